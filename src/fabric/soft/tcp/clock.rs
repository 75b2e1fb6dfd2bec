//! When this rank tells its peers that it lives, and looks whether they do.

use super::sock;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Beats within the time that a peer may be silent.
const BEATS: u32 = 16;

/// So many more are waited for: a peer's last word may be nearly two of its beats older than the moment when it was
/// stopped, and its beats are not in step with this rank's.
const MORE: u32 = 3;

/// The shortest time between two, whatever a peer asks for.
const SHORTEST: Duration = Duration::from_millis(10);

/// A timer that runs from the first connection on. What counts is how often it has struck and not how late it is: a
/// rank that was stopped itself has heard nobody meanwhile.
pub struct Clock {
    timer: OwnedFd,
    runs: AtomicBool,
    silence: Duration,
    /// Time between two beats for one peer, ns.
    every: AtomicU64,
    /// It strikes so often in that time, each time for other peers.
    turns: AtomicU32,
    turn: AtomicU32,
}

impl Clock {
    /// For peers that may be silent for so long.
    pub fn new(silence: Duration) -> io::Result<Self> {
        let every = AtomicU64::new(pace(silence));
        let (turns, turn) = (AtomicU32::new(1), AtomicU32::new(0));
        Ok(Self { timer: sock::timer()?, runs: AtomicBool::new(false), silence, every, turns, turn })
    }

    /// Readable when it has struck.
    pub fn fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// All peers have had a beat after so many strikes.
    pub fn set_turns(&self, turns: u32) {
        self.turns.store(turns.max(1), Ordering::Relaxed);
    }

    /// Whose turn it is, counted from 0.
    pub fn turn(&self) -> u32 {
        self.turn.fetch_add(1, Ordering::Relaxed) % self.turns.load(Ordering::Relaxed)
    }

    /// Has it run.
    pub fn run(&self) {
        if !self.runs.swap(true, Ordering::AcqRel) {
            self.wind();
        }
    }

    /// A peer gives others so much time; none: as much as this rank does.
    pub fn hurry(&self, silence: Duration) {
        let every = pace(silence);
        if !silence.is_zero() && self.every.fetch_min(every, Ordering::Relaxed) > every {
            self.wind();
        }
    }

    /// Beats without a word after which a peer counts as gone.
    pub fn patience(&self) -> u32 {
        let longest = self.silence.as_nanos() as u64 / u64::from(BEATS) * u64::from(BEATS + MORE);
        u32::try_from(longest.div_ceil(self.every.load(Ordering::Relaxed))).unwrap_or(u32::MAX)
    }

    /// Whether it has struck; makes it quiet, and only one caller is told.
    pub fn has_struck(&self) -> bool {
        sock::heard(&self.timer)
    }

    /// Has it strike again.
    pub fn wind(&self) {
        let every = Duration::from_nanos(self.every.load(Ordering::Relaxed));
        sock::arm(&self.timer, every / self.turns.load(Ordering::Relaxed));
    }
}

/// Time between two beats for somebody who waits for so long, ns.
fn pace(silence: Duration) -> u64 {
    (silence / BEATS).max(SHORTEST).as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strikes(clock: &Clock) -> bool {
        let mut p = libc::pollfd { fd: clock.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, borrowed mutably.
        unsafe { libc::poll(&mut p, 1, 30_000) == 1 }
    }

    #[test]
    fn a_long_absence_is_one_beat() {
        let clock = Clock::new(BEATS * SHORTEST).unwrap();
        assert_eq!((clock.has_struck(), clock.patience()), (false, BEATS + MORE));
        clock.run();
        for _ in 0..3 {
            std::thread::sleep(5 * SHORTEST);
            assert!(strikes(&clock));
            assert_eq!([clock.has_struck(), clock.has_struck()], [true, false]);
            clock.wind();
        }
    }

    #[test]
    fn whoever_has_less_patience_sets_the_pace() {
        let hour = Duration::from_secs(3600);
        let clock = Clock::new(hour).unwrap();
        clock.set_turns(2);
        clock.run();
        for other in [Duration::ZERO, 2 * hour] {
            clock.hurry(other);
            assert_eq!(clock.patience(), BEATS + MORE);
        }
        clock.hurry(2 * BEATS * SHORTEST);
        assert!(strikes(&clock) && clock.has_struck());
        // Its own patience is as long as before.
        assert_eq!(u128::from(clock.patience()) * 2 * SHORTEST.as_nanos(), hour.as_nanos() / 16 * 19);
    }
}
