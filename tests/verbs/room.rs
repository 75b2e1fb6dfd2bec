//! Batches, room and payloads: what a context takes, when it takes nothing, and whom that delays.

use crate::harness::*;
use crate::support::logged::{collect, said};
use oxygin::comm::backpressure::Backpressure;
use oxygin::fabric::Posted;
use oxygin::rma::op::{Op, Payload, Put, Value, VALUE_MAX};
use oxygin::rma::seq::Seq;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

fn value(to: &Rank, at: u64, bytes: &[u8], add: u64) -> Op {
    Op::Value(Value {
        payload: Payload::new(bytes).unwrap(),
        rkey: to.data.registration.rkey,
        remote: to.data.memory.base() + at,
        signal: signal(to, 0, add),
        more: false,
    })
}

#[test]
fn a_stopped_peer_delays_nobody_who_talks_to_another() {
    let fake = Fake::take();
    fake.set("devices", 3);
    fake.set("stopped@2", 1);
    let ranks = little_room(3);
    let [a, b, c] = &ranks[..] else { unreachable!() };
    const N: u64 = 3000;
    let started = AtomicU64::new(0);
    std::thread::scope(|s| {
        s.spawn(|| {
            let op = Put { signal: signal(c, 0, 1), ..put(a, 0, c, 0, 8) };
            let last = (0..N).map(|_| {
                // SAFETY: the windows outlive the operations.
                let seq = unsafe { a.contexts[0].put(2, &op) }.unwrap();
                started.fetch_add(1, Ordering::Relaxed);
                seq
            });
            let last = last.last().unwrap();
            finish(&a.contexts[0], 2, last);
        });
        until("the queue to fill", || started.load(Ordering::Relaxed) == 1028);
        // The same context, which has all the room towards the other peer: as gets, and as a batch with a flush.
        let others = s.spawn(|| {
            let gets = [Op::Get(get(a, 1024, b, 0, 8)); 20];
            let posted = post_batch(a, 1, &gets);
            assert_eq!((posted.taken, posted.last), (20, Seq(20)));
            finish(&a.contexts[0], 1, posted.last);
            assert_eq!(a.contexts[0].flushed(1).unwrap(), None);
            // SAFETY: the windows outlive the operations.
            let last = (0..N).map(|_| unsafe { a.contexts[0].get(1, &get(a, 1024, b, 0, 8)) }.unwrap()).last();
            finish(&a.contexts[0], 1, last.unwrap());
        });
        let ended = std::time::Instant::now() + PATIENCE;
        while !others.is_finished() && std::time::Instant::now() < ended {
            std::thread::yield_now();
        }
        let (in_time, stuck) = (others.is_finished(), started.load(Ordering::Relaxed));
        fake.set("stopped@2", 0);
        fake.set("run", 0);
        assert!(in_time, "operations to rank 1 wait for rank 2");
        assert_eq!(stuck, 1028);
    });
    assert_eq!(c.signals.memory.word(0), N);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_batch_is_numbered_in_a_row_and_rung_once() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let ops: Vec<Op> = (0..10u64).map(|i| Op::Put(Put { signal: signal(b, 1, 1), ..put(a, 0, b, 8 * i, 8) })).collect();
    for round in 1..4 {
        let before = fake.count("doorbells");
        let posted = post_batch(a, 1, &ops);
        assert_eq!((posted.taken, posted.last), (10, Seq(10 * round)));
        assert_eq!(fake.count("doorbells") - before, 1);
        finish(&a.contexts[0], 1, posted.last);
    }
    assert_eq!(b.signals.memory.word(1), 30);
    assert_eq!(post_batch(a, 1, &[]), Posted::NONE);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn what_there_is_no_room_for_is_not_taken() {
    let fake = Fake::take();
    fake.set("late", 2);
    let ranks = little_room(2);
    let [a, b] = &ranks[..] else { unreachable!() };
    let ops = vec![Op::Put(Put { signal: signal(b, 1, 1), ..put(a, 0, b, 0, 8) }); 2000];
    assert_eq!(post_batch(a, 1, &ops), Posted { taken: 1024, last: Seq(1024) });
    // Seven of them are with the device: eight work requests, the last of which adds for all.
    assert_eq!(post_batch(a, 1, &ops), Posted { taken: 7, last: Seq(1031) });
    assert_eq!(post_batch(a, 1, &ops), Posted::NONE);
    fake.set("late", 0);
    fake.set("run", 0);
    finish(&a.contexts[0], 1, Seq(1031));
    assert_eq!(b.signals.memory.word(1), 1031);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn who_waits_for_room_names_the_rank_once_and_ends_with_the_communicator() {
    let fake = Fake::take();
    fake.set("devices", 3);
    fake.set("stopped@2", 1);
    let ranks = little_room(3);
    let [a, _, c] = &ranks[..] else { unreachable!() };
    collect();
    let ops = vec![Op::Put(Put { signal: signal(c, 1, 1), ..put(a, 0, c, 0, 8) }); 2000];
    while post_batch(a, 2, &ops).taken > 0 {}
    let closed = AtomicBool::new(false);
    let room = Backpressure { limit: Duration::from_millis(20), operations: 1024 };
    let named = || said(&["rank 2", "for room"]);
    let before = named();
    std::thread::scope(|s| {
        let waits = s.spawn(|| {
            let open = || match closed.load(Ordering::Acquire) {
                true => Err(oxygin::error::Error::usage("closed")),
                false => Ok(()),
            };
            // SAFETY: the windows outlive the operations.
            unsafe { room.start(&a.contexts[0], 2, &ops[0], open) }
        });
        until("the log", || named() > before);
        std::thread::sleep(5 * room.limit);
        closed.store(true, Ordering::Release);
        assert_eq!(waits.join().unwrap().unwrap_err().message(), "closed");
    });
    assert_eq!(named() - before, 1);
    fake.set("stopped@2", 0);
    fake.set("run", 0);
    finish(&a.contexts[0], 2, Seq(1028));
    drop(ranks);
    fake.check_clean();
}

/// Payloads of all lengths, whose operations are gone as soon as they are posted.
fn payloads(fake: &Fake, inlined: i64) {
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    fake.set("late", 2);
    let before = fake.count("inlined");
    let (mut expected, mut sum) = (vec![0u8; 32 * 64], 0);
    for round in 0..3u8 {
        let mut ops: Vec<Op> = Vec::new();
        for i in 0..32u8 {
            // 2, 4, ... 64 bytes in turns.
            let bytes: Vec<u8> = (0..2 * (i + 1)).map(|at| at ^ i ^ (round << 6)).collect();
            expected[64 * i as usize..][..bytes.len()].copy_from_slice(&bytes);
            ops.push(value(b, 64 * u64::from(i), &bytes, 1 + u64::from(i)));
            sum += 1 + u64::from(i);
        }
        let posted = post_batch(a, 1, &ops);
        assert_eq!(posted.taken, 32);
        // All places are taken, but a put needs none.
        let more = post_batch(a, 1, &[value(b, 0, &[1; VALUE_MAX], 0)]);
        assert_eq!(more, Posted::NONE);
        assert_eq!(post_batch(a, 1, &[Op::Put(put(a, 4096, b, 8192, 8))]).taken, 1);
        ops.fill(Op::Put(put(a, 4096, b, 8192, 8)));
        fake.set("late", 0);
        fake.set("run", 0);
        finish(&a.contexts[0], 1, Seq(posted.last.0 + 1));
        fake.set("late", 2);
    }
    let arrived: Vec<u8> = (0..expected.len() / 8).flat_map(|i| b.data.memory.word(i).to_ne_bytes()).collect();
    assert_eq!(arrived, expected);
    assert_eq!(b.signals.memory.word(0), sum);
    assert_eq!(fake.count("inlined") - before, inlined);
    // Nothing and a signal.
    fake.set("late", 0);
    let posted = post_batch(a, 1, &[value(b, 0, &[], 5)]);
    finish(&a.contexts[0], 1, posted.last);
    assert_eq!(b.signals.memory.word(0), sum + 5);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn short_payloads_go_inside_work_requests() {
    let fake = Fake::take();
    // 28 bytes are asked for, so 2, 4, ... 28 fit.
    payloads(&fake, 3 * 14);
}

#[test]
fn devices_that_take_no_payloads_read_them_from_the_bounce_area() {
    let fake = Fake::take();
    fake.set("max_inline", 0);
    payloads(&fake, 0);
}
