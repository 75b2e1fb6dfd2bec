//! The windows of one communicator, those that are gone among them.

use super::window::Window;
use crate::sys::sync::Mutex;
use std::sync::Arc;

/// Keeps a communicator's windows in memory, live or not, and has the next one that is registered take the place of one
/// that is gone: there are never more than were live at a time. Who takes operations keeps it.
pub struct WindowPool {
    coll: u64,
    nranks: usize,
    places: Mutex<PoolPlaces>,
}

#[derive(Default)]
struct PoolPlaces {
    all: Vec<Arc<Window>>,
    /// Those that nobody registers or deregisters, and no handle stands for.
    free: Vec<Arc<Window>>,
}

impl WindowPool {
    /// Of a communicator of so many ranks.
    pub fn new(coll: u64, nranks: usize) -> Self {
        Self { coll, nranks, places: Mutex::default() }
    }

    /// A window that stands for nothing yet.
    pub fn take(&self) -> Arc<Window> {
        let mut places = self.places.lock();
        places.free.pop().unwrap_or_else(|| {
            let window = Arc::new(Window::new(self.coll, self.nranks));
            places.all.push(window.clone());
            window
        })
    }

    /// The registration of this one has ended, and its handle has.
    pub fn give_back(&self, window: Arc<Window>) {
        window.release();
        self.places.lock().free.push(window);
    }

    /// Windows in memory.
    pub fn count(&self) -> usize {
        self.places.lock().all.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::window::{Registration, Remote, WindowFacts};
    use crate::sys::handles;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// A window whose numbers are all `n`.
    fn registered(pool: &WindowPool, n: u64) -> (Arc<Window>, *mut c_void) {
        let window = pool.take();
        let registration = Registration { lkey: n as u32, rkey: n as u32, guard: Box::new(()) };
        let remote = Box::new([Remote { base: n, len: n, rkey: n as u32 }]);
        window.describe(WindowFacts { id: n as u32, base: n, len: n, remote, registration });
        let handle = handles::insert(window.clone()).unwrap();
        (window, handle)
    }

    fn deregistered(pool: &WindowPool, window: Arc<Window>, handle: *mut c_void) {
        assert!(handles::remove::<Window>(handle).is_some());
        pool.give_back(window);
    }

    #[test]
    fn a_window_that_is_gone_gives_its_place_to_the_next_one() {
        let pool = WindowPool::new(5, 1);
        let (first, one) = registered(&pool, 1);
        let (_second, two) = registered(&pool, 2);
        let weak = Arc::downgrade(&first);
        deregistered(&pool, first, one);
        let kept = weak.upgrade().expect("it stays in memory");
        assert!(kept.registration().is_none() && pool.count() == 2);
        let (third, three) = registered(&pool, 3);
        assert!(Arc::ptr_eq(&kept, &third) && pool.count() == 2);
        // SAFETY: the pool keeps the windows.
        let base = |handle| unsafe { handles::read(handle, |w: &Window| w.base()) };
        assert_eq!([one, two, three].map(base), [None, Some(2), Some(3)]);
        [two, three].into_iter().for_each(|handle| drop(handles::remove::<Window>(handle)));
        drop((kept, third, _second, pool));
        assert!(weak.upgrade().is_none(), "nobody keeps it any more");
    }

    /// Whoever reads a window as it goes finds it whole or not at all, whatever takes its place in the table of
    /// handles and in the pool.
    #[test]
    fn a_window_that_goes_as_it_is_read_is_whole_or_none() {
        let pool = WindowPool::new(6, 1);
        let (newest, over) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|s| {
            let readers = [(); 2].map(|()| {
                s.spawn(|| {
                    let mut found = 0u64;
                    while !over.load(Ordering::Relaxed) {
                        let handle = newest.load(Ordering::Relaxed) as *mut c_void;
                        let all = |w: &Window| {
                            let at = w.remote()[0].load();
                            [w.base(), w.len(), w.lkey().into(), at.base, at.len, at.rkey.into()]
                        };
                        // SAFETY: the pool keeps the windows.
                        if let Some(seen) = unsafe { handles::read(handle, all) } {
                            assert!(seen.iter().all(|n| *n == seen[0]), "{seen:?}");
                            found += 1;
                        }
                    }
                    found
                })
            });
            for n in 1..=200_000 {
                let (window, handle) = registered(&pool, n);
                newest.store(handle as u64, Ordering::Relaxed);
                deregistered(&pool, window, handle);
            }
            over.store(true, Ordering::Relaxed);
            for reader in readers {
                assert!(reader.join().is_ok_and(|found| found > 0), "it has read none");
            }
        });
        assert_eq!(pool.count(), 1);
    }
}
