//! From this rank to one peer: the route, and the operations that wait for room on it.

mod copy;
mod leaving;
mod outs;
mod push;
mod question;
mod replies;
mod responses;
mod route;
mod share;
mod turn;

pub use self::leaving::LEAVE_WITHIN;
use self::outs::Outs;
use self::push::{Outcome, Pushed};
use self::question::Question;
use self::replies::Replies;
use self::share::Pulls;
use self::turn::Step;
use super::gpu::{Bounce, Engine, Op, Owner};
use super::lane::{Health, Lane, Task, Work};
use super::local::alive;
use super::local::cma;
use super::local::inbox::PeerInbox;
use super::local::message::GetRequest;
use super::local::status::WINDOW_BITS;
use super::neighbours::dead;
use super::shared::Shared;
use crate::error::{Error, Result};
use crate::rma::op::Signal;
use crate::rma::seq::Seq;
use crate::sync::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::sync::MutexGuard;

/// Bytes moved for one operation before others get their turn: about 0.2 ms of copying.
const QUANTUM: u64 = 2 << 20;
/// Puts up to here go through the ring although cross-memory attach works: below it the system call costs more than
/// the second copy (measured; docs/benchmarks.md).
const RING_MAX: u64 = 4096;
/// Bytes of one message where everything goes through the ring.
const RING_CHUNK: u64 = 16 << 10;
/// Operations of one lane per turn.
const BURST: usize = 64;
/// Unfinished operations towards one peer before a caller is made to wait inside its call.
const MAX_BACKLOG: usize = 1 << 20;
/// How bytes get to the peer.
enum Route {
    /// Not tried yet.
    Unknown,
    /// Asked for its inbox.
    Asking(Question),
    /// It is this rank itself.
    Own,
    /// On this host.
    Local(Box<Local>),
    /// In this process, and one of the two ranks has GPU memory: its engine moves the bytes.
    Gpu(Arc<Engine>),
    /// Anywhere else.
    Tcp,
    /// It has closed its communicator in good order.
    Closed,
}

struct Local {
    inbox: PeerInbox,
    /// Its process, if cross-memory attach reaches it.
    pid: Option<libc::pid_t>,
    /// `BEHIND_GPU_BIT` once anything went into its GPU memory this way, else 0.
    behind: u32,
}

impl Local {
    /// The process for cross-memory attach to a window: none if it cannot be told whether that still exists.
    fn pid_for(&self, window: u32) -> Option<libc::pid_t> {
        self.pid.filter(|_| (window as usize) < WINDOW_BITS)
    }
}

/// An operation that waits or runs.
struct Running {
    seq: Seq,
    work: Work,
    /// Bytes already moved.
    done: u64,
    /// The next piece of a source in GPU memory, on its way to another process.
    bounce: Option<Bounce>,
}

/// A lane's place in the link.
struct Queue {
    lane: Arc<Lane>,
    tasks: VecDeque<Running>,
    /// Operations that the peer or this rank's engine finishes.
    outs: Outs,
    /// What the peer fetches of them. The next lane in this place counts on.
    pulls: Pulls,
    /// In `active`, or being worked on without the lock, or waiting for the peer's answer.
    engaged: bool,
    /// Its first operation waits for the peer's answer.
    waiting: bool,
    /// The kernel copies for its first operation, and the lock is free meanwhile.
    copying: bool,
    /// Its context is gone; another lane may have the place.
    vacant: bool,
}

/// Something the peer asked for.
enum Response {
    Data {
        from: u64,
        key: u32,
        request: GetRequest,
        done: u64,
        bounce: Option<Bounce>,
    },
    Refused(String),
    /// Pulls of its lane `slot` up to this one are done.
    Pulled {
        slot: u32,
        number: Seq,
    },
}

/// Where messages to the peer are pushed, if it is reached through shared memory.
fn ring<'a>(route: &'a mut Route, replies: &'a mut Replies) -> Option<&'a mut Local> {
    match (route, replies) {
        (Route::Local(local), _) | (_, Replies::Through(local)) => Some(local),
        _ => None,
    }
}

struct State {
    route: Route,
    replies: Replies,
    queues: Vec<Queue>,
    active: VecDeque<u32>,
    responses: VecDeque<Response>,
    /// Lanes with something out.
    out: Vec<u32>,
    /// The places of copies by the kernel that are under way, a bit each.
    copies: u32,
    /// Seen closed while operations were unfinished: their end may still be in the ring.
    is_closing: bool,
}

/// This rank's side towards one peer.
pub struct Link {
    /// The peer.
    pub peer: u32,
    /// Whether it can be reached.
    pub health: Arc<Health>,
    state: Mutex<State>,
    backlog: AtomicUsize,
    /// Operations that the peer's engine has and has not completed.
    in_engine: Arc<AtomicUsize>,
}

impl Link {
    /// A link nobody has used.
    pub fn new(peer: u32, health: Arc<Health>) -> Self {
        let state = State {
            route: Route::Unknown,
            replies: Replies::Unknown,
            queues: Vec::new(),
            active: VecDeque::new(),
            responses: VecDeque::new(),
            out: Vec::new(),
            copies: 0,
            is_closing: false,
        };
        Self { peer, health, state: Mutex::new(state), backlog: AtomicUsize::new(0), in_engine: Arc::default() }
    }

    /// Gives a lane a place; the returned number goes with each of its operations.
    pub fn add_lane(&self, lane: Arc<Lane>) -> u32 {
        let mut state = self.state.lock();
        let outs = Outs::new(self.peer, self.health.clone());
        let found = state.queues.iter().position(|q| q.vacant && !q.engaged && !q.copying && q.outs.is_empty());
        let pulls = found.map_or_else(Pulls::default, |slot| state.queues[slot].pulls);
        let queue = Queue {
            lane,
            tasks: VecDeque::new(),
            outs,
            pulls,
            engaged: false,
            waiting: false,
            copying: false,
            vacant: false,
        };
        match found {
            Some(slot) => {
                state.queues[slot] = queue;
                slot as u32
            }
            None => {
                state.queues.push(queue);
                state.queues.len() as u32 - 1
            }
        }
    }

    /// Whether anything waits here.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) != 0 || self.in_engine.load(Ordering::Relaxed) != 0
    }

    /// Starts an operation.
    #[inline]
    pub fn post(&self, shared: &Shared, lane: &Lane, slot: u32, work: Work) -> Result<Seq> {
        self.health.check()?;
        shared.keep_busy();
        let mut state = self.state.lock();
        if let (Route::Local(local), Work::Put(put)) = (&mut state.route, &work) {
            if lane.is_idle() && put.len <= RING_MAX && !put.is_on_gpu() {
                let seq = lane.number();
                match local.push_small(put, slot) {
                    Pushed::All { wake } => {
                        lane.complete(seq);
                        drop(state);
                        if wake {
                            shared.wake(self.peer);
                        }
                        return Ok(seq);
                    }
                    Pushed::Nothing => {
                        return self.enqueue(shared, state, slot, Running { seq, work, done: 0, bounce: None })
                    }
                    Pushed::DataOnly => {
                        let done = put.len;
                        return self.enqueue(shared, state, slot, Running { seq, work, done, bounce: None });
                    }
                }
            }
        }
        let seq = lane.number();
        self.enqueue(shared, state, slot, Running { seq, work, done: 0, bounce: None })
    }

    #[cold]
    #[inline(never)]
    fn enqueue(&self, shared: &Shared, mut state: MutexGuard<'_, State>, slot: u32, running: Running) -> Result<Seq> {
        let seq = running.seq;
        if matches!(state.route, Route::Tcp) {
            let lane = state.queues[slot as usize].lane.clone();
            // Under the lock: what one thread posts first must be first there too.
            shared.tcp().post(Task { lane, seq, work: running.work });
            drop(state);
            // The caller may leave it at that; of copies from a GPU no socket tells.
            shared.stir();
            return Ok(seq);
        }
        if let Route::Gpu(engine) = &state.route {
            let queue = &state.queues[slot as usize];
            if !queue.engaged && queue.tasks.is_empty() {
                self.submit(shared, engine, &queue.lane, &running);
                drop(state);
                // The caller may leave it at that.
                shared.stir();
                if self.in_engine.load(Ordering::Relaxed) > MAX_BACKLOG {
                    self.wait_for_room(shared)?;
                }
                return Ok(seq);
            }
        }
        if matches!(state.route, Route::Closed) {
            self.health.fail(Error::remote(format!("rank {} has closed its communicator", self.peer)));
            self.health.check()?;
        }
        let small = running.work.len() <= RING_MAX;
        let on_gpu = running.work.is_on_gpu();
        let queue = &mut state.queues[slot as usize];
        queue.tasks.push_back(running);
        if !queue.engaged {
            queue.engaged = true;
            state.active.push_back(slot);
        }
        self.backlog.fetch_add(1, Ordering::Relaxed);
        shared.mark_pending(self.peer);
        // A source in GPU memory costs its length nothing here: others fetch it.
        let now = match state.route {
            Route::Own | Route::Unknown => small,
            Route::Local(_) => on_gpu && state.queues[slot as usize].tasks.len() == 1,
            _ => false,
        };
        drop(state);
        if now {
            self.advance(shared);
        }
        shared.stir();
        if self.backlog.load(Ordering::Relaxed) > MAX_BACKLOG {
            self.wait_for_room(shared)?;
        }
        Ok(seq)
    }

    #[cold]
    fn wait_for_room(&self, shared: &Shared) -> Result<()> {
        while self.backlog.load(Ordering::Relaxed).max(self.in_engine.load(Ordering::Relaxed)) > MAX_BACKLOG {
            self.health.check()?;
            if !shared.poll() {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Moves what can move. Returns whether anything did.
    pub fn advance(&self, shared: &Shared) -> bool {
        let Some(mut state) = self.state.try_lock() else { return false };
        let has_failed = self.health.has_failed();
        // A peer that waits for this rank is told that it waits in vain.
        let owes = has_failed && state.responses.iter().any(|r| matches!(r, Response::Refused(_)));
        if has_failed && !owes {
            self.drop_all(&mut state);
            return false;
        }
        match state.route {
            Route::Unknown | Route::Asking(_) => self.find_route(shared, &mut state),
            _ => {}
        }
        if matches!(state.route, Route::Unknown | Route::Asking(_)) {
            return false;
        }
        let mut moved = self.send_responses(shared, &mut state);
        let has_tasks = !has_failed && !matches!(state.route, Route::Tcp | Route::Closed);
        if !has_tasks {
            if has_failed && state.responses.is_empty() {
                self.drop_all(&mut state);
            }
            if state.publish() {
                shared.wake(self.peer);
            }
            return moved;
        }
        if !state.out.is_empty() {
            moved |= self.settle(shared, &mut state);
        }
        let mut turns = state.active.len();
        while turns > 0 {
            turns -= 1;
            let Some(slot) = state.active.pop_front() else { break };
            let (next, step) = self.run_lane(shared, state, slot);
            state = next;
            moved |= !matches!(step, Step::Full);
            match step {
                Step::Again | Step::Fetching => state.active.push_back(slot),
                Step::Idle => state.queues[slot as usize].engaged = false,
                Step::Waiting => state.queues[slot as usize].waiting = true,
                Step::Full => {
                    // Nobody else has room either; next time another lane comes first.
                    state.active.push_back(slot);
                    break;
                }
                // What others have pushed is complete for them: it goes out all the same.
                Step::Failed => break,
            }
        }
        let wake = state.publish();
        let engine = match &state.route {
            Route::Gpu(engine) => Some(engine.clone()),
            _ => None,
        };
        drop(state);
        if wake {
            shared.wake(self.peer);
        }
        engine.is_some_and(|e| e.poll()) || moved
    }

    /// Ends everything that waits; called once the peer has failed.
    fn drop_all(&self, state: &mut State) {
        for queue in &mut state.queues {
            queue.tasks.clear();
            queue.outs.clear();
            (queue.engaged, queue.waiting) = (false, false);
        }
        state.active.clear();
        state.out.clear();
        state.responses.clear();
        self.backlog.store(0, Ordering::Relaxed);
    }

    /// Looks whether a peer on this host still lives.
    pub fn look(&self) {
        if self.health.has_failed() {
            return;
        }
        let Some(mut guard) = self.state.try_lock() else { return };
        let state = &mut *guard;
        let Some(local) = ring(&mut state.route, &mut state.replies) else { return };
        match local.inbox.look() {
            alive::State::Alive => {}
            alive::State::Dead => {
                self.health.fail(dead(self.peer));
                self.drop_all(state);
            }
            // Operations that go another way end that way.
            alive::State::Closed if !matches!(state.route, Route::Local(_)) => {
                self.drop_responses(state);
                state.replies = Replies::Closed;
            }
            alive::State::Closed => {
                if self.backlog.load(Ordering::Relaxed) != 0 {
                    // What it sent last is read before the next look.
                    if !std::mem::replace(&mut state.is_closing, true) {
                        return;
                    }
                    self.health.fail(Error::remote(format!(
                        "rank {} has closed its communicator while operations to it were unfinished",
                        self.peer
                    )));
                    self.drop_all(state);
                }
                state.route = Route::Closed;
            }
        }
    }
}

fn gone(peer: u32) -> String {
    format!("rank {peer} has deregistered the window that an operation names; deregister after the last operation")
}

impl Work {
    fn is_on_gpu(&self) -> bool {
        match self {
            Work::Put(p) => p.is_on_gpu(),
            Work::Get(g) => g.is_on_gpu(),
        }
    }

    fn len(&self) -> u64 {
        match self {
            Work::Put(p) => p.len,
            Work::Get(g) => g.len,
        }
    }

    fn signal(&self) -> Option<&Signal> {
        match self {
            Work::Put(p) => p.signal.as_ref(),
            Work::Get(_) => None,
        }
    }
}
