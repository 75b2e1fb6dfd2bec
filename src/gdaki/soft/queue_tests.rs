use super::super::keys::Keys;
use super::super::meaning::Counts;
use super::*;
use crate::rma::atomic::Atomics;
use crate::rma::op::{Get, Payload, Signal, Value};
use crate::rma::refusal::Target;
use std::sync::atomic::AtomicU32;

const SIZE: usize = 4;

/// Device code that does not wait for a free slot: seen when the entry before it completes, and refused in its turn.
#[test]
fn a_slot_that_is_written_before_its_entry_is_complete_is_refused() {
    let (slots, completions) = ([const { AtomicU64::new(0) }; 8 * SIZE], [const { AtomicU64::new(0) }; 8 * SIZE]);
    let (word, record) = (AtomicU64::new(0), AtomicU32::new(0));
    let terms = Terms {
        target: Target { coll: 0, contexts: 1, nranks: 1 },
        context: 0,
        keys: Arc::new(Keys::default()),
        atomics: Atomics::NONE,
        counts: Arc::new(Counts::new(9, 1)),
        ended: Arc::default(),
    };
    let places = Places {
        slots: NonNull::from(&slots[0]),
        size: SIZE as u32,
        completions: NonNull::from(&completions[0]).cast(),
        credits: None,
        bell: DoorbellWords { handler: Ringing::Proxy, words: NonNull::from(&word), record: NonNull::from(&record) },
        number: 9,
    };
    // SAFETY: all of it outlives the queue.
    let mut queue = unsafe { SendQueue::new(places, Arc::new(terms), 0) };
    // Nothing to do, signalled.
    let nop = |index: u64| {
        let slot = 8 * (index as usize % SIZE);
        slots[slot + 1].store(0x0000_0008_0000_0000u64.to_be(), Ordering::Relaxed);
        slots[slot].store((index << 40 | 9 << 8 | 1).to_be(), Ordering::Relaxed);
    };
    let mut ops = Vec::new();
    nop(0);
    word.store(1, Ordering::Relaxed);
    queue.begin();
    assert_eq!(queue.read(0, &mut ops), Entry::Nothing(Finish::NONE));
    queue.take(1);
    nop(4);
    queue.credit(1);
    for index in 1..4 {
        nop(index);
        word.store(index + 1, Ordering::Relaxed);
        queue.begin();
        assert_eq!(queue.read(0, &mut ops), Entry::Nothing(Finish::NONE));
        queue.take(1);
        queue.credit(1);
    }
    word.store(5, Ordering::Relaxed);
    queue.begin();
    let Entry::Refused(why) = queue.read(0, &mut ops) else { panic!("it is taken") };
    assert!(why.contains("entry 4") && why.contains("more is outstanding"), "{why}");
    assert!(ops.is_empty());
}

/// A put with a signal behind it is one operation, if the put has none yet; everything else stays by itself.
#[test]
fn a_signal_goes_with_the_put_before_it() {
    let signal = Signal { remote: 8, rkey: 3, value: 1, strong: true };
    let put = |len, signal| Op::Put(Put { local: 0, lkey: 1, rkey: 2, remote: 64, len, signal, more: false });
    let bare = Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal: Some(signal), more: false });
    let payload = Payload::new(&[7]).expect("a byte");
    let value = |signal| Op::Value(Value { payload, rkey: 2, remote: 64, signal, more: false });
    let get = Op::Get(Get { local: 0, lkey: 1, rkey: 2, remote: 64, len: 8, more: false });
    for (before, after) in [(put(8, None), put(8, Some(signal))), (value(None), value(Some(signal)))] {
        let mut ops = vec![get, before, bare];
        assert!(join(&mut ops));
        assert_eq!(ops, [get, after]);
    }
    for alone in [get, put(8, Some(signal)), bare] {
        let mut ops = vec![alone, bare];
        assert!(!join(&mut ops));
        assert_eq!(ops, [alone, bare]);
    }
    let mut ops = vec![bare];
    assert!(!join(&mut ops) && ops == [bare]);
}
