//! A communicator closes: what was promised is sent to all peers side by side, and what they still send is thrown away;
//! then every connection goes.

use super::*;

/// How long one wait for room lasts at most: a connection may have room without saying so.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long `close` goes on: until no peer has taken anything for a while.
struct Patience {
    /// When it is over in any case.
    end: Instant,
    last: Instant,
    linger: Duration,
}

impl Patience {
    fn new(now: Instant, timing: &sock::Timing) -> Self {
        Self { end: now + timing.leave, last: now, linger: timing.linger }
    }

    /// Somebody took something.
    fn moved(&mut self, now: Instant) {
        self.last = now;
    }

    fn left(&self, now: Instant) -> Duration {
        self.end.min(self.last + self.linger).saturating_duration_since(now)
    }
}

/// A peer that takes leave. Its link stays locked, so that nothing gets behind the FIN.
struct Draining<'a> {
    peer: &'a Peer,
    link: MutexGuard<'a, Initiator>,
    is_self: bool,
    unfinished: bool,
    /// It gets what is left for it, and the answers that it owes are taken from it.
    sends: bool,
}

impl Draining<'_> {
    /// Sends what the kernel takes and throws away what comes. Returns whether that was anything.
    fn advance(&mut self) -> bool {
        self.link.conns.iter_mut().for_each(|c| c.blocked = false);
        let moved = self.sends.then(|| self.link.pump());
        let Some(Ok(moved)) = moved else {
            self.sends = false;
            return false;
        };
        let came = self.link.throw_answers_away();
        self.sends = self.has_unsent() || self.link.owing().next().is_some();
        moved | came
    }

    fn has_unsent(&self) -> bool {
        self.link.unsent().next().is_some()
    }
}

impl Tcp {
    /// Sends peers what was promised, sends its FIN and closes every connection. Holds their links meanwhile: nobody
    /// else drives a closed communicator.
    pub(in super::super) fn close_peers<'a>(&self, peers: impl Iterator<Item = &'a Peer>, own: u32) {
        let mut left: Vec<_> = peers.map(|p| self.begin_close(p, p.rank == own)).collect();
        let mut patience = Patience::new(Instant::now(), &self.timing);
        loop {
            let moved = left.iter_mut().fold(false, |moved, l| l.advance() | moved);
            // Whoever has all of it need not wait for the others.
            let (late, done): (Vec<_>, Vec<_>) = left.into_iter().partition(|l| l.sends);
            done.into_iter().for_each(|l| self.end_close(l));
            left = late;
            left.iter().for_each(|l| l.peer.serving.throw_away());
            let now = Instant::now();
            if moved {
                patience.moved(now);
            }
            let time = patience.left(now);
            if left.is_empty() || time.is_zero() {
                break;
            }
            let (unsent, owing) = (left.iter().flat_map(|l| l.link.unsent()), left.iter().flat_map(|l| l.link.owing()));
            sock::wait_for(unsent, owing, time.min(LOOK_EVERY));
        }
        let ranks: Vec<_> = left.iter().filter(|l| l.has_unsent()).map(|l| l.peer.rank.to_string()).collect();
        if !ranks.is_empty() {
            let sock::Timing { linger, leave, .. } = self.timing;
            log::warn!(
                "rank {own} closes its communicator although not everything was taken by rank {}: nothing moved for \
                 {linger:?}, or {leave:?} have passed",
                ranks.join(", rank ")
            );
        }
        left.into_iter().for_each(|l| self.end_close(l));
    }

    /// Gives up what has not begun.
    fn begin_close<'a>(&self, peer: &'a Peer, is_self: bool) -> Draining<'a> {
        // Nobody beats any more.
        peer.life.lock().end();
        let mut link = peer.link.lock();
        self.take_inbox(peer, &mut link);
        let mut unfinished = link.is_busy() && link.phase != Phase::Up;
        let parts = link.phase == Phase::Up && !peer.info.health.has_failed();
        if parts {
            unfinished |= link.part();
        }
        Draining { peer, link, is_self, unfinished, sends: parts && !is_self }
    }

    fn end_close(&self, drain: Draining) {
        let Draining { peer, mut link, is_self, mut unfinished, .. } = drain;
        unfinished |= link.is_busy();
        link.cut_off();
        self.note_link(peer, false);
        drop(link);
        if unfinished && !is_self {
            let rank = peer.rank;
            peer.fail(Error::usage(format!("the communicator was closed with operations to rank {rank} unfinished")));
        }
        peer.serving.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_from_the_last_byte_and_has_an_end() {
        let s = Duration::from_secs;
        let timing = sock::Timing { linger: s(2), leave: s(10), ..Default::default() };
        let start = Instant::now();
        let mut patience = Patience::new(start, &timing);
        assert_eq!(patience.left(start), s(2));
        assert_eq!(patience.left(start + s(3)), s(0));
        patience.moved(start + s(1));
        assert_eq!(patience.left(start + s(1)), s(2));
        patience.moved(start + s(9));
        assert_eq!((patience.left(start + s(9)), patience.left(start + s(10))), (s(1), s(0)));
    }
}
