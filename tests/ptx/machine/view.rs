//! What a lane has seen of memory.

use super::memory::{By, Found};
use super::program::Strength;
use rustc_hash::FxHashMap;

/// Times up to which a lane sees everything, or would.
#[derive(Default)]
pub struct View {
    /// What it has taken up.
    pub seen: u64,
    /// What a fence would take up, at the scope of all and at that of the GPU.
    pub of_all: u64,
    pub of_gpu: u64,
    /// Its last fence: what a store behind it publishes.
    pub fenced: u64,
    /// Stores to its block's memory that it has taken up.
    pub shared: u64,
    /// When its block last met.
    pub met: u64,
    /// The oldest values that it may find, by place.
    pub found: FxHashMap<u64, u64>,
}

impl View {
    /// A load has found something.
    pub fn finds(&mut self, at: u64, found: &Found, strength: Strength) {
        if found.since > 0 {
            self.found.insert(at, found.since);
        }
        let is_near = found.by != By::Host;
        if is_near {
            self.of_gpu = self.of_gpu.max(found.publishes);
        }
        if is_near || strength.all {
            self.of_all = self.of_all.max(found.publishes);
            self.seen = self.seen.max(if strength.acquires { found.publishes } else { 0 });
        }
    }

    /// A fence that makes all before it visible.
    pub fn fence(&mut self, all: bool, now: u64) {
        self.seen = self.seen.max(if all { self.of_all } else { self.of_gpu });
        self.fenced = now;
    }
}
