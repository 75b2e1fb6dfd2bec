//! The lane kernel: a kernel of ours that serves queues of device code by itself, while there is traffic.
//!
//! Through the CPU an operation costs three trips between GPU and host: the descriptor, the command for the copy
//! kernel, and the GPU's look for it. The lane kernel looks for descriptors itself, on the GPU of the rank that posts
//! them, and stores into peers' memory and adds to their signals over NVLink. What it does not take (`lanes.ptx` says
//! what it takes) it leaves to the CPU, lane by lane.
//!
//! It is called where entries come close together and ends by itself, as the copy kernel does: after `IDLE` without
//! any, and in any case after [`LIFE`]. A launch does nothing before it is told to begin, and then with the lanes that
//! it is given. So one that comes up late, or never, is in nobody's way: it ends, or it never was. While one serves,
//! another is called `RELAY` before its end; in between the CPU has the lanes, for a few microseconds.

mod board;

pub use board::LaneRecord;

use super::app::{AppThread, SET_UP_WITHIN};
use super::resident::{choose, Backoff, Code, Fate, Launch, Launcher, Request, SlotMemory, LAUNCH_SLOTS};
use super::DRAIN_WITHIN;
use crate::fabric::lanes::{Position, Stage};
use board::{Board, Deal};
use oxygin_ffi::cuda::CudaError;
use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time without an entry after which it ends, and after which one that is not told to begin does.
const IDLE: Duration = Duration::from_millis(1);
/// Time after which it ends in any case: a bound on what a call or a kernel that needs the whole GPU waits for.
pub const LIFE: Duration = Duration::from_millis(2);
/// How long before its end the next one is called: some 50 µs pass until it runs.
const RELAY: Duration = Duration::from_micros(600);
/// Time after which a launch that is not up is given up.
const LATE: Duration = Duration::from_micros(300);
/// Polls for each look at the clock.
const LOOK_EVERY: u32 = 16;
/// How long closing waits for all of them.
const GONE_WITHIN: Duration = Duration::from_secs(1);
/// Threads of its one block: eight warps.
const THREADS: u32 = 256;

/// Its code, ended by a zero.
const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("lanes.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("the PTX holds a zero"),
};
const CODE: Code = Code {
    ptx: PTX,
    entry: c"oxygin_lanes",
    name: "lane",
    without: "the engine's threads serve all queues",
    bytes: board::BYTES,
};

/// A launch slot: its board, and the number of the last launch there.
struct Slot {
    board: Board,
    launches: u64,
}

impl Slot {
    fn is_up(&self) -> bool {
        self.board.up() == self.launches
    }

    fn is_gone(&self) -> bool {
        self.board.gone() == self.launches
    }
}

/// One rank's lane kernel. Makes no call of the driver.
pub struct LaneKernel {
    rank: u32,
    app: Arc<AppThread>,
    launcher: Arc<Launcher>,
    slots: Vec<Slot>,
    /// The last launch that was asked for, as long as it is not known what has become of it, and in which launch slot.
    request: Option<(usize, Arc<Request>)>,
    /// Where the one is that serves, and since when.
    serving: Option<(usize, Instant)>,
    /// Where its lanes are.
    deal: Deal,
    /// Where the one is that comes next, and when it was asked for.
    next: Option<(usize, Instant)>,
    polls: u32,
    /// The lanes of the one that serves carried something.
    has_moved: bool,
    backoff: Backoff,
    /// The driver did not take a launch, and never will.
    is_refused: bool,
    /// Launches that served, for the closing line.
    services: u64,
}

/// What `lanes.ptx` is told.
fn launch(slot: usize, board: u64, number: u64, idle: Duration, life: Duration) -> Launch {
    let arguments = vec![board, number, idle.as_nanos() as u64, life.as_nanos() as u64];
    Launch { slot, blocks: 1, threads: THREADS, arguments }
}

impl LaneKernel {
    /// Loads it and runs it once in each launch slot, briefly. Set-up only: it may wait for kernels.
    pub fn open(rank: u32, app: &Arc<AppThread>) -> Result<Self, String> {
        let opened = app.run(SET_UP_WITHIN, |context| {
            // Not told to begin, it ends at once.
            let first =
                |slot: usize, memory: SlotMemory| launch(slot, memory.device, 1, Duration::ZERO, Duration::ZERO);
            let (launcher, memories) = Launcher::open(context, CODE, first)?;
            // SAFETY: parts of their own of zeroed memory, which is freed when the kernel is closed.
            let slots = memories.into_iter().map(|memory| Slot { board: unsafe { Board::new(memory) }, launches: 1 });
            Ok::<_, CudaError>((launcher, slots.collect()))
        });
        let opened = opened.ok_or("the application's context is gone, or a call of the driver stands")?;
        let (launcher, slots) = opened.map_err(|e| e.to_string())?;
        Ok(Self {
            rank,
            app: app.clone(),
            launcher,
            slots,
            request: None,
            serving: None,
            deal: Deal::default(),
            next: None,
            polls: 0,
            has_moved: false,
            backoff: Backoff::default(),
            is_refused: false,
            services: 0,
        })
    }

    /// Asks for a launch, unless one is awaited, or none can be had for now.
    pub fn call(&mut self, now: Instant) {
        self.forget_request(now);
        if self.next.is_some() || self.is_refused || self.request.is_some() || !self.backoff.allows(now) {
            return;
        }
        let (last, present) = (self.serving.map_or(0, |(slot, _)| slot + 1), self.serving.map(|(slot, _)| slot));
        let free = choose(last, LAUNCH_SLOTS, |i| present != Some(i) && self.slots[i].is_gone());
        let Some(at) = free else { return };
        let slot = &mut self.slots[at];
        slot.launches += 1;
        let what = launch(at, slot.board.device, slot.launches, IDLE, LIFE);
        self.request = Some((at, Request::post(&self.app, &self.launcher, self.rank, what)));
        self.next = Some((at, now));
    }

    /// Forgets the last request if it is known what has become of it. Its launch slot is free again if nothing was
    /// launched.
    fn forget_request(&mut self, now: Instant) {
        let Some((slot, request)) = &self.request else { return };
        let fate = request.fate();
        match fate {
            Fate::Waits | Fate::Taken => return,
            Fate::Launched => {}
            Fate::NotFree | Fate::Refused | Fate::RefusedForNow | Fate::Cancelled => self.slots[*slot].launches -= 1,
        }
        if fate == Fate::RefusedForNow {
            self.backoff.refused(now);
        }
        self.is_refused |= fate == Fate::Refused;
        self.request = None;
    }

    /// Where it is. `moved`: its lanes carry traffic.
    #[inline]
    pub fn poll(&mut self, moved: bool) -> Stage {
        self.polls = self.polls.wrapping_add(1);
        self.has_moved |= moved;
        let is_time = self.polls % LOOK_EVERY == 0;
        if let Some((slot, since)) = self.serving {
            if self.slots[slot].is_gone() {
                return Stage::Over;
            }
            if is_time {
                if self.app.check().is_err() {
                    return Stage::Failed;
                }
                let now = Instant::now();
                if self.has_moved && self.next.is_none() && now.saturating_duration_since(since) > LIFE - RELAY {
                    self.call(now);
                }
            }
            return Stage::Serving;
        }
        self.look_at_next(is_time)
    }

    /// The one that comes next: whether it is there, or late, or has gone again.
    fn look_at_next(&mut self, is_time: bool) -> Stage {
        let Some((at, since)) = self.next else { return Stage::Off };
        let slot = &self.slots[at];
        // First: one that is gone shows that it was up.
        if slot.is_gone() {
            self.next = None;
            return Stage::Off;
        }
        if slot.is_up() {
            self.backoff.in_time();
            return Stage::Ready;
        }
        if !is_time {
            return Stage::Called;
        }
        let now = Instant::now();
        let is_late = now.saturating_duration_since(since) > LATE;
        let is_none = self
            .request
            .as_ref()
            .is_some_and(|(slot, request)| *slot == at && (request.fate().is_none() || is_late && request.cancel()));
        if !is_none && !is_late {
            return Stage::Called;
        }
        self.backoff.late(now);
        self.next = None;
        if is_none {
            self.forget_request(now);
        }
        Stage::Off
    }

    /// Whether the one that comes next runs.
    pub fn has_next(&self) -> bool {
        self.next.is_some_and(|(at, _)| self.slots[at].is_up() && !self.slots[at].is_gone())
    }

    /// Has the one that is ready serve these lanes.
    pub fn serve(&mut self, lanes: &[LaneRecord]) {
        let Some((at, _)) = self.next.take() else { return };
        self.deal = self.slots[at].board.go(self.slots[at].launches, lanes);
        (self.serving, self.has_moved) = (Some((at, Instant::now())), false);
        self.services += 1;
    }

    /// How far the one that serves, or served last, has come with a lane.
    #[inline]
    pub fn position(&self, nth: usize) -> Option<Position> {
        self.serving.map(|(slot, _)| self.slots[slot].board.position(self.deal, nth))
    }

    /// Has the one that serves end soon.
    pub fn stop(&mut self) {
        if let Some((slot, _)) = self.serving {
            self.slots[slot].board.stop(self.slots[slot].launches);
        }
    }

    /// The one that served has ended, and its lanes are taken back.
    pub fn settle(&mut self) {
        debug_assert!(self.serving.is_none_or(|(slot, _)| self.slots[slot].is_gone()));
        self.serving = None;
    }

    /// Whether one serves, or may come to: it is not done with.
    pub fn is_serving(&self) -> bool {
        self.serving.is_some()
    }

    /// How many launches have served.
    pub fn services(&self) -> u64 {
        self.services
    }

    /// Ends it. `healthy`: the GPU has not failed. `false`: one may still run, or is late and will; code and boards are
    /// left to the process.
    pub fn close(self, healthy: bool) -> bool {
        if !healthy {
            return false;
        }
        if let Some((_, request)) = &self.request {
            request.cancel();
        }
        self.slots.iter().for_each(|slot| slot.board.stop(slot.launches));
        let launcher = self.launcher.clone();
        self.app.run(DRAIN_WITHIN, move |_| launcher.end(GONE_WITHIN)).unwrap_or_else(|| self.app.check().is_err())
    }
}
