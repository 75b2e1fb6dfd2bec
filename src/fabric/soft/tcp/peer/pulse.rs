//! The heartbeat: each rank says a word to those it has connections with, and gives up whoever is silent for too long.

use super::super::wire::HELLO;
use super::*;
use std::net::SocketAddr;

/// Peers that have their turn at one strike: a few system calls for each.
const AT_ONCE: usize = 8;

impl Tcp {
    /// Strikes after which all of `peers` have had their turn.
    pub(in super::super) fn turns_of(peers: usize) -> u32 {
        peers.div_ceil(AT_ONCE) as u32
    }

    /// Beats, if it is time to. Returns that no data moved.
    pub(in super::super) fn pulse(&self) -> bool {
        if !self.clock.has_struck() {
            return false;
        }
        if let Some(peers) = self.peers.get() {
            let first = self.clock.turn() as usize * AT_ONCE;
            peers.some(first, AT_ONCE).for_each(|p| self.pulse_of(p, &peers.world));
        }
        self.clock.wind();
        false
    }

    fn pulse_of(&self, peer: &Peer, world: &World) {
        if peer.left.load(Ordering::Acquire) {
            return peer.life.lock().end();
        }
        let (mut up, mut gave) = (None, false);
        self.drive(peer, |link| {
            up = Some(link.phase == Phase::Up);
            gave = link.give_buffers_back();
            true
        });
        if gave {
            self.gpu.renew();
        }
        let (failed, served) = (peer.info.health.has_failed(), peer.serving.stripes() > 0);
        let mut life = peer.life.lock();
        // Whoever has the link is not asked: as it was.
        life.wanted = (served || up.unwrap_or(life.wanted)) && !failed;
        let silent = self.beat(peer, world, &mut life);
        drop(life);
        if silent >= self.clock.patience() && !failed {
            self.fail(peer, peer.is_silent(&self.timing));
            self.nudge(peer);
            self.part_from(peer);
        }
    }

    fn beat(&self, peer: &Peer, world: &World, life: &mut Lines) -> u32 {
        let connect = |attempt: u32| sock::connect(self.line_address(peer, attempt), None, &self.timing);
        life.beat(connect, &self.life_hello(peer, world), peer.heard.swap(false, Ordering::Relaxed))
    }

    /// Where a life line goes: as data connections do, since a link-local address counts the interfaces of the peer's
    /// host.
    fn line_address(&self, peer: &Peer, attempt: u32) -> SocketAddr {
        self.with_dialer(peer, |dialer| dialer.address(attempt, 0))
    }

    fn life_hello(&self, peer: &Peer, world: &World) -> [u8; HELLO] {
        let (token, silence) = (peer.info.token, self.timing.silence_ms());
        let World { rank: from, nranks } = *world;
        Hello { answer: false, token, from, to: peer.rank, nranks, stripe: 0, stripes: 0, silence }.emit()
    }

    /// Takes a life line that a peer opened.
    pub(in super::super) fn admit_life(&self, peer: &Peer, fd: Private<OwnedFd>, hello: &Hello) {
        self.pollers[0].remove(fd.as_raw_fd());
        self.clock.run();
        self.clock.hurry(Duration::from_millis(hello.silence.into()));
        peer.life.lock().admit(fd);
    }

    /// Ends the connections of a peer that has failed, so that it learns of it if it lives after all.
    fn part_from(&self, peer: &Peer) {
        peer.life.lock().end();
        for stripe in 0..peer.serving.stripes() {
            let mut guard = peer.serving.slot(stripe).lock();
            if let Some(mut conn) = guard.take() {
                self.note_served(peer, &mut conn.noted, false);
            }
        }
    }
}

impl Peer {
    fn is_silent(&self, timing: &sock::Timing) -> Error {
        let (rank, at, limit) = (self.rank, self.info.addresses[0], timing.silence.as_secs_f32());
        Error::remote(format!(
            "rank {rank} at {at} has said nothing for {limit} s: it is stopped or out of reach, or its process has \
             ended and a child of it holds the connections; OXYGIN_PEER_TIMEOUT sets how long to wait"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::lane::Health;

    #[test]
    fn a_life_line_goes_to_a_link_local_peer_through_the_interfaces_of_this_host() {
        let all = |list: &[&str]| list.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let tcp = Tcp::open(&all(&["127.0.0.1:0"]), [0; 16], 1, Arc::default()).unwrap();
        tcp.links.set(all(&["[fe80::1%2]:0", "[fe80::2%3]:0"])).unwrap();
        let info = |at| PeerInfo { addresses: all(&[at]), token: [0; 16], health: Arc::<Health>::default() };
        tcp.join(World { rank: 0, nranks: 2 }, vec![info("127.0.0.1:80"), info("[fe80::9%77]:80")]).unwrap();
        let peer = tcp.make_peer(1).unwrap();
        let tried = [0, 1, 2].map(|attempt| tcp.line_address(peer, attempt));
        assert_eq!(all(&["[fe80::9%2]:80", "[fe80::9%3]:80", "[fe80::9%2]:80"]), tried);
    }
}
