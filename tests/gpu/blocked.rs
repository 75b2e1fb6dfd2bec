//! Everything flows while the application's queues stand, on every way between ranks: on the fake CUDA driver, where
//! nothing that needs the GPU's processors begins in the primary context.

use crate::harness::traffic::*;
use crate::harness::*;
use crate::support::common::*;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// When the application's queues begin to stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// Before the first window is registered.
    SetUp,
    /// After.
    Use,
}

fn block(fake: &Fake, gpus: i32, on: bool) {
    (0..gpus).for_each(|gpu| fake.block(gpu, on));
}

/// All kinds of traffic between two ranks, and their end, while the queues stand.
fn flows(transport: &str, gpus: i32, kind: Signals, from: From, issue: Option<&str>) {
    println!("{transport}, {gpus} GPUs, {kind:?}, from {from:?} on, {issue:?}");
    let fake = Fake::take();
    fake.set_transport(transport);
    issue.inspect(|how| fake.set_issue(how));
    let (flags, by_kernel) = (kind.set_up(&fake), fake.commands());
    block(&fake, gpus, from == From::SetUp);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let traffic = Traffic::new(&fake, r, gpu, kind, flags, &arrived);
        if from == From::Use && r.rank == 0 {
            wait_until("warm-ups of the kernel have ended", || fake.launched() == 0);
            block(&fake, gpus, true);
        }
        r.job.barrier.wait();
        {
            // NCCL's progress thread has device 0 current; no call may wait for the application's kernels.
            let _other = fake.enter(0);
            fake.kernel(1);
            traffic.all();
            r.job.barrier.wait();
            fake.kernel(-1);
        }
        r.job.barrier.wait();
    });
    // Both have closed, the queues still standing.
    assert_eq!(fake.commands(), by_kernel, "a kernel ran where queues stand");
    let has_copy_kernel = issue.is_none_or(|how| !how.contains("kernel=0"));
    assert!(fake.launched() > 0 || from == From::Use || !has_copy_kernel);
    block(&fake, gpus, false);
    wait_until("launches that were left have ended", || fake.launched() == 0);
    fake.check();
}

#[test]
fn between_two_gpus() {
    KINDS.into_iter().for_each(|kind| flows("auto", 2, kind, From::Use, None));
}

#[test]
fn within_one_gpu() {
    KINDS.into_iter().for_each(|kind| flows("auto", 1, kind, From::Use, None));
}

#[test]
fn without_the_copy_kernel() {
    for (gpus, kind) in [(1, Signals::NeverReset), (2, Signals::Added), (1, Signals::ReadBack)] {
        flows("auto", gpus, kind, From::Use, Some("kernel=0"));
    }
}

#[test]
fn from_the_first_window_on() {
    flows("auto", 2, Signals::NeverReset, From::SetUp, None);
    flows("auto", 1, Signals::ReadBack, From::SetUp, None);
    flows("auto", 1, Signals::Added, From::SetUp, Some("kernel=0"));
}

#[test]
fn through_host_memory() {
    flows("staged", 2, Signals::NeverReset, From::Use, None);
    flows("staged", 1, Signals::Added, From::SetUp, None);
    flows("staged", 1, Signals::ReadBack, From::Use, Some("kernel=0"));
}

#[test]
fn over_tcp() {
    flows("tcp", 2, Signals::NeverReset, From::Use, None);
    flows("tcp", 1, Signals::Added, From::SetUp, None);
    flows("tcp", 2, Signals::ReadBack, From::Use, Some("kernel=0"));
}

/// Submissions that are not merged, one at a time, large copies with the others: no way of gathering needs processors.
#[test]
fn however_operations_gather() {
    flows("auto", 1, Signals::NeverReset, From::Use, Some("merge=0,submissions=1,bulk=0"));
    flows("auto", 2, Signals::Added, From::Use, Some("merge=0,submissions=4,gather=1,bulk=65536"));
}

/// Once an engine's first store has waited for a time slice, what copy engines can do waits for none: here everything
/// but single bytes and additions.
#[test]
fn only_the_first_store_waits_for_processors() {
    for (transport, gpus) in ["auto", "staged", "tcp"].into_iter().flat_map(|t| [(t, 1), (t, 2)]) {
        let fake = Fake::take();
        fake.set_transport(transport);
        fake.set_issue("kernel=0");
        let flags = Signals::NeverReset.set_up(&fake);
        let arrived = AtomicU64::new(0);
        job(2, 1, |r| {
            let gpu = r.rank as i32 % gpus;
            let _context = fake.enter(gpu);
            let traffic = Traffic::new(&fake, r, gpu, Signals::NeverReset, flags, &arrived);
            if r.rank == 0 {
                // Warm-ups are over.
                fake.rest();
                block(&fake, gpus, true);
            }
            r.job.barrier.wait();
            // A get of a word from host memory is a store too, by the engine of the one that has it.
            let (host, word) = (&traffic.host, (traffic.to_gpu.window(), GAP as u64));
            if r.rank == 0 {
                r.wait(r.put(0, (host.window(), 8), 4, word, 1, Some((traffic.sig.as_window(), 0, 1))));
            } else {
                traffic.sig.wait(r, 0, 1);
                r.wait(r.get(0, (host.window(), 8), 4, word, 0));
                traffic.to_gpu.took(GAP, &traffic.peers[8..12], "4 bytes");
            }
            traffic.barrier();
            let (mut sum, slices) = (1, fake.slices());
            traffic.barrier();
            for (from, to) in WAYS {
                let (from, to) = (traffic.source(from), traffic.target(to));
                for n in SIZES.into_iter().filter(|&n| n != 1) {
                    let what = format!(
                        "{transport}, {gpus} GPUs, {n} bytes, on GPU: {}, {}",
                        from.is_on_gpu(),
                        to.is_on_gpu()
                    );
                    sum += 1;
                    if r.rank == 0 {
                        let signal = Some((traffic.sig.as_window(), 0, 1));
                        r.wait(r.put(0, (from.window(), 8), n, (to.window(), GAP as u64), 1, signal));
                    } else {
                        traffic.sig.wait(r, 0, sum);
                        to.took(GAP, &traffic.peers[8..8 + n], &what);
                        r.wait(r.get(0, (from.window(), 8), n, (to.window(), GAP as u64), 0));
                        to.took(GAP, &traffic.peers[8..8 + n], &what);
                    }
                    traffic.barrier();
                    assert_eq!(fake.slices(), slices, "{what}: waited for processors");
                }
            }
        });
        block(&fake, gpus, false);
        fake.check();
    }
}

/// A store that finds the staging memory full waits for room there, not for the processors.
#[test]
fn stores_wait_for_room_in_the_staging_memory() {
    const STAGING: usize = 4 << 20;
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    let flags = Signals::NeverReset.set_up(&fake);
    let arrived = AtomicU64::new(0);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        let (from, to, signal) = (traffic.host.window(), traffic.to_gpu.window(), (traffic.sig.as_window(), 0, 1));
        if r.rank == 0 {
            fake.rest();
            block(&fake, 1, true);
            // The first one learns that the processors are busy.
            r.wait(r.put(0, (from, 0), 8, (to, GAP as u64), 1, Some(signal)));
            let slices = fake.slices();
            fake.hold(64 << 10);
            // SAFETY: plain call.
            let progress = || ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            let large = r.put(0, (from, 0), STAGING, (to, GAP as u64), 1, None);
            (0..1000).for_each(|_| progress());
            let small = r.put(0, (from, STAGING as u64), 8, (to, (GAP + STAGING) as u64), 1, Some(signal));
            (0..1000).for_each(|_| progress());
            fake.hold(0);
            [large, small].into_iter().for_each(|q| r.wait(q));
            assert_eq!(fake.slices(), slices, "it waited for processors");
        } else {
            traffic.sig.wait(r, 0, 2);
            traffic.to_gpu.took(GAP, &traffic.peers[..STAGING + 8], "all");
        }
        traffic.barrier();
    });
    block(&fake, 1, false);
    fake.check();
}

/// Many at once share the staging memory, whose places do not always fit: those that find none come later, and not by
/// the processors.
#[test]
fn many_copies_within_the_gpu_wait_for_no_processors() {
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    let flags = Signals::NeverReset.set_up(&fake);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        if r.rank == 0 {
            fake.rest();
            block(&fake, 1, true);
        }
        r.job.barrier.wait();
        let (from, to, signal) = (&traffic.gpu, &traffic.to_gpu, (traffic.sig.as_window(), 0, 1));
        let sizes = [8, 5 << 20, 8193, 3 << 20, 100 << 10, 4 << 20, 8, (1 << 20) + 1, 5 << 20, 16, 5 << 20, 2 << 20];
        if r.rank == 0 {
            // The first store waits for a time slice, and none after it.
            r.wait(r.put(0, (from.window(), 8), 8, (to.window(), GAP as u64), 1, Some(signal)));
            let slices = fake.slices();
            let put = |i: usize| {
                let n = sizes[i % sizes.len()];
                r.put(i as i32 % 2, (from.window(), 8), n, (to.window(), GAP as u64), 1, Some(signal))
            };
            let requests: Vec<_> = (0..3 * sizes.len()).map(put).collect();
            requests.into_iter().for_each(|q| r.wait(q));
            assert_eq!(fake.slices(), slices, "waited for processors");
        } else {
            traffic.sig.wait(r, 0, 1 + 3 * sizes.len() as u64);
            to.took(GAP, &traffic.peers[8..8 + (5 << 20)], "the longest");
        }
        traffic.barrier();
    });
    block(&fake, 1, false);
    fake.check();
}

/// Copies within the GPU that are left to its processors wait for a time slice, no longer. Once one has waited others
/// go by host memory for a while, unless they are still larger.
#[test]
fn very_large_copies_within_the_gpu() {
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    const MOST: usize = 64 << 20;
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let memory = Mem::on_gpu(&fake, r, 0, MOST);
        let sig = fake.signals(r, 0, 1, Signals::NeverReset.set_up(&fake));
        r.job.barrier.wait();
        if r.rank == 0 {
            fake.rest();
            fake.block(0, true);
        }
        // The first signal waits for a time slice, too.
        for (i, (n, slices)) in [(33 << 20, 2), (33 << 20, 0), (MOST, 1)].into_iter().enumerate() {
            if r.rank == 0 {
                memory.bytes(0, n).fill(i as u8 + 1);
                let before = fake.slices();
                r.wait(r.put(0, (memory.window(), 0), n, (memory.window(), 0), 1, Some((sig.as_window(), 0, 1))));
                assert_eq!(fake.slices() - before, slices, "put {i}");
            } else {
                sig.wait(r, 0, i as u64 + 1);
                assert!(memory.bytes(0, n).iter().all(|&b| b == i as u8 + 1), "put {i}");
            }
            r.job.barrier.wait();
        }
    });
    fake.block(0, false);
    fake.check();
}

/// Queues that go again: launches that waited come up and end, and later ones carry.
#[test]
fn when_queues_go_again_the_copy_kernel_takes_over() {
    let fake = Fake::take();
    let flags = Signals::NeverReset.set_up(&fake);
    let before = fake.commands();
    fake.block(0, true);
    let arrived = AtomicU64::new(0);
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let traffic = Traffic::new(&fake, r, 0, Signals::NeverReset, flags, &arrived);
        (0..4).for_each(|_| traffic.bursts());
        if r.rank == 0 {
            assert_eq!(fake.commands(), before);
            fake.block(0, false);
        }
        traffic.bursts_until_dispatched(&fake, before);
        traffic.all();
    });
    assert_eq!(fake.launched(), 0);
    fake.check();
}

/// In the application's context the same stands still, which shows that the fake's queues do stand.
#[test]
fn in_the_applications_context_it_stands_still() {
    for transport in ["auto", "staged", "tcp"] {
        let fake = Fake::take();
        fake.set_transport(transport);
        fake.set_issue("own=0,kernel=0");
        let flags = Signals::NeverReset.set_up(&fake);
        job(2, 1, |r| {
            let _context = fake.enter(0);
            let src = fake.window(r, 0, 8, 0);
            let dst = fake.window(r, 0, 8, 0);
            let sig = fake.signals(r, 0, 1, flags);
            src.set(0, 7);
            r.job.barrier.wait();
            fake.block(0, true);
            r.job.barrier.wait();
            let put = (r.rank == 0)
                .then(|| r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 0), 1, Some((sig.as_window(), 0, 1))));
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                // Through host memory it is locally complete before the GPU has seen it.
                assert!(transport != "auto" || put.is_none_or(|put| !test(r, put)), "{transport}: it is done");
                assert!(r.rank == 0 || sig.get(0) == 0, "{transport}: it arrived");
            }
            r.job.barrier.wait();
            fake.block(0, false);
            match put {
                Some(put) => r.wait(put),
                None => {
                    sig.wait(r, 0, 1);
                    assert_eq!(dst.get(0), 7);
                }
            }
        });
        fake.check();
    }
}
