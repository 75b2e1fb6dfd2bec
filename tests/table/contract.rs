//! The ordering contract as a model, and random programs that are held to it.
//!
//! A program is a list of operations a rank and context. Every put writes bytes of its own to a place of its own, every
//! signal adds one to the word of its (sender, context). So the value of a word says how many signals of that sender
//! and context have become visible, and the model says which puts must be visible with it: for a strong signal all
//! earlier ones, for a weak one its own. Receivers check that while the program runs, and all memory at the end.

use crate::support::common::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

const RANKS: usize = 3;
const CONTEXTS: usize = 2;
/// Bytes kept for each operation's data.
const CELL: usize = 12_288;

#[derive(Clone, Debug)]
struct Op {
    peer: usize,
    size: usize,
    signal: bool,
}

/// What one rank does on one context.
type Program = Vec<Op>;

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![Just(0usize), 1usize..64, Just(8usize), 4000usize..4200, 8000usize..CELL];
    (0..RANKS, size, any::<bool>()).prop_map(|(peer, size, signal)| Op { peer, size, signal: signal || size == 0 })
}

fn programs() -> impl Strategy<Value = Vec<Vec<Program>>> {
    let program = proptest::collection::vec(op(), 0..24);
    proptest::collection::vec(proptest::collection::vec(program, CONTEXTS), RANKS)
}

/// The model: what a receiver may see of one sender's context.
struct Expectation {
    /// Operations that reach this receiver: (index in the program, size, signals).
    arrivals: Vec<(usize, usize, bool)>,
}

impl Expectation {
    fn new(program: &Program, receiver: usize) -> Self {
        let arrivals = program
            .iter()
            .enumerate()
            .filter(|(_, op)| op.peer == receiver)
            .map(|(i, op)| (i, op.size, op.signal))
            .collect();
        Self { arrivals }
    }

    fn signals(&self) -> u64 {
        self.arrivals.iter().filter(|a| a.2).count() as u64
    }

    /// The puts that must be visible once the word shows `value`, signals being strong.
    fn visible(&self, value: u64) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut seen = 0;
        let end = self
            .arrivals
            .iter()
            .position(|a| {
                seen += a.2 as u64;
                seen >= value
            })
            .map_or(self.arrivals.len(), |i| i + 1);
        self.arrivals[..if value == 0 { 0 } else { end }].iter().map(|a| (a.0, a.1))
    }
}

fn cell(sender: usize, context: usize, index: usize) -> usize {
    ((sender * CONTEXTS + context) * 24 + index) * CELL
}

fn byte(sender: usize, context: usize, index: usize, at: usize) -> u8 {
    (sender * 83 + context * 41 + index * 7 + at) as u8 | 1
}

fn check_cell(bytes: *const u8, sender: usize, context: usize, index: usize, size: usize) {
    for at in 0..size {
        // SAFETY: inside the window; volatile, because other cells change at the same time.
        let got = unsafe { bytes.add(cell(sender, context, index) + at).read_volatile() };
        assert_eq!(
            got,
            byte(sender, context, index, at),
            "put {index} of rank {sender} context {context}, byte {at} of {size}"
        );
    }
}

fn run(all: &[Vec<Program>]) {
    let words = RANKS * CONTEXTS * 24 * CELL / 8;
    job(RANKS, CONTEXTS as i32, |r| {
        let mut src = r.window(words, 0);
        let dst = r.window(words, 0);
        let sig = r.window(RANKS * CONTEXTS, 1);
        let bytes = src.words.as_mut_ptr().cast::<u8>();
        for (c, program) in all[r.rank].iter().enumerate() {
            for (i, op) in program.iter().enumerate() {
                for at in 0..op.size {
                    // SAFETY: inside the window, before any operation reads it.
                    unsafe { bytes.add(cell(r.rank, c, i) + at).write(byte(r.rank, c, i, at)) };
                }
            }
        }
        r.job.barrier.wait();
        let seen = dst.words.as_ptr().cast::<u8>();
        let expected: Vec<Vec<Expectation>> =
            all.iter().map(|cs| cs.iter().map(|p| Expectation::new(p, r.rank)).collect()).collect();
        let look = || {
            for (s, contexts) in expected.iter().enumerate() {
                for (c, e) in contexts.iter().enumerate() {
                    // SAFETY: an aligned word of the window.
                    let word = unsafe { AtomicU64::from_ptr(sig.words.as_ptr().add(s * CONTEXTS + c).cast_mut()) };
                    let value = word.load(Ordering::Acquire);
                    assert!(value <= e.signals(), "rank {s} context {c}: {value} signals of {}", e.signals());
                    e.visible(value).for_each(|(i, size)| check_cell(seen, s, c, i, size));
                }
            }
        };
        let longest = all[r.rank].iter().map(Vec::len).max().unwrap_or(0);
        let mut requests = Vec::new();
        for i in 0..longest {
            for (c, program) in all[r.rank].iter().enumerate() {
                if let Some(op) = program.get(i) {
                    let at = cell(r.rank, c, i) as u64;
                    let word = ((r.rank * CONTEXTS + c) * 8) as u64;
                    let signal = op.signal.then_some((&sig, word, 1));
                    requests.push(r.put(c as i32, (&src, at), op.size, (&dst, at), op.peer, signal));
                }
            }
            look();
        }
        requests.into_iter().for_each(|q| r.wait(q));
        for (s, contexts) in expected.iter().enumerate() {
            for (c, e) in contexts.iter().enumerate() {
                r.wait_signal(&sig, s * CONTEXTS + c, e.signals());
                look();
            }
        }
        // Nobody counts any more.
        r.job.barrier.wait();
        // What no signal followed is still on its way: a last signal from everybody to everybody flushes it out.
        for c in 0..CONTEXTS {
            for p in 0..RANKS {
                let word = ((r.rank * CONTEXTS + c) * 8) as u64;
                r.wait(r.put(c as i32, (&src, 0), 0, (&dst, 0), p, Some((&sig, word, 1))));
            }
        }
        for (s, contexts) in expected.iter().enumerate() {
            for (c, e) in contexts.iter().enumerate() {
                r.wait_signal(&sig, s * CONTEXTS + c, e.signals() + 1);
                e.arrivals.iter().for_each(|&(i, size, _)| check_cell(seen, s, c, i, size));
            }
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_keep_the_contract(all in programs()) {
        run(&all);
    }
}

#[test]
fn the_model_knows_what_a_signal_implies() {
    let op = |size, signal| Op { peer: 1, size, signal };
    let e = Expectation::new(&vec![op(1, false), op(2, true), op(3, false), op(0, true), op(5, false)], 1);
    assert_eq!(e.signals(), 2);
    assert_eq!(e.visible(0).count(), 0);
    assert_eq!(e.visible(1).collect::<Vec<_>>(), [(0, 1), (1, 2)]);
    assert_eq!(e.visible(2).collect::<Vec<_>>(), [(0, 1), (1, 2), (2, 3), (3, 0)]);
}
