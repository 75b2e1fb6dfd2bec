//! The copy kernel: a kernel of ours, of a few warps, that moves small puts and signals while there are many, and,
//! where large copies stay within the GPU, brings *worker blocks* for them.
//!
//! A copy and a signal by the stream cost the driver's calls and two or three rounds of the GPU's front end: 8 to 12
//! µs. A kernel that runs already needs one read of host memory. But a kernel that always runs would block whoever
//! waits for the whole GPU, so this one is launched when operations come close together and ends by itself: after
//! [`IDLE`] without any, and in any case after [`LIFE`]. Commands go only to one that is known to run; what it has not
//! done when it is gone goes by the stream. Nothing depends on its ever getting a place on the GPU.
//!
//! A launch may wait for its turn for as long as the application likes, and so may the driver's call that makes it. So
//! the call is made by the thread for the application's context ([`resident`](super::resident)), which nobody waits
//! for: while it stands there is no copy kernel. And there are two *launch slots* ([`slot`]), each a stream and a
//! ring; one at a time is given commands. A launch that is not up in time is taken back if the thread has not
//! come to it, and otherwise left to itself: whenever it comes up it finds no commands, and ends. Meanwhile the next
//! one goes to the other launch slot. Where none is free there is no copy kernel for now, and nothing waits for it.
//!
//! Engine and copy kernel never have operations in flight at the same time, which keeps everyone's order.
//!
//! A launch has a block of eight warps, or worker blocks too, only if copies for them were seen lately
//! ([`plan`](super::plan)): they take more of the GPU.

mod command;
mod recent;
mod ring;
mod sizes;
mod slot;

pub use command::{command, windows_hold, HostEnd};
use command::{is_alone, is_bookkeeping};
use recent::Recent;
use ring::{Command, BEHIND_BIT, COMMANDS, CUT, REPORT, UNAWAITED, WORKERS};
use sizes::Sizes;
use slot::{first_launch, LaunchSlot};

use super::app::AppThread;
use super::arrived_bytes::HostBytes;
use super::op::{CallerWindow, Op, Owner, TransferEnd};
use super::plan::{LaunchSize, CROWDED_BYTES};
use super::resident::{Code, Launches, Slot, LAUNCH_SLOTS, LOOK_EVERY, RELAY};
use super::stats::KernelStats;
use crate::memory::gpu::ptx;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time without a command after which it ends. One warp is in nobody's way; a program whose steps are further apart
/// than this time pays for a launch in each.
const IDLE: Duration = Duration::from_millis(1);
/// The same with worker blocks, which take a quarter of the GPU's registers on as many processors, several round trips
/// of a ping-pong.
const IDLE_WITH_WORKERS: Duration = Duration::from_micros(300);
/// Time after which it ends in any case: a bound on what cudaFree, cudaDeviceSynchronize or a kernel that needs the
/// whole GPU may have to wait for, but for what it has begun by then: with worker blocks, up to eight large copies. A
/// launch, some 10 µs, is little beside it.
const LIFE: Duration = Duration::from_millis(2);
/// Behind fewer unfinished operations than these each that copies is reported with its go, not only when 32 are done or
/// nothing follows: so few may come one by one, and NCCL's proxy, or a peer, waits for the report. Floods have more.
const FEW: usize = 16;
/// Threads of a launch of one warp.
const WARP: u32 = 32;
/// Threads of a block of a larger one: `copy.ptx` takes no more.
const THREADS: u32 = 256;

const CODE: Code = Code {
    ptx: Cow::Borrowed(ptx!("copy.ptx")),
    entry: c"oxygin_copy",
    name: "copy",
    without: "all transfers go by the stream",
    bytes: ring::BYTES,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// None takes commands or is expected to.
    Off,
    /// Launched in the present launch slot; it has not said that it runs.
    Launched,
    /// The one in the present launch slot takes commands.
    Up,
}

/// An operation that it was given.
struct Sent {
    op: Op,
    /// Its signal's address, 0 for none.
    signal: u64,
    /// It is for worker blocks.
    is_for_workers: bool,
    /// Entries that its command counts where its poster looks.
    credited: u8,
    /// Its place in the pinned memory.
    staged: Option<Staged>,
}

/// The place in pinned memory of a copy's end in host memory.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    /// Which end of the operation it stands for.
    pub end: HostEnd,
    /// Where the GPU finds it.
    pub at: u64,
    /// Where it is in the engine's staging memory; `None`: it is the operation's own end, which is pinned.
    pub room: Option<StagingRoom>,
}

/// A piece of the engine's staging memory.
#[derive(Clone, Copy, Debug)]
pub struct StagingRoom {
    /// Where it begins.
    pub offset: u64,
    /// Staging memory up to here is free once the operation is done.
    pub until: u64,
}

/// An operation that it has done: what of it matters behind that.
pub struct Landed {
    /// Who waits for it.
    pub owner: Owner,
    /// The end that was written.
    pub to: TransferEnd,
    /// The window of its caller's end, if known.
    pub window: Option<CallerWindow>,
    /// Bytes that were copied there.
    pub len: u64,
    /// Entries of it that are counted where its poster looks.
    pub credited: u8,
    /// Its place in the pinned memory, which holds the bytes of [`HostEnd::To`].
    pub staged: Option<Staged>,
}

/// One engine's copy kernel. Used under the engine's lock; makes no call of the driver.
pub struct CopyKernel {
    launches: Launches<LaunchSlot>,
    /// The present launch slot: where the last launch was that is or was awaited. Launches in others are gone, or late;
    /// none of them has a command to do.
    present: usize,
    phase: Phase,
    /// When the present one was launched, and polls since then.
    since: Instant,
    polls: u32,
    /// Which launch slot has the one that will take over when the present one is gone, and when it was asked for.
    next: Option<(usize, Instant)>,
    /// How many blocks a launch with worker blocks has; 0: all launches are of one warp.
    workers: u32,
    sizes: Sizes,
    /// Commands of the present launch slot that are not known to be done, oldest first; the last one is the last it was
    /// given.
    sent: VecDeque<Sent>,
    /// What counts of the last ones for the order of signals: apart from them, because it is looked at for each signal.
    recent: Recent,
    /// How many of them are copies that make a crowd.
    copies: usize,
    stats: KernelStats,
}

impl CopyKernel {
    /// Loads it and runs it once in each launch slot, briefly, so that the driver has done what it does at a first
    /// launch; later ones may have so many worker blocks. Set-up only: it may wait for kernels.
    pub fn open(rank: u32, app: &Arc<AppThread>, workers: u32) -> Result<Self, String> {
        // SAFETY: memory of its own, zeroed, which stays until the launches are closed.
        let slot = |number, memory| unsafe { LaunchSlot::new(memory, number) };
        Ok(Self {
            launches: Launches::open(rank, app, CODE, first_launch, slot)?,
            present: 0,
            phase: Phase::Off,
            since: Instant::now(),
            polls: 0,
            next: None,
            workers,
            sizes: Sizes::default(),
            sent: VecDeque::with_capacity(COMMANDS as usize),
            recent: Recent::default(),
            copies: 0,
            stats: KernelStats::default(),
        })
    }

    /// Asks for one, if there is a place for it and launches were not late too often; none has commands to do. One that
    /// was late and runs now is as good.
    pub fn launch(&mut self, now: Instant) {
        debug_assert!(self.is_off() && self.sent.is_empty());
        let size = self.sizes.next();
        if let Some(late) = self.launches.slots().iter().position(|b| b.runs() && b.size() >= size) {
            (self.present, self.phase) = (late, Phase::Up);
            return;
        }
        if let Some(slot) = self.ask(now) {
            (self.present, self.phase, self.since, self.polls) = (slot, Phase::Launched, now, 0);
        }
    }

    /// Asks for a launch in a launch slot that is free; `None`: there can be none now.
    fn ask(&mut self, now: Instant) -> Option<usize> {
        let (size, workers, is_off) = (self.sizes.next(), self.workers, self.is_off());
        // Not where the present one was given commands: it may have ended with some undone, which nobody has seen yet.
        let may_be = |number| is_off || number != self.present;
        let slot = self.launches.ask(now, self.present, may_be, |_, slot| slot.next_launch(size, workers))?;
        self.sizes.launched();
        self.stats.launches += 1;
        Some(slot)
    }

    /// There are commands: sees to it that another one runs when the present one's time is over.
    pub fn stay_up(&mut self) {
        self.polls = self.polls.wrapping_add(1);
        if self.next.is_some() || self.polls % LOOK_EVERY != 0 {
            return;
        }
        let now = Instant::now();
        if now.saturating_duration_since(self.since) > LIFE - RELAY {
            self.next = self.ask(now).map(|slot| (slot, now));
        }
    }

    /// The present one is gone, and what it left was taken: the next one takes over, if it was asked for. Whether there
    /// is one, which runs or is awaited.
    pub fn take_over(&mut self) -> bool {
        debug_assert!(self.is_off() && self.sent.is_empty());
        let Some((slot, since)) = self.next.take() else { return false };
        (self.present, self.since, self.polls) = (slot, since, 0);
        self.phase = if self.launches[slot].runs() { Phase::Up } else { Phase::Launched };
        true
    }

    /// Its state, in words.
    pub fn describe(&self) -> String {
        let phase = match self.phase {
            Phase::Off => "off",
            Phase::Launched => "launched, not yet running",
            Phase::Up => "running",
        };
        let waiting = self.launches.slots().iter().filter(|b| b.is_waiting()).count();
        format!(
            "{phase}, {waiting} of {LAUNCH_SLOTS} launches wait for their turn{}, {} of its commands are not done",
            if self.launches.stands() { ", one of them in the driver's call" } else { "" },
            self.sent.len()
        )
    }

    /// What it did, its first start in each launch slot aside.
    pub fn stats(&self) -> KernelStats {
        KernelStats { late: self.launches.late(), ..self.stats }
    }

    /// None was launched, or the last one is gone or late.
    pub fn is_off(&self) -> bool {
        self.phase == Phase::Off
    }

    /// There is work for this size: the next launches have it.
    pub fn wants(&mut self, size: LaunchSize) {
        if self.workers > 0 {
            self.sizes.want(size);
        }
    }

    /// The size of the present one, whether it runs or is awaited.
    pub fn size(&self) -> LaunchSize {
        if self.is_off() {
            LaunchSize::Warp
        } else {
            self.launches[self.present].size()
        }
    }

    /// It takes commands.
    pub fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }

    /// Operations that it was given are not done.
    pub fn is_busy(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Copies among them that make a crowd.
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// How many operations it was given that are not done.
    pub fn busy_with(&self) -> usize {
        self.sent.len()
    }

    /// Whether one more command can be written.
    pub fn has_room(&self) -> bool {
        (self.sent.len() as u64) < COMMANDS
    }

    /// Gives it an operation, whose copy has a place in the pinned memory if it needs one. `in_order`: its signal does
    /// not overtake those of its lane. It is up and has room.
    #[inline]
    pub fn post(&mut self, op: Op, mut command: Command, staged: Option<Staged>, in_order: bool) {
        debug_assert!(self.is_up() && self.has_room());
        let is_alone = is_alone(&op) || self.sent.back().is_some_and(|before| is_alone(&before.op));
        // Signals before it need not wait until worker blocks have moved what it names.
        let is_behind_small = command.flags & WORKERS != 0
            && self.sent.back().is_some_and(|before| !before.is_for_workers && before.signal != 0);
        if self.sent.is_empty() {
            self.recent.clear();
        }
        let lane = Arc::as_ptr(&op.owner.lane) as usize;
        if is_alone || is_behind_small {
            command.flags |= CUT;
            self.recent.clear();
        } else if in_order {
            command.flags |= self.recent.behind(lane, command.signal) << BEHIND_BIT;
        }
        if op.credit.is_none() {
            if self.sent.is_empty() && is_bookkeeping(&op, &command) {
                // Not among others: device code may wait for the next one, which waits for this one.
                command.flags |= UNAWAITED;
            } else if op.len > 0 && self.sent.len() < FEW {
                command.flags |= REPORT;
            }
        }
        self.recent.add(lane, command.signal);
        self.launches[self.present].post(&command);
        let is_for_workers = command.flags & WORKERS != 0;
        let credited = op.credit.map_or(0, |credit| credit.entries);
        self.copies += usize::from(op.len > CROWDED_BYTES);
        self.sent.push_back(Sent { op, signal: command.signal, is_for_workers, credited, staged });
    }

    /// The oldest operation, if it is done. Notices that the copy kernel has begun to run, or is gone, or is late.
    #[inline]
    pub fn land(&mut self) -> Option<Landed> {
        match self.phase {
            Phase::Off => return None,
            Phase::Launched if self.launches[self.present].is_up() => {
                self.launches.in_time();
                self.phase = Phase::Up;
            }
            Phase::Launched => {
                self.give_up_if_late();
                return None;
            }
            Phase::Up => {}
        }
        let slot = &self.launches[self.present];
        let first = slot.posted() - self.sent.len() as u64;
        // First whether it is gone: then the count is final.
        let gone = slot.is_gone();
        if first < slot.done() {
            let Sent { op: Op { owner, to, window, len, .. }, is_for_workers, credited, staged, .. } =
                self.sent.pop_front()?;
            self.copies -= usize::from(len > CROWDED_BYTES);
            self.stats.operations += 1;
            self.stats.by_workers += u64::from(is_for_workers);
            return Some(Landed { owner, to, window, len, credited, staged });
        }
        if gone {
            self.phase = Phase::Off;
        }
        None
    }

    /// Has the next launch go elsewhere if there is none after all, or it is not up in time. It was given nothing.
    fn give_up_if_late(&mut self) {
        self.polls = self.polls.wrapping_add(1);
        if self.polls % LOOK_EVERY != 0 {
            return;
        }
        let now = Instant::now();
        if self.launches[self.present].is_gone() {
            // It has come and gone before it was its turn.
            self.phase = Phase::Off;
            return;
        }
        if self.launches.give_up_if_late(self.present, self.since, now) {
            self.sizes.late(self.launches[self.present].size());
            self.phase = Phase::Off;
        }
    }

    /// What a copy kernel that is gone has left undone. Nobody does it any more: the next one begins behind it.
    pub fn leftovers(&mut self) -> impl Iterator<Item = Op> + '_ {
        debug_assert!(self.is_off());
        self.copies = 0;
        self.sent.drain(..).map(|s| s.op)
    }

    /// All that it was given and has not done; the GPU has failed.
    pub fn give_up(&mut self) -> impl Iterator<Item = Op> + '_ {
        self.phase = Phase::Off;
        self.copies = 0;
        self.sent.drain(..).map(|mut s| {
            // One that is at it may still read them.
            std::mem::replace(&mut s.op.host, HostBytes::Caller).abandon();
            s.op
        })
    }

    /// Whether none can touch what operations named: none runs that was given any.
    pub fn is_idle(&self) -> bool {
        self.launches.are_lost() || self.launches.slots().iter().all(|b| b.is_harmless() || b.is_gone())
    }

    /// Ends it. It has nothing to do any more, or the GPU has failed. `false`: one may still run, or is late and will;
    /// code and rings are left to the process, and the streams.
    pub fn close(self, healthy: bool) -> bool {
        self.launches.close(healthy)
    }
}
