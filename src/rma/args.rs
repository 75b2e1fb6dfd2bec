//! Operations as the tables' callers name them: offsets into windows that handles stand for, nothing checked yet.

use super::atomic::Change;
use nccl_plugin_api::OPT_AGGREGATE;
use std::ffi::c_void;

/// A range of a window, as calls name it.
#[derive(Clone, Copy)]
pub struct Place {
    /// Bytes from the window's start.
    pub offset: u64,
    /// The window's handle.
    pub window: *mut c_void,
}

impl Place {
    /// `offset` bytes behind the start of `window`.
    #[inline(always)]
    pub fn new(offset: u64, window: *mut c_void) -> Self {
        Self { offset, window }
    }
}

/// The signal half of an iputSignal.
#[derive(Clone, Copy)]
pub struct SignalArgs {
    /// Where the signal is.
    pub place: Place,
    /// Its operand.
    pub value: u64,
    /// `SIGNAL_OP_*`.
    pub op: u32,
    /// Ordered behind every earlier put.
    pub strong: bool,
}

/// An iput or iputSignal.
#[derive(Clone, Copy)]
pub struct PutArgs {
    /// Context in the set.
    pub context: i32,
    /// Source.
    pub src: Place,
    /// Bytes.
    pub size: usize,
    /// Destination.
    pub dst: Place,
    /// Peer.
    pub rank: u32,
    /// What to add afterwards.
    pub signal: Option<SignalArgs>,
    /// More follows.
    pub more: bool,
}

impl PutArgs {
    /// An iput without hints.
    #[inline(always)]
    pub fn new(context: i32, src: Place, size: usize, dst: Place, rank: u32) -> Self {
        Self { context, src, size, dst, rank, signal: None, more: false }
    }

    /// The iputSignal of it.
    #[inline(always)]
    pub fn with_signal(self, place: Place, value: u64, op: u32, strong: bool) -> Self {
        Self { signal: Some(SignalArgs { place, value, op, strong }), ..self }
    }

    /// With `OPT_*` hints.
    #[inline(always)]
    pub fn with_hints(self, flags: u32) -> Self {
        Self { more: flags & OPT_AGGREGATE != 0, ..self }
    }
}

/// An iget.
#[derive(Clone, Copy)]
pub struct GetArgs {
    /// Context in the set.
    pub context: i32,
    /// Source, at the peer.
    pub remote: Place,
    /// Bytes.
    pub size: usize,
    /// Destination, here.
    pub local: Place,
    /// Peer.
    pub rank: u32,
    /// More follows.
    pub more: bool,
}

impl GetArgs {
    /// An iget without hints.
    #[inline(always)]
    pub fn new(context: i32, remote: Place, size: usize, local: Place, rank: u32) -> Self {
        Self { context, remote, size, local, rank, more: false }
    }

    /// With `OPT_*` hints.
    #[inline(always)]
    pub fn with_hints(self, flags: u32) -> Self {
        Self { more: flags & OPT_AGGREGATE != 0, ..self }
    }
}

/// An atomic operation. No table has one: the engines that execute what kernels ask for do.
#[derive(Clone, Copy)]
pub struct AtomicArgs {
    /// Context in the set.
    pub context: i32,
    /// What becomes of the word.
    pub change: Change,
    /// Bytes of the word, as they were asked for.
    pub width: u32,
    /// The word, at the peer.
    pub remote: Place,
    /// Where what it held goes, here; `None`: nowhere.
    pub fetched: Option<Place>,
    /// Peer.
    pub rank: u32,
    /// More follows.
    pub more: bool,
}
