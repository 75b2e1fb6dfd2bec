//! Every other rank's side of one collective step, without sockets or clocks.
//!
//! The driver tells what happens ([`Visit::connected`], [`Visit::sent`],
//! [`Visit::received`], [`Visit::broken`], [`Visit::tick`]), does what
//! [`Visit::next_action`] says, and stops when [`Visit::outcome`] is there.

use super::job::Job;
use super::wire::{self, Failure, Reply, ReplyHead};
use nccl_plugin_api::NcclResult;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First and longest pause between attempts to connect; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(256);
/// How long a rank whose deadline passed waits for rank 0 to say whom it waited for.
pub const GRACE: Duration = Duration::from_secs(2);

/// What the driver is to do.
#[derive(Debug)]
pub enum Action {
    /// Connect to rank 0, then report [`Visit::connected`] or [`Visit::broken`].
    Connect,
    /// Send these bytes; when all that was to be sent is, report [`Visit::sent`].
    Send(Arc<[u8]>),
    /// Close the connection; nothing of it is to be reported any more.
    Close,
}

/// A reply that gathered everything: its bytes and where in them each rank's are.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// The whole reply.
    pub bytes: Vec<u8>,
    /// Each rank's bytes for all.
    pub common: Vec<Range<usize>>,
    /// Each rank's bytes for this one.
    pub addressed: Vec<Range<usize>>,
}

/// How a step ended.
pub type Outcome = Result<Answer, Failure>;

enum Stage {
    /// Between two attempts.
    Pause(Instant),
    Connecting,
    Talking {
        sent: bool,
        expired: bool,
    },
    Done(Outcome),
}

/// The state of one step on a rank that is not rank 0.
pub struct Visit {
    job: Arc<Job>,
    name: String,
    step: u32,
    request: Arc<[u8]>,
    stage: Stage,
    reply: Vec<u8>,
    /// When this rank gives up, or says so to rank 0.
    deadline: Instant,
    /// When it no longer waits for rank 0's word on that.
    limit: Instant,
    pause: Duration,
    /// Rank 0 took the request once, and then the connection broke.
    met: bool,
    /// What ended the last attempt.
    trouble: Option<String>,
    actions: VecDeque<Action>,
}

impl Visit {
    /// Starts collective step number `step`, called `name`, with this rank's request, from [`wire::encode_request`].
    pub fn new(job: Arc<Job>, step: u32, name: &str, request: Vec<u8>, now: Instant) -> Self {
        let deadline = now + job.timeout;
        Self {
            job,
            name: name.into(),
            step,
            request: request.into(),
            stage: Stage::Connecting,
            reply: Vec::new(),
            deadline,
            limit: deadline + GRACE,
            pause: FIRST_PAUSE,
            met: false,
            trouble: None,
            actions: VecDeque::from([Action::Connect]),
        }
    }

    /// The connection stands.
    pub fn connected(&mut self) {
        self.stage = Stage::Talking { sent: false, expired: false };
        self.actions.push_back(Action::Send(self.request.clone()));
    }

    /// All bytes that were to be sent are.
    pub fn sent(&mut self) {
        if let Stage::Talking { sent, .. } = &mut self.stage {
            *sent = true;
        }
    }

    /// The connection could not be made, or broke, or rank 0 closed it. `refused`: nobody listens there.
    pub fn broken(&mut self, why: &str, refused: bool, now: Instant) {
        if matches!(self.stage, Stage::Done(_)) {
            return;
        }
        if refused && self.met {
            // It listened before, and the listener lives as long as the communicator.
            let sentence = format!("{}: {} went away: its process ended", self.name, self.job.rank(0));
            return self.finish(Err(Failure { code: NcclResult::REMOTE_ERROR.0, sentence }));
        }
        if matches!(self.stage, Stage::Talking { .. }) {
            self.met = true;
        }
        self.trouble = Some(why.into());
        self.again(now);
    }

    fn again(&mut self, now: Instant) {
        self.reply.clear();
        self.stage = Stage::Pause(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    /// Bytes came.
    pub fn received(&mut self, bytes: &[u8], now: Instant) {
        if !matches!(self.stage, Stage::Talking { .. }) {
            return;
        }
        self.reply.extend_from_slice(bytes);
        let reply = match ReplyHead::parse(&self.reply) {
            Ok(None) => return,
            Ok(Some(head)) if head.step == self.step && self.reply.len() < head.total() => return,
            Ok(Some(head)) if head.step == self.step => Reply::parse(&self.reply, self.job.nranks()),
            Ok(Some(_)) => Err(wire::Malformed("a reply to another step")),
            Err(malformed) => Err(malformed),
        };
        match reply {
            Ok(Reply::Gathered { common, addressed }) => {
                let bytes = std::mem::take(&mut self.reply);
                self.finish(Ok(Answer { bytes, common, addressed }));
            }
            Ok(Reply::Failed(failure)) => self.finish(Err(failure)),
            Ok(Reply::Again) => {
                self.trouble = Some("it was still in an earlier step".into());
                self.actions.push_back(Action::Close);
                self.again(now);
            }
            Err(malformed) => {
                let sentence = format!("{}: {} answered {malformed}", self.name, self.job.rank(0));
                self.finish(Err(Failure { code: NcclResult::REMOTE_ERROR.0, sentence }));
            }
        }
    }

    /// Time passed.
    pub fn tick(&mut self, now: Instant) {
        let late = now >= self.deadline;
        match &mut self.stage {
            Stage::Done(_) => {}
            Stage::Talking { sent: true, expired } if now < self.limit => {
                if late && !*expired {
                    *expired = true;
                    self.limit = now + GRACE;
                    // Once the answer has begun there is nothing left to ask.
                    if self.reply.is_empty() {
                        self.actions.push_back(Action::Send(Arc::new([wire::EXPIRED])));
                    }
                }
            }
            Stage::Talking { sent: false, .. } | Stage::Connecting if !late => {}
            Stage::Pause(until) if !late => {
                if now >= *until {
                    self.stage = Stage::Connecting;
                    self.actions.push_back(Action::Connect);
                }
            }
            _ => {
                let mut sentence = self.job.did_not_come(&self.name, &[0]);
                if let Some(trouble) = &self.trouble {
                    sentence += &format!(" (last: {trouble})");
                }
                self.finish(Err(Failure { code: NcclResult::TIMEOUT.0, sentence }));
            }
        }
    }

    /// When [`Visit::tick`] is due next if nothing else happens.
    pub fn wake(&self) -> Instant {
        match &self.stage {
            Stage::Pause(until) => self.deadline.min(*until),
            Stage::Talking { expired: true, .. } => self.limit,
            _ => self.deadline,
        }
    }

    /// The next thing to do, if any.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// How the step ended, once it has.
    pub fn outcome(&mut self) -> Option<&mut Outcome> {
        match &mut self.stage {
            Stage::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    fn finish(&mut self, outcome: Outcome) {
        self.stage = Stage::Done(outcome);
        self.actions.push_back(Action::Close);
    }
}
