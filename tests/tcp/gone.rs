//! Windows and contexts that go while bytes are on their way: nothing of theirs is written or read any more, and what
//! others do goes on.

use super::harness::*;
use oxygin::rma::op::Op;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

#[test]
fn a_deregistered_window_takes_no_more_bytes() {
    let _guard = alone();
    let all = ranks(2, 1, 1 << 20);
    let (a, b) = (&all[0], &all[1]);
    let source = words(1 << 20);
    pattern(&source, 2);
    let lane = a.lane(0, 1);
    for _ in 0..50 {
        a.post(&lane, Op::Put(put(address(&source), address(&b.data), 8 << 20)));
    }
    until("first bytes", || b.data[0].load(SeqCst) != 0);
    b.registry.remove(DATA);
    for w in &b.data {
        w.store(0, SeqCst);
    }
    until("refusal", || lane.has_failed());
    assert!(b.data.iter().all(|w| w.load(SeqCst) == 0), "written after deregistration");
    signal_works(b, a);
    signal_works(a, b);
}

/// A context goes in the middle of a large get: nothing more comes into its memory, and others' gets are theirs.
#[test]
fn what_comes_for_a_context_that_is_gone_is_thrown_away() {
    const WORDS: usize = 4 << 20;
    let _guard = alone();
    let mut all = ranks(2, 2, WORDS);
    pattern(&all[1].data, 7);
    let theirs = address(&all[1].data);
    let stays = all[0].lane(1, 1);
    let (first, second) = (words(WORDS), words(WORDS / 8));
    // A machine that is slow at the wrong moment lets all of it through.
    let mut gone = None;
    for context in 2..50 {
        first.iter().for_each(|w| w.store(0, SeqCst));
        let lane = all[0].lane(context, 1);
        let seq = all[0].post(&lane, Op::Get(get(address(&first), theirs, 8 * WORDS)));
        until("the first bytes", || first[0].load(SeqCst) != 0);
        // What it has sent so far may arrive.
        all[1].freeze();
        if !lane.test(seq).unwrap() {
            gone = Some(lane);
            break;
        }
        all[1].thaw();
    }
    let gone = gone.expect("a get that is unfinished");
    let other = all[0].post(&stays, Op::Get(get(address(&second), theirs, WORDS)));
    all[0].tcp.drop_lane(&gone, Instant::now() + Duration::from_secs(10));
    let before: Vec<u64> = first.iter().map(|w| w.load(SeqCst)).collect();
    all[1].thaw();
    wait(&stays, other);
    assert!(second.iter().zip(&all[1].data).all(|(a, b)| a.load(SeqCst) == b.load(SeqCst)));
    // Behind everything that the first had asked for.
    let seq = all[0].post(&stays, Op::Get(get(address(&second), theirs, WORDS)));
    wait(&stays, seq);
    assert!(first.iter().zip(&before).all(|(now, before)| now.load(SeqCst) == *before), "bytes came");
    signal_works(&all[0], &all[1]);
    assert!(!all[0].health[1].has_failed() && !all[1].health[0].has_failed());
}

/// A context goes in the middle of a large put: its memory is not read any more, and others' frames are whole.
#[test]
fn what_a_context_that_is_gone_was_sending_is_not_read() {
    const WORDS: usize = 8 << 20;
    const OTHER: usize = WORDS / 8;
    let _guard = alone();
    let mut all = ranks(2, 2, WORDS);
    let theirs = address(&all[1].data);
    let [gone, stays] = [1, 2].map(|c| all[0].lane(c, 1));
    let (first, second) = (words(WORDS - OTHER), words(OTHER));
    pattern(&second, 7);
    for w in &first {
        w.store(1, SeqCst);
    }
    signal_works(&all[0], &all[1]);
    all[1].freeze();
    let seq = all[0].post(&gone, Op::Put(put(address(&first), theirs + 8 * OTHER as u64, 8 * (WORDS - OTHER))));
    let mut whole = put(address(&second), theirs, 8 * OTHER);
    whole.signal = bell(&all[1].signals[0], 1, true);
    let other = all[0].post(&stays, Op::Put(whole));
    assert!(!gone.test(seq).unwrap());
    all[0].tcp.drop_lane(&gone, Instant::now() + Duration::from_secs(10));
    for w in &first {
        w.store(2, SeqCst);
    }
    all[1].thaw();
    wait(&stays, other);
    until("the signal", || all[1].signals[0].load(SeqCst) == 1);
    assert!(second.iter().zip(&all[1].data).all(|(a, b)| a.load(SeqCst) == b.load(SeqCst)));
    let again = all[0].post(&stays, Op::Put(whole));
    wait(&stays, again);
    until("the signal", || all[1].signals[0].load(SeqCst) == 2);
    let came = |what| all[1].data[OTHER..].iter().filter(|w| w.load(SeqCst) == what).count();
    assert_eq!(came(2), 0, "words that were written after its end");
    assert!(came(0) > 0, "all of it went");
    signal_works(&all[0], &all[1]);
    assert!(!all[0].health[1].has_failed() && !all[1].health[0].has_failed());
}
