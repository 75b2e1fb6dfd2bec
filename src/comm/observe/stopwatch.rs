//! How long operations of a table take, of some of them, seen from its progress function.
//!
//! The data path notes no times. NCCL calls progress all the time, between its posts and its tests, so what was posted
//! and what became complete since the last call is known to a few microseconds; for a short while after each look at
//! a context one of its peers is watched that closely. A time begins with the last call before which the operation was
//! not posted, and ends with the first one that finds it complete: it is never too short.

use crate::rma::seq::Seq;
use crate::telemetry::stats::layout::{bucket, Record};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Calls of progress that look for a new operation after each look at a context: to read the clock so often takes some
/// 10 µs.
const CALLS: u32 = 256;
/// One peer is watched for so many nanoseconds at most, for it may stand, and others are to be seen: an operation that
/// is not complete then has no time. Its age is shown all the same.
const MOST: u64 = 1_000_000_000;

/// What is being measured.
#[derive(Clone, Copy)]
enum Phase {
    /// The next operation behind this one, which was not posted at that time.
    Next(Seq, u64),
    /// Until this operation is complete, which was posted behind that time.
    Under(Seq, u64),
}

/// A (context, peer) that is watched.
pub struct Stopwatch {
    /// Its context.
    pub context: u32,
    /// Its peer.
    pub peer: u32,
    began: u64,
    left: u32,
    phase: Phase,
}

impl Stopwatch {
    /// From now on, when `newest` is the newest operation.
    pub fn new(context: u32, peer: u32, newest: Seq, now: u64) -> Self {
        Self { context, peer, began: now, left: CALLS, phase: Phase::Next(newest, now) }
    }

    /// Progress was called. Returns whether it goes on: one that has begun does until it is complete. `newest`, `done`:
    /// the newest operation now, and the newest that is complete.
    pub fn look(&mut self, newest: impl Fn() -> Seq, done: &AtomicU32, record: &Record, now: impl Fn() -> u64) -> bool {
        match self.phase {
            Phase::Next(last, before) => {
                if self.left == 0 {
                    return false;
                }
                self.left -= 1;
                let time = now();
                if newest() == last {
                    self.phase = Phase::Next(last, time);
                } else {
                    self.phase = Phase::Under(last.next(), before);
                    self.end((last.next(), before), newest, done, record, now);
                }
            }
            Phase::Under(seq, since) => self.end((seq, since), newest, done, record, now),
        }
        true
    }

    /// Whether it has gone on for too long.
    pub fn is_overdue(&self, now: u64) -> bool {
        now.saturating_sub(self.began) > MOST
    }

    /// Counts the time of an operation if it is complete.
    fn end(
        &mut self,
        (seq, since): (Seq, u64),
        newest: impl Fn() -> Seq,
        done: &AtomicU32,
        record: &Record,
        now: impl Fn() -> u64,
    ) {
        if !seq.is_done(Seq(done.load(Ordering::Acquire))) {
            return;
        }
        let now = now();
        let ns = now.saturating_sub(since);
        // One caller at a time, under the lock of what publishes the page.
        let add = |word: &AtomicU64, n| word.store(word.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        add(&record.complete[bucket(ns)], 1);
        add(&record.complete_ns, ns);
        self.phase = Phase::Next(newest(), now);
    }
}

#[cfg(test)]
#[path = "stopwatch_tests.rs"]
mod tests;
