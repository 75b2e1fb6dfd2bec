//! Reads among send entries: they bring what the peer has, and what was sent before them, and nothing that is sent
//! after them.

use super::held::wide;
use super::order::serve_fast;
use super::queue::{Data, Entry, Queue};
use super::reads::{ReadPlace, Written};
use super::sends::{Kind, Send, DUMP, READ, SINK, WRITE};
use super::*;

/// Whether a send entry is one.
pub fn is_read(entry: &Entry) -> bool {
    entry.words[0].to_le_bytes()[3] == READ
}

impl Queue {
    /// A read of what the peer has, or of what was sent last; an addition where there is no window for it, or no room.
    pub fn read_send(&mut self, random: &mut Random) -> Entry {
        let sent = self.sent_last(random);
        self.read_of(sent, random)
    }

    fn read_of(&mut self, sent: Option<Written>, random: &mut Random) -> Entry {
        let Some(ReadPlace { of, local, turned }) = self.read_place(sent, random) else {
            return self.addition(true, random);
        };
        let send = self.send(Kind::Read, (of.at, of.handle as u32), random);
        let send = Send { len: of.data.bytes() as u32, lkey: turned.key(), local, ..send };
        Entry::new(send.words(), Some(of.data.at(turned.peer + local)), None)
    }

    /// A dump of some of the sink.
    pub fn dump(&mut self, random: &mut Random) -> Entry {
        let (len, send) = (1 + random.below(8), self.send(Kind::Dump, (0, 0), random));
        Entry::new(Send { len: len as u32, lkey: SINK, local: random.below(9 - len), ..send }.words(), None, None)
    }
}

/// Reads alone.
pub fn serve_reads(ptx: &str, seed: u64) {
    // Windows for them are not in all queues.
    serve_fast(Slots::Sends, ptx, seed, seed % 4, |e, _| is_read(e) || e.signal.is_some_and(|s| s.is_shared));
}

/// What is sent, and reads of it.
pub fn serve_reads_behind(ptx: &str, seed: u64) {
    serve_fast(Slots::Sends, ptx, seed, seed % 4, |e, n| match n % 2 {
        0 => e.words[0].to_le_bytes()[3] == WRITE,
        _ => is_read(e) || e.signal.is_some_and(|s| s.is_shared),
    });
}

/// Additions to words of their own, then reads of them.
pub fn serve_reads_of_words(ptx: &str, seed: u64) {
    serve_fast(Slots::Sends, ptx, seed, 0, |e, n| match n % 16 {
        0..8 => e.signal.is_some_and(|s| !s.is_shared),
        _ => is_read(e) || e.signal.is_some_and(|s| s.is_shared),
    });
}

/// Full looks of additions, each followed by a read of the last one's word.
pub fn serve_held_words(ptx: &str, seed: u64) {
    let mut bench = wide(Slots::Sends, ptx, 4 * seed, None);
    let place = bench.places()[0];
    let q = bench.queues[place].as_mut().expect("a queue");
    q.slots = 32;
    q.turned(&mut bench.gpu.random);
    bench.empty_queues();
    bench.launch(NEVER, NEVER);
    bench.go();
    for _ in 0..8 {
        let (q, random) = (bench.queues[place].as_mut().expect("a queue"), &mut bench.gpu.random);
        let mut all: Vec<_> = (0..8).map(|_| (place, q.addition(false, random))).collect();
        all.push((place, q.read_of(q.written, random)));
        all.extend((0..7).map(|_| (place, q.addition(true, random))));
        bench.post(all, 1);
        bench.run_until(|b| b.left() == 0);
    }
    bench.finish();
}

/// Dumps alone.
pub fn serve_dumps(ptx: &str, seed: u64) {
    serve_fast(Slots::Sends, ptx, seed, seed % 4, |e, _| e.words[0].to_le_bytes()[3] == DUMP);
}

/// A value goes to where a read before it reads, which brings what was there.
pub fn serve_read_in_front(ptx: &str, seed: u64) {
    let mut bench = Bench::of(Slots::Sends, ptx, seed, seed % 4, 2);
    bench.late_every = 0;
    let place = bench.any_place();
    for _ in 0..20 {
        let (q, random) = (bench.queues[place].as_mut().expect("a queue"), &mut bench.gpu.random);
        let Some((remote, w)) = q.target(8, 8, random) else { return };
        let turned = q.turned(random);
        let (Some(local), turned) = (turned.room(8, 8, &mut bench.gpu.random), *turned) else { return };
        let random = &mut bench.gpu.random;
        let read = Send { len: 8, lkey: turned.key(), local, ..q.send(Kind::Read, (remote, w.key()), random) };
        // Nothing was there.
        let read = Entry::new(read.words(), None, None);
        let value = 0x0101_0101_0101_0101;
        let write = Send { len: 8, value, ..q.send(Kind::Value, (remote, w.key()), random) };
        let write = Entry::new(write.words(), Some(Data::Value { value, to: w.peer + remote, bytes: 8 }), None);
        let others =
            [(); 2].map(|()| bench.queues[place].as_mut().expect("a queue").addition(true, &mut bench.gpu.random));
        bench.post(vec![(place, others[0]), (place, read), (place, write), (place, others[1])], 1);
        bench.launch(NEVER, NEVER);
        bench.go();
        bench.run_until(|b| b.left() == 0);
        bench.finish();
    }
}

#[test]
fn reads_are_served() {
    (0..8).for_each(|seed| serve_reads(PTX, seed));
    (0..8).for_each(|seed| serve_reads_of_words(PTX, seed));
    (0..8).for_each(|seed| serve_held_words(PTX, seed));
    (0..4).for_each(|seed| serve_dumps(PTX, seed));
}

#[test]
fn a_read_sees_what_was_sent_before_it() {
    (0..12).for_each(|seed| serve_reads_behind(PTX, seed));
}

#[test]
fn a_read_does_not_see_what_is_sent_after_it() {
    (0..12).for_each(|seed| serve_read_in_front(PTX, seed));
}
