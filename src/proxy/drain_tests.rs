//! What device code gets back where a fault inside the library has hit what drains its queues.

use super::*;
use crate::proxy::lane::stands::Stands;
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Ends, Entry, Finish, Stopped};
use crate::rma::op::{Op, Put};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Mutex;

/// What a ring's device code sees.
#[derive(Default)]
struct Seen {
    /// Entries that stand in the ring.
    entries: AtomicU64,
    given_back: AtomicU32,
    counted: AtomicU32,
    stopped: Mutex<Option<Stopped>>,
}

struct Words {
    seen: Arc<Seen>,
    taken: u32,
    /// Reading an entry is what has the fault, whatever was said of the ring.
    is_bad: bool,
}

struct Word(Arc<Seen>);

impl Head for Word {
    unsafe fn is_there(&self) -> bool {
        self.0.entries.load(Ordering::Relaxed) > 0
    }
}

impl Ring for Words {
    type Head = Word;
    const ENDS: Ends = Ends::Ring;

    fn head(&self) -> Word {
        Word(self.seen.clone())
    }
    fn capacity(&self) -> u32 {
        8
    }
    fn begin(&mut self) {}
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        if u64::from(nth) >= self.seen.entries.load(Ordering::Relaxed) {
            return Entry::Absent;
        }
        assert!(!self.is_bad, "a fault of this test's own, in a ring");
        ops.push(Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 8, signal: None, more: false }));
        Entry::Op(Finish(1))
    }
    fn rung(&mut self) -> u32 {
        self.seen.entries.load(Ordering::Relaxed) as u32
    }
    fn take(&mut self, n: u32) {
        self.seen.entries.fetch_sub(n.into(), Ordering::Relaxed);
        self.taken += n;
    }
    fn finish(&mut self, finish: Finish) {
        self.seen.counted.fetch_add(finish.0, Ordering::Relaxed);
    }
    fn credit(&mut self, n: u32) {
        self.seen.given_back.fetch_add(n, Ordering::Relaxed);
    }
    fn outstanding(&self) -> u32 {
        self.taken - self.seen.given_back.load(Ordering::Relaxed)
    }
    fn stop(&mut self, why: Stopped) {
        *self.seen.stopped.lock().unwrap() = Some(why);
    }
}

struct Bench {
    fabric: Arc<Vec<Stands>>,
    rings: [Arc<Seen>; 2],
    failed: Arc<AtomicBool>,
    drain: Drain<Stands, Words>,
}

impl Bench {
    /// Two lanes of one context; which of them is bad.
    fn new(bad: Option<usize>) -> Self {
        let (fabric, failed) = (Arc::new(vec![Stands::default()]), Arc::new(AtomicBool::new(false)));
        let rings = [(); 2].map(|()| Arc::<Seen>::default());
        // SAFETY: the owner is the vector itself.
        let kept = unsafe { Kept::new(&fabric, fabric.clone()) };
        let words = |(i, seen): (usize, &Arc<Seen>)| {
            let ring = Words { seen: seen.clone(), taken: 0, is_bad: bad == Some(i) };
            (0, Lane::new(ring, i as u32, Seq(0)))
        };
        let lanes = rings.iter().enumerate().map(words).collect();
        let drain = Drain::new(kept, vec![Common::new(0, failed.clone())], lanes, Arc::new(()));
        Self { fabric, rings, failed, drain }
    }

    fn write(&self, entries: u64) {
        for ring in &self.rings {
            ring.entries.fetch_add(entries, Ordering::Relaxed);
        }
    }

    fn given_back(&self) -> [u32; 2] {
        [0, 1].map(|i: usize| self.rings[i].given_back.load(Ordering::Relaxed))
    }

    /// What the engine's thread does.
    fn pass(&mut self) {
        let drain = &mut self.drain;
        if unbroken(|| drain.pass(Rest::Awake)).is_none() {
            drain.fail();
        }
    }
}

#[test]
fn device_code_gets_back_what_was_under_way_at_a_fault_and_what_comes() {
    let mut bench = Bench::new(None);
    bench.write(3);
    (0..3).for_each(|_| bench.pass());
    assert_eq!((bench.given_back(), bench.fabric[0].posted.load(Ordering::Relaxed)), ([0; 2], 6));
    // The fault comes as the next ones are posted, and again and again as the fabric is to advance.
    bench.fabric[0].panics.store(true, Ordering::Relaxed);
    bench.write(2);
    bench.pass();
    assert!(bench.failed.load(Ordering::Relaxed), "queryLastError shows it at once");
    assert_eq!(bench.given_back(), [3; 2]);
    for entries in [5, 7] {
        (0..3).for_each(|_| bench.pass());
        assert_eq!(bench.given_back(), [entries; 2]);
        bench.write(2);
    }
    for ring in &bench.rings {
        assert_eq!(*ring.stopped.lock().unwrap(), Some(Stopped::Lost), "a queue pair tells of it");
        assert_eq!(ring.counted.load(Ordering::Relaxed), 7, "sources are free: their counters say so");
    }
    assert_eq!(bench.fabric[0].posted.load(Ordering::Relaxed), 6, "nothing was carried out");
    assert_eq!(bench.drain.name(), "contexts 0");
}

/// A lane that has a fault at each look holds up no other one.
#[test]
fn a_lane_that_is_broken_for_good_is_left_alone() {
    let mut bench = Bench::new(Some(0));
    bench.write(2);
    (0..5).for_each(|_| bench.pass());
    assert!(bench.failed.load(Ordering::Relaxed));
    assert_eq!(bench.given_back(), [0, 2]);
    bench.write(1);
    (0..2).for_each(|_| bench.pass());
    assert_eq!(bench.given_back(), [0, 3]);
}

impl Bench {
    fn complete(&self, operations: u32) {
        self.fabric[0].completed.fetch_add(operations, Ordering::Relaxed);
    }

    fn left(&self, marks: &mut Vec<LaneMark>) -> (u64, bool) {
        let left = self.drain.left(marks);
        (left.entries, left.stands)
    }
}

/// Entries that stand and those that are under way; what comes later is not counted.
#[test]
fn marks_are_passed_when_what_was_written_is_complete() {
    let mut bench = Bench::new(None);
    assert_eq!(bench.drain.mark(), [], "nothing is there");
    bench.rings[0].entries.store(3, Ordering::Relaxed);
    bench.pass();
    bench.rings[0].entries.store(2, Ordering::Relaxed);
    bench.rings[1].entries.store(4, Ordering::Relaxed);
    let mut marks = bench.drain.mark();
    assert_eq!(marks, [LaneMark { lane: 0, until: 5 }, LaneMark { lane: 1, until: 4 }]);
    assert_eq!(bench.drain.hot, [0, 1], "the next pass takes them");
    assert_eq!(bench.left(&mut marks), (9, false));
    (0..2).for_each(|_| bench.pass());
    bench.write(7);
    bench.pass();
    assert_eq!((bench.left(&mut marks), bench.fabric[0].posted.load(Ordering::Relaxed)), ((9, false), 23));
    // They are numbered over both lanes here.
    bench.complete(5);
    bench.pass();
    assert_eq!(bench.left(&mut marks), (4, false));
    assert_eq!(marks, [LaneMark { lane: 1, until: 4 }]);
    assert_eq!(bench.drain.give_up(&marks), "4 entries to rank 1 (context 0)");
    assert_eq!(bench.left(&mut marks), (4, true));
    bench.complete(18);
    bench.pass();
    assert_eq!(bench.left(&mut marks), (0, true));
    assert!(marks.is_empty());
    assert_eq!(bench.drain.mark(), []);
}

/// What has failed gives entries back and carries none out.
#[test]
fn nobody_waits_for_marks_of_what_has_failed() {
    let mut bench = Bench::new(None);
    bench.write(2);
    bench.fabric[0].is_gone.store(true, Ordering::Relaxed);
    let mut marks = bench.drain.mark();
    bench.pass();
    bench.pass();
    assert_eq!((bench.left(&mut marks).0, bench.given_back()), (0, [2; 2]));
    bench.write(2);
    assert_eq!(bench.drain.mark(), [], "lanes that the fabric failed");
    let mut bench = Bench::new(None);
    bench.write(2);
    bench.drain.fail();
    assert_eq!(bench.drain.mark(), [], "a fault of the library");
}
