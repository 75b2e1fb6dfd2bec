//! What the kernel of `lanes.ptx` does, on the CPU: with its freedom to find descriptors and send entries late, to move
//! bytes and to add to signals in another order, and to have what it stores seen late, used at random.
//!
//! What a warp has stored or added lies in its *open effects* until the host and the peer see it: some time, in any
//! order, and before the warp passes a fence.

use crate::copy_kernel::store;
use crate::kernel::{rest, Launch, Reach, MISALIGNED, SLOWNESS};
use crate::lane_counts::{DESCRIPTORS, ENDS, ENTRIES, GOS, GOS_OF_OTHERS, REFUSALS};
use crate::lane_effect::{pieces, Effect};
use crate::lane_longer::Lane;
use crate::lane_record::{Data, Holds, Record, Taken, RECORD_WORDS};
use crate::lane_slots::Slots;
use crate::random::Random;
use crate::world::world;
use nccl_plugin_api::descriptor::WORDS;
use oxygin_ffi::cuda::{CUresult, CUDA_SUCCESS};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{fence, AtomicU32, Ordering};
use std::time::{Duration, Instant};

// The board: what its bytes are, and where.
const BOARD: usize = RECORDS as usize + PLACES as usize * RECORD as usize;
const PLACES: u64 = 64;
const GO: u64 = 0;
const STOP: u64 = 8;
const SPREAD: u64 = 16;
const HOLDS: u64 = 24;
const UP: u64 = 64;
const GONE: u64 = 128;
const POSITIONS: u64 = 256;
const RECORDS: u64 = 1024;
const RECORD: u64 = 8 * RECORD_WORDS as u64;

/// Of a position: the descriptor or entry there is not for this kernel.
const REFUSED: u64 = 1 << 32;
/// Slots that a warp looks at.
const AT_ONCE: u64 = 8;
/// Between two effects, at times: long enough for others to see the one without the other.
const PAUSE: Duration = Duration::from_micros(20);

/// Why a launch ends.
#[derive(Clone, Copy)]
enum End {
    Stop,
    Idle,
    Life,
}

enum Step {
    Do(Effect),
    /// What came before is seen by all before the warp goes on.
    Fence,
}

#[derive(Default)]
struct Warp {
    lanes: Vec<Lane>,
    /// What is left of its present look.
    steps: VecDeque<Step>,
    open: Vec<Effect>,
    /// Signals of an earlier look have no fence behind them.
    is_dirty: bool,
    /// It has seen that the launch is over, and does no further look.
    is_over: bool,
}

/// What a warp's turn was.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Vain,
    Worked,
    /// It took something.
    Took,
}

/// A look: what it does, in order.
#[derive(Default)]
struct Look {
    clears: Vec<Effect>,
    data: Vec<Effect>,
    signals: Vec<Effect>,
    /// What device code is told, each with a fence behind it, and then.
    shown: Vec<Effect>,
    shown_last: Vec<Effect>,
    refused: Vec<Effect>,
}

/// A block of it.
pub struct LaneKernel<'a> {
    launch: &'a Launch,
    /// Blocks of the launch that have not ended.
    blocks: &'a AtomicU32,
    gpu: Reach,
    /// What faults of lane kernels on this GPU alone are called.
    name: String,
    board: u64,
    number: u64,
    idle: Duration,
    life: Duration,
    started: Instant,
    /// How often tests had ended all kernels when it came up, and how much it takes at most.
    ends: u64,
    left: u64,
    /// Slots of each lane that a look reads at most.
    at_once: u64,
    /// What all its queues hold.
    holds: Holds,
    random: Random,
}

/// Why it ends: it left, or the GPU hit an error.
type Ended = Result<(), CUresult>;

impl<'a> LaneKernel<'a> {
    pub const NAME: &'static str = "oxygin_lanes";
    pub const PARAMETERS: usize = 4;
    /// It is never launched otherwise: of four warps or eight.
    pub const THREADS: [u32; 2] = [128, 256];
    /// At most so many blocks.
    pub const BLOCKS: u32 = 16;

    /// Runs all blocks of a launch to their end.
    pub fn run_all(launch: &'a Launch, blocks: u32, gpu: Reach) -> CUresult {
        let left = AtomicU32::new(blocks);
        std::thread::scope(|s| {
            let run = |block| LaneKernel::new(launch, &left, gpu, block).run();
            let others: Vec<_> = (1..blocks).map(|block| s.spawn(move || run(block))).collect();
            let first = run(0);
            let codes = others.into_iter().map(|other| other.join().unwrap_or(MISALIGNED));
            codes.chain([first]).find(|code| *code != CUDA_SUCCESS).unwrap_or(CUDA_SUCCESS)
        })
    }

    fn new(launch: &'a Launch, blocks: &'a AtomicU32, gpu: Reach, block: u32) -> Self {
        let [boards, number, idle, life] = launch.parameters[..] else { unreachable!("checked at launch") };
        let board = boards + u64::from(block) * BOARD as u64;
        let (idle, life) = (Duration::from_nanos(idle) * SLOWNESS, Duration::from_nanos(life) * SLOWNESS);
        let (ends, most) = world().kernel_limits();
        let mut random = Random::new();
        let left = if most == 0 { u64::MAX } else { random.below(most + 1) };
        let (started, at_once, holds) = (Instant::now(), AT_ONCE, Holds::Descriptors);
        let name = format!("lanes of {}", gpu.device());
        Self { launch, blocks, gpu, name, board, number, idle, life, started, ends, left, at_once, holds, random }
    }

    fn run(mut self) -> CUresult {
        match self.work() {
            Ok(()) => CUDA_SUCCESS,
            Err(code) => code,
        }
    }

    fn read(&self, at: u64) -> Result<u64, CUresult> {
        Ok(self.gpu.word(self.board + at)?.load(Ordering::Acquire))
    }

    fn answer(&self, at: u64, value: u64) -> Ended {
        self.gpu.answer(self.board + at, value)
    }

    fn work(&mut self) -> Ended {
        if self.number == 0 || self.board % 256 != 0 {
            world().violation(&format!("launch {} on a board at {:#x}", self.number, self.board));
            return Err(MISALIGNED);
        }
        self.gpu.at(self.board, BOARD)?;
        self.answer(UP, self.number)?;
        let end = match self.wait_for_go()? {
            ControlFlow::Break(end) => end,
            ControlFlow::Continue(()) => {
                GOS.fetch_add(1, Ordering::Relaxed);
                let is_other = self.board != self.launch.parameters[0];
                GOS_OF_OTHERS.fetch_add(is_other.into(), Ordering::Relaxed);
                let warps = self.warps()?;
                self.serve(warps)?
            }
        };
        ENDS[end as usize].fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.blocks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.launch.end();
        }
        self.answer(GONE, self.number)
    }

    /// Whether somebody who tests has ended it.
    fn is_ended(&self) -> bool {
        world().kernel_limits().0 != self.ends || self.left == 0
    }

    fn wait_for_go(&mut self) -> Result<ControlFlow<End>, CUresult> {
        let mut vain = 0;
        loop {
            // Either may be seen first where both are there.
            for what in [[GO, STOP], [STOP, GO]][self.random.below(2) as usize] {
                if self.read(what)? == self.number {
                    return Ok(if what == GO { ControlFlow::Continue(()) } else { ControlFlow::Break(End::Stop) });
                }
            }
            if self.is_ended() {
                return Ok(ControlFlow::Break(End::Life));
            }
            if self.started.elapsed() > self.idle {
                return Ok(ControlFlow::Break(End::Idle));
            }
            rest(&mut vain);
        }
    }

    /// All warps with their lanes, as the board has them. What is wrong there has no lane.
    fn warps(&mut self) -> Result<Vec<Warp>, CUresult> {
        let mut warps: Vec<Warp> = (0..self.launch.block_warps).map(|_| Warp::default()).collect();
        let spread = self.read(SPREAD)?;
        if spread > 3 {
            world().violation(&format!("lanes spread by {spread}"));
            return Ok(warps);
        }
        let holds = self.read(HOLDS)?;
        let Some(holds) = Holds::parse(holds) else {
            world().violation(&format!("queues that hold {holds}"));
            return Ok(warps);
        };
        self.holds = holds;
        self.at_once = AT_ONCE >> spread;
        let mut owned = Vec::new();
        let places = u64::from(self.launch.block_warps) << spread;
        for place in places..PLACES {
            if self.read(RECORDS + place * RECORD)? != 0 {
                world().violation(&format!("lane {place}: it is no warp's"));
            }
        }
        for place in 0..places {
            let mut words = [0; RECORD_WORDS];
            for (i, word) in words.iter_mut().enumerate() {
                *word = self.read(RECORDS + place * RECORD + 8 * i as u64)?;
            }
            match Record::parse(&words, holds) {
                Ok(None) => {}
                Ok(Some(record)) if record.owned().iter().any(|at| owned.contains(at)) => {
                    world().violation(&format!("lane {place}: another lane has its queue"));
                }
                Ok(Some(record)) => {
                    owned.extend(record.owned());
                    warps[(place >> spread) as usize].lanes.push(Lane::new(place, record));
                }
                Err(what) => world().violation(&format!("lane {place}: {what}")),
            }
        }
        Ok(warps)
    }

    fn serve(&mut self, mut warps: Vec<Warp>) -> Result<End, CUresult> {
        let (mut last, mut vain, mut end) = (Instant::now(), 0, None);
        loop {
            // The first warp looks for it, and not while it is at something.
            if end.is_none() && warps[0].steps.is_empty() {
                end = self.end(last)?;
            }
            let mut is_vain = true;
            for i in self.random.order(warps.len()) {
                // At times it has no turn, or several.
                for _ in 0..[0, 1, 1, 4, 16][self.random.below(5) as usize] {
                    let turn = self.turn(&mut warps[i], end.is_some())?;
                    is_vain &= turn == Turn::Vain;
                    match turn {
                        Turn::Took => last = Instant::now(),
                        Turn::Worked => {}
                        Turn::Vain => break,
                    }
                }
            }
            match end {
                Some(end) if warps.iter().all(|w| w.is_over && w.steps.is_empty()) => return Ok(end),
                _ if is_vain => rest(&mut vain),
                _ => vain = 0,
            }
        }
    }

    /// Whether it is to end. `last`: when it last took something.
    fn end(&self, last: Instant) -> Result<Option<End>, CUresult> {
        let end = if self.read(STOP)? == self.number {
            End::Stop
        } else if self.started.elapsed() > self.life || self.is_ended() {
            End::Life
        } else if last.elapsed() > self.idle {
            End::Idle
        } else {
            return Ok(None);
        };
        Ok(Some(end))
    }

    /// One step of a warp, or a look, which finds out what the next ones are.
    fn turn(&mut self, warp: &mut Warp, is_over: bool) -> Result<Turn, CUresult> {
        match warp.steps.front() {
            Some(Step::Fence) if warp.open.is_empty() => {
                warp.steps.pop_front();
                fence(Ordering::SeqCst);
                return Ok(Turn::Worked);
            }
            Some(Step::Fence) => return self.show_one(warp),
            Some(&Step::Do(effect)) => {
                warp.steps.pop_front();
                warp.open.push(effect);
                return Ok(Turn::Worked);
            }
            None => {}
        }
        if warp.is_over {
            return Ok(Turn::Vain);
        }
        // It may have begun another look before.
        if is_over && self.random.below(2) == 0 {
            warp.is_over = true;
            warp.steps.push_back(Step::Fence);
            return Ok(Turn::Worked);
        }
        let turn = self.look(warp)?;
        if turn == Turn::Vain && !warp.open.is_empty() && self.random.below(2) == 0 {
            return self.show_one(warp);
        }
        Ok(turn)
    }

    /// One of the open effects comes true, but for copies that tests hold.
    fn show_one(&mut self, warp: &mut Warp) -> Result<Turn, CUresult> {
        let n = warp.open.len();
        let first = self.random.below(n as u64) as usize;
        let free = (0..n).map(|i| (first + i) % n).find(|&i| {
            let bytes = warp.open[i].held_bytes();
            bytes == 0 || !world().is_held(bytes)
        });
        let Some(i) = free else { return Ok(Turn::Vain) };
        let effect = warp.open.swap_remove(i);
        self.show(effect)?;
        if self.random.below(64) == 0 {
            std::thread::sleep(PAUSE);
        }
        Ok(Turn::Worked)
    }

    fn show(&mut self, effect: Effect) -> Ended {
        match effect {
            Effect::Clear { slot, blank } => {
                for i in self.random.order(WORDS) {
                    self.gpu.word(slot + 8 * i as u64)?.store(blank, Ordering::Release);
                }
            }
            Effect::Copy { from, to, bytes, .. } => {
                let (from, to) = (self.gpu.at(from, bytes as usize)?, self.gpu.at(to, bytes as usize)?);
                // SAFETY: both ranges are mapped; whoever unmaps them first is at fault, and dies.
                unsafe { std::ptr::copy(from, to, bytes as usize) };
            }
            // SAFETY: mapped, and aligned, as no other is taken.
            Effect::Value { to, bytes, value } => unsafe { store(self.gpu.at(to, bytes as usize)?, bytes, value) },
            Effect::Signal { at, by } => {
                self.gpu.word(at)?.fetch_add(by, Ordering::AcqRel);
            }
            Effect::Index { at, value } => {
                let index = self.gpu.at(at, 4)?;
                // SAFETY: four aligned bytes of mapped memory.
                unsafe { AtomicU32::from_ptr(index.cast()) }.store(value, Ordering::Release);
            }
            Effect::Count { at, value } => self.gpu.answer(at, value)?,
            Effect::Position { place, value } => self.answer(POSITIONS + 8 * place, value)?,
        }
        Ok(())
    }

    fn look(&mut self, warp: &mut Warp) -> Result<Turn, CUresult> {
        let mut look = Look::default();
        for i in self.random.order(warp.lanes.len()) {
            let lane = &mut warp.lanes[i];
            if !lane.is_closed {
                self.look_at(lane, &mut look)?;
            }
        }
        if look.shown_last.is_empty() && look.refused.is_empty() {
            let was_dirty = std::mem::take(&mut warp.is_dirty);
            warp.steps.extend(was_dirty.then_some(Step::Fence));
            return Ok(if was_dirty { Turn::Worked } else { Turn::Vain });
        }
        let turn = if look.shown_last.is_empty() { Turn::Worked } else { Turn::Took };
        let is_fenced = !look.data.is_empty() || warp.is_dirty;
        let are_signals = !look.signals.is_empty();
        // An entry that counts as completed has been carried out, an addition like the rest.
        let are_shown = !is_fenced || self.holds != Holds::Descriptors;
        let steps = &mut warp.steps;
        steps.extend(look.clears.into_iter().chain(look.data).map(Step::Do));
        steps.extend(is_fenced.then_some(Step::Fence));
        steps.extend(look.signals.into_iter().map(Step::Do));
        steps.extend(are_shown.then_some(Step::Fence));
        steps.extend(look.shown.into_iter().flat_map(|effect| [Step::Do(effect), Step::Fence]));
        steps.extend(look.shown_last.into_iter().map(Step::Do));
        warp.is_dirty = !are_shown && are_signals;
        if !look.refused.is_empty() {
            steps.push_back(Step::Fence);
            steps.extend(look.refused.into_iter().map(Step::Do));
            warp.is_dirty = false;
        }
        Ok(turn)
    }

    /// What a look finds in one lane.
    fn look_at(&mut self, lane: &mut Lane, look: &mut Look) -> Ended {
        let slots = Slots::new(&lane.record, lane.next, self.gpu)?;
        if lane.record.is_watched {
            if slots.has_begun(self.holds.blank()) {
                lane.is_closed = true;
                REFUSALS.fetch_add(1, Ordering::Relaxed);
                look.refused.push(Effect::Position { place: lane.place, value: REFUSED | u64::from(lane.next) });
            }
            return Ok(());
        }
        let found = slots.whole(self.at_once, self.left, &mut self.random);
        let (first, mut kind) = (lane.next, None);
        for words in found {
            // Behind entries of another kind it is left to the next look.
            let its = lane.record.is_read(words);
            if its.is_some() && kind.is_some_and(|kind| kind != its) {
                break;
            }
            kind = if its.is_some() { Some(its) } else { kind };
            let Some(Taken { data, signal }) = lane.take(words, self.at_once == AT_ONCE) else {
                lane.is_closed = true;
                REFUSALS.fetch_add(1, Ordering::Relaxed);
                break;
            };
            let us = world().command_us();
            if us > 0 {
                std::thread::sleep(Duration::from_micros(us));
            }
            for name in ["gpu", self.name.as_str()] {
                let code = world().injected(name);
                if code != CUDA_SUCCESS {
                    return Err(code);
                }
            }
            let slot = lane.record.queue + lane.record.slot(lane.next) as u64;
            look.clears.push(Effect::Clear { slot, blank: self.holds.blank() });
            match data {
                Some(Data::Copy { from, to, bytes }) => look.data.extend(pieces(from, to, bytes)),
                Some(Data::Value { to, bytes, value }) => look.data.push(Effect::Value { to, bytes, value }),
                None => {}
            }
            look.signals.extend(signal.map(|(at, by)| Effect::Signal { at, by }));
            lane.next = lane.next.wrapping_add(1);
            self.left -= 1;
        }
        let (place, next) = (lane.place, lane.next);
        if next == first && !lane.is_closed {
            lane.note_vain();
        }
        if next == u32::MAX && self.holds != Holds::Descriptors {
            world().violation(&format!("lane {place}: a launch takes entries up to where indices wrap"));
            lane.is_closed = true;
        }
        if next != first {
            let taken = if self.holds == Holds::Descriptors { &DESCRIPTORS } else { &ENTRIES };
            taken.fetch_add(next.wrapping_sub(first).into(), Ordering::Relaxed);
            let (before, last) = lane.record.progress(first, next);
            look.shown.extend(before);
            look.shown_last.push(last);
            look.shown_last.push(Effect::Position { place, value: next.into() });
        }
        if lane.is_closed {
            look.refused.push(Effect::Position { place, value: REFUSED | u64::from(next) });
        }
        Ok(())
    }
}
