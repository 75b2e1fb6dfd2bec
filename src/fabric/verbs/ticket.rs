//! What a work request carries through the device and back in `wr_id`: the operation it completes, the peer, and how
//! many send queue entries its completion gives back.
//!
//! Bits 0..32 operation number, 32..52 peer, 52..64 entries. Entries 0 marks a receive (the number is then the
//! buffer's), 0xfff a local read that a flush waits for.

/// Ranks that fit.
pub const MAX_PEERS: u32 = 1 << 20;
/// Send queue entries that one completion can give back, and so the deepest send queue.
pub const MAX_SLOTS: u32 = 0xffe;
/// One entry, to be added to a `wr_id`.
pub const SLOT: u64 = 1 << 52;
/// The mark of a flush.
const FLUSH: u32 = 0xfff;

/// A decoded `wr_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

impl Ticket {
    /// Of a work request that completes operation `number` and gives `slots` entries back.
    #[inline(always)]
    pub fn send(peer: u32, number: u32, slots: u32) -> u64 {
        debug_assert!(peer < MAX_PEERS && slots >= 1 && slots <= MAX_SLOTS);
        u64::from(number) | u64::from(peer) << 32 | u64::from(slots) << 52
    }

    /// Of a receive into buffer `index`.
    pub fn receive(peer: u32, index: u32) -> u64 {
        u64::from(index) | u64::from(peer) << 32
    }

    /// Of the local read of flush `number` towards `peer`.
    pub fn flush(peer: u32, number: u32) -> u64 {
        u64::from(number) | u64::from(peer) << 32 | u64::from(FLUSH) << 52
    }

    /// Operation or buffer number.
    #[inline(always)]
    pub fn number(self) -> u32 {
        self.0 as u32
    }

    /// Peer.
    #[inline(always)]
    pub fn peer(self) -> usize {
        (self.0 >> 32) as usize & (MAX_PEERS as usize - 1)
    }

    /// Entries given back, when it is an ordinary send.
    #[inline(always)]
    pub fn slots(self) -> u32 {
        (self.0 >> 52) as u32
    }

    /// Whether it is an ordinary send.
    #[inline(always)]
    pub fn is_send(self) -> bool {
        self.slots().wrapping_sub(1) < MAX_SLOTS
    }

    /// Whether it is a flush.
    pub fn is_flush(self) -> bool {
        self.slots() == FLUSH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back() {
        let t = Ticket(Ticket::send(MAX_PEERS - 1, u32::MAX, MAX_SLOTS));
        assert_eq!((t.peer(), t.number(), t.slots()), (MAX_PEERS as usize - 1, u32::MAX, MAX_SLOTS));
        assert!(t.is_send() && !t.is_flush());
        let t = Ticket(Ticket::send(3, 9, 1) + SLOT);
        assert_eq!((t.peer(), t.number(), t.slots()), (3, 9, 2));
        let t = Ticket(Ticket::receive(7, 31));
        assert!(!t.is_send() && !t.is_flush());
        assert_eq!((t.peer(), t.number()), (7, 31));
        let t = Ticket(Ticket::flush(7, 31));
        assert!(!t.is_send() && t.is_flush());
    }
}
