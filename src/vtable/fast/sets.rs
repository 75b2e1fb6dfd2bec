//! Where the data path finds the contexts that a handle stands for: an entry at each handle's place, with what an
//! operation needs of the set beside the handle. One comparison tells a live handle of the right kind: an entry that
//! nobody has holds 0, and the place of NULL is nobody's and has no contexts.
//!
//! Only sets over verbs are here. What is not found takes the long way, through `handles`.

use super::windows::CachedWindow;
use crate::fabric::verbs::Direct;
use crate::sys::{fork, handles};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr::null;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle's place.
#[repr(C, align(32))]
pub struct SetEntry {
    /// The set's handle.
    handle: AtomicU64,
    /// Written before `handle`, and not changed while a call with that handle is under way.
    set: UnsafeCell<Set>,
}

/// What an operation needs of a set.
struct Set {
    /// Its contexts.
    contexts: *const Direct,
    /// How many; 0: no set.
    count: u32,
    /// Ranks of its communicator.
    nranks: u32,
    /// The communicator's windows.
    windows: *const CachedWindow,
}

const NOBODY: Set = Set { contexts: null(), count: 0, nranks: 0, windows: null() };

// SAFETY: see `SetEntry::set`.
unsafe impl Sync for SetEntry {}

/// Zero pages until they are used: 8 MiB of address space, not of memory.
static TABLE: [SetEntry; handles::PLACES] =
    [const { SetEntry { handle: AtomicU64::new(0), set: UnsafeCell::new(NOBODY) } }; handles::PLACES];

#[inline(always)]
fn entry(handle: u64) -> &'static SetEntry {
    // SAFETY: `place` is below PLACES.
    unsafe { TABLE.get_unchecked(handles::place(handle)) }
}

/// Lets operations find a set. `contexts` and `windows` live until [`retract`].
///
/// # Safety
/// The handle is live, it is the set's, and no operation uses it yet.
pub unsafe fn publish(handle: *mut c_void, contexts: &[Direct], nranks: u32, windows: *const CachedWindow) {
    fork::empty_in_children(disown);
    let entry = entry(handle as u64);
    let set = Set { contexts: contexts.as_ptr(), count: contexts.len() as u32, nranks, windows };
    // SAFETY: nobody looks at it (caller).
    unsafe { entry.set.get().write(set) };
    entry.handle.store(handle as u64, Ordering::Release);
}

/// Operations no longer find the set. If the place has the next owner already, it stays that one's.
pub fn retract(handle: *mut c_void) {
    let _ = entry(handle as u64).handle.compare_exchange(handle as u64, 0, Ordering::AcqRel, Ordering::Relaxed);
}

/// In a child, as it is forked: its parent's sets are found no longer.
fn disown() {
    let used = TABLE[..handles::used()].iter().filter(|e| e.handle.load(Ordering::Relaxed) != 0);
    used.for_each(|e| e.handle.store(0, Ordering::Release));
}

/// A published set that has a certain context, and whose communicator has a certain rank.
///
/// # Safety
/// The set is not destroyed while what is found is used (see [`handles`]).
#[inline(always)]
pub unsafe fn find(handle: *mut c_void, context: i32, rank: u32) -> Option<&'static SetEntry> {
    let entry = entry(handle as u64);
    if entry.handle.load(Ordering::Acquire) != handle as u64 {
        return None;
    }
    let set = entry.set();
    (((context as u32) < set.count) && rank < set.nranks).then_some(entry)
}

impl SetEntry {
    #[inline(always)]
    fn set(&self) -> &Set {
        // SAFETY: it does not change now (field docs).
        unsafe { &*self.set.get() }
    }

    /// The context.
    ///
    /// # Safety
    /// It is the one that [`find`] was asked for.
    #[inline(always)]
    pub unsafe fn context(&self, context: i32) -> Direct {
        // SAFETY: `contexts` has more than `context` elements (caller) and lives as long as the set, that is, now.
        unsafe { *self.set().contexts.add(context as u32 as usize) }
    }

    /// The communicator's windows, for [`super::windows::find`].
    #[inline(always)]
    pub fn windows(&self) -> *const CachedWindow {
        self.set().windows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_published_is_not_found() {
        for handle in [0u64, 1, 16, 8, u64::MAX, 0x2d00_0000_0000_0018] {
            // SAFETY: nothing is published here.
            assert!(unsafe { find(handle as *mut c_void, 0, 0) }.is_none(), "{handle:#x}");
        }
    }
}
