//! The software NIC over GPU memory, through the GIN tables: the structures, windows' records and signals lie on the
//! GPU, queues are pinned.

use crate::harness::Fake;
use crate::support::common::job;
use crate::support::kernel::{Kernel, WAYS};
use crate::support::nic::{read, value, write, Ask, Raw, Status, DUMP};
use nccl_plugin_api::*;
use std::sync::atomic::{AtomicU64, Ordering};

const WORDS: usize = 4096;
/// Entries of so many rounds go round the rings.
const ROUNDS: u64 = 100;

#[test]
fn kernels_find_their_way_on_gpus() {
    for (transport, gpus, through, ringing) in [
        ("auto", 1, WAYS[0], "doorbell"),
        ("auto", 2, WAYS[1], "doorbell"),
        ("staged", 1, WAYS[2], "doorbell"),
        ("tcp", 2, WAYS[3], "proxy"),
        ("auto", 2, WAYS[5], "doorbell"),
        // Completions are counted in the structures, on the GPU.
        ("auto", 2, WAYS[5], "free-flow"),
        ("tcp", 1, WAYS[4], "free-flow"),
        ("staged", 2, WAYS[5], "free-flow"),
        // A kernel that knows neither: its entries are found, and it finds completion entries.
        ("auto", 1, WAYS[3], "free-flow"),
        // One that is never told of it.
        ("auto", 1, WAYS[2], "free-flow"),
    ] {
        let fake = Fake::take();
        std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
        std::env::set_var("OXYGIN_GDAKI_RINGING", ringing);
        fake.set_transport(transport);
        job(2, 1, |r| {
            let (peer, gpu) = (1 - r.rank, r.rank as i32 % gpus);
            let _context = fake.enter(gpu);
            let on_gpu = |at: u64| fake.peek(at) as u64;
            let [src, dst] = [(); 2].map(|()| fake.alloc(gpu, 8 * WORDS, false));
            let [(_, src_gin), (_, dst_gin)] = [src, dst].map(|at| through.register(r, at, 8 * WORDS, PTR_CUDA));
            // SAFETY: inside a window of that many words.
            let word = |at: u64, i: usize| unsafe { &*((on_gpu(at) + 8 * i as u64) as *const AtomicU64) };
            let held = |rank: usize, i: usize| ((i as u64) << 8) + rank as u64 + 1;
            (0..WORDS).for_each(|i| word(src, i).store(held(r.rank, i), Ordering::Release));
            assert!([src_gin, dst_gin].iter().all(|gin| on_gpu(*gin) != 0), "records are on the GPU");
            // Pinned memory has one address for both.
            let see = |at| Some(on_gpu(at)).filter(|seen| *seen != 0).unwrap_or(at);
            let kernel = Kernel::new(r, through, Ask { contexts: 2, ..Ask::default() }, &see);
            assert!(on_gpu(kernel.handle) != 0, "structures are on the GPU");
            let is_counted = ringing == "free-flow" && through.nccl > "2.31";
            assert_eq!(kernel.qp(0, peer).view.is_counted, is_counted, "{through:?}");
            r.job.barrier.wait();
            for round in 1..=ROUNDS {
                let put = write(kernel.at(dst_gin, peer, 0), kernel.own(src_gin, 0), 512);
                kernel.post_counted((0, peer), &[put, kernel.add_signal(0, peer, 2, 1)], 1);
                let to = kernel.at(dst_gin, peer, 800);
                kernel.qp(1, peer).post(&[value(to, &[77; 12]), kernel.add_signal(1, peer, 3, 10)]);
                kernel.wait_signal(0, 2, round);
                kernel.wait_signal(1, 3, 10 * round);
            }
            kernel.wait_counter(0, 1, ROUNDS);
            for round in 1..=5 {
                // Every add of the round before is in; the engine may not count on with a sum of its own.
                kernel.reset_signal(0, 2);
                r.job.barrier.wait();
                kernel.qp(0, peer).post(&[kernel.add_signal(0, peer, 2, 7)]);
                kernel.wait_signal(0, 2, 7);
                assert_eq!(kernel.signal(0, 2), 7, "{transport}, {gpus} GPUs, reset {round}");
                r.job.barrier.wait();
            }
            let got = read(kernel.at(src_gin, peer, 8000), kernel.own(dst_gin, 16_000), 64);
            kernel.qp(0, peer).post(&[got, Raw::new(DUMP, 0).data(kernel.sink(0).0, 0, 1)]);
            assert_eq!(kernel.qp(0, peer).flush(), Status::Good);
            let got = |i: usize| word(dst, i).load(Ordering::Acquire);
            (0..64).for_each(|i| assert_eq!(got(i), held(peer, i), "{transport}, {gpus} GPUs, word {i}"));
            (0..8).for_each(|i| assert_eq!(got(2000 + i), held(peer, 1000 + i)));
            assert_eq!([100, 101, 102].map(got), [0x4d4d_4d4d_4d4d_4d4d, 0x4d4d_4d4d, 0]);
            assert!(!kernel.has_error());
            r.job.barrier.wait();
            kernel.destroy();
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// Device code of GDAKI takes any signal that is sent behind a completion to tell of the put, whoever sends it: so a
/// put is complete when it is in its place, and not while it is in a socket or on its way to the GPU there.
#[test]
fn what_a_kernel_knows_to_be_complete_is_in_its_place() {
    for transport in ["tcp", "staged", "auto"] {
        let fake = Fake::take();
        std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
        std::env::set_var("OXYGIN_GDAKI_RINGING", "free-flow");
        fake.set_transport(transport);
        let places = [(); 2].map(|()| std::sync::OnceLock::new());
        job(2, 1, |r| {
            let (peer, gpu, through) = (1 - r.rank, r.rank as i32, WAYS[5]);
            let _context = fake.enter(gpu);
            let on_gpu = |at: u64| fake.peek(at) as u64;
            let [src, dst] = [(); 2].map(|()| fake.alloc(gpu, 8 * WORDS, false));
            let [(_, src_gin), (_, dst_gin)] = [src, dst].map(|at| through.register(r, at, 8 * WORDS, PTR_CUDA));
            places[r.rank].set(dst).expect("once");
            // SAFETY: inside a window of that many words.
            let word = |at: u64, i: usize| unsafe { &*((on_gpu(at) + 8 * i as u64) as *const AtomicU64) };
            let see = |at| Some(on_gpu(at)).filter(|seen| *seen != 0).unwrap_or(at);
            let kernel = Kernel::new(r, through, Ask::default(), &see);
            r.job.barrier.wait();
            let its = *places[peer].get().expect("set before the barrier");
            for round in 1..=ROUNDS {
                let bytes = [8, 512, 9000, 8 * WORDS as u64][round as usize % 4];
                (0..WORDS).for_each(|i| word(src, i).store(round << 16 | i as u64, Ordering::Release));
                let put = write(kernel.at(dst_gin, peer, 0), kernel.own(src_gin, 0), bytes as u32);
                let signals: &[_] = if round % 3 == 0 { &[kernel.add_signal(0, peer, 2, 1)] } else { &[] };
                kernel.qp(0, peer).post(&[&[put], signals].concat());
                assert_eq!(kernel.qp(0, peer).flush(), Status::Good);
                let is_there = |i: usize| word(its, i).load(Ordering::Acquire) == round << 16 | i as u64;
                assert!((0..bytes as usize / 8).all(is_there), "{transport}: {bytes} bytes of round {round}");
            }
            assert!(!kernel.has_error());
            r.job.barrier.wait();
            kernel.destroy();
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// Copy kernels count completions with what they carry out, a put and its signal as the two entries that they are;
/// what they leave undone goes by the stream, and the engine counts it. Whoever does, each entry is counted once.
#[test]
fn every_entry_is_counted_once() {
    const POSTS: u64 = 1500;
    for (gpus, most_commands) in [(1, 0), (1, 40), (2, 40)] {
        let fake = Fake::take();
        std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
        std::env::set_var("OXYGIN_GDAKI_RINGING", "free-flow");
        fake.set_transport("auto");
        fake.set_issue("kernel=4096");
        fake.kernel_limits(0, most_commands);
        job(2, 1, |r| {
            let (peer, gpu, before) = (1 - r.rank, r.rank as i32 % gpus, fake.credits());
            let _context = fake.enter(gpu);
            let on_gpu = |at: u64| fake.peek(at) as u64;
            let through = WAYS[5];
            let [src, dst] = [(); 2].map(|()| fake.alloc(gpu, 8 * WORDS, false));
            let [(_, src_gin), (_, dst_gin)] = [src, dst].map(|at| through.register(r, at, 8 * WORDS, PTR_CUDA));
            let see = |at| Some(on_gpu(at)).filter(|seen| *seen != 0).unwrap_or(at);
            let kernel = Kernel::new(r, through, Ask { contexts: 2, ..Ask::default() }, &see);
            r.job.barrier.wait();
            for i in 0..POSTS {
                let (context, at) = (i as usize % 2, 8 * (i % 64));
                let queue = kernel.qp(context, peer);
                let put = |len| write(kernel.at(dst_gin, peer, at), kernel.own(src_gin, at), len);
                match i % 20 {
                    3 => queue.post(&[put(512)]),
                    7 => queue.post(&[kernel.add_signal(context, peer, 3, 1)]),
                    11 => queue.post(&[put(16 << 10), kernel.add_signal(context, peer, 2, 1)]),
                    13 => queue.post(&[value(kernel.at(dst_gin, peer, at), &[7; 8]), put(8)]),
                    _ => queue.post(&[put(8), kernel.add_signal(context, peer, 2, 1)]),
                };
                if i % 200 == 0 {
                    assert_eq!(queue.flush(), Status::Good);
                }
            }
            (0..2).for_each(|context| assert_eq!(kernel.qp(context, peer).flush(), Status::Good));
            r.job.barrier.wait();
            for context in 0..2 {
                let queue = kernel.qp(context, peer);
                let entries = queue.reserved();
                assert!(queue.view.is_counted);
                let stands = queue.standing(0);
                assert!(stands.ends_with(&format!(" {entries} seen")), "{gpus} GPUs: {stands}");
            }
            assert!(!kernel.has_error());
            // Memory of a set is its own GPU's alone.
            let (given, is_one) = (fake.credits() - before, gpus == 1);
            assert!(if is_one { given > 0 } else { given == 0 }, "{given} by copy kernels of {gpus} GPUs");
            r.job.barrier.wait();
            kernel.destroy();
            r.job.barrier.wait();
        });
        fake.check();
    }
}
