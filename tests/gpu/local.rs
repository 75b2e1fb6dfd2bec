//! GPU windows between ranks of one host, in one process and as though in several, through the RMA v16 table, on the
//! fake CUDA driver.

use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;

fn pattern(rank: usize, i: usize) -> u64 {
    (rank as u64) << 32 | i as u64
}

/// Every rank, each on its own GPU (`gpus` = ranks) or all on one, puts blocks of many sizes to every rank and reads
/// them back, from and to GPU and host memory.
fn all_to_all(nranks: usize, gpus: usize, signals: Signals, transport: &str) {
    let fake = Fake::take();
    fake.set_transport(transport);
    let flags = signals.set_up(&fake);
    let sizes = [0usize, 1, 4, 7, 8, 64, 4096, 100_000, 3 << 20];
    let block = (3 << 20) / 8 + 1;
    job(nranks, 2, |r| {
        let gpu = (r.rank % gpus) as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, block, 0);
        let dst = fake.window(r, gpu, block * nranks, 0);
        let back = fake.window(r, gpu, block, 0);
        let sig = fake.signals(r, gpu, nranks * 2, flags);
        let mut host_src = r.window(block, 0);
        let host_dst = r.window(block * nranks, 0);
        for i in 0..block {
            src.set(i, pattern(r.rank, i));
            host_src.words[i] = pattern(r.rank, i);
        }
        // NCCL's progress thread has device 0 current.
        let _other = fake.enter(0);
        fake.kernel(1);
        for (round, &size) in sizes.iter().enumerate() {
            for (way, from, to) in [
                (0, src.as_window(), dst.as_window()),
                (1, &host_src, dst.as_window()),
                (2, src.as_window(), &host_dst),
            ] {
                let requests: Vec<_> = (0..nranks)
                    .map(|p| {
                        let at = (r.rank * block * 8) as u64;
                        r.put(1, (from, 0), size, (to, at), p, Some((sig.as_window(), r.rank as u64 * 8, 1)))
                    })
                    .collect();
                requests.into_iter().for_each(|q| r.wait(q));
                for p in 0..nranks {
                    sig.wait(r, p, (round * 3 + way) as u64 + 1);
                    for i in 0..size / 8 {
                        let word = if way == 2 { host_dst.words[p * block + i] } else { dst.get(p * block + i) };
                        assert_eq!(word, pattern(p, i), "way {way} from {p}, {size} bytes, word {i}");
                    }
                }
                r.job.barrier.wait();
                for i in 0..block * nranks {
                    dst.set(i, 0);
                }
                r.job.barrier.wait();
            }
            for p in 0..nranks {
                r.wait(r.get(0, (src.as_window(), 0), size, (back.as_window(), 0), p));
                for i in 0..size / 8 {
                    assert_eq!(back.get(i), pattern(p, i), "got from {p}, {size} bytes, word {i}");
                }
            }
            r.job.barrier.wait();
        }
        fake.kernel(-1);
    });
    fake.check();
}

#[test]
fn two_ranks_on_two_gpus() {
    KINDS.into_iter().for_each(|k| all_to_all(2, 2, k, "auto"));
}

#[test]
fn four_ranks_on_one_gpu() {
    all_to_all(4, 1, Signals::NeverReset, "auto");
}

#[test]
fn through_host_memory() {
    all_to_all(2, 2, Signals::ReadBack, "staged");
}

#[test]
fn four_ranks_through_host_memory() {
    all_to_all(4, 2, Signals::NeverReset, "staged");
}

/// A strong signal follows everything before it, in GPU memory and in host memory.
#[test]
fn strong_signals_follow_everything() {
    for (signals, transport) in KINDS.into_iter().flat_map(|k| [(k, "auto"), (k, "staged")]) {
        let fake = Fake::take();
        fake.set_transport(transport);
        let flags = signals.set_up(&fake);
        job(2, 1, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let rounds = 150u64;
            let src = fake.window(r, gpu, 1 << 16, 0);
            let dst = fake.window(r, gpu, 1 << 16, 0);
            let sig = fake.signals(r, gpu, 2, flags);
            let mut host = r.window(16, 0);
            let host_dst = r.window(16, 0);
            let host_sig = r.window(2, 1);
            let peer = 1 - r.rank;
            for round in 1..=rounds {
                let on_host = round % 3 == 0;
                let q = |sig: &GpuWindow, to: u64| match on_host {
                    true => r.put(0, (&host, 0), 0, (&host, 0), peer, Some((&host_sig, to, 1))),
                    false => r.put(0, (&host, 0), 0, (&host, 0), peer, Some((sig.as_window(), to, 1))),
                };
                let wait = |i: usize| match on_host {
                    true => r.wait_signal(&host_sig, i, round / 3),
                    false => sig.wait(r, i, round - round / 3),
                };
                if r.rank == 0 {
                    (0..8).for_each(|i| src.set(i, round));
                    let mut all = vec![r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 0), peer, None)];
                    if round % 16 == 0 {
                        all.push(r.put(0, (src.as_window(), 0), 400_000, (dst.as_window(), 64), peer, None));
                    }
                    all.push(r.put(0, (src.as_window(), 0), 24, (&host_dst, 0), peer, None));
                    all.push(q(&sig, 0));
                    all.into_iter().for_each(|q| r.wait(q));
                    wait(1);
                } else {
                    wait(0);
                    assert!((0..8).all(|i| dst.get(i) == round));
                    assert_eq!(&host_dst.words[..3], &[round; 3]);
                    r.wait(q(&sig, 8));
                }
            }
            host.words.clear();
        });
        fake.check();
    }
}

/// Many unfinished operations, many senders, one signal; the receiver does nothing.
#[test]
fn fan_in_adds_up() {
    let runs = KINDS.into_iter().zip([2000, 2000, 200]).flat_map(|(k, n)| [(k, n, "auto"), (k, n, "staged")]);
    for (signals, n, transport) in runs {
        let fake = Fake::take();
        fake.set_transport(transport);
        traffic::fan_in(&fake, signals, n, |r, sig, sum, requests| {
            requests.into_iter().for_each(|q| r.wait(q));
            if r.rank == 0 {
                sig.wait(r, 0, sum);
            }
        });
    }
}

/// A kernel sets a signal back to 0 and the next one counts from there.
#[test]
fn kernels_reset_signals() {
    for signals in [Signals::Added, Signals::ReadBack] {
        let fake = Fake::take();
        let flags = signals.set_up(&fake);
        job(2, 1, |r| {
            let _context = fake.enter(0);
            let src = fake.window(r, 0, 8, 0);
            let sig = fake.signals(r, 0, 2, flags);
            for _ in 0..100 {
                if r.rank == 0 {
                    for value in [2, 3] {
                        r.wait(r.put(
                            0,
                            (src.as_window(), 0),
                            0,
                            (src.as_window(), 0),
                            1,
                            Some((sig.as_window(), 0, value)),
                        ));
                    }
                    sig.wait(r, 1, 1);
                    sig.set(1, 0);
                } else {
                    sig.wait(r, 0, 5);
                    assert_eq!(sig.get(0), 5);
                    sig.set(0, 0);
                    r.wait(r.put(0, (src.as_window(), 0), 0, (src.as_window(), 0), 0, Some((sig.as_window(), 8, 1))));
                }
            }
        });
        fake.check();
    }
}

/// A driver that refuses batches of copies: one by one, and nothing is lost.
#[test]
fn copies_go_one_by_one_where_batches_are_refused() {
    let fake = Fake::take();
    fake.settings(false, 200);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, 64, 0);
        let dst = fake.window(r, 0, 64, 0);
        if r.rank == 0 {
            (0..64).for_each(|i| src.set(i, i as u64 + 1));
            fake.inject("cuMemcpyBatchAsync", 1);
            let put = |i: u64| r.put(0, (src.as_window(), i * 8), 8, (dst.as_window(), i * 8), 1, None);
            let requests: Vec<_> = (0..64).map(put).collect();
            requests.into_iter().for_each(|q| r.wait(q));
        }
        r.job.barrier.wait();
        assert!(r.rank == 0 || (0..64).all(|i| dst.get(i) == i as u64 + 1));
    });
    fake.check();
}

/// After `inject` an operation fails, and nothing hangs: the first, or a later one where the fault has to be found out.
fn fails(at_once: bool, inject: impl Fn(&Fake) + Sync) {
    let fake = Fake::take();
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, 8, 0);
        let dst = fake.window(r, 0, 8, 0);
        if r.rank == 0 {
            inject(&fake);
            let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
            let put_fails = || {
                let mut request = null_mut();
                // SAFETY: registered windows.
                let put = unsafe {
                    let (src, dst) = (src.as_window().handle, dst.as_window().handle);
                    T.iput.unwrap()(r.ctx, 0, 0, src, 8, 0, dst, 1, 0, &mut request)
                };
                put != NcclResult::SUCCESS || has_failed(r, request)
            };
            while !put_fails() {
                assert!(!at_once && std::time::Instant::now() < end, "an operation came out well");
            }
            let mut error = false;
            // SAFETY: plain call.
            ok(unsafe { T.query_last_error.unwrap()(r.ctx, &mut error) });
            assert!(error);
        }
        r.job.barrier.wait();
        fake.destroy_context(0, false);
    });
    fake.check();
}

fn has_failed(r: &Rank, request: *mut c_void) -> bool {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let mut done = 0;
        // SAFETY: plain call.
        let result = unsafe { T.test.unwrap()(r.coll, request, &mut done) };
        if result != NcclResult::SUCCESS {
            assert_eq!(result, NcclResult::UNHANDLED_CUDA_ERROR);
            return true;
        }
        if done != 0 {
            return false;
        }
        assert!(std::time::Instant::now() < end, "neither done nor failed");
    }
}

#[test]
fn a_refused_copy_fails_the_operation() {
    fails(true, |fake| fake.inject("cuMemcpyAsync", 1));
}

#[test]
fn a_fault_on_the_gpu_fails_the_operation() {
    fails(true, |fake| fake.inject("gpu", 700));
}

#[test]
fn a_destroyed_context_fails_the_operation() {
    fails(false, |fake| fake.destroy_context(0, true));
}

#[test]
fn memory_that_cannot_be_a_window_is_refused() {
    let fake = Fake::take();
    job(1, 1, |r| {
        let _context = fake.enter(0);
        let host = [0u64; 8];
        for at in [fake.malloc(0, 64, true), host.as_ptr() as u64] {
            let mut handle = null_mut();
            // SAFETY: refused before anything touches it.
            let result = unsafe { T.reg_mr_sym.unwrap()(r.coll, at as *mut c_void, 64, PTR_CUDA, 0, &mut handle) };
            assert_ne!(result, NcclResult::SUCCESS);
        }
    });
    fake.check();
}

#[test]
fn the_device_takes_gpu_memory_where_there_is_a_driver() {
    let _fake = Fake::take();
    // SAFETY: a plain structure of numbers and pointers.
    let mut props: PropertiesV12 = unsafe { std::mem::zeroed() };
    // SAFETY: a place for the answer.
    ok(unsafe { T.get_properties.unwrap()(0, &mut props) });
    // DMA-BUFs too: NCCL refuses windows of several segments elsewhere.
    assert_eq!(props.ptr_support, PTR_HOST | PTR_CUDA | nccl_plugin_api::PTR_DMABUF);
}

/// A context is destroyed while the GPU copies out of its caller's memory: once it is gone the memory may go, too.
#[test]
fn destroying_a_context_waits_for_copies_out_of_its_memory() {
    const BYTES: usize = 8 << 10;
    for transport in ["auto", "staged"] {
        let fake = Fake::take();
        fake.set_issue("kernel=0");
        fake.set_transport(transport);
        let released = std::sync::atomic::AtomicBool::new(false);
        job(2, 1, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, BYTES / 8, 0);
            let dst = fake.window(r, gpu, BYTES / 8, 0);
            let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            let mut ctx = std::ptr::null_mut();
            // SAFETY: pointers to locals; a collective call.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let other = Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
            let put = |n| other.put(0, (src.as_window(), 0), n, (dst.as_window(), 0), 1 - r.rank, None);
            other.wait(put(8));
            r.job.barrier.wait();
            if r.rank == 0 {
                fake.hold(BYTES);
                put(BYTES);
                let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
                while !fake.is_holding() {
                    // SAFETY: plain call.
                    ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                    assert!(std::time::Instant::now() < end, "{transport}: no copy after 60 s");
                }
            }
            r.job.barrier.wait();
            if r.rank == 1 {
                std::thread::sleep(std::time::Duration::from_millis(100));
                released.store(true, std::sync::atomic::Ordering::SeqCst);
                fake.hold(0);
            }
            // SAFETY: destroyed once.
            ok(unsafe { T.destroy_context.unwrap()(ctx) });
            assert!(released.load(std::sync::atomic::Ordering::SeqCst), "{transport}: the copy is still on its way");
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// One rank has found its way for host memory before there was any GPU memory, the other one goes by the GPU since:
/// what the first one gets from host memory still comes, whether the other had answered it before or not.
#[test]
fn host_memory_is_got_from_a_rank_that_uses_its_gpu() {
    const BYTES: usize = 1 << 20;
    const ROUNDS: u64 = 5;
    for (transport, has_answered) in ["auto", "no-cma", "staged"].into_iter().flat_map(|t| [(t, false), (t, true)]) {
        let fake = Fake::take();
        fake.set_transport(transport);
        job(2, 2, |r| {
            let mut host = r.window(BYTES / 8, 0);
            let back = r.window(BYTES / 8, 0);
            let sig = r.window(1, 0);
            host.words.fill(7);
            r.job.barrier.wait();
            let peer = 1 - r.rank;
            let get = |context| r.get(context, (&host, 0), BYTES, (&back, 0), peer);
            if r.rank == 1 {
                r.wait(r.put(0, (&host, 0), 8, (&back, 0), peer, None));
                if has_answered {
                    r.wait(get(0));
                }
            }
            r.job.barrier.wait();
            let _context = fake.enter(0);
            let src = fake.window(r, 0, 1 << 10, 0);
            let dst = fake.window(r, 0, 1 << 10, 0);
            // Gets are under way when the first put from a GPU comes.
            let gets = || [get(0), get(1)];
            let mut under_way = (r.rank == 1).then(gets);
            for round in 1..=ROUNDS {
                if r.rank == 0 {
                    src.set(0, round);
                    let to = (dst.as_window(), 0);
                    r.wait(r.put(0, (src.as_window(), 0), 8 << 10, to, peer, Some((&sig, 0, 1))));
                    r.wait(r.get(1, (&host, 0), 64, (&back, 0), peer));
                } else {
                    under_way.take().unwrap_or_else(gets).into_iter().for_each(|q| r.wait(q));
                    assert!(back.words.iter().all(|&w| w == 7), "{transport}, round {round}");
                    r.wait_signal(&sig, 0, round);
                    assert_eq!(dst.get(0), round);
                }
                r.job.barrier.wait();
            }
        });
        fake.check();
    }
}

/// A context is destroyed whose copies the GPU does not finish: another context between the same ranks goes on
/// meanwhile.
#[test]
fn destroying_a_context_holds_up_no_other() {
    // On the stream for large copies, and on the way to host memory.
    for (transport, bytes) in [("auto", 8 << 20), ("staged", 64 << 10)] {
        let fake = Fake::take();
        fake.set_issue("kernel=0");
        fake.set_transport(transport);
        job(2, 1, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, bytes / 8, 0);
            let dst = fake.window(r, gpu, bytes / 8, 0);
            let (host, host_dst) = (r.window(8, 0), r.window(8, 0));
            let sig = r.window(1, 0);
            let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            let mut ctx = null_mut();
            // SAFETY: pointers to locals; a collective call.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let goes = Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
            let put = |n| goes.put(0, (src.as_window(), 0), n, (dst.as_window(), 0), 1 - r.rank, None);
            goes.wait(put(8));
            r.job.barrier.wait();
            if r.rank == 1 {
                r.wait_signal(&sig, 0, 1);
                r.job.barrier.wait();
                // SAFETY: destroyed once.
                return ok(unsafe { T.destroy_context.unwrap()(ctx) });
            }
            fake.hold(bytes);
            let copies = || fake.calls("cuMemcpyAsync") + fake.calls("cuMemcpyBatchAsync");
            let before = copies();
            put(bytes);
            let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while copies() == before {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                assert!(std::time::Instant::now() < end, "{transport}: no copy after 60 s");
            }
            let [begun, ended] = [(); 2].map(|()| std::sync::atomic::AtomicBool::new(false));
            let ctx = ctx as usize;
            std::thread::scope(|s| {
                s.spawn(|| {
                    begun.store(true, std::sync::atomic::Ordering::SeqCst);
                    // SAFETY: destroyed once.
                    ok(unsafe { T.destroy_context.unwrap()(ctx as *mut c_void) });
                    ended.store(true, std::sync::atomic::Ordering::SeqCst);
                });
                while !begun.load(std::sync::atomic::Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                // Time to get to where it waits.
                std::thread::sleep(std::time::Duration::from_millis(200));
                let (from, to) = match transport {
                    "auto" => (src.as_window(), dst.as_window()),
                    _ => (&host, &host_dst),
                };
                r.wait(r.put(0, (from, 0), 8, (to, 0), 1, Some((&sig, 0, 1))));
                let had_ended = ended.load(std::sync::atomic::Ordering::SeqCst);
                fake.hold(0);
                assert!(!had_ended, "{transport}: the other context came after it");
            });
            r.job.barrier.wait();
        });
        fake.check();
    }
}
