//! Which operations the courier takes, and as what.

use super::ring::{Command, INLINE};
use crate::fabric::soft::gpu::op::{Op, Side};
use crate::fabric::soft::gpu::state::Windows;
use crate::memory::gpu::GPU_BIT;

/// Whether an operation is of a kind that the courier takes, with copies of at most `limit` bytes. Its windows are not
/// looked at.
pub fn is_light(op: &Op, limit: u64) -> bool {
    if op.done != 0 || op.reading.is_some() {
        return false;
    }
    let data = match (op.from, op.to) {
        _ if op.len == 0 => true,
        (Side::Caller { gpu: false, .. }, to @ Side::Window { addr, .. }) => {
            to.is_on_gpu() && matches!(op.len, 1 | 2 | 4 | 8) && addr % op.len == 0
        }
        (from, to) => {
            let words = (from.addr() | to.addr() | op.len) % 4 == 0;
            op.len <= limit && words && from.is_on_gpu() && to.is_on_gpu() && op.is_open
        }
    };
    data && op.signal.is_none_or(|s| s.rkey & GPU_BIT != 0 && s.remote % 8 == 0)
}

/// The operation as a command, its signal counted; `None`: it must go by the stream (where windows that it names and that
/// are gone are found out).
pub fn command(op: &Op, windows: &mut Windows, limit: u64) -> Option<Command> {
    if !is_light(op, limit) {
        return None;
    }
    let mut c = Command { bytes: op.len as u32, ..Command::default() };
    if op.len > 0 {
        let mut end = |side| match side {
            Side::Caller { addr, .. } => Some(addr),
            Side::Window { key, addr } => windows.holds(key, addr, op.len).then_some(addr),
        };
        (c.from, c.to) = (end(op.from)?, end(op.to)?);
        if !op.from.is_on_gpu() {
            // SAFETY: so many bytes are readable there (Context::put), or kept with the operation.
            c.value = unsafe { read(c.from as *const u8, op.len as usize) };
            (c.from, c.flags) = (0, INLINE);
        }
    }
    if let Some(s) = op.signal {
        if !windows.holds(s.rkey, s.remote, 8) {
            return None;
        }
        // Where the engine knows the sum, it goes on knowing it.
        let _ = windows.add(s.rkey, s.remote, s.value);
        (c.signal, c.increment) = (s.remote, s.value);
    }
    Some(c)
}

/// # Safety
/// `len` (at most 8) bytes are readable at `from`.
unsafe fn read(from: *const u8, len: usize) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
    u64::from_le_bytes(bytes)
}
