//! Streams of device code's entries whose effects are known: what a lane kernel, the engine's threads, or both in turn
//! make of them is checked entry by entry.

use super::super::*;
use crate::support::device::{entry, wait, Ask, Device};
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::AtomicU32;

/// Places for puts, their bytes, and where the others are in an area.
pub const BLOCKS: usize = 8;
pub const BLOCK: usize = 40 << 10;
const VALUES: usize = BLOCKS * BLOCK;
const WORD: usize = VALUES + 512;
const SMALL: usize = VALUES + 1024;
const STILL: usize = VALUES + 2048;
const BACK: usize = VALUES + 3072;
/// Bytes of an area: what one stream writes, and what it reads.
pub const AREA: usize = VALUES + 4096;
/// Signals of a stream: one counts, one adds.
const COUNTS: usize = 0;
const ADDS: usize = 1;
/// What an addition has beside its count.
const BY: u64 = 1 << 32;
const COUNTER: u32 = 1;
/// Places of values, and of small ones.
const VALUES_AT_ONCE: usize = 32;

/// xorshift.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// What a stream has beside entries that the kernel takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mix {
    /// One of so many is one that it refuses; 0: none is.
    pub refused: u64,
    /// Gets, and flushes of them, are among these.
    pub gets: bool,
    /// Nothing moves but signals.
    pub signals: bool,
    /// Each of so many is a copy that the kernel takes behind some others alone; 0: none is.
    pub longer: u32,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Put { block: usize, bytes: usize },
    Value { at: usize, bytes: usize },
    Small { at: usize, bytes: usize, value: u64 },
    Word { by: Option<u64> },
    Get { at: usize, bytes: usize },
    Nothing,
}

/// An entry. `signal`: of which number, and what it adds if it does not count.
#[derive(Clone, Copy, Debug)]
struct Step {
    seq: u32,
    what: What,
    signal: Option<(usize, Option<u64>)>,
    has_counter: bool,
}

/// The entries of a stream, the same for who posts and who receives.
struct Plan {
    draws: Draws,
    mix: Mix,
    seq: u32,
    puts: usize,
    values: usize,
}

impl Plan {
    fn new(seed: u64, mix: Mix) -> Self {
        Self { draws: Draws(seed * 2 + 0x9e37_79b9), mix, seq: 0, puts: 0, values: 0 }
    }

    fn put(&mut self, bytes: usize) -> What {
        self.puts += 1;
        What::Put { block: (self.puts - 1) % BLOCKS, bytes }
    }

    fn next(&mut self) -> Step {
        self.seq += 1;
        let is_refused = self.mix.refused > 0 && self.draws.below(self.mix.refused) == 0;
        let draws = &mut self.draws;
        let add = (draws.below(4096), draws.below(3));
        let (kind, n) = (draws.below(12), draws.below(12) as usize);
        let mut has_counter = false;
        let is_longer = self.mix.longer > 0 && self.seq % self.mix.longer == 0;
        let what = match (is_refused, kind) {
            _ if self.mix.signals => What::Nothing,
            _ if is_longer => self.put([36, 40][n % 2] << 10),
            (true, 0..=4) => self.put([36, 40][n % 2] << 10),
            (true, 5..=6) if self.mix.gets => What::Get { at: 8 * n, bytes: 64 },
            (true, _) => {
                has_counter = true;
                self.put(8 * (n + 1))
            }
            (false, 0..=5) => self.put([4, 8, 8, 16, 64, 100, 128, 512, 1024, 4096, 8192, 32 << 10][n]),
            (false, 6..=7) => {
                self.values += 1;
                What::Value { at: self.values % VALUES_AT_ONCE, bytes: [4, 8][n % 2] }
            }
            (false, 8) => What::Small { at: self.seq as usize % VALUES_AT_ONCE, bytes: 1 + n % 2, value: add.0 },
            (false, 9) => What::Word { by: [None, Some(BY + add.0)][n % 2] },
            _ => What::Nothing,
        };
        let signal = match (what, add.1) {
            (What::Word { .. } | What::Get { .. }, _) => None,
            (_, 0) => Some((COUNTS, None)),
            (_, 1) => Some((ADDS, Some(BY + add.0))),
            (What::Nothing, _) => Some((COUNTS, None)),
            _ => None,
        };
        Step { seq: self.seq, what, signal, has_counter }
    }
}

/// Windows that a stream goes through: offsets are the same in all. Handles are this rank's.
pub struct Places<'a> {
    pub src: &'a GpuWindow,
    pub dst: &'a [GpuWindow],
}

impl GpuWindow {
    fn word_of_4(&self, at: usize) -> &AtomicU32 {
        assert!(at % 4 == 0 && at + 4 <= 8 * self.words);
        // SAFETY: inside the mapping, aligned.
        unsafe { AtomicU32::from_ptr(self.alias.cast::<u8>().add(at).cast()) }
    }

    fn handle(&self) -> u64 {
        self.window.handle as u64
    }
}

/// The sending end of a stream: from one context to one peer, through one area.
pub struct Sender {
    pub context: usize,
    pub peer: usize,
    /// Its area at the peer, and here.
    area: usize,
    here: usize,
    /// Of the first signal of its two.
    signals: usize,
    plan: Plan,
    /// Where in the queue the last entry is that writes to a place: blocks, then values, then small ones. Without a
    /// signal in between the next one would have no order with it.
    last: [Option<u32>; BLOCKS + 2 * VALUES_AT_ONCE],
    counted: u64,
    gets: bool,
}

impl Sender {
    /// The next entry writes to a place: waits for the one before.
    fn take(&mut self, device: &Device, place: usize) {
        let next = device.pi(self.context, self.peer).load(Ordering::Relaxed);
        if let Some(last) = self.last[place].replace(next) {
            let is_free = || device.ci(self.context, self.peer).wrapping_sub(last) as i32 > 0;
            wait(|| format!("the credit of entry {last}"), is_free);
        }
    }

    /// What device code writes for the next entry.
    fn descriptor(&mut self, device: &Device, places: &Places) -> Descriptor {
        let (step, area, here) = (self.plan.next(), self.area as u64, self.here as u64);
        let op = match step.signal {
            None => 0,
            Some((_, None)) => OP_SIGNAL_INC,
            Some(_) => OP_SIGNAL_ADD,
        };
        let (id, by) = step.signal.map_or((0, 0), |(id, by)| (id, by.unwrap_or(1)));
        let dst = |block: usize| places.dst[block % places.dst.len()].handle();
        let d = match step.what {
            What::Put { block, bytes } => {
                self.take(device, block);
                let at = self.here + block * BLOCK;
                (0..bytes / 4).for_each(|i| places.src.word_of_4(at + 4 * i).store(step.seq, Ordering::Relaxed));
                self.counted += u64::from(step.has_counter);
                let counter = if step.has_counter { OP_COUNTER } else { 0 };
                let d = entry(OP_PUT | op | counter, bytes as u64).with_counter(COUNTER);
                d.first(at as u64, places.src.handle()).second(area + (block * BLOCK) as u64, dst(block))
            }
            What::Value { at, bytes } => {
                self.take(device, BLOCKS + at);
                let value = u64::from(step.seq) << 32 | u64::from(step.seq);
                let d = entry(OP_PUT | OP_INLINE | op, bytes as u64).value(value);
                d.second(area + (VALUES + 8 * at) as u64, dst(at))
            }
            What::Small { at, bytes, value } => {
                self.take(device, BLOCKS + VALUES_AT_ONCE + at);
                let d = entry(OP_PUT | OP_INLINE | op, bytes as u64).value(value);
                d.second(area + (SMALL + 8 * at) as u64, dst(0))
            }
            What::Word { by } => {
                let d = entry(OP_VA_SIGNAL | by.map_or(OP_SIGNAL_INC, |_| OP_SIGNAL_ADD), 0);
                let word = if by.is_some() { WORD } else { WORD + 8 } as u64;
                return d.first(area + word, dst(0)).with_signal(0, by.unwrap_or(1), true);
            }
            What::Get { at, bytes } => {
                self.gets = true;
                let d = entry(OP_GET, bytes as u64).first(area + (STILL + at) as u64, places.src.handle());
                return d.second(here + (BACK + at) as u64, dst(0));
            }
            What::Nothing => entry(OP_PUT | op, 0),
        };
        d.with_signal((self.signals + id) as u32, by, step.seq % 2 == 0)
    }

    /// Posts one more.
    pub fn post(&mut self, device: &Device, places: &Places) {
        let d = self.descriptor(device, places);
        device.post(self.context, self.peer, d);
    }

    /// All that was posted is done: credits and counters say so, and what was got is here.
    pub fn flush(&mut self, device: &Device, places: &Places, own: usize) {
        match std::mem::take(&mut self.gets) {
            true => device.flush_gets(self.context, self.peer, own),
            false => device.flush(self.context, self.peer),
        }
        let posted = device.pi(self.context, self.peer).load(Ordering::Relaxed);
        assert_eq!(device.ci(self.context, self.peer), posted, "context {} to {}", self.context, self.peer);
        assert!(device.counter(self.context, COUNTER as usize) >= self.counted);
        for at in (0..160).step_by(8) {
            let got = places.dst[0].get((self.here + BACK + at) / 8);
            assert!([0, still(self.peer, at)].contains(&got), "context {}: got {got:#x}", self.context);
        }
    }

    /// Entries with a counter so far.
    pub fn counted(&self) -> u64 {
        self.counted
    }
}

/// What a rank's memory holds that others get.
fn still(rank: usize, at: usize) -> u64 {
    0xabcd_0000_0000_0000 | (rank as u64) << 32 | at as u64
}

/// The receiving end.
pub struct Receiver {
    pub context: usize,
    from: usize,
    area: usize,
    signals: usize,
    plan: Plan,
    /// Entries that come by the next `finish`.
    expected: u32,
    /// Entries that are not looked at.
    steps: VecDeque<Step>,
    /// Seen of those that count, add, and add by address or count there.
    seen: [u64; 4],
    /// What these come to when all has arrived.
    sums: [u64; 4],
    small: Vec<(usize, usize, u64)>,
}

impl Receiver {
    /// So many more will come by the next `finish`.
    pub fn expect(&mut self, n: usize) {
        self.expected += n as u32;
    }

    /// The next entry that has not been looked at. The sender may be ahead of this end.
    fn next_step(&mut self) -> Step {
        if self.steps.is_empty() {
            self.plan_one();
        }
        self.steps.pop_front().expect("there is one")
    }

    fn plan_one(&mut self) {
        let step = self.plan.next();
        assert!(step.seq < self.expected + 10_000, "more signals than entries");
        if let Some((of, by)) = channel(&step) {
            self.sums[of] += by;
        }
        self.steps.push_back(step);
    }

    fn sum(&self, device: &Device, places: &Places, of: usize) -> u64 {
        match of {
            COUNTS | ADDS => device.signal(self.context, self.signals + of),
            _ => places.dst[0].get((self.area + WORD) / 8 + of - 2),
        }
    }

    /// A word of the entry that is older than it, by its number, and what is there.
    fn missing(&self, places: &Places, step: &Step) -> Option<(usize, u32)> {
        let (window, at, bytes) = match step.what {
            What::Put { block, bytes } => (&places.dst[block % places.dst.len()], self.area + block * BLOCK, bytes),
            What::Value { at, bytes } => (&places.dst[at % places.dst.len()], self.area + VALUES + 8 * at, bytes),
            What::Small { .. } | What::Word { .. } | What::Get { .. } | What::Nothing => return None,
        };
        let word = |i: usize| (i, window.word_of_4(at + 4 * i).load(Ordering::Acquire));
        (0..bytes / 4).map(word).find(|(_, word)| *word < step.seq)
    }

    fn told(&self, places: &Places, step: &Step) -> String {
        let Self { from, context, .. } = self;
        format!("context {context}, from {from}: {step:?}, but for {:?}", self.missing(places, step))
    }

    /// An entry of which a signal has said that it is there.
    fn check_step(&mut self, places: &Places, step: &Step) {
        assert!(self.missing(places, step).is_none(), "{}", self.told(places, step));
        self.keep_small(step);
    }

    fn keep_small(&mut self, step: &Step) {
        if let What::Small { at, bytes, value } = step.what {
            self.small.push((at, bytes, value));
        }
    }

    /// Looks at what has come: a signal says that what was posted before it is there.
    pub fn check(&mut self, device: &Device, places: &Places) {
        for of in 0..4 {
            let sum = self.sum(device, places, of);
            let n = if of == ADDS || of == 2 { sum / BY } else { sum };
            while self.seen[of] < n {
                let step = self.next_step();
                if let Some((its, _)) = channel(&step) {
                    self.seen[its] += 1;
                }
                self.check_step(places, &step);
            }
        }
    }

    /// All that was expected has come, and nothing else. The sender has flushed.
    pub fn finish(&mut self, device: &Device, places: &Places) {
        while self.plan.seq < self.expected {
            self.plan_one();
        }
        for of in 0..4 {
            let what = || format!("{:?} from {} in context {}, {of}", self.sums, self.from, self.context);
            wait(what, || self.sum(device, places, of) >= self.sums[of]);
        }
        self.check(device, places);
        let sums = [0, 1, 2, 3].map(|of| self.sum(device, places, of));
        let what = || format!("context {}, from {}", self.context, self.from);
        assert_eq!((sums, self.plan.seq), (self.sums, self.expected), "{}", what());
        // What is behind the last signal comes in its own time: a flush says that it has left the sender.
        for step in std::mem::take(&mut self.steps) {
            wait(|| self.told(places, &step), || self.missing(places, &step).is_none());
            self.keep_small(&step);
        }
        let mut last = std::collections::BTreeMap::new();
        for (at, bytes, value) in std::mem::take(&mut self.small) {
            value.to_le_bytes()[..bytes].iter().enumerate().for_each(|(i, b)| {
                last.insert(8 * at + i, *b);
            });
        }
        for (at, expected) in last {
            let found = || places.dst[0].get((self.area + SMALL + at) / 8).to_le_bytes()[at % 8];
            let what = || format!("byte {at} from {} in context {}: {}", self.from, self.context, found());
            wait(what, || found() == expected);
        }
    }
}

/// To which sum an entry adds, and what.
fn channel(step: &Step) -> Option<(usize, u64)> {
    match (step.what, step.signal) {
        (What::Word { by: Some(by) }, _) => Some((2, by)),
        (What::Word { by: None }, _) => Some((3, 1)),
        (_, Some((id, by))) => Some((id, by.unwrap_or(1))),
        _ => None,
    }
}

/// The two ends that a rank has of streams with a peer: one each way in each of some contexts.
pub struct Streams {
    rank: usize,
    pub senders: Vec<Sender>,
    pub receivers: Vec<Receiver>,
}

/// Signals that a set needs for streams between so many ranks.
pub fn signals(nranks: usize) -> i32 {
    2 * nranks as i32
}

/// Bytes of a window for streams between so many ranks in so many contexts, of so many sets.
pub fn window_words(nranks: usize, contexts: usize) -> usize {
    AREA * nranks * contexts / 8
}

impl Streams {
    /// With these peers. `first`: areas of other sets come before. `mix`: what a rank sends.
    pub fn new(r: &Rank, peers: &[usize], contexts: usize, first: usize, mix: &dyn Fn(usize) -> Mix) -> Self {
        let (own, n) = (r.rank, r.job.nranks);
        let seed = |from: usize, to: usize, c: usize| (from as u64 * 64 + to as u64) * 64 + c as u64;
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for (c, &peer) in (0..contexts).flat_map(|c| peers.iter().map(move |p| (c, p))) {
            // An area belongs to who writes there.
            let area = |from: usize| ((first + c) * n + from) * AREA;
            let plan = |from, to| Plan::new(seed(from, to, first + c), mix(from));
            senders.push(Sender {
                context: c,
                peer,
                area: area(own),
                here: area(peer),
                signals: 2 * own,
                plan: plan(own, peer),
                last: [None; BLOCKS + 2 * VALUES_AT_ONCE],
                counted: 0,
                gets: false,
            });
            receivers.push(Receiver {
                context: c,
                from: peer,
                area: area(peer),
                signals: 2 * peer,
                plan: plan(peer, own),
                expected: 0,
                steps: VecDeque::new(),
                seen: [0; 4],
                sums: [0; 4],
                small: Vec::new(),
            });
        }
        Self { rank: own, senders, receivers }
    }

    /// What others get from this rank.
    pub fn fill(&self, places: &Places) {
        for at in self.receivers.iter().map(|r| r.area) {
            (0..160).step_by(8).for_each(|i| places.src.set((at + STILL + i) / 8, still(self.rank, i)));
        }
    }

    /// Posts `n` to each peer in each context, and looks at what comes meanwhile. All ranks do.
    pub fn run(&mut self, device: &Device, places: &Places, n: usize) {
        self.run_in(usize::MAX, device, places, n);
    }

    /// The same in so many contexts; the others carry nothing.
    pub fn run_in(&mut self, contexts: usize, device: &Device, places: &Places, n: usize) {
        self.receivers.iter_mut().filter(|r| r.context < contexts).for_each(|r| r.expect(n));
        for i in 0..n {
            self.senders.iter_mut().filter(|s| s.context < contexts).for_each(|s| s.post(device, places));
            if i % 8 == 0 {
                self.receivers.iter_mut().for_each(|r| r.check(device, places));
            }
        }
    }

    /// What has been posted is done.
    pub fn flush(&mut self, device: &Device, places: &Places) {
        let rank = self.rank;
        self.senders.iter_mut().for_each(|s| s.flush(device, places, rank));
        for c in self.senders.iter().map(|s| s.context) {
            let counted: u64 = self.senders.iter().filter(|s| s.context == c).map(Sender::counted).sum();
            assert_eq!(device.counter(c, COUNTER as usize), counted, "context {c}");
        }
    }

    /// All of it has come.
    pub fn finish(&mut self, device: &Device, places: &Places) {
        self.receivers.iter_mut().for_each(|r| r.finish(device, places));
    }
}

/// A set whose device code sees GPU memory as the fake has it.
pub fn device<'a>(fake: &'a Fake, r: &Rank, ask: Ask) -> Device<'a> {
    Device::seen_by(r, ask, |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at))
}
