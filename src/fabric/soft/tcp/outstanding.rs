//! The operations of one lane that have not all left: cut into frames, finished out of order, completed in order.

use crate::fabric::soft::gpu::PinnedBuffer;
use crate::fabric::soft::lane::{Lane, Task};
use crate::rma::seq::Seq;
use std::collections::VecDeque;
use std::sync::Arc;

use super::wire::Counts;

struct Outstanding {
    seq: Seq,
    /// Frames that are not finished, plus one while more will be cut.
    left: u32,
}

/// One lane on the initiator's side.
pub struct TaskQueue {
    /// Who learns of completions.
    pub lane: Arc<Lane>,
    /// Not yet begun, but for the first, of which `cut` bytes are.
    pub tasks: VecDeque<Task>,
    /// See `tasks`.
    pub cut: u64,
    /// The number of the first task's operation while `cut` > 0.
    pub cutting: u64,
    /// Chunks sent on each connection.
    pub counts: Counts,
    /// Whether there were any: signals carry the counts from then on.
    pub bulk: bool,
    /// Whether the lane is on the ring.
    pub queued: bool,
    /// The bytes of the small puts from GPU memory among the first `looked` tasks, in their order.
    pub fetched: VecDeque<PinnedBuffer>,
    /// See `fetched`.
    pub looked: usize,
    outstanding: VecDeque<Outstanding>,
    first: u64,
}

impl TaskQueue {
    /// A lane with nothing to do.
    pub fn new(lane: Arc<Lane>) -> Self {
        Self {
            lane,
            tasks: VecDeque::new(),
            cut: 0,
            cutting: 0,
            counts: Counts::default(),
            bulk: false,
            queued: false,
            fetched: VecDeque::new(),
            looked: 0,
            outstanding: VecDeque::new(),
            first: 0,
        }
    }

    /// The first task is done with.
    #[inline]
    pub fn pop(&mut self) {
        self.tasks.pop_front();
        self.looked = self.looked.saturating_sub(1);
    }

    /// Operation `seq` has no bytes that we still need.
    #[inline]
    pub fn done(&mut self, seq: Seq) {
        if self.outstanding.is_empty() {
            self.lane.complete(seq);
        } else {
            self.outstanding.push_back(Outstanding { seq, left: 0 });
        }
    }

    /// Begins an operation of several frames, the first of them not yet counted.
    pub fn begin(&mut self, seq: Seq) -> u64 {
        self.outstanding.push_back(Outstanding { seq, left: 1 });
        self.first + self.outstanding.len() as u64 - 1
    }

    /// One more frame of operation `id`; `last`: no more will follow.
    pub fn frame(&mut self, id: u64, last: bool) {
        if !last {
            self.outstanding[(id - self.first) as usize].left += 1;
        }
    }

    /// A frame of operation `id` is finished.
    pub fn finished(&mut self, id: u64) {
        self.outstanding[(id - self.first) as usize].left -= 1;
        let mut last = None;
        while self.outstanding.front().is_some_and(|f| f.left == 0) {
            last = self.outstanding.pop_front().map(|f| f.seq);
            self.first += 1;
        }
        if let Some(seq) = last {
            self.lane.complete(seq);
        }
    }

    /// Whether anything is unfinished.
    pub fn is_idle(&self) -> bool {
        self.tasks.is_empty() && self.outstanding.is_empty()
    }

    /// Gives everything up.
    pub fn clear(&mut self) {
        self.tasks = VecDeque::new();
        self.fetched = VecDeque::new();
        self.looked = 0;
        self.outstanding = VecDeque::new();
        self.cut = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::lane::Health;

    #[test]
    fn completion_is_in_order() {
        let lane = Arc::new(Lane::new(0, 0, Arc::new(Health::default())));
        let mut q = TaskQueue::new(lane.clone());
        let is_done = |n| lane.test(Seq(n)).unwrap();
        let a = q.begin(Seq(1));
        q.frame(a, false);
        q.frame(a, true);
        let b = q.begin(Seq(2));
        q.frame(b, true);
        q.done(Seq(3));
        q.finished(b);
        q.finished(a);
        assert!(!is_done(1) && !q.is_idle());
        q.finished(a);
        assert!(is_done(3) && q.is_idle());
        q.done(Seq(4));
        assert!(is_done(4));
    }
}
