//! What a work request does: where its bytes are on both ends, what is wrong with it, what it moves.

use super::{Posted, Region, World};
use crate::bytes;
use oxygin_ffi::verbs::types::*;
use std::time::{Duration, Instant};

/// Not a status: the receiver has no receive posted.
pub const NOT_READY: u32 = u32::MAX;

/// What was written and acknowledged, and has not come to memory yet (`lazy_writes`).
pub struct OnTheWay {
    pair: u32,
    rkey: u32,
    to: u64,
    bytes: Vec<u8>,
    until: Instant,
}

impl World {
    /// Where a work request's local piece really is.
    pub fn local(&self, context: usize, sge: &ibv_sge) -> Option<u64> {
        let region = self.local.get(&sge.lkey).filter(|r| r.context == context)?;
        region.host(sge.addr, sge.length.into())
    }

    /// Where a peer's memory really is, if it may be used like this.
    pub fn at_peer(&self, context: usize, rkey: u32, addr: u64, len: u64, access: u32) -> Option<u64> {
        let region = self.local.get(self.remote.get(&rkey)?).filter(|r| r.context == context)?;
        region.host(addr, len).filter(|_| region.access & access != 0)
    }

    /// Carries out one send; its status, or [`NOT_READY`].
    pub(super) fn carry_out(&mut self, number: u32, send: &Posted) -> u32 {
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
        if u64::from(send.sge.length) > self.settings.get("max_msg_sz", pair.device) as u64 {
            return IBV_WC_LOC_LEN_ERR;
        }
        let (mine, theirs) = (pair.context, peer.context);
        let local = match &send.inline {
            Some(bytes) => Some(bytes.as_ptr() as u64),
            None if send.wr.num_sge == 0 => Some(0),
            None => self.local(mine, &send.sge),
        };
        let Some(local) = local else { return IBV_WC_LOC_PROT_ERR };
        self.land_writes(number, send);
        if send.wr.opcode == IBV_WR_SEND {
            return self.deliver(peer_number, theirs, local, send);
        }
        let status = self.one_sided(number, peer_number, local, send);
        if matches!(status, IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR) {
            // The responder's end breaks too.
            self.break_pair(peer_number);
        }
        status
    }

    /// What `send` of a queue pair pushes before it comes to memory: a signal all that the queue pair wrote, a read
    /// what it wrote to the same region.
    fn land_writes(&mut self, pair: u32, send: &Posted) {
        let of_read = match send.wr.opcode {
            // SAFETY: a read fills in this part.
            IBV_WR_RDMA_READ => Some(unsafe { send.wr.wr.rdma.rkey }),
            _ => None,
        };
        if send.wr.opcode == IBV_WR_RDMA_WRITE || self.on_the_way.is_empty() {
            return;
        }
        self.land(|w| w.pair == pair && of_read.is_none_or(|rkey| w.rkey == rkey));
    }

    /// Writes whose time is over arrive.
    pub(super) fn land_old_writes(&mut self) {
        let now = Instant::now();
        self.land(|w| w.until < now);
    }

    /// Writes to a region that goes arrive before: its memory is then the owner's again, who may free it.
    pub(crate) fn land_region(&mut self, rkey: u32) {
        self.land(|w| w.rkey == rkey);
    }

    fn land(&mut self, comes: impl Fn(&OnTheWay) -> bool) {
        let (landed, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.on_the_way).into_iter().partition(comes);
        self.on_the_way = rest;
        for write in landed {
            copy(write.bytes.as_ptr() as u64, write.to, write.bytes.len() as u64);
        }
    }

    /// A write, a read or an atomic operation of `number` at its peer; `local` is where the request's own piece is.
    fn one_sided(&mut self, number: u32, peer: u32, local: u64, send: &Posted) -> u32 {
        let (Some(pair), Some(peer)) = (self.pairs.get(&number), self.pairs.get(&peer)) else {
            return IBV_WC_FATAL_ERR;
        };
        let (wr, len, theirs) = (&send.wr, u64::from(send.sge.length), peer.context);
        let atomics = self.settings.get("atomic_cap", peer.device) != 0;
        // SAFETY: each arm reads the part that its opcode fills in.
        let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
        match wr.opcode {
            IBV_WR_RDMA_WRITE if len == 0 => IBV_WC_SUCCESS,
            IBV_WR_RDMA_WRITE => {
                let ms = self.settings.get("lazy_writes", peer.device) as u64;
                match self.at_peer(theirs, rdma.rkey, rdma.remote_addr, len, IBV_ACCESS_REMOTE_WRITE) {
                    Some(to) if ms > 0 => {
                        let mut bytes = vec![0; len as usize];
                        let status = copy(local, bytes.as_mut_ptr() as u64, len);
                        let until = Instant::now() + Duration::from_millis(ms);
                        self.on_the_way.push(OnTheWay { pair: number, rkey: rdma.rkey, to, bytes, until });
                        status
                    }
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
            IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_CMP_AND_SWP
                if !atomics || len != 8 || pair.attr.max_rd_atomic == 0 || atomic.remote_addr % 8 != 0 =>
            {
                IBV_WC_REM_INV_REQ_ERR
            }
            IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_CMP_AND_SWP => {
                match self.at_peer(theirs, atomic.rkey, atomic.remote_addr, 8, IBV_ACCESS_REMOTE_ATOMIC) {
                    Some(at) => {
                        let old = bytes::change(at, 8, |old| match wr.opcode {
                            IBV_WR_ATOMIC_FETCH_AND_ADD => old.wrapping_add(atomic.compare_add),
                            _ if old == atomic.compare_add => atomic.swap,
                            _ => old,
                        });
                        copy((&raw const old) as u64, local, 8)
                    }
                    None => IBV_WC_REM_ACCESS_ERR,
                }
            }
            _ => IBV_WC_LOC_QP_OP_ERR,
        }
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
}

fn copy(from: u64, to: u64, len: u64) -> u32 {
    bytes::copy(from, to, len);
    IBV_WC_SUCCESS
}
