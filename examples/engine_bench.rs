//! What the proxy engine costs by itself: descriptors of emulated device code, over a fabric that completes at once.
//!
//!     engine_bench drain      descriptors a second, a producer on another core; 128- and 64-byte form
//!     engine_bench laps N     what a descriptor takes that another core has written, N laps of 192
//!     engine_bench sparse     16 x 256 queues of which 4 carry traffic, beside those 4 alone
//!     engine_bench latency    last word written to operation posted, 16 x 256 queues
//!     engine_bench idle N     N idle passes over 16 x 256 queues (for callgrind: N = 0 and N = 1000)
//!     engine_bench rest N     processor time of an idle engine over N seconds, the first eleven not counted
//!     engine_bench count N    N descriptors, put and signal, seen, posted and completed (for callgrind)
//!
//! A last word `stats` has the statistics of `oxygin stats` counted as well.

use nccl_plugin_api::descriptor::*;
use oxygin::error::Result;
use oxygin::fabric::{Context, Flush, Posted, Sent};
use oxygin::memory::window::{Registration, Remote, Window, WindowFacts};
use oxygin::proxy::descriptor::meaning::Terms;
use oxygin::proxy::descriptor::queue::{Queue, QueueAddresses};
use oxygin::proxy::drain::{Drain, Kept, Work};
use oxygin::proxy::engine::{Engine, Settings};
use oxygin::proxy::idle::Rest;
use oxygin::proxy::lane::{Common, Lane};
use oxygin::proxy::meter::{Meter, Metered};
use oxygin::rma::atomic::Atomics;
use oxygin::rma::op::Op;
use oxygin::rma::refusal::Target;
use oxygin::rma::seq::Seq;
use oxygin::sys::handles;
use oxygin::telemetry::stats::layout::Way;
use oxygin::telemetry::stats::{About, Page};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "shared/laps.rs"]
mod shared;
use shared::{median, pin};

const COLL: u64 = 1;
const RANKS: usize = 256;
const CONTEXTS: usize = 16;
const DEPTH: usize = 256;

/// Every operation is complete when it is posted.
struct AtOnce {
    completed: Vec<AtomicU32>,
    /// When something was posted last, in ticks of the processor's clock.
    posted: AtomicU64,
}

impl Context for AtOnce {
    const NAME: &'static str = "at once";
    const SHARES_PROGRESS: bool = true;

    unsafe fn post(&self, peer: u32, ops: &[Op]) -> Result<Posted> {
        let completed = &self.completed[peer as usize];
        let last = completed.load(Ordering::Relaxed).wrapping_add(ops.len() as u32);
        completed.store(last, Ordering::Release);
        self.posted.store(ticks(), Ordering::Release);
        Ok(Posted { taken: ops.len(), last: Seq(last) })
    }

    fn flush(&self, _: u32, _: Option<u32>) -> Result<Flush> {
        Ok(Flush::Done)
    }

    fn test(&self, _: u32, _: Seq) -> Result<bool> {
        Ok(true)
    }

    fn progress(&self) -> Result<()> {
        Ok(())
    }

    fn atomics(&self) -> Atomics {
        Atomics::NONE
    }

    fn has_error(&self) -> bool {
        false
    }

    fn sent(&self, peer: u32) -> Sent {
        Sent { newest: Seq(self.completed[peer as usize].load(Ordering::Relaxed)), bytes: 0 }
    }

    fn completed(&self, peer: u32) -> &AtomicU32 {
        &self.completed[peer as usize]
    }
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 processor counts.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// A set of queues, its windows, and its memory, which both sides use.
struct Setting {
    contexts: Arc<Vec<AtOnce>>,
    memory: Arc<Vec<AtomicU64>>,
    cis: Arc<Vec<AtomicU32>>,
    form: Form,
    ranks: usize,
    window: u64,
    signals: u64,
}

impl Setting {
    fn new(form: Form, contexts: usize, ranks: usize) -> Self {
        let window = |id| {
            let remote = Remote { base: 1 << 32, len: 1 << 20, rkey: id };
            let made = Window::of(
                COLL,
                WindowFacts {
                    id,
                    base: 1 << 32,
                    len: 1 << 20,
                    remote: vec![remote; ranks].into(),
                    registration: Registration { lkey: id, rkey: id, guard: Box::new(()) },
                },
            );
            handles::insert(Arc::new(made)).expect("a free handle") as u64
        };
        let words = form.bytes() / 8 * DEPTH * ranks * contexts;
        let at_once =
            || AtOnce { completed: (0..ranks).map(|_| AtomicU32::new(0)).collect(), posted: AtomicU64::new(0) };
        Self {
            contexts: Arc::new((0..contexts).map(|_| at_once()).collect()),
            memory: Arc::new((0..words).map(|_| AtomicU64::new(0)).collect()),
            cis: Arc::new((0..contexts * ranks).map(|_| AtomicU32::new(0)).collect()),
            form,
            ranks,
            window: window(1),
            signals: window(2),
        }
    }

    fn drain(&self) -> Drain<AtOnce, Queue> {
        let n = self.contexts.len();
        let failed = Arc::new(AtomicBool::new(false));
        let mut lanes = Vec::new();
        for c in 0..n {
            let terms = Arc::new(Terms {
                form: self.form,
                target: Target { coll: COLL, contexts: n as u32, nranks: self.ranks as u32 },
                context: c as u32,
                counters: 0,
                signals: 64,
                signal_window: self.signals as usize,
                ended: Arc::new(AtomicU64::new(0)),
            });
            for peer in 0..self.ranks {
                let places = QueueAddresses {
                    slots: NonNull::from(&self.memory[self.slot(c, peer, 0)]),
                    device_slots: 0,
                    is_managed: false,
                    size: DEPTH as u32,
                    ci: NonNull::from(&self.cis[c * self.ranks + peer]),
                    credits: None,
                    counters: NonNull::dangling(),
                };
                // SAFETY: the drain keeps the memory; indices are kept by the setting, which outlives it.
                let queue = unsafe { Queue::new(places, terms.clone(), peer as u32) };
                lanes.push((c as u32, Lane::new(queue, peer as u32, Seq(0))));
            }
        }
        let commons = (0..n).map(|c| Common::new(c as u32, failed.clone())).collect();
        // SAFETY: the vector does not change any more.
        let kept = unsafe { Kept::new(&self.contexts, self.contexts.clone()) };
        let numbers: Vec<_> =
            lanes.iter().map(|(c, lane)| Metered { context: *c, peer: lane.peer, is_companion: false }).collect();
        let meter = Meter::new(self.page(), None, 0, 1, numbers.into_iter());
        Drain::new(kept, commons, lanes, self.memory.clone()).metered(meter)
    }

    /// Statistics, if the last word asks for them.
    fn page(&self) -> Option<Arc<Page>> {
        std::env::args().next_back().filter(|word| word == "stats")?;
        let about = About {
            way: Way::Engine,
            comm: COLL,
            set: 1,
            comm_id: 0,
            rank: 0,
            nranks: self.ranks as u32,
            contexts: self.contexts.len() as u32,
            stride: 1,
            companions: false,
            threads: 1,
            fabric: AtOnce::NAME,
            stall: Duration::ZERO,
        };
        Some(Arc::new(Page::create(&about).expect("shared memory")))
    }

    fn slot(&self, context: usize, peer: usize, index: u32) -> usize {
        ((context * self.ranks + peer) * DEPTH + index as usize % DEPTH) * (self.form.bytes() / 8)
    }

    fn put(&self) -> Descriptor {
        Descriptor::new(self.form, 2, OP_PUT | OP_SIGNAL_INC, 8)
            .first(64, self.window)
            .second(128, self.window)
            .with_signal(3, 0, true)
    }

    /// Writes descriptor `index` if there is a credit for it.
    fn write(&self, context: usize, peer: usize, index: u32, d: &Descriptor) -> bool {
        let ci = self.cis[context * self.ranks + peer].load(Ordering::Acquire);
        if index.wrapping_sub(ci) >= DEPTH as u32 {
            return false;
        }
        let slot = self.slot(context, peer, index);
        for (i, word) in d.words.iter().enumerate().rev() {
            self.memory[slot + i].store(*word, Ordering::Release);
        }
        true
    }
}

/// Descriptors a second through queues that a producer fills in turns for half a second.
fn rate(setting: &Setting, queues: &[(usize, usize)]) -> f64 {
    let (stop, mut drain) = (AtomicBool::new(false), setting.drain());
    std::thread::scope(|s| {
        let producer = s.spawn(|| {
            pin(1);
            let (d, mut next) = (setting.put(), vec![0u32; queues.len()]);
            while !stop.load(Ordering::Relaxed) {
                for (n, &(context, peer)) in next.iter_mut().zip(queues) {
                    *n = n.wrapping_add(setting.write(context, peer, *n, &d).into());
                }
            }
            next.iter().map(|n| u64::from(*n)).sum::<u64>()
        });
        pin(0);
        let (begun, mut moved) = (Instant::now(), 0u64);
        while begun.elapsed() < Duration::from_millis(500) {
            for _ in 0..1000 {
                moved += u64::from(drain.pass(Rest::Awake).moved);
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        // Taken and completed count one each.
        let (done, written) = (moved / 2, producer.join().expect("the producer"));
        assert!(done <= written && written - done <= (queues.len() * DEPTH) as u64, "{done} done of {written} written");
        moved as f64 / 2.0 / seconds / 1e6
    })
}

fn four() -> Vec<(usize, usize)> {
    vec![(0, 3), (5, 100), (9, 200), (15, 255)]
}

fn drain() {
    for form in [Form::Bytes128, Form::Bytes64] {
        let rates = (0..7).map(|_| rate(&Setting::new(form, 1, 2), &[(0, 1)])).collect();
        println!("{form:?}: {:.1} M descriptors/s, put + signal, one queue", median(rates));
    }
}

/// What a descriptor takes that another core has written, ns.
fn laps(form: Form, n: u32) -> f64 {
    let setting = Setting::new(form, 1, 2);
    let (mut drain, d) = (setting.drain(), setting.put());
    shared::laps(192, n, |nth| setting.write(0, 1, nth, &d), &mut drain)
}

fn sparse() {
    let (mut all, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        all.push(rate(&Setting::new(Form::Bytes128, CONTEXTS, RANKS), &four()));
        alone.push(rate(&Setting::new(Form::Bytes128, 4, 1), &[(0, 0), (1, 0), (2, 0), (3, 0)]));
    }
    let (all, alone) = (median(all), median(alone));
    println!("4 of {} queues: {all:.1} M/s, the 4 alone: {alone:.1} M/s, ratio {:.2}", CONTEXTS * RANKS, all / alone);
}

fn latency() {
    const SAMPLES: u32 = 20_000;
    let setting = Setting::new(Form::Bytes128, CONTEXTS, RANKS);
    let (mut drain, stop) = (setting.drain(), AtomicBool::new(false));
    let mut times: Vec<u64> = std::thread::scope(|s| {
        let producer = s.spawn(|| {
            pin(1);
            let (d, queues) = (setting.put(), four());
            let mut times = Vec::new();
            for n in 0..SAMPLES {
                let (context, peer) = queues[n as usize % 4];
                let index = n / 4;
                let written = ticks();
                while !setting.write(context, peer, index, &d) {}
                let context = &setting.contexts[context];
                while context.completed[peer].load(Ordering::Acquire) <= index {
                    std::hint::spin_loop();
                }
                times.push(context.posted.load(Ordering::Acquire).saturating_sub(written));
            }
            stop.store(true, Ordering::Relaxed);
            times
        });
        pin(0);
        while !stop.load(Ordering::Relaxed) {
            drain.pass(Rest::Awake);
        }
        producer.join().expect("the producer")
    });
    let (from, begun) = (ticks(), Instant::now());
    std::thread::sleep(Duration::from_millis(50));
    let per_us = (ticks() - from) as f64 / begun.elapsed().as_micros() as f64;
    times.sort_unstable();
    let at = |share: f64| times[(times.len() as f64 * share) as usize] as f64 / per_us;
    println!("written to posted, {} queues: median {:.2} µs, 99 % {:.2} µs", CONTEXTS * RANKS, at(0.5), at(0.99));
}

mod measured {
    use super::*;

    /// Passes of an engine that has nothing to do.
    #[inline(never)]
    pub fn idle(drain: &mut Drain<AtOnce, Queue>, passes: u32) -> u32 {
        (0..passes).map(|_| drain.pass(Rest::Awake).moved).sum()
    }

    /// Passes with a batch each.
    #[inline(never)]
    pub fn batch(drain: &mut Drain<AtOnce, Queue>) -> u32 {
        drain.pass(Rest::Awake).moved
    }
}

fn idle(passes: u32) {
    let setting = Setting::new(Form::Bytes128, CONTEXTS, RANKS);
    let mut drain = setting.drain();
    let begun = Instant::now();
    let moved = measured::idle(&mut drain, passes);
    println!("{passes} idle passes in {:?}, {moved} moved", begun.elapsed());
}

/// Processor time of this process.
fn used() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID).expect("a clock");
    Duration::new(time.tv_sec() as u64, time.tv_nsec() as u32)
}

/// An engine as a communicator has it, with a set of 4 contexts and 8 ranks.
fn rest(seconds: u32) {
    let setting = Setting::new(Form::Bytes128, 4, 8);
    let spin = Some(Duration::from_millis(20));
    let settings = Settings { threads: 1, spin, stall: Duration::from_secs(10), cpus: None, comm: 1, trace: None };
    let engine = Engine::start(&settings).expect("a thread");
    let ticket = engine.give(0, Box::new(setting.drain()));
    std::thread::sleep(Duration::from_secs(11));
    let (before, begun) = (used(), Instant::now());
    std::thread::sleep(Duration::from_secs(seconds.into()));
    let share = (used() - before).as_secs_f64() / begun.elapsed().as_secs_f64();
    println!("idle over {seconds} s: {:.3} % of a core", share * 100.0);
    engine.take_back(ticket);
}

fn count(descriptors: u32) {
    let setting = Setting::new(Form::Bytes128, 1, 2);
    let (mut drain, d) = (setting.drain(), setting.put());
    let (mut written, mut moved) = (0, 0);
    while moved < 2 * descriptors {
        while written < descriptors && written % 32 != 31 && setting.write(0, 1, written, &d) {
            written += 1;
        }
        written += u32::from(written < descriptors && setting.write(0, 1, written, &d));
        moved += measured::batch(&mut drain);
    }
    println!("{descriptors} descriptors");
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let n = || words.get(1).and_then(|n| n.parse().ok()).unwrap_or(1000);
    match words.first().map(String::as_str) {
        Some("drain") => drain(),
        Some("laps") => {
            for form in [Form::Bytes128, Form::Bytes64] {
                println!("{form:?}: {:.1} ns a descriptor", laps(form, n()));
            }
        }
        Some("sparse") => sparse(),
        Some("latency") => latency(),
        Some("idle") => idle(n()),
        Some("rest") => rest(n()),
        Some("count") => count(n()),
        _ => eprintln!("engine_bench drain|laps [N]|sparse|latency|idle [N]|rest [N]|count [N] [stats]"),
    }
}
