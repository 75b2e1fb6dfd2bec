//! Sockets and clocks for [`Gather`] and [`Visit`]. The calling thread does all the work; every wait has an end.

mod root;
mod visitor;

pub(super) use root::gather;
pub(super) use visitor::visit;

use super::gather::KeptConnection;
use super::visit::Broken;
use super::wire::Failure;
use crate::sys::fork::Private;
use nccl_plugin_api::NcclResult;
use nix::errno::Errno;
use nix::sys::socket::{self, MsgFlags};
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that one read takes.
const CHUNK: usize = 64 << 10;
/// Reads from one connection before the others have their turn.
const READS: usize = 16;
/// Between two looks whether the communicator has ended meanwhile.
const LOOK: Duration = Duration::from_millis(100);

/// How long a wait that begins at `now` goes on if nothing happens: until `wake` at most.
fn until(wake: Instant, now: Instant) -> Instant {
    wake.min(now + LOOK)
}

/// How a step ends whose communicator was closed, by another thread of this rank: the others see its connections go.
fn closed(step: &str) -> Failure {
    let sentence = format!("{step}: this rank closed the communicator while it waited for the others");
    Failure { code: NcclResult::INVALID_USAGE.0, sentence }
}

/// Milliseconds from now until `at`, rounded up so that a timer is due when the wait ends.
fn millis(at: Instant) -> u16 {
    let nanos = at.saturating_duration_since(Instant::now()).as_nanos();
    u16::try_from(nanos.div_ceil(1_000_000)).unwrap_or(u16::MAX)
}

/// Hands what is there, or some of much, to `sink`. Tells how the connection ended, if it did.
fn read_some(mut socket: &TcpStream, buffer: &mut [u8], mut sink: impl FnMut(&[u8])) -> Option<Broken> {
    for _ in 0..READS {
        match socket.read(buffer) {
            Ok(0) => return Some(Broken::Otherwise),
            Ok(n) => sink(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Some(how_broken(e.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw))),
        }
    }
    None // the rest at the next wait
}

fn how_broken(error: Errno) -> Broken {
    match error {
        Errno::ECONNREFUSED => Broken::Refused,
        Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::EHOSTDOWN => Broken::Unreachable,
        Errno::ETIMEDOUT => Broken::Silent,
        _ => Broken::Otherwise,
    }
}

/// Bytes on their way out.
#[derive(Default)]
struct Outgoing {
    parts: VecDeque<Arc<[u8]>>,
    at: usize,
    /// Bytes that the socket took.
    taken: usize,
}

impl Outgoing {
    fn push(&mut self, part: Arc<[u8]>) {
        if !part.is_empty() {
            self.parts.push_back(part);
        }
    }

    /// Sends what the socket takes, an answer's two parts at once: its reader wakes up once. True: everything is sent.
    fn flush(&mut self, socket: &TcpStream) -> nix::Result<bool> {
        while let Some(first) = self.parts.front() {
            let second = self.parts.get(1).map_or(&[][..], |part| part);
            let both = [IoSlice::new(&first[self.at..]), IoSlice::new(second)];
            // Not writev, which raises SIGPIPE in the host program.
            match socket::sendmsg::<()>(socket.as_raw_fd(), &both, &[], MsgFlags::MSG_NOSIGNAL, None) {
                Ok(n) => self.advance(n),
                Err(Errno::EAGAIN) => return Ok(false),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    fn advance(&mut self, sent: usize) {
        self.at += sent;
        self.taken += sent;
        while let Some(done) = self.parts.front().map(|part| part.len()).filter(|&len| self.at >= len) {
            self.parts.pop_front();
            self.at -= done;
        }
    }
}

/// A step that is run.
pub(super) struct DriveStep<'a> {
    /// What it is called.
    pub name: &'a str,
    /// Whether the communicator has ended.
    pub is_over: &'a dyn Fn() -> bool,
}

/// Connections that a call's step leaves to its next one: rank 0's, by rank, or another rank's.
#[derive(Default)]
pub(super) struct Standing {
    /// Without one where it has broken.
    root: Vec<(KeptConnection, Option<Private<TcpStream>>)>,
    visitor: Option<Private<TcpStream>>,
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.root.iter().filter_map(|(_, socket)| socket.as_ref()).for_each(|socket| drain(socket));
    }
}

/// Closing over unread bytes resets the connection and may destroy the answer on its way.
fn drain(socket: &TcpStream) {
    read_some(socket, &mut [0; 256], |_| ());
}
