//! What must be so at any time, and what once a launch has ended.

use super::queue::{pattern, Data, Queue, Signal};
use super::*;

impl Bench {
    /// What lies somewhere; `far`: as the host and other GPUs see it.
    fn seen(&self, far: bool, at: u64, bytes: u64) -> &[u8] {
        match far {
            true => self.gpu.memory.far_bytes(at, bytes),
            false => self.gpu.memory.bytes(at, bytes),
        }
    }

    /// Whether the bytes of an entry are there, or (`false`) none of them.
    fn check_bytes(&self, place: usize, i: usize, far: bool, there: bool) {
        let Some(data) = self.queue(place).entries[i].data else { return };
        let (Data::Copy { to, bytes, .. } | Data::Value { to, bytes, .. }) = data;
        for (n, &byte) in (0..).zip(self.seen(far, to, bytes)) {
            let wanted = match data {
                _ if !there => 0,
                Data::Copy { from, .. } => pattern(from + n),
                Data::Value { value, .. } => value.to_le_bytes()[n as usize],
            };
            assert_eq!(byte, wanted, "byte {n} of entry {i} of {place}, {data:?}");
        }
    }

    fn sum(&self, far: bool, signal: &Signal) -> u64 {
        u64::from_le_bytes(self.seen(far, signal.at, 8).try_into().expect("8 bytes"))
    }

    /// A signal that no other entry adds to is there, or not.
    fn check_signal(&self, place: usize, i: usize, far: bool, there: bool) {
        if let Some(signal) = self.queue(place).entries[i].signal.filter(|s| !s.is_shared) {
            let sum = self.sum(far, &signal);
            assert!(sum % signal.increment == 0, "what was added for entry {i} of {place}");
            assert_eq!(sum / signal.increment > signal.nth, there, "the signal of entry {i} of {place}");
        }
    }

    /// As who waits for it sees it.
    fn has_signalled(&self, place: usize, i: usize) -> bool {
        let q = self.queue(place);
        q.entries[i].signal.is_some_and(|s| !s.is_shared && self.sum(q.is_far, &s) / s.increment > s.nth)
    }

    /// Signals that are there have the bytes before them there, and the signals of other pairs of looks; what is final
    /// is done.
    pub fn check(&mut self) {
        for place in self.places() {
            let word = self.word(256 + 8 * place as u64);
            let q = self.queue(place);
            let (rung, far) = (q.rung(), q.is_far);
            let taken = self.taken(place);
            assert!(taken >= q.told && taken <= rung, "{place}: {taken} of {rung} entries are taken");
            let is_there = |i: &usize| self.has_signalled(place, *i);
            let signalled = (q.done..q.entries.len()).rev().find(is_there).map_or(0, |i| i + 1);
            assert!(signalled <= rung, "{place}: a signal of what is not there");
            // Whoever waits for the index alone tells others: bytes are there behind that, too.
            let seen = signalled.max(taken).max(q.arrived);
            // What is read comes to this GPU.
            let is_far = |i: usize| far && !q.is_read(&q.entries[i]);
            (q.arrived..seen).for_each(|i| self.check_bytes(place, i, is_far(i), true));
            let mut done = signalled.saturating_sub(self.together(place));
            let mut refused = q.refused;
            if self.is_let_go && word >> 32 != 0 {
                assert_eq!(word >> 32, 1);
                let at = (word as u32).wrapping_sub(q.first) as usize;
                let told = self.told_host(place);
                assert_eq!((told, taken, refused.unwrap_or(at)), (at, at, at), "{place}: refused there");
                assert!(at < rung, "{place}: refused what is not there");
                let entry = &q.entries[at];
                assert!(entry.data.is_none() && entry.signal.is_none(), "{place}: refused {entry:x?}");
                // The host takes over.
                (q.done..at).for_each(|i| self.check_done(place, i, true));
                (done, refused) = (at, Some(at));
            }
            let done = done.max(q.done);
            (q.done..done).for_each(|i| self.check_done(place, i, is_far(i)));
            let q = self.queues[place].as_mut().expect("a queue");
            (q.told, q.arrived, q.done, q.refused) = (taken, seen.max(done), done, refused);
        }
    }

    /// So many entries of a queue may be signalled together at most: those of two looks, where a look may be full and
    /// all queues of the warp have room for the next one ahead of it.
    fn together(&self, place: usize) -> usize {
        let (span, first) = (8 >> self.spread, place >> self.spread << self.spread);
        let of_warp = &self.queues[first..first + (1 << self.spread)];
        let is_wide = |q: &Option<Queue>| q.as_ref().is_some_and(|q| q.slots as usize >= 2 * span);
        if of_warp.iter().all(is_wide) {
            2 * span
        } else {
            span
        }
    }

    fn check_done(&self, place: usize, i: usize, far: bool) {
        self.check_bytes(place, i, far, true);
        self.check_signal(place, i, far, true);
    }

    /// Entries taken, as the consumer index says to the host.
    fn told_host(&self, place: usize) -> usize {
        let q = self.queue(place);
        q.taken(|at, bytes| self.gpu.memory.far_read(at, bytes))
    }

    /// The launch has said that it has ended: all positions are final, and of what comes behind them nothing is done.
    pub fn check_end(&mut self) {
        assert!(self.is_gone() && self.is_up());
        self.check();
        let before: Vec<usize> = self.places().into_iter().map(|p| self.taken(p)).collect();
        self.check_final();
        self.run_until(|b| !b.gpu.runs());
        self.check_final();
        assert_eq!(before, self.places().into_iter().map(|p| self.taken(p)).collect::<Vec<usize>>());
        assert_eq!(self.word(128), self.launches);
    }

    fn check_final(&mut self) {
        for (at, bytes) in self.other_boards() {
            let is_same = self.gpu.memory.far_bytes(at, bytes).chunks(8).all(|word| word == GARBAGE.to_le_bytes());
            assert!(is_same, "the board at {at:#x} is another block's");
        }
        for place in self.places() {
            let word = self.word(256 + 8 * place as u64);
            let (q, taken) = (self.queue(place), self.told_host(place));
            assert_eq!(taken, self.taken(place));
            if self.is_let_go {
                assert_eq!(word as u32, q.first.wrapping_add(taken as u32), "the position of {place}");
                assert_eq!(word >> 32, u64::from(q.refused.is_some()), "{place}: refused");
            }
            let posted = q.entries.len();
            (q.done..taken).for_each(|i| self.check_done(place, i, true));
            for i in taken..posted {
                self.check_bytes(place, i, true, false);
                self.check_signal(place, i, true, false);
            }
            // Slots that are not taken are as they were, all others empty, and what lies beside is.
            for i in taken..taken + q.slots as usize {
                for word in 0..8 << (q.stride - 6) {
                    let wanted = match word {
                        0..8 => q.entries.get(i).map_or(q.blank(), |e| e.words[word]),
                        _ => GARBAGE,
                    };
                    let there = self.gpu.memory.far_read(q.slot_at(i) + 8 * word as u64, 8);
                    assert_eq!(there, wanted, "word {word} of slot {i} of {place}");
                }
            }
            self.check_rings(q);
            let q = self.queues[place].as_mut().expect("a queue");
            (q.done, q.arrived) = (taken, taken);
        }
    }

    /// Words by which send entries are rung are as they were, and so is what lies beside; each completion entry is that
    /// of the newest entry of its slot.
    fn check_rings(&self, q: &Queue) {
        for slot in (0..RING_BYTES / 8).filter(|_| q.pair.is_some()) {
            let wanted = if slot < q.rings() { q.ring_word(slot) } else { GARBAGE };
            assert_eq!(self.gpu.memory.far_read(q.rings_at() + 8 * slot, 8), wanted, "the word of slot {slot}");
        }
        for word in (0..COMPLETION_BYTES / 8).filter(|_| q.has_bell()) {
            let wanted = match (word / 8, word % 8) {
                (slot, 7) if slot < q.slots.into() => q.completion_word(slot),
                _ => GARBAGE,
            };
            let there = self.gpu.memory.far_read(q.completions_at() + 8 * word, 8);
            assert_eq!(there, wanted, "word {word} of the completion queue");
        }
    }

    /// The launch is stopped, and all is as it has to be.
    pub fn finish(&mut self) {
        self.stop();
        self.run_until(Self::is_gone);
        self.check_end();
        self.check_all();
    }

    /// Everything that was taken is there once, and nothing beside.
    pub fn check_all(&mut self) {
        let mut bytes = vec![0; (END - TARGETS) as usize];
        let mut sums = std::collections::HashMap::<u64, u64>::new();
        for place in self.places() {
            let q = self.queue(place);
            for entry in &q.entries[..q.done] {
                match entry.data {
                    Some(Data::Copy { from, to, bytes: n }) => {
                        (0..n).for_each(|i| bytes[(to - TARGETS + i) as usize] = pattern(from + i));
                    }
                    Some(Data::Value { value, to, bytes: n }) => {
                        let to = (to - TARGETS) as usize;
                        bytes[to..to + n as usize].copy_from_slice(&value.to_le_bytes()[..n as usize]);
                    }
                    None => {}
                }
                if let Some(s) = entry.signal {
                    let sum = sums.entry(s.at).or_default();
                    *sum = sum.wrapping_add(s.increment);
                }
            }
        }
        for (&at, sum) in sums.iter().filter(|(at, _)| **at >= TARGETS) {
            let at = (at - TARGETS) as usize;
            bytes[at..at + 8].copy_from_slice(&sum.to_le_bytes());
        }
        assert!(self.gpu.memory.far_bytes(TARGETS, END - TARGETS) == bytes, "something lies beside, or is not there");
        for at in (SIGNALS..SOURCES).step_by(8) {
            assert_eq!(self.gpu.memory.far_read(at, 8), sums.get(&at).copied().unwrap_or(0), "the signal at {at:#x}");
        }
    }
}
