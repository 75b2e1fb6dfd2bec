//! The engine's threads: each works on what it was given, pass by pass, until it is taken back.

mod catch_up;

use super::affinity::Cpus;
use super::drain::{LaneMark, Pass, Work};
use super::idle::{Idle, Next, PassMoved, Rest};
use crate::error::{Error, Result};
use crate::sys::sync::{Condvar, Mutex};
use crate::sys::thread::Thread;
use crate::sys::yielder::Yielder;
use crate::telemetry::{self, trace::Trace};
use catch_up::{FinishTimer, MarksWait};
use std::panic::{catch_unwind, AssertUnwindSafe};
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
/// How long what device code has left behind may take to finish, where work is asked back or a window goes, and how
/// long nothing of it may move meanwhile: as long as a communicator that is closed waits until its peers have what it
/// said was complete.
const FINISH_WITHIN: Duration = Duration::from_secs(10);
const STANDS_AFTER: Duration = Duration::from_secs(2);
/// The same behind what was given up so, as long as nothing has moved since: what stands is waited for once, not by
/// each that goes.
const STILL_STANDS_AFTER: Duration = Duration::from_millis(100);
/// How long a caller waits until a thread says that what device code had rung is through. The thread says so in
/// [`FINISH_WITHIN`], unless it stands in the driver.
const ANSWER: Duration = FINISH_WITHIN.saturating_add(Duration::from_secs(1));

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
pub struct WorkId {
    thread: usize,
    number: u64,
}

#[derive(Default)]
struct Mailbox {
    /// What came and has not been taken up.
    arrived: Vec<(u64, Box<dyn Work>)>,
    /// What is asked back.
    wanted: Vec<u64>,
    /// What the thread has.
    has: Vec<u64>,
    ends: bool,
    /// The thread has let go of everything, and takes nothing up any more.
    is_over: bool,
    /// Something that the thread has was hit by a fault.
    has_failed: bool,
    /// Who waits until what device code has rung by now is through: not taken up, and not answered.
    asked: Vec<u64>,
    unanswered: Vec<u64>,
    /// Somebody was not answered, and the thread has taken up nothing since.
    is_late: bool,
}

struct Common {
    mailbox: Mutex<Mailbox>,
    changed: Condvar,
    /// Goes up with each change of the mailbox by others: the thread looks at it on every pass.
    changes: AtomicU64,
    settings: Settings,
    /// The thread's name.
    name: String,
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
    /// How long it waits for the answers of threads.
    answer: Duration,
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
            answer: ANSWER,
        };
        for i in 0..settings.threads.max(1) {
            let name = format!("oxygin-px{}.{i}", settings.comm);
            let common = Arc::new(Common {
                mailbox: Mutex::default(),
                changed: Condvar::default(),
                changes: AtomicU64::new(0),
                settings: settings.clone(),
                name: name.clone(),
            });
            let own = common.clone();
            let thread = Thread::spawn(&name, STACK, move || run(&own))?;
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

    /// Fails where a fault has hit a thread or what one works on, which the log has.
    pub fn check(&self) -> Result<()> {
        let is_hit = |worker: &Worker| {
            let mailbox = worker.common.mailbox.lock();
            mailbox.is_over || mailbox.has_failed
        };
        match self.workers.iter().any(is_hit) {
            true => Err(Error::internal("a fault has hit an engine thread of this communicator; the log has it")),
            false => Ok(()),
        }
    }

    /// Has a thread work on something from here on.
    pub fn give(&self, thread: usize, mut work: Box<dyn Work>) -> WorkId {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let thread = thread % self.workers.len();
        let common = &self.workers[thread].common;
        let mut mailbox = common.mailbox.lock();
        if mailbox.is_over {
            drop(mailbox);
            work.fail();
        } else {
            mailbox.arrived.push((number, work));
            mailbox.has.push(number);
            common.tell(mailbox);
        }
        WorkId { thread, number }
    }

    /// Ends the work on something, once what device code has left there is carried out: a kernel may end behind entries
    /// that it has not waited for, and a device executes them all the same. What does not come to its end is dropped,
    /// and the log names the ranks. Returns whether the thread has let go of it: if not, its memory must stay.
    pub fn take_back(&self, id: WorkId) -> bool {
        let Worker { common, is_stuck, .. } = &self.workers[id.thread];
        let mut mailbox = common.mailbox.lock();
        mailbox.wanted.push(id.number);
        common.changes.fetch_add(1, Ordering::Release);
        common.changed.notify_all();
        // One that has kept others waiting for as long is not waited for again.
        let end = Instant::now() + if is_stuck.load(Ordering::Relaxed) { Duration::ZERO } else { self.give_back };
        while mailbox.has.contains(&id.number) {
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
            mailbox = common.changed.wait_timeout(mailbox, left).0;
        }
        true
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for worker in &self.workers {
            let mut mailbox = worker.common.mailbox.lock();
            mailbox.ends = true;
            worker.common.tell(mailbox);
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
    fn tell(&self, mailbox: impl Drop) {
        self.changes.fetch_add(1, Ordering::Release);
        drop(mailbox);
        self.changed.notify_all();
    }
}

/// Something that a thread works on.
struct Task {
    number: u64,
    work: Box<dyn Work>,
    /// A fault hit it.
    has_failed: bool,
    /// Another one did: the thread lets go of it.
    is_over: bool,
    /// It is asked back.
    ending: Option<FinishTimer>,
    /// What device code had written by the first pass since in which nothing moved.
    last: Option<Vec<LaneMark>>,
    /// Who waits for what device code had rung there.
    waits: Vec<MarksWait>,
}

impl Task {
    fn new(number: u64, work: Box<dyn Work>) -> Self {
        Self { number, work, has_failed: false, is_over: false, ending: None, last: None, waits: Vec::new() }
    }

    /// Works on it. A fault inside the library ends neither the thread nor what else it has: what it hit is told, and
    /// from then on gives device code its entries back, which would wait for them for ever. A second one ends it.
    #[inline(always)]
    fn attempt<T: Default>(&mut self, common: &Common, what: impl FnOnce(&mut dyn Work) -> T) -> T {
        let work = &mut *self.work;
        catch_unwind(AssertUnwindSafe(|| what(work))).unwrap_or_else(|panic| {
            self.fault(common, telemetry::panic::text(&*panic));
            T::default()
        })
    }

    /// Whether the thread lets go of it behind a pass that looked at everything: it is asked back, and has finished or
    /// will not. `stands`: another one was given up, and nothing has moved since.
    #[cold]
    fn is_through(&mut self, common: &Common, pass: Pass, stands: &mut bool) -> bool {
        if self.ending.is_none() {
            return false;
        }
        if self.has_failed || pass.moved == 0 && !pass.is_busy && self.has_left_nothing(common) {
            return true;
        }
        let Some(timer) = &mut self.ending else { return true };
        let Some((still, all)) = timer.is_over(pass.moved > 0, *stands) else { return false };
        *stands = true;
        log::warn!(
            "destroyContext: {} are dropped with {}: nothing of it has moved for {still:.1?}, of {all:.1?}; have \
             kernels flush before they end",
            self.work.name(),
            self.work.unfinished()
        );
        true
    }

    /// Whether nothing is left of what device code has written: what is there and cannot be taken yet moves nothing.
    fn has_left_nothing(&mut self, common: &Common) -> bool {
        let mut last = match self.last.take() {
            Some(last) => last,
            None => self.attempt(common, |work| work.mark()),
        };
        let left = self.attempt(common, |work| work.left(&mut last));
        self.last = Some(last);
        left.entries == 0
    }

    #[cold]
    fn fault(&mut self, common: &Common, panic: &str) {
        common.mailbox.lock().has_failed = true;
        let work = &mut *self.work;
        let what = catch_unwind(AssertUnwindSafe(|| work.name())).unwrap_or_default();
        self.is_over = std::mem::replace(&mut self.has_failed, true);
        // Told before the log is written, which may take its time.
        self.is_over |= catch_unwind(AssertUnwindSafe(|| work.fail())).is_err();
        let goes_on = match self.is_over {
            false => {
                "what device code writes there is dropped and given back to it, so that kernels end where they can"
            }
            true => "device code gets nothing back there any more, and kernels that wait for it stand",
        };
        log::error!(
            "a fault inside {} with {what}: {panic}; {goes_on}, ncclCommGetAsyncError reports an error, and this \
             communicator takes no more contexts; please report it",
            common.name
        );
    }
}

/// What a thread works on. Dropped, whether the thread ends in order or by a fault, it lets go of all of it.
struct Works<'a> {
    common: &'a Common,
    all: Vec<Task>,
    /// Who waits, and has no answer yet.
    asked: Vec<u64>,
}

impl Works<'_> {
    /// Lets go of what had a second fault, and of what was asked back and is through.
    #[cold]
    fn let_go(&mut self) {
        let (gone, others) = std::mem::take(&mut self.all).into_iter().partition(|task| task.is_over);
        self.all = others;
        let gone: Vec<Task> = gone;
        let numbers: Vec<_> = gone.iter().map(|task| task.number).collect();
        // Dropped without the lock, as everywhere.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(gone)));
        self.common.mailbox.lock().has.retain(|number| !numbers.contains(number));
        self.common.changed.notify_all();
    }
}

impl Drop for Works<'_> {
    fn drop(&mut self) {
        let mut left: Vec<_> = std::mem::take(&mut self.all).into_iter().map(|task| task.work).collect();
        let mut mailbox = self.common.mailbox.lock();
        mailbox.is_over = true;
        left.extend(std::mem::take(&mut mailbox.arrived).into_iter().map(|(_, work)| work));
        drop(mailbox);
        // In order nothing is left. Dropped without the lock, as everywhere.
        left.iter_mut().for_each(|work| work.fail());
        drop(left);
        let mut mailbox = self.common.mailbox.lock();
        mailbox.has.clear();
        mailbox.unanswered.clear();
        drop(mailbox);
        self.common.changed.notify_all();
    }
}

fn run(common: &Common) {
    if let Some(cpus) = &common.settings.cpus {
        cpus.pin_this_thread();
    }
    let mut works = Works { common, all: Vec::new(), asked: Vec::new() };
    let mut seen = u64::MAX;
    let (mut idle, mut yielder) = (Idle::new(common.settings.spin), Yielder::default());
    let (mut watched, mut passes) = (Instant::now(), 0u32);
    let (mut ends, mut stands) = (false, false);
    loop {
        let changes = common.changes.load(Ordering::Acquire);
        if changes != seen {
            seen = changes;
            let (asked, last) = take_up(common, &mut works.all);
            ends = last;
            works.mark(asked);
        }
        let (mut moved, mut by_kernel, mut is_busy) = (0, 0, false);
        let (rest, mut is_over) = (idle.rest(), false);
        for task in &mut works.all {
            // One that is asked back is looked at as a whole.
            let rest = if task.ending.is_some() { Rest::Sleeps } else { rest };
            let pass = task.attempt(common, |work| work.pass(rest));
            moved += pass.moved;
            by_kernel += pass.by_kernel;
            is_busy |= pass.is_busy;
            stands &= pass.moved == 0;
            task.is_over |= task.ending.is_some() && task.is_through(common, pass, &mut stands);
            is_over |= task.is_over;
            if !task.waits.is_empty() {
                task.end_waits(common, &mut stands);
                is_busy |= !task.waits.is_empty();
            }
        }
        if is_over {
            works.let_go();
        }
        if !works.asked.is_empty() {
            works.answer();
        }
        if ends && works.all.is_empty() {
            return;
        }
        passes = passes.wrapping_add(1);
        let next = idle.after(PassMoved::of(moved, by_kernel), is_busy, Instant::now);
        if passes % WATCH_PASSES == 0 || matches!(next, Next::Sleep(_)) {
            let now = Instant::now();
            if now.duration_since(watched) >= WATCH_EVERY {
                watched = now;
                let stall = common.settings.stall;
                works.all.iter_mut().for_each(|task| task.attempt(common, |work| work.watch(now, stall)));
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

/// Takes up what came, and sees what is asked back. Returns who waits from now on, and whether the thread ends, once it
/// has let go of everything.
fn take_up(common: &Common, works: &mut Vec<Task>) -> (Vec<u64>, bool) {
    let mut mailbox = common.mailbox.lock();
    let arrived = std::mem::take(&mut mailbox.arrived).into_iter();
    works.extend(arrived.map(|(number, work)| Task::new(number, work)));
    let wanted = std::mem::take(&mut mailbox.wanted);
    let (asked, ends) = (std::mem::take(&mut mailbox.asked), mailbox.ends);
    if std::mem::take(&mut mailbox.is_late) {
        common.changed.notify_all();
    }
    drop(mailbox);
    for task in works.iter_mut().filter(|task| task.ending.is_none() && (ends || wanted.contains(&task.number))) {
        task.ending = Some(FinishTimer::new());
        task.attempt(common, |work| work.wind_up());
    }
    (asked, ends)
}

fn sleep(common: &Common, seen: u64, time: Duration) {
    let mailbox = common.mailbox.lock();
    if common.changes.load(Ordering::Acquire) == seen {
        drop(common.changed.wait_timeout(mailbox, time));
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
