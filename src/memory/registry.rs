//! This rank's windows as its peers may touch them: what a fabric asks before it lets a message from a peer near
//! memory.

use crate::sync::RwLock;
use std::sync::RwLockReadGuard;

/// A local window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl Extent {
    /// Whether `len` bytes at `addr` lie inside.
    #[inline]
    pub fn holds(&self, addr: u64, len: u64) -> bool {
        addr >= self.base && len <= self.len && addr - self.base <= self.len - len
    }
}

/// All windows of one communicator on this rank, by window number.
///
/// A message is applied under the read half of the lock and a window leaves under the write half, so memory is never
/// written after its deregistration has returned.
#[derive(Default)]
pub struct Registry {
    extents: RwLock<Vec<Option<Extent>>>,
}

/// The registry, held still.
pub struct Held<'a>(RwLockReadGuard<'a, Vec<Option<Extent>>>);

impl Registry {
    /// Lets peers touch `extent` under the number `id`.
    pub fn insert(&self, id: u32, extent: Extent) {
        let mut extents = self.extents.write();
        let at = id as usize;
        if extents.len() <= at {
            extents.resize(at + 1, None);
        }
        extents[at] = Some(extent);
    }

    /// Ends that. On return no message is being applied to the window and none will be.
    pub fn remove(&self, id: u32) {
        if let Some(slot) = self.extents.write().get_mut(id as usize) {
            *slot = None;
        }
    }

    /// Holds all windows in place while messages are applied.
    #[inline]
    pub fn hold(&self) -> Held<'_> {
        Held(self.extents.read())
    }
}

impl Held<'_> {
    /// A pointer to `len` bytes at `addr` if they lie inside window `id`, for as long as the registry is held.
    #[inline]
    pub fn resolve(&self, id: u32, addr: u64, len: u64) -> Option<*mut u8> {
        match self.0.get(id as usize) {
            Some(Some(extent)) if extent.holds(addr, len) => Some(addr as *mut u8),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_inside_resolve() {
        let r = Registry::default();
        r.insert(3, Extent { base: 0x1000, len: 0x100 });
        let held = r.hold();
        assert!(held.resolve(3, 0x1000, 0x100).is_some());
        assert!(held.resolve(3, 0x1100, 0).is_some());
        assert!(held.resolve(3, 0x10ff, 2).is_none());
        assert!(held.resolve(3, 0xfff, 1).is_none());
        assert!(held.resolve(3, u64::MAX, 2).is_none());
        assert!(held.resolve(3, 0x1000, u64::MAX).is_none());
        assert!(held.resolve(2, 0x1000, 1).is_none());
        assert!(held.resolve(9, 0x1000, 1).is_none());
        drop(held);
        r.remove(3);
        r.remove(77);
        assert!(r.hold().resolve(3, 0x1000, 1).is_none());
    }
}
