//! Malformed descriptors: their context fails, alone; nothing is written; credits go on.

use super::super::Tally;
use super::{neighbours, of, open};
use crate::check::pattern::{fill, wrong};
use crate::check::queue::{Set, COUNTERS, SIGNALS};
use crate::check::world::{CaseEnv, Outcome, Window, World};
use crate::device::proxy::{Kernel, Thread};
use crate::device::{Deadline, Pen, Signal};
use crate::plugin::{log, ContextConfig};
use nccl_plugin_api::descriptor::*;

const ROOM: usize = 64 << 10;
/// Where good traffic comes from, where it goes to, and where puts behind the malformed one may or may not go.
const SOURCE: usize = 0;
const TRAFFIC: usize = 8192;
const BEHIND: usize = 16_384;
const SIZE: usize = 1000;
const UNTOUCHED: u8 = 0xA5;
/// The good traffic's signal.
const CAME: u32 = 5;
/// More than the queue has slots.
const MORE: usize = 40;
/// A fault is said once or so, not for each descriptor behind it.
const LINES: usize = 4;

/// What descriptors can name.
struct Names {
    data: u64,
    flags: u64,
    /// Of a window that is no longer registered.
    gone: u64,
}

/// What is wrong, and how it is built. `None`: this form of descriptors cannot say it.
type Bad = (&'static str, fn(&Thread<'_>, &Names) -> Option<Descriptor>);

/// Eight bytes from the window's beginning, with these bits.
fn put(t: &Thread<'_>, n: &Names, op: u16) -> Option<Descriptor> {
    Some(t.descriptor(op, 8).first(SOURCE as u64, n.data).second(BEHIND as u64, n.data))
}

/// The same, if there are 16 bits for them.
fn wide(t: &Thread<'_>, n: &Names, op: u16) -> Option<Descriptor> {
    let d = put(t, n, op)?;
    (d.form == Form::Bytes128).then_some(d)
}

fn of_version(t: &Thread<'_>, n: &Names, version: u8) -> Option<Descriptor> {
    let d = Descriptor::new(Form::Bytes128, version, OP_PUT, 8);
    let d = d.first(SOURCE as u64, n.data).second(BEHIND as u64, n.data);
    (t.descriptor(OP_PUT, 8).form == Form::Bytes128).then_some(d)
}

fn between(t: &Thread<'_>, size: u64, from: (u64, u64), to: (u64, u64)) -> Option<Descriptor> {
    Some(t.descriptor(OP_PUT, size).first(from.1, from.0).second(to.1, to.0))
}

fn get(t: &Thread<'_>, size: u64, from: (u64, u64), to: (u64, u64)) -> Option<Descriptor> {
    let d = t.descriptor(OP_GET, size).first(from.1, from.0).second(to.1, to.0);
    (d.form == Form::Bytes128).then_some(d)
}

fn by_address(t: &Thread<'_>, window: u64, offset: u64) -> Option<Descriptor> {
    let d = t.descriptor(OP_VA_SIGNAL | OP_SIGNAL_ADD, 0);
    Some(d.first(offset, window).with_signal(0, 7, true))
}

const END: u64 = ROOM as u64;
const FAR: u64 = u64::MAX >> 1;
/// Nobody's handle.
const NOBODY: u64 = 0x5ead_beef_0000;

const ALL: &[Bad] = &[
    ("no operation", |t, n| put(t, n, 0)),
    ("an inline value without a put", |t, n| put(t, n, OP_INLINE)),
    ("increment and addition in one", |t, n| put(t, n, OP_PUT | OP_SIGNAL_INC | OP_SIGNAL_ADD)),
    ("a signal by address with a put", |t, n| put(t, n, OP_PUT | OP_VA_SIGNAL | OP_SIGNAL_INC)),
    ("a signal by address that neither adds nor increments", |t, n| put(t, n, OP_VA_SIGNAL)),
    ("put and get in one", |t, n| wide(t, n, OP_PUT | OP_GET)),
    ("put and flush in one", |t, n| wide(t, n, OP_PUT | OP_FLUSH)),
    ("an unknown operation", |t, n| wide(t, n, 0x8001)),
    ("version 0", |t, n| of_version(t, n, 0)),
    ("version 3", |t, n| of_version(t, n, 3)),
    ("version 15", |t, n| of_version(t, n, 15)),
    ("a put from no window", |t, n| between(t, 8, (0, 0), (n.data, BEHIND as u64))),
    ("a put to no window", |t, n| between(t, 8, (n.data, 0), (0, 0))),
    ("a put from nobody's window", |t, n| between(t, 8, (NOBODY, 0), (n.data, BEHIND as u64))),
    ("a put to nobody's window", |t, n| between(t, 8, (n.data, 0), (NOBODY, 0))),
    ("a put from a window that is gone", |t, n| between(t, 8, (n.gone, 0), (n.data, BEHIND as u64))),
    ("a put to a window that is gone", |t, n| between(t, 8, (n.data, 0), (n.gone, 0))),
    ("a put from past the end", |t, n| between(t, 8, (n.data, END - 7), (n.data, BEHIND as u64))),
    ("a put to past the end", |t, n| between(t, 8, (n.data, 0), (n.data, END - 7))),
    ("a put from an offset that overflows", |t, n| between(t, 8, (n.data, FAR), (n.data, BEHIND as u64))),
    ("a put to an offset that overflows", |t, n| between(t, 8, (n.data, 0), (n.data, FAR - 3))),
    ("a put of more than the window has", |t, n| between(t, END + 1, (n.data, 0), (n.data, 0))),
    ("a put of the largest size", |t, n| between(t, u64::MAX >> 7, (n.data, 8), (n.data, 8))),
    ("an inline value of 9 bytes", |t, n| {
        Some(t.descriptor(OP_PUT | OP_INLINE, 9).value(7).second(BEHIND as u64, n.data))
    }),
    ("an inline value past the end", |t, n| Some(t.descriptor(OP_PUT | OP_INLINE, 8).value(7).second(END - 4, n.data))),
    ("a counter past the last", |t, n| Some(put(t, n, OP_PUT | OP_COUNTER)?.with_counter(COUNTERS as u32))),
    ("the largest counter", |t, n| Some(put(t, n, OP_PUT | OP_COUNTER)?.with_counter(0x7f_ffff))),
    ("a signal past the last", |t, n| Some(put(t, n, OP_PUT | OP_SIGNAL_ADD)?.with_signal(SIGNALS as u32, 9, true))),
    ("the largest signal", |t, n| Some(put(t, n, OP_PUT | OP_SIGNAL_INC)?.with_signal(0xff_ffff, 0, true))),
    ("a signal by address past the end", |t, n| by_address(t, n.flags, 4096)),
    ("a signal by address across the end", |t, n| by_address(t, n.flags, 4092)),
    ("a signal by address that is not aligned", |t, n| by_address(t, n.flags, 12)),
    ("a signal by address that overflows", |t, n| by_address(t, n.flags, FAR - 7)),
    ("a signal in nobody's window", |t, _| by_address(t, NOBODY, 0)),
    ("a get from nobody's window", |t, n| get(t, 8, (NOBODY, 0), (n.data, BEHIND as u64))),
    ("a get to nobody's window", |t, n| get(t, 8, (n.data, 0), (NOBODY, 0))),
    ("a get from past the end", |t, n| get(t, 8, (n.data, END - 7), (n.data, BEHIND as u64))),
    ("a get to past the end", |t, n| get(t, 8, (n.data, 0), (n.data, END - 7))),
];

struct Bench<'a, 'b> {
    world: &'b World<'a>,
    data: &'b Window,
    flags: &'b Window,
    names: Names,
    tally: Tally,
}

/// Each of them on contexts of its own, written by rank 0; the others' traffic goes on throughout.
pub fn descriptors(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let world = open(env, &of(1))?;
    let (data, flags, gone) = (world.window(ROOM, 0)?, world.window(4096, 1)?, world.window(4096, 0)?);
    world.deregister(&gone)?;
    let names = Names { data: data.gin, flags: flags.gin, gone: gone.gin };
    let mut bench = Bench { world: &world, data: &data, flags: &flags, names, tally: Tally::default() };
    for (i, bad) in ALL.iter().enumerate() {
        bench.judge(bad, i as u64).map_err(|e| format!("{}: {e}", bad.0))?;
        env.progress_of(i as u64, ALL.len() as u64);
    }
    let Bench { mut tally, .. } = bench;
    let error = world.has_error()?;
    tally.item(u64::from(error), || "queryLastError of contexts that had no fault is true in the end".into());
    world.close(&[&data, &flags])?;
    Ok(tally)
}

/// The queues that take them.
fn descriptors_of(set: &Set) -> Outcome<&Kernel> {
    set.device.proxy().ok_or_else(|| "there are no queues of descriptors".into())
}

impl Bench<'_, '_> {
    fn judge(&mut self, &(what, build): &Bad, round: u64) -> Outcome<()> {
        let (world, env) = (self.world, self.world.env);
        let set = world.more_contexts(&ContextConfig { queue_depth: 16, ..of(2) })?;
        let seed = |rank: u32| u64::from(rank) << 16 | round;
        self.data.bytes(0, ROOM).fill(UNTOUCHED);
        fill(self.data.bytes(SOURCE, SIZE), seed(env.rank as u32));
        let early = world.set_has_error(&set)?;
        self.tally.item(u64::from(early), || format!("{what}: queryLastError of new contexts is true"));
        env.barrier()?;
        let bad = build(&descriptors_of(&set)?.thread(0, Pen::plain(), env), &self.names);
        if let (0, Some(bad)) = (env.rank, bad) {
            self.write(&set, what, &bad)?;
        }
        env.barrier()?;
        if bad.is_some() {
            self.goes_on(&set, what, seed)?;
        }
        env.barrier()?;
        world.end_contexts(set)
    }

    /// The malformed one, and more than a queue full of good ones behind it, which may do something or not.
    fn write(&mut self, set: &Set, what: &str, bad: &Descriptor) -> Outcome<()> {
        let (world, env) = (self.world, self.world.env);
        let (next, _) = neighbours(env);
        let (mark, limit) = (log::mark(), Deadline::new(env.limit));
        descriptors_of(set)?.thread(0, Pen::wild(1, 50), &limit).post(next, bad)?;
        let mut thread = set.device.thread(0, Pen::wild(1, 50), &limit);
        env.until(|| "queryLastError to become true".into(), || Ok(world.set_has_error(set)?.then_some(())))?;
        let (from, to) = ((self.names.data, SOURCE as u64), (self.names.data, BEHIND as u64));
        let behind = (0..MORE).try_for_each(|_| thread.put(next, from, to, 8, None, None).map(drop));
        behind.and_then(|()| thread.flush()).map_err(|e| format!("credits do not go on: {e}"))?;
        let said = log::warnings_since(mark).len();
        self.tally.item(u64::from(said == 0), || format!("{what}: no line was logged about it"));
        self.tally.item(u64::from(said > LINES), || format!("{what}: {said} lines were logged about it"));
        Ok(())
    }

    /// On every rank: the other context works, and nothing else has happened to memory, signals or errors.
    fn goes_on(&mut self, set: &Set, what: &str, seed: impl Fn(u32) -> u64) -> Outcome<()> {
        let Self { world, data, flags, tally, .. } = self;
        let env = world.env;
        let (next, previous) = neighbours(env);
        let mut thread = set.device.thread(1, Pen::wild(2, 50), env);
        let (from, to) = ((data.gin, SOURCE as u64), (data.gin, TRAFFIC as u64));
        thread.put(next, from, to, SIZE as u64, Some(&Signal::inc(CAME)), Some(2))?;
        thread.wait_signal(CAME, 1).map_err(|e| format!("the other context does not go on: {e}"))?;
        thread.wait_counter(2, 1)?;
        let (bad, _) = wrong(data.bytes(TRAFFIC, SIZE), seed(previous));
        tally.item(bad, || format!("{what}: {bad} bytes of the other context's traffic are wrong"));
        let outside = [SOURCE + SIZE..TRAFFIC, TRAFFIC + SIZE..BEHIND, BEHIND + 8..ROOM];
        let touched = |range: std::ops::Range<usize>| {
            data.bytes(range.start, range.len()).iter().filter(|&&b| b != UNTOUCHED).count()
        };
        let touched: usize = outside.into_iter().map(touched).sum();
        let touched = touched as u64 + wrong(data.bytes(SOURCE, SIZE), seed(env.rank as u32)).0;
        tally.item(touched, || format!("{what}: {touched} bytes were written"));
        let flagged = flags.bytes(0, flags.len()).iter().filter(|&&b| b != 0).count() as u64;
        tally.item(flagged, || format!("{what}: {flagged} bytes were written where signals are"));
        let failed = set.device.thread(0, Pen::plain(), env);
        let signals = (0..SIGNALS as u32)
            .filter(|&id| failed.read_signal(id) != 0 || (id != CAME && thread.read_signal(id) != 0));
        let signals = signals.count() as u64;
        tally.item(signals, || format!("{what}: {signals} signals were added to"));
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
