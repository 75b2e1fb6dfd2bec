//! What a work request carries through the device and back in `wr_id`.
//!
//! An operation that goes straight to the device has its peer there and nothing else: it is the one after those that
//! are complete, because a queue pair completes in order and each such operation brings one completion. So the work
//! requests of a lane keep their `wr_id` for good. Bit 63 marks everything else, so that one look at the sign tells;
//! then bits 60..63 say what it is, 50..60 how many send queue entries its completion gives back, 48 that it is a part
//! of the next operation, 32..48 are the peer and 0..32 the number of an operation or a buffer.

/// Ranks that fit.
pub const MAX_PEERS: u32 = 1 << 16;
/// Send queue entries that one completion can give back.
pub const MAX_SLOTS: u32 = 0x3ff;

const SPECIAL: u64 = 1 << 63;
const FLUSH: u64 = SPECIAL | 1 << 60;
const CHAIN: u64 = SPECIAL | 2 << 60;
const PART: u64 = SPECIAL | 3 << 60;
const LOOP: u64 = SPECIAL | 4 << 60;
const ASIDE: u64 = SPECIAL | 5 << 60;
const MIDWAY: u64 = 1 << 48;
const KIND: u64 = 7 << 60 | SPECIAL;

/// A decoded `wr_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrId(pub u64);

impl WrId {
    /// Of the operation after those that are complete.
    pub const fn next(peer: u32) -> u64 {
        peer as u64
    }

    const fn numbered(peer: u32, number: u32) -> u64 {
        number as u64 | (peer as u64) << 32
    }

    /// Of a part of operation `number`, inside a chain.
    pub fn part(peer: u32, number: u32) -> u64 {
        Self::numbered(peer, number) | PART
    }

    /// Of the end of a chain: everything up to operation `number` is complete and `slots` entries are free. `midway`:
    /// the work request itself belongs to the operation after that one, and is not its last.
    pub fn chain(peer: u32, number: u32, slots: u32, midway: bool) -> u64 {
        debug_assert!(peer < MAX_PEERS && slots <= MAX_SLOTS);
        let midway = if midway { MIDWAY } else { 0 };
        Self::numbered(peer, number) | u64::from(slots) << 50 | midway | CHAIN
    }

    /// Of what is no operation: it tells a peer how many of its messages were taken, or finds out whether it is there.
    /// `slots` entries are free. No operation is complete by it: a flush, in another queue, may be already.
    pub fn aside(peer: u32, slots: u32) -> u64 {
        debug_assert!(peer < MAX_PEERS && slots <= MAX_SLOTS);
        Self::numbered(peer, 0) | u64::from(slots) << 50 | ASIDE
    }

    /// Of a receive into buffer `index`.
    pub fn receive(peer: u32, index: u32) -> u64 {
        Self::numbered(peer, index) | SPECIAL
    }

    /// Of the local read of flush `number` towards `peer`.
    pub fn flush(peer: u32, number: u32) -> u64 {
        Self::numbered(peer, number) | FLUSH
    }

    /// Of a compare-and-swap of atomic operation `number` towards `peer`.
    pub fn looped(peer: u32, number: u32) -> u64 {
        Self::numbered(peer, number) | LOOP
    }

    /// Whether it is the operation after those that are complete.
    #[inline(always)]
    pub fn is_next(self) -> bool {
        self.0 as i64 >= 0
    }

    /// Peer of such an operation, as an index.
    #[inline(always)]
    pub fn next_peer(self) -> usize {
        self.0 as usize
    }

    /// Peer.
    pub fn peer(self) -> u32 {
        let peer = if self.is_next() { self.0 } else { self.0 >> 32 };
        peer as u32 & (MAX_PEERS - 1)
    }

    /// Operation or buffer number; means nothing for the next operation.
    pub fn number(self) -> u32 {
        self.0 as u32
    }

    /// The operation that a work request with a number belongs to.
    pub fn operation(self) -> u32 {
        self.number().wrapping_add(u32::from(self.0 & MIDWAY != 0))
    }

    /// Entries given back, when it is the end of a chain.
    pub fn chain_slots(self) -> Option<u32> {
        (self.0 & KIND == CHAIN).then_some((self.0 >> 50) as u32 & MAX_SLOTS)
    }

    /// Entries given back, when it is no operation.
    pub fn aside_slots(self) -> Option<u32> {
        (self.0 & KIND == ASIDE).then_some((self.0 >> 50) as u32 & MAX_SLOTS)
    }

    /// Whether it is a part of an operation inside a chain.
    pub fn is_part(self) -> bool {
        self.0 & KIND == PART
    }

    /// Whether it is a flush.
    pub fn is_flush(self) -> bool {
        self.0 & KIND == FLUSH
    }

    /// Whether it is a step of an atomic operation.
    pub fn is_loop(self) -> bool {
        self.0 & KIND == LOOP
    }

    /// Whether it is a receive.
    pub fn is_receive(self) -> bool {
        self.0 & KIND == SPECIAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back() {
        let t = WrId(WrId::next(MAX_PEERS - 1));
        assert_eq!((t.next_peer(), t.peer()), (MAX_PEERS as usize - 1, MAX_PEERS - 1));
        assert!(t.is_next() && !t.is_part() && !t.is_flush() && !t.is_receive() && t.chain_slots().is_none());
        let t = WrId(WrId::part(MAX_PEERS - 1, u32::MAX));
        assert_eq!((t.peer(), t.number()), (MAX_PEERS - 1, u32::MAX));
        assert!(!t.is_next() && t.is_part() && !t.is_flush() && !t.is_receive() && t.chain_slots().is_none());
        let t = WrId(WrId::chain(MAX_PEERS - 1, u32::MAX, MAX_SLOTS, false));
        assert_eq!((t.peer(), t.number(), t.chain_slots()), (MAX_PEERS - 1, u32::MAX, Some(MAX_SLOTS)));
        let midway = WrId(WrId::chain(MAX_PEERS - 1, u32::MAX, MAX_SLOTS, true));
        assert_eq!((midway.peer(), midway.number(), midway.chain_slots()), (t.peer(), t.number(), t.chain_slots()));
        assert_eq!((t.operation(), midway.operation()), (u32::MAX, 0));
        assert!(!t.is_next() && !t.is_part() && !t.is_flush() && !t.is_receive());
        let t = WrId(WrId::receive(7, 31));
        assert!(!t.is_next() && !t.is_part() && !t.is_flush() && t.is_receive() && t.chain_slots().is_none());
        assert_eq!((t.peer(), t.number()), (7, 31));
        let t = WrId(WrId::flush(7, 31));
        assert!(!t.is_next() && !t.is_part() && t.is_flush() && !t.is_receive() && t.chain_slots().is_none());
        let t = WrId(WrId::looped(7, 31));
        assert!(t.is_loop() && !t.is_next() && !t.is_part() && !t.is_flush() && !t.is_receive());
        assert_eq!((t.peer(), t.number(), t.chain_slots(), t.aside_slots()), (7, 31, None, None));
        let t = WrId(WrId::aside(MAX_PEERS - 1, MAX_SLOTS));
        assert_eq!((t.peer(), t.aside_slots()), (MAX_PEERS - 1, Some(MAX_SLOTS)));
        assert!(t.chain_slots().is_none() && !t.is_next() && !t.is_part() && !t.is_flush() && !t.is_receive());
    }
}
