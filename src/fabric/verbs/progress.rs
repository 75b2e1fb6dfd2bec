//! The thread that applies signal messages while nobody calls in. Only devices without remote atomics need it; it
//! sleeps on the completion channel and ends with the last owner.

use super::context::Shared;
use super::events::Events;
use crate::error::{Error, Result};
use crate::sys::sync::Mutex;
use crate::sys::thread::Thread;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use oxygin_ffi::verbs::Channel;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// The thread calls nothing deep.
const STACK: usize = 256 << 10;

struct State {
    channel: Arc<Channel>,
    events: Arc<Events>,
    /// Written to when the thread is to look at `stop` or at a new context.
    wake: EventFd,
    contexts: Mutex<Contexts>,
    /// Callers that want `contexts`: the thread, which may have much to do, gives way to them.
    wanted: AtomicUsize,
}

impl State {
    /// Changes the contexts, as soon as the thread has gone round once.
    fn change(&self, change: impl FnOnce(&mut Contexts)) {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        change(&mut self.contexts.lock());
        self.wanted.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Contexts {
    all: Vec<Arc<Shared>>,
    stop: bool,
}

/// The thread. Dropping it ends and joins it.
pub struct Progress {
    state: Arc<State>,
    thread: Option<Thread>,
}

impl Progress {
    /// Starts the thread on a channel, and on the events of its device.
    pub fn start(channel: Arc<Channel>, events: Arc<Events>) -> Result<Self> {
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| Error::system(format!("eventfd for the signal thread: {e}; raise the limit of open files")))?;
        let state = Arc::new(State { channel, events, wake, contexts: Mutex::default(), wanted: AtomicUsize::new(0) });
        let own = state.clone();
        let thread = Thread::spawn("oxygin-signals", STACK, move || run(&own))?;
        Ok(Self { state, thread: Some(thread) })
    }

    /// The channel that completion queues are to report to.
    pub fn channel(&self) -> &Arc<Channel> {
        &self.state.channel
    }

    /// Serves a context from here on.
    pub(super) fn add(&self, context: &Arc<Shared>) {
        self.state.change(|contexts| contexts.all.push(context.clone()));
        self.wake();
    }

    /// No longer serves it; on return the thread does not touch it any more.
    pub(super) fn remove(&self, context: &Arc<Shared>) {
        self.state.change(|contexts| contexts.all.retain(|c| !Arc::ptr_eq(c, context)));
    }

    fn wake(&self) {
        // Fails only when the counter is full, and then the thread wakes anyway.
        let _ = self.state.wake.write(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.state.change(|contexts| contexts.stop = true);
        self.wake();
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}

fn run(state: &State) {
    // What is polled beside `wake`, until it reports an error: it would do so at once, for ever.
    let (mut has_channel, mut has_events) = (true, true);
    let mut look = false;
    loop {
        // They only add, take away or stop.
        while state.wanted.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        if look {
            // Whether there is a context that looks at them or not: what waits there would wake this thread for ever.
            state.events.take();
        }
        let Some(is_behind) = serve_all(state, look) else { return };
        let gone = PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL;
        // SAFETY: the channel lives as long as `state`.
        let channel = unsafe { BorrowedFd::borrow_raw(state.channel.fd()) };
        let mut fds = vec![PollFd::new(state.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(state.events.fd().filter(|_| has_events).map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let events = fds.len() - 1;
        fds.extend(has_channel.then(|| PollFd::new(channel, PollFlags::POLLIN)));
        // An interrupted wait is a wake-up like any other.
        let _ = poll(&mut fds, if is_behind { PollTimeout::ZERO } else { PollTimeout::NONE });
        let said = |at: usize| fds.get(at).and_then(|fd| fd.revents()).unwrap_or(PollFlags::empty());
        if events > 0 {
            look = !said(1).is_empty();
            has_events = !said(1).intersects(gone);
        }
        if has_channel && said(events + 1).intersects(gone) {
            log::warn!("the completion channel reports an error; signals wait until this rank calls in");
            has_channel = false;
        }
        let _ = state.wake.read();
        while has_channel && state.channel.take_event() {}
    }
}

/// Serves each context once; whether there may be more to do. `None`: the thread is to end.
fn serve_all(state: &State, look: bool) -> Option<bool> {
    let contexts = state.contexts.lock();
    if contexts.stop {
        return None;
    }
    let mut is_behind = false;
    // Armed first, then swept: what arrives in between makes an event.
    for context in &contexts.all {
        match context.serve(look) {
            Ok(more) => is_behind |= more,
            Err(e) => log::warn!("a completion queue cannot be armed: {e}; signals wait until this rank calls in"),
        }
    }
    Some(is_behind)
}
