//! What the peer answered to gets.

use super::remote::Until;
use super::tx_queue::{LaneQueue, LaneState, Running, TxQueue};
use super::Link;
use crate::error::{Error, Kind as Fault};
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::shm::message::Header;
use crate::fabric::soft::shm::port::PortStep;
use crate::fabric::soft::shm::ring::{place, Message};
use crate::memory::key::Key;
use crate::rma::op::{Get, Op};
use crate::rma::seq::Seq;
use std::sync::atomic::Ordering;

/// Gets of a lane that the peer is asked for at once, at most: in a trip there and back it answers so many.
const ASKED: u32 = 32;

impl LaneQueue {
    /// The get with this number, if its answer is awaited: an atomic operation awaits its fetched value as a get does
    /// its bytes.
    fn awaited(&self, seq: Seq) -> Option<Get> {
        let is_asked = matches!(self.state, LaneState::Asked(_));
        let task = self.tasks.front().filter(|t| is_asked && t.seq == seq)?;
        match task.work {
            Op::Get(get) => Some(get),
            Op::Atomic(atomic) => Some(super::atomic::as_get(&atomic)),
            Op::Put(_) | Op::Value(_) => None,
        }
    }
}

impl Link {
    /// The data of a get has all arrived.
    pub fn get_done(&self, shared: &Domain, context: u32, seq: Seq) {
        let Some(tx) = self.tx_queues.of(context) else { return };
        let mut queue = tx.lock();
        if let LaneState::Vacant { asked, .. } = &mut queue.state {
            *asked = asked.saturating_sub(1);
            return;
        }
        let (Some(get), &LaneState::Asked(asked)) = (queue.awaited(seq), &queue.state) else { return };
        let fetches = queue.remote.fetches().filter(|fetches| Key(get.lkey).is_on_gpu() && !fetches.is_idle());
        let last = fetches.map(|fetches| fetches.last());
        queue.tasks.pop_front();
        if let Some(last) = last {
            queue.remote.push(seq, Until::Fetched(last), None);
        } else {
            self.finish(&tx, &mut queue, seq);
        }
        let is_last = asked == 1;
        queue.state = if is_last { LaneState::Ready } else { LaneState::Asked(asked - 1) };
        queue.rest();
        let has_asked = self.ask_more(&tx, &mut queue);
        tx.release(queue);
        if is_last {
            self.advance(shared);
        } else if has_asked {
            self.publish(shared);
        }
    }

    /// Asks the peer for gets behind those that it was asked for, where all of these are from its host memory: it
    /// answers such ones in their order. Returns whether there was one.
    pub(super) fn ask_more(&self, tx: &TxQueue, queue: &mut LaneQueue) -> bool {
        let &LaneState::Asked(before) = &queue.state else { return false };
        let of_host = |task: &Running| match task.work {
            Op::Get(get) if !Key(get.rkey).is_on_gpu() && get.len > 0 => Some((get, task.seq)),
            _ => None,
        };
        if queue.tasks.front().and_then(of_host).is_none() {
            return false;
        }
        let Some(mut port) = self.route.near() else { return false };
        let mut asked = before;
        while asked < ASKED {
            let Some((get, seq)) = queue.tasks.get(asked as usize).and_then(of_host) else { break };
            // What the kernel copies it does for the first one alone.
            let is_asked_for = Key(get.lkey).is_on_gpu() || port.pid_for(get.rkey).is_none();
            if !is_asked_for || !matches!(port.push_get(&get, tx.lane.context, seq), PortStep::Waiting) {
                break;
            }
            asked += 1;
        }
        queue.state = LaneState::Asked(asked);
        asked > before
    }

    /// Bytes of a get, from `at` on in it. They go where this rank's own operation says, and nowhere if its context
    /// is gone: then nobody vouches for that memory any more. `false`: there is no room for them yet.
    pub fn get_data(&self, shared: &Domain, message: &Message) -> bool {
        let Header { key: context, aux: seq, addr: at, len, .. } = message.header;
        let Some(tx) = self.tx_queues.of(context) else { return true };
        let mut queue = tx.lock();
        let Some(get) = queue.awaited(Seq(seq)) else { return true };
        if at.checked_add(u64::from(len)).is_none_or(|end| end > get.len) {
            let why = format!("rank {} sent {len} bytes at {at} of a get of {} bytes", self.peer, get.len);
            self.health.fail(Error::protocol(why));
            self.backlog.fetch_sub(queue.drop_all(), Ordering::Relaxed);
            tx.release(queue);
            return true;
        }
        let to = get.local + at;
        if Key(get.lkey).is_on_gpu() {
            let lane = queue.remote.fetches_of(&tx.lane);
            // SAFETY: a message in place.
            return shared.received.fetched(&shared.engine, lane, || unsafe { message.copy() }, get.lkey, to);
        }
        let held = shared.registry.hold();
        match held.resolve(get.lkey, to, u64::from(len)) {
            // SAFETY: the payload is `len` bytes inside the ring, the destination `len` bytes inside a held window,
            // which is the operation's for as long as it is in the queue, and the queue is locked.
            Some(to) => unsafe { place(message.payload, to, len as usize) },
            None => {
                drop(held);
                let why =
                    format!("the window that a get from rank {} writes to was deregistered before its end", self.peer);
                let why = Error::usage(why).of_kind(Fault::LocalProtection);
                self.fail_lane(shared, &tx, &mut queue, why);
                tx.release(queue);
            }
        }
        true
    }
}
