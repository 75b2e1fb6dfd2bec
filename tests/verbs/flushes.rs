//! Flushes of gets into GPU memory, and what they need: the connection of a rank to itself.

use crate::gpu::{bring, take, window, Window};
use crate::harness::*;
use crate::support::atomics::{atomic, post, Words};
use oxygin::fabric::Context;
use oxygin::rma::atomic::{Change, Width};
use oxygin::rma::op::{Get, Put};

/// Flushes, and values that are fetched to GPU memory, go over the connection to this rank itself.
#[test]
fn what_waits_for_a_broken_connection_to_this_rank_itself_fails() {
    let (fake, cuda) = take();
    for late in [0, 1] {
        fake.set("late", late);
        let ranks = Job { ranks: 3, ..Default::default() }.start();
        let (a, b, c) = (&ranks[0], &ranks[1], &ranks[2]);
        let here = window(&cuda, a, 10, 64, false, true).unwrap();
        let (at, lkey) = (here.memory.at, here.registration.lkey);
        let wrong = Put { rkey: 0xdead, ..put(a, 0, a, 0, 8) };
        let own = failure(&a.contexts[0], 0, start_put(a, 0, 0, &wrong));
        let g = Get { local: at, lkey, ..get(a, 0, b, 0, 8) };
        // SAFETY: windows outlive the operations.
        unsafe { a.contexts[0].get(1, &g) }.unwrap();
        let e = match a.contexts[0].flushed(1) {
            Ok(flush) => failure(&a.contexts[0], 1, flush.expect("GPU memory needs a read")),
            Err(e) => e,
        };
        assert!(e.message().contains("the connection of rank 0 to itself") && e.kind() == own.kind(), "{e}");
        let word = Words { base: c.signals.memory.base(), key: c.signals.registration.rkey };
        let fetch = atomic(word, 4, Width::Four, Change::add(3), Some((Words { base: at, key: lkey }, 8)));
        let seq = post(&a.contexts[0], 2, &[fetch]);
        let e = failure(&a.contexts[0], 2, seq);
        assert!(e.message().contains("the connection of rank 0 to itself") && e.kind() == own.kind(), "{e}");
        // Nobody else's lane is any the worse.
        finish(&b.contexts[0], 2, start_put(b, 0, 2, &put(b, 0, c, 0, 8)));
        drop((here, ranks));
    }
    cuda.check();
    fake.check_clean();
}

/// What tells a peer how many of its messages were taken goes out while a flush is under way in another queue.
#[test]
fn a_flush_that_is_complete_stays_so() {
    let (fake, cuda) = take();
    fake.set("atomic_cap", 0);
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let here = window(&cuda, a, 10, 64, false, true).unwrap();
    let context = &a.contexts[0];
    bring(a, b, &here);
    fake.set("late", 2);
    let flush = context.flushed(1).unwrap().expect("GPU memory needs a read");
    for _ in 0..16 {
        start_put(b, 0, 0, &Put { signal: signal(a, 0, 1), ..put(b, 0, a, 0, 0) });
    }
    let posted = fake.count("work_requests");
    fake.set("run", 2);
    until("the signals", || {
        context.progress().unwrap();
        a.signals.memory.word(0) == 16
    });
    until("the announcement", || fake.count("work_requests") > posted);
    fake.set("run", 1);
    finish(context, 1, flush);
    fake.set("run", 2);
    context.progress().unwrap();
    assert!(context.test(1, flush).unwrap());
    fake.set("late", 0);
    finish(context, 1, start_put(a, 0, 1, &put(a, 0, b, 0, 8)));
    drop((here, ranks));
    cuda.check();
    fake.check_clean();
}

/// Bytes of device memory that gets brought may be in windows that are gone when the flush comes.
#[test]
fn a_flush_reads_a_window_that_is_still_there() {
    let (fake, cuda) = take();
    fake.set("reuse_keys", 1);
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let context = &a.contexts[0];
    let bring = |into: &Window| bring(a, b, into);
    let first = window(&cuda, a, 10, 64, false, true).unwrap();
    let second = window(&cuda, a, 11, 64, false, true).unwrap();
    bring(&first);
    bring(&second);
    drop(second.registration);
    let before = fake.count("work_requests");
    finish(context, 1, context.flushed(1).unwrap().expect("the first is still there"));
    assert_eq!(fake.count("work_requests") - before, 1, "a local read");
    assert_eq!(fake.count("last_read_key"), i64::from(first.registration.rkey));
    // Another window with the keys of one that is gone.
    bring(&first);
    let keys = first.registration.lkey;
    drop(first.registration);
    let third = window(&cuda, a, 12, 64, false, true).unwrap();
    assert_eq!(third.registration.lkey, keys);
    assert_eq!(context.flushed(1).unwrap(), None, "what was brought is in no window");
    bring(&third);
    finish(context, 1, context.flushed(1).unwrap().expect("GPU memory needs a read"));
    assert_eq!(context.flushed(1).unwrap(), None);
    drop((third, ranks));
    cuda.check();
    fake.check_clean();
}

/// Who flushes one window knows that it stays; another one, of later gets, may be deregistered before the read is done.
#[test]
fn a_flush_reads_the_window_that_it_is_for() {
    let (fake, cuda) = take();
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let context = &a.contexts[0];
    let [first, second, unused] = [10, 11, 12].map(|id| window(&cuda, a, id, 64, false, true).unwrap());
    let flush = |into: u32| {
        [&first, &second].into_iter().for_each(|into| bring(a, b, into));
        finish(context, 1, context.flushed_into(1, into).unwrap().expect("GPU memory needs a read"));
        fake.count("last_read_key")
    };
    for one in [&first, &second] {
        assert_eq!(flush(one.registration.lkey), i64::from(one.registration.rkey));
    }
    // Into where nothing was brought, or into host memory: one that was.
    let others = [&first, &second].map(|one| i64::from(one.registration.rkey));
    for into in [unused.registration.lkey, a.data.registration.lkey] {
        let read = flush(into);
        assert!(others.contains(&read), "{read}");
    }
    drop((first, second, unused, ranks));
    cuda.check();
    fake.check_clean();
}
