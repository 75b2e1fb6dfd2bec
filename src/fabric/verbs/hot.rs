//! A lane's memory of its last put with a signal: the windows, checked, and work requests that already hold their keys.
//! An operation between the same windows only fills in what differs.
//!
//! The memory is of window handles. Before a window's registration ends, whoever ends it makes every lane forget
//! (`Direct::forget`), so a handle that is found here is live.

use oxygin_ffi::verbs::types::*;
use std::ptr::{addr_of_mut, null_mut};

/// A window's extent on one side.
#[derive(Clone, Copy, Default, Debug)]
pub struct Side {
    /// The window's handle; `NOBODY`: nothing is remembered.
    pub handle: u64,
    /// First byte.
    pub base: u64,
    /// Offsets up to here are inside (source, destination); aligned ones below here are signals'.
    pub end: u64,
    /// The key.
    pub key: u32,
}

/// No handle: handles are even.
pub const NOBODY: u64 = 1;

/// The three windows of a put with a signal.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Where data comes from.
    pub src: Side,
    /// Where it goes, at the peer.
    pub dst: Side,
    /// Where the signal is, at the peer.
    pub sig: Side,
}

/// A put with a signal as the tables name it.
#[derive(Clone, Copy)]
pub struct Named {
    /// Handle of the source window.
    pub src: u64,
    /// Offset there.
    pub src_off: u64,
    /// Bytes.
    pub size: u64,
    /// Handle of the destination window.
    pub dst: u64,
    /// Offset there.
    pub dst_off: u64,
    /// Handle of the signal's window.
    pub sig: u64,
    /// Offset there.
    pub sig_off: u64,
    /// What to add.
    pub value: u64,
}

/// What a lane remembers. Its work requests point at one another: it must not move once [`Hot::link`]ed.
#[repr(C)]
pub struct Hot {
    src: u64,
    src_base: u64,
    src_end: u64,
    dst: u64,
    dst_base: u64,
    dst_end: u64,
    sig: u64,
    sig_base: u64,
    sig_end: u64,
    data_sge: ibv_sge,
    signal_sge: ibv_sge,
    pub(super) data: ibv_send_wr,
    pub(super) signal: ibv_send_wr,
}

impl Hot {
    /// Remembers nothing.
    pub fn new() -> Self {
        let data = ibv_send_wr { num_sge: 1, ..super::queues::blank() };
        let signal = ibv_send_wr {
            opcode: IBV_WR_ATOMIC_FETCH_AND_ADD,
            send_flags: IBV_SEND_SIGNALED,
            num_sge: 1,
            ..super::queues::blank()
        };
        Self {
            src: NOBODY,
            src_base: 0,
            src_end: 0,
            dst: NOBODY,
            dst_base: 0,
            dst_end: 0,
            sig: NOBODY,
            sig_base: 0,
            sig_end: 0,
            data_sge: ibv_sge::default(),
            signal_sge: ibv_sge::default(),
            data,
            signal,
        }
    }

    /// Ties the work requests together, with the 8 bytes that the device may overwrite. Called once at its final place.
    pub fn link(&mut self, scratch: u64, scratch_lkey: u32) {
        self.signal_sge = ibv_sge { addr: scratch, length: 8, lkey: scratch_lkey };
        self.data.sg_list = addr_of_mut!(self.data_sge);
        self.data.next = addr_of_mut!(self.signal);
        self.signal.sg_list = addr_of_mut!(self.signal_sge);
        self.signal.next = null_mut();
    }

    /// Remembers these windows.
    pub fn remember(&mut self, w: &Windows) {
        (self.src, self.src_base, self.src_end) = (w.src.handle, w.src.base, w.src.end);
        (self.dst, self.dst_base, self.dst_end) = (w.dst.handle, w.dst.base, w.dst.end);
        (self.sig, self.sig_base, self.sig_end) = (w.sig.handle, w.sig.base, w.sig.end);
        self.data_sge.lkey = w.src.key;
        self.data.wr.rdma = ibv_wr_rdma { remote_addr: 0, rkey: w.dst.key };
        self.signal.wr.atomic = ibv_wr_atomic { remote_addr: 0, compare_add: 0, swap: 0, rkey: w.sig.key };
    }

    /// Forgets everything if a window with this handle is part of it.
    pub fn forget(&mut self, handle: u64) {
        if [self.src, self.dst, self.sig].contains(&handle) {
            self.src = NOBODY;
        }
    }

    /// Fills in the work requests; `false`: other windows, or a range that is not inside, and the work requests mean
    /// nothing.
    #[inline(always)]
    pub fn fill(&mut self, a: &Named) -> bool {
        if a.src != self.src || a.dst != self.dst || a.sig != self.sig {
            return false;
        }
        let (Some(from_end), Some(to_end)) = (a.src_off.checked_add(a.size), a.dst_off.checked_add(a.size)) else {
            return false;
        };
        if from_end > self.src_end || to_end > self.dst_end || a.sig_off >= self.sig_end || a.sig_off & 7 != 0 {
            return false;
        }
        self.data_sge.addr = self.src_base.wrapping_add(a.src_off);
        self.data_sge.length = a.size as u32;
        self.data.wr.rdma.remote_addr = self.dst_base.wrapping_add(a.dst_off);
        self.signal.wr.atomic.remote_addr = self.sig_base.wrapping_add(a.sig_off);
        self.signal.wr.atomic.compare_add = a.value;
        true
    }

    /// What the work requests say, for when the device refuses them.
    pub fn op(&self) -> super::lane::Op {
        // SAFETY: the union's parts are plain numbers.
        let (rdma, atomic) = unsafe { (self.data.wr.rdma, self.signal.wr.atomic) };
        super::lane::Op {
            kind: super::lane::Kind::Put,
            local: self.data_sge.addr,
            lkey: self.data_sge.lkey,
            rkey: rdma.rkey,
            remote: rdma.remote_addr,
            len: self.data_sge.length.into(),
            signal: Some(crate::rma::op::Signal {
                remote: atomic.remote_addr,
                rkey: atomic.rkey,
                value: atomic.compare_add,
                strong: true,
            }),
        }
    }

    /// Where the data goes, for the log.
    #[inline(always)]
    pub fn remote(&self) -> u64 {
        // SAFETY: the union's parts are plain numbers.
        unsafe { self.data.wr.rdma.remote_addr }
    }
}
