//! What this machine alone tells of the choice, before a job runs: for `oxygin doctor`.

use crate::comm::backend::choose::{choose, FabricPromise};
use crate::comm::backend::offer::EngineOffer;
use crate::comm::backend::report::{queue_owner, QueueOwner};
use crate::comm::fabrics::{first_is_verbs, mlx5_of};
use crate::config::Config;
use crate::error::Result;
use crate::fabric::devices;

/// Which engine ranks that are all like this one would take, in the words of the log, with the first reason against
/// each better one. `is_v14` and `rma_in_use` as for [`queue_owner`]. An error: they would refuse each other.
pub fn foresee(config: &Config, is_v14: bool, rma_in_use: bool) -> Result<String> {
    let (owner, why) = queue_owner(config, is_v14, rma_in_use);
    if owner == QueueOwner::Nccl {
        return Ok(format!("nccl chosen: {why}"));
    }
    let is_verbs = first_is_verbs(config);
    let mlx5 = mlx5_of(config, devices::all(config).first().map(|d| &d.kind), owner);
    let promise = FabricPromise { signals_of_all_peers: !is_verbs, is_verbs };
    Ok(choose(&[EngineOffer::new(config, owner, mlx5)], promise, is_v14)?.sentence())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineChoice, FabricChoice};

    #[test]
    fn a_machine_foresees_what_ranks_like_it_would_take() {
        let config = |engine, gin_type| Config { engine, gin_type, fabric: FabricChoice::Soft, ..Config::default() };
        let say = |engine, gin_type, rma| foresee(&config(engine, gin_type), true, rma).map_err(|e| e.to_string());
        assert!(say(EngineChoice::Auto, None, true).unwrap().starts_with("nccl chosen: NCCL_RMA_PLUGIN"));
        for (gin_type, rma) in [(None, false), (Some(3), true)] {
            let chosen = say(EngineChoice::Auto, gin_type, rma).unwrap();
            assert_eq!(chosen, "gdaki-soft chosen; not gdaki: rank 0: OXYGIN_FABRIC=soft");
        }
        assert!(say(EngineChoice::Gdaki, None, true).unwrap_err().contains("OXYGIN_ENGINE=gdaki (rank 0)"));
    }
}
