//! Entries that are rung for before all of them has arrived.
//!
//! Device code orders an entry before its doorbell for its own GPU alone. What it writes to host memory may become
//! visible here in another order, and the loads that read an entry may fall in between.

use super::arrival::Shown;
use std::time::{Duration, Instant};

/// How long an entry may stay away after its doorbell. It was on its way when that was rung, so microseconds; what is
/// not here after a quarter of a second never was.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long one is left alone that may be all there, and of which a word is what words are before they are written:
/// many times what the way of a store takes, which is less than 1 µs behind the store before it.
pub const UNSURE: Duration = Duration::from_micros(10);

/// The entry that is waited for, and since when.
#[derive(Debug, Default)]
pub struct WaitedFor(Option<(u64, Instant)>);

impl WaitedFor {
    /// How long entry `index` has been waited for; `None`: from now on.
    pub fn time(&mut self, index: u64, now: Instant) -> Option<Duration> {
        match self.0 {
            Some((awaited, since)) if awaited == index => Some(now.duration_since(since)),
            _ => {
                self.0 = Some((index, now));
                None
            }
        }
    }
}

/// The one at the head of a queue, if it is such a one.
#[derive(Debug, Default)]
pub struct Early {
    awaited: WaitedFor,
    /// How many there were.
    entries: u64,
}

impl Early {
    /// Entry `index` has been rung for, and its bytes, read before this, do not show all of it. Whether it is waited
    /// for no longer: they are what there is.
    #[cold]
    pub fn is_overdue(&mut self, index: u64, shown: Shown) -> bool {
        let Some(time) = self.awaited.time(index, Instant::now()) else {
            self.entries += 1;
            return false;
        };
        time >= if shown == Shown::No { PATIENCE } else { UNSURE }
    }

    /// How many entries were rung for before they showed.
    pub fn entries(&self) -> u64 {
        self.entries
    }
}
