//! The connections that a peer opened: taken in, and served by whoever finds something on them.

use super::super::order::EXPRESS;
use super::*;

impl Tcp {
    /// Takes a connection that a peer opened and proved to be its own.
    pub(in super::super) fn serve_new(&self, peer: &Peer, world: &World, fd: Private<OwnedFd>, hello: Hello) {
        let token = EventSource::Serving(peer.rank, hello.stripe as usize).token();
        let silence = self.timing.silence_ms();
        let answer =
            Hello { answer: true, token: peer.info.token, from: world.rank, to: hello.from, silence, ..hello }.emit();
        let interest = libc::EPOLLIN as u32;
        let raw = fd.as_raw_fd();
        self.clock.run();
        self.clock.hurry(Duration::from_millis(hello.silence.into()));
        if self.closed.load(Ordering::Acquire) || sock::send_whole(&fd, &answer).is_err() {
            return;
        }
        let stripe = hello.stripe as usize;
        let poller = self.poller_of(peer.rank, stripe, SERVING);
        // Held until it is watched: nobody serves it before, and a second one finds it there.
        if !std::ptr::eq(poller, &self.pollers[0]) {
            self.pollers[0].remove(raw);
        }
        let watched = match std::ptr::eq(poller, &self.pollers[0]) {
            true => poller.change(raw, 0, token),
            false => poller.add(raw, 0, token),
        };
        if !peer.serving.admit(fd, stripe, hello.stripes as usize, interest) {
            log::warn!("rank {} opened TCP data connection {} twice: dropped", peer.rank, hello.stripe);
        } else if watched.and_then(|()| poller.change(raw, interest, token)).is_err() {
            *peer.serving.slot(stripe).lock() = None;
        }
    }

    /// Serves a connection; without `io`, only what needs no system call.
    pub(in super::super) fn serve_event(&self, peer: &Peer, stripe: usize, bits: u32, io: bool) -> bool {
        let must_read = bits & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
        let slot = peer.serving.slot(stripe);
        let mut moved = false;
        for _ in 0..ROUNDS {
            slot.again.store(true, Ordering::Release);
            fence(Ordering::SeqCst);
            // Whoever has it looks again.
            let Some(mut guard) = slot.try_lock() else { return moved };
            slot.again.store(false, Ordering::Release);
            fence(Ordering::SeqCst);
            let Some(conn) = guard.as_mut() else { return moved };
            conn.over |= bits & libc::EPOLLHUP as u32 != 0;
            let before = conn.received();
            let outcome = self.serve(peer, conn, stripe, must_read, io);
            if conn.received() != before {
                peer.note_heard();
            }
            let staging = outcome.is_ok() && conn.is_staging();
            self.note_served(peer, &mut conn.noted, staging);
            if outcome.is_err() {
                *guard = None;
            }
            drop(guard);
            self.gpu.settle(&self.pollers[0]);
            if peer.serving.was_relieved() {
                self.gpu.renew();
                self.pollers[0].arm_flush(FLUSH);
            }
            match outcome {
                Ok(m) => moved |= m,
                Err(why) => {
                    if let Some(e) = why {
                        self.fail(peer, e);
                    }
                    self.nudge(peer);
                    return true;
                }
            }
            fence(Ordering::SeqCst);
            if !slot.again.load(Ordering::Acquire) {
                return moved;
            }
        }
        self.gpu.renew();
        self.pollers[0].arm_flush(FLUSH);
        moved
    }

    /// Tells a rank that what came of a context of its found no place in GPU memory. The caller has no lock.
    #[cold]
    pub fn refuse(&self, rank: u32, context: u32) {
        if let Some(peer) = self.peer(rank).filter(|_| !self.closed.load(Ordering::Acquire)) {
            peer.serving.refuse_late(context);
            self.serve_event(peer, EXPRESS, 0, true);
        }
    }

    /// Tells the peer's failure. From then on callers take their memory for their own again, so nobody may be
    /// receiving into it: whoever does has the link, and looks at the peer's health first.
    pub(super) fn fail(&self, peer: &Peer, why: Error) {
        let _still = peer.link.lock();
        peer.fail(why);
    }

    /// `Err`: the connection is over, and with the error, if any, the peer has failed.
    fn serve(
        &self,
        peer: &Peer,
        conn: &mut Inbound,
        stripe: usize,
        must_read: bool,
        io: bool,
    ) -> Result<bool, Option<Error>> {
        let advanced = peer.serving.advance(conn, stripe, &self.registry, must_read, io);
        if let Some(e) = peer.serving.take_fault(&self.gpu) {
            return Err(Some(e.context(format!("from rank {}", peer.rank))));
        }
        match advanced {
            Ok(Outcome::Open(moved)) => {
                self.watch_served(peer, conn, stripe);
                Ok(moved)
            }
            Ok(Outcome::Parting) => {
                peer.left.store(true, Ordering::Release);
                self.watch_served(peer, conn, stripe);
                Ok(false)
            }
            Ok(Outcome::Closed) => {
                peer.left.store(true, Ordering::Release);
                Err(None)
            }
            Err(e) if peer.left.load(Ordering::Acquire) => {
                // A FIN on another connection says nothing of this one.
                let early =
                    || Error::remote(format!("{} before all that it had sent arrived", peer.has_left().message()));
                Err(conn.is_cut_off(&e).then(early))
            }
            Err(e) => {
                let error = peer.lost(stripe, &e);
                if matches!(e.kind(), std::io::ErrorKind::Other) || e.raw_os_error() == Some(libc::EFAULT) {
                    // Ours alone: what the peer reads went away under it. It sees a reset.
                    log::warn!("{}", error.message());
                    return Err(None);
                }
                Err(Some(error))
            }
        }
    }

    /// Has epoll watch for what a connection that is served waits for.
    fn watch_served(&self, peer: &Peer, conn: &mut Inbound, stripe: usize) {
        let (fd, wanted) = (conn.fd().as_raw_fd(), conn.wanted());
        if conn.interest != wanted {
            let token = EventSource::Serving(peer.rank, stripe).token();
            self.poller_of(peer.rank, stripe, SERVING).watch(fd, &mut conn.interest, wanted, token);
        }
    }

    /// Notes whether a connection that is served waits for this rank's GPU. The caller holds it.
    pub(super) fn note_served(&self, peer: &Peer, noted: &mut bool, staging: bool) {
        if std::mem::replace(noted, staging) != staging {
            match staging {
                true => peer.serving_staging.fetch_add(1, Ordering::AcqRel),
                false => peer.serving_staging.fetch_sub(1, Ordering::AcqRel),
            };
            self.count_staging(staging);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::wire::{Bell, Frame, WindowBytes, HELLO};
    use super::super::super::PeerInfo;
    use super::*;
    use crate::fabric::soft::lane::Health;
    use crate::memory::registry::{Extent, Registry};
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::atomic::AtomicU64;
    use std::sync::Arc;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn until(tcp: &Tcp, what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
            tcp.progress();
        }
    }

    /// Rank 1 of 2, and how rank 0 is doing.
    fn open(registry: Arc<Registry>) -> (Tcp, Arc<Health>) {
        let tcp = Tcp::open(&["127.0.0.1:0".parse().unwrap()], [1; 16], 1, registry).unwrap();
        let health: Arc<Health> = Arc::default();
        let info = |token| PeerInfo { addresses: tcp.addresses(), token: [token; 16], health: health.clone() };
        tcp.join(World { rank: 1, nranks: 2 }, vec![info(0), info(1)]).unwrap();
        (tcp, health)
    }

    /// A connection of rank 0, which the test plays.
    fn connect(tcp: &Tcp, stripe: u16) -> TcpStream {
        let mut peer = TcpStream::connect(tcp.addresses()[0]).unwrap();
        let hello = Hello { answer: false, token: [1; 16], from: 0, to: 1, nranks: 2, stripe, stripes: 3, silence: 0 };
        peer.write_all(&hello.emit()).unwrap();
        peer.set_nonblocking(true).unwrap();
        until(tcp, "answer", || peer.read_exact(&mut [0; HELLO]).is_ok());
        peer
    }

    #[test]
    fn a_failure_is_not_told_while_somebody_receives_into_the_callers_memory() {
        let (tcp, health) = open(Arc::default());
        let mut peer = connect(&tcp, 0);
        peer.write_all(&[0x55; 100]).unwrap();
        // What a thread holds that receives the bytes of a get.
        let link = tcp.peer(0).unwrap().link.lock();
        std::thread::scope(|s| {
            let driver = s.spawn(|| until(&tcp, "failure", || health.has_failed()));
            std::thread::sleep(Duration::from_millis(100));
            let early = health.has_failed();
            drop(link);
            driver.join().unwrap();
            assert!(!early);
        });
    }

    /// Sends until nothing is taken any more, or all is. Returns how much.
    fn send_to_the_limit(tcp: &Tcp, to: &mut TcpStream, all: &[u8]) -> usize {
        let (mut sent, mut refused) = (0, 0);
        until(tcp, "the limit", || {
            match to.write(&all[sent..]) {
                Ok(n) => (sent, refused) = (sent + n, 0),
                Err(_) => refused += 1,
            }
            refused > 1000 || sent == all.len()
        });
        sent
    }

    #[test]
    fn a_connection_that_was_not_read_for_its_signals_is_read_again() {
        // More bytes than two sockets hold: some kernels let a receive buffer grow to 32 MiB.
        const ENOUGH: usize = 1 << 20;
        let (registry, window) = (Arc::new(Registry::default()), [0, 0].map(AtomicU64::new));
        let base = window.as_ptr() as u64;
        registry.insert(1, Extent { base, len: 16 });
        let (tcp, health) = open(registry);
        let (mut express, mut middle) = (connect(&tcp, 0), connect(&tcp, 1));
        let put = |len, bell| Frame::Put { context: 0, place: WindowBytes { rkey: 1, addr: base, len }, bell }.emit();
        // Each waits for one chunk on the middle connection.
        let mut signal = put(0, Some(Bell { rkey: 1, addr: base + 8, value: 1, counted: true })).to_vec();
        signal.extend([0u32, 1, 0].iter().flat_map(|count| count.to_le_bytes()));
        let all = signal.repeat(ENOUGH);
        let mut sent = send_to_the_limit(&tcp, &mut express, &all);
        assert!(sent < all.len(), "all are taken");
        let signals = sent.div_ceil(signal.len());
        let all = &all[..signals * signal.len()];
        middle.write_all(&[&put(8, None)[..], &[0; 8]].concat()).unwrap();
        until(&tcp, "the signals", || {
            sent += express.write(&all[sent..]).unwrap_or(0);
            window[1].load(Ordering::Acquire) == signals as u64
        });
        assert!(!health.has_failed());
    }

    /// A context goes whose signals wait for a chunk that was never sent, more of them than are held: others go on.
    #[test]
    fn a_connection_that_is_full_of_signals_that_are_never_due_is_read_on() {
        const SIGNALS: u32 = 30_000;
        let (registry, window) = (Arc::new(Registry::default()), [0, 0].map(AtomicU64::new));
        let base = window.as_ptr() as u64;
        registry.insert(1, Extent { base, len: 16 });
        let (tcp, health) = open(registry);
        let (mut express, mut middle) = (connect(&tcp, 0), connect(&tcp, 1));
        let place = |len| WindowBytes { rkey: 1, addr: base, len };
        let bell = Some(Bell { rkey: 1, addr: base + 8, value: 1, counted: true });
        let mut signal = Frame::Put { context: 0, place: place(0), bell }.emit().to_vec();
        signal.extend([0u32, 1, 0].iter().flat_map(|count| count.to_le_bytes()));
        let mut all = signal.repeat(SIGNALS as usize);
        let end = Frame::End { context: 0, conns: 0b11 }.emit();
        all.extend_from_slice(&end);
        all.extend_from_slice(&Frame::Put { context: 1, place: place(8), bell: None }.emit());
        all.extend_from_slice(&7u64.to_le_bytes());
        let mut sent = send_to_the_limit(&tcp, &mut express, &all);
        middle.write_all(&end).unwrap();
        until(&tcp, "another context's put", || {
            sent += express.write(&all[sent..]).unwrap_or(0);
            window[0].load(Ordering::Acquire) == 7
        });
        assert!(!health.has_failed() && window[1].load(Ordering::Acquire) == 0);
    }
}
