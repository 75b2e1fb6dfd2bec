//! What the fake driver tells of its lane kernel, and what tests have it do.

pub mod meeting;
pub mod served;
pub mod tables;

use super::*;

/// What tests that say nothing about the lane kernel have: none, as they look at what others do. The last word counts;
/// what the first one says tells this from a test's own.
const NO_LANES: &str = "lanes=1,lanes=0";

/// A test's words of `OXYGIN_GPU_ISSUE` with what they do not say.
pub fn words(how: &str) -> String {
    match how {
        "" => NO_LANES.into(),
        _ if how.contains("lanes=") => how.into(),
        _ => format!("{how},{NO_LANES}"),
    }
}

/// Why a launch of the lane kernel ended.
#[derive(Clone, Copy, Debug)]
pub enum LanesEnd {
    /// It was stopped.
    Stop,
    /// It had nothing to do.
    Idle,
    /// Its time was over, or a test's limit was reached.
    Life,
}

impl Fake {
    /// No launch of the lane kernel starts from here on; `false`: those that did not do so now.
    pub fn hold_lanes(&self, held: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(bool)>(b"fake_hold_lanes")(held) }
    }

    /// Lane kernels start, and the CPU may use managed memory beside kernels, as on most machines.
    pub(super) fn reset_lanes(&self) {
        self.hold_lanes(false);
        self.set_managed(true);
        self.set_staying(false);
    }

    /// Ranges of managed memory that were brought to a GPU so far.
    pub fn brought(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_brought")() }
    }

    /// Whether the CPU may use managed memory while kernels run; if not, none is brought anywhere either.
    pub fn set_managed(&self, is_concurrent: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(bool)>(b"fake_set_managed")(is_concurrent) }
    }

    /// Whether managed memory that is made is brought nowhere.
    pub fn set_staying(&self, stays: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(bool)>(b"fake_set_staying")(stays) }
    }

    /// How many launches do not start because of that.
    pub fn held_lanes(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_held_lanes")() }
    }

    /// Descriptors that lane kernels have taken so far.
    pub fn lane_descriptors(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_lane_descriptors")() }
    }

    /// Send entries that they have taken so far.
    pub fn lane_entries(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_lane_entries")() }
    }

    /// How many copies they have taken that are longer than the most of their lane.
    pub fn longer_copies(&self) -> u64 {
        // SAFETY: the fake's function has this signature.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_lane_longer")() }
    }

    /// Lanes that they have closed so far at a descriptor or an entry that is not for them.
    pub fn refused_lanes(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_refused_lanes")() }
    }

    /// Blocks of them that have got a go so far, and are not the first of their launch.
    pub fn lane_gos_of_others(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_lane_gos_of_others")() }
    }

    /// Blocks of them that have got a go so far.
    pub fn lane_gos(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_lane_gos")() }
    }

    /// Launches of them that have ended so far, by why.
    pub fn lane_ends(&self, why: LanesEnd) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(usize) -> u64>(b"fake_lane_ends")(why as usize) }
    }
}

/// The own engine, with a kernel that serves lanes, unless the words of `OXYGIN_GPU_ISSUE` say that there is none.
pub fn serve_by_kernel() {
    std::env::set_var("OXYGIN_ENGINE", "own");
    if let Ok(words) = std::env::var("OXYGIN_GPU_ISSUE") {
        std::env::set_var("OXYGIN_GPU_ISSUE", words.replace(NO_LANES, "lanes=1"));
    }
}
