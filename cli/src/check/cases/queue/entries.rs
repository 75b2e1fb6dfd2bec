//! Entries that cannot be: their queue pair fails, alone, with the syndrome that a device would give; nothing is
//! written.

use super::super::Tally;
use super::{neighbours, of, open};
use crate::check::pattern::{fill, wrong};
use crate::check::queue::{Set, COUNTERS, SIGNALS};
use crate::check::world::{CaseEnv, Outcome, Window, World};
use crate::device::gdaki::entry::*;
use crate::device::gdaki::{Kernel, QueuePair, Status};
use crate::device::{Deadline, Pen, Signal};
use crate::plugin::{log, ContextConfig};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const ROOM: usize = 64 << 10;
const END: u64 = ROOM as u64;
/// Where good traffic comes from, where it goes to, and where entries behind the bad one must not go.
const SOURCE: usize = 0;
const TRAFFIC: usize = 8192;
const BEHIND: u64 = 16_384;
const SIZE: usize = 1000;
const UNTOUCHED: u8 = 0xA5;
/// The good traffic's signal, that of what comes before the bad entry, and that of what is behind it.
const CAME: u32 = 5;
const BEFORE: u32 = 6;
const LATE: u32 = 7;
const DEPTH: i32 = 16;
const OVERRUN: &str = "more entries than the ring has slots";
/// Nobody's key.
const NOBODY: u32 = 0x0bad_0000;
/// queryLastError says so within this time after the completion entry.
const TOLD: Duration = Duration::from_secs(1);
/// A fault is said once or so, not for each entry behind it.
const LINES: usize = 4;

/// What a completion entry of an error says (mlx5's `syndrome`; rdma-core, `providers/mlx5/mlx5dv.h`).
const LENGTH: u8 = 0x01;
const OPERATION: u8 = 0x02;
const LOCAL: u8 = 0x04;
const FLUSHED: u8 = 0x05;
const INVALID: u8 = 0x12;
const REMOTE: u8 = 0x13;

/// What entries can name.
#[derive(Clone, Copy)]
struct Names {
    /// The data window here and there.
    own: u32,
    there: u32,
    /// Of a window that is no longer registered.
    own_gone: u32,
    gone: u32,
    sink: u32,
}

/// What is wrong, how it is built, and the syndrome that it deserves.
type Bad = (&'static str, fn(&Names) -> Raw, u8);

fn put(n: &Names, from: u64, to: u64, len: u32) -> Raw {
    write((n.there, to), (n.own, from), len)
}

fn fetch(n: &Names, to: u64, len: u32) -> Raw {
    Raw::new(FETCH_ADD, 0).remote(n.there, to).two(1, 0).data(n.sink, 0, len)
}

const ALL: &[Bad] = &[
    ("an unknown opcode", |n| Raw::new(0x7f, 0).remote(n.there, BEHIND).data(n.own, 0, 8), OPERATION),
    ("a send", |n| Raw::new(0x0a, 0).remote(n.there, BEHIND).data(n.own, 0, 8), OPERATION),
    ("a write without data", |n| Raw::new(WRITE, 0).remote(n.there, BEHIND), OPERATION),
    ("a wait without a queue", |_| Raw::new(WAIT, 0), OPERATION),
    ("a masked addition without its masks", |n| Raw::new(MASKED_ADD, 0).remote(n.there, BEHIND).two(1, 0), OPERATION),
    ("an addition of 4 bytes", |n| fetch(n, BEHIND, 4), LENGTH),
    ("a write of more than 1 GiB", |n| put(n, 0, BEHIND, (1 << 30) + 1), LENGTH),
    ("a source with nobody's key", |n| write((n.there, BEHIND), (NOBODY, 0), 8), LOCAL),
    ("a source with key 0", |n| write((n.there, BEHIND), (0, 0), 8), LOCAL),
    ("a source with a key of another lap", |n| write((n.there, BEHIND), (n.own ^ 1, 0), 8), LOCAL),
    ("a source in a window that is gone", |n| write((n.there, BEHIND), (n.own_gone, 0), 8), LOCAL),
    ("a source past the end", |n| put(n, END - 7, BEHIND, 8), LOCAL),
    ("a source whose address overflows", |n| put(n, u64::MAX - 3, BEHIND, 8), LOCAL),
    ("a read to past the end", |n| read((n.there, 0), (n.own, END - 7), 8), LOCAL),
    ("a read to nobody's key", |n| read((n.there, 0), (NOBODY, 0), 8), LOCAL),
    ("an addition that fetches to nobody's key", |n| add((n.there, BEHIND), 1, (NOBODY, 0)), LOCAL),
    ("a dump of nobody's key", |_| dump(NOBODY), LOCAL),
    ("a target with nobody's key", |n| write((NOBODY, BEHIND), (n.own, 0), 8), REMOTE),
    ("a target in a window that is gone", |n| write((n.gone, 0), (n.own, 0), 8), REMOTE),
    ("a target past the end", |n| put(n, 0, END - 7, 8), REMOTE),
    ("a target whose address overflows", |n| put(n, 0, u64::MAX - 3, 8), REMOTE),
    ("a write of more than the target has", |n| put(n, 0, BEHIND, ROOM as u32), REMOTE),
    ("a value past the end", |n| value((n.there, END - 3), &[1, 2, 3, 4]), REMOTE),
    ("a read from nobody's key", |n| read((NOBODY, 0), (n.own, BEHIND), 8), REMOTE),
    ("a read from past the end", |n| read((n.there, END - 7), (n.own, BEHIND), 8), REMOTE),
    ("an addition to nobody's key", |n| add((NOBODY, 0), 1, (n.sink, 0)), REMOTE),
    ("an addition across the end", |n| add((n.there, END - 4), 1, (n.sink, 0)), REMOTE),
    ("an addition to a word that is not aligned", |n| add((n.there, BEHIND + 4), 1, (n.sink, 0)), INVALID),
];

struct Bench<'a, 'b> {
    world: &'b World<'a>,
    data: &'b Window,
    gone: u64,
    tally: Tally,
}

/// Each of them on contexts of its own, written by rank 0; the others' traffic goes on throughout.
pub fn bad(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let world = open(env, &of(1))?;
    let (data, gone) = (world.window(ROOM, 0)?, world.window(4096, 0)?);
    // Its keys, as long as its record is there.
    let (next, _) = neighbours(env);
    let kernel = world.device()?.gdaki().ok_or("there are no queue pairs")?;
    let (there, own) = (kernel.at(gone.gin, next, 0).0, kernel.own(gone.gin, 0).0);
    world.deregister(&gone)?;
    let gone = u64::from(there) << 32 | u64::from(own);
    let mut bench = Bench { world: &world, data: &data, gone, tally: Tally::default() };
    for (i, &(what, build, syndrome)) in ALL.iter().enumerate() {
        let round = i as u64;
        bench
            .judge(what, round, |bench, set| bench.fails(set, what, build, syndrome))
            .map_err(|e| format!("{what}: {e}"))?;
        env.progress_of(round, ALL.len() as u64 + 1);
    }
    let overrun = bench.judge(OVERRUN, ALL.len() as u64, |bench, set| bench.overrun(set, OVERRUN));
    overrun.map_err(|e| format!("{OVERRUN}: {e}"))?;
    let Bench { mut tally, .. } = bench;
    let error = world.has_error()?;
    tally.item(u64::from(error), || "queryLastError of contexts that had no fault is true in the end".into());
    world.close(&[&data])?;
    Ok(tally)
}

fn kernel(set: &Set) -> Outcome<&Kernel<'static>> {
    set.device.gdaki().ok_or_else(|| "there are no queue pairs".into())
}

impl Bench<'_, '_> {
    fn judge(&mut self, what: &str, round: u64, act: impl Fn(&mut Self, &Set) -> Outcome<()>) -> Outcome<()> {
        let (world, env) = (self.world, self.world.env);
        let set = world.more_contexts(&ContextConfig { queue_depth: DEPTH, ..of(2) })?;
        let seed = |rank: u32| u64::from(rank) << 16 | round;
        self.data.bytes(0, ROOM).fill(UNTOUCHED);
        fill(self.data.bytes(SOURCE, SIZE), seed(env.rank as u32));
        let early = world.set_has_error(&set)?;
        self.tally.item(u64::from(early), || format!("{what}: queryLastError of new contexts is true"));
        env.barrier()?;
        if env.rank == 0 {
            let mark = log::mark();
            act(self, &set)?;
            let said = log::warnings_since(mark).len();
            self.tally.item(u64::from(said == 0), || format!("{what}: no line was logged about it"));
            self.tally.item(u64::from(said > LINES), || format!("{what}: {said} lines were logged about it"));
        }
        env.barrier()?;
        self.goes_on(&set, what, seed)?;
        env.barrier()?;
        world.end_contexts(set)
    }

    fn status(&mut self, what: &str, which: &str, queue: &QueuePair, index: u64, wanted: Status) -> Outcome<()> {
        let status = queue.wait(index, self.world.env).map_err(|e| format!("{which}: {e}"))?;
        self.tally.item(u64::from(status != wanted), || format!("{what}: {which} is {status:?}, not {wanted:?}"));
        Ok(())
    }

    /// A good entry, the bad one, good ones behind it, one more later: complete, failed, flushed, flushed.
    fn fails(&mut self, set: &Set, what: &str, build: fn(&Names) -> Raw, syndrome: u8) -> Outcome<()> {
        let (world, env, kernel) = (self.world, self.world.env, kernel(set)?);
        let (next, _) = neighbours(env);
        let (queue, gin) = (kernel.queue_pair(0, next).ok_or("no queue pair")?, self.data.gin);
        let (there, own) = (kernel.at(gin, next, 0).0, kernel.own(gin, 0).0);
        let (own_gone, gone) = (self.gone as u32, (self.gone >> 32) as u32);
        let names = Names { own, there, own_gone, gone, sink: kernel.sink(0).0 };
        let (before, late) = (kernel.add_signal(0, next, BEFORE.into(), 1), kernel.add_signal(0, next, LATE.into(), 1));
        let behind = put(&names, SOURCE as u64, BEHIND, 8);
        let entries = [before, build(&names), behind.clone(), late.clone()];
        let mut pen = Pen::wild(7, 50);
        let last = queue.post(&entries, &mut pen, env)?;
        self.status(what, "the entry before", queue, last - 3, Status::Good)?;
        self.status(what, "the entry", queue, last - 2, Status::Failed { syndrome })?;
        let failed = Instant::now();
        let flushed = Status::Failed { syndrome: FLUSHED };
        self.status(what, "the entry behind", queue, last - 1, flushed)?;
        self.status(what, "the last entry", queue, last, flushed)?;
        env.until(|| "queryLastError to become true".into(), || Ok(world.set_has_error(set)?.then_some(())))?;
        let told = failed.elapsed();
        self.tally.item(u64::from(told > TOLD), || format!("{what}: queryLastError after {} ms", told.as_millis()));
        let later = queue.post(&[behind, late], &mut pen, env)?;
        self.status(what, "an entry that was posted later", queue, later, flushed)?;
        // The same context's queue pair to this rank, and its words.
        let own_queue = kernel.queue_pair(0, env.rank as u32).ok_or("no queue pair to oneself")?;
        if !std::ptr::eq(own_queue, queue) {
            let rank = env.rank as u32;
            let last = own_queue.post(&[kernel.add_signal(0, rank, CAME.into(), 1)], &mut pen, env)?;
            self.status(what, "an entry to oneself", own_queue, last, Status::Good)?;
        }
        Ok(())
    }

    /// Device code that skips the check for free slots: one entry more than there are, while the first cannot go on,
    /// because it waits for a completion entry that only comes later.
    fn overrun(&mut self, set: &Set, what: &str) -> Outcome<()> {
        let (world, env, kernel) = (self.world, self.world.env, kernel(set)?);
        let rank = env.rank as u32;
        let (main, companion) = (kernel.queue_pair(0, rank), kernel.companion(0, rank));
        let (main, companion) = (main.ok_or("no queue pair to oneself")?, companion.ok_or("no companion")?);
        let (size, mut pen, limit) = (u64::from(companion.view.size), Pen::plain(), Deadline::new(env.limit));
        companion.put_entry(0, &wait_for(0, main.view.completion_number), &mut pen);
        let addition = kernel.add_signal(0, rank, LATE.into(), 1);
        (1..size).for_each(|index| companion.put_entry(index, &addition, &mut pen));
        companion.ready(0, size - 1, &limit)?;
        companion.submit(size, &limit)?;
        std::thread::sleep(Duration::from_millis(2));
        companion.put_entry(size, &addition, &mut pen);
        companion.ready(size, size, &limit)?;
        companion.submit(size + 1, &limit)?;
        main.post(&[Raw::new(NOP, 0)], &mut pen, &limit)?;
        env.until(|| "queryLastError to become true".into(), || Ok(world.set_has_error(set)?.then_some(())))?;
        let sum = kernel.signal(0, LATE).load(Ordering::Acquire);
        self.tally.item(u64::from(sum >= size), || format!("{what}: {sum} of {} additions were carried out", size - 1));
        // What was carried out is nobody's affair below.
        kernel.signal(0, LATE).store(0, Ordering::Release);
        Ok(())
    }

    /// On every rank: the other context works, and nothing else has happened to memory, signals or errors.
    fn goes_on(&mut self, set: &Set, what: &str, seed: impl Fn(u32) -> u64) -> Outcome<()> {
        let overran = what == OVERRUN;
        let Self { world, data, tally, .. } = self;
        let env = world.env;
        let (next, previous) = neighbours(env);
        let mut thread = set.device.thread(1, Pen::wild(2, 50), env);
        let (from, to) = ((data.gin, SOURCE as u64), (data.gin, TRAFFIC as u64));
        thread.put(next, from, to, SIZE as u64, Some(&Signal::inc(CAME)), Some(2))?;
        thread.wait_signal(CAME, 1).map_err(|e| format!("the other context does not go on: {e}"))?;
        thread.wait_counter(2, 1)?;
        let (bad, _) = wrong(data.bytes(TRAFFIC, SIZE), seed(previous));
        tally.item(bad, || format!("{what}: {bad} bytes of the other context's traffic are wrong"));
        let outside = [SOURCE + SIZE..TRAFFIC, TRAFFIC + SIZE..ROOM];
        let touched = |range: std::ops::Range<usize>| {
            data.bytes(range.start, range.len()).iter().filter(|&&b| b != UNTOUCHED).count()
        };
        let touched: usize = outside.into_iter().map(touched).sum();
        let touched = touched as u64 + wrong(data.bytes(SOURCE, SIZE), seed(env.rank as u32)).0;
        tally.item(touched, || format!("{what}: {touched} bytes were written"));
        let failed = set.device.thread(0, Pen::plain(), env);
        // The entry before the bad one, and that to oneself.
        let mine = |id: u32| match id {
            BEFORE => u64::from(previous == 0),
            CAME => u64::from(env.rank == 0 && env.nranks > 1),
            _ => 0,
        };
        let wanted = |id: u32| if overran { 0 } else { mine(id) };
        // It is complete at its sender.
        failed.wait_signal(BEFORE, wanted(BEFORE)).map_err(|e| format!("what was posted before: {e}"))?;
        let signals = (0..SIGNALS as u32)
            .filter(|&id| failed.read_signal(id) != wanted(id) || (id != CAME && thread.read_signal(id) != 0));
        let signals = signals.count() as u64;
        tally.item(signals, || format!("{what}: {signals} signals are wrong"));
        let counters = (0..COUNTERS as u32)
            .filter(|&id| failed.read_counter(id) != 0 || (id != 2 && thread.read_counter(id) != 0));
        let counters = counters.count() as u64;
        tally.item(counters, || format!("{what}: {counters} counters went up"));
        let error = world.set_has_error(set)?;
        tally.item(u64::from(error != (env.rank == 0)), || {
            format!("{what}: queryLastError of rank {} is {error}", env.rank)
        });
        let error = world.has_error()?;
        tally.item(u64::from(error), || format!("{what}: queryLastError of other contexts is true"));
        Ok(())
    }
}
