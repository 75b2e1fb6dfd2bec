//! Queues of device code that the library drains itself, over GPU memory: pinned where the CPU looks, GPU memory where
//! only device code does.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::{Fake, T};
use crate::support::common::{job, ok, Job, Rank};
use crate::support::device::{entry, wait, Ask, Device};
use nccl_plugin_api::descriptor::*;
use oxygin::proxy::memory::Memory;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Seconds after which the watchdog speaks.
const STALL: &str = "0.5";

/// Every rank on a GPU of its own among `gpus`, with two windows of 4096 words.
pub fn on_gpus(transport: &str, gpus: i32, body: impl Fn(&Rank, &Fake, &Device, u64, u64) + Send + Sync) {
    with_queues(transport, gpus, 0, |_| {}, body);
}

/// The same with queues of a depth, on a driver that is told something first.
pub fn with_queues(
    transport: &str,
    gpus: i32,
    depth: i32,
    tell: impl Fn(&Fake),
    body: impl Fn(&Rank, &Fake, &Device, u64, u64) + Send + Sync,
) {
    let fake = Fake::take();
    tell(&fake);
    std::env::set_var("OXYGIN_ENGINE", "own");
    fake.set_transport(transport);
    std::env::set_var("OXYGIN_STALL", STALL);
    job(2, 1, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, 4096, 0);
        let dst = fake.window(r, gpu, 4096, 0);
        (0..4096).for_each(|i| src.set(i, ((i as u64) << 8) + r.rank as u64 + 1));
        let (from, to) = (src.as_window().handle as u64, dst.as_window().handle as u64);
        // Pinned memory has one address for both.
        let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
        let device = Device::seen_by(r, Ask { contexts: 2, depth, ..Ask::default() }, see);
        r.job.barrier.wait();
        body(r, &fake, &device, from, to);
        r.job.barrier.wait();
        let peer = 1 - r.rank as u64;
        (0..64)
            .for_each(|i| assert_eq!(dst.get(i), ((i as u64) << 8) + peer + 1, "{transport}, {gpus} GPUs, word {i}"));
        assert!(!device.has_error());
        device.destroy();
    });
    fake.check();
}

#[test]
fn puts_values_signals_and_gets() {
    for (transport, gpus) in [("auto", 1), ("auto", 2), ("staged", 1), ("tcp", 2)] {
        on_gpus(transport, gpus, |r, _, device, src, dst| {
            let peer = 1 - r.rank;
            for round in 1..=50 {
                let put = entry(OP_PUT | OP_SIGNAL_INC | OP_COUNTER, 512).first(0, src).second(0, dst);
                device.post(0, peer, put.with_signal(2, 0, true).with_counter(1));
                let value = entry(OP_PUT | OP_INLINE | OP_SIGNAL_ADD, 8).value(77).second(8 * 100, dst);
                device.post(1, peer, value.with_signal(3, 10, true));
                device.wait_signal(0, 2, round);
                device.wait_signal(1, 3, 10 * round);
            }
            device.flush(0, peer);
            assert_eq!(device.counter(0, 1), 50);
            device.post(0, peer, entry(OP_GET, 64).first(8 * 1000, src).second(8 * 2000, dst));
            device.flush_gets(0, peer, r.rank);
        });
    }
}

/// A kernel ends behind puts that the GPU has yet to carry out, and its windows go at once: the one that they come
/// from, then, once the peer's are here, the other one.
#[test]
fn what_a_kernel_has_left_behind_arrives_from_windows_that_go() {
    for (transport, gpus) in [("auto", 1), ("auto", 2), ("staged", 1), ("tcp", 2)] {
        let tell = |fake: &Fake| fake.settings(false, 100);
        with_queues(transport, gpus, 256, tell, |r, _, device, src, dst| {
            // SAFETY: a plain call.
            let dereg = |window: u64| ok(unsafe { T.dereg_mr_sym.unwrap()(r.coll, window as *mut _) });
            let peer = 1 - r.rank;
            for i in 0..64 {
                let put = entry(OP_PUT, 8).first(8 * i, src).second(8 * i, dst);
                device.post(i as usize % 2, peer, put);
            }
            (0..2).for_each(|c| device.post(c, peer, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(c as u32, 0, true)));
            dereg(src);
            (0..2).for_each(|c| device.wait_signal(c, c, 1));
            r.job.barrier.wait();
            dereg(dst);
        });
    }
}

/// What device code is told of its puts to another GPU is reported when there is time: it looks for that itself, as its
/// flush does here.
#[test]
fn nobody_waits_for_what_device_code_is_told_of_a_lone_put() {
    let is_enough = AtomicBool::new(false);
    on_gpus("auto", 2, |r, fake, device, src, dst| {
        let (peer, before, began) = (1 - r.rank, fake.unawaited_commands(), Instant::now());
        for round in 1.. {
            let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, src).second(0, dst);
            device.post(0, peer, put.with_signal(2, 0, true));
            device.flush(0, peer);
            device.wait_signal(0, 2, round);
            let told = fake.unawaited_commands() - before;
            assert!(began.elapsed() < Duration::from_secs(60), "{told} of {} commands", fake.commands());
            is_enough.fetch_or(r.rank == 0 && told >= 10, Ordering::Relaxed);
            r.job.barrier.wait();
            if is_enough.load(Ordering::Relaxed) {
                break;
            }
            r.job.barrier.wait();
        }
    });
}

/// Blocks of a kernel signal for themselves, and device code is promised no order among signals: a fence for each would
/// let all wait for the last.
#[test]
fn signals_of_device_code_do_not_wait_for_each_other() {
    let against = AtomicU64::new(0);
    on_gpus("tcp", 2, |r, fake, device, src, dst| {
        let (peer, commands, ordered) = (1 - r.rank, fake.commands(), fake.ordered_commands());
        let round = |n| {
            let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, src).second(0, dst);
            device.post(0, peer, put.with_signal(0, 0, true));
            let signal = |s: u32| entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(s, 0, true);
            (1..8).for_each(|s| device.post(0, peer, signal(s)));
            (0..8).for_each(|s| device.wait_signal(0, s, n as u64 + 1));
        };
        let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
        rounds(&meeting, "commands", round, || fake.commands() - commands >= 200);
        assert_eq!(fake.ordered_commands(), ordered);
    });
}

/// createContext from a thread whose current device is not the rank's, or that has none: windows tell which GPU it is.
#[test]
fn queues_are_on_the_gpu_of_the_windows() {
    for has_other in [true, false] {
        let fake = Fake::take();
        std::env::set_var("OXYGIN_ENGINE", "own");
        fake.set_transport("auto");
        job(2, 1, |r| {
            let (gpu, peer) = (r.rank as i32, 1 - r.rank);
            let [src, dst] = [(); 2].map(|()| {
                let _context = fake.enter(gpu);
                fake.window(r, gpu, 64, 0)
            });
            let _other = has_other.then(|| fake.enter(1 - gpu));
            r.job.barrier.wait();
            let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
            let device = Device::seen_by(r, Ask::default(), see);
            (0..64).for_each(|i| src.set(i, i as u64 + 1));
            let (from, to) = (src.as_window().handle as u64, dst.as_window().handle as u64);
            let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, from).second(0, to).with_signal(2, 0, true);
            device.post(0, peer, put);
            device.wait_signal(0, 2, 1);
            (0..64).for_each(|i| assert_eq!(dst.get(i), i as u64 + 1));
            device.flush(0, peer);
            r.job.barrier.wait();
            device.destroy();
        });
        fake.check();
    }
}

/// A set that goes beside another one leaves its pinned memory to the next: to give it back the driver would wait for
/// the application's kernels, of which one may wait for a transfer. The last set of a context frees all.
#[test]
fn a_set_that_goes_beside_another_waits_for_no_kernel() {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_ENGINE", "own");
    fake.set_transport("auto");
    let pinned = || ["cuMemHostAlloc", "cuMemFreeHost"].map(|call| fake.calls(call));
    let before = pinned();
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
        let make = || Device::seen_by(r, Ask { contexts: 2, ..Ask::default() }, see);
        let [first, other] = [(); 2].map(|()| make());
        r.job.barrier.wait();
        let freed = pinned()[1];
        r.job.barrier.wait();
        other.destroy();
        r.job.barrier.wait();
        assert_eq!(pinned()[1], freed, "destroyContext called what waits for kernels");
        let made = pinned()[0];
        r.job.barrier.wait();
        let again = make();
        // What was left there is not what the next one begins with.
        let peer = 1 - r.rank;
        assert_eq!((again.ci(0, peer), again.pi(0, peer).load(Ordering::Relaxed), again.counter(1, 1)), (0, 0, 0));
        r.job.barrier.wait();
        assert_eq!(pinned()[0], made, "it takes what the set before it has left");
        r.job.barrier.wait();
        first.destroy();
        again.destroy();
    });
    let [made, freed] = pinned();
    assert_eq!(made - before[0], freed - before[1], "the last set of a context frees all");
    fake.check();
}

/// What sets leave is bounded: above 256 MiB the oldest of it goes back, by a thread that nobody waits for.
#[test]
fn what_large_sets_leave_goes_back_beside_others() {
    on_gpus("auto", 2, |r, fake, device, src, dst| {
        let peer = 1 - r.rank;
        let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
        // 128 bytes a slot.
        let large = Device::seen_by(r, Ask { contexts: 34, depth: 32_768, ..Ask::default() }, see);
        let freed = fake.calls("cuMemFreeHost");
        r.job.barrier.wait();
        large.destroy();
        wait(|| "what both gave back".into(), || fake.calls("cuMemFreeHost") >= freed + 2);
        r.job.barrier.wait();
        device.post(0, peer, entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, src).second(0, dst).with_signal(2, 0, true));
        device.wait_signal(0, 2, 1);
        device.flush(0, peer);
    });
}

/// Copy kernels give credits with what they carry out, where their GPU can; what they leave undone goes by the stream,
/// and the engine gives them. Whoever does, each entry is counted once.
#[test]
fn every_entry_is_given_back_once() {
    for (gpus, most_commands) in [(1, 0), (1, 40), (2, 0), (2, 40)] {
        let tell = |fake: &Fake| {
            fake.set_issue("kernel=4096");
            fake.kernel_limits(0, most_commands);
        };
        with_queues("auto", gpus, 64, tell, |r, fake, device, src, dst| {
            let (peer, before) = (1 - r.rank, fake.credits());
            for i in 0..4000 {
                let (context, to) = (i % 2, 8 * (i as u64 % 64));
                let usual = entry(OP_PUT | OP_SIGNAL_INC, 8).first(to, src).second(to, dst);
                let d = match i % 20 {
                    0 => entry(OP_PUT | OP_COUNTER, 512).first(0, src).second(0, dst).with_counter(1),
                    5 => entry(OP_PUT | OP_INLINE, 8).value(i as u64).second(8 * 100, dst),
                    8 => entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(2, 0, true),
                    13 => entry(OP_PUT, 16 << 10).first(0, src).second(0, dst),
                    n => usual.with_signal(n as u32 % 8, 0, n % 2 == 0),
                };
                device.post(context, peer, d);
                if i % 200 == 0 {
                    device.flush(context, peer);
                }
            }
            (0..2).for_each(|context| device.flush(context, peer));
            r.job.barrier.wait();
            for context in 0..2 {
                let posted = device.pi(context, peer).load(Ordering::Relaxed);
                assert_eq!((posted, device.ci(context, peer)), (2000, 2000), "{gpus} GPUs, context {context}");
            }
            // Memory of a set is its own GPU's alone.
            let (given, is_one) = (fake.credits() - before, gpus == 1);
            assert!(if is_one { given > 0 } else { given == 0 }, "{given} by copy kernels of {gpus} GPUs");
            r.job.barrier.wait();
        });
    }
}

/// A peer's copy kernel counts in memory of this rank's set: the set goes, and its memory stays until that is done. On
/// a machine with other things to do the kernel may have ended, and the stream has the copy: another set then.
#[test]
fn a_set_that_goes_waits_for_the_credits_that_peers_give() {
    let has_counted = AtomicBool::new(false);
    let tell = |fake: &Fake| fake.set_issue("kernel=4096");
    with_queues("auto", 1, 0, tell, |r, fake, device, src, dst| {
        let peer = 1 - r.rank;
        let put = |bytes| entry(OP_PUT | OP_SIGNAL_INC, bytes).first(0, src).second(0, dst).with_signal(2, 0, true);
        device.post(0, peer, put(512));
        device.flush(0, peer);
        for attempt in 0.. {
            if has_counted.load(Ordering::Acquire) {
                break;
            }
            assert!(attempt < 20, "no copy kernel was given what is held");
            let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
            let other = Device::seen_by(r, Ask::default(), see);
            r.job.barrier.wait();
            if r.rank != 0 {
                r.job.barrier.wait();
                other.destroy();
                continue;
            }
            // Until a copy kernel is at it, which then finds one that it has to wait with.
            let mut before = fake.credits();
            wait(
                || "a copy kernel that gives all credits".into(),
                || {
                    before = fake.credits();
                    (0..20).for_each(|_| other.post(0, peer, put(8)));
                    other.flush(0, peer);
                    fake.credits() == before + 20
                },
            );
            let before = fake.credits();
            fake.hold(512);
            other.post(0, peer, put(512));
            wait(|| "a copy that is held".into(), || fake.is_holding());
            let is_over = AtomicBool::new(false);
            std::thread::scope(|s| {
                s.spawn(|| {
                    std::thread::sleep(Duration::from_millis(500));
                    let is_over = is_over.load(Ordering::Acquire);
                    fake.hold(0);
                    assert!(!is_over, "it has not waited");
                });
                other.destroy();
                is_over.store(true, Ordering::Release);
            });
            let end = Instant::now() + Duration::from_secs(1);
            while fake.credits() == before && Instant::now() < end {
                std::thread::yield_now();
            }
            has_counted.store(fake.credits() > before, Ordering::Release);
            r.job.barrier.wait();
        }
        device.post(0, peer, put(512));
        device.wait_signal(0, 2, 2);
    });
}

/// The application's queues stand, and its threads are in driver calls: what device code asked for is done all the
/// same.
#[test]
fn an_application_in_the_driver_holds_nothing_up() {
    for gpus in [1, 2] {
        on_gpus("auto", gpus, |r, fake, device, src, dst| {
            let peer = 1 - r.rank;
            let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, src).second(0, dst).with_signal(2, 0, true);
            device.post(0, peer, put);
            device.wait_signal(0, 2, 1);
            r.job.barrier.wait();
            (0..2).for_each(|gpu| fake.block(gpu, true));
            r.job.barrier.wait();
            for round in 2..=20 {
                device.post(0, peer, put);
                device.wait_signal(0, 2, round);
            }
            r.job.barrier.wait();
            (0..2).for_each(|gpu| fake.block(gpu, false));
        });
    }
}

/// A copy of contents that stands is given up, and what it reads and writes when it goes on is still there. Nothing is
/// freed that waits for what it waits for.
#[test]
fn what_a_late_copy_needs_outlives_its_set() {
    let fake = Fake::take();
    let _context = fake.enter(0);
    let freed = || fake.calls("cuMemFreeHost");
    for is_over in [false, true] {
        let mut memory = Memory::here().unwrap();
        memory.set_patience(Duration::from_millis(20));
        memory.shared(4096).unwrap();
        let image = memory.device(&[7; 100]).unwrap();
        fake.hold(1);
        let before = freed();
        let refused = memory.zeroed(3 << 20).unwrap_err().to_string();
        assert!(refused.contains("has not ended for 20ms"), "{refused}");
        // SAFETY: inside what was just made, which nobody else knows.
        assert!(unsafe { memory.write_device(image, &[8; 100]) }.is_err(), "it would go behind the late one");
        if is_over {
            fake.hold(0);
            fake.rest();
            // SAFETY: as above.
            unsafe { memory.write_device(image + 1, &[9; 99]) }.unwrap();
            // SAFETY: GPU memory of the fake's, which is there.
            assert_eq!(unsafe { *fake.peek(image).cast::<[u8; 3]>() }, [7, 9, 9]);
        }
        drop(memory);
        assert_eq!(freed() - before, if is_over { 2 } else { 0 });
        fake.hold(0);
        fake.rest();
    }
}

/// closeColl comes first, while a GPU that stands has stores into the set's memory before it: the memory stays.
#[test]
fn a_communicator_that_closes_first_frees_nothing_that_is_written() {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_ENGINE", "own");
    std::env::set_var("OXYGIN_DEREG_TIMEOUT", "0.1");
    fake.set_issue("kernel=0");
    let _context = fake.enter(0);
    let r = Rank::join(&Job::new(1), 0, 0);
    let [src, dst] = [(); 2].map(|()| fake.window(&r, 0, 4096, 0));
    let (from, to) = (src.as_window().handle as u64, dst.as_window().handle as u64);
    let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
    let device = Device::seen_by(&r, Ask::default(), see);
    fake.hold(512);
    let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, from).second(0, to);
    device.post(0, 0, put.with_signal(2, 0, true));
    wait(|| "a copy that is held".into(), || fake.is_holding());
    let began = Instant::now();
    // SAFETY: plain calls.
    unsafe {
        ok(T.close_coll.unwrap()(r.coll));
        device.destroy();
        // 10 s are the GPU's, once.
        assert!(began.elapsed() < Duration::from_secs(18), "it took {:?}", began.elapsed());
        fake.hold(0);
        fake.rest();
        ok(T.finalize.unwrap()(r.instance));
    }
    std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
    fake.check();
}

/// Sets of queues go while the application's GPU stands: all of them wait once, their contexts and their signals.
#[test]
fn sets_that_go_wait_once_for_a_gpu_that_stands() {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_ENGINE", "own");
    std::env::set_var("OXYGIN_DEREG_TIMEOUT", "2");
    fake.set_issue("own=0,kernel=0");
    let _context = fake.enter(0);
    let r = Rank::join(&Job::new(1), 0, 0);
    let [src, dst] = [(); 2].map(|()| fake.window(&r, 0, 4096, 0));
    let (from, to) = (src.as_window().handle as u64, dst.as_window().handle as u64);
    let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
    let sets = [(); 4].map(|()| Device::seen_by(&r, Ask::default(), see));
    fake.hold(512);
    let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, from).second(0, to).with_signal(2, 0, true);
    sets.iter().for_each(|device| device.post(0, 0, put));
    wait(|| "a copy that is held".into(), || fake.is_holding());
    let began = Instant::now();
    sets.into_iter().for_each(Device::destroy);
    let took = began.elapsed();
    assert!((Duration::from_secs(10)..Duration::from_secs(14)).contains(&took), "it took {took:?}");
    fake.hold(0);
    fake.rest();
    // What has moved since is waited for as ever.
    let device = Device::seen_by(&r, Ask::default(), see);
    device.post(0, 0, put);
    device.flush(0, 0);
    device.destroy();
    r.leave();
    std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
    fake.check();
}
