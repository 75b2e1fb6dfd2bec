//! What had arrived from all peers at some moment is applied, whoever serves their connections otherwise.

use super::super::serve::Arrived;
use super::*;

/// A connection that a peer opened, and up to where it is to be served.
pub struct Connection {
    rank: u32,
    stripe: usize,
    /// Once it was looked at.
    mark: Option<Arrived>,
}

impl Tcp {
    /// The connections that peers have opened.
    pub fn connections(&self) -> Vec<Connection> {
        let all = |peer: &Peer| {
            let rank = peer.rank;
            (0..peer.serving.stripes()).map(move |stripe| Connection { rank, stripe, mark: None })
        };
        self.peers.get().iter().flat_map(|peers| peers.all()).flat_map(all).collect()
    }

    /// Serves connections for a turn each and takes out those of which everything is applied that had arrived when
    /// this was called first. Returns whether anything moved. The caller has no lock.
    pub fn apply_arrived(&self, connections: &mut Vec<Connection>) -> bool {
        if connections.is_empty() || self.closed.load(Ordering::Acquire) {
            connections.clear();
            return false;
        }
        let mut moved = false;
        connections.retain_mut(|connection| {
            let Some(peer) = self.peer(connection.rank) else { return false };
            let slot = peer.serving.slot(connection.stripe);
            // Who has it reads, and it is looked at another time.
            let Some(guard) = slot.try_lock() else { return true };
            let Some(conn) = guard.as_ref() else { return false };
            let mut mark = *connection.mark.get_or_insert_with(|| conn.mark());
            drop(guard);
            let has_moved = self.serve_event(peer, connection.stripe, 0, true);
            moved |= has_moved;
            let Some(guard) = slot.try_lock() else { return true };
            let is_before = guard.as_ref().is_some_and(|conn| conn.is_before(&mut mark, has_moved));
            drop(guard);
            connection.mark = Some(mark);
            // Who found it in use has left this one to look again.
            moved |= slot.again.load(Ordering::Acquire) && self.serve_event(peer, connection.stripe, 0, true);
            is_before
        });
        // Copies to the GPU, and what waits for them.
        moved | self.progress()
    }

    /// Bytes from a peer that wait in sockets.
    #[cfg(test)]
    pub fn unread(&self, rank: u32) -> usize {
        let Some(peer) = self.peer(rank) else { return 0 };
        let of = |stripe| peer.serving.slot(stripe).lock().as_ref().map_or(0, Inbound::unread);
        (0..peer.serving.stripes()).map(of).sum()
    }
}
