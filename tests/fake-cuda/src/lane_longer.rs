//! A lane of the lane kernel, and which copies it takes that are longer than the most of its record.

use crate::lane_counts::LONGER;
use crate::lane_record::{Data, Record, Taken};
use nccl_plugin_api::descriptor::WORDS;
use std::sync::atomic::Ordering;

/// Others between two copies that are longer than the most, and before a launch's first one; or looks that found
/// nothing before one that is up to four times as long.
const OTHERS: u32 = 4;

/// A lane.
pub struct Lane {
    pub place: u64,
    pub record: Record,
    pub next: u32,
    pub is_closed: bool,
    /// Entries taken since the last copy that was longer than the most, and looks in vain.
    others: u32,
    vain: u32,
}

impl Lane {
    /// At a place, which begins where its record says.
    pub fn new(place: u64, record: Record) -> Self {
        let next = record.first;
        Self { place, record, next, is_closed: false, others: OTHERS, vain: 0 }
    }

    /// A look found nothing.
    pub fn note_vain(&mut self) {
        self.vain = self.vain.saturating_add(1);
    }

    /// Whether it is a copy longer than so many times the most.
    fn is_longer_than(&self, taken: &Taken, times: u64) -> bool {
        matches!(taken.data, Some(Data::Copy { bytes, .. }) if bytes > times * u64::from(self.record.most_bytes))
    }

    /// What the next entry asks for, if it is for the kernel. It (`lanes.ptx`) takes a copy longer than the most behind
    /// four others or a pause alone, where the lane is the only one of its warp.
    pub fn take(&mut self, words: [u64; WORDS], is_alone: bool) -> Option<Taken> {
        let taken = self.record.take(words, self.next)?;
        let is_longer = self.is_longer_than(&taken, 1);
        let is_paused = self.vain >= OTHERS && !self.is_longer_than(&taken, 4);
        if is_longer && !(is_alone && (self.others >= OTHERS || is_paused)) {
            return None;
        }
        LONGER.fetch_add(is_longer.into(), Ordering::Relaxed);
        (self.others, self.vain) = if is_longer { (0, 0) } else { (self.others + 1, self.vain) };
        Some(taken)
    }
}
