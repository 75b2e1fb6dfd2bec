//! What a rank of a case has: what it shares with the others, and waits that end.

use super::control::{nap, Control, CALLS};
use super::findings::stopped;
use super::world::{Outcome, Remote};
use crate::device::Waiting;
use crate::plugin::Way;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a case knows before it makes a communicator.
pub struct CaseEnv<'a> {
    /// This rank.
    pub rank: usize,
    /// All of them.
    pub nranks: usize,
    /// Shared with the other ranks and the watchdog.
    pub control: &'a Control,
    /// The library under test.
    pub plugin: PathBuf,
    /// The table under test, and how operations go in.
    pub way: Way,
    /// The long form.
    pub full: bool,
    /// The part of a form's rounds to do, above 0 and at most 1.
    pub scale: f64,
    /// How long a wait may take.
    pub limit: Duration,
    /// How long a dead peer may stay unnoticed.
    pub death_limit: Duration,
    /// This rank's place in the control block.
    pub slot: usize,
    /// The way to ranks that other processes started; else the control block is.
    pub remote: Option<Box<Remote<'a>>>,
    /// Bytes moved so far by this rank, for the table.
    pub bytes: Cell<u64>,
}

impl CaseEnv<'_> {
    /// Notes which call the rank is in, for whoever finds it stuck there.
    pub fn enter(&self, call: &'static str) {
        let index = CALLS.iter().position(|c| *c == call).unwrap_or(0);
        self.control.rank(self.slot).call.store(index as u32, Ordering::Relaxed);
    }

    /// Shows that this rank is alive.
    pub fn beat(&self) {
        let me = self.control.rank(self.slot);
        me.call.store(0, Ordering::Relaxed);
        me.beat.fetch_add(1, Ordering::Relaxed);
    }

    /// How many rounds to do of a case with this many in the short and in the long form; never none.
    pub fn rounds(&self, quick: u64, full: u64) -> u64 {
        let whole = if self.full { full } else { quick };
        ((whole as f64 * self.scale).ceil() as u64).clamp(1, whole)
    }

    /// Shows how far this rank is.
    pub fn progress_of(&self, done: u64, total: u64) {
        let me = self.control.rank(self.slot);
        me.done.store(done, Ordering::Relaxed);
        me.total.store(total, Ordering::Relaxed);
    }

    /// Waits until all ranks are here.
    pub fn barrier(&self) -> Outcome<()> {
        self.gather(&[]).map(|_| ())
    }

    /// Waits until the ranks of `among` are here.
    pub fn barrier_among(&self, among: &[usize]) -> Outcome<()> {
        self.gather_among(among, &[]).map(|_| ())
    }

    /// How long to wait for other ranks to reach a step: longer than their own waits, so that the rank that sees
    /// what is wrong says so first.
    pub fn patience(&self) -> Duration {
        self.limit * 2
    }

    /// The messages of the ranks of `among`, in that order.
    pub fn gather_among(&self, among: &[usize], mine: &[u8]) -> Outcome<Vec<Vec<u8>>> {
        if among == [self.rank] {
            return Ok(vec![mine.to_vec()]);
        }
        let Some(remote) = &self.remote else {
            return self.control.gather(self.rank, among, mine, self.patience());
        };
        let all = remote(mine)?;
        self.beat();
        Ok(all.into_iter().enumerate().filter(|(rank, _)| among.contains(rank)).map(|(_, said)| said).collect())
    }

    /// All ranks' messages by rank.
    pub fn gather(&self, mine: &[u8]) -> Outcome<Vec<Vec<u8>>> {
        let all: Vec<usize> = (0..self.nranks).collect();
        self.gather_among(&all, mine)
    }

    /// Polls until there is a value. `what` says what for, and from whom.
    pub fn until<T>(&self, what: impl Fn() -> String, mut poll: impl FnMut() -> Outcome<Option<T>>) -> Outcome<T> {
        let start = Instant::now();
        for spin in 0_u64.. {
            if let Some(found) = poll()? {
                return Ok(found);
            }
            if spin % 64 == 63 {
                self.beat();
                let waited = start.elapsed();
                if self.control.aborted() {
                    return Err(stopped(waited, what()));
                }
                if waited > self.limit {
                    return Err(format!("waited {} s for {}", self.limit.as_secs(), what()));
                }
                match waited.as_millis() {
                    0 => std::thread::yield_now(),
                    _ => nap(waited),
                }
            }
        }
        unreachable!("the loop has no end")
    }
}

impl Waiting for CaseEnv<'_> {
    fn until(&self, what: &dyn Fn() -> String, ready: &mut dyn FnMut() -> bool) -> Result<(), String> {
        CaseEnv::until(self, what, || Ok(ready().then_some(())))
    }
}
