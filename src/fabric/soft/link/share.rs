//! The part of a link that uses GPU windows shared between processes.

use super::outs::{Next, Until};
use super::{gone, Link, Local, Outcome, Response, Route, State};
use crate::error::{Error, Result};
use crate::fabric::soft::gpu::{Op, Owner, Side};
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::local::message::{Header, Kind, PullRequest};
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::GPU_BIT;
use crate::rma::op::{Get, Put};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// Pulls towards one peer: how many were asked for, how many are done.
#[derive(Default)]
pub struct Pulls {
    issued: u32,
    done: u32,
    /// Lanes with something out.
    pub slots: Vec<u32>,
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
        let can_send = matches!(state.route, Route::Local(_) | Route::Asking { .. } | Route::Unknown);
        can_send && !state.responses.is_empty()
    }

    /// This rank has fetched everything up to the peer's pull `number`.
    pub fn acknowledge(&self, shared: &Shared, number: Seq) {
        let mut state = self.state.lock();
        if let Some(Response::Pulled(last)) = state.responses.back_mut() {
            *last = number;
            return;
        }
        state.responses.push_back(Response::Pulled(number));
        self.backlog.fetch_add(1, Ordering::Relaxed);
        drop(state);
        shared.mark_pending(self.peer);
    }

    /// The peer has fetched everything up to pull `number`.
    pub fn pulled(&self, shared: &Shared, number: Seq) {
        let mut state = self.state.lock();
        if number.is_done(Seq(state.pulls.done)) {
            return;
        }
        if !number.is_done(Seq(state.pulls.issued)) {
            self.health.fail(Error::remote(format!("rank {} acknowledges a copy that was never asked for", self.peer)));
            return self.drop_all(&mut state);
        }
        state.pulls.done = number.0;
        self.settle(shared, &mut state);
    }

    /// Completes what is done. Returns whether anything was.
    pub(super) fn settle(&self, shared: &Shared, state: &mut State) -> bool {
        let mut moved = false;
        let mut asked = false;
        let pulled = Seq(state.pulls.done);
        let mut at = 0;
        while let Some(&slot) = state.pulls.slots.get(at) {
            let queue = &mut state.queues[slot as usize];
            match queue.outs.next(pulled) {
                Ok(Next::Done(seq)) => {
                    queue.lane.complete(seq);
                    self.backlog.fetch_sub(1, Ordering::Relaxed);
                    moved = true;
                }
                Ok(Next::InEngine) if !asked => {
                    asked = true;
                    shared.engine.poll();
                }
                Ok(Next::InEngine | Next::AtPeer) => at += 1,
                Ok(Next::None) => drop(state.pulls.slots.swap_remove(at)),
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
        let window = get.rkey & !GPU_BIT;
        let Some(found) = shared.share.find(peer, window, get.remote, get.len) else { return Ok(None) };
        if !self.inbox.has_window(window) {
            return Err(Error::remote(gone(peer)));
        }
        let seq = fetches.number();
        let owner = Owner { lane: fetches.clone(), seq, backlog: Arc::new(AtomicUsize::new(1)) };
        let to = Side::Caller { addr: get.local, gpu: get.lkey & GPU_BIT != 0 };
        shared.engine.submit(Op::copy(owner, Side::Caller { addr: found.addr, gpu: true }, to, get.len));
        Ok(Some(Outcome::Out(Until::Fetched(seq), found.used)))
    }

    /// The message behind a finished fetch.
    pub(super) fn push_pulled(&mut self, number: Seq) -> bool {
        let header = Header { kind: Kind::Pulled, len: 0, key: 0, aux: number.0, addr: 0 };
        // SAFETY: no payload.
        unsafe { self.inbox.producer().push(header, std::ptr::null()) }
    }
}
