//! Sockets and clocks for [`Gather`] and [`Visit`]. The calling thread does all the work; every wait has an end.

use super::gather::{self, Conn, Gather, Kept};
use super::listener::Listener;
use super::visit::{self, Broken, Visit};
use crate::error::{Error, Result};
use crate::fork::Private;
use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{self, sockopt, AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage};
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, IoSlice, Read};
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
        Errno::ETIMEDOUT | Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::EHOSTDOWN => Broken::Silent,
        _ => Broken::Otherwise,
    }
}

/// Has the kernel ask a host that has sent nothing for a while whether it is there, and break the connection when it
/// has not answered for `silence`. A process that is stopped or late does not matter: its kernel answers.
fn watch_host(socket: &TcpStream, silence: Duration) -> nix::Result<()> {
    const PROBES: u32 = 3;
    let pause = (silence.as_secs() / u64::from(PROBES + 1)).max(1) as u32;
    socket::setsockopt(socket, sockopt::TcpKeepIdle, &pause)?;
    socket::setsockopt(socket, sockopt::TcpKeepInterval, &pause)?;
    socket::setsockopt(socket, sockopt::TcpKeepCount, &PROBES)?;
    socket::setsockopt(socket, sockopt::KeepAlive, &true)
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
        while let Some(done) = self.parts.front().map(|part| part.len()).filter(|&len| self.at >= len) {
            self.parts.pop_front();
            self.at -= done;
        }
    }
}

struct Link {
    socket: Private<TcpStream>,
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
    /// For the call's next step.
    kept: &'a mut Vec<(Kept, Private<TcpStream>)>,
}

/// Connections that a call's step leaves to its next one: rank 0's, by rank, or another rank's.
#[derive(Default)]
pub(super) struct Standing {
    root: Vec<(Kept, Private<TcpStream>)>,
    visitor: Option<Private<TcpStream>>,
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.root.iter().for_each(|(_, socket)| drain(socket));
    }
}

/// Closing over unread bytes resets the connection and may destroy the answer on its way.
fn drain(socket: &TcpStream) {
    read_some(socket, &mut [0; 256], |_| ());
}

/// Runs rank 0's side to its end.
pub(super) fn gather(gather: &mut Gather, listener: &Listener, standing: &mut Standing) -> Result<gather::Outcome> {
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
        kept: &mut standing.root,
    };
    root.run().map_err(failed)
}

impl Root<'_> {
    fn run(&mut self) -> nix::Result<gather::Outcome> {
        for (who, socket) in std::mem::take(self.kept) {
            let conn = self.watch_link(socket)?;
            self.gather.kept(conn, who);
        }
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
                Ok((socket, peer)) => (Private::new(socket), peer),
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
            let prepared = socket.set_nonblocking(true).and_then(|()| socket.set_nodelay(true));
            if prepared.is_err() || watch_host(&socket, self.gather.silence()).is_err() {
                continue; // died already
            }
            let conn = self.watch_link(socket)?;
            self.gather.accepted(conn, peer, Instant::now());
            // What a rank sends is usually here already; a stranger less before the next is accepted.
            self.ready(conn, EpollFlags::EPOLLIN);
        }
        Ok(())
    }

    fn watch_link(&mut self, socket: Private<TcpStream>) -> nix::Result<Conn> {
        let conn = self.next;
        self.next += 1;
        self.epoll.add(&*socket, EpollEvent::new(EpollFlags::EPOLLIN, conn))?;
        self.links.insert(conn, Link { socket, out: Outgoing::default(), blocked: false });
        Ok(conn)
    }

    fn ready(&mut self, conn: Conn, events: EpollFlags) {
        let Some(link) = self.links.get(&conn) else { return };
        let now = Instant::now();
        if link.blocked {
            self.flush(conn, now);
        } else if events.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            let ended = read_some(&link.socket, &mut self.buffer, |bytes| self.gather.received(conn, bytes, now));
            if ended.is_some() {
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
                gather::Action::Keep(conn, who) => {
                    if let Some(link) = self.links.remove(&conn) {
                        let _ = self.epoll.delete(&link.socket); // with its descriptor at the latest
                        self.kept.push((who, link.socket));
                    }
                }
                gather::Action::Close(conn) => {
                    if let Some(link) = self.links.remove(&conn) {
                        drain(&link.socket);
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
                self.epoll.modify(&*link.socket, &mut EpollEvent::new(EpollFlags::EPOLLOUT, conn))?;
            } else if all && link.blocked {
                link.blocked = false;
                self.epoll.modify(&*link.socket, &mut EpollEvent::new(EpollFlags::EPOLLIN, conn))?;
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
    socket: Private<TcpStream>,
    connected: bool,
    out: Outgoing,
}

/// Starts to connect. `taken`: a kernel that is there takes all that will be sent, whether or not anybody reads it.
fn connect(address: SocketAddr, silence: Duration, taken: bool) -> std::result::Result<Attempt, Errno> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = Private::new(TcpStream::from(socket::socket(family, SockType::Stream, flags, None)?));
    if taken {
        // There are no probes while something is on its way. This also counts time in which the receiver has no room.
        socket::setsockopt(&*socket, sockopt::TcpUserTimeout, &(silence.as_millis() as u32))?;
    }
    let connected = match socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => true,
        // An interrupted connect goes on in the background like one in progress.
        Err(Errno::EINPROGRESS | Errno::EINTR) => false,
        Err(e) => return Err(e),
    };
    socket.set_nodelay(true).map_err(|_| Errno::last())?;
    watch_host(&socket, silence)?;
    Ok(Attempt { socket, connected, out: Outgoing::default() })
}

/// Takes the connection that stands since the call's step before, or starts another one.
fn begin(
    standing: Option<Private<TcpStream>>,
    address: SocketAddr,
    visit: &Visit,
) -> std::result::Result<Attempt, Errno> {
    let taken = visit.is_taken_at_once();
    let Some(socket) = standing else { return connect(address, visit.silence(), taken) };
    if !taken {
        socket::setsockopt(&*socket, sockopt::TcpUserTimeout, &0)?;
    }
    Ok(Attempt { socket, connected: true, out: Outgoing::default() })
}

/// Runs another rank's side to its end, with rank 0 at `address`.
pub(super) fn visit(visit: &mut Visit, address: SocketAddr, standing: &mut Standing) -> Result<visit::Outcome> {
    let mut attempt: Option<Attempt> = None;
    let mut buffer = vec![0; CHUNK];
    loop {
        let now = Instant::now();
        visit.tick(now);
        while let Some(action) = visit.next_action() {
            match action {
                visit::Action::Close => {
                    let good = visit.outcome().is_some_and(|outcome| outcome.is_ok());
                    standing.visitor = attempt.take().filter(|_| good).map(|attempt| attempt.socket);
                }
                visit::Action::Connect => match begin(standing.visitor.take(), address, visit) {
                    Ok(new) => {
                        if new.connected {
                            visit.connected();
                        }
                        attempt = Some(new);
                    }
                    Err(e) => visit.broken(e.desc(), how_broken(e), now),
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
                    let errno = error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw);
                    visit.broken(errno.desc(), how_broken(errno), now);
                }
            }
            continue;
        }
        let was_unsent = !open.out.parts.is_empty();
        if was_unsent && matches!(open.out.flush(&open.socket), Ok(true)) {
            visit.sent();
        }
        if let Some(how) = read_some(&open.socket, &mut buffer, |bytes| visit.received(bytes, now)) {
            attempt = None;
            let why = match how {
                Broken::Silent => Errno::ETIMEDOUT.desc(),
                _ => "rank 0 closed the connection",
            };
            visit.broken(why, how, now);
        }
    }
}
