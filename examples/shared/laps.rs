//! What the benchmarks of the engine's rings have in common: two cores, of which one writes entries and one takes them.

use oxygin::proxy::drain::Work;
use oxygin::proxy::idle::Rest;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Keeps the calling thread on one processor.
pub fn pin(cpu: usize) {
    let mut set = nix::sched::CpuSet::new();
    let _ = set.set(cpu).and_then(|()| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set));
}

/// The middle one of some values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// `n` laps in turns: another core fills a part of the ring, `lap` entries, by `write` with the number of each, until
/// it takes it; then this one drains them. Neither waits for the other within its lap, so that other work on the
/// machine shows in few of them. Nanoseconds an entry, median.
pub fn laps(lap: u32, n: u32, write: impl Fn(u32) -> bool + Sync, drain: &mut impl Work) -> f64 {
    let turn = AtomicU32::new(0);
    let wait = |value: u32| {
        while turn.load(Ordering::Acquire) != value {
            std::thread::yield_now();
        }
    };
    let times = std::thread::scope(|s| {
        s.spawn(|| {
            pin(1);
            for nth in 0..n {
                wait(2 * nth);
                (0..lap).for_each(|i| while !write(nth * lap + i) {});
                turn.store(2 * nth + 1, Ordering::Release);
            }
        });
        pin(0);
        let time = |nth: u32| {
            wait(2 * nth + 1);
            let (begun, mut moved) = (Instant::now(), 0);
            // Taken and completed count one each.
            while moved < 2 * lap {
                moved += drain.pass(Rest::Awake).moved;
            }
            let time = begun.elapsed();
            turn.store(2 * nth + 2, Ordering::Release);
            time.as_nanos() as f64 / f64::from(lap)
        };
        (0..n).map(time).collect::<Vec<_>>()
    });
    median(times)
}
