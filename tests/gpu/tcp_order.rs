//! Order and sums between ranks that reach each other over TCP, and what passes a large put: through the RMA v16 table,
//! on the fake CUDA driver.

use crate::harness::tcp::{apart, CHUNK};
use crate::harness::*;
use crate::support::common::*;
use std::time::Duration;

/// A strong signal follows everything before it on its lane: small and large puts, to both sides of the bus.
#[test]
fn strong_signals_follow_everything() {
    for (signals, stripes, threads) in [(0, 1, 0), (0, 3, 0), (0, 3, 3), (1, 2, 2), (1, 2, 0), (2, 2, 2)] {
        let (signals, fake) = (KINDS[signals], apart(stripes, threads));
        let flags = signals.set_up(&fake);
        job(2, 1, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, 1 << 17, 0);
            let dst = fake.window(r, gpu, 1 << 17, 0);
            let sig = fake.signals(r, gpu, 2, flags);
            let host_dst = r.window(1 << 17, 0);
            let host_sig = r.window(2, 1);
            let peer = 1 - r.rank;
            let (mut on_gpu, mut on_host) = (0, 0);
            for round in 1..=120u64 {
                let host_signal = round % 3 == 0;
                *(if host_signal { &mut on_host } else { &mut on_gpu }) += 1;
                let wait = |i: usize| match host_signal {
                    true => r.wait_signal(&host_sig, i, on_host),
                    false => sig.wait(r, i, on_gpu),
                };
                let ring = |i: u64| {
                    let w = if host_signal { &host_sig } else { sig.as_window() };
                    r.put(0, (src.as_window(), 0), 0, (dst.as_window(), 0), peer, Some((w, 8 * i, 1)))
                };
                let words = [100, 65536 + 5, 3][round as usize % 3];
                if r.rank == 0 {
                    (0..words).for_each(|i| src.set(i, round));
                    let mut all = vec![
                        r.put(0, (src.as_window(), 0), words * 8, (dst.as_window(), 0), peer, None),
                        r.put(0, (src.as_window(), 0), 24, (&host_dst, 0), peer, None),
                    ];
                    if round % 8 == 0 {
                        all.push(r.put(0, (src.as_window(), 0), words * 8, (&host_dst, 64), peer, None));
                    }
                    all.push(r.put(0, (src.as_window(), 8), 8, (dst.as_window(), 131_000 * 8), peer, None));
                    all.push(ring(0));
                    all.into_iter().for_each(|q| r.wait(q));
                    wait(1);
                } else {
                    wait(0);
                    assert!((0..words).all(|i| dst.get(i) == round), "round {round}");
                    assert_eq!(&host_dst.words[..3], &[round; 3]);
                    assert!(round % 8 != 0 || host_dst.words[8..8 + words].iter().all(|&w| w == round));
                    assert_eq!(dst.get(131_000), round);
                    r.wait(ring(1));
                }
            }
        });
        fake.check();
    }
}

/// Many unfinished operations, many senders, one signal; the receiver does nothing but look.
#[test]
fn fan_in_adds_up() {
    for (signals, n) in KINDS.into_iter().zip([3000, 3000, 150]) {
        let fake = apart(1, 0);
        traffic::fan_in(&fake, signals, n, |r, sig, sum, requests| {
            if r.rank == 0 {
                // The helper thread alone.
                wait_until(&format!("{signals:?}: all of {sum}"), || {
                    std::thread::sleep(Duration::from_millis(1));
                    sig.get(0) >= sum
                });
            }
            requests.into_iter().for_each(|q| r.wait(q));
        });
    }
}

/// On a slow GPU: messages of one context pass while a large put of another is under way.
#[test]
fn small_ones_pass_a_large_put() {
    let fake = apart(1, 0);
    let flags = Signals::NeverReset.set_up(&fake);
    let words = 16 * CHUNK / 8 * 4;
    job(2, 2, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, words, 0);
        let dst = fake.window(r, gpu, words + 8, 0);
        let sig = fake.signals(r, gpu, 2, flags);
        let small = |i: usize| {
            let to = (dst.as_window(), words as u64 * 8);
            r.put(1, (src.as_window(), 0), 64, to, 1 - r.rank, Some((sig.as_window(), 8 * i as u64, 1)))
        };
        // Connections are up.
        r.wait(small(0));
        sig.wait(r, 0, 1);
        r.job.barrier.wait();
        fake.settings(false, 2000);
        if r.rank == 0 {
            let large = r.put(0, (src.as_window(), 0), words * 8, (dst.as_window(), 0), 1, None);
            for round in 0..4 {
                r.wait(small(0));
                sig.wait(r, 0, 2 + round);
            }
            let mut done = 0;
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(r.coll, large, &mut done) });
            assert_eq!(done, 0, "four round trips took as long as 64 chunks at 4 ms");
            fake.settings(false, 3);
            r.wait(large);
        } else {
            for round in 0..4 {
                sig.wait(r, 0, 2 + round);
                r.wait(small(0));
            }
        }
    });
    fake.check();
}
