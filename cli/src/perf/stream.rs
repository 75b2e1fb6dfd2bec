//! Streams of operations: rate, bandwidth, all-to-all.
//!
//! A rank has any number of outgoing and incoming streams and serves all of them in one loop, as NCCL's proxy does.

use super::args::Op;
use super::lane::{Fault, Lane, Wait};
use super::samples::Round;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::time::{Duration, Instant};

/// Small messages move on through this many bytes, so that not one cache line takes all (as in perftest).
const CYCLE: usize = 4096;

/// How long a rank that only receives sleeps between two looks, if it is to: nothing beside a round's 50 ms and more.
const SLEEP: Duration = Duration::from_micros(200);

/// What is streamed.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The operation.
    pub op: Op,
    /// Bytes of each.
    pub size: usize,
    /// How many to each peer.
    pub n: u64,
    /// Outstanding at most, to each peer.
    pub depth: usize,
    /// Posted in a row.
    pub list: usize,
}

impl Load {
    /// Distance of successive messages, and how many different places they go to.
    pub fn places(&self) -> (usize, u64) {
        let stride = self.size.max(1).next_multiple_of(64);
        (stride, (CYCLE / stride).max(1) as u64)
    }

    /// Bytes from the first to the last place that is written.
    pub fn extent(&self) -> usize {
        let (stride, places) = self.places();
        stride * (places - 1) as usize + self.size
    }

    /// How many of `n` operations context `c` of `contexts` gets.
    fn share(&self, c: usize, contexts: usize) -> u64 {
        let (n, c, contexts) = (self.n, c as u64, contexts as u64);
        n / contexts + u64::from(c < n % contexts)
    }

    /// What the stream adds to the word of context `c`, the closing signal included.
    pub fn additions(&self, c: usize, contexts: usize) -> u64 {
        let signals = matches!(self.op, Op::PutSignal | Op::Signal);
        1 + if signals { self.share(c, contexts) } else { 0 }
    }
}

enum Phase {
    Posting,
    Closing,
    AwaitingAnswer,
    Over,
}

/// An outgoing stream.
struct Sender<'a> {
    lane: &'a Lane,
    peer: u32,
    load: Load,
    phase: Phase,
    posted: u64,
    finished: u64,
    outstanding: VecDeque<*mut c_void>,
    start: Instant,
    answer: u64,
    seconds: f64,
}

impl<'a> Sender<'a> {
    fn new(lane: &'a Lane, peer: u32, load: Load, start: Instant) -> Self {
        Self {
            lane,
            peer,
            load,
            phase: Phase::Posting,
            posted: 0,
            finished: 0,
            outstanding: VecDeque::with_capacity(load.depth + lane.contexts),
            start,
            answer: lane.expect(lane.answer_word(peer), 1),
            seconds: 0.0,
        }
    }

    /// Retires what is done, oldest first.
    #[inline]
    fn retire(&mut self) -> Result<(), Fault> {
        while let Some(&oldest) = self.outstanding.front() {
            if !self.lane.done(oldest, self.peer)? {
                break;
            }
            self.outstanding.pop_front();
            self.finished += 1;
        }
        Ok(())
    }

    /// One round of the proxy's loop; true if anything moved.
    #[inline]
    fn step(&mut self) -> Result<bool, Fault> {
        let before = (self.finished, self.posted);
        match self.phase {
            Phase::Posting => {
                self.retire()?;
                let room = (self.load.depth - self.outstanding.len()).min(self.load.list) as u64;
                let burst = room.min(self.load.n - self.posted);
                // A list that does not fit waits until it does, or lists would shrink to one.
                if burst == (self.load.list as u64).min(self.load.n - self.posted).min(self.load.depth as u64) {
                    self.post(burst)?;
                }
                if self.posted == self.load.n && self.outstanding.is_empty() {
                    self.all_done()?;
                }
            }
            Phase::Closing => {
                self.retire()?;
                if self.outstanding.is_empty() {
                    self.phase = Phase::AwaitingAnswer;
                }
            }
            Phase::AwaitingAnswer => {
                if self.lane.session.signals.signal(self.lane.answer_word(self.peer)) >= self.answer {
                    if self.load.op != Op::Get {
                        self.seconds = self.start.elapsed().as_secs_f64();
                    }
                    self.phase = Phase::Over;
                    return Ok(true);
                }
            }
            Phase::Over => {}
        }
        Ok(before != (self.finished, self.posted))
    }

    #[inline]
    fn post(&mut self, burst: u64) -> Result<(), Fault> {
        let (stride, places) = self.load.places();
        for j in 0..burst {
            let context = (self.posted % self.lane.contexts as u64) as usize;
            let at = (self.posted % places) as usize * stride;
            let word = self.lane.stream_word(context, self.lane.session.rank());
            let Load { op, size, .. } = self.load;
            let request = self.lane.start(op, context, self.peer, at, size, word, j + 1 < burst)?;
            self.outstanding.push_back(request);
            self.posted += 1;
        }
        Ok(())
    }

    /// All operations are locally complete: flush gets, then send what tells the receiver that it has everything.
    fn all_done(&mut self) -> Result<(), Fault> {
        if self.load.op == Op::Get {
            for context in 0..self.lane.contexts {
                let flush = self.lane.start_flush(context, self.peer)?;
                self.lane.finish(flush, self.peer, "flush")?;
            }
            self.seconds = self.start.elapsed().as_secs_f64();
        }
        for context in 0..self.lane.contexts {
            let word = self.lane.stream_word(context, self.lane.session.rank());
            self.outstanding.push_back(self.lane.start_strong_signal(context, self.peer, word)?);
        }
        self.phase = Phase::Closing;
        Ok(())
    }

    fn waits_for(&self) -> String {
        let peer = self.peer;
        match self.phase {
            Phase::Posting => format!(
                "{} of {} operations towards rank {peer} are done, {} outstanding",
                self.finished,
                self.load.n,
                self.outstanding.len()
            ),
            Phase::Closing => format!("closing signals towards rank {peer} are not done"),
            Phase::AwaitingAnswer => format!("no answer from rank {peer} to the closing signals"),
            Phase::Over => String::new(),
        }
    }
}

/// An incoming stream.
struct Receiver<'a> {
    lane: &'a Lane,
    peer: u32,
    /// (word, value) for each context.
    awaited: Vec<(usize, u64)>,
    answer: Option<*mut c_void>,
    over: bool,
}

impl<'a> Receiver<'a> {
    fn new(lane: &'a Lane, peer: u32, load: &Load) -> Self {
        let awaited = (0..lane.contexts)
            .map(|c| {
                let word = lane.stream_word(c, peer);
                (word, lane.expect(word, load.additions(c, lane.contexts)))
            })
            .collect();
        Self { lane, peer, awaited, answer: None, over: false }
    }

    #[inline]
    fn step(&mut self) -> Result<bool, Fault> {
        if let Some(answer) = self.answer {
            self.over = self.over || self.lane.done(answer, self.peer)?;
            return Ok(self.over);
        }
        let signals = &self.lane.session.signals;
        if self.awaited.iter().any(|&(word, value)| signals.signal(word) < value) {
            return Ok(false);
        }
        let word = self.lane.answer_word(self.lane.session.rank());
        self.answer = Some(self.lane.start_strong_signal(0, self.peer, word)?);
        Ok(true)
    }

    fn waits_for(&self) -> String {
        let now = |&(word, value): &(usize, u64)| format!("{} of {value}", self.lane.session.signals.signal(word));
        let words: Vec<_> = self.awaited.iter().map(now).collect();
        format!("signal words of the stream from rank {} are {}", self.peer, words.join(", "))
    }
}

/// Streams to each of `to` and from each of `from` until all is over here. Clears and fills before, verifies after;
/// `meet` waits for all ranks once buffers are ready.
pub fn run(
    lane: &Lane,
    to: &[u32],
    from: &[u32],
    load: Load,
    epoch: u64,
    meet: &mut dyn FnMut() -> Result<(), Fault>,
) -> Result<Round, Fault> {
    if let Some(queue) = &lane.queue {
        return queue.stream(lane, to, from, load, epoch, meet);
    }
    let extent = load.extent();
    for &peer in to.iter().chain(from) {
        lane.prepare(peer, extent, epoch);
    }
    // Expectations first: a peer may be faster.
    let mut receivers: Vec<_> = from.iter().map(|&peer| Receiver::new(lane, peer, &load)).collect();
    meet()?;
    let start = Instant::now();
    let mut senders: Vec<_> = to.iter().map(|&peer| Sender::new(lane, peer, load, start)).collect();
    let mut wait = Wait::default();
    loop {
        let mut moved = false;
        let mut over = true;
        let mut sending = false;
        for sender in &mut senders {
            moved |= sender.step()?;
            over &= matches!(sender.phase, Phase::Over);
            sending |= matches!(sender.phase, Phase::Posting | Phase::Closing);
        }
        for receiver in receivers.iter_mut().filter(|r| !r.over) {
            moved |= receiver.step()?;
            over &= receiver.over;
        }
        if over {
            break;
        }
        // A rank that only waits may be told to look at memory alone.
        if lane.progress || sending {
            lane.advance()?;
        }
        if moved {
            wait = Wait::default();
        } else {
            if lane.sleeps && to.is_empty() {
                std::thread::sleep(SLEEP);
            }
            lane.pause(&mut wait, || {
                let sending = senders.iter().filter(|s| !matches!(s.phase, Phase::Over)).map(Sender::waits_for);
                let receiving = receivers.iter().filter(|r| !r.over).map(Receiver::waits_for);
                sending.chain(receiving).collect::<Vec<_>>().join("; ")
            })?;
        }
    }
    let arrivals = if load.op == Op::Get { to } else { from };
    if load.op != Op::Signal {
        let (stride, places) = load.places();
        for &peer in arrivals {
            for place in 0..places.min(load.n) {
                lane.verify(peer, place as usize * stride, load.size, epoch)?;
            }
        }
    }
    for &peer in from {
        (0..lane.contexts).try_for_each(|c| lane.verify_signal(lane.stream_word(c, peer), peer))?;
    }
    to.iter().try_for_each(|&peer| lane.verify_signal(lane.answer_word(peer), peer))?;
    let seconds = senders.iter().map(|s| s.seconds).fold(0.0, f64::max);
    Ok(Round { operations: load.n * senders.len() as u64, seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(size: usize, n: u64) -> Load {
        Load { op: Op::PutSignal, size, n, depth: 8, list: 1 }
    }

    #[test]
    fn small_messages_cycle_through_a_page_and_large_ones_stay() {
        assert_eq!((load(8, 1).places(), load(8, 1).extent()), ((64, 64), 63 * 64 + 8));
        assert_eq!((load(100, 1).places(), load(100, 1).extent()), ((128, 32), 31 * 128 + 100));
        assert_eq!((load(4097, 1).places(), load(4097, 1).extent()), ((4160, 1), 4097));
        assert_eq!(load(0, 1).extent(), 63 * 64);
    }

    #[test]
    fn shares_of_contexts_add_up() {
        for n in [1, 2, 7, 100] {
            for contexts in [1usize, 2, 3, 16] {
                assert_eq!((0..contexts).map(|c| load(8, n).share(c, contexts)).sum::<u64>(), n);
            }
        }
        assert_eq!(load(8, 5).additions(0, 2), 4);
        assert_eq!(Load { op: Op::Put, ..load(8, 5) }.additions(0, 2), 1);
    }
}
