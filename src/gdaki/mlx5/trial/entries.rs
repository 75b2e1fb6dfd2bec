//! The operations that are tried, as a device reads them: what NCCL's device code makes of a put with a signal and a
//! counter.

use super::board::LANDED_WORDS;
use crate::gdaki::entry::send::opcode;

/// What the operations name, with keys by which memory begins at address 0.
#[derive(Clone, Copy, Debug)]
pub struct TrialKeys {
    pub lkey: u32,
    pub rkey: u32,
}

/// Words that are put.
const PUT_WORDS: usize = 8;
/// Bytes from the beginning of the memory: of what is put; of where it goes, with the signal and the counter behind it;
/// and of where these two's old values go.
const SOURCE: u64 = 0;
pub const TARGET: u64 = 1024;
const FETCHED: u64 = 2048;
/// Bytes of the memory: a page.
pub const MEMORY_BYTES: usize = 4096;
const SIGNAL: usize = PUT_WORDS;
const COUNTER: usize = PUT_WORDS + 1;
/// What signal and counter hold, and what is added: the signal's sum has a carry in each of its halves.
const BEFORE: [u64; 2] = [0x00ff_ffff_ffff_fff0, 5];
const ADDED: [u64; 2] = [0x11, 1];

/// `fm_ce_se`: a completion entry is wanted.
const COMPLETES: u8 = 2 << 2;

/// An entry while it is written.
struct Entry([u8; 64]);

impl Entry {
    fn new(queue: u32, index: u16, opcode: u8, segments: u32) -> Self {
        let mut bytes = [0; 64];
        bytes[1..3].copy_from_slice(&index.to_be_bytes());
        bytes[3] = opcode;
        bytes[4..8].copy_from_slice(&(queue << 8 | segments).to_be_bytes());
        bytes[11] = COMPLETES;
        Self(bytes)
    }

    /// Four words, or two of eight bytes, of a segment.
    fn with(mut self, segment: usize, words: [u64; 2]) -> Self {
        for (i, word) in words.iter().enumerate() {
            self.0[16 * segment + 8 * i..][..8].copy_from_slice(&word.to_be_bytes());
        }
        self
    }

    fn words(&self) -> [u64; 8] {
        std::array::from_fn(|i| self.0[8 * i..8 * i + 8].iter().rev().fold(0, |word, b| word << 8 | u64::from(*b)))
    }
}

/// Two words in one.
fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl TrialKeys {
    /// The memory's contents before.
    pub fn memory() -> Vec<u8> {
        let mut memory = vec![0; MEMORY_BYTES];
        let mut write = |at: u64, word: u64| memory[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        (0..).zip(source()).for_each(|(i, word)| write(SOURCE + 8 * i, word));
        write(word_at(SIGNAL), BEFORE[0]);
        write(word_at(COUNTER), BEFORE[1]);
        memory
    }

    /// What is to be found at the target afterwards. `counts`: the companion's operation has come.
    pub fn landed(counts: bool) -> [u64; LANDED_WORDS] {
        let mut landed = [0; LANDED_WORDS];
        landed[..PUT_WORDS].copy_from_slice(&source());
        landed[SIGNAL] = BEFORE[0] + ADDED[0];
        landed[COUNTER] = BEFORE[1] + if counts { ADDED[1] } else { 0 };
        landed
    }

    /// For slots 0 and 1 of a queue pair: a put and its signal.
    pub fn put(&self, queue: u32) -> [u64; 16] {
        let bytes = 8 * PUT_WORDS as u32;
        let put = Entry::new(queue, 0, opcode::WRITE, 3).with(1, self.remote(TARGET));
        two(&put.with(2, [pair(bytes, self.lkey), SOURCE]), &self.add(queue, SIGNAL, ADDED[0], FETCHED))
    }

    /// For those of its companion: a counter goes up when the second one's completion entry is in `completions`.
    pub fn count(&self, queue: u32, completions: u32) -> [u64; 16] {
        let wait = Entry::new(queue, 0, opcode::WAIT, 2).with(1, [0, pair(1, completions)]);
        two(&wait, &self.add(queue, COUNTER, ADDED[1], FETCHED + 8))
    }

    /// In slot 1.
    fn add(&self, queue: u32, word: usize, value: u64, fetched: u64) -> Entry {
        // The second operand is that of compare and swap.
        let entry = Entry::new(queue, 1, opcode::FETCH_ADD, 4).with(1, self.remote(word_at(word)));
        entry.with(2, [value, value]).with(3, [pair(8, self.lkey), fetched])
    }

    fn remote(&self, at: u64) -> [u64; 2] {
        [at, pair(self.rkey, 0)]
    }
}

fn word_at(i: usize) -> u64 {
    TARGET + 8 * i as u64
}

fn two(first: &Entry, second: &Entry) -> [u64; 16] {
    let mut words = [0; 16];
    words[..8].copy_from_slice(&first.words());
    words[8..].copy_from_slice(&second.words());
    words
}

/// What is put: every byte is another one.
fn source() -> [u64; PUT_WORDS] {
    std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|b| (8 * i + b) as u8 + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gdaki::entry::send::{Request, View};

    fn bytes(words: [u64; 16]) -> [[u8; 64]; 2] {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        [bytes[..64].try_into().unwrap(), bytes[64..].try_into().unwrap()]
    }

    #[test]
    fn the_entries_are_a_put_its_signal_and_a_counter_in_one_page() {
        let keys = TrialKeys { lkey: 7, rkey: 9 };
        let [put, signal] = bytes(keys.put(0x0012_3456));
        let [wait, count] = bytes(keys.count(0x0012_3457, 0x33));
        for (entry, index, queue) in [(&put, 0, 0x56), (&signal, 1, 0x56), (&wait, 0, 0x57), (&count, 1, 0x57)] {
            let view = View(entry);
            assert_eq!((view.index(), view.queue()), (index, 0x0012_3400 + queue));
            assert!(view.is_signalled() && !view.is_fenced());
        }
        let Ok(Request::Write(to, from)) = View(&put).work() else { panic!("no put") };
        assert_eq!((to.address, to.key, from.first.address, from.first.key, from.first.len), (1024, 9, 0, 7, 64));
        assert!(from.second.is_none());
        let memory = TrialKeys::memory();
        let word = |at: u64| u64::from_le_bytes(memory[at as usize..at as usize + 8].try_into().unwrap());
        let [landed, not_counted] = [true, false].map(TrialKeys::landed);
        for (entry, at, to) in [(&signal, 1088, 2048), (&count, 1096, 2056)] {
            let Ok(Request::Add { remote, add, boundary: 0, fetched, .. }) = View(entry).work() else {
                panic!("no addition")
            };
            assert_eq!((remote.address, remote.key), (at, 9));
            assert_eq!((fetched.address, fetched.key, fetched.len), (to, 7, 8));
            assert_eq!(landed[(at - 1024) as usize / 8], word(at) + add);
        }
        assert!(matches!(View(&wait).work(), Ok(Request::Wait { queue: 0x33, index: 1 })));
        assert!((0..8).all(|i| landed[i as usize] == word(8 * i) && word(1024 + 8 * i) == 0));
        assert_eq!((&landed[..9], not_counted[9]), (&not_counted[..9], word(1096)));
    }
}
