//! What is in flight on one stream, oldest first.

use super::op::{CallerWindow, Owner, TransferEnd};
use super::stats::Sample;
use oxygin_ffi::cuda::Copies;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A submission whose stores by the stream took longer than this has waited for the GPU's processors, unless its copies
/// explain it.
const SLOW: Duration = Duration::from_micros(700);
/// What a copy takes at most, with its driver's calls, and bytes by way of host memory: 20 GB/s there and as much back.
const COPY: Duration = Duration::from_micros(4);
const BYTES_PER_US: u64 = 20_000;
/// What processors copy, also to another GPU by NVLink: 100 GB/s and more.
const COPIED_PER_US: u64 = 100_000;

/// Submissions' lists that are kept for the next ones.
const SPARES: usize = 4;

/// Bytes in the staging memory on their way to host memory.
pub struct Outward {
    pub offset: u64,
    pub len: u64,
    pub to: TransferEnd,
    /// The window that it lies in, if it is the caller's and known.
    pub window: Option<CallerWindow>,
}

/// How long a submission takes that needs the GPU's processors.
pub struct ProcessorTime {
    /// When it was started, or the one before is done.
    since: Instant,
    /// The longest that it takes if it does not wait for them.
    most: Duration,
}

impl ProcessorTime {
    /// Of stores by the stream; the submission starts now, with such copies by copy engines before them.
    pub fn of_stores<'a>(copies: impl IntoIterator<Item = &'a Copies>) -> Self {
        let (mut count, mut bytes) = (0, 0);
        for (_, _, n) in copies.into_iter().flat_map(|c| c.iter()) {
            (count, bytes) = (count + 1, bytes + n as u64);
        }
        Self { since: Instant::now(), most: SLOW + COPY * count + Duration::from_micros(bytes / BYTES_PER_US) }
    }

    /// Of so many bytes that the processors copy from now on.
    pub fn of_copies(bytes: u64) -> Self {
        Self { since: Instant::now(), most: SLOW + Duration::from_micros(bytes / COPIED_PER_US) }
    }

    /// Whether it has waited for the processors, now that the submission is done.
    pub fn is_late(&self) -> bool {
        self.since.elapsed() > self.most
    }
}

/// What was started at once.
#[derive(Default)]
pub struct Submission {
    pub number: u64,
    pub finished: Vec<Owner>,
    pub outward: Vec<Outward>,
    /// Staging memory up to here is free once it is done.
    pub staged: u64,
    pub sample: Option<Sample>,
    /// If the stream itself stores, and need not; or copies within the GPU that might go by pinned memory.
    pub by_processors: Option<ProcessorTime>,
}

/// The submissions of one stream, numbered from 1 on.
#[derive(Default)]
pub struct InFlight {
    pub submissions: VecDeque<Submission>,
    /// Number of the last submission that was started.
    pub started: u64,
    /// Number of the last one that is done, its outward bytes delivered.
    pub done: u64,
    /// Number of the last one with bytes for host memory.
    pub outward: u64,
    /// Submissions that are done, whose lists are kept for the next ones.
    spare: Vec<Submission>,
}

impl InFlight {
    /// Takes off the oldest submission if the flag says that it is done.
    pub fn pop_done(&mut self, flag: u64) -> Option<Submission> {
        let submission = match self.submissions.front() {
            Some(f) if f.number <= flag => self.submissions.pop_front()?,
            _ => return None,
        };
        self.done = submission.number;
        Some(submission)
    }

    /// The time of the oldest counts from now on: the one before it is done.
    pub fn begin_next(&mut self) {
        if let Some(time) = self.submissions.front_mut().and_then(|next| next.by_processors.as_mut()) {
            time.since = Instant::now();
        }
    }

    /// An empty submission.
    pub fn spare(&mut self) -> Submission {
        self.spare.pop().unwrap_or_default()
    }

    /// Keeps the empty lists of a submission that is done.
    pub fn keep(&mut self, submission: Submission) {
        if self.spare.len() < SPARES {
            self.spare.push(submission);
        }
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.submissions.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_late_if_copies_do_not_explain_it() {
        let of = |n: usize, bytes| {
            let mut copies = Copies::default();
            (0..n).for_each(|_| copies.push(0, 0, bytes));
            copies
        };
        let none = Copies::default();
        let most = |copies: &[&Copies]| ProcessorTime::of_stores(copies.iter().copied()).most;
        assert_eq!(most(&[&none, &none]), SLOW);
        // By way of host memory each copy is two.
        assert_eq!(most(&[&of(256, 8), &of(256, 8)]), SLOW + 512 * COPY);
        assert_eq!(most(&[&of(1, 3_000_000), &none]), SLOW + COPY + Duration::from_micros(150));
        let long_ago = ProcessorTime { since: Instant::now() - 2 * SLOW, most: SLOW };
        assert!(long_ago.is_late());
        assert!(!ProcessorTime { most: 1000 * SLOW, ..long_ago }.is_late());
        assert_eq!(ProcessorTime::of_copies(40_000_000).most, SLOW + Duration::from_micros(400));
    }
}
