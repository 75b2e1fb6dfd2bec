//! GPU windows between ranks that reach each other over TCP, through the RMA v16 table, on the fake CUDA driver.

use crate::harness::*;
use crate::support::children::again;
use crate::support::common::*;
use nccl_plugin_api::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A chunk, as the library cuts large puts.
const CHUNK: usize = 256 << 10;
/// Bytes of the windows.
const BYTES: usize = 3 * CHUNK + 4096;
/// Around every size where something changes.
const SIZES: [usize; 16] =
    [0, 1, 3, 4, 7, 8, 100, 4096, 8191, 8192, 8193, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77, 3 * CHUNK];

/// The fake driver, ranks apart, `stripes` connections for bulk served by `threads` threads.
fn apart(stripes: u32, threads: u32) -> Fake {
    let fake = Fake::take();
    fake.set_transport("tcp");
    std::env::set_var("OXYGIN_TCP_STRIPES", stripes.to_string());
    std::env::set_var("OXYGIN_TCP_THREADS", threads.to_string());
    fake
}

/// Memory on either side of the bus.
enum Mem {
    Gpu(GpuWindow),
    Host(Window),
}

impl Mem {
    fn on(fake: &Fake, r: &Rank, gpu: Option<i32>) -> Self {
        match gpu {
            Some(gpu) => Self::Gpu(fake.window(r, gpu, BYTES / 8, 0)),
            None => Self::Host(r.window(BYTES / 8, 0)),
        }
    }

    fn window(&self) -> &Window {
        match self {
            Self::Gpu(w) => w.as_window(),
            Self::Host(w) => w,
        }
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        match self {
            Self::Gpu(w) => w.word(i),
            // SAFETY: an aligned word of the window.
            Self::Host(w) => unsafe { AtomicU64::from_ptr(w.words.as_ptr().add(i).cast_mut()) },
        }
    }

    /// Bytes `at` to `at + n` are those of the pattern of `round` from its byte `from` on; those around are untouched.
    fn check(&self, round: u64, at: usize, from: usize, n: usize, before: u64, what: &str) {
        let (first, last) = (at / 8, (at + n).div_ceil(8).min(BYTES / 8 - 1));
        for i in first.saturating_sub(1)..=last {
            let word = self.word(i).load(Ordering::Acquire).to_le_bytes();
            for (b, &found) in word.iter().enumerate() {
                let byte = i * 8 + b;
                let wanted = match byte {
                    _ if byte < at || byte >= at + n => before.to_le_bytes()[b],
                    _ => pattern(round, (byte - at + from) / 8).to_le_bytes()[(byte - at + from) % 8],
                };
                assert_eq!(found, wanted, "{what}, round {round}, {n} bytes, byte {byte} (from {at})");
            }
        }
    }

    fn fill(&self, word: impl Fn(usize) -> u64) {
        (0..BYTES / 8).for_each(|i| self.word(i).store(word(i), Ordering::Release));
    }
}

fn pattern(round: u64, i: usize) -> u64 {
    round << 48 ^ (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round
}

const WAYS: [(bool, bool); 3] = [(true, true), (false, true), (true, false)];

/// Every size, aligned and not, GPU to GPU, host to GPU and GPU to host, signals on either side: stamped anew each
/// time, and all there when the signal is.
fn stamped(signals: Signals, stripes: u32, threads: u32) {
    let fake = apart(stripes, threads);
    let flags = signals.set_up(&fake);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = [Mem::on(&fake, r, None), Mem::on(&fake, r, Some(gpu))];
        let dst = [Mem::on(&fake, r, None), Mem::on(&fake, r, Some(gpu))];
        let sig = fake.signals(r, gpu, 2, flags);
        let host_sig = r.window(2, 1);
        dst.iter().for_each(|m| m.fill(|_| 0x1111));
        r.job.barrier.wait();
        let _other = fake.enter(0);
        fake.kernel(1);
        let mut round = 0;
        for (from, to) in WAYS {
            for on_host in [false, true] {
                for (shift, size) in SIZES.into_iter().map(|s| (0, s)).chain(SIZES.into_iter().map(|s| (1, s))) {
                    round += 1;
                    let size = size.min(BYTES - 64);
                    let (a, b) = (shift * 3, 16 + shift * 5);
                    let (src, dst) = (&src[usize::from(from)], &dst[usize::from(to)]);
                    if r.rank == 0 {
                        src.fill(|i| pattern(round, i));
                        let signal = if on_host { &host_sig } else { sig.as_window() };
                        let put = (src.window(), a as u64);
                        r.wait(r.put(0, put, size, (dst.window(), b as u64), 1, Some((signal, 0, 1))));
                        // Locally complete: the source is ours again.
                        src.fill(|_| u64::MAX);
                    } else {
                        let seen = |on_host: bool| (1..=round).filter(|&n| host_round(n) == on_host).count() as u64;
                        match on_host {
                            true => r.wait_signal(&host_sig, 0, seen(true)),
                            false => sig.wait(r, 0, seen(false)),
                        }
                        dst.check(round, b, a, size, 0x1111, &format!("{from} to {to}, signal on host: {on_host}"));
                    }
                    r.job.barrier.wait();
                    dst.fill(|_| 0x1111);
                    r.job.barrier.wait();
                }
            }
        }
        fake.kernel(-1);
    });
    fake.check();
}

/// Whether the signal of a round of `stamped` is in host memory.
fn host_round(round: u64) -> bool {
    (round - 1) / (2 * SIZES.len() as u64) % 2 == 1
}

#[test]
fn every_message_is_there_when_its_signal_is() {
    KINDS.into_iter().for_each(|k| stamped(k, 1, 0));
}

#[test]
fn every_message_is_there_when_its_signal_is_over_three_stripes() {
    stamped(Signals::NeverReset, 3, 0);
}

#[test]
fn every_message_is_there_when_its_signal_is_by_several_threads() {
    stamped(Signals::NeverReset, 3, 4);
    stamped(Signals::ReadBack, 2, 1);
}

/// Gets of every size, from and to GPU and host memory, several at once.
#[test]
fn gets_bring_every_byte() {
    for (stripes, threads) in [(1, 0), (3, 0), (3, 2)] {
        let fake = apart(stripes, threads);
        job(2, 2, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let all: Vec<_> = (0..4).map(|i| Mem::on(&fake, r, (i % 2 == 1).then_some(gpu))).collect();
            for (i, m) in all[..2].iter().enumerate() {
                m.fill(|word| pattern(r.rank as u64 * 2 + i as u64, word));
            }
            r.job.barrier.wait();
            fake.kernel(1);
            for (from, to) in [(1, 3), (1, 2), (0, 3)] {
                for (n, size) in SIZES.into_iter().enumerate() {
                    let (a, b) = (n % 8, 16 + n * 3 % 8);
                    all[to].fill(|_| 0x2222);
                    let peer = 1 - r.rank;
                    let remote = (all[from].window(), a as u64);
                    r.wait(r.get(n as i32 % 2, remote, size, (all[to].window(), b as u64), peer));
                    let round = peer as u64 * 2 + from as u64;
                    all[to].check(round, b, a, size, 0x2222, &format!("{from} to {to}"));
                }
                let piece = BYTES / 8 / 64 * 8;
                all[to].fill(|_| 0);
                let requests: Vec<_> = (0..64)
                    .map(|n| {
                        let at = (n * piece) as u64;
                        r.get(n as i32 % 2, (all[from].window(), at), piece, (all[to].window(), at), 1 - r.rank)
                    })
                    .collect();
                requests.into_iter().for_each(|q| r.wait(q));
                let round = (1 - r.rank) as u64 * 2 + from as u64;
                all[to].check(round, 0, 0, 64 * piece, 0, "64 at once");
            }
            r.job.barrier.wait();
            fake.kernel(-1);
        });
        fake.check();
    }
}

/// A strong signal follows everything before it on its lane: small and large puts, to both sides of the bus.
#[test]
fn strong_signals_follow_everything() {
    for (signals, stripes, threads) in [(0, 1, 0), (0, 3, 0), (0, 3, 3), (1, 2, 2), (1, 2, 0), (2, 2, 2)] {
        let (signals, fake) = (KINDS[signals], apart(stripes, threads));
        let flags = signals.set_up(&fake);
        job(2, 1, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, 1 << 17, 0);
            let dst = fake.window(r, gpu, 1 << 17, 0);
            let sig = fake.signals(r, gpu, 2, flags);
            let host_dst = r.window(1 << 17, 0);
            let host_sig = r.window(2, 1);
            let peer = 1 - r.rank;
            let (mut on_gpu, mut on_host) = (0, 0);
            for round in 1..=200u64 {
                let host_signal = round % 3 == 0;
                *(if host_signal { &mut on_host } else { &mut on_gpu }) += 1;
                let wait = |i: usize| match host_signal {
                    true => r.wait_signal(&host_sig, i, on_host),
                    false => sig.wait(r, i, on_gpu),
                };
                let ring = |i: u64| {
                    let w = if host_signal { &host_sig } else { sig.as_window() };
                    r.put(0, (src.as_window(), 0), 0, (dst.as_window(), 0), peer, Some((w, 8 * i, 1)))
                };
                let words = [100, 65536 + 5, 3][round as usize % 3];
                if r.rank == 0 {
                    (0..words).for_each(|i| src.set(i, round));
                    let mut all = vec![
                        r.put(0, (src.as_window(), 0), words * 8, (dst.as_window(), 0), peer, None),
                        r.put(0, (src.as_window(), 0), 24, (&host_dst, 0), peer, None),
                    ];
                    if round % 8 == 0 {
                        all.push(r.put(0, (src.as_window(), 0), words * 8, (&host_dst, 64), peer, None));
                    }
                    all.push(r.put(0, (src.as_window(), 8), 8, (dst.as_window(), 131_000 * 8), peer, None));
                    all.push(ring(0));
                    all.into_iter().for_each(|q| r.wait(q));
                    wait(1);
                } else {
                    wait(0);
                    assert!((0..words).all(|i| dst.get(i) == round), "round {round}");
                    assert_eq!(&host_dst.words[..3], &[round; 3]);
                    assert!(round % 8 != 0 || host_dst.words[8..8 + words].iter().all(|&w| w == round));
                    assert_eq!(dst.get(131_000), round);
                    r.wait(ring(1));
                }
            }
        });
        fake.check();
    }
}

#[test]
fn all_to_all() {
    all_at_once(2, 0);
}

#[test]
fn all_to_all_by_several_threads() {
    all_at_once(2, 3);
}

/// Four ranks, each on its GPU, in eight contexts at once, blocks of all sizes from and to all.
fn all_at_once(stripes: u32, threads: u32) {
    let fake = apart(stripes, threads);
    let flags = Signals::NeverReset.set_up(&fake);
    let (n, block) = (4usize, 100_000usize);
    job(n, 8, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, block * n, 0);
        let dst = fake.window(r, gpu, block * n, 0);
        let sig = fake.signals(r, gpu, n, flags);
        for round in 1..=3u64 {
            (0..block * n).for_each(|i| src.set(i, pattern(round * 8 + r.rank as u64, i)));
            r.job.barrier.wait();
            fake.kernel(1);
            let mut requests = Vec::new();
            for context in 0..8 {
                let words = block / 8 - context * 1500;
                for p in 0..n {
                    let (a, b) = ((p * block + context * block / 8) * 8, (r.rank * block + context * block / 8) * 8);
                    let to = (dst.as_window(), b as u64);
                    let signal = Some((sig.as_window(), r.rank as u64 * 8, 1));
                    requests.push(r.put(context as i32, (src.as_window(), a as u64), words * 8, to, p, signal));
                }
            }
            requests.into_iter().for_each(|q| r.wait(q));
            for p in 0..n {
                sig.wait(r, p, 8 * round);
                for context in 0..8 {
                    for i in 0..block / 8 - context * 1500 {
                        let wanted = pattern(round * 8 + p as u64, r.rank * block + context * block / 8 + i);
                        assert_eq!(dst.get(p * block + context * block / 8 + i), wanted, "{p} to {}, {i}", r.rank);
                    }
                }
            }
            fake.kernel(-1);
            r.job.barrier.wait();
        }
    });
    fake.check();
}

/// Many unfinished operations, many senders, one signal; the receiver does nothing but look.
#[test]
fn fan_in_adds_up() {
    for (signals, n) in KINDS.into_iter().zip([3000, 3000, 150]) {
        let fake = apart(1, 0);
        traffic::fan_in(&fake, signals, n, |r, sig, sum, requests| {
            if r.rank == 0 {
                // The helper thread alone.
                wait_until(&format!("{signals:?}: all of {sum}"), || {
                    std::thread::sleep(Duration::from_millis(1));
                    sig.get(0) >= sum
                });
            }
            requests.into_iter().for_each(|q| r.wait(q));
        });
    }
}

/// On a slow GPU: messages of one context pass while a large put of another is under way.
#[test]
fn small_ones_pass_a_large_put() {
    let fake = apart(1, 0);
    let flags = Signals::NeverReset.set_up(&fake);
    let words = 16 * CHUNK / 8 * 4;
    job(2, 2, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, words, 0);
        let dst = fake.window(r, gpu, words + 8, 0);
        let sig = fake.signals(r, gpu, 2, flags);
        let small = |i: usize| {
            let to = (dst.as_window(), words as u64 * 8);
            r.put(1, (src.as_window(), 0), 64, to, 1 - r.rank, Some((sig.as_window(), 8 * i as u64, 1)))
        };
        // Connections are up.
        r.wait(small(0));
        sig.wait(r, 0, 1);
        r.job.barrier.wait();
        fake.settings(false, 2000);
        if r.rank == 0 {
            let large = r.put(0, (src.as_window(), 0), words * 8, (dst.as_window(), 0), 1, None);
            for round in 0..4 {
                r.wait(small(0));
                sig.wait(r, 0, 2 + round);
            }
            let mut done = 0;
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(r.coll, large, &mut done) });
            assert_eq!(done, 0, "four round trips took as long as 64 chunks at 4 ms");
            fake.settings(false, 3);
            r.wait(large);
        } else {
            for round in 0..4 {
                sig.wait(r, 0, 2 + round);
                r.wait(small(0));
            }
        }
    });
    fake.check();
}

/// Rank 0's GPU fails: rank 0's operation does, and rank 1 learns that something is wrong.
/// The first one, or, where the fault has to be found out, a later one.
fn fails(bytes: usize, at_once: bool, inject: impl Fn(&Fake) + Sync) {
    [0, 2].into_iter().for_each(|threads| fails_by(bytes, at_once, threads, &inject));
}

fn fails_by(bytes: usize, at_once: bool, threads: u32, inject: &(impl Fn(&Fake) + Sync)) {
    let fake = apart(1, threads);
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let src = fake.window(r, r.rank as i32, BYTES / 8, 0);
        let dst = fake.window(r, r.rank as i32, BYTES / 8, 0);
        let sig = fake.signals(r, r.rank as i32, 1, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
        if r.rank == 0 {
            let signal = Some((sig.as_window(), 0, 1));
            r.wait(r.put(0, (src.as_window(), 0), 8, (dst.as_window(), 0), 1, signal));
        } else {
            sig.wait(r, 0, 1);
        }
        // The connections are up and rank 1's GPU has nothing to do: the fault is rank 0's.
        r.job.barrier.wait();
        if r.rank == 0 {
            inject(&fake);
            let put_fails = || {
                let mut request = null_mut();
                // SAFETY: registered windows.
                let put = unsafe {
                    let (from, to) = (src.as_window().handle, dst.as_window().handle);
                    T.iput.unwrap()(r.ctx, 0, 0, from, bytes, 0, to, 1, 0, &mut request)
                };
                put != NcclResult::SUCCESS || !comes_out(r, request)
            };
            let end = Instant::now() + Duration::from_secs(60);
            while !put_fails() {
                assert!(!at_once && Instant::now() < end, "an operation came out well");
            }
        }
        // It is rank 0's to tell: rank 1 has lost nothing of its own, and its connections stay.
        let end = Instant::now() + Duration::from_secs(60);
        let mut error = r.rank != 0;
        while !error {
            // SAFETY: plain call.
            ok(unsafe { T.query_last_error.unwrap()(r.ctx, &mut error) });
            assert!(Instant::now() < end, "rank {} sees no error", r.rank);
        }
        r.job.barrier.wait();
        fake.destroy_context(0, false);
    });
    fake.check();
}

#[test]
fn a_refused_copy_fails_the_operation() {
    [100, BYTES].into_iter().for_each(|n| {
        fails(n, true, |fake| {
            fake.inject("cuMemcpyBatchAsync", 1);
            fake.inject("cuMemcpyAsync", 1);
        })
    });
}

#[test]
fn a_fault_on_the_gpu_fails_the_operation() {
    [100, BYTES].into_iter().for_each(|n| fails(n, true, |fake| fake.inject("gpu", 700)));
}

#[test]
fn a_destroyed_context_fails_the_operation() {
    [100, BYTES].into_iter().for_each(|n| fails(n, false, |fake| fake.destroy_context(0, true)));
}

/// A rank leaves once its put is locally complete, while the bytes are on their way into the other's GPU memory: they
/// arrive, and their signal rings, on either side of the bus.
#[test]
fn what_a_rank_sent_before_it_left_still_counts() {
    for (threads, on_host) in [(0, true), (0, false), (2, true)] {
        let fake = apart(2, threads);
        let job = Job::new(2);
        let left = AtomicU64::new(0);
        let bytes = 2 * CHUNK + 4096;
        let run = |rank: usize| {
            let r = Rank::join(&job, rank, 1);
            let _context = fake.enter(rank as i32);
            let mut src = r.window(BYTES / 8, 0);
            src.words.fill(5);
            let dst = fake.window(&r, rank as i32, BYTES / 8, 0);
            let sig = fake.signals(&r, rank as i32, 1, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
            let host_sig = r.window(1, 1);
            let signal = if on_host { &host_sig } else { sig.as_window() };
            fake.hold(CHUNK);
            job.barrier.wait();
            if rank == 0 {
                r.wait(r.put(0, (&src, 0), bytes, (dst.as_window(), 0), 1, Some((signal, 0, 1))));
                r.leave();
                left.store(1, Ordering::Release);
                return;
            }
            // It hears of the end while the GPU has the bytes.
            let mut polls = 0;
            while polls < 200 {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                std::thread::sleep(Duration::from_millis(1));
                polls += left.load(Ordering::Acquire);
            }
            assert_eq!(dst.get(1).max(sig.get(0)).max(host_sig.words[0]), 0, "nothing was held");
            fake.hold(0);
            match on_host {
                true => r.wait_signal(&host_sig, 0, 1),
                false => sig.wait(&r, 0, 1),
            }
            assert!((0..bytes / 8).all(|i| dst.get(i) == 5));
            r.leave();
        };
        std::thread::scope(|s| {
            s.spawn(|| run(0));
            run(1);
        });
        fake.check();
    }
}

/// Ranks leave with large and small traffic both ways unfinished; then a new communicator works.
#[test]
fn teardown_with_traffic_in_flight() {
    for threads in [0, 0, 2, 2] {
        let fake = apart(2, threads);
        job(2, 2, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, BYTES / 8, 0);
            let dst = fake.window(r, gpu, BYTES / 8, 0);
            r.wait(r.put(0, (src.as_window(), 0), 8, (dst.as_window(), 0), 1 - r.rank, None));
            for n in 0..40 {
                let size = [BYTES, 64][n % 2];
                r.put(n as i32 % 2, (src.as_window(), 0), size, (dst.as_window(), 0), 1 - r.rank, None);
                r.get(n as i32 % 2, (dst.as_window(), 0), size, (src.as_window(), 0), 1 - r.rank);
            }
        });
        fake.check();
    }
}

/// A window goes with traffic for it in flight: nothing touches it afterwards, the sender is told.
#[test]
fn a_deregistered_window_stays_untouched() {
    [0, 2].into_iter().for_each(deregister);
}

fn deregister(threads: u32) {
    let fake = apart(1, threads);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, BYTES / 8, 0);
        let dst = fake.window(r, gpu, BYTES / 8, 0);
        (0..BYTES / 8).for_each(|i| src.set(i, 7));
        r.job.barrier.wait();
        if r.rank == 0 {
            let requests: Vec<_> =
                (0..20).map(|_| r.put(0, (src.as_window(), 0), BYTES, (dst.as_window(), 0), 1, None)).collect();
            let last = requests[requests.len() - 1];
            let end = Instant::now() + Duration::from_secs(60);
            let (mut done, mut result) = (0, NcclResult::SUCCESS);
            while done == 0 && result == NcclResult::SUCCESS {
                // SAFETY: plain call.
                result = unsafe { T.test.unwrap()(r.coll, last, &mut done) };
                assert!(Instant::now() < end, "neither done nor failed");
            }
        } else {
            while dst.get(0) == 0 {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            }
            r.dereg(dst.as_window());
            (0..BYTES / 8).for_each(|i| dst.set(i, 9));
            for _ in 0..200 {
                // SAFETY: plain call.
                let _ = unsafe { T.rma_progress.unwrap()(r.ctx) };
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!((0..BYTES / 8).all(|i| dst.get(i) == 9));
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// A context goes while the GPU copies out of its memory, or into it: once it is gone the memory may go, too, and
/// nothing of what it had asked for comes.
#[test]
fn destroying_a_context_waits_for_copies_of_its_memory() {
    [0, 2].into_iter().for_each(destroy);
}

fn destroy(threads: u32) {
    const WORDS: usize = 64 * CHUNK / 8;
    /// What the operations behind it leave alone.
    const REST: usize = 4 * CHUNK / 8;
    let fake = apart(1, threads);
    let released = AtomicU64::new(0);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let mine = fake.window(r, gpu, WORDS, 0);
        let theirs = r.window(WORDS, 0);
        // SAFETY: aligned words of the window.
        let their = |i: usize| unsafe { AtomicU64::from_ptr(theirs.words.as_ptr().add(i).cast_mut()) };
        for (round, is_get) in (1..).zip([false, true]) {
            (0..WORDS).for_each(|i| mine.set(i, 1));
            (0..WORDS).for_each(|i| their(i).store(3, Ordering::Relaxed));
            let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            let mut ctx = null_mut();
            // SAFETY: pointers to locals; a collective call.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let other = Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
            let start = |r: &Rank, bytes| match is_get {
                true => r.get(0, (&theirs, 0), bytes, (mine.as_window(), 0), 1),
                false => r.put(0, (mine.as_window(), 0), bytes, (&theirs, 0), 1, None),
            };
            if r.rank == 0 {
                r.wait(start(r, 8));
            }
            r.job.barrier.wait();
            if r.rank == 0 {
                fake.hold(CHUNK);
                let request = start(&other, 8 * WORDS);
                wait_until("the first copy", || {
                    assert!(!test(r, request));
                    fake.is_holding()
                });
            }
            r.job.barrier.wait();
            if r.rank == 1 {
                std::thread::sleep(Duration::from_millis(100));
                released.store(round, Ordering::SeqCst);
                fake.hold(0);
            }
            // SAFETY: destroyed once.
            ok(unsafe { T.destroy_context.unwrap()(ctx) });
            assert_eq!(released.load(Ordering::SeqCst), round, "get: {is_get}: the copy is still on its way");
            if r.rank == 0 {
                if is_get {
                    assert!((1..WORDS).any(|i| mine.get(i) == 1), "all had come");
                } else {
                    (0..WORDS).for_each(|i| mine.set(i, 2));
                }
                let rest = || (REST..WORDS).map(|i| mine.get(i)).collect::<Vec<_>>();
                let before = rest();
                // Behind everything of the other, on all connections.
                for bytes in [8, 64 << 10, 4 * CHUNK, 8] {
                    r.wait(start(r, bytes));
                }
                assert!(rest() == before, "bytes came later");
            }
            r.job.barrier.wait();
            if r.rank == 1 && !is_get {
                assert!((REST..WORDS).all(|i| their(i).load(Ordering::Acquire) != 2), "read later");
            }
            r.job.barrier.wait();
        }
    });
    fake.check();
}

/// Joins a job of two with another process: lines with this rank's handle out, the other's in.
fn join_by_pipe(rank: usize, mut tell: impl Write, hear: impl Read) -> Rank {
    Rank::join_by(&Job::new(2), rank, 2, |own| {
        let hex: String = own.iter().map(|b| format!("{b:02x}")).collect();
        writeln!(tell, "HANDLE {hex}").unwrap();
        tell.flush().unwrap();
        // The test harness writes to the same pipe, also without ending its line.
        let mut lines = BufReader::new(hear).lines().map(Result::unwrap);
        let line = lines.find_map(|l| l.split("HANDLE ").nth(1).map(str::to_string)).expect("a handle");
        let mut other = [0; HANDLE_BYTES];
        for (b, x) in other.iter_mut().zip(line.as_bytes().chunks(2)) {
            *b = u8::from_str_radix(std::str::from_utf8(x).unwrap(), 16).unwrap();
        }
        if rank == 0 {
            vec![own, other]
        } else {
            vec![other, own]
        }
    })
}

/// Large and small traffic to the other rank, kept up until something fails.
fn keep_up(r: &Rank, src: &GpuWindow, dst: &GpuWindow, sig: &GpuWindow, on: impl Fn() -> bool) {
    let mut requests = std::collections::VecDeque::new();
    while on() {
        let size = [BYTES, 64][requests.len() % 2];
        let (context, mut request) = ((requests.len() % 2) as i32, null_mut());
        // SAFETY: registered windows that stay.
        let result = unsafe {
            let (from, to) = (src.as_window().handle, dst.as_window().handle);
            let (word, add) = (sig.as_window().handle, SIGNAL_OP_ADD);
            let put = T.iput_signal.unwrap();
            put(r.ctx, context, 0, from, size, 0, to, 1 - r.rank as u32, 0, word, 1, add, true, 0, &mut request)
        };
        if result != NcclResult::SUCCESS {
            return;
        }
        requests.push_back(request);
        while requests.len() > 8 {
            let Some(&first) = requests.front() else { break };
            let mut done = 0;
            // SAFETY: plain call.
            if unsafe { T.test.unwrap()(r.coll, first, &mut done) } != NcclResult::SUCCESS {
                return;
            }
            if done != 0 {
                requests.pop_front();
            }
        }
    }
}

/// Windows of either process.
fn windows(fake: &Fake, r: &Rank) -> [GpuWindow; 3] {
    let gpu = r.rank as i32;
    let flags = MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET;
    [fake.window(r, gpu, BYTES / 8, 0), fake.window(r, gpu, BYTES / 8, 0), fake.signals(r, gpu, 1, flags)]
}

/// A process that is killed in the middle of traffic both ways: this one learns of it, nothing hangs, all can be taken
/// down and pinned memory is whole for what comes after.
#[test]
fn a_peer_that_is_killed() {
    for threads in [0, 2] {
        let fake = apart(2, threads);
        let mut child = again("the_process_that_is_killed")
            .env("OXYGIN_TEST_CHILD", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let r = join_by_pipe(0, child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let _context = fake.enter(0);
        let [src, dst, sig] = windows(&fake, &r);
        let start = Instant::now();
        let killed_at = std::cell::Cell::new(None);
        let child = std::cell::RefCell::new(&mut child);
        keep_up(&r, &src, &dst, &sig, || {
            assert!(start.elapsed() < Duration::from_secs(60), "{} signals", sig.get(0));
            if sig.get(0) > 20 && killed_at.get().is_none() {
                child.borrow_mut().kill().unwrap();
                killed_at.set(Some(Instant::now()));
            }
            true
        });
        assert!(killed_at.get().is_some(), "failed before anybody was killed");
        child.borrow_mut().wait().unwrap();
        let mut error = false;
        // SAFETY: plain call.
        ok(unsafe { T.query_last_error.unwrap()(r.ctx, &mut error) });
        assert!(error);
        [&src, &dst, &sig].into_iter().for_each(|w| r.dereg(w.as_window()));
        r.leave();
        fake.check();
    }
}

#[test]
#[ignore = "the other process of a_peer_that_is_killed"]
fn the_process_that_is_killed() {
    assert!(std::env::var_os("OXYGIN_TEST_CHILD").is_some(), "run a_peer_that_is_killed, which starts this");
    let threads = std::env::var("OXYGIN_TCP_THREADS").unwrap().parse().unwrap();
    let fake = apart(2, threads);
    let r = join_by_pipe(1, std::io::stdout(), std::io::stdin());
    let _context = fake.enter(1);
    let [src, dst, sig] = windows(&fake, &r);
    let start = Instant::now();
    keep_up(&r, &src, &dst, &sig, || start.elapsed() < Duration::from_secs(100));
}
