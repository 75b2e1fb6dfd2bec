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

use super::app::AppThread;
use super::resident::{ptx, Code, Launch, Launches, Slot, SlotMemory, LOOK_EVERY, RELAY};
use crate::fabric::lanes::{Position, Stage};
use board::{Board, Deal};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time without an entry after which it ends, and after which one that is not told to begin does.
const IDLE: Duration = Duration::from_millis(1);
/// Time after which it ends in any case: a bound on what a call or a kernel that needs the whole GPU waits for.
pub const LIFE: Duration = Duration::from_millis(2);
/// Threads of its one block: eight warps.
const THREADS: u32 = 256;

const CODE: Code = Code {
    ptx: ptx!("lanes.ptx"),
    entry: c"oxygin_lanes",
    name: "lane",
    without: "the engine's threads serve all queues",
    bytes: board::BYTES,
};

/// A launch slot: its board, and the number of the last launch there.
struct LaunchSlot {
    board: Board,
    launches: u64,
}

impl Slot for LaunchSlot {
    fn is_up(&self) -> bool {
        self.board.up() == self.launches
    }

    fn is_gone(&self) -> bool {
        self.board.gone() == self.launches
    }

    fn take_back(&mut self) {
        self.launches -= 1;
    }

    fn stop(&self) {
        self.board.stop(self.launches);
    }
}

/// One rank's lane kernel. Makes no call of the driver.
pub struct LaneKernel {
    launches: Launches<LaunchSlot>,
    /// Where the one is that serves, and since when.
    serving: Option<(usize, Instant)>,
    /// Where its lanes are.
    deal: Deal,
    /// Where the one is that comes next, and when it was asked for.
    next: Option<(usize, Instant)>,
    polls: u32,
    /// The lanes of the one that serves carried something.
    has_moved: bool,
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
        // Not told to begin, it ends at once.
        let first = |number, memory: SlotMemory| launch(number, memory.device, 1, Duration::ZERO, Duration::ZERO);
        // SAFETY: memory of its own, zeroed, which stays until the launches are closed.
        let slot = |_, memory| LaunchSlot { board: unsafe { Board::new(memory) }, launches: 1 };
        Ok(Self {
            launches: Launches::open(rank, app, CODE, first, slot)?,
            serving: None,
            deal: Deal::default(),
            next: None,
            polls: 0,
            has_moved: false,
            services: 0,
        })
    }

    /// Asks for a launch, unless one is awaited, or none can be had for now.
    pub fn call(&mut self, now: Instant) {
        if self.next.is_some() {
            return;
        }
        let present = self.serving.map(|(number, _)| number);
        let last = present.map_or(0, |number| number + 1);
        let asked = self.launches.ask(
            now,
            last,
            |number| present != Some(number),
            |number, slot| {
                slot.launches += 1;
                launch(number, slot.board.device, slot.launches, IDLE, LIFE)
            },
        );
        self.next = asked.map(|number| (number, now));
    }

    /// Where it is. `moved`: its lanes carry traffic.
    #[inline]
    pub fn poll(&mut self, moved: bool) -> Stage {
        self.polls = self.polls.wrapping_add(1);
        self.has_moved |= moved;
        let is_time = self.polls % LOOK_EVERY == 0;
        if let Some((slot, since)) = self.serving {
            if self.launches[slot].is_gone() {
                return Stage::Over;
            }
            if is_time {
                if self.launches.are_lost() {
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
        let slot = &self.launches[at];
        // First: one that is gone shows that it was up.
        if slot.is_gone() {
            self.next = None;
            return Stage::Off;
        }
        if slot.is_up() {
            self.launches.in_time();
            return Stage::Ready;
        }
        if !is_time || !self.launches.give_up_if_late(at, since, Instant::now()) {
            return Stage::Called;
        }
        self.next = None;
        Stage::Off
    }

    /// Whether the one that comes next runs.
    pub fn has_next(&self) -> bool {
        self.next.is_some_and(|(at, _)| self.launches[at].runs())
    }

    /// Has the one that is ready serve these lanes.
    pub fn serve(&mut self, lanes: &[LaneRecord]) {
        let Some((at, _)) = self.next.take() else { return };
        self.deal = self.launches[at].board.go(self.launches[at].launches, lanes);
        (self.serving, self.has_moved) = (Some((at, Instant::now())), false);
        self.services += 1;
    }

    /// How far the one that serves, or served last, has come with a lane.
    #[inline]
    pub fn position(&self, nth: usize) -> Option<Position> {
        self.serving.map(|(slot, _)| self.launches[slot].board.position(self.deal, nth))
    }

    /// Has the one that serves end soon.
    pub fn stop(&mut self) {
        if let Some((number, _)) = self.serving {
            self.launches[number].stop();
        }
    }

    /// The one that served has ended, and its lanes are taken back.
    pub fn settle(&mut self) {
        debug_assert!(self.serving.is_none_or(|(slot, _)| self.launches[slot].is_gone()));
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

    /// Ends it. `healthy`: the GPU has not failed. `false`: a launch may still run, or is late and will; code and
    /// boards are left to the process.
    pub fn close(self, healthy: bool) -> bool {
        self.launches.close(healthy)
    }
}
