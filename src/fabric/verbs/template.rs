//! A lane's own work requests, filled in beforehand but for what differs from operation to operation: zeroing 128 bytes
//! for each would cost more than the whole rest. With them goes the memory of the last put with a signal: its windows,
//! checked, whose keys the work requests hold. The next one between the same windows only fills in addresses.
//!
//! The memory is of window handles. Before a window's registration ends, whoever ends it makes every lane forget
//! (`Direct::forget`), so a handle that is found here is live.

use super::lane::{EntryKind, Logged, Op};
use super::wr_id::WrId;
use crate::rma::op::{Put, Signal};
use oxygin_ffi::verbs::types::*;
use std::ffi::c_void;
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

/// A put with a signal, of which nothing is checked yet. Each argument is read when it is asked for, once at most: to
/// whoever has them on the stack, reading all at the start costs more than the rest.
pub trait Again: Copy {
    /// The source window's handle.
    fn src(&self) -> u64;
    /// The destination window's handle.
    fn dst(&self) -> u64;
    /// The signal window's handle.
    fn sig(&self) -> u64;
    /// Bytes from the source window's start.
    fn src_off(&self) -> u64;
    /// Bytes from the destination window's start.
    fn dst_off(&self) -> u64;
    /// Bytes from the signal window's start.
    fn sig_off(&self) -> u64;
    /// Bytes to put.
    fn size(&self) -> u64;
    /// What to add to the signal; `None`: no such operation.
    fn addend(&self) -> Option<u64>;
    /// Stores the request.
    ///
    /// # Safety
    /// The place is writable.
    unsafe fn store(&self, request: *mut c_void);
}

/// Work requests and memory of a lane. They point at one another: it must not move once [`Template::link`]ed.
#[repr(C)]
pub struct Template {
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
    put_sge: ibv_sge,
    /// Data in front of `signal`. No completion comes for it alone.
    data: ibv_send_wr,
    /// Behind `data`, or alone.
    signal: ibv_send_wr,
    /// Data without a signal.
    put: ibv_send_wr,
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

impl Template {
    /// Remembers nothing.
    pub fn new(peer: u32) -> Self {
        let data = ibv_send_wr { wr_id: WrId::next(peer), num_sge: 1, ..blank() };
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
            put_sge: ibv_sge::default(),
            data,
            signal: ibv_send_wr { opcode: IBV_WR_ATOMIC_FETCH_AND_ADD, send_flags: IBV_SEND_SIGNALED, ..data },
            put: ibv_send_wr { send_flags: IBV_SEND_SIGNALED, ..data },
        }
    }

    /// Ties the work requests together, with the 8 bytes that the device may overwrite. Called once at its final place.
    pub fn link(&mut self, scratch: u64, scratch_lkey: u32) {
        self.signal_sge = ibv_sge { addr: scratch, length: 8, lkey: scratch_lkey };
        self.data.sg_list = addr_of_mut!(self.data_sge);
        self.data.next = addr_of_mut!(self.signal);
        self.signal.sg_list = addr_of_mut!(self.signal_sge);
        self.put.sg_list = addr_of_mut!(self.put_sge);
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

    /// Fills in a put with a signal between the remembered windows and says which work request comes first; `None`:
    /// other windows, or a range that is not inside, and the work requests mean nothing.
    #[inline(always)]
    pub fn again(&mut self, a: &impl Again) -> Option<*mut ibv_send_wr> {
        // Checks one after the other and what changes an argument at the end, so that few values are alive at a time.
        if a.src() != self.src || a.dst() != self.dst || a.sig() != self.sig {
            return None;
        }
        self.signal.wr.atomic.compare_add = a.addend()?;
        if a.src_off().checked_add(a.size())? > self.src_end {
            return None;
        }
        if a.dst_off().checked_add(a.size())? > self.dst_end {
            return None;
        }
        if a.sig_off() >= self.sig_end {
            return None;
        }
        let sig_off = a.sig_off();
        if sig_off & 7 != 0 {
            return None;
        }
        self.signal.wr.atomic.remote_addr = self.sig_base.wrapping_add(sig_off);
        self.data_sge.addr = self.src_base.wrapping_add(a.src_off());
        self.data_sge.length = a.size() as u32;
        self.data.wr.rdma.remote_addr = self.dst_base.wrapping_add(a.dst_off());
        Some(addr_of_mut!(self.data))
    }

    /// The same for any put of at most one message; says also what to note.
    #[inline(always)]
    pub fn fill(&mut self, put: &Put) -> (*mut ibv_send_wr, Logged) {
        let sge = ibv_sge { addr: put.local, length: put.len as u32, lkey: put.lkey };
        let rdma = ibv_wr_rdma { remote_addr: put.remote, rkey: put.rkey };
        let Some(signal) = &put.signal else {
            self.put_sge = sge;
            self.put.wr.rdma = rdma;
            return (addr_of_mut!(self.put), Logged { remote: put.remote, len: put.len as u32 });
        };
        // SAFETY: the union's parts are plain numbers.
        let (sig_key, dst_key) = unsafe { (self.signal.wr.atomic.rkey, self.data.wr.rdma.rkey) };
        let same_data = put.len == 0 || (put.lkey == self.data_sge.lkey && put.rkey == dst_key);
        if signal.rkey != sig_key || !same_data {
            // The memory is of windows with the keys that the work requests hold.
            self.src = NOBODY;
        }
        self.signal.wr.atomic.remote_addr = signal.remote;
        self.signal.wr.atomic.compare_add = signal.value;
        self.signal.wr.atomic.rkey = signal.rkey;
        if put.len == 0 {
            return (addr_of_mut!(self.signal), Logged { remote: signal.remote, len: 0 });
        }
        self.data_sge = sge;
        self.data.wr.rdma = rdma;
        (addr_of_mut!(self.data), Logged { remote: put.remote, len: put.len as u32 })
    }

    /// The operation that the work requests say, and how many of them the device took before it refused `bad`. `alone`:
    /// of a signal without data.
    pub fn refused(&self, bad: *const ibv_send_wr, alone: bool) -> (Op, u32) {
        let of = |wr: &ibv_send_wr, sge: &ibv_sge, signal| {
            // SAFETY: the work request of a write has this part.
            let rdma = unsafe { wr.wr.rdma };
            let (local, lkey, len) = (sge.addr, sge.lkey, sge.length.into());
            Op { kind: EntryKind::Put, local, lkey, rkey: rdma.rkey, remote: rdma.remote_addr, len, signal }
        };
        if std::ptr::eq(bad, &self.put) {
            return (of(&self.put, &self.put_sge, None), 0);
        }
        // SAFETY: the work request of the signal has this part.
        let atomic = unsafe { self.signal.wr.atomic };
        let (remote, rkey, value) = (atomic.remote_addr, atomic.rkey, atomic.compare_add);
        let both = of(&self.data, &self.data_sge, Some(Signal { remote, rkey, value, strong: true }));
        if alone {
            (Op { len: 0, ..both }, 0)
        } else {
            (both, u32::from(std::ptr::eq(bad, &self.signal)))
        }
    }

    /// Whether this is one of the work requests.
    pub fn holds(&self, wr: *const ibv_send_wr) -> bool {
        [&self.data, &self.signal, &self.put].into_iter().any(|own| std::ptr::eq(own, wr))
    }

    /// Where the data of the last put with a signal goes, for the log.
    #[inline(always)]
    pub fn remote(&self) -> u64 {
        // SAFETY: the union's parts are plain numbers.
        unsafe { self.data.wr.rdma.remote_addr }
    }
}
