//! Atomic operations of any fabric, held against what one processor would do: alone, in random order, and from several
//! ranks at once.

use oxygin::fabric::{Context, Posted};
use oxygin::rma::atomic::{Atomic, Change, Fetched, Width};
use oxygin::rma::op::Op;
use oxygin::rma::seq::Seq;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Memory of a rank, as one that uses it names it.
#[derive(Clone, Copy)]
pub struct Words {
    pub base: u64,
    pub key: u32,
}

/// Numbers without order, the same each time.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A change of the word at byte `at` of `words`; its old value goes to byte `to` of `here`.
pub fn atomic(words: Words, at: u64, width: Width, change: Change, to: Option<(Words, u64)>) -> Op {
    let fetched = to.map(|(here, to)| Fetched { local: here.base + to, lkey: here.key });
    Op::Atomic(Atomic { change, width, remote: words.base + at, rkey: words.key, fetched, more: false })
}

/// Posts all of them, and returns the last one's number.
pub fn post<C: Context>(context: &C, peer: u32, ops: &[Op]) -> Seq {
    let end = Instant::now() + PATIENCE;
    let (mut taken, mut last) = (0, Seq(0));
    while taken < ops.len() {
        // SAFETY: windows outlive the operations in every test.
        let posted: Posted = unsafe { context.post(peer, &ops[taken..]) }.unwrap();
        if posted.taken == 0 {
            assert!(Instant::now() < end, "no room for an operation to rank {peer}");
            context.progress().unwrap();
            std::thread::yield_now();
            continue;
        }
        (taken, last) = (taken + posted.taken, posted.last);
    }
    last
}

/// Waits for an operation.
pub fn wait<C: Context>(context: &C, peer: u32, seq: Seq) {
    let end = Instant::now() + PATIENCE;
    while !context.test(peer, seq).unwrap() {
        assert!(Instant::now() < end, "operation {seq:?} to rank {peer} is not done");
        std::thread::yield_now();
    }
}

/// A random change of a word of this width, whose comparisons match now and then.
fn some_change(random: &mut Random, width: Width) -> Change {
    let mask = width.mask();
    match random.below(4) {
        0 => Change::add(random.next() & mask),
        1 => Change::FetchAdd { add: random.next() & mask, boundary: 0x8080_8080_8080_8080 & mask },
        2 => Change::FetchAdd { add: random.next() & mask, boundary: random.next() & mask },
        _ => Change::CompareSwap {
            compare: random.next() & mask,
            compare_mask: random.next() & 1 & mask,
            swap: random.next() & mask,
            swap_mask: random.next() & mask,
        },
    }
}

/// Random changes of `words` (64 bytes, of which it uses 32 for words of 8 bytes and 32 for those of 4, all zero) by
/// one context, some at a time; `read` reads 8 bytes at a byte of `here`, which has 512.
pub fn as_a_model_does<C: Context>(
    context: &C,
    peer: u32,
    words: Words,
    here: Words,
    read: impl Fn(u64) -> u64,
    rounds: u64,
) {
    let (mut random, mut model) = (Random(rounds), [0u8; 64]);
    for round in 0..rounds {
        let (mut ops, mut expected) = (Vec::new(), Vec::new());
        for slot in 0..1 + random.below(24) {
            let wide = random.below(2) == 0;
            let (width, at) = match wide {
                true => (Width::Eight, 8 * random.below(4)),
                false => (Width::Four, 32 + 4 * random.below(8)),
            };
            let change = some_change(&mut random, width);
            let word = &mut model[at as usize..][..width.bytes() as usize];
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            let old = u64::from_le_bytes(bytes);
            if let Some(new) = change.of(old, width) {
                word.copy_from_slice(&new.to_le_bytes()[..word.len()]);
            }
            // Some fetch nothing.
            let to = (random.below(8) > 0).then_some((here, 8 * slot));
            ops.push(atomic(words, at, width, change, to));
            if to.is_some() {
                expected.push((8 * slot, width, old));
            }
        }
        wait(context, peer, post(context, peer, &ops));
        for (at, width, old) in expected {
            assert_eq!(read(at) & width.mask(), old, "round {round}, fetched value {at}");
        }
    }
}

/// A thread's part of [`concurrent`].
pub struct Member<'a, C: Context> {
    pub context: &'a C,
    /// Which rank has the words, and where: 64 bytes, all zero.
    pub peer: u32,
    pub words: Words,
    /// Memory of this thread's own: 8 bytes a turn.
    pub here: Words,
    /// Reads 8 bytes of that.
    pub read: &'a (dyn Fn(u64) -> u64 + Sync),
}

/// Turns of each member.
pub const TURNS: u64 = 200;

/// Members at once: each counts by additions on one word and on one field of another one, by compare-and-swaps on a
/// third, and takes bits of a fourth. `idle`: whoever owns the words makes progress.
pub fn concurrent<C: Context>(members: &[Member<'_, C>], idle: impl Fn() + Sync) {
    let all = members.len() as u64;
    let is_over = AtomicBool::new(false);
    let (bits, swaps) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut seen = HashSet::new();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..)
            .zip(members)
            .map(|(number, member)| {
                let (bits, swaps) = (&bits, &swaps);
                scope.spawn(move || turns(number, member, bits, swaps))
            })
            .collect();
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                idle();
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = running.into_iter().map(|t| t.join()).collect();
        is_over.store(true, Ordering::Release);
        for fetched in results.into_iter().map(Result::unwrap) {
            assert!(fetched.is_sorted(), "one thread's own additions, in their order");
            fetched.into_iter().for_each(|value| assert!(seen.insert(value), "{value} was fetched twice"));
        }
    });
    assert_eq!(seen.len() as u64, all * TURNS);
    let last = &members[0];
    let read = |at, width| {
        wait(last.context, last.peer, {
            post(last.context, last.peer, &[atomic(last.words, at, width, Change::add(0), Some((last.here, 0)))])
        });
        (last.read)(0) & width.mask()
    };
    assert_eq!(read(0, Width::Eight), all * TURNS, "the sum of the additions");
    let fields = read(8, Width::Eight).to_le_bytes();
    for (number, field) in fields.into_iter().enumerate() {
        let expected = if (number as u64) < all { TURNS as u8 } else { 0 };
        assert_eq!(field, expected, "field {number}, whose carries go nowhere");
    }
    assert_eq!(read(16, Width::Four), swaps.load(Ordering::Relaxed), "one for each that matched");
    assert_eq!(bits.load(Ordering::Relaxed), 32, "each bit has one who took it");
    assert_eq!(read(24, Width::Four), u64::from(u32::MAX));
}

/// What one member does; returns what its additions fetched.
fn turns<C: Context>(number: u64, m: &Member<'_, C>, bits: &AtomicU64, swaps: &AtomicU64) -> Vec<u64> {
    let one = |at, width, change| {
        wait(m.context, m.peer, post(m.context, m.peer, &[atomic(m.words, at, width, change, Some((m.here, 0)))]));
        (m.read)(0) & width.mask()
    };
    // Many on their way at once.
    let add = |turn| atomic(m.words, 0, Width::Eight, Change::add(1), Some((m.here, 8 * turn)));
    let field = Change::FetchAdd { add: 1 << (8 * number), boundary: 0x8080_8080_8080_8080 };
    let count = |_| atomic(m.words, 8, Width::Eight, field, None);
    let ops: Vec<Op> = (0..TURNS).flat_map(|turn| [add(turn), count(turn)]).collect();
    wait(m.context, m.peer, post(m.context, m.peer, &ops));
    let fetched = (0..TURNS).map(|turn| (m.read)(8 * turn)).collect();
    let mut value = 0;
    for _ in 0..TURNS {
        let found = one(16, Width::Four, Change::compare_swap(value, value + 1, Width::Four));
        if found == value {
            swaps.fetch_add(1, Ordering::Relaxed);
            value += 1;
        } else {
            value = found;
        }
    }
    for bit in 0..32 {
        let (mask, change_of) = (1 << bit, |mask| (0, mask, mask, mask));
        let (compare, compare_mask, swap, swap_mask) = change_of(mask);
        let found = one(24, Width::Four, Change::CompareSwap { compare, compare_mask, swap, swap_mask });
        if found & mask == 0 {
            bits.fetch_add(1, Ordering::Relaxed);
        }
    }
    fetched
}
