//! Where the queues of a set lie, so that peers which a stride leaves out take next to no memory.
//!
//! Device code finds a context's queue to a peer at `queues + peer * queueSize`: its queues are as far apart as the
//! ranks of its peers. Where only every eighth rank is a peer, seven queues fit between two of them, and these are the
//! queues of the next seven contexts, each set off by one queue. So whole groups of as many contexts as the stride
//! leave nothing free. What is left of a last group that is not whole is between its queues: less than one context
//! takes without a stride, and no other arrangement in one piece is shorter.
//!
//! A descriptor for a peer that is left out would arrive in another context's queue, so device code must never get as
//! far as writing it: [`NO_CREDIT`].

/// The consumer index of a peer that is left out. Device code waits for a credit before it writes: with this one it
/// waits for ever, as it does for any peer that nobody serves. A flush, which device code does over all ranks, finds
/// everything complete: nothing was posted, and the index is not behind that in the half of the numbers that counts.
pub const NO_CREDIT: u32 = u32::MAX >> 1;

/// The arrangement, in queues. One number stands for one queue's bytes.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    contexts: usize,
    /// Peers that are reached.
    peers: usize,
    stride: usize,
    /// The first of them.
    first: usize,
}

impl Packing {
    /// Of so many contexts of `rank` among `nranks`, where peers differ from it by multiples of `stride`; 0 and 1: all.
    pub fn new(contexts: u32, rank: u32, nranks: u32, stride: u32) -> Self {
        let (rank, nranks) = (rank as usize, nranks as usize);
        let stride = (stride as usize).clamp(1, nranks.max(1));
        let first = rank % stride;
        Self { contexts: contexts as usize, peers: (nranks - first).div_ceil(stride), stride, first }
    }

    /// Queues that there must be room for.
    pub fn queues(&self) -> usize {
        let (groups, rest) = (self.contexts / self.stride, self.contexts % self.stride);
        let last = if rest > 0 { (self.peers - 1) * self.stride + rest } else { 0 };
        groups * self.peers * self.stride + last
    }

    /// The number of a context's queue to a peer that is reached.
    pub fn queue(&self, context: usize, peer: u32) -> usize {
        self.begin(context) + peer as usize - self.first
    }

    /// How many queues in front of queue 0 a context's queue to rank 0 is, or would be; less than 0: behind it.
    pub fn before(&self, context: usize) -> i64 {
        self.first as i64 - self.begin(context) as i64
    }

    /// The number of a context's queue to the first peer.
    fn begin(&self, context: usize) -> usize {
        context / self.stride * self.peers * self.stride + context % self.stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rma::reach::is_reached;
    use proptest::prelude::*;

    proptest! {
        /// Each queue has a place of its own inside the room, and device code's way of finding it leads there.
        #[test]
        fn every_queue_is_where_device_code_looks_and_nobody_elses(
            contexts in 1..40u32, nranks in 1..40u32, rank in any::<prop::sample::Index>(), stride in 0..45u32,
        ) {
            let rank = rank.index(nranks as usize) as u32;
            let packing = Packing::new(contexts, rank, nranks, stride);
            let mut taken = vec![false; packing.queues()];
            for context in 0..contexts as usize {
                for peer in (0..nranks).filter(|&peer| is_reached(rank, peer, stride)) {
                    let queue = packing.queue(context, peer);
                    prop_assert_eq!(i64::from(peer) - packing.before(context), queue as i64);
                    prop_assert!(!std::mem::replace(&mut taken[queue], true), "{} {}", context, peer);
                }
            }
            let reached = (0..nranks).filter(|&peer| is_reached(rank, peer, stride)).count();
            let free = taken.iter().filter(|&&taken| !taken).count();
            let whole = contexts % stride.clamp(1, nranks) == 0;
            prop_assert!(if whole { free == 0 } else { free < nranks as usize }, "{} free", free);
            prop_assert_eq!(taken.len() - free, reached * contexts as usize);
        }
    }

    /// Device code's own comparisons, in NCCL's terms: room for descriptor `index`, and everything complete.
    #[test]
    fn a_peer_without_credit_is_never_written_and_always_flushed() {
        for index in [0, 1, 1000, 1 << 20] {
            assert!(u32::wrapping_sub(index, NO_CREDIT) >= 1 << 15, "no room");
            assert!(NO_CREDIT.wrapping_sub(index) <= u32::MAX >> 1, "nothing to wait for");
        }
    }
}
