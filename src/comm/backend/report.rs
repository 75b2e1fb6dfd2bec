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

/// The first NCCL whose device structures this library does not know, as 10000 × major + 100 × minor + patch.
const FIRST_UNKNOWN: i32 = 23_300;

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

/// What this machine has, looked at where it decides and not before: a look loads libraries and opens devices.
pub trait Machine {
    /// This rank's fabric is verbs, as far as its own devices tell: not the software NIC's.
    fn is_verbs(&self) -> bool;
    /// Over verbs: its device's queues serve kernels, which one has tried.
    fn serves_kernels(&self) -> bool;
    /// There is a CUDA driver: the queues of this library's are for CUDA's device code, and RCCL takes plugins, too.
    fn has_cuda(&self) -> bool;
}

/// A machine that has been looked at.
#[derive(Clone, Copy, Debug)]
pub struct KnownMachine {
    /// See [`Machine::is_verbs`].
    pub is_verbs: bool,
    /// See [`Machine::serves_kernels`].
    pub serves_kernels: bool,
    /// See [`Machine::has_cuda`].
    pub has_cuda: bool,
}

impl KnownMachine {
    /// With a GPU, and no RDMA device that can be used.
    pub const WITHOUT_RDMA: Self = Self { is_verbs: false, serves_kernels: false, has_cuda: true };
}

impl Machine for KnownMachine {
    fn is_verbs(&self) -> bool {
        self.is_verbs
    }

    fn serves_kernels(&self) -> bool {
        self.serves_kernels
    }

    fn has_cuda(&self) -> bool {
        self.has_cuda
    }
}

impl Asking {
    /// Why NCCL's proxy, over the RMA table, is the way that suits more kernels.
    fn suits_nccl(self, machine: &dyn Machine) -> Option<&'static str> {
        if !self.is_v14 || !self.rma_in_use {
            return None;
        }
        match self.nccl {
            Some(version) if version < FIRST_UNKNOWN && !machine.has_cuda() => Some("there is no CUDA driver"),
            Some(version) if version < FIRST_UNKNOWN => {
                let by_calls = machine.is_verbs() && !machine.serves_kernels();
                by_calls.then_some("the verbs fabric, by the RMA table")
            }
            Some(_) => Some("this NCCL is newer than those whose device structures the library knows"),
            None => Some("the version of this NCCL is not known, and so its device structures"),
        }
    }
}

/// Whose they are, and the variables that decided it, for the log.
///
/// `NCCL_GIN_TYPE` decides where `OXYGIN_ENGINE` does not. Where both leave it open the queues are the plugin's: up to
/// 2.30.4 because NCCL's own proxy takes one descriptor of a queue a pass there, and refuses depths; from 2.30.7 on
/// because those of a NIC suit kernels of every kind, and no call of NCCL's proxy is in the way. Over verbs, where
/// there is no software NIC, they are NCCL's unless this rank's mlx5 device serves kernels, and so they are for an NCCL
/// that is newer than the library: its proxy refuses kernels that it does not suit, which would fault on the own
/// engine's queues. But not where only the GIN table was given to NCCL, which would skip it then.
pub fn queue_owner(config: &Config, asking: Asking, machine: &dyn Machine) -> (QueueOwner, &'static str) {
    use QueueOwner::{Nccl, Plugin};
    match (config.engine, config.gin_type) {
        (EngineChoice::Nccl, _) => (Nccl, "OXYGIN_ENGINE=nccl"),
        (EngineChoice::Own | EngineChoice::GdakiSoft | EngineChoice::Gdaki, _) => (Plugin, "OXYGIN_ENGINE"),
        (EngineChoice::Auto, Some(DEVICE_GIN_PROXY)) => (Nccl, "NCCL_GIN_TYPE=2"),
        (EngineChoice::Auto, Some(DEVICE_GIN_GDAKI)) => (Plugin, "NCCL_GIN_TYPE=3"),
        // Of no type that this library has: NCCL skips it, whatever it says.
        (EngineChoice::Auto, Some(_)) => (Nccl, "NCCL_GIN_TYPE"),
        (EngineChoice::Auto, None) => match asking.suits_nccl(machine) {
            Some(why) => (Nccl, why),
            None => (Plugin, "neither OXYGIN_ENGINE nor NCCL_GIN_TYPE"),
        },
    }
}

/// The first NCCL that goes on with the device types which all ranks have; earlier ones have no GIN where they differ.
const FIRST_WITH_COMMON_TYPES: i32 = 23_100;

/// What to know, and to set, where hosts differ: if this machine's devices decide the type that this rank tells NCCL,
/// ranks on other hosts may tell another, and NCCL compares them before ranks of this library meet. `None`: the
/// variables or NCCL's version decide, the same way everywhere.
pub fn mixed_hosts(config: &Config, asking: Asking) -> Option<&'static str> {
    let is_open = config.engine == EngineChoice::Auto && config.gin_type.is_none();
    let version = asking.nccl.filter(|version| *version < FIRST_UNKNOWN)?;
    if !is_open || !asking.is_v14 || !asking.rma_in_use {
        return None;
    }
    Some(match version < FIRST_WITH_COMMON_TYPES {
        true => {
            "Ranks on hosts with usable RDMA devices that serve no kernels say 2 and others 3, and this NCCL has no \
             GIN where they differ: for a job on hosts of both kinds set OXYGIN_ENGINE=gdaki-soft, or \
             NCCL_GIN_TYPE=2, on all ranks"
        }
        false => {
            "Ranks on hosts with usable RDMA devices that serve no kernels say 2 and others 3. Where they differ this \
             NCCL goes on with its proxy over the RMA table on all; where its own GDAKI backend takes the RDMA devices \
             it cannot connect to this library: for a job on hosts of both kinds set OXYGIN_ENGINE=gdaki-soft, or \
             NCCL_GIN_TYPE=2, on all ranks"
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use EngineChoice::*;

    /// Every combination of what decides: the table in the README says the same (`the_readme_has_this_table`).
    #[test]
    fn every_combination_has_an_owner() {
        let of_machine = |engine, gin_type, asking, machine| {
            queue_owner(&Config { engine, gin_type, ..Config::default() }, asking, &machine).0 == QueueOwner::Plugin
        };
        let usual = KnownMachine::WITHOUT_RDMA;
        let tried = KnownMachine { is_verbs: true, serves_kernels: true, ..usual };
        let of = |engine, gin_type, asking| of_machine(engine, gin_type, asking, usual);
        for (is_v14, rma_in_use) in [(false, false), (false, true), (true, false), (true, true)] {
            for nccl in [None, Some(22_907), Some(23_004), Some(23_007), Some(23_299), Some(23_300)] {
                let asking = Asking { is_v14, rma_in_use, nccl };
                for gin_type in [None, Some(2), Some(3), Some(4)] {
                    assert!(!of(Nccl, gin_type, asking));
                    assert!(of(Own, gin_type, asking) && of(GdakiSoft, gin_type, asking));
                    assert!(of(Gdaki, gin_type, asking));
                }
                let is_known = nccl.is_some_and(|version| version < 23_300);
                for has_nic in [usual, tried] {
                    let is_ours = of_machine(Auto, None, asking, has_nic);
                    assert_eq!(is_ours, is_known || !is_v14 || !rma_in_use, "{asking:?} {has_nic:?}");
                }
                for other in [KnownMachine { is_verbs: true, ..usual }, KnownMachine { has_cuda: false, ..usual }] {
                    let is_ours = of_machine(Auto, None, asking, other);
                    assert_eq!(is_ours, !is_v14 || !rma_in_use, "{asking:?} {other:?}");
                }
                assert!(!of(Auto, Some(2), asking) && of(Auto, Some(3), asking));
                assert!(!of(Auto, Some(4), asking));
            }
        }
    }
    /// A machine that must not be looked at: its driver may be slow, its devices busy.
    struct Untouched;

    impl Machine for Untouched {
        fn is_verbs(&self) -> bool {
            panic!("the devices were looked at")
        }

        fn serves_kernels(&self) -> bool {
            panic!("a device was tried")
        }

        fn has_cuda(&self) -> bool {
            panic!("the driver was looked at")
        }
    }

    #[test]
    fn a_machine_is_left_alone_where_something_else_decides() {
        let asking = Asking { is_v14: true, rma_in_use: true, nccl: Some(23_203) };
        let decided = [(Own, None), (GdakiSoft, None), (Gdaki, None), (Nccl, None), (Auto, Some(2)), (Auto, Some(3))];
        for (engine, gin_type) in decided {
            queue_owner(&Config { engine, gin_type, ..Config::default() }, asking, &Untouched);
        }
        let config = Config::default();
        for early in [
            Asking { is_v14: false, ..asking },
            Asking { rma_in_use: false, ..asking },
            Asking { nccl: None, ..asking },
            Asking { nccl: Some(23_300), ..asking },
        ] {
            queue_owner(&config, early, &Untouched);
        }
    }
    #[test]
    fn where_hosts_may_differ_the_sentence_names_the_variables() {
        let config = |engine, gin_type| Config { engine, gin_type, ..Config::default() };
        let asking = |nccl| Asking { is_v14: true, rma_in_use: true, nccl: Some(nccl) };
        for (nccl, words) in [(23_007, "has no GIN"), (23_102, "goes on with its proxy"), (23_203, "its own GDAKI")] {
            let said = mixed_hosts(&config(Auto, None), asking(nccl)).unwrap();
            assert!([words, "OXYGIN_ENGINE=gdaki-soft", "NCCL_GIN_TYPE=2"].iter().all(|w| said.contains(w)), "{said}");
            // What it names is enough: the type is the same then, whatever a host has.
            for fixed in [config(GdakiSoft, None), config(Auto, Some(2))] {
                assert!(mixed_hosts(&fixed, asking(nccl)).is_none());
                let owners = [true, false].map(|is_verbs| {
                    queue_owner(&fixed, asking(nccl), &KnownMachine { is_verbs, ..KnownMachine::WITHOUT_RDMA }).0
                });
                assert_eq!(owners[0], owners[1]);
            }
        }
        let early = Asking { is_v14: false, ..asking(23_004) };
        let alone = Asking { rma_in_use: false, ..asking(23_203) };
        for same in [early, alone, asking(23_300), Asking { nccl: None, ..asking(0) }] {
            assert!(mixed_hosts(&config(Auto, None), same).is_none(), "{same:?}");
        }
    }
}
