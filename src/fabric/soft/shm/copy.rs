//! One copy by the kernel between this process and the peer's: announced, so that the peer's deregistration waits for
//! it, and looked at from both sides of the peer's life, because a process number may belong to another process by
//! now.

use crate::error::{Error, Kind, Result};
use crate::fabric::soft::sentences::{dead, gone};
use crate::fabric::soft::status::{alive, PeerStatus, Status};
use std::io;

/// What is copied.
pub struct Piece {
    /// "read" or "write".
    pub what: &'static str,
    /// The peer's window.
    pub window: u32,
    /// Where in the peer's address space.
    pub remote: u64,
    /// Bytes.
    pub len: usize,
}

/// Has the kernel copy to or from a window of `peer`, which says `its` status of itself; `place`, below
/// [`COPIES`](crate::fabric::soft::status::COPIES), is the caller's meanwhile. Returns the bytes; `None`: the peer has
/// closed its communicator, and what it sent last is to be read first.
///
/// The kernel marks a rank's life as ended before it gives the process number to anybody else. So a peer that lived
/// before the copy was not another process then, and one that still lives behind it was none all the time: what came
/// in between is told as a failure.
pub fn run(
    own: &Status,
    its: &PeerStatus,
    (peer, place): (u32, usize),
    piece: &Piece,
    copy: impl FnOnce() -> io::Result<usize>,
) -> Result<Option<u64>> {
    own.begin_copy(peer, place, piece.window);
    let life = its.look();
    if life != alive::Liveness::Alive || !its.has_window(piece.window) {
        own.end_copy(peer, place);
        return match life {
            alive::Liveness::Alive => Err(Error::remote_access(gone(peer))),
            alive::Liveness::Dead => Err(dead(peer)),
            alive::Liveness::Closed => Ok(None),
        };
    }
    let result = copy();
    own.end_copy(peer, place);
    match result {
        _ if its.look() == alive::Liveness::Dead => Err(dead(peer)),
        Ok(n) => Ok(Some(n as u64)),
        Err(e) => Err(failed(peer, piece, &e)),
    }
}

#[cold]
fn failed(peer: u32, piece: &Piece, error: &io::Error) -> Error {
    let &Piece { what, remote, len, .. } = piece;
    match error.raw_os_error() {
        Some(libc::ESRCH) => Error::remote(format!("rank {peer} is gone: its process ended")),
        Some(libc::EFAULT) => Error::remote_access(format!(
            "rank {peer} has no memory at {remote:#x}+{len} for a {what}; its window was freed before it was \
             deregistered"
        )),
        _ => Error::remote(format!("cross-memory {what} of {len} bytes at {remote:#x} of rank {peer} failed: {error}"))
            .of_kind(Kind::System),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::status::tests::Life;
    use std::sync::Arc;

    #[test]
    fn who_dies_before_or_during_a_copy_has_not_got_it() {
        let (own, peer) = (Status::create(2, [1; 16]).unwrap(), Arc::new(Status::create(2, [5; 16]).unwrap()));
        let (its, life) = (PeerStatus::attach(peer.fd(), 2, &[5; 16]).unwrap(), Life::of(&peer));
        let text = |result: Result<Option<u64>>| result.err().map_or("copied".into(), |e| e.message().to_string());
        let piece = Piece { what: "write", window: 3, remote: 0, len: 8 };
        let missing = text(run(&own, &its, (1, 0), &piece, || unreachable!("there is no such window")));
        assert!(missing.contains("has deregistered the window"), "{missing}");
        peer.set_window(3, true);
        let mut copies = 0;
        let first = run(&own, &its, (1, 0), &piece, || {
            copies += 1;
            Ok(8)
        });
        assert!(matches!(first, Ok(Some(8))) && copies == 1);
        // The kernel says that all bytes were copied, to whomever.
        let lost = text(run(&own, &its, (1, 0), &piece, || {
            life.die();
            Ok(8)
        }));
        assert!(lost.contains("its process has ended"), "{lost}");
        let lost = text(run(&own, &its, (1, 0), &piece, || unreachable!("it is dead")));
        assert!(lost.contains("its process has ended"), "{lost}");
    }
}
