//! Random descriptors against a second reading of what they ask for, in numbers that do not overflow.

use super::*;
use crate::memory::window::{Registration, Remote, Window, WindowFacts};
use crate::rma::op::{Get, Put, Signal, Value};
use crate::sys::handles;
use proptest::prelude::*;
use std::sync::OnceLock;

const COLL: u64 = 0x6d65_616e;
const LEN: u64 = 1 << 20;
const COUNTERS: u32 = 7;
const SIGNALS: u32 = 9;
const CONTEXT: u32 = 2;

/// Where a window lies: here, at each of two peers; and its keys.
fn base(window: u64, rank: u64) -> u64 {
    (window + 1) << 32 | rank << 28
}

fn rkey(window: u64, rank: u64) -> u32 {
    (100 * window + rank) as u32
}

/// Windows 0 and 1 are for data, 2 has the contexts' signals.
fn windows() -> &'static [u64; 3] {
    static MADE: OnceLock<[u64; 3]> = OnceLock::new();
    MADE.get_or_init(|| {
        [0, 1, 2].map(|w| {
            let remote = (0..3).map(|rank| Remote { base: base(w, rank), len: LEN, rkey: rkey(w, rank) }).collect();
            let registration = Registration { lkey: 50 + w as u32, rkey: rkey(w, 0), guard: Box::new(()) };
            let facts = WindowFacts { id: w as u32, base: base(w, 0), len: LEN, remote, registration };
            handles::insert(Arc::new(Window::of(COLL, facts))).unwrap() as u64
        })
    })
}

/// What device code asks for.
#[derive(Clone, Copy, Debug)]
struct Wish {
    form: Form,
    version: u8,
    kind: u16,
    size: u64,
    /// Window and offset; 3 stands for no handle, 4 for a wrong one.
    first: (u64, u64),
    second: (u64, u64),
    value: u64,
    counter: Option<u32>,
    /// Number, addend (`None`: one) and whether it is strong.
    signal: Option<(u32, Option<u64>, bool)>,
}

impl Wish {
    fn descriptor(&self) -> Descriptor {
        let handle = |w: u64| windows().get(w as usize).copied().unwrap_or(if w == 3 { 0 } else { 0x6666_0000 });
        let signal = match self.signal {
            None => 0,
            Some((_, None, _)) => OP_SIGNAL_INC,
            Some((_, Some(_), _)) => OP_SIGNAL_ADD,
        };
        let counter = if self.counter.is_some() { OP_COUNTER } else { 0 };
        let mut d = Descriptor::new(self.form, self.version, self.kind | signal | counter, self.size);
        d = match self.kind & OP_INLINE {
            0 => d.first(self.first.1, handle(self.first.0)),
            _ => d.value(self.value),
        };
        d = d.second(self.second.1, handle(self.second.0));
        d = self.counter.map_or(d, |counter| d.with_counter(counter));
        // What is not asked for may hold anything.
        let (number, addend, strong) = self.signal.unwrap_or((8, Some(3), true));
        d.with_signal(number, addend.unwrap_or(77), strong)
    }

    /// Address and key of a range there, if it is inside.
    fn at(place: (u64, u64), len: u64, rank: u64) -> Option<(u64, u32)> {
        let fits = place.0 < 3 && u128::from(place.1) + u128::from(len) <= u128::from(LEN);
        fits.then(|| (base(place.0, rank) + place.1, rkey(place.0, rank)))
    }

    fn signal(&self, peer: u64) -> Option<Signal> {
        let (number, addend, strong) = self.signal?;
        let strong = strong || self.form == Form::Bytes64 || self.version < 2;
        let place = match self.kind {
            OP_VA_SIGNAL => self.first,
            _ if number < SIGNALS => (2, 8 * u64::from(CONTEXT * SIGNALS + number)),
            _ => return None,
        };
        let (remote, rkey) = Self::at(place, 8, peer).filter(|(remote, _)| remote % 8 == 0)?;
        Some(Signal { remote, rkey, value: addend.unwrap_or(1), strong })
    }

    /// What that is; `None`: it cannot be.
    fn expected(&self, peer: u64) -> Option<Meaning> {
        let newest = self.form.newest_version();
        if self.form == Form::Bytes128 && !(1..=newest).contains(&self.version) {
            return None;
        }
        let (signal, len) = (self.signal(peer), self.size);
        if self.signal.is_some() != signal.is_some() || self.counter.is_some_and(|counter| counter >= COUNTERS) {
            return None;
        }
        let plain = self.signal.is_none() && self.counter.is_none();
        let finish = self.counter.map_or(Finish::NONE, |counter| Finish(counter + 1));
        let local = |place: (u64, u64)| Self::at(place, len, 0).map(|(at, _)| (at, 50 + place.0 as u32));
        let nothing = Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal, more: false };
        match self.kind {
            OP_PUT if len == 0 && signal.is_some() => Some(Meaning::Op(Op::Put(nothing), finish)),
            OP_PUT if len == 0 && self.first.0 == 3 => Some(Meaning::Nothing(finish)),
            OP_PUT => {
                let ((local, lkey), (remote, rkey)) = (local(self.first)?, Self::at(self.second, len, peer)?);
                Some(Meaning::Op(Op::Put(Put { local, lkey, rkey, remote, len, signal, more: false }), finish))
            }
            _ if self.kind == OP_PUT | OP_INLINE => {
                let bytes = self.value.to_le_bytes();
                let payload = Payload::new(bytes.get(..len as usize).filter(|b| !b.is_empty())?)?;
                let (remote, rkey) = Self::at(self.second, len, peer)?;
                Some(Meaning::Op(Op::Value(Value { payload, rkey, remote, signal, more: false }), finish))
            }
            OP_VA_SIGNAL if self.counter.is_none() => {
                signal.is_some().then_some(Meaning::Op(Op::Put(nothing), Finish::NONE))
            }
            OP_GET if plain && self.form == Form::Bytes128 => {
                let ((remote, rkey), (local, lkey)) = (Self::at(self.first, len, peer)?, local(self.second)?);
                Some(Meaning::Op(Op::Get(Get { local, lkey, rkey, remote, len, more: false }), Finish::NONE))
            }
            OP_FLUSH if plain && self.form == Form::Bytes128 => Some(Meaning::Flush),
            _ => None,
        }
    }
}

/// Numbers close to where a window ends, and far from it.
fn near_the_end() -> impl Strategy<Value = u64> {
    prop_oneof![0..64u64, LEN - 64..LEN + 64, any::<u64>().prop_map(|n| n >> 1)]
}

fn wish() -> impl Strategy<Value = Wish> {
    let kind = prop_oneof![
        4 => Just(OP_PUT),
        3 => Just(OP_PUT | OP_INLINE),
        2 => Just(OP_VA_SIGNAL),
        2 => Just(OP_GET),
        1 => Just(OP_FLUSH),
        1 => prop::sample::select(&[0, OP_GET | OP_PUT, OP_VA_SIGNAL | OP_INLINE, OP_FLUSH | OP_GET, 1 << 10][..]),
    ];
    let place = || (prop_oneof![9 => 0..3u64, 1 => 3..5u64], near_the_end());
    let number = |n: u32| prop_oneof![9 => 0..n, 1 => n..n + 3];
    let signal = prop::option::of((number(SIGNALS), prop::option::of(any::<u64>()), any::<bool>()));
    let size = prop_oneof![0..9u64, near_the_end().prop_map(|n| n >> 6)];
    (
        prop_oneof![3 => Just(Form::Bytes128), 1 => Just(Form::Bytes64)],
        prop_oneof![9 => 1..3u8, 1 => 0..16u8],
        kind,
        size,
        (place(), place()),
        any::<u64>(),
        prop::option::weighted(0.3, number(COUNTERS)),
        signal,
    )
        .prop_map(|(form, version, kind, size, (first, second), value, counter, signal)| {
            // The 64-byte form has no bits for what is newer.
            let kind = if form == Form::Bytes64 { kind & 63 } else { kind };
            Wish { form, version, kind, size, first, second, value, counter, signal }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn what_can_be_done_is_understood_and_what_cannot_is_refused(wish in wish(), peer in 1..3u32) {
        let terms = Terms {
            form: wish.form,
            target: Target { coll: COLL, contexts: 4, nranks: 3 },
            context: CONTEXT,
            counters: COUNTERS,
            signals: SIGNALS,
            signal_window: windows()[2] as usize,
            ended: Arc::default(),
        };
        let d = wish.descriptor();
        let found = meaning(&d, &terms, peer);
        if let Err(fault) = found {
            let sentence = fault.sentence(&d, 5);
            prop_assert!(sentence.contains("entry 5") && sentence.len() < 600, "{}", sentence);
        }
        prop_assert_eq!(found.ok(), wish.expected(peer.into()), "{:?}", d);
    }
}
