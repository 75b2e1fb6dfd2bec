//! Loom explores what device code and the engine may see of each other, with the engine's own functions. Device code is
//! played in the steps of NCCL's device headers, with slots of four words.

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32 as Modelled32, AtomicU64 as Modelled64};
use loom::sync::Arc;
use std::sync::atomic::Ordering::*;

/// Words of a slot.
const N: usize = 4;

/// What the engine leaves out, to see that loom misses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Without {
    Nothing,
    /// The fence behind the words of a descriptor.
    Fence,
    /// The order of the consumer index.
    IndexOrder,
    /// The order of counters.
    CounterOrder,
    /// Clearing slots before the index moves: it comes after.
    ClearFirst,
}

/// Words as loom watches them. `F` is what is left out.
struct Watched<W, const F: u32>(W);

macro_rules! watched {
    ($word:ty, $value:ty, $without:expr) => {
        impl<const F: u32> SharedWord<$value> for Watched<$word, F> {
            fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, if F == $without as u32 { Relaxed } else { order });
            }

            fn acquire() {
                if F != Without::Fence as u32 {
                    loom::sync::atomic::fence(Acquire);
                }
            }
        }
    };
}

watched!(Modelled64, u64, Without::CounterOrder);
watched!(Modelled32, u32, Without::IndexOrder);

/// A queue, the memory that its descriptors name as their sources, and a counter.
struct Shared<const F: u32> {
    words: Box<[Watched<Modelled64, F>]>,
    slots: u32,
    pi: Modelled32,
    ci: Watched<Modelled32, F>,
    counter: Watched<Modelled64, F>,
    sources: [UnsafeCell<u64>; 2],
}

// SAFETY: shared by atomics, but for the sources, of which loom is to find out.
unsafe impl<const F: u32> Sync for Shared<F> {}

impl<const F: u32> Shared<F> {
    fn new(slots: u32) -> Arc<Self> {
        Arc::new(Self {
            words: (0..slots as usize * N).map(|_| Watched(Modelled64::new(0))).collect(),
            slots,
            pi: Modelled32::new(0),
            ci: Watched(Modelled32::new(0)),
            counter: Watched(Modelled64::new(0)),
            sources: [0, 0].map(UnsafeCell::new),
        })
    }

    fn slots(&self) -> Slots<Watched<Modelled64, F>, N> {
        // SAFETY: as many as there are; the queue lives longer than the result.
        unsafe { Slots::new(NonNull::from(&self.words[0]), self.slots, N) }
    }

    /// Device code: writes `value` into a source, and a descriptor that names it, its words in this order.
    fn post(&self, source: usize, value: u64, order: [usize; N]) {
        // SAFETY: loom fails where somebody else is at it.
        self.sources[source].with_mut(|at| unsafe { *at = value });
        loom::sync::atomic::fence(Release);
        let index = self.pi.fetch_add(1, Relaxed);
        // Device code loads without an order here, and writes the slot if what it got allows that: no processor lets a
        // store become visible before it is decided. The model has no words for this but to acquire.
        while index.wrapping_sub(self.ci.0.load(Acquire)) >= self.slots {
            loom::thread::yield_now();
        }
        let slot = (index & (self.slots - 1)) as usize * N;
        for i in order {
            assert_eq!(self.words[slot + i].0.load(Relaxed), 0, "a slot is given back and not clear");
            self.words[slot + i].0.store(word(i, source, value), Relaxed);
        }
    }

    /// Device code: waits until descriptors before `index` are complete.
    fn flush(&self, index: u32) {
        while self.ci.0.load(Acquire) < index {
            loom::thread::yield_now();
        }
    }

    /// The engine: takes a descriptor once it is there, by `read`, and brings what its source holds.
    fn drain(&self, index: u32, read: impl Fn() -> Option<[u64; 2]>) -> u64 {
        let [source, value] = loop {
            match read() {
                Some(offsets) => break offsets,
                None => loom::thread::yield_now(),
            }
        };
        if F != Without::ClearFirst as u32 {
            self.slots().clear(index);
        }
        // SAFETY: as above.
        let found = self.sources[source as usize].with(|at| unsafe { *at });
        assert_eq!(found, value, "the source of descriptor {index} is not what it was when that was written");
        count(&self.counter);
        give_back(&self.ci, index + 1);
        if F == Without::ClearFirst as u32 {
            self.slots().clear(index);
        }
        value
    }

    /// A descriptor by all its words.
    fn words(&self, index: u32) -> Option<[u64; 2]> {
        let words = self.slots().words(index)?;
        let [source, value] = [words[1] >> 1, words[3] >> 1];
        assert_eq!(words, std::array::from_fn(|i| word(i, source as usize, value)), "words of several descriptors");
        Some([source, value])
    }

    /// A descriptor that differs in its offsets from one that was there before.
    fn repeated(&self, index: u32) -> Option<[u64; 2]> {
        self.slots().repeated(index, &std::array::from_fn(|i| word(i, 0, 0)))
    }
}

/// A word of a descriptor; those of the offsets are the source and its value.
fn word(i: usize, source: usize, value: u64) -> u64 {
    let says = match i {
        1 => source as u64,
        3 => value,
        other => 100 + other as u64,
    };
    says << 1 | 1
}

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

/// Three descriptors through one slot, from one source that is written again when the one before is complete: as its
/// credit says, or its counter.
fn one_slot_and_one_source<const F: u32>(by_counter: bool) {
    explore(move || {
        let shared = Shared::<F>::new(1);
        let its = shared.clone();
        let device = loom::thread::spawn(move || {
            for n in 0..3 {
                match by_counter {
                    false => its.flush(n),
                    true => {
                        while its.counter.0.load(Acquire) < u64::from(n) {
                            loom::thread::yield_now();
                        }
                    }
                }
                let order = if n == 1 { [0, 1, 2, 3] } else { [3, 2, 1, 0] };
                its.post(0, u64::from(n) + 1, order);
            }
        });
        let first = shared.drain(0, || shared.words(0));
        let others = [1, 2].map(|index| shared.drain(index, || shared.repeated(index).or_else(|| shared.words(index))));
        device.join().unwrap();
        assert_eq!((first, others), (1, [2, 3]));
    });
}

#[test]
fn descriptors_arrive_whole_and_their_sources_are_theirs_until_they_are_complete() {
    one_slot_and_one_source::<{ Without::Nothing as u32 }>(false);
    one_slot_and_one_source::<{ Without::Nothing as u32 }>(true);
}

/// Two threads of device code claim slots of one queue and write them in any order.
#[test]
fn descriptors_of_several_threads_are_taken_in_the_order_of_their_slots() {
    explore(|| {
        let shared = Shared::<{ Without::Nothing as u32 }>::new(2);
        let post = |source: usize| {
            let its = shared.clone();
            move || its.post(source, 7 + source as u64, [2, 0, 3, 1])
        };
        let threads = [post(0), post(1)].map(loom::thread::spawn);
        let mut found = [0, 1].map(|index| shared.drain(index, || shared.words(index)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        found.sort();
        assert_eq!(found, [7, 8]);
    });
}

/// Whether loom finds something wrong with an engine that leaves something out.
fn found<const F: u32>(by_counter: bool) -> bool {
    std::thread::spawn(move || one_slot_and_one_source::<F>(by_counter)).join().is_err()
}

#[test]
fn every_order_is_needed() {
    assert!(found::<{ Without::Fence as u32 }>(false), "without the fence");
    assert!(found::<{ Without::IndexOrder as u32 }>(false), "with an index that says nothing of what was before");
    assert!(found::<{ Without::CounterOrder as u32 }>(true), "with counters that say nothing of what was before");
    assert!(found::<{ Without::ClearFirst as u32 }>(false), "with slots that are cleared after they are given back");
}
