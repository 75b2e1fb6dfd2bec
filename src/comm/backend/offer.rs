//! What a rank says at connect of the engines that it could use.

use crate::comm::backend::report::QueueOwner;
use crate::config::{Config, EngineChoice, GdakiSignals};
use crate::sys::wire::{Reader, Writer};

/// One rank's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOffer {
    /// Whose queues its table reported.
    pub owner: QueueOwner,
    /// What `OXYGIN_ENGINE` asks for there.
    pub asked: EngineChoice,
    /// Its kernels take a visible signal to tell of all peers' puts (`OXYGIN_GDAKI_SIGNALS`).
    pub signals_of_all_peers: bool,
    /// Whether its device's queues can be handed to device code, or why not.
    pub mlx5: std::result::Result<(), String>,
}

/// What `OXYGIN_ENGINE` can ask for; the place in here is what ranks tell each other.
const CHOICES: [EngineChoice; 5] =
    [EngineChoice::Auto, EngineChoice::Own, EngineChoice::Nccl, EngineChoice::GdakiSoft, EngineChoice::Gdaki];

fn flag(r: &mut Reader) -> Option<bool> {
    match r.u8()? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

impl EngineOffer {
    /// Of a table that reported this owner. `mlx5`: whether this rank's device can be handed to device code, or why it
    /// cannot.
    pub fn new(config: &Config, owner: QueueOwner, mlx5: std::result::Result<(), String>) -> Self {
        Self { owner, asked: config.engine, signals_of_all_peers: config.gdaki_signals == GdakiSignals::AllPeers, mlx5 }
    }

    /// The message.
    pub fn encode(&self) -> Vec<u8> {
        let asked = CHOICES.iter().position(|choice| *choice == self.asked).unwrap_or(0);
        let flags = [self.owner == QueueOwner::Plugin, self.signals_of_all_peers, self.mlx5.is_ok()];
        let why_not = self.mlx5.as_ref().err().map_or("", |why| why);
        Writer::new().u8(asked as u8).raw(&flags.map(u8::from)).bytes(why_not.as_bytes()).finish()
    }

    /// Reads a message; `None`: it is none.
    pub fn parse(message: &[u8]) -> Option<Self> {
        let mut r = Reader::new(message);
        let asked = *CHOICES.get(usize::from(r.u8()?))?;
        let owner = if flag(&mut r)? { QueueOwner::Plugin } else { QueueOwner::Nccl };
        let (signals_of_all_peers, mlx5) = (flag(&mut r)?, flag(&mut r)?);
        let why_not = String::from_utf8_lossy(r.bytes()?).into_owned();
        r.end()?;
        Some(Self { owner, asked, signals_of_all_peers, mlx5: if mlx5 { Ok(()) } else { Err(why_not) } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_come_back_and_cut_ones_do_not() {
        for (asked, mlx5) in CHOICES.iter().flat_map(|c| [(*c, Ok(())), (*c, Err("no DevX".to_owned()))]) {
            let config = Config { engine: asked, ..Config::default() };
            let offer = EngineOffer::new(&config, QueueOwner::Plugin, mlx5);
            let message = offer.encode();
            assert_eq!(EngineOffer::parse(&message).unwrap(), offer);
            assert!((0..message.len()).all(|cut| EngineOffer::parse(&message[..cut]).is_none()));
            assert!((1..4).all(|at| {
                let mut broken = message.clone();
                broken[at] = 2;
                EngineOffer::parse(&broken).is_none()
            }));
        }
    }
}
