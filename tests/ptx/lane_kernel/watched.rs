//! Lanes that are only watched: nothing of them is taken, and each is closed as soon as something begins to arrive,
//! while others go on.

use super::queue::Entry;
use super::refused::{bench_with_others, check_left_alone};
use super::*;

/// Turns within which the kernel has looked at all its lanes many times.
const SOON: u64 = 100_000;

/// One of some queues is watched, while others carry something. `begins`: of what comes there only the first word does
/// at first.
pub fn serve_watched(slots: Slots, ptx: &str, seed: u64, begins: bool) {
    let mut bench = bench_with_others(slots, ptx, seed);
    let place = bench.any_place();
    bench.queues[place].as_mut().expect("a queue").is_watched = true;
    bench.late_every = 0;
    bench.launch(NEVER, NEVER);
    bench.go();
    let others: Vec<usize> = bench.places().into_iter().filter(|&p| p != place).collect();
    for _ in 0..3 {
        let all = others.iter().map(|&other| (other, bench.entry(other))).collect();
        bench.post(all, 3);
    }
    bench.run_until(|b| b.left() == 0);
    assert!(!bench.position(place).1, "closed although nothing has come");
    // It would be taken.
    let Entry { words, .. } = bench.entry(place);
    let came = Entry::new(words, None, None);
    match begins {
        true => {
            let q = bench.queues[place].as_mut().expect("a queue");
            let at = q.slot_at(0);
            q.entries.push(Entry { is_rung: true, ..came });
            bench.gpu.memory.post(at, 8, words[0]);
            run_until_closed(&mut bench, place);
            for (i, word) in (0..).zip(words).skip(1) {
                bench.gpu.memory.write(at + 8 * i, 8, word);
            }
        }
        false => {
            bench.post(vec![(place, came)], 3);
            run_until_closed(&mut bench, place);
        }
    }
    bench.check();
    assert_eq!(bench.queue(place).refused, Some(0));
    check_left_alone(&mut bench, place, "watched");
    bench.post_some(6);
    bench.run_until(|b| b.left() == 1);
    bench.finish();
}

fn run_until_closed(bench: &mut Bench, place: usize) {
    let mut turns = 0;
    while !bench.position(place).1 {
        bench.run(10);
        turns += 10;
        assert!(turns < SOON, "not closed");
    }
}

/// Queues of descriptors.
pub fn serve_watched_descriptors(ptx: &str, seed: u64) {
    serve_watched(Slots::Descriptors, ptx, seed, seed / 4 % 2 == 0);
}

/// Send queues.
pub fn serve_watched_sends(ptx: &str, seed: u64) {
    serve_watched(Slots::Sends, ptx, seed, false);
}

#[test]
fn what_is_watched_is_closed_and_nothing_of_it_is_taken() {
    (0..16).for_each(|seed| serve_watched_descriptors(PTX, seed));
    (0..8).for_each(|seed| serve_watched_sends(PTX, seed));
}

/// Nothing but watched lanes: the launch is idle.
#[test]
fn a_launch_that_only_watches_ends_by_itself() {
    for seed in 0..8 {
        let mut bench = bench_with_others(Slots::Descriptors, PTX, seed);
        bench.queues.iter_mut().flatten().for_each(|q| q.is_watched = true);
        bench.launch(20_000, NEVER);
        bench.go();
        bench.run_until(Bench::is_gone);
        bench.check_end();
    }
}
