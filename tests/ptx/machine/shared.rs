//! What the warps of a block share: memory of its own, and the barrier at which they meet.

use super::compute::{mask, targets};
use super::pending::Pending;
use super::program::What;
use super::{Machine, LANES};
use rustc_hash::FxHashMap;

/// What a release in the block's memory publishes: all stores up to these times, there and in all memory.
#[derive(Clone, Copy)]
struct Published {
    shared: u64,
    memory: u64,
}

impl Published {
    /// An addition or exchange publishes what was published with what was there before, too.
    fn and(self, before: Option<Self>) -> Self {
        let before = before.unwrap_or(self);
        Self { shared: self.shared.max(before.shared), memory: self.memory.max(before.memory) }
    }
}

/// A word of 4 bytes that was stored.
struct SharedWord {
    value: u64,
    /// What others may find until the block has met, or they have taken up something published later.
    before: u64,
    /// Who stored it; nobody: the block has met since.
    by: Option<(usize, usize)>,
    /// When.
    since: u64,
    published: Option<Published>,
}

/// The memory of all blocks, by block and address.
#[derive(Default)]
pub struct Shared {
    words: FxHashMap<(u64, u64), SharedWord>,
    /// The time: one more with each store.
    now: u64,
}

impl Machine {
    /// The next instruction of a lane, which is about the block's memory.
    pub(super) fn step_shared(&mut self, warp: usize, lane: usize) -> bool {
        let (block, l) = (self.warps[warp].block, &self.warps[warp].lanes[lane]);
        let instruction = &self.program.instructions[l.at];
        let (what, bits, size) = (instruction.what, instruction.bits, u64::from(instruction.bits / 8));
        let v = |i: usize| self.value(l, block, &instruction.operands[i]);
        match what {
            What::Load(strength) => {
                let (at, targets) = (v(1), targets(&instruction.operands[0]));
                assert!(at % (size * targets.len() as u64) == 0, "{}: {at:#x} is not aligned", instruction.text);
                for (i, r) in (0..).zip(targets) {
                    let value = self.load_shared(warp, lane, at + i * size, size, strength.acquires);
                    self.warps[warp].lanes[lane].registers[r] = value;
                }
            }
            What::Store { .. } | What::Release => {
                let releases = matches!(what, What::Release);
                for p in self.stored(warp, lane, instruction) {
                    self.store_shared(warp, lane, &p, releases);
                }
            }
            What::SharedAdd { .. } | What::SharedExchange { .. } if size != 4 => {
                panic!("{}: of words of 4 bytes alone", instruction.text)
            }
            What::SharedAdd { releases } => {
                let (at, value, expected, acquires) = (v(0), mask(v(1), bits), None, false);
                self.change_shared(warp, lane, &Change { at, value, expected, acquires, releases });
                self.told += 1;
            }
            What::SharedExchange { acquires } => {
                let (at, target) = (v(1), targets(&instruction.operands[0])[0]);
                let (expected, value) = (Some(mask(v(2), bits)), mask(v(3), bits));
                let change = Change { at, value, expected, acquires, releases: false };
                let there = self.change_shared(warp, lane, &change);
                self.warps[warp].lanes[lane].registers[target] = there;
            }
            _ => panic!("{} is not for a block's memory", instruction.text),
        }
        self.warps[warp].lanes[lane].at += 1;
        true
    }

    /// What a lane finds in its block's memory.
    pub(super) fn load_shared(&mut self, warp: usize, lane: usize, at: u64, size: u64, acquires: bool) -> u64 {
        let block = self.warps[warp].block;
        let sees = self.warps[warp].lanes[lane].view.shared;
        // A word of 8 bytes is found whole.
        let is_new = self.random.below(2) == 0;
        let mut found = None;
        let mut word = |at| match self.shared.words.get(&(block, at)) {
            // What was never stored is anything.
            None => self.random.next() & 0xffff_ffff,
            Some(w) if is_new || w.by.is_none_or(|by| by == (warp, lane)) || w.since <= sees => {
                found = w.published;
                w.value
            }
            Some(w) => w.before,
        };
        let low = word(at);
        let value = if size == 8 { low | word(at + 4) << 32 } else { low };
        if let Some(published) = found.filter(|_| acquires) {
            self.acquires_shared(warp, lane, at, published);
        }
        value
    }

    /// A lane has acquired what was published at a place: it sees it, and its fences are behind it.
    fn acquires_shared(&mut self, warp: usize, lane: usize, at: u64, published: Published) {
        let view = &mut self.warps[warp].lanes[lane].view;
        view.shared = view.shared.max(published.shared);
        view.seen = view.seen.max(published.memory);
        if let Some(far) = &mut self.memory.far {
            far.acquire(warp, at);
        }
    }

    /// What a lane releases at a place: its stores, and those of its warp from before a barrier, become visible to this
    /// GPU. Fences of who acquires it make them visible to others.
    fn releases_shared(&mut self, warp: usize, lane: usize, at: u64) -> Published {
        self.order(warp, lane, What::Release, &mut []);
        if let Some(far) = &mut self.memory.far {
            far.release(warp, lane, at);
        }
        Published { shared: self.shared.now, memory: self.memory.now() }
    }

    /// A store of a lane to its block's memory.
    pub(super) fn store_shared(&mut self, warp: usize, lane: usize, p: &Pending, releases: bool) {
        let published = releases.then(|| self.releases_shared(warp, lane, p.at));
        self.put_shared(warp, lane, p, published);
    }

    fn put_shared(&mut self, warp: usize, lane: usize, p: &Pending, published: Option<Published>) {
        let block = self.warps[warp].block;
        self.shared.now += 1;
        let words = [(p.at, p.value & 0xffff_ffff), (p.at + 4, p.value >> 32)];
        for (at, value) in words.into_iter().take(p.bytes as usize / 4) {
            let before = self.shared.words.get(&(block, at)).map_or(self.random.next() & 0xffff_ffff, |w| w.value);
            let since = self.shared.now;
            let word = SharedWord { value, before, by: Some((warp, lane)), since, published };
            self.shared.words.insert((block, at), word);
        }
    }

    /// An addition, or an exchange where what is there is as expected, at one moment. Returns what was there.
    pub(super) fn change_shared(&mut self, warp: usize, lane: usize, change: &Change) -> u64 {
        let Change { at, value, expected, acquires, releases } = *change;
        let block = self.warps[warp].block;
        let word = self.shared.words.get(&(block, at)).unwrap_or_else(|| panic!("nobody has stored anything at {at}"));
        let (there, before) = (word.value, word.published);
        if let Some(published) = before.filter(|_| acquires) {
            self.acquires_shared(warp, lane, at, published);
        }
        let new = match expected {
            Some(expected) if expected != there => return there,
            Some(_) => value,
            None => there.wrapping_add(value) & 0xffff_ffff,
        };
        let published = match releases {
            true => Some(self.releases_shared(warp, lane, at).and(before)),
            false => before,
        };
        let owner = (warp, Some(lane));
        let stored = Pending { at, bytes: 4, value: new, adds: false, warp, owner, more: 0, publishes: 0, due: 0 };
        self.put_shared(warp, lane, &stored, published);
        there
    }

    /// A warp waits at a barrier of its block. Once all that have not ended do, they go on: each lane sees what any of
    /// them has taken up, and what they stored and nobody sees yet is the first warp's to make visible.
    pub(super) fn meet(&mut self, warp: usize) {
        let block = self.warps[warp].block;
        let all: Vec<usize> =
            self.of_block(warp).filter(|&w| !self.warps[w].lanes.iter().all(|l| l.has_ended)).collect();
        let waits = |w: &usize| {
            let is_there = |at: usize| matches!(self.program.instructions[at].what, What::BlockBarrier);
            self.warps[*w].lanes.iter().all(|l| !l.has_ended && is_there(l.at))
        };
        if !all.iter().all(waits) {
            return;
        }
        let lanes = all.iter().flat_map(|&w| &self.warps[w].lanes);
        let seen = lanes.map(|l| l.view.seen).max().unwrap_or(0);
        let (met, mut pending) = (self.memory.now(), Vec::<Pending>::new());
        for &w in &all {
            let warp = &mut self.warps[w];
            pending.append(&mut warp.pending);
            for lane in 0..LANES {
                let l = &mut warp.lanes[lane];
                pending.append(&mut l.pending);
                (l.view.seen, l.view.met) = (seen, met);
                l.at += 1;
            }
        }
        pending.iter_mut().for_each(|p| p.owner = (all[0], None));
        self.warps[all[0]].pending = pending;
        let of_block = self.of_block(all[0]);
        if let Some(far) = &mut self.memory.far {
            far.hand_on(of_block, all[0]);
        }
        for (_, word) in self.shared.words.iter_mut().filter(|((of, _), _)| *of == block) {
            word.by = None;
        }
    }
}

/// What changes a word of 4 bytes of a block's memory at one moment.
pub struct Change {
    pub at: u64,
    /// What is added, or what is stored if what is there is as `expected`.
    pub value: u64,
    pub expected: Option<u64>,
    pub acquires: bool,
    pub releases: bool,
}
