//! Additions to one word that leave as one.

use crate::harness::*;
use oxygin::fabric::Context;
use oxygin::rma::op::{Get, Op, Put};
use oxygin::rma::seq::Seq;

/// Posts all of these from rank 0 to rank 1.
fn post_all(ranks: &[Rank], ops: &[Op]) -> Seq {
    let posted = post_batch(&ranks[0], 1, ops);
    assert_eq!(posted.taken, ops.len());
    posted.last
}

/// A put of `len` bytes of the first rank's data, at `at` in both, with a signal.
fn put_signal(ranks: &[Rank], at: u64, len: u64, word: usize, add: u64) -> Op {
    Op::Put(Put { signal: signal(&ranks[1], word, add), ..put(&ranks[0], at, &ranks[1], at, len) })
}

/// What a batch takes: work requests, and what its words have had added.
fn taken(fake: &Fake, ranks: &[Rank], ops: &[Op]) -> (i64, [u64; 2]) {
    let words = || [1, 2].map(|word| ranks[1].signals.memory.word(word));
    let before = (fake.count("work_requests"), words());
    finish(&ranks[0].contexts[0], 1, post_all(ranks, ops));
    until("the signals", || {
        ranks[1].contexts[0].progress().unwrap();
        words() != before.1
    });
    let after = words();
    (fake.count("work_requests") - before.0, [0, 1].map(|i| after[i].wrapping_sub(before.1[i])))
}

#[test]
fn neighbours_to_one_word_add_their_sum_behind_the_data_of_all() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    let op = |at, len, word, add| put_signal(&ranks, at, len, word, add);
    let same: Vec<_> = (0..10).map(|i| op(8 * i, 8, 1, i)).collect();
    assert_eq!(taken(&fake, &ranks, &same), (11, [45, 0]));
    let alone: Vec<_> = (0..10).map(|i| op(0, 0, 1, i)).collect();
    assert_eq!(taken(&fake, &ranks, &alone), (1, [45, 0]), "signals without data");
    let in_turn: Vec<_> = (0..10).map(|i| op(8 * i, 8, 1 + i as usize % 2, 1)).collect();
    assert_eq!(taken(&fake, &ranks, &in_turn), (20, [5, 5]), "neighbours with different words");
    let in_rows: Vec<_> = (0..10).map(|i| op(8 * i, 8, 1 + i as usize / 5, 1)).collect();
    assert_eq!(taken(&fake, &ranks, &in_rows), (12, [5, 5]));
    let wraps = [op(0, 8, 1, u64::MAX), op(0, 8, 1, 3)];
    assert_eq!(taken(&fake, &ranks, &wraps), (3, [2, 0]));
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_signal_waits_for_little_data_only() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    let op = |len| put_signal(&ranks, 0, len, 1, 1);
    assert_eq!(taken(&fake, &ranks, &[op(16 << 10), op(8192)]), (3, [2, 0]), "what is before it does not count");
    assert_eq!(taken(&fake, &ranks, &[op(8), op(8193)]), (4, [2, 0]));
    assert_eq!(taken(&fake, &ranks, &[op(8), op(5000), op(5000)]), (5, [3, 0]), "nor in pieces");
    drop(ranks);
    fake.check_clean();
}

#[test]
fn what_is_no_put_parts_them() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let plain = Op::Put(put(a, 0, b, 0, 8));
    let get = Op::Get(Get {
        local: a.data.memory.base() + 64,
        lkey: a.data.registration.lkey,
        remote: b.data.memory.base(),
        rkey: b.data.registration.rkey,
        len: 8,
        more: false,
    });
    let op = || put_signal(&ranks, 0, 8, 1, 1);
    for between in [plain, get] {
        assert_eq!(taken(&fake, &ranks, &[op(), between, op()]), (5, [2, 0]), "{between:?}");
    }
    drop(ranks);
    fake.check_clean();
}

/// The queue has eight work requests: sums end where it does.
#[test]
fn a_full_queue_ends_a_sum() {
    let fake = Fake::take();
    let ranks = little_room(2);
    fake.set("late", 1);
    for n in 1..40 {
        let ops: Vec<_> = (0..n).map(|i| put_signal(&ranks, 8 * i, 8, 1, 1)).collect();
        let before = ranks[1].signals.memory.word(1);
        finish(&ranks[0].contexts[0], 1, post_all(&ranks, &ops));
        assert_eq!(ranks[1].signals.memory.word(1) - before, n);
    }
    assert_eq!(fake.count("send_queue_full"), 0);
    drop(ranks);
    fake.check_clean();
}

/// A device that takes a part of a chain only: whatever it has taken, each value is added once.
#[test]
fn what_is_refused_is_added_once() {
    for atomic_cap in [1, 0] {
        let fake = Fake::take();
        fake.set("atomic_cap", atomic_cap);
        fake.set("enomem_every", 2);
        fake.set("seed", 7);
        let ranks = Job::default().start();
        let [a, b] = &ranks[..] else { unreachable!() };
        let mut sum = 0;
        for round in 1..200u64 {
            let mut ops = Vec::new();
            for i in 0..round % 13 + 1 {
                let at = 8 * (i % 4);
                a.data.memory.store(at as usize / 8, round * 16 + i);
                let len = if (round + i) % 3 == 0 { 0 } else { 8 };
                ops.push(put_signal(&ranks, at, len, 1, round + i));
                sum += round + i;
            }
            let seq = post_all(&ranks, &ops);
            until("the operations", || {
                b.contexts[0].progress().unwrap();
                a.contexts[0].test(1, seq).unwrap()
            });
            until("the signals", || {
                b.contexts[0].progress().unwrap();
                b.signals.memory.word(1) >= sum
            });
            assert_eq!(b.signals.memory.word(1), sum, "round {round}, atomics {atomic_cap}");
        }
        assert!(fake.count("doorbells") > 250, "chains were cut");
        drop(ranks);
        fake.check_clean();
    }
}

#[test]
fn messages_carry_sums_too() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let ranks = Job::default().start();
    let ops: Vec<_> = (0..10).map(|i| put_signal(&ranks, 8 * i, 8, 1, 1)).collect();
    assert_eq!(taken(&fake, &ranks, &ops), (11, [10, 0]));
    drop(ranks);
    fake.check_clean();
}
