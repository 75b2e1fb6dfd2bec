//! One context: its completion queue and its lanes, under the context's lock. Here is the data path.

use super::hot::Named;
use super::lane::{Kind, Lane, Logged, Next, Op, NOTED};
use super::message::Messages;
use super::outcome::Outcomes;
use super::pairs::Pairs;
use super::ticket::Ticket;
use crate::rma::op::{Put, Signal};
use crate::rma::seq::Seq;
use oxygin_ffi::verbs::types::*;
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

/// A work request that does nothing yet.
pub(super) fn blank() -> ibv_send_wr {
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
    /// Whether a peer that closes its end ends this one: what is posted comes back flushed then.
    pub closes: bool,
}

/// A context's queues.
pub struct Queues {
    device: Device,
    /// Ended before `messages`: nothing arrives in their buffers any more.
    _pairs: Pairs,
    templates: NonNull<Templates>,
    /// The work request of the fast path that the device refused last.
    bad: *mut ibv_send_wr,
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
    pub fn new(
        device: Device,
        pairs: Pairs,
        lanes: Vec<Lane>,
        messages: Option<Messages>,
        outcomes: &Outcomes,
    ) -> Self {
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
        let mut queues = Self {
            device,
            _pairs: pairs,
            templates,
            bad: null_mut(),
            chain: NonNull::from(Box::leak(chain)),
            completions: Box::new([ibv_wc::default(); BATCH]),
            waiting: Vec::with_capacity(lanes.len()),
            lanes: lanes.into(),
            backlogged: 0,
            messages,
        };
        for lane in &mut queues.lanes {
            lane.hot.link(device.scratch, device.scratch_lkey);
        }
        for peer in 0..queues.lanes.len() as u32 {
            // Nothing to post: this opens the lane.
            let _ = queues.pump(peer, outcomes);
        }
        queues
    }

    /// Posts a put straight to the device when nothing stands in the way; `None`: take the long way.
    ///
    /// # Safety
    /// As for `Context::put`.
    #[inline(always)]
    pub unsafe fn put(&mut self, peer: u32, put: &Put) -> Option<Seq> {
        let lane = self.lanes.get_mut(peer as usize)?;
        let number = lane.issued.wrapping_add(1);
        if put.more || !lane.admits(number) {
            return None;
        }
        let id = lane.tag + u64::from(number);
        let t = self.templates.as_ptr();
        let fits = put.len.wrapping_sub(1) < self.device.max_msg;
        let (first, logged);
        // SAFETY: `t` is this object's own and behind the lock.
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
                        (*t).signal.wr_id = id;
                        first = addr_of_mut!((*t).data);
                        logged = Logged { remote: put.remote, len: put.len as u32 };
                    } else if put.len == 0 {
                        (*t).signal.wr_id = id;
                        first = addr_of_mut!((*t).signal);
                        logged = Logged { remote: signal.remote, len: 0 };
                    } else {
                        return None;
                    }
                }
                None if fits => {
                    (*t).put.wr_id = id;
                    (*t).put_sge = ibv_sge { addr: put.local, length: put.len as u32, lkey: put.lkey };
                    (*t).put.wr.rdma = ibv_wr_rdma { remote_addr: put.remote, rkey: put.rkey };
                    first = addr_of_mut!((*t).put);
                    logged = Logged { remote: put.remote, len: put.len as u32 };
                }
                None => return None,
            }
        }
        lane.note(number, logged);
        lane.issued = number;
        // SAFETY: the queue pair is live; the caller vouches for the local range, and the device checks keys and ranges.
        let rc = unsafe { (self.device.post_send)(lane.qp, first, &mut self.bad) };
        if rc != 0 {
            self.refused();
        }
        Some(Seq(number))
    }

    /// Posts a put with a signal between the windows that the lane remembers; `None`, with no effect: other windows, or
    /// something stands in the way. Returns the request.
    ///
    /// # Safety
    /// As for `Context::put`; `peer` is one of the lanes.
    #[inline(always)]
    pub unsafe fn put_again(&mut self, peer: u32, named: &Named) -> Option<u64> {
        // SAFETY: the caller's promise.
        let lane = unsafe { self.lanes.get_unchecked_mut(peer as usize) };
        let number = lane.issued.wrapping_add(1);
        if !lane.admits(number) || named.size.wrapping_sub(1) >= self.device.max_msg || !lane.hot.fill(named) {
            return None;
        }
        let id = lane.tag + u64::from(number);
        let request = lane.request + u64::from(number);
        lane.hot.data.wr_id = id;
        lane.hot.signal.wr_id = id;
        lane.note(number, Logged { remote: lane.hot.remote(), len: named.size as u32 });
        lane.issued = number;
        // SAFETY: the queue pair is live; the caller vouches for the local range, and the device checks keys and ranges.
        let rc = unsafe { (self.device.post_send)(lane.qp, &mut lane.hot.data, &mut self.bad) };
        if rc != 0 {
            self.refused_again(peer);
        }
        Some(request)
    }

    /// As [`Queues::refused`], for the work requests of a lane's own.
    #[cold]
    #[inline(never)]
    fn refused_again(&mut self, peer: u32) {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        let op = lane.hot.op();
        let taken = u32::from(self.bad.cast_const() == &raw const lane.hot.signal);
        self.keep_refused(peer, op, taken);
    }

    /// What the device did not take of the newest operation waits: the signal alone when `taken` is 1.
    fn keep_refused(&mut self, peer: u32, op: Op, taken: u32) {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        lane.shut(lane.issued.wrapping_sub(1));
        lane.take(taken);
        lane.unsignalled = taken;
        lane.offset = if taken == 1 { op.len } else { 0 };
        lane.backlog.push_back(op);
        self.backlogged += 1;
        self.wait(peer);
    }

    /// The device refused a put of the fast path, or the signal behind it: what it did not take waits. Everything is
    /// still in the templates, so that the fast path keeps nothing for this. Whether it was want of room or worse is
    /// found out when it is posted again.
    #[cold]
    #[inline(never)]
    fn refused(&mut self) {
        // SAFETY: `templates` is this object's own.
        let t = unsafe { self.templates.as_ref() };
        let put = Op {
            kind: Kind::Put,
            local: t.put_sge.addr,
            lkey: t.put_sge.lkey,
            // SAFETY: the template of a put has this part.
            rkey: unsafe { t.put.wr.rdma }.rkey,
            // SAFETY: as above.
            remote: unsafe { t.put.wr.rdma }.remote_addr,
            len: t.put_sge.length.into(),
            signal: None,
        };
        // SAFETY: the template of the signal has this part.
        let atomic = unsafe { t.signal.wr.atomic };
        let signal =
            Some(Signal { remote: atomic.remote_addr, rkey: atomic.rkey, value: atomic.compare_add, strong: true });
        // SAFETY: the template of the data has this part.
        let data = unsafe { t.data.wr.rdma };
        let both = Op {
            local: t.data_sge.addr,
            lkey: t.data_sge.lkey,
            rkey: data.rkey,
            remote: data.remote_addr,
            len: t.data_sge.length.into(),
            signal,
            ..put
        };
        let at = self.bad.cast_const();
        // Data goes out with the signal of the same number.
        let with_data = t.data.wr_id == t.signal.wr_id;
        let (id, op, taken) = if at == &raw const t.put {
            (Ticket(t.put.wr_id), put, 0)
        } else if at == &raw const t.signal && !with_data {
            (Ticket(t.signal.wr_id), Op { len: 0, ..both }, 0)
        } else {
            (Ticket(t.signal.wr_id), both, u32::from(at == &raw const t.signal))
        };
        self.keep_refused(id.peer(), op, taken);
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
        lane.shut(lane.issued);
        let seq = Seq(lane.number());
        lane.backlog.push_back(op);
        let held = more && lane.backlog.len() < CHAIN;
        self.backlogged += 1;
        if held || self.pump(peer, outcomes) {
            self.wait(peer);
        }
        Some(seq)
    }

    /// Makes room on an open lane that has reached its limit; whether there is some.
    pub fn reopen(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        self.poll(outcomes);
        let completed = outcomes.completed(peer);
        self.lanes.get_mut(peer as usize).is_some_and(|lane| lane.is_open() && lane.open(completed))
    }

    /// Takes completions and lets waiting lanes advance.
    #[inline(always)]
    pub fn advance(&mut self, outcomes: &Outcomes) {
        self.poll(outcomes);
        if !self.waiting.is_empty() {
            self.pump_all(outcomes);
        }
    }

    /// Takes one batch of completions; returns how many, negative when the device refuses.
    #[inline(always)]
    pub fn poll(&mut self, outcomes: &Outcomes) -> i32 {
        let first = self.completions.as_mut_ptr();
        // SAFETY: the queue is live and the array holds BATCH completions.
        let n = unsafe { (self.device.poll_cq)(self.device.cq, BATCH as i32, first) };
        let completed = outcomes.completed.as_ptr();
        let mut at: *const ibv_wc = first;
        let mut left = n;
        while left > 0 {
            // SAFETY: poll_cq wrote n completions, and n - left of them are behind.
            let wc = unsafe { &*at };
            let ticket = Ticket(wc.wr_id);
            if wc.status != IBV_WC_SUCCESS || !ticket.is_operation() {
                break;
            }
            debug_assert!(ticket.operation_peer() < outcomes.completed.len());
            // SAFETY: this wr_id was made for one of the lanes, and there are as many counts as lanes.
            unsafe { &*completed.add(ticket.operation_peer()) }.store(ticket.number(), Ordering::Release);
            // SAFETY: at most one past the last.
            at = unsafe { at.add(1) };
            left -= 1;
        }
        if left != 0 {
            self.unusual_from(n, left, outcomes);
        }
        n
    }

    /// The last `left` of `n` completions, the first of which is no operation of the fast path that went well.
    #[cold]
    #[inline(never)]
    fn unusual_from(&mut self, n: i32, left: i32, outcomes: &Outcomes) {
        if n < 0 {
            self.lost(outcomes);
            return;
        }
        for i in (n - left)..n {
            let Some(&wc) = self.completions.get(i as usize) else { return };
            let ticket = Ticket(wc.wr_id);
            if wc.status == IBV_WC_SUCCESS && ticket.is_operation() {
                outcomes.complete(ticket.peer(), ticket.number());
            } else {
                self.unusual(&wc, outcomes);
            }
        }
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

    /// An error, the end of a chain, a flush, or a received message.
    fn unusual(&mut self, wc: &ibv_wc, outcomes: &Outcomes) {
        let ticket = Ticket(wc.wr_id);
        let peer = ticket.peer();
        if wc.status != IBV_WC_SUCCESS {
            self.broken(wc, outcomes);
            return;
        }
        if let Some(slots) = ticket.chain_slots() {
            if let Some(lane) = self.lanes.get_mut(peer as usize) {
                lane.give(slots);
            }
            outcomes.complete(peer, ticket.number());
            return;
        }
        if ticket.is_flush() {
            if let Some(own) = self.lanes.get_mut(self.device.rank as usize) {
                own.give(1);
            }
            if let Some(lane) = self.lanes.get_mut(peer as usize) {
                lane.flushing = false;
                lane.sent = ticket.number();
            }
            outcomes.complete(peer, ticket.number());
            self.wait(peer);
            return;
        }
        let (Some(messages), true) = (&mut self.messages, ticket.is_receive()) else { return };
        match messages.received(peer, ticket.number(), wc.byte_len) {
            Ok(()) => {
                if messages.owes(peer) {
                    self.wait(peer);
                }
            }
            Err(sentence) => self.fail(peer, outcomes, || sentence),
        }
    }

    #[cold]
    #[inline(never)]
    fn broken(&mut self, wc: &ibv_wc, outcomes: &Outcomes) {
        let ticket = Ticket(wc.wr_id);
        let peer = ticket.peer();
        if ticket.is_flush() {
            // The broken queue pair is the one to this rank itself.
            let rank = self.device.rank;
            self.fail(rank, outcomes, || outcomes.explain(rank, wc, None));
        }
        let flushed = wc.status == IBV_WC_WR_FLUSH_ERR && !ticket.is_flush();
        if self.device.closes && flushed && self.is_idle(peer, outcomes) {
            self.close(peer, outcomes);
            return;
        }
        let ours = ticket.is_operation() || ticket.chain_slots().is_some();
        let logged = self.lanes.get(peer as usize).filter(|_| ours).map(|lane| lane.noted(ticket.number()));
        self.fail(peer, outcomes, || outcomes.explain(peer, wc, logged));
    }

    /// Whether every operation to `peer` is complete.
    fn is_idle(&self, peer: u32, outcomes: &Outcomes) -> bool {
        self.lanes.get(peer as usize).is_some_and(|lane| lane.issued == outcomes.completed(peer))
    }

    /// The peer closed its end while nothing was unfinished: later operations fail.
    #[cold]
    fn close(&mut self, peer: u32, outcomes: &Outcomes) {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        if lane.failed {
            return;
        }
        lane.failed = true;
        lane.shut(lane.issued);
        outcomes.close(peer);
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
        lane.shut(lane.issued);
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
        if !by_message && !lane.is_open() && lane.unsignalled == 0 {
            lane.open(outcomes.completed(peer));
        }
        false
    }

    /// Posts one chain from the front of a lane's backlog; returns whether another may follow.
    fn post_chain(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let count = self.build(peer, outcomes.completed(peer));
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
            lane.take(taken as u32);
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
    fn build(&mut self, peer: u32, completed: u32) -> usize {
        let chain = self.chain.as_ptr();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return 0 };
        if lane.failed || lane.flushing {
            return 0;
        }
        let limit = (lane.room(completed) as usize).min(CHAIN);
        let mut step = Step { ops: 0, offset: lane.offset, messages: 0 };
        let mut count = 0;
        while count < limit {
            let Some(&op) = lane.backlog.get(step.ops as usize) else { break };
            if op.kind == Kind::Flush {
                break;
            }
            let number = lane.sent.wrapping_add(step.ops).wrapping_add(1);
            if number.wrapping_sub(completed) as usize > NOTED {
                break;
            }
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
                wr.wr_id = Ticket::operation(peer, number);
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
            end.wr_id = Ticket::chain(peer, lane.sent.wrapping_add(step.ops), slots);
        }
        count
    }

    /// Starts the local read of a flush at the front of a lane's backlog, once everything before it is complete.
    fn post_flush(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let own = self.device.rank;
        let free = |own: &Lane| !own.failed && own.room(outcomes.completed(self.device.rank)) > 0;
        let ready = self.lanes.get(own as usize).is_some_and(free);
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        let Some(&op) = lane.backlog.front() else { return false };
        if op.kind != Kind::Flush
            || lane.flushing
            || lane.failed
            || !lane.is_drained(outcomes.completed(peer))
            || !ready
        {
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
            // Its limit was for operations alone.
            own.shut(own.issued);
            own.take(1);
        }
        self.wait(own);
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
        if lane.failed || lane.room(outcomes.completed(peer)) == 0 {
            return;
        }
        let Some((mut sge, rdma)) = messages.announcement(peer) else { return };
        let mut wr = ibv_send_wr {
            wr_id: Ticket::chain(peer, lane.sent, lane.unsignalled + 1),
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
            lane.take(1);
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
        // libibverbs' providers return an errno, its negative, or -1 and leave it in errno.
        let errno = match rc {
            -1 => std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
            rc => rc.saturating_abs(),
        };
        if matches!(errno, libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS) {
            return;
        }
        let e = std::io::Error::from_raw_os_error(errno);
        self.fail(peer, outcomes, || {
            format!("the device refuses work requests towards rank {peer}: {e}; look for the device in the kernel log")
        });
    }
}
