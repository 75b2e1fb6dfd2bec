//! Copies that continue one another, as one.

use super::op::Between;
use oxygin_ffi::cuda::Copies;

/// How far back a copy looks for one to continue: some contexts take turns.
const LOOK_BACK: usize = 16;

/// Copies that neighbours may join.
#[derive(Default)]
pub struct Coalesced {
    pub copies: Copies,
    /// What each copy is between; `None`: nothing may continue it.
    windows: Vec<Option<Between>>,
}

impl Coalesced {
    /// Adds a copy that nothing may continue but what is between the same windows.
    pub fn push(&mut self, to: u64, from: u64, bytes: usize, windows: Option<Between>) {
        self.copies.push(to, from, bytes);
        self.windows.push(windows);
    }

    /// Adds a copy; or more of an earlier one between the same windows that ends where this one begins. Neither
    /// window's end lies inside, so that one copy never spans two allocations that two would not.
    pub fn join(&mut self, to: u64, from: u64, bytes: usize, windows: Option<Between>) {
        if windows.is_some() {
            for i in (0..self.copies.len()).rev().take(LOOK_BACK) {
                if self.windows[i] == windows && self.copies.join(i, to, from, bytes) {
                    return;
                }
            }
        }
        self.push(to, from, bytes, windows);
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.copies.clear();
        self.windows.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::op::{CallerWindow, Op, Owner, TransferEnd};
    use super::*;
    use crate::fabric::soft::lane::Lane;
    use crate::memory::key::Key;
    use crate::rma::op::{self, Get, Put};
    use crate::rma::seq::Seq;
    use std::sync::atomic::AtomicUsize;
    use std::sync::Arc;

    fn owner(lane: &Arc<Lane>) -> Owner {
        Owner { lane: lane.clone(), seq: Seq(1), backlog: Arc::new(AtomicUsize::new(1)) }
    }

    #[test]
    fn copies_join_within_their_windows() {
        let lane = Arc::new(Lane::new(0, 0, Arc::default()));
        let mut coalesced = Coalesced::default();
        // From a window of a caller, if known, to one of this rank.
        let mut put = |window, key, to, from| {
            let caller = TransferEnd::Caller { addr: 0, gpu: true };
            let op = Op {
                from: caller,
                to: TransferEnd::Window { key, addr: 0 },
                window,
                ..Op::copy(owner(&lane), caller, caller, 0)
            };
            coalesced.join(to, from, 8, op.between());
            coalesced.copies.len()
        };
        let of = |rank, key| Some(CallerWindow { rank, key });
        assert_eq!(put(of(0, 1), 2, 0x100, 0x200), 1);
        assert_eq!(put(of(0, 1), 2, 0x108, 0x208), 1);
        // Another window, at either end; only one end continues; an unknown window.
        assert_eq!(put(of(0, 1), 3, 0x110, 0x210), 2);
        assert_eq!(put(of(0, 4), 2, 0x110, 0x210), 3);
        assert_eq!(put(of(0, 1), 2, 0x110, 0x218), 4);
        assert_eq!(put(None, 2, 0x110, 0x210), 5);
        // The same number is another window at another rank.
        assert_eq!(put(of(5, 1), 2, 0x110, 0x210), 6);
        assert_eq!(put(of(0, 1), 2, 0x110, 0x210), 6);
    }

    /// Ranks of one process mostly number their windows alike, and whose is whose depends on the direction.
    #[test]
    fn copies_of_two_posters_and_directions_stay_apart() {
        let lane = Arc::new(Lane::new(0, 0, Arc::default()));
        let (one, two) = (Key::gpu(1, false).0, Key::gpu(2, false).0);
        let put =
            |local, remote| op::Op::Put(Put { local, lkey: one, remote, rkey: two, len: 8, signal: None, more: false });
        let get = |local, remote| op::Op::Get(Get { local, lkey: two, remote, rkey: one, len: 8, more: false });
        let mut coalesced = Coalesced::default();
        let mut add = |rank, work: op::Op| {
            let op = Op::new(owner(&lane), rank, None, &work, 0);
            coalesced.join(op.to.addr(), op.from.addr(), 8, op.between());
            coalesced.copies.len()
        };
        assert_eq!(add(0, put(0x200, 0x100)), 1);
        assert_eq!(add(1, put(0x208, 0x108)), 2);
        // From this rank's window 1 to the caller's window 2, where puts go from the caller's 1 to this rank's 2.
        assert_eq!(add(0, get(0x108, 0x208)), 3);
        assert_eq!(add(0, put(0x208, 0x108)), 3);
    }
}
