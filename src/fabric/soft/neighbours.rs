//! The ranks of this host that have asked for this rank's inbox, or answered: what each says of itself.

use super::local::alive;
use super::local::status::{Announced, PeerStatus, Status};
use super::shared::Shared;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long the deregistration of a window waits for copies by peers that live.
pub const WITHDRAW_WITHIN: Duration = Duration::from_secs(10);
/// How long a copy of a rank that has ended may go on: the kernel ends its threads one after the other, and each only when the
/// piece is copied that it is at.
const DYING: Duration = Duration::from_millis(200);
/// How long a wait for a copy spins before it sleeps: a copy has at most `QUANTUM` bytes.
const SPIN: Duration = Duration::from_millis(1);
/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(200);

/// By rank.
pub struct Neighbours(Box<[OnceLock<Arc<PeerStatus>>]>);

impl Neighbours {
    /// None known yet of `nranks`.
    pub fn new(nranks: usize) -> Self {
        Self((0..nranks).map(|_| OnceLock::new()).collect())
    }

    /// What this rank says of itself, if it has been heard of.
    #[inline]
    pub fn get(&self, rank: u32) -> Option<&Arc<PeerStatus>> {
        self.0.get(rank as usize)?.get()
    }

    /// Takes what rank `rank` sent with its question or answer. `None`: it is not what its `token` promises.
    pub fn meet(&self, rank: u32, file: OwnedFd, token: &[u8; 16]) -> Option<&Arc<PeerStatus>> {
        let place = self.0.get(rank as usize)?;
        if place.get().is_none() {
            match PeerStatus::attach(file.as_fd(), self.0.len(), token) {
                Ok(status) => drop(place.set(Arc::new(status))),
                Err(e) => log::info!("rank {rank}: {}", e.message()),
            }
        }
        place.get()
    }

    /// Takes window `id` of rank `me` back: when this returns no copy to or from it is under way or will be, but those of the
    /// ranks that are returned, which live and have not ended theirs within the time.
    pub fn withdraw(&self, own: &Status, me: u32, id: u32, within: Duration) -> Vec<u32> {
        own.set_window(id, false);
        // Who is met from here on finds the window gone: it asks, and is answered, after it was met.
        let met = (0..).zip(&self.0).filter_map(|(rank, status)| Some((rank, status.get()?)));
        let copies = met.flat_map(|(rank, s)| s.announced(me, id).map(move |copy| (rank, s, copy)));
        let mut copies: Vec<(u32, &Arc<PeerStatus>, Announced)> = copies.collect();
        let start = Instant::now();
        let mut ended = None;
        while !copies.is_empty() {
            copies.retain(|(_, status, copy)| status.goes_on(copy));
            let waited = start.elapsed();
            if copies.iter().all(|(_, status, _)| status.look() != alive::State::Alive) {
                // All that are left are of ranks that have ended; so many need no second wait.
                if waited > *ended.get_or_insert(waited) + DYING {
                    return Vec::new();
                }
            } else {
                ended = None;
            }
            if waited > within {
                return copies.iter().map(|c| c.0).collect();
            }
            if waited < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
        Vec::new()
    }
}

impl Shared {
    /// Takes a window back from the peers that reach it by cross-memory attach.
    pub fn withdraw(&self, id: u32) {
        for rank in self.neighbours.withdraw(&self.status, self.world.rank, id, WITHDRAW_WITHIN) {
            log::warn!(
                "rank {rank} has not ended a copy to or from window {id} of rank {} {} s after its deregistration; its process \
                 may be stopped. The memory may still be read or written: do not use it again",
                self.world.rank,
                WITHDRAW_WITHIN.as_secs()
            );
        }
    }
}

/// The sentence for a peer whose process has ended.
#[cold]
pub fn dead(rank: u32) -> crate::error::Error {
    crate::error::Error::remote(format!(
        "rank {rank} is gone: its process was killed; look for its last words in its own log"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::local::status::tests::Life;
    use std::sync::atomic::{AtomicBool, Ordering};

    const TOKEN: [u8; 16] = [5; 16];
    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    /// Rank 0's view of rank 1, which lives.
    struct Scene {
        own: Status,
        neighbours: Neighbours,
        peer: Arc<Status>,
        life: Life,
    }

    fn scene() -> Scene {
        let (own, peer) = (Status::create(2, [1; 16]).unwrap(), Arc::new(Status::create(2, TOKEN).unwrap()));
        let neighbours = Neighbours::new(2);
        let file = || peer.fd().try_clone_to_owned().unwrap();
        assert!(neighbours.meet(1, file(), &[6; 16]).is_none() && neighbours.meet(2, file(), &TOKEN).is_none());
        assert!(neighbours.meet(1, file(), &TOKEN).is_some() && neighbours.get(1).is_some());
        let life = Life::of(&peer);
        Scene { own, neighbours, peer, life }
    }

    #[test]
    fn a_window_goes_when_the_last_copy_is_over() {
        let s = scene();
        s.peer.begin_copy(0, 3, 5);
        s.own.set_window(5, true);
        assert_eq!(s.neighbours.withdraw(&s.own, 0, 4, LONG), [], "another window");
        assert_eq!(s.neighbours.withdraw(&s.own, 1, 5, LONG), [], "another rank's window");
        assert_eq!(s.neighbours.withdraw(&s.own, 0, 5, SHORT), [1], "who does not end is named");
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let left = s.neighbours.withdraw(&s.own, 0, 5, LONG);
                (left, ended.load(Ordering::SeqCst))
            });
            std::thread::sleep(2 * DYING);
            ended.store(true, Ordering::SeqCst);
            s.peer.end_copy(0, 3);
            // The next one of another window does not count.
            s.peer.begin_copy(0, 3, 4);
            assert_eq!(waiting.join().unwrap(), (vec![], true));
        });
    }

    #[test]
    fn nobody_waits_for_the_dead() {
        let s = scene();
        s.peer.begin_copy(0, 0, 5);
        assert_eq!(s.neighbours.withdraw(&s.own, 0, 5, SHORT), [1]);
        s.life.die();
        let start = Instant::now();
        assert_eq!(s.neighbours.withdraw(&s.own, 0, 5, LONG), []);
        assert!(start.elapsed() < LONG);
    }
}
