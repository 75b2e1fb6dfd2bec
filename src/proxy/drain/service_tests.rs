//! When lanes go to a kernel, and how much of them a thread takes until then.

use super::super::{Kept, Work};
use super::*;
use crate::fabric::lanes::Position;
use crate::proxy::idle::Rest;
use crate::proxy::lane::stands::Stands;
use crate::proxy::lane::{Common, Lane};
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Ends, Entry, Finish, Head, Stopped};
use crate::rma::op::{Op, Put};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Mutex;

/// Entries that stand in a ring, and the bytes that each puts.
#[derive(Default)]
struct Stand {
    entries: AtomicU32,
    bytes: AtomicU32,
    /// They are flushes instead.
    flush: AtomicBool,
}

struct Entries {
    stand: Arc<Stand>,
    next: u32,
    given_back: u32,
}

struct Place(Arc<Stand>);

impl Head for Place {
    unsafe fn is_there(&self) -> bool {
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
        ops.push(Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len, signal: None, more: false }));
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
    fn view(&mut self) -> Option<LaneView> {
        Some(LaneView { next: self.next.into(), ..LaneView::default() })
    }
    fn served(&mut self, next: u32) -> u32 {
        let n = next - self.next;
        (self.next, self.given_back) = (next, next);
        n
    }
}

/// A kernel that does what a test says.
struct Told {
    stage: Stage,
    /// One is called, or there behind the one that serves; whether a call is heard.
    is_awaited: bool,
    hears: bool,
    room: usize,
    /// Launches that were called, each for so many lanes.
    calls: Vec<usize>,
    /// How far it has come with the lanes that it was given.
    positions: Vec<u32>,
    given: usize,
}

struct Kernel(Arc<Mutex<Told>>);

impl LaneServer for Kernel {
    fn poll(&mut self, _: bool) -> Stage {
        self.0.lock().unwrap().stage
    }
    fn reaches(&self, _: u32) -> bool {
        true
    }
    fn is_awaited(&self) -> bool {
        self.0.lock().unwrap().is_awaited
    }
    fn call(&mut self, _: Instant, lanes: usize) {
        let mut told = self.0.lock().unwrap();
        if told.hears {
            told.is_awaited = true;
            told.calls.push(lanes);
            if told.stage == Stage::Off {
                told.stage = Stage::Called;
            }
        }
    }
    fn has_next(&self) -> bool {
        let told = self.0.lock().unwrap();
        told.is_awaited && matches!(told.stage, Stage::Ready | Stage::Serving)
    }
    fn room(&self) -> usize {
        self.0.lock().unwrap().room
    }
    fn serve(&mut self, lanes: &[LaneView]) -> Vec<bool> {
        let mut told = self.0.lock().unwrap();
        assert!(told.stage == Stage::Ready && lanes.len() <= told.room);
        (told.stage, told.is_awaited) = (Stage::Serving, false);
        told.positions = lanes.iter().map(|lane| lane.next as u32).collect();
        told.given = lanes.len();
        vec![true; lanes.len()]
    }
    fn position(&self, nth: usize) -> Position {
        Position { next: self.0.lock().unwrap().positions[nth], is_over: false }
    }
    fn stop(&mut self) {
        let mut told = self.0.lock().unwrap();
        if told.stage == Stage::Serving {
            told.stage = Stage::Over;
        }
    }
    fn settle(&mut self) {
        let mut told = self.0.lock().unwrap();
        if told.stage == Stage::Over {
            told.stage = if told.is_awaited { Stage::Ready } else { Stage::Off };
        }
    }
}

struct Bench {
    fabric: Arc<Vec<Stands>>,
    stands: Vec<Arc<Stand>>,
    told: Arc<Mutex<Told>>,
    drain: Drain<Stands, Entries>,
}

impl Bench {
    /// Lanes of which the engine knows that their entries are for a kernel.
    fn new(lanes: u32) -> Self {
        let fabric = Arc::new(vec![Stands::default()]);
        let stands: Vec<_> = (0..lanes).map(|_| Arc::<Stand>::default()).collect();
        let told = Told {
            stage: Stage::Off,
            is_awaited: false,
            hears: true,
            room: 8,
            calls: Vec::new(),
            positions: Vec::new(),
            given: 0,
        };
        let told = Arc::new(Mutex::new(told));
        // SAFETY: the owner is the vector itself.
        let kept = unsafe { Kept::new(&fabric, fabric.clone()) };
        let lane = |(peer, stand): (usize, &Arc<Stand>)| {
            let ring = Entries { stand: stand.clone(), next: 0, given_back: 0 };
            (0, Lane::new(ring, peer as u32, Seq(0)))
        };
        let lanes = stands.iter().enumerate().map(lane).collect();
        let commons = vec![Common::new(0, Arc::default())];
        let drain = Drain::new(kept, commons, lanes, Arc::new(())).served(Some(Box::new(Kernel(told.clone()))));
        let mut bench = Self { fabric, stands, told, drain };
        // One each shows it.
        bench.write(1);
        bench.pass();
        bench.complete();
        bench
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap()
    }

    fn write(&self, entries: u32) {
        self.stands.iter().for_each(|stand| {
            stand.entries.fetch_add(entries, Ordering::Relaxed);
        });
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
