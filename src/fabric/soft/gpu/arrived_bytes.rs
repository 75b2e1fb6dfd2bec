//! Where the bytes of an operation's end in host memory are, and who keeps them.

use super::PinnedBuffer;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Who keeps the bytes of an end in host memory.
pub enum HostBytes {
    /// The caller, until local completion.
    Caller,
    /// Somebody else, in pinned memory.
    Pinned(PinnedPlace),
    /// The operation: they arrived for GPU memory.
    Arrived(ArrivedBytes),
}

impl HostBytes {
    /// Where the GPU finds them, if they are pinned.
    pub fn pinned(&self) -> Option<u64> {
        match self {
            Self::Caller | Self::Arrived(ArrivedBytes::Boxed(_)) => None,
            Self::Pinned(place) => Some(place.at),
            Self::Arrived(ArrivedBytes::Pinned(bytes)) => Some(bytes.buffer.on_gpu()),
        }
    }

    /// Gives them up although the GPU may still be at them: memory that it reads or writes is never freed.
    pub fn abandon(self) {
        match self {
            Self::Arrived(ArrivedBytes::Pinned(bytes)) => bytes.buffer.abandon(),
            Self::Pinned(place) => place.is_abandoned.store(true, Ordering::Release),
            Self::Caller | Self::Arrived(ArrivedBytes::Boxed(_)) => {}
        }
    }
}

/// Pinned memory of somebody who waits for the operation.
pub struct PinnedPlace {
    /// Where the GPU finds it.
    pub at: u64,
    /// Set where the GPU may be at it when the operation is over.
    pub is_abandoned: Arc<AtomicBool>,
}

/// Bytes that arrived for GPU memory, all of them.
pub enum ArrivedBytes {
    /// In plain memory: the engine copies them to its pinned memory first.
    Boxed(Box<[u8]>),
    /// In a pinned buffer, which the GPU reads where it is. By a pointer, since operations are moved about a lot.
    Pinned(Box<PinnedBytes>),
}

/// The first bytes of a pinned buffer.
pub struct PinnedBytes {
    /// The buffer.
    pub buffer: PinnedBuffer,
    /// How many, not more than it holds.
    pub len: usize,
}

impl ArrivedBytes {
    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Boxed(bytes) => bytes.len(),
            Self::Pinned(bytes) => bytes.len,
        }
    }

    /// Where the CPU finds them; it writes them before they are an operation's.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Self::Boxed(bytes) => bytes.as_mut_ptr(),
            Self::Pinned(bytes) => bytes.buffer.host(),
        }
    }
}
