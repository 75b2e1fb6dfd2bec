//! The copy kernel's code itself, `copy.ptx`, lane by lane on the CPU (`ptx`): what it and its worker blocks move
//! arrives once, in order, and before they say so, whoever's turn it is.

mod crowds;

pub use crowds::{serve_awaited, serve_pieces, serve_signals, serve_stream, serve_unawaited};

use crate::machine::memory::Memory;
use crate::machine::program::Program;
use crate::machine::{Machine, Random};

pub const PTX: &str = include_str!("../../src/fabric/soft/gpu/kernel/copy.ptx");

// What `ring.rs` says of its layout.
const COMMANDS: u64 = 256;
const CUT: u32 = 1;
const STOP: u32 = 2;
const INLINE: u32 = 4;
const WORKERS: u32 = 8;
const CREDIT: u32 = 16;
const REPORT: u32 = 32;
const WIDE: u32 = 64;
const TWICE: u32 = 128;
const UNAWAITED: u32 = 1 << 15;
/// Of the seven commands before one, those whose signals come first: the highest bit is the one right before it.
const BEHIND_BIT: u32 = 8;

// Where all of it lies here.
const RING: u64 = 0x1_0000;
const WORDS: u64 = RING + 64 * COMMANDS;
const BOARDS: u64 = 0x2_0000;
const SIGNALS: u64 = 0x3_0000;
/// 8 bytes for the index of each command, in their order.
const INDICES: u64 = 0x3_8000;
const DATA: u64 = 0x5_0000;
const SOURCES: u64 = DATA;
/// Bytes of the sources, and as many of the destinations.
const ROOM: u64 = 4 << 20;
const TARGETS: u64 = SOURCES + ROOM;

/// The polls in vain after which the copy kernel is calm, and a text that is so after the first.
const CALM: &str = "is_calm, vain, 64;";
const CALM_AT_ONCE: &str = "is_calm, vain, 1;";

/// Turns after which something hangs: a launch takes a fifth.
const TOO_LONG: u64 = 300_000;

#[derive(Clone, Copy, Default)]
struct Command {
    from: u64,
    to: u64,
    bytes: u32,
    flags: u32,
    value: u64,
    signal: u64,
    increment: u64,
}

/// The host, and the GPU.
struct Bench {
    gpu: Machine,
    /// Number of the last launch, of the next command, and of the first that is not known to be done.
    launches: u64,
    posted: u64,
    done: u64,
    /// All commands from `first` on that were posted and not passed over.
    all: Vec<Command>,
    first: u64,
    /// Commands up to here have arrived, as a signal or the count of those done says; of those up to there nothing is
    /// to be looked at any more.
    arrived: usize,
    looked_at: usize,
    slot: u64,
    /// Where the next command's bytes and signal lie.
    at: u64,
    signal: u64,
    index: u64,
}

/// What a source holds at an offset; never 0.
fn pattern(at: u64) -> u8 {
    ((at * 31 + at / 256 * 7) % 255 + 1) as u8
}

/// A command's stamp, where it lies in each of its words.
fn stamp(number: u64) -> u64 {
    (number / COMMANDS + 1) << 48
}

impl Bench {
    /// With memory up to there.
    fn new(ptx: &str, seed: u64, end: u64) -> Self {
        let memory = Memory::new(end);
        let mut random = Random(seed);
        // Half of them seldom find anything but by a calm poll.
        assert!(ptx.contains(CALM));
        let ptx = if seed % 2 == 0 { ptx } else { &ptx.replace(CALM, CALM_AT_ONCE) };
        // Laps whose stamps begin again, and numbers whose low half ends, too.
        let first = [0, 250, (COMMANDS << 16) - 20, (1 << 32) - 20][random.below(4) as usize];
        let mut gpu = Machine::new(Program::parse(ptx, BOARDS), memory, random.next());
        gpu.memory.write(WORDS + 64, 8, first);
        // The lap before: zeros are a stamp as well, of a lap that comes late.
        for (n, word) in (first.saturating_sub(COMMANDS)..first).flat_map(|n| (0..8).map(move |word| (n, word))) {
            gpu.memory.write(RING + n % COMMANDS * 64 + word * 8, 8, stamp(n) | random.next() >> 16);
        }
        let slot = random.below(4);
        let (all, arrived, looked_at) = (Vec::new(), 0, 0);
        let (at, signal, index) = (0, SIGNALS, INDICES);
        Self { gpu, launches: 0, posted: first, done: first, all, first, arrived, looked_at, slot, at, signal, index }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.gpu.random.below(n)
    }

    fn word(&self, at: u64) -> u64 {
        self.gpu.memory.read(WORDS + at, 8)
    }

    fn launch(&mut self, workers: u64, idle: u64, life: u64) {
        self.launches += 1;
        let (blocks, threads) = if workers > 0 { (workers, 256) } else { (1, 32) };
        let parameters = [RING, WORDS, self.posted, self.launches, idle, life, self.slot];
        self.gpu.launch(blocks, threads, &parameters);
    }

    fn is_up(&self) -> bool {
        self.word(0) == self.launches && !self.is_gone()
    }

    fn is_gone(&self) -> bool {
        self.word(128) == self.launches
    }

    fn has_room(&self, commands: u64) -> bool {
        self.posted + commands - self.word(64) <= COMMANDS
    }

    /// The bytes of a command come to where they are copied from.
    fn bring(&mut self, c: &Command) {
        if c.bytes == 0 || c.flags & INLINE != 0 {
            return;
        }
        for at in (c.from & !7..c.from + u64::from(c.bytes)).step_by(8) {
            let word = std::array::from_fn(|i| pattern(at - SOURCES + i as u64));
            self.gpu.memory.write(at, 8, u64::from_le_bytes(word));
        }
    }

    /// Writes commands while the GPU goes on: their words in any order, the last one of each with release.
    fn post(&mut self, commands: &[Command]) {
        self.post_within(commands, 3);
    }

    /// The same, with fewer than `turns` turns of the GPU behind each word.
    fn post_within(&mut self, commands: &[Command], turns: u64) {
        let mut words = Vec::new();
        for (n, c) in (self.posted..).zip(commands) {
            let sizes = u64::from(c.bytes) | u64::from(c.flags) << 32;
            let fields = [c.from, c.to, sizes, c.value, c.signal, c.increment].map(u64::to_le_bytes).concat();
            for (i, six) in fields.chunks(6).enumerate() {
                let low = six.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
                words.push((RING + n % COMMANDS * 64 + 8 * i as u64, stamp(n) | low, i == 7));
            }
        }
        for left in (1..=words.len() as u64).rev() {
            let (at, word, is_last) = words.swap_remove(self.below(left) as usize);
            match is_last {
                true => self.gpu.memory.release(at, 8, word),
                false => self.gpu.memory.write(at, 8, word),
            }
            let some = self.below(turns);
            self.gpu.run(some);
        }
        let real: Vec<Command> = commands.iter().filter(|c| c.flags & STOP == 0).copied().collect();
        self.posted += real.len() as u64;
        self.all.extend(real);
    }

    /// A command of any kind, to a place of its own.
    fn any_command(&mut self, has_workers: bool) -> Command {
        // Behind nothing, behind some, behind all.
        let behind = [0, self.below(128) as u32, 127][self.below(3) as usize] << BEHIND_BIT;
        let flags = [0, 0, 0, 0, CUT, behind, behind, behind][self.below(8) as usize];
        let mut c = Command { flags, ..Command::default() };
        if self.below(4) > 0 {
            (c.signal, c.increment) = (self.signal, 1 + self.below(1 << 40));
            self.signal += 8;
        }
        let word = 4 << self.below(3);
        self.at = self.at.next_multiple_of(16) + word * self.below(3);
        let len = match self.below(if has_workers { 7 } else { 5 }) {
            0 => {
                // A value, at a multiple of its size.
                let len = 1 << self.below(4);
                // No byte of it is 0.
                (c.value, c.flags) = (self.gpu.random.next() | 0x0101_0101_0101_0101, c.flags | INLINE);
                self.at = self.at.next_multiple_of(len);
                len
            }
            1 => 0,
            2 | 3 => word * (1 + self.below(128 / word)),
            4 => {
                let most = [2500, 9000][self.below(2) as usize];
                word * (1 + self.below(most / word))
            }
            _ => {
                c.flags |= WORKERS;
                (2048 + word * self.below(20_000 / word)).next_multiple_of(word)
            }
        };
        c.bytes = len as u32;
        if self.below(2) == 0 {
            c = self.credited(c);
        }
        // Few, or no go that was loaded ahead is carried out.
        if self.below(64) == 0 {
            c.flags |= REPORT;
        }
        if self.below(4) == 0 {
            c.flags |= UNAWAITED;
        }
        if len > 0 {
            c.to = TARGETS + self.at;
            if c.flags & INLINE == 0 {
                c.from = SOURCES + self.below((ROOM - len) / word) * word;
            }
            self.at += len;
        }
        assert!(self.at < ROOM && self.signal < INDICES);
        c
    }

    /// The same, which is to count its completion at an index of its own.
    fn credited(&mut self, c: Command) -> Command {
        let flags = c.flags | CREDIT | [0, TWICE, WIDE, WIDE | TWICE][self.below(4) as usize];
        // One of 4 bytes may be where none of 8 can.
        let at = self.index + if flags & WIDE == 0 { 4 * self.below(2) } else { 0 };
        self.index += 8;
        assert!(self.index <= DATA);
        match c.flags & INLINE {
            0 => Command { flags, value: at, ..c },
            _ => Command { flags, from: at, ..c },
        }
    }

    /// How often a command that was found done is counted, if it is to be, and how often in part.
    fn credit(&self, i: usize) -> Option<(u64, u64)> {
        let c = &self.all[i];
        let index = if c.flags & INLINE == 0 { c.value } else { c.from };
        let entries = if c.flags & TWICE == 0 { 1 } else { 2 };
        let counted = || self.gpu.memory.read(index, if c.flags & WIDE == 0 { 4 } else { 8 });
        (c.flags & CREDIT != 0).then(counted).map(|n| (n / entries, n % entries))
    }

    /// Whether the bytes of a command are there, or (`false`) none of them.
    fn check_bytes(&self, i: usize, there: bool) {
        let c = &self.all[i];
        if c.bytes == 0 {
            return;
        }
        for (n, &byte) in self.gpu.memory.bytes(c.to, c.bytes.into()).iter().enumerate() {
            let wanted = match (there, c.flags & INLINE) {
                (false, _) => 0,
                (true, 0) => pattern(c.from - SOURCES + n as u64),
                _ => c.value.to_le_bytes()[n],
            };
            assert_eq!(byte, wanted, "byte {n} of {} of command {i}, flags {}", c.bytes, c.flags);
        }
    }

    fn check_signal(&self, i: usize, there: bool) {
        let c = &self.all[i];
        if c.signal != 0 {
            let wanted = if there { c.increment } else { 0 };
            assert_eq!(self.gpu.memory.read(c.signal, 8), wanted, "the signal of command {i}");
        }
    }

    /// Signals that are there have the bytes before them there, and the signals that they come behind; what is counted
    /// at its index has its bytes there, and is counted once; what is said to be done is.
    fn check(&mut self) {
        let done = (self.word(64).min(self.posted) - self.first) as usize;
        let is_there = |i: &usize| self.all[*i].signal != 0 && self.gpu.memory.read(self.all[*i].signal, 8) != 0;
        let seen = (self.arrived..self.all.len()).rev().find(is_there).map_or(0, |i| i + 1).max(done);
        (self.arrived..seen).for_each(|i| self.check_bytes(i, true));
        self.arrived = self.arrived.max(seen);
        let looked_at = self.looked_at..self.all.len();
        for i in looked_at.clone().filter(is_there) {
            let behind = (1..=7).filter(|d| self.all[i].flags >> (BEHIND_BIT + 7 - *d as u32) & 1 == 1);
            behind.filter_map(|d| i.checked_sub(d)).for_each(|before| self.check_signal(before, true));
        }
        for i in looked_at {
            match self.credit(i) {
                None => {}
                Some((0, 0)) => assert!(i >= done, "command {i} is done and not counted"),
                Some((1, 0)) => self.check_bytes(i, true),
                Some((n, part)) => panic!("command {i} is counted {n} times, and {part} of one"),
            }
        }
        let cut = (0..seen).rev().find(|&i| self.all[i].flags & CUT != 0 && is_there(&i)).unwrap_or(0);
        (0..done.max(cut)).for_each(|i| self.check_signal(i, true));
        self.looked_at = self.looked_at.max(done);
        self.done = self.first + done as u64;
    }

    fn run_until(&mut self, is_so: impl Fn(&Self) -> bool) {
        let mut turns = 0;
        while !is_so(self) {
            self.gpu.run(50);
            turns += 50;
            assert!(turns < TOO_LONG, "{} of {} are done, launch {}", self.done, self.posted, self.launches);
        }
    }

    /// A launch that is given up to so many commands at the times that it likes, and has ended.
    fn serve(&mut self, workers: u64, commands: u64, life: u64) {
        self.launch(workers, 4_000, life);
        self.run_until(|b| b.word(0) == b.launches);
        let mut turns = 0;
        let mut left = commands;
        while !self.is_gone() {
            if left > 0 && self.is_up() && self.has_room(40) && self.below(3) > 0 {
                // Now and then more than it reads at once.
                let most = [4, 12, 40][self.below(3) as usize];
                let some: Vec<Command> =
                    (0..self.below(most).min(left)).map(|_| self.any_command(workers > 0)).collect();
                left -= some.len() as u64;
                some.iter().for_each(|c| self.bring(c));
                self.post(&some);
            }
            let n = 1 + self.below(60);
            self.gpu.run(n);
            turns += n;
            self.check();
            assert!(turns < TOO_LONG, "{} of {} are done, launch {}", self.done, self.posted, self.launches);
        }
        self.check();
        let done = (self.done - self.first) as usize;
        self.run_until(|b| !b.gpu.runs());
        // It was final, and of what it left undone nothing is done, ever.
        assert_eq!(self.word(64), self.done);
        (done..self.all.len()).for_each(|i| {
            self.check_bytes(i, false);
            self.check_signal(i, false);
            assert!(matches!(self.credit(i), None | Some((0, 0))), "command {i} is not done and counted");
        });
        self.all.truncate(done);
        // Numbers of commands that were passed over.
        self.first = self.posted - done as u64;
        self.gpu.memory.write(WORDS + 64, 8, self.posted);
    }

    /// Nothing lies beside what was copied.
    fn check_gaps(&self) {
        let zeros = vec![0; ROOM as usize];
        // Each command's target lies behind those of the ones before.
        let copied = self.all.iter().filter(|c| c.bytes > 0).map(|c| (c.to, c.to + u64::from(c.bytes)));
        let mut end = TARGETS;
        for (from, to) in copied.chain([(TARGETS + ROOM, 0)]) {
            let gap = self.gpu.memory.bytes(end, from - end);
            assert!(gap == &zeros[..gap.len()], "something lies beside, from {end:#x} on");
            end = to;
        }
    }
}

/// Some launches, one after the other, with worker blocks and without.
pub fn serve(ptx: &str, seed: u64) {
    let mut bench = Bench::new(ptx, seed, TARGETS + ROOM);
    for _ in 0..4 {
        let (workers, commands) = (bench.below(4), bench.below(40));
        // Some end with work undone.
        let life = if bench.below(2) == 0 { 2_000 + bench.below(40_000) } else { 1 << 40 };
        bench.serve(workers, commands, life);
    }
    (0..bench.all.len()).for_each(|i| bench.check_signal(i, true));
    bench.check_gaps();
    // Told to end before it would by itself.
    bench.launch(2, 1 << 40, 1 << 40);
    bench.run_until(Bench::is_up);
    let c = bench.any_command(true);
    bench.bring(&c);
    bench.post(&[c, Command { flags: STOP, ..Command::default() }]);
    bench.run_until(|b| !b.gpu.runs());
    assert!(bench.is_gone() && bench.word(64) == bench.posted + 1);
    bench.check_bytes(bench.all.len() - 1, true);
}

#[test]
fn what_it_says_is_so() {
    (0..8).for_each(|seed| serve(PTX, seed));
    (0..2).for_each(|seed| serve_pieces(PTX, seed));
    (0..4).for_each(|seed| serve_signals(PTX, seed));
    (0..4).for_each(|seed| serve_stream(PTX, seed));
    (0..4).for_each(|seed| serve_awaited(PTX, seed));
    (0..4).for_each(|seed| serve_unawaited(PTX, seed));
}

/// Who waits leaves the L1 of its multiprocessor alone, which an acquire would empty.
#[test]
fn who_waits_acquires_nothing() {
    // Without worker blocks and with them; some have had something to do.
    for (seed, workers, commands) in [(0, 0, 0), (2, 0, 3), (4, 2, 0), (6, 2, 3)] {
        let mut bench = Bench::new(PTX, seed, TARGETS + ROOM);
        bench.launch(workers, 1 << 40, 1 << 40);
        bench.run_until(Bench::is_up);
        for _ in 0..commands {
            let c = bench.any_command(workers > 0);
            bench.bring(&c);
            bench.post(&[c]);
        }
        bench.run_until(|b| b.word(64) == b.posted);
        // Until the last block is up and everybody waits.
        bench.gpu.run(20_000);
        let before = (bench.gpu.acquired, bench.gpu.loaded);
        bench.gpu.run(10_000);
        assert!(bench.gpu.loaded > before.1, "nobody polls");
        assert_eq!(bench.gpu.acquired, before.0, "{workers} worker blocks");
        let c = bench.any_command(workers > 0);
        bench.bring(&c);
        bench.post(&[c]);
        bench.run_until(|b| b.word(64) == b.posted);
        bench.check();
    }
}

/// The ends of copies of all lengths, and nothing before and behind: all tickets but the last three are gone
/// beforehand.
#[test]
fn pieces_end_where_their_copy_does() {
    const MIB: u64 = 1 << 20;
    let all = [(2048, 12), (2 * MIB, 12), (2 * MIB + 4, 14), (32 * MIB - 8, 14), (32 * MIB, 14), (32 * MIB + 16, 16)];
    for (bytes, shift) in all.into_iter().chain([(1024 * MIB - 4, 16), (1024 * MIB, 16)]) {
        let (from, to) = (DATA, DATA + bytes.next_multiple_of(MIB));
        let mut bench = Bench::new(PTX, bytes, to + bytes + MIB);
        let pieces = bytes.div_ceil(1 << shift);
        let skipped = pieces.saturating_sub(3);
        let begin = skipped << shift;
        for i in begin.saturating_sub(64)..bytes + 64 {
            bench.gpu.memory.bytes_mut(from + i, 1)[0] = pattern(i);
        }
        // The launch's board: tickets taken, and done.
        let board = BOARDS + bench.slot * 2048 + 1024;
        [128, 256].iter().for_each(|at| bench.gpu.memory.write(board + at, 8, skipped));
        bench.launch(1, 1 << 40, 1 << 40);
        bench.run_until(Bench::is_up);
        let copy = Command { from, to, bytes: bytes as u32, flags: WORKERS, ..Command::default() };
        bench.post(&[copy]);
        bench.run_until(|b| b.word(64) == b.posted);
        assert_eq!(bench.gpu.memory.read(board, 8), pieces, "{bytes} bytes: other pieces");
        let there = bench.gpu.memory.bytes(to + begin.saturating_sub(64), bytes - begin.saturating_sub(64) + 64);
        for (i, &byte) in (begin.saturating_sub(64)..).zip(there) {
            let wanted = if (begin..bytes).contains(&i) { pattern(i) } else { 0 };
            assert_eq!(byte, wanted, "byte {i} of {bytes}");
        }
    }
}
