//! Operations that touch GPU memory, and what is left of them.

use super::arrived_bytes::{ArrivedBytes, HostBytes};
use super::atomic::{AtomicStep, To};
use crate::fabric::soft::lane::Lane;
use crate::memory::key::Key;
use crate::rma::op::{self, Signal, Transfer};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// One end of a transfer.
#[derive(Clone, Copy, Debug)]
pub enum TransferEnd {
    /// In a window of the engine's rank.
    Window {
        /// The window's key.
        key: u32,
        /// Address in this process.
        addr: u64,
    },
    /// An address of the caller, who vouches for it until local completion, or for as long as its window is there.
    Caller {
        /// The address.
        addr: u64,
        /// It is GPU memory.
        gpu: bool,
    },
}

impl TransferEnd {
    /// Whether it is GPU memory.
    pub fn is_on_gpu(self) -> bool {
        match self {
            Self::Window { key, .. } => Key(key).is_on_gpu(),
            Self::Caller { gpu, .. } => gpu,
        }
    }

    /// Its address.
    pub fn addr(self) -> u64 {
        match self {
            Self::Window { addr, .. } | Self::Caller { addr, .. } => addr,
        }
    }

    /// The same, `n` bytes further on.
    pub fn plus(self, n: u64) -> Self {
        match self {
            Self::Window { key, addr } => Self::Window { key, addr: addr + n },
            Self::Caller { addr, gpu } => Self::Caller { addr: addr + n, gpu },
        }
    }
}

/// A window that a caller's address lies in. Ranks number theirs by themselves: a key names one together with its rank
/// only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerWindow {
    /// The rank that registered it.
    pub rank: u32,
    /// Its key at that rank.
    pub key: u32,
}

/// What an operation copies between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Between {
    caller: CallerWindow,
    /// Key of the window of the engine's rank.
    window: u32,
    /// Into that one.
    is_put: bool,
}

/// Who waits for an operation.
pub struct Owner {
    /// Where it was posted.
    pub lane: Arc<Lane>,
    /// Its number there.
    pub seq: Seq,
    /// Counts the unfinished ones of the poster.
    pub backlog: Arc<AtomicUsize>,
}

impl Owner {
    /// Locally complete.
    pub fn complete(self) {
        self.lane.complete(self.seq);
        self.backlog.fetch_sub(1, Ordering::Relaxed);
    }

    /// The same lane and number, counted nowhere.
    pub fn unowned(&self) -> Self {
        Self { lane: self.lane.clone(), seq: self.seq, backlog: Arc::new(AtomicUsize::new(1)) }
    }

    /// It will never be; the lane's fault or its peer's says why.
    pub fn give_up(self) {
        // Whoever sees the count fall sees the failure.
        self.backlog.fetch_sub(1, Ordering::Release);
    }
}

/// An index of a poster's, and what an operation adds to it once it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Its address, a multiple of its size, on this GPU or on one that this GPU may change words of.
    pub at: u64,
    /// It has 8 bytes, instead of 4.
    pub is_wide: bool,
    /// Entries that the operation is: 1 or 2.
    pub entries: u8,
}

/// An operation on its way.
pub struct Op {
    /// Who waits for it.
    pub owner: Owner,
    /// The end that is read.
    pub from: TransferEnd,
    /// The end that is written.
    pub to: TransferEnd,
    /// Bytes to copy; 0: there is only a signal, or nothing.
    pub len: u64,
    /// Bytes whose transfer has been started.
    pub done: u64,
    /// Added behind the data.
    pub signal: Option<Signal>,
    /// The submission that reads the signal's present value, where nothing else can add to it.
    pub reading: Option<u64>,
    /// The window that the caller's end lies in, if known.
    pub window: Option<CallerWindow>,
    /// The GPU of the caller's end, where it is GPU memory, as the driver names it.
    pub home: Option<i32>,
    /// The caller's end, where it is GPU memory, may be loaded from and stored to by any GPU of this process.
    pub is_open: bool,
    /// It waited behind a large copy of its lane and its turn has come: nothing holds it up any more.
    pub has_turn: bool,
    /// No signal tells of its bytes, only its completion does.
    pub is_get: bool,
    /// Who keeps the bytes of the end in host memory, if there is one.
    pub host: HostBytes,
    /// Where the copy kernel may count its completion, so that the poster need not.
    pub credit: Option<Credit>,
    /// The word that it changes, behind what was submitted before; then there is nothing to copy.
    pub fetch: Option<Box<AtomicStep>>,
}

impl Op {
    /// From an operation of `rank`, whose GPU windows are on `home`, of which `done` bytes have been moved by other
    /// means.
    #[inline]
    pub fn new(owner: Owner, rank: u32, home: Option<i32>, work: &op::Op, done: u64) -> Self {
        let caller = |addr, key: u32| TransferEnd::Caller { addr, gpu: Key(key).is_on_gpu() };
        if let op::Op::Value(value) = work {
            let arrived =
                Self::received(owner, ArrivedBytes::Boxed(value.payload.bytes().into()), value.rkey, value.remote);
            return Self { done, signal: value.signal, ..arrived };
        }
        match work.transfer() {
            Transfer::Put(p) => {
                let (from, to) = (caller(p.local, p.lkey), TransferEnd::Window { key: p.rkey, addr: p.remote });
                Self { signal: p.signal, done, ..Self::copy(owner, from, to, p.len).of_caller(rank, home, p.lkey) }
            }
            Transfer::Get(g) => {
                let (from, to) = (TransferEnd::Window { key: g.rkey, addr: g.remote }, caller(g.local, g.lkey));
                Self { is_get: true, done, ..Self::copy(owner, from, to, g.len).of_caller(rank, home, g.lkey) }
            }
            Transfer::Atomic(a) => {
                let (change, width, key, addr) = (a.change, a.width, a.rkey, a.remote);
                let to = a.fetched.map_or(To::Nowhere, |f| To::Caller(caller(f.local, f.lkey)));
                let window = a.fetched.map(|f| CallerWindow { rank, key: f.lkey });
                Self { window, ..Self::fetching(owner, AtomicStep { change, width, key, addr, to }) }
            }
        }
    }

    /// A transfer between two ends, or with `len` 0 a marker behind what was submitted before.
    #[inline]
    pub fn copy(owner: Owner, from: TransferEnd, to: TransferEnd, len: u64) -> Self {
        Self {
            owner,
            from,
            to,
            len,
            done: 0,
            signal: None,
            reading: None,
            window: None,
            home: None,
            is_open: false,
            has_turn: false,
            is_get: false,
            host: HostBytes::Caller,
            credit: None,
            fetch: None,
        }
    }

    /// The same, where the caller's end is in the window with this key of `rank`, whose GPU windows are on `home`.
    /// Without bytes there is no such end: signals have no key.
    #[inline]
    fn of_caller(self, rank: u32, home: Option<i32>, key: u32) -> Self {
        let window = (self.len > 0).then_some(CallerWindow { rank, key });
        Self { window, home, is_open: Key(key).is_open(), ..self }
    }

    /// Whether the stream, where it carries it out, stores what a word holds behind an addition.
    pub fn stores_sum(&self) -> bool {
        self.fetch.is_some() || self.signal.is_some_and(|signal| Key(signal.rkey).is_on_gpu())
    }

    /// The window in host memory of the engine's rank that it reads, which may go, and where in it.
    #[inline]
    pub fn host_window(&self) -> Option<(u32, u64)> {
        match self.from {
            TransferEnd::Window { key, addr } if self.len > 0 && !Key(key).is_on_gpu() => Some((key, addr)),
            _ => None,
        }
    }

    /// Whether both ends are in windows of the engine's rank.
    fn has_no_caller(&self) -> bool {
        matches!((self.from, self.to), (TransferEnd::Window { .. }, TransferEnd::Window { .. }))
    }

    /// Whether both ends are on the engine's GPU, which has this number for the driver.
    pub fn is_within(&self, gpu: Option<i32>) -> bool {
        gpu.is_some() && (self.has_no_caller() || self.home == gpu)
    }

    /// The windows at both ends, where one is the caller's and both are known.
    pub fn between(&self) -> Option<Between> {
        let caller = self.window?;
        match (self.from, self.to) {
            (TransferEnd::Caller { .. }, TransferEnd::Window { key, .. }) => {
                Some(Between { caller, window: key, is_put: true })
            }
            (TransferEnd::Window { key, .. }, TransferEnd::Caller { .. }) => {
                Some(Between { caller, window: key, is_put: false })
            }
            _ => None,
        }
    }

    /// Bytes that arrived for a GPU window.
    pub fn received(owner: Owner, mut bytes: ArrivedBytes, key: u32, addr: u64) -> Self {
        let from = TransferEnd::Caller { addr: bytes.as_mut_ptr() as u64, gpu: false };
        let (len, host) = (bytes.count() as u64, HostBytes::Arrived(bytes));
        Self { host, ..Self::copy(owner, from, TransferEnd::Window { key, addr }, len) }
    }

    /// A signal that arrived.
    pub fn signalled(owner: Owner, signal: Signal) -> Self {
        let nowhere = TransferEnd::Caller { addr: 0, gpu: false };
        Self { signal: Some(signal), ..Self::copy(owner, nowhere, nowhere, 0) }
    }
}
