//! Why an operation is refused: a value, from which the log line is made, and whatever else has to tell its caller.
//!
//! [`check`](super::check) only answers whether all is good. When it is not, the cold functions here go through the
//! same arguments again.

use super::args::{AtomicArgs, GetArgs, PutArgs, SignalArgs};
use super::atomic::{Atomics, Width};
use super::check::{around, inside};
use crate::error::{Error, Kind};
use crate::memory::window::Window;
use crate::sys::handles;
use nccl_plugin_api::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_void;
use std::sync::Arc;

/// Why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The communicator of the contexts is closed.
    Closed,
    /// The set has no such context.
    NoContext {
        /// What was asked for.
        context: i32,
        /// How many there are.
        contexts: u32,
    },
    /// The communicator has no such rank.
    NoRank {
        /// What was asked for.
        rank: u32,
        /// How many there are.
        nranks: u32,
    },
    /// A window's handle is NULL.
    NullWindow {
        /// The argument.
        name: &'static str,
    },
    /// A handle stands for no window, or for none any more.
    NoWindow {
        /// The argument.
        name: &'static str,
        /// Its value.
        handle: usize,
    },
    /// A window belongs to another communicator.
    ForeignWindow {
        /// The argument.
        name: &'static str,
        /// Its value.
        handle: usize,
    },
    /// A range ends past its window.
    OutOfRange {
        /// The argument.
        name: &'static str,
        /// Its value.
        offset: u64,
        /// Bytes of the range.
        size: u64,
        /// Whose window.
        end: End,
        /// Bytes of the window.
        len: u64,
    },
    /// There is no such operation on signals.
    NoSignalOp(u32),
    /// The signal's address is no multiple of 8.
    UnalignedSignal {
        /// Its offset.
        offset: u64,
    },
    /// The context carries out no atomic operations.
    NoAtomics,
    /// No atomic operation has a word of so many bytes.
    NoAtomicWidth(u32),
    /// An operand of an atomic operation has bits that its word has not.
    WideOperand {
        /// Bytes of the word.
        width: u32,
    },
    /// A word of an atomic operation is not at a multiple of its width.
    UnalignedAtomic {
        /// The argument.
        name: &'static str,
        /// Its value.
        offset: u64,
        /// Bytes of the word.
        width: u32,
    },
    /// The 8 bytes around a word of an atomic operation are not all in its window, and the device needs them.
    PartialWord {
        /// The word's offset.
        offset: u64,
    },
    /// A request names no operation of this communicator.
    NoRequest(usize),
    /// All arguments look right: a fault of this library.
    Unexplained,
}

/// Which window a range is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This rank's, the source of a put.
    Source,
    /// This rank's, the destination of a get.
    Local,
    /// A peer's.
    Peer(u32),
    /// A peer's, of a signal.
    PeersSignal(u32),
}

impl End {
    fn words(self) -> String {
        match self {
            Self::Source => "the source window".into(),
            Self::Local => "the local window".into(),
            Self::Peer(rank) => format!("the window of rank {rank}"),
            Self::PeersSignal(rank) => format!("the signal window of rank {rank}"),
        }
    }
}

impl Refusal {
    /// What kind of fault it is.
    pub fn kind(self) -> Kind {
        match self {
            Self::Closed | Self::NoAtomics => Kind::Usage,
            Self::OutOfRange { end: End::Source | End::Local, .. } => Kind::LocalProtection,
            Self::OutOfRange { .. } => Kind::RemoteAccess,
            Self::Unexplained => Kind::Internal,
            _ => Kind::Argument,
        }
    }

    #[cold]
    fn words(self) -> String {
        match self {
            Self::Closed => {
                "the communicator of this context is closed; destroy the context, make no more calls with it".into()
            }
            Self::NoContext { context, contexts } => {
                format!("context = {context}, but this set has contexts 0 to {}", contexts.saturating_sub(1))
            }
            Self::NoRank { rank, nranks } => {
                format!("rank = {rank}, but the communicator has ranks 0 to {}", nranks.saturating_sub(1))
            }
            Self::NullWindow { name } => {
                format!("{name} is NULL; register the memory with regMrSym and pass its mhandle")
            }
            Self::NoWindow { name, handle } => format!(
                "{name} = {handle:#x} is no memory handle, or was deregistered; pass a live mhandle from regMrSym"
            ),
            Self::ForeignWindow { name, handle } => format!(
                "{name} = {handle:#x} was registered with another communicator; register the memory with this one"
            ),
            Self::OutOfRange { name, offset, size, end, len } => {
                let last = offset.checked_add(size).map_or("more than 2^64".to_string(), |e| e.to_string());
                format!(
                    "{name} = {offset} with size {size} ends at byte {last}, past {}, which has {len} bytes; stay \
                     inside the registered window",
                    end.words()
                )
            }
            Self::NoSignalOp(op) => format!("signalOp = {op}, but only 1 (increment) and 2 (add) exist"),
            Self::UnalignedSignal { offset } => format!(
                "signalOff = {offset} makes the signal's address no multiple of 8; signals are 8-byte aligned words"
            ),
            Self::NoAtomics => "an atomic operation was asked for, but this context's devices have no remote atomics; \
                                use devices that have (`oxygin doctor` says which), or OXYGIN_FABRIC=soft"
                .into(),
            Self::NoAtomicWidth(width) => format!("width = {width}, but atomic operations have words of 4 or 8 bytes"),
            Self::WideOperand { width } => format!(
                "an operand of an atomic operation has bits above the {width} bytes of its word; clear them, or use a \
                 wider word"
            ),
            Self::UnalignedAtomic { name, offset, width } => format!(
                "{name} = {offset} makes the word's address no multiple of {width}; words of atomic operations lie at \
                 multiples of their width"
            ),
            Self::PartialWord { offset } => format!(
                "remoteOff = {offset} names 4 bytes of an aligned word of 8 that is not all inside the window, which \
                 these devices change as a whole; register whole words"
            ),
            Self::NoRequest(request) => format!(
                "request = {request:#x} is not one that this communicator returned, or its context is destroyed; pass \
                 what iput, iputSignal, iget or iflush stored, as long as its context lives"
            ),
            Self::Unexplained => "an operation was refused, but all its arguments look right".into(),
        }
    }
}

impl From<Refusal> for Error {
    #[cold]
    fn from(refusal: Refusal) -> Self {
        let error = match refusal {
            Refusal::Closed | Refusal::NoAtomics => Error::usage(refusal.words()),
            Refusal::Unexplained => Error::internal(refusal.words()),
            _ => Error::argument(refusal.words()),
        };
        error.of_kind(refusal.kind())
    }
}

/// What the operations of a set of contexts are held against.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Number of the communicator.
    pub coll: u64,
    /// Contexts that take operations; 0: the set is closed.
    pub contexts: u32,
    /// Ranks of the communicator.
    pub nranks: u32,
}

impl Target {
    /// Whether there are such a context and such a rank.
    pub fn check(&self, context: i32, rank: u32) -> Result<(), Refusal> {
        if self.contexts == 0 {
            return Err(Refusal::Closed);
        }
        if context as u32 >= self.contexts {
            return Err(Refusal::NoContext { context, contexts: self.contexts });
        }
        if rank >= self.nranks {
            return Err(Refusal::NoRank { rank, nranks: self.nranks });
        }
        Ok(())
    }

    /// A window of the communicator.
    #[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
    pub fn window(&self, name: &'static str, handle: *mut c_void) -> Result<Arc<Window>, Refusal> {
        if handle.is_null() {
            return Err(Refusal::NullWindow { name });
        }
        match handles::clone::<Window>(handle) {
            None => Err(Refusal::NoWindow { name, handle: handle as usize }),
            Some(window) if window.coll != self.coll => Err(Refusal::ForeignWindow { name, handle: handle as usize }),
            Some(window) => Ok(window),
        }
    }
}

fn check_range(name: &'static str, offset: u64, size: u64, end: End, len: u64) -> Result<(), Refusal> {
    if inside(offset, size, len) {
        Ok(())
    } else {
        Err(Refusal::OutOfRange { name, offset, size, end, len })
    }
}

/// A range of a window at a rank that exists; returns where it begins there.
fn check_remote(
    name: &'static str,
    window: &Window,
    offset: u64,
    size: u64,
    end: End,
    rank: u32,
) -> Result<u64, Refusal> {
    let nranks = window.remote().len() as u32;
    let remote = window.remote().get(rank as usize).ok_or(Refusal::NoRank { rank, nranks })?.load();
    check_range(name, offset, size, end, remote.len)?;
    Ok(remote.base.wrapping_add(offset))
}

/// What is wrong with a put's signal.
fn check_signal(target: &Target, s: &SignalArgs, rank: u32) -> Result<(), Refusal> {
    if s.op != SIGNAL_OP_INC && s.op != SIGNAL_OP_ADD {
        return Err(Refusal::NoSignalOp(s.op));
    }
    let window = target.window("signalMhandle", s.place.window)?;
    let at = check_remote("signalOff", &window, s.place.offset, 8, End::PeersSignal(rank), rank)?;
    match at & 7 {
        0 => Ok(()),
        _ => Err(Refusal::UnalignedSignal { offset: s.place.offset }),
    }
}

/// What is wrong with a put.
#[cold]
#[inline(never)]
pub fn put(target: &Target, a: &PutArgs) -> Refusal {
    put_from(target, a, true)
}

/// What is wrong with a put of a value, which has no source window.
#[cold]
#[inline(never)]
pub fn value(target: &Target, a: &PutArgs) -> Refusal {
    put_from(target, a, false)
}

fn put_from(target: &Target, a: &PutArgs, has_source: bool) -> Refusal {
    let find = || -> Result<(), Refusal> {
        target.check(a.context, a.rank)?;
        let size = a.size as u64;
        if let Some(s) = &a.signal {
            check_signal(target, s, a.rank)?;
            if a.size == 0 {
                return Ok(());
            }
        }
        if has_source {
            let src = target.window("srcMhandle", a.src.window)?;
            check_range("srcOff", a.src.offset, size, End::Source, src.len())?;
        }
        let dst = target.window("dstMhandle", a.dst.window)?;
        check_remote("dstOff", &dst, a.dst.offset, size, End::Peer(a.rank), a.rank).map(drop)
    };
    find().err().unwrap_or(Refusal::Unexplained)
}

/// What is wrong with a get.
#[cold]
#[inline(never)]
pub fn get(target: &Target, a: &GetArgs) -> Refusal {
    let find = || -> Result<(), Refusal> {
        target.check(a.context, a.rank)?;
        let size = a.size as u64;
        let remote = target.window("remoteMhandle", a.remote.window)?;
        let local = target.window("localMhandle", a.local.window)?;
        check_remote("remoteOff", &remote, a.remote.offset, size, End::Peer(a.rank), a.rank)?;
        check_range("localOff", a.local.offset, size, End::Local, local.len())
    };
    find().err().unwrap_or(Refusal::Unexplained)
}

/// What is wrong with an atomic operation on a context that carries out `atomics`.
#[cold]
pub fn atomic(target: &Target, atomics: &Atomics, a: &AtomicArgs) -> Refusal {
    let find = || -> Result<(), Refusal> {
        target.check(a.context, a.rank)?;
        if !atomics.any() {
            return Err(Refusal::NoAtomics);
        }
        let width = Width::of(a.width).ok_or(Refusal::NoAtomicWidth(a.width))?;
        if !a.change.fits(width) {
            return Err(Refusal::WideOperand { width: a.width });
        }
        let bytes = width.bytes();
        let check_aligned = |name, offset, at: u64| match at % bytes {
            0 => Ok(()),
            _ => Err(Refusal::UnalignedAtomic { name, offset, width: a.width }),
        };
        let remote = target.window("remoteMhandle", a.remote.window)?;
        let at = check_remote("remoteOff", &remote, a.remote.offset, bytes, End::Peer(a.rank), a.rank)?;
        check_aligned("remoteOff", a.remote.offset, at)?;
        let ((begins, ends), base) = (around(at, bytes, atomics), at - a.remote.offset);
        let len = remote.remote().get(a.rank as usize).map_or(0, |r| r.load().len);
        if begins < base || ends - base > len {
            return Err(Refusal::PartialWord { offset: a.remote.offset });
        }
        let Some(place) = &a.fetched else { return Ok(()) };
        let local = target.window("localMhandle", place.window)?;
        check_range("localOff", place.offset, bytes, End::Local, local.len())?;
        check_aligned("localOff", place.offset, local.base().wrapping_add(place.offset))
    };
    find().err().unwrap_or(Refusal::Unexplained)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rma::args::Place;
    use nccl_plugin_api::NcclResult;

    const NOWHERE: Place = Place { offset: 0, window: std::ptr::null_mut() };
    const TARGET: Target = Target { coll: 1, contexts: 4, nranks: 2 };

    #[test]
    fn the_first_thing_that_is_wrong_is_the_reason() {
        let put_to = |context, rank| PutArgs::new(context, NOWHERE, 8, NOWHERE, rank);
        assert_eq!(put(&Target { contexts: 0, ..TARGET }, &put_to(9, 9)), Refusal::Closed);
        assert_eq!(put(&TARGET, &put_to(4, 9)), Refusal::NoContext { context: 4, contexts: 4 });
        assert_eq!(put(&TARGET, &put_to(-1, 0)), Refusal::NoContext { context: -1, contexts: 4 });
        assert_eq!(put(&TARGET, &put_to(3, 2)), Refusal::NoRank { rank: 2, nranks: 2 });
        assert_eq!(put(&TARGET, &put_to(3, 1)), Refusal::NullWindow { name: "srcMhandle" });
        let signalled = put_to(0, 0).with_signal(NOWHERE, 1, 7, true);
        assert_eq!(put(&TARGET, &signalled), Refusal::NoSignalOp(7));
    }

    #[test]
    fn ranges_say_whose_protection_they_would_break() {
        let range = |end| Refusal::OutOfRange { name: "x", offset: 8, size: 8, end, len: 8 };
        assert_eq!(range(End::Source).kind(), Kind::LocalProtection);
        assert_eq!(range(End::Local).kind(), Kind::LocalProtection);
        assert_eq!(range(End::Peer(1)).kind(), Kind::RemoteAccess);
        assert_eq!(range(End::PeersSignal(1)).kind(), Kind::RemoteAccess);
        for end in [End::Source, End::Peer(1)] {
            assert_eq!(Error::from(range(end)).code(), NcclResult::INVALID_ARGUMENT, "the caller gave the range");
        }
    }
}
