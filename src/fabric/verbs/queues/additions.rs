//! Additions to one word, one behind another, leave as one.
//!
//! A put with its signal is two work requests, and the atomic one is what devices do slowest: some carry out only a
//! few at a time. Where more such puts wait for the same peer and the same word, the values are added up here and one
//! request behind the data of all of them adds the sum. What a signal promises holds: it is there when the data of its
//! put and of everything before it is. It may come later than it could, by the time that the data of those behind it
//! takes, which [`GATHERED`] bounds. Signals of different words keep their order, as only neighbours are joined.

use super::super::lane::{EntryKind, Lane};
use super::chain::Stand;

/// Bytes of the puts behind a signal that it may wait for: 8 KiB take a link of 200 Gbit/s a third of a microsecond.
pub const GATHERED: u64 = 8 << 10;

/// Additions that have no work request yet: the one of a later operation takes them along.
pub struct Joined {
    /// What they add up to.
    pub value: u64,
    /// Bytes of data that came behind the first of them.
    bytes: u64,
    /// Where the lane stands if the device takes none of what follows: at the first of them. From there all is posted
    /// again. What was written already is written twice, before its signal, with the bytes it has until it is complete.
    pub stand: Stand,
}

/// Room for what follows in the chain that is being built.
#[derive(Clone, Copy)]
pub struct Room {
    /// Work requests.
    pub requests: usize,
    /// Bytes that a work request carries at most.
    pub max_msg: u64,
    /// The remote key of the only window that it may write, if there is one.
    pub window: Option<u32>,
}

impl Joined {
    /// The signal of the operation at `stand`, if that of the next operation can take it along.
    pub fn with_next(before: Option<&Self>, lane: &Lane, stand: Stand, room: Room) -> Option<Self> {
        let at = stand.ops as usize;
        let (op, next) = (lane.backlog.get(at)?, lane.backlog.get(at + 1)?);
        let (signal, its) = (op.signal?, next.signal?);
        let are_puts = [op, next].iter().all(|op| matches!(op.kind, EntryKind::Put | EntryKind::Value));
        let bytes = before.map_or(0, |joined| joined.bytes) + next.len;
        let requests = 1 + usize::from(next.len > 0);
        let may_write = next.len == 0 || room.window.is_none_or(|rkey| rkey == next.rkey);
        let has_room = requests <= room.requests && next.len <= room.max_msg && may_write;
        let is_same = (signal.remote, signal.rkey) == (its.remote, its.rkey);
        (is_same && are_puts && bytes <= GATHERED && has_room).then(|| Self {
            value: before.map_or(0, |joined| joined.value).wrapping_add(signal.value),
            bytes,
            stand: before.map_or(stand, |joined| joined.stand),
        })
    }
}
