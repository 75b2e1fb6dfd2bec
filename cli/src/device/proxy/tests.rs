//! Emulated device code against a small consumer that carries out what it reads in one process: handles are addresses.

use super::*;
use crate::device::{Compiled, Deadline, Device, Place, Signal};
use crate::plugin::Kind;
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::device_context::{ContextV1, ContextV2, ContextV3};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const RANKS: usize = 2;
const SIGNALS: usize = 8;
const KINDS: [Kind; 3] = [Kind::GinV12, Kind::GinV13, Kind::GinV14];

/// What a plugin would have behind one context's device handle.
struct Queue {
    form: Form,
    size: usize,
    slots: Vec<AtomicU64>,
    indices: Vec<AtomicU32>,
    words: Vec<AtomicU64>,
    array: Vec<ContextV3>,
}

impl Queue {
    fn new(format: Format, size: usize) -> Box<Self> {
        let zeros = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let mut queue = Box::new(Self {
            form: format.form(),
            size,
            // One word more, to align slots to 16 bytes.
            slots: zeros(RANKS * size * format.form().bytes() / 8 + 1),
            indices: (0..4 * RANKS).map(|_| AtomicU32::new(u32::MAX - 20)).collect(),
            words: zeros(3 * SIGNALS),
            array: Vec::new(),
        });
        let at32 = |i: usize| queue.indices[i * RANKS..].as_ptr() as u64;
        let at64 = |i: usize| queue.words[i * SIGNALS..].as_ptr() as u64;
        let v1 = ContextV1 {
            nranks: RANKS as i32,
            queue_size: size as u32,
            queues: (queue.slots.as_ptr() as u64).next_multiple_of(16),
            pis: at32(0),
            cis: at32(1),
            counters: at64(0),
            signals: at64(1),
        };
        let (last_issued_get, last_visible_get) = (at32(2), at32(3));
        let v2 = ContextV2 { v1, signal_offsets: at64(2), last_issued_get, last_visible_get };
        queue.array.push(ContextV3 { v2, flushes_all_puts_on_any_signal: true });
        queue
    }

    fn handle(&self) -> DeviceHandle {
        DeviceHandle {
            net_device_type: DEVICE_GIN_PROXY,
            net_device_version: PROXY_VERSION,
            handle: self.array.as_ptr().cast_mut().cast(),
            size: 0,
            needs_proxy_progress: 0,
        }
    }

    fn word(&self, peer: usize, index: u32, i: usize) -> &AtomicU64 {
        let slot = (peer * self.size + index as usize % self.size) * self.form.bytes() / 8;
        &self.slots[(self.slots.as_ptr() as usize % 16) / 8 + slot + i]
    }

    /// Takes the next descriptor of a peer's queue if all of it is there.
    fn take(&self, peer: usize, clear: bool) -> Option<Descriptor> {
        let index = self.indices[RANKS + peer].load(Ordering::Relaxed);
        let mut words = [0; WORDS];
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.word(peer, index, i).load(Ordering::Acquire);
            if *word & 1 == 0 {
                return None;
            }
        }
        if clear {
            (0..WORDS).for_each(|i| self.word(peer, index, i).store(0, Ordering::Relaxed));
        }
        Some(Descriptor { words, form: self.form })
    }

    fn credit(&self, peer: usize) {
        let ci = &self.indices[RANKS + peer];
        ci.store(ci.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    fn carry_out(&self, d: &Descriptor) {
        let op = d.op();
        let (first, second) = (d.first_handle() + d.first_offset(), d.second_handle() + d.second_offset());
        let copy = |from: u64, to: u64| {
            // SAFETY: the tests name memory of their own.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, d.size() as usize) };
        };
        let value = d.inline_value();
        match op {
            op if op & OP_GET != 0 => copy(first, second),
            op if op & OP_INLINE != 0 => copy((&raw const value) as u64, second),
            op if op & OP_PUT != 0 && d.size() > 0 => copy(first, second),
            _ => {}
        }
        let more = if op & OP_SIGNAL_INC != 0 { 1 } else { d.signal_value() };
        if op & (OP_SIGNAL_INC | OP_SIGNAL_ADD) != 0 {
            match op & OP_VA_SIGNAL {
                0 => self.words[SIGNALS + d.signal() as usize].fetch_add(more, Ordering::Release),
                // SAFETY: the tests name a word of their own.
                _ => unsafe { AtomicU64::from_ptr(first as *mut u64) }.fetch_add(more, Ordering::Release),
            };
        }
        if op & OP_COUNTER != 0 {
            self.words[d.counter() as usize].fetch_add(1, Ordering::Release);
        }
    }

    /// Runs `body` beside a consumer.
    fn served<T>(&self, body: impl FnOnce() -> T) -> T {
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    for peer in 0..RANKS {
                        if let Some(d) = self.take(peer, true) {
                            self.carry_out(&d);
                            self.credit(peer);
                        } else {
                            std::thread::yield_now();
                        }
                    }
                }
            });
            let _end = End(&end);
            body()
        })
    }
}

fn config(queue_depth: i32) -> ContextConfig {
    ContextConfig { n_signals: SIGNALS as i32, n_counters: SIGNALS as i32, queue_depth, ..Default::default() }
}

fn device(kind: Kind, queue: &Queue) -> Device {
    let format = Format::of(kind).expect("a queue");
    // SAFETY: a handle of this test's own memory.
    unsafe { Device::open(Compiled::Proxy(format), 0, RANKS as u32, &config(4), &queue.handle()) }.expect("a device")
}

#[test]
fn every_operation_arrives_through_a_queue_that_wraps() {
    for kind in KINDS {
        let queue = Queue::new(Format::of(kind).expect("a queue"), 4);
        let device = device(kind, &queue);
        let limit = Deadline::new(Duration::from_secs(20));
        let (from, to, word) = (vec![7_u8; 100], vec![0_u8; 100], AtomicU64::new(0));
        let at = |v: &Vec<u8>| (v.as_ptr() as u64, 0);
        let va = Place::Va { window: word.as_ptr() as u64, offset: 0 };
        let va = Signal { place: va, add: Some(1 << 40), strong: true };
        queue.served(|| {
            let mut thread = device.thread(0, Pen::wild(3, 50), &limit);
            for round in 1..=100_u64 {
                thread.put(1, at(&from), at(&to), 64, Some(&Signal::add(2, u64::MAX)), Some(3)).expect("put");
                thread.put(0, at(&from), at(&to), 8, Some(&va), None).expect("put and signal by address");
                thread.put_value(1, &[2, 3, 4, 5, 6, 7, 8], (at(&to).0, 70), Some(&Signal::inc(1))).expect("value");
                thread.flush().expect("flush");
                assert_eq!((thread.read_signal(2), thread.read_counter(3)), (round.wrapping_neg(), round));
                assert_eq!((thread.read_signal(1), word.load(Ordering::Acquire)), (round, round << 40));
            }
            assert_eq!(to[..64], from[..64]);
            assert_eq!(to[64..80], [0, 0, 0, 0, 0, 0, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0]);
            if Format::of(kind).is_some_and(Format::has_gets) {
                thread.get(1, (at(&from).0, 0), (at(&to).0, 80), 20).expect("get");
                assert_eq!(thread.get(1, at(&from), at(&to), 0), Ok(None));
                thread.flush().expect("flush");
                assert_eq!(to[80..], from[80..]);
            }
            thread.reset_signal(1);
            thread.reset_counter(3);
            assert_eq!((thread.read_signal(1), thread.read_counter(3)), (0, 0));
            thread.signal(1, &Signal::inc(1).weak()).expect("signal");
            thread.wait_signal(1, 1).expect("it comes");
        });
    }
}

#[test]
fn many_producers_lose_nothing() {
    for kind in KINDS {
        let queue = Queue::new(Format::of(kind).expect("a queue"), 8);
        let device = device(kind, &queue);
        queue.served(|| {
            std::thread::scope(|scope| {
                for producer in 0..6 {
                    let device = &device;
                    scope.spawn(move || {
                        let limit = Deadline::new(Duration::from_secs(20));
                        let mut thread = device.thread(0, Pen::wild(producer, 30), &limit);
                        for i in 0..500 {
                            let signal = Signal::add(producer as u32 % 2, 1 + (producer << 20));
                            thread.signal((i % 2) as u32, &signal).expect("signal");
                        }
                    });
                }
            });
            let limit = Deadline::new(Duration::from_secs(20));
            let mut thread = device.thread(0, Pen::plain(), &limit);
            thread.flush().expect("flush");
            let sum = |from: u64| (from..6).step_by(2).map(|p| 500 * (1 + (p << 20))).sum::<u64>();
            assert_eq!((thread.read_signal(0), thread.read_signal(1)), (sum(0), sum(1)));
        });
    }
}

#[test]
fn flushes_post_only_where_gets_are_not_yet_visible() {
    let flushes = |kind: Kind, gets: bool| {
        let queue = Queue::new(Format::of(kind).expect("a queue"), 8);
        let device = device(kind, &queue);
        queue.served(|| {
            let limit = Deadline::new(Duration::from_secs(20));
            let mut thread = device.thread(0, Pen::plain(), &limit);
            let word = AtomicU64::new(0);
            if gets {
                thread.get(1, (word.as_ptr() as u64, 0), (word.as_ptr() as u64, 0), 8).expect("get");
            }
            thread.flush().expect("flush");
            thread.flush().expect("flush");
            device.proxy().expect("descriptors").context(0).ci(0).load(Ordering::Relaxed).wrapping_sub(u32::MAX - 20)
        })
    };
    assert_eq!(flushes(Kind::GinV12, false), 0, "there are none");
    assert_eq!((flushes(Kind::GinV13, false), flushes(Kind::GinV13, true)), (4, 4), "one a peer and flush");
    assert_eq!((flushes(Kind::GinV14, false), flushes(Kind::GinV14, true)), (0, 1), "one behind the get");
}

/// As one does that takes slots for new entries which it has not cleared.
#[test]
fn a_plugin_that_takes_more_than_was_posted_is_wrong_at_once() {
    let queue = Queue::new(Format::of(Kind::GinV14).expect("a queue"), 4);
    let device = device(Kind::GinV14, &queue);
    let limit = Deadline::new(Duration::from_secs(30));
    let mut thread = device.thread(0, Pen::plain(), &limit);
    (0..7).for_each(|_| queue.credit(1));
    let begun = Instant::now();
    let why = thread.signal(1, &Signal::inc(0)).expect_err("it ran ahead");
    assert!(why.contains("still valid") && begun.elapsed() < Duration::from_secs(20), "{why}");
}

#[test]
fn a_queue_that_stands_is_named_with_its_index() {
    let queue = Queue::new(Format::of(Kind::GinV14).expect("a queue"), 4);
    let device = device(Kind::GinV14, &queue);
    let limit = Deadline::new(Duration::from_millis(30));
    let mut thread = device.thread(0, Pen::plain(), &limit);
    let mut last = Err(String::new());
    for _ in 0..5 {
        last = thread.signal(1, &Signal::inc(0));
    }
    let (why, first) = (last.expect_err("no credit"), u32::MAX - 20);
    assert!(why.contains(&format!("credit for index {} of context 0, peer 1", first + 4)), "{why}");
    assert!(why.contains(&format!("consumer index {first}, 4 slots")), "{why}");
    let why = thread.flush().expect_err("nobody consumes");
    assert!(why.contains(&format!("context 0, peer 1: index {} to be complete", first + 4)), "{why}");
    let why = thread.wait_signal(3, 1).expect_err("nobody adds");
    assert!(why.contains("signal 3 of context 0 to reach 0x1; it is 0x0"), "{why}");
}

#[test]
fn a_slot_that_is_given_back_uncleared_is_an_error() {
    let queue = Queue::new(Format::of(Kind::GinV12).expect("a queue"), 1);
    let format = Format::of(Kind::GinV12).expect("a queue");
    // SAFETY: a handle of this test's own memory.
    let device = unsafe { Device::open(Compiled::Proxy(format), 0, RANKS as u32, &config(1), &queue.handle()) }
        .expect("a device");
    device.untouched(0, 0).expect("new");
    let limit = Deadline::new(Duration::from_secs(5));
    let mut thread = device.thread(0, Pen::plain(), &limit);
    thread.signal(0, &Signal::inc(0)).expect("room");
    queue.take(0, false).expect("a descriptor");
    queue.credit(0);
    assert!(device.untouched(0, 0).expect_err("a word is valid").contains("word 0 still valid"));
    let why = thread.signal(0, &Signal::inc(0)).expect_err("a word is valid");
    assert!(why.contains("slot 0 was given back") && why.contains("word 0 still valid"), "{why}");
}

#[test]
fn handles_that_are_no_queue_are_refused_by_name() {
    let format = Format::of(Kind::GinV14).expect("a queue");
    let queue = Queue::new(format, 4);
    let open = |change: &dyn Fn(&mut DeviceHandle), config: &ContextConfig| {
        let mut handle = queue.handle();
        change(&mut handle);
        // SAFETY: a handle of this test's own memory, or one that is refused before it is followed.
        unsafe { Device::open(Compiled::Proxy(format), 0, RANKS as u32, config, &handle) }.err().unwrap_or_default()
    };
    assert_eq!(open(&|_| {}, &config(4)), "");
    assert!(open(&|h| h.net_device_type = 3, &config(4)).contains("netDeviceType is 3"));
    assert!(open(&|h| h.net_device_version = 1, &config(4)).contains("netDeviceVersion is 1"));
    assert!(open(&|h| h.needs_proxy_progress = 1, &config(4)).contains("needsProxyProgress is 1"));
    assert!(open(&|h| h.handle = std::ptr::null_mut(), &config(4)).contains("array is at 0x0"));
    assert!(open(&|_| {}, &config(5)).contains("queueSize is 4"));
    // SAFETY: refused before anything is read.
    let null = unsafe { Device::open(Compiled::Proxy(format), 0, 2, &config(4), std::ptr::null()) };
    assert!(null.err().is_some_and(|e| e.contains("NULL")));
    // SAFETY: a handle of this test's own memory.
    let ranks = unsafe { Device::open(Compiled::Proxy(format), 0, 3, &config(4), &queue.handle()) };
    assert!(ranks.err().is_some_and(|e| e.contains("nranks is 2, not 3")));
}
