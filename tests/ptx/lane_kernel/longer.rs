//! Copies longer than the most of their lane: taken behind four others or a pause, where a warp has the lane alone.
//! Warps that have nothing else help with them.

use super::queue::{Entry, Queue, ROOM};
use super::refused::check_refused_at;
use super::*;

/// The most of the lane, so that what is longer takes few turns: the longest have four pieces of 8 KiB or eight.
const MOST: [u64; 2] = [1040, 2064];
/// The longest has so many times as much.
const TIMES: u64 = 32;
/// Others that lie between two that are longer.
const BETWEEN: u64 = 4;
/// So many times the most has one at most that comes behind a pause and fewer others.
const TIMES_PAUSED: u64 = 4;

/// One that is so long, at any place that has room; else something shorter.
fn of_bytes(q: &mut Queue, bytes: u64, random: &mut Random) -> Entry {
    if q.pair.is_some() {
        return q.put_send(bytes, random);
    }
    q.put_of(bytes, [16, 4][random.below(2) as usize], random)
}

/// One that is longer than the most, and not too long.
fn longer(q: &mut Queue, random: &mut Random) -> Entry {
    longer_up_to(TIMES, q, random)
}

/// The same of so many times the most at most.
fn longer_up_to(times: u64, q: &mut Queue, random: &mut Random) -> Entry {
    let most = q.most;
    // Half of them can go in words of 16 bytes.
    let unit = [4, 16][random.below(2) as usize];
    let more = random.below((times - 1) * most / unit);
    let bytes = [most + unit, times * most, most + unit * (1 + more)][random.below(3) as usize];
    of_bytes(q, bytes, random)
}

/// Up to four queues, one of which has room for two looks, with windows that have room for the longest.
fn bench_of(slots: Slots, ptx: &str, seed: u64, spread: u64) -> (Bench, usize) {
    /// Behind the windows of four queues as they are else.
    const FIRST: u64 = 4;
    let queues = 2 + Random(seed).below(3);
    let mut bench = Bench::of(slots, ptx, seed, spread, queues);
    let place = bench.any_place();
    for q in bench.queues.iter_mut().flatten() {
        let first = FIRST + 12 * q.number;
        for (i, w) in (first..).step_by(3).zip(q.windows.iter_mut().flatten()) {
            (w.here, w.peer) = (SOURCES + i * ROOM + w.here % 16, TARGETS + i * ROOM + w.peer % 16);
            (w.here_bytes, w.peer_bytes) = (3 * ROOM - 64, 3 * ROOM - 64);
        }
    }
    let q = bench.queues[place].as_mut().expect("a queue");
    (q.most, q.slots) = (MOST[usize::from(seed % 3 == 2)], q.slots.max(16));
    bench.empty_queues();
    (bench, place)
}

/// So many of the queue's others.
fn others(bench: &mut Bench, place: usize, n: u64) -> Vec<Entry> {
    (0..n).map(|_| bench.entry(place)).collect()
}

/// One that is longer, by what makes it of the queue.
fn one(bench: &mut Bench, place: usize, make: impl Fn(&mut Queue, &mut Random) -> Entry) -> Entry {
    make(bench.queues[place].as_mut().expect("a queue"), &mut bench.gpu.random)
}

/// Some, with four others or a few more between them: all are taken.
fn serve_longer(slots: Slots, ptx: &str, seed: u64) {
    let (mut bench, place) = bench_of(slots, ptx, seed, 0);
    let mut entries = Vec::new();
    for _ in 0..4 {
        entries.push(one(&mut bench, place, longer));
        let n = BETWEEN + [0, 0, 0, bench.below(5)][bench.below(4) as usize];
        entries.append(&mut others(&mut bench, place, n));
    }
    bench.launch(NEVER, NEVER);
    bench.go();
    let mut left = entries.into_iter().peekable();
    while left.peek().is_some() {
        let n = bench.room(place).min([16, 1 + bench.below(16) as usize][bench.below(2) as usize]);
        let some = left.by_ref().take(n).map(|entry| (place, entry)).collect();
        bench.post(some, 2);
        let turns = bench.below(2_000);
        bench.run(turns);
        bench.check();
        assert_eq!(bench.queue(place).refused, None, "refused");
    }
    bench.run_until(|b| b.left() == 0);
    bench.finish();
}

/// Of descriptors, of send entries.
pub fn serve_longer_descriptors(ptx: &str, seed: u64) {
    serve_longer(Slots::Descriptors, ptx, seed);
}

pub fn serve_longer_sends(ptx: &str, seed: u64) {
    serve_longer(Slots::Sends, ptx, seed);
}

/// One behind another, with fewer than four others between them and a pause: both are taken.
fn serve_paused(slots: Slots, ptx: &str, seed: u64) {
    let (mut bench, place) = bench_of(slots, ptx, seed, 0);
    bench.late_every = 0;
    bench.launch(NEVER, NEVER);
    bench.go();
    for _ in 0..3 {
        let mut entries = vec![one(&mut bench, place, |q, random| longer_up_to(TIMES_PAUSED, q, random))];
        let n = bench.below(BETWEEN);
        entries.append(&mut others(&mut bench, place, n));
        bench.post(entries.into_iter().map(|entry| (place, entry)).collect(), 2);
        bench.run_until(|b| b.left() == 0);
        assert_eq!(bench.queue(place).refused, None, "refused");
        // All warps look many times meanwhile.
        bench.run(40_000);
    }
    bench.finish();
}

pub fn serve_paused_descriptors(ptx: &str, seed: u64) {
    serve_paused(Slots::Descriptors, ptx, seed);
}

pub fn serve_paused_sends(ptx: &str, seed: u64) {
    serve_paused(Slots::Sends, ptx, seed);
}

/// So many looks make a pause, and a text with more.
const PAUSE: &str = "vain, 4;\n    @%p0 mov.u32    soon";
const LONGER_PAUSE: &str = "vain, 40;\n    @%p0 mov.u32    soon";

/// One behind a pause, and another one behind few looks that find nothing, which are no pause.
pub fn serve_too_soon_behind_a_pause(ptx: &str, seed: u64) {
    let slots = [Slots::Descriptors, Slots::Sends][seed as usize / 2 % 2];
    // What says that the copy is taken is seen some looks later; so a pause is longer here.
    let ptx = &ptx.replace(PAUSE, LONGER_PAUSE);
    // Of the other half of the seeds all looks are calm, and may see nothing for long.
    let (mut bench, place) = bench_of(slots, ptx, 2 * seed, 0);
    bench.late_every = 0;
    // What is posted last is seen at once, or there was a pause.
    bench.gpu.late = 0;
    let all = [(); 3].map(|()| one(&mut bench, place, |q, random| of_bytes(q, q.most + 16, random)));
    if all.iter().any(|e| e.bytes() <= bench.queue(place).most) {
        return; // There was no room.
    }
    bench.launch(NEVER, NEVER);
    bench.go();
    for (i, turns) in [200_000, 20].into_iter().enumerate() {
        bench.post(vec![(place, all[i])], 1);
        bench.run_until(|b| b.taken(place) == i + 1);
        bench.run(turns);
    }
    bench.post(vec![(place, Entry::new(all[2].words, None, None))], 1);
    bench.gpu.stand();
    bench.run_until(|b| b.position(place).1);
    bench.check();
    assert_eq!(bench.queue(place).refused, Some(2), "too soon");
    bench.finish();
}

/// Behind a pause, with fewer than four others between them: the second one is too long for that.
pub fn serve_paused_too_long(ptx: &str, seed: u64) {
    let slots = [Slots::Descriptors, Slots::Sends][seed as usize / 2 % 2];
    let (mut bench, place) = bench_of(slots, ptx, seed, 0);
    bench.late_every = 0;
    let bytes = TIMES_PAUSED * bench.queue(place).most + 4;
    let [first, second] = [(); 2].map(|()| one(&mut bench, place, |q, random| of_bytes(q, bytes, random)));
    if first.bytes() != bytes || second.bytes() != bytes {
        return; // There was no room.
    }
    bench.launch(NEVER, NEVER);
    bench.go();
    bench.post(vec![(place, first)], 2);
    bench.run_until(|b| b.left() == 0);
    bench.run(40_000);
    bench.post(vec![(place, Entry::new(second.words, None, None))], 2);
    bench.run_until(|b| b.position(place).1);
    bench.check();
    assert_eq!(bench.queue(place).refused, Some(1), "too long");
    bench.finish();
}

/// Several queues have such copies at the same time: one of them is helped with, and the others look behind each piece
/// whether they may be. Returns how often a warp has helped.
fn serve_many(slots: Slots, ptx: &str, seed: u64) -> u64 {
    let (mut bench, _) = bench_of(slots, ptx, seed, 0);
    let mut entries = Vec::new();
    for place in bench.places() {
        bench.queues[place].as_mut().expect("a queue").most = MOST[usize::from(seed % 3 == 2)];
        let longest = |q: &mut Queue, random: &mut Random| match slots {
            Slots::Descriptors => q.put_of(TIMES * q.most, 16, random),
            Slots::Sends | Slots::Bells => q.put_send(TIMES * q.most, random),
        };
        entries.push((place, one(&mut bench, place, longest)));
        let behind = bench.below(3);
        entries.extend(others(&mut bench, place, behind).into_iter().map(|entry| (place, entry)));
    }
    bench.launch(NEVER, NEVER);
    bench.go();
    bench.post(entries, 2);
    bench.run_until(|b| b.left() == 0);
    bench.finish();
    bench.gpu.told
}

/// The same; somebody helps.
pub fn serve_many_descriptors(ptx: &str, seed: u64) {
    assert!(serve_many(Slots::Descriptors, ptx, seed) > 0, "nobody has helped");
}

/// Fewer than four others lie between two; sometimes nothing does, and the second one is like the first.
fn serve_too_soon(slots: Slots, ptx: &str, seed: u64) {
    let (mut bench, place) = bench_of(slots, ptx, seed, 0);
    let before = bench.below(5);
    let mut entries = others(&mut bench, place, before);
    let first = one(&mut bench, place, longer);
    if first.bytes() <= bench.queue(place).most {
        return; // There was no room.
    }
    entries.push(first);
    let between = bench.below(BETWEEN);
    entries.append(&mut others(&mut bench, place, between));
    let second = match between {
        0 if slots == Slots::Descriptors => first,
        _ => one(&mut bench, place, |q, random| of_bytes(q, q.most + 16, random)),
    };
    if second.bytes() <= bench.queue(place).most {
        return;
    }
    let at = entries.len();
    entries.push(Entry::new(second.words, None, None));
    let behind = bench.below(4);
    entries.append(&mut others(&mut bench, place, behind));
    check_refused_at(bench, place, entries, at, "too soon");
}

pub fn serve_too_soon_descriptors(ptx: &str, seed: u64) {
    serve_too_soon(Slots::Descriptors, ptx, seed);
}

pub fn serve_too_soon_sends(ptx: &str, seed: u64) {
    serve_too_soon(Slots::Sends, ptx, seed);
}

/// One that nobody takes, of so many times the most and 4 bytes, behind some others.
fn serve_never(slots: Slots, ptx: &str, seed: u64, spread: u64, times: u64) {
    let (mut bench, place) = bench_of(slots, ptx, seed, spread);
    let bytes = times * bench.queue(place).most + 4;
    let bad = one(&mut bench, place, |q, random| of_bytes(q, bytes, random));
    let before = bench.below(10);
    let mut entries = others(&mut bench, place, before);
    if bad.bytes() == bytes {
        entries.push(Entry::new(bad.words, None, None));
        check_refused_at(bench, place, entries, before as usize, "never");
    }
}

/// Longer than the longest.
pub fn serve_too_long_descriptors(ptx: &str, seed: u64) {
    serve_never(Slots::Descriptors, ptx, seed, 0, TIMES);
}

pub fn serve_too_long_sends(ptx: &str, seed: u64) {
    serve_never(Slots::Sends, ptx, seed, 0, TIMES);
}

/// Where a warp has several lanes.
pub fn serve_longer_of_several(ptx: &str, seed: u64) {
    let slots = [Slots::Descriptors, Slots::Sends][seed as usize / 2 % 2];
    serve_never(slots, ptx, seed, 1 + seed % 3, 1);
}

#[test]
fn longer_ones_are_taken_behind_four_others() {
    (0..16).for_each(|seed| {
        serve_longer_descriptors(PTX, seed);
        serve_longer_sends(PTX, seed);
    });
}

#[test]
fn longer_ones_are_taken_behind_a_pause() {
    (0..8).for_each(|seed| {
        serve_paused_descriptors(PTX, seed);
        serve_paused_sends(PTX, seed);
        serve_paused_too_long(PTX, seed);
        serve_too_soon_behind_a_pause(PTX, seed);
    });
}

#[test]
fn warps_that_have_nothing_help() {
    (0..12).for_each(|seed| {
        serve_many_descriptors(PTX, seed);
        serve_many(Slots::Sends, PTX, seed);
    });
}

#[test]
fn longer_ones_are_refused_else() {
    (0..16).for_each(|seed| {
        serve_too_soon_descriptors(PTX, seed);
        serve_too_soon_sends(PTX, seed);
        serve_too_long_descriptors(PTX, seed);
        serve_too_long_sends(PTX, seed);
        serve_longer_of_several(PTX, seed);
    });
}
