//! What the engine tells about itself: counts that others read while it runs, traces, the watchdog.

use crate::support::common::job;
use crate::support::device::{entry, own, wait, Ask, Device};
use crate::support::logged::{collect, lines, listen};
use crate::support::variable::Variable;
use nccl_plugin_api::descriptor::*;
use oxygin::telemetry::stats::layout::{State, Way};
use oxygin::telemetry::stats::read::{sets, Set};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The set of this rank, as another process reads it. One rank looks at a time: while a page is looked at, its reader
/// has it open in this process too, and a page that was just closed would still be found.
fn of_rank(rank: usize) -> Option<Set> {
    static LOOKING: Mutex<()> = Mutex::new(());
    let looking = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let all = sets(std::process::id(), |_, _| {}).unwrap();
    drop(looking);
    let mut own: Vec<_> = all.into_iter().filter(|s| s.rank == rank as u64).collect();
    assert!(own.len() <= 1, "{own:#?}");
    own.pop()
}

/// Waits until what is read is as it should be.
fn until(rank: usize, good: impl Fn(&Set) -> bool) -> Set {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let set = of_rank(rank);
        match set {
            Some(set) if good(&set) => return set,
            _ if Instant::now() > end => panic!("{set:#?}"),
            _ => std::thread::yield_now(),
        }
    }
}

#[test]
fn counts_are_what_device_code_did() {
    const N: u64 = 1000;
    let _turn = own();
    let ask = Ask { contexts: 3, ..Ask::default() };
    for (threads, stride) in [("1", 1), ("2", 1), ("1", 2)] {
        let _threads = Variable::set("OXYGIN_PROXY_THREADS", threads);
        job(3, 1, |r| {
            let window = r.window(4096, 0);
            let handle = window.handle as u64;
            let device = Device::new(r, Ask { stride, ..ask });
            let reached: Vec<usize> = (0..3).filter(|p| p % stride as usize == r.rank % stride as usize).collect();
            r.job.barrier.wait();
            for i in 0..N {
                for &peer in &reached {
                    let put = entry(OP_PUT | OP_SIGNAL_INC, 64).first(0, handle).second(8 * (i % 8), handle);
                    device.post(1, peer, put.with_signal(0, 0, true));
                }
                let own = entry(OP_PUT | OP_INLINE, 3).value(i).second(2048, handle);
                device.post(2, r.rank, own);
            }
            reached.iter().for_each(|&peer| device.flush(1, peer));
            device.flush(2, r.rank);
            let lanes = reached.len() + 1;
            let done = |s: &Set| s.lanes.len() == lanes && s.lanes.iter().all(|l| l.completed == N);
            let set = until(r.rank, done);
            assert_eq!((set.way, set.nranks, set.contexts, &set.fabric[..]), (Way::Engine, 3, 3, "soft"));
            assert_eq!(set.threads.to_string(), threads);
            for (i, lane) in set.lanes.iter().enumerate() {
                let to = reached.get(i).map(|&peer| (1, peer as u64, 64)).unwrap_or((2, r.rank as u64, 3));
                assert_eq!((lane.context, lane.peer, lane.bytes), (to.0, to.1, to.2 * N), "{lane:?}");
                assert_eq!((lane.entries, lane.under_way, lane.oldest), (N, 0, None));
                assert_eq!((lane.refused, lane.dropped, lane.state), (0, 0, State::Open));
                assert!((N.div_ceil(32)..=N).contains(&lane.batches), "{lane:?}");
                assert_eq!(lane.complete.count(), N);
                assert!(lane.complete.sum.unwrap() > 0 && lane.posted.count() <= lane.batches);
            }
            r.job.barrier.wait();
            // Faults are counted, too.
            device.post(0, r.rank, Descriptor::new(Form::Bytes128, 9, OP_PUT, 8));
            (0..5).for_each(|_| device.post(0, r.rank, entry(OP_PUT, 0)));
            device.flush(0, r.rank);
            let set = until(r.rank, |s| s.lanes[0].context == 0 && s.lanes[0].completed == 6);
            assert_eq!((set.lanes[0].refused, set.lanes[0].dropped), (1, 5));
            assert_eq!(set.lanes[0].state, State::Stopped);
            r.job.barrier.wait();
            device.destroy();
            assert!(of_rank(r.rank).is_none(), "a destroyed set has no page");
            r.job.barrier.wait();
        });
    }
}

#[test]
fn without_statistics_there_is_no_page() {
    let _turn = own();
    let _off = Variable::set("OXYGIN_STATS", "0");
    job(2, 1, |r| {
        let device = Device::new(r, Ask::default());
        device.post(0, 1 - r.rank, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(0, 0, true));
        device.wait_signal(0, 0, 1);
        assert!(of_rank(r.rank).is_none());
        r.job.barrier.wait();
        device.destroy();
    });
}

#[test]
fn a_trace_has_every_operation() {
    const N: u64 = 100;
    let _turn = own();
    let folder = std::env::temp_dir().join(format!("oxygin-trace-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let _trace = Variable::set("OXYGIN_TRACE", folder.join("of-%p.json").to_str().unwrap());
    job(2, 1, |r| {
        let window = r.window(4096, 0);
        let handle = window.handle as u64;
        let device = Device::new(r, Ask { contexts: 2, ..Ask::default() });
        r.job.barrier.wait();
        for i in 0..N {
            let peer = 1 - r.rank;
            device.post(0, peer, entry(OP_PUT, 8 * (i + 1)).first(0, handle).second(0, handle));
            device.post(1, peer, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(1, 0, true));
            device.post(1, peer, entry(OP_PUT | OP_COUNTER, 0).with_counter(0));
            device.post(1, peer, entry(OP_PUT | OP_INLINE, 5).value(i).second(4000, handle));
        }
        device.flush(0, 1 - r.rank);
        device.flush(1, 1 - r.rank);
        // Each batch is timed then.
        let set = until(r.rank, |s| s.lanes.iter().map(|l| l.completed).sum::<u64>() == 4 * N);
        assert!(set.lanes.iter().all(|l| l.posted.count() == l.batches), "{set:#?}");
        r.job.barrier.wait();
        device.destroy();
    });
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(files.len(), 2, "a file for each communicator: {files:?}");
    for file in files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with(&format!("of-{}-", std::process::id())) && name.ends_with(".json"), "{name}");
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(trace["otherData"]["lost"], 0);
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |kind: &str| events.iter().filter(|e| e["args"]["kind"] == kind).collect::<Vec<_>>();
        for kind in ["put", "signal", "no data", "value"] {
            assert_eq!(of(kind).len() as u64, N, "{kind}");
        }
        let bytes: Vec<_> = of("put").iter().map(|e| e["args"]["bytes"].as_u64().unwrap() / 8).collect();
        assert_eq!(bytes, (1..=N).collect::<Vec<_>>(), "in their order");
        for event in of("signal") {
            let times: Vec<_> = events.iter().filter(|e| e["id"] == event["id"]).collect();
            assert_eq!(times.len(), 6);
            // Seen, seen, posted, posted, complete, complete.
            let at = |i: usize| times[i]["ts"].as_f64().unwrap();
            assert!((1..6).all(|i| at(i - 1) <= at(i)) && at(0) == at(1) && at(4) == at(5), "{times:#?}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Sets of one context are split among the threads, as the contexts of one set are.
#[test]
fn sets_of_one_context_have_threads_of_their_own() {
    let _turn = own();
    let folder = std::env::temp_dir().join(format!("oxygin-threads-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let _trace = Variable::set("OXYGIN_TRACE", folder.join("of-%p.json").to_str().unwrap());
    let _threads = Variable::set("OXYGIN_PROXY_THREADS", "3");
    job(2, 1, |r| {
        let sets = [(); 3].map(|()| Device::new(r, Ask { contexts: 1, ..Ask::default() }));
        r.job.barrier.wait();
        for device in &sets {
            device.post(0, 1 - r.rank, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(1, 0, true));
            device.flush(0, 1 - r.rank);
            device.wait_signal(0, 1, 1);
        }
        r.job.barrier.wait();
        sets.into_iter().for_each(Device::destroy);
    });
    for file in std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()) {
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["args"]["kind"] == "signal");
        let mut threads: Vec<_> = events.map(|e| e["tid"].as_u64().unwrap()).collect();
        threads.dedup();
        assert_eq!(threads, [0, 1, 2], "{trace:#}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Device code that dies while it writes a descriptor.
#[test]
fn the_watchdog_names_what_stands() {
    let _turn = own();
    let _stall = Variable::set("OXYGIN_STALL", "0.3");
    collect();
    job(2, 1, |r| {
        listen();
        let device = Device::new(r, Ask { contexts: 2, ..Ask::default() });
        let peer = 1 - r.rank;
        device.post(1, peer, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(0, 0, true));
        device.wait_signal(1, 0, 1);
        device.post_in(1, peer, &entry(OP_PUT | OP_SIGNAL_INC, 0), &[0, 1, 2], || {});
        let end = Instant::now() + Duration::from_secs(30);
        let begin = format!("context 1, queue to rank {peer}, fabric soft: the oldest entry of device code has been");
        let said = || lines().iter().filter(|(_, l)| l.starts_with(&begin)).map(|l| l.1.clone()).collect::<Vec<_>>();
        while said().is_empty() {
            assert!(Instant::now() < end, "{:#?}", lines());
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_secs(1));
        let said = said();
        assert_eq!(said.len(), 1, "once: {said:#?}");
        assert!(said[0].contains("OXYGIN_STALL") && said[0].contains("its other words are missing"), "{said:#?}");
        r.job.barrier.wait();
        device.destroy();
    });
}

/// The processors that each of the engine's threads may use, by their names.
fn threads() -> Vec<(String, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        let folder = task.unwrap().path();
        let (name, status) = (read(folder.join("comm")), read(folder.join("status")));
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t")).unwrap_or_default();
        (name.trim().to_owned(), allowed.to_owned())
    };
    tasks.map(of).filter(|(name, _)| name.starts_with("oxygin-px")).collect()
}

#[test]
fn threads_have_names_and_run_where_they_are_to() {
    let _turn = own();
    let all = std::thread::available_parallelism().unwrap().get();
    for (asked, is_pinned) in [("0", true), ("off", false)] {
        let _affinity = Variable::set("OXYGIN_PROXY_AFFINITY", asked);
        let _threads = Variable::set("OXYGIN_PROXY_THREADS", "2");
        job(1, 1, |r| {
            let device = Device::new(r, Ask { contexts: 2, ..Ask::default() });
            // They come up beside this one.
            let are_right = |threads: &[(String, String)]| {
                let ends: Vec<_> = threads.iter().map(|(name, _)| name.rsplit('.').next().unwrap()).collect();
                let is_right = |(_, cpus): &(String, String)| (cpus == "0") == (is_pinned || all == 1);
                ends.contains(&"0") && ends.contains(&"1") && threads.iter().all(is_right)
            };
            wait(|| format!("two threads that are pinned: {is_pinned}, not {:?}", threads()), || are_right(&threads()));
            drop(device);
        });
    }
}
