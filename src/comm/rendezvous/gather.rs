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

/// What the driver is to do.
#[derive(Debug)]
pub enum Action {
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
    /// The rank has its answer. Nothing of this connection is to be reported any more in this step; if the call goes on,
    /// it is where the rank brings its next request ([`Gather::kept`]).
    Keep(Conn, Kept),
}

/// Who is at the other end of a connection that outlives a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
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
    Kept(u32),
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
    /// When to conclude because some rank's deadline passed.
    settle: Option<Instant>,
    beats: Beats,
    /// Who knows that the step failed, or never will.
    told: BTreeSet<u32>,
    phase: Phase,
    actions: VecDeque<Action>,
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
        self.job.silence()
    }

    /// Whether new connections are wanted.
    pub fn accepting(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Failing { .. })
    }

    /// A connection from `peer` is there.
    pub fn accepted(&mut self, conn: Conn, peer: SocketAddr, now: Instant) {
        self.links.insert(conn, Link { peer, bytes: Vec::new(), stage: Stage::Stranger(now) });
        self.strangers.insert(conn);
        if self.strangers.len() > MAX_STRANGERS + self.brought.len() {
            self.drop_oldest_stranger();
        }
    }

    /// A connection is still there from the step before, in the same call.
    pub fn kept(&mut self, conn: Conn, who: Kept) {
        self.links.insert(conn, Link { peer: who.peer, bytes: Vec::new(), stage: Stage::Kept(who.rank) });
    }

    /// Closes the stranger that has been here longest: the driver is short of descriptors. False: there is none.
    pub fn drop_oldest_stranger(&mut self) -> bool {
        let oldest = self.strangers.first().copied();
        oldest.inspect(|&conn| self.close(conn)).is_some()
    }

    /// Bytes came.
    pub fn received(&mut self, conn: Conn, bytes: &[u8], now: Instant) {
        let Some(link) = self.links.get_mut(&conn).filter(|_| !bytes.is_empty()) else { return };
        match link.stage {
            Stage::Stranger(_) | Stage::Kept(_) => {
                // Its deadline in the step before passed while the answer was on its way.
                let late = matches!(link.stage, Stage::Kept(_)) && link.bytes.is_empty() && bytes[0] == wire::EXPIRED;
                link.bytes.extend_from_slice(&bytes[usize::from(late)..]);
                match RequestHead::parse(&link.bytes) {
                    Ok(None) => {}
                    Ok(Some(head)) if head.token == self.job.token => {
                        link.stage = Stage::Head(head);
                        self.strangers.remove(&conn);
                        self.whole(conn, now);
                    }
                    bad => {
                        let why = bad.err().map_or("a wrong token", |malformed| malformed.0);
                        log::debug!("{}: dropped a connection from {}: {why}", self.name, link.peer);
                        self.close(conn);
                    }
                }
            }
            Stage::Head(head) => {
                // Nobody of ours sends more than the request and one byte; what is more is not kept.
                let room = (head.total() + 2).saturating_sub(link.bytes.len());
                link.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
                self.whole(conn, now);
            }
            Stage::Waiting { rank, .. } => self.more(conn, rank, bytes, now),
            Stage::Answering { .. } => {}
        }
    }

    /// Takes a request if it is complete.
    fn whole(&mut self, conn: Conn, now: Instant) {
        let Some(link) = self.links.get_mut(&conn) else { return };
        let Stage::Head(head) = link.stage else { return };
        if link.bytes.len() < head.total() {
            return;
        }
        let mut bytes = std::mem::take(&mut link.bytes);
        let rest = bytes.split_off(head.total());
        self.request(conn, head, bytes, now);
        if let Some(Link { stage: Stage::Waiting { rank, .. }, .. }) = self.links.get(&conn) {
            self.more(conn, *rank, &rest, now);
        }
    }

    /// A complete request with the right token.
    fn request(&mut self, conn: Conn, head: RequestHead, bytes: Vec<u8>, now: Instant) {
        let peer = self.links[&conn].peer;
        let (rank, mine) = (head.rank, self.job.nranks());
        let (name, failure) = match Request::parse(&bytes) {
            Ok(request) => (request.name.to_owned(), request.common.err()),
            Err(malformed) => {
                let sentence = format!("{}: {peer} shows this job's token but sent {malformed}", self.name);
                self.fail(NcclResult::REMOTE_ERROR, sentence, now);
                return self.close(conn);
            }
        };
        if head.step < self.step {
            return self.too_late(conn, &head, &name);
        }
        let who = if rank < mine { self.job.rank(rank) } else { format!("rank {rank} (at {peer})") };
        if head.step > self.step {
            // Never in the middle of a step that goes well: a rank leaves one only with its answer, or in despair.
            let sentence = format!("{}: {who} has given this step up and is in {name} already", self.name);
            self.fail(NcclResult::REMOTE_ERROR, sentence, now);
            return self.answer(conn, wire::encode_again(head.step).into(), None);
        }
        let wrong = if head.nranks != mine {
            Some(format!("{who} says that there are {} ranks while rank 0 says {mine}", head.nranks))
        } else if rank == 0 {
            Some(format!("a second process, at {peer}, says that it is rank 0"))
        } else if name != self.name {
            Some(format!("{who} is in {name} while rank 0 is in {}", self.name))
        } else if let Some(first) = &self.brought[rank as usize] {
            let first = self.links.get(&first.conn).map_or("a connection closed since".into(), |l| l.peer.to_string());
            Some(format!("{who} came twice, from {first} and from {peer}"))
        } else {
            None
        };
        self.set_stage(conn, Stage::Waiting { rank, expired: false });
        match wrong {
            None => self.keep(conn, head, failure, bytes),
            Some(wrong) => self.fail(NcclResult::INVALID_USAGE, format!("{}: {wrong}", self.name), now),
        }
        let waits = matches!(self.links.get(&conn), Some(Link { stage: Stage::Waiting { .. }, .. }));
        if let (Phase::Failing { failure, .. }, true) = (&self.phase, waits) {
            let bytes = wire::encode_failed(head.step, failure);
            self.answer(conn, bytes.into(), Some(rank));
        }
    }

    /// Answers a rank that comes to a step that is over.
    fn too_late(&mut self, conn: Conn, head: &RequestHead, name: &str) {
        let mut sentence = format!("{name}: over before {} came", self.job.rank(head.rank));
        if let Some((_, why)) = self.earlier.as_ref().filter(|(step, _)| *step == head.step) {
            sentence = format!("{sentence}; {why}");
        }
        let failure = Failure { code: NcclResult::TIMEOUT.0, sentence };
        self.answer(conn, wire::encode_failed(head.step, &failure).into(), None);
    }

    /// Stores a contribution to this step. The step is concluded at the next tick, when whatever else has happened is
    /// known: a rank that gave up has perhaps left its request and its farewell in one piece.
    fn keep(&mut self, conn: Conn, head: RequestHead, failure: Option<Failure>, bytes: Vec<u8>) {
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        let Ok(request) = Request::parse(&bytes) else { return };
        let common = request.common.as_ref().map_or(0, |common| common.len());
        let addressed = bytes.len() - request.addressed.len();
        let common = addressed - common..addressed;
        let slice = request.addressed.len() / self.brought.len();
        if let Some(failure) = failure {
            self.failed.insert(head.rank, failure);
        }
        self.brought[head.rank as usize] = Some(Brought { bytes, common, addressed, slice, conn });
        self.missing -= 1;
    }

    /// Bytes behind a request: the one that says that its sender's deadline passed, or nonsense.
    fn more(&mut self, conn: Conn, rank: u32, bytes: &[u8], now: Instant) {
        match bytes {
            [] => {}
            [wire::EXPIRED] => {
                self.set_stage(conn, Stage::Waiting { rank, expired: true });
                self.settle.get_or_insert(now + SETTLE);
            }
            _ => {
                let sentence = format!("{}: {} sent bytes behind its request", self.name, self.job.rank(rank));
                self.fail(NcclResult::REMOTE_ERROR, sentence, now);
            }
        }
    }

    /// Everything of an [`Action::Send`] is sent.
    pub fn sent(&mut self, conn: Conn) {
        if let Some(Link { stage: Stage::Answering { tells }, peer, .. }) = self.links.get(&conn) {
            let (tells, peer) = (*tells, *peer);
            self.told.extend(tells);
            match (tells, &self.phase) {
                (Some(rank), Phase::Answering { .. }) => {
                    self.links.remove(&conn);
                    self.actions.push_back(Action::Keep(conn, Kept { rank, peer }));
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
            Stage::Kept(rank) => self.lost(rank, "went away between two steps", now),
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
                if let (Phase::Answering { outcome, .. }, Some(rank)) = (&mut self.phase, tells) {
                    let sentence = format!("{}: {} went away before its answer", self.name, self.job.rank(rank));
                    *outcome = Err(Failure { code: NcclResult::REMOTE_ERROR.0, sentence });
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
        match &mut self.phase {
            Phase::Open if self.missing == 0 => self.complete(now),
            Phase::Open if now >= self.deadline || self.settle.is_some_and(|at| now >= at) => self.expire(now),
            Phase::Open if self.beats.is_due(now) => self.beat(),
            Phase::Answering { until, outcome } if now >= *until => {
                let slow: Vec<u32> = self.links.values().filter_map(|link| link.stage.tells()).collect();
                let sentence = format!("{}: {} did not read the answer", self.name, self.job.ranks(&slow));
                *outcome = Err(Failure { code: NcclResult::TIMEOUT.0, sentence });
                self.links.keys().copied().collect::<Vec<_>>().into_iter().for_each(|conn| self.close(conn));
            }
            Phase::Failing { until, .. } if now >= *until => {
                self.links.keys().copied().collect::<Vec<_>>().into_iter().for_each(|conn| self.close(conn));
            }
            _ => {}
        }
        self.finish_if_all_know(now);
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
    pub fn next_action(&mut self) -> Option<Action> {
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

    fn finish_if_all_know(&mut self, now: Instant) {
        let answering = self.links.values().any(|link| matches!(link.stage, Stage::Answering { .. }));
        let over = match &self.phase {
            Phase::Answering { .. } => !answering,
            Phase::Failing { until, .. } => !answering && (self.told.len() == self.brought.len() || now >= *until),
            _ => false,
        };
        if over {
            self.phase = match std::mem::replace(&mut self.phase, Phase::Open) {
                Phase::Answering { outcome, .. } => Phase::Done(outcome),
                Phase::Failing { failure, .. } => Phase::Done(Err(failure)),
                other => other,
            };
        }
    }

    /// The deadline passed here or on another rank.
    fn expire(&mut self, now: Instant) {
        let absent: Vec<u32> = (0..).zip(&self.brought).filter(|(_, b)| b.is_none()).map(|(rank, _)| rank).collect();
        let gone: Vec<u32> = self.gave_up.iter().copied().collect();
        let mut sentence = match &gone[..] {
            [] => self.job.did_not_come(&self.name, &absent),
            gone => {
                let mut sentence = format!(
                    "{}: {} gave up after {} s before rank 0 came",
                    self.name,
                    self.job.ranks(gone),
                    self.job.timeout.as_secs_f64()
                );
                if !absent.is_empty() {
                    sentence += &format!("; {} did not come either", self.job.ranks(&absent));
                }
                sentence
            }
        };
        if !self.failed.is_empty() {
            sentence += &format!("; {}", self.job.failures(&self.failed));
        }
        self.fail(NcclResult::TIMEOUT, sentence, now);
        if let Phase::Failing { until, .. } = &mut self.phase {
            // The absent had their time: nobody waits for them any longer.
            self.told.extend(absent);
            *until = (*until).max(now + LINGER);
        }
    }

    /// All ranks came.
    fn complete(&mut self, now: Instant) {
        if !self.failed.is_empty() {
            return self.fail(
                NcclResult::REMOTE_ERROR,
                format!("{}: {}", self.name, self.job.failures(&self.failed)),
                now,
            );
        }
        if !self.gave_up.is_empty() {
            return self.expire(now);
        }
        let brought: Vec<Brought> = std::mem::take(&mut self.brought).into_iter().flatten().collect();
        self.brought.resize_with(brought.len(), || None);
        let commons = brought.iter().map(|b| &b.bytes[b.common.clone()]);
        let own = |rank: usize| {
            wire::encode_list(brought.iter().map(move |b| &b.bytes[b.addressed + rank * b.slice..][..b.slice]))
        };
        let (common, mine) = (wire::encode_list(commons), own(0));
        if (common.len() + mine.len()) as u64 > wire::MAX_REPLY_BODY {
            let sentence = format!("{}: the ranks brought more than {} bytes", self.name, wire::MAX_REPLY_BODY);
            return self.fail(NcclResult::INVALID_USAGE, sentence, now);
        }
        // Each sender's slices have one length, so every rank's own part has the same: one head serves all.
        let mut shared = wire::gathered_head(self.step, common.len(), mine.len());
        shared.extend_from_slice(&common);
        let shared: Arc<[u8]> = shared.into();
        let until = self.deadline.max(now) + ANSWER_TIME;
        self.phase = Phase::Answering { until, outcome: Ok((shared.clone(), mine)) };
        for (rank, one) in brought.iter().enumerate().skip(1) {
            self.set_stage(one.conn, Stage::Answering { tells: Some(rank as u32) });
            self.actions.push_back(Action::Send { conn: one.conn, shared: shared.clone(), own: own(rank) });
        }
    }

    /// Tells those who wait that this rank does, too.
    fn beat(&mut self) {
        let waiting = self.links.iter().filter(|(_, link)| matches!(link.stage, Stage::Waiting { .. }));
        let shared: Arc<[u8]> = Arc::new([wire::BEAT]);
        let beats = waiting.map(|(&conn, _)| Action::Send { conn, shared: shared.clone(), own: Vec::new() });
        self.actions.extend(beats);
    }

    /// Fails the step, unless it is over, and tells all who wait.
    fn fail(&mut self, code: NcclResult, sentence: String, now: Instant) {
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        let failure = Failure { code: code.0, sentence };
        let bytes: Arc<[u8]> = wire::encode_failed(self.step, &failure).into();
        self.phase = Phase::Failing { until: now + LINGER, failure };
        let waiting = self.links.iter().filter_map(|(&conn, link)| match link.stage {
            Stage::Waiting { rank, .. } => Some((conn, rank)),
            _ => None,
        });
        for (conn, rank) in waiting.collect::<Vec<_>>() {
            self.answer(conn, bytes.clone(), Some(rank));
        }
        self.told.extend(&self.gave_up);
    }

    fn answer(&mut self, conn: Conn, bytes: Arc<[u8]>, tells: Option<u32>) {
        let tells = tells.filter(|&rank| rank < self.job.nranks());
        self.set_stage(conn, Stage::Answering { tells });
        self.actions.push_back(Action::Send { conn, shared: bytes, own: Vec::new() });
    }

    fn set_stage(&mut self, conn: Conn, stage: Stage) {
        if let Some(link) = self.links.get_mut(&conn) {
            link.stage = stage;
        }
    }

    fn close(&mut self, conn: Conn) {
        self.strangers.remove(&conn);
        if self.links.remove(&conn).is_some() {
            self.actions.push_back(Action::Close(conn));
        }
    }
}

impl Stage {
    fn tells(&self) -> Option<u32> {
        match self {
            Self::Answering { tells } => *tells,
            _ => None,
        }
    }
}
