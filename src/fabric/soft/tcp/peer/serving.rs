//! The connections that a peer opened: taken in, and served by whoever finds something on them.

use super::*;

impl Tcp {
    /// Takes a connection that a peer opened and proved to be its own.
    pub(in super::super) fn serve_new(&self, peer: &Peer, world: &World, fd: OwnedFd, hello: Hello) {
        let token = Source::Serving(peer.rank, hello.stripe as usize).token();
        let answer = Hello { answer: true, token: peer.info.token, from: world.rank, to: hello.from, ..hello }.emit();
        let interest = libc::EPOLLIN as u32;
        let raw = fd.as_raw_fd();
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
            *peer.serving.seat(stripe).lock() = None;
        }
    }

    /// Serves a connection; without `io`, only what needs no system call.
    pub(in super::super) fn serve_event(&self, peer: &Peer, stripe: usize, bits: u32, io: bool) -> bool {
        let must_read = bits & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
        let seat = peer.serving.seat(stripe);
        let mut moved = false;
        for _ in 0..ROUNDS {
            seat.again.store(true, Ordering::Release);
            fence(Ordering::SeqCst);
            // Whoever has it looks again.
            let Some(mut guard) = seat.try_lock() else { return moved };
            seat.again.store(false, Ordering::Release);
            fence(Ordering::SeqCst);
            let Some(conn) = guard.as_mut() else { return moved };
            let outcome = self.serve(peer, conn, stripe, must_read, io);
            let staging = outcome.is_ok() && conn.is_staging();
            self.note_served(peer, &mut conn.noted, staging);
            if outcome.is_err() {
                *guard = None;
            }
            drop(guard);
            self.gpu.settle(&self.pollers[0]);
            match outcome {
                Ok(m) => moved |= m,
                Err(()) => {
                    self.nudge(peer);
                    return true;
                }
            }
            fence(Ordering::SeqCst);
            if !seat.again.load(Ordering::Acquire) {
                return moved;
            }
        }
        self.gpu.renew();
        self.pollers[0].arm_flush(FLUSH);
        moved
    }

    /// `Err`: the connection is over.
    fn serve(&self, peer: &Peer, conn: &mut Inbound, stripe: usize, must_read: bool, io: bool) -> Result<bool, ()> {
        let advanced = peer.serving.advance(conn, stripe, &self.registry, must_read, io);
        if let Some(e) = peer.serving.take_fault() {
            peer.fail(e.context(format!("from rank {}", peer.rank)));
            return Err(());
        }
        match advanced {
            Ok(Outcome::Open(moved)) => {
                let wanted = conn.wanted();
                if conn.interest != wanted {
                    conn.interest = wanted;
                    let token = Source::Serving(peer.rank, stripe).token();
                    let poller = self.poller_of(peer.rank, stripe, SERVING);
                    let _ = poller.change(conn.fd().as_raw_fd(), wanted, token);
                }
                return Ok(moved);
            }
            Ok(Outcome::Closed) => peer.left.store(true, Ordering::Release),
            Err(e) => {
                let fault = matches!(e.kind(), std::io::ErrorKind::Other) || e.raw_os_error() == Some(libc::EFAULT);
                if !peer.left.load(Ordering::Acquire) {
                    let error = peer.lost(stripe, &e);
                    if fault {
                        // Ours alone: what the peer reads went away under it. It sees a reset.
                        log::warn!("{}", error.message());
                    } else {
                        peer.fail(error);
                    }
                }
            }
        }
        Err(())
    }

    /// Notes whether a connection that is served waits for this rank's GPU. The caller holds it.
    fn note_served(&self, peer: &Peer, noted: &mut bool, staging: bool) {
        if std::mem::replace(noted, staging) != staging {
            match staging {
                true => peer.serving_staging.fetch_add(1, Ordering::AcqRel),
                false => peer.serving_staging.fetch_sub(1, Ordering::AcqRel),
            };
            self.count_staging(staging);
        }
    }
}
