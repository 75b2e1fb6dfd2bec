//! The host, device code that posts, and the GPU that runs the kernel.

use super::queue::{pattern, Data, Entry, Queue, Slots};
use super::*;

pub struct Bench {
    pub gpu: Machine,
    /// Number of the last launch, and whether it was let go.
    pub launches: u64,
    pub is_let_go: bool,
    pub spread: u64,
    pub slots: Slots,
    /// By place of this launch.
    pub queues: Vec<Option<Queue>>,
    /// One send entry of so many is rung late, if any are: those that are written and not rung yet.
    pub late_every: u64,
    pub late: Vec<(usize, usize)>,
}

impl Bench {
    /// With queues at so many of the places that there are with this spread.
    pub fn new(ptx: &str, seed: u64, spread: u64, queues: u64) -> Self {
        Self::of(Slots::Descriptors, ptx, seed, spread, queues)
    }

    /// The same with queues of one kind or the other.
    pub fn of(slots: Slots, ptx: &str, seed: u64, spread: u64, queues: u64) -> Self {
        let mut random = Random(seed);
        // Half of them seldom find anything but by a calm look.
        assert!(ptx.contains(CALM));
        let ptx = if seed % 2 == 0 { ptx } else { &ptx.replace(CALM, CALM_AT_ONCE) };
        let mut gpu = Machine::new(Program::parse(ptx, 0), Memory::new(END), random.next());
        gpu.late = [0, 2_000][random.below(2) as usize];
        gpu.first_block = RUN_AS[seed as usize % 3];
        let places = 8 << spread;
        let mut all: Vec<Option<Queue>> = (0..places).map(|_| None).collect();
        for number in 0..queues.min(places) {
            let mut place = random.below(places) as usize;
            while all[place].is_some() {
                place = (place + 1) % all.len();
            }
            let q = Queue::new(number, &mut random);
            all[place] = Some(match slots {
                Slots::Descriptors => q,
                Slots::Sends | Slots::Bells => q.of_sends(slots == Slots::Bells, &mut random),
            });
        }
        let late_every = if slots == Slots::Descriptors { 0 } else { [0, 6][random.below(2) as usize] };
        let (launches, is_let_go, late) = (0, false, Vec::new());
        let mut bench = Self { gpu, launches, is_let_go, spread, slots, queues: all, late_every, late };
        bench.empty_queues();
        bench
    }

    /// All slots are empty, and what is no slot, or the other half of one of 128 bytes, is nobody's business.
    pub fn empty_queues(&mut self) {
        let boards = self.other_boards();
        for (at, bytes) in [(QUEUES, INDICES - QUEUES), (RINGS, SIGNALS - RINGS)].into_iter().chain(boards) {
            let garbage = self.gpu.memory.bytes_mut(at, bytes);
            garbage.chunks_mut(8).for_each(|word| word.copy_from_slice(&GARBAGE.to_le_bytes()));
        }
        for q in self.queues.iter().flatten() {
            for i in 0..q.slots as usize {
                self.gpu.memory.bytes_mut(q.slot_at(i), 64).fill(q.blank() as u8);
            }
            let index = &q.index(0).to_le_bytes()[..q.index_bytes() as usize];
            self.gpu.memory.bytes_mut(q.index_at(), q.index_bytes()).copy_from_slice(index);
            for slot in 0..q.rings() {
                let word = q.ring_word(slot).to_le_bytes();
                self.gpu.memory.bytes_mut(q.rings_at() + 8 * slot, 8).copy_from_slice(&word);
            }
            for slot in (0..q.slots.into()).filter(|_| q.has_bell()) {
                let word = q.completion_word(slot).to_le_bytes();
                self.gpu.memory.bytes_mut(q.completions_at() + 64 * slot + 56, 8).copy_from_slice(&word);
            }
        }
        self.gpu.memory.part();
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.gpu.random.below(n)
    }

    /// Of the block that runs.
    pub fn board(&self) -> u64 {
        BOARDS + BOARD_BYTES * self.gpu.first_block
    }

    /// Where those of the other blocks are, and how long.
    pub fn other_boards(&self) -> Vec<(u64, u64)> {
        let others = (0..BLOCKS).filter(|&block| block != self.gpu.first_block);
        others.map(|block| (BOARDS + BOARD_BYTES * block, BOARD_BYTES)).collect()
    }

    pub fn word(&self, at: u64) -> u64 {
        self.gpu.memory.far_read(self.board() + at, 8)
    }

    pub fn places(&self) -> Vec<usize> {
        (0..self.queues.len()).filter(|&p| self.queues[p].is_some()).collect()
    }

    /// A place with a queue.
    pub fn any_place(&mut self) -> usize {
        let places = self.places();
        places[self.below(places.len() as u64) as usize]
    }

    /// An entry of any kind for a queue.
    pub fn entry(&mut self, place: usize) -> Entry {
        self.queues[place].as_mut().expect("a queue").any_entry(&mut self.gpu.random)
    }

    pub fn queue(&self, place: usize) -> &Queue {
        self.queues[place].as_ref().expect("a queue")
    }

    /// Launches it; records come before go.
    pub fn launch(&mut self, idle: u64, life: u64) {
        self.launches += 1;
        self.is_let_go = false;
        self.gpu.launch(1, 256, &[BOARDS, self.launches, idle, life]);
    }

    /// Writes the records, then go.
    pub fn go(&mut self) {
        self.is_let_go = true;
        let board = self.board();
        self.gpu.memory.write(board + 16, 8, self.spread);
        self.gpu.memory.write(board + 24, 8, self.slots as u64);
        for place in 0..64 {
            let queue = self.queues.get(place).and_then(Option::as_ref);
            // A place with a refused entry has none, as its host has taken over.
            let words = match queue.filter(|q| q.refused.is_none()) {
                Some(q) => {
                    let next = u64::from(q.first.wrapping_add(q.done as u32));
                    self.gpu.memory.write(board + 256 + 8 * place as u64, 8, next);
                    q.record(q.done, &mut self.gpu.random)
                }
                None => std::array::from_fn(|i| if i == 0 { 0 } else { self.gpu.random.next() }),
            };
            for (i, word) in words.into_iter().enumerate() {
                self.gpu.memory.write(board + 1024 + 256 * place as u64 + 8 * i as u64, 8, word);
            }
            let some = self.below(3);
            self.gpu.run(some);
        }
        self.gpu.memory.release(board, 8, self.launches);
    }

    pub fn stop(&mut self) {
        self.gpu.memory.release(self.board() + 8, 8, self.launches);
    }

    pub fn is_up(&self) -> bool {
        self.word(64) == self.launches
    }

    pub fn is_gone(&self) -> bool {
        self.word(128) == self.launches
    }

    /// Where the kernel says how far a queue is, and whether it has refused what is there.
    pub fn position(&self, place: usize) -> (u32, bool) {
        let word = self.word(256 + 8 * place as u64);
        (word as u32, word >> 32 != 0)
    }

    /// Entries of a queue whose slots device code may use.
    pub fn room(&self, place: usize) -> usize {
        let q = self.queue(place);
        q.slots as usize - (q.entries.len() - self.taken(place))
    }

    /// Entries taken, as the consumer index says.
    pub fn taken(&self, place: usize) -> usize {
        let q = self.queue(place);
        q.taken(|at, bytes| self.gpu.memory.read(at, bytes))
    }

    /// Entries that are not taken yet, of one queue and of all.
    pub fn left_of(&self, place: usize) -> usize {
        self.queue(place).entries.len() - self.taken(place)
    }

    pub fn left(&self) -> usize {
        self.places().into_iter().map(|p| self.left_of(p)).sum()
    }

    /// The bytes of an entry come to where they are copied from.
    pub fn bring(&mut self, entry: &Entry) {
        if let Some(Data::Copy { from, bytes, .. }) = entry.data {
            for at in (from & !7..from + bytes).step_by(8) {
                let word = std::array::from_fn(|i| pattern(at + i as u64));
                self.gpu.memory.write(at, 8, u64::from_le_bytes(word));
            }
        }
    }

    /// Time passes; send entries that are late may be rung.
    pub fn run(&mut self, turns: u64) {
        let mut left = turns;
        while left > 0 {
            let some = left.min(200);
            self.gpu.run(some);
            left -= some;
            if self.late_every > 0 && !self.late.is_empty() && self.below(4) == 0 {
                self.ring_late();
            }
        }
    }

    /// Writes entries of several queues while the GPU goes on, each behind its bytes: their words in any order, one of
    /// each with release. Fewer than `turns` turns of the GPU are behind each word.
    pub fn post(&mut self, entries: Vec<(usize, Entry)>, turns: u64) {
        if self.slots != Slots::Descriptors {
            return self.send(entries, None, turns);
        }
        let (mut words, mut brought) = (Vec::new(), std::collections::HashSet::new());
        for (place, entry) in entries {
            assert!(self.room(place) > 0);
            let q = self.queues[place].as_mut().expect("a queue");
            let at = q.slot_at(q.entries.len());
            q.entries.push(Entry { is_rung: true, ..entry });
            // The slot was cleared before its index said so.
            for (i, word) in (0..).zip(entry.words) {
                assert_eq!(self.gpu.memory.read(at + 8 * i, 8), 0, "word {i} of a slot that may be used, {place}");
                words.push((at + 8 * i, word, i == 7, entry));
            }
        }
        for left in (1..=words.len() as u64).rev() {
            let (at, word, is_released, entry) = words.swap_remove(self.below(left) as usize);
            if brought.insert(at & !63) {
                self.bring(&entry);
            }
            match is_released {
                true => self.gpu.memory.post(at, 8, word),
                false => self.gpu.memory.write(at, 8, word),
            }
            let some = self.below(turns);
            self.gpu.run(some);
        }
    }

    /// Up to so many entries of any kind to queues that have room.
    pub fn post_some(&mut self, most: u64) -> u64 {
        let (mut all, mut room) = (Vec::new(), std::collections::HashMap::new());
        let places: Vec<usize> = self.places().into_iter().filter(|&p| self.queue(p).refused.is_none()).collect();
        let one = places[self.below(places.len() as u64) as usize];
        let many = self.below(2) == 0;
        for _ in 0..most {
            let place = if many { places[self.below(places.len() as u64) as usize] } else { one };
            let room = room.entry(place).or_insert(self.room(place));
            if *room > 0 {
                *room -= 1;
                all.push((place, self.entry(place)));
            }
        }
        let posted = all.len() as u64;
        let turns = 1 + self.below(4);
        self.post(all, turns);
        posted
    }

    pub fn run_until(&mut self, is_so: impl Fn(&Self) -> bool) {
        let mut turns = 0;
        while !is_so(self) {
            self.run(50);
            turns += 50;
            if turns % 1000 == 0 {
                self.check();
            }
            assert!(turns < TOO_LONG, "{} entries are left in launch {}", self.left(), self.launches);
        }
        self.check();
    }
}
