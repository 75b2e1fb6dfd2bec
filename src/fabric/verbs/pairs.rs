//! The queue pairs of one context, and what keeps them connected.

use super::iwarp::Connections;
use oxygin_ffi::verbs::Qp;

/// Queue pairs of one context.
#[derive(Default)]
pub struct Pairs {
    /// By peer; the one to this rank itself is its own peer, but for iWARP.
    pub by_peer: Vec<Qp>,
    /// iWARP: the far end of the connection to this rank itself. A connection has two ends there, as TCP has.
    pub own_end: Option<Qp>,
    /// iWARP: what holds the connections. Ended after the queue pairs, as librdmacm demands.
    pub connections: Option<Connections>,
}

impl Pairs {
    /// Where messages of each peer arrive.
    pub fn receivers(&self, rank: u32) -> Vec<&Qp> {
        let at = |(peer, qp)| self.own_end.as_ref().filter(|_| peer == rank).unwrap_or(qp);
        (0..).zip(&self.by_peer).map(at).collect()
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        if let Some(connections) = &self.connections {
            connections.close();
        }
    }
}
