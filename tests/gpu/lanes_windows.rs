//! Windows that go while a kernel serves lanes whose entries name them, and others that come at their address, or with
//! their handle: nothing stale is used.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::*;
use crate::harness::*;
use crate::support::common::{job, Rank};
use crate::support::device::{entry, wait, Ask, Device};
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a window that comes and goes: a half to send, and a half to receive.
const WORDS: usize = 1024;
/// The signal of its entries.
const SIGNAL: usize = 4;

/// A window at this address comes, is used among the streams that `serve` runs, and goes; its memory is then the
/// application's again. Round `n`.
pub fn come_and_go(
    fake: &Fake,
    r: &Rank,
    device: &Device,
    meeting: &Meeting,
    at: u64,
    n: usize,
    mut serve: impl FnMut(),
) {
    const EACH: usize = 32;
    let (peer, half) = (1 - r.rank, WORDS / 2);
    let window = fake.register_at(r, at, WORDS, 0);
    let handle = window.as_window().handle as u64;
    let value = |rank: usize, i: usize| ((n * 2 + rank) as u64) << 32 | i as u64;
    (0..half).for_each(|i| window.set(i, value(r.rank, i)));
    (half..WORDS).for_each(|i| window.set(i, 0));
    meeting.wait();
    serve();
    let before = device.signal(0, SIGNAL);
    meeting.wait();
    for i in 0..EACH {
        let from = (8 * 16 * i) as u64;
        let put = entry(OP_PUT | OP_SIGNAL_INC, 128).first(from, handle).second(8 * half as u64 + from, handle);
        device.post(0, peer, put.with_signal(SIGNAL as u32, 0, true));
    }
    device.wait_signal(0, SIGNAL, before + EACH as u64);
    for i in 0..half {
        assert_eq!(window.get(half + i), value(peer, i), "round {n}, word {i}");
    }
    serve();
    device.flush(0, peer);
    meeting.wait();
    // One of them goes first, while the other's kernel knows it.
    if n % 2 == r.rank {
        r.dereg(window.as_window());
        (0..WORDS).for_each(|i| window.set(i, u64::MAX));
    }
    meeting.wait();
    serve();
    if n % 2 != r.rank {
        r.dereg(window.as_window());
        (0..WORDS).for_each(|i| window.set(i, u64::MAX));
    }
    serve();
    meeting.wait();
    assert!((0..WORDS).all(|i| window.get(i) == u64::MAX), "round {n}: somebody has written to a window that is gone");
}

#[test]
fn windows_that_go_are_left_and_new_ones_are_their_own() {
    for (gpus, contexts) in [(1, 1), (2, 1), (2, 2)] {
        let fake = Fake::take();
        serve_by_kernel();
        let (against, before) = (AtomicU64::new(0), fake.lane_descriptors());
        job(2, 1, |r| {
            let gpu = r.rank as i32 % gpus;
            let _context = fake.enter(gpu);
            let words = window_words(2, contexts);
            let (src, dst) = (fake.window(r, gpu, words, 0), [fake.window(r, gpu, words, 0)]);
            let places = Places { src: &src, dst: &dst };
            let ask = Ask { depth: 64, contexts: contexts as i32, signals: SIGNAL as i32 + 1, ..Ask::default() };
            let device = device(&fake, r, ask);
            let mut streams = Streams::new(r, &[1 - r.rank], contexts, 0, &|_| Mix::default());
            let at = [(); 2].map(|()| fake.alloc(gpu, 8 * WORDS, false));
            let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
            let round = |n: usize| {
                let served = || {
                    streams.run(&device, &places, 60);
                    streams.flush(&device, &places);
                };
                come_and_go(&fake, r, &device, &meeting, at[n / 2 % 2], n, served);
                streams.finish(&device, &places);
            };
            rounds(&meeting, "windows that come and go", round, || fake.lane_descriptors() - before >= 1500);
            assert!(!device.has_error());
            device.destroy();
        });
        fake.check();
    }
}

/// An entry that names a window which went a moment ago, here or at the peer, while the kernel had its lane: nothing
/// moves.
#[test]
fn entries_for_a_window_that_is_gone_move_nothing() {
    for (attempt, is_own) in (0..4).flat_map(|a| [(a, true), (a, false)]) {
        let fake = Fake::take();
        serve_by_kernel();
        let (against, before, gone) = (AtomicU64::new(0), fake.lane_descriptors(), AtomicU64::new(0));
        job(2, 1, |r| {
            let gpu = if attempt % 2 == 0 { 0 } else { r.rank as i32 };
            let _context = fake.enter(gpu);
            let [near, far] = [(); 2].map(|()| fake.window(r, gpu, WORDS, 0));
            let device = device(&fake, r, Ask { depth: 64, signals: 2, ..Ask::default() });
            let [from, to] = [&near, &far].map(|w| w.as_window().handle as u64);
            let put = |bytes| entry(OP_PUT | OP_SIGNAL_INC, bytes).first(0, from).second(0, to).with_signal(0, 0, true);
            (0..WORDS).for_each(|i| near.set(i, 7));
            let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
            meeting.wait();
            let post = |bytes| {
                if r.rank == 0 {
                    device.post(0, 1, put(bytes))
                }
            };
            // The lane rests behind each: one that has always something under way may go on by the CPU for long.
            let round = |_| {
                (0..100).for_each(|_| post(64));
                if r.rank == 0 {
                    device.flush(0, 1);
                }
            };
            rounds(&meeting, "a kernel that serves", round, || fake.lane_descriptors() - before >= 100);
            if r.rank == 0 {
                device.flush(0, 1);
            }
            meeting.wait();
            let mark = || (0..WORDS).for_each(|i| far.set(i, u64::MAX));
            if r.rank == 0 {
                let begun = fake.lane_descriptors();
                for i in 0.. {
                    post(0);
                    let is_served = fake.lane_descriptors() > begun + 10 || i > 100_000;
                    if is_served && is_own && gone.load(Ordering::SeqCst) == 2 {
                        r.dereg(near.as_window());
                        break;
                    }
                    if is_served {
                        gone.fetch_max(1, Ordering::SeqCst);
                    }
                    if !is_own && gone.load(Ordering::SeqCst) == 2 {
                        break;
                    }
                }
                device.post(0, 1, put(64));
                wait(|| "an error".into(), || device.has_error());
                device.flush(0, 1);
            } else {
                wait(|| "a kernel that serves".into(), || gone.load(Ordering::SeqCst) == 1);
                if !is_own {
                    r.dereg(far.as_window());
                }
                mark();
                gone.store(2, Ordering::SeqCst);
            }
            meeting.wait();
            let moved = (0..WORDS).find(|i| r.rank == 1 && far.get(*i) != u64::MAX);
            assert_eq!(moved, None, "attempt {attempt}, its own window: {is_own}");
            device.destroy();
        });
        fake.check();
    }
}
