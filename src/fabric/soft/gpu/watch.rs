//! A thread that sees when others stand: one for the process, as long as any engine has a GPU.
//!
//! Who stands in a call of the driver, or waits for one who does, cannot say so. This thread makes no call of the
//! driver and waits for nobody's lock.

use super::Engine;
use crate::error::Result;
use crate::sys::sync::{Condvar, Mutex};
use crate::sys::thread::Thread;
use oxygin_ffi::cuda::{under_way, Call};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a call may last, or nothing may move, before that is said, once.
const STANDS_AFTER: Duration = Duration::from_secs(4);
/// It formats a line and calls the logger.
const STACK: usize = 256 << 10;
/// The names of threads that may stand in the driver end like this: nobody waits for them.
const MAY_STAND: &str = "-gpu";

/// Whether it is to end.
#[derive(Default)]
struct Stop {
    is_asked: Mutex<bool>,
    changed: Condvar,
}

struct Running {
    users: usize,
    thread: Option<(Arc<Stop>, Thread)>,
}

static RUNNING: Mutex<Running> = Mutex::new(Running { users: 0, thread: None });

/// While one lives the thread runs. Not to be dropped by the thread itself.
pub struct Watched(());

impl Watched {
    /// Starts it, unless it runs.
    pub fn begin() -> Result<Self> {
        let mut running = RUNNING.lock();
        if running.thread.is_none() {
            let stop = Arc::new(Stop::default());
            let own = stop.clone();
            running.thread = Some((stop, Thread::spawn("oxygin-watch", STACK, move || own.run())?));
        }
        running.users += 1;
        Ok(Self(()))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut running = RUNNING.lock();
        running.users -= 1;
        if running.users > 0 {
            return;
        }
        let thread = running.thread.take();
        // Before it is joined: whoever comes next starts another one.
        drop(running);
        if let Some((stop, thread)) = thread {
            *stop.is_asked.lock() = true;
            stop.changed.notify_all();
            thread.join();
        }
    }
}

impl Stop {
    fn run(&self) {
        let (mut calls, mut engines) = (Standing::default(), Standing::default());
        let mut is_asked = self.is_asked.lock();
        while !*is_asked {
            is_asked = self.changed.wait_timeout(is_asked, LOOK_EVERY).0;
            if !*is_asked {
                drop(is_asked);
                look_at_calls(&mut calls);
                look_at_engines(&mut engines);
                is_asked = self.is_asked.lock();
            }
        }
    }
}

/// What stands, by a key: what was seen of it last, since when that has not changed, and whether it was said.
struct Standing<K, S>(HashMap<K, (S, Instant, bool)>);

impl<K, S> Default for Standing<K, S> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: std::hash::Hash + Eq + Copy, S: PartialEq> Standing<K, S> {
    /// Takes what a look has found. Returns the keys of what has stood for so long that it is to be said now, and for
    /// how long.
    fn update(&mut self, now: Instant, found: impl Iterator<Item = (K, S)>) -> Vec<(K, Duration)> {
        let mut before = std::mem::take(&mut self.0);
        let mut over = Vec::new();
        for (key, seen) in found {
            let (since, was_said) = match before.remove(&key) {
                Some((last, since, was_said)) if last == seen => (since, was_said),
                _ => (now, false),
            };
            let is_over = now - since >= STANDS_AFTER;
            if is_over && !was_said {
                over.push((key, now - since));
            }
            self.0.insert(key, (seen, since, was_said || is_over));
        }
        over
    }
}

/// The name of a thread of this process.
fn name_of(thread: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

fn look_at_calls(calls: &mut Standing<u32, Call>) {
    let found: Vec<Call> = under_way().collect();
    for (place, time) in calls.update(Instant::now(), found.iter().map(|c| (c.place, *c))) {
        let Some(call) = found.iter().find(|c| c.place == place) else { continue };
        let (name, thread, seconds) = (call.name, name_of(call.thread), time.as_secs());
        if thread.ends_with(MAY_STAND) {
            log::info!(
                "{name} in thread {} ({thread}) has not returned for {seconds} s: the application is in a call of the \
                 CUDA driver that waits for a kernel; nobody waits for this thread",
                call.thread
            );
        } else {
            log::warn!(
                "{name} in thread {} ({thread}) has not returned for {seconds} s; if the application is in a call that \
                 waits for a kernel (cudaFree, a synchronous copy, loading a module), and the kernel for a transfer, \
                 look at both threads' stacks and report it",
                call.thread
            );
        }
    }
}

fn look_at_engines(engines: &mut Standing<usize, u64>) {
    let open = super::all_engines();
    let key = |e: &Arc<Engine>| Arc::as_ptr(e) as usize;
    let found = open.iter().filter_map(|e| Some((key(e), e.stands_at()?)));
    for (at, time) in engines.update(Instant::now(), found) {
        let Some(engine) = open.iter().find(|e| key(e) == at) else { continue };
        let state = engine.describe().unwrap_or_else(|| "a thread is at work on it".into());
        let calls: Vec<String> = under_way().map(|c| format!("{} ({})", c.name, name_of(c.thread))).collect();
        log::warn!(
            "rank {}: nothing has moved on its GPU for {} s: {state}; calls of the driver under way: {}",
            engine.rank,
            time.as_secs(),
            if calls.is_empty() { "none".into() } else { calls.join(", ") }
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_is_said_once_and_again_only_after_it_has_moved() {
        let (mut standing, start) = (Standing::default(), Instant::now());
        let mut at = |seconds: u64, found: &[(u32, u64)]| {
            let said = standing.update(start + Duration::from_secs(seconds), found.iter().copied());
            said.into_iter().map(|(key, time)| (key, time.as_secs())).collect::<Vec<_>>()
        };
        assert_eq!(at(0, &[(1, 10), (2, 20)]), []);
        assert_eq!(at(3, &[(1, 10), (2, 21)]), []);
        assert_eq!(at(4, &[(1, 10), (2, 21)]), [(1, 4)]);
        assert_eq!(at(5, &[(1, 10), (2, 21)]), []);
        assert_eq!(at(7, &[(1, 10), (2, 21)]), [(2, 4)]);
        assert_eq!(at(8, &[(1, 11)]), []);
        // It was away in between.
        assert_eq!(at(11, &[(1, 11), (2, 21)]), []);
        assert_eq!(at(12, &[(1, 11), (2, 21)]), [(1, 4)]);
    }
}
