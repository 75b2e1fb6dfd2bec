//! Entries of one kind, in orders that find what all kinds together find late.

use super::queue::{Entry, Queue};
use super::*;

/// One queue, whose entries come as soon as its index allows: its slots are used again at once.
pub fn serve_fast(slots: Slots, ptx: &str, seed: u64, spread: u64, kind: fn(&Entry, usize) -> bool) {
    let mut bench = Bench::of(slots, ptx, seed, spread, 1);
    let place = bench.any_place();
    serve_fast_on(bench, place, |_, entry, i| kind(entry, i));
}

/// The same of a bench that has this queue alone.
pub fn serve_fast_on(mut bench: Bench, place: usize, kind: impl Fn(&Queue, &Entry, usize) -> bool) {
    bench.queues[place].as_mut().expect("a queue").slots = 4;
    bench.empty_queues();
    bench.launch(NEVER, NEVER);
    bench.go();
    for i in 0..60 {
        let q = bench.queues[place].as_mut().expect("a queue");
        let entry = q.entry_where(&mut bench.gpu.random, |q, e| e.bytes() <= 128 && kind(q, e, i));
        let mut turns = 0;
        while bench.room(place) == 0 {
            bench.run(4);
            turns += 4;
            bench.check();
            assert!(turns < TOO_LONG / 4, "an entry is lost");
        }
        bench.check();
        bench.post(vec![(place, entry)], 1);
    }
    bench.run_until(|b| b.left() == 0);
    bench.finish();
}

/// Signals alone.
pub fn serve_signals(ptx: &str, seed: u64) {
    serve_fast(Slots::Descriptors, ptx, seed, seed % 4, |e, _| e.data.is_none());
}

/// Bytes that all threads of a group move, with a signal.
pub fn serve_signalled(ptx: &str, seed: u64) {
    serve_fast(Slots::Descriptors, ptx, seed, seed % 4, |e, _| {
        e.signal.is_some_and(|s| !s.is_shared) && e.bytes() > 32
    });
}

/// Bytes without a signal, then a signal alone: one look each.
pub fn serve_later(ptx: &str, seed: u64) {
    serve_fast(Slots::Descriptors, ptx, seed, 3, is_in_turn);
}

/// Bytes alone, and a signal alone.
pub fn is_in_turn(e: &Entry, i: usize) -> bool {
    match i % 2 {
        0 => e.data.is_some() && e.signal.is_none(),
        _ => e.data.is_none() && e.signal.is_some_and(|s| !s.is_shared),
    }
}

#[test]
fn slots_are_used_again_at_once() {
    (0..8).for_each(|seed| serve_signals(PTX, seed));
    (0..8).for_each(|seed| serve_later(PTX, seed));
    (0..4).for_each(|seed| serve_signalled(PTX, seed));
}

/// Of the four entries of this queue none is taken from number `at` on, for long, while other queues go on.
pub fn go_on_around(bench: &mut Bench, place: usize, at: usize) {
    bench.run_until(|b| b.taken(place) == at);
    for other in bench.places().into_iter().filter(|&p| p != place) {
        let some = (0..3).map(|_| (other, bench.entry(other))).collect();
        bench.post(some, 2);
    }
    bench.run_until(|b| b.left() == 4 - at);
    bench.run(20_000);
    bench.check();
    assert_eq!((bench.taken(place), bench.position(place).1), (at, false));
}

/// An entry of which a word is missing, whichever: nothing behind it in its queue is taken, and other queues go on.
pub fn serve_gap(ptx: &str, seed: u64) {
    let mut bench = Bench::new(ptx, seed, seed % 4, 3);
    let place = bench.any_place();
    bench.launch(NEVER, NEVER);
    bench.go();
    let missing = bench.below(8);
    let at = bench.below(4) as usize;
    let all: Vec<(usize, Entry)> = (0..4).map(|_| (place, bench.entry(place))).collect();
    all.iter().for_each(|(_, e)| bench.bring(e));
    // All that is there is published with the last word of all; the missing one comes much later.
    let slots: Vec<u64> = (0..4).map(|i| bench.queue(place).slot_at(i)).collect();
    let late = (slots[at] + 8 * missing, all[at].1.words[missing as usize]);
    for (slot, (_, entry)) in slots.iter().zip(&all) {
        for (i, &word) in (0..).zip(&entry.words) {
            if slot + 8 * i != late.0 {
                bench.gpu.memory.post(slot + 8 * i, 8, word);
            }
        }
    }
    let entries: Vec<Entry> = all.into_iter().map(|(_, e)| Entry { is_rung: true, ..e }).collect();
    bench.queues[place].as_mut().expect("a queue").entries.extend(entries);
    go_on_around(&mut bench, place, at);
    bench.gpu.memory.post(late.0, 8, late.1);
    bench.run_until(|b| b.left() == 0);
    bench.finish();
}

#[test]
fn nothing_passes_a_gap() {
    (0..16).for_each(|seed| serve_gap(PTX, seed));
}

/// Who looks in vain leaves the L1 of its multiprocessor alone, which an acquire or a fence would empty.
pub fn serve_waiting(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = Bench::of(slots, ptx, seed, seed % 4, 3);
    bench.launch(NEVER, NEVER);
    bench.go();
    bench.post_some(seed % 4 * 4);
    bench.run_until(|b| b.left() == 0);
    // Each warp looks 64 times and more.
    bench.run(120_000);
    let before = (bench.gpu.acquired, bench.gpu.loaded);
    bench.run(10_000);
    assert!(bench.gpu.loaded > before.1, "nobody looks");
    assert_eq!(bench.gpu.acquired, before.0, "seed {seed}");
    bench.post_some(3);
    bench.run_until(|b| b.left() == 0);
}

pub fn serve_waiting_sends(ptx: &str, seed: u64) {
    serve_waiting(Slots::Sends, ptx, seed);
}

#[test]
fn who_waits_acquires_nothing() {
    (0..8).for_each(|seed| serve_waiting(Slots::Descriptors, PTX, seed));
    (0..4).for_each(|seed| serve_waiting_sends(PTX, seed));
}
