//! Data, signals and gets over the fake libibverbs: contents, order, splitting, backlog, both kinds of signals.

use crate::harness::*;
use oxygin::config::Config;
use oxygin::fabric::{Context, ContextSpec};
use oxygin::rma::op::Put;

#[test]
fn puts_and_signals_arrive_at_every_peer_and_at_oneself() {
    let fake = Fake::take();
    let ranks = Job { ranks: 3, ..Default::default() }.start();
    for from in &ranks {
        from.data.memory.store(from.rank as usize, 100 + u64::from(from.rank));
        for to in &ranks {
            let at = 8 * u64::from(from.rank);
            let p = Put { signal: signal(to, 5, 1 << (8 * from.rank)), ..put(from, at, to, 1024 + at, 8) };
            finish(&from.contexts[0], to.rank, start_put(from, 0, to.rank, &p));
        }
    }
    for to in &ranks {
        assert_eq!(to.signals.memory.word(5), 0x01_01_01);
        for from in 0..3 {
            assert_eq!(to.data.memory.word(128 + from), 100 + from as u64);
        }
    }
    drop(ranks);
    fake.check_clean();
}

#[test]
fn sizes_from_nothing_to_several_messages_arrive_whole() {
    let fake = Fake::take();
    fake.set("max_msg_sz", 1000);
    let ranks = Job { bytes: 1 << 20, ..Default::default() }.start();
    let [a, b] = &ranks[..] else { unreachable!() };
    for i in 0..(1 << 16) {
        a.data.memory.store(i, (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    // SAFETY: the window lives as long as the ranks and nobody writes it here.
    let source = unsafe { std::slice::from_raw_parts(a.data.memory.base() as *const u8, 1 << 19) };
    let mut expected = 0;
    for (i, len) in [0u64, 1, 7, 999, 1000, 1001, 2000, 2001, 33_333, 400_003].into_iter().enumerate() {
        for with_signal in [false, true] {
            let local = 3 * i as u64;
            let remote = (1 << 19) + 5 * i as u64;
            let mut p = put(a, local, b, remote, len);
            if with_signal {
                p.signal = signal(b, 0, 7);
                expected += 7;
            }
            finish(&a.contexts[0], 1, start_put(a, 0, 1, &p));
            // SAFETY: as above; the put is complete and the fake has moved it.
            let got = unsafe { std::slice::from_raw_parts((b.data.memory.base() + remote) as *const u8, len as usize) };
            assert!(got == &source[local as usize..(local + len) as usize], "{len} bytes differ");
        }
    }
    assert_eq!(b.signals.memory.word(0), expected);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn gets_bring_the_peers_bytes() {
    let fake = Fake::take();
    fake.set("max_msg_sz", 64);
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    for i in 0..100 {
        b.data.memory.store(i, i as u64 + 1);
    }
    // SAFETY: windows outlive the operation.
    let seq = unsafe { a.contexts[0].get(1, &get(a, 4096, b, 0, 800)) }.unwrap();
    if let Some(seq) = a.contexts[0].flushed(1).unwrap() {
        finish(&a.contexts[0], 1, seq);
    }
    assert!(a.contexts[0].test(1, seq).unwrap());
    for i in 0..100 {
        assert_eq!(a.data.memory.word(512 + i), i as u64 + 1);
    }
    assert_eq!(a.contexts[0].flushed(1).unwrap(), None, "nothing is unfinished");
    drop(ranks);
    fake.check_clean();
}

/// The contract's litmus test: whoever sees the n-th signal sees the n-th put. Completions come late and the queue
/// pairs advance in random order.
fn litmus(fake: &Fake, rounds: u64, job: Job) {
    fake.set("late", 1);
    let ranks = job.start();
    let n = ranks.len();
    std::thread::scope(|s| {
        for to in 1..n {
            let ranks = &ranks;
            s.spawn(move || {
                let me = &ranks[to];
                for round in 1..=rounds {
                    until("the signal", || {
                        me.contexts[0].progress().unwrap();
                        me.signals.memory.word(0) >= round
                    });
                    let seen = me.signals.memory.word(0);
                    let data = me.data.memory.word(0);
                    assert!(data >= seen.min(round), "signal {seen} came before its data {data}");
                }
            });
        }
        let me = &ranks[0];
        let mut last = vec![oxygin::rma::seq::Seq(0); n];
        for round in 1..=rounds {
            let slot = round as usize % 256;
            if slot == 0 {
                for (to, &seq) in last.iter().enumerate().skip(1) {
                    finish(&me.contexts[0], to as u32, seq);
                }
            }
            me.data.memory.store(512 + slot, round);
            for (to, seq) in last.iter_mut().enumerate().skip(1) {
                let p = Put {
                    signal: signal(&ranks[to], 0, 1),
                    more: round % 3 != 0,
                    ..put(me, 8 * (512 + slot) as u64, &ranks[to], 0, 8)
                };
                *seq = start_put(me, 0, to as u32, &p);
            }
        }
        for (to, &seq) in last.iter().enumerate().skip(1) {
            finish(&me.contexts[0], to as u32, seq);
        }
    });
    for rank in &ranks[1..] {
        until("the last signal", || rank.signals.memory.word(0) == rounds);
    }
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_signal_never_comes_before_its_data() {
    let fake = Fake::take();
    for seed in [3, 17] {
        fake.set("seed", seed);
        litmus(&fake, 3000, Job { ranks: 3, ..Default::default() });
    }
}

#[test]
fn a_signal_by_message_never_comes_before_its_data() {
    // In work requests, and from memory where a device takes nothing in them.
    for most in [256, 0] {
        let fake = Fake::take();
        fake.set("atomic_cap", 0);
        fake.set("seed", 5);
        fake.set("max_inline", most);
        let before = fake.count("inlined");
        litmus(&fake, 3000, Job { ranks: 3, ..Default::default() });
        assert_eq!(fake.count("receiver_not_ready"), 0, "a message was sent without a receive for it");
        let inlined = fake.count("inlined") - before;
        // Of three puts that are rung together one message at least adds up.
        assert!(if most > 0 { inlined >= 3000 / 32 } else { inlined == 0 }, "{inlined} with {most} bytes at most");
    }
}

#[test]
fn a_device_that_takes_only_part_of_chains_loses_nothing() {
    let fake = Fake::take();
    fake.set("enomem_every", 3);
    litmus(&fake, 2000, Job::default());
    fake.set("enomem_every", 2);
    fake.set("atomic_cap", 0);
    litmus(&fake, 1000, Job::default());
}

#[test]
fn a_hundred_thousand_operations_wait_their_turn() {
    let fake = Fake::take();
    let spec = ContextSpec { contexts: 1, queue_depth: 16, traffic_class: None, rank_stride: 1 };
    let config = Config { max_operations: 100_000, ..Config::default() };
    let ranks = Job { spec, config, ..Default::default() }.start();
    let [a, b] = &ranks[..] else { unreachable!() };
    fake.set("late", 2);
    const N: u64 = 100_000;
    let mut last = None;
    for i in 0..N {
        let p = Put { signal: signal(b, 1, i), ..put(a, 0, b, 8 * (i % 1000), 8) };
        last = Some(start_put(a, 0, 1, &p));
    }
    assert!(fake.count("work_requests") <= 16, "the queue has 16 entries");
    assert_eq!(fake.count("send_queue_full"), 0, "the device was never asked for more than it has");
    assert!(!a.contexts[0].test(1, last.unwrap()).unwrap());
    fake.set("late", 0);
    fake.set("run", 0);
    finish(&a.contexts[0], 1, last.unwrap());
    assert_eq!(b.signals.memory.word(1), N * (N - 1) / 2);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn chains_are_rung_once_and_only_the_last_is_signalled() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let before = fake.count("doorbells");
    let mut last = None;
    for i in 0..10u64 {
        let p = Put { more: i < 9, signal: signal(b, 2, 1), ..put(a, 0, b, 8 * i, 8) };
        last = Some(start_put(a, 0, 1, &p));
    }
    assert_eq!(fake.count("doorbells") - before, 1);
    finish(&a.contexts[0], 1, last.unwrap());
    assert_eq!(b.signals.memory.word(2), 10);
    // A chain that nobody ends is rung by test.
    let p = Put { more: true, ..put(a, 0, b, 0, 8) };
    let seq = start_put(a, 0, 1, &p);
    let before = fake.count("doorbells");
    finish(&a.contexts[0], 1, seq);
    assert_eq!(fake.count("doorbells") - before, 1);
    // And one by progress, without a test.
    let p = Put { more: true, signal: signal(b, 2, 1), ..put(a, 0, b, 0, 8) };
    start_put(a, 0, 1, &p);
    assert_eq!(b.signals.memory.word(2), 10);
    a.contexts[0].progress().unwrap();
    assert_eq!(b.signals.memory.word(2), 11);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_rank_that_calls_nothing_still_gets_signals_by_message() {
    let fake = Fake::take();
    fake.set("atomic_cap@1", 0);
    // One device with atomics and one without: all go by message.
    let ranks = Job { devices: 2, ..Default::default() }.start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let mut last = None;
    for _ in 0..1000 {
        let p = Put { signal: signal(b, 3, 2), ..put(a, 0, b, 0, 8) };
        last = Some(start_put(a, 0, 1, &p));
    }
    finish(&a.contexts[0], 1, last.unwrap());
    until("signals at a rank that calls nothing", || b.signals.memory.word(3) == 2000);
    // To oneself too.
    let p = Put { signal: signal(a, 3, 9), ..put(a, 0, a, 64, 8) };
    finish(&a.contexts[0], 0, start_put(a, 0, 0, &p));
    until("a signal to oneself", || a.signals.memory.word(3) == 9);
    assert_eq!(fake.count("receiver_not_ready"), 0);
    drop(ranks);
    fake.check_clean();
}

/// Peers that send faster than a context takes keep the thread that applies signals neither from other contexts nor
/// from its end.
#[test]
fn one_context_that_is_never_through_holds_up_no_other() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let spec = ContextSpec { contexts: 2, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    let mut ranks = Job { spec, ..Default::default() }.start();
    // A completion that is no operation's and frees nothing.
    fake.set("endless", (1 << 63 | 5u64 << 60) as i64);
    let in_time = |condition: &dyn Fn() -> bool| {
        let since = std::time::Instant::now();
        while !condition() && since.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        condition()
    };
    let [a, b] = &ranks[..] else { unreachable!() };
    let arrived = [0, 1].map(|context| {
        let p = Put { signal: signal(b, context, 1), ..put(a, 0, b, 0, 8) };
        start_put(a, context, 1, &p);
        in_time(&|| b.signals.memory.word(context) == 1)
    });
    let contexts = std::mem::take(&mut ranks[1].contexts);
    let ending = std::thread::spawn(move || drop(contexts));
    let ended = in_time(&|| ending.is_finished());
    fake.set("endless", 0);
    ending.join().unwrap();
    assert!(arrived == [true; 2] && ended, "{arrived:?}, {ended}");
    drop(ranks);
    fake.check_clean();
}

#[test]
fn ranks_whose_devices_take_different_numbers_of_messages_send_as_many_as_both_do() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    // 32 receives at rank 0, 4 at rank 1.
    fake.set("max_cqe@1", 60);
    litmus(&fake, 1000, Job { devices: 2, ..Default::default() });
    let ranks = Job { devices: 2, ..Default::default() }.start();
    for (from, to) in [(&ranks[0], &ranks[1]), (&ranks[1], &ranks[0])] {
        let p = Put { signal: signal(to, 1, 1), ..put(from, 0, to, 0, 8) };
        let last = (0..200).map(|_| start_put(from, 0, to.rank, &p)).last().unwrap();
        finish(&from.contexts[0], to.rank, last);
        until("the signals", || to.signals.memory.word(1) == 200);
    }
    assert_eq!(fake.count("receiver_not_ready"), 0);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn contexts_do_not_mix() {
    let fake = Fake::take();
    fake.set("late", 1);
    let spec = ContextSpec { contexts: 4, queue_depth: 8, traffic_class: None, rank_stride: 1 };
    let ranks = Job { ranks: 2, spec, ..Default::default() }.start();
    std::thread::scope(|s| {
        for c in 0..4usize {
            for from in 0..2usize {
                let ranks = &ranks;
                s.spawn(move || {
                    let (me, to) = (&ranks[from], &ranks[1 - from]);
                    let mut last = None;
                    for _ in 0..500 {
                        let p = Put { signal: signal(to, c, 1), ..put(me, 0, to, 8 * c as u64, 8) };
                        last = Some(start_put(me, c, to.rank, &p));
                    }
                    finish(&me.contexts[c], to.rank, last.unwrap());
                });
            }
        }
    });
    for rank in &ranks {
        for c in 0..4 {
            assert_eq!(rank.signals.memory.word(c), 500);
        }
    }
    drop(ranks);
    fake.check_clean();
}

#[test]
fn several_threads_may_use_one_context() {
    let fake = Fake::take();
    fake.set("late", 1);
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    std::thread::scope(|s| {
        for t in 0..4u64 {
            s.spawn(move || {
                for _ in 0..500 {
                    let p = Put { signal: signal(b, 4, 1), more: t == 0, ..put(a, 0, b, 8 * t, 8) };
                    finish(&a.contexts[0], 1, start_put(a, 0, 1, &p));
                }
            });
        }
    });
    assert_eq!(b.signals.memory.word(4), 2000);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn operation_numbers_wrap() {
    let fake = Fake::take();
    for late in [0, 1] {
        fake.set("late", late);
        let ranks = Job::default().start();
        let [a, b] = &ranks[..] else { unreachable!() };
        a.contexts[0].renumber(1, u32::MAX - 50);
        let seqs: Vec<_> = (0..200u64)
            .map(|i| {
                let p = Put { signal: signal(b, 0, 1), more: i % 5 == 0, ..put(a, 0, b, 0, 8) };
                start_put(a, 0, 1, &p)
            })
            .collect();
        assert_eq!(seqs[50].0, 0);
        for &seq in seqs.iter().rev() {
            finish(&a.contexts[0], 1, seq);
        }
        assert_eq!(b.signals.memory.word(0), 200);
        drop(ranks);
    }
    fake.check_clean();
}

#[test]
fn above_the_limit_calls_wait_and_lose_nothing() {
    let fake = Fake::take();
    fake.set("late", 2);
    let config = Config { max_operations: 1024, queue_depth: 8, ..Config::default() };
    let ranks = Job { config, ..Default::default() }.start();
    let [a, b] = &ranks[..] else { unreachable!() };
    assert_eq!(fake.count("last_depth"), 8);
    let started = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut last = None;
            for _ in 0..5000 {
                let p = Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 8) };
                last = Some(start_put(a, 0, 1, &p));
                started.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            finish(&a.contexts[0], 1, last.unwrap());
        });
        // Four operations are with the device and 1024 wait when the next call does.
        let count = || started.load(std::sync::atomic::Ordering::Relaxed);
        until("the queue to fill", || count() == 1028);
        fake.set("late", 1);
    });
    assert_eq!(b.signals.memory.word(0), 5000);
    drop(ranks);
    fake.check_clean();
}
