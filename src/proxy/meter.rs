//! What a thread's lanes did and when, for [`crate::telemetry`]: counted once a batch, behind its posting.
//!
//! The clock is looked at once on a pass that moves something. On one pass of 64, and on every one while there is a
//! trace, it is looked at around each visit too.

use super::lane::{Batch, LaneProgress, Told};
use crate::rma::op::Op;
use crate::telemetry::stats::layout::{bucket, Record};
use crate::telemetry::stats::{now, Page};
use crate::telemetry::trace::{Event, Kind, Trace};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Passes between two that are timed from seen to posted.
const SAMPLE_EVERY: u32 = 64;

/// Where counts and times of a thread's lanes go.
pub struct Meter {
    page: Option<Arc<Page>>,
    trace: Option<Arc<Trace>>,
    /// The thread's number, for the trace.
    thread: usize,
    /// The set's number, for the trace.
    set: u32,
    lanes: Vec<Track>,
    passes: u32,
    /// This pass is timed visit by visit.
    is_timed: bool,
    /// When this pass moved something first; 0: not yet.
    now: u64,
}

/// Which lane it is.
#[derive(Clone, Copy, Debug)]
pub struct Metered {
    /// Its context in the set.
    pub context: u32,
    /// The peer of its queue pair.
    pub peer: u32,
    /// Whether it is that queue pair's companion, whose operations go to this rank.
    pub is_companion: bool,
}

/// A lane, and what was posted on it and is unfinished.
struct Track {
    context: u32,
    peer: u32,
    record: usize,
    entries: u64,
    completed: u64,
    /// Batches, oldest first: entries that are left, and when they were posted.
    batches: VecDeque<(u32, u64)>,
    /// Entries; empty without a trace.
    traced: VecDeque<Event>,
}

/// Adds to a count of which the calling thread is the only writer.
#[inline(always)]
fn add(count: &AtomicU64, n: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

impl Meter {
    /// Of these lanes, in the order in which they are named later. `thread` and `set` are for the
    /// trace. `None`: there is nobody to tell.
    pub fn new(
        page: Option<Arc<Page>>,
        trace: Option<Arc<Trace>>,
        thread: usize,
        set: u32,
        lanes: impl Iterator<Item = Metered>,
    ) -> Option<Self> {
        if page.is_none() && trace.is_none() {
            return None;
        }
        let track = |Metered { context, peer, is_companion }| Track {
            context,
            peer,
            record: page.as_ref().map_or(0, |page| match is_companion {
                true => page.companion_index(context, peer),
                false => page.index(context, peer),
            }),
            entries: 0,
            completed: 0,
            batches: VecDeque::new(),
            traced: VecDeque::new(),
        };
        Some(Self { lanes: lanes.map(track).collect(), page, trace, thread, set, passes: 0, is_timed: false, now: 0 })
    }

    /// A pass begins.
    #[inline(always)]
    pub fn begin_pass(&mut self) {
        self.passes = self.passes.wrapping_add(1);
        self.is_timed = self.passes % SAMPLE_EVERY == 0 || self.trace.is_some();
        self.now = 0;
    }

    /// A lane is about to be visited. Returns the time if it is wanted, else 0.
    #[inline(always)]
    pub fn before(&self) -> u64 {
        match self.is_timed {
            true => now(),
            false => 0,
        }
    }

    /// The visit, begun at `seen`, has moved something or found a fault.
    pub fn after(&mut self, lane: u32, seen: u64, progress: &LaneProgress, told: Told, batch: &Batch) {
        if self.now == 0 || self.is_timed {
            self.now = now();
        }
        let (at, track) = (self.now, &mut self.lanes[lane as usize]);
        if progress.taken > 0 {
            track.entries += u64::from(progress.taken);
            track.batches.push_back((progress.taken, at));
            if self.trace.is_some() {
                track.note(self.set, progress.taken, batch, seen, at);
            }
        }
        let done = told.credited.wrapping_sub(track.completed);
        track.completed = told.credited;
        let record = self.page.as_ref().map(|page| page.record(track.record));
        if done > 0 {
            track.complete(done, at, record);
        }
        if let Some(record) = record {
            if progress.taken > 0 {
                record.entries.store(track.entries, Ordering::Relaxed);
                let bytes = record.bytes.load(Ordering::Relaxed) + batch.posted_bytes();
                record.bytes.store(bytes, Ordering::Release);
                add(&record.batches, 1);
                if seen > 0 {
                    add(&record.posted[bucket(at.saturating_sub(seen))], 1);
                }
            }
            record.completed.store(track.completed, Ordering::Relaxed);
            record.under_way.store(track.entries.saturating_sub(track.completed), Ordering::Relaxed);
            record.oldest.store(track.batches.front().map_or(0, |batch| batch.1), Ordering::Relaxed);
            told.store(record);
        }
        if let (Some(trace), true) = (&self.trace, done > 0) {
            let n = track.traced.len().min(done as usize);
            trace.record(self.thread, track.traced.drain(..n).map(|event| Event { complete: at, ..event }));
        }
    }

    /// A kernel has done `n` entries of a lane by itself. Nobody knows their times, nor what they were.
    pub fn served(&mut self, lane: u32, n: u32, told: Told) {
        let track = &mut self.lanes[lane as usize];
        track.entries += u64::from(n);
        track.completed = told.credited;
        if let Some(page) = &self.page {
            let record = page.record(track.record);
            record.entries.store(track.entries, Ordering::Relaxed);
            record.completed.store(track.completed, Ordering::Relaxed);
            record.under_way.store(track.entries.saturating_sub(track.completed), Ordering::Relaxed);
            told.store(record);
        }
    }

    /// The watchdog's look.
    pub fn look(&self, told: impl Iterator<Item = (u32, Told)>) {
        let Some(page) = &self.page else { return };
        page.set_published(now());
        for (lane, told) in told {
            told.store(page.record(self.lanes[lane as usize].record));
        }
    }
}

impl Told {
    fn store(&self, record: &Record) {
        record.refused.store(self.refused, Ordering::Relaxed);
        record.dropped.store(self.dropped, Ordering::Relaxed);
        record.state.store(self.state as u64, Ordering::Relaxed);
    }
}

impl Track {
    /// So many of the oldest entries are complete.
    fn complete(&mut self, mut left: u64, at: u64, record: Option<&Record>) {
        while let Some((n, posted)) = self.batches.front_mut() {
            let some = left.min(u64::from(*n));
            if let Some(record) = record {
                let took = at.saturating_sub(*posted);
                add(&record.complete[bucket(took)], some);
                add(&record.complete_ns, took * some);
            }
            left -= some;
            *n -= some as u32;
            if *n > 0 {
                break;
            }
            self.batches.pop_front();
            if left == 0 {
                break;
            }
        }
    }

    /// Remembers the entries of a batch until they are complete.
    #[cold]
    fn note(&mut self, set: u32, taken: u32, batch: &Batch, seen: u64, posted: u64) {
        let (context, peer) = (self.context, self.peer);
        let mut ops = batch.posted().iter();
        let counts = batch.counts().chain(std::iter::repeat(0)).take(taken as usize);
        self.traced.extend(counts.map(|n| {
            let some = || ops.clone().take(n.into());
            let (kind, bytes) = (some().next().map_or(Kind::Nothing, kind), some().map(Op::len).sum());
            (0..n).for_each(|_| _ = ops.next());
            Event { set, context, peer, kind, bytes, seen, posted, complete: posted }
        }));
    }
}

fn kind(op: &Op) -> Kind {
    match op {
        Op::Put(put) if put.len == 0 => Kind::Signal,
        Op::Put(put) if put.signal.is_some() => Kind::PutSignal,
        Op::Put(_) => Kind::Put,
        Op::Value(_) => Kind::Value,
        Op::Get(_) => Kind::Get,
        Op::Atomic(_) => Kind::Atomic,
    }
}
