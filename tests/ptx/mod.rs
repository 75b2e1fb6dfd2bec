//! Runs a kernel in PTX on the CPU, one instruction of one lane at a time.
//!
//! Whose turn it is is drawn: lanes of a warp go apart wherever nothing keeps them together, and blocks come up when they like.
//! Stores and additions without a result become visible late and in any order, but for those to one place; a fence makes those
//! of its lane visible, and those of its warp from before a `bar.warp.sync`. Loads happen where they stand, fences of all scopes
//! are alike, and what a register holds at first is random. So a fence or barrier that is missing where something is published
//! is found; one that is missing where it is taken up is not.

pub mod program;

use program::{Operand, Program, Vote, What};

pub const LANES: usize = 32;
/// Addresses below are nobody's.
const LOWEST: u64 = 4096;
/// A lane's stores that are not visible yet, at most.
const HELD: usize = 48;
/// Instructions that a lane does in one turn, at most.
const TURN: u64 = 60;
/// A `nanosleep` is so many turns, at most.
const SLEEP: u64 = 40;
/// One turn of a warp in so many leaves some of its lanes behind, for so many turns of all at most.
const LAG_EVERY: u64 = 60;
const LAG: u64 = 4000;
/// In one turn of so many a store becomes visible that nothing has asked for.
const SHOW_EVERY: u64 = 4;

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

/// All memory, by address.
pub struct Memory(Vec<u8>);

impl Memory {
    /// Zeros, up to an address.
    pub fn new(end: u64) -> Self {
        Self(vec![0; end as usize])
    }

    fn range(&self, at: u64, bytes: u64) -> std::ops::Range<usize> {
        assert!(at >= LOWEST && at + bytes <= self.0.len() as u64, "{bytes} bytes at {at:#x} are nobody's");
        at as usize..(at + bytes) as usize
    }

    pub fn bytes(&self, at: u64, bytes: u64) -> &[u8] {
        &self.0[self.range(at, bytes)]
    }

    pub fn bytes_mut(&mut self, at: u64, bytes: u64) -> &mut [u8] {
        let range = self.range(at, bytes);
        &mut self.0[range]
    }

    /// An aligned word of at most 8 bytes.
    pub fn read(&self, at: u64, bytes: u64) -> u64 {
        assert!(at % bytes == 0, "{bytes} bytes at {at:#x}: not aligned");
        let mut word = [0; 8];
        word[..bytes as usize].copy_from_slice(self.bytes(at, bytes));
        u64::from_le_bytes(word)
    }

    pub fn write(&mut self, at: u64, bytes: u64, value: u64) {
        assert!(at % bytes == 0, "{bytes} bytes at {at:#x}: not aligned");
        self.bytes_mut(at, bytes).copy_from_slice(&value.to_le_bytes()[..bytes as usize]);
    }
}

/// What is not visible yet.
#[derive(Clone, Copy)]
struct Pending {
    at: u64,
    bytes: u64,
    value: u64,
    adds: bool,
}

impl Pending {
    fn meets(&self, at: u64, bytes: u64) -> bool {
        self.at < at + bytes && at < self.at + self.bytes
    }

    fn show(&self, memory: &mut Memory) {
        let before = if self.adds { memory.read(self.at, self.bytes) } else { 0 };
        memory.write(self.at, self.bytes, before.wrapping_add(self.value));
    }
}

/// Shows all of a list that a range meets, oldest first.
fn show_at(list: &mut Vec<Pending>, at: u64, bytes: u64, memory: &mut Memory) {
    list.retain(|p| {
        let shown = p.meets(at, bytes);
        if shown {
            p.show(memory);
        }
        !shown
    });
}

struct Lane {
    /// In its block.
    thread: u64,
    at: usize,
    registers: Vec<u64>,
    has_ended: bool,
    pending: Vec<Pending>,
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
    parameters: Vec<u64>,
    turns: u64,
}

impl Machine {
    pub fn new(program: Program, memory: Memory, seed: u64) -> Self {
        Self { program, memory, random: Random(seed), warps: Vec::new(), parameters: Vec::new(), turns: 0 }
    }

    /// Launches the kernel. The one before has ended.
    pub fn launch(&mut self, blocks: u64, threads: u64, parameters: &[u64]) {
        assert!(!self.runs());
        self.parameters = parameters.to_vec();
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
                };
                let lanes = (first..first + LANES as u64).map(lane).collect();
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
            let n = self.warps.len() as u64;
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
        }
    }

    /// A turn of one lane of a warp, or of all.
    fn turn(&mut self, warp: usize) {
        let lanes = &self.warps[warp].lanes;
        let waits = |l: &Lane| self.program.instructions[l.at].what.is_sync();
        let ready: Vec<usize> = (0..LANES).filter(|&i| !lanes[i].has_ended && !waits(&lanes[i])).collect();
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

    fn value(&self, lane: &Lane, block: u64, operand: &Operand) -> u64 {
        match operand {
            Operand::Reg(r) => lane.registers[*r],
            Operand::Value(v) => *v,
            Operand::Group(halves) => {
                assert!(halves.len() == 2);
                lane.registers[halves[0]] & 0xffff_ffff | lane.registers[halves[1]] << 32
            }
            Operand::At(r, offset) => lane.registers[*r].wrapping_add(*offset),
            Operand::Thread => lane.thread,
            Operand::Block => block,
            Operand::Timer => self.turns,
        }
    }

    /// The next instruction of a lane. `false`: it waits for others, sleeps, or has ended.
    fn step(&mut self, warp: usize, lane: usize) -> bool {
        let (block, l) = (self.warps[warp].block, &self.warps[warp].lanes[lane]);
        let instruction = &self.program.instructions[l.at];
        let (what, bits, operands) = (instruction.what, instruction.bits, &instruction.operands);
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
        let mask = |v: u64| if bits >= 64 { v } else { v & ((1 << bits) - 1) };
        let v = |i: usize| self.value(l, block, &operands[i]);
        let mut set = Vec::with_capacity(4);
        let target = |i: usize| match &operands[i] {
            Operand::Reg(r) => vec![*r],
            Operand::Group(all) => all.clone(),
            other => panic!("{other:?} is no target"),
        };
        let (mut next, mut goes_on, mut stores) = (l.at + 1, true, Vec::new());
        match what {
            What::Param(i) => set.push((target(0)[0], self.parameters[i])),
            What::Compute(f) => set.push((target(0)[0], mask(f(mask(v(1)), v(2), bits)))),
            What::Not => set.push((target(0)[0], mask(!v(1)))),
            What::Reverse => set.push((target(0)[0], mask(v(1)).reverse_bits() >> (64 - bits))),
            What::LeadingZeros => set.push((target(0)[0], u64::from(mask(v(1)).leading_zeros() + bits - 64))),
            What::Move => match &operands[0] {
                Operand::Group(halves) => {
                    set.push((halves[0], v(1) & 0xffff_ffff));
                    set.push((halves[1], v(1) >> 32));
                }
                _ => set.push((target(0)[0], mask(v(1)))),
            },
            What::Compare(f) => set.push((target(0)[0], u64::from(f(mask(v(1)), mask(v(2)))))),
            What::Branch(to) => next = to,
            What::Return => {}
            What::Fence => {}
            What::Sleep => goes_on = false,
            What::Load | What::FetchAdd => {
                let (size, targets) = (u64::from(bits / 8), target(0));
                let (at, all) = (v(1), size * targets.len() as u64);
                assert!(at % all == 0, "{}: {at:#x} is not aligned", instruction.text);
                let adds = matches!(what, What::FetchAdd).then(|| v(2));
                let w = &mut self.warps[warp];
                show_at(&mut w.pending, at, all, &mut self.memory);
                show_at(&mut w.lanes[lane].pending, at, all, &mut self.memory);
                for (i, r) in targets.into_iter().enumerate() {
                    set.push((r, self.memory.read(at + i as u64 * size, size)));
                }
                if let Some(by) = adds {
                    self.memory.write(at, size, set[0].1.wrapping_add(by));
                }
            }
            What::Store | What::Release | What::Add => {
                let (size, sources) = (u64::from(bits / 8), operands[1].clone());
                let values: Vec<u64> = match sources {
                    Operand::Group(all) => all.iter().map(|&r| l.registers[r]).collect(),
                    _ => vec![v(1)],
                };
                let at = v(0);
                assert!(at % (size * values.len() as u64) == 0, "{}: {at:#x} is not aligned", instruction.text);
                let adds = matches!(what, What::Add);
                let pending = |(i, v)| Pending { at: at + i as u64 * size, bytes: size, value: mask(v), adds };
                stores.extend(values.into_iter().enumerate().map(pending));
            }
            What::Vote(_) | What::Shuffle | What::Barrier => unreachable!(),
        }
        if matches!(what, What::Fence | What::Release) {
            self.show_all(warp, lane);
        }
        let crowded = !stores.is_empty() && self.warps[warp].lanes[lane].pending.len() > HELD;
        let w = &mut self.warps[warp];
        if crowded {
            (0..HELD).for_each(|_| w.show_one(&mut self.random, &mut self.memory));
        }
        let l = &mut w.lanes[lane];
        set.into_iter().for_each(|(r, v)| l.registers[r] = v);
        l.pending.append(&mut stores);
        if matches!(what, What::Return) {
            l.has_ended = true;
            return false;
        }
        l.at = next;
        if !goes_on {
            w.wakes = self.turns + self.random.below(SLEEP);
        }
        goes_on
    }

    /// Everything before a lane's fence.
    fn show_all(&mut self, warp: usize, lane: usize) {
        let w = &mut self.warps[warp];
        w.pending.drain(..).for_each(|p| p.show(&mut self.memory));
        w.lanes[lane].pending.drain(..).for_each(|p| p.show(&mut self.memory));
    }

    /// What all lanes of a warp do together.
    fn together(&mut self, warp: usize, at: usize) {
        let (instruction, w) = (&self.program.instructions[at], &self.warps[warp]);
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
        for (i, l) in w.lanes.iter_mut().enumerate() {
            match &results {
                Some(results) => l.registers[target.expect("a target")] = results[i],
                None => w.pending.append(&mut l.pending),
            }
            l.at += 1;
        }
    }
}
