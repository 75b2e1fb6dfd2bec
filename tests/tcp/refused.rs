//! Operations that a peer refuses: they touch nothing, their context alone fails, and whoever was refused leaves in
//! order.

use super::harness::*;
use oxygin::error::Kind;
use oxygin::rma::op::{Op, Put};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

fn refused(work: impl Fn(&Rank, &Rank) -> Op, wanted: &str) {
    let _guard = alone();
    let all = ranks(3, 1, 1 << 17);
    let (a, b) = (&all[0], &all[1]);
    signal_works(a, b);
    let lane = a.lane(3, 1);
    let seq = a.post(&lane, work(a, b));
    until("failure", || lane.has_failed());
    let e = lane.test(seq).and_then(|_| lane.check()).unwrap_err();
    assert_eq!(e.kind(), Kind::RemoteAccess);
    assert!(e.message().contains("rank 1 refused") && e.message().contains(wanted), "{e}");
    assert!(b.data.iter().all(|w| w.load(SeqCst) == 0), "refused bytes were written");
    assert_eq!(b.signals[0].load(SeqCst), 0, "a refused put rang");
    // Later operations fail; nothing hangs.
    let later = a.post(&lane, Op::Put(put(address(&a.data), address(&b.data), 8)));
    assert!(lane.test(later).is_err());
    // Other contexts to the same peer lost nothing, and neither did the peer and others.
    assert!(!a.health[1].has_failed());
    let other = a.lane(4, 1);
    let bulk = Put { signal: bell(&b.signals[1], 1, true), ..put(address(&a.data), address(&b.data), 8 << 17) };
    let seqs =
        [a.post(&other, Op::Get(get(address(&a.data), address(&b.data), 8 << 17))), a.post(&other, Op::Put(bulk))];
    until("another context", || seqs.iter().all(|&seq| other.test(seq).unwrap()));
    until("its signal", || b.signals[1].load(SeqCst) == 1);
    signal_works(a, b);
    signal_works(b, a);
    signal_works(&all[2], b);
    signal_works(a, &all[2]);
    assert!(!b.health[0].has_failed());
}

#[test]
fn a_put_past_the_window_is_refused() {
    refused(
        |a, b| {
            let mut p = put(address(&a.data), address(&b.data) + 8 * (1 << 17) - 4, 8);
            p.signal = bell(&b.signals[0], 1, true);
            Op::Put(p)
        },
        "put to 8 bytes",
    );
}

#[test]
fn a_large_put_to_no_window_is_refused() {
    refused(
        |a, b| {
            let mut p = put(address(&a.data), address(&b.data), 1 << 20);
            p.rkey = 77;
            p.signal = bell(&b.signals[0], 1, true);
            Op::Put(p)
        },
        "window 77",
    );
}

#[test]
fn a_put_that_wraps_around_is_refused() {
    refused(|a, _| Op::Put(put(address(&a.data), u64::MAX - 3, 8)), "0xfffffffffffffffc");
}

#[test]
fn a_get_of_nobodys_memory_is_refused() {
    refused(|a, b| Op::Get(get(address(&a.data), address(&b.data) - 8, 1 << 20)), "get from");
}

#[test]
fn a_misaligned_signal_is_refused() {
    refused(
        |_, b| {
            let mut p = put(0, 0, 0);
            p.signal = bell(&b.signals[0], 1, true);
            p.signal.as_mut().unwrap().remote += 4;
            Op::Put(p)
        },
        "signal at 8 bytes",
    );
}

#[test]
fn who_was_refused_still_leaves_in_order() {
    let _guard = alone();
    let all = ranks(2, 1, 1 << 10);
    let lane = all[0].lane(0, 1);
    let wrong = Put { rkey: 77, ..put(address(&all[0].data), address(&all[1].data), 64) };
    all[0].post(&lane, Op::Put(wrong));
    until("refusal", || lane.has_failed());
    all[0].tcp.close();
    // Time for the end to arrive.
    std::thread::sleep(Duration::from_millis(100));
    assert!(!all[1].health[0].has_failed(), "{:?}", all[1].health[0].check());
}
