//! Bulk copies, and operations behind them.
//!
//! A large copy runs on a stream of its own. Its operation waits here until the CPU has seen the copy done, and what
//! the same lane posts meanwhile waits behind it, so that signals and completions keep their order; other lanes go on.
//! Bulk copies of one lane need no order among themselves: several are on their way at once.

use super::op::Op;
use crate::fabric::soft::lane::Lane;
use std::collections::VecDeque;
use std::sync::Arc;

/// How far the copy of a deferred operation is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Copy {
    /// It has not been started.
    Waiting,
    /// It is in this submission of the bulk stream.
    Up(u64),
    /// The operation is not large; it only waits for its turn.
    None,
}

/// All of them, in the order of arrival.
#[derive(Default)]
pub struct Deferred(VecDeque<(Op, Copy)>);

impl Deferred {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether operations of this lane wait.
    pub fn has(&self, lane: &Arc<Lane>) -> bool {
        self.0.iter().any(|(op, _)| Arc::ptr_eq(&op.owner.lane, lane))
    }

    /// Adds one at the end.
    pub fn push(&mut self, op: Op, copy: Copy) {
        self.0.push_back((op, copy));
    }

    /// Those whose copies can be started, with what becomes of them.
    pub fn waiting(&mut self) -> impl Iterator<Item = (&mut Op, &mut Copy)> {
        self.0.iter_mut().filter(|(_, copy)| *copy == Copy::Waiting).map(|(op, copy)| (op, copy))
    }

    /// Takes out what may go on, now that submissions up to `done` are done.
    pub fn release(&mut self, done: u64) -> Vec<Op> {
        let (mut ready, mut held): (Vec<Op>, Vec<Arc<Lane>>) = (Vec::new(), Vec::new());
        for _ in 0..self.0.len() {
            let Some((op, copy)) = self.0.pop_front() else { break };
            let lane_waits = held.iter().any(|l| Arc::ptr_eq(l, &op.owner.lane));
            let copy_is_up = match copy {
                Copy::Waiting => true,
                Copy::Up(submission) => submission > done,
                Copy::None => false,
            };
            if !lane_waits && !copy_is_up {
                ready.push(op);
                continue;
            }
            if !lane_waits {
                held.push(op.owner.lane.clone());
            }
            self.0.push_back((op, copy));
        }
        ready
    }

    /// Takes out those that `unwanted` names.
    pub fn remove(&mut self, unwanted: impl Fn(&Op) -> bool) -> Vec<Op> {
        let (mut kept, mut gone) = (VecDeque::new(), Vec::new());
        for (op, copy) in self.0.drain(..) {
            if unwanted(&op) {
                gone.push(op);
            } else {
                kept.push_back((op, copy));
            }
        }
        self.0 = kept;
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::gpu::{Owner, TransferEnd};
    use crate::rma::seq::Seq;
    use std::sync::atomic::AtomicUsize;

    fn op(lane: &Arc<Lane>, seq: u32) -> Op {
        let owner = Owner { lane: lane.clone(), seq: Seq(seq), backlog: Arc::new(AtomicUsize::new(1)) };
        let nowhere = TransferEnd::Caller { addr: 0, gpu: false };
        Op::copy(owner, nowhere, nowhere, 0)
    }

    fn seqs(ops: Vec<Op>) -> Vec<u32> {
        ops.iter().map(|op| op.owner.seq.0).collect()
    }

    #[test]
    fn a_lane_keeps_its_order_and_holds_up_no_other() {
        let lanes = [0, 1].map(|context| Arc::new(Lane::new(context, 0, Arc::default())));
        let mut deferred = Deferred::default();
        deferred.push(op(&lanes[0], 1), Copy::Up(1));
        deferred.push(op(&lanes[1], 11), Copy::Up(2));
        deferred.push(op(&lanes[0], 2), Copy::None);
        deferred.push(op(&lanes[0], 3), Copy::Up(3));
        deferred.push(op(&lanes[1], 12), Copy::None);
        deferred.push(op(&lanes[0], 4), Copy::None);
        assert_eq!(seqs(deferred.release(0)), [0; 0]);
        assert_eq!(seqs(deferred.release(1)), [1, 2]);
        assert!(deferred.has(&lanes[0]) && deferred.has(&lanes[1]));
        assert_eq!(seqs(deferred.release(2)), [11, 12]);
        assert!(!deferred.has(&lanes[1]));
        assert_eq!(seqs(deferred.remove(|op| op.owner.seq.0 == 3)), [3]);
        assert_eq!(seqs(deferred.release(2)), [4]);
        assert!(deferred.is_empty());
    }
}
