//! What lane kernels have done since the process began, counted for tests.

use std::sync::atomic::{AtomicU64, Ordering};

pub static DESCRIPTORS: AtomicU64 = AtomicU64::new(0);
pub static LONGER: AtomicU64 = AtomicU64::new(0);
pub static ENTRIES: AtomicU64 = AtomicU64::new(0);
pub static REFUSALS: AtomicU64 = AtomicU64::new(0);
pub static GOS: AtomicU64 = AtomicU64::new(0);
pub static GOS_OF_OTHERS: AtomicU64 = AtomicU64::new(0);
/// Launches that ended, by why.
pub static ENDS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

/// How many descriptors lane kernels have taken since the process began.
#[no_mangle]
pub extern "C" fn fake_lane_descriptors() -> u64 {
    DESCRIPTORS.load(Ordering::Relaxed)
}

/// How many send entries they have taken.
#[no_mangle]
pub extern "C" fn fake_lane_entries() -> u64 {
    ENTRIES.load(Ordering::Relaxed)
}

/// How many copies they have taken that are longer than the most of their lane.
#[no_mangle]
pub extern "C" fn fake_lane_longer() -> u64 {
    LONGER.load(Ordering::Relaxed)
}

/// How many lanes they have closed at a descriptor or an entry that is not for them.
#[no_mangle]
pub extern "C" fn fake_refused_lanes() -> u64 {
    REFUSALS.load(Ordering::Relaxed)
}

/// How many blocks of them got a go that are not the first of their launch.
#[no_mangle]
pub extern "C" fn fake_lane_gos_of_others() -> u64 {
    GOS_OF_OTHERS.load(Ordering::Relaxed)
}

/// How many blocks of them got a go.
#[no_mangle]
pub extern "C" fn fake_lane_gos() -> u64 {
    GOS.load(Ordering::Relaxed)
}

/// How many launches of them have ended because they were stopped (0), idle (1), or at the end of their life (2), also
/// where tests have brought it about.
#[no_mangle]
pub extern "C" fn fake_lane_ends(why: usize) -> u64 {
    ENDS.get(why).map_or(0, |n| n.load(Ordering::Relaxed))
}
