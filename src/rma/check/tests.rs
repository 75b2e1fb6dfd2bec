//! Atomic operations: what is taken, and that what is not has a reason.

use super::super::args::Place;
use super::super::atomic::{Atomicity, Change};
use super::super::refusal::{self, End, Refusal, Target};
use super::*;
use crate::memory::window::{Registration, WindowFacts};
use std::sync::Arc;

const COLL: u64 = 77;
const ALL: Atomics = Atomics { host: Atomicity::Processors, gpu: Atomicity::Fabric, by_words: false };
const TARGET: Target = Target { coll: COLL, contexts: 2, nranks: 2 };

/// A window of 64 bytes here, at 0x1000, and of 40 bytes at rank 1, at 0x2004.
fn window(coll: u64) -> *mut c_void {
    let remote = |base, len| Remote { base, len, rkey: 9 };
    let registration = Registration { lkey: 5, rkey: 9, guard: Box::new(()) };
    let remote = [remote(0x1000, 64), remote(0x2004, 40)].into();
    let window = Window::of(coll, WindowFacts { id: 1, base: 0x1000, len: 64, remote, registration });
    handles::insert(Arc::new(window)).unwrap()
}

fn args(window: *mut c_void) -> AtomicArgs {
    let (remote, fetched) = (Place::new(4, window), Some(Place::new(16, window)));
    AtomicArgs { context: 0, change: Change::add(3), width: 8, remote, fetched, rank: 1, more: false }
}

#[test]
fn what_is_taken_has_addresses_and_keys() {
    let window = window(COLL);
    let a = args(window);
    // SAFETY: a live handle.
    let taken = unsafe { atomic(&Live(COLL), &ALL, &a) };
    let fetched = Some(Fetched { local: 0x1010, lkey: 5 });
    let op = Atomic { change: a.change, width: Width::Eight, remote: 0x2008, rkey: 9, fetched, more: false };
    assert_eq!(taken, Some(op));
    let a = AtomicArgs { width: 4, remote: Place::new(32, window), fetched: None, ..a };
    // SAFETY: as above.
    let taken = unsafe { atomic(&Live(COLL), &ALL, &a) }.unwrap();
    assert_eq!((taken.remote, taken.width, taken.fetched), (0x2024, Width::Four, None));
    // The window begins, and ends, within a word of 8 bytes.
    let by_words = Atomics { by_words: true, ..ALL };
    for (offset, is_whole) in [(0, false), (4, true), (8, true), (32, true), (36, false)] {
        let a = AtomicArgs { remote: Place::new(offset, window), ..a };
        // SAFETY: as above.
        let (taken, refused) = unsafe { (atomic(&Live(COLL), &by_words, &a), refusal::atomic(&TARGET, &by_words, &a)) };
        let why = if is_whole { Refusal::Unexplained } else { Refusal::PartialWord { offset } };
        assert_eq!((taken.is_some(), refused), (is_whole, why), "{offset}");
    }
    assert!(handles::remove::<Window>(window).is_some());
}

#[test]
fn what_is_not_taken_has_a_reason() {
    let (window, foreign) = (window(COLL), window(COLL + 1));
    let good = args(window);
    let swap = Change::CompareSwap { compare: 0, compare_mask: 1 << 32, swap: 0, swap_mask: 0 };
    let range = |name, offset, size, end, len| Refusal::OutOfRange { name, offset, size, end, len };
    let cases = [
        (AtomicArgs { width: 2, ..good }, Refusal::NoAtomicWidth(2)),
        (AtomicArgs { width: 16, ..good }, Refusal::NoAtomicWidth(16)),
        (AtomicArgs { width: 4, change: swap, ..good }, Refusal::WideOperand { width: 4 }),
        (
            AtomicArgs { remote: Place::new(8, window), ..good },
            Refusal::UnalignedAtomic { name: "remoteOff", offset: 8, width: 8 },
        ),
        (
            AtomicArgs { width: 4, remote: Place::new(6, window), ..good },
            Refusal::UnalignedAtomic { name: "remoteOff", offset: 6, width: 4 },
        ),
        (
            AtomicArgs { fetched: Some(Place::new(20, window)), ..good },
            Refusal::UnalignedAtomic { name: "localOff", offset: 20, width: 8 },
        ),
        (AtomicArgs { remote: Place::new(36, window), ..good }, range("remoteOff", 36, 8, End::Peer(1), 40)),
        (AtomicArgs { remote: Place::new(u64::MAX - 3, window), ..good }, {
            range("remoteOff", u64::MAX - 3, 8, End::Peer(1), 40)
        }),
        (AtomicArgs { fetched: Some(Place::new(64, window)), ..good }, range("localOff", 64, 8, End::Local, 64)),
        (
            AtomicArgs { remote: Place::new(4, std::ptr::null_mut()), ..good },
            Refusal::NullWindow { name: "remoteMhandle" },
        ),
        (AtomicArgs { fetched: Some(Place::new(0, foreign)), ..good }, {
            Refusal::ForeignWindow { name: "localMhandle", handle: foreign as usize }
        }),
    ];
    for (args, why) in cases {
        // SAFETY: live handles, or none.
        let (taken, refused) = unsafe { (atomic(&Live(COLL), &ALL, &args), refusal::atomic(&TARGET, &ALL, &args)) };
        assert_eq!((taken, refused), (None, why));
        assert!(!crate::error::Error::from(why).message().is_empty());
    }
    // SAFETY: as above.
    let (taken, refused) =
        unsafe { (atomic(&Live(COLL), &Atomics::NONE, &good), refusal::atomic(&TARGET, &Atomics::NONE, &good)) };
    assert_eq!((taken, refused), (None, Refusal::NoAtomics));
    assert_eq!(refused.kind(), crate::error::Kind::Usage);
    for handle in [window, foreign] {
        assert!(handles::remove::<Window>(handle).is_some());
    }
}
