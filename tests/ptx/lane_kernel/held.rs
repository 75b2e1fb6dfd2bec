//! Full looks one after another, of which every first one is held until the next one is dealt with: whatever comes
//! behind it, what is held is done once, and before anything says so.

use super::alike::{full, post_each};
use super::queue::{Data, Entry, Queue};
use super::refused::{bad_descriptor, check_left_alone};
use super::sends_refused::bad_send;
use super::*;

/// One warp, whichever or this one, whose queues have room for several looks.
pub fn wide(slots: Slots, ptx: &str, seed: u64, warp: Option<u64>) -> Bench {
    let mut bench = full(slots, ptx, seed);
    bench.late_every = 0;
    // The smallest one decides what is looked at ahead.
    let mut looks = || [2, 4, 4, 8][bench.gpu.random.below(4) as usize];
    let (one, others) = (looks(), looks());
    for (i, q) in bench.queues.iter_mut().flatten().enumerate() {
        q.slots = (8 >> bench.spread) * if i == 0 { one } else { others };
    }
    if let Some(warp) = warp {
        let (from, to) = (bench.places()[0], (warp << bench.spread) as usize);
        (0..1 << bench.spread).for_each(|i| bench.queues.swap(from + i, to + i));
    }
    bench.empty_queues();
    bench
}

/// Up to so many full looks at once, or a few entries more.
fn post_looks(bench: &mut Bench, most: u64) {
    let looks = 1 + bench.below(most);
    let more = bench.below(2) * bench.below(8 >> bench.spread);
    post_each(bench, looks * (8 >> bench.spread) + more, 1);
    // Else it finds them full only by chance; but what it finds then it need not see as it is.
    if bench.below(2) == 0 {
        bench.gpu.stand();
    }
}

/// Time passes until it is so, a little at a time.
fn run_closely(bench: &mut Bench, is_so: impl Fn(&Bench) -> bool) {
    let is_first = bench.places()[0] < 1 << bench.spread;
    let (step, mut turns) = (if is_first { 5 } else { 20 }, 0);
    while !is_so(bench) {
        bench.run(step);
        turns += step;
        bench.check();
        assert!(turns < TOO_LONG / 4, "{} entries are left", bench.left());
    }
}

/// It ends, and the next launch takes what is left.
fn end(mut bench: Bench) {
    if !bench.is_gone() {
        bench.stop();
        bench.run_until(Bench::is_gone);
    }
    bench.check_end();
    bench.launch(NEVER, NEVER);
    bench.go();
    bench.run_until(|b| b.left() == 0);
    bench.finish();
}

/// Nothing behind them, or not for long.
pub fn serve_held_slots(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = wide(slots, ptx, seed, None);
    bench.launch(NEVER, NEVER);
    bench.go();
    for _ in 0..8 {
        post_looks(&mut bench, 5);
        if bench.below(3) > 0 {
            run_closely(&mut bench, |b| b.left() == 0);
        } else {
            let some = bench.below(600);
            bench.run(some);
        }
    }
    run_closely(&mut bench, |b| b.left() == 0);
    end(bench);
}

pub fn serve_held(ptx: &str, seed: u64) {
    serve_held_slots(Slots::Descriptors, ptx, seed);
}

pub fn serve_held_sends(ptx: &str, seed: u64) {
    serve_held_slots(Slots::Sends, ptx, seed);
}

#[test]
fn full_looks_are_held() {
    (0..8).for_each(|seed| serve_held(PTX, seed));
    (0..8).for_each(|seed| serve_held_sends(PTX, seed));
}

/// Signals alone, a full look of them or several, and then nothing: those of the last look are in order behind the
/// others.
pub fn serve_held_signals(ptx: &str, seed: u64) {
    let mut bench = wide(Slots::Descriptors, ptx, seed, None);
    bench.launch(NEVER, NEVER);
    bench.go();
    let is_wanted = |e: &Entry| e.data.is_none() && e.signal.is_some_and(|s| !s.is_shared);
    for _ in 0..12 {
        let looks = 1 + bench.below(3);
        for place in (0..looks * (8 >> bench.spread)).flat_map(|_| bench.places()).collect::<Vec<_>>() {
            if bench.room(place) > 0 {
                let q = bench.queues[place].as_mut().expect("a queue");
                let entry = q.entry_of(&mut bench.gpu.random, is_wanted);
                bench.post(vec![(place, entry)], 1);
            }
        }
        bench.gpu.stand();
        run_closely(&mut bench, |b| b.left() == 0);
    }
    end(bench);
}

#[test]
fn signals_that_are_held_come_behind_others() {
    (0..8).for_each(|seed| serve_held_signals(PTX, seed));
}

/// Short puts, the second look of which comes when the first one may be found: what it finds ahead is new to it.
pub fn serve_held_new_slots(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = wide(slots, ptx, seed, Some(0));
    bench.launch(NEVER, NEVER);
    bench.go();
    // While there is room for them.
    let tries = std::cell::Cell::new(4000);
    let is_wanted = |e: &Entry| {
        tries.set(tries.get() - i32::from(tries.get() > 0));
        tries.get() == 0 || e.bytes() <= 64 && matches!(e.data, Some(Data::Copy { .. }))
    };
    for _ in 0..6 {
        for _ in 0..2 {
            for place in (0..8 >> bench.spread).flat_map(|_| bench.places()).collect::<Vec<_>>() {
                let q = bench.queues[place].as_mut().expect("a queue");
                let entry = q.entry_of(&mut bench.gpu.random, is_wanted);
                bench.post(vec![(place, entry)], 1);
            }
            if bench.left() == 8 {
                bench.gpu.stand();
            }
        }
        run_closely(&mut bench, |b| b.left() == 0);
    }
    end(bench);
}

pub fn serve_held_new(ptx: &str, seed: u64) {
    serve_held_new_slots(Slots::Descriptors, ptx, seed);
}

pub fn serve_held_new_sends(ptx: &str, seed: u64) {
    serve_held_new_slots(Slots::Sends, ptx, seed);
}

#[test]
fn what_is_found_ahead_is_new() {
    (0..8).for_each(|seed| serve_held_new(PTX, seed));
    (0..8).for_each(|seed| serve_held_new_sends(PTX, seed));
}

/// There is always something to do until it ends.
fn run_steadily(bench: &mut Bench, stops_at: u64) {
    let span = 8 >> bench.spread;
    let mut turns = 0;
    while !bench.is_gone() {
        if bench.places().into_iter().all(|p| bench.room(p) >= span) {
            post_each(bench, 64, 1);
        }
        if turns >= stops_at {
            bench.stop();
        }
        bench.run(20);
        turns += 20;
        bench.check();
        assert!(turns < TOO_LONG / 2, "it does not end");
    }
}

/// It is stopped while one is held, maybe. The first warp never is: it reads the word for all before it looks.
pub fn serve_held_stopped_slots(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = wide(slots, ptx, seed, Some(1 + seed % 7));
    bench.launch(NEVER, NEVER);
    bench.go();
    let stops_at = 4_000 + bench.below(12_000);
    run_steadily(&mut bench, stops_at);
    end(bench);
}

pub fn serve_held_stopped(ptx: &str, seed: u64) {
    serve_held_stopped_slots(Slots::Descriptors, ptx, seed);
}

/// Its life ends.
pub fn serve_held_life(ptx: &str, seed: u64) {
    let mut bench = wide(Slots::Descriptors, ptx, seed, Some(0));
    let life = 3_000 + bench.below(9_000);
    bench.launch(NEVER, life);
    bench.go();
    run_steadily(&mut bench, NEVER);
    end(bench);
}

#[test]
fn what_is_held_is_done_at_the_end() {
    (0..8).for_each(|seed| serve_held_stopped(PTX, seed));
    (0..8).for_each(|seed| serve_held_stopped_slots(Slots::Sends, PTX, seed));
    (0..8).for_each(|seed| serve_held_life(PTX, seed));
}

/// Entries of a queue, as many as it has slots; the first one behind a full look is `one`, or any in two looks.
fn with_one(bench: &mut Bench, place: usize, one: Option<Entry>) -> (Vec<(usize, Entry)>, usize) {
    let (span, slots) = (8usize >> bench.spread, bench.queue(place).slots as usize);
    let at = [span, span, bench.below(2 * span as u64) as usize][bench.below(3) as usize];
    let mut entry = |i| one.filter(|_| i == at).unwrap_or_else(|| bench.entry(place));
    ((0..slots).map(|i| (place, entry(i))).collect(), at)
}

/// Behind a full look one is refused. Others go on.
pub fn serve_held_refused_slots(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = wide(slots, ptx, seed, None);
    let place = bench.any_place();
    let q: &mut Queue = bench.queues[place].as_mut().expect("a queue");
    let bad = match slots {
        Slots::Descriptors => bad_descriptor(q, &mut bench.gpu.random),
        Slots::Sends | Slots::Bells => bad_send(q, &mut bench.gpu.random),
    };
    bench.launch(NEVER, NEVER);
    bench.go();
    let (all, at) = with_one(&mut bench, place, Some(bad));
    for other in bench.places().into_iter().filter(|&p| p != place) {
        for _ in 0..8 >> bench.spread {
            let entry = bench.entry(other);
            bench.post(vec![(other, entry)], 1);
        }
    }
    let rest = all.len() - at;
    all.into_iter().for_each(|one| bench.post(vec![one], 1));
    bench.gpu.stand();
    run_closely(&mut bench, |b| b.position(place).1);
    assert_eq!(bench.queue(place).refused, Some(at));
    check_left_alone(&mut bench, place, "behind a full look");
    run_closely(&mut bench, |b| b.left() == rest);
    bench.finish();
}

pub fn serve_held_refused(ptx: &str, seed: u64) {
    serve_held_refused_slots(Slots::Descriptors, ptx, seed);
}

#[test]
fn what_is_behind_a_full_look_is_refused() {
    (0..12).for_each(|seed| serve_held_refused(PTX, seed));
    (0..12).for_each(|seed| serve_held_refused_slots(Slots::Sends, PTX, seed));
}

/// Behind full looks of all queues one has a word missing, or is not rung: all before it is done all the same.
pub fn serve_held_gap(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = wide(slots, ptx, seed, None);
    let place = bench.any_place();
    bench.launch(NEVER, NEVER);
    bench.go();
    let (mut all, at) = with_one(&mut bench, place, None);
    for other in bench.places().into_iter().filter(|&p| p != place) {
        for _ in 0..8 >> bench.spread {
            let entry = bench.entry(other);
            bench.post(vec![(other, entry)], 1);
        }
    }
    let rest = all.len() - at;
    let missing = bench.below(8) as usize;
    let word = std::mem::take(&mut all[at].1.words[missing]);
    match slots {
        Slots::Descriptors => all.into_iter().for_each(|one| bench.post(vec![one], 1)),
        Slots::Sends | Slots::Bells => {
            all[at].1.words[missing] = word;
            bench.send(all, Some(at), 1);
        }
    }
    bench.gpu.stand();
    run_closely(&mut bench, |b| b.left() == rest);
    bench.run(2_000);
    bench.check();
    assert_eq!((bench.taken(place), bench.position(place).1), (at, false));
    match slots {
        Slots::Descriptors => {
            let q = bench.queues[place].as_mut().expect("a queue");
            q.entries[at].words[missing] = word;
            let slot = q.slot_at(at);
            bench.gpu.memory.post(slot + 8 * missing as u64, 8, word);
        }
        Slots::Sends | Slots::Bells => bench.ring_late(),
    }
    run_closely(&mut bench, |b| b.left() == 0);
    end(bench);
}

#[test]
fn nothing_passes_a_gap_behind_a_full_look() {
    (0..8).for_each(|seed| serve_held_gap(Slots::Descriptors, PTX, seed));
    (0..8).for_each(|seed| serve_held_gap(Slots::Sends, PTX, seed));
}
