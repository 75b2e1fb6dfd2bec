//! What the warps of a block share: memory of its own, and the barrier at which they meet.

use super::pending::Pending;
use super::program::What;
use super::{Machine, LANES};
use rustc_hash::FxHashMap;

/// A word of 4 bytes that was stored.
struct SharedWord {
    value: u64,
    /// What others may find until the block has met.
    before: u64,
    /// Who stored it; nobody: the block has met since.
    by: Option<(usize, usize)>,
}

/// The memory of all blocks, by block and address.
#[derive(Default)]
pub struct Shared(FxHashMap<(u64, u64), SharedWord>);

impl Machine {
    /// What a lane finds in its block's memory.
    pub(super) fn load_shared(&mut self, warp: usize, lane: usize, at: u64, size: u64) -> u64 {
        let block = self.warps[warp].block;
        // A word of 8 bytes is found whole.
        let is_new = self.random.below(2) == 0;
        let mut word = |at| match self.shared.0.get(&(block, at)) {
            // What was never stored is anything.
            None => self.random.next() & 0xffff_ffff,
            Some(w) if is_new || w.by.is_none_or(|by| by == (warp, lane)) => w.value,
            Some(w) => w.before,
        };
        let low = word(at);
        if size == 8 {
            low | word(at + 4) << 32
        } else {
            low
        }
    }

    /// A store of a lane to its block's memory.
    pub(super) fn store_shared(&mut self, warp: usize, lane: usize, at: u64, size: u64, value: u64) {
        let block = self.warps[warp].block;
        for (at, value) in [(at, value & 0xffff_ffff), (at + 4, value >> 32)].into_iter().take(size as usize / 4) {
            let before = self.shared.0.get(&(block, at)).map_or(self.random.next() & 0xffff_ffff, |w| w.value);
            self.shared.0.insert((block, at), SharedWord { value, before, by: Some((warp, lane)) });
        }
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
        for (_, word) in self.shared.0.iter_mut().filter(|((of, _), _)| *of == block) {
            word.by = None;
        }
    }
}
