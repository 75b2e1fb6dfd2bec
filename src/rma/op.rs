//! Operations as the fabrics see them: checked, with addresses and keys instead of offsets and handles. One type goes
//! from the tables to the wire: [`Op`].

use super::atomic::Atomic;
use crate::memory::key::Key;

/// Bytes that an operation carries inside itself at most.
pub const VALUE_MAX: usize = 64;

/// An atomic 64-bit addition at a peer, visible there after what the contract says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Address of the 8-byte-aligned signal word in the peer's address space.
    pub remote: u64,
    /// The peer's key for the region of the word.
    pub rkey: u32,
    /// What to add (an increment is an addition of one).
    pub value: u64,
    /// Strong: visible only after every earlier put and signal of this context to this peer. Weak: only after the
    /// put it came with.
    pub strong: bool,
}

/// A write to a peer's memory, or a bare signal (`len` 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// Source address in this process.
    pub local: u64,
    /// This rank's key for the source region.
    pub lkey: u32,
    /// The peer's key for the destination region.
    pub rkey: u32,
    /// Destination address in the peer's address space.
    pub remote: u64,
    /// Bytes; 0 with a signal means the signal alone.
    pub len: u64,
    /// Added at the peer after the data.
    pub signal: Option<Signal>,
    /// A hint: more operations follow at once, ringing the doorbell may wait for them.
    pub more: bool,
}

/// A read of a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Get {
    /// Destination address in this process.
    pub local: u64,
    /// This rank's key for the destination region.
    pub lkey: u32,
    /// The peer's key for the source region.
    pub rkey: u32,
    /// Source address in the peer's address space.
    pub remote: u64,
    /// Bytes.
    pub len: u64,
    /// A hint: more operations follow at once.
    pub more: bool,
}

impl Put {
    /// Whether any end is GPU memory of the soft fabric.
    #[inline(always)]
    pub fn is_on_gpu(&self) -> bool {
        Key(self.lkey | self.rkey | self.signal.map_or(0, |s| s.rkey)).is_on_gpu()
    }
}

impl Get {
    /// Whether any end is GPU memory of the soft fabric.
    #[inline(always)]
    pub fn is_on_gpu(&self) -> bool {
        Key(self.lkey | self.rkey).is_on_gpu()
    }
}

/// Bytes inside an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    bytes: [u8; VALUE_MAX],
    len: u8,
}

impl Payload {
    /// A copy of `bytes`; `None`: they are more than [`VALUE_MAX`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut payload = Self { bytes: [0; VALUE_MAX], len: bytes.len() as u8 };
        payload.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(payload)
    }

    /// Them.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len).min(VALUE_MAX)]
    }
}

/// A write of bytes that the operation carries: no memory of the caller's is read once it is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// The bytes.
    pub payload: Payload,
    /// The peer's key for the destination region.
    pub rkey: u32,
    /// Destination address in the peer's address space.
    pub remote: u64,
    /// Added at the peer after the data.
    pub signal: Option<Signal>,
    /// A hint: more operations follow at once.
    pub more: bool,
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A write from the caller's memory, or a bare signal.
    Put(Put),
    /// A read into the caller's memory.
    Get(Get),
    /// A write of bytes in the operation.
    Value(Value),
    /// A change of a word, with what it held before.
    Atomic(Atomic),
}

// Queues hold operations by the thousand: a payload decides how large they are, nothing else.
const _: () = assert!(size_of::<Op>() <= size_of::<Value>() + 8);

/// What an operation moves, both ends by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// To the peer.
    Put(Put),
    /// From the peer.
    Get(Get),
    /// A word, changed where it is.
    Atomic(Atomic),
}

impl Op {
    /// What it moves. The source of a value is its payload inside `self`, in host memory of no window: the address is
    /// good as long as `self` stays where it is.
    #[inline(always)]
    pub fn transfer(&self) -> Transfer {
        match self {
            Self::Put(put) => Transfer::Put(*put),
            Self::Get(get) => Transfer::Get(*get),
            Self::Value(value) => {
                let (bytes, &Value { rkey, remote, signal, more, .. }) = (value.payload.bytes(), value);
                let (local, len) = (bytes.as_ptr() as u64, bytes.len() as u64);
                Transfer::Put(Put { local, lkey: 0, rkey, remote, len, signal, more })
            }
            Self::Atomic(atomic) => Transfer::Atomic(*atomic),
        }
    }

    /// Bytes that it moves.
    #[inline(always)]
    pub fn len(&self) -> u64 {
        match self {
            Self::Put(put) => put.len,
            Self::Get(get) => get.len,
            Self::Value(value) => value.payload.len.into(),
            Self::Atomic(atomic) => atomic.width.bytes(),
        }
    }

    /// Whether it moves none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it adds behind its data.
    #[inline(always)]
    pub fn signal(&self) -> Option<&Signal> {
        match self {
            Self::Put(put) => put.signal.as_ref(),
            Self::Get(_) | Self::Atomic(_) => None,
            Self::Value(value) => value.signal.as_ref(),
        }
    }

    /// Whether more operations follow at once.
    #[inline(always)]
    pub fn more(&self) -> bool {
        match self {
            Self::Put(put) => put.more,
            Self::Get(get) => get.more,
            Self::Value(value) => value.more,
            Self::Atomic(atomic) => atomic.more,
        }
    }

    /// Whether any end is GPU memory of the soft fabric.
    #[inline(always)]
    pub fn is_on_gpu(&self) -> bool {
        match self {
            Self::Put(put) => put.is_on_gpu(),
            Self::Get(get) => get.is_on_gpu(),
            Self::Value(value) => Key(value.rkey | value.signal.map_or(0, |s| s.rkey)).is_on_gpu(),
            Self::Atomic(atomic) => atomic.is_on_gpu(),
        }
    }
}

impl From<Put> for Op {
    #[inline(always)]
    fn from(put: Put) -> Self {
        Self::Put(put)
    }
}

impl From<Get> for Op {
    #[inline(always)]
    fn from(get: Get) -> Self {
        Self::Get(get)
    }
}

impl From<Atomic> for Op {
    fn from(atomic: Atomic) -> Self {
        Self::Atomic(atomic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_a_put_of_the_bytes_inside_it() {
        assert!(Payload::new(&[0; VALUE_MAX + 1]).is_none());
        let payload = Payload::new(&[7, 8, 9]).unwrap();
        let op = Op::Value(Value { payload, rkey: 5, remote: 64, signal: None, more: true });
        let Transfer::Put(put) = op.transfer() else { unreachable!() };
        assert_eq!((put.lkey, put.rkey, put.remote, put.len, put.more), (0, 5, 64, 3, true));
        let inside = std::ptr::from_ref(&op) as u64;
        assert!((inside..inside + size_of::<Op>() as u64 - 3).contains(&put.local));
        // SAFETY: inside `op`.
        assert_eq!(unsafe { std::slice::from_raw_parts(put.local as *const u8, 3) }, [7, 8, 9]);
        assert_eq!((op.len(), op.is_on_gpu(), op.more()), (3, false, true));
    }
}
