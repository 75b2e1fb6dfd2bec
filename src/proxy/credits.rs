//! Credits for device code that looks for them in GPU memory.
//!
//! This process cannot store there: the fabric does, for it. What device code is owed the engine tells by operations of
//! its own to its own rank, *payments*. They are posted apart from the program's ([`Context::post_internal`]): what it
//! does wrong to its own rank ends no other queue's credits. They need no order with its operations, since only what is
//! known to be complete is paid for.
//!
//! The fabric may count at an index itself, where it carries out the operations of entries by a kernel
//! ([`Context::post_entries`]). There a payment stores the whole count. Additions of the one and stores of the other
//! never meet: a payment waits until nothing is under way that may be counted, and nothing of that kind is posted
//! before the payment is done.
//!
//! To an index of 8 bytes payments add, as long as the fabric counts nothing there: they need not wait for each other
//! then. Once it may, they store. An addition would be lost, as this rank's engine keeps sums that only it adds to.
//!
//! [`Context::post_entries`]: crate::fabric::Context::post_entries
//! [`Context::post_internal`]: crate::fabric::Context::post_internal

use crate::error::Error;
use crate::fabric::{Context, CreditIndex};
use crate::rma::op::{Op, Payload, Put, Signal, Value};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicBool, Ordering};

/// Looks at a payment in vain after which the fabric is asked whether it will ever be done.
const ASK_EVERY: u32 = 4096;
/// Looks without a credit after which few are told although more follow: some 100 µs, longer than most operations take.
const WAITS: u32 = 1024;
/// That credits end was said, once a process: a GPU that fails ends those of many queues.
static IS_SAID: AtomicBool = AtomicBool::new(false);

/// A consumer index, of 4 or 8 bytes, in a window of this rank's.
#[derive(Clone, Copy, Debug)]
pub struct CreditWord {
    rank: u32,
    rkey: u32,
    at: u64,
    bytes: usize,
    is_counted: bool,
}

impl CreditWord {
    /// Of 4 bytes at `at`, on a border of as many. `rank` is this rank, `rkey` its own key to the window.
    pub fn half(rank: u32, rkey: u32, at: u64) -> Self {
        Self { rank, rkey, at, bytes: 4, is_counted: true }
    }

    /// Of 8 bytes at `at`. `is_counted`: the fabric may count there, as no other queue of its context to its peer has
    /// an index.
    pub fn whole(rank: u32, rkey: u32, at: u64, is_counted: bool) -> Self {
        Self { rank, rkey, at, bytes: 8, is_counted }
    }
}

/// A payment that is under way, or an operation that must be over before one.
#[derive(Clone, Copy, Debug)]
struct Payment {
    seq: Seq,
    looks: u32,
}

impl Payment {
    /// Whether it is complete, or will never be, for which the fabric is asked now and then.
    fn is_over<C: Context>(&mut self, context: &C, peer: u32) -> bool {
        if self.seq.is_done(Seq(context.completed(peer).load(Ordering::Acquire))) {
            return true;
        }
        self.looks += 1;
        self.looks % ASK_EVERY == 0 && context.test(peer, self.seq).is_err()
    }
}

/// What device code was told of an index, and what it has not been told.
#[derive(Debug)]
pub struct Owed {
    at: CreditWord,
    /// So many credits are worth a payment while more follow.
    worth: u32,
    /// Credits.
    credits: u64,
    /// How many of them payments have told, modulo 2^32.
    told: u32,
    /// Payments add; later ones may be under way than the one that is kept.
    adds: bool,
    payment: Option<Payment>,
    /// The newest operation that the fabric may count and is not known to have completed.
    counted: Option<Payment>,
    /// Looks since the last credit.
    waits: u32,
    /// The fabric takes no payment any more, and has said so.
    is_over: bool,
}

impl Owed {
    /// Of an index that is 0. `worth`: so many credits are worth a payment while more follow, a part of the ring's
    /// slots, so that a producer that waits for room finds some before all is used up.
    pub fn new(at: CreditWord, worth: u32) -> Self {
        Self {
            at,
            worth: worth.max(1),
            credits: 0,
            told: 0,
            adds: at.bytes > 4,
            payment: None,
            counted: None,
            waits: 0,
            is_over: false,
        }
    }

    /// A kernel has given `n` more, and told device code.
    pub fn served(&mut self, n: u32) {
        self.credits += u64::from(n);
        self.told = self.told.wrapping_add(n);
    }

    /// Whether device code has been told of all of its credits, and nothing is under way that changes the index.
    pub fn settled<C: Context>(&self, context: &C, peer: u32) -> bool {
        let paid = if self.adds { 0 } else { context.paid(peer) };
        self.payment.is_none() && self.counted.is_none() && !self.is_over && self.left(paid) == 0
    }

    /// Whether a kernel may ever store the index.
    pub fn suits_kernel(&self) -> bool {
        self.at.is_counted
    }

    /// The index's address, for a kernel that stores it: nothing is under way that changes it, and from here on
    /// payments store it, too. `None`: other queues' completions are told by additions to this rank as well, which
    /// cannot be told from this one's.
    pub fn for_kernel(&mut self) -> Option<u64> {
        self.adds &= !self.at.is_counted;
        (!self.adds).then_some(self.at.at)
    }

    /// Device code is owed `n` more.
    #[inline(always)]
    pub fn add(&mut self, n: u32) {
        self.credits += u64::from(n);
        self.waits = 0;
    }

    /// So many credits are worth a payment now: fewer when more follow and do not come for long, as device code may
    /// wait for those that there are.
    #[inline(always)]
    fn least(&mut self, more_follow: bool) -> u32 {
        if !more_follow || self.waits >= WAITS {
            return 1;
        }
        self.waits += 1;
        self.worth
    }

    /// What was added and neither a payment nor the fabric, which has counted `paid`, has told.
    #[inline(always)]
    fn left(&self, paid: u32) -> u32 {
        let left = (self.credits as u32).wrapping_sub(self.told).wrapping_sub(paid);
        // The fabric is ahead of what was added by as much as has been completed since.
        if left > i32::MAX as u32 {
            0
        } else {
            left
        }
    }

    /// The index, for the fabric to count the entries of a batch to `peer` at; `None`: not now, as a payment is under
    /// way or comes next. `joined`: which operations are two entries.
    #[inline(always)]
    pub fn index<C: Context>(&mut self, context: &C, peer: u32, joined: u32) -> Option<CreditIndex> {
        if self.adds && !self.stops_adding(context, peer) {
            return None;
        }
        let CreditWord { rkey, at, bytes, .. } = self.at;
        let is_free = self.payment.is_none() && self.left(context.paid(peer)) < self.worth;
        is_free.then_some(CreditIndex { at, rkey, is_wide: bytes > 4, joined })
    }

    /// Whether the fabric may have counted: an entry's place may be used again before its completion is known here.
    #[inline(always)]
    pub fn may_be_ahead(&self) -> bool {
        !self.adds
    }

    /// The fabric counts from here on.
    #[cfg(test)]
    pub fn stop_adding(&mut self) {
        self.adds = false;
    }

    /// Payments end to add where the fabric may count, once all that were posted are over.
    fn stops_adding<C: Context>(&mut self, context: &C, peer: u32) -> bool {
        let CreditWord { rkey, is_counted, .. } = self.at;
        self.adds = !(is_counted && context.may_count(peer, rkey) && self.is_paid(context));
        !self.adds
    }

    /// Operations up to this one may be counted.
    #[inline(always)]
    pub fn may_count(&mut self, last: Seq) {
        self.counted = Some(Payment { seq: last, looks: 0 });
    }

    /// Posts what device code is owed on the queues to `peer`, and looks after what was posted. `more_follow`: entries
    /// are under way, so that a few credits can wait for theirs. Whether something is left to do.
    #[inline(always)]
    pub fn pay<C: Context>(&mut self, context: &C, peer: u32, more_follow: bool) -> bool {
        if self.adds {
            return self.pay_by_addition(context, more_follow);
        }
        if !more_follow && self.counted.as_mut().is_some_and(|counted| counted.is_over(context, peer)) {
            // Known while it is so: others post on that (context, peer), too, and numbers come again.
            self.counted = None;
        }
        if self.payment.is_some() && !self.is_paid(context) {
            return true;
        }
        let paid = context.paid(peer);
        let (left, least) = (self.left(paid), self.least(more_follow));
        if left < least || self.is_over {
            return false;
        }
        if let Some(counted) = &mut self.counted {
            if !counted.is_over(context, peer) {
                return true;
            }
            self.counted = None;
        }
        // Of what has completed the fabric shows by now what it has counted, which may be more than what was added
        // here: that is added first.
        let paid = context.paid(peer);
        if self.left(paid) >= least {
            self.post(context, paid);
        }
        true
    }

    /// The same, without waiting for earlier ones.
    #[inline(always)]
    fn pay_by_addition<C: Context>(&mut self, context: &C, more_follow: bool) -> bool {
        let (left, least) = (self.left(0), self.least(more_follow));
        if left < least || self.is_over {
            // What was posted is looked after. Where more follow, that is on the way already.
            return !more_follow && !self.is_paid(context);
        }
        let CreditWord { rank, rkey, at, .. } = self.at;
        let signal = Some(Signal { remote: at, rkey, value: left.into(), strong: false });
        let op = Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal, more: false });
        // SAFETY: the operation names memory of the set's alone, which ends after its queues.
        match unsafe { context.post_internal(rank, &op) } {
            Ok(posted) if posted.taken == 0 => {}
            Ok(posted) => {
                self.told = self.told.wrapping_add(left);
                self.payment = Some(Payment { seq: posted.last, looks: 0 });
            }
            Err(why) => {
                self.end(&why);
                return false;
            }
        }
        true
    }

    fn post<C: Context>(&mut self, context: &C, paid: u32) {
        let CreditWord { rank, rkey, at, bytes, .. } = self.at;
        let Some(payload) = Payload::new(&self.credits.to_le_bytes()[..bytes]) else { return };
        let op = Op::Value(Value { payload, rkey, remote: at, signal: None, more: false });
        // SAFETY: the operation names memory of the set's alone, which ends after its queues.
        match unsafe { context.post_internal(rank, &op) } {
            // There is no room now.
            Ok(posted) if posted.taken == 0 => {}
            Ok(posted) => {
                self.told = (self.credits as u32).wrapping_sub(paid);
                self.payment = Some(Payment { seq: posted.last, looks: 0 });
            }
            Err(why) => self.end(&why),
        }
    }

    /// Whether device code has yet to see something that it is owed, for the watchdog. `peer` is the queue's.
    #[cold]
    pub fn is_late<C: Context>(&self, context: &C, peer: u32) -> bool {
        let completed = || Seq(context.completed_internal(self.at.rank).load(Ordering::Acquire));
        let is_posted = self.payment.is_some_and(|payment| !payment.seq.is_done(completed()));
        let paid = if self.adds { 0 } else { context.paid(peer) };
        !self.is_over && (is_posted || self.left(paid) > 0)
    }

    /// Whether the payment is done, or will never be.
    fn is_paid<C: Context>(&mut self, context: &C) -> bool {
        let Some(payment) = &mut self.payment else { return true };
        if !payment.seq.is_done(Seq(context.completed_internal(self.at.rank).load(Ordering::Acquire))) {
            payment.looks += 1;
            if payment.looks % ASK_EVERY != 0 {
                return false;
            }
            let Err(why) = context.test_internal(self.at.rank, payment.seq) else { return false };
            self.end(&why);
        }
        self.payment = None;
        true
    }

    /// The fabric takes no payment any more.
    #[cold]
    fn end(&mut self, why: &Error) {
        self.is_over = true;
        let level = if IS_SAID.swap(true, Ordering::Relaxed) { log::Level::Info } else { log::Level::Warn };
        log::log!(
            level,
            "device code is not told any more which entries of a queue are done: {}; kernels that wait for room there, \
             or for a flush, wait for ever",
            why.message()
        );
    }
}

#[cfg(test)]
mod tests;
