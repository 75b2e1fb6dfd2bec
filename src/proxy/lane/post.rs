//! Entries become operations: what stands in the ring is read, posted as one batch, and taken off.

use super::batch::Other;
use super::{Batch, Common, Lane, Run, State, BATCH};
use crate::error::Result;
use crate::fabric::{Context, Posted};
use crate::proxy::ring::{Ends, Entry, Finish, Ring, Stopped};
use crate::rma::seq::Seq;

/// Whether what was posted still stands in its place of the ring.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    IsThere,
    IsTaken,
}

/// What ends the reading of a batch.
enum Stop {
    Flush(Finish),
    Refused(Box<str>),
}

impl<R: Ring> Lane<R> {
    /// Reads what there is, posts it as one batch, and takes off the ring what was posted. Behind `most` entries, if
    /// all of them are for a kernel, it leaves the others.
    #[inline]
    pub(super) fn post<C: Context>(
        &mut self,
        most: u32,
        context: &C,
        common: &mut Common,
        batch: &mut Batch,
    ) -> Result<u32> {
        batch.clear();
        self.ring.begin();
        let (mut stop, mut is_fenced) = (None, false);
        let of_batch = if R::JOINS { 2 * BATCH } else { BATCH };
        for nth in 0..of_batch.min(self.ring.capacity()) {
            if nth > 0 && nth >= most && batch.would_suit_kernel() {
                break;
            }
            let before = batch.ops.len();
            let entry = self.ring.read(nth, &mut batch.ops);
            if R::JOINS && before >= BATCH as usize && entry != Entry::Joined {
                // The batch is full; it is read again.
                batch.ops.truncate(before);
                break;
            }
            match entry {
                Entry::Absent => break,
                Entry::Fenced => {
                    is_fenced = nth == 0;
                    break;
                }
                Entry::Joined => batch.add_joined(),
                Entry::Op(finish) => batch.add(finish, true),
                Entry::Nothing(finish) => batch.add(finish, false),
                Entry::Nop => batch.add_nop(),
                Entry::Ops(ops) => batch.add_several(ops),
                Entry::Gets(ops) => batch.add_gets(ops),
                Entry::Flush(finish) => {
                    stop = Some(Stop::Flush(finish));
                    break;
                }
                Entry::Refused(why) => {
                    stop = Some(Stop::Refused(why));
                    break;
                }
            }
        }
        if most == 0 && batch.len() > 0 && batch.would_suit_kernel() {
            // One was read, to know what it is.
            batch.clear();
            return Ok(0);
        }
        if is_fenced {
            self.go_on_behind_fence(context);
            return Ok(0);
        }
        let mut taken = self.post_batch(context, common, batch)?;
        if let Some(stop) = stop.filter(|_| taken == batch.len()) {
            self.ring.take(1);
            taken += 1;
            match stop {
                Stop::Flush(finish) => {
                    let left = std::mem::take(&mut common.gets);
                    self.state = State::Flushing { waits: Vec::new(), left, finish };
                    self.go_on_flushing(context, common);
                }
                Stop::Refused(why) => {
                    log::warn!("context {}, to rank {}: {why}", common.number, self.peer);
                    match R::ENDS {
                        Ends::Context => common.is_dead = true,
                        Ends::Ring => self.state = State::Stopped,
                    }
                    self.ring.stop(Stopped::Refused);
                    self.refused += 1;
                    common.fail();
                    self.renew_newest(context);
                    self.add_idle(Finish::NONE);
                }
            }
        }
        Ok(taken)
    }

    /// Posts the operations of the batch. Where all entries need nothing but their credits, the fabric may give those,
    /// and what it takes is off the ring before it can: [`Place::IsTaken`]. Those of gets into host memory it may not,
    /// as it counts them before their bytes are there: a kernel may take the flush that device code posts then.
    ///
    /// # Safety
    /// As for [`Context::post`].
    #[inline(always)]
    unsafe fn post_ops<C: Context>(&mut self, context: &C, batch: &Batch) -> Result<(Posted, Place)> {
        let owed = self.ring.owed().filter(|_| batch.others.is_empty() && !batch.ops.any_into_host());
        let Some(index) = owed.and_then(|owed| owed.index(context, self.peer, batch.joined)) else {
            // SAFETY: the caller's promise.
            return Ok((unsafe { context.post(self.peer, &batch.ops) }?, Place::IsThere));
        };
        let (ring, mut begun) = (&mut self.ring, 0);
        let begin = |n: usize| {
            begun = batch.entries(n as u32);
            ring.take(begun);
        };
        // SAFETY: as above. The index is in memory of the set's, which ends after its contexts and queues, and nothing
        // else changes it meanwhile.
        let posted = unsafe { context.post_entries(self.peer, &batch.ops, index, begin) };
        match posted {
            Ok(posted) => {
                debug_assert_eq!(batch.entries(posted.taken as u32), begun);
                if let Some(owed) = self.ring.owed().filter(|_| posted.taken > 0) {
                    owed.may_count(posted.last);
                }
                Ok((posted, Place::IsTaken))
            }
            Err(error) => {
                // They are given back with all that is under way.
                self.under_way += begun;
                Err(error)
            }
        }
    }

    /// The first `n` operations of a batch are under way, the first one with number `next`: a run for each row of those
    /// that have as many entries.
    #[inline(always)]
    fn add_plain(&mut self, next: Seq, n: u32, joined: u32) {
        let mut at = 0;
        while at < n {
            let bits = joined >> at;
            let is_joined = bits & 1;
            let alike = if is_joined > 0 { bits.trailing_ones() } else { bits.trailing_zeros() }.min(n - at);
            at += alike;
            self.newest = Seq(next.0.wrapping_add(at - 1));
            let (n, of_op) = (alike << is_joined, 1 + is_joined);
            self.add(Run { last: self.newest, n, of_op, finish: Finish::NONE, brings: false });
        }
    }

    /// Posts the batch; returns how many entries that took.
    #[inline]
    fn post_batch<C: Context>(&mut self, context: &C, common: &mut Common, batch: &mut Batch) -> Result<u32> {
        if batch.len() == 0 {
            return Ok(0);
        }
        let (mut next, mut left, mut place) = (self.newest.next(), 0, Place::IsThere);
        if !batch.ops.is_empty() {
            // SAFETY: local ranges lie in windows, which callers deregister after the operations on them; the values in
            // the operations are copied.
            let (posted, was) = unsafe { self.post_ops(context, batch) }?;
            place = was;
            left = posted.taken as u32;
            batch.posted = posted.taken;
            if left > 0 {
                // Others may have posted on this (context, peer): the numbers of a batch are consecutive all the same.
                next = Seq(posted.last.0.wrapping_sub(left - 1));
            }
            if let Some(nth) = batch.ops.last_get(posted.taken) {
                common.note_get(self.peer, Seq(next.0.wrapping_add(nth as u32)));
            }
        }
        let plain = batch.plain.min(left);
        left -= plain;
        self.add_plain(next, plain, batch.joined);
        let mut taken = batch.entries(plain);
        next = Seq(next.0.wrapping_add(plain));
        if plain == batch.plain {
            for &Other { finish, ops, brings, .. } in &batch.others {
                if ops > 0 {
                    // One whose operations were taken in part is posted again as a whole: it is no atomic one.
                    let Some(rest) = left.checked_sub(ops.into()) else { break };
                    left = rest;
                    self.newest = Seq(next.0.wrapping_add(u32::from(ops) - 1));
                    next = self.newest.next();
                } else {
                    self.renew_newest(context);
                }
                self.add(Run { last: self.newest, n: 1, of_op: 0, finish, brings });
                taken += 1;
            }
        }
        if taken > 0 && place == Place::IsThere {
            self.ring.take(taken);
        }
        Ok(taken)
    }
}

#[cfg(test)]
#[path = "post_tests.rs"]
mod tests;
