//! Who may store into a rank's GPU without asking its engine: kernels of peers that carry out device code's entries by
//! themselves ([`lane_kernel`](super::gpu::lane_kernel)).
//!
//! Such a kernel adds to this rank's signals. The rank's own engine may add to them at the same time by its copy
//! kernel, but not by its stream, which can only store sums: an addition in between would be lost. Nor may a window go
//! while such a kernel knows of it. So each rank has a *gate*: whoever is about to let its kernel at this rank's GPU
//! enters first, and leaves once that kernel has ended; whoever needs the GPU for the engine alone closes the gate and
//! waits until nobody is inside. Entering is told before the gate is looked at, and closing before the entries are
//! looked at, with a full fence in between on both sides: one of the two sees the other.
//!
//! Nobody is inside for long: a kernel that serves lanes ends by itself after [`LIFE`](super::gpu::lane_kernel::LIFE),
//! and its host has to enter again before the next one. So one whose process stands counts as gone after
//! `GONE_AFTER`, and for good: until it leaves, nobody waits for it again. Should its process go on before that, its
//! kernel has ended long since, as that one was up before the gate was entered.

use super::peer::neighbours::Neighbours;
use super::status::alive::Liveness;
use super::status::{PeerStatus, Status};
use crate::sys::sync::Mutex;
use crate::sys::wait::until;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long after it was seen inside a closed gate a visitor counts as gone: a hundred lives of a kernel. Its host must
/// stand, or it would have left.
const GONE_AFTER: Duration = Duration::from_millis(200);

/// One visit: who is let in has it until it leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Visit {
    /// Of a rank of this process, by number.
    Here(u64),
    /// Of this rank of another process, by what [`PeerStatus::entries`] says meanwhile.
    There(u32, u64),
}

/// What a rank of this process leaves a [`Gate`] with.
#[must_use = "whoever does not leave is waited for"]
#[derive(Debug)]
pub struct Entered(u64);

/// What other processes are told, and what they tell.
struct Others {
    status: Arc<Status>,
    neighbours: Arc<Neighbours>,
    /// By rank, the visit that counts as gone, as [`PeerStatus::entries`] says it; 0, which is no visit: none does.
    gone: Box<[AtomicU64]>,
}

impl Others {
    /// Which visits their ranks make at the gate of `rank`.
    fn visits(&self, rank: u32) -> impl Iterator<Item = (u32, u64)> + '_ {
        let inside = move |(peer, its): (u32, &Arc<PeerStatus>)| {
            let entries = its.entries(rank);
            let is_gone = || self.gone[peer as usize].load(Ordering::Relaxed) == entries;
            // The kernels of a process that has died are gone, too.
            (entries % 2 != 0 && !is_gone() && its.look() == Liveness::Alive).then_some((peer, entries))
        };
        self.neighbours.met().filter_map(inside)
    }
}

/// Who keeps a gate closed.
#[derive(Default)]
struct Closed {
    /// So many have closed it.
    by: u32,
    /// Visits during which it was closed, and since when they are known to have been asked to end.
    asked: Vec<(Visit, Instant)>,
}

/// A rank's gate.
pub struct Gate {
    rank: u32,
    /// Visits of ranks of this process, but those that count as gone, and how many these are.
    here: Mutex<Vec<u64>>,
    inside: AtomicU32,
    entries: AtomicU64,
    closed: Mutex<Closed>,
    is_closed: AtomicU32,
    /// `None`: there are no other processes.
    others: Option<Others>,
}

impl Gate {
    /// The gate of `rank`, which is open.
    pub fn new(rank: u32, others: Option<(Arc<Status>, Arc<Neighbours>)>) -> Self {
        let others = others.map(|(status, neighbours)| {
            let gone = (0..neighbours.ranks()).map(|_| AtomicU64::new(0)).collect();
            Others { status, neighbours, gone }
        });
        Self {
            rank,
            here: Mutex::default(),
            inside: AtomicU32::new(0),
            entries: AtomicU64::new(0),
            closed: Mutex::default(),
            is_closed: AtomicU32::new(0),
            others,
        }
    }

    /// Enters, for a rank of this process. `None`: it is closed.
    pub fn enter(&self) -> Option<Entered> {
        let entered = Entered(self.entries.fetch_add(1, Ordering::SeqCst));
        self.with_here(|here| here.push(entered.0));
        fence(Ordering::SeqCst);
        if self.is_closed() {
            self.leave(entered);
            return None;
        }
        Some(entered)
    }

    /// Leaves.
    pub fn leave(&self, entered: Entered) {
        self.with_here(|here| here.retain(|&visit| visit != entered.0));
    }

    /// Changes which ranks of this process are inside.
    fn with_here(&self, change: impl FnOnce(&mut Vec<u64>)) {
        let mut here = self.here.lock();
        change(&mut here);
        self.inside.store(here.len() as u32, Ordering::SeqCst);
    }

    /// Whether somebody wants to be alone: whoever is inside leaves soon.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst) != 0
    }

    /// Closes it, once more where it is.
    pub fn close(&self) {
        let mut closed = self.closed.lock();
        closed.by += 1;
        if closed.by == 1 {
            self.is_closed.store(1, Ordering::SeqCst);
            if let Some(others) = &self.others {
                others.status.set_closed(true);
            }
            fence(Ordering::SeqCst);
        }
    }

    /// Opens it, unless another one has closed it as well.
    pub fn open(&self) {
        let mut closed = self.closed.lock();
        closed.by -= 1;
        if closed.by == 0 {
            // Nobody is asked to leave any more.
            closed.asked.clear();
            self.is_closed.store(0, Ordering::SeqCst);
            if let Some(others) = &self.others {
                others.status.set_closed(false);
            }
        }
    }

    /// Whether somebody is inside who does not count as gone.
    pub fn has_visitors(&self) -> bool {
        let of = |others: &Others| others.visits(self.rank).next().is_some();
        self.inside.load(Ordering::Acquire) != 0 || self.others.as_ref().is_some_and(of)
    }

    /// Whether nobody is inside, or nobody who is not gone. It is closed.
    pub fn is_empty(&self) -> bool {
        !self.has_visitors() || self.have_all_gone()
    }

    /// Counts visitors as gone that were asked long ago to leave. Whether all are.
    fn have_all_gone(&self) -> bool {
        let (mut closed, now) = (self.closed.lock(), Instant::now());
        let mut visits: Vec<_> = self.here.lock().iter().map(|&number| Visit::Here(number)).collect();
        let there = self.others.iter().flat_map(|others| others.visits(self.rank));
        visits.extend(there.map(|(peer, entries)| Visit::There(peer, entries)));
        closed.asked.retain(|(visit, _)| visits.contains(visit));
        for visit in visits {
            match closed.asked.iter().find(|(asked, _)| *asked == visit) {
                None => closed.asked.push((visit, now)),
                Some((_, since)) if now.saturating_duration_since(*since) > GONE_AFTER => self.count_as_gone(visit),
                Some(_) => {}
            }
        }
        !self.has_visitors()
    }

    /// Nobody waits for the end of this visit any more.
    fn count_as_gone(&self, visit: Visit) {
        match (visit, &self.others) {
            (Visit::Here(number), _) => self.with_here(|here| here.retain(|&visit| visit != number)),
            (Visit::There(peer, entries), Some(others)) => {
                log::info!("rank {}: rank {peer} stands, its kernel on this GPU counts as ended", self.rank);
                others.gone[peer as usize].store(entries, Ordering::Relaxed);
            }
            (Visit::There(..), None) => {}
        }
    }

    /// Closes it for good, or until it is opened, and waits until nobody is inside, at most `within`. `false`: somebody
    /// still is.
    pub fn close_and_wait(&self, within: Duration) -> bool {
        self.close();
        until(Instant::now() + within, || self.is_empty())
    }

    /// A number that differs from an earlier one if somebody has entered since.
    pub fn entries(&self) -> u64 {
        let met =
            |others: &Others| others.neighbours.met().map(|(_, its)| its.entries(self.rank)).fold(0, u64::wrapping_add);
        self.entries.load(Ordering::Acquire).wrapping_add(self.others.as_ref().map_or(0, met))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    #[test]
    fn a_closed_gate_lets_nobody_in_and_waits_for_who_is_inside() {
        let gate = Gate::new(0, None);
        let entered = gate.enter().unwrap();
        assert!(!gate.is_closed());
        let before = gate.entries();
        gate.close();
        assert!(gate.is_closed() && !gate.is_empty() && gate.enter().is_none());
        assert_ne!(gate.entries(), before, "one that was turned away counts, too: it may have been seen inside");
        gate.leave(entered);
        assert!(gate.is_empty());
        gate.close();
        gate.open();
        assert!(gate.is_closed(), "two have closed it");
        gate.open();
        assert!(!gate.is_closed() && gate.enter().is_some());
    }

    /// How long a closing lasts.
    fn closing(gate: &Gate) -> Duration {
        let began = Instant::now();
        assert!(gate.close_and_wait(LONG));
        gate.open();
        began.elapsed()
    }

    #[test]
    fn who_stands_inside_is_waited_for_once() {
        let gate = Gate::new(0, None);
        let stands = gate.enter().unwrap();
        assert!(closing(&gate) >= GONE_AFTER);
        assert!(closing(&gate) < GONE_AFTER / 2 && !gate.has_visitors());
        // Others are waited for as before, and the one that stood may still leave.
        let other = gate.enter().unwrap();
        gate.leave(stands);
        assert!(gate.has_visitors());
        gate.close();
        assert!(!gate.is_empty());
        gate.leave(other);
        assert!(gate.is_empty());
    }

    #[test]
    fn a_process_that_stands_inside_is_waited_for_once() {
        let token = [7; 16];
        let [mine, its] = [(); 2].map(|()| Arc::new(Status::create(2, token).unwrap()));
        let neighbours = Arc::new(Neighbours::new(2));
        assert!(its.hold_life());
        assert!(neighbours.meet(1, its.fd().try_clone_to_owned().unwrap(), &token).is_some());
        let gate = Gate::new(0, Some((mine, neighbours)));
        its.enter(0);
        assert!(gate.has_visitors());
        assert!(closing(&gate) >= GONE_AFTER);
        assert!(closing(&gate) < GONE_AFTER / 2 && !gate.has_visitors());
        // It goes on, and its next visit counts.
        its.leave(0);
        assert!(!gate.has_visitors());
        its.enter(0);
        gate.close();
        assert!(gate.has_visitors() && !gate.is_empty());
        its.leave(0);
        assert!(gate.is_empty());
        its.release_life();
    }

    /// Two threads, one that enters and leaves, one that closes and opens: never is one inside while the other is
    /// alone.
    #[test]
    fn nobody_is_inside_while_it_is_closed_and_empty() {
        let (gate, shared) = (Arc::new(Gate::new(0, None)), Arc::new(AtomicU64::new(0)));
        let (other, its) = (gate.clone(), shared.clone());
        let visitor = std::thread::spawn(move || {
            for _ in 0..20_000 {
                if let Some(entered) = other.enter() {
                    its.store(its.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    other.leave(entered);
                }
            }
        });
        let mut alone = 0;
        while !visitor.is_finished() || alone == 0 {
            gate.close();
            if gate.is_empty() {
                let before = shared.load(Ordering::Relaxed);
                std::thread::yield_now();
                assert_eq!(shared.load(Ordering::Relaxed), before);
                alone += 1;
            }
            gate.open();
        }
        visitor.join().unwrap();
    }
}
