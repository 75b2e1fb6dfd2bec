//! Runs a kernel in PTX on the CPU, one instruction of one lane at a time.
//!
//! Whose turn it is is drawn: lanes of a warp go apart wherever nothing keeps them together, and blocks come up when
//! they like. What a register holds at first is random. Memory is as weak as PTX says it may be, in these ways:
//!
//! * Stores and additions without a result become visible late and in any order, but for those to one place; a fence or
//!   release makes those of its lane visible, and those of its warp from before a `bar.warp.sync`; behind a `bar.sync`
//!   those of the block from before it are the first warp's.
//! * Loads may find what lay there before ([`memory`]), but for what their lane has taken up: what somebody published
//!   with a release, or with a fence and a store behind it, is taken up by a load with acquire that finds it, or by a
//!   load and a fence behind it, at a scope that holds both; and `bar.warp.sync` hands on to all lanes what each of
//!   them has taken up, and `bar.sync` to all of a block.
//! * A vector is loaded element by element, in any order, and anything may happen between two.
//!
//! What a block shares has its own memory: a store there is seen at once by its own lane, and by the others from the
//! next `bar.sync` on, or once they have acquired what was released there behind it, or at any time before. Whoever
//! acquires it takes up what the releasing lane's stores to all memory were, too, and has them behind its own fences.
//!
//! Loads are at least relaxed: there are no others here. A lane never finds a value older than one it has found in the
//! same place; other lanes may, even behind a barrier, where PTX would not have it. The host sees all that is visible,
//! unless memory has a [`pending::Far`]: then the host and other GPUs see what that has, and device code of this GPU
//! sees all that is visible.

mod compute;
pub mod memory;
mod pending;
pub mod program;
mod shared;
mod view;

use compute::{mask, targets};
use memory::{By, Memory, MustSee};
use pending::{show_at, Pending};
use program::{Instruction, Operand, Program, Strength, Vote, What};
use view::View;

pub const LANES: usize = 32;

/// What an instruction has at most four of: elements of a vector, registers that it sets, stores.
type Few<T> = arrayvec::ArrayVec<T, 4>;

/// A lane's stores that are not visible yet, at most.
const HELD: usize = 48;
/// Instructions that a lane does in one turn, at most.
const TURN: u64 = 60;
/// A `nanosleep` is so many turns, at most.
const SLEEP: u64 = 40;
/// One turn of a warp in so many leaves some of its lanes behind, for so many turns of all at most.
const LAG_EVERY: u64 = 60;
const LAG: u64 = 4000;
/// Of so many stores one is late, if any are.
const LATE_EVERY: u64 = 4;
/// In one turn of so many a store becomes visible that nothing has asked for.
const SHOW_EVERY: u64 = 4;
/// … to others than this GPU.
const SHOW_FAR_EVERY: u64 = 32;

/// splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

struct Lane {
    /// In its block.
    thread: u64,
    at: usize,
    registers: Vec<u64>,
    has_ended: bool,
    pending: Vec<Pending>,
    view: View,
    /// Of a vector that it loads: what is there.
    loaded: Vec<Option<u64>>,
}

struct Warp {
    block: u64,
    lanes: Vec<Lane>,
    /// From before a `bar.warp.sync`.
    pending: Vec<Pending>,
    /// Its next turn is not before this.
    wakes: u64,
    /// Lanes that have none before this.
    lag: u32,
    lag_ends: u64,
}

impl Warp {
    fn has_ended(&self) -> bool {
        self.lanes.iter().all(|l| l.has_ended && l.pending.is_empty()) && self.pending.is_empty()
    }

    /// Shows one pending store of somebody.
    fn show_one(&mut self, random: &mut Random, memory: &mut Memory) {
        let lane = &mut self.lanes[random.below(LANES as u64) as usize];
        let of_lane = random.below(2) == 0 && !lane.pending.is_empty();
        let from = if of_lane { &lane.pending } else { &self.pending };
        if from.is_empty() {
            return;
        }
        let p = from[random.below(from.len() as u64) as usize];
        if p.due > memory.turn {
            return;
        }
        // What was stored before to the same place comes first.
        show_at(&mut self.pending, p.at, p.bytes, memory);
        if of_lane {
            show_at(&mut lane.pending, p.at, p.bytes, memory);
        }
    }
}

pub struct Machine {
    program: Program,
    pub memory: Memory,
    pub random: Random,
    warps: Vec<Warp>,
    threads: u64,
    shared: shared::Shared,
    parameters: Vec<u64>,
    /// The number of the first block of a launch: as if those before it were others' business.
    pub first_block: u64,
    turns: u64,
    /// Some stores become visible so many turns later than others, at most, unless something asks for them.
    pub late: u64,
    /// Additions to what a block shares.
    pub told: u64,
    /// Loads of lanes, and what of these and of fences takes up something.
    pub loaded: u64,
    pub acquired: u64,
}

impl Machine {
    pub fn new(program: Program, memory: Memory, seed: u64) -> Self {
        let random = Random(seed);
        let (warps, parameters, shared) = (Vec::new(), Vec::new(), shared::Shared::default());
        let (threads, first_block, turns, late, told, loaded, acquired) = (0, 0, 0, 0, 0, 0, 0);
        Self {
            program,
            memory,
            random,
            warps,
            threads,
            shared,
            parameters,
            first_block,
            turns,
            late,
            told,
            loaded,
            acquired,
        }
    }

    /// Launches the kernel. The one before has ended.
    pub fn launch(&mut self, blocks: u64, threads: u64, parameters: &[u64]) {
        assert!(!self.runs());
        let now = self.memory.settle();
        self.parameters = parameters.to_vec();
        self.threads = threads;
        self.shared = shared::Shared::default();
        self.warps.clear();
        for block in 0..blocks {
            // Some come up late.
            let wakes = self.turns + if block > 0 { self.random.below(3) * self.random.below(3000) } else { 0 };
            for first in (0..threads).step_by(LANES) {
                let lane = |thread| Lane {
                    thread,
                    at: 0,
                    registers: (0..self.program.registers).map(|_| self.random.next()).collect(),
                    has_ended: false,
                    pending: Vec::new(),
                    view: View { seen: now, ..View::default() },
                    loaded: Vec::new(),
                };
                let lanes = (first..first + LANES as u64).map(lane).collect();
                let block = self.first_block + block;
                self.warps.push(Warp { block, lanes, pending: Vec::new(), wakes, lag: 0, lag_ends: 0 });
            }
        }
    }

    /// Whether what was launched has not ended.
    pub fn runs(&self) -> bool {
        !self.warps.iter().all(Warp::has_ended)
    }

    /// So many turns.
    pub fn run(&mut self, turns: u64) {
        for _ in 0..turns {
            self.turns += 1;
            self.memory.turn = self.turns;
            let n = self.warps.len() as u64;
            if n == 0 {
                continue;
            }
            // The first warp's turn is as likely as that of all others.
            let warp = if self.random.below(2) == 0 { 0 } else { self.random.below(n) as usize };
            if self.warps[warp].wakes <= self.turns {
                self.turn(warp);
            }
            let other = self.random.below(n) as usize;
            if self.random.below(SHOW_EVERY) == 0 {
                for of in [warp, other] {
                    self.warps[of].show_one(&mut self.random, &mut self.memory);
                }
            }
            if let Some(far) = self.memory.far.as_mut().filter(|_| self.random.below(SHOW_FAR_EVERY) == 0) {
                far.show_one(&mut self.random, self.turns);
            }
        }
    }

    /// Nobody has a turn for so long that everybody will see what is visible now.
    pub fn stand(&mut self) {
        self.turns += memory::STALE + 1;
        self.memory.turn = self.turns;
    }

    /// A turn of one lane of a warp, or of all.
    fn turn(&mut self, warp: usize) {
        let lanes = &self.warps[warp].lanes;
        let waits = |l: &Lane| self.program.instructions[l.at].what.is_sync();
        let ready: arrayvec::ArrayVec<usize, LANES> =
            (0..LANES).filter(|&i| !lanes[i].has_ended && !waits(&lanes[i])).collect();
        if ready.is_empty() {
            if lanes.iter().all(|l| l.has_ended) {
                return;
            }
            let (at, text) = (lanes[0].at, |l: &Lane| &self.program.instructions[l.at].text);
            for l in lanes {
                assert!(!l.has_ended, "lane {} has ended, others wait for it", l.thread);
                assert!(l.at == at, "one lane waits at {:?}, one at {:?}", text(l), text(&lanes[0]));
            }
            return self.together(warp, at);
        }
        let most = 1 + self.random.below(TURN);
        let all = self.random.below(2) == 0;
        let one = ready[self.random.below(ready.len() as u64) as usize];
        let w = &mut self.warps[warp];
        if w.lag_ends < self.turns {
            let lags = self.random.below(LAG_EVERY) == 0;
            w.lag = if lags { (self.random.next() | self.random.next()) as u32 } else { 0 };
            w.lag_ends = self.turns + if lags { self.random.below(LAG) } else { 0 };
        }
        let lag = w.lag;
        for lane in ready.into_iter().filter(|&i| (all || i == one) && lag >> i & 1 == 0) {
            let mut left = most;
            while left > 0 && self.step(warp, lane) {
                left -= 1;
            }
        }
    }

    /// The next instruction of a lane. `false`: it waits for others, sleeps, or has ended.
    fn step(&mut self, warp: usize, lane: usize) -> bool {
        let (block, l) = (self.warps[warp].block, &self.warps[warp].lanes[lane]);
        let instruction = &self.program.instructions[l.at];
        let (what, size) = (instruction.what, u64::from(instruction.bits / 8));
        let goes = instruction.guard.is_none_or(|(r, wanted)| (l.registers[r] & 1 == 1) == wanted);
        if what.is_sync() {
            assert!(instruction.guard.is_none(), "{}: not for all lanes", instruction.text);
            return false;
        }
        if l.has_ended {
            return false;
        }
        if !goes {
            self.warps[warp].lanes[lane].at += 1;
            return true;
        }
        if instruction.is_shared {
            return self.step_shared(warp, lane);
        }
        let v = |i: usize| self.value(l, block, &instruction.operands[i]);
        let (mut next, mut set, mut stores) = (l.at + 1, Few::new(), Few::new());
        match what {
            What::Param(_) | What::Compute(_) | What::Not | What::Reverse | What::LeadingZeros | What::Count => {
                set = self.computed(l, block, instruction);
            }
            What::Move | What::Compare(_) | What::Permute => set = self.computed(l, block, instruction),
            What::Branch(to) => next = to,
            What::Return | What::Sleep | What::Fence { .. } => {}
            What::Load(strength) => {
                let (at, targets) = (v(1), targets(&instruction.operands[0]));
                assert!(at % (size * targets.len() as u64) == 0, "{}: {at:#x} is not aligned", instruction.text);
                self.loaded += 1;
                self.acquired += u64::from(strength.acquires);
                let Some(values) = self.load(warp, lane, at, size, targets.len(), strength) else { return true };
                set = targets.into_iter().zip(values).collect();
            }
            What::FetchAdd => {
                let (at, by, target) = (v(1), v(2), targets(&instruction.operands[0])[0]);
                self.show_at(warp, lane, at, size);
                let publishes = self.warps[warp].lanes[lane].view.fenced;
                set.push((target, self.memory.read(at, size)));
                self.memory.add(at, size, by, By::Warp(warp), publishes);
            }
            What::Store { .. } | What::Release | What::Add => stores = self.stored(warp, lane, instruction),
            What::SharedAdd { .. } | What::SharedExchange { .. } => unreachable!(),
            What::Vote(_) | What::Shuffle | What::Barrier | What::BlockBarrier => unreachable!(),
        }
        self.order(warp, lane, what, &mut stores);
        self.ends(warp, lane, what, next, &set, &mut stores)
    }

    /// What a store or an addition without a result leaves pending.
    fn stored(&self, warp: usize, lane: usize, instruction: &Instruction) -> Few<Pending> {
        let (block, l) = (self.warps[warp].block, &self.warps[warp].lanes[lane]);
        let (size, operands) = (u64::from(instruction.bits / 8), &instruction.operands);
        let values: Few<u64> = match &operands[1] {
            Operand::Group(all) => all.iter().map(|&r| l.registers[r]).collect(),
            one => std::iter::once(self.value(l, block, one)).collect(),
        };
        let at = self.value(l, block, &operands[0]);
        assert!(at % (size * values.len() as u64) == 0, "{}: {at:#x} is not aligned", instruction.text);
        let adds = matches!(instruction.what, What::Add);
        let pending = |(i, v)| {
            let (at, value) = (at + i as u64 * size, mask(v, instruction.bits));
            Pending { at, bytes: size, value, adds, warp, owner: (warp, Some(lane)), more: 0, publishes: 0, due: 0 }
        };
        values.into_iter().enumerate().map(pending).collect()
    }

    /// The end of an instruction: its registers are set, its stores pending, and its lane goes to `next`. Returns as
    /// `step` does.
    fn ends(
        &mut self,
        warp: usize,
        lane: usize,
        what: What,
        next: usize,
        set: &[(usize, u64)],
        stores: &mut Few<Pending>,
    ) -> bool {
        let w = &mut self.warps[warp];
        if !stores.is_empty() && w.lanes[lane].pending.len() > HELD {
            (0..HELD).for_each(|_| w.show_one(&mut self.random, &mut self.memory));
        }
        for store in stores.iter_mut() {
            if self.late > 0 && self.random.below(LATE_EVERY) == 0 {
                store.due = self.turns + self.random.below(self.late);
            }
        }
        let l = &mut w.lanes[lane];
        set.iter().for_each(|&(r, v)| l.registers[r] = v);
        l.pending.extend(stores.drain(..));
        if matches!(what, What::Return) {
            l.has_ended = true;
            return false;
        }
        l.at = next;
        let sleeps = matches!(what, What::Sleep);
        if sleeps {
            w.wakes = self.turns + self.random.below(SLEEP);
        }
        !sleeps
    }

    /// The warps of a warp's block.
    fn of_block(&self, warp: usize) -> std::ops::Range<usize> {
        let warps = self.threads as usize / LANES;
        let first = warp / warps * warps;
        first..first + warps
    }

    /// What is pending of a lane, and of its warp and its block from before a barrier, at a place that it looks at.
    fn show_at(&mut self, warp: usize, lane: usize, at: u64, bytes: u64) {
        let first = self.of_block(warp).start;
        show_at(&mut self.warps[first].pending, at, bytes, &mut self.memory);
        let w = &mut self.warps[warp];
        show_at(&mut w.pending, at, bytes, &mut self.memory);
        show_at(&mut w.lanes[lane].pending, at, bytes, &mut self.memory);
    }

    /// One more element of a vector; all of them, once they are there.
    fn load(&mut self, warp: usize, lane: usize, at: u64, size: u64, count: usize, how: Strength) -> Option<Few<u64>> {
        self.show_at(warp, lane, at, size * count as u64);
        let block = self.of_block(warp);
        let l = &mut self.warps[warp].lanes[lane];
        l.loaded.resize(count, None);
        let missing = l.loaded.iter().filter(|e| e.is_none()).count();
        let drawn = self.random.below(missing as u64) as usize;
        let (i, _) = l.loaded.iter().enumerate().filter(|(_, e)| e.is_none()).nth(drawn).expect("one is missing");
        let at = at + i as u64 * size;
        let since = l.view.seen.max(l.view.found.get(&at).copied().unwrap_or(0));
        let must = MustSee { since, warp, block, met: l.view.met };
        let found = self.memory.load(at, size, &must, &mut self.random);
        l.view.finds(at, &found, how);
        l.loaded[i] = Some(found.value);
        if missing > 1 {
            return None;
        }
        l.loaded.drain(..).collect()
    }

    /// What a fence or release does, and what stores of a lane publish.
    fn order(&mut self, warp: usize, lane: usize, what: What, stores: &mut [Pending]) {
        let is_fence = matches!(what, What::Fence { .. });
        if is_fence || matches!(what, What::Release) {
            let w = &mut self.warps[warp];
            w.pending.drain(..).for_each(|p| p.show(&mut self.memory));
            w.lanes[lane].pending.drain(..).for_each(|p| p.show(&mut self.memory));
        }
        let (now, view) = (self.memory.now(), &mut self.warps[warp].lanes[lane].view);
        if let What::Fence { all } = what {
            self.acquired += 1;
            view.fence(all, now);
            if let (true, Some(far)) = (all, &mut self.memory.far) {
                far.fence(warp, lane);
            }
        }
        let publishes = match what {
            What::Release => now,
            What::Store { strong: true } | What::Add => view.fenced,
            _ => 0,
        };
        stores.iter_mut().for_each(|s| s.publishes = publishes);
    }

    /// What all lanes of a warp do together.
    fn together(&mut self, warp: usize, at: usize) {
        let (instruction, w) = (&self.program.instructions[at], &self.warps[warp]);
        if matches!(instruction.what, What::BlockBarrier) {
            return self.meet(warp);
        }
        let of = |i: usize| {
            let operand = &instruction.operands[i];
            let v: Vec<u64> = w.lanes.iter().map(|l| self.value(l, w.block, operand)).collect();
            v
        };
        let everybody = *of(instruction.operands.len() - 1).first().expect("a mask");
        assert!(everybody == 0xffff_ffff, "{}: not for all lanes", instruction.text);
        let results: Option<Vec<u64>> = match instruction.what {
            What::Vote(vote) => {
                let ballot = of(1).iter().enumerate().fold(0u64, |all, (i, v)| all | (v & 1) << i);
                let result = match vote {
                    Vote::Ballot => ballot,
                    Vote::Any => u64::from(ballot != 0),
                    Vote::All => u64::from(ballot == 0xffff_ffff),
                };
                Some(vec![result; LANES])
            }
            What::Shuffle => {
                let (values, from) = (of(1), of(2));
                Some(from.into_iter().map(|i| values[i as usize % LANES] & 0xffff_ffff).collect())
            }
            _ => None,
        };
        let target = match instruction.operands[0] {
            Operand::Reg(r) => Some(r),
            _ => None,
        };
        let w = &mut self.warps[warp];
        let seen = w.lanes.iter().map(|l| l.view.seen).max().unwrap_or(0);
        let shared = w.lanes.iter().map(|l| l.view.shared).max().unwrap_or(0);
        for (i, l) in w.lanes.iter_mut().enumerate() {
            match &results {
                Some(results) => l.registers[target.expect("a target")] = results[i],
                None => {
                    l.pending.iter_mut().for_each(|p| p.owner.1 = None);
                    w.pending.append(&mut l.pending);
                    (l.view.seen, l.view.shared) = (seen, shared);
                }
            }
            l.at += 1;
        }
        if let (None, Some(far)) = (&results, &mut self.memory.far) {
            far.hand_on(warp..warp + 1, warp);
        }
    }
}
