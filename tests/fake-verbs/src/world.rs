//! The network that exists in this process only: regions, completion queues, queue pairs, and what carries work
//! requests out. One lock guards it all; the fake is for correctness, not for speed.

use crate::settings::Settings;
use oxygin_ffi::verbs::types::*;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

/// A registered region.
pub struct Region {
    /// What work requests call its first byte.
    pub iova: u64,
    /// Where it really is.
    pub host: u64,
    /// Bytes.
    pub len: u64,
    /// `IBV_ACCESS_*`.
    pub access: u32,
    /// The open device.
    pub context: usize,
}

impl Region {
    /// Where `len` bytes at `addr` really are, if they are inside.
    fn host(&self, addr: u64, len: u64) -> Option<u64> {
        let at = addr.checked_sub(self.iova)?;
        (at <= self.len && len <= self.len - at).then(|| self.host + at)
    }
}

/// A completion and how many send queue entries taking it gives back.
struct Entry {
    wc: ibv_wc,
    frees: (u32, u32),
}

/// A completion queue.
#[derive(Default)]
pub struct Completions {
    entries: VecDeque<Entry>,
    size: usize,
    /// Armed: for solicited completions only, or for all.
    armed: Option<bool>,
    channel: usize,
}

/// A posted send.
struct Posted {
    wr: ibv_send_wr,
    sge: ibv_sge,
}

// SAFETY: the pointers inside are not followed once the request is posted.
unsafe impl Send for Posted {}

/// A queue pair.
pub struct Pair {
    context: usize,
    device: usize,
    send_cq: usize,
    recv_cq: usize,
    cap: ibv_qp_cap,
    /// What modify_qp set, with the state.
    pub attr: ibv_qp_attr,
    sends: VecDeque<Posted>,
    receives: VecDeque<(u64, ibv_sge)>,
    /// Entries of the send queue in use: freed when a completion is taken.
    used: u32,
    /// Carried out without a completion since the last one.
    silent: u32,
    /// iWARP: it accepted the connection and nothing of the other end has arrived yet, so that it must not send.
    must_wait: bool,
}

/// Events of a completion channel.
#[derive(Default)]
pub struct Events {
    /// An eventfd that counts them.
    pub fd: i32,
    /// Completion queues, oldest first.
    pub queue: VecDeque<usize>,
}

/// Everything.
#[derive(Default)]
pub struct World {
    /// Settings and counts.
    pub settings: Settings,
    /// By local key.
    pub local: HashMap<u32, Region>,
    /// Local by remote key: the two are never the same number, so that mixing them up shows.
    pub remote: HashMap<u32, u32>,
    /// By address.
    pub completions: HashMap<usize, Completions>,
    /// By number.
    pub pairs: HashMap<u32, Pair>,
    /// By address.
    pub channels: HashMap<usize, Events>,
    next_key: u32,
    next_pair: u32,
}

impl World {
    /// Gives a region its keys.
    pub fn add_region(&mut self, region: Region) -> (u32, u32) {
        self.next_key += 1;
        let (lkey, rkey) = (self.next_key * 2, 0x8000_0001 + self.next_key * 2);
        self.local.insert(lkey, region);
        self.remote.insert(rkey, lkey);
        (lkey, rkey)
    }

    /// Makes a completion queue.
    pub fn add_completions(&mut self, cq: usize, size: usize, channel: usize) {
        self.completions.insert(cq, Completions { size, channel, ..Default::default() });
    }

    /// Makes a queue pair and returns its number.
    pub fn add_pair(&mut self, context: usize, device: usize, send_cq: usize, recv_cq: usize, cap: ibv_qp_cap) -> u32 {
        self.next_pair += 1;
        let number = 0x10_0000 + self.next_pair;
        self.pairs.insert(
            number,
            Pair {
                context,
                device,
                send_cq,
                recv_cq,
                cap,
                attr: ibv_qp_attr::default(),
                sends: VecDeque::new(),
                receives: VecDeque::new(),
                used: 0,
                silent: 0,
                must_wait: false,
            },
        );
        number
    }

    /// Takes a send into the queue; an errno when it cannot.
    pub fn queue_send(&mut self, number: u32, wr: &ibv_send_wr) -> Result<(), i32> {
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        if pair.attr.qp_state < IBV_QPS_RTS || wr.num_sge < 0 || wr.num_sge > 1 {
            return Err(libc::EINVAL);
        }
        if pair.used >= pair.cap.max_send_wr {
            self.settings.count("send_queue_full", 1);
            return Err(libc::ENOMEM);
        }
        // SAFETY: the poster links num_sge pieces.
        let sge = if wr.num_sge == 1 { unsafe { *wr.sg_list } } else { ibv_sge::default() };
        pair.sends.push_back(Posted { wr: *wr, sge });
        pair.used += 1;
        self.settings.count("work_requests", 1);
        Ok(())
    }

    /// Takes a receive into the queue.
    pub fn queue_receive(&mut self, number: u32, id: u64, sge: ibv_sge) -> Result<(), i32> {
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        if pair.attr.qp_state == IBV_QPS_RESET {
            return Err(libc::EINVAL);
        }
        if pair.receives.len() >= pair.cap.max_recv_wr as usize {
            return Err(libc::ENOMEM);
        }
        if pair.attr.qp_state == IBV_QPS_ERR {
            let cq = pair.recv_cq;
            let wc = ibv_wc { wr_id: id, status: IBV_WC_WR_FLUSH_ERR, qp_num: number, ..Default::default() };
            self.complete(cq, wc, (number, 0), false);
            return Ok(());
        }
        pair.receives.push_back((id, sge));
        let peer = pair.attr.dest_qp_num;
        if self.settings.get("late", 0) == 0 {
            // A sender may have been waiting for it.
            self.run(peer, usize::MAX);
        }
        Ok(())
    }

    /// Takes up to `n` completions.
    pub fn poll(&mut self, cq: usize, n: usize, mut take: impl FnMut(usize, ibv_wc)) -> usize {
        if self.settings.get("late", 0) == 1 {
            self.stir();
        }
        let mut taken = 0;
        while taken < n {
            let Some(entry) = self.completions.get_mut(&cq).and_then(|c| c.entries.pop_front()) else { break };
            if let Some(pair) = self.pairs.get_mut(&entry.frees.0) {
                pair.used -= entry.frees.1;
            }
            take(taken, entry.wc);
            taken += 1;
        }
        taken
    }

    /// Arms a queue's channel.
    pub fn arm(&mut self, cq: usize, solicited_only: bool) {
        if let Some(c) = self.completions.get_mut(&cq) {
            c.armed = Some(solicited_only);
        }
    }

    /// Carries out a little of some queue pairs, chosen at random: late, and out of order across queue pairs.
    pub fn stir(&mut self) {
        for _ in 0..self.settings.random(4) {
            let mut busy: Vec<u32> = self.pairs.iter().filter(|(_, p)| !p.sends.is_empty()).map(|(n, _)| *n).collect();
            busy.sort_unstable();
            let at = self.settings.random(busy.len() as u64) as usize;
            let Some(&number) = busy.get(at) else { return };
            let steps = 1 + self.settings.random(5) as usize;
            self.run(number, steps);
        }
    }

    /// Carries out everything that can be.
    pub fn run_all(&mut self) {
        let all: Vec<u32> = self.pairs.keys().copied().collect();
        for number in all {
            self.run(number, usize::MAX);
        }
    }

    /// Carries out up to `steps` sends of a queue pair, in order.
    pub fn run(&mut self, number: u32, steps: usize) {
        for _ in 0..steps {
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            let at = if self.settings.get("overtake", 0) == 0 {
                0
            } else {
                let next = pair.sends.iter().position(|s| s.wr.opcode != IBV_WR_RDMA_READ);
                next.filter(|&i| pair.sends[i].wr.send_flags & IBV_SEND_FENCE == 0).unwrap_or(0)
            };
            let Some(send) = pair.sends.remove(at) else { return };
            let (wr, broken) = (send.wr, pair.attr.qp_state == IBV_QPS_ERR);
            let status = if broken { IBV_WC_WR_FLUSH_ERR } else { self.carry_out(number, &send) };
            if status == NOT_READY {
                self.settings.count("receiver_not_ready", 1);
                if let Some(pair) = self.pairs.get_mut(&number) {
                    pair.sends.push_front(send);
                }
                return;
            }
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            pair.silent += 1;
            if status == IBV_WC_SUCCESS && wr.send_flags & IBV_SEND_SIGNALED == 0 {
                continue;
            }
            let frees = (number, std::mem::take(&mut pair.silent));
            let cq = pair.send_cq;
            let wc = ibv_wc {
                wr_id: wr.wr_id,
                status,
                // Undefined on errors: something that would mislead whoever looks at it.
                opcode: if status == IBV_WC_SUCCESS { 0 } else { 0x5a5a },
                vendor_err: if status == IBV_WC_SUCCESS { 0 } else { 0x81 },
                qp_num: number,
                ..Default::default()
            };
            self.complete(cq, wc, frees, status != IBV_WC_SUCCESS);
            if status != IBV_WC_SUCCESS && !broken {
                self.break_pair(number);
            }
        }
    }

    /// The queue pair fails: everything in it is flushed.
    pub fn break_pair(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.attr.qp_state = IBV_QPS_ERR;
        let cq = pair.recv_cq;
        for (wr_id, _) in std::mem::take(&mut pair.receives) {
            let wc = ibv_wc { wr_id, status: IBV_WC_WR_FLUSH_ERR, qp_num: number, ..Default::default() };
            self.complete(cq, wc, (number, 0), true);
        }
        self.run(number, usize::MAX);
    }

    fn complete(&mut self, cq: usize, wc: ibv_wc, frees: (u32, u32), solicited: bool) {
        let Some(c) = self.completions.get_mut(&cq) else { return };
        c.entries.push_back(Entry { wc, frees });
        if c.entries.len() > c.size {
            self.settings.count("completion_overruns", 1);
        }
        if c.armed.is_some_and(|only| solicited || !only) {
            c.armed = None;
            let channel = c.channel;
            if let Some(events) = self.channels.get_mut(&channel) {
                events.queue.push_back(cq);
                let one = 1u64;
                // SAFETY: writes eight bytes of a local variable to the channel's eventfd.
                unsafe { libc::write(events.fd, (&raw const one).cast(), 8) };
            }
        }
    }

    /// Where a work request's local piece really is.
    fn local(&self, context: usize, sge: &ibv_sge) -> Option<u64> {
        let region = self.local.get(&sge.lkey).filter(|r| r.context == context)?;
        region.host(sge.addr, sge.length.into())
    }

    /// Where a peer's memory really is, if it may be used like this.
    fn at_peer(&self, context: usize, rkey: u32, addr: u64, len: u64, access: u32) -> Option<u64> {
        let region = self.local.get(self.remote.get(&rkey)?).filter(|r| r.context == context)?;
        region.host(addr, len).filter(|_| region.access & access != 0)
    }

    fn carry_out(&mut self, number: u32, send: &Posted) -> u32 {
        let left = self.settings.get("error_in", 0);
        if left > 0 {
            self.settings.set("error_in", left - 1);
            if left == 1 {
                return self.settings.get("error_status", 0) as u32;
            }
        }
        let Some(pair) = self.pairs.get(&number) else { return IBV_WC_FATAL_ERR };
        let peer_number = pair.attr.dest_qp_num;
        let Some(peer) = self.pairs.get(&peer_number) else { return IBV_WC_RETRY_EXC_ERR };
        let linked = peer.attr.dest_qp_num == number
            && peer.attr.qp_state >= IBV_QPS_RTR
            && peer.attr.qp_state != IBV_QPS_ERR
            && peer.attr.rq_psn == pair.attr.sq_psn
            && peer.attr.path_mtu == pair.attr.path_mtu;
        if !linked {
            return IBV_WC_RETRY_EXC_ERR;
        }
        if pair.must_wait {
            self.settings.count("misuse", 1);
            return IBV_WC_FATAL_ERR;
        }
        if peer.must_wait {
            if let Some(peer) = self.pairs.get_mut(&peer_number) {
                peer.must_wait = false;
            }
            return self.carry_out(number, send);
        }
        let iwarp = self.settings.get("iwarp", pair.device) != 0;
        // iWARP reads arrive as writes: the local memory must allow them.
        let sink = |r: &Region| r.access & IBV_ACCESS_REMOTE_WRITE != 0;
        if iwarp && send.wr.opcode == IBV_WR_RDMA_READ && !self.local.get(&send.sge.lkey).is_some_and(sink) {
            return IBV_WC_LOC_PROT_ERR;
        }
        let (wr, len) = (&send.wr, u64::from(send.sge.length));
        if len > self.settings.get("max_msg_sz", pair.device) as u64 {
            return IBV_WC_LOC_LEN_ERR;
        }
        let (mine, theirs) = (pair.context, peer.context);
        let local = if wr.num_sge == 0 { Some(0) } else { self.local(mine, &send.sge) };
        let Some(local) = local else { return IBV_WC_LOC_PROT_ERR };
        let atomics = self.settings.get("atomic_cap", peer.device) != 0;
        // SAFETY: each arm reads the part that its opcode fills in.
        let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
        let status = match wr.opcode {
            IBV_WR_RDMA_WRITE if len == 0 => IBV_WC_SUCCESS,
            IBV_WR_RDMA_WRITE => {
                match self.at_peer(theirs, rdma.rkey, rdma.remote_addr, len, IBV_ACCESS_REMOTE_WRITE) {
                    Some(to) => copy(local, to, len),
                    None => IBV_WC_REM_ACCESS_ERR,
                }
            }
            IBV_WR_RDMA_READ if pair.attr.max_rd_atomic == 0 => IBV_WC_LOC_QP_OP_ERR,
            IBV_WR_RDMA_READ => {
                self.settings.note("last_read_key", rdma.rkey.into());
                self.settings.note("last_read_bytes", len as i64);
                match self.at_peer(theirs, rdma.rkey, rdma.remote_addr, len, IBV_ACCESS_REMOTE_READ) {
                    Some(from) => copy(from, local, len),
                    None => IBV_WC_REM_ACCESS_ERR,
                }
            }
            IBV_WR_ATOMIC_FETCH_AND_ADD if !atomics || len != 8 || pair.attr.max_rd_atomic == 0 => {
                IBV_WC_REM_INV_REQ_ERR
            }
            IBV_WR_ATOMIC_FETCH_AND_ADD if atomic.remote_addr % 8 != 0 => IBV_WC_REM_INV_REQ_ERR,
            IBV_WR_ATOMIC_FETCH_AND_ADD => {
                match self.at_peer(theirs, atomic.rkey, atomic.remote_addr, 8, IBV_ACCESS_REMOTE_ATOMIC) {
                    Some(at) => {
                        // SAFETY: eight aligned bytes inside a registered region.
                        let word = unsafe { AtomicU64::from_ptr(at as *mut u64) };
                        let old = word.fetch_add(atomic.compare_add, Ordering::AcqRel);
                        copy((&raw const old) as u64, local, 8)
                    }
                    None => IBV_WC_REM_ACCESS_ERR,
                }
            }
            IBV_WR_SEND => return self.deliver(peer_number, theirs, local, send),
            _ => IBV_WC_LOC_QP_OP_ERR,
        };
        if matches!(status, IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR) {
            // The responder's end breaks too.
            self.break_pair(peer_number);
        }
        status
    }

    fn deliver(&mut self, peer: u32, context: usize, from: u64, send: &Posted) -> u32 {
        let Some(pair) = self.pairs.get_mut(&peer) else { return IBV_WC_RETRY_EXC_ERR };
        let Some((wr_id, sge)) = pair.receives.pop_front() else { return NOT_READY };
        let cq = pair.recv_cq;
        let into = self.local(context, &sge);
        let (Some(into), true) = (into, send.sge.length <= sge.length) else {
            self.break_pair(peer);
            return IBV_WC_REM_INV_REQ_ERR;
        };
        copy(from, into, send.sge.length.into());
        let wc = ibv_wc { wr_id, opcode: IBV_WC_RECV, byte_len: send.sge.length, qp_num: peer, ..Default::default() };
        self.complete(cq, wc, (peer, 0), send.wr.send_flags & IBV_SEND_SOLICITED != 0);
        IBV_WC_SUCCESS
    }

    /// Connects two queue pairs of iWARP devices, as the connection manager does.
    pub fn link(&mut self, active: u32, passive: u32) -> Result<(), i32> {
        for (own, peer) in [(active, passive), (passive, active)] {
            let iwarp = self.pairs.get(&own).is_some_and(|p| self.settings.get("iwarp", p.device) != 0);
            let pair = self.pairs.get_mut(&own).filter(|p| iwarp && p.attr.qp_state == IBV_QPS_INIT);
            let pair = pair.ok_or(libc::EINVAL)?;
            pair.attr.qp_state = IBV_QPS_RTS;
            pair.attr.dest_qp_num = peer;
            pair.attr.max_rd_atomic = 1;
            pair.must_wait = own == passive;
        }
        Ok(())
    }

    /// Moves a queue pair to another state as a strict device would.
    pub fn modify(&mut self, number: u32, attr: &ibv_qp_attr, mask: i32) -> Result<(), i32> {
        let ethernet = self.settings.get("link_layer", 0) == i64::from(IBV_LINK_LAYER_ETHERNET);
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        let port_mtu = self.settings.get("active_mtu", pair.device) as u32;
        let iwarp = self.settings.get("iwarp", pair.device) != 0;
        let now = &mut pair.attr;
        if iwarp {
            // All that an iWARP device knows of it; the rest is the connection manager's.
            let init = (IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS);
            if (now.qp_state, attr.qp_state, mask) != init {
                return Err(libc::EINVAL);
            }
            *now = *attr;
            return Ok(());
        }
        let (from, needed) = match attr.qp_state {
            IBV_QPS_INIT => (IBV_QPS_RESET, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            IBV_QPS_RTR => (
                IBV_QPS_INIT,
                IBV_QP_STATE
                    | IBV_QP_AV
                    | IBV_QP_PATH_MTU
                    | IBV_QP_DEST_QPN
                    | IBV_QP_RQ_PSN
                    | IBV_QP_MAX_DEST_RD_ATOMIC
                    | IBV_QP_MIN_RNR_TIMER,
            ),
            IBV_QPS_RTS => (
                IBV_QPS_RTR,
                IBV_QP_STATE
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_SQ_PSN
                    | IBV_QP_MAX_QP_RD_ATOMIC,
            ),
            _ => return Err(libc::EINVAL),
        };
        if now.qp_state != from || mask != needed {
            return Err(libc::EINVAL);
        }
        match attr.qp_state {
            IBV_QPS_INIT => {
                if attr.port_num != 1 || attr.pkey_index != 0 {
                    return Err(libc::EINVAL);
                }
                *now = *attr;
            }
            IBV_QPS_RTR => {
                let ah = &attr.ah_attr;
                let routed = ah.is_global == 1 && ah.grh.hop_limit > 0 && ah.grh.dgid.raw != [0; 16];
                let addressed = ah.port_num == 1 && (routed || (!ethernet && ah.dlid != 0));
                let max_dest = self.settings.get("max_qp_rd_atom", pair.device);
                if !addressed || attr.path_mtu > port_mtu || i64::from(attr.max_dest_rd_atomic) > max_dest {
                    return Err(libc::EINVAL);
                }
                let now = &mut pair.attr;
                now.qp_state = attr.qp_state;
                now.path_mtu = attr.path_mtu;
                now.dest_qp_num = attr.dest_qp_num;
                now.rq_psn = attr.rq_psn;
                now.max_dest_rd_atomic = attr.max_dest_rd_atomic;
                self.settings.note("last_path_mtu", attr.path_mtu.into());
                self.settings.note("last_traffic_class", ah.grh.traffic_class.into());
                self.settings.note("last_sl", ah.sl.into());
                self.settings.note("last_sgid_index", ah.grh.sgid_index.into());
                self.settings.note("last_max_dest_rd_atomic", attr.max_dest_rd_atomic.into());
            }
            _ => {
                let max = self.settings.get("max_qp_init_rd_atom", pair.device);
                if i64::from(attr.max_rd_atomic) > max || attr.timeout > 31 || attr.retry_cnt > 7 {
                    return Err(libc::EINVAL);
                }
                let now = &mut pair.attr;
                now.qp_state = attr.qp_state;
                now.sq_psn = attr.sq_psn;
                now.max_rd_atomic = attr.max_rd_atomic;
                self.settings.note("last_max_rd_atomic", attr.max_rd_atomic.into());
                self.settings.note("last_timeout", attr.timeout.into());
                self.settings.note("last_retry_cnt", attr.retry_cnt.into());
            }
        }
        Ok(())
    }
}

/// Not a status: the receiver has no receive posted.
const NOT_READY: u32 = u32::MAX;

fn copy(from: u64, to: u64, len: u64) -> u32 {
    // SAFETY: both ranges lie inside registered regions (or one is a local variable). They may overlap when a rank
    // puts to itself.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len as usize) };
    std::sync::atomic::fence(Ordering::Release);
    IBV_WC_SUCCESS
}
