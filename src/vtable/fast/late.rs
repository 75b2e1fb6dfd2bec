//! The arguments of `iputSignal`, read where they are used.

use crate::fabric::verbs::Again;
use crate::rma::args::{Place, PutArgs};
use nccl_plugin_api::{OPT_AGGREGATE, SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_void;

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
}

impl Again for LatePut<'_> {
    #[inline(always)]
    fn src(&self) -> u64 {
        self.src as u64
    }

    #[inline(always)]
    fn dst(&self) -> u64 {
        self.dst.get() as u64
    }

    #[inline(always)]
    fn sig(&self) -> u64 {
        self.sig.get() as u64
    }

    #[inline(always)]
    fn src_off(&self) -> u64 {
        self.src_off
    }

    #[inline(always)]
    fn dst_off(&self) -> u64 {
        self.dst_off
    }

    #[inline(always)]
    fn sig_off(&self) -> u64 {
        self.sig_off.get()
    }

    #[inline(always)]
    fn size(&self) -> u64 {
        self.size as u64
    }

    #[inline(always)]
    fn addend(&self) -> Option<u64> {
        match self.op.get() {
            SIGNAL_OP_ADD => Some(self.value.get()),
            op => one(op),
        }
    }

    #[inline(always)]
    unsafe fn store(&self, request: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { self.request.get().write(request) };
    }
}

/// The rest of `addend`, out of the way.
#[cold]
#[inline(always)]
fn one(op: u32) -> Option<u64> {
    (op == SIGNAL_OP_INC).then_some(1)
}
