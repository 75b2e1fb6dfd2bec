//! What the software NIC costs by itself: entries of emulated device code, over a fabric that completes at once.
//!
//!     nic_bench drain      entries a second, a producer on another core; puts, each with a signal behind it
//!     nic_bench laps N     what an entry takes that another core has written, N laps of 512
//!     nic_bench count N    N entries, seen, posted and completed (for callgrind)
//!
//! A last word `values` has the puts be of bytes that stand in their entries, `reads` has them be gets.

use oxygin::config::Ringing;
use oxygin::error::Result;
use oxygin::fabric::{Context, Flush, Posted, Sent};
use oxygin::gdaki::soft::doorbell::DoorbellWords;
use oxygin::gdaki::soft::keys::{Keys, SINK};
use oxygin::gdaki::soft::meaning::{Counts, Terms};
use oxygin::gdaki::soft::queue::{QueuePairAddresses, SendQueue};
use oxygin::memory::window::{Registration, Remote, Window, WindowFacts};
use oxygin::proxy::drain::{Drain, Kept, Work};
use oxygin::proxy::idle::Rest;
use oxygin::proxy::lane::{Common, Lane};
use oxygin::rma::atomic::Atomics;
use oxygin::rma::op::Op;
use oxygin::rma::refusal::Target;
use oxygin::rma::seq::Seq;
use oxygin::sys::handles;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "shared/laps.rs"]
mod shared;
use shared::{median, pin};

const COLL: u64 = 1;
const SIZE: u32 = 1024;
const NUMBER: u32 = 7;

/// Every operation is complete when it is posted.
#[derive(Default)]
struct AtOnce(AtomicU32);

impl Context for AtOnce {
    const NAME: &'static str = "at once";
    const SHARES_PROGRESS: bool = true;

    unsafe fn post(&self, _: u32, ops: &[Op]) -> Result<Posted> {
        let last = self.0.load(Ordering::Relaxed).wrapping_add(ops.len() as u32);
        self.0.store(last, Ordering::Release);
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
    fn sent(&self, _: u32) -> Sent {
        Sent { newest: Seq(self.0.load(Ordering::Relaxed)), bytes: 0 }
    }
    fn completed(&self, _: u32) -> &AtomicU32 {
        &self.0
    }
}

/// One queue pair, its window, and its memory, which both sides use.
struct Setting {
    contexts: Arc<Vec<AtOnce>>,
    slots: Arc<Vec<AtomicU64>>,
    completions: Vec<AtomicU64>,
    words: Vec<AtomicU64>,
    record: AtomicU32,
    handler: Ringing,
    keys: Arc<Keys>,
    /// Of the first of the entries.
    opcode: u64,
    entries: [[u64; 8]; 2],
}

/// Whether the last word is this one.
fn is_asked(kind: &str) -> bool {
    std::env::args().next_back().is_some_and(|word| word == kind)
}

/// The words of a segment.
fn segment(bytes: &[&[u8]]) -> [u64; 2] {
    let all: [u8; 16] = bytes.concat().try_into().expect("16 bytes");
    [0, 8].map(|at| u64::from_ne_bytes(all[at..at + 8].try_into().expect("8 bytes")))
}

impl Setting {
    fn new(handler: Ringing) -> Self {
        let window = Window::of(
            COLL,
            WindowFacts {
                id: 1,
                base: 1 << 32,
                len: 1 << 20,
                remote: vec![Remote { base: 1 << 32, len: 1 << 20, rkey: 1 }].into(),
                registration: Registration { lkey: 1, rkey: 1, guard: Box::new(()) },
            },
        );
        let keys = Arc::new(Keys::default());
        let handle = handles::insert(Arc::new(window)).expect("a free handle") as u64;
        let key = keys.add(handle).expect("a key").to_be_bytes();
        let control = |n: u32| segment(&[&[0; 4], &(NUMBER << 8 | n).to_be_bytes(), &[0, 0, 0, 8], &[0; 4]]);
        let remote = |at: u64| segment(&[&at.to_be_bytes(), &key, &[0; 4]]);
        let put = match is_asked("values") {
            true => segment(&[&(8u32 | 1 << 31).to_be_bytes(), &[7; 8], &[0; 4]]),
            false => segment(&[&8u32.to_be_bytes(), &key, &64u64.to_be_bytes()]),
        };
        let (add, sink) = (segment(&[&1u64.to_be_bytes(), &[0; 8]]), SINK.to_be_bytes());
        let sink = segment(&[&8u32.to_be_bytes(), &sink, &[0; 8]]);
        let join = |s: [[u64; 2]; 4]| s.concat().try_into().expect("8 words");
        let zeros = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        Self {
            contexts: Arc::new(vec![AtOnce::default()]),
            slots: Arc::new(zeros(8 * SIZE as usize)),
            completions: zeros(8 * SIZE as usize),
            words: zeros(handler.words(SIZE)),
            record: AtomicU32::new(0),
            handler,
            keys,
            opcode: if is_asked("reads") { 0x10 } else { 0x08 },
            entries: [join([control(3), remote(128), put, [0; 2]]), join([control(4), remote(256), add, sink])],
        }
    }

    fn drain(&self) -> Drain<AtOnce, SendQueue> {
        let terms = Arc::new(Terms {
            target: Target { coll: COLL, contexts: 1, nranks: 1 },
            context: 0,
            keys: self.keys.clone(),
            atomics: Atomics::NONE,
            counts: Arc::new(Counts::new(NUMBER, 1)),
            ended: Arc::default(),
        });
        let bell = DoorbellWords {
            handler: self.handler,
            words: NonNull::from(&self.words[0]),
            record: NonNull::from(&self.record),
        };
        let (slots, completions) = (NonNull::from(&self.slots[0]), NonNull::from(&self.completions[0]).cast());
        let (device_slots, device_rings) = (0, 0);
        let places = QueuePairAddresses {
            slots,
            device_slots,
            device_rings,
            device_completions: None,
            is_managed: false,
            size: SIZE,
            completions,
            credits: None,
            bell,
            number: NUMBER,
        };
        // SAFETY: the setting keeps the memory and outlives the drain.
        let queue = unsafe { SendQueue::new(places, terms, 0) };
        let common = Common::new(0, Arc::new(AtomicBool::new(false)));
        // SAFETY: the vector does not change any more.
        let kept = unsafe { Kept::new(&self.contexts, self.contexts.clone()) };
        Drain::new(kept, vec![common], vec![(0, Lane::new(queue, 0, Seq(0)))], self.slots.clone())
    }

    /// Writes entry `index` and rings if there is room for it.
    fn write(&self, index: u64) -> bool {
        let (size, at) = (u64::from(SIZE), (index % u64::from(SIZE)) as usize);
        if index >= size {
            let before = index - size;
            let last = self.completions[8 * (before % size) as usize + 7].load(Ordering::Acquire).to_ne_bytes()[7];
            if (last & 1 == 1) != (before & size != 0) {
                return false;
            }
        }
        let entry = &self.entries[index as usize % 2];
        let opcode = if index % 2 == 0 { self.opcode } else { 0x12 };
        let first = u64::from_be(entry[0]) | (index & 0xffff) << 40 | opcode << 32;
        (1..8).for_each(|i| self.slots[8 * at + i].store(entry[i], Ordering::Relaxed));
        self.slots[8 * at].store(first.to_be(), Ordering::Release);
        match self.handler {
            Ringing::FreeFlow => self.words[at].store(index + 1, Ordering::Release),
            Ringing::Proxy => self.words[0].store(index + 1, Ordering::Release),
            Ringing::Doorbell => {
                let bell = ((index + 1) & 0xff_ffff) << 40 | u64::from(NUMBER << 8);
                self.words[0].store(bell.to_be(), Ordering::Release);
                self.record.store(((index as u32 + 1) & 0xffff).to_be(), Ordering::Release);
            }
        }
        true
    }
}

/// Entries a second for half a second, in millions.
fn rate(setting: &Setting) -> f64 {
    let (stop, mut drain) = (AtomicBool::new(false), setting.drain());
    std::thread::scope(|s| {
        s.spawn(|| {
            pin(1);
            let mut next = 0;
            while !stop.load(Ordering::Relaxed) {
                next += u64::from(setting.write(next));
            }
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
        moved as f64 / 2.0 / seconds / 1e6
    })
}

/// What an entry takes that another core has written, ns.
fn laps(handler: Ringing, n: u32) -> f64 {
    let setting = Setting::new(handler);
    let mut drain = setting.drain();
    shared::laps(512, n, |nth| setting.write(u64::from(nth)), &mut drain)
}

mod measured {
    use super::*;

    /// Passes with a batch each.
    #[inline(never)]
    pub fn batch(drain: &mut Drain<AtOnce, SendQueue>) -> u32 {
        drain.pass(Rest::Awake).moved
    }
}

fn count(handler: Ringing, entries: u64) {
    let setting = Setting::new(handler);
    let mut drain = setting.drain();
    let (mut written, mut moved) = (0, 0);
    while moved < 2 * entries {
        for _ in 0..32.min(entries - written) {
            written += u64::from(setting.write(written));
        }
        moved += u64::from(measured::batch(&mut drain));
    }
    println!("{entries} entries");
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let n = words.get(1).and_then(|n| n.parse().ok()).unwrap_or(1000);
    let handlers = [Ringing::Doorbell, Ringing::Proxy, Ringing::FreeFlow];
    match words.first().map(String::as_str) {
        Some("drain") => {
            for handler in handlers {
                let rate = median((0..7).map(|_| rate(&Setting::new(handler))).collect());
                println!("{handler:?}: {rate:.1} M entries/s, puts and signals, one queue pair");
            }
        }
        Some("laps") => {
            for handler in handlers {
                println!("{handler:?}: {:.1} ns an entry", laps(handler, n as u32));
            }
        }
        Some("count") => {
            let which = words.get(2).and_then(|w| w.parse().ok()).unwrap_or(0usize);
            count(handlers[which % 3], n);
        }
        _ => eprintln!("nic_bench drain|laps [N]|count [N] [0: doorbell, 1: proxy, 2: free flow] [values|reads]"),
    }
}
