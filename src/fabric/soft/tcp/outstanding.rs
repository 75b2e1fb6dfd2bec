//! The operations of one lane that have not all left: cut into frames, finished out of order, completed in order.

use crate::fabric::soft::gpu::PinnedBuffer;
use crate::fabric::soft::lane::{Lane, Task};
use crate::rma::seq::Seq;
use std::collections::VecDeque;
use std::sync::Arc;

use super::wire::Counts;

struct Outstanding {
    seq: Seq,
    /// Frames that are not finished, plus one while more will be cut, plus one while its bytes await confirmation.
    left: u32,
    /// The peer has not said that its bytes are visible there.
    is_unconfirmed: bool,
}

/// A fence that the peer has not answered.
struct Asked {
    number: Seq,
    /// It is for operations with ids below this.
    below: u64,
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
    /// Operations with ids below this are confirmed, as far as they have to be.
    confirmed: u64,
    fences: VecDeque<Asked>,
    last_fence: Seq,
    /// There are unconfirmed operations that the peer was not asked about, and that are cut.
    pub wants_fence: bool,
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
            confirmed: 0,
            fences: VecDeque::new(),
            last_fence: Seq(0),
            wants_fence: false,
        }
    }

    /// The first task is done with.
    #[inline]
    pub fn pop(&mut self) {
        self.tasks.pop_front();
        self.looked = self.looked.saturating_sub(1);
    }

    /// Operation `seq` has no bytes that we still need. `puts`: it has put some.
    #[inline]
    pub fn done(&mut self, seq: Seq, puts: bool) {
        let is_unconfirmed = puts && self.lane.confirms;
        if self.outstanding.is_empty() && !is_unconfirmed {
            self.lane.complete(seq);
        } else {
            self.outstanding.push_back(Outstanding { seq, left: is_unconfirmed.into(), is_unconfirmed });
            self.wants_fence |= is_unconfirmed;
        }
    }

    /// Begins an operation of several frames, the first of them not yet counted. `puts`: it is a put.
    pub fn begin(&mut self, seq: Seq, puts: bool) -> u64 {
        let is_unconfirmed = puts && self.lane.confirms;
        self.outstanding.push_back(Outstanding { seq, left: 1 + u32::from(is_unconfirmed), is_unconfirmed });
        self.end() - 1
    }

    /// The id behind the last operation that was begun.
    fn end(&self) -> u64 {
        self.first + self.outstanding.len() as u64
    }

    /// One more frame of operation `id`; `last`: no more will follow.
    pub fn frame(&mut self, id: u64, last: bool) {
        let one = &mut self.outstanding[(id - self.first) as usize];
        match last {
            false => one.left += 1,
            true => self.wants_fence |= one.is_unconfirmed,
        }
    }

    /// The peer is about to be asked about all operations that are cut. Returns the fence's number.
    pub fn ask(&mut self) -> Seq {
        self.last_fence = self.last_fence.next();
        // One that is being cut is the last.
        let below = self.end() - u64::from(self.cut > 0);
        self.fences.push_back(Asked { number: self.last_fence, below });
        self.wants_fence = false;
        self.last_fence
    }

    /// The peer has answered a fence, and with it those before: answers come by several connections.
    pub fn answered(&mut self, number: Seq) {
        let mut below = self.confirmed;
        while let Some(asked) = self.fences.front().filter(|asked| asked.number.is_done(number)) {
            below = asked.below;
            self.fences.pop_front();
        }
        self.confirm(below);
    }

    /// Nobody answers any more, nor needs to: the peer has closed its communicator.
    pub fn confirm_all(&mut self) {
        self.fences.clear();
        self.wants_fence = false;
        self.confirm(self.end());
    }

    fn confirm(&mut self, below: u64) {
        for id in self.confirmed.max(self.first)..below {
            let one = &mut self.outstanding[(id - self.first) as usize];
            one.left -= u32::from(std::mem::take(&mut one.is_unconfirmed));
        }
        self.confirmed = below;
        self.complete_first();
    }

    /// A frame of operation `id` is finished.
    pub fn finished(&mut self, id: u64) {
        self.outstanding[(id - self.first) as usize].left -= 1;
        self.complete_first();
    }

    fn complete_first(&mut self) {
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
        self.fences = VecDeque::new();
        self.wants_fence = false;
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
        let a = q.begin(Seq(1), true);
        q.frame(a, false);
        q.frame(a, true);
        let b = q.begin(Seq(2), true);
        q.frame(b, true);
        q.done(Seq(3), true);
        q.finished(b);
        q.finished(a);
        assert!(!is_done(1) && !q.is_idle());
        q.finished(a);
        assert!(is_done(3) && q.is_idle());
        q.done(Seq(4), true);
        assert!(is_done(4) && !q.wants_fence);
    }

    /// Puts of a lane that confirms wait for the answer to a fence, and what comes behind them with them.
    #[test]
    fn confirmed_puts_are_complete_when_the_peer_says_so() {
        let lane = Arc::new(Lane::new(0, 0, Arc::new(Health::default())).confirming(true));
        let mut q = TaskQueue::new(lane.clone());
        let is_done = |n| lane.test(Seq(n)).unwrap();
        q.done(Seq(1), false);
        assert!(is_done(1) && !q.wants_fence, "a signal alone");
        q.done(Seq(2), true);
        q.done(Seq(3), false);
        assert!(q.wants_fence && !is_done(2));
        let first = q.ask();
        assert!(!q.wants_fence);
        // One that is cut in two: the fence between is for those before it alone.
        q.done(Seq(4), true);
        let long = q.begin(Seq(5), true);
        q.frame(long, false);
        q.cut = 1;
        let between = q.ask();
        q.frame(long, true);
        q.cut = 0;
        assert!(q.wants_fence);
        q.finished(long);
        q.answered(first);
        assert!(is_done(3) && !is_done(4));
        q.answered(between);
        q.answered(between);
        q.finished(long);
        assert!(is_done(4) && !is_done(5), "the peer may not have its second half");
        let last = q.ask();
        q.answered(last);
        assert!(is_done(5) && q.is_idle());
        // Answers come by several connections: a later one says what an earlier one does.
        q.done(Seq(6), true);
        let [earlier, later] = [q.ask(), q.ask()];
        q.answered(later);
        q.answered(earlier);
        assert!(is_done(6) && q.is_idle());
        q.done(Seq(7), true);
        q.confirm_all();
        assert!(is_done(7) && !q.wants_fence);
    }
}
