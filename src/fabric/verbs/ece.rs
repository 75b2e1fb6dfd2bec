//! Options of connections that devices of one vendor agree on beyond what the standard has ("enhanced connection
//! establishment"). What they mean is the vendor's affair: a device takes a part of what it is offered, and says which
//! once its queue pair receives. So of two ends one goes first.

use crate::error::{Error, Result};
use oxygin_ffi::verbs::types::ibv_ece;
use oxygin_ffi::verbs::Qp;

/// How far a queue pair has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Agreed {
    /// There is nothing to agree on.
    #[default]
    No,
    /// It has taken options of the other end's, and receives.
    Receives,
    /// The other end has taken these.
    On(ibv_ece),
}

impl Agreed {
    /// Has a queue pair connect with what the other end has taken. Where its device refuses that, the ends differ in
    /// what only their vendor knows, and are not to be connected.
    pub fn set(self, qp: &Qp) -> Result<()> {
        let Self::On(ece) = self else { return Ok(()) };
        qp.set_ece(ece).map_err(|e| {
            Error::system(format!(
                "queue pair {} with the options {:#x} of vendor {:#x}, which the other end has taken: {e}; set \
                 NCCL_IB_ECE_ENABLE=0 on all ranks",
                qp.number(),
                ece.options,
                ece.vendor_id
            ))
        })
    }
}

/// Bytes of what is told to one peer.
pub fn slice_len(contexts: usize) -> usize {
    16 * contexts
}

/// Whether a queue pair has options of its own, and is to connect with those that the other end has.
pub fn takes(qp: &Qp, offered: Option<ibv_ece>) -> bool {
    offered.is_some_and(|ece| qp.query_ece().is_some() && qp.set_ece(ece).is_ok())
}
