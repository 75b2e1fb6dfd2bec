//! One context: its completion queue and its lanes, under the context's lock. Here is the data path.

use super::lane::{Kind, Lane, Logged, Next, Op, LOG_PUT, LOG_PUT_SIGNAL, LOG_SIGNAL};
use super::message::Messages;
use super::outcome::Outcomes;
use super::ticket::{Ticket, SLOT};
use crate::rma::op::Put;
use crate::rma::seq::Seq;
use oxygin_ffi::verbs::types::*;
use std::mem::MaybeUninit;
use std::ptr::{addr_of_mut, null_mut, NonNull};
use std::sync::atomic::Ordering;

/// Completions taken by one poll.
const BATCH: usize = 32;
/// Work requests rung by one doorbell at most, and operations that a `more` hint holds back at most.
pub const CHAIN: usize = 32;

/// The work requests of the fast path, filled in once but for what differs from operation to operation: a put, and a
/// put with a signal behind it. Zeroing 128 bytes for each work request would cost more than the whole rest.
struct Templates {
    put: ibv_send_wr,
    put_sge: ibv_sge,
    data: ibv_send_wr,
    data_sge: ibv_sge,
    signal: ibv_send_wr,
    signal_sge: ibv_sge,
}

/// Room for a chain that is being built.
struct Chain {
    wrs: [ibv_send_wr; CHAIN],
    sges: [ibv_sge; CHAIN],
    /// Where the lane stands after each work request.
    steps: [Step; CHAIN],
}

#[derive(Clone, Copy, Default)]
struct Step {
    /// Operations of the backlog that are wholly in the queue.
    ops: u32,
    /// Bytes of the next one that are.
    offset: u64,
    /// Signal messages among the work requests.
    messages: u32,
}

fn blank() -> ibv_send_wr {
    ibv_send_wr {
        wr_id: 0,
        next: null_mut(),
        sg_list: null_mut(),
        num_sge: 0,
        opcode: IBV_WR_RDMA_WRITE,
        send_flags: 0,
        imm_data: 0,
        wr: ibv_wr_remote { atomic: ibv_wr_atomic::default() },
        qp_type: 0,
        rest: [0; 6],
    }
}

/// The device's calls and objects that the data path uses.
#[derive(Clone, Copy)]
pub struct Device {
    /// Takes completions.
    pub poll_cq: PollCq,
    /// Posts sends.
    pub post_send: PostSend,
    /// The context's completion queue.
    pub cq: *mut ibv_cq,
    /// Largest message in bytes that both ends of every lane take.
    pub max_msg: u64,
    /// 8 bytes that atomics may overwrite: address.
    pub scratch: u64,
    /// 8 bytes that atomics may overwrite: key.
    pub scratch_lkey: u32,
    /// This rank.
    pub rank: u32,
}

/// A context's queues.
pub struct Queues {
    device: Device,
    templates: NonNull<Templates>,
    chain: NonNull<Chain>,
    completions: Box<[ibv_wc; BATCH]>,
    /// By peer.
    pub lanes: Box<[Lane]>,
    /// Lanes with something to do that no completion will bring about by itself.
    waiting: Vec<u32>,
    /// Operations in all backlogs.
    pub backlogged: usize,
    /// Signals by message, where the devices have no atomics.
    pub messages: Option<Messages>,
}

// SAFETY: the pointers are to memory that this object owns and to libibverbs objects, which any thread may use; the
// context's lock keeps threads apart.
unsafe impl Send for Queues {}

impl Drop for Queues {
    fn drop(&mut self) {
        // SAFETY: both were made by Box::into_raw in `new` and nobody else holds them.
        unsafe {
            drop(Box::from_raw(self.templates.as_ptr()));
            drop(Box::from_raw(self.chain.as_ptr()));
        }
    }
}

impl Queues {
    /// Queues over connected lanes.
    pub fn new(device: Device, lanes: Vec<Lane>, messages: Option<Messages>) -> Self {
        let templates = NonNull::from(Box::leak(Box::new(Templates {
            put: ibv_send_wr { send_flags: IBV_SEND_SIGNALED, num_sge: 1, ..blank() },
            put_sge: ibv_sge::default(),
            data: ibv_send_wr { num_sge: 1, ..blank() },
            data_sge: ibv_sge::default(),
            signal: ibv_send_wr {
                opcode: IBV_WR_ATOMIC_FETCH_AND_ADD,
                send_flags: IBV_SEND_SIGNALED,
                num_sge: 1,
                ..blank()
            },
            signal_sge: ibv_sge { addr: device.scratch, length: 8, lkey: device.scratch_lkey },
        })));
        let t = templates.as_ptr();
        // SAFETY: `t` is valid and nobody else has it; the links point into the same allocation, which stays put.
        unsafe {
            (*t).put.sg_list = addr_of_mut!((*t).put_sge);
            (*t).data.sg_list = addr_of_mut!((*t).data_sge);
            (*t).data.next = addr_of_mut!((*t).signal);
            (*t).signal.sg_list = addr_of_mut!((*t).signal_sge);
        }
        let chain = Box::new(Chain {
            wrs: [blank(); CHAIN],
            sges: [ibv_sge::default(); CHAIN],
            steps: [Step::default(); CHAIN],
        });
        Self {
            device,
            templates,
            chain: NonNull::from(Box::leak(chain)),
            completions: Box::new([ibv_wc::default(); BATCH]),
            waiting: Vec::with_capacity(lanes.len()),
            lanes: lanes.into(),
            backlogged: 0,
            messages,
        }
    }

    /// Posts a put straight to the device when nothing stands in the way; `None`: take the long way.
    ///
    /// # Safety
    /// As for `Context::put`.
    #[inline(always)]
    pub unsafe fn put(&mut self, peer: u32, put: &Put) -> Option<Seq> {
        let lane = self.lanes.get_mut(peer as usize)?;
        if !lane.direct || put.more || lane.room < 2 {
            return None;
        }
        let number = lane.issued.wrapping_add(1);
        let id = lane.tag + u64::from(number);
        let t = self.templates.as_ptr();
        let fits = put.len.wrapping_sub(1) < self.device.max_msg;
        let mut bad = MaybeUninit::<*mut ibv_send_wr>::uninit();
        let rc;
        // SAFETY: `t` is this object's own and behind the lock; the queue pair is live; the caller vouches for the
        // local range, and the device checks keys and ranges.
        unsafe {
            match &put.signal {
                Some(signal) => {
                    (*t).signal.wr.atomic.remote_addr = signal.remote;
                    (*t).signal.wr.atomic.compare_add = signal.value;
                    (*t).signal.wr.atomic.rkey = signal.rkey;
                    if fits {
                        (*t).data.wr_id = id;
                        (*t).data_sge = ibv_sge { addr: put.local, length: put.len as u32, lkey: put.lkey };
                        (*t).data.wr.rdma = ibv_wr_rdma { remote_addr: put.remote, rkey: put.rkey };
                        (*t).signal.wr_id = id + SLOT;
                        lane.note(number, Logged { remote: put.remote, len: put.len as u32, what: LOG_PUT_SIGNAL });
                        lane.room -= 2;
                        rc = (self.device.post_send)(lane.qp, addr_of_mut!((*t).data), bad.as_mut_ptr());
                    } else if put.len == 0 {
                        (*t).signal.wr_id = id;
                        lane.note(number, Logged { remote: signal.remote, len: 0, what: LOG_SIGNAL });
                        lane.room -= 1;
                        rc = (self.device.post_send)(lane.qp, addr_of_mut!((*t).signal), bad.as_mut_ptr());
                    } else {
                        return None;
                    }
                }
                None if fits => {
                    (*t).put.wr_id = id;
                    (*t).put_sge = ibv_sge { addr: put.local, length: put.len as u32, lkey: put.lkey };
                    (*t).put.wr.rdma = ibv_wr_rdma { remote_addr: put.remote, rkey: put.rkey };
                    lane.note(number, Logged { remote: put.remote, len: put.len as u32, what: LOG_PUT });
                    lane.room -= 1;
                    rc = (self.device.post_send)(lane.qp, addr_of_mut!((*t).put), bad.as_mut_ptr());
                }
                None => return None,
            }
        }
        lane.issued = number;
        if rc != 0 {
            // SAFETY: a failing post_send has said which work request it refused.
            let bad = unsafe { bad.assume_init() };
            self.refused(peer, put, rc, bad);
        }
        Some(Seq(number))
    }

    /// The device refused a put of the fast path, or the signal behind it: what it did not take waits.
    #[cold]
    #[inline(never)]
    fn refused(&mut self, peer: u32, put: &Put, rc: i32, bad: *mut ibv_send_wr) {
        let t = self.templates.as_ptr();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        let both = put.signal.is_some() && put.len > 0;
        // SAFETY: only the address is taken.
        let took_data = both && bad == unsafe { addr_of_mut!((*t).signal) };
        lane.room += if took_data || !both { 1 } else { 2 };
        lane.direct = false;
        lane.sent = lane.issued.wrapping_sub(1);
        lane.unsignalled = u32::from(took_data);
        lane.offset = if took_data { put.len } else { 0 };
        lane.backlog.push_back(Op::put(put));
        self.backlogged += 1;
        self.wait(peer);
        // Whether it is want of room or worse is found out when it is posted again.
        log::trace!("post_send to rank {peer}: errno {rc}; waiting");
    }

    /// Puts a lane into the list of those to look at again.
    fn wait(&mut self, peer: u32) {
        if let Some(lane) = self.lanes.get_mut(peer as usize) {
            if !lane.waiting {
                lane.waiting = true;
                self.waiting.push(peer);
            }
        }
    }

    /// Takes an operation the long way: behind what waits already, or behind a `more` hint.
    pub fn enqueue(&mut self, peer: u32, op: Op, more: bool, outcomes: &Outcomes) -> Option<Seq> {
        let lane = self.lanes.get_mut(peer as usize)?;
        if lane.direct {
            lane.direct = false;
            lane.sent = lane.issued;
        }
        lane.issued = lane.issued.wrapping_add(1);
        let seq = Seq(lane.issued);
        lane.backlog.push_back(op);
        let held = more && lane.backlog.len() < CHAIN;
        self.backlogged += 1;
        if held || self.pump(peer, outcomes) {
            self.wait(peer);
        }
        Some(seq)
    }

    /// Takes completions and lets waiting lanes advance.
    #[inline(always)]
    pub fn advance(&mut self, outcomes: &Outcomes) {
        self.poll(outcomes);
        if !self.waiting.is_empty() {
            self.pump_all(outcomes);
        }
    }

    /// Takes one batch of completions; returns how many.
    #[inline(always)]
    pub fn poll(&mut self, outcomes: &Outcomes) -> usize {
        let first = self.completions.as_mut_ptr();
        // SAFETY: the queue is live and the array holds BATCH completions.
        let n = unsafe { (self.device.poll_cq)(self.device.cq, BATCH as i32, first) };
        if n <= 0 {
            if n < 0 {
                self.lost(outcomes);
            }
            return 0;
        }
        let n = n as usize;
        for i in 0..n {
            // SAFETY: poll_cq wrote n completions, at most BATCH.
            let wc = unsafe { &*first.add(i) };
            let ticket = Ticket(wc.wr_id);
            if wc.status != IBV_WC_SUCCESS || !ticket.is_send() {
                let wc = *wc;
                self.unusual(&wc, outcomes);
                continue;
            }
            if let Some(lane) = self.lanes.get_mut(ticket.peer()) {
                lane.room += ticket.slots();
                // SAFETY: there are as many completion counts as lanes.
                unsafe { outcomes.completed.get_unchecked(ticket.peer()) }.store(ticket.number(), Ordering::Release);
            }
        }
        n
    }

    #[cold]
    #[inline(never)]
    fn lost(&mut self, outcomes: &Outcomes) {
        for peer in 0..self.lanes.len() as u32 {
            self.fail(peer, outcomes, || {
                "the completion queue cannot be read; look for the device in the kernel log".into()
            });
        }
    }

    /// An error, a received message, or a flush.
    #[cold]
    #[inline(never)]
    fn unusual(&mut self, wc: &ibv_wc, outcomes: &Outcomes) {
        let ticket = Ticket(wc.wr_id);
        let peer = ticket.peer() as u32;
        if wc.status != IBV_WC_SUCCESS {
            if ticket.is_flush() {
                // The broken queue pair is the one to this rank itself.
                let rank = self.device.rank;
                self.fail(rank, outcomes, || outcomes.explain(rank, wc, &Logged::default()));
            }
            let logged = match (self.lanes.get(ticket.peer()), ticket.is_send()) {
                (Some(lane), true) => lane.noted(ticket.number()),
                _ => Logged::default(),
            };
            self.fail(peer, outcomes, || outcomes.explain(peer, wc, &logged));
            return;
        }
        if ticket.is_flush() {
            if let Some(own) = self.lanes.get_mut(self.device.rank as usize) {
                own.room += 1;
            }
            if let Some(lane) = self.lanes.get_mut(ticket.peer()) {
                lane.flushing = false;
                lane.sent = ticket.number();
                outcomes.complete(peer, ticket.number());
            }
            self.wait(peer);
            return;
        }
        let Some(messages) = &mut self.messages else { return };
        match messages.received(peer, ticket.number(), wc.byte_len) {
            Ok(()) => {
                if messages.owes(peer) {
                    self.wait(peer);
                }
            }
            Err(sentence) => self.fail(peer, outcomes, || sentence),
        }
    }

    /// Ends a lane: what waits is dropped, everything unfinished fails.
    #[cold]
    #[inline(never)]
    pub fn fail(&mut self, peer: u32, outcomes: &Outcomes, sentence: impl FnOnce() -> String) {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        if lane.failed {
            // Work requests flushed behind the first error.
            return;
        }
        lane.failed = true;
        lane.direct = false;
        self.backlogged -= lane.backlog.len();
        lane.backlog = Default::default();
        outcomes.fail(peer, sentence());
    }

    #[cold]
    #[inline(never)]
    fn pump_all(&mut self, outcomes: &Outcomes) {
        let mut i = 0;
        while let Some(&peer) = self.waiting.get(i) {
            if self.pump(peer, outcomes) {
                i += 1;
                continue;
            }
            self.waiting.swap_remove(i);
            if let Some(lane) = self.lanes.get_mut(peer as usize) {
                lane.waiting = false;
            }
        }
    }

    /// Posts what waits on a lane as far as there is room; returns whether something still waits.
    #[must_use]
    fn pump(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        self.announce(peer, outcomes);
        while self.post_chain(peer, outcomes) {}
        let owes = self.messages.as_ref().is_some_and(|m| m.owes(peer));
        let by_message = self.messages.is_some();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        if lane.failed {
            return false;
        }
        if !lane.backlog.is_empty() || lane.flushing || owes {
            return true;
        }
        if lane.backlog.capacity() > 4096 {
            lane.backlog.shrink_to(64);
        }
        if !lane.direct && !by_message && lane.unsignalled == 0 {
            lane.direct = true;
        }
        false
    }

    /// Posts one chain from the front of a lane's backlog; returns whether another may follow.
    fn post_chain(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let count = self.build(peer);
        if count == 0 {
            return self.post_flush(peer, outcomes);
        }
        let chain = self.chain.as_ptr();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        let mut bad = null_mut();
        // SAFETY: the chain is this object's own, its first `count` work requests are linked and end in NULL; the
        // queue pair is live; whoever issued the operations vouches for their local ranges.
        let rc = unsafe { (self.device.post_send)(lane.qp, addr_of_mut!((*chain).wrs[0]), &mut bad) };
        let taken = if rc == 0 {
            count
        } else {
            // SAFETY: only addresses are compared.
            (0..count).find(|&i| bad == unsafe { addr_of_mut!((*chain).wrs[i]) }).unwrap_or(0)
        };
        if taken > 0 {
            // SAFETY: `build` filled the first `count` steps and `taken` is at most that.
            let step = unsafe { (*chain).steps[taken - 1] };
            lane.backlog.drain(..step.ops as usize);
            lane.offset = step.offset;
            lane.sent = lane.sent.wrapping_add(step.ops);
            lane.room -= taken as u32;
            // Behind the last work request of a whole chain comes a completion; behind part of one there is none.
            lane.unsignalled = if taken == count { 0 } else { lane.unsignalled + taken as u32 };
            self.backlogged -= step.ops as usize;
            if let Some(messages) = &mut self.messages {
                messages.sent(peer, step.messages);
            }
        }
        if rc != 0 {
            self.refused_chain(peer, rc, outcomes);
        }
        rc == 0 && count == CHAIN
    }

    /// Fills the chain with the next work requests of a lane; returns how many.
    fn build(&mut self, peer: u32) -> usize {
        let chain = self.chain.as_ptr();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return 0 };
        if lane.failed || lane.flushing {
            return 0;
        }
        let limit = (lane.room as usize).min(CHAIN);
        let mut step = Step { ops: 0, offset: lane.offset, messages: 0 };
        let mut count = 0;
        while count < limit {
            let Some(&op) = lane.backlog.get(step.ops as usize) else { break };
            if op.kind == Kind::Flush {
                break;
            }
            let number = lane.sent.wrapping_add(step.ops).wrapping_add(1);
            let (next, last) = op.next(step.offset, self.device.max_msg);
            let mut wr = blank();
            let sge = match next {
                Next::Data(bytes) => {
                    wr.opcode = if op.kind == Kind::Get { IBV_WR_RDMA_READ } else { IBV_WR_RDMA_WRITE };
                    wr.wr.rdma = ibv_wr_rdma { remote_addr: op.remote + step.offset, rkey: op.rkey };
                    wr.num_sge = i32::from(bytes > 0);
                    step.offset += u64::from(bytes);
                    ibv_sge { addr: op.local + (step.offset - u64::from(bytes)), length: bytes, lkey: op.lkey }
                }
                Next::Signal(signal) => {
                    wr.num_sge = 1;
                    match &mut self.messages {
                        None => {
                            wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
                            wr.wr.atomic = ibv_wr_atomic {
                                remote_addr: signal.remote,
                                compare_add: signal.value,
                                swap: 0,
                                rkey: signal.rkey,
                            };
                            ibv_sge { addr: self.device.scratch, length: 8, lkey: self.device.scratch_lkey }
                        }
                        Some(messages) => {
                            let Some(sge) = messages.stage(peer, step.messages, &signal) else { break };
                            step.messages += 1;
                            wr.opcode = IBV_WR_SEND;
                            wr.send_flags = IBV_SEND_SOLICITED;
                            sge
                        }
                    }
                }
            };
            lane.note(number, Logged::of(&op));
            if last {
                step.ops += 1;
                step.offset = 0;
            }
            // SAFETY: `count` is below CHAIN; the links point into the same allocation, which stays put.
            unsafe {
                (*chain).sges[count] = sge;
                wr.sg_list = addr_of_mut!((*chain).sges[count]);
                // Only an error brings this one back, and then the operation it belongs to is wanted.
                wr.wr_id = Ticket::send(peer, number, 1);
                (*chain).wrs[count] = wr;
                if count > 0 {
                    (*chain).wrs[count - 1].next = addr_of_mut!((*chain).wrs[count]);
                }
                (*chain).steps[count] = step;
            }
            count += 1;
        }
        if count > 0 {
            let slots = lane.unsignalled + count as u32;
            // SAFETY: the first `count` work requests were just written.
            let end = unsafe { &mut (*chain).wrs[count - 1] };
            end.send_flags |= IBV_SEND_SIGNALED;
            end.wr_id = Ticket::send(peer, lane.sent.wrapping_add(step.ops), slots);
        }
        count
    }

    /// Starts the local read of a flush at the front of a lane's backlog, once everything before it is complete.
    fn post_flush(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let own = self.device.rank;
        let ready = self.lanes.get(own as usize).is_some_and(|own| !own.failed && own.room > 0);
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        let Some(&op) = lane.backlog.front() else { return false };
        if op.kind != Kind::Flush || lane.flushing || lane.failed || lane.room < lane.depth || !ready {
            return false;
        }
        let mut sge = ibv_sge { addr: op.local, length: op.len as u32, lkey: op.lkey };
        let mut wr = ibv_send_wr {
            wr_id: Ticket::flush(peer, lane.sent.wrapping_add(1)),
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
            self.refused_chain(peer, rc, outcomes);
            return false;
        }
        if let Some(own) = self.lanes.get_mut(own as usize) {
            own.room -= 1;
        }
        if let Some(lane) = self.lanes.get_mut(peer as usize) {
            lane.backlog.pop_front();
            lane.flushing = true;
        }
        self.backlogged -= 1;
        false
    }

    /// Tells a peer how many of its signal messages were taken, where that is due.
    fn announce(&mut self, peer: u32, outcomes: &Outcomes) {
        let Some(messages) = &mut self.messages else { return };
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        if lane.failed || lane.room == 0 {
            return;
        }
        let Some((mut sge, rdma)) = messages.announcement(peer) else { return };
        let mut wr = ibv_send_wr {
            wr_id: Ticket::send(peer, lane.sent, lane.unsignalled + 1),
            sg_list: &mut sge,
            num_sge: 1,
            send_flags: IBV_SEND_SIGNALED,
            wr: ibv_wr_remote { rdma },
            ..blank()
        };
        let mut bad = null_mut();
        // SAFETY: the queue pair is live and the source word belongs to `messages`, which outlives it.
        let rc = unsafe { (self.device.post_send)(lane.qp, &mut wr, &mut bad) };
        if rc == 0 {
            lane.room -= 1;
            lane.unsignalled = 0;
            messages.announced(peer);
        } else {
            self.refused_chain(peer, rc, outcomes);
        }
    }

    /// Want of room is no failure: what was refused is posted again later. Anything else ends the lane.
    #[cold]
    #[inline(never)]
    fn refused_chain(&mut self, peer: u32, rc: i32, outcomes: &Outcomes) {
        let errno = if rc > 0 { rc } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(0) };
        if matches!(errno, libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS) {
            return;
        }
        let e = std::io::Error::from_raw_os_error(errno);
        self.fail(peer, outcomes, || {
            format!("the device refuses work requests towards rank {peer}: {e}; look for the device in the kernel log")
        });
    }
}
