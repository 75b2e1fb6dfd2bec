//! The request pointer NCCL holds: which operation of which (context, peer), in 64 bits, with nothing to allocate or
//! free behind it.

use super::seq::Seq;
use std::ffi::c_void;

/// Sets of contexts a communicator can have at a time; set 0 does not exist, so a request is never NULL.
pub const MAX_SETS: usize = 32;
/// Contexts a set can have.
pub const MAX_CONTEXTS: u32 = 1 << 10;
/// Ranks a communicator can have.
pub const MAX_RANKS: u32 = 1 << 16;

/// A request, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Set of contexts within the communicator, 1 to 31.
    pub set: u32,
    /// Context within the set.
    pub context: u32,
    /// The rank the operation went to.
    pub peer: u32,
    /// Which operation.
    pub seq: Seq,
}

impl Request {
    /// The pointer for NCCL: set in bits 58..62, context in 48..57, peer in 32..47, number in 0..31.
    #[inline(always)]
    pub fn encode(self) -> *mut c_void {
        (u64::from(self.set) << 58 | u64::from(self.context) << 48 | u64::from(self.peer) << 32 | u64::from(self.seq.0))
            as *mut c_void
    }

    /// The fields of whatever came back. Any value decodes; whether they name something is for the caller to check.
    #[inline(always)]
    pub fn decode(request: *mut c_void) -> Self {
        let bits = request as u64;
        Self {
            set: (bits >> 58) as u32 & (MAX_SETS as u32 - 1),
            context: (bits >> 48) as u32 & (MAX_CONTEXTS - 1),
            peer: (bits >> 32) as u32 & (MAX_RANKS - 1),
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
        fn round_trip(set in 1u32..32, context in 0..MAX_CONTEXTS, peer in 0..MAX_RANKS, seq: u32) {
            let request = Request { set, context, peer, seq: Seq(seq) };
            prop_assert!(!request.encode().is_null());
            prop_assert_eq!(Request::decode(request.encode()), request);
        }
    }
}
