//! Contexts that call a put complete when it is visible at the peer: on a device whose writes are acknowledged before
//! they come to memory (`lazy_writes`).

use crate::harness::*;
use oxygin::config::Config;
use oxygin::fabric::{Context, ContextSpec};
use oxygin::rma::op::{Op, Put};

/// What word `i` of rank 0's data window holds.
fn held(i: u64) -> u64 {
    0x1000 + i
}

fn ranks(confirms: bool, depth: u32) -> Vec<Rank> {
    let spec = ContextSpec { contexts: 1, queue_depth: depth, traffic_class: None, rank_stride: 1 };
    let config = Config { max_operations: 4096, ..Config::default() };
    let ranks = Job { spec, config, bytes: 1 << 16, words: 1 << 12, confirms, ..Job::default() }.start();
    (0..1 << 13).for_each(|i| ranks[0].data.memory.store(i, held(i as u64)));
    ranks
}

/// A put of so many words from the same place of rank 0's data window, to rank 1's data or signal window.
fn words(ranks: &[Rank], at: u64, n: u64, to_signals: bool) -> Put {
    let to = if to_signals { &ranks[1].signals } else { &ranks[1].data };
    let plain = put(&ranks[0], 8 * at, &ranks[1], 8 * at, 8 * n);
    Put { rkey: to.registration.rkey, remote: to.memory.base() + 8 * at, ..plain }
}

fn is_there(ranks: &[Rank], at: u64, n: u64, in_signals: bool) -> bool {
    let to = if in_signals { &ranks[1].signals } else { &ranks[1].data };
    (at..at + n).all(|i| to.memory.word(i as usize) == held(i))
}

#[test]
fn an_acknowledged_put_is_not_visible_unless_it_is_confirmed() {
    for confirms in [false, true] {
        let fake = Fake::take();
        fake.set("lazy_writes", 10_000);
        let ranks = ranks(confirms, 0);
        let seq = start_put(&ranks[0], 0, 1, &words(&ranks, 3, 5, false));
        finish(&ranks[0].contexts[0], 1, seq);
        assert_eq!(is_there(&ranks, 3, 5, false), confirms);
        drop(ranks);
        fake.check_clean();
    }
}

/// Puts of many sizes into two windows, some with signals, one by one and in batches: each is visible when it is
/// complete. With the devices and faults that `set` asks for.
fn every_put_is_visible(depth: u32, set: impl Fn(&Fake)) {
    let fake = Fake::take();
    fake.set("lazy_writes", 10_000);
    set(&fake);
    let ranks = ranks(true, depth);
    let context = &ranks[0].contexts[0];
    let mut random = 1_u64;
    let mut below = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % n
    };
    let (mut at, mut signals) = ([0_u64; 2], 0);
    let mut sent = Vec::new();
    while at.iter().all(|at| *at < 3_500) {
        let most = if below(8) == 0 { 300 } else { 10 };
        let n = 1 + below(most);
        let window = below(3) / 2;
        let has_signal = below(4) == 0;
        let mut op = words(&ranks, at[window as usize], n, window == 1);
        if has_signal {
            // A word of its own, behind all that is put.
            op.signal = signal(&ranks[1], 4_095, 1);
            signals += 1;
        }
        sent.push((op, at[window as usize], n, window == 1));
        at[window as usize] += n;
    }
    let mut rest = &sent[..];
    while !rest.is_empty() {
        let (batch, behind) = rest.split_at((1 + below(40) as usize).min(rest.len()));
        rest = behind;
        let ops: Vec<Op> = batch.iter().map(|(op, ..)| Op::Put(*op)).collect();
        let mut posted = 0;
        let mut seqs = Vec::new();
        while posted < ops.len() {
            // SAFETY: the windows outlive the operations.
            let taken = unsafe { context.post(1, &ops[posted..]) }.unwrap();
            for i in 0..taken.taken {
                let number = taken.last.0.wrapping_sub((taken.taken - 1 - i) as u32);
                seqs.push(oxygin::rma::seq::Seq(number));
            }
            posted += taken.taken;
            if taken.taken == 0 {
                context.progress().unwrap();
                ranks[1].contexts[0].progress().unwrap();
            }
        }
        for (seq, (_, at, n, in_signals)) in seqs.into_iter().zip(batch) {
            // Where signals go by message the peer takes them.
            until("a completion", || {
                ranks[1].contexts[0].progress().unwrap();
                context.test(1, seq).unwrap()
            });
            assert!(is_there(&ranks, *at, *n, *in_signals), "{n} words at {at}");
        }
    }
    until("all signals", || {
        ranks[1].contexts[0].progress().unwrap();
        ranks[1].signals.memory.word(4_095) == signals
    });
    drop(ranks);
    fake.check_clean();
}

#[test]
fn every_put_is_visible_when_it_is_complete() {
    every_put_is_visible(0, |_| ());
    every_put_is_visible(4, |_| ());
    // Pieces of a put; queues that take a part of a chain; completions that come late.
    every_put_is_visible(8, |fake| fake.set("max_msg_sz", 256));
    for every in 2..9 {
        every_put_is_visible(16, |fake| fake.set("enomem_every", every));
    }
    every_put_is_visible(16, |fake| fake.set("late", 1));
}

#[test]
fn so_it_is_where_signals_go_by_message() {
    // Credits are writes, too, which nothing pushes.
    every_put_is_visible(0, |fake| {
        fake.set("lazy_writes", 5);
        fake.set("atomic_cap", 0);
    });
    for every in 2..6 {
        every_put_is_visible(16, |fake| {
            fake.set("lazy_writes", 5);
            fake.set("atomic_cap", 0);
            fake.set("enomem_every", every);
        });
    }
}

#[test]
fn a_key_that_is_refused_names_the_put() {
    let fake = Fake::take();
    let ranks = ranks(true, 0);
    let good = start_put(&ranks[0], 0, 1, &words(&ranks, 0, 4, false));
    finish(&ranks[0].contexts[0], 1, good);
    let bad = Put { rkey: 0x7777, ..words(&ranks, 16, 4, false) };
    let seq = start_put(&ranks[0], 0, 1, &bad);
    let error = failure(&ranks[0].contexts[0], 1, seq);
    assert!(error.message().contains("a put of 32 bytes"), "{error}");
    drop(ranks);
    fake.check_clean();
}
