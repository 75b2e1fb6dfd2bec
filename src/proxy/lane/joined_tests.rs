//! Entries that are a part of the operation before them.

use super::stands::Stands;
use super::*;
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Ends, Head};
use crate::rma::op::{Op, Put};
use proptest::prelude::*;
use std::cell::RefCell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Op,
    Joined,
    Nothing,
    /// An entry of two operations.
    Two,
}

struct Nowhere;

impl Head for Nowhere {
    unsafe fn is_there(&self) -> bool {
        false
    }
}

/// A long ring, and what is to be the case of it.
struct Entries {
    all: Vec<Kind>,
    next: usize,
    credited: RefCell<usize>,
    /// The last operation of a batch that was read, if no joined entry can follow it in the next one.
    can_join: bool,
}

// SAFETY: a test uses it in one thread.
unsafe impl Send for Entries {}

impl Ring for Entries {
    type Head = Nowhere;
    const ENDS: Ends = Ends::Ring;
    const JOINS: bool = true;

    fn head(&self) -> Nowhere {
        Nowhere
    }
    fn capacity(&self) -> u32 {
        128
    }
    fn begin(&mut self) {
        self.can_join = false;
    }
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        let Some(kind) = self.all.get(self.next + nth as usize) else { return Entry::Absent };
        let put = Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 8, signal: None, more: false });
        let could_join = std::mem::replace(&mut self.can_join, *kind == Kind::Op);
        match kind {
            Kind::Joined if could_join => return Entry::Joined,
            // What has nothing to join is an operation of its own.
            Kind::Op | Kind::Joined => ops.push(put),
            Kind::Nothing => return Entry::Nothing(Finish::NONE),
            Kind::Two => {
                [put; 2].into_iter().for_each(|put| ops.push(put));
                return Entry::Ops(2);
            }
        }
        Entry::Op(Finish::NONE)
    }
    fn rung(&mut self) -> u32 {
        (self.all.len() - self.next) as u32
    }
    fn take(&mut self, n: u32) {
        self.next += n as usize;
    }
    fn finish(&mut self, _: Finish) {}
    fn credit(&mut self, n: u32) {
        *self.credited.borrow_mut() += n as usize;
    }
    fn outstanding(&self) -> u32 {
        (self.next - *self.credited.borrow()) as u32
    }
    fn stop(&mut self, _: Stopped) {}
}

fn bench(all: Vec<Kind>) -> (Vec<Stands>, Lane<Entries>, Common) {
    let ring = Entries { all, next: 0, credited: RefCell::default(), can_join: false };
    (vec![Stands::default()], Lane::new(ring, 0, Seq(0)), Common::new(0, Arc::default()))
}

#[test]
fn a_batch_has_as_many_operations_whether_entries_join_them_or_not() {
    for (entries, taken) in [(vec![Kind::Op], BATCH), (vec![Kind::Op, Kind::Joined], 2 * BATCH)] {
        let (contexts, mut lane, mut common) = bench(entries.repeat(100));
        let mut batch = Batch::default();
        let found = lane.visit(u32::MAX, &contexts, &mut common, &mut batch);
        assert_eq!((found.taken, batch.posted().len() as u32), (taken, BATCH));
        let counts: Vec<_> = batch.counts().collect();
        assert_eq!(counts, [1, 0][..entries.len()].repeat(BATCH as usize));
        // The half of them are complete.
        contexts[0].completed.store(BATCH / 2, Ordering::Relaxed);
        contexts[0].is_full.store(true, Ordering::Relaxed);
        assert_eq!(lane.visit(u32::MAX, &contexts, &mut common, &mut batch).completed, taken / 2);
    }
}

proptest! {
    /// Whatever the fabric takes and completes when: entries are given back when the operation that has them is
    /// complete, and those without one when all before them are.
    #[test]
    fn each_entry_is_given_back_with_its_operation(
        kinds in prop::collection::vec(
            prop_oneof![4 => Just(Kind::Op), 4 => Just(Kind::Joined), 1 => Just(Kind::Nothing), 1 => Just(Kind::Two)],
            1..200,
        ),
        steps in prop::collection::vec((0..40_usize, 0..40_u32), 1..100),
    ) {
        let (contexts, mut lane, mut common) = bench(kinds.clone());
        let fabric = &contexts[0];
        let mut batch = Batch::default();
        // By entry: operations that must be complete for it.
        let mut needs: Vec<u32> = Vec::new();
        let mut posted = 0;
        let mut visit = |lane: &mut Lane<Entries>| {
            let found = lane.visit(u32::MAX, &contexts, &mut common, &mut batch);
            for count in batch.counts().take(found.taken as usize) {
                posted += u32::from(count);
                needs.push(posted);
            }
            let done = fabric.completed.load(Ordering::Relaxed);
            let credited = *lane.ring.credited.borrow();
            (needs.iter().take_while(|&&n| n <= done).count(), credited, needs.len(), lane.under_way as usize)
        };
        for (room, done) in steps {
            fabric.is_full.store(room == 0, Ordering::Relaxed);
            fabric.most.store(room as u32, Ordering::Relaxed);
            let most = fabric.posted.load(Ordering::Relaxed);
            let done = (fabric.completed.load(Ordering::Relaxed) + done).min(most);
            fabric.completed.store(done, Ordering::Relaxed);
            let (may_be, is, taken, under_way) = visit(&mut lane);
            prop_assert!(is <= may_be && taken == is + under_way, "{is} of {may_be}, {taken} taken");
        }
        fabric.is_full.store(false, Ordering::Relaxed);
        fabric.most.store(0, Ordering::Relaxed);
        for _ in 0..2 * kinds.len() {
            fabric.completed.store(fabric.posted.load(Ordering::Relaxed), Ordering::Relaxed);
            visit(&mut lane);
        }
        prop_assert_eq!(*lane.ring.credited.borrow(), kinds.len());
    }
}
