use super::*;
use crate::error::{Error, Result};
use crate::fabric::{Flush, Posted, Sent};
use crate::rma::atomic::Atomics;
use crate::rma::op::Put;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;

const PEER: u32 = 1;
const OWN: u32 = 0;
/// Where the model counts payments, which are numbered apart.
const INTERNAL: u32 = 2;

/// What the fabric has under way to the peer: operations that it may count, and others.
#[derive(Clone, Copy, PartialEq)]
enum Entry {
    MayCount,
    MayCountTwo,
    Other,
}

impl Entry {
    /// So many entries of device code's it is.
    fn entries(self) -> u32 {
        if self == Self::MayCountTwo {
            2
        } else {
            1
        }
    }
}

/// A fabric that does what it is told, with an index where nothing may meet.
#[derive(Default)]
struct Model {
    index: Cell<u64>,
    under_way: RefCell<VecDeque<Entry>>,
    payment: RefCell<Option<u64>>,
    paid: Cell<u32>,
    posted: [AtomicU32; 3],
    completed: [AtomicU32; 3],
    /// Of those to the peer that are complete.
    entries: Cell<u32>,
    may_count: Cell<bool>,
    /// Sums that were posted for the index.
    additions: RefCell<VecDeque<u64>>,
    sum: Cell<u64>,
    is_full: Cell<bool>,
    is_gone: Cell<bool>,
    is_peer_gone: Cell<bool>,
    /// An operation of the program to its own rank was refused.
    is_own_failed: Cell<bool>,
    payments: Cell<u32>,
}

// SAFETY: a test uses it in one thread.
unsafe impl Sync for Model {}

impl Model {
    fn take(&self, peer: u32, n: usize) -> Posted {
        let last = self.posted[peer as usize].fetch_add(n as u32, Ordering::Relaxed) + n as u32;
        Posted { taken: n, last: Seq(last) }
    }

    /// The oldest operation to the peer is complete; the fabric counts it, if it may and wants to.
    fn complete(&self, counts: bool) -> bool {
        let Some(entry) = self.under_way.borrow_mut().pop_front() else { return false };
        if entry != Entry::Other && counts {
            assert!(self.payment.borrow().is_none(), "counted while a payment is under way");
            self.index.set(self.index.get() + u64::from(entry.entries()));
            self.paid.set(self.paid.get() + entry.entries());
        }
        self.entries.set(self.entries.get() + entry.entries());
        self.completed[PEER as usize].fetch_add(1, Ordering::Relaxed);
        true
    }

    fn store(&self) {
        while let Some(value) = self.additions.borrow_mut().pop_front() {
            self.sum.set(self.sum.get() + value);
            // Who keeps the sum does not look at what others have made of the index.
            assert!(
                self.sum.get() > self.index.get(),
                "the index goes from {} to {}",
                self.index.get(),
                self.sum.get()
            );
            self.index.set(self.sum.get());
            self.completed[INTERNAL as usize].fetch_add(1, Ordering::Relaxed);
        }
        if let Some(value) = self.payment.borrow_mut().take() {
            assert!(value > self.index.get(), "the index goes from {} to {value}", self.index.get());
            self.index.set(value);
            self.completed[INTERNAL as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Context for Model {
    const NAME: &'static str = "model";
    const SHARES_PROGRESS: bool = true;

    unsafe fn post(&self, peer: u32, ops: &[Op]) -> Result<Posted> {
        if peer == OWN && self.is_own_failed.get() {
            return Err(Error::usage("a window was deregistered"));
        }
        self.under_way.borrow_mut().extend(ops.iter().map(|_| Entry::Other));
        Ok(self.take(peer, ops.len()))
    }
    unsafe fn post_internal(&self, rank: u32, op: &Op) -> Result<Posted> {
        assert_eq!(rank, OWN);
        match op {
            Op::Value(value) => {
                if self.is_gone.get() {
                    return Err(Error::system("the GPU is gone"));
                }
                if self.is_full.get() {
                    return Ok(Posted::NONE);
                }
                assert!(!self.under_way.borrow().contains(&Entry::MayCount), "a payment meets what is counted");
                let mut bytes = [0; 8];
                bytes[..value.payload.bytes().len()].copy_from_slice(value.payload.bytes());
                assert_eq!((value.rkey, value.remote), (7, 64));
                let before = self.payment.replace(Some(u64::from_le_bytes(bytes)));
                assert!(before.is_none(), "two payments at a time");
            }
            Op::Put(Put { signal: Some(signal), .. }) => {
                if self.is_full.get() {
                    return Ok(Posted::NONE);
                }
                self.additions.borrow_mut().push_back(signal.value);
            }
            other => panic!("no payment: {other:?}"),
        }
        self.payments.set(self.payments.get() + 1);
        Ok(self.take(INTERNAL, 1))
    }
    fn test_internal(&self, rank: u32, seq: Seq) -> Result<bool> {
        assert_eq!(rank, OWN);
        self.test(INTERNAL, seq)
    }
    fn completed_internal(&self, rank: u32) -> &AtomicU32 {
        assert_eq!(rank, OWN);
        self.completed(INTERNAL)
    }
    unsafe fn post_entries(
        &self,
        peer: u32,
        ops: &[Op],
        index: CreditIndex,
        begin: impl FnOnce(usize),
    ) -> Result<Posted> {
        begin(ops.len());
        assert_eq!((index.at, index.rkey), (64, 7));
        assert!(self.payment.borrow().is_none(), "what is counted meets a payment");
        assert!(self.additions.borrow().is_empty(), "what is counted meets an addition");
        let entry = |nth| if index.entries(nth) > 1 { Entry::MayCountTwo } else { Entry::MayCount };
        self.under_way.borrow_mut().extend((0..ops.len()).map(entry));
        Ok(self.take(peer, ops.len()))
    }
    fn may_count(&self, _: u32, rkey: u32) -> bool {
        assert_eq!(rkey, 7);
        self.may_count.get()
    }
    fn paid(&self, _: u32) -> u32 {
        self.paid.get()
    }
    fn flush(&self, _: u32, _: Option<u32>) -> Result<Flush> {
        Ok(Flush::Done)
    }
    fn test(&self, peer: u32, seq: Seq) -> Result<bool> {
        match self.is_gone.get() || self.is_peer_gone.get() && peer == PEER {
            true => Err(Error::system("the GPU is gone")),
            false => Ok(seq.is_done(Seq(self.completed[peer as usize].load(Ordering::Relaxed)))),
        }
    }
    fn progress(&self) -> Result<()> {
        Ok(())
    }
    fn has_error(&self) -> bool {
        false
    }
    fn completed(&self, peer: u32) -> &AtomicU32 {
        &self.completed[peer as usize]
    }
    fn sent(&self, peer: u32) -> Sent {
        Sent { newest: Seq(self.posted[peer as usize].load(Ordering::Relaxed)), bytes: 0 }
    }
    fn atomics(&self) -> Atomics {
        Atomics::NONE
    }
}

const PUT: Op = Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal: None, more: false });

/// A queue, as far as its credits go.
struct Lane {
    fabric: Model,
    owed: Owed,
    seen: u32,
    total: u64,
}

impl Lane {
    fn new(at: CreditWord, worth: u32) -> Self {
        Self { fabric: Model::default(), owed: Owed::new(at, worth), seen: 0, total: 0 }
    }

    /// Posts entries; `plain`: they need nothing but their credits. Whether the fabric may count them.
    fn post(&mut self, n: u64, plain: bool) -> bool {
        self.post_joined(n, plain, 0)
    }

    /// The same; a bit of `joined`, the lowest for the first, says that two entries are one operation.
    fn post_joined(&mut self, n: u64, plain: bool, joined: u32) -> bool {
        let ops = vec![PUT; n as usize];
        let index = if plain { self.owed.index(&self.fabric, PEER, joined) } else { None };
        self.total += n + index.map_or(0, |index| u64::from(index.joined.count_ones()));
        // SAFETY: nothing is read or written.
        match unsafe { index.map(|index| self.fabric.post_entries(PEER, &ops, index, |_| {})) } {
            Some(posted) => self.owed.may_count(posted.unwrap().last),
            // SAFETY: as above.
            None => _ = unsafe { self.fabric.post(PEER, &ops) },
        }
        index.is_some()
    }

    /// Sees what is complete, and pays.
    fn visit(&mut self) -> bool {
        let complete = self.fabric.entries.get();
        if complete != self.seen {
            self.owed.add(complete.wrapping_sub(self.seen));
        }
        self.seen = complete;
        let more_follow = !self.fabric.under_way.borrow().is_empty();
        let is_busy = self.owed.pay(&self.fabric, PEER, more_follow);
        assert!(self.fabric.index.get() <= self.total, "{} of {}", self.fabric.index.get(), self.total);
        is_busy
    }
}

fn half() -> CreditWord {
    CreditWord::half(OWN, 7, 64)
}

fn whole(is_counted: bool) -> CreditWord {
    CreditWord::whole(OWN, 7, 64, is_counted)
}

#[test]
fn few_credits_can_wait_while_more_follow() {
    let mut lane = Lane::new(half(), 4);
    lane.post(10, false);
    (0..3).for_each(|_| assert!(lane.fabric.complete(false)));
    assert!(!lane.visit() && lane.fabric.payment.borrow().is_none());
    lane.fabric.complete(false);
    assert!(lane.visit());
    assert_eq!(*lane.fabric.payment.borrow(), Some(4));
    (0..6).for_each(|_| assert!(lane.fabric.complete(false)));
    assert!(lane.visit(), "one at a time");
    lane.fabric.store();
    assert!(lane.visit());
    assert_eq!(*lane.fabric.payment.borrow(), Some(10));
    lane.fabric.store();
    assert!(!lane.visit());
    assert_eq!((lane.fabric.index.get(), lane.fabric.payments.get()), (10, 2));
}

/// The fabric counts what is plain; then come 2^31 operations of others on the same (context, peer).
#[test]
fn what_was_counted_long_ago_is_not_waited_for() {
    let mut lane = Lane::new(half(), 1);
    assert!(lane.post(3, true));
    (0..3).for_each(|_| assert!(lane.fabric.complete(true)));
    assert!(!lane.visit());
    for others in [&lane.fabric.posted, &lane.fabric.completed] {
        others[PEER as usize].fetch_add(1 << 31, Ordering::Relaxed);
    }
    lane.post(1, false);
    assert!(lane.fabric.complete(false));
    assert!(lane.visit());
    assert_eq!(*lane.fabric.payment.borrow(), Some(4));
}

#[test]
fn what_the_fabric_counts_costs_no_payment() {
    let mut lane = Lane::new(half(), 4);
    for _ in 0..100 {
        assert!(lane.post(3, true));
        while lane.fabric.complete(true) {
            assert!(!lane.visit());
        }
        assert!(!lane.visit());
    }
    assert_eq!((lane.fabric.index.get(), lane.fabric.payments.get()), (300, 0));
}

#[test]
fn entries_are_counted_again_after_a_payment() {
    let mut lane = Lane::new(half(), 2);
    assert!(lane.post(4, true));
    (0..3).for_each(|_| assert!(lane.fabric.complete(false)));
    assert!(lane.visit(), "it waits for the fourth, which may be counted");
    assert!(lane.fabric.payment.borrow().is_none());
    assert!(!lane.post(1, true), "a payment comes next");
    lane.fabric.complete(true);
    assert!(lane.visit());
    assert_eq!((*lane.fabric.payment.borrow(), lane.fabric.index.get()), (Some(4), 1));
    assert!(!lane.post(1, true), "it is under way");
    lane.fabric.store();
    (0..2).for_each(|_| assert!(lane.fabric.complete(true)));
    lane.visit();
    lane.fabric.store();
    assert!(!lane.visit() && lane.post(1, true));
}

#[test]
fn to_an_index_of_eight_bytes_payments_add() {
    for (is_counted, may_count) in [(false, true), (true, false)] {
        let mut lane = Lane::new(whole(is_counted), 3);
        lane.fabric.may_count.set(may_count);
        assert!(!lane.post(8, true), "another queue to the peer has an index, or the fabric cannot count there");
        (0..2).for_each(|_| assert!(lane.fabric.complete(true)));
        assert!(!lane.visit() && lane.fabric.payments.get() == 0);
        lane.fabric.complete(true);
        lane.fabric.is_full.set(true);
        assert!(lane.visit(), "there is no room");
        lane.fabric.is_full.set(false);
        assert!(lane.visit());
        assert!(!lane.visit(), "more follow");
        (0..5).for_each(|_| assert!(lane.fabric.complete(true)));
        assert!(lane.visit() && lane.fabric.payments.get() == 2, "it waits for no other");
        assert!(lane.visit(), "it is looked after");
        lane.fabric.store();
        assert!(!lane.visit());
        assert_eq!((lane.fabric.index.get(), lane.fabric.payments.get()), (8, 2));
    }
}

#[test]
fn payments_to_an_index_of_eight_bytes_store_once_the_fabric_may_count() {
    let mut lane = Lane::new(whole(true), 1);
    lane.post(2, true);
    while lane.fabric.complete(true) {}
    assert!(lane.visit());
    lane.fabric.may_count.set(true);
    assert!(!lane.post(1, true), "an addition is under way");
    lane.fabric.store();
    lane.fabric.complete(false);
    assert!(lane.visit());
    lane.fabric.store();
    for _ in 0..100 {
        assert!(lane.post_joined(3, true, 0b101));
        while lane.fabric.complete(true) {
            assert!(!lane.visit());
        }
    }
    assert_eq!((lane.fabric.index.get(), lane.fabric.payments.get()), (503, 2));
    assert!(lane.post_joined(2, true, 0b10));
    (0..2).for_each(|_| assert!(lane.fabric.complete(false)));
    assert!(lane.visit());
    assert_eq!(*lane.fabric.payment.borrow(), Some(506));
    lane.fabric.store();
    assert!(!lane.visit() && lane.post(1, true));
}

/// Whoever is told that the fabric has failed waits for nothing more.
#[test]
fn a_fabric_that_fails_is_not_waited_for() {
    for is_posted in [false, true] {
        let mut lane = Lane::new(half(), 1);
        lane.post(2, false);
        lane.fabric.complete(false);
        assert!(!is_posted || lane.visit());
        lane.fabric.is_gone.set(true);
        lane.fabric.complete(false);
        let visits = (0..=ASK_EVERY).take_while(|_| lane.visit()).count();
        assert!(visits <= ASK_EVERY as usize, "{is_posted}");
        assert!(!lane.visit());
    }
}

/// The program names a window that is gone in a put to its own rank: its other queues are told of their credits.
#[test]
fn a_fault_of_the_program_to_its_own_rank_ends_no_credits() {
    for at in [half(), whole(false), whole(true)] {
        let mut lane = Lane::new(at, 1);
        lane.fabric.is_own_failed.set(true);
        // SAFETY: nothing is read or written.
        assert!(unsafe { lane.fabric.post(OWN, &[PUT]) }.is_err());
        for told in 1..=3 {
            lane.post(1, false);
            assert!(lane.fabric.complete(false) && lane.visit());
            lane.fabric.store();
            assert!(!lane.visit());
            assert_eq!((lane.fabric.index.get(), lane.owed.is_late(&lane.fabric, PEER)), (told, false));
        }
    }
}

/// Behind what is complete an operation takes long: device code is told of the others meanwhile.
#[test]
fn few_credits_do_not_wait_for_a_long_operation() {
    for at in [half(), whole(false), whole(true)] {
        let mut lane = Lane::new(at, 64);
        lane.post(2, false);
        lane.fabric.complete(false);
        let visits = (0..2 * WAITS).take_while(|_| !lane.visit() && lane.fabric.payments.get() == 0).count() as u32;
        assert!((WAITS - 1..=WAITS).contains(&visits), "{visits}");
        lane.fabric.store();
        assert_eq!((lane.fabric.index.get(), lane.fabric.payments.get()), (1, 1));
    }
}

/// A peer alone is gone: what it was sent is counted by nobody any more, and credits are told all the same.
#[test]
fn credits_go_on_when_a_peer_is_gone() {
    let mut lane = Lane::new(half(), 4);
    assert!(lane.post(2, true));
    lane.fabric.is_peer_gone.set(true);
    lane.fabric.under_way.borrow_mut().clear();
    lane.owed.add(2);
    let visits = (0..=ASK_EVERY).take_while(|_| lane.visit() && lane.fabric.payment.borrow().is_none()).count();
    assert!(visits > 0 && visits <= ASK_EVERY as usize);
    assert_eq!(*lane.fabric.payment.borrow(), Some(2));
}

proptest! {
    /// Whatever is posted, counted, completed and stored when: the index never goes back nor beyond what is complete,
    /// and at the end all is told.
    #[test]
    fn all_is_told_once(
        (worth, is_wide) in (0..6_u32, any::<bool>()),
        steps in prop::collection::vec((0..6_u8, any::<bool>(), 1..5_u64), 1..300),
    ) {
        let mut lane = Lane::new(if is_wide { whole(true) } else { half() }, worth);
        for (what, flag, n) in steps {
            match what {
                0 => _ = lane.post_joined(n, flag, if is_wide { n as u32 } else { 0 }),
                1 | 2 => _ = lane.fabric.complete(flag),
                3 => lane.fabric.store(),
                4 => lane.fabric.is_full.set(flag),
                5 if n == 4 => lane.fabric.may_count.set(true),
                _ => _ = lane.visit(),
            }
            prop_assert!(lane.fabric.index.get() <= lane.fabric.entries.get().into());
        }
        lane.fabric.is_full.set(false);
        while lane.fabric.complete(true) {}
        for _ in 0..6 {
            lane.visit();
            lane.fabric.store();
        }
        prop_assert!(!lane.visit());
        prop_assert_eq!(lane.fabric.index.get(), lane.total);
    }
}
