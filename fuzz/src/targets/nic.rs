//! Send entries that device code writes for the software NIC: whatever they say, only operations inside live windows
//! come out, each entry gets one completion entry, and a window that was seen before changes nothing.

use super::windows::{window, HERE, LEN, THERE};
use super::{take, Target};
use oxygin::config::Ringing;
use oxygin::gdaki::entry::completion::{FAILED, GOOD};
use oxygin::gdaki::entry::send::SendEntry;
use oxygin::gdaki::entry::{Syndrome, ENTRY_BYTES};
use oxygin::gdaki::soft::doorbell::DoorbellWords;
use oxygin::gdaki::soft::keys::{Keys, SINK};
use oxygin::gdaki::soft::meaning::{Counts, Terms};
use oxygin::gdaki::soft::queue::{QueuePairAddresses, SendQueue};
use oxygin::proxy::ops::Ops;
use oxygin::proxy::ring::{Entry, Ring, Stopped};
use oxygin::rma::atomic::{Atomicity, Atomics};
use oxygin::rma::op::{Op, Transfer};
use oxygin::rma::refusal::Target as Against;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub fn targets() -> Vec<Target> {
    vec![Target { name: "send_entry", seeds: seeds(), run: entries }]
}

const COLL: u64 = 78;
const PEER: u32 = 1;
const NUMBER: u32 = 5;
const SLOTS: usize = 4;
/// Of a seed: its flags, and an entry.
const RECORD: usize = 1 + ENTRY_BYTES;

/// The keys of two windows.
fn keys() -> &'static (Arc<Keys>, [u32; 2]) {
    static MADE: OnceLock<(Arc<Keys>, [u32; 2])> = OnceLock::new();
    MADE.get_or_init(|| {
        let keys = Arc::new(Keys::default());
        let made = [0u64, 1].map(|i| keys.add(window(COLL, i)).expect("a key"));
        (keys, made)
    })
}

/// An entry of up to four segments; index and queue pair are put in later.
fn seed(flags: u8, opcode: u8, modifier: u8, segments: &[[u32; 4]]) -> Vec<u8> {
    let mut bytes = vec![flags, modifier, 0, 0, opcode, 0, 0, 0, 1 + segments.len() as u8, 0, 0, 0, 8, 0, 0, 0, 0];
    segments.iter().flatten().for_each(|word| bytes.extend(word.to_be_bytes()));
    bytes.resize(RECORD, 0);
    bytes
}

fn seeds() -> Vec<Vec<u8>> {
    let [a, b] = keys().1;
    let (remote, data, sink) = ([0, 64, b, 0], [8, a, 0, 16], [8, SINK, 0, 0]);
    vec![
        seed(0, 0x00, 0, &[]),
        seed(0, 0x08, 0, &[remote, data]),
        seed(1, 0x08, 0, &[remote, data, data]),
        seed(0, 0x08, 0, &[remote, [8 | 1 << 31, 1, 2, 0]]),
        seed(0, 0x08, 0, &[remote, [28 | 1 << 31, 1, 2, 3], [4, 5, 6, 7]]),
        seed(0, 0x10, 0, &[remote, data]),
        seed(0, 0x12, 0, &[remote, [0, 1, 0, 0], sink]),
        seed(0, 0x12, 0, &[remote, [0, 1, 0, 0], data]),
        seed(0, 0x15, 8, &[remote, [1, 1 << 31, 0, 0], [4, a, 0, 4]]),
        seed(0, 0x15, 9, &[remote, [0, 1, 0, 1], data]),
        seed(0, 0x14, 8, &[remote, [1, 2, 3, 4], [4, a, 0, 4]]),
        seed(0, 0x0f, 0, &[[0, 0, 0, NUMBER]]),
        seed(0, 0x23, 0, &[sink]),
    ]
}

fn inside(at: u64, len: u64, base: u64) -> bool {
    (0..2).any(|i| at >= base + 4096 * i && at + len <= base + 4096 * i + LEN)
}

fn judge(op: &Op) {
    let there = THERE * (1 + u64::from(PEER));
    match op.transfer() {
        Transfer::Put(put) => {
            assert!(put.len == 0 || inside(put.remote, put.len, there), "{put:?}");
            assert!(put.len == 0 || matches!(op, Op::Value(_)) || inside(put.local, put.len, HERE), "{put:?}");
            if let Some(signal) = put.signal {
                assert!(inside(signal.remote, 8, there) && signal.remote % 8 == 0, "{put:?}");
            }
        }
        Transfer::Get(get) => {
            assert!(inside(get.remote, get.len, there) && inside(get.local, get.len, HERE), "{get:?}");
        }
        Transfer::Atomic(atomic) => {
            let n = atomic.width.bytes();
            assert!(inside(atomic.remote, n, there) && atomic.remote % n == 0, "{atomic:?}");
            assert!(atomic.fetched.is_none_or(|f| inside(f.local, n, HERE) && f.local % n == 0), "{atomic:?}");
            assert!(atomic.change.fits(atomic.width), "{atomic:?}");
        }
    }
}

/// What entries are held against.
fn terms() -> Terms {
    Terms {
        target: Against { coll: COLL, contexts: 1, nranks: 2 },
        context: 0,
        keys: keys().0.clone(),
        atomics: Atomics { host: Atomicity::Fabric, gpu: Atomicity::Fabric, by_words: false },
        counts: Arc::new(Counts::new(NUMBER, 2)),
        ended: Arc::default(),
    }
}

/// The first entry. What came before one that waits for its peer has been carried out there.
fn read(queue: &mut SendQueue, ops: &mut Ops) -> Entry {
    let entry = queue.read(0, ops);
    if entry != Entry::Fenced {
        return entry;
    }
    assert!(ops.is_empty());
    queue.fenced();
    queue.read(0, ops)
}

fn entries(mut input: &[u8]) {
    let (slots, completions) = ([const { AtomicU64::new(0) }; 8 * SLOTS], [const { AtomicU64::new(0) }; 8 * SLOTS]);
    let (words, record) = ([const { AtomicU64::new(0) }; SLOTS], AtomicU32::new(0));
    let is_free = input.first().is_some_and(|flags| flags & 1 == 1);
    let handler = if is_free { Ringing::FreeFlow } else { Ringing::Proxy };
    let terms = Arc::new(terms());
    let places = QueuePairAddresses {
        credits: None,
        slots: NonNull::from(&slots[0]),
        device_slots: 0,
        device_rings: 0,
        device_completions: None,
        is_managed: false,
        size: SLOTS as u32,
        completions: NonNull::from(&completions[0]).cast(),
        bell: DoorbellWords { handler, words: NonNull::from(&words[0]), record: NonNull::from(&record) },
        number: NUMBER,
    };
    // SAFETY: all of it outlives the queue.
    let mut queue = unsafe { SendQueue::new(places, terms.clone(), PEER) };
    let (mut index, mut ops, mut stopped) = (0u64, Ops::default(), false);
    while !input.is_empty() {
        let _flags: [u8; 1] = take(&mut input);
        let mut bytes: [u8; ENTRY_BYTES] = take(&mut input);
        bytes[1..3].copy_from_slice(&(index as u16).to_be_bytes());
        bytes[4..7].copy_from_slice(&NUMBER.to_be_bytes()[1..]);
        let slot = index as usize % SLOTS;
        for (i, word) in bytes.chunks(8).enumerate() {
            let word = u64::from_ne_bytes(word.try_into().expect("8 bytes"));
            slots[8 * slot + i].store(word, Ordering::Relaxed);
        }
        words[if is_free { slot } else { 0 }].store(index + 1, Ordering::Relaxed);
        queue.begin();
        ops.clear();
        let first = read(&mut queue, &mut ops);
        ops.iter().for_each(judge);
        let n = match &first {
            // A wait, or what looks as if it had not all arrived.
            Entry::Absent => return,
            Entry::Fenced => panic!("it was carried out"),
            Entry::Op(_) => 1,
            Entry::Ops(n) | Entry::Gets(n) => usize::from(*n),
            Entry::Nothing(_) | Entry::Nop | Entry::Joined | Entry::Flush(_) | Entry::Refused(_) => 0,
        };
        assert_eq!(ops.len(), n);
        // Nothing is known of windows any more, then everything.
        terms.ended.fetch_add(1, Ordering::Relaxed);
        for _ in 0..2 {
            queue.begin();
            let before = std::mem::take(&mut ops);
            assert_eq!(queue.read(0, &mut ops), first);
            assert_eq!(ops, before);
        }
        let asked = SendEntry::parse(&bytes);
        queue.take(1);
        let is_refused = matches!(first, Entry::Refused(_));
        if is_refused {
            queue.stop(Stopped::Refused);
        } else {
            assert!(stopped || asked.is_ok());
        }
        queue.credit(1);
        let last = completions[8 * slot + 7].load(Ordering::Relaxed).to_ne_bytes();
        let is_said = stopped || is_refused || asked.is_ok_and(|asked| asked.is_signalled);
        if !is_said {
            // From here on completion entries are not where send entries are.
            return;
        }
        let code = if stopped || is_refused { FAILED } else { GOOD };
        assert_eq!(last[7], code << 4 | u8::from(index as usize & SLOTS != 0));
        assert_eq!(last[4..6], (index as u16).to_be_bytes());
        let syndrome = completions[8 * slot + 6].load(Ordering::Relaxed).to_ne_bytes()[7];
        assert!(code == GOOD || (syndrome == Syndrome::Flushed as u8) == stopped && syndrome != 0);
        stopped |= is_refused;
        index += 1;
    }
}
