//! Opening the connections to one peer: connect, greet, be greeted; again after a while if that fails.

use super::clock::Clock;
use super::link::{Initiator, Phase};
use super::order::STRIPES;
use super::sock::{self, Moved, Poller, Timing};
use super::wire::{Hello, HELLO};
use super::PeerInfo;
use crate::error::{Error, Result};
use crate::fabric::World;
use crate::sys::interfaces;
use crate::sys::secret;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First and longest wait before another attempt.
const WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// How long one attempt to connect may stay unanswered before another address is tried.
pub const ATTEMPT: Duration = Duration::from_secs(3);

/// How far one connection is.
#[derive(Debug, Default)]
enum Step {
    #[default]
    New,
    Waiting(Instant),
    Connecting(Instant),
    Greeted([u8; HELLO], usize),
    Ready,
}

/// The making of one connection.
#[derive(Debug, Default)]
pub struct Dial {
    step: Step,
    attempts: u32,
    trouble: Option<(SocketAddr, io::Error)>,
    refusals: Option<Refusals>,
}

/// Attempts in a row that were refused: nothing else came of them.
#[derive(Clone, Copy, Debug)]
struct Refusals {
    since: Instant,
    count: usize,
}

/// What dialing needs to know.
pub struct Dialer<'a> {
    /// This rank among all.
    pub world: World,
    /// This rank's secret, which the answer must show.
    pub own_token: &'a [u8; 16],
    /// Interfaces to leave by.
    pub local: &'a [SocketAddr],
    /// These, and behind them the others by which link-local addresses may be reached.
    pub links: &'a [SocketAddr],
    /// The peer.
    pub rank: u32,
    /// Where it listens.
    pub peer: &'a PeerInfo,
    /// Deadlines.
    pub timing: &'a Timing,
    /// Learns how long the peer lets others be silent.
    pub clock: &'a Clock,
    /// Where the socket of a stripe is watched.
    pub poller: &'a dyn Fn(usize) -> &'a Poller,
}

impl Dialer<'_> {
    /// Begins.
    pub fn start(&self, link: &mut Initiator, token: impl Fn(usize) -> u64) -> Result<()> {
        link.phase = Phase::Dialing;
        link.deadline = Some(Instant::now() + self.timing.connect);
        self.step_all(link, token)
    }

    /// Looks after deadlines of all connections.
    pub fn step_all(&self, link: &mut Initiator, token: impl Fn(usize) -> u64) -> Result<()> {
        for stripe in 0..link.conns.len() {
            self.step(link, stripe, false, token(stripe))?;
        }
        Ok(())
    }

    /// Advances one connection; `ready`: its socket has something to say.
    pub fn step(&self, link: &mut Initiator, stripe: usize, ready: bool, token: u64) -> Result<()> {
        let now = Instant::now();
        if link.deadline.is_some_and(|d| now >= d) && !matches!(link.conns[stripe].dial.step, Step::Ready) {
            return Err(self.give_up(link, stripe));
        }
        if let Err(e) = self.try_step(link, stripe, ready, token, now) {
            let address = self.address(link.conns[stripe].dial.attempts, stripe);
            let (refused, everywhere) = (e.kind() == io::ErrorKind::ConnectionRefused, self.ways());
            let conn = &mut link.conns[stripe];
            conn.fd = None;
            let wait = (WAIT * (1 << conn.dial.attempts.min(7))).min(LONGEST_WAIT);
            conn.dial.attempts += 1;
            conn.dial.trouble = Some((address, e));
            conn.dial.step = Step::Waiting(now + wait);
            if !refused {
                conn.dial.refusals = None;
            } else {
                let refusals = conn.dial.refusals.get_or_insert(Refusals { since: now, count: 0 });
                refusals.count += 1;
                let everywhere = refusals.count >= everywhere;
                if everywhere && now - refusals.since >= self.timing.refused {
                    return Err(self.refused(&conn.dial));
                }
            }
        }
        if link.conns.iter().all(|c| matches!(c.dial.step, Step::Ready)) {
            link.phase = Phase::Up;
            link.deadline = None;
        }
        Ok(())
    }

    #[cold]
    fn refused(&self, dial: &Dial) -> Error {
        let list = |all: &[SocketAddr]| all.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
        let why = dial.trouble.as_ref().map_or(String::new(), |(_, e)| e.to_string());
        Error::remote(format!(
            "rank {} refuses connections at {}, where it has listened, {} attempts in a row: {why}; it has closed its \
             communicator or ended, or a firewall rejects: look into that rank's own log",
            self.rank,
            list(&self.peer.addresses),
            dial.refusals.map_or(0, |r| r.count),
        ))
    }

    fn give_up(&self, link: &Initiator, stripe: usize) -> Error {
        let Self { rank, .. } = self;
        let dial = &link.conns[stripe].dial;
        let secs = self.timing.connect.as_secs_f32();
        let what = match (&dial.step, &dial.trouble) {
            (Step::Greeted(..), _) => {
                format!("{} accepted but never greeted back", self.address(dial.attempts, stripe))
            }
            (_, Some((address, e))) => format!("{address}: {e}"),
            _ => format!("{}: no answer", self.address(dial.attempts, stripe)),
        };
        Error::remote(format!(
            "no data connection to rank {rank} within {secs} s (OXYGIN_PEER_TIMEOUT) and {} attempts: {what}; check \
             that the rank is alive and that no firewall is between the interfaces NCCL_SOCKET_IFNAME selects",
            dial.attempts + 1
        ))
    }

    /// Attempt by attempt and stripe by stripe through the peer's addresses.
    pub fn address(&self, attempts: u32, stripe: usize) -> SocketAddr {
        let (all, attempts) = (&self.peer.addresses, attempts as usize);
        // The express and the middle connection go where the first stripe goes.
        let at = (stripe.saturating_sub(STRIPES) + attempts) % all.len();
        // The i-th interfaces of both hosts are likely on one network; if not, the next ones in the next round.
        interfaces::through(all[at], self.links, at + attempts / all.len())
    }

    /// How many attempts go through all ways to the peer.
    fn ways(&self) -> usize {
        let links = self.links.iter().filter(|link| interfaces::link_local(link)).count().max(1);
        self.peer.addresses.iter().map(|to| if interfaces::link_local(to) { links } else { 1 }).max().unwrap_or(1)
            * self.peer.addresses.len()
    }

    /// With several interfaces here, stripes leave by different ones; every other attempt leaves that to routing.
    fn from(&self, attempts: u32, stripe: usize, to: &SocketAddr) -> Option<IpAddr> {
        let address = &self.local[stripe.saturating_sub(STRIPES) % self.local.len()];
        let ip = address.ip();
        // To a link-local address the interface is given with it.
        let fits = ip.is_ipv4() == to.is_ipv4() && !ip.is_unspecified() && !interfaces::link_local(address);
        (self.local.len() > 1 && attempts % 2 == 0 && fits).then_some(ip)
    }

    fn try_step(&self, link: &mut Initiator, stripe: usize, ready: bool, token: u64, now: Instant) -> io::Result<()> {
        let stripes = link.conns.len() as u16;
        let conn = &mut link.conns[stripe];
        match &mut conn.dial.step {
            Step::Ready => {}
            Step::Waiting(until) if now < *until => {}
            Step::New | Step::Waiting(_) => {
                let to = self.address(conn.dial.attempts, stripe);
                let fd = sock::connect(to, self.from(conn.dial.attempts, stripe, &to), self.timing)?;
                let interest = libc::EPOLLOUT as u32;
                (self.poller)(stripe).add(fd.as_raw_fd(), interest, token)?;
                conn.interest = Some(interest);
                conn.fd = Some(Arc::new(fd));
                conn.dial.step = Step::Connecting(now);
            }
            Step::Connecting(since) => {
                let since = *since;
                let Some(fd) = &conn.fd else { return Err(io::ErrorKind::NotConnected.into()) };
                if !ready {
                    return if now - since > ATTEMPT { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) };
                }
                sock::pending_error(fd)?;
                let World { rank, nranks } = self.world;
                let hello = Hello {
                    answer: false,
                    token: self.peer.token,
                    from: rank,
                    to: self.rank,
                    nranks,
                    stripe: stripe as u16,
                    stripes,
                    silence: self.timing.silence_ms(),
                };
                sock::send_whole(fd, &hello.emit())?;
                let interest = libc::EPOLLIN as u32;
                (self.poller)(stripe).change(fd.as_raw_fd(), interest, token)?;
                conn.interest = Some(interest);
                conn.dial.step = Step::Greeted([0; HELLO], 0);
            }
            Step::Greeted(buf, have) if ready => {
                let Some(fd) = &conn.fd else { return Err(io::ErrorKind::NotConnected.into()) };
                match sock::receive_into(fd, &mut buf[*have..])? {
                    Moved::Bytes(n) => *have += n,
                    Moved::Blocked => {}
                    Moved::Ended => return Err(io::Error::other("closed before greeting back (another job's rank?)")),
                }
                if *have == HELLO {
                    let hello = Hello::parse(buf).map_err(|m| io::Error::other(m.0))?;
                    if !hello.answer || !secret::same(&hello.token, self.own_token) || hello.from != self.rank {
                        return Err(io::Error::other("greeted back as somebody else"));
                    }
                    self.clock.hurry(Duration::from_millis(hello.silence.into()));
                    conn.dial = Dial { step: Step::Ready, ..Dial::default() };
                }
            }
            Step::Greeted(..) => {}
        }
        Ok(())
    }
}
