//! Stores that are not visible yet: to anybody, or to who is not on this GPU.

use super::memory::{By, Memory};
use super::Random;

/// A lane's stores wait for it alone; from before a barrier, for any lane of its warp.
pub type Owner = (usize, Option<usize>);

/// What is not visible yet.
#[derive(Clone, Copy)]
pub struct Pending {
    pub at: u64,
    pub bytes: u64,
    pub value: u64,
    pub adds: bool,
    pub warp: usize,
    /// Whose fence makes it visible.
    pub owner: Owner,
    /// Whose fence does so, too, as he has acquired what was released behind it: a bit a warp. And where in what a
    /// block shares that was ([`place`]).
    pub more: u64,
    pub publishes: u64,
    /// By itself it does not become visible before this turn.
    pub due: u64,
}

/// The bit of a place in what a block shares; bits below are of warps.
fn place(at: u64) -> u64 {
    assert!(at / 4 < 32, "no bit for place {at}");
    1 << (32 + at / 4)
}

impl Pending {
    fn is_of(&self, warp: usize, lane: usize) -> bool {
        self.owner == (warp, None) || self.owner == (warp, Some(lane)) || self.has_taker(warp)
    }

    /// Whether a warp has acquired it.
    fn has_taker(&self, warp: usize) -> bool {
        warp < 32 && self.more >> warp & 1 == 1
    }

    fn add_taker(&mut self, warp: usize) {
        assert!(warp < 32, "no bit for warp {warp}");
        self.more |= 1 << warp;
    }

    fn meets(&self, at: u64, bytes: u64) -> bool {
        self.at < at + bytes && at < self.at + self.bytes
    }

    pub fn show(&self, memory: &mut Memory) {
        let by = By::Warp(self.warp);
        match self.adds {
            true => memory.add(self.at, self.bytes, self.value, by, self.publishes),
            false => memory.store(self.at, self.bytes, self.value, by, self.publishes),
        }
        if let Some(far) = &mut memory.far {
            far.pending.push(*self);
        }
    }
}

/// Shows all of a list that a range meets, oldest first.
pub fn show_at(list: &mut Vec<Pending>, at: u64, bytes: u64, memory: &mut Memory) {
    list.retain(|p| {
        let shown = p.meets(at, bytes);
        if shown {
            p.show(memory);
        }
        !shown
    });
}

/// Memory as the host and other GPUs see it: what this GPU stores they see later than it does, and in another order,
/// but for what a fence of the system has made visible to them.
pub struct Far {
    pub bytes: Vec<u8>,
    /// What only this GPU sees, oldest first.
    pending: Vec<Pending>,
}

impl Far {
    /// Which sees all that is there.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, pending: Vec::new() }
    }

    /// What somebody else stores, who is seen at once: behind what was there.
    pub fn put(&mut self, at: u64, bytes: &[u8]) {
        self.show_all(|p| p.meets(at, bytes.len() as u64));
        self.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn show(bytes: &mut [u8], p: &Pending) {
        let there = &mut bytes[p.at as usize..(p.at + p.bytes) as usize];
        let mut word = [0; 8];
        word[..there.len()].copy_from_slice(there);
        let value = if p.adds { u64::from_le_bytes(word).wrapping_add(p.value) } else { p.value };
        there.copy_from_slice(&value.to_le_bytes()[..p.bytes as usize]);
    }

    /// Shows what is wanted, and what was stored to the same places before.
    fn show_all(&mut self, is_wanted: impl Fn(&Pending) -> bool) {
        let mut newest = rustc_hash::FxHashMap::default();
        let words = |p: &Pending| p.at & !7..p.at + p.bytes;
        for (i, p) in self.pending.iter().enumerate().filter(|(_, p)| is_wanted(p)) {
            newest.extend(words(p).step_by(8).map(|word| (word, i)));
        }
        let (mut i, bytes) = (0, &mut self.bytes);
        self.pending.retain(|p| {
            let shown = words(p).step_by(8).any(|word| newest.get(&word).is_some_and(|&last| i <= last));
            if shown {
                Self::show(bytes, p);
            }
            i += 1;
            !shown
        });
    }

    /// A fence of the system by a lane.
    pub fn fence(&mut self, warp: usize, lane: usize) {
        self.show_all(|p| p.is_of(warp, lane));
    }

    /// One of them becomes visible by itself.
    pub fn show_one(&mut self, random: &mut Random, now: u64) {
        if !self.pending.is_empty() {
            let p = self.pending[random.below(self.pending.len() as u64) as usize];
            if p.due <= now {
                self.show_all(|other| other.at == p.at && other.bytes == p.bytes);
            }
        }
    }

    /// The kernel has ended.
    pub fn settle(&mut self) {
        self.show_all(|_| true);
    }

    /// A barrier hands on what some own.
    pub fn hand_on(&mut self, from: std::ops::Range<usize>, to: usize) {
        for p in &mut self.pending {
            if from.contains(&p.owner.0) {
                p.owner = (to, None);
            } else if from.clone().any(|warp| p.has_taker(warp)) {
                p.add_taker(to);
            }
        }
    }

    /// A lane releases something in what its block shares.
    pub fn release(&mut self, warp: usize, lane: usize, at: u64) {
        self.pending.iter_mut().filter(|p| p.is_of(warp, lane)).for_each(|p| p.more |= place(at));
    }

    /// A lane acquires it, for its warp.
    pub fn acquire(&mut self, warp: usize, at: u64) {
        self.pending.iter_mut().filter(|p| p.more & place(at) != 0).for_each(|p| p.add_taker(warp));
    }
}
