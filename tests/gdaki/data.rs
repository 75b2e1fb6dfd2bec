//! Bytes, signals and counters: what entries ask for is done, in the order that a reliable connection has.

use crate::harness::{on_ranks, ways};
use crate::support::nic::*;
use oxygin::config::Ringing;

#[test]
fn puts_are_there_when_their_signal_is() {
    for ask in ways() {
        on_ranks(3, ask, |r, nic, src, dst| {
            let (next, before) = ((r.rank + 1) % 3, (r.rank + 2) % 3);
            for round in 1..=300u64 {
                let i = (round % 100) as usize;
                src.set(i, round * 10 + r.rank as u64);
                nic.qp(0, next).post(&[write(dst.at(i), src.at(i), 8), nic.add_signal(0, 3, 1)]);
                nic.wait_signal(0, 3, round);
                assert_eq!(dst.get(i), round * 10 + before as u64, "round {round}");
                r.job.barrier.wait();
            }
            assert_eq!(nic.qp(0, next).flush(), Status::Good);
            assert!(!nic.has_error());
        });
    }
}

#[test]
fn every_operation_does_what_it_says() {
    for ask in ways() {
        on_ranks(2, Ask { contexts: 3, ..ask }, |r, nic, src, dst| {
            let (peer, c) = (1 - r.rank, 2);
            let (qp, sink) = (nic.qp(c, peer), (nic.view.sink, 0));
            (0..64).for_each(|i| src.set(i, 0x0101 * (i as u64 + 1) + r.rank as u64));
            r.job.barrier.wait();
            // Values of all lengths, each to 32 bytes of its own.
            let bytes: Vec<u8> = (1..=28).collect();
            for n in 1..=28 {
                qp.post(&[value(dst.at(4 * n), &bytes[..n])]);
            }
            // A put of one range and of two, nothing, a put of one byte.
            qp.post(&[
                write(dst.at(128), src.at(0), 256),
                Raw::new(NOP, 0),
                write(dst.at(200), src.at(0), 16).data(src.key, 8 * 10, 24),
                write((dst.key, 8 * 210 + 3), src.at(0), 1),
                nic.add_signal(c, 1, 5),
            ]);
            nic.wait_signal(c, 1, 5);
            for n in 1..=28usize {
                for (i, word) in (0..4).map(|i| (i, dst.get(4 * n + i).to_le_bytes())) {
                    for (j, byte) in word.into_iter().enumerate() {
                        let at = 8 * i + j;
                        assert_eq!(byte, if at < n { at as u8 + 1 } else { 0 }, "byte {at} of {n}");
                    }
                }
            }
            let theirs = |i: usize| 0x0101 * (i as u64 + 1) + peer as u64;
            (0..32).for_each(|i| assert_eq!(dst.get(128 + i), theirs(i)));
            assert_eq!([0, 1, 2, 3, 4].map(|i| dst.get(200 + i)), [0, 1, 10, 11, 12].map(theirs));
            assert_eq!(dst.get(210), (theirs(0) & 0xff) << 24);
            assert_eq!(qp.flush(), Status::Good);
            r.job.barrier.wait();
            // Gets of one range and of two; what they bring is there with their completion, and with the dump's.
            let got = qp.post(&[read(src.at(0), dst.at(300), 512)]);
            assert_eq!(qp.wait(got), Status::Good);
            (0..64).for_each(|i| assert_eq!(dst.get(300 + i), theirs(i)));
            qp.post(&[
                read(src.at(5), dst.at(400), 8).data(dst.key, 8 * 402, 16),
                Raw::new(DUMP, 0).data(sink.0, 0, 1),
            ]);
            assert_eq!(qp.flush(), Status::Good);
            assert_eq!([400, 401, 402, 403].map(|i| dst.get(i)), [theirs(5), 0, theirs(6), theirs(7)]);
            // To oneself.
            nic.qp(c, r.rank).post(&[write(dst.at(500), src.at(1), 8), nic.add_signal(c, 2, 9)]);
            nic.wait_signal(c, 2, 9);
            assert_eq!(dst.get(500), src.get(1));
            assert!(!nic.has_error());
        });
    }
}

#[test]
fn words_are_changed_as_one_and_what_they_held_comes_back() {
    on_ranks(2, Ask::default(), |r, nic, src, dst| {
        let (qp, at) = (nic.qp(0, 1 - r.rank), |i: usize| dst.at(i));
        dst.set(0, 40);
        dst.set(1, 0x00ff_00ff);
        dst.set(2, 0x7fff_ffff_ffff_ffff);
        dst.set(3, 0x1234_5678);
        r.job.barrier.wait();
        let masked_add =
            |width: u8, i, words| Raw::new(MASKED_ADD, 0x08 + (width == 8) as u8).remote(at(i).0, at(i).1).with(words);
        let four = |words: [u32; 4]| words.map(u32::to_be_bytes).concat().try_into().unwrap();
        let eight = |words: [u64; 2]| words.map(u64::to_be_bytes).concat().try_into().unwrap();
        qp.post(&[
            add(at(0), 2, src.at(100)),
            // No carry leaves the low half.
            masked_add(4, 1, four([0x0001_0001, 0x8000_8000, 0, 0])).data(src.key, 8 * 101, 4),
            masked_add(8, 2, eight([1, 0])).data(src.key, 8 * 102, 8),
            // The low byte matches: the byte above it is replaced.
            Raw::new(MASKED_SWAP, 0x08).remote(at(3).0, at(3).1).four([0xab00, 0x78, 0xff00, 0xff]).data(
                src.key,
                8 * 103,
                4,
            ),
            Raw::new(MASKED_SWAP, 0x08).remote(at(3).0, at(3).1).four([0, 0x77, 0xff00, 0xff]).data(
                src.key,
                8 * 104,
                4,
            ),
            add(at(0), u64::MAX, src.at(105)),
            nic.add_signal(0, 0, 1),
        ]);
        nic.wait_signal(0, 0, 1);
        assert_eq!(qp.flush(), Status::Good);
        assert_eq!([0, 1, 2, 3].map(|i| dst.get(i)), [41, 0x0100_0100, 1 << 63, 0x1234_ab78]);
        let fetched = [100, 101, 102, 103, 104, 105].map(|i| src.get(i));
        assert_eq!(fetched, [40, 0x00ff_00ff, 0x7fff_ffff_ffff_ffff, 0x1234_5678, 0x1234_ab78, 42]);
    });
}

#[test]
fn counters_go_up_when_their_puts_are_complete() {
    for ask in ways() {
        on_ranks(2, Ask { contexts: 2, depth: 8, ..ask }, |r, nic, src, dst| {
            let peer = 1 - r.rank;
            for i in 1..=200u64 {
                src.set(i as usize, i);
                let put = write(dst.at(i as usize), src.at(i as usize), 8);
                nic.post_counted(1, peer, &[put, nic.add_signal(1, 0, 1)], (i % 3) as u32);
            }
            (0..3).for_each(|c| nic.wait_counter(1, c, 66));
            assert_eq!(nic.companion(1, peer).flush(), Status::Good);
            assert_eq!([0, 1, 2, 3].map(|c| nic.counter(1, c)), [66, 67, 67, 0]);
            nic.wait_signal(1, 0, 200);
            (1..=200).for_each(|i| assert_eq!(dst.get(i), i as u64));
            // The source was free when the counter said so; a counter waits for its own put.
            assert_eq!(nic.counter(0, 0), 0);
            assert!(!nic.has_error());
        });
    }
}

#[test]
fn rings_wrap_under_many_producers() {
    const THREADS: u32 = 6;
    const EACH: u64 = 1500;
    for ask in ways() {
        on_ranks(2, Ask { contexts: 2, depth: 16, ..ask }, |r, nic, src, dst| {
            let peer = 1 - r.rank;
            std::thread::scope(|s| {
                for t in 0..THREADS {
                    s.spawn(move || {
                        for i in 0..EACH {
                            let at = t as usize * 64 + (i % 64) as usize;
                            let entries = [write(dst.at(at), src.at(at), 8), nic.add_signal(t as usize % 2, t, i + 1)];
                            match i % 3 {
                                0 => drop(nic.post_counted(t as usize % 2, peer, &entries, t)),
                                _ => drop(nic.qp(t as usize % 2, peer).post(&entries)),
                            }
                        }
                    });
                }
            });
            for t in 0..THREADS {
                let c = t as usize % 2;
                assert_eq!(nic.qp(c, peer).flush(), Status::Good);
                nic.wait_signal(c, t, EACH * (EACH + 1) / 2);
                nic.wait_counter(c, t, EACH.div_ceil(3));
            }
            r.job.barrier.wait();
            for t in 0..THREADS {
                assert_eq!(nic.signal(t as usize % 2, t), EACH * (EACH + 1) / 2);
                assert_eq!(nic.counter(t as usize % 2, t), EACH.div_ceil(3));
            }
            assert!(!nic.has_error());
        });
    }
}

/// More laps than an index in a doorbell has values.
#[test]
fn indices_wrap_beyond_sixteen_bits() {
    for ask in [ways()[1], ways()[2], ways()[3]] {
        on_ranks(1, Ask { depth: 64, counters: 0, ..ask }, |_, nic, _, _| {
            let qp = nic.qp(0, 0);
            for i in 0..70_000 / 32 {
                let last = qp.post(&vec![nic.add_signal(0, 1, 1); 32]);
                assert_eq!(last, 32 * i + 31);
            }
            assert_eq!(qp.flush(), Status::Good);
            assert_eq!(nic.signal(0, 1), 70_000 / 32 * 32);
        });
    }
}

#[test]
fn all_ranks_talk_to_those_that_the_stride_leaves() {
    on_ranks(4, Ask { stride: 2, handler: Ringing::FreeFlow, ..Ask::default() }, |r, nic, src, dst| {
        for peer in 0..4 {
            assert_eq!(nic.has(0, peer), peer % 2 == r.rank % 2);
        }
        src.set(0, 100 + r.rank as u64);
        for peer in [r.rank, (r.rank + 2) % 4] {
            nic.qp(0, peer).post(&[write(dst.at(r.rank), src.at(0), 8), nic.add_signal(0, 7, 1)]);
        }
        nic.wait_signal(0, 7, 2);
        for peer in [r.rank, (r.rank + 2) % 4] {
            assert_eq!(dst.get(peer), 100 + peer as u64);
            assert_eq!(nic.qp(0, peer).flush(), Status::Good);
        }
    });
}

/// What a fenced entry writes is what the reads before it have brought.
#[test]
fn a_fenced_entry_comes_after_the_reads_before_it() {
    on_ranks(2, Ask::default(), |r, nic, src, dst| {
        let (peer, qp) = (1 - r.rank, nic.qp(0, 1 - r.rank));
        for round in 1..=200u64 {
            src.set(0, 1000 * round + r.rank as u64);
            dst.set(1, 0);
            r.job.barrier.wait();
            // Reads the peer's word, and writes it back to the peer at once.
            qp.post(&[read(src.at(0), src.at(9), 8), write(dst.at(1), src.at(9), 8).fenced(), nic.add_signal(0, 0, 1)]);
            nic.wait_signal(0, 0, round);
            assert_eq!(dst.get(1), 1000 * round + r.rank as u64, "from rank {peer}");
            assert_eq!(qp.flush(), Status::Good);
            r.job.barrier.wait();
        }
    });
}

/// A read brings what the entries before it have written and added, by whatever way they go.
#[test]
fn a_read_brings_what_was_sent_before_it() {
    for ask in ways() {
        on_ranks(2, ask, |r, nic, src, dst| {
            let (qp, sink) = (nic.qp(0, 1 - r.rank), (nic.view.sink, 0));
            for round in 1..=200u64 {
                src.set(611, round);
                qp.post(&[
                    value(dst.at(1), &round.to_le_bytes()),
                    write(dst.at(100), src.at(100), 4096),
                    add(dst.at(0), 1, sink),
                ]);
                let got = qp.post(&[read(dst.at(0), src.at(2), 16), read(dst.at(611), src.at(4), 8)]);
                assert_eq!(qp.wait(got), Status::Good);
                assert_eq!([2, 3, 4].map(|i| src.get(i)), [round; 3]);
            }
            assert!(!nic.has_error());
        });
    }
}

/// Device code that was compiled before there was free flow, told to ring so: it writes entries and rings nothing.
#[test]
fn entries_that_nobody_rings_are_found_by_their_arrival() {
    const ROUNDS: u64 = 100;
    on_ranks(2, Ask { handler: Ringing::FreeFlow, depth: 8, ..Ask::default() }, |r, nic, src, dst| {
        let (peer, qp) = (1 - r.rank, nic.qp(0, 1 - r.rank));
        let held = |rank: usize, round: u64| (round << 8) + rank as u64 + 1;
        for round in 0..ROUNDS {
            let (first, at) = (qp.reserve(2), round as usize);
            src.set(at, held(r.rank, round));
            qp.put_entry(first, &write(dst.at(at), src.at(at), 8));
            qp.put_entry(first + 1, &nic.add_signal(0, 0, 1));
            assert_eq!(qp.wait(first + 1), Status::Good);
        }
        nic.wait_signal(0, 0, ROUNDS);
        (0..ROUNDS).for_each(|round| assert_eq!(dst.get(round as usize), held(peer, round)));
        assert!(!nic.has_error());
    });
}
