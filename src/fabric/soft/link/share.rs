//! The part of a link that uses GPU windows shared between processes.

use super::outs::{Next, Until};
use super::{gone, Link, Local, Outcome, Response, Route, State};
use crate::error::{Error, Result};
use crate::fabric::soft::gpu::{Op, Owner, Side};
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::local::message::{Header, Kind, PullRequest};
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::{window_number, GPU_BIT};
use crate::rma::op::{Get, Put};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// Pulls of one lane: how many were asked for, how many are done.
#[derive(Clone, Copy, Default)]
pub struct Pulls {
    issued: u32,
    done: u32,
}

impl Link {
    /// Finds the route now: others will need it.
    pub fn find(&self, shared: &Shared) {
        let mut state = self.state.lock();
        if matches!(state.route, Route::Unknown) {
            self.find_route(shared, &mut state);
        }
    }

    /// Whether the peer still has window `id`, as far as is known here.
    pub fn may_have_window(&self, id: u32) -> bool {
        match &self.state.lock().route {
            Route::Local(local) => local.inbox.has_window(id),
            Route::Closed => false,
            _ => true,
        }
    }

    /// Whether the peer waits for something that only has to be sent.
    pub fn owes(&self) -> bool {
        let state = self.state.lock();
        !state.responses.is_empty() && !matches!(state.route, Route::Closed)
    }

    /// This rank has fetched everything up to pull `number` of the peer's lane `slot`.
    pub fn acknowledge(&self, shared: &Shared, slot: u32, number: Seq) {
        if self.add_acknowledgement(slot, number) {
            shared.mark_pending(self.peer);
        }
    }

    /// Adds one to what is to be sent. `false`: one that waits there says it now.
    fn add_acknowledgement(&self, slot: u32, number: Seq) -> bool {
        let mut state = self.state.lock();
        // What was not sent yet says it as well; nothing else follows acknowledgements.
        for response in state.responses.iter_mut().rev() {
            match response {
                Response::Pulled { slot: of, number: last } if *of == slot => {
                    // Two threads may have found out at once, and the one that found less comes second.
                    if last.is_done(number) {
                        *last = number;
                    }
                    return false;
                }
                Response::Pulled { .. } => {}
                _ => break,
            }
        }
        state.responses.push_back(Response::Pulled { slot, number });
        self.backlog.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The peer has fetched everything up to pull `number` of lane `slot`.
    pub fn pulled(&self, shared: &Shared, slot: u32, number: Seq) {
        let mut state = self.state.lock();
        match state.queues.get_mut(slot as usize) {
            Some(queue) if number.is_done(Seq(queue.pulls.done)) => return,
            Some(queue) if number.is_done(Seq(queue.pulls.issued)) => queue.pulls.done = number.0,
            _ => {
                let why = format!("rank {} acknowledges a copy that was never asked for", self.peer);
                self.health.fail(Error::remote(why));
                return self.drop_all(&mut state);
            }
        }
        self.settle(shared, &mut state);
    }

    /// Completes what is done. Returns whether anything was, or is on its way on this rank's GPU.
    pub(super) fn settle(&self, shared: &Shared, state: &mut State) -> bool {
        let mut moved = false;
        let mut asked = false;
        let mut at = 0;
        while let Some(&slot) = state.out.get(at) {
            let queue = &mut state.queues[slot as usize];
            match queue.outs.next(Seq(queue.pulls.done)) {
                Ok(Next::Done(seq)) => {
                    queue.lane.complete(seq);
                    self.backlog.fetch_sub(1, Ordering::Relaxed);
                    moved = true;
                }
                Ok(Next::InEngine) if !asked => {
                    asked = true;
                    moved |= shared.engine.poll();
                }
                Ok(Next::InEngine | Next::AtPeer) => at += 1,
                Ok(Next::None) => drop(state.out.swap_remove(at)),
                Err(error) => {
                    self.health.fail(error);
                    self.drop_all(state);
                    return true;
                }
            }
        }
        moved
    }

    /// An operation whose own part is done: complete, unless others before it are out.
    pub(super) fn finish(&self, state: &mut State, slot: u32, seq: Seq) {
        let queue = &mut state.queues[slot as usize];
        if queue.outs.is_empty() {
            queue.lane.complete(seq);
            self.backlog.fetch_sub(1, Ordering::Relaxed);
        } else {
            queue.outs.push(seq, Until::Before, None);
        }
    }
}

impl Local {
    /// Asks the peer to fetch a put's bytes, if it has the source mapped. `None`: it has not.
    pub(super) fn push_pull(
        &mut self,
        shared: &Shared,
        put: &Put,
        slot: u32,
        peer: u32,
        pulls: &mut Pulls,
    ) -> Option<Outcome> {
        if put.rkey & GPU_BIT == 0 || put.lkey & GPU_BIT == 0 || put.len == 0 {
            return None;
        }
        let (window, used) = shared.share.give(peer, put.lkey, put.local, put.len)?;
        let number = Seq(pulls.issued).next();
        let signal = put.signal.map(|s| (s.rkey, s.remote, s.value));
        let request = PullRequest { len: put.len, from: put.local, window, number: number.0, signal }.encode();
        let header = Header { kind: Kind::Pull, len: request.len() as u32, key: put.rkey, aux: slot, addr: put.remote };
        // SAFETY: the payload is the request's own bytes.
        if !unsafe { self.inbox.producer().push(header, request.as_ptr()) } {
            return Some(Outcome::Full);
        }
        pulls.issued = number.0;
        Some(Outcome::Out(Until::Pulled(number), used))
    }

    /// Fetches a get's bytes by this rank's own engine, if the source is mapped here. `None`: it is not.
    pub(super) fn fetch(
        &mut self,
        shared: &Shared,
        get: &Get,
        peer: u32,
        fetches: &Arc<Lane>,
    ) -> Result<Option<Outcome>> {
        if get.rkey & GPU_BIT == 0 || get.len == 0 {
            return Ok(None);
        }
        let window = window_number(get.rkey);
        let Some(found) = shared.share.find(peer, window, get.remote, get.len) else { return Ok(None) };
        if !self.inbox.has_window(window) {
            return Err(Error::remote(gone(peer)));
        }
        let seq = fetches.number();
        let owner = Owner { lane: fetches.clone(), seq, backlog: Arc::new(AtomicUsize::new(1)) };
        let to = Side::Caller { addr: get.local, gpu: get.lkey & GPU_BIT != 0 };
        let from = Side::Caller { addr: found.addr, gpu: true };
        shared.engine.submit(Op { home: Some(found.home), ..Op::copy(owner, from, to, get.len) });
        Ok(Some(Outcome::Out(Until::Fetched(seq), found.used)))
    }

    /// The message behind a finished fetch.
    pub(super) fn push_pulled(&mut self, slot: u32, number: Seq) -> bool {
        let header = Header { kind: Kind::Pulled, len: 0, key: slot, aux: number.0, addr: 0 };
        // SAFETY: no payload.
        unsafe { self.inbox.producer().push(header, std::ptr::null()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn numbers(state: &State) -> Vec<(u32, Seq)> {
        let numbers = state.responses.iter().map(|r| match r {
            Response::Pulled { slot, number } => (*slot, *number),
            _ => panic!("not an acknowledgement"),
        });
        numbers.collect()
    }

    #[test]
    fn an_acknowledgement_takes_none_back() {
        let link = Link::new(1, Arc::default());
        for (slot, number) in [(0, 3), (1, 1), (0, 9), (0, 5), (1, u32::MAX), (1, 2)] {
            link.add_acknowledgement(slot, Seq(number));
        }
        assert_eq!(numbers(&link.state.lock()), [(0, Seq(9)), (1, Seq(2))]);
        assert_eq!(link.backlog.load(Ordering::Relaxed), 2);
    }
}
