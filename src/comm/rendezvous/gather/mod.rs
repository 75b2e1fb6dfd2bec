//! Rank 0's side of one collective step, without sockets or clocks.
//!
//! The driver tells what happens ([`Gather::accepted`], [`Gather::received`],
//! [`Gather::sent`], [`Gather::closed`], [`Gather::tick`]), does what
//! [`Gather::next_action`] says, and stops when [`Gather::outcome`] is there.
//!
//! A connection is a stranger until its request's head shows the token; only
//! strangers are dropped for being slow or too many. What a stranger does never
//! matters to the step. What a rank does may fail it, with a sentence that
//! every rank gets.

mod ending;
mod request;

use super::beats::Beats;
use super::job::Job;
use super::wire::{self, Failure, Request, RequestHead};
use nccl_plugin_api::NcclResult;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a stranger may take for the head of its request.
pub const HELLO_TIME: Duration = Duration::from_secs(5);
/// Strangers at a time, beside as many as there are ranks.
pub const MAX_STRANGERS: usize = 64;
/// After a rank said that its deadline passed: how long rank 0 goes on accepting, so that a rank that came in time
/// but was not accepted yet is not called missing.
pub const SETTLE: Duration = Duration::from_millis(50);
/// After a failure that is known before all ranks came: how long rank 0 stays to tell the others.
pub const LINGER: Duration = Duration::from_secs(1);
/// How long answers may take past the step's deadline.
pub const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Names a connection between driver and machine; higher ones are younger.
pub type Conn = u64;

/// What the driver of rank 0's side is to do.
#[derive(Debug)]
pub enum RootAction {
    /// Send `shared` and then `own`, then report [`Gather::sent`].
    Send {
        /// The connection.
        conn: Conn,
        /// The same for many connections.
        shared: Arc<[u8]>,
        /// This connection's alone.
        own: Vec<u8>,
    },
    /// Close; nothing of this connection is to be reported any more.
    Close(Conn),
    /// The rank has its answer, or went before it had, or took too long and was closed. Nothing of this connection is
    /// to be reported any more in this step; if the call goes on, it is where the rank brings its next request
    /// ([`Gather::kept`]), or nobody does ([`Gather::gone`]).
    Keep(Conn, KeptConnection),
}

/// Who is at the other end of a connection that outlives a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptConnection {
    /// The rank.
    pub rank: u32,
    /// Where the connection comes from.
    pub peer: SocketAddr,
}

/// How a step ended on rank 0: its own reply in two parts, or why it failed.
pub type Outcome = Result<(Arc<[u8]>, Vec<u8>), Failure>;

enum Stage {
    /// No token yet, since then.
    Stranger(Instant),
    /// This rank's since the step before; no request yet.
    KeptConnection(u32),
    /// The head was good; the rest is on its way.
    Head(RequestHead),
    /// Contributed; waits for the answer.
    Waiting { rank: u32, expired: bool },
    /// Being answered; the rank that will know how this step ended then.
    Answering { tells: Option<u32> },
}

struct Link {
    peer: SocketAddr,
    bytes: Vec<u8>,
    stage: Stage,
}

/// What a rank brought.
struct Brought {
    bytes: Vec<u8>,
    common: Range<usize>,
    addressed: usize,
    slice: usize,
    conn: Conn,
}

enum Phase {
    /// Ranks are coming.
    Open,
    /// All came; answers are on their way, until then at the latest.
    Answering { until: Instant, outcome: Outcome },
    /// Failed; ranks are told, those that still come too, until then at the latest.
    Failing { until: Instant, failure: Failure },
    /// Over.
    Done(Outcome),
}

/// The state of one step on rank 0.
pub struct Gather {
    job: Arc<Job>,
    step: u32,
    name: String,
    /// How the step before this one failed here, for a rank that comes too late to it.
    earlier: Option<(u32, String)>,
    deadline: Instant,
    links: BTreeMap<Conn, Link>,
    strangers: BTreeSet<Conn>,
    brought: Vec<Option<Brought>>,
    missing: usize,
    /// Ranks that contributed a failure, and it.
    failed: BTreeMap<u32, Failure>,
    /// Ranks that gave up after their deadline and left.
    gave_up: BTreeSet<u32>,
    /// Ranks that came to a step that was over.
    behind: BTreeSet<u32>,
    /// When to conclude because some rank's deadline passed.
    settle: Option<Instant>,
    beats: Beats,
    /// Who knows that the step failed, or never will.
    told: BTreeSet<u32>,
    phase: Phase,
    actions: VecDeque<RootAction>,
}

/// `Conn` of rank 0's own contribution.
const SELF: Conn = Conn::MAX;

impl Gather {
    /// Starts collective step number `step`, called `name`, with rank 0's own request `mine`, from
    /// [`wire::encode_request`]. `earlier`: number and sentence of an earlier step that failed.
    pub fn new(
        job: Arc<Job>,
        step: u32,
        name: &str,
        mine: Vec<u8>,
        earlier: Option<(u32, String)>,
        now: Instant,
    ) -> Self {
        let nranks = job.addresses.len();
        let mut gather = Self {
            deadline: now + job.timeout,
            beats: Beats::new(job.silence, now),
            job,
            step,
            name: name.into(),
            earlier,
            links: BTreeMap::new(),
            strangers: BTreeSet::new(),
            brought: (0..nranks).map(|_| None).collect(),
            missing: nranks,
            failed: BTreeMap::new(),
            gave_up: BTreeSet::new(),
            behind: BTreeSet::new(),
            settle: None,
            told: BTreeSet::from([0]),
            phase: Phase::Open,
            actions: VecDeque::new(),
        };
        match Request::parse(&mine).map(|request| (request.head, request.common.err())) {
            Ok((head, failure)) => gather.keep(SELF, head, failure, mine),
            Err(error) => gather.fail(NcclResult::INTERNAL_ERROR, format!("{name}: rank 0: {error}"), now),
        }
        gather
    }

    /// How long a rank's host may stay silent before its connection counts as broken.
    pub fn silence(&self) -> Duration {
        self.job.silence
    }

    /// Whether new connections are wanted.
    pub fn accepting(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Failing { .. })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.brought.len()
    }

    /// A connection from `peer` is there.
    pub fn accepted(&mut self, conn: Conn, peer: SocketAddr, now: Instant) {
        self.links.insert(conn, Link { peer, bytes: Vec::new(), stage: Stage::Stranger(now) });
        self.strangers.insert(conn);
        if self.strangers.len() > MAX_STRANGERS + self.brought.len() {
            self.drop_oldest_stranger();
        }
    }

    /// A rank had gone when the step before ended, in the same call.
    pub fn gone(&mut self, rank: u32, now: Instant) {
        self.lost(rank, "went away between two steps", now);
    }

    /// A connection is still there from the step before, in the same call.
    pub fn kept(&mut self, conn: Conn, who: KeptConnection) {
        self.links.insert(conn, Link { peer: who.peer, bytes: Vec::new(), stage: Stage::KeptConnection(who.rank) });
    }

    /// Closes the stranger that has been here longest: the driver is short of descriptors. False: there is none.
    pub fn drop_oldest_stranger(&mut self) -> bool {
        let oldest = self.strangers.first().copied();
        oldest.inspect(|&conn| self.close(conn)).is_some()
    }

    /// Everything of a [`RootAction::Send`] is sent.
    pub fn sent(&mut self, conn: Conn) {
        if let Some(Link { stage: Stage::Answering { tells }, peer, .. }) = self.links.get(&conn) {
            let (tells, peer) = (*tells, *peer);
            self.told.extend(tells);
            match (tells, &self.phase) {
                (Some(rank), Phase::Answering { .. }) => {
                    self.links.remove(&conn);
                    self.actions.push_back(RootAction::Keep(conn, KeptConnection { rank, peer }));
                }
                _ => self.close(conn),
            }
        }
    }

    /// The peer closed, or the connection broke.
    pub fn closed(&mut self, conn: Conn, now: Instant) {
        self.strangers.remove(&conn);
        let Some(link) = self.links.remove(&conn) else { return };
        match link.stage {
            Stage::Stranger(_) => {}
            Stage::KeptConnection(rank) => self.lost(rank, "went away between two steps", now),
            Stage::Head(head) if head.step != self.step || head.rank >= self.job.nranks() => {}
            Stage::Head(head) => {
                let (got, total) = (link.bytes.len(), head.total());
                self.lost(head.rank, &format!("sent {got} of {total} bytes and went away"), now)
            }
            Stage::Waiting { rank, expired: true } => {
                self.gave_up.insert(rank);
            }
            Stage::Waiting { rank, .. } => self.lost(rank, "went away before all ranks came", now),
            Stage::Answering { tells } => {
                self.told.extend(tells);
                // Others know already that all ranks came: the step has ended well for them, and does so here. The next
                // one fails, for all.
                if let (Phase::Answering { .. }, Some(rank)) = (&self.phase, tells) {
                    self.actions.push_back(RootAction::Keep(conn, KeptConnection { rank, peer: link.peer }));
                }
            }
        }
    }

    fn lost(&mut self, rank: u32, how: &str, now: Instant) {
        self.told.insert(rank);
        let sentence =
            format!("{}: {} {how}: its process ended or the connection broke", self.name, self.job.rank(rank));
        self.fail(NcclResult::REMOTE_ERROR, sentence, now);
    }

    /// Time passed, or all that happened until `now` has been reported. To be called before each wait.
    pub fn tick(&mut self, now: Instant) {
        while let Some(&conn) = self.strangers.first() {
            let Some(Link { stage: Stage::Stranger(since), peer, .. }) = self.links.get(&conn) else { break };
            if *since + HELLO_TIME > now {
                break;
            }
            log::debug!("{}: dropped a connection from {peer} that did not introduce itself", self.name);
            self.close(conn);
        }
        let expires = self.is_about_to_expire(now);
        // Whose thread was held up finds room for the rest of an answer only now.
        let was_held_up = now.saturating_duration_since(self.wake()) > SETTLE;
        match &mut self.phase {
            Phase::Answering { until, .. } if was_held_up && now >= *until => *until = now + ANSWER_TIME,
            Phase::Open if self.missing == 0 => self.complete(now),
            Phase::Open if expires => self.expire(now),
            Phase::Open if self.beats.is_due(now) => self.beat(),
            Phase::Answering { until, .. } if now >= *until => self.leave_slow_readers(),
            Phase::Failing { until, .. } if now >= *until => {
                self.links.keys().copied().collect::<Vec<_>>().into_iter().for_each(|conn| self.close(conn));
            }
            _ => {}
        }
        self.finish_if_all_know(now);
    }

    /// Answers have had their time. All ranks came, and those that read theirs know it: the step has ended well for
    /// them, and does so here. Ranks that have not read theirs are gone for the next one, which fails for all at once.
    fn leave_slow_readers(&mut self) {
        for (conn, link) in std::mem::take(&mut self.links) {
            self.strangers.remove(&conn);
            self.actions.push_back(RootAction::Close(conn));
            if let Stage::Answering { tells: Some(rank) } = link.stage {
                log::warn!("{}: {} did not read the answer in time", self.name, self.job.rank(rank));
                self.told.insert(rank);
                self.actions.push_back(RootAction::Keep(conn, KeptConnection { rank, peer: link.peer }));
            }
        }
    }

    /// Whether [`Gather::tick`] is about to name those who did not come. To be asked before it: rank 0 may have been
    /// held up, and they may have come meanwhile.
    pub fn is_about_to_expire(&self, now: Instant) -> bool {
        let is_late = now >= self.deadline || self.settle.is_some_and(|at| now >= at);
        matches!(self.phase, Phase::Open) && self.missing > 0 && is_late
    }

    /// When [`Gather::tick`] is due next if nothing else happens.
    pub fn wake(&self) -> Instant {
        let phase = match &self.phase {
            Phase::Open => self.settle.map_or(self.deadline, |at| at.min(self.deadline)).min(self.beats.next()),
            Phase::Answering { until, .. } | Phase::Failing { until, .. } => *until,
            Phase::Done(_) => self.deadline,
        };
        let oldest = self.strangers.first().and_then(|conn| self.links.get(conn));
        match oldest {
            Some(Link { stage: Stage::Stranger(since), .. }) => phase.min(*since + HELLO_TIME),
            _ => phase,
        }
    }

    /// The next thing to do, if any.
    pub fn next_action(&mut self) -> Option<RootAction> {
        self.actions.pop_front()
    }

    /// How the step ended, once it has and every rank that can know does.
    pub fn outcome(&mut self, now: Instant) -> Option<&Outcome> {
        self.finish_if_all_know(now);
        match &self.phase {
            Phase::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Tells those who wait that this rank does, too.
    fn beat(&mut self) {
        let waiting = self.links.iter().filter(|(_, link)| matches!(link.stage, Stage::Waiting { .. }));
        let shared: Arc<[u8]> = Arc::new([wire::BEAT]);
        let beats = waiting.map(|(&conn, _)| RootAction::Send { conn, shared: shared.clone(), own: Vec::new() });
        self.actions.extend(beats);
    }

    fn answer(&mut self, conn: Conn, bytes: Arc<[u8]>, tells: Option<u32>) {
        let tells = tells.filter(|&rank| rank < self.job.nranks());
        self.set_stage(conn, Stage::Answering { tells });
        self.actions.push_back(RootAction::Send { conn, shared: bytes, own: Vec::new() });
    }

    fn set_stage(&mut self, conn: Conn, stage: Stage) {
        if let Some(link) = self.links.get_mut(&conn) {
            link.stage = stage;
        }
    }

    fn close(&mut self, conn: Conn) {
        self.strangers.remove(&conn);
        if self.links.remove(&conn).is_some() {
            self.actions.push_back(RootAction::Close(conn));
        }
    }
}
