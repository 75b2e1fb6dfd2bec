//! One (context, peer): its queue pair, the room in its send queue, and the operations that wait for room.

use super::atomic::Loops;
use super::bounce::Values;
use super::regions::Brought;
use super::template::Template;
use crate::fabric::Sent;
use crate::rma::atomic::Atomic;
use crate::rma::op::{Get, Put, Signal, Value};
use crate::rma::seq::Seq;
use oxygin_ffi::verbs::types::{ibv_qp, ibv_wr_rdma};
use std::collections::VecDeque;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// RDMA write.
    Put,
    /// RDMA write of a payload that lies in the lane's bounce area.
    Value,
    /// RDMA read.
    Get,
    /// A read of own memory through the device, behind which all that earlier gets brought is visible. `local` and
    /// `lkey` name scratch, `remote` and `rkey` the own memory.
    Flush,
    /// A fetch-and-add, which is `signal`. `local` and `lkey` name where the fetched value goes; key 0: nowhere.
    FetchAdd,
    /// An atomic operation that takes several work requests, kept in `Lane::loops`. `local` and `lkey` name a slot.
    Loop,
}

/// An operation that waits for room in the send queue: an entry of the lane's queue, not another operation type
/// beside [`rma::op::Op`](crate::rma::op::Op). It holds what work requests are made of, whatever they were asked for
/// as, and has no room for a payload, of which a backlog of thousands would keep 64 bytes for each: payloads lie in
/// the bounce area.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// What it does.
    pub kind: EntryKind,
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
            kind: EntryKind::Put,
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
        Self {
            kind: EntryKind::Get,
            local: g.local,
            lkey: g.lkey,
            rkey: g.rkey,
            remote: g.remote,
            len: g.len,
            signal: None,
        }
    }

    /// A value whose payload has been copied to `local`, which `lkey` covers.
    pub fn value(v: &Value, local: u64, lkey: u32) -> Self {
        let len = v.payload.bytes().len() as u64;
        Self { kind: EntryKind::Value, local, lkey, rkey: v.rkey, remote: v.remote, len, signal: v.signal }
    }

    /// A plain fetch-and-add.
    pub fn fetch_add(a: &Atomic, add: u64) -> Self {
        let (local, lkey) = a.fetched.map_or((0, 0), |f| (f.local, f.lkey));
        let signal = Some(Signal { remote: a.remote, rkey: a.rkey, value: add, strong: true });
        Self { kind: EntryKind::FetchAdd, local, lkey, rkey: a.rkey, remote: a.remote, len: 0, signal }
    }

    /// Another atomic operation, whose slot is at `local`.
    pub fn looped(a: &Atomic, local: u64, lkey: u32) -> Self {
        Self { kind: EntryKind::Loop, local, lkey, rkey: a.rkey, remote: a.remote, len: 0, signal: None }
    }

    /// The work request that comes after `done` bytes: bytes of data, or the signal; and whether it is the last.
    pub fn next(&self, done: u64, max_msg: u64) -> (WorkRequest, bool) {
        let left = self.len - done;
        if left > 0 || (self.len == 0 && self.signal.is_none()) {
            let bytes = left.min(max_msg);
            return (WorkRequest::Data(bytes as u32), bytes == left && self.signal.is_none());
        }
        match self.signal {
            Some(signal) => (WorkRequest::Signal(signal), true),
            None => (WorkRequest::Data(0), true),
        }
    }
}

/// A work request of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkRequest {
    /// So many bytes.
    Data(u32),
    /// The signal.
    Signal(Signal),
}

/// What a failing work request was about, kept for the message.
#[derive(Clone, Copy, Debug, Default)]
pub struct Logged {
    /// Address at the peer.
    pub remote: u64,
    /// Bytes of a put; [`LOG_GET`] and bytes, capped, of a get; 0 of a signal alone; or one of the other marks.
    pub len: u32,
}

/// Set in the length of a get.
const LOG_GET: u32 = 1 << 31;
/// An atomic operation.
const LOG_ATOMIC: u32 = u32::MAX;
/// A put of nothing.
const LOG_EMPTY: u32 = u32::MAX - 1;
/// The read of a flush.
const LOG_FLUSH: u32 = u32::MAX - 2;
/// No operation: see `WrId::aside`.
const LOG_ASIDE: u32 = u32::MAX - 3;
/// Bytes that can be told from the marks.
const LOG_MOST: u32 = (LOG_ASIDE - 1) & !LOG_GET;

impl Logged {
    /// What is no operation.
    pub const ASIDE: Self = Self { remote: 0, len: LOG_ASIDE };

    /// Of an operation.
    pub fn of(op: &Op) -> Self {
        let len = op.len.min(LOG_MOST.into()) as u32;
        match (op.kind, op.signal) {
            (EntryKind::FetchAdd | EntryKind::Loop, _) => Self { remote: op.remote, len: LOG_ATOMIC },
            (EntryKind::Get, _) => Self { remote: op.remote, len: len | LOG_GET },
            (EntryKind::Flush, _) => Self { remote: op.remote, len: LOG_FLUSH },
            (EntryKind::Put | EntryKind::Value, Some(s)) if op.len == 0 => Self { remote: s.remote, len: 0 },
            (EntryKind::Put | EntryKind::Value, None) if op.len == 0 => Self { remote: op.remote, len: LOG_EMPTY },
            (EntryKind::Put | EntryKind::Value, _) => Self { remote: op.remote, len },
        }
    }
}

impl std::fmt::Display for Logged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let len = self.len & !LOG_GET;
        let (start, end) = (self.remote, self.remote.wrapping_add(len.into()));
        match self.len {
            LOG_ATOMIC => write!(f, "an atomic operation at {start:#x}"),
            LOG_EMPTY => write!(f, "a put of 0 bytes to {start:#x}"),
            LOG_FLUSH => write!(f, "the read of a flush at {start:#x}"),
            LOG_ASIDE => write!(f, "a write that goes with signal messages"),
            0 => write!(f, "a signal at {start:#x}"),
            LOG_GET.. => write!(f, "a get of {len} bytes from {start:#x}..{end:#x}"),
            _ => write!(f, "a put of {len} bytes to {start:#x}..{end:#x}"),
        }
    }
}

/// Operations in the send queue at most, so that what each was about can be told. A power of two.
pub const NOTED: usize = 256;

/// What the last [`NOTED`] operations were about, by number. Every operation writes a note: two arrays, because an
/// element of 8 or 4 bytes is addressed without a computation, and in the lane, so that no pointer is followed.
struct Notes {
    remote: [u64; NOTED],
    len: [u32; NOTED],
}

/// The state of one (context, peer), under the context's lock. Lanes share no cache line.
///
/// A lane is *open* while operations go straight to the device. Each of them then counts as two send queue entries,
/// which is the most it takes, so that counting operations is enough and completions have nothing to give back.
/// Anything else shuts the lane: then entries are counted one by one (`used`), until nothing waits any more.
#[repr(C, align(128))]
pub struct Lane {
    /// Where work requests go.
    pub qp: *mut ibv_qp,
    /// The request of the newest operation: below, its number; above, what the set of contexts calls this lane.
    newest: u64,
    /// The first number that may not go straight to the device: the next one while the lane is shut.
    stop: u32,
    /// Operations go straight to the device up to `stop`.
    open: bool,
    /// In the context's list of lanes with something to do.
    pub waiting: bool,
    /// No more operations: the queue pair is broken.
    pub failed: bool,
    /// A flush's local read is under way; nothing behind it may start.
    pub flushing: bool,
    /// The work requests of operations that go straight to the device.
    pub template: Template,
    /// Entries of the send queue.
    depth: u32,
    /// Entries taken while shut and not given back yet.
    used: u32,
    /// The newest operation that went straight to the device, when the lane was last shut.
    direct: u32,
    /// The newest operation that is wholly in the send queue. Only kept while shut.
    pub sent: u32,
    /// Entries taken by work requests behind which no completion comes yet.
    pub unsignalled: u32,
    /// The newest get that is in the send queue, in part or wholly.
    pub last_get: Option<u32>,
    /// Of what is in the send queue, a place that was written behind which no read comes yet, though one has to.
    pub unconfirmed: Option<ibv_wr_rdma>,
    /// Bytes of the first waiting operation that are in the send queue.
    pub offset: u64,
    /// Operations that wait, oldest first.
    pub backlog: VecDeque<Op>,
    /// The operations whose payloads lie in the bounce area, oldest first.
    pub values: Values,
    /// The operations that are [`EntryKind::Loop`].
    pub loops: Loops,
    /// Where gets brought device memory since the last flush.
    pub brought: Vec<Brought>,
    /// Bytes of all operations that were taken.
    bytes: u64,
    notes: Notes,
}

// SAFETY: the pointer is to a libibverbs object, which may be used from any thread.
unsafe impl Send for Lane {}

impl Lane {
    /// A lane without operations, shut.
    pub fn new(qp: *mut ibv_qp, peer: u32, depth: u32) -> Self {
        Self {
            qp,
            newest: 0,
            stop: 1,
            open: false,
            waiting: false,
            failed: false,
            flushing: false,
            template: Template::new(peer),
            depth,
            used: 0,
            direct: 0,
            sent: 0,
            unsignalled: 0,
            last_get: None,
            unconfirmed: None,
            offset: 0,
            backlog: VecDeque::new(),
            values: Values::default(),
            loops: Loops::default(),
            brought: Vec::new(),
            bytes: 0,
            notes: Notes { remote: [0; NOTED], len: [0; NOTED] },
        }
    }

    /// A lane to a peer that has no queue pair: it never opens.
    pub fn left_out(peer: u32) -> Self {
        Self { failed: true, ..Self::new(std::ptr::null_mut(), peer, 0) }
    }

    /// The newest operation's number.
    pub fn issued(&self) -> u32 {
        self.newest as u32
    }

    /// What it was given.
    pub fn sent(&self) -> Sent {
        Sent { newest: Seq(self.issued()), bytes: self.bytes }
    }

    /// So many bytes more, of an operation that was taken.
    #[inline(always)]
    pub fn count(&mut self, bytes: u64) {
        self.bytes = self.bytes.wrapping_add(bytes);
    }

    /// The request of the next operation if that may go straight to the device.
    #[inline(always)]
    pub fn admits(&self) -> Option<u64> {
        // Never carries into the upper half: see `open`.
        let request = self.newest + 1;
        (request as u32 != self.stop).then_some(request)
    }

    /// That operation goes there now.
    #[inline(always)]
    pub fn admit(&mut self, request: u64) {
        self.newest = request;
    }

    /// What the upper half of this lane's requests is from here on.
    pub fn name(&mut self, request: u64) {
        self.newest = request + u64::from(self.issued());
    }

    fn set_issued(&mut self, number: u32) {
        self.newest = self.newest >> 32 << 32 | u64::from(number);
    }

    /// Whether operations go straight to the device.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Free entries of the send queue; `completed` is the newest operation that is complete.
    pub fn room(&self, completed: u32) -> u32 {
        let newest = if self.open { self.issued() } else { self.direct };
        let direct = (newest.wrapping_sub(completed) as i32).max(0) as u32;
        self.depth.saturating_sub(self.used).saturating_sub(2 * direct)
    }

    /// All operations that went straight to the device are among those up to `completed`: numbers wrap, so that is
    /// noted while it shows.
    pub fn settle(&mut self, completed: u32) {
        if !self.open && self.direct.wrapping_sub(completed) as i32 <= 0 {
            self.direct = completed;
        }
    }

    /// Operations go the long way from the one after `direct` on.
    pub fn shut(&mut self, direct: u32) {
        if self.open {
            self.open = false;
            self.direct = direct;
            self.sent = direct;
        }
        self.stop = self.issued().wrapping_add(1);
    }

    /// Operations go straight to the device, as many as there is room for; false when there is none. Nothing waits.
    /// Numbers wrap on the long way only, so that there the next request is the last one plus one.
    pub fn open(&mut self, completed: u32) -> bool {
        if !self.open {
            // Whatever is in the queue counts as if it had gone straight there: more than it takes, never less.
            self.direct = self.issued();
        }
        let operations = (self.room(completed) / 2).min(NOTED as u32).min(u32::MAX - self.issued());
        if operations == 0 {
            self.shut(self.issued());
            return false;
        }
        self.open = true;
        self.stop = self.issued().wrapping_add(operations).wrapping_add(1);
        true
    }

    /// Gives the next operation its number.
    pub fn number(&mut self) -> u32 {
        let number = self.issued().wrapping_add(1);
        self.set_issued(number);
        self.stop = number.wrapping_add(1);
        number
    }

    /// Lets numbers go on after `number`.
    pub fn renumber(&mut self, number: u32) {
        self.set_issued(number);
        (self.sent, self.direct) = (number, number);
        self.stop = number.wrapping_add(1);
        self.open = false;
    }

    /// Takes entries while shut.
    pub fn take(&mut self, slots: u32) {
        self.used += slots;
    }

    /// Gives them back.
    pub fn give(&mut self, slots: u32) {
        self.used = self.used.saturating_sub(slots);
    }

    /// Whether a get is in the send queue; `completed` is the newest operation that is complete.
    pub fn is_reading(&self, completed: u32) -> bool {
        self.last_get.is_some_and(|number| number.wrapping_sub(completed) as i32 > 0)
    }

    /// Whether the send queue is empty.
    pub fn is_drained(&self, completed: u32) -> bool {
        self.room(completed) == self.depth
    }

    /// Whether no completion is to come, so that no error is either.
    pub fn is_silent(&self, completed: u32) -> bool {
        self.room(completed) + self.unsignalled == self.depth
    }

    /// Notes what operation `number` is about: at most [`NOTED`] of them are in the send queue.
    #[inline(always)]
    pub fn note(&mut self, number: u32, logged: Logged) {
        let at = number as usize % NOTED;
        self.notes.remote[at] = logged.remote;
        self.notes.len[at] = logged.len;
    }

    /// What operation `number` is about.
    pub fn noted(&self, number: u32) -> Logged {
        let at = number as usize % NOTED;
        Logged { remote: self.notes.remote[at], len: self.notes.len[at] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By message nothing goes straight to the device, ever.
    #[test]
    fn there_is_room_after_half_of_the_numbers() {
        let mut lane = Lane::new(std::ptr::null_mut(), 3, 8);
        lane.shut(0);
        for completed in [1, 0x7fff_ffff, 0x8000_0001, 0xffff_ffff, 5] {
            lane.settle(completed);
            assert_eq!(lane.room(completed.wrapping_add(1)), 8, "{completed:#x}");
        }
    }

    #[test]
    fn operations_are_split_and_signalled_last() {
        let add = Signal { remote: 8, rkey: 1, value: 2, strong: true };
        let signal = Some(add);
        let op = |len, signal| Op { kind: EntryKind::Put, local: 0, lkey: 0, rkey: 0, remote: 0, len, signal };
        assert_eq!(op(0, None).next(0, 10), (WorkRequest::Data(0), true));
        assert_eq!(op(10, None).next(0, 10), (WorkRequest::Data(10), true));
        assert_eq!(op(11, None).next(0, 10), (WorkRequest::Data(10), false));
        assert_eq!(op(11, None).next(10, 10), (WorkRequest::Data(1), true));
        assert_eq!(op(11, signal).next(10, 10), (WorkRequest::Data(1), false));
        assert_eq!(op(11, signal).next(11, 10), (WorkRequest::Signal(add), true));
        assert_eq!(op(0, signal).next(0, 10), (WorkRequest::Signal(add), true));
    }

    #[test]
    fn an_open_lane_admits_half_its_entries_and_a_shut_one_none() {
        let mut lane = Lane::new(std::ptr::null_mut(), 3, 8);
        assert!(lane.admits().is_none(), "lanes start shut");
        lane.name(7 << 32);
        assert!(lane.open(0));
        for number in 1..=4 {
            assert_eq!(lane.admits(), Some(7 << 32 | number));
            lane.admit(7 << 32 | number);
        }
        assert!(lane.admits().is_none(), "eight entries hold four operations of two");
        assert!(!lane.open(0) && !lane.is_open());
        assert_eq!((lane.sent, lane.room(0), lane.room(3)), (4, 0, 6));
        assert_eq!(lane.number(), 5);
        assert!(lane.admits().is_none());
        lane.take(5);
        assert_eq!((lane.room(3), lane.room(4)), (1, 3));
        // Reopened with five entries still out: operation 5 counts once as those and once as two.
        assert!(!lane.open(4));
        lane.give(5);
        assert!(lane.open(4));
        assert_eq!(lane.admits(), Some(7 << 32 | 6));
        assert!(!lane.is_drained(4) && lane.is_drained(5));
    }

    #[test]
    fn numbers_wrap_on_the_long_way_and_leave_the_upper_half_alone() {
        let mut lane = Lane::new(std::ptr::null_mut(), 0, 8);
        lane.name(7 << 32);
        lane.renumber(u32::MAX - 1);
        assert!(lane.open(u32::MAX - 1));
        assert_eq!(lane.admits(), Some(7 << 32 | u64::from(u32::MAX)));
        lane.admit(7 << 32 | u64::from(u32::MAX));
        assert!(lane.admits().is_none());
        assert!(!lane.open(u32::MAX) && !lane.is_open(), "the next number is 0");
        assert_eq!(lane.number(), 0);
        assert!(lane.open(0));
        for number in [1, 2, 3, 4] {
            assert_eq!(lane.admits(), Some(7 << 32 | number));
            lane.admit(7 << 32 | number);
        }
        assert!(lane.admits().is_none());
    }
}
