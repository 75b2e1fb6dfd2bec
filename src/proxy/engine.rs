//! The engine's threads: each works on what it was given, pass by pass, until it is taken back.

use super::affinity::Cpus;
use super::drain::Work;
use super::idle::{Idle, Next};
use crate::error::{Error, Result};
use crate::sys::sync::{Condvar, Mutex};
use crate::sys::thread::Thread;
use crate::sys::yielder::Yielder;
use crate::telemetry::trace::Trace;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Stack of a thread: no recursion, no large frames; what a log line takes.
const STACK: usize = 512 << 10;
/// Between two looks of the watchdog.
const WATCH_EVERY: Duration = Duration::from_millis(250);
/// Passes between two looks at the clock for it, while the thread is busy.
const WATCH_PASSES: u32 = 4096;
/// How long a caller waits until a thread gives work back. A pass takes microseconds; a thread that does not come back
/// stands in the driver.
const GIVE_BACK: Duration = Duration::from_secs(30);

/// How the threads behave.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Threads.
    pub threads: u32,
    /// How long they spin when there is nothing; `None`: for ever.
    pub spin: Option<Duration>,
    /// When an entry counts as stalled.
    pub stall: Duration,
    /// Where they run; `None`: wherever.
    pub cpus: Option<Cpus>,
    /// For their names.
    pub comm: u64,
    /// Written when they have ended.
    pub trace: Option<Arc<Trace>>,
}

/// Names work that a thread has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    thread: usize,
    number: u64,
}

#[derive(Default)]
struct Desk {
    /// What came and has not been taken up.
    arrived: Vec<(u64, Box<dyn Work>)>,
    /// What is asked back.
    wanted: Vec<u64>,
    /// What the thread has.
    has: Vec<u64>,
    ends: bool,
    /// The thread has let go of everything, and takes nothing up any more.
    is_over: bool,
}

struct Common {
    desk: Mutex<Desk>,
    changed: Condvar,
    /// Goes up with each change of the desk by others: the thread looks at it on every pass.
    changes: AtomicU64,
    settings: Settings,
}

struct Worker {
    common: Arc<Common>,
    thread: Option<Thread>,
    /// It has not let go of what was asked back: it stands in a call that may never return.
    is_stuck: AtomicBool,
}

/// The threads of a communicator.
pub struct Engine {
    workers: Vec<Worker>,
    next: AtomicU64,
    /// Contexts that the threads were dealt.
    dealt: AtomicUsize,
    trace: Option<Arc<Trace>>,
    /// How long it waits for work that it asks back.
    give_back: Duration,
}

impl Engine {
    /// Starts them.
    pub fn start(settings: &Settings) -> Result<Self> {
        let mut engine = Self {
            workers: Vec::new(),
            next: AtomicU64::new(1),
            dealt: AtomicUsize::new(0),
            trace: settings.trace.clone(),
            give_back: GIVE_BACK,
        };
        for i in 0..settings.threads.max(1) {
            let common = Arc::new(Common {
                desk: Mutex::default(),
                changed: Condvar::default(),
                changes: AtomicU64::new(0),
                settings: settings.clone(),
            });
            let own = common.clone();
            let thread = Thread::spawn(&format!("oxygin-px{}.{i}", settings.comm), STACK, move || run(&own))?;
            engine.workers.push(Worker { common, thread: Some(thread), is_stuck: AtomicBool::new(false) });
        }
        Ok(engine)
    }

    /// Threads.
    pub fn threads(&self) -> usize {
        self.workers.len()
    }

    /// The threads that have a set's contexts, one after another without end. They go on where the set before ended:
    /// most sets have few contexts.
    pub fn deal(&self, contexts: usize) -> impl Iterator<Item = usize> + '_ {
        let first = self.dealt.fetch_add(contexts, Ordering::Relaxed) % self.threads();
        (0..self.threads()).cycle().skip(first)
    }

    /// Where they note what they do, if they do.
    pub fn trace(&self) -> Option<Arc<Trace>> {
        self.trace.clone()
    }

    /// Fails where a thread has ended by a fault of its own, which the log has.
    pub fn check(&self) -> Result<()> {
        match self.workers.iter().any(|worker| worker.common.desk.lock().is_over) {
            true => Err(Error::internal("an engine thread of this communicator has ended by a fault")),
            false => Ok(()),
        }
    }

    /// Has a thread work on something from here on.
    pub fn give(&self, thread: usize, mut work: Box<dyn Work>) -> Ticket {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let thread = thread % self.workers.len();
        let common = &self.workers[thread].common;
        let mut desk = common.desk.lock();
        if desk.is_over {
            drop(desk);
            work.fail();
        } else {
            desk.arrived.push((number, work));
            desk.has.push(number);
            common.tell(desk);
        }
        Ticket { thread, number }
    }

    /// Ends the work on something. Returns whether the thread has let go of it: if not, its memory must stay.
    pub fn take_back(&self, ticket: Ticket) -> bool {
        let Worker { common, is_stuck, .. } = &self.workers[ticket.thread];
        let mut desk = common.desk.lock();
        desk.wanted.push(ticket.number);
        common.changes.fetch_add(1, Ordering::Release);
        common.changed.notify_all();
        // One that has kept others waiting for as long is not waited for again.
        let end = Instant::now() + if is_stuck.load(Ordering::Relaxed) { Duration::ZERO } else { self.give_back };
        while desk.has.contains(&ticket.number) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                is_stuck.store(true, Ordering::Relaxed);
                log::warn!(
                    "an engine thread has not let go of a destroyed set of contexts for {:?}: it stands in a call of \
                     the driver; its memory stays allocated",
                    self.give_back
                );
                return false;
            }
            desk = common.changed.wait_timeout(desk, left).0;
        }
        true
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for worker in &self.workers {
            let mut desk = worker.common.desk.lock();
            desk.ends = true;
            worker.common.tell(desk);
        }
        for worker in &mut self.workers {
            match worker.thread.take() {
                Some(thread) if *worker.is_stuck.get_mut() => thread.leave(),
                Some(thread) => thread.join(),
                None => {}
            }
        }
        if let Some(trace) = &self.trace {
            trace.write();
        }
    }
}

impl Common {
    fn tell(&self, desk: impl Drop) {
        self.changes.fetch_add(1, Ordering::Release);
        drop(desk);
        self.changed.notify_all();
    }
}

/// What a thread works on. Dropped, whether the thread ends in order or by a fault, it lets go of all of it.
struct Works<'a> {
    common: &'a Common,
    all: Vec<(u64, Box<dyn Work>)>,
}

impl Drop for Works<'_> {
    fn drop(&mut self) {
        let mut left = std::mem::take(&mut self.all);
        let mut desk = self.common.desk.lock();
        desk.is_over = true;
        left.append(&mut desk.arrived);
        drop(desk);
        // In order nothing is left. Dropped without the lock, as everywhere.
        left.iter_mut().for_each(|(_, work)| work.fail());
        drop(left);
        self.common.desk.lock().has.clear();
        self.common.changed.notify_all();
    }
}

fn run(common: &Common) {
    if let Some(cpus) = &common.settings.cpus {
        cpus.pin_this_thread();
    }
    let mut works = Works { common, all: Vec::new() };
    let mut seen = u64::MAX;
    let (mut idle, mut yielder) = (Idle::new(common.settings.spin), Yielder::default());
    let (mut watched, mut passes) = (Instant::now(), 0u32);
    loop {
        let changes = common.changes.load(Ordering::Acquire);
        if changes != seen {
            seen = changes;
            if !take_up(common, &mut works.all) {
                return;
            }
        }
        let (mut moved, mut is_busy) = (0, false);
        for (_, work) in &mut works.all {
            let pass = work.pass(idle.rest());
            moved += pass.moved;
            is_busy |= pass.is_busy;
        }
        passes = passes.wrapping_add(1);
        let next = idle.after(moved > 0, is_busy, Instant::now);
        if passes % WATCH_PASSES == 0 || matches!(next, Next::Sleep(_)) {
            let now = Instant::now();
            if now.duration_since(watched) >= WATCH_EVERY {
                watched = now;
                works.all.iter_mut().for_each(|(_, work)| work.watch(now, common.settings.stall));
            }
        }
        match next {
            Next::Pass => std::hint::spin_loop(),
            Next::Yield => yielder.give_way(),
            // Nothing to look at: until something comes.
            Next::Sleep(_) if works.all.is_empty() => sleep(common, seen, Duration::from_secs(3600)),
            Next::Sleep(time) => sleep(common, seen, time),
        }
    }
}

/// Takes up what came and lets go of what is wanted back; whether the thread goes on.
fn take_up(common: &Common, works: &mut Vec<(u64, Box<dyn Work>)>) -> bool {
    let mut desk = common.desk.lock();
    works.append(&mut desk.arrived);
    let wanted = std::mem::take(&mut desk.wanted);
    let ends = desk.ends;
    drop(desk);
    // Dropped without the lock: that may free memory.
    works.retain(|(number, _)| !ends && !wanted.contains(number));
    let mut desk = common.desk.lock();
    desk.has.retain(|number| !ends && !wanted.contains(number));
    drop(desk);
    common.changed.notify_all();
    !ends
}

fn sleep(common: &Common, seen: u64, time: Duration) {
    let desk = common.desk.lock();
    if common.changes.load(Ordering::Acquire) == seen {
        drop(common.changed.wait_timeout(desk, time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::drain::Pass;
    use crate::proxy::idle::Rest;
    use std::sync::atomic::AtomicU32;

    struct Counts(Arc<AtomicU32>, Arc<AtomicBool>);

    impl Work for Counts {
        fn pass(&mut self, _: Rest) -> Pass {
            self.0.fetch_add(1, Ordering::SeqCst);
            Pass::default()
        }
        fn watch(&mut self, _: Instant, _: Duration) {}
        fn fail(&mut self) {
            self.0.store(u32::MAX, Ordering::SeqCst);
        }
    }

    impl Drop for Counts {
        fn drop(&mut self) {
            self.1.store(true, Ordering::SeqCst);
        }
    }

    fn start(threads: u32, spin: Option<Duration>) -> Engine {
        let settings = Settings { threads, spin, stall: Duration::from_secs(1), cpus: None, comm: 7, trace: None };
        Engine::start(&settings).unwrap()
    }

    #[test]
    fn work_is_done_until_it_is_taken_back() {
        let engine = start(2, Some(Duration::from_micros(100)));
        let all: Vec<_> = (0..4)
            .map(|i| {
                let (count, dropped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
                let ticket = engine.give(i, Box::new(Counts(count.clone(), dropped.clone())));
                (ticket, count, dropped)
            })
            .collect();
        for (_, count, _) in &all {
            let seen = count.load(Ordering::SeqCst);
            while count.load(Ordering::SeqCst) < seen + 3 {
                std::thread::yield_now();
            }
        }
        let (ticket, count, dropped) = &all[0];
        assert!(engine.take_back(*ticket));
        assert!(dropped.load(Ordering::SeqCst));
        let after = count.load(Ordering::SeqCst);
        let other = all[2].1.load(Ordering::SeqCst);
        while all[2].1.load(Ordering::SeqCst) < other + 3 {
            std::thread::yield_now();
        }
        assert_eq!(count.load(Ordering::SeqCst), after, "nobody works on it any more");
        drop(engine);
        assert!(all.iter().all(|(_, _, dropped)| dropped.load(Ordering::SeqCst)));
    }

    #[test]
    fn sets_of_few_contexts_have_all_threads_in_turn() {
        let engine = start(3, Some(Duration::from_micros(100)));
        assert_eq!([1, 1, 1, 4, 2, 1].map(|contexts| engine.deal(contexts).next()), [0, 1, 2, 0, 1, 0].map(Some));
    }

    /// Stands in a call, as a driver's may, until it is let go.
    struct Stands(Arc<AtomicBool>, Arc<AtomicBool>);

    impl Work for Stands {
        fn pass(&mut self, _: Rest) -> Pass {
            self.0.store(true, Ordering::SeqCst);
            while !self.1.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            Pass::default()
        }

        fn watch(&mut self, _: Instant, _: Duration) {}
        fn fail(&mut self) {}
    }

    #[test]
    fn a_thread_that_stands_holds_nobody_up_for_ever() {
        let mut engine = start(1, None);
        engine.give_back = Duration::from_millis(50);
        let [stands, goes] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let first = engine.give(0, Box::new(Stands(stands.clone(), goes.clone())));
        while !stands.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let (count, dropped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let second = engine.give(0, Box::new(Counts(count, dropped.clone())));
        assert!(!engine.take_back(first) && !engine.take_back(second));
        drop(engine);
        goes.store(true, Ordering::SeqCst);
        while !dropped.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    /// Has a fault once it is told to.
    struct Faults(Arc<AtomicBool>);

    impl Work for Faults {
        fn pass(&mut self, _: Rest) -> Pass {
            assert!(!self.0.load(Ordering::SeqCst), "a fault of this test's own");
            Pass::default()
        }
        fn watch(&mut self, _: Instant, _: Duration) {}
        fn fail(&mut self) {}
    }

    /// What the thread had, and what comes to it later, is told and let go of.
    #[test]
    fn a_thread_that_has_a_fault_keeps_nothing() {
        let engine = start(1, None);
        let faults = Arc::new(AtomicBool::new(false));
        let counts = || (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let [before, after] = [counts(), counts()];
        let give = |(count, dropped): &(Arc<AtomicU32>, Arc<AtomicBool>)| {
            engine.give(0, Box::new(Counts(count.clone(), dropped.clone())))
        };
        let tickets = [engine.give(0, Box::new(Faults(faults.clone()))), give(&before)];
        assert!(engine.check().is_ok());
        faults.store(true, Ordering::SeqCst);
        while engine.check().is_ok() {
            std::thread::yield_now();
        }
        let last = give(&after);
        let begun = Instant::now();
        assert!(tickets.into_iter().chain([last]).all(|ticket| engine.take_back(ticket)));
        assert!(begun.elapsed() < GIVE_BACK / 2, "it has waited for a thread that is gone");
        for (count, dropped) in [before, after] {
            assert!(count.load(Ordering::SeqCst) == u32::MAX && dropped.load(Ordering::SeqCst));
        }
    }
}
