//! Where the queues of a set lie in its memory.

use super::completion_queue::QueuePlace;
use crate::error::{Error, Result};

/// Bytes of a slot, of a completion entry.
const ENTRY_BYTES: u64 = 64;
/// Where rings begin: what the device takes for a page at least, and the pages in which it is given the memory. With
/// larger ones a ring could not begin there.
pub const RING_BORDER: u64 = 4096;
/// Where doorbell records begin, so that kernels which ring different queues write different cache lines of the GPU.
const RECORD_BORDER: u64 = 128;
/// The last byte of a completion entry that nobody wrote: opcode 15 (invalid), owner bit 1.
const UNWRITTEN: u8 = 0xf1;
/// Slots of a responder's send queue, as a power of two: a ring takes a page whatever its size.
const LOG_RESPONDER_SLOTS: u32 = 6;

/// The memory of a set: rings of queues with their completion queues, then those of responders, then records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePlan {
    /// Entries of each ring, as a power of two.
    log_entries: u32,
    /// Queue pairs that kernels use.
    queues: u64,
    responders: u64,
}

impl QueuePlan {
    /// For so many queue pairs that kernels use, with as many slots each, and so many responders.
    pub fn new(queues: usize, responders: usize, log_entries: u32) -> Result<Self> {
        let plan = Self { log_entries, queues: queues as u64, responders: responders as u64 };
        // Far below what an address can be, so that nothing here overflows.
        if plan.queues.saturating_add(plan.responders) >= 1 << 24 {
            return Err(Error::argument(format!("{queues} queue pairs in a set; a device has 2²⁴ numbers")));
        }
        Ok(plan)
    }

    /// Those that kernels use.
    pub fn queues(&self) -> usize {
        self.queues as usize
    }

    /// All of them.
    pub fn queue_pairs(&self) -> u64 {
        self.queues + self.responders
    }

    fn ring(&self) -> u64 {
        (ENTRY_BYTES << self.log_entries).next_multiple_of(RING_BORDER)
    }

    fn responder_ring(&self) -> u64 {
        (ENTRY_BYTES << LOG_RESPONDER_SLOTS).next_multiple_of(RING_BORDER)
    }

    fn records(&self) -> u64 {
        2 * self.queues * self.ring() + self.responders * self.responder_ring()
    }

    /// Bytes of device code's memory.
    pub fn bytes(&self) -> u64 {
        (self.records() + (self.queues + self.responders) * RECORD_BORDER).next_multiple_of(RING_BORDER)
    }

    /// Bytes of host memory: the completion queues' records, and those of send queues that this process rings.
    pub fn host_bytes(&self) -> u64 {
        (self.queues * RECORD_BORDER).next_multiple_of(RING_BORDER)
    }

    /// The send queue of queue pair `i`.
    pub fn send_queue(&self, i: usize) -> QueuePlace {
        let i = i as u64;
        let (ring, record) = (2 * i * self.ring(), self.records() + i * RECORD_BORDER);
        QueuePlace { ring, record, log_entries: self.log_entries }
    }

    /// The same, with its doorbell record in host memory: behind that of its completion queue.
    pub fn send_queue_of_host(&self, i: usize) -> QueuePlace {
        QueuePlace { record: i as u64 * RECORD_BORDER + RECORD_BORDER / 2, ..self.send_queue(i) }
    }

    /// Its completion queue: as many entries.
    pub fn completion_queue(&self, i: usize) -> QueuePlace {
        let ring = (2 * i as u64 + 1) * self.ring();
        QueuePlace { ring, record: i as u64 * RECORD_BORDER, log_entries: self.log_entries }
    }

    /// The send queue of responder `i`.
    pub fn responder(&self, i: usize) -> QueuePlace {
        let i = i as u64;
        QueuePlace {
            ring: 2 * self.queues * self.ring() + i * self.responder_ring(),
            record: self.records() + (self.queues + i) * RECORD_BORDER,
            log_entries: LOG_RESPONDER_SLOTS,
        }
    }

    /// Writes what is in device code's memory at first into a piece of it, which is zeroed; where both begin are
    /// multiples of an entry.
    pub fn write(&self, begin: usize, piece: &mut [u8]) {
        let end = begin + piece.len();
        let of_pair = 2 * self.ring() as usize;
        let (first, behind) = (begin / of_pair, end.div_ceil(of_pair).min(self.queues as usize));
        for place in (first..behind).map(|i| self.completion_queue(i)) {
            let ring = place.ring as usize;
            let (from, to) = (ring.max(begin), (ring + ((ENTRY_BYTES as usize) << place.log_entries)).min(end));
            if from < to {
                let entries = piece[from - begin..to - begin].chunks_exact_mut(ENTRY_BYTES as usize);
                entries.for_each(|entry| entry[63] = UNWRITTEN);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_everything_is_inside() {
        for (queues, responders, log) in [(1, 1, 0), (3, 1, 7), (16, 4, 5), (5, 5, 6), (2, 0, 10)] {
            let plan = QueuePlan::new(queues, responders, log).unwrap();
            let mut taken: Vec<(u64, u64)> = Vec::new();
            let mut take = |place: QueuePlace| {
                assert!(place.ring % 4096 == 0 && place.record % 128 == 0);
                taken.push((place.ring, place.ring + (64 << place.log_entries)));
                place.record
            };
            let mut records: Vec<u64> = (0..queues).map(|i| take(plan.send_queue(i))).collect();
            records.extend((0..responders).map(|i| take(plan.responder(i))));
            let mut hosts: Vec<u64> = (0..queues).map(|i| take(plan.completion_queue(i))).collect();
            hosts.extend((0..queues).map(|i| plan.send_queue_of_host(i).record));
            hosts.sort_unstable();
            taken.extend(records.iter().map(|&at| (at, at + 8)));
            taken.sort_unstable();
            assert!(taken.windows(2).all(|w| w[0].1 <= w[1].0), "{plan:?}: {taken:?}");
            assert!(taken.last().unwrap().1 <= plan.bytes() && plan.bytes() % 4096 == 0);
            assert!(hosts.windows(2).all(|w| w[0] + 64 == w[1]) && hosts.last().unwrap() + 8 <= plan.host_bytes());
        }
    }

    #[test]
    fn completion_entries_are_unwritten_and_all_else_is_zero() {
        let plan = QueuePlan::new(2, 1, 1).unwrap();
        let written = |pieces: usize| {
            let mut contents = vec![0; plan.bytes() as usize];
            contents.chunks_mut(pieces).enumerate().for_each(|(i, piece)| plan.write(i * pieces, piece));
            contents.into_iter().enumerate().filter(|(_, b)| *b != 0).collect::<Vec<_>>()
        };
        for pieces in [64, 128, 4096, 4096 + 64, 3 * 4096, 1 << 20] {
            let expected = [4096 + 63, 4096 + 127, 3 * 4096 + 63, 3 * 4096 + 127].map(|i| (i, 0xf1));
            assert_eq!(written(pieces), expected, "pieces of {pieces} bytes");
        }
    }

    #[test]
    fn more_than_a_device_can_number_is_refused() {
        assert!(QueuePlan::new(1 << 24, 0, 7).is_err() && QueuePlan::new(usize::MAX, 1, 7).is_err());
    }
}
