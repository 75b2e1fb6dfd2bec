//! One copy by the kernel between this process and the peer's: announced, so that the peer's deregistration waits for it, and
//! looked at from both sides of the peer's life, because a process number may belong to another process by now.

use super::push::Outcome;
use super::{gone, Link, State};
use crate::error::{Error, Result};
use crate::fabric::soft::local::alive;
use crate::fabric::soft::local::status::COPIES;
use crate::fabric::soft::neighbours::dead;
use crate::fabric::soft::shared::Shared;
use std::io;
use std::sync::MutexGuard;

/// What is copied.
pub(super) struct Piece {
    /// "read" or "write".
    pub what: &'static str,
    /// The peer's window.
    pub window: u32,
    /// Where in the peer's address space.
    pub remote: u64,
    /// Bytes.
    pub len: usize,
}

impl Link {
    /// Has the kernel copy for the head of a lane. Others may post and move meanwhile; the lane is engaged, so its head stays.
    ///
    /// The kernel marks a rank's life as ended before it gives the process number to anybody else. So a peer that lived
    /// before the copy was not another process then, and one that still lives behind it was none all the time: what came in
    /// between is told as a failure.
    pub(super) fn copy<'a>(
        &'a self,
        shared: &Shared,
        mut state: MutexGuard<'a, State>,
        slot: u32,
        piece: &Piece,
        copy: impl FnOnce() -> io::Result<usize>,
    ) -> (MutexGuard<'a, State>, Result<Outcome>) {
        let Some(status) = shared.neighbours.get(self.peer) else {
            return (state, Err(Error::internal(format!("rank {} is reached, but was never met", self.peer))));
        };
        // A bit a place; with more threads than places some wait.
        let place = state.copies.trailing_ones() as usize;
        if place >= COPIES {
            return (state, Ok(Outcome::Full));
        }
        shared.status.begin_copy(self.peer, place, piece.window);
        let life = status.look();
        if life != alive::State::Alive || !status.has_window(piece.window) {
            shared.status.end_copy(self.peer, place);
            let outcome = match life {
                alive::State::Alive => Err(Error::remote(gone(self.peer))),
                alive::State::Dead => Err(dead(self.peer)),
                // What it sent last is read first (`look`).
                alive::State::Closed => Ok(Outcome::Full),
            };
            return (state, outcome);
        }
        state.copies |= 1 << place;
        state.queues[slot as usize].copying = true;
        drop(state);
        let result = copy();
        shared.status.end_copy(self.peer, place);
        let died = status.look() == alive::State::Dead;
        let mut state = self.state.lock();
        state.copies &= !(1 << place);
        state.queues[slot as usize].copying = false;
        let result = match result {
            _ if died => Err(dead(self.peer)),
            Ok(n) => Ok(Outcome::Moved(n as u64)),
            Err(e) => Err(self.copy_failed(piece, &e)),
        };
        (state, result)
    }

    #[cold]
    fn copy_failed(&self, piece: &Piece, error: &io::Error) -> Error {
        let (peer, &Piece { what, remote, len, .. }) = (self.peer, piece);
        Error::remote(match error.raw_os_error() {
            Some(libc::ESRCH) => format!("rank {peer} is gone: its process ended"),
            Some(libc::EFAULT) => format!(
                "rank {peer} has no memory at {remote:#x}+{len} for a {what}; its window was freed before it was deregistered"
            ),
            _ => format!("cross-memory {what} of {len} bytes at {remote:#x} of rank {peer} failed: {error}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SoftTransport;
    use crate::fabric::soft::lane::Lane;
    use crate::fabric::soft::local::status::tests::Life;
    use crate::fabric::soft::local::status::Status;
    use crate::fabric::soft::near_tests::{join, ABSENT};
    use crate::fabric::soft::shared::Shared;
    use std::sync::Arc;

    fn copy(shared: &Shared, slot: u32, copy: impl FnOnce() -> io::Result<usize>) -> Result<Outcome> {
        let link = shared.link(1);
        let piece = Piece { what: "write", window: 3, remote: 0, len: 8 };
        link.copy(shared, link.state.lock(), slot, &piece, copy).1
    }

    fn text(result: Result<Outcome>) -> String {
        result.err().map_or("copied".into(), |e| e.message().to_string())
    }

    #[test]
    fn who_dies_before_or_during_a_copy_has_not_got_it() {
        let ranks = join(2, 1, SoftTransport::Auto);
        let shared = ranks[0].fabric.shared().unwrap();
        // Rank 1 as the test plays it.
        let peer = Arc::new(Status::create(2, ABSENT).unwrap());
        let life = Life::of(&peer);
        assert!(shared.neighbours.meet(1, peer.fd().try_clone_to_owned().unwrap(), &ABSENT).is_some());
        let slot = shared.link(1).add_lane(Arc::new(Lane::new(0, 1, Arc::default())));
        let mut copies = 0;
        let missing = text(copy(shared, slot, || unreachable!("there is no such window")));
        assert!(missing.contains("has deregistered the window"), "{missing}");
        peer.set_window(3, true);
        let first = copy(shared, slot, || {
            copies += 1;
            Ok(8)
        });
        assert!(matches!(first, Ok(Outcome::Moved(8))) && copies == 1);
        // The kernel says that all bytes were copied, to whomever.
        let lost = text(copy(shared, slot, || {
            life.die();
            Ok(8)
        }));
        assert!(lost.contains("its process was killed"), "{lost}");
        let lost = text(copy(shared, slot, || unreachable!("it is dead")));
        assert!(lost.contains("its process was killed"), "{lost}");
    }
}
