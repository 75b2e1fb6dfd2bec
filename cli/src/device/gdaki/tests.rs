//! Emulated device code against a small device that carries out what it reads in one process: a key names all memory,
//! and addresses are this process's.

use super::entry::*;
use super::*;
use crate::device::{Compiled, Deadline, Device, Place, Signal};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU8};
use std::time::Duration;

const RANKS: usize = 2;
const SIGNALS: usize = 8;
const SLOTS: usize = 4;
const KEY: u32 = 0x0102_0304;
const SINK: u32 = 0x0908_0706;
const FLUSHED: u8 = 0x05;

/// A queue pair as the device has it.
struct Queue {
    number: u32,
    slots: Vec<AtomicU64>,
    completions: Vec<AtomicU64>,
    bell: AtomicU64,
    record: AtomicU32,
    done: AtomicU64,
    failed: AtomicBool,
}

impl Queue {
    fn new(number: u32) -> Self {
        let words = |n: usize| (0..n).map(|_| AtomicU64::new(u64::MAX)).collect::<Vec<_>>();
        Self {
            number,
            // As much again, to align them to 64 bytes.
            slots: words(8 * (SLOTS + 1)),
            completions: words(8 * (SLOTS + 1)),
            bell: AtomicU64::new(0),
            record: AtomicU32::new(0),
            done: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        }
    }

    fn aligned(words: &[AtomicU64]) -> u64 {
        (words.as_ptr() as u64).next_multiple_of(64)
    }

    /// Entries that were rung for, by whichever is ahead.
    fn rung(&self) -> u64 {
        let (done, bell) = (self.done.load(Ordering::Relaxed), self.bell.load(Ordering::Acquire));
        let bell = (u32::from_be(bell as u32) >> 8) as u16;
        let record = u32::from_be(self.record.load(Ordering::Acquire)) as u16;
        [bell, record]
            .map(|index| index.wrapping_sub(done as u16))
            .into_iter()
            .filter(|n| *n < 1 << 15)
            .max()
            .unwrap_or(0)
            .into()
    }

    fn complete(&self, index: u64, syndrome: Option<u8>) {
        let at = Self::aligned(&self.completions) + 64 * (index % SLOTS as u64);
        let byte = |i: u64| {
            // SAFETY: inside the completion entry.
            unsafe { AtomicU8::from_ptr((at + i) as *mut u8) }
        };
        byte(55).store(syndrome.unwrap_or(0), Ordering::Relaxed);
        byte(60).store((index >> 8) as u8, Ordering::Relaxed);
        byte(61).store(index as u8, Ordering::Relaxed);
        let owner = (index / SLOTS as u64) as u8 & 1;
        byte(63).store(if syndrome.is_some() { 13 << 4 } else { 0 } | owner, Ordering::Release);
        self.done.store(index + 1, Ordering::Release);
    }

    /// Carries out the next entry if there is one and it can go on.
    fn step(&self, all: &[Queue]) {
        let index = self.done.load(Ordering::Relaxed);
        if self.rung() == 0 {
            return;
        }
        if self.failed.load(Ordering::Relaxed) {
            return self.complete(index, Some(FLUSHED));
        }
        let slot = Self::aligned(&self.slots) + 64 * (index % SLOTS as u64);
        // SAFETY: a slot of the queue's, which device code has rung for.
        let entry: [u8; 64] = unsafe { std::ptr::read_volatile(slot as *const [u8; 64]) };
        let word = |at: usize| u64::from_be_bytes(entry[at..at + 8].try_into().expect("8 bytes"));
        let half = |at: usize| u32::from_be_bytes(entry[at..at + 4].try_into().expect("4 bytes"));
        let named = (u64::from(half(0)) >> 8 & 0xffff, half(4) >> 8);
        let copy = |from: u64, to: u64, n: u32| {
            // SAFETY: the tests name memory of their own.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, n as usize) };
        };
        let far = (entry[3] != NOP && entry[3] != WAIT && entry[3] != DUMP) && half(24) != KEY;
        let syndrome = match entry[3] {
            _ if named != (index & 0xffff, self.number) || entry[11] != 8 => Some(0x02),
            _ if far => Some(0x13),
            NOP | DUMP => None,
            WRITE if half(32) >> 31 != 0 => {
                copy(slot + 36, word(16), half(32) & 0xffff);
                None
            }
            WRITE | READ if half(36) != KEY => Some(0x04),
            WRITE => {
                copy(word(40), word(16), half(32));
                None
            }
            READ => {
                copy(word(16), word(40), half(32));
                None
            }
            FETCH_ADD if half(48) != 8 || half(52) != SINK => Some(0x04),
            FETCH_ADD => {
                // SAFETY: the tests name words of their own.
                unsafe { AtomicU64::from_ptr(word(16) as *mut u64) }.fetch_add(word(32), Ordering::AcqRel);
                None
            }
            WAIT => {
                let of = all.iter().find(|queue| queue.number == half(28)).expect("a queue");
                // One more lap than 32 bits is not what tests do.
                if of.done.load(Ordering::Acquire) <= u64::from(half(24)) {
                    return;
                }
                None
            }
            _ => Some(0x02),
        };
        self.failed.fetch_or(syndrome.is_some(), Ordering::Relaxed);
        self.complete(index, syndrome);
    }
}

/// What a plugin would have behind one context's device handle.
struct Nic {
    numbers: Numbers,
    /// Main and companion of each rank.
    queues: Vec<Queue>,
    words: Vec<AtomicU64>,
    /// Context, queue pairs, companions, notes of gets, keys: 8-byte words.
    memory: Vec<AtomicU64>,
    window: Vec<AtomicU64>,
}

impl Nic {
    fn new(numbers: Numbers) -> Box<Self> {
        let zeros = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let queues = (0..2 * RANKS as u32).map(|i| Queue::new(100 + i)).collect();
        let mut nic =
            Box::new(Self { numbers, queues, words: zeros(2 * SIGNALS), memory: zeros(400), window: zeros(4) });
        let base = nic.memory.as_ptr() as u64;
        let [pairs, companions, gets, keys] = [256, 1024, 2048, 2304].map(|at| base + at);
        let words = nic.words.as_ptr() as u64;
        nic.put(0, pairs);
        nic.put(8, companions);
        for (field, own) in [(16, words), (40, words + 8 * SIGNALS as u64)] {
            nic.put(field, own);
            nic.put(field + 8, keys);
            nic.put_half(field + 16, KEY.to_be());
            // The region is all of memory: word 0 is behind so many words.
            assert_eq!(own % 8, 0);
        }
        nic.put_half(64, SINK.to_be());
        if numbers.has_gets {
            nic.put(72, gets);
            nic.put(80, gets + 64);
        }
        (0..RANKS as u64).for_each(|rank| nic.put_half(2304 + 4 * rank, KEY.to_be()));
        for i in 0..2 * RANKS {
            let at = 256 + 768 * (i as u64 % 2) + (i as u64 / 2) * numbers.queue_pair as u64;
            nic.describe(at, i);
        }
        nic.window[0].store(keys, Ordering::Relaxed);
        nic.window[1].store(KEY.to_be().into(), Ordering::Relaxed);
        nic
    }

    fn put(&mut self, at: u64, word: u64) {
        self.memory[at as usize / 8].store(word, Ordering::Relaxed);
    }

    fn put_half(&mut self, at: u64, half: u32) {
        // SAFETY: inside `memory`, which nobody else has yet.
        unsafe { ((self.memory.as_ptr() as u64 + at) as *mut u32).write(half) };
    }

    fn describe(&mut self, at: u64, i: usize) {
        let (n, old) = (self.numbers, self.numbers.queue_pair == 280);
        let queue = &self.queues[i];
        let (number, slots, completions) =
            (queue.number, Queue::aligned(&queue.slots), Queue::aligned(&queue.completions));
        let (bell, record) = (queue.bell.as_ptr() as u64, queue.record.as_ptr() as u64);
        self.put_half(at + 28, number << 8);
        (0..=n.segments).for_each(|s| self.put_half(at + 32 + 4 * u64::from(s), (number << 8 | s).to_be()));
        self.put_half(at + if old { 56 } else { 60 }, SLOTS as u32 | (SLOTS as u32 - 1) << 16);
        self.put(at + 64, slots);
        self.put(at + 72, record);
        self.put(at + 80, bell);
        self.put(at + 160, completions);
        self.put_half(at + 168, number);
        self.put_half(at + 172, SLOTS as u32);
        self.put_half(at + n.nic_handler as u64, 2);
    }

    fn handle(&self) -> DeviceHandle {
        DeviceHandle {
            net_device_type: DEVICE_GIN_GDAKI,
            net_device_version: self.numbers.device_version,
            handle: self.memory.as_ptr().cast_mut().cast(),
            size: 0,
            needs_proxy_progress: 0,
        }
    }

    /// What the device knows a signal or counter by is its address; the tables say offsets. 32 bits of offset are too
    /// few for the distance, so the tables' words are at addresses that the keys' region begins with.
    fn shift(&self, kernel: &mut Kernel<'_>) {
        for context in &mut kernel.contexts {
            for words in [&mut context.signals, &mut context.counters].into_iter().flatten() {
                let own = words.own;
                words.remote.iter_mut().for_each(|place| place.1 += own);
            }
        }
    }

    fn device(&self) -> Device {
        let compiled = Compiled::Gdaki(self.numbers);
        // SAFETY: a handle of this test's own memory.
        let mut device = unsafe { Device::open(compiled, 0, RANKS as u32, &config(SLOTS as i32), &self.handle()) }
            .expect("a device");
        if let Device::Gdaki(kernel) = &mut device {
            self.shift(kernel);
        }
        device
    }

    /// Runs `body` beside the device.
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
                    self.queues.iter().for_each(|queue| queue.step(&self.queues));
                    std::thread::yield_now();
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

#[test]
fn every_operation_arrives_through_queue_pairs_that_wrap() {
    for numbers in NCCLS {
        let nic = Nic::new(numbers);
        let device = nic.device();
        let limit = Deadline::new(Duration::from_secs(20));
        let (from, to, word) = (vec![7_u8; 100], vec![0_u8; 100], AtomicU64::new(0));
        let window = nic.window.as_ptr() as u64;
        let at = |v: &Vec<u8>, i: u64| (window, v.as_ptr() as u64 + i);
        let va = Place::Va { window, offset: word.as_ptr() as u64 };
        let va = Signal { place: va, add: Some(1 << 40), strong: true };
        (0..RANKS as u32).for_each(|peer| device.untouched(0, peer).expect("new"));
        assert_eq!((device.queue_size(0), device.most_inline()), (SLOTS as u32, 28));
        nic.served(|| {
            let mut thread = device.thread(0, Pen::wild(3, 50), &limit);
            for round in 1..=100_u64 {
                thread.put(1, at(&from, 0), at(&to, 0), 64, Some(&Signal::add(2, u64::MAX)), Some(3)).expect("put");
                thread.put(0, at(&from, 0), at(&to, 0), 8, Some(&va), None).expect("put and signal by address");
                let value: Vec<u8> = (1..=round as u8 % 28 + 1).collect();
                let posted = thread.put_value(1, &value, at(&to, 70), Some(&Signal::inc(1))).expect("value");
                thread.flush().expect("flush");
                assert_eq!(device.is_complete(&posted), Ok(true));
                thread.wait_counter(3, round).expect("it is counted");
                assert_eq!((thread.read_signal(2), thread.read_counter(3)), (round.wrapping_neg(), round));
                assert_eq!((thread.read_signal(1), word.load(Ordering::Acquire)), (round, round << 40));
                assert_eq!(to[70..70 + value.len()], value);
            }
            assert_eq!(to[..64], from[..64]);
            thread.get(1, at(&from, 0), at(&to, 70), 30).expect("get");
            thread.get(1, at(&from, 0), at(&to, 70), 0).expect("nothing");
            thread.flush().expect("flush");
            assert_eq!(to[64..], [[0; 6].as_slice(), &[7; 30]].concat());
            thread.reset_signal(1);
            thread.reset_counter(3);
            assert_eq!((thread.read_signal(1), thread.read_counter(3)), (0, 0));
            thread.signal(1, &Signal::inc(1)).expect("signal");
            thread.wait_signal(1, 1).expect("it comes");
        });
        assert!(device.untouched(0, 1).expect_err("used").contains("of a new queue pair is there"));
    }
}

#[test]
fn many_producers_lose_nothing() {
    let nic = Nic::new(NCCLS[4]);
    let device = nic.device();
    nic.served(|| {
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

/// A dump behind gets, once, where the NCCL has one; 2.30.4 does not know whether there were any.
#[test]
fn flushes_post_only_where_gets_are_not_yet_visible() {
    let flushes = |nccl: &str, gets: bool| {
        let nic = Nic::new(Numbers::of(nccl).expect("known"));
        let device = nic.device();
        nic.served(|| {
            let limit = Deadline::new(Duration::from_secs(20));
            let mut thread = device.thread(0, Pen::plain(), &limit);
            let at = (nic.window.as_ptr() as u64, nic.words.as_ptr() as u64);
            if gets {
                thread.get(1, at, at, 8).expect("get");
            }
            thread.flush().expect("flush");
            thread.flush().expect("flush");
            [0, 2].map(|i: usize| nic.queues[i].done.load(Ordering::Acquire))
        })
    };
    assert_eq!(flushes("2.29.7", false), [0, 0]);
    assert_eq!((flushes("2.30.4", false), flushes("2.30.4", true)), ([2, 2], [2, 3]));
    assert_eq!((flushes("2.30.7", false), flushes("2.30.7", true)), ([0, 0], [0, 2]));
    // The flag is not set here.
    assert_eq!(flushes("2.32.3", true), [0, 1]);
}

#[test]
fn an_entry_that_fails_is_named_and_one_that_stands_too() {
    let nic = Nic::new(NCCLS[2]);
    let device = nic.device();
    let kernel = device.gdaki().expect("queue pairs");
    let limit = Deadline::new(Duration::from_millis(300));
    let queue = kernel.queue_pair(0, 1).expect("a queue pair");
    let posted = nic.served(|| {
        let good = kernel.add_signal(0, 1, 0, 1);
        let bad = entry::add((KEY + 1, 0), 1, kernel.sink(0));
        let last = queue.post(&[good.clone(), bad, good], &mut Pen::plain(), &limit).expect("slots");
        let said = [0, 1, 2].map(|i| queue.wait(i, &limit).expect("a completion entry"));
        assert_eq!(said, [Status::Good, Status::Failed { syndrome: 0x13 }, Status::Failed { syndrome: FLUSHED }]);
        Posted { context: 0, peer: 1, next: last + 1 }
    });
    let thread = device.thread(0, Pen::plain(), &limit);
    let why = thread.complete(&posted).expect_err("it was flushed");
    assert!(why.contains("context 0, peer 1: entry 2 failed with syndrome 0x05"), "{why}");
    assert_eq!(device.is_complete(&posted), Err(why));
    // Nobody serves it any more.
    let mut thread = device.thread(0, Pen::plain(), &limit);
    let posted = thread.signal(0, &Signal::inc(0)).expect("room");
    assert_eq!(device.is_complete(&posted), Ok(false));
    let why = thread.complete(&posted).expect_err("nobody rings back");
    assert!(
        why.contains("context 0, peer 0: waited 0.3 s for completion entry 0 of queue pair 100: 1 entries"),
        "{why}"
    );
    assert!(device.standing(&posted).contains("1 rung for, 0 seen"));
}

#[test]
fn handles_that_lead_to_no_queue_pairs_are_refused_by_name() {
    let numbers = NCCLS[4];
    let open = |change: &dyn Fn(&mut Nic), handle: &dyn Fn(&mut DeviceHandle), config: &ContextConfig| {
        let mut nic = Nic::new(numbers);
        change(&mut nic);
        let mut given = nic.handle();
        handle(&mut given);
        // SAFETY: a handle of this test's own memory, or one that is refused before it is followed.
        unsafe { Device::open(Compiled::Gdaki(numbers), 0, RANKS as u32, config, &given) }.err().unwrap_or_default()
    };
    let asked = config(SLOTS as i32);
    let nothing = |_: &mut Nic| {};
    assert_eq!(open(&nothing, &|_| {}, &asked), "");
    for (change, says) in [
        (&(|h: &mut DeviceHandle| h.net_device_type = 2) as &dyn Fn(&mut DeviceHandle), "netDeviceType is 2"),
        (&|h| h.net_device_version = 100, "netDeviceVersion is 100; device code of NCCL 2.32.3 knows 200"),
        (&|h| h.needs_proxy_progress = 1, "needsProxyProgress is 1"),
        (&|h| h.handle = std::ptr::null_mut(), "array is at 0x0"),
    ] {
        let why = open(&nothing, change, &asked);
        assert!(why.contains(says), "{why}");
    }
    let put = |at: u64, word: u64| move |nic: &mut Nic| nic.put(at, word);
    let half = |at: u64, word: u32| move |nic: &mut Nic| nic.put_half(at, word);
    for (change, says) in [
        (Box::new(put(0, 0)) as Box<dyn Fn(&mut Nic)>, "no array of queue pairs"),
        (Box::new(put(8, 0)), "there is no companion"),
        (Box::new(put(256, 1)), "does not begin at zero"),
        (Box::new(half(256 + 60, 3 | 2 << 16)), "3 slots: no power of two"),
        (Box::new(half(256 + 36, 7)), "prepared words of entries are not those of queue pair 100"),
        (Box::new(half(256 + 172, 2)), "2 completion entries for 4 slots"),
        (Box::new(half(256 + 288, 3)), "nobody rings by nic_handler 3"),
        (Box::new(put(256 + 80, 0)), "doorbell 0x0"),
        (Box::new(put(256 + 72, 2)), "record 0x2"),
        (Box::new(put(40, 0)), "signals or counters are at NULL"),
        (Box::new(put(48, 0)), "a pointer leads to 0x0"),
        (Box::new(put(72, 4)), "misaligned"),
    ] {
        let why = open(&change, &|_| {}, &asked);
        assert!(why.contains(says), "{why}");
    }
    assert!(open(&nothing, &|_| {}, &config(5)).contains("4 slots; 5 were asked for"));
    let none = ContextConfig { n_signals: 0, ..asked };
    assert!(open(&nothing, &|_| {}, &none).contains("0 signals were asked for"));
    let strided = ContextConfig { rank_stride: 2, ..asked };
    assert!(open(&nothing, &|_| {}, &strided).contains("there is a queue pair, with a stride of 2"));
}
