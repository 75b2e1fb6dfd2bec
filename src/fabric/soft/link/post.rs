//! Operations come in: small ones go into the ring of a peer on this host at once, others to whoever moves them, or
//! wait.

use super::tx_queue::{LaneQueue, LaneState, Running, TxQueue};
use super::{Link, RouteKind};
use crate::error::{Error, Result};
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::lane::Task;
use crate::fabric::soft::shm::port::{Pushed, RING_MAX};
use crate::fabric::{CreditIndex, Posted};
use crate::rma::op::{Op, Put, Transfer};
use crate::rma::seq::Seq;
use crate::sys::spin::SpinGuard;
use std::sync::atomic::Ordering;

/// Whether the source of a small put in host memory is still a window's: one that goes passes by every queue once its
/// bit is down (`Link::pass_tx_queues`).
#[inline]
fn may_read(shared: &Domain, op: &Op, put: &Put) -> bool {
    put.len == 0 || matches!(op, Op::Value(_)) || shared.status.may_have(put.lkey)
}

impl Link {
    /// Waits for who posts right now: a window is gone, which those see who come later.
    pub fn pass_tx_queues(&self) {
        self.tx_queues.all().iter().for_each(|tx| drop(tx.lock()));
    }

    /// Starts operations of a lane as far as it may have more than it has; never waits. `credit`: their completions may
    /// be counted there; `begin` is told how many are taken. See
    /// [`Context::post_entries`](crate::fabric::Context::post_entries).
    #[inline]
    pub fn post(
        &self,
        shared: &Domain,
        tx: &TxQueue,
        ops: &[Op],
        credit: Option<CreditIndex>,
        begin: impl FnOnce(usize),
    ) -> Result<Posted> {
        let lane = &tx.lane;
        lane.check()?;
        shared.keep_busy();
        let queue = tx.lock();
        let room = shared.config.max_operations.saturating_sub(lane.unfinished());
        let ops = ops.get(..room as usize).unwrap_or(ops);
        if ops.is_empty() {
            drop(queue);
            // What is in front goes on although the caller may leave it at that.
            shared.stir();
            return Ok(Posted::NONE);
        }
        begin(ops.len());
        lane.count(ops.iter().map(Op::len).sum());
        let (mut pushed, mut done, mut last) = (0, 0, None);
        // What the peer is to confirm is asked for by the lane's turn.
        let is_plain = || !lane.confirms || ops.iter().all(Op::is_empty);
        let near = if lane.is_idle() && is_plain() { self.route.near() } else { None };
        if let Some(mut port) = near {
            for op in ops {
                let Transfer::Put(put) = op.transfer() else { break };
                if put.len > RING_MAX || op.is_on_gpu() || !may_read(shared, op, &put) {
                    break;
                }
                match port.push_small(&put, lane.context) {
                    Pushed::All => last = Some(lane.number()),
                    Pushed::Nothing => break,
                    Pushed::DataOnly => {
                        done = put.len;
                        break;
                    }
                }
                pushed += 1;
            }
            // One wake-up for all.
            let wake = (pushed > 0 || done > 0) && port.inbox.publish();
            // Behind that: what is complete the peer finds in its ring, if it looks.
            last.into_iter().for_each(|seq| lane.complete(seq));
            drop(port);
            if pushed == ops.len() {
                drop(queue);
                if wake {
                    shared.wake(self.peer);
                }
                return Ok(Posted { taken: pushed, last: lane.last() });
            }
            if wake {
                shared.wake(self.peer);
            }
        }
        let credit = credit.map(|index| index.behind(pushed));
        let last = self.enqueue(shared, tx, queue, &ops[pushed..], done, credit)?;
        Ok(Posted { taken: ops.len(), last })
    }

    /// Takes operations the long way; of the first one `done` bytes have been moved. Returns the last one's number.
    #[cold]
    #[inline(never)]
    fn enqueue<'a>(
        &'a self,
        shared: &Domain,
        tx: &'a TxQueue,
        mut queue: SpinGuard<'a, LaneQueue>,
        ops: &[Op],
        done: u64,
        credit: Option<CreditIndex>,
    ) -> Result<Seq> {
        let lane = &tx.lane;
        if lane.is_over() {
            // Why is told in a moment.
            ops.iter().for_each(|_| _ = lane.number());
            return Ok(lane.last());
        }
        let done_of = |nth| if nth == 0 { done } else { 0 };
        let run =
            |(nth, &work)| Running { seq: lane.number(), work, done: done_of(nth), bounce: None, is_pushed: false };
        let running = ops.iter().enumerate().map(run);
        let way = self.route.way();
        if way == RouteKind::Far {
            // Under the lock: what one thread posts first must be first there too.
            self.hand_to_tcp(shared, tx, &mut queue);
            let task = |running: Running| Task { lane: lane.clone(), seq: running.seq, work: running.work };
            shared.tcp().post_all(lane, running.map(task));
            let last = lane.last();
            tx.release(queue);
            // The caller may leave it at that; of copies from a GPU no socket tells.
            shared.stir();
            return Ok(last);
        }
        let is_first = matches!(queue.state, LaneState::Idle) && queue.tasks.is_empty();
        if let (Some(engine), true) = (self.route.engine(), is_first) {
            let begun = ops.iter().enumerate().map(|(nth, work)| (lane.number(), work, done_of(nth)));
            self.submit(shared, engine, lane, credit, begun);
            let last = lane.last();
            drop(queue);
            shared.stir();
            return Ok(last);
        }
        if way == RouteKind::Closed {
            self.health.fail(Error::rank_closed(self.peer));
            self.health.check()?;
        }
        let small = ops.iter().all(|op| op.len() <= RING_MAX);
        let on_gpu = ops.iter().any(|op| op.is_on_gpu());
        let was_empty = queue.tasks.is_empty();
        queue.tasks.extend(running);
        let last = lane.last();
        if matches!(queue.state, LaneState::Idle) {
            queue.state = LaneState::Ready;
        }
        self.backlog.fetch_add(ops.len(), Ordering::Relaxed);
        shared.mark_pending(self.peer);
        // A source in GPU memory costs its length nothing here: others fetch it.
        let now = match way {
            RouteKind::Own | RouteKind::Unknown => small,
            RouteKind::Near => (on_gpu || lane.confirms && small) && was_empty,
            _ => false,
        };
        if now && way == RouteKind::Near && matches!(queue.state, LaneState::Ready) {
            // By this thread alone: others have their turns.
            queue = self.run_lane(shared, tx, queue).0;
            tx.release(queue);
            self.publish(shared);
        } else {
            tx.release(queue);
            if now {
                self.advance(shared);
            }
        }
        shared.stir();
        Ok(last)
    }
}
