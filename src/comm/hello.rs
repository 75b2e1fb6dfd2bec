//! What each rank says of itself at connect, and the choice of one fabric that all ranks compute from it.

use crate::config::FabricChoice;
use crate::error::{Error, Result};
use crate::sys::wire::{Reader, Writer};

/// Version of this message. Ranks of different versions refuse each other with a sentence.
const VERSION: u16 = 2;

/// One rank's word at connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What `OXYGIN_FABRIC` asks for there.
    pub choice: FabricChoice,
    /// The verbs fabric's own hello, or why the rank cannot use verbs.
    pub verbs: std::result::Result<Vec<u8>, String>,
    /// The soft fabric's own hello; empty where soft is ruled out.
    pub soft: Vec<u8>,
}

impl Hello {
    /// The message.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u16(VERSION).u8(match self.choice {
            FabricChoice::Auto => 0,
            FabricChoice::Verbs => 1,
            FabricChoice::Soft => 2,
        });
        match &self.verbs {
            Ok(hello) => w.u8(1).bytes(hello),
            Err(reason) => w.u8(0).bytes(reason.as_bytes()),
        };
        w.bytes(&self.soft).finish()
    }

    /// Reads a message from `rank`.
    pub fn parse(rank: u32, message: &[u8]) -> Result<Self> {
        let mut r = Reader::new(message);
        if let Some(version) = r.u16().filter(|&v| v != VERSION) {
            return Err(Error::protocol(format!(
                "rank {rank} runs an oxygin whose connect message has version {version}, this one has {VERSION}; use \
                 the same build on all ranks"
            )));
        }
        (|| {
            let choice = match r.u8()? {
                0 => FabricChoice::Auto,
                1 => FabricChoice::Verbs,
                2 => FabricChoice::Soft,
                _ => return None,
            };
            let verbs = match r.u8()? {
                1 => Ok(r.bytes()?.to_vec()),
                0 => Err(String::from_utf8_lossy(r.bytes()?).into_owned()),
                _ => return None,
            };
            let soft = r.bytes()?.to_vec();
            r.end()?;
            Some(Self { choice, verbs, soft })
        })()
        .ok_or_else(|| {
            Error::protocol(format!("rank {rank} sent a malformed connect message of {} bytes", message.len()))
        })
    }
}

/// The fabric that all ranks settle on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Every rank has a usable port.
    Verbs,
    /// At least one rank has not, or asked for soft; the sentence says which and why.
    Soft(String),
}

/// Decides, from what all ranks said, alike on every rank. `mismatch` says why ranks with these verbs hellos cannot be
/// connected to each other.
pub fn settle(hellos: &[Hello], mismatch: impl Fn(&[&[u8]]) -> Option<String>) -> Result<Settled> {
    let asks = |choice| hellos.iter().position(|h| h.choice == choice);
    let lacks = hellos.iter().enumerate().find_map(|(rank, h)| Some((rank, h.verbs.as_ref().err()?)));
    match (asks(FabricChoice::Verbs), asks(FabricChoice::Soft), lacks) {
        (Some(v), Some(s), _) => Err(Error::usage(format!(
            "rank {v} has OXYGIN_FABRIC=verbs and rank {s} has OXYGIN_FABRIC=soft; set the same on all ranks"
        ))),
        (Some(v), None, Some((rank, why))) => Err(Error::usage(format!(
            "rank {v} has OXYGIN_FABRIC=verbs, but rank {rank} cannot use verbs: {why}; mend that or set \
             OXYGIN_FABRIC=auto"
        ))),
        (_, Some(s), _) => Ok(Settled::Soft(format!("rank {s} has OXYGIN_FABRIC=soft"))),
        (_, None, Some((rank, why))) => Ok(Settled::Soft(format!("rank {rank} cannot use verbs: {why}"))),
        (demanded, None, None) => {
            let verbs: Vec<&[u8]> = hellos.iter().filter_map(|h| h.verbs.as_deref().ok()).collect();
            match (mismatch(&verbs), demanded) {
                (None, _) => Ok(Settled::Verbs),
                (Some(why), None) => Ok(Settled::Soft(why)),
                (Some(why), Some(v)) => Err(Error::usage(format!("rank {v} has OXYGIN_FABRIC=verbs, but {why}"))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(choice: FabricChoice, verbs: bool) -> Hello {
        let verbs = if verbs { Ok(vec![1]) } else { Err("port down".into()) };
        Hello { choice, verbs, soft: vec![2, 3] }
    }

    #[test]
    fn encoded_hellos_parse_and_cut_ones_do_not() {
        for h in [hello(FabricChoice::Auto, true), hello(FabricChoice::Soft, false)] {
            let m = h.encode();
            assert_eq!(Hello::parse(0, &m).unwrap(), h);
            for cut in 0..m.len() {
                assert!(Hello::parse(4, &m[..cut]).unwrap_err().message().contains("rank 4"));
            }
        }
    }

    #[test]
    fn all_ranks_settle_on_one_fabric() {
        use FabricChoice::*;
        let table = [
            (vec![(Auto, true), (Auto, true)], Ok(true), ""),
            (vec![(Verbs, true), (Auto, true)], Ok(true), ""),
            (vec![(Auto, true), (Auto, false)], Ok(false), "rank 1 cannot use verbs: port down"),
            (vec![(Auto, true), (Auto, true), (Soft, true)], Ok(false), "rank 2 has OXYGIN_FABRIC=soft"),
            (vec![(Verbs, true), (Auto, false)], Err(()), "rank 1 cannot use verbs: port down"),
            (vec![(Soft, true), (Verbs, true)], Err(()), "rank 1 has OXYGIN_FABRIC=verbs and rank 0"),
        ];
        for (ranks, want, words) in table {
            let hellos: Vec<_> = ranks.iter().map(|&(c, v)| hello(c, v)).collect();
            match (settle(&hellos, |_| None), want) {
                (Ok(Settled::Verbs), Ok(true)) => {}
                (Ok(Settled::Soft(why)), Ok(false)) => assert!(why.contains(words), "{why}"),
                (Err(e), Err(())) => assert!(e.message().contains(words), "{e}"),
                (got, _) => panic!("{ranks:?}: {got:?}"),
            }
        }
    }

    #[test]
    fn devices_that_do_not_fit_each_other_leave_the_soft_fabric() {
        let mismatch = |verbs: &[&[u8]]| (verbs.len() == 2).then(|| "rank 1 is on iWARP".to_owned());
        let auto = [hello(FabricChoice::Auto, true), hello(FabricChoice::Auto, true)];
        assert_eq!(settle(&auto, mismatch).unwrap(), Settled::Soft("rank 1 is on iWARP".into()));
        let demanded = [hello(FabricChoice::Auto, true), hello(FabricChoice::Verbs, true)];
        let e = settle(&demanded, mismatch).unwrap_err();
        assert!(e.message().contains("rank 1 has OXYGIN_FABRIC=verbs, but rank 1 is on iWARP"), "{e}");
    }
}
