//! What a work request carries through the device and back in `wr_id`.
//!
//! Bits 0..32 operation number, 32..48 peer; that is all for an operation of the fast path. Bit 63 marks everything
//! else, so that one look at the sign tells; then bits 60..63 say what it is and bits 50..60 how many send queue entries
//! its completion gives back.

/// Ranks that fit.
pub const MAX_PEERS: u32 = 1 << 16;
/// Send queue entries that one completion can give back.
pub const MAX_SLOTS: u32 = 0x3ff;

const SPECIAL: u64 = 1 << 63;
const FLUSH: u64 = SPECIAL | 1 << 60;
const CHAIN: u64 = SPECIAL | 2 << 60;
const KIND: u64 = 7 << 60 | SPECIAL;

/// A decoded `wr_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

impl Ticket {
    /// Of operation `number`.
    #[inline(always)]
    pub const fn operation(peer: u32, number: u32) -> u64 {
        number as u64 | (peer as u64) << 32
    }

    /// Of the end of a chain: everything up to operation `number` is complete and `slots` entries are free.
    pub fn chain(peer: u32, number: u32, slots: u32) -> u64 {
        debug_assert!(peer < MAX_PEERS && slots <= MAX_SLOTS);
        Self::operation(peer, number) | u64::from(slots) << 50 | CHAIN
    }

    /// Of a receive into buffer `index`.
    pub fn receive(peer: u32, index: u32) -> u64 {
        Self::operation(peer, index) | SPECIAL
    }

    /// Of the local read of flush `number` towards `peer`.
    pub fn flush(peer: u32, number: u32) -> u64 {
        Self::operation(peer, number) | FLUSH
    }

    /// Whether it is an operation of the fast path.
    #[inline(always)]
    pub fn is_operation(self) -> bool {
        self.0 as i64 >= 0
    }

    /// Operation or buffer number.
    #[inline(always)]
    pub fn number(self) -> u32 {
        self.0 as u32
    }

    /// Peer of an operation of the fast path.
    #[inline(always)]
    pub fn operation_peer(self) -> usize {
        (self.0 >> 32) as usize
    }

    /// Peer.
    pub fn peer(self) -> u32 {
        (self.0 >> 32) as u32 & (MAX_PEERS - 1)
    }

    /// Entries given back, when it is the end of a chain.
    pub fn chain_slots(self) -> Option<u32> {
        (self.0 & KIND == CHAIN).then_some((self.0 >> 50) as u32 & MAX_SLOTS)
    }

    /// Whether it is a flush.
    pub fn is_flush(self) -> bool {
        self.0 & KIND == FLUSH
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
        let t = Ticket(Ticket::operation(MAX_PEERS - 1, u32::MAX));
        assert_eq!((t.operation_peer(), t.peer(), t.number()), (MAX_PEERS as usize - 1, MAX_PEERS - 1, u32::MAX));
        assert!(t.is_operation() && !t.is_flush() && !t.is_receive() && t.chain_slots().is_none());
        let t = Ticket(Ticket::chain(MAX_PEERS - 1, u32::MAX, MAX_SLOTS));
        assert_eq!((t.peer(), t.number(), t.chain_slots()), (MAX_PEERS - 1, u32::MAX, Some(MAX_SLOTS)));
        assert!(!t.is_operation() && !t.is_flush() && !t.is_receive());
        let t = Ticket(Ticket::receive(7, 31));
        assert!(!t.is_operation() && !t.is_flush() && t.is_receive() && t.chain_slots().is_none());
        assert_eq!((t.peer(), t.number()), (7, 31));
        let t = Ticket(Ticket::flush(7, 31));
        assert!(!t.is_operation() && t.is_flush() && !t.is_receive() && t.chain_slots().is_none());
    }
}
