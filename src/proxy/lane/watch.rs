//! The watchdog's look at a lane: an entry that has not moved for long is named once.

use super::{Common, Lane, State, Told};
use crate::fabric::Context;
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Entry, Head, Ring};
use crate::telemetry::stats::layout::State as Shown;
use std::time::{Duration, Instant};

/// What the watchdog remembers of a lane.
#[derive(Default)]
pub(super) struct Watch {
    /// Entries completed, all in all.
    pub(super) completed: u64,
    /// `completed` when it looked, and since when it has not changed while something was unfinished.
    since: Option<(u64, Instant)>,
    said: bool,
}

impl<R: Ring> Lane<R> {
    /// For the statistics.
    pub fn told(&self, common: &Common) -> Told {
        let state = match self.state {
            State::Failed => Shown::Failed,
            State::Stopped => Shown::Stopped,
            _ if common.is_dead => Shown::Stopped,
            State::Flushing { .. } => Shown::Flushing,
            State::Open | State::Held | State::Served => Shown::Open,
        };
        Told { credited: self.watch.completed, refused: self.refused, dropped: self.dropped, state }
    }

    /// How many entries were taken and are not done; `None`: none.
    pub fn unfinished(&self) -> Option<u32> {
        (self.under_way > 0).then_some(self.under_way)
    }

    /// Entries given back to device code, all in all.
    pub fn credited(&self) -> u64 {
        self.watch.completed
    }

    /// How many entries will have been given back once all is that device code has written and rung by now; `None`: all
    /// is, or comes to nothing.
    pub fn mark(&mut self) -> Option<u64> {
        if let State::Failed = self.state {
            return None;
        }
        let left = match self.state {
            State::Served => self.ring.rung_at_most(),
            _ => self.ring.outstanding() + self.ring.rung(),
        };
        (left > 0).then_some(self.watch.completed + u64::from(left))
    }

    /// Whether all its places hold entries that device code has not rung, and none is under way. Not while a kernel
    /// looks at it: a look from here would bring its memory back from the GPU.
    pub fn is_full_of_unrung(&self) -> bool {
        !matches!(self.state, State::Served) && self.ring.is_full_of_unrung()
    }

    /// Whether an entry has begun to arrive that was not taken.
    fn has_head(&self) -> bool {
        // SAFETY: the ring is there.
        unsafe { self.ring.head().is_there() }
    }

    /// A sentence about the oldest entry if nothing has moved for `limit`, once; or about credits that device code has
    /// not been told of.
    pub fn watch<C: Context>(&mut self, common: &Common, context: &C, now: Instant, limit: Duration) -> Option<String> {
        if let State::Served = self.state {
            // What the kernel does not do in its time comes back; who gave it the lane watches whether it does.
            return None;
        }
        let (peer, fabric, has_head) = (self.peer, C::NAME, self.has_head());
        let is_busy = !self.unfinished.is_empty() || matches!(self.state, State::Flushing { .. });
        let is_late = !is_busy && self.ring.owed().is_some_and(|owed| owed.is_late(context, peer));
        let is_full = !is_busy && !is_late && !has_head && self.ring.is_full_of_unrung();
        if !is_busy && !is_late && !has_head && !is_full {
            (self.watch.since, self.watch.said) = (None, false);
            return None;
        }
        let since = match self.watch.since {
            Some((completed, since)) if completed == self.watch.completed => since,
            _ => {
                (self.watch.since, self.watch.said) = (Some((self.watch.completed, now)), false);
                return None;
            }
        };
        let age = now.duration_since(since);
        if age < limit || self.watch.said {
            return None;
        }
        self.watch.said = true;
        let context = common.number;
        if is_full {
            return Some(format!(
                "context {context}, queue to rank {peer}: for {age:.1?} (OXYGIN_STALL) its {} places have been full of \
                 entries that device code has not rung. A kernel whose threads share a context and ring late \
                 (ncclGinOptFlagsAggregateRequests) stands so on any NIC: give it more contexts (ginContextCount, \
                 NCCL_GIN_NCONTEXTS) or a longer queue (ginQueueDepth, NCCL_GIN_GDAKI_QP_DEPTH)",
                self.ring.capacity()
            ));
        }
        if is_late && !has_head {
            return Some(format!(
                "context {context}, queue to rank {peer}, fabric {fabric}: all entries of device code are complete, \
                 and for {age:.1?} (OXYGIN_STALL) it has not been told so: this rank's GPU takes no store"
            ));
        }
        let way = match is_busy {
            true => format!(
                "read from the queue and posted as operation {} or before, {} in all unfinished",
                self.unfinished.front().map_or(self.newest.0, |run| run.last.0),
                self.under_way
            ),
            false => "it stands in the queue and nothing is unfinished".into(),
        };
        let waits = match &self.state {
            State::Flushing { waits, left, .. } => {
                let ranks: Vec<_> = waits.iter().chain(left).map(|(peer, _)| peer).collect();
                format!("a flush waits for what gets have brought from ranks {ranks:?} to be visible")
            }
            _ if is_busy => {
                format!("fabric {fabric} has not reported it complete: rank {peer}, or this GPU, takes nothing")
            }
            _ => match self.ring.read(0, &mut Ops::default()) {
                Entry::Absent => self.ring.why_absent(),
                Entry::Fenced => format!("it waits until rank {peer} has carried out what came before it"),
                _ => format!("fabric {fabric} has no room for it: rank {peer}, or this GPU, takes nothing"),
            },
        };
        Some(format!(
            "context {context}, queue to rank {peer}, fabric {fabric}: the oldest entry of device code has been under \
             way for {age:.1?} (OXYGIN_STALL); {way}; {waits}"
        ))
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
