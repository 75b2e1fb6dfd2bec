//! What the kernel of `copy.ptx` does, on the CPU: with its freedom to take commands in other portions, to move bytes
//! and to add to signals in another order, and to report late, used at random.

use crate::kernel::{rest, Launch, Reach, MISALIGNED, SLOWNESS};
use crate::random::Random;
use crate::world::world;
use oxygin_ffi::cuda::{CUresult, CUDA_SUCCESS};
use std::sync::atomic::{fence, AtomicU16, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::time::{Duration, Instant};

const CUT: u32 = 1;
const STOP: u32 = 2;
const INLINE: u32 = 4;
const WORKERS: u32 = 8;
const CREDIT: u32 = 16;
const REPORT: u32 = 32;
const WIDE: u32 = 64;
const TWICE: u32 = 128;
const UNAWAITED: u32 = 1 << 15;
/// Of the commands whose signals come before its own: a bit each, from here on, the highest for the one before it.
const BEHIND_BIT: u32 = 8;
const BEHIND_MOST: u32 = 7;

/// Commands of a ring, bytes of one, how many are taken at once.
const RING: u64 = 256;
const COMMAND: u64 = 64;
const AT_ONCE: u64 = 8;
/// Words of a command: six bytes of it and its lap.
const WORDS_OF_ONE: usize = 8;
/// Commands that count as done together, at most, while more keep coming.
const REPORT_AFTER: u64 = 32;
/// Bytes of the ring and the three lines of answers behind it.
const WORDS: usize = 192;

/// Bytes above which a copy is to be in a go of its own.
const ALONE_ABOVE: u32 = 64 << 20;
/// Launch slots that there are boards for.
const LAUNCH_SLOTS: u64 = 2;

static COMMANDS: AtomicU64 = AtomicU64::new(0);
static WORKER_COMMANDS: AtomicU64 = AtomicU64::new(0);
static REPORTS: AtomicU64 = AtomicU64::new(0);
static UNAWAITED_COMMANDS: AtomicU64 = AtomicU64::new(0);
static ORDERED_COMMANDS: AtomicU64 = AtomicU64::new(0);
static CREDITS: AtomicU64 = AtomicU64::new(0);

/// How many commands were done.
pub fn commands() -> u64 {
    COMMANDS.load(Ordering::Relaxed)
}

/// How many of them were to be reported with their go.
pub fn awaited_commands() -> u64 {
    REPORTS.load(Ordering::Relaxed)
}

/// How many of them nobody was known to wait for.
pub fn unawaited_commands() -> u64 {
    UNAWAITED_COMMANDS.load(Ordering::Relaxed)
}

/// How many of them had signals that came behind others.
pub fn ordered_commands() -> u64 {
    ORDERED_COMMANDS.load(Ordering::Relaxed)
}

/// How many of them by worker blocks.
pub fn worker_commands() -> u64 {
    WORKER_COMMANDS.load(Ordering::Relaxed)
}

/// How many were counted at an index of their poster's.
pub fn credits() -> u64 {
    CREDITS.load(Ordering::Relaxed)
}

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

impl Command {
    /// Those before it whose signals come first, a bit each: the highest for its predecessor.
    fn behind(&self) -> u32 {
        self.flags >> BEHIND_BIT & ((1 << BEHIND_MOST) - 1)
    }
}

pub struct CopyKernel<'a> {
    launch: &'a Launch,
    gpu: Reach,
    ring: u64,
    words: u64,
    number: u64,
    idle: Duration,
    life: Duration,
    /// Commands taken, and how many of them are reported as done.
    count: u64,
    reported: u64,
    /// Somebody may wait for one that is not reported.
    is_awaited: bool,
    random: Random,
}

/// Why it ends: it left, or the GPU hit an error.
type Ended = Result<(), CUresult>;

impl<'a> CopyKernel<'a> {
    pub const NAME: &'static str = "oxygin_copy";
    pub const PARAMETERS: usize = 7;

    pub fn new(launch: &'a Launch, gpu: Reach) -> Self {
        let [ring, words, count, number, idle, life, slot] = launch.parameters[..] else {
            unreachable!("checked at launch")
        };
        if slot >= LAUNCH_SLOTS {
            world().violation(&format!("slot {slot}"));
        }
        let (idle, life) = (Duration::from_nanos(idle) * SLOWNESS, Duration::from_nanos(life) * SLOWNESS);
        let random = Random::new();
        Self { launch, gpu, ring, words, number, idle, life, count, reported: count, is_awaited: false, random }
    }

    pub fn run(mut self) -> CUresult {
        match self.work() {
            Ok(()) => CUDA_SUCCESS,
            Err(code) => code,
        }
    }

    /// All commands taken so far are done.
    fn report(&mut self, count: u64) -> Ended {
        if count != self.reported {
            self.gpu.answer(self.words + 64, count)?;
            self.reported = count;
            self.is_awaited = false;
        }
        Ok(())
    }

    fn work(&mut self) -> Ended {
        if self.ring % 64 != 0 || self.words % 8 != 0 {
            return Err(MISALIGNED);
        }
        self.gpu.at(self.words, WORDS)?;
        let (ends, most) = world().kernel_limits();
        let first = self.count;
        let limit = if most == 0 { u64::MAX } else { self.random.below(most + 1) };
        let started = Instant::now();
        let (mut last, mut vain) = (started, 0);
        self.gpu.answer(self.words, self.number)?;
        loop {
            let (now, _) = world().kernel_limits();
            let left = limit - (self.count - first);
            if now != ends || left == 0 {
                break;
            }
            let batch = self.poll(left)?;
            if batch.is_empty() {
                if self.is_awaited || vain > 0 {
                    self.report(self.count)?;
                }
                if last.elapsed() > self.idle {
                    break;
                }
                rest(&mut vain);
            } else {
                if batch[0].flags & STOP != 0 {
                    self.count += 1;
                    break;
                }
                self.execute(&batch)?;
                (last, vain) = (Instant::now(), 0);
            }
            if started.elapsed() > self.life {
                break;
            }
        }
        fence(Ordering::SeqCst);
        self.gpu.answer(self.words + 64, self.count)?;
        self.launch.end();
        self.gpu.answer(self.words + 128, self.number)
    }

    /// The next commands that are done in one go; a STOP only as the first.
    fn poll(&mut self, left: u64) -> Result<Vec<Command>, CUresult> {
        let ring = self.gpu.at(self.ring, (RING * COMMAND) as usize)?;
        let most = if self.random.below(4) == 0 { self.random.below(AT_ONCE) + 1 } else { AT_ONCE }.min(left);
        let mut found = [[None; WORDS_OF_ONE]; AT_ONCE as usize];
        // Word by word, in any order, and at times with a pause: what a GPU may do.
        let pause = self.random.below(8) == 0;
        for i in self.random.order(WORDS_OF_ONE * most as usize) {
            let (n, part) = (self.count + (i / WORDS_OF_ONE) as u64, i % WORDS_OF_ONE);
            let at = (n % RING * COMMAND) as usize + 8 * part;
            // SAFETY: an aligned word of the ring, which is mapped.
            let word = unsafe { AtomicU64::from_ptr(ring.add(at).cast()) }.load(Ordering::Acquire);
            if word >> 48 == (n / RING + 1) & 0xffff {
                found[i / WORDS_OF_ONE][part] = Some(word.to_le_bytes());
            }
            if pause && self.random.below(8) == 0 {
                std::thread::yield_now();
            }
        }
        let mut batch = Vec::new();
        for (i, words) in found.into_iter().enumerate() {
            let parts: Vec<u8> = words.iter().flatten().flat_map(|w| w[..6].to_vec()).collect();
            if parts.len() < 6 * WORDS_OF_ONE {
                break;
            }
            let field = |i: usize| u64::from_le_bytes(std::array::from_fn(|byte| parts[8 * i + byte]));
            let command = Command {
                from: field(0),
                to: field(1),
                bytes: field(2) as u32,
                flags: (field(2) >> 32) as u32,
                value: field(3),
                signal: field(4),
                increment: field(5),
            };
            if i > 0 && command.flags & (CUT | STOP) != 0 {
                break;
            }
            batch.push(command);
            if command.flags & STOP != 0 {
                break;
            }
        }
        Ok(batch)
    }

    /// The bytes of all, then the signals of all.
    fn execute(&mut self, batch: &[Command]) -> Ended {
        if batch.len() > 1 && batch.iter().any(|c| c.bytes > ALONE_ABOVE) {
            world().violation("others in one go with a long copy");
        }
        for i in self.random.order(batch.len()) {
            let c = &batch[i];
            while world().is_held(c.bytes as usize) {
                std::thread::sleep(Duration::from_micros(50));
            }
            let us = world().command_us();
            if us > 0 {
                std::thread::sleep(Duration::from_micros(us));
            }
            let code = world().injected("gpu");
            if code != CUDA_SUCCESS {
                return Err(code);
            }
            self.move_bytes(c)?;
        }
        fence(Ordering::SeqCst);
        if self.random.below(2) == 0 {
            self.report(self.count)?;
        }
        // In no order, but for those that are told to come behind others.
        let mut is_added = vec![false; batch.len()];
        for _ in 0..batch.len() {
            let is_free = |&i: &usize| {
                let behind = batch[i].behind();
                !is_added[i] && (0..i).all(|j| is_added[j] || i - j > 7 || behind << (i - j) >> BEHIND_MOST & 1 == 0)
            };
            let free: Vec<usize> = (0..batch.len()).filter(is_free).collect();
            let next = free[self.random.below(free.len() as u64) as usize];
            self.signal(&batch[next])?;
            is_added[next] = true;
        }
        for i in self.random.order(batch.len()) {
            self.give_credit(&batch[i])?;
        }
        self.count += batch.len() as u64;
        let unawaited = batch.iter().filter(|c| c.flags & UNAWAITED != 0).count();
        UNAWAITED_COMMANDS.fetch_add(unawaited as u64, Ordering::Relaxed);
        self.is_awaited |= unawaited < batch.len();
        let ordered = batch.iter().filter(|c| c.behind() != 0).count();
        ORDERED_COMMANDS.fetch_add(ordered as u64, Ordering::Relaxed);
        // At the latest after so many, or where somebody waits for one.
        let awaited = batch.iter().filter(|c| c.flags & REPORT != 0).count() as u64;
        REPORTS.fetch_add(awaited, Ordering::Relaxed);
        if awaited > 0 || self.count - self.reported >= REPORT_AFTER || self.random.below(4) == 0 {
            self.report(self.count)?;
        }
        COMMANDS.fetch_add(batch.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn signal(&self, c: &Command) -> Ended {
        if c.signal == 0 {
            return Ok(());
        }
        if c.signal % 8 != 0 {
            return Err(MISALIGNED);
        }
        let word = self.gpu.at(c.signal, 8)?;
        // SAFETY: an aligned word of mapped memory.
        unsafe { AtomicU64::from_ptr(word.cast()) }.fetch_add(c.increment, Ordering::AcqRel);
        Ok(())
    }

    fn give_credit(&self, c: &Command) -> Ended {
        if c.flags & CREDIT == 0 {
            return Ok(());
        }
        let index = if c.flags & INLINE == 0 { c.value } else { c.from };
        let (bytes, n) = (if c.flags & WIDE == 0 { 4 } else { 8 }, if c.flags & TWICE == 0 { 1 } else { 2 });
        if index % bytes != 0 {
            return Err(MISALIGNED);
        }
        let index = self.gpu.at(index, bytes as usize)?;
        if bytes == 4 {
            // SAFETY: four aligned bytes of mapped memory.
            unsafe { AtomicU32::from_ptr(index.cast()) }.fetch_add(n, Ordering::AcqRel);
        } else {
            // SAFETY: eight aligned bytes of mapped memory.
            unsafe { AtomicU64::from_ptr(index.cast()) }.fetch_add(n.into(), Ordering::AcqRel);
        }
        CREDITS.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn move_bytes(&self, c: &Command) -> Ended {
        let behind = ((1 << BEHIND_MOST) - 1) << BEHIND_BIT;
        if c.flags & !(CUT | STOP | INLINE | WORKERS | CREDIT | REPORT | WIDE | TWICE | behind | UNAWAITED) != 0 {
            world().violation(&format!("a command with the flags {:#x}", c.flags));
        }
        if c.flags & INLINE != 0 {
            return self.store(c);
        }
        if c.bytes == 0 {
            return Ok(());
        }
        if (c.from | c.to | u64::from(c.bytes)) % 4 != 0 {
            world().violation(&format!("{} bytes from {:#x} to {:#x}: not in words", c.bytes, c.from, c.to));
            return Err(MISALIGNED);
        }
        if c.flags & WORKERS != 0 {
            if self.launch.workers == 0 {
                world().violation("work for workers, of which this launch has none");
            }
            WORKER_COMMANDS.fetch_add(1, Ordering::Relaxed);
        }
        let (from, to) = (self.gpu.at(c.from, c.bytes as usize)?, self.gpu.at(c.to, c.bytes as usize)?);
        // SAFETY: both ranges are mapped; whoever unmaps them first is at fault, and dies.
        unsafe { std::ptr::copy(from, to, c.bytes as usize) };
        Ok(())
    }

    fn store(&self, c: &Command) -> Ended {
        if ![1, 2, 4, 8].contains(&c.bytes) {
            world().violation(&format!("{} bytes in a command", c.bytes));
            return Ok(());
        }
        if c.to % u64::from(c.bytes) != 0 {
            return Err(MISALIGNED);
        }
        let to = self.gpu.at(c.to, c.bytes as usize)?;
        // SAFETY: mapped and aligned.
        unsafe { store(to, c.bytes, c.value) };
        Ok(())
    }
}

/// Stores the low bytes of a value: 1, 2, 4 or 8.
///
/// # Safety
/// They are mapped and aligned to their number.
pub unsafe fn store(to: *mut u8, bytes: u32, value: u64) {
    // SAFETY: the caller's word.
    unsafe {
        match bytes {
            1 => AtomicU8::from_ptr(to).store(value as u8, Ordering::Release),
            2 => AtomicU16::from_ptr(to.cast()).store(value as u16, Ordering::Release),
            4 => AtomicU32::from_ptr(to.cast()).store(value as u32, Ordering::Release),
            _ => AtomicU64::from_ptr(to.cast()).store(value, Ordering::Release),
        }
    }
}
