//! The contract of signals: the litmus test, and additions from many sides.

use super::harness::*;
use oxygin::fabric::soft::tcp::CHUNK;
use oxygin::rma::op::{Op, Put};
use std::sync::atomic::Ordering::SeqCst;

/// Puts of several sizes, the last words of which carry the round; then a strong signal. Whoever sees the signal must
/// see them all. Weak signals in between: whoever sees one sees its own put.
fn litmus(stripes: u32, rounds: u64) {
    let large = 600_000 / 8;
    // The first word of each chunk and the last of each put: two large ones and a small one.
    let chunk = CHUNK / 8;
    let marks = [0, chunk, 2 * chunk, large - 1, large, large + chunk, large + 2 * chunk, 2 * large - 1, 2 * large];
    let all = ranks(2, stripes, 3 * large);
    let (a, b) = (&all[0], &all[1]);
    std::thread::scope(|s| {
        s.spawn(|| {
            for round in 1..=rounds {
                until("strong signal", || b.signals[0].load(SeqCst) >= round);
                for at in marks {
                    assert_eq!(b.data[at].load(SeqCst), round, "word {at} behind its signal");
                }
                assert_eq!(b.signals[1].load(SeqCst), round, "weak signal behind a later strong one");
                // Lets the sender go on: the data stays still until then.
                b.signals[2].store(round, SeqCst);
            }
        });
        let source = words(3 * large);
        let lane = a.lane(stripes, 1);
        for round in 1..=rounds {
            for at in marks {
                source[at].store(round, SeqCst);
            }
            let (from, to) = (address(&source), address(&b.data));
            let mut first = put(from, to, 8 * large);
            first.signal = bell(&b.signals[1], 1, false);
            let small = put(from + 16 * large as u64, to + 16 * large as u64, 8);
            let second = put(from + 8 * large as u64, to + 8 * large as u64, 8 * large);
            a.post(&lane, Op::Put(first));
            a.post(&lane, Op::Put(small));
            a.post(&lane, Op::Put(second));
            let mut ring = put(0, 0, 0);
            ring.signal = bell(&b.signals[0], 1, true);
            let last = a.post(&lane, Op::Put(ring));
            wait(&lane, last);
            until("receiver", || b.signals[2].load(SeqCst) == round);
        }
    });
}

#[test]
fn strong_signals_come_last() {
    litmus(1, 200);
}

#[test]
fn strong_signals_come_last_over_three_stripes() {
    litmus(3, 200);
}

#[test]
fn small_puts_are_visible_at_their_signal() {
    let all = ranks(2, 2, 1 << 16);
    let (a, b) = (&all[0], &all[1]);
    let n = 1 << 16;
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut seen = 0;
            until("all", || {
                let now = b.signals[0].load(SeqCst);
                for i in seen..now {
                    assert_eq!(b.data[i as usize].load(SeqCst), i + 1, "put {i} of {now} signalled");
                }
                seen = now;
                now == n
            });
        });
        let source = words(n as usize);
        let lane = a.lane(7, 1);
        let mut last = None;
        for i in 0..n {
            source[i as usize].store(i + 1, SeqCst);
            let mut p = put(address(&source) + 8 * i, address(&b.data) + 8 * i, 8);
            p.signal = bell(&b.signals[0], 1, true);
            last = Some(a.post(&lane, Op::Put(p)));
        }
        wait(&lane, last.unwrap());
    });
}

/// What a burst leaves staged goes out by itself when its caller falls silent, or at once when that one has no more.
#[test]
fn the_end_of_a_burst_is_not_left_behind() {
    for silent in [true, false] {
        let mut all = ranks(2, 1, 8);
        let b = all.pop().unwrap();
        let mut a = all.pop().unwrap();
        let lane = a.lane(0, 1);
        let mut ring = put(0, 0, 0);
        ring.signal = bell(&b.signals[0], 1, true);
        wait(&lane, a.post(&lane, Op::Put(ring)));
        until("first", || b.signals[0].load(SeqCst) == 1);
        a.freeze();
        for round in 1..=200 {
            for _ in 0..10 {
                // The hint makes sure that it is staged.
                a.post(&lane, Op::Put(Put { more: true, ..ring }));
            }
            if silent {
                // Nobody calls until the descriptor says so.
                let start = std::time::Instant::now();
                while b.signals[0].load(SeqCst) != 1 + 10 * round {
                    let mut p = libc::pollfd { fd: a.tcp.as_fd(), events: libc::POLLIN, revents: 0 };
                    // SAFETY: one pollfd.
                    if unsafe { libc::poll(&mut p, 1, 1) } == 1 {
                        a.tcp.progress();
                    }
                    assert!(start.elapsed() < PATIENCE, "round {round}: the descriptor stays quiet");
                }
            } else {
                a.tcp.progress();
                a.tcp.progress();
                until("burst", || b.signals[0].load(SeqCst) == 1 + 10 * round);
            }
        }
    }
}

#[test]
fn signals_add_up_from_many_ranks_and_threads() {
    let all = ranks(5, 1, 8);
    let target = &all[0];
    std::thread::scope(|s| {
        for r in &all {
            for context in 0..2 {
                s.spawn(move || {
                    let lane = r.lane(context, 0);
                    for i in 0..2000u64 {
                        let mut p = put(0, 0, 0);
                        p.signal = bell(&target.signals[0], 1 + (i << 40), i % 2 == 0);
                        let seq = r.post(&lane, Op::Put(p));
                        if i % 100 == 0 {
                            wait(&lane, seq);
                        }
                    }
                });
            }
        }
    });
    let each: u64 = (0..2000u64).fold(0, |s, i| s.wrapping_add(1 + (i << 40)));
    until("sum", || target.signals[0].load(SeqCst) == each.wrapping_mul(10));
}

#[test]
fn a_signal_overtakes_a_large_put_of_another_context() {
    let n = 64 << 20;
    let all = ranks(2, 1, n / 8);
    let (a, b) = (&all[0], &all[1]);
    let source = words(n / 8);
    let (bulk, urgent) = (a.lane(0, 1), a.lane(1, 1));
    // Connections are up before it counts.
    let mut ring = put(0, 0, 0);
    ring.signal = bell(&b.signals[0], 1, true);
    a.post(&urgent, Op::Put(ring));
    until("first signal", || b.signals[0].load(SeqCst) == 1);
    let mut large = put(address(&source), address(&b.data), n);
    large.signal = bell(&b.signals[1], 1, true);
    a.post(&bulk, Op::Put(large));
    a.post(&urgent, Op::Put(ring));
    until("second signal", || b.signals[0].load(SeqCst) == 2);
    assert_eq!(b.signals[1].load(SeqCst), 0, "the large put was applied first");
    until("large put", || b.signals[1].load(SeqCst) == 1);
}
