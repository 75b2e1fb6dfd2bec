//! The request pointer NCCL holds: which operation of which (context, peer), in 64 bits, with nothing to allocate or
//! free behind it.

use super::seq::Seq;
use std::ffi::c_void;

/// Sets of contexts a communicator can have numbers for; set 0 does not exist. In communicators of more than 2048 ranks
/// requests have room for fewer: [`RequestForm::sets`].
pub const MAX_SETS: usize = 1024;
/// Contexts a set can have.
pub const MAX_CONTEXTS: u32 = 1 << CONTEXT_BITS;
/// Ranks a communicator can have.
pub const MAX_RANKS: u32 = 1 << 16;

const CONTEXT_BITS: u32 = 10;
/// Bits of a request, beside the operation's number and the mark, for set, context and peer.
const NAME_BITS: u32 = 31;
/// Set in every request of this form, so that none is NULL.
const MARK: u64 = 1 << 63;

/// A request, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Set of contexts within the communicator, from 1 on.
    pub set: u32,
    /// Context within the set.
    pub context: u32,
    /// The rank the operation went to.
    pub peer: u32,
    /// Which operation.
    pub seq: Seq,
}

/// How the requests of a communicator are pointers: the operation's number in the lower half; from bit 32 on as many
/// bits for the peer as there are ranks, 10 for the context, and the set in what is left up to bit 62.
#[derive(Clone, Copy, Debug)]
pub struct RequestForm {
    peer_bits: u32,
}

impl RequestForm {
    /// Of a communicator of so many ranks, at most [`MAX_RANKS`].
    #[inline(always)]
    pub fn of(nranks: u32) -> Self {
        Self { peer_bits: u32::BITS - nranks.saturating_sub(1).leading_zeros() }
    }

    /// Numbers of sets, 0 among them.
    pub fn sets(self) -> usize {
        MAX_SETS.min(1 << (NAME_BITS - CONTEXT_BITS - self.peer_bits))
    }

    /// The pointer for NCCL.
    #[inline(always)]
    pub fn encode(self, request: Request) -> *mut c_void {
        let name = (u64::from(request.set) << CONTEXT_BITS | u64::from(request.context)) << self.peer_bits;
        (MARK | (name | u64::from(request.peer)) << 32 | u64::from(request.seq.0)) as *mut c_void
    }

    /// The fields of whatever came back. Any value decodes; whether they name something is for the caller to check.
    #[inline(always)]
    pub fn decode(self, request: *mut c_void) -> Request {
        let bits = request as u64;
        let name = (bits & !MARK) >> 32;
        Request {
            set: (name >> (CONTEXT_BITS + self.peer_bits)) as u32,
            context: (name >> self.peer_bits) as u32 & (MAX_CONTEXTS - 1),
            peer: name as u32 & ((1 << self.peer_bits) - 1),
            seq: Seq(bits as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(nranks in 1..=MAX_RANKS, set: u32, context in 0..MAX_CONTEXTS, peer: u32, seq: u32) {
            let form = RequestForm::of(nranks);
            let set = 1 + set % (form.sets() as u32 - 1);
            let request = Request { set, context, peer: peer % nranks, seq: Seq(seq) };
            prop_assert!(form.encode(request) as u64 & MARK != 0);
            prop_assert_eq!(form.decode(form.encode(request)), request);
        }
    }

    #[test]
    fn the_more_ranks_the_fewer_sets() {
        let sets = [1, 2, 64, 2048, 2049, MAX_RANKS].map(|nranks| RequestForm::of(nranks).sets());
        assert_eq!(sets, [1024, 1024, 1024, 1024, 512, 32]);
    }
}
