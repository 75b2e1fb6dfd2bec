//! What each rank says of itself at connect, and the choice of one fabric that all ranks compute from it.

use crate::comm::backend::offer::EngineOffer;
use crate::config::FabricChoice;
use crate::error::{Error, Result};
use crate::sys::version;
use crate::sys::wire::{Reader, Writer};

/// Version of this message and of what fabrics put into it and say to each other later; whoever changes one of these
/// raises it. Ranks of different versions refuse each other with a sentence. The version and the build behind it stay
/// where they are in all versions from 3 on, so that the sentence can name both builds.
const VERSION: u16 = 11;

/// The first version that says which build it is.
const FIRST_WITH_BUILD: u16 = 3;

/// One rank's word at connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Which build the rank runs; builds that differ may talk, as long as the versions of their messages are the same.
    pub build: String,
    /// What `OXYGIN_FABRIC` asks for there.
    pub choice: FabricChoice,
    /// The verbs fabric's own hello, or why the rank cannot use verbs.
    pub verbs: std::result::Result<Vec<u8>, String>,
    /// The soft fabric's own hello; empty where soft is ruled out.
    pub soft: Vec<u8>,
    /// Which engines the rank could use for device code.
    pub engine: EngineOffer,
}

impl Hello {
    /// The message.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u16(VERSION).bytes(self.build.as_bytes()).u8(match self.choice {
            FabricChoice::Auto => 0,
            FabricChoice::Verbs => 1,
            FabricChoice::Soft => 2,
        });
        match &self.verbs {
            Ok(hello) => w.u8(1).bytes(hello),
            Err(reason) => w.u8(0).bytes(reason.as_bytes()),
        };
        w.bytes(&self.soft).bytes(&self.engine.encode()).finish()
    }

    /// Reads a message from `rank`.
    pub fn parse(rank: u32, message: &[u8]) -> Result<Self> {
        let mut r = Reader::new(message);
        let version = r.u16();
        let build = version::of_peer(match version {
            Some(FIRST_WITH_BUILD..) => r.bytes().unwrap_or_default(),
            _ => &[],
        });
        if let Some(version) = version.filter(|&v| v != VERSION) {
            return Err(Error::protocol(format!(
                "rank {rank} runs oxygin {build}, whose connect message has version {version}; this one is {} and has \
                 version {VERSION}; install builds that speak the same on all ranks",
                version::BUILD
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
            let engine = EngineOffer::parse(r.bytes()?)?;
            r.end()?;
            Some(Self { build, choice, verbs, soft, engine })
        })()
        .ok_or_else(|| {
            Error::protocol(format!("rank {rank} sent a malformed connect message of {} bytes", message.len()))
        })
    }
}

/// What the log says where ranks run other builds than this one, which is allowed: the first of them by name.
pub fn other_builds(hellos: &[Hello]) -> Option<String> {
    let mut others = hellos.iter().enumerate().filter(|(_, hello)| hello.build != version::BUILD);
    let (rank, first) = others.next()?;
    Some(format!(
        "{} of {} ranks run another build of oxygin than this one, {}; the first is rank {rank} with {}; they \
         speak the same protocols",
        others.count() + 1,
        hellos.len(),
        version::BUILD,
        first.build
    ))
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
    use crate::comm::backend::report::QueueOwner;
    use crate::config::Config;

    fn hello(choice: FabricChoice, verbs: bool) -> Hello {
        let verbs = if verbs { Ok(vec![1]) } else { Err("port down".into()) };
        let engine = EngineOffer::new(&Config::default(), QueueOwner::Nccl, Err("no mlx5 device".into()));
        Hello { build: version::BUILD.into(), choice, verbs, soft: vec![2, 3], engine }
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
    fn versions_that_differ_are_refused_with_both_builds_in_the_sentence() {
        let mut of_later =
            Hello { build: "9.8.7 (commit 0a1b2c3d4e5f)".into(), ..hello(FabricChoice::Auto, true) }.encode();
        of_later[0] = VERSION as u8 + 1;
        of_later.extend(b"what later versions add");
        // Before version 3 the fabric that is asked for came right behind the version.
        let of_earlier = [2, 0, 0, 0, 1, 0, 0, 0, b'x', 0, 0, 0, 0];
        for (message, theirs, number) in [
            (&of_later[..], "9.8.7 (commit 0a1b2c3d4e5f)", &format!("version {}", VERSION + 1)[..]),
            (&of_earlier, "of an earlier version", "version 2"),
        ] {
            let error = Hello::parse(3, message).unwrap_err();
            let ours = format!("version {VERSION}");
            let said = ["rank 3", theirs, number, version::BUILD, &ours];
            assert!(said.iter().all(|words| error.message().contains(words)), "{error}");
        }
    }

    #[test]
    fn builds_may_differ_where_versions_do_not() {
        let other = Hello { build: "0.1.0 (commit 0a1b2c3d4e5f)".into(), ..hello(FabricChoice::Auto, true) };
        assert_eq!(Hello::parse(1, &other.encode()).unwrap(), other);
        assert!(other_builds(&[hello(FabricChoice::Auto, true)]).is_none());
        let said = other_builds(&[hello(FabricChoice::Auto, true), other.clone(), other]).unwrap();
        assert!(said.starts_with("2 of 3 ranks") && said.contains("rank 1") && said.contains("0a1b2c3d4e5f"), "{said}");
        assert!(said.contains(version::BUILD), "{said}");
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
