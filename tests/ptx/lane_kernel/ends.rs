//! When a launch begins and ends.

use super::*;

/// Stop, idle time or life before go: no record is read, no queue looked at, and nothing said of any.
#[test]
fn it_ends_without_go() {
    for (seed, (stops, idle, life)) in (0..).zip([(true, NEVER, NEVER), (false, 5_000, NEVER), (false, NEVER, 5_000)]) {
        let mut bench = Bench::new(PTX, seed, 0, 8);
        bench.post_some(8);
        // Nobody's addresses in all records.
        let board = bench.board();
        (1024..BOARD_BYTES).step_by(8).for_each(|at| bench.gpu.memory.write(board + at, 8, GARBAGE));
        // Of the launch before.
        [0, 8].iter().for_each(|at| bench.gpu.memory.write(board + at, 8, 6));
        bench.launches = 6;
        bench.launch(idle, life);
        bench.run_until(Bench::is_up);
        if stops {
            bench.run(5_000);
            assert!(!bench.is_gone(), "it ends by itself");
            bench.stop();
        }
        bench.run_until(Bench::is_gone);
        bench.check_end();
        (256..768).step_by(8).for_each(|at| assert_eq!(bench.word(at), 0, "a position"));
    }
}

/// Both at once: nothing is taken that is not said to be.
#[test]
fn stop_beside_go() {
    for seed in 0..8 {
        let mut bench = Bench::new(PTX, seed, seed % 4, 3);
        bench.post_some(9);
        bench.launch(NEVER, NEVER);
        bench.stop();
        bench.go();
        bench.run_until(Bench::is_gone);
        bench.check_end();
    }
}

/// Without any queue it waits, and ends as it would with some.
#[test]
fn without_queues() {
    for (seed, (stops, idle, life)) in (0..).zip([(true, NEVER, NEVER), (false, 9_000, NEVER), (false, NEVER, 9_000)]) {
        let mut bench = Bench::new(PTX, seed, seed % 4, 0);
        bench.launch(idle, life);
        bench.go();
        bench.run(4_000);
        assert!(!bench.is_gone());
        if stops {
            bench.stop();
        }
        bench.run_until(Bench::is_gone);
        bench.check_end();
    }
}

/// One queue, at a place of each warp in turn.
fn alone(slots: Slots, ptx: &str, seed: u64, warp: usize) -> (Bench, usize) {
    let mut bench = Bench::of(slots, ptx, seed, seed % 4, 1);
    let (from, to) = (bench.any_place(), warp << bench.spread);
    bench.queues.swap(from, to);
    (bench, to)
}

/// What any warp takes keeps the launch up; once none has taken anything for long, it ends.
pub fn serve_idle(ptx: &str, seed: u64) {
    const IDLE: u64 = 120_000;
    for warp in [0, seed as usize % 7 + 1] {
        let (mut bench, place) = alone(Slots::Descriptors, ptx, seed, warp);
        bench.launch(IDLE, NEVER);
        bench.go();
        // Twice as long in all.
        for _ in 0..6 {
            let entry = bench.entry(place);
            bench.post(vec![(place, entry)], 1);
            bench.run(IDLE / 3);
            assert!(!bench.is_gone(), "it ends while warp {warp} has something to do");
            bench.check();
            assert_eq!(bench.left(), 0);
        }
        // Not long after.
        bench.run(2 * IDLE);
        assert!(bench.is_gone(), "it goes on without anything to do");
        bench.check_end();
    }
}

#[test]
fn it_ends_when_idle() {
    (0..4).for_each(|seed| serve_idle(PTX, seed));
}

/// While there is always something to do, too.
pub fn serve_life(ptx: &str, seed: u64) {
    life(Slots::Descriptors, ptx, seed);
}

fn life(slots: Slots, ptx: &str, seed: u64) {
    let (mut bench, place) = alone(slots, ptx, seed, seed as usize % 8);
    bench.launch(NEVER, 60_000);
    bench.go();
    let mut turns = 0;
    while !bench.is_gone() && turns < 200_000 {
        if bench.room(place) > 0 {
            let entry = bench.entry(place);
            bench.post(vec![(place, entry)], 2);
        }
        bench.run(100);
        turns += 100;
        bench.check();
    }
    assert!(bench.is_gone(), "it lives on");
    assert!(turns > 30_000, "it ended early");
    bench.check_end();
}

#[test]
fn it_ends_when_its_life_does() {
    (0..4).for_each(|seed| serve_life(PTX, seed));
    (0..4).for_each(|seed| life(Slots::Sends, PTX, seed));
}

/// Stop, while there is always something to do.
pub fn serve_stop(ptx: &str, seed: u64) {
    stop(Slots::Descriptors, ptx, seed);
}

fn stop(slots: Slots, ptx: &str, seed: u64) {
    let (mut bench, place) = alone(slots, ptx, seed, seed as usize % 8);
    bench.launch(NEVER, NEVER);
    bench.go();
    let mut turns = 0;
    while !bench.is_gone() {
        if bench.room(place) > 0 {
            let entry = bench.entry(place);
            bench.post(vec![(place, entry)], 2);
        }
        bench.run(100);
        turns += 100;
        if turns == 20_000 {
            bench.stop();
        }
        bench.check();
        assert!(turns < 120_000, "it does not stop");
    }
    bench.check_end();
}

#[test]
fn it_stops() {
    (0..4).for_each(|seed| serve_stop(PTX, seed));
    (0..4).for_each(|seed| stop(Slots::Sends, PTX, seed));
}
