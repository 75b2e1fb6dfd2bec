//! Sockets: options, non-blocking connect, vectored transfer of raw memory.

use crate::config::Config;
use crate::sys::fork::Private;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// How long things may take. One set a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From the first operation to a peer until its connections are up.
    pub connect: Duration,
    /// For how long a peer's every address may refuse connections. It has said that it listens there.
    pub refused: Duration,
    /// From accepting a connection until its greeting is complete.
    pub greeting: Duration,
    /// How long a peer may be silent: its host, with nothing acknowledged, or its process, without a beat or any
    /// other byte.
    pub silence: Duration,
    /// How long `close` waits for peers to take more of what it has promised to deliver.
    pub linger: Duration,
    /// How long it waits for that in all.
    pub leave: Duration,
}

impl Timing {
    /// As usual, for peers that may be silent for so long.
    pub fn of(silence: Duration) -> Self {
        Self {
            connect: silence,
            refused: Duration::from_secs(1),
            greeting: Duration::from_secs(5),
            silence,
            linger: Duration::from_secs(2),
            leave: Duration::from_secs(10),
        }
    }

    /// What a greeting says of it.
    pub fn silence_ms(&self) -> u32 {
        u32::try_from(self.silence.as_millis()).unwrap_or(u32::MAX).max(1)
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self::of(Config::default().peer_limit())
    }
}

/// Bytes that the kernel may hold unsent on a connection before it stops taking more. A signal waits behind at most
/// this much plus a chunk.
const NOT_SENT: libc::c_int = 512 * 1024;

fn set(fd: RawFd, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` is a c_int and lives through the call; `size` is its size.
    let rc = unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), size) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Prepares a data connection: no delay of small frames, little unsent in the kernel, death noticed.
pub fn tune(fd: &OwnedFd, timing: &Timing) -> io::Result<()> {
    let fd = fd.as_raw_fd();
    // The kernel's own view of a host that is gone; whole seconds in part.
    let silence = timing.silence.as_millis().max(1000) as libc::c_int;
    let probe = (silence / 8000).max(1);
    set(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    set(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, NOT_SENT)?;
    set(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 2 * probe)?;
    set(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, probe)?;
    // Covers data in flight and, in place of a count of them, how long probes go unanswered.
    set(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, silence)
}

/// Starts a connection to `to`, from the interface of `from` if told.
pub fn connect(to: SocketAddr, from: Option<IpAddr>, timing: &Timing) -> io::Result<Private<OwnedFd>> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let fd = Private::new(socket::socket(family, SockType::Stream, flags, None)?);
    tune(&fd, timing)?;
    if let Some(ip) = from {
        socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(ip, 0)))?;
    }
    match socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(nix::Error::EINPROGRESS) => Ok(fd),
        Err(e) => Err(e.into()),
    }
}

/// What a finished connect, or a reset, left on the socket.
pub fn pending_error(fd: &OwnedFd) -> io::Result<()> {
    match socket::getsockopt(fd, socket::sockopt::SocketError)? {
        0 => Ok(()),
        e => Err(io::Error::from_raw_os_error(e)),
    }
}

/// Whether a connection that was started stands.
pub fn is_connected(fd: &OwnedFd) -> io::Result<bool> {
    let mut p = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd, borrowed mutably.
    let ready = unsafe { libc::poll(&mut p, 1, 0) } == 1;
    pending_error(fd).map(|()| ready)
}

/// What a transfer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// This many bytes.
    Bytes(usize),
    /// Nothing: not ready.
    Blocked,
    /// Nothing: the peer sends no more.
    Ended,
}

fn moved(n: isize) -> io::Result<Moved> {
    match n {
        0 => Ok(Moved::Ended),
        n if n > 0 => Ok(Moved::Bytes(n as usize)),
        _ => {
            let e = io::Error::last_os_error();
            match e.raw_os_error() {
                // EINTR: level-triggered readiness brings us back.
                Some(libc::EAGAIN | libc::EINTR) => Ok(Moved::Blocked),
                _ => Err(e),
            }
        }
    }
}

fn message(io: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeros is a valid msghdr: null pointers with zero lengths.
    let mut m: libc::msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = io.as_ptr().cast_mut();
    m.msg_iovlen = io.len();
    m
}

/// Sends what the vectors name, or a part. The kernel reads the memory: an unmapped page is `EFAULT`, not a fault.
///
/// # Safety
/// Nobody may be harmed by what these addresses hold being sent.
pub unsafe fn send(fd: RawFd, io: &[libc::iovec]) -> io::Result<Moved> {
    let m = message(io);
    // SAFETY: `m` points to `io`, which outlives the call.
    moved(unsafe { libc::sendmsg(fd, &m, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) })
}

/// Receives into what the vectors name.
///
/// # Safety
/// The vectors name memory that the caller may overwrite.
pub unsafe fn receive(fd: RawFd, io: &[libc::iovec]) -> io::Result<Moved> {
    let mut m = message(io);
    // SAFETY: `m` points to `io`, which outlives the call; the memory is the caller's to overwrite.
    moved(unsafe { libc::recvmsg(fd, &mut m, libc::MSG_DONTWAIT) })
}

/// Sends a short message whole or reports failure; for greetings, which an empty socket buffer always takes.
pub fn send_whole(fd: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    let io = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    // SAFETY: `io` names `bytes`, borrowed through the call and only read.
    match unsafe { send(fd.as_raw_fd(), &io) }? {
        Moved::Bytes(n) if n == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Sends a short message. Returns what the kernel has not taken of it; `None`: it takes nothing now.
pub fn send_some<'a>(fd: &OwnedFd, bytes: &'a [u8]) -> io::Result<Option<&'a [u8]>> {
    let io = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    // SAFETY: `io` names `bytes`, borrowed through the call and only read.
    match unsafe { send(fd.as_raw_fd(), &io) }? {
        Moved::Bytes(n) => Ok(Some(&bytes[n..])),
        _ => Ok(None),
    }
}

/// Receives into `buf`.
pub fn receive_into(fd: &OwnedFd, buf: &mut [u8]) -> io::Result<Moved> {
    let io = [libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() }];
    // SAFETY: `io` names `buf`, borrowed mutably through the call.
    unsafe { receive(fd.as_raw_fd(), &io) }
}

/// Bytes that are still to be received on a connection of which no more will come, not even an end in order. `None`:
/// more may come.
pub fn rest(fd: &OwnedFd) -> Option<usize> {
    let mut p = libc::pollfd { fd: fd.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one pollfd, borrowed mutably.
    if unsafe { libc::poll(&mut p, 1, 0) } != 1 || p.revents & libc::POLLHUP == 0 {
        return None;
    }
    unread(fd)
}

/// Bytes that are here and not received yet.
pub fn unread(fd: &OwnedFd) -> Option<usize> {
    let mut n: libc::c_int = 0;
    // SAFETY: FIONREAD writes an int to `n`, borrowed mutably.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &mut n) };
    (rc == 0).then_some(n.max(0) as usize)
}

/// What ended a connection that is over.
pub fn end_of(fd: &OwnedFd) -> io::Error {
    pending_error(fd).err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Has the peer see a reset when `fd` is closed: what was begun on this connection cannot be finished.
pub fn abort(fd: &OwnedFd) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: `linger` lives through the call; `size` is its size. A failure leaves an ordinary close.
    unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), size) };
}

/// One epoll instance and the timers on it. Level-triggered throughout: whoever finds an object locked leaves its event
/// to the next caller.
pub struct Poller {
    epoll: OwnedFd,
    tick: OwnedFd,
    flush: OwnedFd,
}

/// Events taken at once.
pub const EVENTS: usize = 32;

impl Poller {
    /// An instance whose timers report `tick` and `flush`.
    pub fn new(tick: u64, flush: u64) -> io::Result<Self> {
        // SAFETY: plain system call; the result is checked before it is owned.
        let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        let this = Self { epoll, tick: timer()?, flush: timer()? };
        this.add(this.tick.as_raw_fd(), libc::EPOLLIN as u32, tick)?;
        this.add(this.flush.as_raw_fd(), libc::EPOLLIN as u32, flush)?;
        Ok(this)
    }

    /// The instance itself, readable when something is ready.
    pub fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    fn control(&self, op: i32, fd: RawFd, interest: u32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest, u64: token };
        // SAFETY: `event` lives through the call.
        match unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), op, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Watches `fd`. Closing it ends that.
    pub fn add(&self, fd: RawFd, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, interest, token)
    }

    /// Changes what is watched for.
    pub fn change(&self, fd: RawFd, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, interest, token)
    }

    /// Brings what is watched for on `fd` from `interest` to `wanted`. `None`: nothing, not even the end, which epoll
    /// tells of whatever it is asked for.
    pub fn watch(&self, fd: RawFd, interest: &mut Option<u32>, wanted: Option<u32>, token: u64) {
        match (*interest, wanted) {
            (_, None) => self.remove(fd),
            (None, Some(bits)) => drop(self.add(fd, bits, token)),
            (Some(_), Some(bits)) => drop(self.change(fd, bits, token)),
        }
        *interest = wanted;
    }

    /// Watches `fd` no more.
    pub fn remove(&self, fd: RawFd) {
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// What is ready now.
    pub fn ready<'a>(&self, events: &'a mut [libc::epoll_event; EVENTS]) -> &'a [libc::epoll_event] {
        self.wait(events, 0)
    }

    /// What is ready within `for_ms` milliseconds (-1: whenever that is).
    pub fn wait<'a>(&self, events: &'a mut [libc::epoll_event; EVENTS], for_ms: i32) -> &'a [libc::epoll_event] {
        // SAFETY: the array has room for EVENTS entries and is borrowed mutably.
        let n = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), EVENTS as i32, for_ms) };
        &events[..n.max(0) as usize]
    }

    /// Fires the tick once after `after`.
    pub fn arm_tick(&self, after: Duration) {
        arm(&self.tick, after);
    }

    /// Fires the flush once after `after`.
    pub fn arm_flush(&self, after: Duration) {
        arm(&self.flush, after);
    }

    /// Makes the tick quiet again.
    pub fn heard_tick(&self) {
        heard(&self.tick);
    }

    /// Makes the flush quiet again.
    pub fn heard_flush(&self) {
        heard(&self.flush);
    }
}

/// A timer that does not run.
pub fn timer() -> io::Result<OwnedFd> {
    // SAFETY: plain system call; the result is checked before it is owned.
    owned(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) })
}

/// Fires a timer once after `after`.
pub fn arm(timer: &OwnedFd, after: Duration) {
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let value = libc::timespec { tv_sec: after.as_secs() as _, tv_nsec: after.subsec_nanos().max(1) as _ };
    let spec = libc::itimerspec { it_interval: zero, it_value: value };
    // SAFETY: `spec` lives through the call; no old value is asked for.
    unsafe { libc::timerfd_settime(timer.as_raw_fd(), 0, &spec, std::ptr::null_mut()) };
}

/// Makes a timer quiet again. `false`: somebody else did.
pub fn heard(timer: &OwnedFd) -> bool {
    let mut count = [0u8; 8];
    // SAFETY: the buffer holds the 8 bytes that a timerfd gives.
    unsafe { libc::read(timer.as_raw_fd(), count.as_mut_ptr().cast(), 8) == 8 }
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the system call just returned it, so it is open and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits until one of the former takes bytes again or one of the latter has some, at most so long. For `close` alone.
pub fn wait_for<'a>(
    unsent: impl Iterator<Item = &'a OwnedFd>,
    owing: impl Iterator<Item = &'a OwnedFd>,
    at_most: Duration,
) {
    let poll = |events| move |fd: &OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let mut all: Vec<_> = unsent.map(poll(libc::POLLOUT)).chain(owing.map(poll(libc::POLLIN))).collect();
    let for_ms = at_most.as_millis().clamp(1, 1000) as i32;
    // SAFETY: so many pollfds, borrowed mutably.
    unsafe { libc::poll(all.as_mut_ptr(), all.len() as libc::nfds_t, for_ms) };
}

#[cfg(test)]
mod tests {
    use super::super::Tcp;
    use super::*;
    use std::net::TcpStream;
    use std::sync::Arc;

    /// As many peers as the kernel allows may come while this rank does something else; a backlog of 128 has the next
    /// one wait for the kernel's second SYN, a second later, and the third.
    #[test]
    fn all_may_come_before_anybody_looks() {
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse::<usize>().unwrap();
        let tcp = Tcp::open(&["127.0.0.1:0".parse().unwrap()], [1; 16], 1, Arc::default()).unwrap();
        let to = tcp.addresses()[0];
        let come = |i| TcpStream::connect_timeout(&to, Duration::from_secs(15)).unwrap_or_else(|e| panic!("{i}: {e}"));
        let all: Vec<_> = (0..most.min(400)).map(come).collect();
        // They are there, and none was dropped for the others.
        assert!(all.iter().all(|one| one.take_error().unwrap().is_none()));
    }
}
