//! When lanes go to a kernel, and how much of them a thread takes until then.

use super::super::{Kept, Work};
use super::hand_over::REST_WITHIN;
use super::*;
use crate::fabric::lanes::{LaneView, Position, LONGEST_APART, TOGETHER};
use crate::memory::key::Key;
use crate::proxy::idle::Rest;
use crate::proxy::lane::stands::Stands;
use crate::proxy::lane::{Common, Lane};
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Ends, Entry, Finish, Head, Stopped};
use crate::rma::op::{Op, Put};
use crate::rma::seq::Seq;
use kernel::{Kernel, Orders};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Mutex;

/// Any window on a GPU.
const GPU: u32 = Key::gpu(1, false).0;

/// Entries that stand in a ring, and the bytes that each puts.
#[derive(Default)]
struct Stand {
    entries: AtomicU32,
    bytes: AtomicU32,
    /// They are flushes instead.
    flush: AtomicBool,
    /// The ring could be brought to the GPU.
    is_managed: AtomicBool,
    /// How often somebody looked whether an entry has begun to arrive.
    looks: AtomicU32,
}

struct Entries {
    stand: Arc<Stand>,
    next: u32,
    given_back: u32,
}

struct Place(Arc<Stand>);

impl Head for Place {
    unsafe fn is_there(&self) -> bool {
        self.0.looks.fetch_add(1, Ordering::Relaxed);
        self.0.entries.load(Ordering::Relaxed) > 0
    }
}

impl Ring for Entries {
    type Head = Place;
    const ENDS: Ends = Ends::Ring;

    fn head(&self) -> Place {
        Place(self.stand.clone())
    }
    fn capacity(&self) -> u32 {
        64
    }
    fn begin(&mut self) {}
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        if nth >= self.stand.entries.load(Ordering::Relaxed) {
            return Entry::Absent;
        }
        if self.stand.flush.load(Ordering::Relaxed) {
            return Entry::Flush(Finish::NONE);
        }
        let len = self.stand.bytes.load(Ordering::Relaxed).into();
        ops.push(Op::Put(Put { local: 0, lkey: GPU, rkey: GPU, remote: 0, len, signal: None, more: false }));
        Entry::Op(Finish::NONE)
    }
    fn rung(&mut self) -> u32 {
        self.stand.entries.load(Ordering::Relaxed)
    }
    fn take(&mut self, n: u32) {
        self.stand.entries.fetch_sub(n, Ordering::Relaxed);
        self.next += n;
    }
    fn finish(&mut self, _: Finish) {}
    fn credit(&mut self, n: u32) {
        self.given_back += n;
    }
    fn outstanding(&self) -> u32 {
        self.next - self.given_back
    }
    fn stop(&mut self, _: Stopped) {}
    fn can_be_served(&self) -> bool {
        true
    }
    fn can_be_watched(&self) -> bool {
        self.stand.is_managed.load(Ordering::Relaxed)
    }
    fn view(&mut self, is_watched: bool) -> Option<LaneView> {
        Some(LaneView { next: self.next.into(), is_watched, ..LaneView::default() })
    }
    fn served(&mut self, next: u32) -> u32 {
        let n = next - self.next;
        (self.next, self.given_back) = (next, next);
        n
    }
}

/// Lanes of one engine's thread, and the kernel that it may hand them to.
struct Bench {
    fabric: Arc<Vec<Stands>>,
    stands: Vec<Arc<Stand>>,
    told: Arc<Mutex<Orders>>,
    drain: Drain<Stands, Entries>,
}

impl Bench {
    /// Lanes of which the engine knows that their entries are for a kernel.
    fn new(lanes: u32) -> Self {
        let mut bench = Self::quiet(lanes);
        // One each shows it.
        bench.write(1);
        bench.pass();
        bench.complete();
        bench
    }

    /// Lanes that may be brought to the GPU. The first one has had an entry, the others none.
    fn managed(lanes: u32) -> Self {
        let mut bench = Self::quiet(lanes);
        bench.stands.iter().for_each(|stand| stand.is_managed.store(true, Ordering::Relaxed));
        bench.write_first(1);
        bench.pass();
        bench.complete();
        bench
    }

    /// Lanes that have had nothing.
    fn quiet(lanes: u32) -> Self {
        let fabric = Arc::new(vec![Stands::default()]);
        let stands: Vec<_> = (0..lanes).map(|_| Arc::<Stand>::default()).collect();
        let told = Arc::new(Mutex::new(Orders::default()));
        // SAFETY: the owner is the vector itself.
        let kept = unsafe { Kept::new(&fabric, fabric.clone()) };
        let lane = |(peer, stand): (usize, &Arc<Stand>)| {
            let ring = Entries { stand: stand.clone(), next: 0, given_back: 0 };
            (0, Lane::new(ring, peer as u32, Seq(0)))
        };
        let lanes = stands.iter().enumerate().map(lane).collect();
        let commons = vec![Common::new(0, Arc::default())];
        let drain = Drain::new(kept, commons, lanes, Arc::new(())).served(Some(Box::new(Kernel(told.clone()))));
        Self { fabric, stands, told, drain }
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Orders> {
        self.told.lock().unwrap()
    }

    fn write(&self, entries: u32) {
        self.stands.iter().for_each(|stand| {
            stand.entries.fetch_add(entries, Ordering::Relaxed);
        });
    }

    fn write_first(&self, entries: u32) {
        self.stands[0].entries.fetch_add(entries, Ordering::Relaxed);
    }

    /// How often somebody has looked at any ring.
    fn looks(&self) -> u32 {
        self.stands.iter().map(|stand| stand.looks.load(Ordering::Relaxed)).sum()
    }

    /// Entries that stand in each ring.
    fn standing(&self) -> Vec<u32> {
        self.stands.iter().map(|stand| stand.entries.load(Ordering::Relaxed)).collect()
    }

    fn pass(&mut self) {
        self.drain.pass(Rest::Awake);
    }

    /// All lanes carry something, and a kernel has come and has so many of them.
    fn let_serve(&mut self, lanes: usize) {
        self.write(4);
        (0..2).for_each(|_| self.pass());
        self.told().stage = Stage::Ready;
        self.complete();
        self.pass();
        assert_eq!(self.told().given, lanes);
    }

    /// The first lane carries something, and a kernel has come, which has these lanes; says of each whether it watches.
    fn let_serve_first(&mut self) -> Vec<bool> {
        self.write_first(4);
        (0..2).for_each(|_| self.pass());
        self.told().stage = Stage::Ready;
        self.complete();
        self.pass();
        assert_eq!(self.told().stage, Stage::Serving);
        self.told().watched.clone()
    }

    /// All that was posted is complete, and the next pass sees it.
    fn complete(&mut self) {
        let posted = self.fabric[0].posted.load(Ordering::Relaxed);
        self.fabric[0].completed.store(posted, Ordering::Relaxed);
        self.pass();
    }
}

#[test]
fn few_entries_are_taken_until_a_kernel_serves() {
    let mut bench = Bench::new(2);
    bench.write(20);
    (0..2).for_each(|_| bench.pass());
    assert_eq!((bench.standing(), &bench.told().calls[..]), (vec![16; 2], &[2][..]), "four of each are under way");
    bench.complete();
    assert_eq!(bench.standing(), [12; 2], "as many again: nothing stands still");
    bench.told().stage = Stage::Ready;
    bench.pass();
    assert_eq!((bench.standing(), bench.told().given), (vec![12; 2], 0), "they are held");
    bench.complete();
    bench.pass();
    assert_eq!((bench.standing(), bench.told().given), (vec![12; 2], 2), "the kernel has them");
}

#[test]
fn all_is_taken_where_none_comes() {
    let late = |bench: &mut Bench| (bench.told().stage, bench.told().is_awaited) = (Stage::Off, false);
    let mut bench = Bench::new(2);
    bench.write(20);
    bench.pass();
    assert_eq!(bench.standing(), [16; 2]);
    // It is given up, and the next one is not waited for before one has come.
    late(&mut bench);
    bench.pass();
    assert_eq!((bench.standing(), bench.told().calls.len()), (vec![0; 2], 2));
    bench.complete();
    bench.told().stage = Stage::Ready;
    (0..2).for_each(|_| bench.pass());
    assert_eq!(bench.told().given, 2);
    bench.told().stage = Stage::Over;
    bench.write(20);
    bench.pass();
    assert_eq!(bench.standing(), [16; 2]);
    // None can be called.
    bench.told().hears = false;
    late(&mut bench);
    (0..2).for_each(|_| bench.pass());
    assert_eq!(bench.standing(), [0; 2]);
}

#[test]
fn entries_that_are_not_for_a_kernel_are_all_taken() {
    let mut bench = Bench::new(2);
    bench.stands.iter().for_each(|stand| stand.bytes.store(1 << 20, Ordering::Relaxed));
    bench.write(20);
    bench.pass();
    assert_eq!(bench.standing(), [0; 2]);
    // Behind these, what is.
    bench.stands.iter().for_each(|stand| stand.bytes.store(8, Ordering::Relaxed));
    bench.write(20);
    bench.pass();
    assert_eq!(bench.standing(), [20; 2], "enough is under way");
    bench.complete();
    assert_eq!(bench.standing(), [16; 2]);
}

#[test]
fn a_flush_is_taken_whatever_is_under_way() {
    let mut bench = Bench::new(1);
    bench.write(4);
    bench.pass();
    bench.stands[0].flush.store(true, Ordering::Relaxed);
    bench.write(1);
    bench.pass();
    assert_eq!(bench.standing(), [0]);
}

#[test]
fn the_next_kernel_has_the_lanes_before_anything_is_taken() {
    let mut bench = Bench::new(2);
    bench.let_serve(2);
    // It has taken all, and the next one is there as its time is over.
    bench.told().positions.iter_mut().for_each(|next| *next += 40);
    bench.pass();
    bench.told().given = 0;
    (bench.told().is_awaited, bench.told().stage) = (true, Stage::Over);
    bench.write(20);
    bench.pass();
    assert_eq!((bench.standing(), bench.told().given), (vec![20; 2], 2));
}

#[test]
fn lanes_for_which_there_is_no_room_go_on_and_stay_the_kernels() {
    let mut bench = Bench::new(3);
    bench.told().room = 2;
    bench.let_serve(2);
    bench.write(4);
    bench.pass();
    assert_eq!(bench.standing().iter().filter(|&&n| n == 0).count(), 1, "the third one is this thread's");
    // The next one has room.
    assert_eq!(bench.told().calls[..], [3]);
    bench.pass();
    assert_eq!(bench.told().calls[..], [3, 3], "for all of them");
    bench.told().room = 8;
    bench.complete();
    (0..3).for_each(|_| bench.pass());
    assert_eq!(bench.told().given, 3);
}

#[test]
fn a_kernel_that_has_all_lanes_is_alone_in_looking_at_them() {
    let mut bench = Bench::managed(3);
    assert_eq!(bench.let_serve_first(), [false, true, true], "the others are watched");
    let calls = bench.told().calls.clone();
    assert_eq!(calls, [3], "room for all was asked for");
    let looks = bench.looks();
    (0..2000).for_each(|_| bench.pass());
    assert_eq!(bench.looks(), looks);
    // The next one has them at once.
    (bench.told().is_awaited, bench.told().stage) = (true, Stage::Over);
    bench.told().given = 0;
    (0..10).for_each(|_| bench.pass());
    assert_eq!((bench.told().given, bench.looks()), (3, looks));
    // None comes: this thread looks itself.
    bench.told().stage = Stage::Over;
    bench.pass();
    assert!(bench.looks() > looks);
}

/// Launches, each directly behind the one before, carry something.
fn carry_on(bench: &mut Bench) {
    for _ in 0..4 {
        (bench.told().is_awaited, bench.told().stage) = (true, Stage::Over);
        bench.pass();
        bench.told().positions[0] += 10;
        bench.pass();
        std::thread::sleep(Duration::from_millis(1));
        bench.pass();
    }
}

#[test]
fn queues_of_all_lanes_are_brought_to_the_gpu() {
    let mut bench = Bench::managed(2);
    bench.let_serve_first();
    carry_on(&mut bench);
    assert!(bench.told().brought > 0);
}

#[test]
fn queues_that_cannot_be_brought_are_served_alone_all_the_same() {
    let mut bench = Bench::new(2);
    bench.let_serve(2);
    let looks = bench.looks();
    carry_on(&mut bench);
    assert_eq!(bench.looks(), looks);
    assert_eq!(bench.told().brought, 0);
}

#[test]
fn a_watched_lane_that_carries_something_is_this_threads_and_then_served() {
    let mut bench = Bench::managed(3);
    bench.let_serve_first();
    bench.stands[1].entries.store(MANY, Ordering::Relaxed);
    bench.pass();
    assert_eq!(bench.standing()[1], MANY, "nobody looks before the kernel says so");
    bench.told().closed[1] = true;
    bench.pass();
    assert_eq!(bench.standing()[1], 0);
    // Enough for another launch, which has it like any other, as what came there is for the kernel.
    (0..10).for_each(|_| bench.complete());
    let watched = bench.told().watched.clone();
    assert_eq!(watched, [false, false, true]);
}

#[test]
fn others_have_what_carries_something_alone() {
    // Too many; one that cannot be brought; one that carries what is not for the kernel.
    let mut many = Bench::managed(TOGETHER as u32 + 1);
    many.told().room = LANES;
    assert_eq!(many.let_serve_first(), [false]);
    let mut pinned = Bench::managed(2);
    pinned.stands[1].is_managed.store(false, Ordering::Relaxed);
    assert_eq!(pinned.let_serve_first(), [false]);
    let mut busy = Bench::managed(2);
    busy.stands[1].bytes.store(2 * LONGEST_APART as u32, Ordering::Relaxed);
    busy.stands[1].entries.store(1, Ordering::Relaxed);
    busy.pass();
    assert_eq!(busy.let_serve_first(), [false]);
    for bench in [&mut many, &mut pinned, &mut busy] {
        let looks = bench.looks();
        carry_on(bench);
        assert!(bench.looks() > looks && bench.told().brought == 0);
    }
}

#[path = "service_tests/joining.rs"]
mod joining;
#[path = "service_tests/kept_out.rs"]
mod kept_out;
#[path = "service_tests/kernel.rs"]
mod kernel;
#[path = "service_tests/overdue.rs"]
mod overdue;
#[path = "service_tests/pauses.rs"]
mod pauses;
