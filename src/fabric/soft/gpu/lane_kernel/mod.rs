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
mod grid;
mod managed;
mod text;

pub use board::LaneRecord;

use super::app::AppThread;
use super::resident::{Code, Launch, Launches, Slot, SlotMemory, LOOK_EVERY, RELAY};
use crate::fabric::lanes::{Holds, Position, Stage};
use board::Board;
use grid::{Deal, Grid, BLOCKS, WARPS};
use managed::Ranges;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time without an entry after which it ends, and after which one that is not told to begin does. Of several blocks one
/// may have lanes that carry nothing: these do not end by themselves, but are told to when none has carried anything
/// for so long.
const IDLE: Duration = Duration::from_millis(1);
/// Time after which it ends in any case: a bound on what a call or a kernel that needs the whole GPU waits for.
pub const LIFE: Duration = Duration::from_millis(2);
/// After a launch that was late so many are small, and twice as many each time that one which is not is late again, up
/// to a limit: a GPU on which large blocks find a place at once may be rare.
const SMALL: u32 = 8;
const SMALL_MOST: u32 = 1024;

/// A launch slot: its boards, one a block, and the number of the last launch there.
struct LaunchSlot {
    boards: Vec<Board>,
    launches: u64,
    /// What the last launch is, and the one before.
    grid: Grid,
    before: Grid,
}

impl LaunchSlot {
    /// The boards of the last launch.
    fn present(&self) -> &[Board] {
        &self.boards[..self.grid.blocks]
    }

    /// What the next launch is, of this grid.
    fn next(&mut self, number: usize, grid: Grid) -> Launch {
        (self.before, self.grid) = (self.grid, grid);
        self.launches += 1;
        let idle = if grid.blocks > 1 { LIFE } else { IDLE };
        launch(number, self.boards[0].device, self.launches, grid, (idle, LIFE))
    }
}

impl Slot for LaunchSlot {
    fn is_up(&self) -> bool {
        self.present().iter().all(|board| board.up() == self.launches)
    }

    fn is_gone(&self) -> bool {
        self.present().iter().all(|board| board.gone() == self.launches)
    }

    fn take_back(&mut self) {
        (self.launches, self.grid) = (self.launches - 1, self.before);
    }

    fn stop(&self) {
        self.present().iter().for_each(|board| board.stop(self.launches));
    }
}

/// One rank's lane kernel. Makes no call of the driver.
pub struct LaneKernel {
    launches: Launches<LaunchSlot>,
    /// Where the one is that serves, and since when.
    serving: Option<(usize, Instant)>,
    /// When the one that serves was asked for.
    asked: Instant,
    /// Where the lanes of each of its blocks are, which have them in turn.
    deals: Vec<Deal>,
    /// Where the one is that comes next, and when it was asked for.
    next: Option<(usize, Instant)>,
    polls: u32,
    /// The lanes of the one that serves carried something since the time was looked at, and when they were seen to do
    /// so last; not after it began: never.
    moves: bool,
    moved: Instant,
    /// So many more launches are small, and so many there are to be once a large one is late.
    small: u32,
    are_small: u32,
    /// Where the queues of the one that serves are, until they are brought to its GPU.
    queues: Ranges,
    /// By lane of the one that serves, the low half of its first entry's index.
    firsts: Vec<u32>,
    /// Launches that served, and entries that they carried out.
    services: u64,
    entries: u64,
    /// Launches whose queues were to be brought to the GPU.
    brought: u64,
}

/// What a lane kernel has done, for the closing line.
#[derive(Clone, Copy, Debug)]
pub struct LaneStats {
    /// Launches that served.
    pub services: u64,
    /// Entries that they carried out.
    pub entries: u64,
    /// Launches whose queues were brought to the GPU, as far as there was room.
    pub brought: u64,
    /// Launches that were not there in time.
    pub late: u64,
}

/// What `lanes.ptx` is told.
fn launch(slot: usize, board: u64, number: u64, grid: Grid, (idle, life): (Duration, Duration)) -> Launch {
    let arguments = vec![board, number, idle.as_nanos() as u64, life.as_nanos() as u64];
    Launch { slot, blocks: grid.blocks as u32, threads: grid.threads(), arguments }
}

impl LaneKernel {
    /// Loads it for such queues and runs it once in each launch slot, briefly. Set-up only: it may wait for kernels.
    pub fn open(rank: u32, app: &Arc<AppThread>, holds: Holds) -> Result<Self, String> {
        const ONE: Grid = Grid { blocks: 1, warps: WARPS };
        let code = Code {
            ptx: text::of(holds).into(),
            entry: c"oxygin_lanes",
            name: "lane",
            without: "the engine's threads serve all queues",
            bytes: BLOCKS * board::BYTES,
        };
        // Not told to begin, it ends at once.
        let first =
            |number, memory: SlotMemory| launch(number, memory.device, 1, ONE, (Duration::ZERO, Duration::ZERO));
        let slot = |_, memory: SlotMemory| {
            let board = |block: usize| {
                // SAFETY: inside the launch slot's memory, which is of so many boards.
                let host = unsafe { memory.host.add(block * board::BYTES) };
                let part = SlotMemory { host, device: memory.device + (block * board::BYTES) as u64 };
                // SAFETY: memory of its own, zeroed, which stays until the launches are closed.
                unsafe { Board::new(part) }
            };
            LaunchSlot { boards: (0..BLOCKS).map(board).collect(), launches: 1, grid: ONE, before: ONE }
        };
        Ok(Self {
            launches: Launches::open(rank, app, code, first, slot)?,
            serving: None,
            asked: Instant::now(),
            deals: Vec::new(),
            next: None,
            polls: 0,
            moves: false,
            moved: Instant::now(),
            small: 0,
            are_small: SMALL,
            queues: Ranges::default(),
            firsts: Vec::new(),
            services: 0,
            entries: 0,
            brought: 0,
        })
    }

    /// Asks for a launch for so many lanes, unless one is awaited, or none can be had for now.
    pub fn call(&mut self, now: Instant, lanes: usize) {
        if self.is_awaited() {
            return;
        }
        let grid = Grid::of(lanes, self.small > 0);
        let present = self.serving.map(|(number, _)| number);
        let last = present.map_or(0, |number| number + 1);
        let asked =
            self.launches.ask(now, last, |number| present != Some(number), |number, slot| slot.next(number, grid));
        self.next = asked.map(|number| (number, now));
        self.small = self.small.saturating_sub(asked.is_some().into());
    }

    /// Where it is. `moved`: its lanes carry traffic.
    #[inline]
    pub fn poll(&mut self, moved: bool) -> Stage {
        self.polls = self.polls.wrapping_add(1);
        self.moves |= moved;
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
                if std::mem::take(&mut self.moves) {
                    self.moved = now;
                }
                self.forget_gone();
                // A launch lives from its beginning on, and may have waited for its lanes.
                let (age, life) = (now.saturating_duration_since(since), now.saturating_duration_since(self.asked));
                let is_old = age > LIFE - RELAY || life > LIFE - RELAY / 2;
                if self.moved > since && !self.is_awaited() && is_old {
                    self.call(now, self.served());
                }
                // Each block ends by itself: where one's life is over, the others' lanes wait for it.
                let present = &self.launches[slot];
                let has_ended = |board: &Board| board.gone() == present.launches;
                let is_idle = self.deals.len() > 1 && now.saturating_duration_since(self.moved) > IDLE;
                if is_idle || present.present()[..self.deals.len()].iter().any(has_ended) {
                    present.stop();
                }
            }
            return Stage::Serving;
        }
        self.look_at_next(is_time)
    }

    /// One that has gone again is not waited for.
    fn forget_gone(&mut self) {
        self.next = self.next.filter(|(at, _)| !self.launches[*at].is_gone());
    }

    /// The one that comes next: whether it is there, or late, or has gone again.
    fn look_at_next(&mut self, is_time: bool) -> Stage {
        // First: one that is gone shows that it was up.
        self.forget_gone();
        let Some((at, since)) = self.next else { return Stage::Off };
        let is_large = self.launches[at].grid.warps == WARPS;
        if self.launches[at].is_up() {
            self.launches.in_time();
            if is_large {
                self.are_small = SMALL;
            }
            return Stage::Ready;
        }
        if !is_time || !self.launches.give_up_if_late(at, since, Instant::now()) {
            return Stage::Called;
        }
        if is_large {
            self.small = self.are_small;
            self.are_small = (2 * self.are_small).min(SMALL_MOST);
        }
        self.next = None;
        Stage::Off
    }

    /// Whether one was called that does not serve yet.
    pub fn is_awaited(&self) -> bool {
        self.next.is_some()
    }

    /// Since when one is awaited that waits for its place on the GPU. Where the application's thread has not got
    /// through to the driver with it, the present one would end for nothing.
    pub fn awaited_since(&self) -> Option<Instant> {
        let (at, asked) = self.next?;
        let slot = &self.launches[at];
        (!slot.is_up() && !slot.is_gone() && self.launches.has_driver(at)).then_some(asked)
    }

    /// Whether the one that comes next runs.
    pub fn has_next(&self) -> bool {
        self.next.is_some_and(|(at, _)| self.launches[at].runs())
    }

    /// How many lanes the one that is ready has room for.
    pub fn room(&self) -> usize {
        self.next.map_or(0, |(at, _)| self.launches[at].grid.room())
    }

    /// How many lanes the present one has.
    fn served(&self) -> usize {
        self.deals.iter().map(|deal| deal.lanes()).sum()
    }

    /// Has the one that is ready serve these lanes, for which it has room.
    pub fn serve(&mut self, lanes: &[LaneRecord]) {
        let Some((at, asked)) = self.next.take() else { return };
        self.asked = asked;
        let slot = &self.launches[at];
        // Blocks without a lane end.
        let Grid { blocks: launched, warps } = slot.grid;
        let blocks = launched.min(lanes.len());
        slot.boards[blocks..launched].iter().for_each(|board| board.stop(slot.launches));
        let of_block = |block: usize| -> Vec<&LaneRecord> { lanes.iter().skip(block).step_by(blocks).collect() };
        self.queues = Ranges::of(lanes.iter().map(|lane| &lane.view));
        self.firsts = lanes.iter().map(|lane| lane.view.next as u32).collect();
        self.deals = (0..blocks).map(|block| slot.boards[block].go(slot.launches, warps, &of_block(block))).collect();
        let now = Instant::now();
        self.serving = Some((at, now));
        (self.moves, self.moved) = (false, now);
        self.services += 1;
    }

    /// Has the queues of the one that serves, which are in managed memory, brought to its GPU.
    pub fn bring(&mut self) {
        if self.serving.is_some() {
            self.launches.bring(std::mem::take(&mut self.queues).into());
            self.brought += 1;
        }
    }

    /// How far the one that serves, or served last, has come with a lane.
    #[inline]
    pub fn position(&self, nth: usize) -> Option<Position> {
        let (slot, _) = self.serving?;
        let (block, nth) = (nth % self.deals.len(), nth / self.deals.len());
        Some(self.launches[slot].boards[block].position(self.deals[block], nth))
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
        for (nth, first) in std::mem::take(&mut self.firsts).into_iter().enumerate() {
            self.entries += self.position(nth).map_or(0, |at| at.next.wrapping_sub(first).into());
        }
        self.serving = None;
    }

    /// Whether one serves, or may come to: it is not done with.
    pub fn is_serving(&self) -> bool {
        self.serving.is_some()
    }

    /// What it has done so far.
    pub fn stats(&self) -> LaneStats {
        let (services, entries, brought) = (self.services, self.entries, self.brought);
        LaneStats { services, entries, brought, late: self.launches.late() }
    }

    /// Ends it. `healthy`: the GPU has not failed. `false`: a launch may still run, or is late and will; code and
    /// boards are left to the process.
    pub fn close(self, healthy: bool) -> bool {
        self.launches.close(healthy)
    }
}

#[cfg(test)]
mod tests {
    /// What `fabric/lanes.rs` says of long copies the kernel has in its text.
    #[test]
    fn the_text_has_the_numbers_of_long_copies() {
        use crate::fabric::lanes::{LONGEST, LONGEST_APART, LONGEST_PAUSED, OTHERS};
        let text = include_str!("lanes.ptx");
        let shift = |name: &str, longest: u64| {
            let shift = (longest / LONGEST).ilog2();
            assert_eq!(longest, LONGEST << shift);
            format!("shl.b32    {name}, most, {shift};")
        };
        let (longest, paused) = (shift("longest", LONGEST_APART), shift("paused", LONGEST_PAUSED));
        let (first, fewer) =
            (format!("mov.u32         others, {OTHERS};"), format!("setp.lt.u32     %p1, others, {OTHERS};"));
        assert!([longest, paused, first, fewer].iter().all(|line| text.contains(line)));
    }
}
