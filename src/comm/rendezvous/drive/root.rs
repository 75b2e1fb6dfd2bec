//! Rank 0's sockets.

use super::{closed, drain, millis, read_some, until, DriveStep, Outgoing, Standing, CHUNK};
use crate::comm::rendezvous::gather::{self, Conn, Gather, KeptConnection, RootAction, SETTLE};
use crate::comm::rendezvous::host;
use crate::comm::rendezvous::listener::Listener;
use crate::error::{Error, Result};
use crate::sys::fork::Private;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Pause after the process ran out of descriptors and no stranger was there to drop.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(10);
/// Connections accepted at once, those counted that died in the queue: who comes faster than this rank accepts does not
/// keep it from its deadline.
const ACCEPTS: usize = 64;
/// Events that one look takes.
const EVENTS: usize = 64;

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
    kept: &'a mut Vec<(KeptConnection, Option<Private<TcpStream>>)>,
}

/// Runs rank 0's side to its end.
pub fn gather(
    gather: &mut Gather,
    listener: &Listener,
    standing: &mut Standing,
    step: &DriveStep<'_>,
) -> Result<gather::Outcome> {
    let failed = |e| Error::system(format!("epoll for the rendezvous: {e}"));
    gather.tick(Instant::now());
    if let Some(outcome) = gather.outcome(Instant::now()) {
        return Ok(outcome.clone()); // a job of one rank
    }
    let mut root = Root::new(gather, listener, &mut standing.root).map_err(failed)?;
    root.run(step).map_err(failed)
}

impl<'a> Root<'a> {
    /// With nobody there yet but those whose connections are `kept`; of those who have gone there is none.
    fn new(
        gather: &'a mut Gather,
        listener: &'a Listener,
        kept: &'a mut Vec<(KeptConnection, Option<Private<TcpStream>>)>,
    ) -> nix::Result<Self> {
        Ok(Self {
            gather,
            listener,
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            links: HashMap::new(),
            next: 0,
            buffer: vec![0; CHUNK],
            watched: false,
            short: false,
            shortage: None,
            kept,
        })
    }

    fn run(&mut self, step: &DriveStep<'_>) -> nix::Result<gather::Outcome> {
        for (who, socket) in std::mem::take(self.kept) {
            match socket {
                Some(socket) => {
                    let conn = self.watch_link(socket)?;
                    self.gather.kept(conn, who);
                }
                None => self.gather.gone(who.rank, Instant::now()),
            }
        }
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let now = Instant::now();
            if self.gather.is_about_to_expire(now) {
                self.take_what_is_there(&mut events)?;
            }
            self.gather.tick(now);
            self.act(now);
            if let Some(outcome) = self.gather.outcome(now) {
                return Ok(outcome.clone());
            }
            if (step.is_over)() {
                return Ok(Err(closed(step.name)));
            }
            let accept = self.gather.accepting() && self.shortage.is_none_or(|until| now >= until);
            self.watch(accept)?;
            let wake = self.shortage.filter(|_| !accept).map_or(self.gather.wake(), |at| at.min(self.gather.wake()));
            self.wait(&mut events, EpollTimeout::from(millis(until(wake, now))))?;
        }
    }

    /// Waits until something happens, and takes it. `false`: nothing has.
    fn wait(&mut self, events: &mut [EpollEvent; EVENTS], limit: EpollTimeout) -> nix::Result<bool> {
        let count = match self.epoll.wait(events, limit) {
            Err(Errno::EINTR) => 0,
            result => result?,
        };
        for event in &events[..count] {
            match event.data() {
                LISTENER => self.accept()?,
                conn => self.ready(conn, event.events()),
            }
        }
        Ok(count > 0)
    }

    /// The time is over. This thread may have been held up, and not have seen who came meanwhile; or there are more of
    /// them than one look takes. Strangers keep it no longer than [`SETTLE`] or, on a busy host, than two looks for
    /// each rank take: in that time a thread may have run for a moment only.
    fn take_what_is_there(&mut self, events: &mut [EpollEvent; EVENTS]) -> nix::Result<()> {
        let end = Instant::now() + SETTLE;
        let mut looks = 2 * self.gather.ranks();
        self.watch(self.gather.accepting())?;
        while self.wait(events, EpollTimeout::ZERO)? && (looks > 0 || Instant::now() < end) {
            looks = looks.saturating_sub(1);
        }
        Ok(())
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

    /// Accepts some of those who wait; the rest at the next wait.
    fn accept(&mut self) -> nix::Result<()> {
        for _ in 0..ACCEPTS {
            if !self.gather.accepting() {
                break;
            }
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
            let silence = self.gather.silence();
            // There are no probes while a beat is on its way.
            let watched = host::probe(&socket, silence).and_then(|()| host::demand_room(&socket, silence));
            if prepared.is_err() || watched.is_err() {
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
                RootAction::Send { conn, shared, own } => {
                    if let Some(link) = self.links.get_mut(&conn) {
                        link.out.push(shared);
                        link.out.push(own.into());
                    }
                    self.flush(conn, now);
                }
                RootAction::Keep(conn, who) => {
                    let socket = self.links.remove(&conn).map(|link| link.socket);
                    // With its descriptor at the latest.
                    socket.iter().for_each(|socket| _ = self.epoll.delete(socket));
                    self.kept.push((who, socket));
                }
                RootAction::Close(conn) => {
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
                // What it said before it went may be why.
                if let Some(link) = self.links.remove(&conn) {
                    read_some(&link.socket, &mut self.buffer, |bytes| self.gather.received(conn, bytes, now));
                }
                self.gather.closed(conn, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::rendezvous::job::Job;
    use crate::comm::rendezvous::wire::{self, encode_request, Sender};
    use std::io::Write;
    use std::sync::Arc;

    /// Rank 0 of a job that has so many ranks and whose time is over, if `is_late`.
    fn late_root(listener: &Listener, nranks: u32, is_late: bool) -> Gather {
        let (token, timeout) = (listener.token(), Duration::from_secs(60));
        let addresses = (0..nranks).map(|_| Some(listener.address())).collect();
        let sender = Sender { token, step: 1, name: "connect", rank: 0, nranks };
        let request = encode_request(&sender, Ok(b""), b"").unwrap();
        let begun = Instant::now() - if is_late { timeout } else { Duration::ZERO };
        let job = Job { addresses, token, timeout, silence: timeout };
        Gather::new(Arc::new(job), 1, "connect", request, None, begun)
    }

    /// Its thread was held up until then, or there are more of them than one look takes.
    #[test]
    fn who_is_there_when_the_time_is_over_has_come() {
        const RANKS: u32 = 200;
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut gather = late_root(&listener, RANKS, true);
        let come = |rank| {
            let sender = Sender { token: listener.token(), step: 1, name: "connect", rank, nranks: RANKS };
            let mut socket = TcpStream::connect(listener.address()).unwrap();
            socket.write_all(&encode_request(&sender, Ok(b""), b"").unwrap()).unwrap();
            socket
        };
        let _others: Vec<_> = (1..RANKS).map(come).collect();
        let (mut kept, step) = (Vec::new(), DriveStep { name: "connect", is_over: &|| false });
        let outcome = Root::new(&mut gather, &listener, &mut kept).unwrap().run(&step).unwrap();
        assert!(outcome.is_ok(), "{outcome:?}");
    }

    /// A rank gives up, leaves unread what rank 0 has sent, and is gone when the next beat goes out: it is not taken
    /// for one that died.
    #[test]
    fn who_has_given_up_before_a_beat_is_known_by_its_word() {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut gather = late_root(&listener, 3, false);
        let sender = Sender { token: listener.token(), step: 1, name: "connect", rank: 1, nranks: 3 };
        let mut socket = TcpStream::connect(listener.address()).unwrap();
        socket.write_all(&encode_request(&sender, Ok(b""), b"").unwrap()).unwrap();
        let (mut kept, mut events) = (Vec::new(), [EpollEvent::empty(); EVENTS]);
        let mut root = Root::new(&mut gather, &listener, &mut kept).unwrap();
        root.take_what_is_there(&mut events).unwrap();
        let beat = |root: &mut Root<'_>| {
            let now = Instant::now();
            root.links.get_mut(&0).unwrap().out.push(Arc::new([wire::BEAT]));
            root.flush(0, now);
        };
        beat(&mut root);
        let mut some = [0; 8];
        while socket.peek(&mut some).unwrap() == 0 {}
        socket.write_all(&[wire::EXPIRED]).unwrap();
        // With a reset, as something is unread.
        drop(socket);
        std::thread::sleep(Duration::from_millis(50));
        beat(&mut root);
        let now = Instant::now() + Duration::from_secs(60);
        root.gather.tick(now);
        root.act(now);
        let outcome = root.gather.outcome(now + Duration::from_secs(60));
        let Some(Err(failure)) = outcome else { panic!("{outcome:?}") };
        assert!(failure.sentence.contains("rank 1 (127.0.0.1"), "{}", failure.sentence);
        assert!(failure.sentence.contains("gave up after 60 s"), "{}", failure.sentence);
    }

    #[test]
    fn many_who_wait_are_accepted_in_turns_between_looks_at_the_clock() {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut gather = late_root(&listener, 2, false);
        let mut kept = Vec::new();
        let mut root = Root::new(&mut gather, &listener, &mut kept).unwrap();
        let waiting: Vec<_> = (0..ACCEPTS + 10).map(|_| TcpStream::connect(listener.address()).unwrap()).collect();
        root.accept().unwrap();
        assert_eq!(root.next, ACCEPTS as Conn);
        root.accept().unwrap();
        assert_eq!(root.next, waiting.len() as Conn);
    }
}
