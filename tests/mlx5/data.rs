//! What kernels write into queue pairs of an mlx5 device.

use crate::harness::{here, on_kernels, Fake, V14_2};
use crate::support::common::job;
use crate::support::kernel::{finds_its_way, Kernel, WAYS};
use crate::support::nic::{write, Ask};
use std::time::{Duration, Instant};

#[test]
fn kernels_of_every_nccl_find_their_way() {
    let fake = Fake::take();
    for through in WAYS {
        on_kernels(3, through, Ask { contexts: 2, depth: 64, ..Ask::default() }, |r, kernel, src, dst| {
            finds_its_way(r, &kernel, &src.seen(), &dst.seen());
            assert!(!kernel.has_error());
            r.job.barrier.wait();
            kernel.destroy();
        });
        fake.check_clean();
    }
}

#[test]
fn peers_that_rank_stride_leaves_out_have_no_queue_pairs() {
    let fake = Fake::take();
    let ask = Ask { stride: 2, signals: 2, counters: 0, ..Ask::default() };
    on_kernels(4, V14_2, ask, |r, kernel, src, dst| {
        let (mine, peer) = (r.rank, (r.rank + 2) % 4);
        assert_eq!([0, 1, 2, 3].map(|p| kernel.has(0, p)), [0, 1, 2, 3].map(|p| p % 2 == mine % 2));
        assert_eq!((kernel.has_companion(0, peer), kernel.has_words(0)), (false, [true, false]));
        src.set(1, 77 + mine as u64);
        let put = write(kernel.at(dst.gin, peer, 0), kernel.own(src.gin, 8), 8);
        kernel.qp(0, peer).post(&[put, kernel.add_signal(0, peer, 1, 1)]);
        kernel.wait_signal(0, 1, 1);
        assert_eq!(dst.get(0), 77 + peer as u64);
        r.job.barrier.wait();
        // 2 of 4 ranks, and a responder: 3 queue pairs a rank, 2 completion queues.
        assert_eq!((fake.count("live_mlx5_qps"), fake.count("live_mlx5_cqs")), (12, 8));
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.check_clean();
}

#[test]
fn sets_come_and_go_beside_each_other() {
    let fake = Fake::take();
    on_kernels(2, V14_2, Ask::default(), |r, first, src, dst| {
        let second = Kernel::new(r, V14_2, Ask { contexts: 3, depth: 193, counters: 0, ..Ask::default() }, &here);
        src.set(0, 5);
        for (round, kernel) in [(1, &first), (2, &second)] {
            let put = write(kernel.at(dst.gin, 1 - r.rank, 8 * round), kernel.own(src.gin, 0), 8);
            kernel.qp(0, 1 - r.rank).post(&[put, kernel.add_signal(0, 1 - r.rank, 0, 1)]);
            kernel.wait_signal(0, 0, 1);
            assert_eq!(dst.get(round as usize), 5);
        }
        assert_eq!(second.qp(2, 0).view.size, 256);
        r.job.barrier.wait();
        first.destroy();
        let put = write(second.at(dst.gin, 1 - r.rank, 24), second.own(src.gin, 0), 8);
        second.qp(2, 1 - r.rank).post(&[put, second.add_signal(2, 1 - r.rank, 0, 1)]);
        second.wait_signal(2, 0, 1);
        assert_eq!((dst.get(3), second.has_error()), (5, false));
        r.job.barrier.wait();
        second.destroy();
    });
    fake.check_clean();
}

#[test]
fn a_communicator_ends_its_sets() {
    let fake = Fake::take();
    on_kernels(2, V14_2, Ask::default(), |_, kernel, _, _| std::mem::forget(kernel));
    fake.check_clean();
}

#[test]
fn many_contexts_of_many_ranks_are_made_in_a_second() {
    const RANKS: usize = 64;
    let fake = Fake::take();
    let taken = std::sync::Mutex::new(Duration::ZERO);
    job(RANKS, 0, |r| {
        // The processors are shared by the ranks here, which they are not in a job: only one rank's set is of size.
        r.job.barrier.wait();
        let begun = Instant::now();
        let ask = Ask { contexts: 1, counters: 0, signals: 64, ..Ask::default() };
        let kernel = Kernel::new(r, V14_2, ask, &here);
        r.job.barrier.wait();
        if r.rank == 0 {
            *taken.lock().unwrap() = begun.elapsed();
            let (qps, peers) = (fake.count("live_mlx5_qps"), RANKS * RANKS);
            assert_eq!(qps as usize, peers + RANKS);
        }
        r.job.barrier.wait();
        kernel.destroy();
    });
    // 64 ranks with a context each make four times as many queue pairs as a rank has with 64 peers and 16 contexts.
    let taken = *taken.lock().unwrap();
    println!("{} queue pairs: {taken:?}", RANKS * (RANKS + 1));
    assert!(taken < Duration::from_secs(4), "{taken:?}");
    fake.check_clean();
}
