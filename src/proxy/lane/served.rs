//! A lane that a kernel serves by itself: how it is handed over, and taken back.

use super::{Common, Lane, State};
use crate::error::Result;
use crate::fabric::lanes::LaneView;
use crate::fabric::{Context, Flush};
use crate::proxy::ring::Ring;
use crate::rma::seq::Seq;
use std::sync::atomic::Ordering;

impl<R: Ring> Lane<R> {
    /// Takes nothing for now, so that it can be handed over. `false`: it is not in a state for that, or has more than
    /// `most` entries under way, which would take their time.
    pub fn hold(&mut self, most: u32) -> bool {
        let may_be = matches!(self.state, State::Open) && self.under_way <= most;
        if may_be {
            (self.state, self.fence) = (State::Held, None);
        }
        may_be
    }

    /// Takes entries again.
    pub fn release(&mut self) {
        if let State::Held | State::Served = self.state {
            (self.state, self.fence) = (State::Open, None);
        }
    }

    /// The first entry waits until the peer has carried out what came before it: asks, or looks whether it has.
    #[cold]
    pub(super) fn go_on_behind_fence<C: Context>(&mut self, context: &C) {
        // What has failed shows when the entry is posted.
        let is_over = match self.fence_once(context) {
            Ok(Flush::Done) | Err(_) => true,
            Ok(Flush::Until(seq)) => context.test(self.peer, seq).unwrap_or(true),
            Ok(Flush::NoRoom) => false,
        };
        if is_over {
            self.fence = None;
            self.ring.fenced();
        }
    }

    /// Whether all that was taken is complete and in place at the peer, and device code has been told.
    pub fn is_at_rest<C: Context>(&mut self, context: &C, common: &Common) -> bool {
        let (peer, is_held) = (self.peer, matches!(self.state, State::Held));
        is_held
            && self.unfinished.is_empty()
            && !common.is_dead
            && self.ring.owed().is_none_or(|owed| owed.settled(context, peer))
            && self.is_in_place(context)
    }

    /// Whether the peer has carried out all that is complete here: some of it may be on its way still, and a kernel
    /// would overtake it. Who asks again later does not do so for long: a lane is held for a while.
    fn is_in_place<C: Context>(&mut self, context: &C) -> bool {
        match self.fence_once(context) {
            Ok(Flush::Done) => true,
            Ok(Flush::Until(seq)) => seq.is_done(Seq(context.completed(self.peer).load(Ordering::Acquire))),
            // What has failed shows when something is posted.
            Ok(Flush::NoRoom) | Err(_) => false,
        }
    }

    /// Has the peer say when it has carried out all that is complete here, once until `fence` is forgotten.
    fn fence_once<C: Context>(&mut self, context: &C) -> Result<Flush> {
        if let Some(asked) = self.fence {
            return Ok(Flush::Until(asked));
        }
        let asked = context.fence(self.peer)?;
        if let Flush::Until(seq) = asked {
            self.fence = Some(seq);
        }
        Ok(asked)
    }

    /// Whether a kernel could ever serve it, as far as is known now.
    pub fn can_be_served(&self) -> bool {
        self.ring.can_be_served()
    }

    /// Whether a kernel that serves others could watch it, and its queue be brought to the GPU with theirs.
    pub fn can_be_watched(&self) -> bool {
        self.ring.can_be_watched()
    }

    /// As a kernel is to know it that serves or watches it, where it is at rest.
    pub fn view(&mut self, is_watched: bool) -> Option<LaneView> {
        self.ring.view(is_watched)
    }

    /// A kernel serves it from here on.
    pub fn begin_served(&mut self) {
        self.state = State::Served;
    }

    /// Whether a kernel does.
    pub fn is_served(&self) -> bool {
        matches!(self.state, State::Served)
    }

    /// Whether it takes nothing for now.
    #[cfg(test)]
    pub fn is_held(&self) -> bool {
        matches!(self.state, State::Held)
    }

    /// The GPU has failed while a kernel served it.
    #[cold]
    pub fn lose_served(&mut self, common: &Common) {
        self.release();
        self.fail(common, "the GPU has failed while a kernel carried out what device code had written");
    }

    /// The kernel has come to this entry. Returns how many it has done since it was asked last.
    pub fn served_until(&mut self, next: u32) -> u32 {
        let n = self.ring.served(next);
        self.watch.completed += u64::from(n);
        n
    }
}
