//! What windows between processes are made of, and what tests write there.

use super::*;
use nccl_plugin_api::PTR_HOST;

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

/// A window in host memory that was made on a NUMA node.
pub struct HostWindow {
    window: Window,
    at: *mut u64,
    words: usize,
}

impl HostWindow {
    /// One that GPUs with a bit in `who` are let to.
    pub fn new(fake: &Fake, r: &Rank, words: usize, who: u64) -> Self {
        // SAFETY: a function of the fake driver, of this type.
        let alloc = unsafe { fake.call::<extern "C" fn(usize, u64) -> u64>(b"fake_alloc_host") };
        let at = alloc((8 * words).next_multiple_of(65_536), who) as *mut u64;
        let mut window = r.not_registered(0);
        // SAFETY: memory that stays.
        let code = unsafe {
            T.reg_mr_sym.unwrap()(r.coll, at.cast(), words * 8, PTR_HOST, MR_FLAG_FORCE_SO, &mut window.handle)
        };
        ok(code);
        Self { window, at, words }
    }

    /// For the calls of `Rank`.
    pub fn as_window(&self) -> &Window {
        &self.window
    }

    pub fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.words);
        // SAFETY: inside the mapping, aligned.
        unsafe { AtomicU64::from_ptr(self.at.add(i)) }
    }

    pub fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Release);
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
