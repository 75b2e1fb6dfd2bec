//! Descriptors that are not for the kernel: those before are done, it and those behind it are never touched, and other
//! queues go on.

use super::queue::{Entry, Queue, Window};
use super::*;
use nccl_plugin_api::descriptor::*;

/// What a descriptor is made of, each for itself.
#[derive(Clone, Copy)]
struct Parts {
    version: u8,
    op: u16,
    size: u64,
    first: (u64, u64),
    second: (u64, u64),
    signal: u32,
}

/// The windows of a descriptor, and numbers of its queue.
struct Around {
    from: Window,
    to: Window,
    newest: u8,
    most: u64,
    signals: u32,
}

type Spoil = fn(&mut Parts, &Around);

/// The last place for so many bytes that are aligned, and what follows it.
pub fn behind(base: u64, bytes: u64, size: u64, unit: u64) -> u64 {
    (base + bytes - size) / unit * unit + unit - base
}

const PUT_ADDS: u16 = OP_PUT | OP_SIGNAL_ADD;

/// Of a put of 64 bytes with a signal.
const PUTS: &[(&str, Spoil)] = &[
    ("first window unknown", |p, _| p.first.1 ^= 1 << 40),
    ("second window unknown", |p, _| p.second.1 ^= 1 << 62),
    ("first window none", |p, _| p.first.1 = 0),
    ("second window none", |p, _| p.second.1 = 0),
    ("first window all ones", |p, _| p.first.1 = u64::MAX >> 1),
    ("source ends behind its window", |p, a| p.first.0 = behind(a.from.here, a.from.here_bytes, 64, 4)),
    ("target ends behind its window", |p, a| p.second.0 = behind(a.to.peer, a.to.peer_bytes, 64, 4)),
    ("source begins behind its window", |p, a| p.first.0 = behind(a.from.here, a.from.here_bytes, 0, 4)),
    ("target begins behind its window", |p, a| p.second.0 = behind(a.to.peer, a.to.peer_bytes, 0, 4)),
    ("source is far away", |p, _| p.first.0 += 1 << 40),
    ("target is far away", |p, _| p.second.0 += 1 << 40),
    ("source is before its window, as it were", |p, _| p.first.0 = (1 << 63) - 64),
    ("target is before its window, as it were", |p, _| p.second.0 = (1 << 63) - 64),
    ("source is not aligned", |p, _| p.first.0 += 2),
    ("target is not aligned", |p, _| p.second.0 += 1),
    ("size is not aligned", |p, _| p.size = 62),
    ("longer than a copy may be", |p, a| p.size = (8 * a.most).next_multiple_of(4) + 4),
    ("longer than 32 bits tell", |p, _| p.size |= 1 << 32),
    ("as long as can be", |p, _| p.size = (1 << 57) - 4),
    ("longer than all memory", |p, _| (p.size, p.first.0, p.second.0) = ((1 << 57) - 64, 64, 64)),
    ("nothing to do", |p, _| (p.op, p.size) = (OP_PUT, 0)),
    ("counter", |p, _| p.op |= OP_COUNTER),
    ("counter alone", |p, _| p.op = OP_PUT | OP_COUNTER),
    ("both signals", |p, _| p.op |= OP_SIGNAL_INC | OP_SIGNAL_ADD),
    ("both signals, no data", |p, _| (p.op, p.size) = (p.op | OP_SIGNAL_INC | OP_SIGNAL_ADD, 0)),
    ("signal without put", |p, _| (p.op, p.size) = (OP_SIGNAL_INC, 0)),
    ("data without put", |p, _| p.op = OP_SIGNAL_ADD),
    ("no operation", |p, _| p.op = 0),
    ("put and signal by window", |p, _| p.op |= OP_VA_SIGNAL),
    ("signal beyond the context's", |p, a| (p.op, p.signal) = (PUT_ADDS, a.signals)),
    ("signal far beyond", |p, _| (p.op, p.signal) = (PUT_ADDS, 0xff_ffff)),
    ("signal alone beyond", |p, a| (p.op, p.signal, p.size) = (PUT_ADDS, a.signals, 0)),
];

/// Of the 128-byte form.
const LONG_PUTS: &[(&str, Spoil)] = &[
    ("get as well", |p, _| p.op |= OP_GET),
    ("get and flush", |p, _| p.op = OP_GET | OP_FLUSH),
    ("get of nothing", |p, _| (p.op, p.size) = (OP_GET, 0)),
    ("flush as well", |p, _| p.op |= OP_FLUSH),
    ("an operation of 16 bits", |p, _| p.op |= 1 << 15),
    ("an operation of 9 bits", |p, _| p.op |= 1 << 8),
    ("no version", |p, _| p.version = 0),
    ("newer version", |p, a| p.version = a.newest + 1),
    ("newest version", |p, _| p.version = 15),
];

/// Of a value of 8 bytes.
const VALUES: &[(&str, Spoil)] = &[
    ("no value", |p, _| p.size = 0),
    ("no value, a signal", |p, _| (p.op, p.size) = (p.op | OP_SIGNAL_INC, 0)),
    ("a value of 3 bytes", |p, _| p.size = 3),
    ("a value of 6 bytes", |p, _| p.size = 6),
    ("a value of 16 bytes", |p, _| p.size = 16),
    ("a value longer than 32 bits tell", |p, _| p.size |= 1 << 32),
    ("value is not aligned", |p, _| p.second.0 += 4),
    ("short value is not aligned", |p, _| (p.size, p.second.0) = (2, p.second.0 + 1)),
    ("value's window unknown", |p, _| p.second.1 ^= 1),
    ("value ends behind its window", |p, a| p.second.0 = behind(a.to.peer, a.to.peer_bytes, 8, 8)),
    ("value is far away", |p, _| p.second.0 = (1 << 63) - 8),
    ("value without put", |p, _| p.op = OP_INLINE),
    ("value with both signals", |p, _| p.op |= OP_SIGNAL_INC | OP_SIGNAL_ADD),
    ("value with a counter", |p, _| p.op |= OP_COUNTER),
    ("value with a signal beyond", |p, a| (p.op, p.signal) = (p.op | OP_SIGNAL_ADD, a.signals)),
];

/// Of a signal by window.
const VA_SIGNALS: &[(&str, Spoil)] = &[
    ("signal by window is not aligned", |p, _| p.first.0 += 4),
    ("signal's window unknown", |p, _| p.first.1 ^= 2),
    ("signal's window none", |p, _| p.first.1 = 0),
    ("signal ends behind its window", |p, a| p.first.0 = behind(a.to.peer, a.to.peer_bytes, 8, 8)),
    ("signal begins behind its window", |p, a| p.first.0 = behind(a.to.peer, a.to.peer_bytes, 0, 8)),
    ("signal is far away", |p, _| p.first.0 = (1 << 63) - 8),
    ("signal by window that adds nothing", |p, _| p.op = OP_VA_SIGNAL),
    ("both signals by window", |p, _| p.op |= OP_SIGNAL_INC | OP_SIGNAL_ADD),
    ("signal by window with a counter", |p, _| p.op |= OP_COUNTER),
    ("signal by window with a value", |p, _| p.op |= OP_INLINE),
];

/// A descriptor that would be taken, and what it is spoiled with.
fn spoiled(q: &mut Queue, kind: usize, spoil: Option<Spoil>, random: &mut Random) -> Entry {
    let (size, op) = [(64, OP_PUT | OP_SIGNAL_INC), (8, OP_PUT | OP_INLINE), (1, OP_VA_SIGNAL | OP_SIGNAL_ADD)][kind];
    let (offset, to) = q.target(64, 64, random).expect("room");
    let from = *q.window(random);
    let first = if kind == 2 { (offset, to.handle) } else { (from.here.next_multiple_of(16) - from.here, from.handle) };
    let (version, second) = (q.version(random), (offset, to.handle));
    let mut p = Parts { version, op, size, first, second, signal: 5 };
    let around = Around { from, to, newest: q.newest as u8, most: q.most, signals: q.signals };
    spoil.into_iter().for_each(|spoil| spoil(&mut p, &around));
    let d = Descriptor::new(q.form, p.version, p.op, p.size).second(p.second.0, p.second.1);
    let d = if kind == 1 { d.value(!0) } else { d.first(p.first.0, p.first.1) };
    Entry::new(d.with_signal(p.signal, 7, true).words, None, None)
}

/// One of these behind some others, in front of some more, while other queues have something, too.
fn serve_refused(ptx: &str, seed: u64, name: &str, kind: usize, spoil: Spoil, is_long: bool) {
    let mut bench = bench_with_others(Slots::Descriptors, ptx, seed);
    let place = bench.any_place();
    if is_long {
        lengthen(&mut bench, place);
    }
    let q = bench.queues[place].as_mut().expect("a queue");
    let bad = spoiled(q, kind, Some(spoil), &mut bench.gpu.random);
    check_refused(bench, place, bad, name);
}

/// The queue has descriptors of 128 bytes.
pub fn lengthen(bench: &mut Bench, place: usize) {
    let q = bench.queues[place].as_mut().expect("a queue");
    if q.form == Form::Bytes64 {
        (q.form, q.stride, q.newest) = (Form::Bytes128, 7, 1);
        bench.empty_queues();
    }
}

/// Two to four queues.
pub fn bench_with_others(slots: Slots, ptx: &str, seed: u64) -> Bench {
    let queues = 2 + Random(seed).below(3);
    Bench::of(slots, ptx, seed, seed % 4, queues)
}

/// This one is posted to a queue among others, and is refused.
pub fn check_refused(mut bench: Bench, place: usize, bad: Entry, name: &str) {
    let posted = u64::from(bench.queue(place).slots).min(12);
    let at = bench.below(posted);
    let entries = (0..posted).map(|i| if i == at { bad } else { bench.entry(place) }).collect();
    check_refused_at(bench, place, entries, at as usize, name);
}

/// These are posted to a queue among others, and the one with this number is refused.
pub fn check_refused_at(mut bench: Bench, place: usize, entries: Vec<Entry>, at: usize, name: &str) {
    bench.launch(NEVER, NEVER);
    bench.go();
    let mut all: Vec<(usize, Entry)> = entries.into_iter().map(|e| (place, e)).collect();
    for other in bench.places().into_iter().filter(|&p| p != place) {
        for _ in 0..4 {
            all.push((other, bench.entry(other)));
        }
    }
    bench.post(all, 3);
    run_until_refused(&mut bench, place, at, name);
    check_left_alone(&mut bench, place, name);
    // Others go on, and get more.
    let rest = bench.queue(place).entries.len() - at;
    bench.run_until(|b| b.left() == rest);
    bench.post_some(6);
    bench.run_until(|b| b.left() == rest);
    bench.finish();
}

/// The entry of a queue with this number is refused, and all before it are done by then.
pub fn run_until_refused(bench: &mut Bench, place: usize, at: usize, name: &str) {
    let mut turns = 0;
    while !bench.position(place).1 {
        bench.run(10);
        turns += 10;
        assert!(bench.taken(place) <= at, "taken: {name}");
        assert!(turns < TOO_LONG, "not refused: {name}");
    }
    bench.check();
    assert_eq!(bench.queue(place).refused, Some(at), "{name}");
}

/// The host has taken over a queue: what it writes to its position stays.
pub fn check_left_alone(bench: &mut Bench, place: usize, name: &str) {
    let position = bench.board() + 256 + 8 * place as u64;
    let said = bench.gpu.memory.read(position, 8);
    bench.gpu.memory.write(position, 8, 0);
    bench.run(3_000);
    assert_eq!(bench.gpu.memory.read(position, 8), 0, "{name}: refused again");
    bench.gpu.memory.write(position, 8, said);
}

/// In all queues one is refused, behind some that are taken with one look; then nothing is left to do.
pub fn serve_all_refused(ptx: &str, seed: u64) {
    let is_wanted = |e: &Entry| e.signal.is_some_and(|s| !s.is_shared) && e.bytes() <= 64;
    check_all_refused(Slots::Descriptors, ptx, seed, is_wanted, bad_descriptor);
}

/// One that is refused, as it has a counter.
pub fn bad_descriptor(q: &mut Queue, random: &mut Random) -> Entry {
    spoiled(q, 0, Some(|p, _| p.op |= OP_COUNTER), random)
}

/// The same with these before one that is not for the kernel.
pub fn check_all_refused(
    slots: Slots,
    ptx: &str,
    seed: u64,
    is_wanted: fn(&Entry) -> bool,
    bad: fn(&mut Queue, &mut Random) -> Entry,
) {
    let spread = seed % 3;
    let mut bench = Bench::of(slots, ptx, seed, spread, 8 << spread);
    for q in bench.queues.iter_mut().flatten() {
        q.slots = q.slots.max(8);
    }
    bench.empty_queues();
    let mut all = Vec::new();
    for place in bench.places() {
        let q = bench.queues[place].as_mut().expect("a queue");
        // While there is room.
        let bad = bad(q, &mut bench.gpu.random);
        for _ in 1..8 >> spread {
            all.push((place, q.entry_of(&mut bench.gpu.random, is_wanted)));
        }
        all.push((place, bad));
    }
    bench.post(all, 1);
    bench.launch(100_000, NEVER);
    bench.go();
    let mut turns = 0;
    while !bench.is_gone() {
        bench.run(5);
        turns += 5;
        bench.check();
        assert!(turns < TOO_LONG, "it goes on without anything to do");
    }
    bench.check_end();
    bench.check_all();
}

#[test]
fn all_are_refused() {
    (0..6).for_each(|seed| serve_all_refused(PTX, seed));
}

/// All lists, and what of them is of the 128-byte form alone.
fn all() -> impl Iterator<Item = (&'static (&'static str, Spoil), usize, bool)> {
    let of = |list: &'static [(&'static str, Spoil)], kind, is_long| list.iter().map(move |one| (one, kind, is_long));
    let puts = of(PUTS, 0, false).chain(of(LONG_PUTS, 0, true));
    puts.chain(of(VALUES, 1, false)).chain(of(VA_SIGNALS, 2, false))
}

/// Each of these is refused; `first`: from which number on every second one.
fn serve_refusals(ptx: &str, seed: u64, first: usize) {
    for (n, (&(name, spoil), kind, is_long)) in (0..).zip(all()).skip(first).step_by(2) {
        serve_refused(ptx, seed + n, name, kind, spoil, is_long);
    }
}

/// One of them, by its name.
pub fn serve_refusal(ptx: &str, seed: u64, name: &str) {
    let (&(name, spoil), kind, is_long) = all().find(|((n, _), ..)| *n == name).expect(name);
    serve_refused(ptx, seed, name, kind, spoil, is_long);
}

#[test]
fn what_is_not_for_it_is_refused() {
    (0..2).for_each(|seed| serve_refusals(PTX, 100 * seed, 0));
}

#[test]
fn what_is_not_for_it_is_refused_too() {
    (0..2).for_each(|seed| serve_refusals(PTX, 100 * seed, 1));
}

/// What the lists spoil would be taken.
#[test]
fn what_is_not_spoiled_is_taken() {
    for seed in 0..12 {
        let mut bench = Bench::new(PTX, seed, seed % 4, 1);
        let place = bench.any_place();
        let q = bench.queues[place].as_mut().expect("a queue");
        let entry = spoiled(q, seed as usize % 3, None, &mut bench.gpu.random);
        bench.post(vec![(place, entry)], 1);
        bench.launch(NEVER, NEVER);
        bench.go();
        bench.run_until(|b| b.left() == 0);
    }
}
