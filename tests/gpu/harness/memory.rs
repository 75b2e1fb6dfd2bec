//! What windows between processes are made of, and what tests write there.

use super::*;

/// What a window's memory is.
#[derive(Clone, Copy, Debug)]
pub enum Memory {
    /// Of cuMemCreate, side by side; the window starts somewhere in the first and ends somewhere in the last.
    Segments(usize),
    /// Of cuMemCreate, and not exportable.
    Private,
}

/// Bytes of all of them but the last.
const SEGMENT: usize = 1 << 20;

impl Fake {
    /// Devices of this process are on PCI buses from this one on.
    pub fn first_bus(&self, bus: i32) {
        // SAFETY: a function of the fake driver, of this type.
        unsafe { self.call::<extern "C" fn(i32)>(b"fake_first_bus")(bus) }
    }
}

impl Memory {
    /// A window over such memory, which begins a bit behind its start.
    pub fn window(self, fake: &Fake, r: &Rank, gpu: i32, words: usize) -> GpuWindow {
        let (segments, exportable) = match self {
            Self::Segments(n) => (n, true),
            Self::Private => (1, false),
        };
        let last = (4096 + words * 8).next_multiple_of(65_536).max(segments * SEGMENT) - (segments - 1) * SEGMENT;
        let sizes: Vec<_> = (1..segments).map(|_| SEGMENT).chain([last]).collect();
        let at = fake.segments(gpu, &sizes, exportable);
        fake.register_at(r, at + 4096, words, 0)
    }
}

/// What a word of a rank's holds; never 0.
pub fn pattern(rank: usize, i: usize) -> u64 {
    (rank as u64) << 32 | i as u64 | 1 << 63
}
