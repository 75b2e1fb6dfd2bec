//! What this machine alone tells of the choice, before a job runs: for `oxygin doctor`.

use crate::comm::backend::choose::choose;
use crate::comm::backend::offer::EngineOffer;
use crate::comm::backend::report::{queue_owner, Asking, QueueOwner};
use crate::comm::fabrics::{foreseen_promise, mlx5_of};
use crate::config::Config;
use crate::error::Result;
use crate::fabric::devices;

/// Which engine ranks that are all like this one would take, in the words of the log, with the first reason against
/// each better one, if such a GIN table asks. An error: they would refuse each other.
pub fn foresee(config: &Config, asking: Asking, has_cuda: bool) -> Result<String> {
    let (owner, why) = queue_owner(config, asking, &|| has_cuda);
    if owner == QueueOwner::Nccl {
        return Ok(format!("nccl chosen: {why}"));
    }
    let mlx5 = mlx5_of(config, devices::all(config).first().map(|d| &d.kind), owner, asking.is_v14);
    Ok(choose(&[EngineOffer::new(config, owner, mlx5)], foreseen_promise(config), asking.is_v14)?.sentence())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineChoice, FabricChoice};

    #[test]
    fn a_machine_foresees_what_ranks_like_it_would_take() {
        let config = |engine, gin_type| Config { engine, gin_type, fabric: FabricChoice::Soft, ..Config::default() };
        let say = |engine, gin_type, nccl| {
            let asking = Asking { is_v14: true, rma_in_use: true, nccl: Some(nccl) };
            foresee(&config(engine, gin_type), asking, true).map_err(|e| e.to_string())
        };
        assert!(say(EngineChoice::Auto, None, 23_300).unwrap().starts_with("nccl chosen: this NCCL is newer"));
        assert_eq!(say(EngineChoice::Auto, Some(2), 23_203).unwrap(), "nccl chosen: NCCL_GIN_TYPE=2");
        for (gin_type, nccl) in [(None, 23_203), (Some(3), 23_300)] {
            let chosen = say(EngineChoice::Auto, gin_type, nccl).unwrap();
            assert_eq!(chosen, "gdaki-soft chosen; not gdaki: rank 0: OXYGIN_FABRIC=soft");
        }
        assert!(say(EngineChoice::Gdaki, None, 23_203).unwrap_err().contains("OXYGIN_ENGINE=gdaki (rank 0)"));
    }
}
