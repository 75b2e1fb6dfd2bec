//! This rank's windows as its peers may touch them: what a fabric asks before it lets a message from a peer near
//! memory.

use super::table::Table;
use crate::sys::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
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
    extents: RwLock<Table<Extent>>,
}

/// The registry, held still.
pub struct Held<'a>(RwLockReadGuard<'a, Table<Extent>>);

impl Registry {
    /// Lets peers touch `extent` under the number `id`.
    pub fn insert(&self, id: u32, extent: Extent) {
        self.extents.write().insert(id, extent);
    }

    /// Ends that. On return no message is being applied to the window and none will be.
    pub fn remove(&self, id: u32) {
        self.extents.write().remove(id);
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
        self.0.get(id).filter(|extent| extent.holds(addr, len)).map(|_| addr as *mut u8)
    }

    /// Whether any window holds the range: it is looked for where its own is not known any more.
    pub fn covers(&self, addr: u64, len: u64) -> bool {
        self.0.iter().any(|(_, extent)| extent.holds(addr, len))
    }

    /// Adds to the signal at `addr` of window `id`, atomically with respect to everybody who does; all fabrics and
    /// engines that have the CPU add to a signal do it here. `false`: no aligned word of that window is there.
    ///
    /// Whoever sees the sum sees what was written before the addition, by this thread and by those whose additions it
    /// includes.
    #[inline(always)]
    pub fn add(&self, id: u32, addr: u64, value: u64) -> bool {
        let Some(word) = self.resolve(id, addr, 8).filter(|_| addr % 8 == 0) else { return false };
        // SAFETY: eight aligned bytes of a window, which stays one while the registry is held; all who write there
        // while peers may signal do so atomically (the contract of signals).
        unsafe { AtomicU64::from_ptr(word.cast()) }.fetch_add(value, Ordering::AcqRel);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_aligned_words_of_a_window_are_added_to() {
        let words = [AtomicU64::new(7), AtomicU64::new(9)];
        let (r, base) = (Registry::default(), words.as_ptr() as u64);
        r.insert(1, Extent { base, len: 16 });
        let held = r.hold();
        assert!(held.add(1, base, 3) && held.add(1, base + 8, u64::MAX));
        assert!(!held.add(1, base + 4, 1) && !held.add(1, base + 16, 1) && !held.add(2, base, 1));
        assert_eq!(words.map(AtomicU64::into_inner), [10, 8]);
    }

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
        r.insert(4, Extent { base: 0x2000, len: 0x100 });
        let held = r.hold();
        assert!(held.covers(0x2010, 0xf0) && !held.covers(0x2010, 0xf1) && !held.covers(0x1000, 1));
    }
}
