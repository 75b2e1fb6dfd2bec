//! Send entries that are not for the kernel, which refuses them as it does such descriptors.

use super::queue::{Entry, Queue, Window};
use super::refused::{behind, bench_with_others, check_all_refused, check_left_alone, check_refused};
use super::sends::{Kind, Send, COMPLETES, SINK};
use super::*;

/// The windows of an entry, and numbers of its queue.
struct Around {
    from: Window,
    to: Window,
    /// One that is only read.
    read: Window,
    most: u64,
    slots: u16,
}

type Spoil = fn(&mut Send, &Around);

/// Of the first address from there on that is a multiple of 16, the offset.
fn aligned(base: u64) -> u64 {
    base.next_multiple_of(16) - base
}

/// Of a put of 64 bytes.
const PUTS: &[(&str, Spoil)] = &[
    ("nothing, of three segments", |s, _| s.opcode = 0x00),
    ("wait", |s, _| (s.opcode, s.segments) = (0x0f, 2)),
    ("dump", |s, _| (s.opcode, s.segments) = (0x23, 2)),
    ("a fence", |s, _| s.flags |= 0x20),
    ("the other fence", |s, _| s.flags |= 0x80),
    ("write with a value for who waits", |s, _| s.opcode = 0x09),
    ("an opcode of 5 bits", |s, _| s.opcode = 0x18),
    ("an opcode of 8 bits", |s, _| s.opcode = 0x88),
    ("an addition that is a put", |s, _| s.opcode = 0x12),
    ("modifier", |s, _| s.modifier = 1),
    ("modifier of 8 bits", |s, _| s.modifier = 0x80),
    ("no segments", |s, _| s.segments = 0),
    ("two segments", |s, _| s.segments = 2),
    ("two ranges", |s, _| s.segments = 4),
    ("five segments", |s, _| s.segments = 5),
    ("segments of 6 bits", |s, _| s.segments = 0x23),
    ("the next one's index", |s, _| s.index = 1),
    ("an index of the lap before", |s, a| s.index = a.slots),
    ("the high byte of another index", |s, _| s.index = 0x8000),
    ("another queue pair in the low byte", |s, _| s.number ^= 1),
    ("… in the middle one", |s, _| s.number ^= 0x100),
    ("… in the high one", |s, _| s.number ^= 0x80_0000),
    ("source's key unknown", |s, _| s.lkey ^= 1 << 31),
    ("… in its low byte", |s, _| s.lkey ^= 0x10),
    ("source's key none", |s, _| s.lkey = 0),
    ("source's key all ones", |s, _| s.lkey = u32::MAX),
    ("source's key the sink's", |s, _| s.lkey = SINK),
    ("target's key unknown", |s, _| s.rkey ^= 1 << 31),
    ("… in its middle", |s, _| s.rkey ^= 1 << 20),
    ("target's key none", |s, _| s.rkey = 0),
    ("target's key all ones", |s, _| s.rkey = u32::MAX),
    ("target's key the sink's", |s, _| s.rkey = SINK),
    ("source ends behind its window", |s, a| s.local = behind(a.from.here, a.from.here_bytes, 64, 4)),
    ("target ends behind its window", |s, a| s.remote = behind(a.to.peer, a.to.peer_bytes, 64, 4)),
    ("source begins behind its window", |s, a| s.local = behind(a.from.here, a.from.here_bytes, 0, 4)),
    ("target begins behind its window", |s, a| s.remote = behind(a.to.peer, a.to.peer_bytes, 0, 4)),
    ("source is far away", |s, _| s.local += 1 << 40),
    ("target is far away", |s, _| s.remote += 1 << 40),
    ("source is farthest away", |s, _| s.local |= 1 << 63),
    ("target is farthest away", |s, _| s.remote |= 1 << 63),
    ("source is before its window, as it were", |s, _| s.local = u64::MAX - 63),
    ("target is before its window, as it were", |s, _| s.remote = u64::MAX - 63),
    ("source all ones", |s, _| s.local = u64::MAX),
    ("target all ones", |s, _| s.remote = u64::MAX),
    ("source is not aligned", |s, _| s.local += 2),
    ("target is not aligned", |s, _| s.remote += 1),
    ("size is not aligned", |s, _| s.len = 62),
    ("no bytes", |s, _| s.len = 0),
    ("longer than a copy may be", |s, a| s.len = (8 * a.most).next_multiple_of(4) as u32 + 4),
    ("longer than a message", |s, _| s.len = (1 << 30) + 4),
    ("as long as can be", |s, _| s.len = 0x7fff_fffc),
    ("a length of all ones", |s, _| s.len = u32::MAX),
    ("so many bytes in the entry", |s, _| s.len |= 1 << 31),
];

/// Of a value of 8 bytes.
const VALUES: &[(&str, Spoil)] = &[
    ("no value", |s, _| s.len = 0),
    ("a value of 3 bytes", |s, _| s.len = 3),
    ("a value of 5 bytes", |s, _| s.len = 5),
    ("a value of 7 bytes", |s, _| s.len = 7),
    ("a value of 12 bytes", |s, _| s.len = 12),
    ("a value of 16 bytes", |s, _| (s.len, s.segments) = (16, 4)),
    ("a value of 28 bytes", |s, _| (s.len, s.segments) = (28, 4)),
    ("a value longer than a byte tells", |s, _| s.len |= 1 << 8),
    ("a value longer than 3 bytes tell", |s, _| s.len |= 1 << 30),
    ("value is not aligned", |s, _| s.remote += 4),
    ("short value is not aligned", |s, _| (s.len, s.remote) = (2, s.remote + 1)),
    ("value of 4 is not aligned", |s, _| (s.len, s.remote) = (4, s.remote + 2)),
    ("value's key unknown", |s, _| s.rkey ^= 1 << 8),
    ("value's key none", |s, _| s.rkey = 0),
    ("value ends behind its window", |s, a| s.remote = behind(a.to.peer, a.to.peer_bytes, 8, 8)),
    ("value is far away", |s, _| s.remote = u64::MAX - 7),
    ("value with a modifier", |s, _| s.modifier = 8),
    ("value of two segments", |s, _| s.segments = 2),
    ("value of five segments", |s, _| s.segments = 5),
    ("value that is read", |s, _| s.opcode = 0x10),
    ("value that is added", |s, _| (s.opcode, s.segments) = (0x12, 4)),
    ("value of another queue pair", |s, _| s.number ^= 2),
    ("value of another index", |s, _| s.index = 0x100),
    ("value for what is only read", |s, a| (s.rkey, s.remote) = (a.read.key(), aligned(a.read.here))),
];

/// Of an addition.
const ADDITIONS: &[(&str, Spoil)] = &[
    ("masked addition of 8 bytes", |s, _| (s.opcode, s.modifier) = (0x15, 9)),
    ("masked addition of 4 bytes", |s, _| (s.opcode, s.modifier, s.len) = (0x15, 8, 4)),
    ("masked swap", |s, _| (s.opcode, s.modifier, s.len) = (0x14, 8, 4)),
    ("swap", |s, _| s.opcode = 0x11),
    ("addition with a modifier", |s, _| s.modifier = 9),
    ("addition of three segments", |s, _| s.segments = 3),
    ("addition of five segments", |s, _| s.segments = 5),
    ("old value of 4 bytes", |s, _| s.len = 4),
    ("old value of 16 bytes", |s, _| s.len = 16),
    ("old value of no bytes", |s, _| s.len = 0),
    ("old value in the entry", |s, _| s.len |= 1 << 31),
    ("old value to a window", |s, a| s.lkey = a.from.key()),
    ("old value to no key", |s, _| s.lkey = 0),
    ("old value to another sink", |s, _| s.lkey |= 1),
    ("old value behind the sink", |s, _| s.local = 8),
    ("old value far behind the sink", |s, _| s.local = 1 << 40),
    ("word is not aligned", |s, _| s.remote += 4),
    ("word's key unknown", |s, _| s.rkey ^= 1 << 9),
    ("word's key none", |s, _| s.rkey = 0),
    ("word ends behind its window", |s, a| s.remote = behind(a.to.peer, a.to.peer_bytes, 8, 8)),
    ("word begins behind its window", |s, a| s.remote = behind(a.to.peer, a.to.peer_bytes, 0, 8)),
    ("word is far away", |s, _| s.remote = u64::MAX - 7),
    ("addition of another queue pair", |s, _| s.number ^= 1 << 16),
    ("addition of another index", |s, _| s.index = 0xffff),
    ("addition to what is only read", |s, a| (s.rkey, s.remote) = (a.read.key(), aligned(a.read.here))),
];

/// Of one that asks for nothing.
const NOPS: &[(&str, Spoil)] = &[
    ("nothing with a modifier", |s, _| s.modifier = 1),
    ("nothing of no segments", |s, _| s.segments = 0),
    ("nothing of two segments", |s, _| s.segments = 2),
    ("nothing of four segments", |s, _| s.segments = 4),
    ("nothing of another queue pair", |s, _| s.number ^= 1 << 8),
    ("nothing of another index", |s, _| s.index = 1),
    ("wait of one segment", |s, _| s.opcode = 0x0f),
    ("write of one segment", |s, _| s.opcode = 0x08),
    ("addition of one segment", |s, _| s.opcode = 0x12),
];

/// Of a read of 64 bytes: of what is only read, to a place here.
const READS: &[(&str, Spoil)] = &[
    ("a read with a modifier", |s, _| s.modifier = 1),
    ("a read of two segments", |s, _| s.segments = 2),
    ("a read of two ranges", |s, _| s.segments = 4),
    ("a read into the entry", |s, _| s.len |= 1 << 31),
    ("a read with a fence", |s, _| s.flags |= 0x40),
    ("a read of another queue pair", |s, _| s.number ^= 1),
    ("a read of another index", |s, _| s.index = 1),
    ("a read of an unknown window", |s, _| s.rkey ^= 1 << 30),
    ("a read to an unknown window", |s, _| s.lkey ^= 1 << 30),
    ("a read to the sink", |s, _| s.lkey = SINK),
    ("a read ends behind its window", |s, a| s.remote = behind(a.from.here, a.from.here_bytes, 64, 4)),
    ("a read ends behind its window here", |s, a| s.local = behind(a.from.peer, a.from.peer_bytes, 64, 4)),
    ("a read is far away", |s, _| s.remote |= 1 << 63),
    ("a read goes far away", |s, _| s.local |= 1 << 63),
    ("a read is not aligned", |s, _| s.remote += 2),
    ("a read is not aligned here", |s, _| s.local += 1),
    ("a read's size is not aligned", |s, _| s.len = 62),
    ("a read of no bytes", |s, _| s.len = 0),
    ("a read longer than a copy may be", |s, a| s.len = (8 * a.most).next_multiple_of(4) as u32 + 4),
    ("a write to what is only read", |s, a| (s.opcode, s.local) = (0x08, aligned(a.read.peer))),
];

/// Of a dump of 8 bytes of the sink.
const DUMPS: &[(&str, Spoil)] = &[
    ("a dump with a modifier", |s, _| s.modifier = 1),
    ("a dump of one segment", |s, _| s.segments = 1),
    ("a dump of three segments", |s, _| s.segments = 3),
    ("a dump of a window", |s, a| s.lkey = a.to.key()),
    ("a dump of no bytes", |s, _| s.len = 0),
    ("a dump of 9 bytes", |s, _| s.len = 9),
    ("a dump of many bytes", |s, _| s.len = 1 << 24),
    ("a dump behind the sink", |s, _| s.local = 1),
    ("a dump far behind the sink", |s, _| s.local = 1 << 40),
    ("a dump of another queue pair", |s, _| s.number ^= 1 << 8),
];

/// An entry that would be taken, and what it is spoiled with.
fn spoiled(q: &mut Queue, kind: Kind, spoil: Option<Spoil>, random: &mut Random) -> Entry {
    let (mut remote, mut to) = q.target(64, 64, random).expect("room");
    let mut from = *q.window(random);
    let mut local = aligned(from.here);
    let read = *q.turned(random);
    if kind == Kind::Read {
        (from, to, remote, local) = (read, read, aligned(read.here), aligned(read.peer));
    }
    let s = q.send(kind, (remote, to.key()), random);
    let mut s = match kind {
        Kind::Put => Send { len: 64, lkey: from.key(), local, ..s },
        Kind::Value => Send { len: 8, value: random.next(), ..s },
        Kind::Addition => Send { len: 8, lkey: SINK, value: random.next(), ..s },
        Kind::Nop => s,
        Kind::Read => Send { len: 64, lkey: from.key(), local, ..s },
        Kind::Dump => Send { len: 8, lkey: SINK, ..s },
    };
    let around = Around { from, to, read, most: q.most, slots: q.slots as u16 };
    spoil.into_iter().for_each(|spoil| spoil(&mut s, &around));
    Entry::new(s.words(), None, None)
}

fn serve_refused(ptx: &str, seed: u64, name: &str, kind: Kind, spoil: Spoil) {
    let mut bench = bench_with_others(Slots::Sends, ptx, seed);
    let place = bench.any_place();
    let q = bench.queues[place].as_mut().expect("a queue");
    let bad = spoiled(q, kind, Some(spoil), &mut bench.gpu.random);
    check_refused(bench, place, bad, name);
}

fn all() -> impl Iterator<Item = (&'static (&'static str, Spoil), Kind)> {
    let of = |list: &'static [(&'static str, Spoil)], kind| list.iter().map(move |one| (one, kind));
    let written = of(PUTS, Kind::Put).chain(of(VALUES, Kind::Value)).chain(of(ADDITIONS, Kind::Addition));
    written.chain(of(NOPS, Kind::Nop)).chain(of(READS, Kind::Read)).chain(of(DUMPS, Kind::Dump))
}

/// One of them, by its name.
pub fn serve_refused_send(ptx: &str, seed: u64, name: &str) {
    let (&(name, spoil), kind) = all().find(|((n, _), _)| *n == name).expect(name);
    serve_refused(ptx, seed, name, kind, spoil);
}

/// Each of these is refused; `first`: from which number on every second one.
fn serve_refusals(seed: u64, first: usize) {
    for (n, (&(name, spoil), kind)) in (0..).zip(all()).skip(first).step_by(2) {
        serve_refused(PTX, seed + n, name, kind, spoil);
    }
}

#[test]
fn what_is_not_for_it_is_refused() {
    serve_refusals(0, 0);
}

#[test]
fn what_is_not_for_it_is_refused_too() {
    serve_refusals(0, 1);
}

/// A put that is refused, as it has a modifier.
pub fn bad_send(q: &mut Queue, random: &mut Random) -> Entry {
    spoiled(q, Kind::Put, Some(|s, _| s.modifier = 1), random)
}

/// One that is alone in its queue is refused once.
pub fn serve_refused_alone(ptx: &str, seed: u64) {
    let mut bench = bench_with_others(Slots::Sends, ptx, seed);
    bench.late_every = 0;
    let place = bench.any_place();
    let q = bench.queues[place].as_mut().expect("a queue");
    let bad = bad_send(q, &mut bench.gpu.random);
    bench.launch(NEVER, NEVER);
    bench.go();
    bench.post(vec![(place, bad)], 1);
    bench.run_until(|b| b.position(place).1);
    check_left_alone(&mut bench, place, "modifier");
}

/// One that asks for no completion entry, where these tell device code what is complete.
pub fn serve_unasked(ptx: &str, seed: u64) {
    let mut bench = bench_with_others(Slots::Bells, ptx, seed);
    let place = bench.any_place();
    let q = bench.queues[place].as_mut().expect("a queue");
    let kind = [Kind::Put, Kind::Value, Kind::Addition, Kind::Nop][seed as usize % 4];
    let bad = spoiled(q, kind, Some(|s, _| s.flags &= !COMPLETES), &mut bench.gpu.random);
    check_refused(bench, place, bad, "no completion entry");
}

/// In all queues one is refused, behind additions that are taken with one look.
pub fn serve_all_refused_sends(slots: Slots, ptx: &str, seed: u64) {
    let is_wanted = |e: &Entry| e.signal.is_some_and(|s| !s.is_shared);
    check_all_refused(slots, ptx, seed, is_wanted, bad_send);
}

#[test]
fn all_are_refused() {
    (0..3).for_each(|seed| serve_all_refused_sends(Slots::Sends, PTX, seed));
    (0..3).for_each(|seed| serve_refused_alone(PTX, seed));
}

/// What the lists spoil would be taken.
#[test]
fn what_is_not_spoiled_is_taken() {
    for seed in 0..12 {
        let mut bench = Bench::of(Slots::Sends, PTX, seed, seed % 4, 1);
        let place = bench.any_place();
        let q = bench.queues[place].as_mut().expect("a queue");
        let kind = [Kind::Put, Kind::Value, Kind::Addition, Kind::Nop, Kind::Read, Kind::Dump][seed as usize % 6];
        let entry = spoiled(q, kind, None, &mut bench.gpu.random);
        bench.post(vec![(place, entry)], 1);
        bench.launch(NEVER, NEVER);
        bench.go();
        bench.run_until(|b| b.left() == 0);
    }
}

/// One that is not for the kernel is not refused before it is rung.
#[test]
fn what_is_not_rung_is_not_refused() {
    for seed in 0..4 {
        let mut bench = Bench::of(Slots::Sends, PTX, seed, seed % 4, 2);
        let place = bench.any_place();
        let q = bench.queues[place].as_mut().expect("a queue");
        let bad = bad_send(q, &mut bench.gpu.random);
        bench.launch(NEVER, NEVER);
        bench.go();
        bench.late_every = 0;
        bench.send(vec![(place, bad)], Some(0), 1);
        bench.run(20_000);
        assert!(!bench.position(place).1);
        bench.ring_late();
        bench.run_until(|b| b.position(place).1);
    }
}
