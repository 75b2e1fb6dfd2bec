//! Operations as commands of the copy kernel.

use super::ring::{Command, INLINE, REPORT, WORKERS};
use super::Staged;
use crate::fabric::soft::gpu::op::{Op, TransferEnd};
use crate::fabric::soft::gpu::windows::Windows;
use crate::memory::key::Key;

/// Longer copies are done by themselves, not up to eight in one go: a copy kernel does not look at its time before it
/// is through.
const ALONE_FROM: u64 = (64 << 20) + 1;

/// Whether an operation shares its go with no other.
pub fn is_alone(op: &Op) -> bool {
    op.len >= ALONE_FROM
}

/// Whether all that it names lies in windows that are there.
pub fn windows_hold(op: &Op, windows: &Windows) -> bool {
    let holds = |side, len| match side {
        TransferEnd::Caller { addr, .. } => windows.has_caller(op.window, addr, len),
        // Whoever delivers or reads the bytes looks for it.
        TransferEnd::Window { key, .. } if !Key(key).is_on_gpu() => true,
        TransferEnd::Window { key, addr } => windows.holds(key, addr, len),
    };
    let data = op.len == 0 || holds(op.from, op.len) && holds(op.to, op.len);
    data && op.signal.is_none_or(|s| holds(TransferEnd::Window { key: s.rkey, addr: s.remote }, 8))
}

/// Which end of an operation's copy is in host memory, where the copy kernel needs a place in the pinned memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEnd {
    /// It is read.
    From,
    /// It is written.
    To,
}

impl HostEnd {
    /// Of an operation of the copy kernel's kind; `None`: it needs none, since its bytes are few or all on the GPU.
    pub fn of(op: &Op) -> Option<Self> {
        match (op.from.is_on_gpu(), op.to.is_on_gpu()) {
            _ if op.len == 0 => None,
            (false, _) if is_inline(op) => None,
            (false, _) => Some(Self::From),
            (true, false) => Some(Self::To),
            (true, true) => None,
        }
    }
}

/// Whether the bytes of an operation from host memory go into the command.
fn is_inline(op: &Op) -> bool {
    matches!(op.len, 1 | 2 | 4 | 8) && op.to.addr() % op.len == 0
}

/// The operation as a command, its signal counted, with its credit. Its windows hold; `by_workers`: worker blocks do
/// it; `staged`: the place of its end in host memory.
pub fn command(op: &Op, windows: &mut Windows, by_workers: bool, staged: Option<&Staged>) -> Command {
    let mut c = Command { bytes: op.len as u32, flags: if by_workers { WORKERS } else { 0 }, ..Command::default() };
    if op.len > 0 {
        (c.from, c.to) = (op.from.addr(), op.to.addr());
        match staged {
            Some(Staged { end: HostEnd::From, at, .. }) => c.from = *at,
            Some(Staged { end: HostEnd::To, at, .. }) => (c.to, c.flags) = (*at, c.flags | REPORT),
            None if !op.from.is_on_gpu() => {
                // SAFETY: so many bytes are readable there (Context::put), held, or kept with the operation.
                c.value = unsafe { read(c.from as *const u8, op.len as usize) };
                (c.from, c.flags) = (0, INLINE);
            }
            None => {}
        }
    }
    if let Some(s) = op.signal {
        // Where the engine knows the sum, it goes on knowing it.
        let _ = windows.add(s.rkey, s.remote, s.value);
        (c.signal, c.increment) = (s.remote, s.value);
    }
    op.credit.map_or(c, |credit| c.with_credit(credit))
}

/// Whether an operation, which is this command, is of the kind of what the engine tells device code of completions: a
/// value without a signal, or a weak signal without data. Whoever looks for one finds it in memory.
pub fn is_bookkeeping(op: &Op, command: &Command) -> bool {
    match op.signal {
        None => command.flags & INLINE != 0,
        Some(signal) => op.len == 0 && !signal.strong,
    }
}

/// # Safety
/// `len` (at most 8) bytes are readable at `from`.
unsafe fn read(from: *const u8, len: usize) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
    u64::from_le_bytes(bytes)
}
