//! The fake driver's lane kernel itself, where queues hold send entries: as `fake_lanes.rs` has it of descriptors, and
//! what is rung, how it is counted, and how slots are left.

mod cases;

use crate::fake_lanes::{Draws, LONG, SHORT};
use crate::harness::board::entries::*;
use crate::harness::board::given::*;
use crate::harness::board::*;
use crate::harness::lanes::LanesEnd;
use crate::harness::*;
use cases::cases;
use std::time::Duration;

/// The word of the signals to which all is added that `COUNTER` and `SUM` do not tell.
const OTHER: u64 = 2;

/// What is given to lanes of entries.
trait GivenEntries {
    fn push(&mut self, at: u64, bytes: Vec<u8>, counts: bool);
    fn next(&mut self, board: &Board<'_>, i: usize, draws: &mut Draws) -> Entry;
    fn check_done(&mut self, board: &EntryBoard<'_>, i: usize);
    fn check_end(&mut self, board: &EntryBoard<'_>, i: usize);
}

impl GivenEntries for Given {
    fn push(&mut self, at: u64, bytes: Vec<u8>, counts: bool) {
        self.all.push(Brought { at, bytes, counts });
    }

    /// The next one of a lane: bytes in a place of their own, or an addition.
    fn next(&mut self, board: &Board<'_>, i: usize, draws: &mut Draws) -> Entry {
        let at = board.lanes[i].room + self.all.len() as u64 * 1024;
        match draws.below(8) {
            0 | 1 => {
                let (n, value) = (1 << draws.below(4), [draws.below(u64::MAX), u64::MAX][draws.below(4) as usize / 3]);
                let bytes = value.to_le_bytes()[..n].to_vec();
                let e = Entry::value(&bytes, at, 3 + draws.below(2) as u8);
                self.push(at, bytes, false);
                e
            }
            2 | 3 => {
                let (from, n) = (draws.below(1000) * 4, [4, 8, 64, 100, 1024][draws.below(5) as usize]);
                self.push(at, board.source(from, n), false);
                match draws.below(2) {
                    0 => Entry::copy(from, at, n as u32),
                    _ => Entry::read(from, at, n as u32),
                }
            }
            4 => {
                let by = draws.below(1 << 20) << 40 | 1;
                self.add(by);
                self.push(0, Vec::new(), false);
                Entry::addition(8 * SUM, by)
            }
            5 => {
                let by = [u64::MAX, draws.below(u64::MAX)][draws.below(2) as usize];
                self.added[1] = self.added[1].wrapping_add(by);
                self.push(0, Vec::new(), false);
                // Nobody looks at what is behind the addend.
                Entry::addition(8 * OTHER, by).with(40, &[0xff; 8])
            }
            _ => {
                self.push(0, Vec::new(), true);
                Entry::addition(8 * COUNTER, 1)
            }
        }
    }

    /// All that counts as completed has signalled.
    fn check_done(&mut self, board: &EntryBoard<'_>, i: usize) {
        let (done, signals) = (board.done(i), board.host.signal(i, COUNTER));
        assert!(done <= self.all.len() && signals >= self.counted(done), "lane {i}: {done} done, {signals} signals");
        self.check(&board.host, i, done);
    }

    /// Nothing more comes.
    fn check_end(&mut self, board: &EntryBoard<'_>, i: usize) {
        self.check_done(board, i);
        let lane = &board.host.lanes[i];
        let signals = [COUNTER, SUM, OTHER].map(|s| board.host.signal(i, s));
        assert_eq!(signals, [self.counted(usize::MAX), self.added[0], self.added[1]], "lane {i}");
        let last = lane.posted - lane.slots..lane.posted;
        assert!(last.clone().all(|index| board.is_blank(i, index)), "lane {i}: something is in a slot");
        assert!(last.into_iter().all(|index| board.is_rung(i, index)), "lane {i}: a word was written");
    }
}

/// Launches that end at any time, and lanes that go on where the one before left them. Indices pass a multiple of 2^16.
#[test]
fn lanes_bring_all_entries_once_and_in_order() {
    const EACH: usize = 60;
    for spread in 0..4 {
        let fake = Fake::take();
        fake.kernel_limits(0, 400);
        let mut draws = Draws(0x8765_4321 + spread);
        let n = 8usize << spread;
        let mut board = EntryBoard::new(&fake, n, [4, 8, 16, 2][spread as usize], (3 << 16) - 20);
        let mut given: Vec<Given> = (0..n).map(|_| Given::default()).collect();
        let before = (fake.lane_entries(), fake.lane_descriptors(), fake.lane_gos());
        while (0..n).any(|i| board.done(i) < EACH) {
            if board.host.number == 0 || board.host.is_gone() {
                go_on(&mut board, spread);
            }
            for (i, given) in given.iter_mut().enumerate() {
                let room = board.host.lanes[i].slots as usize - (given.all.len() - board.done(i));
                let left = EACH - given.all.len();
                match draws.below(4) {
                    0 if room > 1 && left > 1 => {
                        let [first, second] = [(), ()].map(|()| given.next(&board.host, i, &mut draws));
                        board.post_swapped(i, [&first, &second], draws.below(24));
                    }
                    1 | 2 if room > 0 && left > 0 => {
                        let e = given.next(&board.host, i, &mut draws);
                        board.post(i, &e, draws.below(24));
                    }
                    _ => {}
                }
                if spread == 3 {
                    given.check_signals(&board.host, i);
                }
                given.check_done(&board, i);
            }
        }
        board.host.end();
        given.iter_mut().enumerate().for_each(|(i, given)| given.check_end(&board, i));
        assert_eq!(fake.lane_entries() - before.0, (n * EACH) as u64);
        assert_eq!(fake.lane_descriptors(), before.1);
        assert!(fake.lane_gos() > before.2 + 1);
        fake.check();
    }
}

/// The next launch begins where the last one, if there was one, says that it ended.
fn go_on(board: &mut EntryBoard<'_>, spread: u64) {
    for i in 0..board.host.lanes.len() {
        let lane = &board.host.lanes[i];
        let is_first = board.host.number == 0;
        let position = if is_first { lane.first.into() } else { board.host.get(POSITIONS + i) };
        assert_eq!(EntryBoard::index(position as u32), board.count(i), "lane {i}");
        assert_eq!(position >> 32, 0, "lane {i}");
        board.record(i, position as u32);
    }
    board.host.launch(SHORT);
    board.host.go(spread);
}

/// What is in its slot and not rung is not there, nor is what is behind it, whatever was rung before in these slots.
#[test]
fn an_entry_that_is_not_rung_is_not_taken() {
    let fake = Fake::take();
    let mut board = EntryBoard::new(&fake, 2, 4, 6);
    (0..2).for_each(|i| board.record(i, 6));
    board.host.launch(LONG);
    board.host.go(0);
    wait_until("it is up", || board.host.is_up());
    for round in 1..=20 {
        let written = [(); 4].map(|()| board.write(0, &Entry::addition(8 * COUNTER, 1), round));
        board.ring(0, written[1]);
        board.ring(0, written[3]);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!((board.done(0), board.host.signal(0, COUNTER)), (4 * round as usize - 4, 4 * round - 4));
        board.ring(0, written[0]);
        let done = 4 * round as usize - 2;
        wait_until("two are taken", || board.done(0) == done);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!((board.done(0), board.host.signal(0, COUNTER)), (done, done as u64));
        assert!(!board.is_blank(0, written[2]) && !board.is_blank(0, written[3]));
        board.ring(0, written[2]);
        wait_until("all are taken", || board.are_done(0));
    }
    board.host.end();
    assert_eq!((board.done(1), board.host.get(POSITIONS + 1)), (0, 6));
    fake.check();
}

/// Looks that find some words of an entry, or halves of words, and then what rings, take all of it.
#[test]
fn entries_are_taken_whole_however_their_words_come() {
    const EACH: usize = 6000;
    let fake = Fake::take();
    let mut draws = Draws(0x1357_9bdf);
    let mut board = EntryBoard::new(&fake, 1, 16, 0);
    board.record(0, 0);
    board.host.launch(LONG.map(|time| time * 10));
    board.host.go(3);
    let values: Vec<_> = (0..EACH).map(|n| (1 << (n % 4), draws.below(u64::MAX).to_le_bytes())).collect();
    for (n, (len, value)) in values.iter().enumerate() {
        wait_until("there is room", || {
            assert_eq!(board.host.get(POSITIONS) & REFUSED, 0, "entry {}", board.done(0));
            board.done(0) + 4 > n
        });
        board.post(0, &Entry::value(&value[..*len], 8 * n as u64, 3), draws.below(24));
    }
    wait_until("all are taken", || board.are_done(0));
    board.host.end();
    for (n, (len, value)) in values.iter().enumerate() {
        assert_eq!(board.host.target(8 * n as u64, *len as u64), value[..*len], "entry {n}");
    }
    fake.check();
}

/// A lane is closed at what is not for the kernel, and what came before it is seen by then; others go on.
#[test]
fn a_lane_closes_at_an_entry_that_it_does_not_take() {
    for spread in [0, 1, 3] {
        let fake = Fake::take();
        let lanes = 8usize << spread;
        let mut board = EntryBoard::new(&fake, lanes, 16, 100);
        let all = cases(0, lanes as u64 * ROOM);
        all.chunks(lanes).for_each(|some| each_in_a_lane(&fake, &mut board, spread, some));
        fake.check();
    }
}

/// Puts each between two that are taken.
fn each_in_a_lane(fake: &Fake, board: &mut EntryBoard<'_>, spread: u64, cases: &[(&str, bool, Entry)]) {
    let before = (fake.lane_entries(), fake.refused_lanes());
    let firsts: Vec<u32> = (0..cases.len()).map(|i| board.renew(i)).collect();
    (0..board.host.lanes.len()).for_each(|i| board.host.set_record(i, 0, 0));
    let counted: Vec<u64> = (0..cases.len()).map(|i| board.host.signal(i, COUNTER)).collect();
    for (i, (_, _, e)) in cases.iter().enumerate() {
        board.record(i, firsts[i]);
        let increment = Entry::addition(8 * COUNTER, 1);
        [&increment, e, &increment].into_iter().enumerate().for_each(|(n, e)| board.post(i, e, n as u64));
    }
    board.host.launch(LONG);
    board.host.go(spread);
    for (i, (what, is_taken, _)) in cases.iter().enumerate() {
        let (first, taken) = (firsts[i], if *is_taken { 3 } else { 1 });
        let refused = if *is_taken { 0 } else { REFUSED };
        let position = refused | u64::from(first + taken);
        let count = EntryBoard::index(first + taken);
        wait_until(what, || board.host.get(POSITIONS + i) == position && board.count(i) == count);
        assert_eq!(board.host.signal(i, COUNTER) - counted[i], [0, 1, 1, 2][taken as usize], "{what}");
    }
    board.host.end();
    for (i, (what, is_taken, _)) in cases.iter().enumerate() {
        let are_blank = [0, 1, 2].map(|n| board.is_blank(i, firsts[i] + n));
        assert_eq!(are_blank, [true, *is_taken, *is_taken], "{what}");
    }
    let refused = cases.iter().filter(|case| !case.1).count() as u64;
    let taken = refused + 3 * (cases.len() as u64 - refused);
    assert_eq!((fake.lane_entries() - before.0, fake.refused_lanes() - before.1), (taken, refused));
}

/// What no host may write is told, and such a lane is not touched.
#[test]
fn a_board_of_entries_that_no_host_may_write_is_a_violation() {
    let fake = Fake::take();
    let mut board = EntryBoard::new(&fake, 2, 16, 0);
    let increment = Entry::addition(8 * COUNTER, 1);
    // Lane 1, at place 1, which is the second warp's, has something to take all the while.
    board.post(1, &increment, 0);
    // The word of lane 1's record, what is put there, given what is there.
    type Change = fn(u64) -> u64;
    let changes: [(usize, Change); 18] = [
        (0, |queue| queue + 8),
        (1, |mask| mask - 1),
        (1, |mask| mask & 0xffff_ffff | 5 << 32),
        (1, |mask| mask & 0xffff_ffff | 7 << 32),
        (2, |number| number | 1 << 56),
        (2, |first| first | 0xffff_fff1),
        (3, |count| count + 4),
        (3, |_| 0),
        (4, |rings| rings + 4),
        (4, |_| 0),
        (5, |most| most | 1),
        (6, |_| 4),
        (7, |high| high | 1 << 32),
        (8, |key| key | 1 << 32),
        (8, |_| (1_u32 << 8).to_be().into()),
        (8, |_| TARGET_KEY.to_be().into()),
        (9, |_| u64::MAX - 8),
        (13, |_| 2),
    ];
    let mut violations = |change: &dyn Fn(&Board<'_>)| {
        let before = fake.violations();
        (0..2).for_each(|i| board.record(i, board.count(i) as u32));
        (2..64).for_each(|i| board.host.set_record(i, 0, 0));
        change(&board.host);
        board.host.launch(LONG);
        board.host.go(0);
        board.post(0, &increment, 0);
        wait_until("lane 0 is served", || board.are_done(0));
        board.host.end();
        (fake.violations() - before, board.done(1))
    };
    for (word, change) in changes {
        let at = RECORDS + RECORD_WORDS + word;
        assert_eq!(violations(&|b| b.set(at, change(b.get(at)))), (1, 0), "word {word}");
    }
    for own in [0, 3, 4] {
        let twice = |b: &Board<'_>| b.set_record(1, own, b.get(RECORDS + own));
        assert_eq!(violations(&twice), (1, 0), "word {own} of another lane");
    }
    let (before, increments) = (fake.violations(), board.host.signal(0, COUNTER));
    board.host.set(HOLDS, 3);
    board.host.launch(LONG);
    board.host.go(0);
    wait_until("what it holds is told", || fake.violations() == before + 1);
    board.host.end();
    assert_eq!((increments, board.done(1)), (board.done(0) as u64, 0));
}

/// Indices do not wrap in a launch, and what rings has the whole of an index: the library has to see to that.
#[test]
fn an_index_that_wraps_or_is_rung_by_another_is_a_violation() {
    const FIRST: u32 = u32::MAX - 6;
    let fake = Fake::take();
    let mut board = EntryBoard::new(&fake, 1, 4, FIRST);
    let increment = Entry::addition(8 * COUNTER, 1);
    board.record(0, FIRST);
    board.host.launch(LONG);
    board.host.go(0);
    let index = board.write(0, &increment, 0);
    // By the low half alone.
    board.ring_by(0, index, (index + 1).into());
    wait_until("it is taken", || board.are_done(0));
    assert_eq!(fake.violations(), 1);
    for n in 1..6 {
        assert_eq!(fake.violations(), 1, "{n}");
        board.post(0, &increment, n);
        wait_until("it is taken", || board.are_done(0));
    }
    wait_until("the lane is closed", || board.host.get(POSITIONS) == REFUSED | u64::from(u32::MAX));
    board.host.end();
    assert_eq!((fake.violations(), board.done(0)), (2, 6));
}

/// Launches end when they are stopped, idle or at the end of their life, with all that they took done and counted, and
/// the next one goes on there.
#[test]
fn launches_of_entries_end_as_others_do() {
    let fake = Fake::take();
    let ends = || [LanesEnd::Stop, LanesEnd::Idle, LanesEnd::Life].map(|why| fake.lane_ends(why));
    let before = ends();
    let ended = || std::array::from_fn(|i| ends()[i] - before[i]);
    let mut board = EntryBoard::new(&fake, 9, 16, 0);
    let [copy, increment] = [Entry::copy(0, 0, 4096), Entry::addition(8 * COUNTER, 1)];
    (0..9).for_each(|i| board.record(i, 0));
    fake.hold(4096);
    board.host.launch(LONG);
    board.host.go(1);
    // Mostly one look finds both.
    board.post_swapped(8, [&copy, &increment], 0);
    wait_until("the copy is held", || fake.is_holding());
    board.post(0, &increment, 0);
    wait_until("the other warp's is served", || board.are_done(0));
    board.host.stop();
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!((board.host.signal(8, COUNTER), board.done(8), board.host.is_gone()), (0, 0, false));
    fake.hold(0);
    board.host.end();
    let position = board.host.get(POSITIONS + 8);
    assert_eq!((board.count(8), ended()), (EntryBoard::index(position as u32), [1, 0, 0]));
    assert_eq!((board.done(8) > 0, board.host.target(0, 4096)), (true, board.host.source(0, 4096)));

    // Behind its stop: whatever the last launch left.
    let times = [[SHORT[0], LONG[1]], [SHORT[0] * 50, SHORT[1]]];
    for (n, times) in times.into_iter().enumerate() {
        (0..9).for_each(|i| board.record(i, board.count(i) as u32));
        board.post(3, &increment, 0);
        board.host.launch(times);
        board.host.go(1);
        wait_until("it ends by itself", || board.host.is_gone());
        assert_eq!(ended(), [[1, 1, 0], [1, 1, 1]][n]);
        assert!([0, 3, 8].into_iter().all(|i| board.are_done(i)));
    }
    assert_eq!([0, 3, 8].map(|i| board.host.signal(i, COUNTER)), [1, 2, 1]);
    fake.check();
}

/// An error of the GPU, or words that it cannot reach: the stream has it, and nobody says that it is gone.
#[test]
fn errors_at_entries_are_the_streams() {
    for (is_injected, code) in [(true, 719), (false, 700)] {
        let fake = Fake::take();
        let mut board = EntryBoard::new(&fake, 1, 16, 0);
        board.record(0, 0);
        if !is_injected {
            // Of another GPU alone.
            board.host.set_record(0, 4, fake.alloc(1, 128, true));
        }
        if is_injected {
            fake.inject("gpu", code);
        }
        board.host.launch(LONG);
        board.host.go(0);
        board.post(0, &Entry::addition(0, 1), 0);
        wait_until("the stream has it", || board.host.query() == code);
        assert!(!board.host.is_gone());
        fake.check();
    }
}
