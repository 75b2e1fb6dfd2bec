//! How device code posts send entries.

use super::queue::{Entry, Queue};
use super::sends::{index_bits, stores};
use super::*;

/// An entry that somebody is writing.
struct Writing {
    place: usize,
    number: usize,
    /// Offset, bytes and value of each store that is left.
    stores: Vec<(u64, u64, u64)>,
    /// Its bytes are where they are copied from.
    is_brought: bool,
}

impl Bench {
    /// Writes send entries of several queues while the GPU goes on, each by itself: its words in any order, then a
    /// fence of the GPU and the word of its slot, or the doorbell. Some of these words are left for later, and that of
    /// entry number `held`. Fewer than `turns` turns of the GPU are behind each store.
    pub fn send(&mut self, entries: Vec<(usize, Entry)>, held: Option<usize>, turns: u64) {
        let mut all: Vec<Writing> = entries.into_iter().map(|(place, entry)| self.begin(place, entry)).collect();
        let held = held.map(|i| (all[i].place, all[i].number));
        while !all.is_empty() {
            let one = self.below(all.len() as u64) as usize;
            match self.next_store(&mut all[one].stores) {
                Some((offset, bytes, value)) => {
                    let at = self.queue(all[one].place).slot_at(all[one].number);
                    self.gpu.memory.write(at + offset, bytes, value);
                    // What is copied comes before the entry, or between it and its word.
                    if !all[one].is_brought && self.below(8) == 0 {
                        all[one].is_brought = true;
                        self.bring_for(all[one].place, all[one].number);
                    }
                }
                None => {
                    let w = all.swap_remove(one);
                    if !w.is_brought {
                        self.bring_for(w.place, w.number);
                    }
                    let every = self.late_every;
                    let is_late = every > 0 && self.below(every) == 0;
                    if is_late || held == Some((w.place, w.number)) {
                        self.late.push((w.place, w.number));
                    } else {
                        self.ring(w.place, w.number);
                    }
                }
            }
            let some = self.below(turns);
            self.run(some);
        }
    }

    /// The next entry of a queue is to be written.
    fn begin(&mut self, place: usize, mut entry: Entry) -> Writing {
        assert!(self.room(place) > 0);
        let q = self.queues[place].as_mut().expect("a queue");
        let number = q.entries.len();
        entry.words[0] ^= index_bits(q.index(number));
        q.entries.push(entry);
        // The slot was set to all ones before its count said so.
        for at in (q.slot_at(number)..).step_by(8).take(8) {
            assert_eq!(self.gpu.memory.read(at, 8), u64::MAX, "a word of a slot that may be used, {place}");
        }
        Writing { place, number, stores: stores(&entry.words), is_brought: false }
    }

    fn next_store(&mut self, stores: &mut Vec<(u64, u64, u64)>) -> Option<(u64, u64, u64)> {
        if stores.is_empty() {
            return None;
        }
        let one = self.below(stores.len() as u64) as usize;
        Some(stores.swap_remove(one))
    }

    fn bring_for(&mut self, place: usize, number: usize) {
        let entry = self.queue(place).entries[number];
        self.bring(&entry);
    }

    /// The word of an entry's slot, or the doorbell for it and all before it, once these are ready: what was stored
    /// before is visible on this GPU.
    pub fn ring(&mut self, place: usize, number: usize) {
        let q: &mut Queue = self.queues[place].as_mut().expect("a queue");
        if !q.has_bell() {
            q.entries[number].is_rung = true;
            return self.gpu.memory.post(q.ring_at(number), 8, q.index(number) + 1);
        }
        q.entries[number].is_ready = true;
        let ready = q.entries.iter().take_while(|e| e.is_ready).count();
        if ready > number {
            q.entries[..ready].iter_mut().for_each(|e| e.is_rung = true);
            self.gpu.memory.post(q.rings_at(), 8, q.bell(q.index(ready)));
        }
    }

    /// One of those that are late.
    pub fn ring_late(&mut self) {
        let one = self.below(self.late.len() as u64) as usize;
        let (place, number) = self.late.swap_remove(one);
        self.ring(place, number);
    }
}
