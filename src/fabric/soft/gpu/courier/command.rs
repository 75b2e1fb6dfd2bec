//! Which operations the courier takes, and as what.

use super::ring::{Command, HEAVY, INLINE};
use crate::fabric::soft::gpu::op::{Op, Side};
use crate::fabric::soft::gpu::state::Windows;
use crate::memory::gpu::GPU_BIT;

/// The shortest copies for hands, where the courier does not do them itself.
pub const HEAVY_FROM: u64 = 2 << 10;
/// The longest that they take: 0.7 ms, or some 15 where the GPU had room for the courier's first block alone. A courier does not
/// look at its time before it is through.
const HEAVY_UP_TO: u64 = 512 << 20;
/// Longer ones are done by themselves, not up to eight in one go, for the same reason.
const ALONE_FROM: u64 = (64 << 20) + 1;

/// Whether an operation shares its go with no other.
pub fn is_alone(op: &Op) -> bool {
    op.len >= ALONE_FROM
}

/// Whether an operation is a copy of at least `from` bytes that hands could do. Its windows are not looked at.
pub fn is_heavy(op: &Op, from: u64) -> bool {
    (from.max(HEAVY_FROM)..=HEAVY_UP_TO).contains(&op.len) && is_light(op, u64::MAX)
}

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

/// Whether all that it names lies in windows that are there.
pub fn windows_hold(op: &Op, windows: &mut Windows) -> bool {
    let mut holds = |side, len| match side {
        Side::Caller { .. } => true,
        Side::Window { key, addr } => windows.holds(key, addr, len),
    };
    let data = op.len == 0 || holds(op.from, op.len) && holds(op.to, op.len);
    data && op.signal.is_none_or(|s| holds(Side::Window { key: s.rkey, addr: s.remote }, 8))
}

/// The operation as a command, its signal counted; `None`: it must go by the stream (where windows that it names and that
/// are gone are found out). `by_hands`: it is heavy, for a courier with hands.
pub fn command(op: &Op, windows: &mut Windows, limit: u64, by_hands: bool) -> Option<Command> {
    if !by_hands && !is_light(op, limit) {
        return None;
    }
    if !windows_hold(op, windows) {
        return None;
    }
    let mut c = Command { bytes: op.len as u32, flags: if by_hands { HEAVY } else { 0 }, ..Command::default() };
    if op.len > 0 {
        (c.from, c.to) = (op.from.addr(), op.to.addr());
        if !op.from.is_on_gpu() {
            // SAFETY: so many bytes are readable there (Context::put), or kept with the operation.
            c.value = unsafe { read(c.from as *const u8, op.len as usize) };
            (c.from, c.flags) = (0, INLINE);
        }
    }
    if let Some(s) = op.signal {
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
