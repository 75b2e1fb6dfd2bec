//! Whose queues device code is to write into, as a GIN table's `getProperties` says it: NCCL reads that before there is
//! a communicator, so each rank finds it out alone, from its configuration.

use crate::config::{Config, EngineChoice};
use crate::proxy::descriptor::layout::FIRST_UNKNOWN;
use nccl_plugin_api::{DEVICE_GIN_GDAKI, DEVICE_GIN_PROXY};

/// Whose queues they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOwner {
    /// NCCL's: its proxy drains them and calls the tables' data operations.
    Nccl,
    /// The plugin's: NCCL takes device code's queues from the device handle as they are. Device type 3.
    Plugin,
}

/// Who asks, as far as that matters.
#[derive(Clone, Copy, Debug)]
pub struct Asking {
    /// The table is GIN v14 (NCCL 2.30.7 and later), where NCCL skips a plugin whose queues are NCCL's and drives its
    /// proxy over the RMA table.
    pub is_v14: bool,
    /// A communicator of this process has this library's RMA table, which those versions set up before they ask here.
    pub rma_in_use: bool,
    /// NCCL's version, as 10000 × major + 100 × minor + patch; `None`: not known.
    pub nccl: Option<i32>,
}

impl Asking {
    /// Why NCCL's proxy, over the RMA table, is the way that suits more kernels.
    fn suits_nccl(self, has_cuda: &dyn Fn() -> bool) -> Option<&'static str> {
        if !self.is_v14 || !self.rma_in_use {
            return None;
        }
        match self.nccl {
            Some(version) if version < FIRST_UNKNOWN => (!has_cuda()).then_some("there is no CUDA driver"),
            Some(_) => Some("this NCCL is newer than those whose device structures the library knows"),
            None => Some("the version of this NCCL is not known, and so its device structures"),
        }
    }
}

/// Whose they are, and the variables that decided it, for the log.
///
/// `NCCL_GIN_TYPE` decides where `OXYGIN_ENGINE` does not. Where both leave it open the queues are the plugin's: up to
/// 2.30.4 because NCCL's own proxy takes one descriptor of a queue a pass there, and refuses depths; from 2.30.7 on
/// because those of a NIC suit kernels of every kind, and no call of NCCL's proxy is in the way. For an NCCL that is
/// newer than the library they are NCCL's: its proxy refuses kernels that it does not suit, which would fault on other
/// queues; and so they are without a CUDA driver, as RCCL takes plugins, too. But not where only the GIN table was
/// given to NCCL, which would skip it then. Nothing that differs from host to host decides, beside the driver: NCCL
/// compares what ranks say.
///
/// `has_cuda`: whether there is a CUDA driver; asked where that decides and not before, as a look loads it.
pub fn queue_owner(config: &Config, asking: Asking, has_cuda: &dyn Fn() -> bool) -> (QueueOwner, &'static str) {
    use QueueOwner::{Nccl, Plugin};
    match (config.engine, config.gin_type) {
        (EngineChoice::Nccl, _) => (Nccl, "OXYGIN_ENGINE=nccl"),
        (EngineChoice::Own | EngineChoice::GdakiSoft | EngineChoice::Gdaki, _) => (Plugin, "OXYGIN_ENGINE"),
        (EngineChoice::Auto, Some(DEVICE_GIN_PROXY)) => (Nccl, "NCCL_GIN_TYPE=2"),
        (EngineChoice::Auto, Some(DEVICE_GIN_GDAKI)) => (Plugin, "NCCL_GIN_TYPE=3"),
        // Of no type that this library has: NCCL skips it, whatever it says.
        (EngineChoice::Auto, Some(_)) => (Nccl, "NCCL_GIN_TYPE"),
        (EngineChoice::Auto, None) => match asking.suits_nccl(has_cuda) {
            Some(why) => (Nccl, why),
            None => (Plugin, "neither OXYGIN_ENGINE nor NCCL_GIN_TYPE"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EngineChoice::*;

    /// Every combination of what decides: the table in the README says the same (`the_readme_has_this_table`).
    #[test]
    fn every_combination_has_an_owner() {
        let on = |has_cuda: bool, engine, gin_type, asking| {
            let config = Config { engine, gin_type, ..Config::default() };
            queue_owner(&config, asking, &|| has_cuda).0 == QueueOwner::Plugin
        };
        let of = |engine, gin_type, asking| on(true, engine, gin_type, asking);
        for (is_v14, rma_in_use) in [(false, false), (false, true), (true, false), (true, true)] {
            for nccl in [None, Some(22_907), Some(23_004), Some(23_007), Some(23_299), Some(23_300)] {
                let asking = Asking { is_v14, rma_in_use, nccl };
                for gin_type in [None, Some(2), Some(3), Some(4)] {
                    assert!(!of(Nccl, gin_type, asking));
                    assert!(of(Own, gin_type, asking) && of(GdakiSoft, gin_type, asking));
                    assert!(of(Gdaki, gin_type, asking));
                }
                let is_known = nccl.is_some_and(|version| version < 23_300);
                assert_eq!(of(Auto, None, asking), is_known || !is_v14 || !rma_in_use, "{asking:?}");
                assert_eq!(on(false, Auto, None, asking), !is_v14 || !rma_in_use, "{asking:?}");
                assert!(!of(Auto, Some(2), asking) && of(Auto, Some(3), asking));
                assert!(!of(Auto, Some(4), asking));
            }
        }
    }

    #[test]
    fn a_machine_is_left_alone_where_something_else_decides() {
        let asking = Asking { is_v14: true, rma_in_use: true, nccl: Some(23_203) };
        // Its driver may be slow.
        let untouched = || -> bool { panic!("the driver was looked at") };
        let decided = [(Own, None), (GdakiSoft, None), (Gdaki, None), (Nccl, None), (Auto, Some(2)), (Auto, Some(3))];
        for (engine, gin_type) in decided {
            queue_owner(&Config { engine, gin_type, ..Config::default() }, asking, &untouched);
        }
        let config = Config::default();
        for early in [
            Asking { is_v14: false, ..asking },
            Asking { rma_in_use: false, ..asking },
            Asking { nccl: None, ..asking },
            Asking { nccl: Some(23_300), ..asking },
        ] {
            queue_owner(&config, early, &untouched);
        }
    }
}
