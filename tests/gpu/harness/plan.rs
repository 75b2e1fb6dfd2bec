//! Random puts with signals from one rank to another, sent, watched and checked, for tests of the copy kernel and its
//! worker blocks.
use super::*;
use crate::support::common::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What a plan is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// What the copy kernel itself takes.
    Light,
    /// That, and what it cannot take.
    Any,
    /// All of that, and large copies.
    Large,
}

/// What each byte of a source holds; never 0.
pub fn pattern(at: usize, round: u64) -> u8 {
    ((at as u64 * 31 + at as u64 / 256 * 7 + round * 101) % 255 + 1) as u8
}

/// One put.
pub struct Planned {
    pub context: usize,
    pub at: usize,
    pub len: usize,
    /// It comes from host memory, as values do.
    pub is_value: bool,
    /// Which of its context's two signals it adds 1 to.
    pub signal: Option<usize>,
}

/// Puts from one sender, to places of their own.
pub struct Plan {
    puts: Vec<Planned>,
    pub words: usize,
    orders: Vec<Order>,
}

/// The puts of one context, and what whoever watches asks of them again and again.
#[derive(Default)]
struct Order {
    puts: Vec<usize>,
    /// For each addition to a signal, how many puts there are up to it.
    until: [Vec<usize>; 2],
    /// How often a signal is added to by the first so many puts.
    added: [Vec<u64>; 2],
}

impl Order {
    fn of(puts: &[Planned], context: usize) -> Self {
        let mut this = Self { added: [vec![0], vec![0]], ..Self::default() };
        for (at, put) in puts.iter().enumerate().filter(|(_, p)| p.context == context) {
            this.puts.push(at);
            for signal in 0..2 {
                let adds = put.signal == Some(signal);
                this.until[signal].extend(adds.then_some(this.puts.len()));
                let added = this.until[signal].len() as u64;
                this.added[signal].push(added);
            }
        }
        this
    }
}

impl Plan {
    /// `draws`: one of each put.
    pub fn new(draws: &[u64], contexts: usize, mix: Mix) -> Self {
        let (mut at, mut puts) = (0, Vec::new());
        for &draw in draws {
            let pick = |shift: u32, n: u64| (draw >> shift & 0xffff) as usize % n as usize;
            let (is_value, len, skip) = match pick(0, 8) {
                0..3 => {
                    let len = 1 << pick(4, 4);
                    (true, len, pick(6, 8 / len as u64) * len)
                }
                // What the copy kernel cannot take.
                3 if mix != Mix::Light => (false, 4 + pick(4, 100), pick(8, 5)),
                4 if mix != Mix::Light => (false, 4 * (1 + pick(4, 256)), 0),
                // In words of 4, 8 or 16 bytes, at such addresses, more or less.
                5 | 6 if mix == Mix::Large => {
                    let word = 4 << pick(20, 3);
                    (false, (2048 << pick(4, 6)) + word * pick(8, 9), (16 - at % 16) % 16 + word * pick(22, 2))
                }
                _ => (false, 4 * (1 + pick(4, 32)), pick(8, 2) * 4),
            };
            let signal = [None, Some(0), Some(1), Some(0)][pick(16, 4)];
            puts.push(Planned { context: pick(32, contexts as u64), at: at + skip, len, is_value, signal });
            at = (at + skip + len).next_multiple_of(8);
        }
        Self::of(puts, at / 8 + 1, contexts)
    }

    fn of(puts: Vec<Planned>, words: usize, contexts: usize) -> Self {
        let orders = (0..contexts).map(|context| Order::of(&puts, context)).collect();
        Self { puts, words, orders }
    }

    /// The same puts, those between every `n`-th without signals.
    fn with_every_nth_signal(self, n: usize) -> Self {
        let Self { mut puts, words, orders } = self;
        puts.iter_mut().enumerate().filter(|(i, _)| i % n != 0).for_each(|(_, p)| p.signal = None);
        Self::of(puts, words, orders.len())
    }

    /// How often a signal of a context is added to.
    pub fn count(&self, context: usize, signal: usize) -> u64 {
        self.orders[context].until[signal].len() as u64
    }

    /// Sends all, `depth` at a time.
    pub fn send(&self, r: &Rank, round: u64, depth: usize, ends: &Ends<'_>, peer: usize, first_signal: usize) {
        let words = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| pattern(8 * i + b, round)));
        (0..self.words).for_each(|i| ends.gpu.set(i, words(i)));
        // SAFETY: the window's words; no operation is up.
        let host = unsafe { std::slice::from_raw_parts_mut(ends.host.words.as_ptr().cast_mut(), self.words) };
        host.iter_mut().enumerate().for_each(|(i, w)| *w = words(i));
        let mut up = std::collections::VecDeque::new();
        for p in &self.puts {
            let from = if p.is_value { ends.host } else { ends.gpu.as_window() };
            let at = p.at as u64;
            let signal = p.signal.map(|s| (ends.sig.as_window(), 8 * (first_signal + 2 * p.context + s) as u64, 1));
            up.push_back(r.put(p.context as i32, (from, at), p.len, (ends.dst.as_window(), at), peer, signal));
            if up.len() == depth {
                up.pop_front().into_iter().for_each(|q| r.wait(q));
            }
        }
        up.into_iter().for_each(|q| r.wait(q));
    }

    /// What a window holds when all has arrived.
    pub fn word(&self, i: usize, round: u64, arrived: &[bool]) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|b| if arrived[8 * i + b] { pattern(8 * i + b, round) } else { 0 }))
    }

    /// Checks that a put has arrived.
    pub fn check(&self, dst: &GpuWindow, p: &Planned, round: u64) {
        for at in p.at..p.at + p.len {
            let byte = dst.get(at / 8).to_le_bytes()[at % 8];
            assert_eq!(byte, pattern(at, round), "byte {at} of a put of {} bytes at {}", p.len, p.at);
        }
    }
}

/// A sender's windows.
pub struct Ends<'a> {
    pub host: &'a Window,
    pub gpu: &'a GpuWindow,
    pub dst: &'a GpuWindow,
    pub sig: &'a GpuWindow,
}

/// Watches the two signals of each context until all has arrived: neither overtakes data nor the other. `base`: what
/// they were before.
pub fn watch(r: &Rank, plan: &Plan, contexts: usize, round: u64, dst: &GpuWindow, sig: &GpuWindow, base: &[u64]) {
    let end = Instant::now() + Duration::from_secs(60);
    let mut seen = vec![0; contexts];
    loop {
        let mut missing = 0;
        for c in 0..contexts {
            for (first, second) in [(0, 1), (1, 0)] {
                let count = |s: usize| sig.get(2 * c + s) - base[2 * c + s];
                let (before, after) = (count(first), count(second));
                assert!(before <= plan.count(c, first), "context {c}: signal {first} is {before}");
                // The put that brought it there, and what came before.
                let order = &plan.orders[c];
                let at = match before {
                    0 => 0,
                    n => order.until[first][n as usize - 1],
                };
                let due = order.added[second][at];
                assert!(after >= due, "context {c}: signal {first} is {before}, and {second} {after} instead of {due}");
                order.puts[..at].iter().skip(seen[c]).for_each(|&p| plan.check(dst, &plan.puts[p], round));
                seen[c] = at.max(seen[c]);
                missing += plan.count(c, first) - before;
            }
        }
        if missing == 0 {
            break;
        }
        // SAFETY: plain call.
        ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
        assert!(!r.job.barrier.has_failed(), "another rank failed");
        assert!(Instant::now() < end, "{missing} signals are missing after 60 s");
    }
}

/// Sends a plan's puts from rank 0 to rank 1, in two rounds. Kernels reset signals between them where they may.
pub fn transfer(fake: &Fake, kind: Signals, plan: &Plan, contexts: usize, depth: usize, gpus: i32) {
    let flags = kind.set_up(fake);
    println!("{kind:?}, {} puts, {contexts} contexts, {depth} at a time, {gpus} GPUs", plan.puts.len());
    job(2, contexts as i32, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let host = r.window(plan.words, 0);
        let gpu_src = fake.window(r, gpu, plan.words, 0);
        let dst = fake.window(r, gpu, plan.words, 0);
        let sig = fake.signals(r, gpu, 2 * contexts, flags);
        let mut arrived = vec![false; 8 * plan.words];
        plan.puts.iter().for_each(|p| arrived[p.at..p.at + p.len].fill(true));
        let mut base = vec![0; 2 * contexts];
        for round in 1..=2 {
            r.job.barrier.wait();
            if r.rank == 0 {
                plan.send(r, round, depth, &Ends { host: &host, gpu: &gpu_src, dst: &dst, sig: &sig }, 1, 0);
            } else {
                watch(r, plan, contexts, round, &dst, &sig, &base);
            }
            r.job.barrier.wait();
            if r.rank == 1 {
                // Those without a signal as well, and nothing beside them.
                (0..plan.words).for_each(|i| assert_eq!(dst.get(i), plan.word(i, round, &arrived), "word {i}"));
                for (i, base) in base.iter_mut().enumerate() {
                    assert_eq!(sig.get(i) - *base, plan.count(i / 2, i % 2));
                    match kind {
                        Signals::NeverReset => *base = sig.get(i),
                        _ => sig.set(i, 0),
                    }
                }
                (0..plan.words).for_each(|i| dst.set(i, 0));
            }
        }
    });
    fake.check();
    wait_until("copy kernels have ended", || fake.launched() == 0);
}

/// Draws that do not change from run to run.
pub fn draws(n: u64) -> Vec<u64> {
    (1..=n).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).wrapping_mul(0xbf58_476d_1ce4_e5b9)).collect()
}

pub fn any_kind() -> impl Strategy<Value = Signals> {
    prop_oneof![Just(Signals::NeverReset), Just(Signals::Added), Just(Signals::ReadBack)]
}

/// Puts between two signals where each signal has to be read first.
const BETWEEN_READS: usize = 8;

/// Signals that the copy kernel adds to, in a crowd, until it has moved some.
pub fn traffic(fake: &Fake, kind: Signals, until: impl Fn() -> bool) {
    let plan = Plan::new(&draws(400), 3, Mix::Light);
    let plan = match kind {
        // A signal is a submission of its own there. Where each comes late, on a loaded machine, only what comes in
        // crowds calls the copy kernel.
        Signals::ReadBack => plan.with_every_nth_signal(BETWEEN_READS),
        _ => plan,
    };
    traffic_of(fake, kind, &plan, 2, until);
}

/// A plan's puts over and over, between ranks of so many GPUs, until something is so.
pub fn traffic_of(fake: &Fake, kind: Signals, plan: &Plan, gpus: i32, until: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        transfer(fake, kind, plan, 3, 100, gpus);
        if until() {
            return;
        }
        assert!(Instant::now() < end, "not after 60 s of traffic");
    }
}

/// Does one thing over and over on a thread of its own while another is done, which may panic.
pub fn beside(again: impl Fn() + Sync, act: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                again();
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        stop.store(true, Ordering::Release);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Repeats it until something is so.
pub fn repeat_until(what: &str, mut it: impl FnMut(), is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not after 60 s: {what}");
        it();
    }
}
