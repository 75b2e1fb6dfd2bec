//! Descriptors that device code writes: whatever they say, only operations inside live windows come out, and a window
//! that was seen before changes nothing.

use super::windows::{window, HERE, LEN, THERE};
use super::{take, Target};
use nccl_plugin_api::descriptor::*;
use oxygin::proxy::descriptor::meaning::Terms;
use oxygin::proxy::descriptor::queue::{Queue, QueueAddresses};
use oxygin::proxy::ops::Ops;
use oxygin::proxy::ring::{Entry, Ring};
use oxygin::rma::op::{Op, Transfer};
use oxygin::rma::refusal::Target as Against;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub fn targets() -> Vec<Target> {
    vec![Target { name: "descriptor", seeds: seeds(), run: descriptor }]
}

const COLL: u64 = 77;
const PEER: u32 = 1;
const COUNTERS: u32 = 3;
const SIGNALS: u32 = 5;

/// Two windows for data, and the one of the signals.
fn windows() -> [u64; 3] {
    static MADE: OnceLock<[u64; 3]> = OnceLock::new();
    *MADE.get_or_init(|| [0u64, 1, 2].map(|i| window(COLL, i)))
}

fn seeds() -> Vec<Vec<u8>> {
    // Window numbers stand for handles: `descriptor` puts those in.
    let put = |form, op| Descriptor::new(form, 2, op, 64).first(8, 1).second(16, 2).with_signal(3, 9, true);
    let all = [
        put(Form::Bytes128, OP_PUT | OP_SIGNAL_ADD),
        put(Form::Bytes64, OP_PUT | OP_SIGNAL_INC),
        put(Form::Bytes128, OP_PUT | OP_COUNTER).with_counter(2),
        put(Form::Bytes128, OP_GET),
        put(Form::Bytes128, OP_VA_SIGNAL | OP_SIGNAL_ADD),
        Descriptor::new(Form::Bytes128, 2, OP_FLUSH, 0),
        Descriptor::new(Form::Bytes128, 1, OP_PUT | OP_INLINE, 8).value(u64::MAX).second(0, 1),
    ];
    let bytes = |d: &Descriptor| {
        let (form, words) = ([u8::from(d.form == Form::Bytes64)], d.words);
        form.into_iter().chain(words.into_iter().flat_map(u64::to_le_bytes))
    };
    // Rows of one kind, whose offsets alone change, in and out of the windows.
    let row = |form, op| {
        let at = |from, to| put(form, op).first(from, 1).second(to, 2);
        [at(0, 936), at(936, 0), at(937, 0), at(5, 937), at(u64::MAX >> 1, 0)].iter().flat_map(bytes).collect()
    };
    let rows = [row(Form::Bytes128, OP_PUT), row(Form::Bytes64, OP_PUT | OP_SIGNAL_INC)];
    all.iter().map(|d| bytes(d).collect()).chain(rows).collect()
}

/// A handle for what stands where one does: mostly a live one.
fn with_handle(word: u64) -> u64 {
    match (word >> 1) & 7 {
        n @ 1..=3 => windows()[n as usize - 1] << 1 | word & 1,
        _ => word,
    }
}

fn inside(at: u64, len: u64, base: u64) -> bool {
    (0..3).any(|i| at >= base + 4096 * i && at + len <= base + 4096 * i + LEN)
}

fn judge(op: &Op) {
    match op.transfer() {
        Transfer::Put(put) => {
            if put.len > 0 {
                assert!(inside(put.remote, put.len, THERE * (1 + u64::from(PEER))), "{put:?}");
                assert!(matches!(op, Op::Value(_)) || inside(put.local, put.len, HERE), "{put:?}");
            }
            if let Some(signal) = put.signal {
                assert!(inside(signal.remote, 8, THERE * (1 + u64::from(PEER))) && signal.remote % 8 == 0, "{put:?}");
            }
        }
        Transfer::Get(get) => {
            assert!(inside(get.remote, get.len, THERE * (1 + u64::from(PEER))), "{get:?}");
            assert!(inside(get.local, get.len, HERE), "{get:?}");
        }
        Transfer::Atomic(atomic) => panic!("{atomic:?}"),
    }
}

fn descriptor(mut input: &[u8]) {
    let form = if input.first().is_some_and(|b| b & 1 == 1) { Form::Bytes64 } else { Form::Bytes128 };
    let slots: Vec<AtomicU64> = (0..2 * form.bytes() / 8).map(|_| AtomicU64::new(0)).collect();
    let (ci, counters) = (AtomicU32::new(u32::MAX - 1), [const { AtomicU64::new(0) }; COUNTERS as usize]);
    let terms = Arc::new(Terms {
        form,
        target: Against { coll: COLL, contexts: 2, nranks: 2 },
        context: 1,
        counters: COUNTERS,
        signals: SIGNALS,
        signal_window: windows()[2] as usize,
        ended: Arc::default(),
    });
    let places = QueueAddresses {
        credits: None,
        slots: NonNull::from(&slots[0]),
        device_slots: 0,
        is_managed: false,
        size: 2,
        ci: NonNull::from(&ci),
        counters: NonNull::from(&counters[0]),
    };
    // SAFETY: all of it outlives the queue.
    let mut queue = unsafe { Queue::new(places, terms.clone(), PEER) };
    let (mut index, mut ops) = (u32::MAX - 1, Ops::default());
    while !input.is_empty() {
        let _form: [u8; 1] = take(&mut input);
        let mut words = [0; WORDS];
        words.iter_mut().for_each(|word| *word = u64::from_le_bytes(take(&mut input)));
        (words[2], words[4]) = (with_handle(words[2]), with_handle(words[4]));
        let slot = (index % 2) as usize * (form.bytes() / 8);
        (0..WORDS).for_each(|i| slots[slot + i].store(words[i], Ordering::Relaxed));
        queue.begin();
        ops.clear();
        let first = queue.read(0, &mut ops);
        let whole = words.iter().all(|word| word & 1 == 1);
        assert_eq!(first == Entry::Absent, !whole);
        ops.iter().for_each(judge);
        // Nothing is known of windows any more, then everything.
        terms.ended.fetch_add(1, Ordering::Relaxed);
        for _ in 0..2 {
            queue.begin();
            let before = ops.clone();
            ops.clear();
            assert_eq!(queue.read(0, &mut ops), first);
            assert_eq!(ops, before);
        }
        if let Entry::Op(finish) | Entry::Nothing(finish) = first {
            queue.finish(finish);
        }
        queue.take(1);
        queue.credit(1);
        index = index.wrapping_add(1);
        assert_eq!(ci.load(Ordering::Relaxed), index);
        assert!(slots[slot..slot + WORDS].iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }
}
