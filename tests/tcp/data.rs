//! Bytes arrive where they belong: sizes, alignments, stripes, gets, oneself, many at once.

use super::harness::*;
use oxygin::rma::op::Op;
use std::sync::atomic::Ordering::SeqCst;

const MIB: usize = 1 << 20;

fn sizes(stripes: u32, peer: u32) {
    let words_n = 2 * MIB / 8;
    let all = ranks(2, stripes, words_n);
    let (a, b) = (&all[0], &all[peer as usize]);
    let source = words(words_n);
    pattern(&source, 7);
    let expected = bytes(&source);
    let lane = a.lane(5, peer);
    let mut rounds = 0;
    for len in [0, 1, 7, 8, 100, 8191, 8192, 8193, 65_537, 262_144, 262_145, MIB + 5] {
        for shift in [0, 1, 3] {
            for word in b.data.iter() {
                word.store(0, SeqCst);
            }
            rounds += 1;
            let mut p = put(address(&source) + shift, address(&b.data) + 2 * shift, len);
            p.signal = bell(&b.signals[0], 1, true);
            let seq = a.post(&lane, Op::Put(p));
            wait(&lane, seq);
            until("signal", || b.signals[0].load(SeqCst) == rounds);
            let (got, at) = (bytes(&b.data), 2 * shift as usize);
            assert!(got[at..at + len] == expected[shift as usize..shift as usize + len], "{len} bytes, shift {shift}");
            assert!(got[..at].iter().all(|&x| x == 0), "bytes before a put of {len}");
            assert!(got[at + len..].iter().all(|&x| x == 0), "bytes behind a put of {len}");
        }
    }
}

#[test]
fn puts_of_all_sizes() {
    sizes(1, 1);
}

#[test]
fn puts_of_all_sizes_over_three_stripes() {
    sizes(3, 1);
}

#[test]
fn puts_to_oneself() {
    sizes(2, 0);
}

#[test]
fn gets_of_all_sizes() {
    for stripes in [1, 3] {
        let n = 2 * MIB / 8;
        let all = ranks(2, stripes, n);
        let (a, b) = (&all[0], &all[1]);
        pattern(&b.data, 3);
        let expected = bytes(&b.data);
        let lane = a.lane(0, 1);
        for len in [0, 1, 8, 1000, 262_144, 262_145, MIB + 77] {
            let to = words(n);
            let seq = a.post(&lane, Op::Get(get(address(&to) + 1, address(&b.data) + 3, len)));
            wait(&lane, seq);
            let got = bytes(&to);
            assert!(got[1..1 + len] == expected[3..3 + len], "{len} bytes");
            assert!(got[0] == 0 && got[1 + len..].iter().all(|&x| x == 0));
        }
    }
}

#[test]
fn puts_and_gets_in_both_directions_at_once() {
    let all = ranks(2, 2, MIB / 8);
    let sources = [words(MIB / 8), words(MIB / 8)];
    (0..2).for_each(|r| pattern(&sources[r], r as u64));
    std::thread::scope(|s| {
        for r in 0..2usize {
            let (me, other, source) = (&all[r], &all[1 - r], &sources[r]);
            s.spawn(move || {
                let lanes: Vec<_> = (0..4).map(|c| me.lane(c, 1 - r as u32)).collect();
                let back: Vec<_> = (0..4).map(|_| words(MIB / 8)).collect();
                for _ in 0..20 {
                    let puts: Vec<_> = lanes
                        .iter()
                        .map(|l| me.post(l, Op::Put(put(address(source), address(&other.data), MIB))))
                        .collect();
                    for (l, p) in lanes.iter().zip(puts) {
                        wait(l, p);
                    }
                    let mut sync = put(0, 0, 0);
                    for l in &lanes {
                        sync.signal = bell(&other.signals[l.context as usize], 1, true);
                        me.post(l, Op::Put(sync));
                    }
                }
                for c in 0..4 {
                    until("signals", || other.signals[c].load(SeqCst) == 20);
                }
                for (l, to) in lanes.iter().zip(&back) {
                    let g = me.post(l, Op::Get(get(address(to), address(&other.data), MIB)));
                    wait(l, g);
                    assert!(bytes(to) == bytes(source));
                }
            });
        }
    });
}

#[test]
fn a_hundred_thousand_operations_outstanding() {
    let all = ranks(2, 1, 1024);
    let (a, b) = (&all[0], &all[1]);
    let source = words(1024);
    pattern(&source, 1);
    let lanes: Vec<_> = (0..4).map(|c| a.lane(c, 1)).collect();
    let mut last = Vec::new();
    for i in 0..100_000usize {
        let lane = &lanes[i % 4];
        let at = 8 * (i as u64 / 4 % 1024);
        let mut p = put(address(&source) + at, address(&b.data) + at, 8);
        p.signal = bell(&b.signals[i % 4], 1, i % 3 == 0);
        p.more = i % 5 != 0;
        last.push((i % 4, a.post(lane, Op::Put(p))));
    }
    for &(lane, seq) in last.iter().rev().take(4) {
        wait(&lanes[lane], seq);
    }
    for lane in 0..4 {
        until("all signals", || b.signals[lane].load(SeqCst) == 25_000);
    }
    assert!(bytes(&b.data) == bytes(&source));
    assert!(lanes.iter().all(|l| l.is_idle()));
}

#[test]
fn large_operations_outstanding_complete_in_order() {
    let all = ranks(2, 3, 256 * 1024 / 8 * 3);
    let (a, b) = (&all[0], &all[1]);
    let len = 8 * a.data.len();
    pattern(&b.data, 9);
    let (source, to) = (words(a.data.len()), words(a.data.len()));
    pattern(&source, 9);
    let lane = a.lane(1, 1);
    let seqs: Vec<_> = (0..300)
        .map(|i| match i % 3 {
            0 => a.post(&lane, Op::Put(put(address(&source), address(&b.data), len))),
            1 => a.post(&lane, Op::Get(get(address(&to), address(&b.data), len))),
            _ => a.post(&lane, Op::Put(put(address(&source), address(&b.data), 8))),
        })
        .collect();
    for seq in seqs {
        wait(&lane, seq);
    }
    assert!(bytes(&to) == bytes(&source));
}
