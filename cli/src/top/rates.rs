//! What has changed between two looks.

use oxygin::telemetry::stats::read::{Lane, Set};
use std::collections::HashMap;

/// Which (process, communicator, set, context, peer), and whether it is the companion there.
type Key = (u32, u64, u64, u64, u64, bool);

/// Remembers the look before.
#[derive(Default)]
pub struct Rates {
    before: HashMap<Key, (u64, u64, u64)>,
}

/// A (context, peer) with what it did since the look before, a second.
#[derive(Clone, Debug)]
pub struct Moving {
    /// Its set, as a number among those of the look.
    pub set: usize,
    /// What was read.
    pub lane: Lane,
    /// Entries.
    pub entries: f64,
    /// Bytes.
    pub bytes: f64,
}

impl Moving {
    /// Entries that are a program's operations: what a companion does for counters is none.
    pub fn operations(&self) -> f64 {
        if self.lane.is_companion {
            0.0
        } else {
            self.entries
        }
    }
}

/// One look.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// The sets; their lanes are in `lanes`.
    pub sets: Vec<Set>,
    /// Those with errors first, then the oldest that stall, then by rate.
    pub lanes: Vec<Moving>,
}

impl Rates {
    /// What moved since the last call. A lane that was not there then has no rate yet.
    pub fn update(&mut self, mut sets: Vec<Set>) -> Look {
        let mut next = HashMap::new();
        let mut lanes = Vec::new();
        for (number, set) in sets.iter_mut().enumerate() {
            for lane in std::mem::take(&mut set.lanes) {
                let key = (set.pid, set.comm, set.set, lane.context, lane.peer, lane.is_companion);
                let (mut entries, mut bytes) = (0.0, 0.0);
                if let Some(&(at, had, had_bytes)) = self.before.get(&key).filter(|b| b.0 < set.at) {
                    let seconds = (set.at - at) as f64 / 1e9;
                    entries = lane.entries.saturating_sub(had) as f64 / seconds;
                    bytes = lane.bytes.saturating_sub(had_bytes) as f64 / seconds;
                }
                next.insert(key, (set.at, lane.entries, lane.bytes));
                lanes.push(Moving { set: number, lane, entries, bytes });
            }
        }
        self.before = next;
        let stalls = |m: &Moving| {
            let limit = sets.get(m.set).map_or(0, |s| s.stall);
            m.lane.oldest.filter(|age| limit > 0 && *age >= limit).unwrap_or(0)
        };
        lanes.sort_by(|a, b| {
            let rank = |m: &Moving| (m.lane.refused + m.lane.dropped, stalls(m));
            rank(b).cmp(&rank(a)).then(b.entries.total_cmp(&a.entries)).then(b.lane.entries.cmp(&a.lane.entries))
        });
        Look { sets, lanes }
    }
}
