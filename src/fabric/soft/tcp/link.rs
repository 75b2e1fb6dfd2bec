//! The initiator's side: what this rank asks of one peer, cut into frames and spread over that peer's connections.

mod answers;
mod atomics;
mod bulk;
mod drain;
mod ending;
mod failing;
mod fences;
mod places;
mod spread;
mod staged;

use ending::refusal;
pub use ending::Lost;

use self::answers::{ask_next, AskedGet};
use super::dial::Dial;
use super::gpu::Gpu;
use super::order::{EXPRESS, MIDDLE, STRIPES};
use super::outstanding::TaskQueue;
use super::receive_buffer::ReceiveBuffer;
use super::send_buffer::{FrameOwner, SendBuffer};
use super::sock;
use super::wire::{Bell, Frame, Refusal, WindowBytes, HEADER};
use crate::error::Error;
use crate::fabric::soft::gpu::{PinnedBuffer, PinnedPools};
use crate::fabric::soft::lane::Task;
use crate::fabric::soft::local;
use crate::memory::key::Key;
use crate::memory::registry::{Held, Registry};
use crate::rma::op::{Get, Op, Put, Transfer};
use crate::rma::seq::Seq;
use crate::sys::fork::Private;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Payload of a frame. Lanes take turns after each, so this is what a signal waits for.
pub const CHUNK: usize = 256 * 1024;

/// Puts up to this size are copied to the stage and are locally complete at once.
pub const SMALL: usize = PinnedPools::SMALL as usize;

const _: () = assert!(CHUNK as u64 <= PinnedPools::LARGE);

/// Small operations of one lane in a turn, in bytes of frames.
const SMALL_TURN: usize = 16 * 1024;

/// Bytes handed to the kernel in one call of `pump`, so that nobody holds the link for long.
const TURN: usize = 1 << 20;

/// One connection to the peer.
#[derive(Default)]
pub struct Conn {
    /// The socket, once connected.
    pub fd: Option<Arc<Private<OwnedFd>>>,
    /// How the socket comes to be.
    pub dial: Dial,
    /// What epoll watches for.
    pub interest: Option<u32>,
    /// Epoll told of its end: nothing new will come.
    pub over: bool,
    /// The kernel took less than it was offered; epoll will say when it takes more.
    pub blocked: bool,
    send_buffer: SendBuffer,
    /// The send buffer is with the thread that sends.
    lent: bool,
    /// A context went meanwhile: what its operations lend is copied when the send buffer is back.
    disowned: bool,
    receive_buffer: ReceiveBuffer,
    asked: VecDeque<AskedGet>,
    asked_bytes: usize,
    /// Contexts that are over, and the connections that are told of each.
    over_here: VecDeque<(u32, u32)>,
    /// The front of `asked` is being answered.
    landing: bool,
    /// Its bytes are for GPU memory and no buffer is free: the connection is not read.
    starved: bool,
    /// Chunks that wait for their bytes to come from the GPU, or behind such, in the order of sending.
    line: VecDeque<staged::Chunk>,
    line_bytes: usize,
    /// Answers on their way to GPU memory.
    storing: VecDeque<(PinnedBuffer, FrameOwner)>,
    /// What words held before atomic operations, by context and number, as came here.
    fetched: Vec<(u32, u32, u64)>,
    /// Fences that were answered here, by context and number.
    fenced: Vec<(u32, Seq)>,
    /// What the peer has refused here.
    refusals: Vec<(Refusal, u32, WindowBytes)>,
    /// Places of lanes whose gets found their windows gone, with the keys.
    withdrawn: Vec<(u32, u32)>,
}

/// What became of a lane's turn.
#[derive(PartialEq, Eq)]
enum Turn {
    Moved,
    Blocked,
    Empty,
}

/// How far the link is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Nothing was asked of the peer yet.
    Idle,
    /// Connections are being opened.
    Dialing,
    /// All are up.
    Up,
    /// Over.
    Down,
}

/// Everything on its way to one peer.
pub struct Initiator {
    /// How far it is.
    pub phase: Phase,
    /// One a stripe.
    pub conns: Vec<Conn>,
    lanes: Vec<Option<Box<TaskQueue>>>,
    places: places::Places,
    ring: VecDeque<u32>,
    spread: spread::Spread,
    /// When connecting is given up.
    pub deadline: Option<Instant>,
    /// When an operation was last posted, or bytes were last handed to the kernel.
    pub last_use: Option<Instant>,
    /// Posts in a row that came soon after the one before, or after a send.
    pub streak: u32,
    /// Since when a flush is due.
    pub deferred: Option<Instant>,
    gpu: Arc<Gpu>,
    /// This rank's windows in host memory: operations are from and to them.
    registry: Arc<Registry>,
    /// Threads of their own send on the stripes.
    movers: bool,
    /// How often each connection's send buffer was lent and how often it came back, together: odd while it is lent.
    turns: Vec<u64>,
    /// Lanes that have failed, and whose callers are not told yet.
    failing: Vec<failing::Failing>,
    /// A lane waits for a buffer.
    hungry: bool,
    /// Why transfers from or to this rank's GPU cannot go on.
    pub fault: Option<Error>,
    /// A connection has contexts that are over to tell of.
    ends_due: bool,
    /// Atomic operations without an answer.
    fetching: VecDeque<atomics::Fetching>,
    /// A lane may want a fence.
    fences_due: bool,
}

impl Initiator {
    /// A link of `stripes` connections, none of them open.
    pub fn new(stripes: usize, gpu: Arc<Gpu>, registry: Arc<Registry>, movers: bool) -> Self {
        let mut conns = Vec::new();
        conns.resize_with(stripes, Conn::default);
        Self {
            phase: Phase::Idle,
            conns,
            lanes: Vec::new(),
            places: places::Places::default(),
            ring: VecDeque::new(),
            spread: spread::Spread::new(movers),
            deadline: None,
            last_use: None,
            streak: 0,
            deferred: None,
            gpu,
            registry,
            movers,
            turns: vec![0; stripes],
            failing: Vec::new(),
            hungry: false,
            fault: None,
            ends_due: false,
            fetching: VecDeque::new(),
            fences_due: false,
        }
    }

    /// Bytes staged on all connections, if none of them waits for room and nothing else is on its way.
    pub fn only_staged(&self) -> Option<usize> {
        if !self.ring.is_empty() || self.conns.iter().any(|c| c.blocked || c.unsent() > 0) {
            return None;
        }
        Some(self.conns.iter().map(|c| c.send_buffer.staged()).sum())
    }

    /// Whether anything is unfinished or unsent.
    pub fn is_busy(&self) -> bool {
        self.conns.iter().any(|c| !c.send_buffer.is_empty() || !c.asked.iter().all(AskedGet::is_disowned))
            || self.lanes.iter().flatten().any(|l| !l.is_idle())
    }

    /// Takes an operation: a small one goes to the stage if nothing of its lane is in front, others queue.
    pub fn accept(&mut self, task: Task) {
        if task.lane.is_stopped() {
            // Its fault is told.
            return;
        }
        let at = self.place_of(&task.lane);
        let Some(lane) = self.lanes[at].as_deref_mut() else { return };
        if self.phase == Phase::Up && lane.tasks.is_empty() {
            if let Transfer::Put(put) = &task.work.transfer() {
                let stripes = self.conns.len();
                let conn = &mut self.conns[EXPRESS];
                if put.len as usize <= SMALL && !staged::is_from_gpu(put) {
                    let held = self.registry.hold();
                    if let Err(e) = local::check(&held, &task.work, 0, put.len) {
                        drop(held);
                        return self.fail_lane(&task.lane, e);
                    }
                    if stage(lane, conn, put, stripes) {
                        lane.done(task.seq, put.len > 0);
                        self.fences_due |= lane.wants_fence;
                        return;
                    }
                }
            }
        }
        let own = task.lane.clone();
        lane.tasks.push_back(task);
        if self.phase == Phase::Up {
            if let Err(e) = staged::prefetch(lane, &self.gpu, &self.conns[EXPRESS]) {
                return self.fail_lane(&own, e.context(format!("towards rank {}", own.peer)));
            }
        }
        if !std::mem::replace(&mut lane.queued, true) {
            self.ring.push_back(at as u32);
        }
    }

    /// Gives lanes their turns until every connection has enough to send.
    fn fill(&mut self) {
        let mut blocked = 0;
        self.hungry = false;
        while blocked < self.ring.len() {
            let Some(at) = self.ring.pop_front() else { return };
            let turn = self.turn(at as usize);
            self.fences_due |= self.lanes[at as usize].as_ref().is_some_and(|lane| lane.wants_fence);
            match turn {
                Turn::Empty => {
                    if let Some(lane) = &mut self.lanes[at as usize] {
                        lane.queued = false;
                    }
                }
                Turn::Moved => {
                    blocked = 0;
                    self.ring.push_back(at);
                }
                Turn::Blocked => {
                    blocked += 1;
                    self.ring.push_back(at);
                }
            }
        }
    }

    /// A turn of a lane whose first operation goes a way of its own, and how many bytes it counts for.
    fn turn_apart(&mut self, at: usize, seq: Seq, work: &Op) -> Option<(Turn, usize)> {
        match work.transfer() {
            Transfer::Put(put) if staged::is_from_gpu(&put) => {
                Some((self.turn_staged(at, seq, &put), HEADER + put.len as usize))
            }
            Transfer::Atomic(atomic) => Some((self.turn_atomic(at, seq, &atomic), HEADER)),
            _ => None,
        }
    }

    fn turn(&mut self, at: usize) -> Turn {
        let stripes = self.conns.len();
        let mut small = 0;
        loop {
            let Some(lane) = self.lanes[at].as_deref_mut() else { return Turn::Empty };
            let Some(task) = lane.tasks.front() else { return Turn::Empty };
            let (seq, work) = (task.seq, task.work);
            match self.turn_apart(at, seq, &work) {
                Some((Turn::Empty, bytes)) => {
                    small += bytes;
                    if small >= SMALL_TURN {
                        return Turn::Moved;
                    }
                    continue;
                }
                Some((Turn::Blocked, _)) if small > 0 => return Turn::Moved,
                Some((turn, _)) => return turn,
                None => {}
            }
            let Some(lane) = self.lanes[at].as_deref_mut() else { return Turn::Empty };
            let held = self.registry.hold();
            if let Err(e) = local::check(&held, &work, lane.cut, work.len() - lane.cut) {
                drop(held);
                return self.refuse(at, e);
            }
            match work.transfer() {
                Transfer::Put(put) if put.len as usize <= SMALL => {
                    if !stage(lane, &mut self.conns[EXPRESS], &put, stripes) {
                        return if small > 0 { Turn::Moved } else { Turn::Blocked };
                    }
                    lane.pop();
                    lane.done(seq, put.len > 0);
                    small += HEADER + put.len as usize;
                    if small >= SMALL_TURN {
                        return Turn::Moved;
                    }
                }
                Transfer::Put(put) => {
                    let left = put.len - lane.cut;
                    let len = left.min(CHUNK as u64) as usize;
                    let last = left == len as u64;
                    // The last chunk's signal goes behind others, which the peer may take none of for now.
                    let rings = last && put.signal.is_some();
                    let has_room = !rings || self.conns[EXPRESS].send_buffer.has_room(HEADER + 4 * stripes);
                    let stripe = || self.spread.for_put(&self.conns, put.len, CHUNK);
                    let Some(stripe) = has_room.then(stripe).flatten() else {
                        return if small > 0 { Turn::Moved } else { Turn::Blocked };
                    };
                    let id = lane.begin_or_go_on(seq, true);
                    let place =
                        WindowBytes { rkey: put.rkey, addr: put.remote.wrapping_add(lane.cut), len: len as u32 };
                    let owner = FrameOwner { lane: at as u32, operation: id };
                    self.conns[stripe].push_chunk(lane, place, put.local + lane.cut, owner, None);
                    finish_chunk(lane, &mut self.conns, stripe, &put, place, last);
                    lane.advance(id, len, last);
                    return Turn::Moved;
                }
                Transfer::Atomic(_) => return Turn::Blocked,
                Transfer::Get(get) if get.len == 0 => {
                    lane.pop();
                    lane.done(seq, false);
                }
                Transfer::Get(get) => {
                    let stripe = self.spread.for_get(&self.conns, get.len);
                    if !ask_next(lane, &mut self.conns[stripe], at, seq, &get) {
                        return if small > 0 { Turn::Moved } else { Turn::Blocked };
                    }
                    small += HEADER;
                    if small >= SMALL_TURN {
                        return Turn::Moved;
                    }
                }
            }
        }
    }

    /// Sends what the kernel takes, for a turn. Returns whether anything moved; an error with the connection's number.
    pub fn pump(&mut self) -> std::result::Result<bool, (usize, io::Error)> {
        if self.phase != Phase::Up {
            return Ok(false);
        }
        let (mut total, mut moved) = (0, self.advance_staged());
        loop {
            self.fill();
            self.send_fences();
            let mut again = false;
            let own = if self.movers { STRIPES } else { self.conns.len() };
            for (stripe, conn) in self.conns[..own].iter_mut().enumerate() {
                if conn.blocked || conn.send_buffer.is_empty() {
                    continue;
                }
                let Some(fd) = &conn.fd else { continue };
                let before = conn.send_buffer.borrowed() + conn.send_buffer.staged();
                let lanes = &mut self.lanes;
                // SAFETY: borrowed ranges belong to unfinished operations, whose callers keep them readable.
                let all = unsafe { conn.send_buffer.send(fd.as_raw_fd(), |owner| finished(lanes, owner)) }
                    .map_err(|e| (stripe, e))?;
                let sent = before - conn.send_buffer.borrowed() - conn.send_buffer.staged();
                total += sent;
                moved |= sent > 0;
                if sent > 0 && stripe == MIDDLE {
                    self.spread.sent_on_middle();
                }
                conn.blocked = all == Some(false);
                again |= !conn.blocked;
            }
            if !again || total >= TURN {
                break;
            }
        }
        self.fill();
        if self.ends_due {
            self.send_ends();
        }
        if moved {
            self.last_use = Some(Instant::now());
        }
        Ok(moved)
    }

    /// What epoll should watch for on a stripe. `None`: its end was told and waits until there is a buffer.
    pub fn wanted(&self, stripe: usize) -> Option<u32> {
        let conn = &self.conns[stripe];
        let write = if conn.send_buffer.is_empty() && !conn.lent { 0 } else { libc::EPOLLOUT };
        let read = if conn.starved { 0 } else { libc::EPOLLIN };
        (!conn.over || read | write != 0).then_some((read | write) as u32)
    }

    /// Connections that have more to send.
    pub fn unsent(&self) -> impl Iterator<Item = &OwnedFd> {
        self.conns.iter().filter(|c| !c.send_buffer.is_empty()).filter_map(|c| c.fd.as_deref().map(|fd| &**fd))
    }

    /// Connections on which answers are due.
    pub fn owing(&self) -> impl Iterator<Item = &OwnedFd> {
        self.conns.iter().filter(|c| !c.asked.is_empty()).filter_map(|c| c.fd.as_deref().map(|fd| &**fd))
    }
}

impl TaskQueue {
    /// See [`TaskQueue::begin`].
    fn begin_or_go_on(&mut self, seq: Seq, puts: bool) -> u64 {
        if self.cut == 0 {
            self.cutting = self.begin(seq, puts);
        }
        self.cutting
    }

    fn advance(&mut self, id: u64, len: usize, last: bool) {
        self.frame(id, last);
        self.cut += len as u64;
        if last {
            self.cut = 0;
            self.pop();
        }
    }
}

impl Conn {
    /// Bytes of chunks that the kernel has not taken, but for those that are lent.
    fn unsent(&self) -> usize {
        self.send_buffer.borrowed() + self.line_bytes
    }
}

/// A frame of an operation is finished. Some operations are nobody's any more.
#[inline]
fn finished(lanes: &mut [Option<Box<TaskQueue>>], owner: FrameOwner) {
    if let Some(Some(lane)) = lanes.get_mut(owner.lane as usize) {
        lane.finished(owner.operation);
    }
}

/// Counts a chunk that `stripe` took; the last one's signal goes on the express connection.
fn finish_chunk(lane: &mut TaskQueue, conns: &mut [Conn], stripe: usize, put: &Put, place: WindowBytes, last: bool) {
    lane.counts[stripe] = lane.counts[stripe].wrapping_add(1);
    lane.bulk = true;
    if let (true, Some(mut signal)) = (last, put.signal) {
        // Behind all of the put's chunks, so never merely weak.
        signal.strong = true;
        let (nothing, stripes) = (WindowBytes { len: 0, ..place }, conns.len());
        head(lane, &mut conns[EXPRESS], nothing, Some(signal), stripes);
    }
}

/// Stages a small put and its signal; `false`: no room now.
#[inline]
fn stage(lane: &mut TaskQueue, conn: &mut Conn, put: &Put, stripes: usize) -> bool {
    let len = put.len as usize;
    if !conn.send_buffer.has_room(HEADER + 4 * stripes + len) {
        return false;
    }
    if len == 0 && put.signal.is_none() {
        return true;
    }
    let place = WindowBytes { rkey: put.rkey, addr: put.remote, len: len as u32 };
    head(lane, conn, place, put.signal, stripes);
    // SAFETY: the source is a buffer of this rank, or in a window that the caller holds (`local::check`).
    unsafe { conn.send_buffer.copy_from(put.local, len) };
    true
}

/// Stages a put frame's header. A strong signal carries counts if there is anything to count.
#[inline]
fn head(lane: &TaskQueue, conn: &mut Conn, place: WindowBytes, signal: Option<crate::rma::op::Signal>, stripes: usize) {
    let bell = signal.map(|s| Bell { rkey: s.rkey, addr: s.remote, value: s.value, counted: s.strong && lane.bulk });
    conn.send_buffer.copy(&Frame::Put { context: lane.lane.context, place, bell }.emit());
    if bell.is_some_and(|b| b.counted) {
        copy_counts(lane, &mut conn.send_buffer, stripes);
    }
}

/// Stages the counts that go behind a header.
fn copy_counts(lane: &TaskQueue, send_buffer: &mut SendBuffer, stripes: usize) {
    lane.counts[..stripes].iter().for_each(|count| send_buffer.copy(&count.to_le_bytes()));
}
