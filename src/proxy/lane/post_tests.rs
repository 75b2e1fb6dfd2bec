use super::*;
use crate::error::Error;
use crate::fabric::{CreditIndex, Flush, Sent};
use crate::proxy::credits::{CreditWord, Owed};
use crate::proxy::drain::{Drain, Kept, Work};
use crate::proxy::idle::Rest;
use crate::proxy::ops::Ops;
use crate::proxy::ring::Head;
use crate::rma::atomic::Atomics;
use crate::rma::op::{Op, Put};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;

const SLOTS: usize = 4;
const TOTAL: u64 = 1000;

/// Device code that writes an entry as soon as a place is given back: entries are numbers from 1 on.
#[derive(Default)]
struct Device {
    slots: [u64; SLOTS],
    /// So many it writes in all.
    total: u64,
    written: u64,
    given_back: u64,
    /// By the lane; not what the fabric counted.
    credited: u32,
}

impl Device {
    fn write(&mut self) {
        while self.written < (self.given_back + SLOTS as u64).min(self.total) {
            let slot = &mut self.slots[self.written as usize % SLOTS];
            assert_eq!(*slot, 0, "a place is given back and still stands");
            self.written += 1;
            *slot = self.written;
        }
    }
}

struct Slots {
    device: Rc<RefCell<Device>>,
    next: u64,
    owed: Owed,
}

// SAFETY: a test uses it in one thread.
unsafe impl Send for Slots {}

/// A place of the ring.
struct Slot {
    device: Rc<RefCell<Device>>,
    at: usize,
}

impl Head for Slot {
    unsafe fn is_there(&self) -> bool {
        self.device.borrow().slots[self.at] != 0
    }
}

impl Ring for Slots {
    type Head = Slot;
    const ENDS: Ends = Ends::Ring;

    fn head(&self) -> Slot {
        Slot { device: self.device.clone(), at: self.next as usize % SLOTS }
    }
    fn capacity(&self) -> u32 {
        SLOTS as u32
    }
    fn begin(&mut self) {}
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        let entry = self.device.borrow().slots[(self.next + u64::from(nth)) as usize % SLOTS];
        if entry == 0 {
            return Entry::Absent;
        }
        ops.push(Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: entry, len: 8, signal: None, more: false }));
        Entry::Op(Finish::NONE)
    }
    fn rung(&mut self) -> u32 {
        (self.device.borrow().written - self.next) as u32
    }
    fn take(&mut self, n: u32) {
        (0..u64::from(n)).for_each(|i| self.device.borrow_mut().slots[(self.next + i) as usize % SLOTS] = 0);
        self.next += u64::from(n);
    }
    fn finish(&mut self, _: Finish) {}
    fn credit(&mut self, n: u32) {
        self.device.borrow_mut().credited += n;
        self.owed.add(n);
    }
    fn outstanding(&self) -> u32 {
        self.next as u32 - self.device.borrow().credited
    }
    fn owed(&mut self) -> Option<&mut Owed> {
        Some(&mut self.owed)
    }
    fn stop(&mut self, _: Stopped) {}
}

/// A fabric whose kernel carries out and counts what it is given before the call returns.
struct AtOnce {
    device: Rc<RefCell<Device>>,
    entries: RefCell<Vec<u64>>,
    done: AtomicU32,
    /// Operations that it takes at once at most.
    most: usize,
    fails: AtomicBool,
}

// SAFETY: a test uses it in one thread.
unsafe impl Send for AtOnce {}
// SAFETY: as above.
unsafe impl Sync for AtOnce {}

impl Context for AtOnce {
    const NAME: &'static str = "at once";
    const SHARES_PROGRESS: bool = true;

    unsafe fn post(&self, _: u32, ops: &[Op]) -> Result<Posted> {
        assert!(matches!(ops, [Op::Value(_)]), "all entries are the fabric's to count");
        // What failed it takes no entries; the word that gives them back it stores.
        let taken = self.fails.load(Ordering::Relaxed).into();
        Ok(Posted { taken, last: self.sent(1).newest })
    }
    unsafe fn post_entries(&self, _: u32, ops: &[Op], _: CreditIndex, begin: impl FnOnce(usize)) -> Result<Posted> {
        let taken = ops.len().min(self.most);
        begin(taken);
        if self.fails.load(Ordering::Relaxed) {
            return Err(Error::system("rank 1 is gone"));
        }
        for op in &ops[..taken] {
            let Op::Put(put) = op else { unreachable!() };
            self.entries.borrow_mut().push(put.remote);
            let mut device = self.device.borrow_mut();
            device.given_back += 1;
            device.write();
        }
        let last = self.done.fetch_add(taken as u32, Ordering::Relaxed) + taken as u32;
        Ok(Posted { taken, last: Seq(last) })
    }
    fn paid(&self, _: u32) -> u32 {
        self.done.load(Ordering::Relaxed)
    }
    fn flush(&self, _: u32, _: Option<u32>) -> Result<Flush> {
        Ok(Flush::Done)
    }
    fn test(&self, _: u32, _: Seq) -> Result<bool> {
        Ok(true)
    }
    fn progress(&self) -> Result<()> {
        Ok(())
    }
    fn has_error(&self) -> bool {
        false
    }
    fn completed(&self, _: u32) -> &AtomicU32 {
        &self.done
    }
    fn sent(&self, _: u32) -> Sent {
        Sent { newest: Seq(self.done.load(Ordering::Relaxed)), bytes: 0 }
    }
    fn atomics(&self) -> Atomics {
        Atomics::NONE
    }
}

/// With a ring that device code has filled, if it writes so many entries, and a fabric that takes so many at once.
fn bench(most: usize, total: u64) -> (Vec<AtOnce>, Lane<Slots>, Common) {
    let device = Rc::new(RefCell::new(Device { total, ..Device::default() }));
    device.borrow_mut().write();
    let owed = Owed::new(CreditWord::half(0, 7, 64), 1);
    let ring = Slots { device: device.clone(), next: 0, owed };
    let (entries, done, fails) = (RefCell::default(), AtomicU32::new(0), AtomicBool::new(false));
    let fabric = AtOnce { device, entries, done, most, fails };
    (vec![fabric], Lane::new(ring, 1, Seq(0)), Common::new(0, Arc::default()))
}

/// Device code writes the next entry into a place as soon as the fabric has counted it.
#[test]
fn places_are_clear_before_the_fabric_counts_them() {
    for most in [1, 3, SLOTS] {
        let (contexts, mut lane, mut common) = bench(most, TOTAL);
        let mut batch = Batch::default();
        for _ in 0..2 * TOTAL {
            lane.visit(u32::MAX, &contexts, &mut common, &mut batch);
        }
        assert_eq!(*contexts[0].entries.borrow(), (1..=TOTAL).collect::<Vec<_>>(), "{most} at once");
        assert_eq!(u64::from(contexts[0].device.borrow().credited), TOTAL);
    }
}

/// What was taken off the ring for a post that failed is given back all the same.
#[test]
fn what_a_failed_post_took_is_given_back() {
    let (contexts, mut lane, mut common) = bench(SLOTS, TOTAL);
    contexts[0].fails.store(true, Ordering::Relaxed);
    let found = lane.visit(u32::MAX, &contexts, &mut common, &mut Batch::default());
    assert_eq!((found.taken, found.has_failed), (SLOTS as u32, true), "they are counted as what came off the ring");
    assert_eq!((lane.ring.next, contexts[0].device.borrow().credited), (SLOTS as u64, SLOTS as u32));
}

/// Who looks for the next entry of a lane that has become cold looks behind those that the failed post took.
#[test]
fn what_comes_long_after_a_failed_post_is_given_back() {
    let (contexts, lane, common) = bench(SLOTS, 1);
    contexts[0].fails.store(true, Ordering::Relaxed);
    let (device, contexts) = (contexts[0].device.clone(), Arc::new(contexts));
    // SAFETY: the owner is that of the contexts.
    let kept = unsafe { Kept::new(&contexts, contexts.clone()) };
    let mut drain = Drain::new(kept, vec![common], vec![(0, lane)], Arc::new(()));
    let mut credited_after_passes = || {
        (0..2000).for_each(|_| _ = drain.pass(Rest::Awake));
        device.borrow().credited
    };
    assert_eq!(credited_after_passes(), 1);
    device.borrow_mut().total = 2;
    device.borrow_mut().write();
    assert_eq!(credited_after_passes(), 2);
}
