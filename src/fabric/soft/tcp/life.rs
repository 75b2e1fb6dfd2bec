//! Signs of life between two ranks, on connections that carry nothing else.
//!
//! A process that is gone leaves its connections to whoever has a copy of them, a child that it forked for one, and
//! its host goes on to acknowledge what comes: only its own word shows that it lives. It goes beside the data, not
//! among it. A data connection may be full, or wait for a GPU that stands; and bytes that come after one's end
//! destroy, on their way, what was promised before it. The end of a life line says nothing: the data connections tell
//! that better.

use super::dial::ATTEMPT;
use super::sock::{self, Moved};
use super::wire::HELLO;
use crate::sys::fork::Private;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Receives from one line at a beat: nobody honest has sent so much.
const RECEIVES: usize = 4;

/// The line that this rank opens.
#[derive(Default)]
enum Line {
    #[default]
    Closed,
    /// Since then.
    Connecting(Private<OwnedFd>, Instant),
    Open(Private<OwnedFd>),
}

/// The lines between this rank and a peer.
#[derive(Default)]
pub struct Lines {
    /// There are data connections between the two, and this rank opens a line beside them. Either does: the other one
    /// may be stopped before it has.
    pub wanted: bool,
    own: Line,
    /// The line that the peer opened.
    theirs: Option<Private<OwnedFd>>,
    attempts: u32,
    silent: u32,
}

impl Lines {
    /// The peer has opened a line, and listens from that on: it hears at once.
    pub fn admit(&mut self, fd: Private<OwnedFd>) {
        let _ = sock::send_some(&fd, b".");
        self.theirs = Some(fd);
    }

    /// Ends both.
    pub fn end(&mut self) {
        *self = Self::default();
    }

    /// Says a word and hears what was said. Returns the beats in a row without an answer. `connect` makes a
    /// connection; it is told how many have failed so far. `hello` opens it. `heard`: the peer has said something on a
    /// data connection since the beat before.
    pub fn beat(
        &mut self,
        connect: impl FnOnce(u32) -> io::Result<Private<OwnedFd>>,
        hello: &[u8; HELLO],
        mut heard: bool,
    ) -> u32 {
        self.own = match std::mem::take(&mut self.own) {
            _ if !self.wanted => Line::Closed,
            Line::Closed => match connect(self.attempts) {
                Ok(fd) => Line::Connecting(fd, Instant::now()),
                Err(_) => self.failed(),
            },
            Line::Connecting(fd, since) => match sock::is_connected(&fd) {
                // An address that answers nothing keeps the others from being tried no longer than for a data
                // connection.
                Ok(false) if since.elapsed() <= ATTEMPT => Line::Connecting(fd, since),
                Ok(true) if sock::send_whole(&fd, hello).is_ok() => Line::Open(fd),
                _ => self.failed(),
            },
            open => open,
        };
        let mut listens = false;
        if let Line::Open(fd) = &self.own {
            match exchange(fd) {
                Ok(word) => (heard, listens) = (heard | word, true),
                Err(_) => self.own = self.failed(),
            }
        }
        if let Some(fd) = &self.theirs {
            match exchange(fd) {
                Ok(word) => (heard, listens) = (heard | word, true),
                Err(_) => self.theirs = None,
            }
        }
        self.silent = if heard || !listens { 0 } else { self.silent + 1 };
        self.silent
    }

    /// Another attempt comes with the next beat, at the peer's next address.
    fn failed(&mut self) -> Line {
        self.attempts = self.attempts.wrapping_add(1);
        Line::Closed
    }
}

/// A word out, if there is room, and any in. An error: the line is over.
fn exchange(fd: &OwnedFd) -> io::Result<bool> {
    sock::send_some(fd, b".")?;
    let mut heard = false;
    let mut words = [0; 64];
    for _ in 0..RECEIVES {
        match sock::receive_into(fd, &mut words)? {
            Moved::Bytes(_) => heard = true,
            Moved::Blocked => break,
            Moved::Ended => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    Ok(heard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::SocketAddr;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    fn pair() -> (Private<OwnedFd>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Private::new(ours.into()), theirs)
    }

    fn none(_: u32) -> io::Result<Private<OwnedFd>> {
        Err(io::ErrorKind::ConnectionRefused.into())
    }

    #[test]
    fn only_silence_on_an_open_line_counts() {
        let hello = &[7; HELLO];
        let mut life = Lines::default();
        assert_eq!(life.beat(none, hello, false), 0, "nobody is there to say anything");
        let (ours, mut peer) = pair();
        life.admit(ours);
        assert_eq!([life.beat(none, hello, false), life.beat(none, hello, false)], [1, 2]);
        peer.write_all(b"..").unwrap();
        assert_eq!([life.beat(none, hello, false), life.beat(none, hello, false)], [0, 1]);
        let mut said = [0; 5];
        peer.read_exact(&mut said).unwrap();
        assert_eq!(&said, b".....");
        assert_eq!(
            [life.beat(none, hello, true), life.beat(none, hello, false)],
            [0, 1],
            "something on a data connection"
        );
        drop(peer);
        assert_eq!(life.beat(none, hello, false), 0, "its end says nothing");
    }

    #[test]
    fn a_line_is_opened_where_it_is_wanted_and_again_where_that_fails() {
        let hello = &[7; HELLO];
        let mut life = Lines { wanted: true, ..Lines::default() };
        for attempt in 0..3 {
            let mut asked = None;
            life.beat(|n| none(*asked.insert(n)), hello, false);
            assert_eq!((asked, life.attempts), (Some(attempt), attempt + 1));
        }
        let (ours, mut peer) = pair();
        let mut ours = Some(ours);
        assert_eq!(life.beat(|_| Ok(ours.take().unwrap()), hello, false), 0);
        assert_eq!([life.beat(none, hello, false), life.beat(none, hello, false)], [1, 2]);
        let mut said = [0; HELLO + 2];
        peer.read_exact(&mut said).unwrap();
        assert_eq!((&said[..HELLO], &said[HELLO..]), (&hello[..], &b".."[..]));
        // A word on the other line is as good.
        let (theirs, mut other) = pair();
        life.admit(theirs);
        other.write_all(b".").unwrap();
        assert_eq!(life.beat(none, hello, false), 0);
        life.wanted = false;
        life.beat(none, hello, false);
        peer.read_to_end(&mut Vec::new()).expect("the end of the line");
    }

    #[test]
    fn an_address_that_answers_nothing_gives_way_to_the_next() {
        use nix::sys::socket::SockaddrIn;
        use nix::sys::socket::{bind, getsockname, listen, socket, AddressFamily, Backlog, SockFlag, SockType};
        // Its queue holds one connection, and what comes after that is dropped.
        let listener = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
        bind(listener.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let at: SockaddrIn = getsockname(listener.as_raw_fd()).unwrap();
        let at = SocketAddr::new(at.ip().into(), at.port());
        let connect = |_| sock::connect(at, None, &sock::Timing::default());
        let _first = std::net::TcpStream::connect(at).unwrap();
        let hello = &[7; HELLO];
        let mut life = Lines { wanted: true, ..Lines::default() };
        for _ in 0..3 {
            life.beat(connect, hello, false);
        }
        assert!(matches!(life.own, Line::Connecting(..)) && life.attempts == 0);
        let Line::Connecting(_, since) = &mut life.own else { unreachable!() };
        *since = since.checked_sub(2 * ATTEMPT).unwrap();
        life.beat(connect, hello, false);
        assert!(matches!(life.own, Line::Closed) && life.attempts == 1);
    }
}
