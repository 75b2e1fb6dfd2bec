//! The helper thread, and those that serve bulk over TCP.
//!
//! The helper thread receives for a rank that is not calling in, and sleeps while there is nothing to do.
//!
//! While callers poll, it naps: it only wakes to see that they still do. Once nobody has polled for a nap's length it
//! works itself, and when nothing moves any more it asks its peers to wake it and sleeps without a timer.
//!
//! While operations for this rank's GPU come thick from other processes it works beside the callers instead: NCCL's
//! one thread has 0.5 µs of its own to do for each operation that it posts, and what arrives, the driver's calls and
//! the sockets would come on top of that.

use super::progress::Progress;
use crate::error::{Error, Result};
use crate::sys::thread::Thread;
use crate::sys::yielder::Yielder;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long nobody may have polled before the thread takes over.
const NAP: u16 = 2;
/// How often it answers peers that it has not met while something moves: each look is a system call.
const HEAR_EVERY: Duration = Duration::from_millis(2);
/// How long it spins after the last message before it sleeps.
const LINGER: Duration = Duration::from_micros(30);
/// How often it looks at what waits, and at its peers, while operations are unfinished, ms.
const WATCH: u16 = 50;
/// The thread calls nothing deep.
const STACK: usize = 256 << 10;

/// Rounds beside the callers between two looks at the clock.
const CLOCK_EVERY: u32 = 32;

/// What the thread sleeps on: contact socket, stirring, and TCP.
struct Waits<'a>([BorrowedFd<'a>; 3]);

impl<'a> Waits<'a> {
    fn new(shared: &'a Progress) -> Self {
        // SAFETY: the transport, hence its descriptor, lives as long as `shared`.
        let tcp = unsafe { BorrowedFd::borrow_raw(shared.tcp().as_fd()) };
        Self([shared.contact.fd(), shared.stirred_fd(), tcp])
    }

    /// Waits until one of them is readable; with TCP or without. Not by a set of epoll: one that holds TCP's set is
    /// told of every packet, whether somebody waits there or not, and who sends from this host to itself pays for it,
    /// up to 1 µs a send.
    fn wait(&self, with_tcp: bool, timeout: PollTimeout) {
        let mut fds = self.0.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let n = if with_tcp { 3 } else { 2 };
        // An interrupted or failed wait is only a short one.
        let _ = poll(&mut fds[..n], timeout);
    }
}

/// A test has the thread stand where it has just woken and holds nothing: a machine that is busy does the same to it.
#[cfg(test)]
fn stand(shared: &Progress) {
    let [asked, stands] = &shared.stands;
    while asked.load(Ordering::SeqCst) {
        stands.store(true, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(100));
    }
    stands.store(false, Ordering::SeqCst);
}

#[cfg(not(test))]
#[inline(always)]
fn stand(_shared: &Progress) {}

/// How long the thread may take to come up.
const START_WITHIN: Duration = Duration::from_secs(10);

/// Starts the thread. It ends after `Domain::request_stop`.
pub fn start(shared: Arc<Progress>) -> Result<Thread> {
    let up = Arc::new(AtomicU32::new(0));
    let (name, own, own_up) = (format!("oxygin-{}", shared.world.rank), shared.clone(), up.clone());
    let thread = Thread::spawn(&name, STACK, move || {
        let holds = own.status.hold_life();
        own_up.store(1 + holds as u32, Ordering::Release);
        if holds {
            run(&own, &Waits::new(&own));
            own.status.release_life();
        }
    })?;
    let end = Instant::now() + START_WITHIN;
    while up.load(Ordering::Acquire) == 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(20));
    }
    if up.load(Ordering::Acquire) == 2 {
        return Ok(thread);
    }
    shared.request_stop();
    thread.join();
    Err(Error::internal("the helper thread could not mark this rank as alive"))
}

/// Cores below which the callers and the helper thread serve all connections: more threads would only take turns.
const FEW_CORES: u32 = 8;
/// Most movers without being told: eight at some 3 GiB/s are more than a host's network.
const MOVERS: u32 = 8;

/// How many threads serve bulk on this machine.
pub fn movers() -> u32 {
    match std::thread::available_parallelism().map_or(1, |n| n.get() as u32) {
        cores if cores < FEW_CORES => 0,
        cores => (cores / 4).min(MOVERS),
    }
}

/// Starts a thread that serves some of the connections for bulk. It ends after `Domain::request_stop` and
/// `Tcp::wake_movers`.
pub fn start_mover(shared: Arc<Progress>, number: usize) -> Result<Thread> {
    let name = format!("oxygin-{}-{number}", shared.world.rank);
    Thread::spawn(&name, STACK, move || shared.tcp().move_bulk(number, || shared.is_stopping()))
}

fn run(shared: &Progress, waits: &Waits<'_>) {
    let (mut seen, mut rate) = (shared.polls(), Rate::new(shared));
    while !shared.is_stopping() {
        waits.wait(!shared.is_tcp_active(), PollTimeout::from(NAP));
        stand(shared);
        shared.calm();
        shared.answer_contacts();
        if !shared.is_tcp_active() && shared.tcp().progress() {
            shared.tcp_active();
        }
        let now = shared.polls();
        if rate.is_thick(shared) {
            work_beside(shared, &mut rate);
            // What callers have left to it meanwhile, which may be their last.
            seen = shared.polls();
            shared.step();
        } else if now != seen {
            seen = now;
            continue;
        }
        work(shared, waits, seen);
        seen = shared.polls();
    }
}

/// How fast operations for this rank's GPU arrive from other processes.
struct Rate {
    since: Instant,
    arrivals: u64,
}

impl Rate {
    fn new(shared: &Progress) -> Self {
        Self { since: Instant::now(), arrivals: shared.received.arrivals() }
    }

    /// Whether they came thick since this was last asked.
    fn is_thick(&mut self, shared: &Progress) -> bool {
        let before = std::mem::replace(self, Self::new(shared));
        shared.is_thick(self.arrivals.wrapping_sub(before.arrivals), self.since - before.since)
    }
}

/// Works while callers do, who leave almost everything to it, as long as operations come thick.
fn work_beside(shared: &Progress, rate: &mut Rate) {
    shared.set_beside(true);
    let (mut rounds, mut yielder) = (0u32, Yielder::default());
    while !shared.is_stopping() {
        let mut moved = shared.step();
        if shared.is_tcp_active() {
            moved |= shared.tcp().progress();
        }
        if !moved {
            std::hint::spin_loop();
        }
        rounds = rounds.wrapping_add(1);
        if rounds % CLOCK_EVERY != 0 {
            continue;
        }
        if !moved {
            yielder.give_way();
        }
        if rate.since.elapsed() < HEAR_EVERY {
            continue;
        }
        shared.calm();
        shared.answer_contacts();
        shared.look_at_peers();
        if !rate.is_thick(shared) {
            break;
        }
    }
    shared.set_beside(false);
}

/// Works and sleeps until somebody polls again.
fn work(shared: &Progress, waits: &Waits<'_>, seen: u64) {
    let mut last = Instant::now();
    let mut heard = last;
    while !shared.is_stopping() && shared.polls() == seen {
        let mut moved = shared.step();
        moved |= shared.tcp().progress();
        shared.look_at_peers();
        if moved {
            last = Instant::now();
            // What is on its way on a GPU moves for as long as a kernel likes.
            if last - heard > HEAR_EVERY {
                shared.answer_contacts();
                heard = last;
            }
            continue;
        }
        if last.elapsed() < LINGER {
            std::hint::spin_loop();
            continue;
        }
        shared.status.set_sleeping(true);
        // Whoever polled since `seen` was not asked to stir this thread, and may have left something for it.
        if shared.polls() == seen && shared.cool_down() {
            let timeout = if shared.has_pending() { PollTimeout::from(WATCH) } else { PollTimeout::NONE };
            waits.wait(true, timeout);
            stand(shared);
        }
        shared.status.set_sleeping(false);
        shared.calm();
        shared.answer_contacts();
        last = Instant::now();
    }
}
