//! What the copy kernel gets: from host memory of its process and of another one, and from GPU memory of another one
//! that is mapped here. Many at a time, as an embedding table is read.

use crate::harness::copy_kernel::take;
use crate::harness::memory::pattern;
use crate::harness::plan::repeat_until;
use crate::harness::*;
use crate::support::common::{job, Rank, Window};
use crate::support::processes::{processes, Place};

/// Pieces of a table, and words of one.
const PIECES: usize = 200;
const WORDS: usize = 32;

/// This rank's table, in host memory.
fn host_table(r: &Rank, words: usize) -> Window {
    let mut table = r.window(words * PIECES, 0);
    table.words.iter_mut().enumerate().for_each(|(i, w)| *w = pattern(r.rank, i));
    table
}

/// Gets all pieces, of so many words, of `peer`'s table, in another order than they lie in, until the copy kernel has
/// done so many more.
fn read_all(fake: &Fake, r: &Rank, (table, words): (&Window, usize), back: &GpuWindow, peer: usize) {
    let before = fake.commands();
    let once = || {
        (0..words * PIECES).for_each(|i| back.set(i, 0));
        let piece = |nth: usize| (nth * 77 % PIECES * 8 * words) as u64;
        let all: Vec<_> = (0..PIECES)
            .map(|nth| r.get((nth % 2) as i32, (table, piece(nth)), 8 * words, (back.as_window(), piece(nth)), peer))
            .collect();
        all.into_iter().for_each(|q| r.wait(q));
        let wrong = (0..words * PIECES).find(|&i| back.get(i) != pattern(peer, i));
        assert_eq!(wrong.map(|i| (i, back.get(i))), None, "from rank {peer}");
    };
    repeat_until("gets go by the copy kernel", once, || fake.commands() >= before + 2 * PIECES as u64);
}

/// Pieces, and words of 8 bytes, which stand in commands.
#[test]
fn from_host_memory_of_its_process() {
    for words in [WORDS, 1] {
        let fake = take();
        job(2, 2, |r| {
            let _context = fake.enter(0);
            let table = host_table(r, words);
            let back = fake.window(r, 0, words * PIECES, 0);
            r.job.barrier.wait();
            if r.rank == 1 {
                // Its own, and another rank's.
                read_all(&fake, r, (&table, words), &back, 1);
                read_all(&fake, r, (&table, words), &back, 0);
            }
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// Each of two processes reads the other one's table; `read` is given where it reads to, and the peer.
fn each_other(place: &Place, read: impl Fn(&Fake, &Rank, &GpuWindow, usize)) {
    let fake = take();
    let gpu = place.rank as i32;
    let _context = fake.enter(gpu);
    let r = place.join(2);
    let back = fake.window(&r, gpu, WORDS * PIECES, 0);
    read(&fake, &r, &back, 1 - r.rank);
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0);
    fake.check();
}

/// Which answers, many at a time: what has arrived goes into GPU memory behind what was asked for before it.
#[test]
fn from_host_memory_of_another_process() {
    processes("from_host_memory_of_another_process", 2, &[], |place| {
        each_other(place, |fake, r, back, peer| {
            let table = host_table(r, WORDS);
            place.barrier();
            read_all(fake, r, (&table, WORDS), back, peer);
            place.barrier();
        });
    });
}

#[test]
fn from_a_window_of_another_process() {
    processes("from_a_window_of_another_process", 2, &[], |place| {
        each_other(place, |fake, r, back, peer| {
            let at = fake.segments(r.rank as i32, &[1 << 16; 2], true);
            let table = fake.register_at(r, at, (1 << 17) / 8, 0);
            (0..WORDS * PIECES).for_each(|i| table.set(i, pattern(r.rank, i)));
            place.barrier();
            read_all(fake, r, (table.as_window(), WORDS), back, peer);
            place.barrier();
        });
    });
}
