//! What a descriptor means: an operation on checked windows, or why none.

use crate::proxy::ring::Finish;
use crate::rma::args::{GetArgs, Place, PutArgs, SignalArgs};
use crate::rma::check::{self, Live};
use crate::rma::op::{Op, Payload};
use crate::rma::refusal::{self, Refusal, Target};
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;

/// What the descriptors of a context are held against.
#[derive(Debug)]
pub struct Terms {
    /// How they look.
    pub form: Form,
    /// The communicator, its contexts and ranks.
    pub target: Target,
    /// The context's number in its set.
    pub context: u32,
    /// Counters of the context.
    pub counters: u32,
    /// Signals of the context.
    pub signals: u32,
    /// The window of all contexts' signals, as a handle.
    pub signal_window: usize,
    /// Goes up when a window of the communicator ends.
    pub ended: Arc<AtomicU64>,
}

/// What one means.
#[derive(Debug, PartialEq, Eq)]
pub enum Meaning {
    /// This operation, and a counter that goes up when it is complete.
    Op(Op, Finish),
    /// No bytes and no signal: only a counter.
    Nothing(Finish),
    /// A flush of what gets have brought.
    Flush,
}

/// What is wrong with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A version that is newer than this library, or none.
    Version(u8),
    /// Bits that do not go together.
    Op(u16),
    /// An inline value of so many bytes.
    Inline(u64),
    /// A counter that the context does not have.
    Counter(u32, u32),
    /// A signal that the context does not have.
    Signal(u32, u32),
    /// Its windows or ranges.
    Refused(Refusal),
}

/// Bytes of an inline value at most: two words of the descriptor carry it.
const INLINE_MAX: u64 = 8;

fn window(handle: u64) -> *mut c_void {
    handle as usize as *mut c_void
}

/// What `d` asks for, towards `peer`, which is one of the target's ranks.
#[inline(always)]
pub fn meaning(d: &Descriptor, terms: &Terms, peer: u32) -> Result<Meaning, Fault> {
    let op = d.op();
    if !terms.form.has_version(d.version()) {
        return Err(Fault::Version(d.version()));
    }
    if op & OP_PUT == 0 {
        return other(d, terms, peer);
    }
    let signal = signal_op(op)?;
    if op & !(OP_PUT | OP_INLINE | OP_COUNTER | OP_SIGNAL_INC | OP_SIGNAL_ADD) != 0 {
        return Err(Fault::Op(op));
    }
    let mut finish = Finish::NONE;
    if op & OP_COUNTER != 0 {
        if d.counter() >= terms.counters {
            return Err(Fault::Counter(d.counter(), terms.counters));
        }
        finish = Finish(d.counter() + 1);
    }
    let dst = Place::new(d.second_offset(), window(d.second_handle()));
    let mut put = PutArgs::new(terms.context as i32, Place::new(0, window(0)), d.size() as usize, dst, peer);
    if let Some(op) = signal {
        if d.signal() >= terms.signals {
            return Err(Fault::Signal(d.signal(), terms.signals));
        }
        let number = u64::from(terms.context) * u64::from(terms.signals) + u64::from(d.signal());
        put = put.with_signal(
            Place::new(8 * number, terms.signal_window as *mut c_void),
            d.signal_value(),
            op,
            d.is_strong(),
        );
    }
    if op & OP_INLINE != 0 {
        return inline(d, terms, &put, finish);
    }
    put.src = Place::new(d.first_offset(), window(d.first_handle()));
    if put.size == 0 && signal.is_none() && d.first_handle() == 0 {
        return Ok(Meaning::Nothing(finish));
    }
    // SAFETY: who drains a set's queues keeps the set; `peer` is a rank.
    unsafe {
        match check::put(&Live(terms.target.coll), &put) {
            Some(checked) => Ok(Meaning::Op(Op::Put(checked), finish)),
            None => Err(Fault::Refused(refusal::put(&terms.target, &put))),
        }
    }
}

/// `SIGNAL_OP_*` for the bits of an operation.
#[inline(always)]
fn signal_op(op: u16) -> Result<Option<u32>, Fault> {
    match op & (OP_SIGNAL_INC | OP_SIGNAL_ADD) {
        0 => Ok(None),
        OP_SIGNAL_INC => Ok(Some(SIGNAL_OP_INC)),
        OP_SIGNAL_ADD => Ok(Some(SIGNAL_OP_ADD)),
        _ => Err(Fault::Op(op)),
    }
}

/// A put of a value in the descriptor.
#[inline]
fn inline(d: &Descriptor, terms: &Terms, put: &PutArgs, finish: Finish) -> Result<Meaning, Fault> {
    let size = d.size();
    let value = d.inline_value().to_le_bytes();
    let payload = (1..=INLINE_MAX).contains(&size).then(|| Payload::new(&value[..size as usize])).flatten();
    let Some(payload) = payload else { return Err(Fault::Inline(size)) };
    // SAFETY: who drains a set's queues keeps the set; `peer` is a rank.
    unsafe {
        match check::value(&Live(terms.target.coll), payload, put) {
            Some(checked) => Ok(Meaning::Op(Op::Value(checked), finish)),
            None => Err(Fault::Refused(refusal::value(&terms.target, put))),
        }
    }
}

/// What is no put: a get, a flush, a signal by window and offset.
#[inline]
fn other(d: &Descriptor, terms: &Terms, peer: u32) -> Result<Meaning, Fault> {
    let (op, context) = (d.op(), terms.context as i32);
    let nowhere = Place::new(0, window(0));
    // SAFETY: who drains a set's queues keeps the set; `peer` is a rank.
    unsafe {
        match op {
            OP_GET if terms.form == Form::Bytes128 => {
                let remote = Place::new(d.first_offset(), window(d.first_handle()));
                let local = Place::new(d.second_offset(), window(d.second_handle()));
                let get = GetArgs::new(context, remote, d.size() as usize, local, peer);
                match check::get(&Live(terms.target.coll), &get) {
                    Some(checked) => Ok(Meaning::Op(Op::Get(checked), Finish::NONE)),
                    None => Err(Fault::Refused(refusal::get(&terms.target, &get))),
                }
            }
            OP_FLUSH if terms.form == Form::Bytes128 => Ok(Meaning::Flush),
            _ if op & OP_VA_SIGNAL != 0 && op & !(OP_VA_SIGNAL | OP_SIGNAL_INC | OP_SIGNAL_ADD) == 0 => {
                let Some(signal) = signal_op(op)? else { return Err(Fault::Op(op)) };
                let place = Place::new(d.first_offset(), window(d.first_handle()));
                let signal = SignalArgs { place, value: d.signal_value(), op: signal, strong: d.is_strong() };
                let put = PutArgs { signal: Some(signal), ..PutArgs::new(context, nowhere, 0, nowhere, peer) };
                match check::put(&Live(terms.target.coll), &put) {
                    Some(checked) => Ok(Meaning::Op(Op::Put(checked), Finish::NONE)),
                    None => Err(Fault::Refused(refusal::put(&terms.target, &put))),
                }
            }
            _ => Err(Fault::Op(op)),
        }
    }
}

impl Fault {
    /// What is wrong, with the descriptor taken apart. `index`: which one of its queue.
    #[cold]
    pub fn sentence(self, d: &Descriptor, index: u32) -> String {
        let why = match self {
            Self::Version(v) => format!(
                "version {v} is none that this library reads (1 to {}): device code is compiled with another NCCL \
                 than it runs with",
                d.form.newest_version()
            ),
            Self::Op(op) => format!("op = {op:#x} is no operation"),
            Self::Inline(size) => format!("an inline value has 1 to {INLINE_MAX} bytes, not {size}"),
            Self::Counter(id, n) => format!("counter {id} of {n}; ask for more counters when the context is made"),
            Self::Signal(id, n) => format!("signal {id} of {n}; ask for more signals when the context is made"),
            Self::Refused(refusal) => crate::error::Error::from(refusal).message().to_string(),
        };
        format!(
            "device code wrote a descriptor that cannot be: {why} (entry {index}: version {}, op {:#x}, size {}, first \
             {:#x} + {}, second {:#x} + {}, counter {}, signal {} += {}{}); this context takes nothing from here on",
            d.version(),
            d.op(),
            d.size(),
            d.first_handle(),
            d.first_offset(),
            d.second_handle(),
            d.second_offset(),
            d.counter(),
            d.signal(),
            d.signal_value(),
            if d.is_strong() { ", strong" } else { "" },
        )
    }
}

#[cfg(test)]
#[path = "meaning_tests.rs"]
mod tests;
