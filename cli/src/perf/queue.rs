//! Measurements through the queue that a plugin gives to device code, with threads that play device code.
//!
//! A context has three signals for each rank: what its streams add to, its answers, its pings.

use super::args::{Args, Op, Test};
use super::lane::{Fault, Lane};
use super::latency::Role;
use super::samples::{Round, Samples};
use super::stream::Load;
use crate::device::{Compiled, Deadline, Device, Pen, Posted, Signal, Thread, Waiting};
use crate::plugin::{ContextConfig, Way};
use crate::ranks::Session;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Signals for each rank.
const KINDS: u32 = 3;

/// The contexts of a communicator as device code sees them.
pub struct Queue {
    device: Device,
    /// The data window's handle for device code.
    data: u64,
    producers: usize,
    strong: bool,
    /// What each context's signals should be, by context and number.
    expected: Vec<Vec<Cell<u64>>>,
}

/// What contexts are asked for with: enough signals, and the layout that this way's device code reads.
pub fn wishes(way: Way, nranks: u32, config: ContextConfig) -> Result<ContextConfig, String> {
    let Some(compiled) = Compiled::of(way)? else { return Ok(config) };
    let n_signals = (KINDS * nranks) as i32;
    Ok(ContextConfig { n_signals, n_counters: 1, backend_version: compiled.backend_version(), ..config })
}

/// Where operations begin and end, for any thread.
#[derive(Clone, Copy)]
struct Ends {
    data: u64,
    slot: usize,
    me: u32,
    strong: bool,
}

impl Ends {
    /// Offset of byte `at` of what `rank` sends, in the window of who receives.
    fn inbox(&self, rank: u32, at: usize) -> u64 {
        (self.slot * (1 + rank as usize) + at) as u64
    }

    /// Posts one operation; `id` is the signal that it adds one to.
    #[inline]
    fn start(
        &self,
        thread: &mut Thread<'_>,
        op: Op,
        peer: u32,
        at: usize,
        size: usize,
        id: u32,
    ) -> Result<Option<Posted>, String> {
        let (here, there) = ((self.data, at as u64), (self.data, self.inbox(self.me, at)));
        let signal = Signal { strong: self.strong, ..Signal::inc(id) };
        match op {
            Op::Put => thread.put(peer, here, there, size as u64, None, None).map(Some),
            Op::PutSignal => thread.put(peer, here, there, size as u64, Some(&signal), None).map(Some),
            Op::Signal => thread.signal(peer, &signal).map(Some),
            Op::Get => thread.get(peer, here, (self.data, self.inbox(peer, at)), size as u64),
        }
    }
}

impl Queue {
    /// What `session`, brought up with `config`, has for device code.
    pub fn open(session: &Session, way: Way, config: &ContextConfig, args: &Args) -> Result<Self, Fault> {
        let compiled = Compiled::of(way)?.ok_or_else(|| format!("{way} has no queue"))?;
        let (rank, nranks) = (session.rank(), session.nranks());
        if session.device_handle.is_null() {
            return Err(
                format!("{} has no queue of its own: createContext left the device handle NULL", way.kind).into()
            );
        }
        // SAFETY: what createContext gave; the contexts live as long as the session, and so does this.
        let device = unsafe { Device::open(compiled, rank, nranks, config, session.device_handle) }?;
        let words = || (0..KINDS * nranks).map(|_| Cell::new(0)).collect();
        Ok(Self {
            expected: (0..device.len()).map(|_| words()).collect(),
            device,
            data: session.data_gin,
            producers: args.producers as usize,
            strong: !args.weak,
        })
    }

    /// Slots of a queue.
    pub fn depth(&self) -> u32 {
        self.device.queue_size(0)
    }

    /// The signal to which the streams of `rank` add here, on each context.
    fn stream_of(&self, rank: u32) -> u32 {
        rank
    }

    fn answer_of(&self, rank: u32) -> u32 {
        self.device.nranks() + rank
    }

    fn ping_of(&self, rank: u32) -> u32 {
        2 * self.device.nranks() + rank
    }

    fn me(&self) -> u32 {
        self.device.rank()
    }

    /// How measurements wait: without giving the core away, unless there are fewer cores than threads.
    fn deadline(&self, lane: &Lane) -> Deadline<'static> {
        match lane.yields {
            true => Deadline::new(lane.patience),
            false => Deadline::new(lane.patience).spinning(),
        }
    }

    /// Says that `more` is to be added to a signal here, and returns what it will be then.
    fn expect(&self, context: usize, id: u32, more: u64) -> u64 {
        let word = &self.expected[context][id as usize];
        word.set(word.get() + more);
        word.get()
    }

    fn verify(&self, context: usize, id: u32, limit: &dyn Waiting) -> Result<(), Fault> {
        let (is, should) = (self.thread(context, limit).read_signal(id), self.expected[context][id as usize].get());
        match is == should {
            true => Ok(()),
            false => Err(format!("wrong signal: {id} of context {context} is {is} and should be {should}").into()),
        }
    }

    fn thread<'a>(&'a self, context: usize, limit: &'a dyn Waiting) -> Thread<'a> {
        self.device.thread(context, Pen::plain(), limit)
    }

    fn ends(&self, lane: &Lane) -> Ends {
        Ends { data: self.data, slot: lane.slot, me: self.me(), strong: self.strong }
    }

    /// Both of a pair: each sends a strong signal on every context and waits for the other's.
    fn settle(&self, peer: u32, limit: &dyn Waiting) -> Result<(), Fault> {
        for context in 0..self.device.len() {
            self.thread(context, limit).signal(peer, &Signal::inc(self.answer_of(self.me())))?;
        }
        for context in 0..self.device.len() {
            let id = self.answer_of(peer);
            let thread = self.thread(context, limit);
            thread.wait_signal(id, self.expect(context, id, 1))?;
            self.verify(context, id, limit)?;
        }
        Ok(())
    }

    /// Runs `n` rounds of a ping-pong, or of one operation at a time, as [`super::latency::run`] does by calls.
    #[allow(clippy::too_many_arguments)]
    pub fn latency(
        &self,
        lane: &Lane,
        role: Role,
        test: Test,
        op: Op,
        size: usize,
        n: u64,
        epoch: u64,
        samples: &mut Samples,
        meet: &mut dyn FnMut() -> Result<(), Fault>,
    ) -> Result<Duration, Fault> {
        let (peer, first) = match role {
            Role::Idle => return meet().map(|()| Duration::ZERO),
            Role::First(peer) => (peer, true),
            Role::Second(peer) => (peer, false),
        };
        let limit = self.deadline(lane);
        lane.prepare(peer, size, epoch);
        meet()?;
        let start = Instant::now();
        let both = test == Test::Latency && op != Op::Get;
        match (both, first) {
            (true, _) => self.bounce(lane, peer, first, op, size, n, samples, &limit)?,
            (false, true) => self.one_at_a_time(lane, peer, op, size, n, samples, &limit)?,
            (false, false) => {}
        }
        let took = start.elapsed();
        self.settle(peer, &limit)?;
        let received = match op {
            Op::Signal => 0,
            Op::Get => size * usize::from(first),
            _ => size * usize::from(both || !first),
        };
        lane.verify(peer, 0, received, epoch)?;
        if matches!(op, Op::PutSignal | Op::Signal) {
            let (id, contexts) = (self.ping_of(peer), self.device.len() as u64);
            for context in 0..self.device.len() {
                if !both && !first {
                    let share = n / contexts + u64::from((context as u64) < n % contexts);
                    self.expect(context, id, share);
                }
                self.verify(context, id, &limit)?;
            }
        }
        Ok(took)
    }

    /// Each waits for the other's signal, then sends its own.
    #[allow(clippy::too_many_arguments)]
    fn bounce(
        &self,
        lane: &Lane,
        peer: u32,
        first: bool,
        op: Op,
        size: usize,
        n: u64,
        samples: &mut Samples,
        limit: &dyn Waiting,
    ) -> Result<(), Fault> {
        let mut threads: Vec<_> = (0..self.device.len()).map(|context| self.thread(context, limit)).collect();
        let (there, here, ends) = (self.ping_of(self.me()), self.ping_of(peer), self.ends(lane));
        let mut clock = Instant::now();
        for i in 0..n {
            let context = i as usize % threads.len();
            let value = self.expect(context, here, 1);
            let thread = &mut threads[context];
            if first {
                ends.start(thread, op, peer, 0, size, there)?;
                thread.wait_signal(here, value)?;
                let now = Instant::now();
                samples.record((now - clock).as_nanos() as u64);
                clock = now;
            } else {
                thread.wait_signal(here, value)?;
                ends.start(thread, op, peer, 0, size, there)?;
            }
        }
        Ok(())
    }

    /// Posts one, waits until it is complete; a get also flushes.
    #[allow(clippy::too_many_arguments)]
    fn one_at_a_time(
        &self,
        lane: &Lane,
        peer: u32,
        op: Op,
        size: usize,
        n: u64,
        samples: &mut Samples,
        limit: &dyn Waiting,
    ) -> Result<(), Fault> {
        let mut threads: Vec<_> = (0..self.device.len()).map(|context| self.thread(context, limit)).collect();
        let mut clock = Instant::now();
        for i in 0..n {
            let context = i as usize % threads.len();
            let thread = &mut threads[context];
            let posted = self.ends(lane).start(thread, op, peer, 0, size, self.ping_of(self.me()))?;
            match op {
                Op::Get => {
                    let flush = thread.flush_async(peer)?;
                    thread.wait(&flush)?;
                }
                _ => posted.iter().try_for_each(|posted| thread.complete(posted))?,
            }
            let now = Instant::now();
            samples.record((now - clock).as_nanos() as u64);
            clock = now;
        }
        Ok(())
    }

    /// Streams to each of `to` and from each of `from`, as [`super::stream::run`] does by calls: the producers post,
    /// this thread closes the streams and answers those of others.
    pub fn stream(
        &self,
        lane: &Lane,
        to: &[u32],
        from: &[u32],
        load: Load,
        epoch: u64,
        meet: &mut dyn FnMut() -> Result<(), Fault>,
    ) -> Result<Round, Fault> {
        let contexts = self.device.len();
        to.iter().chain(from).for_each(|&peer| lane.prepare(peer, load.extent(), epoch));
        // Expectations first: a peer may be faster.
        let sums = |&peer: &u32| -> Vec<u64> {
            let sum = |context| self.expect(context, self.stream_of(peer), load.additions(context, contexts));
            (0..contexts).map(sum).collect()
        };
        let incoming: Vec<(u32, Vec<u64>)> = from.iter().map(|peer| (*peer, sums(peer))).collect();
        let answers: Vec<(u32, u64)> = to.iter().map(|&p| (p, self.expect(0, self.answer_of(p), 1))).collect();
        meet()?;
        let limit = match lane.sleeps {
            true => self.deadline(lane).sleeping(),
            false => self.deadline(lane),
        };
        let start = Instant::now();
        if !to.is_empty() {
            self.produce(lane, to, load, &limit)?;
        }
        let produced = start.elapsed();
        for context in 0..contexts {
            let mut thread = self.thread(context, &limit);
            let id = self.stream_of(self.me());
            to.iter().try_for_each(|&peer| thread.signal(peer, &Signal::inc(id)).map(drop))?;
        }
        self.answer(incoming, answers, &limit)?;
        let seconds = if load.op == Op::Get { produced } else { start.elapsed() };
        self.look(lane, to, from, load, epoch, &limit)?;
        let seconds = if to.is_empty() { 0.0 } else { seconds.as_secs_f64() };
        Ok(Round { operations: load.n * to.len() as u64, seconds })
    }

    /// The producers' part: operation k of a stream is on context k modulo their number, and its producer's own.
    fn produce(&self, lane: &Lane, to: &[u32], load: Load, limit: &Deadline<'static>) -> Result<(), Fault> {
        let (contexts, producers) = (self.device.len(), self.producers);
        let (stride, places) = load.places();
        let id = self.stream_of(self.me());
        let (device, ends) = (&self.device, self.ends(lane));
        let produce = move |producer: usize| -> Result<(), String> {
            // Which of a context's producers this is, and how many there are.
            let (nth, of) = match producers > contexts {
                true => (producer / contexts, (producers - producer % contexts).div_ceil(contexts)),
                false => (0, 1),
            };
            let mine =
                |c: &usize| if producers > contexts { *c == producer % contexts } else { c % producers == producer };
            let open = |c: usize| (c, device.thread(c, Pen::plain(), limit));
            let mut threads: Vec<_> = (0..contexts).filter(mine).map(open).collect();
            let mut turn = nth as u64;
            while turn * (contexts as u64) < load.n {
                for (context, thread) in &mut threads {
                    let k = turn * contexts as u64 + *context as u64;
                    if k < load.n {
                        let at = (k % places) as usize * stride;
                        for &peer in to {
                            ends.start(thread, load.op, peer, at, load.size, id)?;
                        }
                    }
                }
                turn += of as u64;
            }
            match load.op {
                Op::Get => threads.iter_mut().try_for_each(|(_, thread)| thread.flush()),
                _ => Ok(()),
            }
        };
        let ends: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..producers).map(|p| scope.spawn(move || produce(p))).collect();
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a producer panicked".into()))).collect()
        });
        Ok(ends.into_iter().collect::<Result<(), String>>()?)
    }

    /// Answers each stream once all of it is here, until all is answered, and all answers have come.
    fn answer(
        &self,
        mut incoming: Vec<(u32, Vec<u64>)>,
        mut answers: Vec<(u32, u64)>,
        limit: &dyn Waiting,
    ) -> Result<(), Fault> {
        let threads: Vec<_> = (0..self.device.len()).map(|context| self.thread(context, limit)).collect();
        let mut failed = None;
        let left = Cell::new((incoming.len(), answers.len()));
        let what = || format!("{} streams to end here and {} answers", left.get().0, left.get().1);
        let mut step = || {
            incoming.retain(|(peer, sums)| {
                let id = self.stream_of(*peer);
                if sums.iter().zip(&threads).any(|(sum, thread)| thread.read_signal(id) < *sum) {
                    return true;
                }
                let answer = Signal::inc(self.answer_of(self.me()));
                failed = failed.take().or(self.thread(0, limit).signal(*peer, &answer).err());
                false
            });
            answers.retain(|(peer, value)| threads[0].read_signal(self.answer_of(*peer)) < *value);
            left.set((incoming.len(), answers.len()));
            (incoming.is_empty() && answers.is_empty()) || failed.is_some()
        };
        limit.until(&what, &mut step)?;
        failed.map_or(Ok(()), |e| Err(e.into()))
    }

    /// Compares every byte and signal.
    fn look(
        &self,
        lane: &Lane,
        to: &[u32],
        from: &[u32],
        load: Load,
        epoch: u64,
        limit: &dyn Waiting,
    ) -> Result<(), Fault> {
        let (stride, places) = load.places();
        let arrivals = if load.op == Op::Get { to } else { from };
        for &peer in arrivals.iter().filter(|_| load.op != Op::Signal) {
            for place in 0..places.min(load.n) {
                lane.verify(peer, place as usize * stride, load.size, epoch)?;
            }
        }
        for &peer in from {
            (0..self.device.len()).try_for_each(|c| self.verify(c, self.stream_of(peer), limit))?;
        }
        to.iter().try_for_each(|&peer| self.verify(0, self.answer_of(peer), limit))
    }
}
