//! Payloads of operations on their way: a registered area of the context, with places for each lane. What the device
//! takes inline leaves its place when it is posted, other payloads when their operation is complete.

use super::regions::OwnRegion;
use crate::error::Result;
use crate::rma::op::{Payload, VALUE_MAX};
use oxygin_ffi::verbs::Pd;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Payloads of one lane on their way at most: as many operations as one doorbell rings.
pub const PLACES: usize = 32;

/// Bytes that are asked of queue pairs to be taken inside work requests. With an RDMA write's own segments they fill
/// 64 bytes, a basic block of mlx5's send queues, so that those take no more memory than without. Devices may give
/// more.
pub const INLINE: u32 = 28;

/// Words of a place.
const WORDS: usize = VALUE_MAX / 8;

/// The area. Made at the context's first payload, or atomic operation that has no work request of its own: most
/// programs have neither, and registered memory is pinned.
pub struct Bounce(OwnRegion);

impl Bounce {
    /// Places for so many lanes.
    pub fn new(pd: &Arc<Pd>, lanes: usize) -> Result<Self> {
        OwnRegion::new(pd, lanes * PLACES * VALUE_MAX).map(Self)
    }

    /// Copies a payload to a place of a lane; returns its address and key.
    pub fn keep(&self, lane: u32, place: usize, payload: &Payload) -> Option<(u64, u32)> {
        let words = self.words(lane, place)?;
        for (bytes, to) in payload.bytes().chunks(8).zip(words) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            to.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        Some((words.as_ptr() as u64, self.0.keys().0))
    }

    /// The address of a place of a lane, for a device to write to, and its key.
    pub fn slot(&self, lane: u32, place: usize) -> Option<(u64, u32)> {
        Some((self.words(lane, place)?.as_ptr() as u64, self.0.keys().0))
    }

    fn words(&self, lane: u32, place: usize) -> Option<&[AtomicU64]> {
        let first = (lane as usize * PLACES + place) * WORDS;
        self.0.words().get(first..first + WORDS)
    }
}

/// A lane's places. They are taken, and become free, in turn.
#[derive(Default)]
pub struct Values {
    /// The numbers of the operations that have places.
    numbers: VecDeque<u32>,
    /// The next place.
    next: usize,
}

impl Values {
    /// A free place, with all up to operation `gone` out of theirs; `issued` is the newest one. Numbers wrap: one may
    /// have been out of its place for as long as that takes.
    pub fn place(&mut self, gone: u32, issued: u32) -> Option<usize> {
        let is_in = |number: u32| number.wrapping_sub(gone).wrapping_sub(1) < issued.wrapping_sub(gone);
        while self.numbers.front().is_some_and(|&number| !is_in(number)) {
            self.numbers.pop_front();
        }
        (self.numbers.len() < PLACES).then_some(self.next)
    }

    /// That place is operation `number`'s.
    pub fn take(&mut self, number: u32) {
        self.numbers.push_back(number);
        self.next = (self.next + 1) % PLACES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_free_again_in_their_order() {
        let mut values = Values::default();
        let start = u32::MAX - 3;
        for i in 0..PLACES {
            assert_eq!(values.place(start, start.wrapping_add(i as u32)), Some(i));
            values.take(start.wrapping_add(1 + i as u32));
        }
        let issued = start.wrapping_add(PLACES as u32);
        assert_eq!(values.place(start, issued), None);
        // Numbers wrap.
        assert_eq!(values.place(start.wrapping_add(2), issued), Some(0));
        let issued = issued.wrapping_add(1);
        values.take(issued);
        assert_eq!(values.place(start.wrapping_add(2), issued), Some(1));
        // All are out of theirs, and none was asked for until half of the numbers had passed.
        let later = issued.wrapping_add(1 << 31).wrapping_add(5);
        assert_eq!(values.place(later, later), Some(1));
        assert!(values.numbers.is_empty());
    }
}
