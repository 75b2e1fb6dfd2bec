//! Every other rank's side of one collective step, without sockets or clocks.
//!
//! The driver tells what happens ([`Visit::connected`], [`Visit::sent`],
//! [`Visit::received`], [`Visit::broken`], [`Visit::tick`]), does what
//! [`Visit::next_action`] says, and stops when [`Visit::outcome`] is there.

use super::beats::{Expectation, DOUBT};
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
/// How long connections to a rank 0 that was never reached may be refused: a network that is being set up does that.
pub const REFUSED: Duration = Duration::from_secs(1);

/// Why there is no connection to rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Its host says that nobody listens there.
    Refused,
    /// The kernel says that its host, or a network on the way, cannot be reached.
    Unreachable,
    /// The connection stood, and its host, or the network between, has not answered for long.
    Silent,
    /// Anything else: it closed, this host has no room, or nothing answers an attempt. That is no reason to give up:
    /// a kernel whose queue of connections is full is silent, too.
    Otherwise,
}

/// What the driver of a rank that visits rank 0 is to do.
#[derive(Debug)]
pub enum VisitorAction {
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
    /// When it no longer waits for rank 0's word on that; once that has passed, it looks a last time.
    limit: Instant,
    doubted: bool,
    pause: Duration,
    life: Expectation,
    /// Rank 0 listened once, in this step or an earlier one. It does so as long as the communicator lives.
    met: bool,
    /// Since when every attempt was refused.
    refused: Option<Instant>,
    /// Since when the kernel has said of every attempt that the host cannot be reached.
    unreachable: Option<Instant>,
    /// What ended the last attempt.
    trouble: Option<String>,
    actions: VecDeque<VisitorAction>,
}

impl Visit {
    /// Starts collective step number `step`, called `name`, with this rank's request, from [`wire::encode_request`].
    /// `met`: a connection to rank 0 stood in an earlier step.
    pub fn new(job: Arc<Job>, step: u32, name: &str, request: Vec<u8>, met: bool, now: Instant) -> Self {
        let deadline = now + job.timeout;
        Self {
            life: Expectation::new(job.silence),
            job,
            name: name.into(),
            step,
            request: request.into(),
            stage: Stage::Connecting,
            reply: Vec::new(),
            deadline,
            limit: deadline + GRACE,
            doubted: false,
            pause: FIRST_PAUSE,
            met,
            refused: None,
            unreachable: None,
            trouble: None,
            actions: VecDeque::from([VisitorAction::Connect]),
        }
    }

    /// The connection stands.
    pub fn connected(&mut self) {
        (self.met, self.refused, self.unreachable) = (true, None, None);
        self.stage = Stage::Talking { sent: false, expired: false };
        self.actions.push_back(VisitorAction::Send(self.request.clone()));
    }

    /// How long rank 0's host may stay silent.
    pub fn silence(&self) -> Duration {
        self.job.silence
    }

    /// Whether rank 0 was there, in this step or an earlier one.
    pub fn met(&self) -> bool {
        self.met
    }

    /// All bytes that were to be sent are.
    pub fn sent(&mut self) {
        if let Stage::Talking { sent, .. } = &mut self.stage {
            *sent = true;
        }
    }

    /// The connection could not be made, or broke, or rank 0 closed it.
    pub fn broken(&mut self, why: &str, how: Broken, now: Instant) {
        if matches!(self.stage, Stage::Done(_)) {
            return;
        }
        self.trouble = Some(why.into());
        if how != Broken::Refused {
            self.refused = None;
        }
        if how != Broken::Unreachable {
            self.unreachable = None;
        }
        match how {
            Broken::Refused => {
                let since = *self.refused.get_or_insert(now);
                if self.met {
                    return self.fail(&format!("{} went away: nobody listens there any more", self.root()));
                }
                if now >= since + REFUSED {
                    let why = "it has ended, or that address leads to another host here";
                    return self.fail(&format!("nobody listens where {} should: {why}", self.root()));
                }
            }
            // A connection that stood falls silent only after the kernel has asked for long.
            Broken::Silent | Broken::Unreachable if matches!(self.stage, Stage::Talking { .. }) => {
                return self.unanswered();
            }
            Broken::Unreachable => {
                self.unreachable.get_or_insert(now);
            }
            Broken::Silent | Broken::Otherwise => {}
        }
        self.again(now);
    }

    fn root(&self) -> String {
        self.job.rank(0)
    }

    fn fail(&mut self, what: &str) {
        let sentence = format!("{}: {what}", self.name);
        self.finish(Err(Failure { code: NcclResult::REMOTE_ERROR.0, sentence }));
    }

    fn unanswered(&mut self) {
        self.fail(&format!(
            "{} went away: its host, or the network to it, has not answered for {} s (last: {}); OXYGIN_PEER_TIMEOUT \
             sets how long to wait",
            self.root(),
            self.job.silence.as_secs_f64(),
            self.trouble.as_deref().unwrap_or("no answer")
        ));
    }

    /// When a host that cannot be reached counts as gone.
    fn patience(&self) -> Option<Instant> {
        self.unreachable.map(|since| since + self.job.silence)
    }

    fn again(&mut self, now: Instant) {
        self.reply.clear();
        self.life.forget();
        self.stage = Stage::Pause(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    /// Bytes came.
    pub fn received(&mut self, bytes: &[u8], now: Instant) {
        if !matches!(self.stage, Stage::Talking { .. }) {
            return;
        }
        let beats = bytes.iter().take_while(|&&b| self.reply.is_empty() && b == wire::BEAT).count();
        if beats > 0 {
            self.life.heard(now);
        }
        self.reply.extend_from_slice(&bytes[beats..]);
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
                self.actions.push_back(VisitorAction::Close);
                self.again(now);
            }
            Err(malformed) => {
                self.fail(&format!("{} answered {malformed}", self.root()));
            }
        }
    }

    /// Time passed.
    pub fn tick(&mut self, now: Instant) {
        if matches!(self.stage, Stage::Talking { .. }) && self.life.is_over(now) {
            let (silent, root) = (self.job.silence.as_secs_f64(), self.job.rank(0));
            let sentence = format!(
                "{}: {root} has said nothing for {silent} s in this step: it is stopped or out of reach, or its \
                 process has ended and a child of it holds the connections; OXYGIN_PEER_TIMEOUT sets how long to wait",
                self.name
            );
            return self.finish(Err(Failure { code: NcclResult::REMOTE_ERROR.0, sentence }));
        }
        let is_asked = matches!(self.stage, Stage::Talking { sent: true, .. });
        if is_asked && now >= self.limit && !std::mem::replace(&mut self.doubted, true) {
            // This rank may have been stopped itself, and the answer is there.
            self.limit = now + DOUBT;
        }
        let late = now >= self.deadline;
        let unanswered = !late && self.patience().is_some_and(|until| now >= until);
        match &mut self.stage {
            Stage::Connecting | Stage::Pause(_) if unanswered => self.unanswered(),
            Stage::Done(_) => {}
            Stage::Talking { sent: true, expired } if now < self.limit => {
                if late && !*expired {
                    *expired = true;
                    self.limit = now + GRACE;
                    // Once the answer has begun there is nothing left to ask.
                    if self.reply.is_empty() {
                        self.actions.push_back(VisitorAction::Send(Arc::new([wire::EXPIRED])));
                    }
                }
            }
            Stage::Talking { sent: false, .. } | Stage::Connecting if !late => {}
            Stage::Pause(until) if !late => {
                if now >= *until {
                    self.stage = Stage::Connecting;
                    self.actions.push_back(VisitorAction::Connect);
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
        let deadline = self.patience().map_or(self.deadline, |until| until.min(self.deadline));
        let stage = match &self.stage {
            Stage::Pause(until) => deadline.min(*until),
            Stage::Talking { expired: true, .. } => self.limit,
            _ => deadline,
        };
        self.life.until().map_or(stage, |until| until.min(stage))
    }

    /// The next thing to do, if any.
    pub fn next_action(&mut self) -> Option<VisitorAction> {
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
        self.actions.push_back(VisitorAction::Close);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply of one rank's two bytes for all, and none for this one.
    fn reply(step: u32) -> Vec<u8> {
        let lists = [[&b"ab"[..], b""], [b"", b""]].map(|list| wire::encode_list(list.into_iter()));
        [wire::gathered_head(step, lists[0].len(), lists[1].len()), lists.concat()].concat()
    }

    /// A rank that was stopped for longer than any deadline finds what came meanwhile, and nothing if nothing did.
    #[test]
    fn who_was_stopped_itself_reads_before_it_gives_up() {
        let (s, begun) = (Duration::from_secs, Instant::now());
        let token = crate::comm::handle::Token::from_bytes([0; 16]);
        let job = Arc::new(Job { addresses: vec![None; 2], token, timeout: s(120), silence: s(35) });
        for came in [true, false] {
            let mut visit = Visit::new(job.clone(), 1, "connect", Vec::new(), false, begun);
            visit.connected();
            visit.sent();
            let late = begun + s(1000);
            visit.tick(late);
            assert!(visit.outcome().is_none() && visit.wake() > late);
            if came {
                visit.received(&reply(1), late);
            }
            visit.tick(late + GRACE + DOUBT);
            match visit.outcome() {
                Some(Ok(answer)) => assert_eq!((came, &answer.bytes[answer.common[0].clone()]), (true, &b"ab"[..])),
                Some(Err(failure)) => assert!(!came && failure.sentence.contains("did not come"), "{failure:?}"),
                None => panic!("it waits still"),
            }
        }
    }
}
