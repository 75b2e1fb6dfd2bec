//! The engine that all ranks of a communicator take, from what each of them said.

use crate::comm::backend::offer::EngineOffer;
use crate::comm::backend::report::QueueOwner;
use crate::comm::contexts::EngineKind;
use crate::config::EngineChoice;
use crate::error::{Error, Result};

/// What the ranks took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineChosen {
    /// The engine.
    pub kind: EngineKind,
    /// What speaks against each of those that would come before it, best first.
    pub against: Vec<(EngineKind, String)>,
}

impl EngineChosen {
    /// For the log: what was taken, and the first reason against each better one.
    pub fn sentence(&self) -> String {
        let against = self.against.iter().map(|(kind, why)| format!("; not {}: {why}", kind.name()));
        format!("{} chosen{}", self.kind.name(), against.collect::<String>())
    }
}

/// What the communicator's fabric promises, which is the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct FabricPromise {
    /// Contexts can be made to have a visible signal imply every put received before it, from any peer
    /// ([`Fabric::confirm_puts`](crate::fabric::Fabric::confirm_puts)).
    pub signals_of_all_peers: bool,
    /// It is the verbs fabric, whose ports mlx5 devices' queues are on.
    pub is_verbs: bool,
}

/// Of the engines that give device code the plugin's queues, best first: those of GDAKI suit kernels of every kind.
const BY_RANK: [EngineKind; 3] = [EngineKind::Gdaki, EngineKind::GdakiSoft, EngineKind::Own];

fn of_choice(choice: EngineChoice) -> Option<EngineKind> {
    match choice {
        EngineChoice::Auto => None,
        EngineChoice::Own => Some(EngineKind::Own),
        EngineChoice::Nccl => Some(EngineKind::Nccl),
        EngineChoice::GdakiSoft => Some(EngineKind::GdakiSoft),
        EngineChoice::Gdaki => Some(EngineKind::Gdaki),
    }
}

/// Why the ranks cannot use it, whoever asks.
fn impossible(kind: EngineKind, offers: &[EngineOffer], fabric: FabricPromise) -> Option<String> {
    match kind {
        EngineKind::Nccl | EngineKind::Own => None,
        EngineKind::GdakiSoft if fabric.signals_of_all_peers => None,
        EngineKind::GdakiSoft => {
            let rank = offers.iter().position(|o| o.signals_of_all_peers)?;
            Some(format!(
                "kernels compiled for GDAKI take a visible signal to say that every put before it has arrived, from \
                 any peer, which iWARP devices cannot promise: set OXYGIN_FABRIC=soft, or, for kernels that conclude \
                 from a signal to its sender's puts alone, OXYGIN_GDAKI_SIGNALS=per-peer on rank {rank}, too"
            ))
        }
        EngineKind::Gdaki => {
            match offers.iter().enumerate().find_map(|(rank, o)| Some((rank, o.mlx5.as_ref().err()?))) {
                Some((rank, why)) => Some(format!("rank {rank}: {why}")),
                None => (!fabric.is_verbs).then(|| "the ranks settled on the soft fabric, see above".to_owned()),
            }
        }
    }
}

/// Decides, from what all ranks said, alike on every rank. `gdaki_first`: the table is one whose kernels may be
/// compiled for GDAKI alone (GIN v14); before it engines of GDAKI are taken only by `OXYGIN_ENGINE`.
pub fn choose(offers: &[EngineOffer], fabric: FabricPromise, gdaki_first: bool) -> Result<EngineChosen> {
    let with = |owner| offers.iter().position(|o| o.owner == owner);
    if let (Some(plugin), Some(nccl)) = (with(QueueOwner::Plugin), with(QueueOwner::Nccl)) {
        return Err(Error::usage(format!(
            "device code of rank {plugin} writes into this library's queues and that of rank {nccl} into NCCL's; set \
             OXYGIN_ENGINE, NCCL_GIN_TYPE, NCCL_GIN_PLUGIN and NCCL_RMA_PLUGIN the same on all ranks"
        )));
    }
    if with(QueueOwner::Plugin).is_none() {
        return Ok(EngineChosen { kind: EngineKind::Nccl, against: Vec::new() });
    }
    let mut demands = offers.iter().enumerate().filter_map(|(rank, o)| Some((rank, of_choice(o.asked)?)));
    if let Some((rank, kind)) = demands.next() {
        if let Some((other, differs)) = demands.find(|(_, other)| *other != kind) {
            return Err(Error::usage(format!(
                "rank {rank} has OXYGIN_ENGINE={} and rank {other} has OXYGIN_ENGINE={}; set the same on all ranks",
                kind.name(),
                differs.name()
            )));
        }
        return match impossible(kind, offers, fabric) {
            None => Ok(EngineChosen { kind, against: Vec::new() }),
            Some(why) => Err(Error::usage(format!("OXYGIN_ENGINE={} (rank {rank}): {why}", kind.name()))),
        };
    }
    let mut against = Vec::new();
    for kind in BY_RANK {
        let early = || {
            (!gdaki_first && kind != EngineKind::Own)
                .then(|| format!("this NCCL has kernels for all backends; OXYGIN_ENGINE={} takes it", kind.name()))
        };
        match impossible(kind, offers, fabric).or_else(early) {
            None => return Ok(EngineChosen { kind, against }),
            Some(why) => against.push((kind, why)),
        }
    }
    Err(Error::internal("no engine is left"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use EngineChoice::{Auto, Gdaki, GdakiSoft, Nccl, Own};

    fn offer(asked: EngineChoice) -> EngineOffer {
        let owner = if asked == Nccl { QueueOwner::Nccl } else { QueueOwner::Plugin };
        EngineOffer::new(&Config { engine: asked, ..Config::default() }, owner, Err("no mlx5 device".into()))
    }

    fn with_mlx5(offer: EngineOffer) -> EngineOffer {
        EngineOffer { mlx5: Ok(()), ..offer }
    }

    const SOFT: FabricPromise = FabricPromise { signals_of_all_peers: true, is_verbs: false };
    const VERBS: FabricPromise = FabricPromise { signals_of_all_peers: true, is_verbs: true };
    const IWARP: FabricPromise = FabricPromise { signals_of_all_peers: false, is_verbs: true };

    fn kind(offers: &[EngineOffer], fabric: FabricPromise, gdaki_first: bool) -> EngineKind {
        choose(offers, fabric, gdaki_first).unwrap().kind
    }

    fn refused(offers: &[EngineOffer], fabric: FabricPromise, words: &[&str]) {
        let error = choose(offers, fabric, true).unwrap_err();
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    }

    #[test]
    fn what_any_rank_asks_for_all_take() {
        for (asked, want) in [(Own, EngineKind::Own), (GdakiSoft, EngineKind::GdakiSoft)] {
            for first in [false, true] {
                assert_eq!(kind(&[offer(Auto), offer(asked)], SOFT, first), want);
            }
        }
        assert_eq!(kind(&[offer(Nccl), offer(Nccl)], SOFT, true), EngineKind::Nccl);
        let can = [with_mlx5(offer(Gdaki)), with_mlx5(offer(Auto))];
        assert_eq!(kind(&can, VERBS, true), EngineKind::Gdaki);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_rank_that_cannot() {
        refused(&[offer(Own), offer(GdakiSoft)], SOFT, &["rank 0 has OXYGIN_ENGINE=own", "rank 1", "gdaki-soft"]);
        refused(&[offer(Own), offer(Nccl)], SOFT, &["rank 0", "rank 1", "NCCL_RMA_PLUGIN"]);
        refused(&[with_mlx5(offer(Gdaki))], SOFT, &["OXYGIN_ENGINE=gdaki", "settled on the soft fabric"]);
        refused(&[with_mlx5(offer(Gdaki)), offer(Gdaki)], VERBS, &["OXYGIN_ENGINE=gdaki", "rank 1: no mlx5 device"]);
        refused(&[offer(GdakiSoft)], IWARP, &["OXYGIN_FABRIC=soft", "OXYGIN_GDAKI_SIGNALS=per-peer", "rank 0"]);
        let of_its_sender = EngineOffer { signals_of_all_peers: false, ..offer(GdakiSoft) };
        assert_eq!(kind(&[of_its_sender], IWARP, true), EngineKind::GdakiSoft);
    }

    #[test]
    fn auto_takes_the_first_that_may_be_and_says_what_speaks_against_the_better_ones() {
        assert_eq!(kind(&[offer(Auto), offer(Auto)], SOFT, false), EngineKind::Own);
        let chosen = choose(&[offer(Auto), offer(Auto)], SOFT, true).unwrap();
        assert_eq!(chosen.kind, EngineKind::GdakiSoft);
        assert_eq!(chosen.sentence(), "gdaki-soft chosen; not gdaki: rank 0: no mlx5 device");
        let chosen = choose(&[offer(Auto)], IWARP, true).unwrap();
        assert_eq!(chosen.kind, EngineKind::Own);
        assert!(chosen.sentence().contains("not gdaki-soft: kernels compiled for GDAKI"), "{chosen:?}");
        assert!(chosen.sentence().contains("not gdaki: rank 0: no mlx5 device"), "{chosen:?}");
        let can = with_mlx5(offer(Auto));
        assert_eq!(kind(&[can.clone(), can.clone()], VERBS, true), EngineKind::Gdaki);
        // Kernels of an older NCCL are compiled for all backends, and its proxy context suits them.
        assert_eq!(kind(std::slice::from_ref(&can), VERBS, false), EngineKind::Own);
        let chosen = choose(&[can, offer(Auto)], VERBS, true).unwrap();
        assert_eq!(chosen.kind, EngineKind::GdakiSoft);
        assert!(chosen.sentence().contains("not gdaki: rank 1: no mlx5 device"), "{chosen:?}");
    }
}
