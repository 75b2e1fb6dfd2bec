//! The ranks of this host that have asked for this rank's inbox, or answered: what each says of itself.

use crate::fabric::soft::status::PeerStatus;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

/// By rank.
pub struct Neighbours(Box<[OnceLock<Arc<PeerStatus>>]>);

impl Neighbours {
    /// None known yet of `nranks`.
    pub fn new(nranks: usize) -> Self {
        Self((0..nranks).map(|_| OnceLock::new()).collect())
    }

    /// How many there may be, this rank among them.
    pub fn ranks(&self) -> usize {
        self.0.len()
    }

    /// What this rank says of itself, if it has been heard of.
    #[inline]
    pub fn get(&self, rank: u32) -> Option<&Arc<PeerStatus>> {
        self.0.get(rank as usize)?.get()
    }

    /// Takes what rank `rank` sent with its probe or answer. `None`: it is not what its `token` promises.
    pub fn meet(&self, rank: u32, file: OwnedFd, token: &[u8; 16]) -> Option<&Arc<PeerStatus>> {
        let place = self.0.get(rank as usize)?;
        if place.get().is_none() {
            match PeerStatus::attach(file.as_fd(), self.0.len(), token) {
                Ok(status) => drop(place.set(Arc::new(status))),
                Err(e) => log::info!("rank {rank}: {}", e.message()),
            }
        }
        place.get()
    }

    /// Those that were met, with their ranks.
    pub fn met(&self) -> impl Iterator<Item = (u32, &Arc<PeerStatus>)> {
        (0..).zip(&self.0).filter_map(|(rank, status)| Some((rank, status.get()?)))
    }
}
