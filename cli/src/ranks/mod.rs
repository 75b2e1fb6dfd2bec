//! Ranks to drive a plugin with: forked on this host, or started by hand on several.
//!
//! Every rank has one connection to the *hub*, a process that never loads a plugin: the parent of the ranks forked
//! here. The hub gathers what the ranks tell each other ([`Ranks::gather`]), names those that do not come within the
//! deadline, notices a rank that dies and tells the others, and kills and reaps its children in the end.

mod frame;
mod hub;
mod launch;
mod session;
mod window;
mod wire;

pub use hub::ENDED;
pub use launch::{run, Outcome, Place, Plan};
pub use session::{Session, SessionError, SetUpTimes, Spec};
pub use window::Memory;

use frame::{put_bytes, take_bytes, Kind};
use std::fmt;
use std::time::Duration;
use wire::Wire;

/// First bytes of a greeting over TCP.
const MAGIC: &[u8] = b"oxygin-ranks/1\n";

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Well, with this result.
    Done(Vec<u8>),
    /// It said why it gave up.
    Failed(String),
    /// Its process died or its host went away.
    Died(String),
    /// The run was over before it had ended, because of another rank.
    Aborted(String),
}

/// Why a step among the ranks failed; the text names the rank at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RanksError(String);

impl fmt::Display for RanksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RanksError {}

/// Whether a run failed, by its own words, because a rank never came; the words name it.
pub fn is_absence(why: &str) -> bool {
    why.contains(hub::ABSENT) || why.contains(launch::UNREACHABLE)
}

/// This rank's way to the others, apart from the plugin under test.
pub struct Ranks {
    rank: u32,
    nranks: u32,
    deadline: Duration,
    work: Duration,
    alive: Vec<bool>,
    wire: Wire,
}

impl Ranks {
    fn new(rank: u32, nranks: u32, deadline: Duration, wire: Wire) -> Self {
        Self { rank, nranks, deadline, work: Duration::ZERO, alive: vec![true; nranks as usize], wire }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in all.
    pub fn nranks(&self) -> u32 {
        self.nranks
    }

    /// How long a step may take.
    pub fn deadline(&self) -> Duration {
        self.deadline + self.work
    }

    /// From now on steps may take so much longer, for the work that some ranks have between them.
    pub fn allow(&mut self, work: Duration) {
        self.work = work;
    }

    /// Whether a rank took part in the last step (a dead one does not, where deaths are tolerated).
    pub fn alive(&self, rank: u32) -> bool {
        self.alive.get(rank as usize).copied().unwrap_or(false)
    }

    /// Hands everybody's bytes to everybody, by rank (empty for a dead rank). All ranks call it with the same `step`.
    pub fn gather(&mut self, step: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RanksError> {
        self.gather_within(step, bytes, self.deadline())
    }

    /// [`Ranks::gather`] with a deadline of its own, counted from the arrival of the first rank; the longest that any
    /// rank names holds.
    pub fn gather_within(&mut self, step: &str, bytes: &[u8], deadline: Duration) -> Result<Vec<Vec<u8>>, RanksError> {
        let lost = |e: std::io::Error| RanksError(format!("step '{step}': the connection to the launcher broke: {e}"));
        let mut payload = Vec::new();
        put_bytes(&mut payload, step.as_bytes());
        payload.extend((deadline.as_millis().min(u32::MAX.into()) as u32).to_le_bytes());
        put_bytes(&mut payload, bytes);
        self.wire.send(Kind::Gather, payload).map_err(lost)?;
        // The hub's deadline comes first; this one is for a hub whose host went away.
        let frame = self.wire.wait_frame(deadline * 2 + Duration::from_secs(10)).map_err(lost)?;
        match frame.kind {
            Kind::Gathered => {
                self.unpack(&frame.payload).ok_or_else(|| RanksError(format!("step '{step}': malformed answer")))
            }
            _ => Err(RanksError(String::from_utf8_lossy(&frame.payload).into_owned())),
        }
    }

    fn unpack(&mut self, mut rest: &[u8]) -> Option<Vec<Vec<u8>>> {
        let mut all = Vec::with_capacity(self.nranks as usize);
        for alive in &mut self.alive {
            let (&there, after) = rest.split_first()?;
            rest = after;
            *alive = there == 1;
            all.push(if *alive { take_bytes(&mut rest)?.to_vec() } else { Vec::new() });
        }
        rest.is_empty().then_some(all)
    }

    /// Waits until every living rank is here.
    pub fn barrier(&mut self, step: &str) -> Result<(), RanksError> {
        self.gather(step, &[]).map(drop)
    }

    /// [`Ranks::gather`] of values. For runs in which no rank may die.
    pub fn gather_values<T>(&mut self, step: &str, value: &T) -> Result<Vec<T>, RanksError>
    where
        T: serde::Serialize + serde::de::DeserializeOwned,
    {
        let bad = |e: serde_json::Error| RanksError(format!("step '{step}': {e}"));
        let all = self.gather(step, &serde_json::to_vec(value).map_err(bad)?)?;
        all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(bad)).collect()
    }
}
