//! Memory that the ranks of one case and the process that started them share: where each rank is, and a way to
//! gather small messages and to stop together.

use super::findings::stopped;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The longest message that one gather carries, bytes.
pub const MESSAGE: usize = 1024;
/// Calls into the plugin by number, for [`Rank::call`].
pub const CALLS: &[&str] = &[
    "no call",
    "dlopen",
    "init",
    "getProperties",
    "listen",
    "connect",
    "closeListen",
    "createContext",
    "regMrSym",
    "deregMrSym",
    "destroyContext",
    "closeColl",
    "finalize",
    "iput",
    "iputSignal",
    "iget",
    "iflush",
    "test",
    "progress",
    "queryLastError",
    "getRmaProperties",
    "dlclose",
];

/// Sleeps between two looks, after a wait of so long: what is late already is not waited for to the microsecond, and
/// ranks that wait for a deadline take no core from those that work.
pub fn nap(waited: Duration) {
    let us = if waited < Duration::from_millis(200) { 50 } else { 250 };
    std::thread::sleep(Duration::from_micros(us));
}

/// What one rank shows to the others. Lives in shared memory, all zero at first.
#[repr(C)]
pub struct Rank {
    /// Counts up as long as the rank is alive and not stuck in a call.
    pub beat: AtomicU64,
    /// Rounds done.
    pub done: AtomicU64,
    /// Rounds to do; 0: unknown.
    pub total: AtomicU64,
    /// Index into [`CALLS`]: where it is now.
    pub call: AtomicU32,
    /// The rank will kill itself on purpose.
    pub doomed: AtomicU32,
    /// Messages published.
    epoch: AtomicU64,
    lengths: [AtomicU64; 2],
    messages: [std::cell::UnsafeCell<[u8; MESSAGE]>; 2],
}

/// The shared memory of one case.
pub struct Control {
    ranks: *mut Rank,
    aborted: *mut AtomicU32,
    nranks: usize,
    bytes: usize,
}

impl Control {
    /// Makes the memory; children forked after this share it.
    pub fn new(nranks: usize) -> std::io::Result<Self> {
        let bytes = nranks * size_of::<Rank>() + 64;
        // SAFETY: a new anonymous mapping, zeroed, given back in drop.
        let at = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: inside the mapping, which is page-aligned; the flag's word comes first.
        let ranks = unsafe { at.byte_add(64) }.cast();
        Ok(Self { ranks, aborted: at.cast(), nranks, bytes })
    }

    /// How many ranks there are.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    /// One rank's part.
    pub fn rank(&self, rank: usize) -> &Rank {
        assert!(rank < self.nranks);
        // SAFETY: in bounds; all zero is a valid Rank; shared access goes through atomics.
        unsafe { &*self.ranks.add(rank) }
    }

    /// Tells all ranks to stop waiting.
    pub fn abort(&self) {
        // SAFETY: the mapping lives as long as self.
        unsafe { &*self.aborted }.store(1, Ordering::Release);
    }

    /// Whether some rank has failed.
    pub fn aborted(&self) -> bool {
        // SAFETY: as above.
        unsafe { &*self.aborted }.load(Ordering::Acquire) != 0
    }

    /// Publishes `mine` and returns what each rank of `among` published in the same step. All of them call it the
    /// same number of times. `Err` names the ranks that did not come within `limit`.
    pub fn gather(&self, rank: usize, among: &[usize], mine: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, String> {
        assert!(mine.len() <= MESSAGE);
        let me = self.rank(rank);
        let epoch = me.epoch.load(Ordering::Relaxed);
        let side = (epoch % 2) as usize;
        // SAFETY: this rank writes its own slot; peers read it only between this epoch and the next but one, which
        // this rank reaches after they have read it.
        unsafe { (&mut *me.messages[side].get())[..mine.len()].copy_from_slice(mine) };
        me.lengths[side].store(mine.len() as u64, Ordering::Relaxed);
        me.epoch.store(epoch + 1, Ordering::Release);
        let start = Instant::now();
        let mut found = Vec::with_capacity(among.len());
        for &peer in among {
            let other = self.rank(peer);
            while other.epoch.load(Ordering::Acquire) <= epoch {
                me.beat.fetch_add(1, Ordering::Relaxed);
                let what = || {
                    let late = among.iter().filter(|&&p| self.rank(p).epoch.load(Ordering::Acquire) <= epoch);
                    let late = late.map(usize::to_string).collect::<Vec<_>>().join(", ");
                    format!("rank(s) {late} to reach the same step")
                };
                let waited = start.elapsed();
                if self.aborted() {
                    return Err(stopped(waited, what()));
                }
                if waited > limit {
                    return Err(format!("waited {} s for {}", limit.as_secs(), what()));
                }
                nap(waited);
            }
            let len = other.lengths[side].load(Ordering::Relaxed) as usize;
            // SAFETY: published before the epoch that was read with acquire.
            found.push(unsafe { (&*other.messages[side].get())[..len].to_vec() });
        }
        Ok(found)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // SAFETY: the mapping that new made.
        unsafe { libc::munmap(self.aborted.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathers_step_by_step_and_names_who_is_missing() {
        let control = Control::new(3).expect("map");
        let limit = Duration::from_secs(30);
        struct Shared<'a>(&'a Control);
        // SAFETY: threads stand in for processes; the control block is made for sharing.
        unsafe impl Sync for Shared<'_> {}
        let shared = &Shared(&control);
        std::thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    for step in 0..200_u8 {
                        let said = shared.0.gather(rank, &[0, 1, 2], &[rank as u8, step], limit).expect("gather");
                        assert_eq!(said, [[0, step], [1, step], [2, step]]);
                    }
                });
            }
        });
        let late = control.gather(1, &[0, 1], b"x", Duration::from_millis(20)).expect_err("rank 0 is missing");
        assert!(late.contains("rank(s) 0 "), "{late}");
    }
}
