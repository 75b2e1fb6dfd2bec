//! Puts and gets by windows that the processes share: the peer fetches what this rank puts from its GPU, this rank's
//! own engine what it gets into it. What follows them on a lane is complete after them.

use super::remote::{FirstPull, RemoteCompletions, Until};
use super::route::Route;
use super::staged::Step;
use super::tx_queue::{LaneQueue, LaneState, TxQueue};
use super::{Link, RouteKind};
use crate::error::{Error, Result};
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::gpu::{CallerWindow, Op, Owner, TransferEnd};
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::sentences::gone;
use crate::fabric::soft::shm::message::PullRequest;
use crate::fabric::soft::shm::port::Port;
use crate::fabric::Flush;
use crate::memory::key::Key;
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

impl Pulls {
    /// Has the peer say, as of a pull with the number returned, when all that came of a context before is in place.
    /// `None`: its ring has no room.
    fn ask(&mut self, port: &mut Port, context: u32) -> Option<Seq> {
        let number = Seq(self.issued).next();
        port.push_fence(context, number).then(|| {
            self.issued = number.0;
            number
        })
    }
}

impl Link {
    /// Whether the peer still has window `id`, as far as is known here.
    pub fn may_have_window(&self, id: u32) -> bool {
        match self.route.way() {
            RouteKind::Near => self.route.near().is_none_or(|port| port.inbox.has_window(id)),
            RouteKind::Closed => false,
            _ => true,
        }
    }

    /// The peer has fetched everything up to pull `number` of a context.
    pub fn pulled(&self, shared: &Domain, context: u32, number: Seq) {
        // Of a context that is gone an earlier one may come behind a later one.
        let Some(tx) = self.tx_queues.of(context) else { return };
        let mut queue = tx.lock();
        match &mut queue.pulls {
            pulls if number.is_done(Seq(pulls.done)) => return,
            pulls if number.is_done(Seq(pulls.issued)) => pulls.done = number.0,
            _ => {
                let why = format!("rank {} acknowledges a copy that was never asked for", self.peer);
                self.health.fail(Error::protocol(why));
                self.backlog.fetch_sub(queue.drop_all(), Ordering::Relaxed);
                return tx.release(queue);
            }
        }
        self.settle(shared, &tx, &mut queue, &mut false);
        tx.release(queue);
    }

    /// Has the peer say when all that was posted on a lane is in place there: values and signals go into its ring, and
    /// are complete here at once. Other ways complete what is in place.
    pub fn fence(&self, shared: &Domain, tx: &TxQueue) -> Result<Flush> {
        tx.lane.check()?;
        let mut queue = tx.lock();
        if self.route.way() != RouteKind::Near || queue.fence == tx.lane.last() && tx.lane.is_idle() {
            return Ok(Flush::Done);
        }
        let is_idle = matches!(queue.state, LaneState::Idle) && queue.tasks.is_empty() && tx.lane.is_idle();
        let Some(mut port) = self.route.near().filter(|_| is_idle) else { return Ok(Flush::NoRoom) };
        let Some(number) = queue.pulls.ask(&mut port, tx.lane.context) else { return Ok(Flush::NoRoom) };
        let wake = port.inbox.publish();
        drop(port);
        let seq = tx.lane.number();
        queue.fence = seq;
        queue.remote.push(seq, Until::Pulled(number), None);
        self.backlog.fetch_add(1, Ordering::Relaxed);
        shared.mark_pending(self.peer);
        tx.release(queue);
        if wake {
            shared.wake(self.peer);
        }
        Ok(Flush::Until(seq))
    }

    /// Has the peer say when the lane's first operation, all of which is in its ring, is in place.
    pub(super) fn ask_to_confirm(&self, tx: &TxQueue, queue: &mut LaneQueue) -> Step {
        // By other ways what is complete is in place, and they are taken once the ring is read.
        if self.route.way() != RouteKind::Near {
            return Step::Finished;
        }
        let Some(mut port) = self.route.near() else { return Step::Full };
        let number = queue.pulls.ask(&mut port, tx.lane.context);
        number.map_or(Step::Full, |number| Step::Out(Until::Pulled(number), None))
    }

    /// Completes what is done of a lane. Returns whether anything was, or is on its way on this rank's GPU, which is
    /// asked once, and noted in `asked`.
    pub(super) fn settle(&self, shared: &Domain, tx: &TxQueue, queue: &mut LaneQueue, asked: &mut bool) -> bool {
        let mut moved = false;
        loop {
            match queue.remote.next(Seq(queue.pulls.done)) {
                Ok(FirstPull::Done(seq)) => {
                    // One that has failed completes nothing more: others before this one may have been dropped.
                    if !tx.lane.is_stopped() {
                        tx.lane.complete(seq);
                    }
                    self.backlog.fetch_sub(1, Ordering::Relaxed);
                    moved = true;
                }
                Ok(FirstPull::InEngine) if !*asked => {
                    *asked = true;
                    moved |= shared.engine.poll();
                }
                Ok(FirstPull::InEngine | FirstPull::AtPeer | FirstPull::None) => return moved,
                Err(error) => {
                    let dropped = queue.remote.abandon();
                    self.backlog.fetch_sub(dropped.len(), Ordering::Relaxed);
                    self.fail_lane(shared, tx, queue, error);
                    return true;
                }
            }
        }
    }

    /// An operation whose own part is done: complete, unless others before it are out.
    pub(super) fn finish(&self, tx: &TxQueue, queue: &mut LaneQueue, seq: Seq) {
        if queue.remote.is_empty() {
            tx.lane.complete(seq);
            self.backlog.fetch_sub(1, Ordering::Relaxed);
        } else {
            queue.remote.push(seq, Until::Before, None);
        }
    }
}

/// Asks the peer to fetch a put's bytes, if it has the source mapped. `None`: it has not.
pub(super) fn pull(shared: &Domain, port: &mut Port, put: &Put, lane: &Lane, pulls: &mut Pulls) -> Option<Step> {
    if !Key(put.rkey).is_on_gpu() || !Key(put.lkey).is_on_gpu() || put.len == 0 {
        return None;
    }
    let Some((window, used)) = shared.share.give(lane.peer, put.lkey, put.local, put.len) else {
        shared.share.tell_of_slow(lane.peer, Key(put.lkey).number());
        return None;
    };
    let number = Seq(pulls.issued).next();
    let signal = put.signal.map(|s| (s.rkey, s.remote, s.value));
    let request = PullRequest { len: put.len, from: put.local, window, number: number.0, signal };
    if !port.push_pull(put, lane.context, &request) {
        return Some(Step::Full);
    }
    pulls.issued = number.0;
    Some(Step::Out(Until::Pulled(number), Some(used)))
}

/// Fetches a get's bytes by this rank's own engine, if the source is mapped here; `in_engine` counts it while the
/// engine has it. `None`: it is not, or both ends are in host memory, or there are no bytes.
pub(super) fn fetch(
    shared: &Domain,
    route: &Route,
    in_engine: &Arc<AtomicUsize>,
    get: &Get,
    lane: &Lane,
    remote: &mut RemoteCompletions,
) -> Result<Option<Step>> {
    if !get.is_on_gpu() || get.len == 0 {
        return Ok(None);
    }
    let window = Key(get.rkey).number();
    let Some(found) = shared.share.find(lane.peer, window, get.remote, get.len) else { return Ok(None) };
    if !route.near().is_some_and(|port| port.inbox.has_window(window)) {
        return Err(Error::remote_access(gone(lane.peer)));
    }
    let fetches = remote.fetches_of(lane);
    let seq = fetches.number();
    in_engine.fetch_add(1, Ordering::Relaxed);
    let owner = Owner { lane: fetches.clone(), seq, backlog: in_engine.clone() };
    // By its window: once the peer has failed nothing waits for the copy before that goes.
    let to = TransferEnd::Window { key: get.lkey, addr: get.local };
    let from = TransferEnd::Caller { addr: found.addr, gpu: true };
    let (window, home) = (Some(CallerWindow { rank: lane.peer, key: found.window }), Some(found.named));
    // It was mapped for the GPU that copies it.
    let op = Op { window, home, is_get: true, is_open: true, ..Op::copy(owner, from, to, get.len) };
    shared.engine.submit(std::iter::once(op));
    Ok(Some(Step::Out(Until::Fetched(seq), Some(found.used))))
}
