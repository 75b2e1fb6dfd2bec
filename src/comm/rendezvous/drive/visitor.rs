//! The socket of every other rank.

use super::{closed, how_broken, millis, read_some, until, DriveStep, Outgoing, Standing, CHUNK};
use crate::comm::rendezvous::host::{self, DeliveryWatch};
use crate::comm::rendezvous::routes::Routes;
use crate::comm::rendezvous::visit::{self, Broken, Visit, VisitorAction};
use crate::comm::rendezvous::wire::Failure;
use crate::error::{Error, Result};
use crate::sys::fork::Private;
use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// How long an attempt to connect may stay unanswered before the next: longer than the kernel looks for a neighbour,
/// and shorter than its pauses when it tries again by itself.
const ATTEMPT: Duration = Duration::from_secs(4);
/// Why such an attempt came to nothing.
const UNANSWERED: &str = "nothing answers there: a host that is gone, or one whose queue of connections is full";

/// An attempt to reach rank 0, and the connection that comes of it.
struct Attempt {
    socket: Private<TcpStream>,
    connected: bool,
    /// Rank 0's kernel has taken something: the connection is in its queue at least.
    heard: bool,
    /// When it is over if nothing answers.
    until: Instant,
    watch: DeliveryWatch,
    out: Outgoing,
}

/// How an attempt ended, and how the kernel or this module calls it.
type End = (Broken, &'static str);

impl Attempt {
    /// Takes the connection that stands since the call's step before, or starts another one.
    fn begin(
        standing: Option<Private<TcpStream>>,
        address: SocketAddr,
        silence: Duration,
        now: Instant,
    ) -> std::result::Result<Self, Errno> {
        let heard = standing.is_some();
        let (socket, connected) = standing.map_or_else(|| connect(address, silence), |socket| Ok((socket, true)))?;
        let (until, watch) = (now + ATTEMPT, DeliveryWatch::new(silence, now));
        Ok(Self { socket, connected, heard, until, watch, out: Outgoing::default() })
    }

    /// When it is to be looked at if nothing happens to its socket.
    fn wake(&self) -> Instant {
        if self.connected {
            self.watch.next()
        } else {
            self.until
        }
    }

    /// What the socket waits for.
    fn flags(&self) -> PollFlags {
        let mut flags = PollFlags::POLLIN;
        flags.set(PollFlags::POLLOUT, !self.connected || !self.out.parts.is_empty());
        flags
    }

    /// Whether it ended because nothing comes from rank 0's host.
    fn end_of_silence(&mut self, now: Instant) -> Option<End> {
        if !self.connected {
            return (now >= self.until).then_some((Broken::Otherwise, UNANSWERED));
        }
        if !self.watch.is_silent(&self.socket, now) {
            return None;
        }
        let left = host::unacknowledged(&self.socket).unwrap_or(usize::MAX);
        if self.heard || left < self.out.taken {
            return Some((Broken::Silent, "nothing is acknowledged any more"));
        }
        // For this kernel the connection stands. Rank 0's has no room for it, if it is there, and none of it shall
        // arrive when there is another one.
        host::abort(&self.socket);
        Some((Broken::Otherwise, UNANSWERED))
    }

    /// The socket has something to say.
    fn ready(&mut self, visit: &mut Visit, buffer: &mut [u8], now: Instant) -> Option<End> {
        if !self.connected {
            if let Some(error) = self.socket.take_error().unwrap_or_else(Some) {
                let errno = error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw);
                return Some((how_broken(errno), errno.desc()));
            }
            self.connected = true;
            visit.connected();
            return None;
        }
        let unsent = !self.out.parts.is_empty();
        if unsent && matches!(self.out.flush(&self.socket), Ok(true)) {
            visit.sent();
        }
        let how = read_some(&self.socket, buffer, |bytes| visit.received(bytes, now))?;
        Some(match how {
            Broken::Silent | Broken::Unreachable => (how, Errno::ETIMEDOUT.desc()),
            _ => (how, "rank 0 closed the connection"),
        })
    }
}

/// Starts to connect. True: it is done already.
fn connect(address: SocketAddr, silence: Duration) -> std::result::Result<(Private<TcpStream>, bool), Errno> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = Private::new(TcpStream::from(socket::socket(family, SockType::Stream, flags, None)?));
    let connected = match socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => true,
        // An interrupted connect goes on in the background like one in progress.
        Err(Errno::EINPROGRESS | Errno::EINTR) => false,
        Err(e) => return Err(e),
    };
    socket.set_nodelay(true).map_err(|_| Errno::last())?;
    host::probe(&socket, silence)?;
    Ok((socket, connected))
}

/// Runs another rank's side to its end, with rank 0 behind `routes`.
pub fn visit(
    visit: &mut Visit,
    routes: &mut Routes,
    standing: &mut Standing,
    step: &DriveStep<'_>,
) -> Result<visit::Outcome> {
    let mut attempt: Option<Attempt> = None;
    let mut buffer = vec![0; CHUNK];
    loop {
        let now = Instant::now();
        visit.tick(now);
        while let Some(action) = visit.next_action() {
            act(action, visit, routes, standing, &mut attempt, now);
        }
        if let Some(outcome) = visit.outcome() {
            if outcome.is_ok() {
                routes.worked();
            }
            let taken = Err(Failure { code: 0, sentence: String::new() });
            return Ok(std::mem::replace(outcome, taken));
        }
        if (step.is_over)() {
            return Ok(Err(closed(step.name)));
        }
        let wake = attempt.as_ref().map_or(visit.wake(), |open| open.wake().min(visit.wake()));
        let mut fds: Vec<PollFd<'_>> =
            attempt.iter().map(|open| PollFd::new(open.socket.as_fd(), open.flags())).collect();
        let is_ready = match poll(&mut fds, PollTimeout::from(millis(until(wake, now)))) {
            Ok(count) => count > 0,
            Err(Errno::EINTR) => false,
            Err(e) => return Err(Error::system(format!("poll for the rendezvous: {e}"))),
        };
        drop(fds);
        let now = Instant::now();
        let Some(open) = &mut attempt else { continue };
        let end = if is_ready { open.ready(visit, &mut buffer, now) } else { open.end_of_silence(now) };
        if let Some((how, why)) = end {
            attempt = None;
            // An answer may have come before the end.
            if visit.outcome().is_none() {
                visit.broken(why, routes.failed(how), now);
            }
        }
    }
}

fn act(
    action: VisitorAction,
    visit: &mut Visit,
    routes: &mut Routes,
    standing: &mut Standing,
    attempt: &mut Option<Attempt>,
    now: Instant,
) {
    match action {
        VisitorAction::Close => {
            let good = visit.outcome().is_some_and(|outcome| outcome.is_ok());
            standing.visitor = attempt.take().filter(|_| good).map(|attempt| attempt.socket);
        }
        VisitorAction::Connect => {
            match Attempt::begin(standing.visitor.take(), routes.current(), visit.silence(), now) {
                Ok(new) => {
                    if new.connected {
                        visit.connected();
                    }
                    *attempt = Some(new);
                }
                Err(e) => visit.broken(e.desc(), routes.failed(how_broken(e)), now),
            }
        }
        VisitorAction::Send(bytes) => {
            if let Some(attempt) = attempt {
                attempt.out.push(bytes);
                // A connection that broke shows when it is read; an answer may still be there.
                if matches!(attempt.out.flush(&attempt.socket), Ok(true)) {
                    visit.sent();
                }
            }
        }
    }
}
