//! Windows of this rank and its peer, for what device code writes.

use oxygin::memory::window::{Registration, Remote, Window, WindowFacts};
use oxygin::sys::handles;
use std::sync::Arc;

/// Bytes of each, here and at the peer.
pub const LEN: u64 = 1000;
/// Where the first one is here.
pub const HERE: u64 = 1 << 20;
/// The distance between ranks, whose own are as far apart as here.
pub const THERE: u64 = 1 << 24;

/// The handle of window `i` of this communicator, which stays.
pub fn window(coll: u64, i: u64) -> u64 {
    let remote = |rank: u64| Remote { base: THERE * (1 + rank) + 4096 * i, len: LEN, rkey: 10 + i as u32 };
    let registration = Registration { lkey: i as u32, rkey: i as u32, guard: Box::new(()) };
    let remote = [remote(0), remote(1)].into();
    let window = Window::of(coll, WindowFacts { id: i as u32, base: HERE + 4096 * i, len: LEN, remote, registration });
    handles::insert(Arc::new(window)).expect("a free handle") as u64
}
