//! Whose queues device code is to write into, as a GIN table's `getProperties` says it: NCCL reads that before there is
//! a communicator, so each rank finds it out alone, from its configuration.

use crate::config::{Config, EngineChoice};
use nccl_plugin_api::{DEVICE_GIN_GDAKI, DEVICE_GIN_PROXY};

/// Whose queues they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOwner {
    /// NCCL's: its proxy drains them and calls the tables' data operations.
    Nccl,
    /// The plugin's: NCCL takes device code's queues from the device handle as they are. Device type 3.
    Plugin,
}

/// Whose they are, and the variables that decided it, for the log.
///
/// `is_v14`: the table is GIN v14 (NCCL 2.30.7 and later), where NCCL skips a plugin whose queues are NCCL's and drives
/// its proxy over the RMA table. `rma_in_use`: a communicator of this process has this library's RMA table, which those
/// versions set up before they ask here.
///
/// `NCCL_GIN_TYPE` decides where `OXYGIN_ENGINE` does not. Where both leave it open: up to 2.30.4 the queues are the
/// plugin's, because NCCL's own proxy takes one descriptor of a queue a pass there, and refuses depths. From 2.30.7 on
/// they are NCCL's, which suits kernels of every kind, unless only the GIN table was given to NCCL: that would skip it.
pub fn queue_owner(config: &Config, is_v14: bool, rma_in_use: bool) -> (QueueOwner, &'static str) {
    use QueueOwner::{Nccl, Plugin};
    match (config.engine, config.gin_type) {
        (EngineChoice::Nccl, _) => (Nccl, "OXYGIN_ENGINE=nccl"),
        (EngineChoice::Own | EngineChoice::GdakiSoft | EngineChoice::Gdaki, _) => (Plugin, "OXYGIN_ENGINE"),
        (EngineChoice::Auto, Some(DEVICE_GIN_PROXY)) => (Nccl, "NCCL_GIN_TYPE=2"),
        (EngineChoice::Auto, Some(DEVICE_GIN_GDAKI)) => (Plugin, "NCCL_GIN_TYPE=3"),
        // Of no type that this library has: NCCL skips it, whatever it says.
        (EngineChoice::Auto, Some(_)) => (Nccl, "NCCL_GIN_TYPE"),
        (EngineChoice::Auto, None) if !is_v14 => (Plugin, "NCCL up to 2.30.4"),
        (EngineChoice::Auto, None) if rma_in_use => (Nccl, "NCCL_RMA_PLUGIN names this library, too"),
        (EngineChoice::Auto, None) => (Plugin, "no NCCL_RMA_PLUGIN that names this library"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EngineChoice::*;

    /// Every combination of what decides: the table in the README says the same (`the_readme_has_this_table`).
    #[test]
    fn every_combination_has_an_owner() {
        let of = |engine, gin_type, is_v14, rma| {
            queue_owner(&Config { engine, gin_type, ..Config::default() }, is_v14, rma).0 == QueueOwner::Plugin
        };
        for (is_v14, rma) in [(false, false), (false, true), (true, false), (true, true)] {
            for gin_type in [None, Some(2), Some(3), Some(4)] {
                assert!(!of(Nccl, gin_type, is_v14, rma));
                assert!(of(Own, gin_type, is_v14, rma) && of(GdakiSoft, gin_type, is_v14, rma));
                assert!(of(Gdaki, gin_type, is_v14, rma));
            }
            assert_eq!(of(Auto, None, is_v14, rma), !is_v14 || !rma);
            assert!(!of(Auto, Some(2), is_v14, rma) && of(Auto, Some(3), is_v14, rma));
            assert!(!of(Auto, Some(4), is_v14, rma));
        }
    }
}
