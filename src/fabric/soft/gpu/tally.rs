//! What an engine did, said in one line when it closes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One flight in so many has its times taken, which keeps the clock off the others.
const SAMPLE: u64 = 16;

/// Counts since the engine was made. Kept under the engine's lock.
#[derive(Default)]
pub struct Tally {
    flights: u64,
    operations: u64,
    copies: u64,
    stores: u64,
    bulk: u64,
    sampled: u64,
    launching: Duration,
    landed: u64,
    flying: Duration,
}

/// Times of one flight that was chosen for it.
#[derive(Clone, Copy)]
pub struct Sample(Instant);

/// What the courier did.
#[derive(Clone, Copy, Default)]
pub struct Carried {
    pub operations: u64,
    /// How many of them its hands did.
    pub heavy: u64,
    pub launches: u64,
}

impl Tally {
    /// A flight is about to start.
    pub fn before_launch(&self) -> Option<Sample> {
        (self.flights % SAMPLE == 0).then(|| Sample(Instant::now()))
    }

    /// It was started.
    pub fn launched(&mut self, sample: Option<&Sample>, operations: usize, copies: usize, stores: usize) {
        self.flights += 1;
        self.operations += operations as u64;
        self.copies += copies as u64;
        self.stores += stores as u64;
        if let Some(Sample(since)) = sample {
            self.sampled += 1;
            self.launching += since.elapsed();
        }
    }

    /// A flight of large copies was started.
    pub fn bulk(&mut self, copies: usize) {
        self.bulk += copies as u64;
    }

    /// Its flag was seen.
    pub fn landed(&mut self, Sample(since): Sample) {
        self.landed += 1;
        self.flying += since.elapsed();
    }

    /// The line; `busy`: how often a poll found the engine in use; `beside`: how often the helper thread came to work beside the
    /// callers; `carried`: what the courier did.
    pub fn line(&self, rank: u32, busy: &AtomicU64, beside: &AtomicU64, carried: Carried) -> Option<String> {
        if self.flights + self.bulk + carried.operations == 0 {
            return None;
        }
        let mean = |sum: Duration, n: u64| sum.as_secs_f64() * 1e6 / n.max(1) as f64;
        Some(format!(
            "rank {rank}: {} flights of {:.1} operations to its GPU ({} copies, {} signals and small values, {} large \
             copies), {} operations by the courier, {} of them by its hands, in {} launches; \
             {:.1} µs to start one, {:.1} µs from there to its end; {} polls found another thread at work, {} times \
             the helper thread worked beside the callers",
            self.flights,
            self.operations as f64 / self.flights.max(1) as f64,
            self.copies,
            self.stores,
            self.bulk,
            carried.operations,
            carried.heavy,
            carried.launches,
            mean(self.launching, self.sampled),
            mean(self.flying, self.landed),
            busy.load(Ordering::Relaxed),
            beside.load(Ordering::Relaxed)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_all_counts() {
        let (mut t, busy, beside) = (Tally::default(), AtomicU64::new(9), AtomicU64::new(8));
        assert_eq!(t.line(3, &busy, &beside, Carried::default()), None);
        for flight in 0..SAMPLE + 1 {
            let sample = t.before_launch();
            assert_eq!(sample.is_some(), flight % SAMPLE == 0);
            t.launched(sample.as_ref(), 3, 2, 1);
            sample.into_iter().for_each(|s| t.landed(s));
        }
        t.bulk(4);
        let line =
            t.line(3, &busy, &beside, Carried { operations: 70, heavy: 5, launches: 2 }).expect("there were flights");
        for part in [
            "rank 3: 17 flights of 3.0 operations",
            "34 copies, 17 signals",
            "4 large",
            "70 operations by the courier, 5 of them by its hands, in 2 launches",
            "9 polls found",
            "8 times the helper",
        ] {
            assert!(line.contains(part), "{line}");
        }
    }
}
