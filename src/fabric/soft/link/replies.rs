//! The way back to a peer that asks through shared memory, where operations towards it go another way: by a GPU's engine in
//! this process, or over TCP because it once did not answer.

use super::{ring, Link, Local, Question, Route, State};
use crate::config::SoftTransport;
use crate::error::Error;
use crate::fabric::soft::shared::Shared;
use nix::errno::Errno;
use std::sync::atomic::Ordering;

/// How replies get to the peer where the route is not shared memory.
pub enum Replies {
    /// There were none.
    Unknown,
    /// Asked for its inbox.
    Asking(Question),
    /// Through its inbox.
    Through(Box<Local>),
    /// It has closed its communicator, and waits for none.
    Closed,
}

impl State {
    /// Makes visible what was pushed for the peer. Returns whether it must be woken.
    pub(super) fn publish(&mut self) -> bool {
        let ring = ring(&mut self.route, &mut self.replies);
        ring.is_some_and(|local| local.inbox.producer().is_dirty() && local.inbox.publish())
    }
}

impl Link {
    /// The peer waits for something, and the route is not shared memory: looks for the way back, or drops what it waits for.
    #[cold]
    pub(super) fn find_way_back(&self, shared: &Shared, state: &mut State) {
        if state.responses.is_empty() {
            return;
        }
        let is_closed = matches!(state.route, Route::Closed) || matches!(state.replies, Replies::Closed);
        if is_closed {
            return self.drop_responses(state);
        }
        if shared.config.soft_transport == SoftTransport::Tcp {
            return self.fail_replies(state, "; set OXYGIN_SOFT_TRANSPORT=tcp on all ranks");
        }
        let question = match &state.replies {
            Replies::Asking(question) => Some(*question),
            _ => None,
        };
        let question = Question::next(question);
        let limit = shared.config.peer_limit();
        if question.is_late(limit) {
            let why = format!(": it has not answered for {} s (OXYGIN_PEER_TIMEOUT)", limit.as_secs_f32());
            return self.fail_replies(state, &why);
        }
        if !question.is_due() {
            return;
        }
        match shared.ask(self.peer) {
            Ok(_) => state.replies = Replies::Asking(question.asked()),
            // It has reached this rank: its socket was there.
            Err(Errno::ECONNREFUSED | Errno::ENOENT) => {
                state.replies = Replies::Closed;
                self.drop_responses(state);
            }
            Err(e) => self.fail_replies(state, &format!(": {}", e.desc())),
        }
    }

    pub(super) fn drop_responses(&self, state: &mut State) {
        self.backlog.fetch_sub(state.responses.len(), Ordering::Relaxed);
        state.responses.clear();
    }

    pub(super) fn fail_replies(&self, state: &mut State, why: &str) {
        self.drop_responses(state);
        let peer = self.peer;
        self.health.fail(Error::remote(format!(
            "rank {peer} reaches this rank through shared memory, but not the other way round{why}"
        )));
    }
}
