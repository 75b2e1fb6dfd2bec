//! Which calls of the driver are under way, for a thread that watches: a call can stand for as long as the application
//! likes, and who stands cannot say so.

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Calls that are noted at once; more go unnoted. Few threads call the driver at the same time.
const SLOTS: usize = 64;

/// A function's name, as a place that a pointer can name.
pub type Name = &'static &'static str;

/// One call, or none.
struct Slot {
    /// The function, NULL for none.
    name: AtomicPtr<&'static str>,
    /// The calling thread, as the kernel numbers it.
    thread: AtomicU32,
    /// Calls that this slot has seen: whether it is still the same one.
    count: AtomicU32,
}

/// The calls of this process that this library has under way.
static CALLS: [Slot; SLOTS] =
    [const { Slot { name: AtomicPtr::new(null_mut()), thread: AtomicU32::new(0), count: AtomicU32::new(0) } }; SLOTS];

thread_local! {
    /// This thread's number, 0 until it is asked for. Without a destructor: the library may be unloaded.
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

fn thread() -> u32 {
    let known = THREAD.get();
    if known != 0 {
        return known;
    }
    // SAFETY: plain call; by number, because glibc has a function for it from 2.30 on only.
    let number = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
    THREAD.set(number);
    number
}

/// While it lives the call is noted.
pub(super) struct Calling(Option<&'static Slot>);

impl Calling {
    /// The calling thread enters a function.
    #[inline]
    pub fn new(name: Name) -> Self {
        let (thread, name) = (thread(), std::ptr::from_ref(name).cast_mut());
        let slot = (0..SLOTS)
            .map(|i| &CALLS[(thread as usize + i) % SLOTS])
            .find(|s| s.name.compare_exchange(null_mut(), name, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        if let Some(slot) = slot {
            slot.thread.store(thread, Ordering::Relaxed);
            slot.count.fetch_add(1, Ordering::Release);
        }
        Self(slot)
    }
}

impl Drop for Calling {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.name.store(null_mut(), Ordering::Release);
        }
    }
}

/// A call that was under way when somebody looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The function.
    pub name: &'static str,
    /// The thread that is in it, as the kernel numbers it.
    pub thread: u32,
    /// Two looks that find the same place and number have found the same call.
    pub place: u32,
    /// See `place`.
    pub number: u32,
}

/// The calls that are under way.
pub fn under_way() -> impl Iterator<Item = Call> {
    CALLS.iter().zip(0..).filter_map(|(slot, place)| {
        let number = slot.count.load(Ordering::Acquire);
        // SAFETY: NULL or a `Name`, which is static.
        let name = *unsafe { slot.name.load(Ordering::Acquire).as_ref() }?;
        Some(Call { name, thread: slot.thread.load(Ordering::Relaxed), place, number })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// All tests share the slots, and one of them takes them all.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    fn mine() -> Vec<Call> {
        under_way().filter(|c| c.thread == thread()).collect()
    }

    #[test]
    fn a_call_is_noted_until_it_returns() {
        let _alone = ONE_AT_A_TIME.lock();
        assert_eq!(mine(), []);
        let outer = Calling::new(&"cuLaunchKernel");
        let first = mine();
        assert_eq!(first.iter().map(|c| c.name).collect::<Vec<_>>(), ["cuLaunchKernel"]);
        assert_eq!(mine(), first, "it is still the same call");
        drop(outer);
        assert_eq!(mine(), []);
        let _again = Calling::new(&"cuLaunchKernel");
        assert_ne!(mine(), first, "it is another call");
    }

    #[test]
    fn more_calls_than_slots_are_no_fault() {
        let _alone = ONE_AT_A_TIME.lock();
        let many: Vec<_> = (0..2 * SLOTS).map(|_| Calling::new(&"cuInit")).collect();
        assert!(mine().len() <= SLOTS);
        drop(many);
        assert_eq!(mine(), []);
    }
}
