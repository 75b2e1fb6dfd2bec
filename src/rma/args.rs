//! Operations as the tables' callers name them: offsets into windows that handles stand for, nothing checked yet.

use nccl_plugin_api::{OPT_AGGREGATE, SIGNAL_OP_ADD, SIGNAL_OP_INC};
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

/// An argument that came on the stack, read where it is used. Read at the start of a function, as compilers do, a dozen
/// of them take registers that must be saved for the caller first, which costs more than the operation's own work.
#[derive(Clone, Copy)]
pub struct Late<'a, T>(pub &'a T);

impl<T: Copy> Late<'_, T> {
    /// The argument.
    #[inline(always)]
    pub fn get(self) -> T {
        // SAFETY: from a reference; volatile, so that it stays where it is.
        unsafe { std::ptr::from_ref(self.0).read_volatile() }
    }
}

/// An iputSignal, put together only where the short way does not take it.
#[derive(Clone, Copy)]
pub struct LatePut<'a> {
    /// Context in the set.
    pub context: i32,
    /// Source: offset.
    pub src_off: u64,
    /// Source: window.
    pub src: *mut c_void,
    /// Bytes.
    pub size: usize,
    /// Destination: offset.
    pub dst_off: u64,
    /// Destination: window.
    pub dst: Late<'a, *mut c_void>,
    /// Peer.
    pub rank: Late<'a, u32>,
    /// Signal: offset.
    pub sig_off: Late<'a, u64>,
    /// Signal: window.
    pub sig: Late<'a, *mut c_void>,
    /// Signal: operand.
    pub value: Late<'a, u64>,
    /// Signal: `SIGNAL_OP_*`.
    pub op: Late<'a, u32>,
    /// Signal: ordered behind every earlier put.
    pub strong: bool,
    /// `OPT_*`.
    pub hints: Option<Late<'a, u32>>,
    /// Where the request goes.
    pub request: Late<'a, *mut *mut c_void>,
}

impl LatePut<'_> {
    /// All arguments, read.
    pub fn args(&self) -> PutArgs {
        let (src, dst) = (Place::new(self.src_off, self.src), Place::new(self.dst_off, self.dst.get()));
        let signal = Place::new(self.sig_off.get(), self.sig.get());
        PutArgs::new(self.context, src, self.size, dst, self.rank.get())
            .with_signal(signal, self.value.get(), self.op.get(), self.strong)
            .with_hints(self.hints.map_or(0, Late::get))
    }

    /// Whether more follows.
    #[inline(always)]
    pub fn more(&self) -> bool {
        self.hints.is_some_and(|flags| flags.get() & OPT_AGGREGATE != 0)
    }

    /// What to add; `None` for an operation that does not exist.
    #[inline(always)]
    pub fn addend(&self) -> Option<u64> {
        match self.op.get() {
            SIGNAL_OP_ADD => Some(self.value.get()),
            op => one(op),
        }
    }
}

/// The rest of [`LatePut::addend`], out of the way.
#[cold]
#[inline(always)]
fn one(op: u32) -> Option<u64> {
    (op == SIGNAL_OP_INC).then_some(1)
}
