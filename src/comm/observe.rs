//! Statistics of sets of contexts, for other processes to read: their pages, and what the calls of a table fill them
//! with.
//!
//! The data path of a table adds up bytes for this and does nothing else. Fabrics number operations and say up to which
//! number they are complete; all that is looked at from the table's progress function, which NCCL calls all the time:
//! each context four times a second, one at a time, so that no call takes long. Times are those of samples.

mod stopwatch;

use super::coll::Coll;
use super::contexts::Contexts;
use super::fabrics::on_queues;
use crate::fabric::Context;
use crate::rma::seq::Seq;
use crate::sys::sync::Mutex;
use crate::telemetry::stats::layout::{State, Way};
use crate::telemetry::stats::{now, About, Page};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;
use stopwatch::Stopwatch;

/// Calls of progress between two looks at the clock.
const LOOK_EVERY: u32 = 256;
/// Nanoseconds between two looks at a context.
const PUBLISH_EVERY: u64 = 250_000_000;

impl Coll {
    /// A page for a set; `None`: nobody wants it, or there is no memory or descriptor for it, which the log says.
    pub(super) fn stats_page(
        &self,
        set: &Contexts,
        way: Way,
        stride: u32,
        companions: bool,
        threads: u32,
    ) -> Option<Arc<Page>> {
        fn name<C: Context>(_: &[C]) -> &'static str {
            C::NAME
        }
        let config = &self.instance.config;
        let about = About {
            way,
            comm: self.id,
            set: set.set,
            comm_id: self.instance.comm_id,
            rank: self.world.rank,
            nranks: self.world.nranks,
            contexts: set.count(),
            stride,
            companions,
            threads,
            fabric: on_queues!(set.queues(), q => name(q)),
            stall: if way == Way::Engine { config.stall } else { Duration::ZERO },
        };
        if !config.stats {
            return None;
        }
        let page = Page::create(&about);
        page.inspect_err(|error| log::info!("no statistics of set {}: {}", set.set, error.message())).ok().map(Arc::new)
    }
}

/// What publishes the numbers of a set that calls of a table drive.
#[derive(Default)]
pub struct Published {
    calls: AtomicU32,
    /// There is a sample.
    samples: AtomicBool,
    state: Mutex<Table>,
}

/// What it knows.
#[derive(Default)]
struct Table {
    /// When it looked last, and at which context it looks next.
    looked: u64,
    next: usize,
    page: Option<Arc<Page>>,
    /// Nanoseconds between two looks.
    pause: u64,
    /// There is none, and will be none.
    is_off: bool,
    /// By context, then peer: what it saw last.
    seen: Vec<Seen>,
    /// What is measured, and of each context the peer that was last.
    sample: Option<Stopwatch>,
    sampled: Vec<u32>,
}

/// Of a (context, peer).
#[derive(Clone, Copy, Default)]
struct Seen {
    newest: u32,
    completed: u32,
    posted_all: u64,
    completed_all: u64,
    /// Since when nothing unfinished has become complete.
    since: u64,
}

impl Published {
    /// The table's progress function was called. Looks at the contexts if it is time.
    #[inline]
    pub fn tick(&self, set: &Contexts, owner: impl FnOnce() -> Option<Arc<Coll>>) {
        // One caller at a time, as for everything in a context; a lost count costs nothing.
        let calls = self.calls.load(Ordering::Relaxed).wrapping_add(1);
        self.calls.store(calls, Ordering::Relaxed);
        if calls % LOOK_EVERY == 1 {
            self.look(set, owner);
        } else if self.samples.load(Ordering::Relaxed) {
            self.sample(set);
        }
    }

    /// Goes on with the sample that there is.
    #[cold]
    fn sample(&self, set: &Contexts) {
        let Some(mut table) = self.state.try_lock() else { return };
        let Table { page: Some(page), sample, .. } = &mut *table else { return };
        let Some(taken) = sample else { return };
        let record = page.record(page.index(taken.context, taken.peer));
        let goes_on = on_queues!(set.queues(), contexts => {
            contexts.get(taken.context as usize).is_some_and(|context| {
                let peer = taken.peer;
                taken.look(|| context.sent(peer).newest, context.completed(peer), record, now)
            })
        });
        if !goes_on {
            self.watch(sample, None);
        }
    }

    /// Takes another sample, or none.
    fn watch(&self, sample: &mut Option<Stopwatch>, next: Option<Stopwatch>) {
        self.samples.store(next.is_some(), Ordering::Relaxed);
        *sample = next;
    }

    #[cold]
    fn look(&self, set: &Contexts, owner: impl FnOnce() -> Option<Arc<Coll>>) {
        let Some(mut table) = self.state.try_lock() else { return };
        let time = now();
        if table.is_off || (table.page.is_some() && time.saturating_sub(table.looked) < table.pause) {
            return;
        }
        if table.page.is_none() {
            table.page = owner().and_then(|coll| coll.stats_page(set, Way::Table, 1, false, 0));
            table.is_off = table.page.is_none();
            table.pause = PUBLISH_EVERY / u64::from(set.count().max(1));
            table.seen = vec![Seen::default(); table.page.as_ref().map_or(0, |page| page.len())];
            table.sampled = vec![0; set.count() as usize];
        }
        table.looked = time;
        let Table { page: Some(page), seen, next, sample, sampled, .. } = &mut *table else { return };
        page.set_published(time);
        let moved = on_queues!(set.queues(), contexts => {
            *next = (*next + 1) % contexts.len().max(1);
            publish(contexts, *next, set.nranks, page, seen, (time, sampled.get(*next).copied().unwrap_or(0)))
        });
        if sample.as_ref().is_some_and(|sample| sample.is_overdue(time)) {
            self.watch(sample, None);
        }
        if let (None, Some((peer, newest))) = (&sample, moved) {
            if let Some(sampled) = sampled.get_mut(*next) {
                *sampled = peer;
            }
            self.watch(sample, Some(Stopwatch::new(*next as u32, peer, newest, time)));
        }
    }
}

/// Stores a context's numbers. Returns one of the peers that have been sent something since the last time, the next one
/// behind `last` if there is one, and its newest operation.
fn publish<C: Context>(
    contexts: &[C],
    number: usize,
    nranks: u32,
    page: &Page,
    seen: &mut [Seen],
    (time, last): (u64, u32),
) -> Option<(u32, Seq)> {
    let (mut first, mut behind) = (None, None);
    if let Some(context) = contexts.get(number) {
        for peer in 0..nranks {
            let index = page.index(number as u32, peer);
            let Some(seen) = seen.get_mut(index) else { break };
            // In this order: what is complete was posted before.
            let completed = context.completed(peer).load(Ordering::Acquire);
            let sent = context.sent(peer);
            let newest = sent.newest.0;
            if newest != seen.newest {
                let place = if peer > last { &mut behind } else { &mut first };
                place.get_or_insert((peer, sent.newest));
            }
            if (newest, completed) == (seen.newest, seen.completed) && (seen.since > 0 || newest == completed) {
                continue;
            }
            let moved = completed != seen.completed || seen.since == 0;
            seen.posted_all += u64::from(newest.wrapping_sub(seen.newest));
            seen.completed_all += u64::from(completed.wrapping_sub(seen.completed));
            (seen.newest, seen.completed) = (newest, completed);
            seen.since = match newest == completed {
                true => 0,
                false if moved => time,
                false => seen.since,
            };
            let record = page.record(index);
            record.entries.store(seen.posted_all, Ordering::Relaxed);
            record.bytes.store(sent.bytes, Ordering::Release);
            record.completed.store(seen.completed_all, Ordering::Relaxed);
            record.under_way.store(seen.posted_all.saturating_sub(seen.completed_all), Ordering::Relaxed);
            record.oldest.store(seen.since, Ordering::Relaxed);
            record.state.store(State::Open as u64, Ordering::Relaxed);
        }
    }
    behind.or(first)
}
