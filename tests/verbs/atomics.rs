//! Atomic operations over verbs: those that a device carries out, and those that are loops of compare-and-swaps.

use crate::harness::*;
use crate::support::atomics::*;
use crate::support::logged::{collect, lines};
use oxygin::error::Kind;
use oxygin::fabric::{Context, ContextSpec};
use oxygin::rma::atomic::{Atomicity, Atomics, Change, Width};
use oxygin::rma::op::{Op, Put};
use std::sync::atomic::Ordering;

fn signals(of: &Rank) -> Words {
    Words { base: of.signals.memory.base(), key: of.signals.registration.rkey }
}

fn here(of: &Rank, at: u64) -> Words {
    Words { base: of.data.memory.base() + at, key: of.data.registration.lkey }
}

fn read(of: &Rank, at: u64) -> u64 {
    of.data.memory.word(at as usize / 8)
}

#[test]
fn every_change_is_that_of_the_model() {
    let fake = Fake::take();
    // At once; late enough that operations queue up; and with work requests that the device has no room for.
    for (late, enomem) in [(0, 0), (1, 0), (1, 3)] {
        fake.set("late", late);
        fake.set("enomem_every", enomem);
        let ranks = Job { words: 64, ..Default::default() }.start();
        let [a, b] = &ranks[..] else { unreachable!() };
        let context = &a.contexts[0];
        let all = Atomics { host: Atomicity::Fabric, gpu: Atomicity::Fabric, by_words: true };
        assert_eq!(context.atomics(), all);
        for (peer, of) in [(1, b), (0, a)] {
            as_a_model_does(context, peer, signals(of), here(a, 0), |at| read(a, at), 100);
        }
        drop(ranks);
        fake.check_clean();
    }
}

#[test]
fn of_several_ranks_at_once_none_is_lost() {
    let fake = Fake::take();
    let spec = ContextSpec { contexts: 2, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    let ranks = Job { ranks: 3, spec, ..Default::default() }.start();
    let reads: Vec<_> = ranks.iter().map(|r| [0, 8192].map(|from| move |at| read(r, from + at))).collect();
    let members: Vec<_> = ranks
        .iter()
        .zip(&reads)
        .flat_map(|(r, reads)| {
            let words = signals(&ranks[1]);
            r.contexts.iter().zip(reads).zip([0, 8192]).map(move |((context, read), from)| Member {
                context,
                peer: 1,
                words,
                here: here(r, from),
                read,
            })
        })
        .collect();
    concurrent(&members, || ());
    drop(members);
    drop(reads);
    drop(ranks);
    fake.check_clean();
}

/// Plain additions go out with what is around them and are rung once; others hold up what follows.
#[test]
fn what_the_device_can_is_one_work_request() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let add = |at| atomic(signals(b), 0, Width::Eight, Change::add(5), Some((here(a, 1024), at)));
    let data = Op::Put(Put { signal: signal(b, 1, 1), ..put(a, 0, b, 0, 64) });
    let before = fake.count("doorbells");
    let last = post(&a.contexts[0], 1, &[data, add(0), data, add(8)]);
    assert_eq!(fake.count("doorbells") - before, 1);
    finish(&a.contexts[0], 1, last);
    assert_eq!((read(a, 1024), read(a, 1032), b.signals.memory.word(0)), (0, 5, 10));
    let swap = Change::CompareSwap { compare: 10, compare_mask: 0xff, swap: 7, swap_mask: 0xf };
    let ops = [data, atomic(signals(b), 0, Width::Eight, swap, Some((here(a, 1024), 16))), data, add(24)];
    finish(&a.contexts[0], 1, post(&a.contexts[0], 1, &ops));
    assert_eq!((read(a, 1040), read(a, 1048), b.signals.memory.word(0)), (10, 7, 12));
    assert_eq!(b.signals.memory.word(1), 4);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_word_outside_its_window_says_so() {
    let fake = Fake::take();
    let ranks = Job { words: 2, ..Default::default() }.start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let nowhere = Words { key: 0xdead, ..signals(b) };
    let odd = Change::FetchAdd { add: 1, boundary: 2 };
    let seq = post(&a.contexts[0], 1, &[atomic(nowhere, 0, Width::Eight, odd, Some((here(a, 0), 0)))]);
    let why = failure(&a.contexts[0], 1, seq);
    assert_eq!(why.kind(), Kind::RemoteAccess, "{why}");
    assert!(why.message().contains("an atomic operation at"), "{why}");
    assert_eq!(read(a, 0), 0);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn without_remote_atomics_there_are_none_and_it_is_said_once() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    collect();
    let spec = ContextSpec { contexts: 3, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    let ranks = Job { spec, ..Default::default() }.start();
    let said = lines().iter().filter(|line| line.1.contains("there are no atomic operations")).count();
    assert_eq!(said, 2, "once a rank");
    let [a, b] = &ranks[..] else { unreachable!() };
    let context = &a.contexts[0];
    assert_eq!(context.atomics(), Atomics::NONE);
    let add = atomic(signals(b), 0, Width::Eight, Change::add(1), None);
    let data = Op::Put(put(a, 0, b, 0, 8));
    // SAFETY: the windows outlive the operations.
    let why = unsafe { context.post(1, &[data, add]) }.unwrap_err();
    assert_eq!(why.kind(), Kind::Usage, "{why}");
    assert!(why.message().contains("remote atomics"), "{why}");
    // None of them was taken, and nothing has failed.
    // SAFETY: as above.
    let seq = unsafe { context.put(1, &Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 8) }) }.unwrap();
    finish(context, 1, seq);
    until("the signal", || b.signals.memory.0[0].load(Ordering::Acquire) == 1);
    assert!(!context.has_error());
    drop(ranks);
    fake.check_clean();
}
