//! Operations that have not been started: those that wait for their turn, and those that are deferred.

use super::deferred::{Copy, Deferred};
use super::op::Op;
use crate::fabric::soft::lane::Lane;
use crate::rma::op::Signal;
use std::collections::VecDeque;
use std::sync::Arc;

/// So many operations, as many as a submission has, find their signals read at once.
const READ_FOR: usize = 256;

/// All operations that are not in flight.
#[derive(Default)]
pub struct OperationQueue {
    /// In the order in which they start.
    pub ready: VecDeque<Op>,
    /// Bulk copies, and operations behind them.
    pub deferred: Deferred,
}

impl OperationQueue {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.deferred.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ready.len() + self.deferred.len()
    }

    /// Drops what waits on a lane.
    pub fn forget(&mut self, lane: &Arc<Lane>) {
        for _ in 0..self.ready.len() {
            match self.ready.pop_front() {
                Some(op) if Arc::ptr_eq(&op.owner.lane, lane) => op.owner.give_up(),
                Some(op) => self.ready.push_back(op),
                None => break,
            }
        }
        let gone = self.deferred.remove(|op| Arc::ptr_eq(&op.owner.lane, lane));
        gone.into_iter().for_each(|op| op.owner.give_up());
    }

    /// Takes out what is unwanted.
    pub fn remove(&mut self, unwanted: impl Fn(&Op) -> bool) -> Vec<Op> {
        let (mut gone, kept): (Vec<_>, Vec<_>) = self.ready.drain(..).partition(&unwanted);
        self.ready = kept.into();
        gone.extend(self.deferred.remove(unwanted));
        gone
    }

    /// Lets deferred operations go on: in front, because what else is queued of their lanes came later, but for what
    /// the copy kernel left undone.
    pub fn release(&mut self, done: u64) {
        let mut front = 0;
        for op in self.deferred.release(done) {
            let put_back = self.ready.iter().take_while(|q| q.has_turn).enumerate();
            let earlier = put_back.filter(|(_, q)| Arc::ptr_eq(&q.owner.lane, &op.owner.lane)).last();
            let at = earlier.map_or(front, |(i, _)| front.max(i + 1));
            front += usize::from(at == front);
            self.put_back(at, op);
        }
    }

    /// A submission reads signals for the first of the queue, with those around it. Operations that wait by now, and
    /// whose signals these are, need not have them read once more: whoever resets a signal does so before it is posted
    /// again.
    pub fn note_reading(&mut self, submission: u64, is_read: impl Fn(&Signal) -> bool) {
        for op in self.ready.iter_mut().take(READ_FOR).filter(|op| op.fetch.is_none()) {
            if op.signal.as_ref().is_some_and(&is_read) {
                op.reading = Some(submission);
            }
        }
    }

    /// Queues an operation that was taken from there before, for its turn. One that has read its signal's value reads
    /// it again: others may go ahead of it now.
    pub fn put_back(&mut self, at: usize, op: Op) {
        if let Some(next) = self.ready.front_mut() {
            next.reading = None;
        }
        self.ready.insert(at, Op { has_turn: true, ..op });
    }

    /// Sets an operation aside: a large copy, or one behind it.
    pub fn defer(&mut self, op: Op, is_bulk: bool) {
        self.deferred.push(Op { reading: None, ..op }, if is_bulk { Copy::Waiting } else { Copy::None });
    }

    /// Takes all of them out.
    pub fn take_all(&mut self) -> impl Iterator<Item = Op> + '_ {
        self.ready.drain(..).chain(self.deferred.remove(|_| true))
    }
}
