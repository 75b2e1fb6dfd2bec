//! One (context, peer): its queue pair, the room in its send queue, and the operations that wait for room.

use super::ticket::Ticket;
use crate::rma::op::{Get, Put, Signal};
use oxygin_ffi::verbs::types::ibv_qp;
use std::collections::VecDeque;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// RDMA write.
    Put,
    /// RDMA read.
    Get,
    /// A read of own memory through the device, behind which all that earlier gets brought is visible. `local` and
    /// `lkey` name scratch, `remote` and `rkey` the own memory.
    Flush,
}

/// An operation that waits for room in the send queue.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// What it does.
    pub kind: Kind,
    /// Address here.
    pub local: u64,
    /// Key here.
    pub lkey: u32,
    /// Key there.
    pub rkey: u32,
    /// Address there.
    pub remote: u64,
    /// Bytes.
    pub len: u64,
    /// Added after the data.
    pub signal: Option<Signal>,
}

impl Op {
    /// A put.
    pub fn put(p: &Put) -> Self {
        Self {
            kind: Kind::Put,
            local: p.local,
            lkey: p.lkey,
            rkey: p.rkey,
            remote: p.remote,
            len: p.len,
            signal: p.signal,
        }
    }

    /// A get.
    pub fn get(g: &Get) -> Self {
        Self { kind: Kind::Get, local: g.local, lkey: g.lkey, rkey: g.rkey, remote: g.remote, len: g.len, signal: None }
    }

    /// The work request that comes after `done` bytes: bytes of data, or the signal; and whether it is the last.
    pub fn next(&self, done: u64, max_msg: u64) -> (Next, bool) {
        let left = self.len - done;
        if left > 0 || (self.len == 0 && self.signal.is_none()) {
            let bytes = left.min(max_msg);
            return (Next::Data(bytes as u32), bytes == left && self.signal.is_none());
        }
        match self.signal {
            Some(signal) => (Next::Signal(signal), true),
            None => (Next::Data(0), true),
        }
    }
}

/// A work request of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// So many bytes.
    Data(u32),
    /// The signal.
    Signal(Signal),
}

/// What a failing work request was about, kept for the message. 16 bytes, so that a ring of them stays small.
#[derive(Clone, Copy, Debug, Default)]
pub struct Logged {
    /// Address at the peer.
    pub remote: u64,
    /// Bytes, capped.
    pub len: u32,
    /// `LOG_*`.
    pub what: u32,
}

/// A put.
pub const LOG_PUT: u32 = 1;
/// A put with a signal.
pub const LOG_PUT_SIGNAL: u32 = 2;
/// A signal alone.
pub const LOG_SIGNAL: u32 = 3;
/// A get.
pub const LOG_GET: u32 = 4;

impl Logged {
    /// Of an operation.
    pub fn of(op: &Op) -> Self {
        let (remote, what) = match (op.kind, op.signal) {
            (Kind::Get | Kind::Flush, _) => (op.remote, LOG_GET),
            (Kind::Put, None) => (op.remote, LOG_PUT),
            (Kind::Put, Some(s)) if op.len == 0 => (s.remote, LOG_SIGNAL),
            (Kind::Put, Some(_)) => (op.remote, LOG_PUT_SIGNAL),
        };
        Self { remote, len: op.len.min(u32::MAX.into()) as u32, what }
    }
}

impl std::fmt::Display for Logged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (start, end) = (self.remote, self.remote.wrapping_add(self.len.into()));
        match self.what {
            LOG_PUT => write!(f, "a put of {} bytes to {start:#x}..{end:#x}", self.len),
            LOG_PUT_SIGNAL => write!(f, "a put of {} bytes to {start:#x}..{end:#x} with a signal", self.len),
            LOG_SIGNAL => write!(f, "a signal at {start:#x}"),
            LOG_GET => write!(f, "a get of {} bytes from {start:#x}..{end:#x}", self.len),
            _ => f.write_str("no operation of this rank"),
        }
    }
}

/// The state of one (context, peer), under the context's lock.
pub struct Lane {
    /// Where work requests go.
    pub qp: *mut ibv_qp,
    /// The `wr_id` of operation 0 with one entry.
    pub tag: u64,
    /// Free entries of the send queue.
    pub room: u32,
    /// The newest operation's number.
    pub issued: u32,
    /// Operations may go straight to the device: nothing waits, nothing failed, signals are atomics.
    pub direct: bool,
    /// In the context's list of lanes with something to do.
    pub waiting: bool,
    /// No more operations: the queue pair is broken.
    pub failed: bool,
    /// A flush's local read is under way; nothing behind it may start.
    pub flushing: bool,
    /// Entries of the send queue.
    pub depth: u32,
    /// The newest operation that is wholly in the send queue. Only kept while not `direct`.
    pub sent: u32,
    /// Entries taken by work requests behind which no completion comes yet.
    pub unsignalled: u32,
    /// Bytes of the first waiting operation that are in the send queue.
    pub offset: u64,
    /// Operations that wait, oldest first.
    pub backlog: VecDeque<Op>,
    /// Where a get brought device memory since the last flush: address, local key.
    pub flush_from: Option<(u64, u32)>,
    /// Operations in the send queue by number; a power of two of at least `depth` entries.
    pub log: Box<[Logged]>,
}

// SAFETY: the pointer is to a libibverbs object, which may be used from any thread.
unsafe impl Send for Lane {}

impl Lane {
    /// A lane without operations.
    pub fn new(qp: *mut ibv_qp, peer: u32, depth: u32, direct: bool) -> Self {
        Self {
            qp,
            tag: Ticket::send(peer, 0, 1),
            room: depth,
            issued: 0,
            direct,
            waiting: false,
            failed: false,
            flushing: false,
            depth,
            sent: 0,
            unsignalled: 0,
            offset: 0,
            backlog: VecDeque::new(),
            flush_from: None,
            log: vec![Logged::default(); depth.next_power_of_two() as usize].into(),
        }
    }

    /// Notes what operation `number` is about.
    #[inline(always)]
    pub fn note(&mut self, number: u32, logged: Logged) {
        let at = number as usize & (self.log.len().wrapping_sub(1));
        // SAFETY: the length is a power of two, so the mask keeps the index below it.
        unsafe { *self.log.get_unchecked_mut(at) = logged };
    }

    /// What operation `number` is about.
    pub fn noted(&self, number: u32) -> Logged {
        self.log.get(number as usize & (self.log.len() - 1)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_split_and_signalled_last() {
        let signal = Some(Signal { remote: 8, rkey: 1, value: 2, strong: true });
        let op = |len, signal| Op { kind: Kind::Put, local: 0, lkey: 0, rkey: 0, remote: 0, len, signal };
        assert_eq!(op(0, None).next(0, 10), (Next::Data(0), true));
        assert_eq!(op(10, None).next(0, 10), (Next::Data(10), true));
        assert_eq!(op(11, None).next(0, 10), (Next::Data(10), false));
        assert_eq!(op(11, None).next(10, 10), (Next::Data(1), true));
        assert_eq!(op(11, signal).next(10, 10), (Next::Data(1), false));
        assert_eq!(op(11, signal).next(11, 10), (Next::Signal(signal.unwrap()), true));
        assert_eq!(op(0, signal).next(0, 10), (Next::Signal(signal.unwrap()), true));
    }
}
