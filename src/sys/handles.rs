//! Opaque handles: every pointer that NCCL holds for us is a number of one table, not an address.
//!
//! A handle that is NULL, foreign, of the wrong kind, or already destroyed is told from a live one without touching
//! memory that is not ours. A handle is even, below 2^62 and never zero, so it survives the device descriptors that
//! keep 63 bits of it above a flag bit.
//!
//! Lifetime: the table owns one reference of each object. Borrowed by [`get`], as the data path does, an object must
//! not be destroyed by another thread during the call, as with any C interface. [`clone`] makes a reference of its own
//! and asks for nothing: it and [`remove`] take turns. [`read`] is for objects that NCCL does end during calls, which
//! stay in memory for that: windows. Destroying an object twice, or calling with it afterwards, is an error and not a
//! crash.
//!
//! A forked child has a copy of the table, and of nothing that its objects stand for: their threads are not there,
//! and their sockets and shared memory are still its parent's. As it is forked all that its copy holds becomes a
//! handle that nobody has (`disown`), so that a child can neither use nor end what is its parent's. [`clone`] and
//! [`remove`] also look at the process that made an object: a child of the bare system call is not met as it is
//! forked.

use crate::error::{Error, Result};
use crate::sys::sync::Mutex;
use std::ffi::c_void;
use std::sync::atomic::{fence, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

/// What a handle stands for. The discriminant is part of the handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// What `init` made.
    Instance = 1,
    /// What `listen` made.
    Listen = 2,
    /// What `connect` made.
    Coll = 3,
    /// What `createContext` made.
    Contexts = 4,
    /// What `regMrSym` made.
    Window = 5,
}

impl Kind {
    /// The table's word for it, for messages.
    pub fn noun(self) -> &'static str {
        match self {
            Kind::Instance => "plugin context",
            Kind::Listen => "listenComm",
            Kind::Coll => "collComm",
            Kind::Contexts => "ginCtx / rmaCtx",
            Kind::Window => "memory handle",
        }
    }
}

/// Types that handles stand for.
pub trait Object: Send + Sync + 'static {
    /// Their kind.
    const KIND: Kind;
}

// A handle: bit 0 zero | kind (3) | index (18) | generation (30) | zeros (4) | mark (6) | bits 62, 63 zero. With
// entries of 16 bytes the index is, in its place, the entry's offset in the table.
const KIND_SHIFT: u32 = 1;
const LOW_BITS: u64 = 0xf;
const INDEX_SHIFT: u32 = 4;
const INDEX_BITS: u32 = 18;
const INDEX_MASK: u64 = ((1 << INDEX_BITS) - 1) << INDEX_SHIFT;
const GENERATION_SHIFT: u32 = INDEX_SHIFT + INDEX_BITS;
const GENERATION_BITS: u32 = 30;
const MARK: u64 = 0b10_1101 << 56;
/// A bit that no kind has.
const DISOWNED: u64 = 1;

#[repr(C, align(16))]
struct HandleEntry {
    /// The live handle, or 0; with [`DISOWNED`] in a child of the process that made it.
    handle: AtomicU64,
    /// From `Arc::into_raw`, and never made from a reference: it may be turned back into an `Arc`.
    object: AtomicPtr<c_void>,
}

const _: () = assert!(std::mem::size_of::<HandleEntry>() == 1 << INDEX_SHIFT);

struct Free {
    indices: Vec<u32>,
    next: u32,
    generation: u64,
}

/// Places that a live handle can have.
pub const PLACES: usize = 1 << INDEX_BITS;

/// The place of a handle, for tables of what is wanted of its object; below [`PLACES`] whatever the handle is. No two
/// live handles have the same.
#[inline(always)]
pub fn place(handle: u64) -> usize {
    ((handle & INDEX_MASK) >> INDEX_SHIFT) as usize
}

/// All entries. Zero pages until they are used: 4 MiB of address space, not of memory.
static TABLE: [HandleEntry; PLACES] =
    [const { HandleEntry { handle: AtomicU64::new(0), object: AtomicPtr::new(std::ptr::null_mut()) } }; PLACES];
/// The process that made what is, or was, at a place: 1 MiB of address space. Beside the table, whose entries are full.
static OWNERS: [AtomicU32; PLACES] = [const { AtomicU32::new(0) }; PLACES];
/// Places that were ever taken. Beside what is locked: a child may not lock.
static USED: AtomicUsize = AtomicUsize::new(0);
/// By kind: had while all objects of a kind are asked something, and by who takes one out. It takes as long as they do.
static ASKED: [Mutex<()>; Kind::Window as usize + 1] = [const { Mutex::new(()) }; Kind::Window as usize + 1];
// The first place stays free: it is that of NULL. Taken for a look, after `ASKED` where both are.
static FREE: Mutex<Free> = Mutex::new(Free { indices: Vec::new(), next: 1, generation: 1 });

#[inline(always)]
fn entry(handle: u64) -> &'static HandleEntry {
    // SAFETY: the masked bits are the offset of an entry inside the table.
    unsafe { &*TABLE.as_ptr().byte_add((handle & INDEX_MASK) as usize) }
}

/// A place in the table for an object that is yet to be made, so that its handle cannot fail any more. Dropped: the
/// place is free again.
pub struct Reserved<T> {
    handle: u64,
    kind: std::marker::PhantomData<fn(T)>,
}

/// Takes a place; an error where as many objects are live as there are places.
pub fn reserve<T: Object>() -> Result<Reserved<T>> {
    super::fork::empty_in_children(disown);
    let mut free = FREE.lock();
    let index = match free.indices.pop() {
        Some(index) => index,
        None => {
            let index = free.next;
            if index as usize >= TABLE.len() {
                return Err(full());
            }
            free.next += 1;
            USED.store(free.next as usize, Ordering::Relaxed);
            index
        }
    };
    free.generation += 1;
    let generation = free.generation & ((1 << GENERATION_BITS) - 1);
    let handle =
        MARK | generation << GENERATION_SHIFT | u64::from(index) << INDEX_SHIFT | (T::KIND as u64) << KIND_SHIFT;
    Ok(Reserved { handle, kind: std::marker::PhantomData })
}

#[cold]
fn full() -> Error {
    Error::system(format!(
        "{} objects are live, as many as there can be; close unused communicators, contexts and windows",
        PLACES - 1
    ))
}

impl<T: Object> Reserved<T> {
    /// Puts the object there and returns its handle.
    pub fn fill(self, object: Arc<T>) -> *mut c_void {
        let handle = self.handle;
        std::mem::forget(self);
        OWNERS[place(handle)].store(std::process::id(), Ordering::Relaxed);
        let entry = entry(handle);
        // With release: who sees it also sees that the handle before is gone.
        entry.object.store(Arc::into_raw(object) as *mut c_void, Ordering::Release);
        entry.handle.store(handle, Ordering::Release);
        handle as *mut c_void
    }
}

impl<T> Drop for Reserved<T> {
    fn drop(&mut self) {
        FREE.lock().indices.push(place(self.handle) as u32);
    }
}

/// Puts an object into the table and returns its handle; an error where there is no place for it.
pub fn insert<T: Object>(object: Arc<T>) -> Result<*mut c_void> {
    Ok(reserve()?.fill(object))
}

/// The process that made a live object, if that is another one than this.
pub fn maker(handle: *mut c_void) -> Option<u32> {
    let held = entry(handle as u64).handle.load(Ordering::Acquire) & !DISOWNED;
    let is_live = !handle.is_null() && held == handle as u64;
    let maker = OWNERS[place(handle as u64)].load(Ordering::Relaxed);
    (is_live && maker != std::process::id()).then_some(maker)
}

/// In a child, as it is forked: what its parent made is no live handle here.
fn disown() {
    for place in &TABLE[..used()] {
        if place.handle.load(Ordering::Relaxed) != 0 {
            place.handle.fetch_or(DISOWNED, Ordering::Release);
        }
    }
}

/// The number of places that were ever taken, at the start of tables by [`place`].
pub fn used() -> usize {
    USED.load(Ordering::Relaxed)
}

/// Where the object of a live handle of the right kind is.
#[inline(always)]
fn live<T: Object>(handle: u64) -> Option<*const T> {
    let entry = entry(handle);
    // Zero is never live, although an empty entry holds it: its kind is nobody's.
    if handle & LOW_BITS != (T::KIND as u64) << KIND_SHIFT || entry.handle.load(Ordering::Acquire) != handle {
        return None;
    }
    Some(entry.object.load(Ordering::Relaxed) as *const T)
}

/// The object behind a live handle of the right kind.
///
/// # Safety
/// The caller of the C interface does not destroy the object during the call that `'a` spans (module docs).
#[inline(always)]
pub unsafe fn get<'a, T: Object>(handle: *mut c_void) -> Option<&'a T> {
    let object = live::<T>(handle as u64)?;
    // SAFETY: a live handle's object came from Arc::into_raw of the type its kind stands for, and is not taken out now
    // (caller).
    unsafe {
        std::hint::assert_unchecked(!object.is_null());
        Some(&*object)
    }
}

/// What `read` finds in the object behind a live handle of the right kind; `None` where the handle ends meanwhile.
///
/// # Safety
/// An object of this kind that was taken out stays in memory during the call, and what of it changes then `read` reads
/// by atomic loads.
#[inline(always)]
pub unsafe fn read<T: Object, R>(handle: *mut c_void, read: impl FnOnce(&T) -> R) -> Option<R> {
    let object = live::<T>(handle as u64)?;
    let is_live = || {
        fence(Ordering::Acquire);
        entry(handle as u64).handle.load(Ordering::Relaxed) == handle as u64
    };
    // Taken out since, or another one's, of any kind.
    if object.is_null() || !is_live() {
        return None;
    }
    // SAFETY: the handle was live after its object had been looked up, so that is of the type its kind stands for; it
    // is in memory (caller).
    let found = read(unsafe { &*object });
    // It may have become another one's on the way.
    is_live().then_some(found)
}

/// Whether a handle is live now, of the right kind and made by this process. To be asked before the lock is taken: a
/// child may have been forked while it was held, and nobody is there to let it go. What its parent made is not live
/// there.
fn is_own<T: Object>(handle: *mut c_void) -> bool {
    live::<T>(handle as u64).is_some() && maker(handle).is_none()
}

/// Whether a handle is live, of this kind and made by this process.
pub fn is_live<T: Object>(handle: u64) -> bool {
    is_own::<T>(handle as *mut c_void)
}

/// One more reference to the object behind a live handle that this process made.
#[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
pub fn clone<T: Object>(handle: *mut c_void) -> Option<Arc<T>> {
    is_own::<T>(handle).then_some(())?;
    let _turn = FREE.lock();
    let object = live::<T>(handle as u64)?;
    // SAFETY: handle and object change only under the lock, which is held: the handle is live, so the object is one of
    // the type its kind stands for, and the table's reference to it stays until the new one is made. The pointer is the
    // one from Arc::into_raw, so it reaches the counts beside the object.
    unsafe {
        Arc::increment_strong_count(object);
        Some(Arc::from_raw(object))
    }
}

/// What is asked of a live object; `None` for every handle that is not live, of this kind and made by this process.
/// Objects of this kind wait with their end until it is known; nobody waits to make one, or for another reference.
#[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
pub fn ask<T: Object, R>(handle: *mut c_void, asked: impl FnOnce(&T) -> R) -> Option<R> {
    is_own::<T>(handle).then_some(())?;
    let _asked = ASKED[T::KIND as usize].lock();
    // SAFETY: removal is serialised by the lock, so the object stays during the call.
    unsafe { get::<T>(handle) }.map(asked)
}

/// Whether something holds for any live object of a kind. Objects of this kind wait with their end until it is known;
/// nobody waits to make one, or for another reference.
pub fn any<T: Object>(mut holds: impl FnMut(&T) -> bool) -> bool {
    let _asked = ASKED[T::KIND as usize].lock();
    (1..used()).any(|index| {
        let handle = TABLE[index].handle.load(Ordering::Acquire);
        // SAFETY: removal is serialised by the lock, so the object stays during the call.
        unsafe { get::<T>(handle as *mut c_void) }.is_some_and(&mut holds)
    })
}

/// Takes an object out; its handle is dead from here on. `None` for every handle that is not live, of this kind and
/// made by this process.
#[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
pub fn remove<T: Object>(handle: *mut c_void) -> Option<Arc<T>> {
    is_own::<T>(handle).then_some(())?;
    let _asked = ASKED[T::KIND as usize].lock();
    let mut free = FREE.lock();
    let object = live::<T>(handle as u64)?;
    let entry = entry(handle as u64);
    entry.handle.store(0, Ordering::Release);
    entry.object.store(std::ptr::null_mut(), Ordering::Release);
    free.indices.push(place(handle as u64) as u32);
    drop(free);
    // SAFETY: the pointer came from Arc::into_raw in `fill`, of the type its handle's kind stands for; it left the
    // table just now, under the lock, so the table's reference is taken once.
    Some(unsafe { Arc::from_raw(object) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    struct A(u32);
    impl Object for A {
        const KIND: Kind = Kind::Instance;
    }
    struct B;
    impl Object for B {
        const KIND: Kind = Kind::Window;
    }

    #[test]
    fn a_reserved_place_is_nobody_s_until_it_is_filled() {
        let reserved = reserve::<A>().unwrap();
        let handle = reserved.handle as *mut c_void;
        // SAFETY: nobody destroys the object here.
        assert!(unsafe { get::<A>(handle).is_none() });
        drop(reserved);
        let reserved = reserve::<A>().unwrap();
        assert_ne!(reserved.handle, handle as u64);
        let handle = reserved.fill(Arc::new(A(9)));
        // SAFETY: as above.
        assert_eq!(unsafe { get::<A>(handle).unwrap().0 }, 9);
        assert_eq!(remove::<A>(handle).unwrap().0, 9);
    }

    #[test]
    fn live_handles_resolve_and_others_do_not() {
        let h = insert(Arc::new(A(7))).unwrap();
        // SAFETY: nobody destroys the object here.
        unsafe {
            assert_eq!(get::<A>(h).unwrap().0, 7);
            assert_eq!((clone::<A>(h).unwrap().0, maker(h)), (7, None));
            assert!(get::<B>(h).is_none());
            for bad in [0u64, 1, 0x10, 0xdead_beef, u64::MAX, (h as u64) + 16, (h as u64) ^ 1] {
                assert!(get::<A>(bad as *mut c_void).is_none(), "{bad:#x}");
            }
            assert!(any::<A>(|a| a.0 == 7) && !any::<A>(|a| a.0 == 8));
            assert_eq!(remove::<A>(h).unwrap().0, 7);
            assert!(get::<A>(h).is_none() && !any::<A>(|a| a.0 == 7));
        }
        assert!(remove::<A>(h).is_none());
        let again = insert(Arc::new(A(8))).unwrap();
        assert_ne!(again, h, "a generation tells a new object in an old place");
        assert_eq!(again as u64 & 1, 0);
        assert!((again as u64) < 1 << 62);
        remove::<A>(again);
    }

    /// Says when it ends.
    struct C(Arc<AtomicBool>);
    impl Object for C {
        const KIND: Kind = Kind::Listen;
    }
    impl Drop for C {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// One thread takes objects out while another one asks for references to them: it gets them in time, or none.
    #[test]
    fn a_reference_is_made_before_the_end_or_not_at_all() {
        const MEETINGS: usize = 100_000;
        static OFFERED: AtomicU64 = AtomicU64::new(0);
        let (met, end) = (Arc::new(AtomicUsize::new(0)), Instant::now() + Duration::from_secs(120));
        let counted = met.clone();
        let asking = std::thread::spawn(move || loop {
            let handle = OFFERED.load(Ordering::Acquire);
            if handle == u64::MAX {
                return;
            }
            // Until it is gone: the last time is the one that meets the end.
            while let Some(object) = clone::<C>(handle as *mut c_void) {
                assert!(!object.0.load(Ordering::SeqCst), "a reference to what has ended");
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        while met.load(Ordering::Relaxed) < MEETINGS && !asking.is_finished() {
            assert!(Instant::now() < end, "the two threads hardly ever met");
            let handle = insert(Arc::new(C(Arc::default()))).unwrap();
            OFFERED.store(handle as u64, Ordering::Release);
            // Another moment each time.
            (0..met.load(Ordering::Relaxed) % 64).for_each(|_| std::hint::spin_loop());
            let ended = remove::<C>(handle).unwrap().0.clone();
            assert!(clone::<C>(handle).is_none());
            // The other one's reference may be the last.
            while !ended.load(Ordering::SeqCst) && !asking.is_finished() {
                std::hint::spin_loop();
            }
        }
        OFFERED.store(u64::MAX, Ordering::Release);
        asking.join().unwrap();
    }

    /// What keeps the two of the test above apart, without chance: no reference is made while removal is shut out.
    #[test]
    fn references_and_removal_take_turns() {
        let handle = insert(Arc::new(A(1))).unwrap() as u64;
        let (asks, has_it) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (told, done) = (asks.clone(), has_it.clone());
        let turn = FREE.lock();
        let asking = std::thread::spawn(move || {
            told.store(true, Ordering::SeqCst);
            assert!(clone::<A>(handle as *mut c_void).is_some());
            done.store(true, Ordering::SeqCst);
        });
        while !asks.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(200));
        assert!(!has_it.load(Ordering::SeqCst), "a reference was made beside the lock");
        drop(turn);
        asking.join().unwrap();
        assert!(has_it.load(Ordering::SeqCst));
        remove::<A>(handle as *mut c_void).unwrap();
    }

    /// Objects take their time to answer: others are made, used and ended meanwhile, and those of the kind wait with
    /// their end.
    #[test]
    fn who_is_asked_holds_up_no_other() {
        let is_asked = Arc::new(AtomicBool::new(false));
        let handle = insert(Arc::new(A(77))).unwrap() as u64;
        let mut ends = None;
        assert!(any::<A>(|asked| {
            if asked.0 != 77 {
                return false;
            }
            is_asked.store(true, Ordering::SeqCst);
            let (made, is_asked) = (insert(Arc::new(B)).unwrap(), is_asked.clone());
            assert!(clone::<B>(made).is_some() && clone::<A>(handle as *mut c_void).is_some());
            remove::<B>(made).unwrap();
            let until = is_asked.clone();
            ends = Some(std::thread::spawn(move || {
                remove::<A>(handle as *mut c_void).unwrap();
                assert!(!until.load(Ordering::SeqCst), "it ended while it was asked");
            }));
            std::thread::sleep(Duration::from_millis(100));
            is_asked.store(false, Ordering::SeqCst);
            true
        }));
        ends.unwrap().join().unwrap();
    }
}
