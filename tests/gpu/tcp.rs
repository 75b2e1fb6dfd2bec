//! GPU windows between ranks that reach each other over TCP: every byte of every size arrives, and is there when its
//! signal is. Through the RMA v16 table, on the fake CUDA driver.

use crate::harness::tcp::{apart, BYTES, CHUNK};
use crate::harness::*;
use crate::support::common::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Around every size where something changes.
const SIZES: [usize; 16] =
    [0, 1, 3, 4, 7, 8, 100, 4096, 8191, 8192, 8193, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77, 3 * CHUNK];

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

/// Large puts of several contexts, the last chunk of each in a buffer of the small ones, with small puts behind them
/// that could have all of those.
#[test]
fn large_puts_get_buffers_before_the_small_ones_behind_them() {
    const CONTEXTS: usize = 6;
    const LARGE: usize = (2 << 20) + (8 << 10);
    let fake = apart(1, 0);
    job(2, CONTEXTS as i32, |r| {
        let _context = fake.enter(r.rank as i32);
        let [src, dst] = [(), ()].map(|()| fake.window(r, r.rank as i32, LARGE / 8, 0));
        r.job.barrier.wait();
        if r.rank == 0 {
            let put = |context, len| r.put(context, (src.as_window(), 0), len, (dst.as_window(), 0), 1, None);
            let large: Vec<_> = (0..CONTEXTS).map(|context| put(context as i32, LARGE)).collect();
            let small = (0..CONTEXTS).flat_map(|context| [context as i32; 31]).map(|context| put(context, 4096));
            large.into_iter().chain(small.collect::<Vec<_>>()).for_each(|request| r.wait(request));
        }
        r.job.barrier.wait();
    });
    fake.check();
}
