//! Whoever connects and has not yet shown who it is. Strangers are few at a time, briefly, and in nobody's way.

use super::sock::{self, Moved, Poller, Timing};
use super::wire::{Hello, HELLO};
use crate::sys::fork::Private;
use crate::sys::secret;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Strangers held at a time; one more, and the oldest goes.
const STRANGERS: usize = 128;

/// Connections accepted in one turn.
const TURN: usize = 32;

/// How long a listener is left alone for which there was no descriptor.
const SHUT: Duration = Duration::from_secs(1);

struct Caller {
    fd: Private<OwnedFd>,
    buf: [u8; HELLO],
    have: usize,
    since: Instant,
    hello: Option<Hello>,
}

/// The listeners and what came in by them.
pub struct Acceptor {
    listeners: Vec<Private<TcpListener>>,
    callers: Vec<Option<Caller>>,
    /// Since when a listener is not watched because descriptors ran out.
    shut: Option<Instant>,
    /// That was said, and nobody came in since.
    warned: bool,
}

impl Acceptor {
    /// Watches `listeners`, reporting the i-th as `token(i)`.
    pub fn new(listeners: Vec<Private<TcpListener>>) -> Self {
        Self { listeners, callers: Vec::new(), shut: None, warned: false }
    }

    /// Accepts what waits on listener `i`; `listener` and `slot` make epoll tokens. `true`: somebody came.
    pub fn accept(
        &mut self,
        i: usize,
        poller: &Poller,
        timing: &Timing,
        listener: impl Fn(usize) -> u64,
        slot: impl Fn(usize) -> u64,
    ) -> bool {
        for n in 0..TURN {
            let Some(l) = self.listeners.get(i) else { return n > 0 };
            let stream = match l.accept() {
                Ok((stream, _)) => stream,
                Err(e) => {
                    if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) {
                        if !std::mem::replace(&mut self.warned, true) {
                            log::warn!("accepting a data connection failed: {e}; raise the limit of open files");
                        }
                        // Level-triggered, it would wake us for ever. `expire` looks again.
                        self.shut = poller.change(l.as_raw_fd(), 0, listener(i)).ok().map(|()| Instant::now());
                    }
                    return n > 0;
                }
            };
            self.warned = false;
            let fd = Private::new(OwnedFd::from(stream));
            if set_nonblocking(&fd).and_then(|()| sock::tune(&fd, timing)).is_err() {
                continue;
            }
            let at = self.free_slot();
            if poller.add(fd.as_raw_fd(), libc::EPOLLIN as u32, slot(at)).is_ok() {
                let since = Instant::now();
                self.callers[at] = Some(Caller { fd, buf: [0; HELLO], have: 0, since, hello: None });
            }
        }
        true
    }

    fn free_slot(&mut self) -> usize {
        let strangers = |c: &Option<Caller>| c.as_ref().is_some_and(|c| c.hello.is_none());
        if self.callers.iter().filter(|c| strangers(c)).count() >= STRANGERS {
            let since = |c: &Option<Caller>| c.as_ref().map(|c| c.since);
            let oldest = (0..self.callers.len()).filter(|&i| strangers(&self.callers[i]));
            if let Some(i) = oldest.min_by_key(|&i| since(&self.callers[i])) {
                log::debug!("too many connections without a greeting: dropped the oldest");
                self.callers[i] = None;
                return i;
            }
        }
        if let Some(i) = self.callers.iter().position(Option::is_none) {
            return i;
        }
        self.callers.push(None);
        self.callers.len() - 1
    }

    /// Hears what the caller in slot `at` has to say. A complete greeting with the right secret is returned; its
    /// connection stays until [`Acceptor::take`]. Anything else ends the connection when it is complete.
    pub fn hear(&mut self, at: usize, token: &[u8; 16]) -> Option<Hello> {
        let caller = self.callers.get_mut(at)?.as_mut()?;
        if caller.hello.is_none() {
            match sock::receive_into(&caller.fd, &mut caller.buf[caller.have..]) {
                Ok(Moved::Bytes(n)) => caller.have += n,
                Ok(Moved::Blocked) => return None,
                Ok(Moved::Ended) | Err(_) => {
                    self.callers[at] = None;
                    return None;
                }
            }
            if caller.have < HELLO {
                return None;
            }
            match Hello::parse(&caller.buf) {
                Ok(h) if !h.answer && secret::same(&h.token, token) => caller.hello = Some(h),
                _ => {
                    log::debug!("a connection without this rank's token was dropped");
                    self.callers[at] = None;
                    return None;
                }
            }
        }
        caller.hello
    }

    /// Greeted callers that wait for `join`, to be watched no more until then.
    pub fn keep(&mut self, at: usize, poller: &Poller, token: u64) {
        if let Some(Some(c)) = self.callers.get(at) {
            if poller.change(c.fd.as_raw_fd(), 0, token).is_err() {
                self.callers[at] = None;
            }
        }
    }

    /// All greeted callers.
    pub fn greeted(&self) -> Vec<usize> {
        let greeted = |c: &Option<Caller>| c.as_ref().is_some_and(|c| c.hello.is_some());
        (0..self.callers.len()).filter(|&i| greeted(&self.callers[i])).collect()
    }

    /// Hands a caller's connection over.
    pub fn take(&mut self, at: usize) -> Option<Private<OwnedFd>> {
        Some(self.callers.get_mut(at)?.take()?.fd)
    }

    /// Drops strangers whose time is up, and watches listeners again. `true`: somebody is left to look after.
    pub fn expire(&mut self, poller: &Poller, timing: &Timing, listener: impl Fn(usize) -> u64) -> bool {
        for c in &mut self.callers {
            if c.as_ref().is_some_and(|c| c.hello.is_none() && c.since.elapsed() > timing.greeting) {
                *c = None;
            }
        }
        if self.shut.is_some_and(|since| since.elapsed() >= SHUT) {
            self.shut = None;
            for (i, l) in self.listeners.iter().enumerate() {
                let _ = poller.change(l.as_raw_fd(), libc::EPOLLIN as u32, listener(i));
            }
        }
        self.shut.is_some() || self.callers.iter().flatten().any(|c| c.hello.is_none())
    }

    /// Closes everything.
    pub fn close(&mut self) {
        self.listeners.clear();
        self.callers.clear();
    }
}

fn set_nonblocking(fd: &OwnedFd) -> std::io::Result<()> {
    // SAFETY: plain system call on an open descriptor. An accepted socket has no other status flags to keep.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
