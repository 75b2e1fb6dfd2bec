//! The application's CUDA context, used by one thread of ours alone.
//!
//! A call in that context can wait for the application: while one of its threads loads a module, launches a kernel for
//! the first time or frees memory, the driver holds a lock of the context until the kernels that run have ended, and
//! they may wait for the very bytes that we are to move. So nobody who moves bytes calls there. What has to be done
//! there (loading and launching the copy kernel, looking for the context's faults, unmapping memory of other processes)
//! is given to this thread, and nobody waits for it but set-up and closing.

use super::DRAIN_WITHIN;
use crate::error::Result;
use crate::sys::sync::{Condvar, Mutex};
use crate::sys::thread::Thread;
use oxygin_ffi::cuda::{Context, CudaError, Stream};
use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks for faults while operations are on their way.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long set-up waits for a call of the driver: it may compile, on a machine with other things to do.
pub const SET_UP_WITHIN: Duration = Duration::from_secs(120);
/// The driver compiles PTX on this thread, and its compiler recurses. Pages that are not used are no memory.
const STACK: usize = 8 << 20;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Inner {
    jobs: VecDeque<Job>,
    /// Somebody wants to know of faults now.
    look: bool,
    is_stopping: bool,
    has_ended: bool,
}

struct Shared {
    context: Arc<Context>,
    hardware_queues: u32,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// The thread looks for faults now and then, until a look finds that nothing was started since the one before.
    is_awake: AtomicBool,
    /// Operations were started since the last look.
    is_active: AtomicBool,
    has_failed: AtomicBool,
    failure: Mutex<Option<CudaError>>,
    /// Somebody has waited for it in vain.
    was_late: AtomicBool,
}

/// The thread, and what it has found out.
pub struct AppThread {
    shared: Arc<Shared>,
    thread: Mutex<Option<Thread>>,
}

impl AppThread {
    /// Starts it for an engine's rank, in a context with so many hardware queues. First it makes a stream in the
    /// context, by which it learns of faults.
    pub fn start(rank: u32, context: Arc<Context>, hardware_queues: u32) -> Result<Arc<Self>> {
        let shared = Arc::new(Shared {
            context,
            hardware_queues,
            inner: Mutex::default(),
            changed: Condvar::default(),
            is_awake: AtomicBool::new(false),
            is_active: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            was_late: AtomicBool::new(false),
        });
        let own = shared.clone();
        let thread = Thread::spawn(&format!("oxygin-{rank}-gpu"), STACK, move || own.run())?;
        Ok(Arc::new(Self { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Waits until the stream is made, or cannot be, which `check` says then. Set-up only.
    pub fn wait_started(&self) {
        // What is posted is done after that.
        self.run(SET_UP_WITHIN, |_| ());
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.shared.context
    }

    /// How many hardware queues its streams have.
    pub fn hardware_queues(&self) -> u32 {
        self.shared.hardware_queues
    }

    /// Has the thread do something, with nothing current, when it has done what it was given before. Never waits.
    pub fn post(&self, job: impl FnOnce() + Send + 'static) {
        self.shared.inner.lock().jobs.push_back(Box::new(job));
        self.shared.changed.notify_all();
    }

    /// Has the thread do something in the context and waits for it: set-up and closing only. `None`: it is not done
    /// `within` that time, or the context is gone; what was begun goes on.
    pub fn run<T: Send + 'static>(
        &self,
        within: Duration,
        job: impl FnOnce(&Arc<Context>) -> T + Send + 'static,
    ) -> Option<T> {
        let (result, context) = (Arc::new(Answer::default()), self.shared.context.clone());
        let (giver, shared) = (Giver(result.clone()), self.shared.clone());
        self.post(move || match context.enter() {
            Ok(_current) => giver.0.give(Some(job(&context))),
            Err(e) => shared.fail(e),
        });
        let made = result.wait(within);
        if made.is_none() {
            self.shared.was_late.store(true, Ordering::Relaxed);
        }
        made
    }

    /// Operations are started: faults are looked for now and then until none were for a while.
    #[inline]
    pub fn stay_awake(&self) {
        let shared = &self.shared;
        if !shared.is_active.load(Ordering::Relaxed) {
            shared.is_active.store(true, Ordering::SeqCst);
            if !shared.is_awake.load(Ordering::SeqCst) {
                self.wake_up();
            }
        }
    }

    #[cold]
    fn wake_up(&self) {
        let _ordered = self.shared.inner.lock();
        self.shared.changed.notify_all();
    }

    /// Has the thread look for faults now; whoever asks learns of them later.
    pub fn look(&self) {
        let mut inner = self.shared.inner.lock();
        if !inner.look {
            inner.look = true;
            self.shared.changed.notify_all();
        }
    }

    /// An error that the context has shown.
    #[inline]
    pub fn check(&self) -> std::result::Result<(), CudaError> {
        if self.shared.has_failed.load(Ordering::Acquire) {
            if let Some(e) = &*self.shared.failure.lock() {
                return Err(e.clone());
            }
        }
        Ok(())
    }

    /// Ends the thread, once it has done what it was given. One that stands in the driver for longer than
    /// deregistration waits is left to end by itself, and the library stays loaded for it.
    pub fn end(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        // Who closes waits once.
        let patience = if self.shared.was_late.load(Ordering::Relaxed) { Duration::ZERO } else { DRAIN_WITHIN };
        let end = Instant::now() + patience;
        let mut inner = self.shared.inner.lock();
        inner.is_stopping = true;
        self.shared.changed.notify_all();
        while !inner.has_ended {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(inner);
                log::warn!(
                    "a call of the CUDA driver has not returned for {} s while a communicator was closed; its thread \
                     and this library stay until it does",
                    DRAIN_WITHIN.as_secs()
                );
                return thread.leave();
            }
            inner = self.shared.changed.wait_timeout(inner, left).0;
        }
        drop(inner);
        thread.join();
    }
}

impl Drop for AppThread {
    fn drop(&mut self) {
        self.end();
    }
}

/// What a job makes, for who waits for it.
struct Answer<T> {
    /// `Some(None)`: there will be none.
    made: Mutex<Option<Option<T>>>,
    changed: Condvar,
}

impl<T> Default for Answer<T> {
    fn default() -> Self {
        Self { made: Mutex::new(None), changed: Condvar::default() }
    }
}

/// Sees to it that there is an answer, whatever becomes of the job.
struct Giver<T>(Arc<Answer<T>>);

impl<T> Drop for Giver<T> {
    fn drop(&mut self) {
        self.0.give(None);
    }
}

impl<T> Answer<T> {
    fn give(&self, made: Option<T>) {
        self.made.lock().get_or_insert(made);
        self.changed.notify_all();
    }

    /// `None`: there is none, or not within that time.
    fn wait(&self, within: Duration) -> Option<T> {
        let end = Instant::now() + within;
        let mut made = self.made.lock();
        loop {
            if let Some(made) = made.take() {
                return made;
            }
            made = match end.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return None,
                left => self.changed.wait_timeout(made, left).0,
            };
        }
    }
}

impl Shared {
    fn run(&self) {
        let probe = self.context.enter().and_then(|_current| Stream::create(self.context.cuda()));
        let probe = probe.inspect_err(|e| self.fail(e.clone())).ok();
        while let Some(job) = self.next() {
            match job {
                Some(job) => {
                    if catch_unwind(AssertUnwindSafe(job)).is_err() {
                        log::error!("a fault inside an oxygin thread; please report it");
                    }
                }
                None => self.look_for_faults(probe.as_ref()),
            }
        }
        // In a context that is gone the stream went with it.
        match self.context.enter() {
            Ok(_current) => drop(probe),
            Err(_) => std::mem::forget(probe),
        }
        self.inner.lock().has_ended = true;
        self.changed.notify_all();
    }

    /// What to do next; `Some(None)`: look for faults. `None`: end.
    fn next(&self) -> Option<Option<Job>> {
        let mut inner = self.inner.lock();
        loop {
            if let Some(job) = inner.jobs.pop_front() {
                return Some(Some(job));
            }
            if inner.is_stopping {
                return None;
            }
            if std::mem::take(&mut inner.look) {
                return Some(None);
            }
            if !self.is_awake.load(Ordering::Relaxed) {
                // First: whoever starts operations from here on sees it, or is seen.
                self.is_awake.store(true, Ordering::SeqCst);
                if !self.is_active.load(Ordering::SeqCst) {
                    self.is_awake.store(false, Ordering::SeqCst);
                    if !self.is_active.load(Ordering::SeqCst) {
                        inner = self.changed.wait(inner);
                    }
                    continue;
                }
            }
            let is_time;
            (inner, is_time) = self.changed.wait_timeout(inner, LOOK_EVERY);
            if is_time {
                self.is_awake.store(self.is_active.swap(false, Ordering::SeqCst), Ordering::SeqCst);
                return Some(None);
            }
        }
    }

    fn look_for_faults(&self, probe: Option<&Stream>) {
        let Some(probe) = probe else { return };
        if let Err(e) = self.context.enter().and_then(|_current| probe.is_done()) {
            self.fail(e);
        }
    }

    #[cold]
    fn fail(&self, e: CudaError) {
        self.failure.lock().get_or_insert(e);
        self.has_failed.store(true, Ordering::Release);
    }
}
