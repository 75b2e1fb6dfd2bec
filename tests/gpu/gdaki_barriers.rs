//! Device code of the software NIC that goes through barriers of signals, while copy kernels come late and end when
//! they like.

use crate::harness::plan::beside;
use crate::harness::Fake;
use crate::support::common::{job, Rank};
use crate::support::kernel::{Kernel, WAYS};
use crate::support::nic::{write, Ask, Status};
use nccl_plugin_api::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const RANKS: usize = 4;
const CONTEXTS: usize = 4;
/// Five of each length.
const ROUNDS: u64 = 20;
/// Bytes from one rank to another, at most; a round's lengths are of all the copy kernel's ways to copy.
const LONGEST: usize = 64 << 10;
const LENGTHS: [usize; 4] = [4096, LONGEST, 64, 16 << 10];
/// Signals: those who are at the first barrier, the puts that are in, those who are at the second barrier.
const FIRST: u64 = 0;
const PUTS: u64 = 1;
const SECOND: u64 = 2;

/// This rank and then the others, in a ring.
fn ring(rank: usize) -> impl Iterator<Item = usize> {
    (0..RANKS).map(move |k| (rank + k) % RANKS)
}

/// Tells every rank that one more is at the barrier, and waits for all of them.
fn barrier(kernel: &Kernel<'_>, rank: usize, context: usize, signal: u64, round: u64) {
    for peer in ring(rank) {
        kernel.qp(context, peer).post(&[kernel.add_signal(context, peer, signal, 1)]);
    }
    kernel.wait_signal(context, signal, RANKS as u64 * round);
}

/// One rank's part: every context's block waits for all others before the puts and behind them, and flushes in
/// between; context 0 puts.
fn all_to_alls(r: &Rank, fake: &Fake, ringing: &str) {
    let (_context, me) = (fake.enter(0), r.rank);
    let on_gpu = |at: u64| fake.peek(at) as u64;
    let [src, dst] = [(); 2].map(|()| fake.alloc(0, RANKS * LONGEST, false));
    let [(_, src_gin), (_, dst_gin)] = [src, dst].map(|at| WAYS[5].register(r, at, RANKS * LONGEST, PTR_CUDA));
    // SAFETY: inside a window of that many words.
    let word = |at: u64, i: usize| unsafe { &*((on_gpu(at) + 8 * i as u64) as *const AtomicU64) };
    let see = |at| Some(on_gpu(at)).filter(|seen| *seen != 0).unwrap_or(at);
    let ask = Ask { contexts: CONTEXTS as u32, signals: 3, ..Ask::default() };
    let kernel = Kernel::new(r, WAYS[5], ask, &see);
    let block = |context: usize, round: u64, len: usize| {
        barrier(&kernel, me, context, FIRST, round);
        if context == 0 {
            for peer in ring(me) {
                let to = kernel.at(dst_gin, peer, (me * len) as u64);
                let put = write(to, kernel.own(src_gin, (peer * len) as u64), len as u32);
                kernel.qp(0, peer).post(&[put, kernel.add_signal(0, peer, PUTS, 1)]);
            }
            kernel.wait_signal(0, PUTS, RANKS as u64 * round);
        }
        ring(me).for_each(|peer| assert_eq!(kernel.qp(context, peer).flush(), Status::Good));
        barrier(&kernel, me, context, SECOND, round);
    };
    r.job.barrier.wait();
    for round in 1..=ROUNDS {
        let len = LENGTHS[round as usize / 5 % LENGTHS.len()];
        for i in 0..RANKS * len / 8 {
            word(src, i).store(round << 32 | (me * 8 + i) as u64, Ordering::Release);
        }
        std::thread::scope(|s| (0..CONTEXTS).for_each(|context| drop(s.spawn(move || block(context, round, len)))));
        for (from, i) in (0..RANKS).flat_map(|from| (0..len / 8).step_by(61).map(move |i| (from, i))) {
            let wanted = round << 32 | (from * 8 + me * len / 8 + i) as u64;
            let found = word(dst, from * len / 8 + i).load(Ordering::Acquire);
            assert_eq!(found, wanted, "{ringing}, round {round}, {len} bytes, word {i} of rank {from}");
        }
        r.job.barrier.wait();
    }
    assert!(!kernel.has_error());
    r.job.barrier.wait();
    kernel.destroy();
    r.job.barrier.wait();
}

/// Four ranks on one GPU put to each other between barriers of signals, as nccl-tests' all-to-all does.
#[test]
fn all_to_alls_between_barriers_come_to_an_end() {
    for (ringing, limits) in [("free-flow", (0, 0)), ("free-flow", (20, 30)), ("doorbell", (20, 30))] {
        let fake = Fake::take();
        std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
        std::env::set_var("OXYGIN_GDAKI_RINGING", ringing);
        fake.kernel_limits(limits.0, limits.1);
        let held = AtomicBool::new(false);
        let disturb = || {
            fake.hold_kernels(!held.fetch_xor(true, Ordering::AcqRel));
            std::thread::sleep(Duration::from_micros(1500));
            fake.end_kernels();
        };
        beside(disturb, || job(RANKS, 1, |r| all_to_alls(r, &fake, ringing)));
        fake.hold_kernels(false);
        fake.kernel_limits(0, 0);
        fake.check();
    }
}
