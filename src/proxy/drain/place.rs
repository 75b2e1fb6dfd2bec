//! A lane, and what a thread keeps of it to know when to look at it, and whether a kernel could have it.

use crate::fabric::lanes::Apart;
use crate::proxy::lane::{Common, Lane};
use std::time::Instant;

/// A lane among others.
pub(super) struct LanePlace<R> {
    pub(super) lane: Lane<R>,
    /// Index of its context in `commons`.
    pub(super) context: u32,
    pub(super) is_hot: bool,
    /// Visits since it carried something; when the first of them was, where a pause of it counts.
    pub(super) quiet: u32,
    pub(super) quiet_since: Instant,
    /// It had a fault even as it was only to give back what came: nobody touches it any more.
    pub(super) is_broken: bool,
    /// Entries in a row that a kernel would have taken, how many there must be before it gets the lane, and what lay
    /// between long copies.
    pub(super) suits: u32,
    pub(super) wanted: u32,
    pub(super) apart: Apart,
    /// In which service of a kernel it carried something last, and in which it was held for the next one and did not
    /// come to rest in time.
    pub(super) carried_in: u64,
    pub(super) late_in: u64,
}

impl<R> LanePlace<R> {
    /// A lane that has carried nothing, and the index of its context in `commons`.
    pub(super) fn new(lane: Lane<R>, context: u32) -> Self {
        Self {
            lane,
            context,
            is_hot: false,
            quiet: 0,
            quiet_since: Instant::now(),
            is_broken: false,
            suits: 0,
            wanted: 0,
            apart: Apart::default(),
            carried_in: 0,
            late_in: 0,
        }
    }

    /// Whether its context, one of these, still takes entries.
    pub(super) fn is_live(&self, commons: &[Common]) -> bool {
        !commons[self.context as usize].is_dead()
    }
}
