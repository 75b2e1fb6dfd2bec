//! Errors of the device, and who sees them.

use crate::harness::{here, on_kernels, Fake, Registered, V14_2};
use crate::support::common::job;
use crate::support::kernel::Kernel;
use crate::support::logged::{collect, lines, listen};
use crate::support::nic::{write, Ask, Raw, Status};
use std::time::{Duration, Instant};

/// Waits until queryLastError says so. A second is what NCCL's user waits at most.
fn sees_within_a_second(has_error: impl Fn() -> bool) {
    let begun = Instant::now();
    while !has_error() {
        assert!(begun.elapsed() < Duration::from_secs(1), "no error after {:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn warned(words: &[&str]) -> usize {
    let is_one =
        |line: &&(log::Level, String)| line.0 == log::Level::Warn && words.iter().all(|word| line.1.contains(word));
    lines().iter().filter(is_one).count()
}

#[test]
fn a_wrong_key_is_seen_where_it_was_used_and_other_contexts_go_on() {
    let fake = Fake::take();
    collect();
    on_kernels(2, V14_2, Ask { contexts: 2, ..Ask::default() }, |r, kernel, src, dst| {
        listen();
        r.job.barrier.wait();
        assert!(!kernel.has_error());
        r.job.barrier.wait();
        if r.rank == 0 {
            let (key, _) = kernel.at(dst.gin, 1, 0);
            let wrong = write((key ^ 0x5500, 0), kernel.own(src.gin, 0), 8);
            kernel.qp(0, 1).post(&[wrong, Raw::new(0, 0)]);
            // Remote access error, and what is behind it is flushed.
            assert_eq!(kernel.qp(0, 1).wait(0), Status::Failed { syndrome: 0x13 });
            assert_eq!(kernel.qp(0, 1).wait(1), Status::Failed { syndrome: 0x05 });
            sees_within_a_second(|| kernel.has_error());
            assert!(kernel.has_error(), "it stays");
            // The same rank's other context, and another peer of the same one.
            src.set(0, 9);
            for (context, peer) in [(1, 1), (0, 0)] {
                let put = write(kernel.at(dst.gin, peer, 8), kernel.own(src.gin, 0), 8);
                kernel.qp(context, peer).post(&[put, kernel.add_signal(context, peer, 0, 1)]);
                assert_eq!(kernel.qp(context, peer).flush(), Status::Good);
            }
        } else {
            // Its device refused what the peer asked for, and says so.
            sees_within_a_second(|| kernel.has_error());
            kernel.wait_signal(1, 0, 1);
            assert_eq!(dst.get(1), 9);
        }
        r.job.barrier.wait();
        kernel.destroy();
    });
    assert_eq!(warned(&["queue pair", "of context 0 towards rank 1", "entry of its kernel's"]), 1, "{:#?}", lines());
    assert_eq!(warned(&["of context 0 towards rank 0", "refused what the peer asked for"]), 1, "{:#?}", lines());
    fake.check_clean();
}

#[test]
fn a_peer_that_does_not_answer_is_seen() {
    let fake = Fake::take();
    on_kernels(2, V14_2, Ask { counters: 2, ..Ask::default() }, |r, kernel, src, dst| {
        r.job.barrier.wait();
        if r.rank == 0 {
            // Retries exceeded.
            fake.set("mlx5_error_in", 1);
            let put = write(kernel.at(dst.gin, 1, 0), kernel.own(src.gin, 0), 8);
            kernel.post_counted((0, 1), &[put], 1);
            sees_within_a_second(|| kernel.has_error());
            assert_eq!(kernel.qp(0, 1).wait(0), Status::Failed { syndrome: 0x15 });
        }
        r.job.barrier.wait();
        assert_eq!(kernel.has_error(), r.rank == 0);
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.check_clean();
}

#[test]
fn looking_for_errors_is_no_burden() {
    let fake = Fake::take();
    on_kernels(2, V14_2, Ask { contexts: 8, ..Ask::default() }, |r, kernel, _, _| {
        r.job.barrier.wait();
        let commands = fake.count("mlx5_commands");
        r.job.barrier.wait();
        (0..1000).for_each(|_| assert!(!kernel.has_error()));
        r.job.barrier.wait();
        assert_eq!(fake.count("mlx5_commands"), commands, "no queue pair is asked for its state");
        assert_eq!(fake.count("mlx5_born_armed"), 0, "nothing that completes may be taken for an error");
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.check_clean();
}

#[test]
fn a_set_ends_with_entries_that_nobody_has_executed() {
    let fake = Fake::take();
    on_kernels(2, V14_2, Ask { counters: 2, ..Ask::default() }, |r, kernel, src, dst| {
        // What is flushed then goes to memory that is still there: the device ends queues before it.
        fake.set("mlx5_held", 1);
        let put = write(kernel.at(dst.gin, 1 - r.rank, 0), kernel.own(src.gin, 0), 8);
        kernel.qp(0, 1 - r.rank).post(&[put, Raw::new(0, 0)]);
        r.job.barrier.wait();
        assert!(!kernel.has_error());
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.set("mlx5_held", 0);
    fake.check_clean();
}

/// A wrong key of rank 0's, on a device that tells of these events alone. Which ranks see an error within a second.
fn seen_with(fake: &Fake, events: i64) -> [bool; 2] {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    let seen = [AtomicBool::new(false), AtomicBool::new(false)];
    fake.set("mlx5_events", events);
    job(2, 0, |r| {
        listen();
        let (src, dst) = (Registered::new(r, V14_2), Registered::new(r, V14_2));
        let kernel = Kernel::new(r, V14_2, Ask { contexts: 3, counters: 2, ..Ask::default() }, &here);
        r.job.barrier.wait();
        assert!(!kernel.has_error());
        r.job.barrier.wait();
        if r.rank == 0 {
            let (key, _) = kernel.at(dst.gin, 1, 0);
            kernel.qp(2, 1).post(&[write((key ^ 0x5500, 0), kernel.own(src.gin, 0), 8)]);
            assert_eq!(kernel.qp(2, 1).wait(0), Status::Failed { syndrome: 0x13 });
            sees_within_a_second(|| kernel.has_error());
        }
        r.job.barrier.wait();
        std::thread::sleep(Duration::from_millis(200));
        seen[r.rank].store(kernel.has_error(), Relaxed);
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.set("mlx5_events", -1);
    fake.check_clean();
    seen.map(AtomicBool::into_inner)
}

#[test]
fn events_that_a_device_does_not_tell_of_are_done_without() {
    let fake = Fake::take();
    collect();
    // Completions alone: what a responder refuses is seen where it was asked for.
    assert_eq!(seen_with(&fake, 1), [true, false]);
    assert_eq!(warned(&["of context 2 towards rank 1", "entry of its kernel's"]), 1, "{:#?}", lines());
    let refused = |event: &str| lines().iter().filter(|line| line.1.contains(&format!("no events {event}"))).count();
    assert_eq!(["0x00", "0x04", "0x05", "0x10", "0x11"].map(refused), [0, 2, 2, 2, 2], "{:#?}", lines());
    lines().clear();
    // All but one of them.
    assert_eq!(seen_with(&fake, !(1 << 4)), [true, true]);
    lines().clear();
    // None: queue pairs are asked, both of the connection.
    assert_eq!(seen_with(&fake, 0), [true, true]);
    assert_eq!(warned(&["queue pair", "of context 2 towards rank 1 is in state ERR", "; or the device refused"]), 1);
    assert_eq!(refused("0x00"), 2, "{:#?}", lines());
}

#[test]
fn a_completion_that_is_no_error_is_no_failure() {
    let fake = Fake::take();
    fake.set("mlx5_false_alarms", 1);
    on_kernels(2, V14_2, Ask { counters: 2, ..Ask::default() }, |r, kernel, src, dst| {
        let put = write(kernel.at(dst.gin, 1 - r.rank, 0), kernel.own(src.gin, 0), 8);
        kernel.post_counted((0, 1 - r.rank), &[put, kernel.add_signal(0, 1 - r.rank, 0, 1)], 1);
        kernel.wait_counter(0, 1, 1);
        kernel.wait_signal(0, 0, 1);
        (0..10).for_each(|_| assert!(!kernel.has_error()));
        r.job.barrier.wait();
        // What fails later is seen all the same.
        if r.rank == 0 {
            let (key, _) = kernel.at(dst.gin, 1, 0);
            kernel.qp(0, 1).post(&[write((key ^ 0x5500, 0), kernel.own(src.gin, 0), 8)]);
            sees_within_a_second(|| kernel.has_error());
        }
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.check_clean();
}
