//! Where `test` finds an operation's outcome: one entry a (context, peer) of every context in the process, named by the
//! upper half of the request. With it the usual answer costs some twenty instructions.
//!
//! A request is the entry's number in bits 32 and up and the operation's number below. Requests of the other form
//! (`rma::request`), for when the table is full, have bit 63 set and are no number of an entry.

use crate::fabric::verbs::Direct;
use crate::sys::fork;
use crate::sys::sync::Mutex;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Entries: 8 MiB of address space, of which only what is used becomes memory.
const ENTRIES: usize = 1 << 18;

/// Where one (context, peer) stands.
#[repr(C, align(32))]
pub struct RequestEntry {
    /// Handle of the communicator it belongs to; 0: none.
    coll: AtomicU64,
    /// The newest operation that is complete.
    completed: AtomicPtr<AtomicU32>,
    /// The context (a `Direct`) if it is over verbs, or NULL.
    context: AtomicPtr<c_void>,
    /// The set of contexts, context and peer: the request in the other form, without the operation's number.
    encoded: AtomicU64,
}

static TABLE: [RequestEntry; ENTRIES] = [const {
    RequestEntry {
        coll: AtomicU64::new(0),
        completed: AtomicPtr::new(null_mut()),
        context: AtomicPtr::new(null_mut()),
        encoded: AtomicU64::new(0),
    }
}; ENTRIES];

/// Free stretches, in order, no two of them side by side: first entry, entries. Entry 0 stays free, so that no request
/// is NULL.
static FREE: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());
static FRESH: Mutex<usize> = Mutex::new(1);
/// Entries that were ever taken. Beside what is locked: a child may not lock.
static USED: AtomicUsize = AtomicUsize::new(1);

/// Entries that one set of contexts has.
pub struct Stretch {
    first: usize,
    len: usize,
}

impl Stretch {
    /// `len` entries, or `None` when the table is full: then requests have the other form.
    pub fn take(len: usize) -> Option<Self> {
        fork::empty_in_children(disown);
        let mut free = FREE.lock();
        if let Some(i) = free.iter().position(|&(_, n)| n >= len) {
            let (first, n) = free[i];
            if n == len {
                free.remove(i);
            } else {
                free[i] = (first + len, n - len);
            }
            return Some(Self { first, len });
        }
        let mut fresh = FRESH.lock();
        let first = *fresh;
        if len > ENTRIES - first {
            return None;
        }
        *fresh += len;
        USED.store(*fresh, Ordering::Relaxed);
        Some(Self { first, len })
    }

    /// Fills entry `i`. `completed` and `context` live until the stretch is dropped. `encoded`: the request of
    /// operation 0 in the other form.
    pub fn fill(&self, i: usize, completed: *const AtomicU32, context: Option<Direct>, encoded: *mut c_void) {
        let entry = &TABLE[self.first + i];
        entry.completed.store(completed.cast_mut(), Ordering::Relaxed);
        entry.context.store(context.map_or(null_mut(), Direct::into_raw), Ordering::Relaxed);
        entry.encoded.store(encoded as u64, Ordering::Relaxed);
    }

    /// The communicator's handle, once there is one.
    pub fn announce(&self, coll: u64) {
        TABLE[self.first..self.first + self.len].iter().for_each(|e| e.coll.store(coll, Ordering::Release));
    }

    /// The request of operation 0 of entry `i`.
    #[inline(always)]
    pub fn request(&self, i: usize) -> u64 {
        ((self.first + i) as u64) << 32
    }
}

/// Adds a stretch to the free ones, and to its neighbours among them: sets of many sizes would leave nothing but
/// pieces.
fn give_back(free: &mut Vec<(usize, usize)>, first: usize, len: usize) {
    let at = free.partition_point(|&(other, _)| other < first);
    free.insert(at, (first, len));
    for left in [Some(at), at.checked_sub(1)].into_iter().flatten() {
        if let Some(&[(a, n), (b, m)]) = free.get(left..left + 2) {
            if a + n == b {
                free[left] = (a, n + m);
                free.remove(left + 1);
            }
        }
    }
}

impl Drop for Stretch {
    fn drop(&mut self) {
        self.announce(0);
        give_back(&mut FREE.lock(), self.first, self.len);
    }
}

impl RequestEntry {
    /// The newest operation that is complete.
    ///
    /// # Safety
    /// The entry was found just now, and its set is not destroyed meanwhile.
    #[inline(always)]
    pub unsafe fn completed(&self) -> &AtomicU32 {
        let completed = self.completed.load(Ordering::Relaxed);
        // SAFETY: a live entry holds what `fill` stored.
        unsafe {
            std::hint::assert_unchecked(!completed.is_null());
            &*completed
        }
    }

    /// The context, if it is over verbs.
    ///
    /// # Safety
    /// As for [`RequestEntry::completed`].
    #[inline(always)]
    pub unsafe fn context(&self) -> Option<Direct> {
        // SAFETY: a live entry holds what `fill` stored.
        unsafe { Direct::from_raw(self.context.load(Ordering::Relaxed)) }
    }

    /// The communicator's handle.
    pub fn coll(&self) -> *mut c_void {
        self.coll.load(Ordering::Relaxed) as *mut c_void
    }

    /// The request in the other form, without the operation's number.
    pub fn encoded(&self) -> u64 {
        self.encoded.load(Ordering::Relaxed)
    }
}

/// In a child, as it is forked: its parent's requests are found no longer.
fn disown() {
    let used = TABLE[..USED.load(Ordering::Relaxed)].iter().filter(|e| e.coll.load(Ordering::Relaxed) != 0);
    used.for_each(|e| e.coll.store(0, Ordering::Release));
}

/// The entry that a request of the communicator `coll` names.
#[inline(always)]
pub fn find(coll: *mut c_void, request: *mut c_void) -> Option<&'static RequestEntry> {
    let number = request as u64 >> 32;
    if number >= ENTRIES as u64 {
        return None;
    }
    // SAFETY: below ENTRIES.
    let entry = unsafe { TABLE.get_unchecked(number as usize) };
    // What belongs to nobody holds 0.
    if entry.coll.load(Ordering::Acquire) != coll as u64 {
        return None;
    }
    if coll.is_null() {
        return None;
    }
    Some(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets of many sizes come and go: what is free in the end is one stretch.
    #[test]
    fn free_stretches_side_by_side_are_one() {
        let mut free = Vec::new();
        for (first, len) in [(40, 8), (10, 5), (20, 4), (15, 5), (48, 2), (24, 16)] {
            give_back(&mut free, first, len);
            assert!(free.windows(2).all(|two| two[0].0 + two[0].1 < two[1].0), "{free:?}");
        }
        assert_eq!(free, [(10, 40)]);
    }

    #[test]
    fn stretches_do_not_overlap_and_come_back() {
        let a = Stretch::take(10).unwrap();
        let b = Stretch::take(5).unwrap();
        assert!(a.first > 0 && b.first > 0);
        assert!(a.first + a.len <= b.first || b.first + b.len <= a.first);
        assert_eq!(a.request(3) >> 32, a.first as u64 + 3);
        let first = a.first;
        drop(a);
        let c = Stretch::take(4).unwrap();
        assert!(c.first + 4 <= b.first || c.first >= b.first + 5, "{first}");
        assert!(Stretch::take(ENTRIES).is_none());
        // Nothing is filled: nothing is found.
        assert!(find(null_mut(), b.request(0) as *mut c_void).is_none());
        assert!(find(16 as *mut c_void, b.request(0) as *mut c_void).is_none());
        assert!(find(16 as *mut c_void, u64::MAX as *mut c_void).is_none());
    }
}
