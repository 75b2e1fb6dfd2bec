//! Options of connections that devices of one vendor agree on beyond what the standard has ("enhanced connection
//! establishment"). What they mean is the vendor's affair: a device takes a part of what it is offered, and says which
//! once its queue pair receives. So of two ends one goes first.

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
    /// Has a queue pair connect with what the other end has taken. A device that refuses that connects without, as both
    /// ends then are by the standard at least.
    pub fn set(self, qp: &Qp, label: &str, peer: usize) {
        if let Self::On(ece) = self {
            match qp.set_ece(ece) {
                Ok(()) => {
                    log::debug!("{label}, rank {peer}: options {:#x} of vendor {:#x}", ece.options, ece.vendor_id)
                }
                Err(e) => log::info!("{label}, rank {peer}: options {:#x} cannot be set: {e}", ece.options),
            }
        }
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
