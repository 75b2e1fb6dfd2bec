//! The soft fabric between ranks of one host, through the RMA v16 table.

use crate::support::common::*;
use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::MR_FLAG_FORCE_SO;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ptr::null_mut;

fn pattern(rank: usize, i: usize) -> u64 {
    (rank as u64) << 32 | i as u64
}

/// Every rank puts blocks of many sizes to every rank (itself included), each with a signal, and reads them back.
fn all_to_all(nranks: usize) {
    let sizes = [0usize, 1, 7, 8, 64, 4095, 4096, 4097, 100_000, 3 << 20];
    let block = (3 << 20) / 8 + 1;
    job(nranks, 2, |r| {
        let mut src = r.window(block, 0);
        let dst = r.window(block * nranks, 0);
        let back = r.window(block, 0);
        let sig = r.window(nranks * 2, 1);
        for (i, w) in src.words.iter_mut().enumerate() {
            *w = pattern(r.rank, i);
        }
        for (round, &size) in sizes.iter().enumerate() {
            let requests: Vec<_> = (0..nranks)
                .map(|p| {
                    r.put(
                        1,
                        (&src, 0),
                        size,
                        (&dst, (r.rank * block * 8) as u64),
                        p,
                        Some((&sig, r.rank as u64 * 8, 1)),
                    )
                })
                .collect();
            requests.into_iter().for_each(|q| r.wait(q));
            for p in 0..nranks {
                r.wait_signal(&sig, p, round as u64 + 1);
                for i in 0..size / 8 {
                    assert_eq!(dst.words[p * block + i], pattern(p, i), "from {p}, {size} bytes, word {i}");
                }
            }
            r.job.barrier.wait();
            for p in 0..nranks {
                r.wait(r.get(0, (&src, 0), size, (&back, 0), p));
                for i in 0..size / 8 {
                    assert_eq!(back.words[i], pattern(p, i), "got from {p}, {size} bytes, word {i}");
                }
            }
            r.job.barrier.wait();
        }
    });
}

#[test]
fn two_ranks() {
    all_to_all(2);
}

#[test]
fn four_ranks() {
    all_to_all(4);
}

/// Small and large puts before a strong signal: when it is visible, all of them are.
#[test]
fn strong_signals_follow_everything() {
    job(2, 1, |r| {
        let rounds = 2000u64;
        let mut src = r.window(1 << 16, 0);
        let dst = r.window(1 << 16, 0);
        let sig = r.window(2, 1);
        let peer = 1 - r.rank;
        for round in 1..=rounds {
            if r.rank == 0 {
                src.words.fill(round);
                let mut q = vec![r.put(0, (&src, 0), 8, (&dst, 0), peer, None)];
                if round % 16 == 0 {
                    q.push(r.put(0, (&src, 0), 400_000, (&dst, 64), peer, None));
                }
                q.push(r.put(0, (&src, 0), 24, (&dst, 8), peer, None));
                q.push(r.put(0, (&src, 0), 0, (&dst, 0), peer, Some((&sig, 0, 1))));
                q.into_iter().for_each(|q| r.wait(q));
                r.wait_signal(&sig, 1, round);
            } else {
                r.wait_signal(&sig, 0, round);
                assert_eq!(&dst.words[..4], &[round; 4]);
                if round % 16 == 0 {
                    assert!(dst.words[8..50_008].iter().all(|&w| w == round));
                }
                r.wait(r.put(0, (&src, 0), 0, (&dst, 0), peer, Some((&sig, 8, 1))));
            }
        }
    });
}

/// Many unfinished operations, many senders, one signal.
#[test]
fn fan_in_adds_up() {
    job(4, 2, |r| {
        let n = 20_000;
        let src = r.window(8, 0);
        let sig = r.window(1, 1);
        let requests: Vec<_> = (0..n).map(|i| r.put(i % 2, (&src, 0), 0, (&src, 0), 0, Some((&sig, 0, 3)))).collect();
        requests.into_iter().for_each(|q| r.wait(q));
        if r.rank == 0 {
            r.wait_signal(&sig, 0, 3 * 4 * n as u64);
            assert_eq!(sig.words[0], 3 * 4 * n as u64);
        }
    });
}

/// A rank that calls nothing still receives.
#[test]
fn the_helper_thread_receives() {
    job(2, 1, |r| {
        let src = r.window(8, 0);
        let sig = r.window(1, 1);
        if r.rank == 0 {
            for _ in 0..100 {
                r.wait(r.put(0, (&src, 0), 0, (&src, 0), 1, Some((&sig, 0, 1))));
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        } else {
            // SAFETY: an aligned word of the window.
            let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(sig.words.as_ptr().cast_mut()) };
            let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while word.load(std::sync::atomic::Ordering::Acquire) < 100 {
                std::thread::sleep(std::time::Duration::from_millis(1));
                assert!(std::time::Instant::now() < end);
            }
        }
    });
}

/// The set that an operation names decides, whichever of many it is: NCCL makes one for each of its RMA contexts
/// (`NCCL_NUM_RMA_CTX`), and one for each device communicator.
#[test]
fn a_communicator_has_as_many_sets_as_it_is_asked_for() {
    const SETS: usize = 80;
    job(3, 0, |r| {
        let src = r.window(SETS, 0);
        let dst = r.window(3 * SETS, 0);
        let sig = r.window(SETS, MR_FLAG_FORCE_SO);
        let make = || {
            let (mut ctx, mut config) = (null_mut(), ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 });
            // SAFETY: pointers to locals.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx }
        };
        let mut sets: Vec<_> = (0..SETS).map(|_| make()).collect();
        for round in 1..=3 {
            let all = sets.iter().enumerate().flat_map(|(i, set)| {
                let (src, dst, sig) = (&src, &dst, &sig);
                (0..3).map(move |peer| {
                    let (from, to) = (8 * i as u64, 8 * (r.rank * SETS + i) as u64);
                    (set, set.put(0, (src, from), 8, (dst, to), peer, Some((sig, from, 1))))
                })
            });
            all.collect::<Vec<_>>().into_iter().for_each(|(set, request)| set.wait(request));
            (0..SETS).for_each(|i| sets[i].wait_signal(&sig, i, 3 * round));
            r.job.barrier.wait();
            // Others come in the place of some that go.
            for i in (round as usize..SETS).step_by(7) {
                // SAFETY: nothing of it is under way.
                ok(unsafe { T.destroy_context.unwrap()(sets[i].ctx) });
                sets[i] = make();
            }
            r.job.barrier.wait();
        }
        // What is left ends with the communicator.
    });
}
