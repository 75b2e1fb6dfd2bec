//! Pages of statistics whose numbers are known, for tests of whatever reads them.

use oxygin::telemetry::stats::layout::{State, Way, MAGIC};
use oxygin::telemetry::stats::{now, About, Page};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pages of this process are all on one screen: one test at a time makes them.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A set whose numbers are known: 3 of 4 entries to rank 1 complete, the fourth for ten minutes not; rank 2 failed.
pub fn page(comm: u64, way: Way) -> Page {
    let page = Page::create(&About {
        way,
        comm,
        set: 1,
        comm_id: 0xabc,
        rank: 0,
        nranks: 3,
        contexts: 2,
        stride: 1,
        companions: true,
        threads: 1,
        fabric: "soft",
        stall: Duration::from_secs(10),
    });
    let page = page.expect("shared memory");
    let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
    let record = page.record(page.index(1, 1));
    set(&record.entries, 12_345_678);
    set(&record.bytes, 5_000_000_000);
    set(&record.batches, 700_000);
    set(&record.completed, 12_345_677);
    set(&record.under_way, 1);
    set(&record.oldest, now().saturating_sub(600_000_000_000));
    set(&record.posted[8], 64);
    set(&record.complete[12], 12_000_000);
    set(&record.complete[16], 345_677);
    set(&record.complete_ns, 1_500_000_000);
    let record = page.record(page.index(0, 2));
    set(&record.entries, 50);
    set(&record.completed, 50);
    set(&record.dropped, 7);
    set(&record.state, State::Failed as u64);
    // Of the queue pair to rank 1 in context 1.
    let record = page.record(page.companion_index(1, 1));
    set(&record.entries, 606);
    set(&record.completed, 604);
    set(&record.under_way, 2);
    page
}

/// A process with a page of another version of the layout, as its standard input.
pub struct Stranger(Child);

impl Stranger {
    pub fn new(version: u64) -> Self {
        let page = File::from(oxygin::sys::memfd::create_named(c"oxygin-stats", 4096).expect("shared memory"));
        page.write_all_at(&[MAGIC.to_ne_bytes(), version.to_ne_bytes()].concat(), 0).expect("a header");
        Self(Command::new("sleep").arg("600").stdin(page).spawn().expect("sleep runs"))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}
