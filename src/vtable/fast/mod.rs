//! The short ways of the data path over verbs. With them an 8-byte `iputSignal` and its `test` cost 158 instructions
//! of this library, 121 with 32 in flight; by the plain way, [`calls`](super::calls), 480 and 459
//! (`tests/bench/instructions`). Everything here may be taken out: then everything goes the plain way, and nothing
//! but the time changes. The layers below know nothing of it; they tell an [`Observer`] what there is.
//!
//! What a call saves here, in the order in which it meets it:
//!
//! * **Arguments.** The tables' `iputSignal` has 14 to 16 of them, most on the stack. Compilers read them all at the
//!   start and save registers to hold them. [`late`] reads each where it is used.
//! * **The set of contexts.** A handle's place in [`sets`] holds the handle and what an operation needs of the set: one
//!   comparison tells a live handle, where the handle table would tell the object first and its kind and state then.
//! * **Windows.** A lane of verbs has work requests that are filled in but for addresses (`fabric::verbs`, work
//!   request template), and remembers which three windows their keys are of. A put between the same windows is
//!   checked against the template ([`put::put_again`]); one between others finds its windows in a small cache by
//!   their handles ([`windows`], [`put::fast_put`]).
//! * **Requests.** A request is the number of an entry of one static table and the operation's number below
//!   ([`requests`]). The entry leads to the counter of complete operations, so `test` of one that is done is a load
//!   and a comparison.
//!
//! What keeps it right: a handle that is found is live, because whoever ends a set or a window takes it out here
//! first (`Attached::close`, `Observer::window_removed`, `Context::forget`), and NCCL ends nothing during a call with
//! it. What is found nowhere is not refused here but goes the plain way, which says what is wrong with it.

pub mod late;
pub mod put;
pub mod requests;
pub mod sets;
pub mod test;
pub mod windows;

use crate::comm::coll::Observer;
use crate::comm::contexts::{Attached, Contexts};
use crate::comm::fabrics::Queues;
use crate::fabric::verbs::{Direct, VerbsContext};
use crate::memory::window::Window;
use crate::rma::request::{Request, RequestForm};
use crate::rma::seq::Seq;
use crate::sys::sync::Mutex;
use requests::Stretch;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use windows::WindowCache;

/// The short ways to what one communicator has.
#[derive(Default)]
pub struct Ways {
    windows: Arc<WindowCache>,
    sets: Mutex<Vec<Weak<SetWays>>>,
    /// The communicator's handle; 0 until NCCL has one.
    coll: AtomicU64,
}

/// The short ways to a set of contexts and its requests.
struct SetWays {
    /// The handle under which `sets` has the set; 0: it has not.
    handle: AtomicU64,
    nranks: u32,
    windows: Arc<WindowCache>,
    /// To each context; none unless the set is over verbs.
    direct: Box<[Direct]>,
    /// One entry for each (context, peer); `None`: the table is full.
    requests: Option<Stretch>,
}

impl Observer for Ways {
    fn window_added(&self, window: &Window) {
        self.windows.insert(window);
    }

    fn window_removed(&self, window: &Window) {
        self.windows.remove(window);
    }

    fn contexts_added(&self, set: &Contexts) {
        let ways = Arc::new(SetWays::new(set, self.windows.clone()));
        ways.name_coll(self.coll.load(Ordering::Acquire));
        let mut sets = self.sets.lock();
        sets.retain(|known| known.strong_count() > 0);
        sets.push(Arc::downgrade(&ways));
        set.attach(Box::new(ways));
        for (context, verbs) in (0..).zip(verbs(set)) {
            verbs.number_requests(|peer| set.request(context, peer, Seq(0)) as u64);
        }
    }

    fn coll_named(&self, handle: *mut c_void) {
        self.coll.store(handle as u64, Ordering::Release);
        self.sets.lock().iter().filter_map(Weak::upgrade).for_each(|ways| ways.name_coll(handle as u64));
    }
}

/// A set's contexts over verbs; none if it is on another fabric.
fn verbs(set: &Contexts) -> &[VerbsContext] {
    match set.queues() {
        Queues::Verbs(contexts) => contexts,
        _ => &[],
    }
}

impl SetWays {
    /// Gives each (context, peer) of the set an entry, and `test` the way from there to what is complete.
    fn new(set: &Contexts, windows: Arc<WindowCache>) -> Self {
        let (contexts, nranks) = (set.count(), set.nranks);
        let requests = Stretch::take(contexts as usize * nranks as usize);
        let direct: Box<[Direct]> = verbs(set).iter().map(VerbsContext::direct).collect();
        let ways = Self { handle: AtomicU64::new(0), nranks, windows, direct, requests };
        let form = RequestForm::of(nranks);
        for context in 0..contexts {
            for peer in 0..nranks {
                if let Some(requests) = &ways.requests {
                    let plain = form.encode(Request { set: set.set, context, peer, seq: Seq(0) });
                    let direct = ways.direct.get(context as usize).copied();
                    requests.fill(ways.entry(context, peer), set.completed(context, peer), direct, plain);
                }
            }
        }
        ways
    }

    fn entry(&self, context: u32, peer: u32) -> usize {
        context as usize * self.nranks as usize + peer as usize
    }

    fn request(&self, context: u32, peer: u32) -> Option<u64> {
        Some(self.requests.as_ref()?.request(self.entry(context, peer)))
    }

    /// The communicator's handle, once NCCL has it: from then on `test` knows the short way.
    fn name_coll(&self, handle: u64) {
        if let Some(requests) = &self.requests {
            requests.announce(handle);
        }
    }
}

impl Attached for Arc<SetWays> {
    fn request(&self, context: u32, peer: u32) -> Option<u64> {
        SetWays::request(self, context, peer)
    }

    unsafe fn named(&self, handle: *mut c_void) {
        if !self.direct.is_empty() {
            self.handle.store(handle as u64, Ordering::Release);
            // SAFETY: passed on; `close` retracts it, at the latest when the set ends.
            unsafe { sets::publish(handle, &self.direct, self.nranks, self.windows.start()) };
        }
    }

    fn close(&self) {
        let handle = self.handle.swap(0, Ordering::AcqRel);
        if handle != 0 {
            sets::retract(handle as *mut c_void);
        }
        self.name_coll(0);
    }
}
