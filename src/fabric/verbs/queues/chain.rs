//! Chains: operations that waited, linked together and rung once, with one completion behind them all.

use super::super::lane::{EntryKind, Lane, Logged, Op, WorkRequest, NOTED};
use super::super::outcome::Outcomes;
use super::super::template::blank;
use super::super::wr_id::WrId;
use super::additions::{Joined, Room};
use super::{Device, Queues};
use crate::rma::op::Signal;
use oxygin_ffi::verbs::types::*;
use std::ptr::{addr_of_mut, null_mut, NonNull};

/// Work requests rung by one doorbell at most, and operations that a `more` hint holds back at most.
pub const CHAIN: usize = 32;

/// A chain that is being built.
pub(super) struct Chain(NonNull<Requests>);

/// What a chain is written into.
struct Requests {
    wrs: [ibv_send_wr; CHAIN],
    sges: [ibv_sge; CHAIN],
    /// Where the lane stands after each work request.
    stands: [Stand; CHAIN],
}

/// Where a lane stands in its backlog.
#[derive(Clone, Copy, Default)]
pub struct Stand {
    /// Operations of the backlog that are wholly in the queue.
    pub ops: u32,
    /// Bytes of the next one that are.
    offset: u64,
    /// Signal messages among the work requests.
    messages: u32,
    /// The newest get among them.
    get: Option<u32>,
    /// A place that was written, and is not read behind that yet: see [`Device::confirms`].
    unconfirmed: Option<ibv_wr_rdma>,
}

impl Stand {
    /// The next bytes of an operation are in the queue. `is_to_confirm`: they are written, and a read has to follow.
    fn pass(&mut self, op: &Op, bytes: u32, is_to_confirm: bool) {
        if is_to_confirm && bytes > 0 {
            self.unconfirmed = Some(ibv_wr_rdma { remote_addr: op.remote + self.offset, rkey: op.rkey });
        }
        self.offset += u64::from(bytes);
    }

    /// Whether the operation writes to another window than those before it, whose read comes first.
    fn is_elsewhere(&self, op: &Op) -> bool {
        op.kind != EntryKind::Get && self.unconfirmed.is_some_and(|place| place.rkey != op.rkey)
    }
}

impl Chain {
    /// Nothing yet.
    pub(super) fn new() -> Self {
        let requests =
            Requests { wrs: [blank(); CHAIN], sges: [ibv_sge::default(); CHAIN], stands: [Stand::default(); CHAIN] };
        Self(NonNull::from(Box::leak(Box::new(requests))))
    }

    fn as_ptr(&self) -> *mut Requests {
        self.0.as_ptr()
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // SAFETY: made by Box::leak in `new`, and nobody else holds it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Queues {
    /// Posts one chain from the front of a lane's backlog; returns whether another may follow.
    pub(super) fn post_chain(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let (count, may_follow) = self.build(peer, outcomes.completed(peer));
        if count == 0 {
            let more = self.post_looped(peer, outcomes) || self.post_flush(peer, outcomes);
            self.probe(peer, outcomes);
            return more;
        }
        let chain = self.chain.as_ptr();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        let mut bad = null_mut();
        // SAFETY: the chain is this object's own, its first `count` work requests are linked and end in NULL; the
        // queue pair is live; whoever issued the operations vouches for their local ranges.
        let rc = unsafe { (self.device.post_send)(lane.qp, addr_of_mut!((*chain).wrs[0]), &mut bad) };
        // SAFETY: only addresses are compared.
        let refused = || (0..count).find(|&i| bad == unsafe { addr_of_mut!((*chain).wrs[i]) });
        let named = if rc == 0 { Some(count) } else { refused() };
        let taken = named.unwrap_or(0);
        if taken > 0 {
            // SAFETY: `build` filled the first `count` of `stands` and `taken` is at most that.
            let stand = unsafe { (*chain).stands[taken - 1] };
            lane.backlog.drain(..stand.ops as usize);
            lane.offset = stand.offset;
            lane.last_get = stand.get.or(lane.last_get);
            lane.unconfirmed = stand.unconfirmed;
            lane.sent = lane.sent.wrapping_add(stand.ops);
            lane.take(taken as u32);
            // Behind the last work request of a whole chain comes a completion; behind part of one there is none.
            lane.unsignalled = if taken == count { 0 } else { lane.unsignalled + taken as u32 };
            if let Some(messages) = &mut self.messages {
                messages.sent(peer, stand.messages);
            }
        }
        if rc != 0 {
            self.refused_chain(peer, peer, rc, named.is_some(), outcomes);
        }
        rc == 0 && may_follow
    }

    /// Fills the chain with the next work requests of a lane; returns how many, and whether others may follow at once.
    fn build(&mut self, peer: u32, completed: u32) -> (usize, bool) {
        let chain = self.chain.as_ptr();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return (0, false) };
        if lane.failed || lane.flushing {
            return (0, false);
        }
        // The read that confirms comes last.
        let kept = usize::from(self.device.confirms);
        let limit = (lane.room(completed) as usize).min(CHAIN).saturating_sub(kept);
        let mut stand = Stand { ops: 0, offset: lane.offset, messages: 0, get: None, unconfirmed: lane.unconfirmed };
        let mut count = 0;
        let mut reading = lane.is_reading(completed);
        let mut joined: Option<Joined> = None;
        while count < limit {
            let Some(&op) = lane.backlog.get(stand.ops as usize) else { break };
            if matches!(op.kind, EntryKind::Flush | EntryKind::Loop) {
                break;
            }
            let number = lane.sent.wrapping_add(stand.ops).wrapping_add(1);
            let unfinished = number.wrapping_sub(completed) as usize;
            if unfinished > NOTED {
                break;
            }
            let (next, last) = op.next(stand.offset, self.device.max_msg);
            if matches!(next, WorkRequest::Data(1..)) && stand.is_elsewhere(&op) {
                break;
            }
            if matches!(next, WorkRequest::Signal(_)) && unfinished < NOTED {
                let window = stand.unconfirmed.map(|place| place.rkey);
                let room = Room { requests: limit - count, max_msg: self.device.max_msg, window };
                let with_next = Joined::with_next(joined.as_ref(), lane, stand, room);
                let has_credit = || self.messages.as_ref().is_none_or(|m| m.has_credit(peer, stand.messages));
                if with_next.is_some() && has_credit() {
                    joined = with_next;
                    stand.ops += 1;
                    stand.offset = 0;
                    continue;
                }
            }
            let (mut wr, sge) = match (next, &mut self.messages) {
                (WorkRequest::Data(bytes), _) => {
                    let request = data(&op, stand.offset, bytes, self.device.max_inline);
                    stand.pass(&op, bytes, self.device.confirms && request.0.opcode == IBV_WR_RDMA_WRITE);
                    request
                }
                (WorkRequest::Signal(mut signal), messages) => {
                    signal.value = signal.value.wrapping_add(joined.take().map_or(0, |joined| joined.value));
                    match messages {
                        None => addition(&self.device, &op, &signal),
                        Some(messages) => {
                            let Some(sge) = messages.stage(peer, stand.messages, &signal) else { break };
                            stand.messages += 1;
                            message(sge, self.device.max_inline)
                        }
                    }
                }
            };
            if wr.opcode == IBV_WR_RDMA_READ {
                stand.get = Some(number);
                reading = true;
            } else if reading && self.device.overtakes {
                wr.send_flags |= IBV_SEND_FENCE;
            }
            lane.note(number, Logged::of(&op));
            if last {
                stand.ops += 1;
                stand.offset = 0;
            }
            // Only an error brings this one back, and then the operation it belongs to is wanted.
            wr.wr_id = WrId::part(peer, number);
            let stand = joined.as_ref().map_or(stand, |joined| joined.stand);
            // SAFETY: `count` is below CHAIN, and the chain stays put.
            unsafe { link(chain, count, wr, sge, stand) };
            count += 1;
        }
        let may_follow = count > 0 && (count + kept == CHAIN || stand.unconfirmed.is_some());
        let confirming = self.device.confirming().filter(|_| count < lane.room(completed) as usize);
        // SAFETY: the first `count` work requests were just written, and the loop has left a place.
        (unsafe { end(chain, count, peer, lane, stand, confirming) }, may_follow)
    }

    /// Starts the local read of a flush at the front of a lane's backlog, once everything before it is complete.
    fn post_flush(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let own = self.device.rank;
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        let Some(&op) = lane.backlog.front() else { return false };
        if op.kind != EntryKind::Flush || lane.flushing || lane.failed || !lane.is_drained(outcomes.completed(peer)) {
            return false;
        }
        let number = lane.sent.wrapping_add(1);
        lane.note(number, Logged::of(&op));
        if !self.own_has_room(peer, outcomes) {
            return false;
        }
        let mut sge = ibv_sge { addr: op.local, length: op.len as u32, lkey: op.lkey };
        let mut wr = ibv_send_wr {
            wr_id: WrId::flush(peer, number),
            sg_list: &mut sge,
            num_sge: 1,
            opcode: IBV_WR_RDMA_READ,
            send_flags: IBV_SEND_SIGNALED,
            wr: ibv_wr_remote { rdma: ibv_wr_rdma { remote_addr: op.remote, rkey: op.rkey } },
            ..blank()
        };
        let Some(qp) = self.lanes.get(own as usize).map(|l| l.qp) else { return false };
        let mut bad = null_mut();
        // SAFETY: the queue pair is live; the scratch outlives it and the device checks keys and ranges.
        let rc = unsafe { (self.device.post_send)(qp, &mut wr, &mut bad) };
        if rc != 0 {
            self.refused_chain(peer, own, rc, std::ptr::eq(bad, &wr), outcomes);
            return false;
        }
        if let Some(own) = self.lanes.get_mut(own as usize) {
            // Its limit was for operations alone.
            own.shut(own.issued());
            own.take(1);
        }
        self.wait(own);
        if let Some(lane) = self.lanes.get_mut(peer as usize) {
            lane.backlog.pop_front();
            lane.flushing = true;
        }
        false
    }

    /// Whether something for `peer` can go over the connection to this rank itself. Where that one is broken it never
    /// will: what waits for it fails, as nothing else would end the wait.
    pub(super) fn own_has_room(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let rank = self.device.rank;
        let Some(own) = self.lanes.get(rank as usize) else { return false };
        if !own.failed {
            return own.room(outcomes.completed(rank)) > 0;
        }
        let kind = outcomes.check(rank).map_or_else(|e| e.kind(), |()| crate::error::Kind::DeviceFailed);
        self.fail(peer, outcomes, kind, || {
            format!(
                "the connection of rank {rank} to itself, over which what gets and atomic operations brought is made \
                 visible, is broken; look for its error, which came first"
            )
        });
        false
    }

    /// Tells a peer how many of its signal messages were taken, where that is due.
    pub(super) fn announce(&mut self, peer: u32, outcomes: &Outcomes) {
        let Some(messages) = &mut self.messages else { return };
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        if lane.failed || lane.room(outcomes.completed(peer)) == 0 {
            return;
        }
        let Some((mut sge, rdma)) = messages.announcement(peer) else { return };
        let fence = if self.device.overtakes && lane.is_reading(outcomes.completed(peer)) { IBV_SEND_FENCE } else { 0 };
        let flags = fence | in_request(sge.length, self.device.max_inline);
        let sge = NonNull::from(&mut sge);
        if self.post_aside(peer, rdma, Some(sge), flags, outcomes) {
            if let Some(messages) = &mut self.messages {
                messages.announced(peer);
            }
        }
    }

    /// Asks for a sign of life of a peer whose credit a signal waits for, with nothing under way that the device could
    /// report as lost. A write of nothing is acknowledged by the peer's device, whatever its process does; where there
    /// is no device or no queue pair any more, it comes back with an error.
    fn probe(&mut self, peer: u32, outcomes: &Outcomes) {
        let Some(messages) = &mut self.messages else { return };
        let Some(lane) = self.lanes.get(peer as usize) else { return };
        let completed = outcomes.completed(peer);
        let waits = lane.backlog.front().is_some_and(|op| !matches!(op.kind, EntryKind::Flush | EntryKind::Loop));
        if !waits || lane.failed || lane.flushing || !lane.is_silent(completed) || lane.room(completed) == 0 {
            return;
        }
        if let Some(rdma) = messages.probe(peer) {
            self.post_aside(peer, rdma, None, 0, outcomes);
        }
    }

    /// Posts a write of `sge`, or of nothing, that is no operation; whether the device took it.
    fn post_aside(
        &mut self,
        peer: u32,
        rdma: ibv_wr_rdma,
        sge: Option<NonNull<ibv_sge>>,
        flags: u32,
        outcomes: &Outcomes,
    ) -> bool {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        let mut wr = ibv_send_wr {
            wr_id: WrId::aside(peer, lane.unsignalled + 1),
            sg_list: sge.map_or(null_mut(), NonNull::as_ptr),
            num_sge: i32::from(sge.is_some()),
            send_flags: IBV_SEND_SIGNALED | flags,
            wr: ibv_wr_remote { rdma },
            ..blank()
        };
        let mut bad = null_mut();
        // SAFETY: the queue pair is live, `sge` is the caller's own, and what it names belongs to `messages`, which
        // outlives the queue pair.
        let rc = unsafe { (self.device.post_send)(lane.qp, &mut wr, &mut bad) };
        if rc != 0 {
            self.refused_chain(peer, peer, rc, std::ptr::eq(bad, &wr), outcomes);
            return false;
        }
        lane.take(1);
        lane.unsignalled = 0;
        true
    }

    /// Want of room is no failure: what was refused is posted again later. Anything else ends the lane, and so does a
    /// refusal that names none of the work requests: the providers of soft devices queue all of them before they ring,
    /// and if that fails nobody knows what the device has taken. `by` is the lane in whose queue they are.
    #[cold]
    #[inline(never)]
    pub(super) fn refused_chain(&mut self, peer: u32, by: u32, rc: i32, is_named: bool, outcomes: &Outcomes) {
        // libibverbs' providers return an errno, its negative, or -1 and leave it in errno.
        let errno = match rc {
            -1 => std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
            rc => rc.saturating_abs(),
        };
        if is_named && matches!(errno, libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS) {
            return;
        }
        let e = std::io::Error::from_raw_os_error(errno);
        let unsaid = if is_named { "" } else { ", without a word on which of them it took" };
        let sentence = || {
            format!(
                "the device refuses work requests towards rank {by}{unsaid}: {e}; look for the device in the kernel log"
            )
        };
        if !is_named && by != peer {
            self.fail(by, outcomes, crate::error::Kind::DeviceFailed, sentence);
        }
        self.fail(peer, outcomes, crate::error::Kind::DeviceFailed, sentence);
    }
}

/// Has the device's library take so many bytes from host memory as it posts them, where they fit into a work request:
/// the device need not fetch them.
#[inline(always)]
fn in_request(bytes: u32, max_inline: u32) -> u32 {
    if bytes <= max_inline {
        IBV_SEND_INLINE
    } else {
        0
    }
}

/// The work request of `bytes` of an operation's data that come after `offset`, and where they are here.
#[inline(always)]
fn data(op: &Op, offset: u64, bytes: u32, max_inline: u32) -> (ibv_send_wr, ibv_sge) {
    let mut wr = blank();
    // A get of nothing is a write of nothing: soft-iWARP breaks the connection over empty reads.
    let read = op.kind == EntryKind::Get && bytes > 0;
    wr.opcode = if read { IBV_WR_RDMA_READ } else { IBV_WR_RDMA_WRITE };
    wr.wr.rdma = ibv_wr_rdma { remote_addr: op.remote + offset, rkey: op.rkey };
    wr.num_sge = i32::from(bytes > 0);
    if op.kind == EntryKind::Value {
        wr.send_flags |= in_request(bytes, max_inline);
    }
    (wr, ibv_sge { addr: op.local + offset, length: bytes, lkey: op.lkey })
}

/// The work request of a signal, or of a plain fetch-and-add, as an atomic operation.
#[inline(always)]
fn addition(device: &Device, op: &Op, signal: &Signal) -> (ibv_send_wr, ibv_sge) {
    let atomic = ibv_wr_atomic { remote_addr: signal.remote, compare_add: signal.value, swap: 0, rkey: signal.rkey };
    let wr = ibv_send_wr { opcode: IBV_WR_ATOMIC_FETCH_AND_ADD, num_sge: 1, wr: ibv_wr_remote { atomic }, ..blank() };
    let (addr, lkey) = match op.kind == EntryKind::FetchAdd && op.lkey != 0 {
        true => (op.local, op.lkey),
        false => (device.scratch, device.scratch_lkey),
    };
    (wr, ibv_sge { addr, length: 8, lkey })
}

/// The work request of a signal that goes as a message, which has been staged at `sge`.
#[inline(always)]
fn message(sge: ibv_sge, max_inline: u32) -> (ibv_send_wr, ibv_sge) {
    let send_flags = IBV_SEND_SOLICITED | in_request(sge.length, max_inline);
    (ibv_send_wr { opcode: IBV_WR_SEND, send_flags, num_sge: 1, ..blank() }, sge)
}

/// Ends a chain of so many work requests: `confirming`, where a read goes that confirms what was written, comes behind
/// them if any wrote; the last one has a completion. Returns how many there are now.
///
/// # Safety
/// As for [`link`]; the first `count` were linked.
unsafe fn end(
    chain: *mut Requests,
    count: usize,
    peer: u32,
    lane: &Lane,
    mut stand: Stand,
    confirming: Option<ibv_sge>,
) -> usize {
    let (mut count, number) = (count, lane.sent.wrapping_add(stand.ops));
    if let Some((sge, rdma)) = confirming.and_then(|sge| Some((sge, stand.unconfirmed.take()?))) {
        let read = ibv_send_wr { opcode: IBV_WR_RDMA_READ, num_sge: 1, wr: ibv_wr_remote { rdma }, ..blank() };
        // SAFETY: the caller's promise.
        unsafe { link(chain, count, read, sge, stand) };
        count += 1;
    }
    if count > 0 {
        let slots = lane.unsignalled + count as u32;
        // SAFETY: the first `count` work requests were written.
        let last = unsafe { &mut (*chain).wrs[count - 1] };
        last.send_flags |= IBV_SEND_SIGNALED;
        last.wr_id = WrId::chain(peer, number, slots, stand.offset > 0);
    }
    count
}

/// Puts a work request at the end of the chain's first `count`.
///
/// # Safety
/// The chain is there, stays where it is until it is posted, and has room for one more.
#[inline(always)]
unsafe fn link(chain: *mut Requests, count: usize, mut wr: ibv_send_wr, sge: ibv_sge, stand: Stand) {
    // SAFETY: the caller's promise; all that is pointed to lies in the same allocation.
    unsafe {
        (*chain).sges[count] = sge;
        wr.sg_list = addr_of_mut!((*chain).sges[count]);
        (*chain).wrs[count] = wr;
        if count > 0 {
            (*chain).wrs[count - 1].next = addr_of_mut!((*chain).wrs[count]);
        }
        (*chain).stands[count] = stand;
    }
}
