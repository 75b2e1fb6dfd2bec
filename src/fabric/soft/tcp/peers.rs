//! The other ranks, as far as there is anything to do with them by TCP.
//!
//! A rank's own state is some 8 KiB, and on one host nobody uses any of it: each is made when an operation goes to its
//! rank or a connection comes from there, and stays until the end.

use super::peer::Peer;
use super::PeerInfo;
use crate::fabric::World;
use crate::sys::sync::Mutex;
use std::sync::OnceLock;

/// What `join` learned, and what has come of it.
pub struct Peers {
    /// This rank among all.
    pub world: World,
    places: Box<[Place]>,
    /// Nobody is added any more; held while somebody is.
    closed: Mutex<bool>,
}

/// Of one rank.
struct Place {
    info: PeerInfo,
    peer: OnceLock<Box<Peer>>,
}

impl Peers {
    /// Nobody is there yet; `infos[r]` is of rank r.
    pub fn new(world: World, infos: Vec<PeerInfo>) -> Self {
        let places = infos.into_iter().map(|info| Place { info, peer: OnceLock::new() }).collect();
        Self { world, places, closed: Mutex::default() }
    }

    /// A rank, if it is there.
    #[inline]
    pub fn get(&self, rank: u32) -> Option<&Peer> {
        Some(self.places.get(rank as usize)?.peer.get()?)
    }

    /// A rank, which `make` makes if it is not there. `None`: there is no such rank, or the end has come.
    #[inline]
    pub fn get_or_make(&self, rank: u32, make: impl FnOnce(PeerInfo) -> Peer) -> Option<&Peer> {
        self.get(rank).or_else(|| self.add(rank, make))
    }

    #[cold]
    fn add(&self, rank: u32, make: impl FnOnce(PeerInfo) -> Peer) -> Option<&Peer> {
        let place = self.places.get(rank as usize)?;
        let closed = self.closed.lock();
        match *closed {
            // Somebody else may have been first.
            true => self.get(rank),
            false => Some(place.peer.get_or_init(|| Box::new(make(place.info.clone())))),
        }
    }

    /// Those that are there, by rank.
    pub fn all(&self) -> impl Iterator<Item = &Peer> {
        self.some(0, self.places.len())
    }

    /// Those that are there of `count` ranks from `first` on.
    pub fn some(&self, first: usize, count: usize) -> impl Iterator<Item = &Peer> {
        self.places.iter().skip(first).take(count).filter_map(|place| place.peer.get().map(Box::as_ref))
    }

    /// Nobody comes any more: who is there now is all that there will be.
    pub fn close(&self) {
        *self.closed.lock() = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::tcp::Gpu;
    use std::cell::Cell;
    use std::sync::Arc;

    #[test]
    fn a_rank_is_made_once_when_it_is_asked_for_and_none_at_the_end() {
        let info = || PeerInfo { addresses: Vec::new(), token: [0; 16], health: Arc::default() };
        let peers = Peers::new(World { rank: 0, nranks: 3 }, (0..3).map(|_| info()).collect());
        let (made, gpu) = (Cell::new(0), Arc::<Gpu>::default());
        let ask = |rank| {
            let make = |info| {
                made.set(made.get() + 1);
                Peer::new(rank, info, 3, (&gpu, &Arc::default()), false)
            };
            peers.get_or_make(rank, make).map(|peer| peer.rank)
        };
        assert!(peers.all().next().is_none() && peers.get(1).is_none());
        assert_eq!([ask(1), ask(1), ask(3)], [Some(1), Some(1), None]);
        assert_eq!((made.get(), peers.get(1).is_some()), (1, true));
        peers.close();
        assert_eq!([ask(2), ask(1)], [None, Some(1)]);
        assert_eq!((made.get(), peers.all().map(|p| p.rank).collect::<Vec<_>>()), (1, vec![1]));
        assert_eq!((peers.some(0, 1).count(), peers.some(1, 2).count()), (0, 1));
    }
}
