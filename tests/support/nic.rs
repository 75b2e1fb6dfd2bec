//! Device code of NCCL's GDAKI backend on the software NIC, without the structures in which kernels find it: entries
//! and queue pairs are the command-line tool's. Nothing of `oxygin::gdaki` that reads or writes entries is used here.

use super::common::Rank;
pub use super::device::wait;
use oxygin::comm::coll::Coll;
use oxygin::comm::contexts::Contexts;
use oxygin::comm::nic::NicSpec;
use oxygin::config::Ringing;
use oxygin::fabric::ContextSpec;
use oxygin::gdaki::soft::SetView;
use oxygin::gdaki::view::Handler;
use oxygin::sys::handles;
use oxygin_cli::device::gdaki::{self, Habits, QueuePair, QueueView};
use oxygin_cli::device::{Pen, Waiting};
use std::cell::RefCell;
use std::ffi::c_void;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

pub use oxygin_cli::device::gdaki::entry::*;
pub use oxygin_cli::device::gdaki::Status;
/// A place in a window: its key, and bytes from its start.
pub type Place = gdaki::Remote;

/// What is asked of a set.
#[derive(Clone, Copy)]
pub struct Ask {
    pub contexts: u32,
    pub signals: u32,
    pub counters: u32,
    pub depth: i32,
    pub stride: u32,
    pub handler: Ringing,
    /// Compute capability 9.0: only the owner bit of a completion entry is looked at.
    pub is_sm90: bool,
    /// 2.29.7 and before: the record is written before the doorbell.
    pub record_first: bool,
}

impl Default for Ask {
    fn default() -> Self {
        Self {
            contexts: 1,
            signals: 8,
            counters: 8,
            depth: 0,
            stride: 1,
            handler: Ringing::Doorbell,
            is_sm90: true,
            record_first: false,
        }
    }
}

/// Waits as tests do.
struct Patience;

impl Waiting for Patience {
    fn until(&self, what: &dyn Fn() -> String, ready: &mut dyn FnMut() -> bool) -> Result<(), String> {
        let ready = RefCell::new(ready);
        wait(what, || (ready.borrow_mut())());
        Ok(())
    }
}

/// One queue, as device code keeps it, whose waits end with the test.
#[derive(Clone, Copy)]
pub struct Qp<'a>(pub &'a QueuePair);

impl Deref for Qp<'_> {
    type Target = QueuePair;

    fn deref(&self) -> &QueuePair {
        self.0
    }
}

impl Qp<'_> {
    pub fn wait(&self, index: u64) -> Status {
        self.0.wait(index, &Patience).expect("a completion entry")
    }

    /// Reserves slots and waits until they are free. As device code does, it goes on also where an entry before has
    /// failed.
    pub fn reserve(&self, n: u64) -> u64 {
        self.0.reserve(n, &Patience).expect("slots")
    }

    pub fn put_entry(&self, index: u64, raw: &Raw) {
        self.0.put_entry(index, raw, &mut Pen::plain());
    }

    pub fn put_bytes(&self, index: u64, raw: Raw) {
        self.0.put_bytes(index, &raw, &mut Pen::plain());
    }

    /// Says that entries `first` to `last` are written.
    pub fn ready(&self, first: u64, last: u64) {
        self.0.ready(first, last, &Patience).expect("the turn");
    }

    pub fn submit(&self, producer: u64) {
        self.0.submit(producer, &Patience).expect("the lock");
    }

    /// Writes entries and rings. Returns the last one's index.
    pub fn post(&self, entries: &[Raw]) -> u64 {
        self.0.post(entries, &mut Pen::plain(), &Patience).expect("slots")
    }

    /// Waits until all that was posted is complete. Returns what became of the last entry.
    pub fn flush(&self) -> Status {
        self.0.flush(&Patience).expect("a completion entry")
    }
}

/// A queue pair that counts by itself.
fn alone(view: oxygin::gdaki::soft::QueueView, ask: Ask) -> QueuePair {
    let handler = match view.handler {
        Ringing::Proxy => gdaki::Ringing::Proxy,
        Ringing::Doorbell => gdaki::Ringing::Doorbell,
        Ringing::FreeFlow => gdaki::Ringing::FreeFlow,
    };
    let oxygin::gdaki::soft::QueueView { slots, size, completions, is_counted, record, bell, number, .. } = view;
    let habits = Habits { is_sm90: ask.is_sm90, record_first: ask.record_first };
    let (completion_number, nic_handler) = (number, Handler::from(view.handler).code());
    let view = QueueView {
        slots,
        size,
        completions,
        is_counted,
        record,
        bell,
        handler,
        number,
        completion_number,
        nic_handler,
    };
    QueuePair::alone(view, habits)
}

/// A set of contexts, as device code has it.
pub struct Nic {
    pub set: Arc<Contexts>,
    pub coll: Arc<Coll>,
    pub view: SetView,
    qps: Vec<Option<(QueuePair, Option<QueuePair>)>>,
    nranks: usize,
}

impl Nic {
    pub fn new(r: &Rank, ask: Ask) -> Self {
        let coll = handles::clone::<Coll>(r.coll).expect("a communicator");
        let spec = NicSpec {
            contexts: ContextSpec {
                contexts: ask.contexts,
                queue_depth: 0,
                traffic_class: None,
                rank_stride: ask.stride,
            },
            depth: ask.depth,
            signals: ask.signals,
            counters: ask.counters,
            handler: ask.handler,
            layout: None,
        };
        let (set, _place, view) = coll.create_nic_contexts(|| Ok(spec)).expect("a set");
        let qp = |view| alone(view, ask);
        let qps = view.pairs.iter().map(|p| p.map(|p| (qp(p.main), p.companion.map(qp)))).collect();
        Self { set, coll, view, qps, nranks: r.job.nranks }
    }

    pub fn key(&self, window: *mut c_void) -> u32 {
        self.coll.key_of(window).expect("a key")
    }

    pub fn has(&self, context: usize, peer: usize) -> bool {
        self.qps[context * self.nranks + peer].is_some()
    }

    pub fn qp(&self, context: usize, peer: usize) -> Qp<'_> {
        Qp(&self.qps[context * self.nranks + peer].as_ref().expect("a queue pair").0)
    }

    pub fn companion(&self, context: usize, peer: usize) -> Qp<'_> {
        Qp(self.qps[context * self.nranks + peer].as_ref().and_then(|p| p.1.as_ref()).expect("a companion"))
    }

    /// The place of a signal at a peer.
    pub fn signal_place(&self, context: usize, id: u32) -> Place {
        let table = &self.view.signals;
        (table.key, 8 * (context as u64 * u64::from(table.each) + u64::from(id)))
    }

    pub fn add_signal(&self, context: usize, id: u32, n: u64) -> Raw {
        add(self.signal_place(context, id), n, (self.view.sink, 0))
    }

    pub fn signal(&self, context: usize, id: u32) -> u64 {
        let at = self.view.signals.words + self.signal_place(context, id).1;
        // SAFETY: a word of the set's.
        unsafe { (*(at as *const AtomicU64)).load(Ordering::Acquire) }
    }

    pub fn wait_signal(&self, context: usize, id: u32, least: u64) {
        wait(
            || format!("signal {id} of context {context} >= {least} (it is {})", self.signal(context, id)),
            || self.signal(context, id) >= least,
        );
    }

    /// Entries on a queue pair, and on its companion a counter that goes up when they are complete.
    pub fn post_counted(&self, context: usize, peer: usize, entries: &[Raw], counter: u32) -> u64 {
        let (main, companion) = (self.qp(context, peer), self.companion(context, peer));
        let first = main.reserve(entries.len() as u64);
        let last = first + entries.len() as u64 - 1;
        (first..).zip(entries).for_each(|(index, raw)| main.put_entry(index, raw));
        main.ready(first, last);
        let at = companion.reserve(2);
        companion.put_entry(at, &wait_for(last, main.view.number));
        let table = &self.view.counters;
        let place = (table.key, 8 * (context as u64 * u64::from(table.each) + u64::from(counter)));
        companion.put_entry(at + 1, &add(place, 1, (self.view.sink, 0)));
        companion.ready(at, at + 1);
        main.submit(last + 1);
        companion.submit(at + 2);
        last
    }

    pub fn counter(&self, context: usize, id: u32) -> u64 {
        let table = &self.view.counters;
        let at = table.words + 8 * (context as u64 * u64::from(table.each) + u64::from(id));
        // SAFETY: a word of the set's.
        unsafe { (*(at as *const AtomicU64)).load(Ordering::Acquire) }
    }

    pub fn wait_counter(&self, context: usize, id: u32, least: u64) {
        wait(
            || format!("counter {id} of context {context} >= {least} (it is {})", self.counter(context, id)),
            || self.counter(context, id) >= least,
        );
    }

    pub fn has_error(&self) -> bool {
        self.set.has_error()
    }

    pub fn destroy(self) {
        self.set.destroy();
    }
}
