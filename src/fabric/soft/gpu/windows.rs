//! This rank's GPU windows, the values of their signals, its windows in host memory that GPUs may read, and which
//! windows of operations' callers are gone.

use super::op::{CallerWindow, Op};
use super::window_set::WindowSet;
use crate::memory::gpu::{HostMemory, SignalRules};
use crate::memory::key::Key;
use crate::memory::registry::Extent;
use crate::memory::table::Table;
use crate::rma::op::Signal;

/// A GPU window.
pub struct GpuWindow {
    extent: Extent,
    signals: SignalRules,
    /// Values of its signals by word, as far as they were ever signalled.
    sums: Vec<u64>,
    /// Which of them are values; `None`: all, and those behind them are 0.
    known: Option<Vec<bool>>,
}

/// Bytes around a signal that are read at once.
pub const READ_AT_ONCE: u64 = 4096;

impl GpuWindow {
    /// Which of its words an address is, that is in it.
    fn word_of(&self, addr: u64) -> usize {
        ((addr - self.extent.base) / 8) as usize
    }

    /// Whether the value of a word is known, where only additions ever change it.
    fn is_known(&self, at: usize) -> bool {
        self.known.as_ref().is_none_or(|known| known.get(at).is_some_and(|known| *known))
    }

    fn make_room(&mut self, at: usize) {
        if self.sums.len() <= at {
            self.sums.resize(at + 1, 0);
        }
        if let Some(known) = self.known.as_mut().filter(|known| known.len() <= at) {
            known.resize(at + 1, false);
        }
    }
}

/// This rank's GPU windows.
pub struct Windows {
    rank: u32,
    by_number: Table<GpuWindow>,
    /// In host memory of the driver's.
    in_host_memory: Table<HostMemory>,
    /// Windows that are gone, of other ranks of this process and this rank's own in host memory: nothing that touches
    /// what lies there begins.
    withdrawn: WindowSet,
    /// Those of them that are waited for no longer: nothing that has begun touches it either.
    left: WindowSet,
    /// Windows in host memory that operations have come from, and the last one.
    host_callers: WindowSet,
    last_caller: Option<CallerWindow>,
    /// Kernels may reset the signal that was added to last.
    last_may_be_reset: bool,
}

impl Windows {
    /// Of `rank`, which has none yet.
    pub fn of(rank: u32) -> Self {
        let (withdrawn, left, host_callers) = Default::default();
        let (by_number, in_host_memory) = Default::default();
        let (last_caller, last_may_be_reset) = (None, false);
        Self { rank, by_number, in_host_memory, withdrawn, left, host_callers, last_caller, last_may_be_reset }
    }

    /// Adds one.
    pub fn insert(&mut self, id: u32, extent: Extent, signals: SignalRules) {
        self.by_number.insert(id, GpuWindow { extent, signals, sums: Vec::new(), known: None });
    }

    /// Adds one in host memory.
    pub fn insert_host(&mut self, id: u32, memory: HostMemory) {
        self.in_host_memory.insert(id, memory);
    }

    /// One in host memory that GPUs may be let to.
    pub fn host_memory(&self, id: u32) -> Option<HostMemory> {
        self.in_host_memory.get(id).copied()
    }

    /// Removes it.
    pub fn remove(&mut self, id: u32) {
        self.by_number.remove(id);
        self.in_host_memory.remove(id);
    }

    /// Where a GPU window is.
    pub fn extent(&self, key: u32) -> Option<Extent> {
        self.by_number.get(Key(key).number()).map(|w| w.extent)
    }

    /// Whether a GPU window holds the range.
    pub fn holds(&self, key: u32, addr: u64, len: u64) -> bool {
        self.extent(key).is_some_and(|extent| extent.holds(addr, len))
    }

    /// Whether `len` bytes at `addr`, the end of an operation that is its caller's and in this window, may be touched:
    /// not once the window is gone, whose memory may be, too. Of windows of other ranks of this process, and of those
    /// in host memory, only that is known.
    #[inline]
    pub fn has_caller(&self, window: Option<CallerWindow>, addr: u64, len: u64) -> bool {
        window.is_none_or(|w| match w.rank == self.rank && Key(w.key).is_on_gpu() {
            true => self.holds(w.key, addr, len),
            false => !self.withdrawn.contains(w.rank, Key(w.key).number()),
        })
    }

    /// Whether bytes that are on their way to host memory in this window may go there: who deregisters it waits for
    /// them.
    pub fn may_deliver(&self, window: Option<CallerWindow>) -> bool {
        window.is_none_or(|w| !self.left.contains(w.rank, w.key))
    }

    /// Operations come.
    #[inline]
    pub fn note_callers<'a>(&mut self, ops: impl Iterator<Item = &'a Op>) {
        for window in ops.filter_map(|op| op.window).filter(|w| Key(w.key).is_in_host_memory()) {
            if self.last_caller != Some(window) {
                self.last_caller = Some(window);
                self.host_callers.insert(window.rank, window.key);
            }
        }
    }

    /// Whether operations have come from window `id` of `rank`, in host memory.
    pub fn is_host_caller(&self, rank: u32, id: u32) -> bool {
        self.host_callers.contains(rank, id)
    }

    /// Window `id` of another rank of this process is gone, or one of this rank's in host memory: nothing begins there.
    pub fn withdraw_caller(&mut self, rank: u32, id: u32) {
        self.withdrawn.insert(rank, id);
        self.host_callers.remove(rank, id);
        self.last_caller = None;
    }

    /// It is waited for no longer.
    pub fn leave_caller(&mut self, rank: u32, id: u32) {
        self.left.insert(rank, id);
    }

    /// Another one has its number.
    pub fn admit_caller(&mut self, rank: u32, id: u32) {
        [&mut self.withdrawn, &mut self.left, &mut self.host_callers].into_iter().for_each(|set| set.remove(rank, id));
        self.last_caller = None;
    }

    /// Whether the caller's end of an operation is in window `id` of `rank`.
    pub fn is_from(op: &Op, rank: u32, id: u32) -> bool {
        op.window.is_some_and(|w: CallerWindow| w.rank == rank && Key(w.key).number() == id)
    }

    /// Others have added to signals: the values of none are known here any more.
    pub fn forget_sums(&mut self) {
        self.by_number.iter_mut().for_each(|(_, window)| window.known = Some(Vec::new()));
    }

    /// Whether the value of a signal is in GPU memory alone: kernels may reset those of its window, or others have
    /// added to it.
    pub fn is_unknown(&self, key: u32, addr: u64) -> bool {
        let is_unknown = |w: &GpuWindow| !w.signals.never_reset || !w.is_known(w.word_of(addr));
        self.by_number.get(Key(key).number()).is_some_and(|w| w.extent.holds(addr, 8) && is_unknown(w))
    }

    /// Whether kernels may reset a window's signals, whose values are in GPU memory alone.
    pub fn may_be_reset(&self, key: u32) -> bool {
        self.by_number.get(Key(key).number()).is_some_and(|w| !w.signals.never_reset)
    }

    /// Whether a strong signal may not overtake others of its context.
    #[inline]
    pub fn orders_signals(&self, key: u32) -> bool {
        self.by_number.get(Key(key).number()).is_none_or(|w| w.signals.are_ordered)
    }

    /// Whether kernels may reset signals that are added to now.
    pub fn are_reset_of_late(&self) -> bool {
        self.last_may_be_reset
    }

    /// What to read where a signal is unknown, with those around it: its address and bytes, the same for all of these.
    pub fn around(&self, key: u32, addr: u64) -> (u64, u64) {
        let window = self.by_number.get(Key(key).number()).filter(|w| w.extent.base % 8 == 0);
        let Some(GpuWindow { extent, .. }) = window else { return (addr, 8) };
        let first = addr & !(READ_AT_ONCE - 1);
        let (from, end) = (first.max(extent.base), (first + READ_AT_ONCE).min(extent.base + (extent.len & !7)));
        (from, end - from)
    }

    /// What [`Windows::around`] named has been read, as `values` has it of so many bytes, and nobody has added since.
    /// Adds a signal and returns its sum.
    pub fn take_up(&mut self, signal: &Signal, values: impl FnOnce(u64) -> Vec<u64>) -> u64 {
        let (from, bytes) = self.around(signal.rkey, signal.remote);
        let values = values(bytes);
        self.learn(signal.rkey, from, &values);
        let sum = values[((signal.remote - from) / 8) as usize].wrapping_add(signal.value);
        self.add(signal.rkey, signal.remote, signal.value).unwrap_or(sum)
    }

    fn learn(&mut self, key: u32, addr: u64, values: &[u64]) {
        let Some(window) = self.by_number.get_mut(Key(key).number()).filter(|w| w.signals.never_reset) else { return };
        let first = window.word_of(addr);
        for (at, value) in (first..).zip(values) {
            if !window.is_known(at) {
                window.make_room(at);
                window.sums[at] = *value;
                window.known.iter_mut().for_each(|known| known[at] = true);
            }
        }
    }

    /// Adds to a signal whose value only this rank's engine changes and returns the sum; `Err(true)`: kernels may reset
    /// it, its value is in GPU memory alone; `Err(false)`: it is in no window.
    pub fn add(&mut self, key: u32, addr: u64, value: u64) -> Result<u64, bool> {
        let window = self.by_number.get_mut(Key(key).number());
        let window = window.filter(|w| w.extent.holds(addr, 8) && addr % 8 == 0).ok_or(false)?;
        self.last_may_be_reset = !window.signals.never_reset;
        if !window.signals.never_reset {
            return Err(true);
        }
        let at = window.word_of(addr);
        if !window.is_known(at) {
            return Err(true);
        }
        window.make_room(at);
        window.sums[at] = window.sums[at].wrapping_add(value);
        Ok(window.sums[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER_RESET: SignalRules = SignalRules::of_tables(true);
    const RESET: SignalRules = SignalRules::of_tables(false);

    #[test]
    fn sums_that_others_may_have_changed_are_read_once_with_those_around_them() {
        let key = Key::gpu(1, false).0;
        let mut windows = Windows::of(0);
        windows.insert(1, Extent { base: 0x1000, len: 0x2000 }, NEVER_RESET);
        assert_eq!(windows.add(key, 0x1008, 5), Ok(5));
        windows.forget_sums();
        assert_eq!(windows.add(key, 0x1008, 5), Err(true));
        assert!(windows.is_unknown(key, 0x1008) && windows.is_unknown(key, 0x2ff8));
        let signal = |remote| Signal { remote, rkey: key, value: 3, strong: true };
        let read = |bytes: u64| (0..bytes / 8).map(|i| 100 * i).collect();
        assert_eq!(windows.take_up(&signal(0x1010), read), 203);
        assert_eq!((windows.add(key, 0x1008, 1), windows.add(key, 0x1010, 1)), (Ok(101), Ok(204)));
        assert!(windows.is_unknown(key, 0x2000), "what was not read is not known");
        // Wherever the window begins, those that are read together are found together.
        windows.insert(3, Extent { base: 0x3100, len: 0x2008 }, RESET);
        let around = |addr| windows.around(Key::gpu(3, false).0, addr);
        assert_eq!(
            [0x3100, 0x3ff8, 0x4000, 0x4ff8, 0x5100].map(around),
            [(0x3100, 0xf00), (0x3100, 0xf00), (0x4000, 0x1000), (0x4000, 0x1000), (0x5000, 0x108),]
        );
        // Of signals that kernels reset nothing is remembered.
        windows.insert(2, Extent { base: 0x8000, len: 64 }, RESET);
        let key = Key::gpu(2, false).0;
        let signal = Signal { remote: 0x8008, rkey: key, value: 3, strong: true };
        assert_eq!(windows.around(key, 0x8008), (0x8000, 64));
        let read = |bytes| (0..bytes / 8).map(|i| 6 + i).collect();
        assert_eq!((windows.take_up(&signal, read), windows.add(key, 0x8008, 1)), (10, Err(true)));
        assert_eq!(windows.add(key, 0x8010, 1), Err(true), "nor of those around");
        assert!(windows.are_reset_of_late());
        assert_eq!(windows.add(Key::gpu(1, false).0, 0x1008, 1), Ok(102));
        assert!(!windows.are_reset_of_late());
    }
}
