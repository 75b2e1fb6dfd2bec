//! A window goes, from or to which peers may copy by cross-memory attach right now.

use crate::fabric::soft::status::{alive, Announced, PeerStatus, Status};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a copy of a rank that has ended may go on: the kernel ends its threads one after the other, and each only
/// when the piece is copied that it is at.
const DYING: Duration = Duration::from_millis(200);
/// How long a wait for a copy spins before it sleeps: a copy has at most `QUANTUM` bytes.
const SPIN: Duration = Duration::from_millis(1);
/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(200);

/// Takes window `id` of rank `me` back: when this returns no copy to or from it is under way or will be, but
/// those of the ranks that are returned, which live and have not ended theirs within the time.
///
/// `met` says who was met, and is asked after peers have been told that the window is gone.
pub fn withdraw<'a>(
    own: &Status,
    met: impl Iterator<Item = (u32, &'a Arc<PeerStatus>)>,
    me: u32,
    id: u32,
    within: Duration,
) -> Vec<u32> {
    own.set_window(id, false);
    // Who is met from here on finds the window gone: it asks, and is answered, after it was met.
    let copies = met.flat_map(|(rank, s)| s.announced(me, id).map(move |copy| (rank, s, copy)));
    let mut copies: Vec<(u32, &Arc<PeerStatus>, Announced)> = copies.collect();
    let start = Instant::now();
    let mut ended = None;
    while !copies.is_empty() {
        copies.retain(|(_, status, copy)| status.goes_on(copy));
        let waited = start.elapsed();
        if copies.iter().all(|(_, status, _)| status.look() != alive::Liveness::Alive) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::peer::neighbours::Neighbours;
    use crate::fabric::soft::status::tests::Life;
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
        assert!(withdraw(&s.own, s.neighbours.met(), 0, 4, LONG).is_empty(), "another window");
        assert!(withdraw(&s.own, s.neighbours.met(), 1, 5, LONG).is_empty(), "another rank's window");
        assert_eq!(withdraw(&s.own, s.neighbours.met(), 0, 5, SHORT), [1], "who does not end is named");
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let left = withdraw(&s.own, s.neighbours.met(), 0, 5, LONG);
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
        assert_eq!(withdraw(&s.own, s.neighbours.met(), 0, 5, SHORT), [1]);
        s.life.die();
        let start = Instant::now();
        assert!(withdraw(&s.own, s.neighbours.met(), 0, 5, LONG).is_empty());
        assert!(start.elapsed() < LONG);
    }
}
