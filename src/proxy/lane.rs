//! One lane: the ring of a (context, peer), and what was posted from it and is unfinished.

mod batch;
mod post;
mod served;
#[cfg(test)]
pub(super) mod stands;
mod watch;

use super::ring::{Entry, Finish, Ring, Stopped};
use crate::error::Result;
use crate::fabric::{Context, Flush};
use crate::rma::seq::Seq;
use crate::telemetry::stats::layout;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use watch::Watch;

pub use batch::Batch;

/// Entries that are posted at once. As many as a copy kernel's launch or a chain of work requests carries; more would
/// let the first ones wait for the last.
pub const BATCH: u32 = 32;
/// Visits without a completion after which the fabric is asked whether there will be one.
const ASK_EVERY: u32 = 4096;

/// What the lanes of a context share, and what others see of it.
pub struct Common {
    /// Number in its set, for the log.
    pub number: u32,
    /// Peers that gets since the last flush are from, and the newest of these.
    gets: Vec<(u32, Seq)>,
    /// An entry was malformed, or the fabric failed a lane: what queryLastError shows.
    failed: Arc<AtomicBool>,
    /// Nothing is posted any more.
    is_dead: bool,
}

impl Common {
    /// Of a context that has done nothing. `failed` is set once and for all at the first fault.
    pub fn new(number: u32, failed: Arc<AtomicBool>) -> Self {
        Self { number, gets: Vec::new(), failed, is_dead: false }
    }

    /// An operation to the peer is a get.
    fn note_get(&mut self, peer: u32, seq: Seq) {
        match self.gets.iter_mut().find(|(of, _)| *of == peer) {
            Some((_, newest)) => *newest = seq,
            None => self.gets.push((peer, seq)),
        }
    }

    /// Whether its lanes take nothing any more.
    pub fn is_dead(&self) -> bool {
        self.is_dead
    }

    /// queryLastError shows a fault from here on.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }
}

/// Unfinished entries whose operations have consecutive numbers.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Of the last one. All of them may have it: entries without an operation are complete with what came before.
    last: Seq,
    /// Entries.
    n: u32,
    /// How many are one operation: the `of_op` before the last ones have the number before theirs, and so on; 0: they
    /// have none.
    of_op: u32,
    /// Of each.
    finish: Finish,
    /// What they bring here has to be made visible once they are done. Such a run has no consecutive numbers.
    brings: bool,
}

impl Run {
    /// How many of them are complete when all up to `done` are.
    fn done(&self, done: Seq) -> u32 {
        if self.last.is_done(done) {
            return self.n;
        }
        match self.of_op {
            0 => 0,
            // Those behind `done` are not.
            of_op => self.n.saturating_sub(self.last.0.wrapping_sub(done.0).saturating_mul(of_op)),
        }
    }
}

/// What a visit of a lane brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneProgress {
    /// Entries taken off the ring.
    pub taken: u32,
    /// Entries completed.
    pub completed: u32,
    /// Whether something is under way or waits.
    pub is_busy: bool,
    /// The fabric has failed the lane.
    pub has_failed: bool,
}

/// What the statistics are told of a lane.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Entries given back to device code, all in all.
    pub credited: u64,
    /// Malformed entries.
    pub refused: u64,
    /// Entries that came to nothing.
    pub dropped: u64,
    /// What the lane is doing.
    pub state: layout::State,
}

#[derive(Debug)]
enum State {
    /// Takes entries.
    Open,
    /// Takes none for now: a kernel is to serve it once all that was taken is complete.
    Held,
    /// A kernel serves it.
    Served,
    /// A flush is at the head: what gets brought must be visible first. `left` are gets, flushes for which have not
    /// been started.
    Flushing { waits: Vec<(u32, Seq)>, left: Vec<(u32, Seq)>, finish: Finish },
    /// An entry was refused that ends this ring alone: those that come are dropped, credits go on in order.
    Stopped,
    /// The fabric failed it: entries are dropped, credits go on.
    Failed,
}

/// The ring of a (context, peer) and its unfinished entries.
pub struct Lane<R> {
    ring: R,
    /// The peer's rank.
    pub peer: u32,
    /// Oldest first.
    unfinished: VecDeque<Run>,
    /// Entries in it.
    under_way: u32,
    /// Of the newest operation.
    newest: Seq,
    /// What a lane that is held waits for, or its first entry, so that nothing of it is on its way.
    fence: Option<Seq>,
    state: State,
    /// Visits since something completed.
    waited: u32,
    refused: u64,
    dropped: u64,
    watch: Watch,
}

impl<R: Ring> Lane<R> {
    /// A lane; `newest`: the number of the last operation of the context to that peer.
    pub fn new(ring: R, peer: u32, newest: Seq) -> Self {
        Self {
            ring,
            peer,
            unfinished: VecDeque::new(),
            under_way: 0,
            newest,
            fence: None,
            state: State::Open,
            waited: 0,
            refused: 0,
            dropped: 0,
            watch: Watch::default(),
        }
    }

    /// See [`Ring::head`].
    pub fn head(&self) -> R::Head {
        self.ring.head()
    }

    /// Completes what is complete, posts what there is and fits, but no entry that a kernel would take while `most` are
    /// under way.
    pub fn visit<C: Context>(
        &mut self,
        most: u32,
        contexts: &[C],
        common: &mut Common,
        batch: &mut Batch,
    ) -> LaneProgress {
        let context = &contexts[common.number as usize];
        let completed = self.complete(context, common);
        let before = self.under_way;
        let taken = match self.state {
            State::Open if !common.is_dead => match self.post(most.saturating_sub(before), context, common, batch) {
                Ok(taken) => taken,
                Err(error) => {
                    // The fabric may have begun some before it failed: they are off the ring.
                    let taken = self.under_way - before;
                    self.fail(common, &error.to_string());
                    taken
                }
            },
            State::Flushing { .. } if !common.is_dead => self.go_on_flushing(context, common),
            State::Held if !common.is_dead => 0,
            State::Served => 0,
            _ => self.drop_entries(context, batch),
        };
        let owes = self.pay(context);
        LaneProgress {
            taken,
            completed,
            is_busy: owes
                || !self.unfinished.is_empty()
                || matches!(self.state, State::Flushing { .. } | State::Held | State::Served),
            has_failed: matches!(self.state, State::Failed),
        }
    }

    /// Counters and credits of what is complete.
    fn complete<C: Context>(&mut self, context: &C, common: &mut Common) -> u32 {
        if self.unfinished.is_empty() {
            return 0;
        }
        let done = Seq(context.completed(self.peer).load(Ordering::Acquire));
        let (mut n, mut fault) = (0, None);
        while let Some(run) = self.unfinished.front_mut() {
            let some = run.done(done);
            if run.brings && some > 0 {
                match self.show(context, done) {
                    Ok(true) => continue,
                    Ok(false) => break,
                    Err(error) => {
                        fault = Some(error);
                        break;
                    }
                }
            }
            n += some;
            if run.finish != Finish::NONE {
                (0..some).for_each(|_| self.ring.finish(run.finish));
            }
            run.n -= some;
            if run.n > 0 {
                break;
            }
            self.unfinished.pop_front();
        }
        if n > 0 {
            self.credit(n);
        } else {
            self.ask(context, common);
        }
        if let Some(error) = fault {
            self.fail(common, &error.to_string());
        }
        n
    }

    /// Starts one flush for all that is done up to `done` and has brought something, whose entries complete with it.
    /// `false`: there is no room to start it now.
    #[cold]
    fn show<C: Context>(&mut self, context: &C, done: Seq) -> Result<bool> {
        let until = match context.flush(self.peer, None)? {
            Flush::Done => None,
            Flush::Until(seq) => Some(seq),
            Flush::NoRoom => return Ok(false),
        };
        for run in self.unfinished.iter_mut().take_while(|run| run.last.is_done(done)).filter(|run| run.brings) {
            run.brings = false;
            run.last = until.unwrap_or(run.last);
        }
        Ok(true)
    }

    /// Entries that were taken are under way.
    #[inline(always)]
    fn add(&mut self, run: Run) {
        self.under_way += run.n;
        self.unfinished.push_back(run);
    }

    /// Before entries without an operation are added. Where nothing is unfinished that they could come behind they are
    /// complete at once: others post on this (context, peer), too, and once 2^31 operations of theirs have followed
    /// this lane's newest one its number seems to be one that is to come.
    fn renew_newest<C: Context>(&mut self, context: &C) {
        if self.unfinished.is_empty() {
            self.newest = Seq(context.completed(self.peer).load(Ordering::Acquire));
        }
    }

    /// An entry without an operation: complete with what came before it ([`Lane::renew_newest`]).
    fn add_idle(&mut self, finish: Finish) {
        self.add(Run { last: self.newest, n: 1, of_op: 0, finish, brings: false });
    }

    /// A flush that was taken is waited for no longer: it completes with what came before it.
    fn end_flushing(&mut self) {
        if let State::Flushing { finish, .. } = self.state {
            self.state = State::Open;
            self.add_idle(finish);
        }
    }

    /// Nothing completes what is unfinished. The sources are free either way.
    fn finish_all(&mut self) {
        for run in self.unfinished.drain(..) {
            self.ring.finish(run.finish);
        }
    }

    fn credit(&mut self, n: u32) {
        self.under_way -= n;
        self.ring.credit(n);
        self.waited = 0;
        self.watch.completed += u64::from(n);
    }

    /// Posts what device code is owed. Whether something is left to do for it.
    #[inline(always)]
    fn pay<C: Context>(&mut self, context: &C) -> bool {
        let more_follow = !self.unfinished.is_empty();
        self.ring.owed().is_some_and(|owed| owed.pay(context, self.peer, more_follow))
    }

    /// After long waiting: whether what is unfinished will ever be done.
    fn ask<C: Context>(&mut self, context: &C, common: &mut Common) {
        self.waited += 1;
        if self.waited % ASK_EVERY != 0 {
            return;
        }
        let Some(run) = self.unfinished.front() else { return };
        if let Err(error) = context.test(self.peer, run.last) {
            self.fail(common, &error.to_string());
        }
    }

    /// Starts flushes that are left, and looks whether those started are done. Completes the entry then.
    fn go_on_flushing<C: Context>(&mut self, context: &C, common: &Common) -> u32 {
        let State::Flushing { waits, left, .. } = &mut self.state else { return 0 };
        let (own, mut failed) = (self.peer, None);
        // Another peer's fault is not this lane's, whose operations go on: nobody brings anything from there any more.
        let mut fault = |peer: u32, why: String| match peer == own {
            true => failed = Some(why),
            false => {
                log::warn!(
                    "context {}, rank {peer}: {why}; a flush does not wait for what gets should have brought",
                    common.number
                );
                common.fail();
            }
        };
        left.retain(|&(peer, get)| match flush_behind(context, peer, get) {
            Ok(Flush::Done) => false,
            Ok(Flush::Until(seq)) => {
                waits.push((peer, seq));
                false
            }
            Ok(Flush::NoRoom) => true,
            Err(error) => {
                fault(peer, error.to_string());
                false
            }
        });
        waits.retain(|&(peer, seq)| match context.test(peer, seq) {
            Ok(done) => !done,
            Err(error) => {
                fault(peer, error.to_string());
                false
            }
        });
        if let Some(why) = failed {
            self.fail(common, &why);
        } else if waits.is_empty() && left.is_empty() {
            self.renew_newest(context);
            self.end_flushing();
        }
        0
    }

    /// The fabric will not complete what is unfinished: credits for all of it, and what comes is dropped.
    #[cold]
    fn fail(&mut self, common: &Common, why: &str) {
        self.end_flushing();
        log::warn!(
            "context {} to rank {}: {why}; {} entries of device code to it are dropped, and those that come",
            common.number,
            self.peer,
            self.under_way
        );
        self.lose(common);
    }

    /// Nothing completes what is unfinished, or nobody knows any more what is: credits for all that was taken, and what
    /// comes is dropped.
    #[cold]
    pub fn lose(&mut self, common: &Common) {
        common.fail();
        self.end_flushing();
        self.state = State::Failed;
        self.ring.stop(Stopped::Lost);
        self.finish_all();
        // A thread that had a fault may have left entries that it had taken and not noted.
        self.under_way = self.ring.outstanding();
        self.dropped += u64::from(self.under_way);
        if self.under_way > 0 {
            self.credit(self.under_way);
        }
    }

    /// Drops and gives back what has come to a lane that was lost. Returns how much, and whether something is left to
    /// do for it.
    #[cold]
    pub fn give_back_all<C: Context>(&mut self, context: &C, batch: &mut Batch) -> (u32, bool) {
        let dropped = self.drop_entries(context, batch);
        (dropped, self.pay(context))
    }

    /// Takes entries off the ring without doing anything for them. Those that were posted complete first.
    #[cold]
    fn drop_entries<C: Context>(&mut self, context: &C, batch: &mut Batch) -> u32 {
        batch.clear();
        self.ring.begin();
        let (mut n, mut finishes) = (0, Vec::new());
        while n < BATCH.min(self.ring.capacity()) {
            finishes.push(match self.ring.read(n, &mut batch.ops) {
                Entry::Absent => break,
                Entry::Fenced => {
                    self.ring.fenced();
                    break;
                }
                Entry::Op(finish) | Entry::Nothing(finish) | Entry::Flush(finish) => finish,
                Entry::Joined | Entry::Nop | Entry::Ops(_) | Entry::Gets(_) | Entry::Refused(_) => Finish::NONE,
            });
            n += 1;
        }
        self.renew_newest(context);
        self.end_flushing();
        if n > 0 {
            self.ring.take(n);
            self.dropped += u64::from(n);
            finishes.into_iter().for_each(|finish| self.add_idle(finish));
            // Nothing is under way that they could wait for.
            if let State::Failed = self.state {
                self.finish_all();
                self.credit(self.under_way);
            }
        }
        n
    }
}

/// Starts a flush of what gets up to `get` have brought, once they are complete; no room: not now.
fn flush_behind<C: Context>(context: &C, peer: u32, get: Seq) -> Result<Flush> {
    let completed = context.completed(peer).load(Ordering::Acquire);
    let newest = context.sent(peer).newest.0;
    // However long ago it was, numbers come again.
    let is_unfinished = newest.wrapping_sub(get.0) < newest.wrapping_sub(completed);
    if is_unfinished && !context.test(peer, get)? {
        return Ok(Flush::NoRoom);
    }
    context.flush(peer, None)
}

#[cfg(test)]
#[path = "lane/joined_tests.rs"]
mod joined_tests;
