//! A message in a ring: 24 bytes of header, then a payload padded to 8 bytes.
//!
//! The header is read once, into a value of ours, and checked; a peer that scribbles over it afterwards changes
//! nothing.

use crate::error::Kind as Fault;
use crate::fabric::soft::atomic::AtomicRequest;

/// Bytes of a header.
pub const HEADER: usize = 24;
/// Messages start at multiples of this.
pub const ALIGN: usize = 8;

/// What a message asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MessageKind {
    /// Nothing: the rest of the ring up to its end is unused.
    Pad = 1,
    /// Write the payload to `addr` of window `key`.
    Put = 2,
    /// Add the 8-byte payload to the signal at `addr` of window `key`.
    Signal = 3,
    /// Send what lies at `addr` of window `key`; the payload is a [`GetRequest`].
    Get = 4,
    /// All of a get's data came before this: `key` is the receiver's context, `aux` the operation's number there.
    GetDone = 5,
    /// The receiver refused an operation of its peer's context `key`, and touches nothing for that one any more;
    /// `aux` is the kind of fault ([`code_of`]), the payload a sentence.
    Refused = 6,
    /// Fetch bytes from the sender's GPU memory, which the receiver has mapped, to `addr` of window `key`; the payload
    /// is a [`PullRequest`].
    Pull = 7,
    /// All pulls and fences of the receiver's context `key` up to number `aux` are done: their sources may be reused.
    Pulled = 8,
    /// Bytes that a get asked for: `key` is the receiver's context, `aux` the operation's number there, `addr` where
    /// in the get they begin. Where they go the receiver knows itself, and nowhere if the context is gone.
    GetData = 9,
    /// Change the word at `addr` of window `key`; the payload is an [`AtomicRequest`]. Answered as a get of what the
    /// word held, by its data if that is wanted, then its end.
    Atomic = 10,
    /// Answer as a pull with number `addr` once all that came of the sender's context `aux` before is in place.
    Fence = 11,
}

/// A kind of fault on its way to a peer.
pub fn code_of(kind: Fault) -> u32 {
    match kind {
        Fault::PeerGone => 1,
        Fault::DeviceFailed => 2,
        Fault::Protocol => 3,
        Fault::LocalProtection => 4,
        Fault::System => 5,
        _ => 0,
    }
}

/// What it is at the peer: a number that nobody knows is a plain refusal.
pub fn kind_of(code: u32) -> Fault {
    match code {
        1 => Fault::PeerGone,
        2 => Fault::DeviceFailed,
        3 => Fault::Protocol,
        4 => Fault::LocalProtection,
        5 => Fault::System,
        _ => Fault::RemoteAccess,
    }
}

/// A header, checked for its own consistency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What to do.
    pub kind: MessageKind,
    /// Bytes of payload.
    pub len: u32,
    /// Window number at the receiver (or context number).
    pub key: u32,
    /// See the kinds; of puts, signals, pulls, fences and atomic operations the sender's context: those of one stay in
    /// order.
    pub aux: u32,
    /// Address at the receiver.
    pub addr: u64,
}

impl Header {
    /// The three words of a header.
    #[inline(always)]
    pub fn encode(self) -> [u64; 3] {
        [self.kind as u64 | u64::from(self.len) << 32, u64::from(self.key) | u64::from(self.aux) << 32, self.addr]
    }

    /// A header from whatever three words hold. The payload's fit in the ring is for the ring to check.
    #[inline(always)]
    pub fn parse(words: [u64; 3]) -> Option<Self> {
        let kind = match words[0] as u32 {
            1 => MessageKind::Pad,
            2 => MessageKind::Put,
            3 => MessageKind::Signal,
            4 => MessageKind::Get,
            5 => MessageKind::GetDone,
            6 => MessageKind::Refused,
            7 => MessageKind::Pull,
            8 => MessageKind::Pulled,
            9 => MessageKind::GetData,
            10 => MessageKind::Atomic,
            11 => MessageKind::Fence,
            _ => return None,
        };
        let len = (words[0] >> 32) as u32;
        let fits = match kind {
            MessageKind::Signal => len == 8,
            MessageKind::Get => len as usize == GetRequest::LEN,
            MessageKind::Pull => len as usize == PullRequest::LEN,
            MessageKind::Atomic => len as usize == AtomicRequest::LEN,
            _ => true,
        };
        if !fits {
            return None;
        }
        Some(Self { kind, len, key: words[1] as u32, aux: (words[1] >> 32) as u32, addr: words[2] })
    }
}

/// Bytes a message with `len` bytes of payload takes.
#[inline(always)]
pub const fn footprint(len: usize) -> usize {
    HEADER + len.div_ceil(ALIGN) * ALIGN
}

/// The payload of a [`MessageKind::Get`]: how much, and what the data belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetRequest {
    /// Bytes wanted.
    pub len: u64,
    /// The requester's context.
    pub context: u32,
    /// The operation's number there.
    pub seq: u32,
}

impl GetRequest {
    /// Bytes of the payload.
    pub const LEN: usize = 16;

    /// The payload.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..8].copy_from_slice(&self.len.to_le_bytes());
        b[8..12].copy_from_slice(&self.context.to_le_bytes());
        b[12..16].copy_from_slice(&self.seq.to_le_bytes());
        b
    }

    /// From a payload.
    pub fn parse(b: &[u8]) -> Option<Self> {
        let mut r = crate::sys::wire::Reader::new(b);
        Some(Self { len: r.u64()?, context: r.u32()?, seq: r.u32()? })
    }
}

/// The payload of a [`MessageKind::Pull`]: which bytes of the sender's, and the signal behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullRequest {
    /// Bytes.
    pub len: u64,
    /// Where they start, an address in the sender's window.
    pub from: u64,
    /// Number of that window.
    pub window: u32,
    /// Number of this pull among those of the sender's context.
    pub number: u32,
    /// Key, address and value of a signal behind the bytes.
    pub signal: Option<(u32, u64, u64)>,
}

impl PullRequest {
    /// Bytes of the payload.
    pub const LEN: usize = 48;

    /// The payload.
    #[inline]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let (key, at, value) = self.signal.unwrap_or((0, 0, 0));
        let words = [
            self.len,
            self.from,
            u64::from(self.window) | u64::from(self.number) << 32,
            u64::from(key) | u64::from(self.signal.is_some()) << 32,
            at,
            value,
        ];
        let mut b = [0; Self::LEN];
        for (place, word) in b.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        b
    }

    /// From a payload.
    #[inline]
    pub fn parse(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = crate::sys::wire::Reader::new(b);
        let (len, from, window, number) = (r.u64()?, r.u64()?, r.u32()?, r.u32()?);
        let (key, has_signal, at, value) = (r.u32()?, r.u32()?, r.u64()?, r.u64()?);
        let signal = match has_signal {
            0 => None,
            1 => Some((key, at, value)),
            _ => return None,
        };
        Some(Self { len, from, window, number, signal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_words_parse_or_not_without_harm(words: [u64; 3]) {
            if let Some(h) = Header::parse(words) {
                prop_assert_eq!(Header::parse(h.encode()), Some(h));
            }
        }

        #[test]
        fn get_requests_round_trip(len: u64, context: u32, seq: u32) {
            let g = GetRequest { len, context, seq };
            prop_assert_eq!(GetRequest::parse(&g.encode()), Some(g));
        }
    }

    proptest! {
        #[test]
        fn pulls_round_trip(len: u64, from: u64, window: u32, number: u32, signal: Option<(u32, u64, u64)>) {
            let p = PullRequest { len, from, window, number, signal };
            prop_assert_eq!(PullRequest::parse(&p.encode()), Some(p));
        }
    }

    #[test]
    fn footprints() {
        assert_eq!([0, 1, 8, 9].map(footprint), [24, 32, 32, 40]);
    }
}
