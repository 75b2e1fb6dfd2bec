//! Queues of random entries, whole and broken, held against a model of them.

use crate::harness::{on_ranks, ways};
use crate::support::nic::*;
use proptest::prelude::*;
use std::sync::Mutex;

/// Words that entries read and write.
const WORDS: usize = 16;

/// An entry, by words of the two windows.
#[derive(Clone, Debug)]
enum Step {
    Nop,
    Write {
        to: usize,
        from: usize,
        words: usize,
    },
    Value {
        to: usize,
        bytes: Vec<u8>,
    },
    Read {
        from: usize,
        to: usize,
    },
    Add {
        to: usize,
        n: u64,
    },
    FetchAdd {
        to: usize,
        n: u64,
        fetched: usize,
    },
    Counted {
        to: usize,
        from: usize,
    },
    /// Of a bad remote key, a bad local key, no opcode.
    Bad(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let (word, bytes) = (0..WORDS, prop::collection::vec(any::<u8>(), 1..=28));
    prop_oneof![
        1 => Just(Step::Nop),
        4 => (word.clone(), word.clone(), 1..4usize).prop_map(|(to, from, words)| Step::Write { to, from, words }),
        3 => (word.clone(), bytes).prop_map(|(to, bytes)| Step::Value { to, bytes }),
        2 => (word.clone(), word.clone()).prop_map(|(from, to)| Step::Read { from, to }),
        3 => (word.clone(), any::<u64>()).prop_map(|(to, n)| Step::Add { to, n }),
        2 => (word.clone(), any::<u64>(), word.clone()).prop_map(|(to, n, fetched)| Step::FetchAdd { to, n, fetched }),
        2 => (word.clone(), word).prop_map(|(to, from)| Step::Counted { to, from }),
    ]
}

/// Steps of which one may be bad.
fn program() -> impl Strategy<Value = (Vec<Step>, usize, usize)> {
    let steps = prop::collection::vec(step(), 1..60);
    (steps, prop::option::of((any::<prop::sample::Index>(), 0..3u8)), 0..4usize, 2..6usize).prop_map(
        |(mut steps, bad, way, batch)| {
            if let Some((at, kind)) = bad {
                let at = at.index(steps.len());
                steps[at] = Step::Bad(kind);
            }
            (steps, way, batch)
        },
    )
}

/// What the windows hold; both are this rank's own.
#[derive(Clone, Debug, PartialEq)]
struct Model {
    src: Vec<u64>,
    dst: Vec<u64>,
    counter: u64,
}

impl Model {
    fn new() -> Self {
        // Reads go to the upper half of the source, so that no entry reads what an earlier one may still bring.
        Self { src: (0..4 * WORDS as u64).map(|i| i * 0x0101_0101 + 1).collect(), dst: vec![0; 4 * WORDS], counter: 0 }
    }

    /// Does it; `Some`: the syndrome that it gets.
    fn apply(&mut self, step: &Step) -> Option<u8> {
        match step {
            Step::Nop => {}
            Step::Write { to, from, words } => (0..*words).for_each(|i| self.dst[to + i] = self.src[from + i]),
            Step::Value { to, bytes } => {
                for (i, byte) in bytes.iter().enumerate() {
                    let word = &mut self.dst[to + i / 8];
                    let at = 8 * (i % 8);
                    *word = *word & !(0xff << at) | u64::from(*byte) << at;
                }
            }
            Step::Read { from, to } => self.src[2 * WORDS + to] = self.dst[*from],
            Step::Add { to, n } => self.dst[*to] = self.dst[*to].wrapping_add(*n),
            Step::FetchAdd { to, n, fetched } => {
                self.src[3 * WORDS + fetched] = self.dst[*to];
                self.dst[*to] = self.dst[*to].wrapping_add(*n);
            }
            Step::Counted { to, from } => {
                self.dst[*to] = self.src[*from];
                self.counter += 1;
            }
            Step::Bad(kind) => return Some([0x13, 0x04, 0x02][usize::from(*kind)]),
        }
        None
    }
}

fn raw(step: &Step, src: u32, dst: u32, sink: u32) -> Raw {
    let at = |key: u32, word: usize| (key, 8 * word as u64);
    match step {
        Step::Nop => Raw::new(NOP, 0),
        Step::Write { to, from, words } => write(at(dst, *to), at(src, *from), 8 * *words as u32),
        Step::Value { to, bytes } => value(at(dst, *to), bytes),
        // A read may be overtaken by what is behind it, and overtakes nothing.
        Step::Read { from, to } => read(at(dst, *from), at(src, 2 * WORDS + to), 8),
        Step::Add { to, n } => add(at(dst, *to), *n, (sink, 0)),
        Step::FetchAdd { to, n, fetched } => add(at(dst, *to), *n, at(src, 3 * WORDS + fetched)),
        Step::Counted { to, from } => write(at(dst, *to), at(src, *from), 8),
        Step::Bad(0) => write(at(dst ^ 0x40, 0), at(src, 0), 8),
        Step::Bad(1) => write(at(dst, 0), at(src ^ 0x40, 0), 8),
        Step::Bad(_) => Raw::new(0x3f, 0),
    }
    .fenced()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// One producer, to itself, where the fabric moves everything in order; all entries wait for the reads before them.
    #[test]
    fn queues_do_what_the_model_does((steps, way, batch) in program()) {
        let failed = Mutex::new(None);
        on_ranks(1, Ask { depth: 64, counters: 1, ..ways()[way] }, |_, nic, src, dst| {
            let mut model = Model::new();
            (0..4 * WORDS).for_each(|i| src.set(i, model.src[i]));
            let qp = nic.qp(0, 0);
            let mut expected = Vec::new();
            let mut stopped = false;
            for some in steps.chunks(batch) {
                let entries: Vec<_> = some.iter().map(|s| raw(s, src.key, dst.key, nic.view.sink)).collect();
                match some {
                    [Step::Counted { .. }, ..] => nic.post_counted(0, 0, &entries, 0),
                    _ => qp.post(&entries),
                };
                for step in some {
                    let counter = model.counter;
                    let status = match stopped {
                        true => Status::Failed { syndrome: 0x05 },
                        false => match model.apply(step) {
                            None => Status::Good,
                            Some(syndrome) => Status::Failed { syndrome },
                        },
                    };
                    stopped |= status != Status::Good;
                    model.counter = counter;
                    expected.push(status);
                }
                // A wait is over when the awaited entry is complete, well or not.
                model.counter += u64::from(matches!(some[0], Step::Counted { .. }));
            }
            qp.flush();
            let seen: Vec<_> = (0..expected.len() as u64).map(|i| qp.poll(i)).collect();
            nic.wait_counter(0, 0, model.counter);
            let now = Model {
                src: (0..4 * WORDS).map(|i| src.get(i)).collect(),
                dst: (0..4 * WORDS).map(|i| dst.get(i)).collect(),
                counter: nic.counter(0, 0),
            };
            let expected: Vec<_> = expected.into_iter().map(Some).collect();
            if (&seen, &now, nic.has_error()) != (&expected, &model, stopped) {
                *failed.lock().unwrap() = Some(format!("{seen:?} {now:?}\nexpected\n{expected:?} {model:?}"));
            }
        });
        if let Some(why) = failed.into_inner().unwrap() {
            prop_assert!(false, "{why}");
        }
    }
}
