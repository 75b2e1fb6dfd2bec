//! Entries that cannot be, windows and peers that go: what device code is told, and what goes on.

use crate::harness::{on_ranks, ways, WORDS};
use crate::support::nic::*;
use oxygin::config::Ringing;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The NIC waits for 250 ms for an entry that was rung for.
const IN_TIME: Duration = Duration::from_millis(100);

const LENGTH: u8 = 0x01;
const OPERATION: u8 = 0x02;
const LOCAL: u8 = 0x04;
const FLUSHED: u8 = 0x05;
const INVALID: u8 = 0x12;
const REMOTE: u8 = 0x13;
const RETRIES: u8 = 0x15;

/// Entries that cannot be, with windows of these keys, and the syndromes that they deserve.
fn bad(src: Place, dst: Place, sink: Place) -> Vec<(Raw, u8)> {
    let end = 8 * WORDS as u64;
    let raw = Raw::new;
    vec![
        (raw(0x0a, 0).remote(dst.0, 0).data(src.0, 0, 8), OPERATION),
        (raw(0x7f, 0), OPERATION),
        (raw(WRITE, 3).remote(dst.0, 0).data(src.0, 0, 8), OPERATION),
        (raw(WRITE, 0).remote(dst.0, 0), OPERATION),
        (raw(NOP, 0).remote(dst.0, 0), OPERATION),
        (raw(WAIT, 0), OPERATION),
        (raw(WAIT, 0).four([0, 0, 0, 4000]), OPERATION),
        (raw(DUMP, 0), OPERATION),
        (raw(MASKED_ADD, 0).remote(dst.0, 0).two(1, 0).data(sink.0, 0, 8), OPERATION),
        (raw(MASKED_SWAP, 9).remote(dst.0, 0).two(1, 0).data(sink.0, 0, 8), OPERATION),
        (raw(WRITE, 0).remote(dst.0, 0).four([13 | 1 << 31, 0, 0, 0]), LENGTH),
        (raw(WRITE, 0).remote(dst.0, 0).four([1 << 31, 0, 0, 0]), LENGTH),
        (write(dst, src, 0), LENGTH),
        (write(dst, src, (1 << 30) + 1), LENGTH),
        (write(dst, src, 1 << 30).data(src.0, 0, 8), LENGTH),
        (raw(FETCH_ADD, 0).remote(dst.0, 0).two(1, 0).data(sink.0, 0, 4), LENGTH),
        (write(dst, (0x0bad_0000, 0), 8), LOCAL),
        (write(dst, (0, 0), 8), LOCAL),
        (write(dst, (src.0 ^ 1, 0), 8), LOCAL),
        (write(dst, (src.0, end - 7), 8), LOCAL),
        (write(dst, (src.0, u64::MAX), 8), LOCAL),
        (write(dst, sink, 8), LOCAL),
        (write(dst, src, 8).data(src.0, end, 1), LOCAL),
        (add(dst, 1, (sink.0, 1)), LOCAL),
        (raw(DUMP, 0).data(sink.0, 8, 1), LOCAL),
        (raw(DUMP, 0).data(0x0bad_0000, 0, 1), LOCAL),
        (read(src, (dst.0, end), 8), LOCAL),
        (write((0x0bad_0000, 0), src, 8), REMOTE),
        (write((u32::MAX, 0), src, 8), REMOTE),
        (write((dst.0, end), src, 1), REMOTE),
        (value((dst.0, end - 3), &[1, 2, 3, 4]), REMOTE),
        (read((src.0, end - 1), dst, 2), REMOTE),
        (add((dst.0, end - 4), 1, sink), REMOTE),
        (add((dst.0, 4), 1, sink), INVALID),
        (add((dst.0, 4), 1, src), INVALID),
    ]
}

/// A malformed entry gets its syndrome, what is behind it is flushed, what was before it is done, and other queue pairs
/// go on.
#[test]
fn a_malformed_entry_ends_its_queue_pair_alone() {
    let n = bad((1, 0), (2, 0), (3, 0)).len() as u32;
    let ask = Ask { contexts: n + 1, depth: 8, counters: 0, ..Ask::default() };
    for ask in [ask, Ask { is_sm90: false, handler: Ringing::FreeFlow, ..ask }] {
        on_ranks(2, ask, |r, nic, src, dst| {
            let (peer, last) = (1 - r.rank, n as usize);
            let bad = bad((src.key, 0), (dst.key, 0), (nic.view.sink, 0));
            assert!(!nic.has_error());
            r.job.barrier.wait();
            for (c, (entry, syndrome)) in bad.iter().enumerate() {
                let qp = nic.qp(c, peer);
                let after = nic.add_signal(c, 1, 1);
                let end = qp.post(&[nic.add_signal(c, 0, 1), entry.clone(), after.clone(), after.clone()]);
                assert_eq!(qp.wait(end - 3), Status::Good, "{c}: before");
                assert_eq!(qp.wait(end - 2), Status::Failed { syndrome: *syndrome }, "{c}");
                assert_eq!(qp.wait(end), Status::Failed { syndrome: FLUSHED }, "{c}: behind");
                // What comes later is flushed, too; device code goes on as long as there are slots.
                let end = qp.post(&[after]);
                assert_eq!(qp.wait(end), Status::Failed { syndrome: FLUSHED }, "{c}: later");
                assert!(nic.has_error());
                // The same context to this rank itself, and another context.
                for (context, to) in [(c, r.rank), (last, peer)] {
                    let end = nic.qp(context, to).post(&[nic.add_signal(context, 2, 1)]);
                    assert_eq!(nic.qp(context, to).wait(end), Status::Good);
                }
                nic.wait_signal(c, 0, 1);
                nic.wait_signal(c, 2, 1);
                nic.wait_signal(last, 2, c as u64 + 1);
            }
            r.job.barrier.wait();
            for c in 0..last {
                assert_eq!((nic.signal(c, 0), nic.signal(c, 1)), (1, 0), "context {c}");
            }
            assert!((0..WORDS).all(|i| dst.get(i) == 0));
        });
    }
}

#[test]
fn an_entry_for_another_queue_pair_is_refused() {
    on_ranks(1, Ask::default(), |_, nic, src, dst| {
        let qp = nic.qp(0, 0);
        let index = qp.reserve(1);
        let mut raw = write(dst.at(0), src.at(0), 8);
        raw.bytes[4..8].copy_from_slice(&((qp.view.number + 1) << 8 | 3).to_be_bytes());
        qp.put_bytes(index, raw);
        qp.ready(index, index);
        qp.submit(index + 1);
        assert_eq!(qp.wait(index), Status::Failed { syndrome: OPERATION });
    });
}

#[test]
fn the_key_of_a_deregistered_window_names_nothing() {
    on_ranks(2, Ask { contexts: 2, ..Ask::default() }, |r, nic, src, dst| {
        let peer = 1 - r.rank;
        // Both queue pairs have seen the windows.
        for c in 0..2 {
            let end = nic.qp(c, peer).post(&[write(dst.at(c), src.at(0), 8)]);
            assert_eq!(nic.qp(c, peer).wait(end), Status::Good);
        }
        r.job.barrier.wait();
        r.dereg(&dst.window);
        let another = r.window(WORDS, 0);
        assert_ne!(nic.key(another.handle), dst.key);
        for (c, raw, syndrome) in
            [(0, write(dst.at(0), src.at(0), 8), REMOTE), (1, read(src.at(0), dst.at(0), 8), LOCAL)]
        {
            let end = nic.qp(c, peer).post(&[raw]);
            assert_eq!(nic.qp(c, peer).wait(end), Status::Failed { syndrome });
        }
    });
}

/// The fabric refuses what this side let pass: the first entry that is outstanding says so, the others are flushed.
#[test]
fn what_the_fabric_fails_is_said_of_the_first_entry() {
    on_ranks(2, Ask { contexts: 2, ..Ask::default() }, |r, nic, src, dst| {
        if r.rank == 1 {
            // Only here: rank 0 does not know.
            r.dereg(&dst.window);
        }
        r.job.barrier.wait();
        if r.rank == 0 {
            let qp = nic.qp(0, 1);
            qp.post(&[write(dst.at(0), src.at(0), 8), Raw::new(NOP, 0)]);
            // A put may be complete when it has left, wherever it goes; later entries find the lane failed.
            wait(
                || "the fabric's fault".into(),
                || {
                    let end = qp.post(&[nic.add_signal(0, 1, 1)]);
                    matches!(qp.wait(end), Status::Failed { .. })
                },
            );
            let failed: Vec<_> = (0..128).map_while(|i| qp.poll(i)).filter(|s| *s != Status::Good).collect();
            assert_eq!(failed[0], Status::Failed { syndrome: RETRIES });
            assert!(failed[1..].iter().all(|s| *s == Status::Failed { syndrome: FLUSHED }), "{failed:?}");
            // What comes later is flushed.
            let later = qp.post(&[Raw::new(NOP, 0)]);
            assert_eq!(qp.wait(later), Status::Failed { syndrome: FLUSHED });
            assert!(nic.has_error());
            let end = nic.qp(1, 0).post(&[nic.add_signal(1, 1, 1)]);
            assert_eq!(nic.qp(1, 0).wait(end), Status::Good);
        }
        r.job.barrier.wait();
    });
}

/// A doorbell for an entry that never comes; what comes late is waited for.
#[test]
fn what_is_rung_is_waited_for_but_not_for_ever() {
    for ask in ways() {
        let came_in_time = AtomicBool::new(false);
        // On a busy machine this thread may itself be the one that is late, which says nothing.
        let attempt = || {
            on_ranks(1, ask, |_, nic, src, dst| {
                let qp = nic.qp(0, 0);
                let first = qp.reserve(2);
                src.set(0, 77);
                let rung = Instant::now();
                qp.ready(first, first);
                qp.submit(first + 1);
                std::thread::yield_now();
                qp.put_entry(first, &write(dst.at(5), src.at(0), 8));
                if rung.elapsed() > IN_TIME {
                    return;
                }
                came_in_time.store(true, Ordering::Relaxed);
                assert_eq!(qp.wait(first), Status::Good);
                assert_eq!(dst.get(5), 77);
                qp.ready(first + 1, first + 1);
                qp.submit(first + 2);
                assert_eq!(qp.wait(first + 1), Status::Failed { syndrome: OPERATION });
                assert!(nic.has_error());
            })
        };
        let done = (0..20).any(|_| {
            attempt();
            came_in_time.load(Ordering::Relaxed)
        });
        assert!(done, "this thread never came in time");
    }
}

/// One more than the ring has room for is refused when it has its turn; the others are carried out.
#[test]
fn more_than_the_ring_holds_is_refused() {
    for ask in ways() {
        on_ranks(1, Ask { depth: 8, contexts: 2, ..ask }, |_, nic, _, _| {
            let (main, companion) = (nic.qp(0, 0), nic.companion(0, 0));
            // It stands until the main queue has moved.
            let hold = Raw::new(WAIT, 0).four([0, 0, 0, main.view.number]);
            companion.put_entry(0, &hold);
            (1..8).for_each(|i| companion.put_entry(i, &nic.add_signal(0, 0, 1)));
            companion.ready(0, 8);
            companion.submit(9);
            // Its slot is that of the first entry, which stands while others go on.
            for _ in 0..100 {
                let end = nic.qp(1, 0).post(&[nic.add_signal(1, 0, 1)]);
                assert_eq!(nic.qp(1, 0).wait(end), Status::Good);
            }
            if ask.handler != Ringing::FreeFlow {
                assert_eq!((companion.poll(0), nic.signal(0, 0)), (None, 0));
            }
            main.post(&[Raw::new(NOP, 0)]);
            if ask.handler == Ringing::FreeFlow {
                // The word of slot 0 says that entry 8 is there: entry 0 is gone, and its completion entry may be 8's.
                assert_eq!(companion.wait(7), Status::Failed { syndrome: FLUSHED });
                assert!(nic.has_error());
                assert_eq!(nic.signal(0, 0), 0);
                return;
            }
            assert_eq!(companion.wait(7), Status::Good);
            companion.poll(0);
            assert_eq!(companion.wait(8), Status::Failed { syndrome: OPERATION });
            assert_eq!(nic.signal(0, 0), 7);
            assert!(nic.has_error());
        });
    }
}

/// An entry that is overwritten while it is outstanding is seen in its slot.
#[test]
fn a_slot_that_is_written_too_early_is_seen() {
    on_ranks(1, Ask { depth: 4, counters: 1, ..Ask::default() }, |_, nic, _, _| {
        let (main, companion) = (nic.qp(0, 0), nic.companion(0, 0));
        companion.put_entry(0, &Raw::new(WAIT, 0).four([0, 0, 0, main.view.number]));
        companion.ready(0, 0);
        companion.submit(1);
        // Device code that does not wait for a free slot.
        companion.put_entry(4, &nic.add_signal(0, 0, 1));
        main.post(&[Raw::new(NOP, 0)]);
        assert_eq!(companion.wait(0), Status::Failed { syndrome: OPERATION });
        assert_eq!(nic.signal(0, 0), 0);
    });
}
