//! Windows that go while device code's entries name them, or other windows: what device code had written is carried out
//! first, and what it writes meanwhile holds nobody up.

use crate::support::common::{job, Rank, Window};
use crate::support::device::{entry, own, Ask, Device};
use crate::support::logged::{collect, lines, listen};
use crate::support::processes::processes;
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CONTEXTS: usize = 3;
/// A thread of the engine that has had nothing to do for so long sleeps for 20 ms at a time.
const ASLEEP: Duration = Duration::from_millis(1200);
/// What a deregistration takes at most where everything moves, on a machine that has other things to do.
const SHORT: Duration = Duration::from_secs(5);

fn word(w: &Window, i: usize) -> &AtomicU64 {
    assert!(i < w.words.len());
    // SAFETY: inside the window; peers write it.
    unsafe { &*w.words.as_ptr().add(i).cast::<AtomicU64>() }
}

fn put(src: &Window, dst: &Window, at: u64, bytes: u64) -> Descriptor {
    entry(OP_PUT, bytes).first(at, src.handle as u64).second(at, dst.handle as u64)
}

/// How long the end of a window takes.
fn dereg(r: &Rank, w: &Window) -> Duration {
    let begun = Instant::now();
    r.dereg(w);
    begun.elapsed()
}

/// A kernel ends behind puts that it has not waited for; its windows go at once, and their memory is used again. The
/// engine's threads sleep as it does.
#[test]
fn what_a_kernel_has_left_behind_arrives_from_windows_that_go() {
    const PUTS: usize = 96;
    let _turn = own();
    for threads in ["1", "2"] {
        std::env::set_var("OXYGIN_PROXY_THREADS", threads);
        std::env::set_var("OXYGIN_PROXY_POLL", "0");
        job(2, 1, |r| {
            let (src, dst) = (r.window(CONTEXTS * PUTS, 0), r.window(CONTEXTS * PUTS, 0));
            let device = Device::new(r, Ask { contexts: CONTEXTS as i32, ..Ask::default() });
            r.job.barrier.wait();
            std::thread::sleep(ASLEEP);
            if r.rank == 0 {
                for i in 0..CONTEXTS * PUTS {
                    word(&src, i).store(i as u64 + 1, Ordering::Relaxed);
                    device.post(i / PUTS, 1, put(&src, &dst, 8 * i as u64, 8));
                }
                for c in 0..CONTEXTS {
                    device.post(c, 1, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(c as u32, 0, true));
                }
                r.dereg(&src);
                (0..CONTEXTS * PUTS).for_each(|i| word(&src, i).store(u64::MAX, Ordering::Relaxed));
                r.dereg(&dst);
            } else {
                (0..CONTEXTS).for_each(|c| device.wait_signal(c, c, 1));
                assert!((0..CONTEXTS * PUTS).all(|i| word(&dst, i).load(Ordering::Relaxed) == i as u64 + 1));
            }
            r.job.barrier.wait();
            assert!(!device.has_error());
            device.destroy();
        });
        std::env::remove_var("OXYGIN_PROXY_THREADS");
        std::env::remove_var("OXYGIN_PROXY_POLL");
    }
}

/// What comes behind the deregistration is not waited for.
#[test]
fn a_kernel_that_goes_on_for_ever_with_other_windows_holds_nobody_up() {
    const WINDOWS: usize = 12;
    let _turn = own();
    job(2, 1, |r| {
        let (src, dst) = (r.window(1 << 12, 0), r.window(1 << 12, 0));
        let going: Vec<_> = (0..WINDOWS).map(|_| r.window(64, 0)).collect();
        let device = Device::new(r, Ask { contexts: 2, ..Ask::default() });
        let (ends, posted) = (AtomicBool::new(false), AtomicU64::new(0));
        let (to, d) = (1 - r.rank, put(&src, &dst, 0, 1 << 14));
        r.job.barrier.wait();
        std::thread::scope(|s| {
            for c in 0..2 {
                let (device, ends, posted) = (&device, &ends, &posted);
                s.spawn(move || {
                    while !ends.load(Ordering::Relaxed) {
                        device.post(c, to, d);
                        posted.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let mut slowest = Duration::ZERO;
            for window in &going {
                let before = posted.load(Ordering::Relaxed);
                while posted.load(Ordering::Relaxed) < before + 100 {
                    std::thread::yield_now();
                }
                slowest = slowest.max(dereg(r, window));
            }
            ends.store(true, Ordering::Relaxed);
            assert!(slowest < SHORT, "{slowest:?}");
        });
        (0..2).for_each(|c| device.flush(c, to));
        r.job.barrier.wait();
        assert!(!device.has_error());
        device.destroy();
    });
}

/// Bytes that sockets take for a process that stands, and as much again: buffers grow as the kernel likes.
fn more_than_buffers() -> usize {
    let most = |name: &str| -> usize {
        let three = std::fs::read_to_string(format!("/proc/sys/net/ipv4/tcp_{name}")).unwrap();
        three.split_whitespace().next_back().unwrap().parse().unwrap()
    };
    4 * (most("rmem") + most("wmem")) + (16 << 20)
}

/// A peer that takes nothing: it is waited for once, for two seconds, and named.
#[test]
fn a_peer_that_stands_is_named_and_waited_for_once() {
    const PUTS: usize = 32;
    processes("a_peer_that_stands_is_named_and_waited_for_once", 2, &[], |place| {
        for (name, value) in [
            ("OXYGIN_ENGINE", "own"),
            ("OXYGIN_FABRIC", "soft"),
            // Over the others a stopped process takes what it is given.
            ("OXYGIN_SOFT_TRANSPORT", "tcp"),
            ("OXYGIN_PEER_TIMEOUT", "600"),
            ("OXYGIN_DEREG_TIMEOUT", "0.5"),
        ] {
            std::env::set_var(name, value);
        }
        collect();
        let r = place.join(1);
        listen();
        let bytes = (more_than_buffers() / PUTS).next_multiple_of(4096);
        let (src, dst) = (r.window(bytes / 8, 0), r.window(bytes / 8, 0));
        let others: Vec<_> = (0..5).map(|_| r.window(8, 0)).collect();
        let device = Device::new(&r, Ask::default());
        device.post(0, 1 - place.rank, put(&src, &dst, 0, 8));
        device.flush(0, 1 - place.rank);
        place.word(place.rank).store(std::process::id().into(), Ordering::SeqCst);
        place.barrier();
        if place.rank == 0 {
            let peer = place.word(1).load(Ordering::SeqCst);
            place.signal(peer, libc::SIGSTOP);
            (0..PUTS).for_each(|_| device.post(0, 1, put(&src, &dst, 0, bytes as u64)));
            let first = dereg(&r, &others[0]);
            assert!((Duration::from_secs(2)..Duration::from_secs(8)).contains(&first), "{first:?}");
            let said = || lines().iter().filter(|(_, line)| line.starts_with("deregMrSym: contexts 0 have")).count();
            let named = |line: &str| line.contains("entries to rank 1 (context 0), which device code had rung");
            assert!(said() == 1 && lines().iter().any(|(_, line)| named(line)), "{:#?}", lines());
            for other in &others[1..] {
                let next = dereg(&r, other);
                assert!(next < Duration::from_secs(1), "{next:?}");
            }
            assert_eq!(said(), 5);
            assert!(!device.has_error(), "nothing names these windows");
            place.signal(peer, libc::SIGCONT);
            // It goes on, and is waited for again.
            r.dereg(&src);
            assert_eq!(said(), 5);
            assert!(!device.has_error());
        }
        place.barrier();
        device.destroy();
        r.leave();
    });
}
