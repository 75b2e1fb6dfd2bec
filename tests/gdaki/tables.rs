//! `OXYGIN_ENGINE=gdaki-soft` through the GIN tables: a kernel that knows the device handle and the windows'
//! `ginHandle`s alone has its entries executed.

use crate::support::apart::is_elsewhere;
use crate::support::common::{job, ok, Job, Rank, Window};
use crate::support::kernel::{finds_its_way, Kernel, Seen, Through, WAYS};
use crate::support::logged::{collect, lines, listen};
use crate::support::nic::{wait, write, Ask, Status};
use crate::support::turn;
use nccl_plugin_api::gin_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::vtable::gin_v12::ncclGinPlugin_v12 as V12;
use oxygin::vtable::gin_v13::ncclGinPlugin_v13 as V13;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as V14;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Barrier;
use std::time::Duration;

const WORDS: usize = 1024;
const LOCAL: u8 = 0x04;
const V14_2: Through = WAYS[3];

/// Waits for the turn, and has the tables give device code the software NIC.
fn gdaki_soft() -> turn::Turn {
    let turn = turn::take();
    std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
    turn
}

/// Memory is where device code sees it.
fn here(at: u64) -> u64 {
    at
}

/// A window that was registered through a GIN table.
struct Registered {
    memory: Window,
    mhandle: *mut c_void,
    gin: u64,
}

impl Registered {
    fn new(r: &Rank, through: Through) -> Self {
        let memory = r.not_registered(WORDS);
        let (mhandle, gin) = through.register(r, memory.words.as_ptr() as u64, 8 * WORDS, PTR_HOST);
        assert_ne!(gin, mhandle as u64, "device code has a name of its own for it");
        Self { memory, mhandle, gin }
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < WORDS);
        // SAFETY: inside the window; peers write it.
        unsafe { &*self.memory.words.as_ptr().add(i).cast::<AtomicU64>() }
    }

    fn seen(&self) -> Seen<'_> {
        // SAFETY: the window's words, which peers write, too.
        let words = unsafe { std::slice::from_raw_parts(self.memory.words.as_ptr().cast(), WORDS) };
        Seen { gin: self.gin, words }
    }

    fn deregister(&self, r: &Rank) {
        // SAFETY: a plain call.
        ok(unsafe { V14.dereg_mr_sym.unwrap()(r.coll, self.mhandle) });
    }

    fn get(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Acquire)
    }

    fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Release)
    }
}

/// Every rank with a kernel and two windows, which come before the contexts, as with NCCL.
fn on_kernels(
    ranks: usize,
    through: Through,
    ask: Ask,
    body: impl Fn(&Rank, Kernel, &Registered, &Registered) + Send + Sync,
) {
    job(ranks, 1, |r| {
        let (src, dst) = (Registered::new(r, through), Registered::new(r, through));
        let kernel = Kernel::new(r, through, ask, &here);
        r.job.barrier.wait();
        body(r, kernel, &src, &dst);
        r.job.barrier.wait();
    });
}

#[test]
fn kernels_of_every_nccl_find_their_way() {
    let _turn = gdaki_soft();
    for through in WAYS {
        on_kernels(3, through, Ask { contexts: 2, depth: 64, ..Ask::default() }, |r, kernel, src, dst| {
            finds_its_way(r, &kernel, &src.seen(), &dst.seen());
            assert!(!kernel.has_error());
            r.job.barrier.wait();
            kernel.destroy();
        });
    }
}

/// A kernel ends behind puts and a signal that it has not waited for, and its set is destroyed at once: the peer gets
/// all of them, as from a device, which executes what was rung. NCCL EP's combine in its high-throughput mode ends so.
#[test]
fn what_a_kernel_has_left_behind_arrives() {
    const PUTS: usize = 128;
    let _turn = gdaki_soft();
    for through in WAYS {
        on_kernels(2, through, Ask { depth: 256, ..Ask::default() }, |r, kernel, src, dst| {
            if r.rank == 0 {
                (0..PUTS).for_each(|i| src.set(i, i as u64 + 1));
                let place = |i: usize| 8 * i as u64;
                let put = |i| write(kernel.at(dst.gin, 1, place(i)), kernel.own(src.gin, place(i)), 8);
                let entries: Vec<_> = (0..PUTS).map(put).chain([kernel.add_signal(0, 1, 1, 1)]).collect();
                for some in entries.chunks(8) {
                    kernel.qp(0, 1).post(some);
                }
                kernel.destroy();
            } else {
                kernel.wait_signal(0, 1, 1);
                assert!((0..PUTS).all(|i| dst.get(i) == i as u64 + 1));
                kernel.destroy();
            }
        });
    }
}

/// The same with windows that go while the set stays, and whose memory is used again at once: the engine's thread
/// sleeps as they do.
#[test]
fn what_a_kernel_has_left_behind_arrives_from_windows_that_go() {
    const PUTS: usize = 96;
    let _turn = gdaki_soft();
    std::env::set_var("OXYGIN_PROXY_POLL", "0");
    for through in WAYS {
        on_kernels(2, through, Ask { contexts: 2, depth: 256, ..Ask::default() }, |r, kernel, src, dst| {
            // From then on it sleeps for 20 ms at a time.
            std::thread::sleep(Duration::from_millis(1200));
            if r.rank == 0 {
                (0..2 * PUTS).for_each(|i| src.set(i, i as u64 + 1));
                let place = |i: usize| 8 * i as u64;
                let put = |i| write(kernel.at(dst.gin, 1, place(i)), kernel.own(src.gin, place(i)), 8);
                for c in 0..2 {
                    let entries: Vec<_> = (0..PUTS).map(|i| put(2 * i + c)).collect();
                    kernel.post_counted((c, 1), &entries, 1);
                    kernel.qp(c, 1).post(&[kernel.add_signal(c, 1, 1, 1)]);
                }
                src.deregister(r);
                (0..2 * PUTS).for_each(|i| src.set(i, u64::MAX));
                dst.deregister(r);
            } else {
                (0..2).for_each(|c| kernel.wait_signal(c, 1, 1));
                assert!((0..2 * PUTS).all(|i| dst.get(i) == i as u64 + 1), "{through:?}");
            }
            r.job.barrier.wait();
            assert!(!kernel.has_error(), "{through:?}");
            assert!(r.rank == 1 || (0..2).all(|c| kernel.counter(c, 1) == 1), "companions, too");
            kernel.destroy();
        });
    }
    std::env::remove_var("OXYGIN_PROXY_POLL");
}

/// More contexts than a thread, sets side by side, none of words, and depths that are no power of two.
#[test]
fn sets_have_the_shapes_that_were_asked_for() {
    let _turn = gdaki_soft();
    for through in [WAYS[1], V14_2] {
        let first = Ask { contexts: 17, depth: 193, counters: 0, signals: 6, ..Ask::default() };
        on_kernels(2, through, first, |r, kernel, src, dst| {
            let peer = 1 - r.rank;
            let second = Kernel::new(r, through, Ask { contexts: 1, signals: 0, ..Ask::default() }, &here);
            assert_eq!((kernel.has_words(16), second.has_words(0)), ([true, false], [false, true]));
            assert!(!kernel.has_companion(3, peer) && second.has_companion(0, peer));
            assert_eq!((kernel.qp(16, peer).view.size, second.qp(0, peer).view.size), (256, 128));
            r.job.barrier.wait();
            for c in 0..17 {
                for to in 0..2 {
                    kernel.qp(c, to).post(&[kernel.add_signal(c, to, 5, c as u64 + 1)]);
                }
            }
            src.set(9, 77 + r.rank as u64);
            let put = write(second.at(dst.gin, peer, 72), second.own(src.gin, 72), 8);
            second.post_counted((0, peer), &[put], 0);
            second.wait_counter(0, 0, 1);
            (0..17).for_each(|c| kernel.wait_signal(c, 5, 2 * (c as u64 + 1)));
            assert_eq!(second.qp(0, peer).flush(), Status::Good);
            // Complete at its source; it has no signal that would tell that it is here.
            wait(|| "a put".into(), || dst.get(9) == 77 + peer as u64);
            r.job.barrier.wait();
            for c in 0..17 {
                assert_eq!(kernel.signal(c, 5), 2 * (c as u64 + 1));
                assert!((0..5).all(|id| kernel.signal(c, id) == 0));
            }
            second.destroy();
            r.job.barrier.wait();
            kernel.qp(2, peer).post(&[kernel.add_signal(2, peer, 0, 1)]);
            kernel.wait_signal(2, 0, 1);
            r.job.barrier.wait();
            kernel.destroy();
        });
    }
}

#[test]
fn a_stride_leaves_peers_out() {
    let _turn = gdaki_soft();
    for through in [WAYS[2], V14_2] {
        on_kernels(4, through, Ask { stride: 2, ..Ask::default() }, |r, kernel, src, dst| {
            (0..4).for_each(|peer| assert_eq!(kernel.has(0, peer), peer % 2 == r.rank % 2));
            let other = (r.rank + 2) % 4;
            src.set(1, 5 + r.rank as u64);
            let put = write(kernel.at(dst.gin, other, 8), kernel.own(src.gin, 8), 8);
            kernel.qp(0, other).post(&[put, kernel.add_signal(0, other, 0, 1)]);
            kernel.wait_signal(0, 0, 1);
            assert_eq!(dst.get(1), 5 + other as u64);
            r.job.barrier.wait();
            kernel.destroy();
        });
    }
}

/// A kernel that kept a window's record: its key names nothing any more, also where another window has the record.
#[test]
fn a_deregistered_window_is_refused_and_its_record_used_again() {
    let _turn = gdaki_soft();
    on_kernels(2, V14_2, Ask { contexts: 3, ..Ask::default() }, |r, kernel, src, _| {
        let peer = 1 - r.rank;
        let gone = Registered::new(r, V14_2);
        let put = write(kernel.at(gone.gin, peer, 0), kernel.own(src.gin, 0), 8);
        kernel.qp(0, peer).post(&[put.clone(), kernel.add_signal(0, peer, 0, 1)]);
        kernel.wait_signal(0, 0, 1);
        assert_eq!(kernel.qp(0, peer).flush(), Status::Good);
        r.job.barrier.wait();
        gone.deregister(r);
        r.job.barrier.wait();
        assert!(!kernel.has_error());
        kernel.qp(0, peer).post(std::slice::from_ref(&put));
        assert_eq!(kernel.qp(0, peer).flush(), Status::Failed { syndrome: 0x13 });
        assert!(kernel.has_error());
        let again = Registered::new(r, V14_2);
        assert_eq!(again.gin, gone.gin);
        let from =
            write(kernel.at(src.gin, peer, 0), (put.bytes[24..28].iter().fold(0, |k, b| k << 8 | *b as u32), 0), 8);
        kernel.qp(1, peer).post(&[from]);
        assert_eq!(kernel.qp(1, peer).flush(), Status::Failed { syndrome: LOCAL });
        // The window that has the record now.
        src.set(2, 40 + r.rank as u64);
        let put = write(kernel.at(again.gin, peer, 16), kernel.own(src.gin, 16), 8);
        kernel.qp(2, peer).post(&[put, kernel.add_signal(2, peer, 0, 1)]);
        kernel.wait_signal(2, 0, 1);
        assert_eq!((again.get(2), gone.get(2)), (40 + peer as u64, 0));
        r.job.barrier.wait();
        kernel.destroy();
    });
}

/// closeColl and finalize end what destroyContext did not, and a new communicator starts afresh.
#[test]
fn sets_that_nobody_destroys_end_with_the_communicator() {
    let _turn = gdaki_soft();
    for through in [WAYS[0], WAYS[1], V14_2] {
        on_kernels(2, through, Ask::default(), |r, kernel, src, dst| {
            let peer = 1 - r.rank;
            src.set(0, 9);
            let put = write(kernel.at(dst.gin, peer, 0), kernel.own(src.gin, 0), 8);
            kernel.qp(0, peer).post(&[put, kernel.add_signal(0, peer, 0, 1)]);
            kernel.wait_signal(0, 0, 1);
            assert!(dst.get(0) == 9 && !kernel.has_error());
        });
    }
}

#[test]
fn what_cannot_be_is_refused_on_every_rank() {
    let _turn = gdaki_soft();
    job(2, 1, |r| {
        let (good, backend) = (Ask::default(), |backend| Through { backend, ..V14_2 });
        let bad = [
            (V14_2, Ask { contexts: 0, ..good }),
            (V14_2, Ask { signals: u32::MAX, ..good }),
            (V14_2, Ask { depth: 40_000, ..good }),
            (V14_2, Ask { depth: -2, ..good }),
            (backend(0), good),
            (backend(3), good),
        ];
        for (i, (through, ask)) in bad.into_iter().enumerate() {
            // One rank alone is wrong; the other one is told.
            let (through, ask) = if i % 2 == r.rank { (through, ask) } else { (V14_2, good) };
            assert!(through.create(r, ask).is_err(), "case {i}");
        }
        // A caller without a place for the device handle has nothing that he could use.
        let mut ctx = null_mut();
        // SAFETY: pointers to locals, or NULL.
        unsafe {
            assert_eq!(
                V12.create_context.unwrap()(r.coll, 8, 8, 1, &mut ctx, null_mut()),
                NcclResult::INVALID_ARGUMENT
            );
            let (mut config, mut handle) = (std::mem::zeroed::<ConfigV14>(), null_mut());
            config.n_contexts = 1;
            config.backend_version = 2;
            let refused = V14.create_context.unwrap()(r.coll, &mut config, null_mut(), &mut handle);
            assert_eq!(refused, NcclResult::INVALID_ARGUMENT);
            let mut v11 = std::mem::zeroed::<PropertiesV11>();
            ok(V12.get_properties.unwrap()(0, &mut v11));
            assert_eq!(v11.net_device_type, DEVICE_GIN_GDAKI);
            for get in [V13.get_properties, V14.get_properties] {
                let mut v12 = std::mem::zeroed::<PropertiesV12>();
                ok(get.unwrap()(0, &mut v12));
                assert_eq!(v12.net_device_type, DEVICE_GIN_GDAKI);
            }
        }
        // Nobody is told of a window that has no place for it.
        let (memory, mut mhandle) = (r.not_registered(8), null_mut());
        let at = memory.words.as_ptr() as *mut c_void;
        // SAFETY: memory that stays, and pointers to locals, or NULL.
        unsafe {
            ok(V14.reg_mr_sym.unwrap()(r.coll, at, 64, PTR_HOST, 0, &mut mhandle, null_mut()));
            ok(V14.dereg_mr_sym.unwrap()(r.coll, mhandle));
        }
        r.job.barrier.wait();
        V14_2.destroy(V14_2.create(r, good).expect("a set").0);
    });
}

/// From NCCL 2.30.7 on `NCCL_GIN_TYPE=3` is enough; unset, and with an RMA table in use, the queues are NCCL's.
#[test]
fn the_type_that_nccl_was_told_takes_the_software_nic() {
    // What is logged is the process's.
    if is_elsewhere(concat!(module_path!(), "::the_type_that_nccl_was_told_takes_the_software_nic")) {
        return;
    }
    let _turn = turn::take();
    collect();
    std::env::remove_var("OXYGIN_ENGINE");
    let reported = |want| {
        let mut props = std::mem::MaybeUninit::<PropertiesV12>::uninit();
        // SAFETY: a place for the answer, which is there on success.
        let is = unsafe {
            ok(V14.get_properties.unwrap()(0, props.as_mut_ptr()));
            props.assume_init().net_device_type
        };
        assert_eq!(is, want);
    };
    job(2, 1, |r| {
        reported(DEVICE_GIN_PROXY);
        assert_eq!(V14_2.create(r, Ask::default()).err(), Some(NcclResult::INVALID_USAGE));
    });
    std::env::set_var("NCCL_GIN_TYPE", "3");
    on_kernels(2, V14_2, Ask::default(), |r, kernel, src, dst| {
        reported(DEVICE_GIN_GDAKI);
        let peer = 1 - r.rank;
        src.set(0, 77 + r.rank as u64);
        let entries = [write(kernel.at(dst.gin, peer, 0), kernel.own(src.gin, 0), 8), kernel.add_signal(0, peer, 1, 1)];
        kernel.qp(0, peer).post(&entries);
        kernel.wait_signal(0, 1, 1);
        assert_eq!(dst.get(0), 77 + peer as u64);
        r.job.barrier.wait();
        kernel.destroy();
    });
    // NCCL compares what ranks say: the log has it, once for all of them of a process until it changes.
    collect();
    for (kind, want) in [("2", DEVICE_GIN_PROXY), ("3", DEVICE_GIN_GDAKI)] {
        std::env::set_var("NCCL_GIN_TYPE", kind);
        (0..2).for_each(|_| reported(want));
        let line = format!("device code's queues: type {kind} (NCCL_GIN_TYPE={kind})");
        let all = lines().clone();
        assert_eq!(all.iter().filter(|(_, said)| *said == line).count(), 1, "{all:#?}");
    }
    std::env::remove_var("NCCL_GIN_TYPE");
}

/// Two ranks whose `OXYGIN_ENGINE` was this and that when they began: what connect says.
fn mixed(engines: [&str; 2]) -> Vec<String> {
    collect();
    let (job, turns) = (Job::new(2), Barrier::new(2));
    let handles = std::sync::Mutex::new(vec![[0; HANDLE_BYTES]; 2]);
    std::thread::scope(|s| {
        for (rank, engine) in engines.into_iter().enumerate() {
            let (job, turns, handles) = (&job, &turns, &handles);
            s.spawn(move || {
                if rank == 1 {
                    turns.wait();
                }
                std::env::set_var("OXYGIN_ENGINE", engine);
                let refused = Rank::try_join_by(job, rank, 1, |handle| {
                    handles.lock().unwrap()[rank] = handle;
                    // Rank 0 has begun; rank 1 begins.
                    if rank == 0 {
                        turns.wait();
                    }
                    turns.wait();
                    listen();
                    handles.lock().unwrap().clone()
                });
                assert_eq!(refused.err(), Some(NcclResult::INVALID_USAGE));
                turns.wait();
            });
        }
    });
    lines().iter().map(|line| line.1.clone()).collect()
}

#[test]
fn ranks_with_different_engines_are_refused() {
    // What is logged is the process's, and whoever calls `init` meanwhile turns it off.
    if is_elsewhere(concat!(module_path!(), "::ranks_with_different_engines_are_refused")) {
        return;
    }
    let _turn = gdaki_soft();
    for (engines, words) in [
        (["own", "gdaki-soft"], "rank 0 has OXYGIN_ENGINE=own and rank 1 has OXYGIN_ENGINE=gdaki-soft"),
        (["gdaki-soft", "own"], "rank 0 has OXYGIN_ENGINE=gdaki-soft and rank 1 has OXYGIN_ENGINE=own"),
        (["gdaki-soft", "nccl"], "rank 0 writes into this library's queues and that of rank 1 into NCCL's"),
        (["nccl", "own"], "rank 1 writes into this library's queues and that of rank 0 into NCCL's"),
    ] {
        let said = mixed(engines);
        assert_eq!(said.iter().filter(|line| line.contains(words)).count(), 2, "{words}: {said:#?}");
    }
}
