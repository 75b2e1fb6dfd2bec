//! What the copy kernel gets: from host memory of its process and of another one, and from GPU memory of another one
//! that is mapped here. Many at a time, as an embedding table is read.

use crate::harness::copy_kernel::take;
use crate::harness::plan::repeat_until;
use crate::harness::*;
use crate::support::common::{job, Rank, Window};
use crate::support::processes::{processes, Place};

/// Of a piece, in words and bytes.
const WORDS: usize = 32;
const BYTES: usize = 8 * WORDS;
/// Pieces of a table.
const PIECES: usize = 200;
/// What the harness' tables are multiples of, so that a piece in a wrong place is seen.
const STEP: u64 = 1 << 32;

/// Word `i` of `rank`'s table.
fn word(rank: usize, i: usize) -> u64 {
    STEP * (rank as u64 + 1) + i as u64
}

/// Gets all pieces of `peer`'s table, in another order than they lie in, until the copy kernel has done so many more.
fn read_all(fake: &Fake, r: &Rank, table: &Window, back: &GpuWindow, peer: usize) {
    let before = fake.commands();
    let once = || {
        (0..WORDS * PIECES).for_each(|i| back.set(i, 0));
        let piece = |nth: usize| (nth * 77 % PIECES * BYTES) as u64;
        let all: Vec<_> = (0..PIECES)
            .map(|nth| r.get((nth % 2) as i32, (table, piece(nth)), BYTES, (back.as_window(), piece(nth)), peer))
            .collect();
        all.into_iter().for_each(|q| r.wait(q));
        let wrong = (0..WORDS * PIECES).find(|&i| back.get(i) != word(peer, i));
        assert_eq!(wrong.map(|i| (i, back.get(i))), None, "from rank {peer}");
    };
    repeat_until("gets go by the copy kernel", once, || fake.commands() >= before + 2 * PIECES as u64);
}

#[test]
fn from_host_memory_of_its_process() {
    let fake = take();
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let mut table = r.window(WORDS * PIECES, 0);
        table.words.iter_mut().enumerate().for_each(|(i, w)| *w = word(r.rank, i));
        let back = fake.window(r, 0, WORDS * PIECES, 0);
        r.job.barrier.wait();
        if r.rank == 1 {
            // Its own, and another rank's.
            read_all(&fake, r, &table, &back, 1);
            read_all(&fake, r, &table, &back, 0);
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// By values of 8 bytes, which stand in commands.
#[test]
fn words_from_host_memory_of_its_process() {
    let fake = take();
    job(1, 1, |r| {
        let _context = fake.enter(0);
        let mut table = r.window(PIECES, 0);
        table.words.iter_mut().enumerate().for_each(|(i, w)| *w = word(0, i));
        let back = fake.window(r, 0, PIECES, 0);
        let before = fake.commands();
        let once = || {
            (0..PIECES).for_each(|i| back.set(i, 0));
            let get = |i: usize| r.get(0, (&table, 8 * i as u64), 8, (back.as_window(), 8 * i as u64), 0);
            let all: Vec<_> = (0..PIECES).map(get).collect();
            all.into_iter().for_each(|q| r.wait(q));
            assert!((0..PIECES).all(|i| back.get(i) == word(0, i)));
        };
        repeat_until("gets of words go by the copy kernel", once, || fake.commands() >= before + 2 * PIECES as u64);
    });
    fake.check();
}

/// Which answers, many at a time: what has arrived goes into GPU memory behind what was asked for before it.
#[test]
fn from_host_memory_of_another_process() {
    processes("from_host_memory_of_another_process", 2, &[], |place| {
        let fake = take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(2);
        let mut table = r.window(WORDS * PIECES, 0);
        table.words.iter_mut().enumerate().for_each(|(i, w)| *w = word(r.rank, i));
        let back = fake.window(&r, gpu, WORDS * PIECES, 0);
        place.barrier();
        read_all(&fake, &r, &table, &back, 1 - r.rank);
        place.barrier();
        r.leave();
        fake.check();
    });
}

#[test]
fn from_a_window_of_another_process() {
    processes("from_a_window_of_another_process", 2, &[], of_another_process);
}

fn of_another_process(place: &Place) {
    let fake = take();
    let gpu = place.rank as i32;
    let _context = fake.enter(gpu);
    let r = place.join(2);
    let at = fake.segments(gpu, &[1 << 16; 2], true);
    let table = fake.register_at(&r, at, (1 << 17) / 8, 0);
    (0..WORDS * PIECES).for_each(|i| table.set(i, word(r.rank, i)));
    let back = fake.window(&r, gpu, WORDS * PIECES, 0);
    place.barrier();
    read_all(&fake, &r, table.as_window(), &back, 1 - r.rank);
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0);
    fake.check();
}
