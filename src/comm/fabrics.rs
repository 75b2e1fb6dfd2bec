//! The fabrics there are: one line each. What a fabric does is in its folder, behind [`Fabric`] and
//! [`crate::fabric::Context`]; here is only which ones a communicator can be on.

use super::backend::choose::FabricPromise;
use super::backend::offer::EngineOffer;
use super::backend::report::QueueOwner;
use super::hello::{other_builds, settle, Hello, Settled};
use crate::config::{Config, EngineChoice, FabricChoice};
use crate::error::{Error, Result};
use crate::fabric::devices::{self, DeviceKind};
use crate::fabric::soft::SoftFabric;
use crate::fabric::verbs::{self, VerbsFabric};
use crate::fabric::{Fabric, World};
use crate::gdaki::mlx5;
use crate::memory::registry::Registry;
use crate::sys::version;
use std::sync::Arc;

/// Makes the types that are one thing or another by fabric, and the macros that do the same with whichever it is: one
/// match a call, everything below is static. `$d` is a dollar sign for the inner macros.
macro_rules! fabrics {
    ($d:tt $($(#[$doc:meta])* $name:ident: $fabric:ty,)+) => {
        /// The fabric a communicator runs on.
        pub enum AnyFabric {
            $($(#[$doc])* $name($fabric),)+
        }

        /// The contexts of a set, by fabric.
        pub enum Queues {
            $($(#[$doc])* $name(Box<[<$fabric as Fabric>::Context]>),)+
        }

        /// Does something with the fabric, whichever it is.
        macro_rules! on_fabric {
            ($d any:expr, $d fabric:ident => $d body:expr) => {
                match $d any {
                    $($crate::comm::fabrics::AnyFabric::$name($d fabric) => $d body,)+
                }
            };
        }

        /// Makes the contexts of a set on the fabric, whichever it is.
        macro_rules! queues_on {
            ($d any:expr, $d fabric:ident => $d body:expr) => {
                match $d any {
                    $($crate::comm::fabrics::AnyFabric::$name($d fabric) =>
                        $crate::comm::fabrics::Queues::$name($d body.into()),)+
                }
            };
        }

        /// Does something with the contexts, on whichever fabric they are.
        macro_rules! on_queues {
            ($d any:expr, $d queues:ident => $d body:expr) => {
                match $d any {
                    $($crate::comm::fabrics::Queues::$name($d queues) => $d body,)+
                }
            };
        }
    };
}

fabrics! { $
    /// RDMA devices.
    Verbs: VerbsFabric,
    /// Shared memory and TCP.
    Soft: SoftFabric,
}

pub(super) use {on_fabric, on_queues, queues_on};

/// Whether queues of a device of this kind can be handed to device code, or why not. Opens the device and tries it,
/// where the engine may be taken. `owner`: whose queues device code is to write; `gdaki_first`: as
/// [`choose`](super::backend::choose::choose) has it.
pub fn mlx5_of(
    config: &Config,
    kind: Option<&DeviceKind>,
    owner: QueueOwner,
    gdaki_first: bool,
) -> std::result::Result<(), String> {
    let is_asked = match config.engine {
        EngineChoice::Gdaki => true,
        EngineChoice::Auto => gdaki_first,
        EngineChoice::Own | EngineChoice::Nccl | EngineChoice::GdakiSoft => false,
    };
    match (config.fabric, kind) {
        (FabricChoice::Soft, _) => Err("OXYGIN_FABRIC=soft".into()),
        (_, Some(DeviceKind::Verbs(_))) if owner != QueueOwner::Plugin || !is_asked => {
            Err("it was not asked for; set OXYGIN_ENGINE=gdaki on all ranks".into())
        }
        (_, Some(DeviceKind::Verbs(_))) if !config.gdaki_trial && config.engine == EngineChoice::Auto => {
            Err("OXYGIN_GDAKI_TRIAL=0; OXYGIN_ENGINE=gdaki takes it untried".into())
        }
        (_, Some(DeviceKind::Verbs(info))) => match mlx5::probe(info, config)? {
            // Whether kernels count is known when it is too late to take another engine.
            found if !found.cross_channel && config.engine == EngineChoice::Auto => Err(format!(
                "{}:{} has no entries that wait for completions (cd), by which counters are incremented; for kernels \
                 without counters OXYGIN_ENGINE=gdaki takes it",
                info.name, info.port
            )),
            _ => Ok(()),
        },
        _ => Err(devices::why_no_verbs(config)),
    }
}

/// Whether queues of the first device serve kernels, as far as this rank can tell: it tries. The log has the reason if
/// not.
pub fn first_serves_kernels(config: &Config) -> bool {
    let first = devices::all(config).first().map(|d| &d.kind);
    let found = mlx5_of(config, first, QueueOwner::Plugin, true);
    found.inspect_err(|why| log::info!("no queues of an RDMA device's for kernels: {why}")).is_ok()
}

/// What a communicator of ranks whose machines are like this one would have of its fabric.
pub fn foreseen_promise(config: &Config) -> FabricPromise {
    let port = match devices::all(config).first().map(|d| &d.kind) {
        Some(DeviceKind::Verbs(info)) if config.fabric != FabricChoice::Soft && info.problem.is_none() => Some(info),
        _ => None,
    };
    FabricPromise { signals_of_all_peers: port.is_none_or(|info| !info.iwarp), is_verbs: port.is_some() }
}

/// The fabrics this rank could use, before the ranks have settled on one.
pub struct Opened {
    soft: Option<SoftFabric>,
    verbs: std::result::Result<VerbsFabric, String>,
    /// Whether the device's queues can be handed to device code, or why not.
    mlx5: std::result::Result<(), String>,
}

impl Opened {
    /// Opens what this rank's configuration and devices allow. `owner` and `gdaki_first`: as for [`mlx5_of`].
    pub fn open(
        config: &Arc<Config>,
        device: usize,
        registry: &Arc<Registry>,
        (owner, gdaki_first): (QueueOwner, bool),
    ) -> Result<Self> {
        let kind = devices::all(config).get(device).map(|d| &d.kind);
        let mlx5 = mlx5_of(config, kind, owner, gdaki_first);
        let verbs = match (config.fabric, kind) {
            (FabricChoice::Soft, _) => Err("OXYGIN_FABRIC=soft".into()),
            (_, Some(DeviceKind::Verbs(info))) => {
                VerbsFabric::open_for(info, config, registry.clone(), mlx5.is_ok()).map_err(|e| e.message().to_string())
            }
            _ => Err(devices::why_no_verbs(config)),
        };
        let soft = match config.fabric {
            FabricChoice::Verbs => None,
            _ => Some(SoftFabric::open(config, registry.clone())?),
        };
        Ok(Self { soft, verbs, mlx5 })
    }

    /// What the others are to know.
    pub fn hello(&self, config: &Config, engine: EngineOffer) -> Hello {
        Hello {
            build: version::BUILD.into(),
            choice: config.fabric,
            verbs: self.verbs.as_ref().map(|f| f.hello()).map_err(String::clone),
            soft: self.soft.as_ref().map(|f| f.hello()).unwrap_or_default(),
            engine,
        }
    }

    /// Whether the device's queues can be handed to device code, or why not.
    pub fn mlx5(&self) -> std::result::Result<(), String> {
        self.mlx5.clone()
    }

    /// The fabric that all ranks settle on, from what they said.
    pub fn settle(self, world: World, hellos: &[Hello]) -> Result<AnyFabric> {
        if let Some(said) = other_builds(hellos) {
            log::info!("{said}");
        }
        match settle(hellos, verbs::mismatch)? {
            Settled::Verbs => {
                let fabric = self.verbs.map_err(Error::internal)?;
                log::info!("fabric verbs: every rank has a usable port (rank {} of {})", world.rank, world.nranks);
                let verbs: Vec<&[u8]> = hellos.iter().map(|h| h.verbs.as_deref().unwrap_or_default()).collect();
                fabric.join(world, &verbs)?;
                Ok(AnyFabric::Verbs(fabric))
            }
            Settled::Soft(why) => {
                let fabric = self.soft.ok_or_else(|| Error::internal("settled on soft, which was never opened"))?;
                log::info!("fabric soft: {why} (rank {} of {})", world.rank, world.nranks);
                let soft: Vec<&[u8]> = hellos.iter().map(|h| &h.soft[..]).collect();
                fabric.join(world, &soft)?;
                Ok(AnyFabric::Soft(fabric))
            }
        }
    }
}
