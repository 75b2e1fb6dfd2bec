//! Operations as the fabrics see them: checked, with addresses and keys instead of offsets and handles.

use crate::memory::gpu::GPU_BIT;

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
        (self.lkey | self.rkey | self.signal.map_or(0, |s| s.rkey)) & GPU_BIT != 0
    }
}

impl Get {
    /// Whether any end is GPU memory of the soft fabric.
    #[inline(always)]
    pub fn is_on_gpu(&self) -> bool {
        (self.lkey | self.rkey) & GPU_BIT != 0
    }
}
