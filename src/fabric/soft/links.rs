//! The links of a rank, by peer.

use super::atomic::AtomicRequest;
use super::domain::Domain;
use super::gpu::{Engine, Senders, Source};
use super::lane::Health;
use super::link::Link;
use super::tcp::PeerInfo;
use crate::error::{Error, Result};
use crate::rma::seq::Seq;
use std::ops::Deref;
use std::sync::Arc;

/// A [`Domain`] and a link from it to each rank.
pub struct Links {
    domain: Domain,
    all: Box<[Link]>,
}

impl Links {
    /// Links that nobody has used.
    pub fn new(domain: Domain) -> Result<Self> {
        let health: Vec<_> = domain.hellos.iter().map(|_| Arc::new(Health::default())).collect();
        let peers = domain
            .hellos
            .iter()
            .zip(&health)
            .map(|(h, health)| PeerInfo { addresses: h.tcp.clone(), token: h.token, health: health.clone() })
            .collect();
        domain.tcp().join(domain.world, peers)?;
        let all = health.into_iter().enumerate().map(|(r, h)| Link::new(r as u32, h)).collect();
        Ok(Self { domain, all })
    }

    /// The link to a rank.
    #[inline(always)]
    pub fn link(&self, peer: u32) -> &Link {
        &self.all[peer as usize]
    }

    /// All of them, by rank.
    pub fn links(&self) -> &[Link] {
        &self.all
    }

    /// The engines of other ranks of this process that have operations of this rank's, by rank.
    pub fn engines_of_peers(&self) -> Vec<(u32, Arc<Engine>)> {
        let others = self.all.iter().filter_map(|link| Some((link.peer, link.engine_of_peer()?.clone())));
        others.filter(|(_, engine)| !Arc::ptr_eq(engine, &self.engine)).collect()
    }
}

impl Deref for Links {
    type Target = Domain;

    #[inline(always)]
    fn deref(&self) -> &Domain {
        &self.domain
    }
}

impl Senders for Links {
    fn acknowledge(&self, rank: u32, context: u32, number: Seq) {
        self.link(rank).acknowledge(self, context, number);
    }

    fn answer(&self, rank: u32, context: u32, request: &AtomicRequest, value: u64) {
        self.link(rank).answer_atomic(self, context, request, value);
    }

    #[cold]
    fn refuse(&self, source: Source, why: Error) {
        match source.by_tcp {
            true => self.tcp().refuse(source.rank, source.context),
            false => self.link(source.rank).refuse(self, source.context, why),
        }
    }
}
