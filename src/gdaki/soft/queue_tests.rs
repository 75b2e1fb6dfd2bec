use super::super::early::UNSURE;
use super::super::keys::Keys;
use super::super::meaning::Counts;
use super::*;
use crate::fabric::lanes::{Format, Rings};
use crate::memory::window::{Registration, Remote, Window, WindowFacts};
use crate::proxy::ring::Head;
use crate::rma::atomic::Atomics;
use crate::rma::op::{Op, Put, Signal};
use crate::rma::refusal::Target;
use crate::sys::handles;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

const SIZE: usize = 4;

/// What a queue and its device code share.
struct Shared {
    slots: [AtomicU64; 8 * SIZE],
    completions: [AtomicU64; 8 * SIZE],
    words: [AtomicU64; SIZE],
    record: AtomicU32,
}

impl Shared {
    fn new() -> Self {
        Self {
            slots: [const { AtomicU64::new(0) }; 8 * SIZE],
            completions: [const { AtomicU64::new(0) }; 8 * SIZE],
            words: [const { AtomicU64::new(0) }; SIZE],
            record: AtomicU32::new(0),
        }
    }

    /// A queue that is used no longer than this.
    fn queue(&self, handler: Ringing, credits: Option<CreditWord>) -> SendQueue {
        self.queue_of(Arc::default(), handler, credits)
    }

    /// The same, where `keys` name windows.
    fn queue_of(&self, keys: Arc<Keys>, handler: Ringing, credits: Option<CreditWord>) -> SendQueue {
        let terms = Terms {
            target: Target { coll: 0, contexts: 1, nranks: 1 },
            context: 0,
            keys,
            atomics: Atomics::NONE,
            counts: Arc::new(Counts::new(9, 1)),
            ended: Arc::default(),
        };
        let bell = DoorbellWords { handler, words: NonNull::from(&self.words[0]), record: NonNull::from(&self.record) };
        let places = QueuePairAddresses {
            slots: NonNull::from(&self.slots[0]),
            device_slots: 0x1000,
            device_rings: 0x2000,
            device_completions: Some(0x3000),
            is_managed: false,
            size: SIZE as u32,
            completions: NonNull::from(&self.completions[0]).cast(),
            credits,
            bell,
            number: 9,
        };
        // SAFETY: all of it outlives the queue.
        unsafe { SendQueue::new(places, Arc::new(terms), 0) }
    }

    /// Writes an entry: nothing to do, signalled.
    fn nop(&self, index: u64) {
        let slot = 8 * (index as usize % SIZE);
        self.slots[slot + 1].store(0x0000_0008_0000_0000u64.to_be(), Ordering::Relaxed);
        self.slots[slot].store((index << 40 | 9 << 8 | 1).to_be(), Ordering::Relaxed);
    }

    /// Rings by free flow.
    fn ring(&self, index: u64) {
        self.words[index as usize % SIZE].store(index + 1, Ordering::Relaxed);
    }
}

/// A window of 4096 bytes at 4 GiB, here and at the peer, and the key that entries name it by.
struct Named {
    keys: Arc<Keys>,
    key: u64,
    handle: *mut std::ffi::c_void,
}

impl Named {
    fn new() -> Self {
        let remote = vec![Remote { base: 1 << 32, len: 4096, rkey: 5 }].into();
        let registration = Registration { lkey: 5, rkey: 5, guard: Box::new(()) };
        let facts = WindowFacts { id: 1, base: 1 << 32, len: 4096, remote, registration };
        let handle = handles::insert(Arc::new(Window::of(0, facts))).expect("a free handle");
        let keys = Arc::new(Keys::default());
        let key = u64::from(keys.add(handle as u64).expect("a key"));
        Self { keys, key, handle }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        handles::remove::<Window>(self.handle);
    }
}

/// Device code that does not wait for a free slot: seen when the entry before it completes, and refused in its turn.
#[test]
fn a_slot_that_is_written_before_its_entry_is_complete_is_refused() {
    let shared = Shared::new();
    let mut queue = shared.queue(Ringing::Proxy, None);
    let rings = |producer: u64| shared.words[0].store(producer, Ordering::Relaxed);
    let mut ops = Ops::default();
    shared.nop(0);
    rings(1);
    queue.begin();
    assert_eq!(queue.read(0, &mut ops), Entry::Nop);
    queue.take(1);
    shared.nop(4);
    queue.credit(1);
    for index in 1..4 {
        shared.nop(index);
        rings(index + 1);
        queue.begin();
        assert_eq!(queue.read(0, &mut ops), Entry::Nop);
        queue.take(1);
        queue.credit(1);
    }
    rings(5);
    queue.begin();
    let Entry::Refused(why) = queue.read(0, &mut ops) else { panic!("it is taken") };
    assert!(why.contains("entry 4") && why.contains("more is outstanding"), "{why}");
    assert!(ops.is_empty());
}

/// Device code that knows free flow, and is held up between its first entry and the word for it for so long that the
/// entry counts as one that nobody rings. It waits to be told of completions as such, and may write nothing before.
#[test]
fn a_producer_that_was_held_up_before_it_rang_is_told_of_completions() {
    let shared = Shared::new();
    let mut queue = shared.queue(Ringing::FreeFlow, Some(CreditWord::whole(0, 7, 64, true)));
    let mut ops = Ops::default();
    let mut take = |queue: &mut SendQueue| {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            queue.begin();
            match queue.read(0, &mut ops) {
                Entry::Absent => assert!(Instant::now() < end, "the entry has not been found"),
                entry => break assert_eq!(entry, Entry::Nop),
            }
        }
        queue.take(1);
        queue.credit(1);
    };
    shared.nop(0);
    take(&mut queue);
    // SAFETY: what it looks at is here.
    let is_there = |queue: &SendQueue| unsafe { queue.head().is_there() };
    assert!(queue.owed().is_none(), "device code that does not ring counts for itself");
    assert!(!is_there(&queue));
    shared.ring(0);
    assert!(is_there(&queue), "a queue that is looked at rarely shows it");
    queue.begin();
    assert!(queue.owed().is_some());
    assert!(!is_there(&queue));
    shared.nop(1);
    shared.ring(1);
    take(&mut queue);
    assert!(queue.owed().is_some());
}

/// What the log says of an entry that stands.
#[test]
fn an_entry_that_is_not_taken_has_its_reason_named() {
    let named = |act: &dyn Fn(&Shared)| {
        let shared = Shared::new();
        let mut queue = shared.queue(Ringing::FreeFlow, None);
        shared.nop(0);
        shared.ring(0);
        queue.begin();
        assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop);
        queue.take(1);
        act(&shared);
        queue.begin();
        assert_eq!(queue.read(0, &mut Ops::default()), Entry::Absent);
        // SAFETY: what it looks at is here.
        assert!(unsafe { queue.head().is_there() });
        queue.why_absent()
    };
    let unrung = named(&|shared| shared.nop(1));
    assert!(unrung.contains("has not been rung") && unrung.contains("OXYGIN_GDAKI_RINGING=doorbell"), "{unrung}");
    // A write, without its remote key.
    let write: u64 = 1 << 40 | 8 << 32 | 9 << 8 | 3;
    let missing = named(&|shared| shared.slots[8].store(write.to_be(), Ordering::Relaxed));
    assert!(missing.contains("its other words are missing"), "{missing}");
    let rung = named(&|shared| shared.ring(1));
    assert_eq!(rung, "its doorbell has been rung, and it has not arrived");
}

/// Threads that share a queue and ring late fill it, and none of them gets on.
#[test]
fn a_queue_that_is_full_of_unrung_entries_shows_it() {
    for handler in [Ringing::Doorbell, Ringing::Proxy] {
        let shared = Shared::new();
        let mut queue = shared.queue(handler, None);
        for index in 0..SIZE as u64 {
            assert!(!queue.is_full_of_unrung(), "{handler:?}: {index} entries");
            shared.nop(index);
        }
        assert!(queue.is_full_of_unrung(), "{handler:?}");
        shared.record.store(1u32.to_be(), Ordering::Relaxed);
        shared.words[0].store(u64::from(handler == Ringing::Proxy), Ordering::Relaxed);
        queue.begin();
        assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop);
        assert!(!queue.is_full_of_unrung(), "{handler:?}: one is rung");
        queue.take(1);
        queue.credit(1);
        assert!(!queue.is_full_of_unrung(), "{handler:?}: one has gone");
    }
}

/// Where the fabric counts completions device code may use a slot again before they show here.
#[test]
fn a_slot_whose_completion_was_counted_is_written_again() {
    let shared = Shared::new();
    let mut queue = shared.queue(Ringing::FreeFlow, Some(CreditWord::whole(0, 7, 64, true)));
    queue.owed.as_mut().expect("completions are counted").stop_adding();
    let mut ops = Ops::default();
    for index in 0..SIZE as u64 {
        shared.nop(index);
        shared.ring(index);
    }
    queue.begin();
    (0..SIZE as u32).for_each(|nth| assert_eq!(queue.read(nth, &mut ops), Entry::Nop));
    queue.take(SIZE as u32);
    shared.nop(SIZE as u64);
    shared.ring(SIZE as u64);
    queue.begin();
    assert_eq!(queue.read(0, &mut ops), Entry::Absent, "its slot's record is the entry's before it");
    queue.credit(1);
    queue.begin();
    assert_eq!(queue.read(0, &mut ops), Entry::Nop);
    queue.take(1);
    queue.credit(SIZE as u32);
}

/// Where completions are counted device code leaves out completion entries, and a companion waits for an entry's index.
#[test]
fn a_wait_for_an_entry_without_a_completion_entry_ends_where_they_are_counted() {
    for (credits, is_over) in [(None, false), (Some(CreditWord::whole(0, 7, 64, true)), true)] {
        let shared = Shared::new();
        let mut queue = shared.queue(Ringing::FreeFlow, credits);
        shared.nop(0);
        // Not signalled.
        shared.slots[1].store(0, Ordering::Relaxed);
        shared.ring(0);
        queue.begin();
        assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop);
        queue.take(1);
        queue.credit(1);
        assert_eq!(queue.is_over(9, 0), Ok(is_over));
    }
}

/// The word for an entry is visible here before all of the entry is: whichever of its words are missing.
#[test]
fn what_is_rung_before_it_has_arrived_is_waited_for() {
    // Of queue pair 9; no window has their key.
    const KEY: u64 = 0x7700;
    let (sink, local) = (8 << 32 | 0x100, 8 << 32 | KEY);
    let entries: [&[u64]; 8] = [
        &[0x0000_0012_0000_0904, 8 << 32, 64, KEY << 32, 5, 0, sink, 0],
        &[0x0900_0015_0000_0904, 8 << 32, 64, KEY << 32, 5, 1 << 63, sink, 0],
        &[0x0800_0014_0000_0904, 8 << 32, 64, KEY << 32, 5, 7 << 32, 4 << 32 | 0x100, 0],
        &[0x0000_0008_0000_0903, 8 << 32, 64, KEY << 32, local, 64],
        &[0x0000_0008_0000_0904, 8 << 32, 64, KEY << 32, local, 64, local, 128],
        &[0x0000_0008_0000_0903, 8 << 32, 64, KEY << 32, (1 << 31 | 8) << 32 | 7, 7 << 32],
        &[0x0000_000f_0000_0902, 8 << 32, 0, 5],
        &[0x0000_0000_0000_0901, 8 << 32],
    ];
    for (entry, missing) in entries.iter().flat_map(|entry| (1..1 << entry.len()).map(move |missing| (entry, missing)))
    {
        let shared = Shared::new();
        let mut queue = shared.queue(Ringing::FreeFlow, None);
        let store = |late: bool| {
            let words = (0..entry.len()).filter(|i| (missing >> i & 1 == 1) == late);
            words.for_each(|i| shared.slots[i].store(entry[i].to_be(), Ordering::Relaxed));
        };
        store(false);
        shared.ring(0);
        queue.begin();
        let mut ops = Ops::default();
        assert_eq!(queue.read(0, &mut ops), Entry::Absent, "{entry:x?} without words {missing:#b}");
        store(true);
        match queue.read(0, &mut ops) {
            Entry::Nop => assert_eq!(entry.len(), 2),
            Entry::Refused(why) => assert!(["key", "queue"].iter().any(|word| why.contains(word)), "{why}"),
            other => panic!("{entry:x?} without words {missing:#b}: {other:?}"),
        }
        assert!(ops.is_empty());
    }
}

/// Bytes that stand in an entry are stored in units of 4, and less where there are less; behind them nothing is.
#[test]
fn bytes_inside_an_entry_are_waited_for_in_the_units_they_are_stored_in() {
    // Length, bytes: what is missing of them makes the entry wait.
    for len in [1, 2, 4, 8, 28] {
        let units = 1 + usize::div_ceil(len, 4);
        for missing in 0..1_u32 << units {
            let shared = Shared::new();
            let mut queue = shared.queue(Ringing::FreeFlow, None);
            let mut bytes = [0xff; 64];
            let segments: u8 = if len > 12 { 4 } else { 3 };
            bytes[..32].fill(0);
            bytes[3] = 0x08;
            bytes[6..8].copy_from_slice(&[9, segments]);
            for unit in (0..units).filter(|unit| missing >> unit & 1 == 0) {
                let end = if unit == 0 { 36 } else { 36 + len.min(4 * unit) };
                bytes[32 + 4 * unit..end].fill(0x11);
            }
            if missing & 1 == 0 {
                bytes[32..36].copy_from_slice(&(1 << 31 | len as u32).to_be_bytes());
            }
            for (i, word) in bytes.chunks_exact(8).enumerate() {
                shared.slots[i].store(u64::from_ne_bytes(word.try_into().unwrap()), Ordering::Relaxed);
            }
            shared.ring(0);
            queue.begin();
            let is_absent = queue.read(0, &mut Ops::default()) == Entry::Absent;
            assert_eq!(is_absent, missing != 0, "{len} bytes without units {missing:#b}");
        }
    }
}

/// Of an addition of -1 a word is what words are before they are written: it counts when it has stood for a while.
#[test]
fn what_may_have_arrived_is_taken_when_it_has_stood() {
    let shared = Shared::new();
    let mut queue = shared.queue(Ringing::FreeFlow, None);
    let began = Instant::now();
    shared.nop(0);
    shared.slots[1].store(u64::MAX, Ordering::Relaxed);
    shared.ring(0);
    let mut looks = 0;
    loop {
        queue.begin();
        match queue.read(0, &mut Ops::default()) {
            Entry::Absent => looks += 1,
            entry => break assert_eq!(entry, Entry::Nop),
        }
    }
    assert!(looks > 0 && began.elapsed() >= UNSURE && began.elapsed() < Duration::from_secs(60));
    queue.take(1);
    assert!(shared.slots[..8].iter().all(|word| word.load(Ordering::Relaxed) == u64::MAX), "for the next lap");
}

/// Puts with signals behind them are one operation: where a word of the signal's is what words are before they are
/// written, when it has stood for a while, and where it is a masked addition of one field. The fabric has no atomic
/// operations, so that a signal which is taken for one is refused.
#[test]
fn every_signal_goes_with_its_put() {
    let window = Named::new();
    let (keys, key) = (&window.keys, window.key);
    let put =
        Put { local: (1 << 32) + 128, lkey: 5, rkey: 5, remote: (1 << 32) + 64, len: 8, signal: None, more: false };
    for (first, value, waits) in [(0x12 << 32, 7, false), (0x12 << 32, u64::MAX, true), (0x0900_0015 << 32, 7, false)] {
        let shared = Shared::new();
        let mut queue = shared.queue_of(keys.clone(), Ringing::FreeFlow, None);
        let entries = [
            [8 << 32 | 9 << 8 | 3, 8 << 32, 64, key << 32, 8 << 32 | key, 128, u64::MAX, u64::MAX],
            [first | 1 << 40 | 9 << 8 | 4, 8 << 32, 256, key << 32, value, 0, 8 << 32 | 0x100, 0],
        ];
        for (slot, word) in shared.slots.iter().zip(entries.as_flattened()) {
            slot.store(word.to_be(), Ordering::Relaxed);
        }
        (0..2).for_each(|index| shared.ring(index));
        let signal = Some(Signal { remote: (1 << 32) + 256, rkey: 5, value, strong: true });
        let (end, mut looks) = (Instant::now() + Duration::from_secs(60), 0);
        loop {
            let mut ops = Ops::default();
            queue.begin();
            assert_eq!(queue.read(0, &mut ops), Entry::Op(Finish::NONE));
            assert_eq!(ops[..], [Op::Put(put)]);
            let entry = queue.read(1, &mut ops);
            if entry != Entry::Absent {
                assert_eq!((entry, &ops[..]), (Entry::Joined, &[Op::Put(Put { signal, ..put })][..]), "{first:x}");
                break;
            }
            looks += 1;
            assert!(Instant::now() < end);
        }
        assert_eq!(looks > 0, waits, "{first:x}");
    }
}

/// What a device would carry out: entries that are rung, by whichever way, and where nobody has rung yet those that are
/// there.
#[test]
fn what_is_rung_is_counted_up_to_the_first_entry_that_is_not() {
    for handler in [Ringing::Proxy, Ringing::Doorbell, Ringing::FreeFlow] {
        let shared = Shared::new();
        let mut queue = shared.queue(handler, None);
        let ring = |last: u64| match handler {
            Ringing::Proxy => shared.words[0].store(last + 1, Ordering::Relaxed),
            Ringing::Doorbell => shared.record.store((last as u32 + 1).to_be(), Ordering::Relaxed),
            Ringing::FreeFlow => (0..=last).for_each(|index| shared.ring(index)),
        };
        assert_eq!(queue.rung(), 0);
        (0..2).for_each(|index| shared.nop(index));
        // Device code that does not know free flow.
        assert_eq!(queue.rung(), if handler == Ringing::FreeFlow { 2 } else { 0 });
        ring(1);
        shared.nop(2);
        let take = |queue: &mut SendQueue| {
            queue.begin();
            assert_eq!(queue.read(0, &mut Ops::default()), Entry::Nop);
            queue.take(1);
        };
        take(&mut queue);
        assert_eq!((queue.rung(), queue.outstanding()), (1, 1), "{handler:?}: entry 2 is written and not rung");
        ring(3);
        assert_eq!(queue.rung(), 3);
        if handler == Ringing::FreeFlow {
            shared.ring(5);
            assert_eq!(queue.rung(), 3, "entry 4 is on its way");
        }
    }
}

#[path = "queue/reading_tests.rs"]
mod reading;
#[path = "queue/served_tests.rs"]
mod served;
