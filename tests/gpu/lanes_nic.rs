//! Queues of the software NIC that a kernel serves by itself: bytes before their signals, sums, completions and
//! counters, whoever of the kernel and the engine's threads has carried an entry out. On the fake CUDA driver.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::*;
use crate::support::common::{job, Rank};
use crate::support::kernel::{Kernel, Through, WAYS};
use crate::support::nic::{read, value, wait, write, Ask, Raw, Status, NOP};
use crate::support::processes::processes;
use nccl_plugin_api::PTR_CUDA;
use std::sync::atomic::{AtomicU64, Ordering};

/// Blocks of a stream, where its puts go in turn, and the values behind them.
const BLOCKS: usize = 4;
const BLOCK: usize = 40 << 10;
const VALUES: usize = BLOCKS * BLOCK;
const VALUES_AT_ONCE: usize = 64;
/// Bytes of what one stream writes.
const AREA: usize = VALUES + 8 * VALUES_AT_ONCE;
/// Signals of a stream: one counts its puts, one its values, one adds.
const SIGNALS: usize = 3;
const BY: u64 = 1 << 40 | 5;
const COUNTER: u64 = 1;

/// What a stream has beside entries that the kernel takes.
#[derive(Clone, Copy, Debug, Default)]
struct Mix {
    /// One of so many posts is one that it refuses; 0: none is.
    refused: usize,
    /// Kernels reset signals by a store behind each round.
    resets: bool,
}

/// Who is where.
#[derive(Clone, Copy, Debug)]
struct Scene {
    ranks: usize,
    gpus: i32,
    contexts: usize,
    /// Slots of a queue; 0: as many as NCCL takes.
    depth: i32,
    each: usize,
    mix: Mix,
    /// The tables, and the NCCL that kernels were compiled with.
    through: Through,
}

impl Default for Scene {
    fn default() -> Self {
        Self { ranks: 2, gpus: 1, contexts: 1, depth: 64, each: 100, mix: Mix::default(), through: WAYS[5] }
    }
}

/// What a post does, the same for who posts and who receives.
#[derive(Clone, Copy, Debug)]
enum What {
    Put {
        block: usize,
        bytes: usize,
    },
    Value {
        at: usize,
        bytes: usize,
    },
    Add,
    /// An addition behind a put of no bytes.
    AddBehindNothing,
    Get,
}

/// The `nth` post of a stream.
fn what(nth: usize, mix: Mix) -> What {
    let draw = (nth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    let (kind, n) = (draw as usize % 8, draw as usize / 8 % 8);
    let block = nth % BLOCKS;
    match kind {
        _ if mix.refused > 0 && draw as usize % mix.refused == 0 => match n % 2 {
            0 => What::Put { block, bytes: BLOCK },
            _ => What::Value { at: nth % VALUES_AT_ONCE, bytes: 16 },
        },
        0..=3 => What::Put { block, bytes: [8, 16, 64, 104, 520, 4096, 8192, 32 << 10][n] },
        4..=5 => What::Value { at: nth % VALUES_AT_ONCE, bytes: 8 },
        6 => What::AddBehindNothing,
        7 if n == 0 => What::Get,
        _ => What::Add,
    }
}

/// A rank's windows, as it sees them, and what device code calls them.
struct Windows<'a> {
    src: &'a [AtomicU64],
    dst: &'a [AtomicU64],
    gin: [u64; 2],
}

/// One (context, peer), both ways.
struct Stream {
    context: usize,
    peer: usize,
    own: usize,
    ranks: usize,
    mix: Mix,
    posted: usize,
    /// When each block was posted last, as an entry of the queue.
    last: [Option<u64>; BLOCKS],
    /// What has come, of each signal, and what was expected of it; posts that were looked at.
    sums: [u64; SIGNALS],
    puts: usize,
    seen: usize,
    counted: u64,
}

impl Stream {
    fn area(&self, from: usize) -> usize {
        (self.context * self.ranks + from) * AREA
    }

    fn post(&mut self, kernel: &Kernel, windows: &Windows) {
        let (qp, nth) = (kernel.qp(self.context, self.peer), self.posted);
        let (to, here) = (self.area(self.own), self.area(self.peer));
        let signal =
            |which: usize, by| kernel.add_signal(self.context, self.peer, (SIGNALS * self.own + which) as u64, by);
        let at = |offset: usize| kernel.at(windows.gin[1], self.peer, (to + offset) as u64);
        let from = |offset: usize| kernel.own(windows.gin[0], (here + offset) as u64);
        match what(nth, self.mix) {
            What::Put { block, bytes } => {
                if let Some(last) = self.last[block].take() {
                    assert_eq!(qp.wait(last), Status::Good);
                }
                let first = (here + block * BLOCK) / 8;
                windows.src[first..first + bytes / 8].iter().for_each(|w| w.store(nth as u64 + 1, Ordering::Release));
                let entries = [write(at(block * BLOCK), from(block * BLOCK), bytes as u32), signal(0, 1)];
                self.last[block] = Some(match bytes {
                    BLOCK => {
                        kernel.post_counted((self.context, self.peer), &entries, COUNTER);
                        self.counted += 1;
                        qp.reserved() - 1
                    }
                    _ => qp.post(&entries),
                });
            }
            What::Value { at: place, bytes } => {
                let word = (nth as u64 + 1).to_le_bytes();
                let inline: Vec<u8> = word.into_iter().cycle().take(bytes).collect();
                qp.post(&[value(at(VALUES + 8 * (place & !1)), &inline), signal(1, 1)]);
            }
            What::Add => drop(qp.post(&[signal(2, BY)])),
            What::AddBehindNothing => drop(qp.post(&[Raw::new(NOP, 0), signal(2, BY)])),
            What::Get => drop(qp.post(&[read(at(0), from(BLOCK - 64), 8)])),
        }
        self.posted += 1;
    }

    fn sum(&self, kernel: &Kernel, which: usize) -> u64 {
        kernel.signal(self.context, (SIGNALS * self.peer + which) as u64)
    }

    /// Puts of which the signal has come are there, or newer ones.
    fn check(&mut self, kernel: &Kernel, windows: &Windows) {
        let come = self.sum(kernel, 0);
        while (self.puts as u64) < come {
            if let What::Put { block, bytes } = what(self.seen, self.mix) {
                let first = (self.area(self.peer) + block * BLOCK) / 8;
                for at in [first, first + bytes / 16, first + bytes / 8 - 1] {
                    let word = windows.dst[at].load(Ordering::Acquire);
                    assert!(word > self.seen as u64, "post {} from {}: {word} at {at}", self.seen, self.peer);
                }
                self.puts += 1;
            }
            self.seen += 1;
        }
    }

    /// All of the peer's posts up to `until` have come, and nothing else.
    fn finish(&mut self, kernel: &Kernel, windows: &Windows, from: usize, until: usize) {
        for nth in from..until {
            match what(nth, self.mix) {
                What::Put { .. } => self.sums[0] += 1,
                What::Value { .. } => self.sums[1] += 1,
                What::Add | What::AddBehindNothing => self.sums[2] += BY,
                What::Get => {}
            }
        }
        for which in 0..SIGNALS {
            let name = || format!("signal {which} from {}: {}", self.peer, self.sum(kernel, which));
            wait(name, || self.sum(kernel, which) >= self.sums[which]);
        }
        self.check(kernel, windows);
        let sums: Vec<u64> = (0..SIGNALS).map(|which| self.sum(kernel, which)).collect();
        assert_eq!(sums, self.sums, "from {} in context {}", self.peer, self.context);
        self.seen = until;
        if self.mix.resets {
            (0..SIGNALS).for_each(|which| kernel.reset_signal(self.context, (SIGNALS * self.peer + which) as u64));
            (self.sums, self.puts) = ([0; SIGNALS], 0);
        }
    }
}

/// Rounds of streams between all of them, until `is_enough`.
fn streams(fake: &Fake, r: &Rank, scene: Scene, meeting: &Meeting, is_enough: &dyn Fn() -> bool) {
    let Scene { ranks, gpus, contexts, depth, each, mix, through } = scene;
    let gpu = r.rank as i32 % gpus;
    let _context = fake.enter(gpu);
    let bytes = AREA * ranks * contexts;
    let memory = [(); 2].map(|()| fake.segments(gpu, &[bytes.next_multiple_of(65_536)], true));
    let gin = [0, 1].map(|which| through.register(r, memory[which], bytes, PTR_CUDA).1);
    // SAFETY: a window of so many words, which stays.
    let words = |at: u64| unsafe { std::slice::from_raw_parts(fake.peek(at).cast::<AtomicU64>(), bytes / 8) };
    let windows = Windows { src: words(memory[0]), dst: words(memory[1]), gin };
    let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
    let ask = Ask { contexts: contexts as u32, signals: (SIGNALS * ranks) as u32, depth, ..Ask::default() };
    let kernel = Kernel::new(r, through, ask, &see);
    let mut all: Vec<Stream> = (0..contexts)
        .flat_map(|context| (0..ranks).filter(|peer| *peer != r.rank).map(move |peer| (context, peer)))
        .map(|(context, peer)| Stream {
            context,
            peer,
            own: r.rank,
            ranks,
            mix,
            posted: 0,
            last: [None; BLOCKS],
            sums: [0; SIGNALS],
            puts: 0,
            seen: 0,
            counted: 0,
        })
        .collect();
    meeting.wait();
    let round = |n: usize| {
        for i in 0..each {
            all.iter_mut().for_each(|s| s.post(&kernel, &windows));
            if i % 8 == 0 && !mix.resets {
                all.iter_mut().for_each(|s| s.check(&kernel, &windows));
            }
        }
        all.iter().for_each(|s| assert_eq!(kernel.qp(s.context, s.peer).flush(), Status::Good));
        for context in 0..contexts {
            let counted = all.iter().filter(|s| s.context == context).map(|s| s.counted).sum();
            kernel.wait_counter(context, COUNTER, counted);
            assert_eq!(kernel.counter(context, COUNTER), counted);
        }
        meeting.wait();
        all.iter_mut().for_each(|s| s.finish(&kernel, &windows, n * each, (n + 1) * each));
    };
    rounds(meeting, &format!("{scene:?}"), round, is_enough);
    for (context, peer) in all.iter().map(|s| (s.context, s.peer)) {
        let qp = kernel.qp(context, peer);
        let (entries, stands) = (qp.reserved(), qp.standing(0));
        // Counted completions are all seen; of others device code looks at those that it waits for.
        let is_counted = !is_doorbell();
        assert_eq!(qp.view.is_counted, is_counted, "{scene:?}");
        assert!(!is_counted || stands.ends_with(&format!(" {entries} seen")), "{scene:?}: {stands}");
    }
    assert!(!kernel.has_error());
    meeting.wait();
    kernel.destroy();
    meeting.wait();
}

const RINGING: &str = "OXYGIN_GDAKI_RINGING";

/// Kernels of the software NIC are served by one of ours, and ring by free flow.
pub fn take() -> Fake {
    take_rung_by("free-flow")
}

/// The same, and they ring so.
pub fn take_rung_by(ringing: &str) -> Fake {
    let fake = Fake::take();
    serve_by_kernel();
    std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
    std::env::set_var(RINGING, ringing);
    fake
}

fn is_doorbell() -> bool {
    std::env::var(RINGING).is_ok_and(|ringing| ringing == "doorbell")
}

/// Threads, until the kernel has taken so many.
fn between_threads(scene: Scene, least: u64) {
    between_threads_on(take(), scene, least);
}

fn between_threads_on(fake: Fake, scene: Scene, least: u64) {
    let before = fake.lane_entries();
    threads_until(&fake, scene, &|| fake.lane_entries() - before >= least);
}

fn threads_until(fake: &Fake, scene: Scene, is_enough: &(dyn Fn() -> bool + Sync)) {
    let against = AtomicU64::new(0);
    job(scene.ranks, 1, |r| {
        let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
        streams(fake, r, scene, &meeting, is_enough);
    });
    fake.check();
}

/// Two threads with a GPU each and so many contexts, until it is enough.
pub fn between_threads_until(fake: &Fake, contexts: usize, is_enough: &(dyn Fn() -> bool + Sync)) {
    threads_until(fake, Scene { gpus: 2, contexts, ..Scene::default() }, is_enough);
}

#[test]
fn the_kernel_carries_out_send_entries() {
    for (gpus, contexts, depth) in [(1, 1, 64), (2, 2, 8), (2, 1, 0)] {
        between_threads(Scene { gpus, contexts, depth, ..Scene::default() }, 1000);
    }
}

/// Of each layout that kernels read: the first one's write the doorbell record before the doorbell.
#[test]
fn the_kernel_carries_out_entries_that_a_doorbell_rings() {
    for (through, gpus, contexts, depth) in
        [(WAYS[0], 1, 1, 0), (WAYS[2], 2, 2, 8), (WAYS[3], 2, 1, 64), (WAYS[5], 1, 1, 64)]
    {
        let scene = Scene { gpus, contexts, depth, through, ..Scene::default() };
        between_threads_on(take_rung_by("doorbell"), scene, 1000);
    }
}

#[test]
fn doorbells_of_the_smallest_rings_are_heard() {
    let scene = Scene { depth: 2, each: 60, through: WAYS[3], ..Scene::default() };
    between_threads_on(take_rung_by("doorbell"), scene, 50);
}

#[test]
fn rings_with_a_doorbell_go_to_the_engine_and_back() {
    for gpus in [1, 2] {
        let mix = Mix { refused: 100, ..Mix::default() };
        let scene = Scene { gpus, mix, each: 150, through: WAYS[3], ..Scene::default() };
        between_threads_on(take_rung_by("doorbell"), scene, 300);
    }
}

/// A put and its signal need two slots.
#[test]
fn the_smallest_rings_are_served() {
    between_threads(Scene { depth: 2, each: 60, ..Scene::default() }, 50);
}

#[test]
fn three_ranks() {
    between_threads(Scene { ranks: 3, gpus: 3, ..Scene::default() }, 500);
}

/// Longer puts, gets, counters, longer values: the engine's threads carry them out, in their place.
#[test]
fn rings_go_to_the_engine_and_back() {
    for gpus in [1, 2] {
        let mix = Mix { refused: 100, ..Mix::default() };
        between_threads(Scene { gpus, mix, each: 150, ..Scene::default() }, 300);
    }
}

#[test]
fn signals_that_kernels_reset_begin_anew() {
    for gpus in [1, 2] {
        let mix = Mix { refused: 200, resets: true };
        between_threads(Scene { gpus, mix, ..Scene::default() }, 500);
    }
}

#[test]
fn rings_are_served_between_processes() {
    processes("rings_are_served_between_processes", 2, &[], |place| {
        let fake = take();
        let r = place.join(1);
        let meeting = Meeting::new(|| place.barrier(), place.word(0));
        let scene = Scene { gpus: 2, contexts: 2, mix: Mix { refused: 300, ..Mix::default() }, ..Scene::default() };
        streams(&fake, &r, scene, &meeting, &|| fake.lane_entries() >= 300);
        r.leave();
        assert_eq!(fake.foreign(), 0, "memory of other processes is still mapped");
        fake.check();
    });
}
