//! Gets and flushes among descriptors: gets bring what the peer has, and what was sent before them, and nothing that is
//! sent after them; flushes ask for nothing.

use super::order::serve_fast_on;
use super::queue::{Data, Entry, Queue};
use super::reads::ReadPlace;
use super::refused::{check_refused_at, lengthen, run_until_refused};
use super::*;
use nccl_plugin_api::descriptor::{Descriptor, Form, OP_FLUSH, OP_GET, OP_INLINE, OP_PUT};

impl Queue {
    pub fn op(&self, entry: &Entry) -> u16 {
        Descriptor { words: entry.words, form: self.form }.op()
    }

    /// A get of what the peer has, or of what was sent last; a signal alone where it has no window or room.
    pub fn get_entry(&mut self, random: &mut Random) -> Entry {
        let sent = self.sent_last(random);
        let Some(ReadPlace { of, local, turned }) = self.read_place(sent, random) else {
            return self.put_entry(None, 4, random);
        };
        let d = Descriptor::new(self.form, self.version(random), OP_GET, of.data.bytes());
        let d = d.first(of.at, of.handle).second(local, turned.handle);
        // Nobody looks at a signal.
        let d = d.with_signal(random.next() as u32 & 0xff_ffff, random.next(), random.below(2) == 0);
        Entry::new(d.words, Some(of.data.at(turned.peer + local)), None)
    }

    /// Nothing but its operation is looked at.
    pub fn flush_entry(&mut self, random: &mut Random) -> Entry {
        let size = [0, 0, random.next() >> 7][random.below(3) as usize];
        let d = Descriptor::new(self.form, self.version(random), OP_FLUSH, size);
        let mut any = || [0, random.next() >> 1][random.below(2) as usize];
        Entry::new(d.first(any(), any()).second(any(), any()).words, None, None)
    }
}

/// A queue that may have gets, and others.
fn bench_of_gets(ptx: &str, seed: u64, queues: u64) -> (Bench, usize) {
    let mut bench = Bench::of(Slots::Descriptors, ptx, seed, seed % 4, queues);
    let place = bench.any_place();
    lengthen(&mut bench, place);
    let q = bench.queues[place].as_mut().expect("a queue");
    // One of four is free, or is for others.
    if q.windows.iter().flatten().all(|w| !w.is_turned) {
        q.windows[3] = None;
        q.windows[0].get_or_insert_with(|| queue::Window::new(q.number, 0, &mut bench.gpu.random));
    }
    q.turned(&mut bench.gpu.random);
    q.has_gets = true;
    bench.empty_queues();
    (bench, place)
}

/// Those of a kind, of which each comes as soon as the index allows.
fn serve_kind(ptx: &str, seed: u64, kind: fn(&Queue, &Entry, usize) -> bool) {
    let (bench, place) = bench_of_gets(ptx, seed, 1);
    serve_fast_on(bench, place, kind);
}

fn is_shared_signal(e: &Entry) -> bool {
    e.signal.is_some_and(|s| s.is_shared)
}

/// Some launches of queues that have anything.
pub fn serve_anything(ptx: &str, seed: u64) {
    let (mut bench, _) = bench_of_gets(ptx, seed, [1, 2, 5][seed as usize % 3]);
    for q in bench.queues.iter_mut().flatten().filter(|q| q.form == Form::Bytes128) {
        q.has_gets = true;
    }
    serve_launches(bench);
}

/// Gets alone.
pub fn serve_gets(ptx: &str, seed: u64) {
    serve_kind(ptx, seed, |q, e, _| q.is_read(e) || is_shared_signal(e) && e.data.is_none());
}

/// What is sent, and gets of it.
pub fn serve_gets_behind(ptx: &str, seed: u64) {
    serve_kind(ptx, seed, |q, e, n| match n % 2 {
        0 => q.op(e) & OP_PUT != 0 && e.data.is_some(),
        _ => q.is_read(e) || is_shared_signal(e) && e.data.is_none(),
    });
}

/// A get, and then puts that are alike.
pub fn serve_puts_behind(ptx: &str, seed: u64) {
    serve_kind(ptx, seed, |q, e, n| match n % 4 {
        0 => q.is_read(e) || is_shared_signal(e) && e.data.is_none(),
        _ => q.op(e) == OP_PUT && e.bytes() == 64,
    });
}

/// Flushes alone.
pub fn serve_flushes(ptx: &str, seed: u64) {
    serve_kind(ptx, seed, |q, e, _| q.op(e) == OP_FLUSH);
}

/// A value goes to where a get before it gets from, which brings what was there.
pub fn serve_get_in_front(ptx: &str, seed: u64) {
    let (mut bench, place) = bench_of_gets(ptx, seed, 1);
    bench.late_every = 0;
    for _ in 0..20 {
        let (q, random) = (bench.queues[place].as_mut().expect("a queue"), &mut bench.gpu.random);
        let Some((remote, w)) = q.target(8, 8, random) else { return };
        let turned = q.turned(random);
        let (Some(local), turned) = (turned.room(8, 8, random), *turned) else { return };
        let version = q.version(random);
        let get = Descriptor::new(q.form, version, OP_GET, 8).first(remote, w.handle).second(local, turned.handle);
        // Nothing was there.
        let get = Entry::new(get.words, None, None);
        let value = 0x0101_0101_0101_0101;
        let write = Descriptor::new(q.form, version, OP_PUT | OP_INLINE, 8).value(value).second(remote, w.handle);
        let write = Entry::new(write.words, Some(Data::Value { value, to: w.peer + remote, bytes: 8 }), None);
        let [first, last] = [(); 2].map(|()| q.put_entry(None, 4, random));
        bench.post(vec![(place, first), (place, get), (place, write), (place, last)], 1);
        bench.launch(NEVER, NEVER);
        bench.go();
        bench.run_until(|b| b.left() == 0);
        bench.finish();
    }
}

/// The first offset that is a multiple of 4 and leaves less than 64 of so many bytes.
fn past_end(bytes: u64) -> u64 {
    (bytes - 64) / 4 * 4 + 4
}

/// A get that is not for the kernel, for this reason, among others.
pub fn serve_refused_get(ptx: &str, seed: u64, name: &str) {
    let (mut bench, place) = bench_of_gets(ptx, seed, 3);
    let (q, random) = (bench.queues[place].as_mut().expect("a queue"), &mut bench.gpu.random);
    let (turned, w) = (*q.turned(random), *q.window(random));
    let (mut from, mut to, mut size) = ((0, turned.handle), (0, turned.handle), 64);
    let align = |base: u64| base.next_multiple_of(16) - base;
    (from.0, to.0) = (align(turned.here), align(turned.peer));
    match name {
        "the peer's window unknown" => from.1 ^= 1 << 40,
        "the own window unknown" => to.1 ^= 1 << 40,
        "it begins behind the peer's window" => from.0 += turned.here_bytes.next_multiple_of(4),
        "it ends behind the peer's window" => from.0 = past_end(turned.here_bytes),
        "it ends behind the own window" => to.0 = past_end(turned.peer_bytes),
        "it is not aligned at the peer" => from.0 += 2,
        "it is not aligned here" => to.0 += 1,
        "its size is not aligned" => size = 62,
        "a put to what is only read" => (from, to) = ((align(w.here), w.handle), (align(turned.here), turned.handle)),
        _ => panic!("{name}"),
    }
    let op = if name.starts_with("a put") { OP_PUT } else { OP_GET };
    let d = Descriptor::new(q.form, q.version(random), op, size).first(from.0, from.1).second(to.0, to.1);
    let posted = u64::from(q.slots).min(6);
    let at = bench.below(posted);
    let bad = Entry::new(d.words, None, None);
    let entries = (0..posted).map(|i| if i == at { bad } else { bench.entry(place) }).collect();
    check_refused_at(bench, place, entries, at as usize, name);
}

/// Behind a get another one that is like it, and ends behind one of its windows.
pub fn serve_refused_behind(ptx: &str, seed: u64) {
    let (mut bench, place) = bench_of_gets(ptx, seed, 1);
    bench.launch(NEVER, NEVER);
    bench.go();
    let (q, random) = (bench.queues[place].as_mut().expect("a queue"), &mut bench.gpu.random);
    let (version, turned) = (q.newest as u8, q.turned(random));
    let (from, local) = (turned.here.next_multiple_of(16) - turned.here, turned.room(64, 16, random).expect("room"));
    let turned = *turned;
    let get = |from, to| {
        let d = Descriptor::new(Form::Bytes128, version, OP_GET, 64);
        d.first(from, turned.handle).second(to, turned.handle).words
    };
    let data = Data::Copy { from: turned.here + from, to: turned.peer + local, bytes: 64 };
    bench.post(vec![(place, Entry::new(get(from, local), Some(data), None))], 1);
    bench.run_until(|b| b.left() == 0);
    // Inside the other end's window, if that is longer.
    let bad = match turned.here_bytes < turned.peer_bytes {
        true => get(past_end(turned.here_bytes), local),
        false => get(from, past_end(turned.peer_bytes)),
    };
    bench.post(vec![(place, Entry::new(bad, None, None))], 1);
    run_until_refused(&mut bench, place, 1, "it ends behind a window");
}

#[test]
fn gets_are_served() {
    (0..8).for_each(|seed| serve_anything(PTX, seed));
    (0..8).for_each(|seed| serve_gets(PTX, seed));
    (0..4).for_each(|seed| serve_puts_behind(PTX, seed));
    (0..4).for_each(|seed| serve_flushes(PTX, seed));
}

#[test]
fn a_get_brings_what_was_sent_before_it() {
    (0..12).for_each(|seed| serve_gets_behind(PTX, seed));
}

#[test]
fn a_get_does_not_bring_what_is_sent_after_it() {
    (0..12).for_each(|seed| serve_get_in_front(PTX, seed));
}

#[test]
fn a_get_of_what_is_not_there_is_refused() {
    (0..8).for_each(|seed| serve_refused_behind(PTX, seed));
    let all = [
        "the peer's window unknown",
        "the own window unknown",
        "it begins behind the peer's window",
        "it ends behind the peer's window",
        "it ends behind the own window",
        "it is not aligned at the peer",
        "it is not aligned here",
        "its size is not aligned",
        "a put to what is only read",
    ];
    (0..).zip(all).for_each(|(seed, name)| (0..2).for_each(|n| serve_refused_get(PTX, 2 * seed + n, name)));
}
