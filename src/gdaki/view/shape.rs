//! How many contexts there are, and to whom they go.

use crate::error::{Error, Result};
use crate::rma::reach::is_reached;

/// The ranks and contexts of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetShape {
    /// This rank.
    pub rank: u32,
    /// All ranks: what device code indexes arrays by.
    pub ranks: u32,
    /// Only peers whose rank differs by a multiple of it are talked to; 0 and 1: all.
    pub stride: u32,
    /// Contexts.
    pub contexts: u32,
}

impl SetShape {
    /// Whether it is one.
    pub(super) fn check(&self) -> Result<()> {
        if self.contexts == 0 || self.rank >= self.ranks {
            let Self { rank, ranks, contexts, .. } = self;
            return Err(Error::argument(format!("{contexts} contexts of rank {rank} of {ranks}: no such set")));
        }
        Ok(())
    }

    /// The peers that device code talks to, itself among them, in ascending order.
    pub fn peers(&self) -> impl Iterator<Item = u32> {
        let Self { rank, ranks, stride, .. } = *self;
        (0..ranks).filter(move |&peer| is_reached(rank, peer, stride))
    }
}
