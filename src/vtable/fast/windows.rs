//! The windows of one communicator where the data path finds them: by a few bits of the handle, with what an operation
//! needs beside it.
//!
//! Two windows may fall on the same place; then the earlier one keeps it, and operations on the other take the long way
//! through the handle table. Nothing is ever wrong here, only slower. A place changes only while no live window has it:
//! whoever has found a window reads its fields one after the other, while another thread may register a window.

use crate::memory::window::{Remote, RemoteCell, Window};
use crate::rma::check::{Find, Local};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Places, a power of two.
const PLACES: usize = 256;
const PLACE_SHIFT: u32 = 6;
/// The bits of a handle that pick a place: the lowest of the index in `handles`.
const PICK_SHIFT: u32 = 4;

/// What an operation needs of a window. A cache line.
#[derive(Default)]
#[repr(C, align(64))]
pub struct CachedWindow {
    handle: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    lkey: AtomicU32,
    remote: AtomicPtr<RemoteCell>,
}

const _: () = assert!(std::mem::size_of::<CachedWindow>() == 1 << PLACE_SHIFT);

impl CachedWindow {
    /// First byte here.
    #[inline(always)]
    pub fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// Bytes here.
    #[inline(always)]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether there is nothing; never so for a window.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This rank's key.
    #[inline(always)]
    pub fn lkey(&self) -> u32 {
        self.lkey.load(Ordering::Relaxed)
    }

    /// The window at `rank`.
    ///
    /// # Safety
    /// `rank` is one of the communicator's, of which a set of contexts lives during the call.
    #[inline(always)]
    pub unsafe fn remote(&self, rank: u32) -> Remote {
        // SAFETY: a window has an entry for each rank, and the set keeps it in memory (caller).
        unsafe { (*self.remote.load(Ordering::Relaxed).add(rank as usize)).load() }
    }
}

/// The places of one communicator.
pub struct WindowCache(Box<[CachedWindow]>);

impl Default for WindowCache {
    fn default() -> Self {
        let places: Box<[CachedWindow]> = (0..PLACES).map(|_| CachedWindow::default()).collect();
        (0..PLACES).for_each(|i| places[i].handle.store(vacant(i), Ordering::Relaxed));
        Self(places)
    }
}

/// What an empty place holds: a value that is looked up elsewhere, so that whatever is asked for, it does not match.
fn vacant(place: usize) -> u64 {
    (((place + 1) % PLACES) << PICK_SHIFT) as u64 | 1
}

/// What a place holds while a window's fields are written: as little a match as [`vacant`].
fn claimed(place: usize) -> u64 {
    vacant(place) | 2
}

impl WindowCache {
    fn index(handle: u64) -> usize {
        (handle >> PICK_SHIFT) as usize % PLACES
    }

    fn place(&self, handle: u64) -> &CachedWindow {
        &self.0[Self::index(handle)]
    }

    /// Where the data path starts counting: hand it to [`find`] while the cache lives.
    pub fn start(&self) -> *const CachedWindow {
        self.0.as_ptr()
    }

    /// Gives a window its place, unless another one has it.
    pub fn insert(&self, window: &Window) {
        let handle = window.handle.load(Ordering::Relaxed);
        let (place, index) = (self.place(handle), Self::index(handle));
        let (empty, claimed) = (vacant(index), claimed(index));
        if place.handle.compare_exchange(empty, claimed, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return;
        }
        place.base.store(window.base(), Ordering::Relaxed);
        place.len.store(window.len(), Ordering::Relaxed);
        place.lkey.store(window.lkey(), Ordering::Relaxed);
        place.remote.store(window.remote().as_ptr().cast_mut(), Ordering::Relaxed);
        place.handle.store(handle, Ordering::Release);
    }

    /// Takes a window's place away, if it still has it.
    pub fn remove(&self, window: &Window) {
        let handle = window.handle.load(Ordering::Relaxed);
        let empty = vacant(Self::index(handle));
        let _ = self.place(handle).handle.compare_exchange(handle, empty, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The place of the window with this handle, if it has one.
///
/// # Safety
/// `start` came from a cache that lives during `'a`.
#[inline(always)]
pub unsafe fn find<'a>(start: *const CachedWindow, handle: *mut c_void) -> Option<&'a CachedWindow> {
    let offset = (handle as usize & (PLACES - 1) << PICK_SHIFT) << (PLACE_SHIFT - PICK_SHIFT);
    // SAFETY: the masked offset is that of one of PLACES places.
    let place = unsafe { &*start.byte_add(offset) };
    (place.handle.load(Ordering::Acquire) == handle as u64).then_some(place)
}

/// The windows of one communicator that the data path looks at first, and may not find all.
pub struct Cached(pub *const CachedWindow);

impl Find for Cached {
    #[inline(always)]
    unsafe fn local(&self, handle: *mut c_void) -> Option<Local> {
        // SAFETY: the set that this came from keeps the cache alive.
        let place = unsafe { find(self.0, handle)? };
        Some(Local { base: place.base(), len: place.len(), lkey: place.lkey() })
    }

    #[inline(always)]
    unsafe fn remote(&self, handle: *mut c_void, rank: u32) -> Option<Remote> {
        // SAFETY: as above; the rank exists and the set lives (caller).
        Some(unsafe { find(self.0, handle)?.remote(rank) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::window::{Registration, WindowFacts};

    /// A window whose numbers are all `n`, behind a handle with this index.
    fn window(index: u64, n: u64) -> Window {
        let remote = Box::new([Remote { base: n, len: n, rkey: n as u32 }]);
        let registration = Registration { lkey: n as u32, rkey: n as u32, guard: Box::new(()) };
        let window = Window::of(1, WindowFacts { id: 0, base: n, len: n, remote, registration });
        window.handle.store(n << 32 | index << PICK_SHIFT, Ordering::Relaxed);
        window
    }

    fn handle(window: &Window) -> *mut c_void {
        window.handle.load(Ordering::Relaxed) as *mut c_void
    }

    fn fields(place: &CachedWindow) -> [u64; 4] {
        // SAFETY: the windows of these tests have rank 0, and live to their ends.
        let remote = unsafe { place.remote(0) };
        [place.base(), place.len(), place.lkey().into(), remote.base]
    }

    #[test]
    fn a_place_that_was_found_stays_its_window_s_while_others_are_registered() {
        let cache = WindowCache::default();
        let (first, second) = (window(3, 1), window(3 + PLACES as u64, 2));
        cache.insert(&first);
        // SAFETY: the cache lives until the end.
        let look = |window: &Window| unsafe { find(cache.start(), handle(window)) };
        let place = look(&first).unwrap();
        cache.insert(&second);
        assert_eq!(fields(place), [1; 4]);
        assert!(look(&second).is_none(), "the place is taken");
        cache.remove(&second);
        assert_eq!(look(&first).map(fields), Some([1; 4]));
        cache.remove(&first);
        assert!(look(&first).is_none());
        cache.insert(&second);
        assert_eq!(look(&second).map(fields), Some([2; 4]));
    }

    #[test]
    fn what_is_not_registered_is_not_found() {
        let cache = WindowCache::default();
        for place in 0..PLACES {
            for value in [vacant(place), claimed(place)] {
                // SAFETY: as above.
                assert!(unsafe { find(cache.start(), value as *mut c_void) }.is_none());
                assert_ne!(WindowCache::index(value), place);
            }
        }
    }
}
