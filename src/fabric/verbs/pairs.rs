//! The queue pairs of one context, and what keeps them connected.

use super::iwarp::Connections;
use oxygin_ffi::verbs::Qp;

/// Queue pairs of one context.
#[derive(Default)]
pub struct Pairs {
    /// By peer; the one to this rank itself is its own peer, but for iWARP. `None`: a peer that is left out.
    pub by_peer: Vec<Option<Qp>>,
    /// iWARP: the far end of the connection to this rank itself. A connection has two ends there, as TCP has.
    pub own_end: Option<Qp>,
    /// iWARP: what holds the connections. Ended after the queue pairs, as librdmacm demands.
    pub connections: Option<Connections>,
}

impl Pairs {
    /// The queue pair to a peer.
    pub fn to(&self, peer: u32) -> Option<&Qp> {
        self.by_peer.get(peer as usize)?.as_ref()
    }

    /// Peers that there are queue pairs to.
    pub fn peers(&self) -> impl Iterator<Item = (u32, &Qp)> {
        (0..).zip(&self.by_peer).filter_map(|(peer, qp)| Some((peer, qp.as_ref()?)))
    }

    /// Where messages of each peer arrive. None is left out where signals are messages.
    pub fn receivers(&self, rank: u32) -> Vec<&Qp> {
        let at = |(peer, qp)| self.own_end.as_ref().filter(|_| peer == rank).unwrap_or(qp);
        self.peers().map(at).collect()
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        if let Some(connections) = &self.connections {
            connections.close();
        }
    }
}
