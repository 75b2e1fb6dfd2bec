//! What an engine did, said in one line when it closes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One submission in so many has its times taken, which keeps the clock off the others.
const SAMPLE: u64 = 16;

/// Counts since the engine was made. Kept under the engine's lock.
#[derive(Default)]
pub struct Stats {
    submissions: u64,
    operations: u64,
    copies: u64,
    stores: u64,
    bulk: u64,
    sampled: u64,
    launching: Duration,
    finished: u64,
    flying: Duration,
}

/// Times of one submission that was chosen for it.
#[derive(Clone, Copy)]
pub struct Sample(Instant);

/// What the copy kernel did.
#[derive(Clone, Copy, Default)]
pub struct KernelStats {
    pub operations: u64,
    /// How many of them its worker blocks did.
    pub by_workers: u64,
    pub launches: u64,
    /// How many of them were given up, as they were not there in time.
    pub late: u64,
}

impl Stats {
    /// A submission is about to start.
    pub fn before_launch(&self) -> Option<Sample> {
        (self.submissions % SAMPLE == 0).then(|| Sample(Instant::now()))
    }

    /// It was started.
    pub fn launched(&mut self, sample: Option<&Sample>, operations: usize, copies: usize, stores: usize) {
        self.submissions += 1;
        self.operations += operations as u64;
        self.copies += copies as u64;
        self.stores += stores as u64;
        if let Some(Sample(since)) = sample {
            self.sampled += 1;
            self.launching += since.elapsed();
        }
    }

    /// A submission of bulk copies was started.
    pub fn bulk(&mut self, copies: usize) {
        self.bulk += copies as u64;
    }

    /// A submission is done.
    pub fn finished(&mut self, Sample(since): Sample) {
        self.finished += 1;
        self.flying += since.elapsed();
    }

    /// The line; `busy`: how often a poll found the engine in use; `beside`: how often the helper thread came to work
    /// beside the callers; `by_kernel`: what the copy kernel did.
    pub fn line(&self, rank: u32, busy: &AtomicU64, beside: &AtomicU64, by_kernel: KernelStats) -> Option<String> {
        if self.submissions + self.bulk + by_kernel.operations == 0 {
            return None;
        }
        let mean = |sum: Duration, n: u64| sum.as_secs_f64() * 1e6 / n.max(1) as f64;
        Some(format!(
            "rank {rank}: {} submissions of {:.1} operations to its GPU ({} copies, {} signals and small values, {} \
             large copies), {} operations by the copy kernel, {} of them by its worker blocks, in {} launches, \
             {} of them late; {:.1} µs to start one, {:.1} µs from there to its end; {} polls found another thread at \
             work, {} times the helper thread worked beside the callers",
            self.submissions,
            self.operations as f64 / self.submissions.max(1) as f64,
            self.copies,
            self.stores,
            self.bulk,
            by_kernel.operations,
            by_kernel.by_workers,
            by_kernel.launches,
            by_kernel.late,
            mean(self.launching, self.sampled),
            mean(self.flying, self.finished),
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
        let (mut t, busy, beside) = (Stats::default(), AtomicU64::new(9), AtomicU64::new(8));
        assert_eq!(t.line(3, &busy, &beside, KernelStats::default()), None);
        for submission in 0..SAMPLE + 1 {
            let sample = t.before_launch();
            assert_eq!(sample.is_some(), submission % SAMPLE == 0);
            t.launched(sample.as_ref(), 3, 2, 1);
            sample.into_iter().for_each(|s| t.finished(s));
        }
        t.bulk(4);
        let line = t
            .line(3, &busy, &beside, KernelStats { operations: 70, by_workers: 5, launches: 2, late: 1 })
            .expect("there were submissions");
        for part in [
            "rank 3: 17 submissions of 3.0 operations",
            "34 copies, 17 signals",
            "4 large",
            "70 operations by the copy kernel, 5 of them by its worker blocks, in 2 launches, 1 of them late;",
            "9 polls found",
            "8 times the helper",
        ] {
            assert!(line.contains(part), "{line}");
        }
    }
}
