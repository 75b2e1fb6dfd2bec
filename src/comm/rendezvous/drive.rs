//! Sockets and clocks for [`Gather`] and [`Visit`]. The calling thread does all the work; every wait has an end.

use super::gather::{self, Conn, Gather};
use super::listener::Listener;
use super::visit::{self, Visit};
use crate::error::{Error, Result};
use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that one read takes.
const CHUNK: usize = 64 << 10;
/// Reads from one connection before the others have their turn.
const READS: usize = 16;
/// Pause after the process ran out of descriptors and no stranger was there to drop.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(10);

/// Milliseconds from now until `at`, rounded up so that a timer is due when the wait ends.
fn millis(at: Instant) -> u16 {
    let nanos = at.saturating_duration_since(Instant::now()).as_nanos();
    u16::try_from(nanos.div_ceil(1_000_000)).unwrap_or(u16::MAX)
}

/// Hands what is there, or some of much, to `sink`. True: the peer closed or the connection broke.
fn read_some(mut socket: &TcpStream, buffer: &mut [u8], mut sink: impl FnMut(&[u8])) -> bool {
    for _ in 0..READS {
        match socket.read(buffer) {
            Ok(0) => return true,
            Ok(n) => sink(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return false,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return true,
        }
    }
    false // the rest at the next wait
}

/// Bytes on their way out.
#[derive(Default)]
struct Outgoing {
    parts: VecDeque<Arc<[u8]>>,
    at: usize,
}

impl Outgoing {
    fn push(&mut self, part: Arc<[u8]>) {
        if !part.is_empty() {
            self.parts.push_back(part);
        }
    }

    /// Sends what the socket takes. True: everything is sent.
    fn flush(&mut self, mut socket: &TcpStream) -> std::io::Result<bool> {
        while let Some(part) = self.parts.front() {
            match socket.write(&part[self.at..]) {
                Ok(n) => {
                    self.at += n;
                    if self.at == part.len() {
                        self.parts.pop_front();
                        self.at = 0;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }
}

struct Link {
    socket: TcpStream,
    out: Outgoing,
    blocked: bool,
}

/// epoll's number for the listener; connections count up from 0.
const LISTENER: u64 = u64::MAX - 1;

struct Root<'a> {
    gather: &'a mut Gather,
    listener: &'a Listener,
    epoll: Epoll,
    links: HashMap<Conn, Link>,
    next: Conn,
    buffer: Vec<u8>,
    /// The listener is watched.
    watched: bool,
    /// The process ran out of descriptors in this step; said once.
    short: bool,
    /// Accept nothing before then.
    shortage: Option<Instant>,
}

/// Runs rank 0's side to its end.
pub(super) fn gather(gather: &mut Gather, listener: &Listener) -> Result<gather::Outcome> {
    let failed = |e| Error::system(format!("epoll for the rendezvous: {e}"));
    gather.tick(Instant::now());
    if let Some(outcome) = gather.outcome(Instant::now()) {
        return Ok(outcome.clone()); // a job of one rank
    }
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
    let mut root = Root {
        gather,
        listener,
        epoll,
        links: HashMap::new(),
        next: 0,
        buffer: vec![0; CHUNK],
        watched: false,
        short: false,
        shortage: None,
    };
    root.run().map_err(failed)
}

impl Root<'_> {
    fn run(&mut self) -> nix::Result<gather::Outcome> {
        let mut events = [EpollEvent::empty(); 64];
        loop {
            let now = Instant::now();
            self.gather.tick(now);
            self.act(now);
            if let Some(outcome) = self.gather.outcome(now) {
                return Ok(outcome.clone());
            }
            let accept = self.gather.accepting() && self.shortage.is_none_or(|until| now >= until);
            self.watch(accept)?;
            let wake = self.shortage.filter(|_| !accept).map_or(self.gather.wake(), |at| at.min(self.gather.wake()));
            let count = match self.epoll.wait(&mut events, EpollTimeout::from(millis(wake))) {
                Err(Errno::EINTR) => 0,
                result => result?,
            };
            for event in &events[..count] {
                match event.data() {
                    LISTENER => self.accept()?,
                    conn => self.ready(conn, event.events()),
                }
            }
        }
    }

    fn watch(&mut self, accept: bool) -> nix::Result<()> {
        if accept != self.watched {
            self.watched = accept;
            let socket = self.listener.socket();
            if accept {
                self.epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
            } else {
                self.epoll.delete(socket)?;
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> nix::Result<()> {
        while self.gather.accepting() {
            let (socket, peer) = match self.listener.socket().accept() {
                Ok(accepted) => accepted,
                Err(e)
                    if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) =>
                {
                    if !self.gather.drop_oldest_stranger() {
                        if !std::mem::replace(&mut self.short, true) {
                            log::warn!("rendezvous: cannot accept a connection: {e}; raise the limit (ulimit -n)");
                        }
                        self.shortage = Some(Instant::now() + SHORTAGE_PAUSE);
                    }
                    self.act(Instant::now());
                    return Ok(());
                }
                // WouldBlock: none is left. Others are the fate of one connection that died in the queue.
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => continue,
            };
            if socket.set_nonblocking(true).and_then(|()| socket.set_nodelay(true)).is_err() {
                continue; // died already
            }
            let conn = self.next;
            self.next += 1;
            self.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, conn))?;
            self.links.insert(conn, Link { socket, out: Outgoing::default(), blocked: false });
            self.gather.accepted(conn, peer, Instant::now());
            // What a rank sends is usually here already; a stranger less before the next is accepted.
            self.ready(conn, EpollFlags::EPOLLIN);
        }
        Ok(())
    }

    fn ready(&mut self, conn: Conn, events: EpollFlags) {
        let Some(link) = self.links.get(&conn) else { return };
        let now = Instant::now();
        if link.blocked {
            self.flush(conn, now);
        } else if events.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            let closed = read_some(&link.socket, &mut self.buffer, |bytes| self.gather.received(conn, bytes, now));
            if closed {
                self.links.remove(&conn);
                self.gather.closed(conn, now);
            }
        }
        self.act(now);
    }

    fn act(&mut self, now: Instant) {
        while let Some(action) = self.gather.next_action() {
            match action {
                gather::Action::Send { conn, shared, own } => {
                    if let Some(link) = self.links.get_mut(&conn) {
                        link.out.push(shared);
                        link.out.push(own.into());
                    }
                    self.flush(conn, now);
                }
                gather::Action::Close(conn) => {
                    if let Some(link) = self.links.remove(&conn) {
                        // Closing over unread bytes resets the connection and may destroy the answer on its way.
                        read_some(&link.socket, &mut self.buffer, |_| ());
                    }
                }
            }
        }
    }

    fn flush(&mut self, conn: Conn, now: Instant) {
        let Some(link) = self.links.get_mut(&conn) else { return };
        let result = link.out.flush(&link.socket).and_then(|all| {
            if !all && !link.blocked {
                link.blocked = true;
                // Only room matters now; reading on would spin on a peer that closed its half.
                self.epoll.modify(&link.socket, &mut EpollEvent::new(EpollFlags::EPOLLOUT, conn))?;
            }
            Ok(all)
        });
        match result {
            Ok(true) => self.gather.sent(conn),
            Ok(false) => {}
            Err(_) => {
                self.links.remove(&conn);
                self.gather.closed(conn, now);
            }
        }
    }
}

/// What is left of an attempt to reach rank 0.
struct Attempt {
    socket: TcpStream,
    connected: bool,
    out: Outgoing,
}

fn connect(address: SocketAddr) -> std::result::Result<Attempt, Errno> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket::socket(family, SockType::Stream, flags, None)?;
    let connected = match socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => true,
        // An interrupted connect goes on in the background like one in progress.
        Err(Errno::EINPROGRESS | Errno::EINTR) => false,
        Err(e) => return Err(e),
    };
    let socket = TcpStream::from(fd);
    socket.set_nodelay(true).map_err(|_| Errno::last())?;
    Ok(Attempt { socket, connected, out: Outgoing::default() })
}

/// Runs another rank's side to its end, with rank 0 at `address`.
pub(super) fn visit(visit: &mut Visit, address: SocketAddr) -> Result<visit::Outcome> {
    let mut attempt: Option<Attempt> = None;
    let mut buffer = vec![0; CHUNK];
    loop {
        let now = Instant::now();
        visit.tick(now);
        while let Some(action) = visit.next_action() {
            match action {
                visit::Action::Close => attempt = None,
                visit::Action::Connect => match connect(address) {
                    Ok(new) => {
                        if new.connected {
                            visit.connected();
                        }
                        attempt = Some(new);
                    }
                    Err(e) => visit.broken(e.desc(), e == Errno::ECONNREFUSED, now),
                },
                visit::Action::Send(bytes) => {
                    if let Some(attempt) = &mut attempt {
                        attempt.out.push(bytes);
                        // A connection that broke shows when it is read; an answer may still be there.
                        if matches!(attempt.out.flush(&attempt.socket), Ok(true)) {
                            visit.sent();
                        }
                    }
                }
            }
        }
        if let Some(outcome) = visit.outcome() {
            let taken = Err(super::wire::Failure { code: 0, sentence: String::new() });
            return Ok(std::mem::replace(outcome, taken));
        }
        let mut flags = PollFlags::POLLIN;
        let unsent = attempt.as_ref().is_some_and(|a| !a.connected || !a.out.parts.is_empty());
        flags.set(PollFlags::POLLOUT, unsent);
        let mut fds: Vec<PollFd<'_>> =
            attempt.iter().map(|attempt| PollFd::new(attempt.socket.as_fd(), flags)).collect();
        match poll(&mut fds, PollTimeout::from(millis(visit.wake()))) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(e) => return Err(Error::system(format!("poll for the rendezvous: {e}"))),
        }
        drop(fds);
        let now = Instant::now();
        let Some(open) = &mut attempt else { continue };
        if !open.connected {
            match open.socket.take_error().unwrap_or_else(Some) {
                None => {
                    open.connected = true;
                    visit.connected();
                }
                Some(error) => {
                    attempt = None;
                    visit.broken(&error.to_string(), error.kind() == ErrorKind::ConnectionRefused, now);
                }
            }
            continue;
        }
        let was_unsent = !open.out.parts.is_empty();
        if was_unsent && matches!(open.out.flush(&open.socket), Ok(true)) {
            visit.sent();
        }
        if read_some(&open.socket, &mut buffer, |bytes| visit.received(bytes, now)) {
            attempt = None;
            visit.broken("rank 0 closed the connection", false, now);
        }
    }
}
