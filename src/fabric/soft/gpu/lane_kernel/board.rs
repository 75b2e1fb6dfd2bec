//! Through which a block of the lane kernel and its host talk: pinned host memory. `lanes.ptx` has the same offsets.

use super::grid::Deal;
use crate::fabric::lanes::{Format, Holds, LaneView, Position, Rings, LONGEST, WINDOWS};
use crate::fabric::soft::gpu::resident::SlotMemory;
use std::sync::atomic::{AtomicU64, Ordering};

const GO_AT: usize = 0;
const STOP_AT: usize = 8;
const SPREAD_AT: usize = 16;
const HOLDS_AT: usize = 24;
const UP_AT: usize = 64;
const GONE_AT: usize = 128;
const POSITIONS_AT: usize = 256;
const RECORDS_AT: usize = 1024;
/// Words of a record, and of a window in it, which begin at the ninth.
const RECORD_WORDS: usize = 32;
const WINDOWS_AT: usize = 8;
const WINDOW_WORDS: usize = 6;
/// In a position: the kernel does not touch the lane any more.
const OVER: u64 = 1 << 32;
/// Lanes of a block, at most.
pub const ROOM: usize = 64;
/// Bytes of all of it: so far apart are those of a launch's blocks.
pub const BYTES: usize = RECORDS_AT + ROOM * RECORD_WORDS * 8;

/// The board of a block in a launch slot.
pub struct Board {
    host: *mut u8,
    /// For the kernel.
    pub device: u64,
}

// SAFETY: the memory is used through atomics alone.
unsafe impl Send for Board {}

/// A lane, as the kernel reaches it.
#[derive(Clone, Copy, Debug)]
pub struct LaneRecord {
    /// What device code and the rank know of it; windows that the kernel does not reach have no handle.
    pub view: LaneView,
    /// Where the peer's windows are for this GPU.
    pub windows: [u64; WINDOWS],
    /// Which of them are only read.
    pub are_read: [bool; WINDOWS],
    /// Where the peer's signals of the context are for this GPU.
    pub signals: u64,
    /// The longest copy.
    pub most: u32,
    /// The peer is on another GPU.
    pub is_far: bool,
}

impl Board {
    /// # Safety
    /// There are [`BYTES`] zeroed bytes, on a border of 256, which stay as long as this is used.
    pub unsafe fn new(memory: SlotMemory) -> Self {
        debug_assert!(memory.host as usize % 256 == 0);
        Self { host: memory.host, device: memory.device }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at % 8 == 0 && at < BYTES);
        // SAFETY: an aligned word of the board (promised to `new`), used through atomics on this side.
        unsafe { AtomicU64::from_ptr(self.host.add(at).cast()) }
    }

    /// The number of the launch that has come up last.
    #[inline]
    pub fn up(&self) -> u64 {
        self.word(UP_AT).load(Ordering::Acquire)
    }

    /// The number of the launch that has ended last. Positions read after it are final.
    #[inline]
    pub fn gone(&self) -> u64 {
        self.word(GONE_AT).load(Ordering::Acquire)
    }

    /// Tells a launch to end.
    pub fn stop(&self, launch: u64) {
        self.word(STOP_AT).store(launch, Ordering::Release);
    }

    /// How far it has come with a lane.
    #[inline]
    pub fn position(&self, deal: Deal, nth: usize) -> Position {
        let word = self.word(POSITIONS_AT + 8 * deal.place(nth)).load(Ordering::Acquire);
        Position { next: word as u32, is_over: word & OVER != 0 }
    }

    /// Lets a block of so many warps begin with these lanes, for which it has room, all of descriptors or all of send
    /// entries that are rung alike. Returns where they are.
    pub fn go(&self, launch: u64, warps: usize, lanes: &[&LaneRecord]) -> Deal {
        let deal = Deal::of(lanes.len(), warps);
        for place in 0..ROOM {
            let lane = deal.nth(place).and_then(|nth| lanes.get(nth));
            let record = lane.map_or([0; RECORD_WORDS], |lane| lane.words());
            let at = RECORDS_AT + place * RECORD_WORDS * 8;
            // Of a place without a lane the first word says so.
            let words = if lane.is_some() { RECORD_WORDS } else { 1 };
            for (i, word) in record[..words].iter().enumerate() {
                self.word(at + 8 * i).store(*word, Ordering::Relaxed);
            }
            let first = lane.map_or(0, |lane| lane.view.next as u32);
            self.word(POSITIONS_AT + 8 * place).store(first.into(), Ordering::Relaxed);
        }
        let holds = lanes.first().map_or(0, |lane| lane.holds());
        debug_assert!(lanes.iter().all(|lane| lane.holds() == holds));
        self.word(HOLDS_AT).store(holds, Ordering::Relaxed);
        self.word(SPREAD_AT).store(deal.spread().into(), Ordering::Relaxed);
        self.word(GO_AT).store(launch, Ordering::Release);
        deal
    }
}

impl LaneRecord {
    /// Of a lane whose windows and signals at the peer are not known yet.
    pub fn new(view: &LaneView) -> Self {
        let (windows, are_read) = ([0; WINDOWS], [false; WINDOWS]);
        Self { view: *view, windows, are_read, signals: 0, most: LONGEST as u32, is_far: false }
    }

    /// What its slots hold, as the board has it.
    fn holds(&self) -> u64 {
        match self.view.format.holds() {
            Holds::Descriptors => 0,
            Holds::Entries => 1,
            Holds::EntriesWithDoorbell => 2,
        }
    }

    fn words(&self) -> [u64; RECORD_WORDS] {
        let (view, mut words) = (&self.view, [0; RECORD_WORDS]);
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (newest, which, at) = match view.format {
            Format::Short => (0, view.signals, self.signals),
            Format::Long(newest) => (newest, view.signals, self.signals),
            // A number has 24 bits, and stands before a byte that the kernel does not look at.
            Format::Entries { number, rings: Rings::Words(at) | Rings::Doorbell { at, .. } } => {
                (0, (number << 8).to_be(), at)
            }
        };
        words[0] = view.slots;
        words[1] = pair(view.size - 1, view.format.bytes().trailing_zeros());
        words[2] = pair(view.next as u32, which);
        words[3] = view.index;
        words[4] = at;
        words[5] = pair(newest, self.most);
        words[6] = u64::from(self.is_far) | u64::from(view.is_watched) << 1;
        words[7] = view.next >> 32;
        for (i, (window, remote)) in
            view.windows.iter().zip(self.windows).enumerate().filter(|(_, (w, _))| w.handle != 0)
        {
            let at = WINDOWS_AT + i * WINDOW_WORDS;
            let is_read = self.are_read[i].into();
            let all = [window.handle, window.base, window.len, remote, window.remote_len, is_read];
            words[at..at + WINDOW_WORDS].copy_from_slice(&all);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::lanes::WindowView;

    #[test]
    fn a_record_has_what_the_kernel_reads() {
        let mut view = LaneView {
            peer: 3,
            slots: 0x1000,
            size: 64,
            format: Format::Long(2),
            next: 7,
            index: 0x2000,
            signals: 9,
            signals_at: 0x3000,
            signals_key: 5,
            ..LaneView::default()
        };
        view.windows[2] =
            WindowView { handle: 77, lkey: 1, base: 0x4000, len: 64, rkey: 2, remote_base: 0x5000, remote_len: 32 };
        let known = LaneRecord { windows: [0, 0, 0x6000, 0], most: 4096, ..LaneRecord::new(&view) };
        let words = LaneRecord { signals: 0x7000, is_far: true, ..known }.words();
        assert_eq!(words[..8], [0x1000, 63 | 7 << 32, 7 | 9 << 32, 0x2000, 0x7000, 2 | 4096 << 32, 1, 0]);
        assert_eq!(words[8..20], [0; 12]);
        assert_eq!(words[20..26], [77, 0x4000, 64, 0x6000, 32, 0]);
        assert_eq!(words[26..], [0; 6]);
        let read = LaneRecord { are_read: [false, false, true, false], ..known }.words();
        assert_eq!((read[25], words[25]), (1, 0));
        let view = LaneView {
            format: Format::Entries { number: 0x01_0203, rings: Rings::Words(0x8000) },
            next: 5 << 32 | 7,
            signals: 0,
            ..view
        };
        let record = LaneRecord { most: 4096, ..LaneRecord::new(&view) };
        assert_eq!(record.words()[1..8], [63 | 6 << 32, 7 | 0x03_0201 << 32, 0x2000, 0x8000, 4096 << 32, 0, 5]);
        let rings = Rings::Doorbell { at: 0x9000, completions: 0x2000 };
        let format = Format::Entries { number: 0x01_0203, rings };
        let other = LaneRecord { view: LaneView { format, ..view }, ..record };
        assert_eq!((other.words()[4], record.holds(), other.holds()), (0x9000, 1, 2));
    }
}
