//! The fake driver's lane kernel itself, on which tests of the library rely: it takes what it is to take, in order and
//! once, closes lanes at the rest, and can be held up, failed and ended.

use crate::harness::board::given::*;
use crate::harness::board::*;
use crate::harness::lanes::LanesEnd;
use crate::harness::*;
use nccl_plugin_api::descriptor::*;
use std::time::Duration;

pub const SHORT: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(2)];
pub const LONG: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];
const FORMS: [Form; 2] = [Form::Bytes64, Form::Bytes128];

/// xorshift.
pub struct Draws(pub u64);

impl Draws {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// The next one of a lane: bytes in a place of their own, mostly with a signal.
fn next(given: &mut Given, board: &Board<'_>, i: usize, draws: &mut Draws) -> Descriptor {
    let form = board.lanes[i].form;
    let version = 1 + draws.below(2) as u8;
    let at = board.lanes[i].room + given.all.len() as u64 * 1024;
    let by = draws.below(1 << 20) << 40 | 1;
    let (op, signal) = [(0, 0), (OP_SIGNAL_INC, 0), (OP_SIGNAL_INC, 0), (OP_SIGNAL_ADD, 1)][draws.below(4) as usize];
    let (d, bytes) = match draws.below(6) {
        0 => {
            given.added[1] += by;
            given.all.push(Brought { at, bytes: Vec::new(), counts: false });
            let d = Descriptor::new(form, version, OP_VA_SIGNAL | OP_SIGNAL_ADD, 99);
            return d.first(2 * 8, SOURCE).with_signal(u32::MAX, by, true);
        }
        1 if op != 0 => (Descriptor::new(form, version, op | OP_PUT, 0), Vec::new()),
        2 | 3 => {
            let (n, value) = (1 << draws.below(4), draws.below(u64::MAX));
            let d = Descriptor::new(form, version, op | OP_PUT | OP_INLINE, n).value(value);
            (d.second(at, TARGET), value.to_le_bytes()[..n as usize].to_vec())
        }
        _ => {
            let (from, n) = (draws.below(1000) * 4, [4, 8, 64, 100, 1024][draws.below(5) as usize]);
            let d = Descriptor::new(form, version, op | OP_PUT, n).first(from, SOURCE).second(at, TARGET);
            (d, board.source(from, n))
        }
    };
    if op == OP_SIGNAL_ADD {
        given.add(by);
    }
    given.all.push(Brought { at, bytes, counts: op == OP_SIGNAL_INC });
    d.with_signal(signal, by, draws.below(2) == 0)
}

/// Launches that end at any time, and lanes that go on where the one before left them.
#[test]
fn lanes_bring_everything_once_and_in_order() {
    const EACH: usize = 60;
    for (spread, form) in (0..4).flat_map(|s| FORMS.map(|f| (s, f))) {
        let fake = Fake::take();
        fake.kernel_limits(0, 400);
        let mut draws = Draws(0x1234_5678 + spread * 2 + form as u64);
        let n = 8usize << spread;
        let mut board = Board::new(&fake, n, form, [4, 8, 16, 2][spread as usize], u32::MAX - 20);
        let mut given: Vec<Given> = (0..n).map(|_| Given::default()).collect();
        let before = (fake.lane_descriptors(), fake.lane_gos());
        while (0..n).any(|i| board.index(i).wrapping_sub(board.lanes[i].first) < EACH as u32) {
            if board.number == 0 || board.is_gone() {
                for i in 0..n {
                    let position =
                        if board.number == 0 { board.lanes[i].first.into() } else { board.get(POSITIONS + i) };
                    assert_eq!(position, u64::from(board.index(i)), "lane {i}");
                    board.record(i, position as u32);
                }
                board.launch(SHORT);
                board.go(spread);
            }
            for (i, given) in given.iter_mut().enumerate() {
                let lane = &board.lanes[i];
                let room = lane.slots - lane.posted.wrapping_sub(board.index(i));
                let left = EACH - given.all.len();
                match draws.below(4) {
                    0 if room > 1 && left > 1 => {
                        let [first, second] = [(), ()].map(|()| next(given, &board, i, &mut draws));
                        board.post_swapped(i, [&first, &second]);
                    }
                    1 | 2 if room > 0 && left > 0 => {
                        let d = next(given, &board, i, &mut draws);
                        board.post(i, &d, draws.below(8));
                    }
                    _ => {}
                }
                if spread == 3 {
                    given.check_signals(&board, i);
                }
                given.check(&board, i, board.index(i).wrapping_sub(board.lanes[i].first) as usize);
            }
        }
        board.end();
        for (i, given) in given.iter_mut().enumerate() {
            given.check(&board, i, board.index(i).wrapping_sub(board.lanes[i].first) as usize);
            let counted = given.counted(usize::MAX);
            assert_eq!([0, 1, 2].map(|s| board.signal(i, s)), [counted, given.added[0], given.added[1]], "lane {i}");
            assert!((0..board.lanes[i].slots).all(|slot| board.is_clear(i, slot)));
        }
        assert_eq!(fake.lane_descriptors() - before.0, (n * EACH) as u64);
        assert!(fake.lane_gos() > before.1 + 1);
        fake.check();
    }
}

/// One descriptor, and whether it is taken: `put` is one of 8 bytes that is.
fn cases(form: Form, room: u64, end: u64) -> Vec<(&'static str, bool, Descriptor)> {
    let new = |op, size| Descriptor::new(form, 1, op, size);
    let put = |size| new(OP_PUT, size).first(16, SOURCE).second(room, TARGET);
    let inline = |size, at| new(OP_PUT | OP_INLINE, size).value(7).second(at, TARGET);
    let signal = |op: u16, id| new(OP_PUT | op, 0).with_signal(id, 5, true);
    let word = |op, at, handle| new(op, 0).first(at, handle);
    let (far, inc) = (u64::MAX >> 1, OP_SIGNAL_INC);
    let mut all = vec![
        ("bytes", true, put(8)),
        ("the longest copy", true, put(MOST)),
        ("the last signal", true, signal(inc, SIGNALS as u32 - 1)),
        ("an added signal", true, signal(OP_SIGNAL_ADD, 0)),
        ("the last bytes", true, new(OP_PUT, 8).first(SOURCE_BYTES - 8, SOURCE).second(end - 8, TARGET)),
        ("a value at the end", true, inline(8, end - 8)),
        ("the last word of a window", true, word(OP_VA_SIGNAL | inc, 8 * (SIGNALS - 1), SOURCE)),
        ("nothing", false, new(0, 0)),
        ("no bytes and no signal", false, put(0)),
        ("a counter", false, Descriptor::new(form, 1, OP_PUT | OP_COUNTER, 8).first(16, SOURCE).second(room, TARGET)),
        ("both signals", false, signal(inc | OP_SIGNAL_ADD, 0)),
        ("a signal that there is not", false, signal(inc, SIGNALS as u32)),
        ("a signal of no put", false, new(inc, 0).with_signal(0, 1, true)),
        ("more bytes than a copy ever has", false, put(LONGEST + 4)),
        ("odd bytes", false, put(6)),
        ("an odd source", false, new(OP_PUT, 8).first(18, SOURCE).second(room, TARGET)),
        ("an odd destination", false, new(OP_PUT, 8).first(16, SOURCE).second(room + 2, TARGET)),
        ("an unknown source", false, new(OP_PUT, 8).first(16, 30).second(room, TARGET)),
        ("a source without a window", false, new(OP_PUT, 8).first(16, 0).second(room, TARGET)),
        ("an unknown destination", false, new(OP_PUT, 8).first(16, SOURCE).second(room, 30)),
        ("more than the source has", false, new(OP_PUT, 8).first(SOURCE_BYTES - 4, SOURCE).second(room, TARGET)),
        ("more than the destination has", false, new(OP_PUT, 8).first(16, SOURCE).second(end - 4, TARGET)),
        ("an offset that wraps", false, new(OP_PUT, 8).first(far - 3, SOURCE).second(room, TARGET)),
        ("a value of three bytes", false, inline(3, room)),
        ("a value of no bytes", false, inline(0, room)),
        ("a value beside its word", false, inline(4, room + 2)),
        ("a value behind the end", false, inline(8, end)),
        ("a value that goes nowhere", false, new(OP_PUT | OP_INLINE, 8).value(7).second(room, 30)),
        ("a word without a signal", false, word(OP_VA_SIGNAL, 0, SOURCE)),
        ("a word with both", false, word(OP_VA_SIGNAL | inc | OP_SIGNAL_ADD, 0, SOURCE)),
        ("a word with bytes", false, word(OP_VA_SIGNAL | inc | OP_PUT, 0, SOURCE)),
        ("a word beside one", false, word(OP_VA_SIGNAL | inc, 4, SOURCE)),
        ("a word behind the end", false, word(OP_VA_SIGNAL | inc, 8 * SIGNALS, SOURCE)),
        ("a word of an unknown window", false, word(OP_VA_SIGNAL | inc, 0, 30)),
    ];
    if form == Form::Bytes128 {
        let versioned = |v| Descriptor::new(form, v, OP_PUT | inc, 0).with_signal(0, 1, true);
        all.extend([("the newest version", true, versioned(2)), ("version 0", false, versioned(0))]);
        all.extend([("a version to come", false, versioned(3)), ("a put and flush", false, new(OP_PUT | OP_FLUSH, 8))]);
        let get = |size| new(OP_GET, size).first(room, TARGET).second(16, SOURCE);
        all.extend([("a get", true, get(8)), ("a get of nothing", false, get(0)), ("an odd get", false, get(6))]);
        all.extend([("a get from behind the end", false, new(OP_GET, 8).first(end - 4, TARGET).second(16, SOURCE))]);
        all.extend([("a flush", true, new(OP_FLUSH, 0)), ("a get and flush", false, new(OP_GET | OP_FLUSH, 8))]);
    }
    all
}

/// A lane is closed at what is not for the kernel, and what came before it is seen by then; others go on.
#[test]
fn a_lane_closes_at_what_it_does_not_take() {
    for (spread, form) in [0, 1, 3].into_iter().flat_map(|s| FORMS.map(|f| (s, f))) {
        let fake = Fake::take();
        let lanes = 8usize << spread;
        let mut board = Board::new(&fake, lanes, form, 16, 0);
        let all = cases(form, 0, lanes as u64 * ROOM);
        all.chunks(lanes).for_each(|some| each_in_a_lane(&fake, &mut board, spread, some));
        fake.check();
    }
}

/// Puts each between two that are taken.
fn each_in_a_lane(fake: &Fake, board: &mut Board<'_>, spread: u64, cases: &[(&str, bool, Descriptor)]) {
    let before = (fake.lane_descriptors(), fake.refused_lanes());
    let firsts: Vec<u32> = (0..cases.len()).map(|i| board.renew(i)).collect();
    (0..board.lanes.len()).for_each(|i| board.set_record(i, 0, 0));
    let added: Vec<u64> = (0..cases.len()).map(|i| board.signal(i, 1)).collect();
    for (i, (_, _, d)) in cases.iter().enumerate() {
        board.record(i, firsts[i]);
        let increment = board.increment(i, 1);
        [&increment, d, &increment].into_iter().enumerate().for_each(|(n, d)| board.post(i, d, n as u64));
    }
    board.launch(LONG);
    board.go(spread);
    for (i, (what, is_taken, _)) in cases.iter().enumerate() {
        let first = firsts[i];
        let position = || board.get(POSITIONS + i);
        match is_taken {
            true => wait_until(what, || board.index(i) == first + 3 && position() == u64::from(first + 3)),
            false => {
                wait_until(what, || position() & REFUSED != 0);
                assert_eq!(position(), REFUSED | u64::from(first + 1), "{what}");
                assert_eq!((board.index(i), board.signal(i, 1)), (first + 1, added[i] + 1), "{what}");
            }
        }
    }
    board.end();
    for (i, (what, is_taken, _)) in cases.iter().enumerate() {
        assert_eq!([0, 1, 2].map(|n| board.is_clear(i, firsts[i] + n)), [true, *is_taken, *is_taken], "{what}");
    }
    let refused = cases.iter().filter(|case| !case.1).count() as u64;
    let taken = refused + 3 * (cases.len() as u64 - refused);
    assert_eq!((fake.lane_descriptors() - before.0, fake.refused_lanes() - before.1), (taken, refused));
}

/// What no host may write is told, and such a lane is not touched.
#[test]
fn a_board_that_no_host_may_write_is_a_violation() {
    let fake = Fake::take();
    let mut board = Board::new(&fake, 2, Form::Bytes128, 16, 0);
    // Lane 1, at place 1, which is the second warp's, has something to take all the while.
    let increment = board.increment(1, 0);
    board.post(1, &increment, 0);
    // The word of lane 1's record, what is put there, given what is there.
    type Change = fn(u64) -> u64;
    let changes: [(usize, Change); 11] = [
        (0, |queue| queue + 8),
        (1, |mask| mask - 1),
        (1, |mask| mask & 0xffff_ffff | 5 << 32),
        (1, |mask| mask & 0xffff_ffff | 6 << 32),
        (3, |index| index + 2),
        (3, |_| 0),
        (4, |signals| signals + 4),
        (5, |newest| newest + 14),
        (6, |_| 4),
        (8, |_| TARGET),
        (13, |_| 1),
    ];
    let mut violations = |change: &dyn Fn(&Board<'_>)| {
        let before = fake.violations();
        (0..2).for_each(|i| board.record(i, board.index(i)));
        (2..64).for_each(|i| board.set_record(i, 0, 0));
        change(&board);
        board.launch(LONG);
        board.go(0);
        board.post(0, &increment, 0);
        wait_until("lane 0 is served", || board.index(0) == board.lanes[0].posted);
        board.end();
        (fake.violations() - before, board.index(1))
    };
    for (word, change) in changes {
        let at = RECORDS + RECORD_WORDS + word;
        assert_eq!(violations(&|b| b.set(at, change(b.get(at)))), (1, 0), "word {word}");
    }
    let twice = |b: &Board<'_>| (0..RECORD_WORDS).for_each(|w| b.set_record(1, w, b.get(RECORDS + w)));
    assert_eq!(violations(&twice), (1, 0));
    (0..2).for_each(|i| board.record(i, board.index(i)));
    board.launch(LONG);
    board.go(4);
    wait_until("the spread is told", || fake.violations() == 13);
    board.end();
    board.launch(LONG);
    board.go(0);
    wait_until("lane 1 is served", || board.index(1) == 1);
    board.end();
    for (blocks, threads) in [(17, 256), (1, 32), (8, 32)] {
        assert_ne!(board.launch_as(blocks, threads, LONG), 0);
    }
    assert_eq!(fake.violations(), 13 + 3);
}

/// A launch without a go ends when it is stopped, or after its time; one that is held comes up when it is let go.
#[test]
fn launches_wait_for_their_go() {
    let fake = Fake::take();
    let ends = || [LanesEnd::Stop, LanesEnd::Idle, LanesEnd::Life].map(|why| fake.lane_ends(why));
    let (before, gos) = (ends(), fake.lane_gos());
    let ended = || std::array::from_fn(|i| ends()[i] - before[i]);
    let mut board = Board::new(&fake, 1, Form::Bytes128, 16, 0);
    board.record(0, 0);
    let increment = board.increment(0, 0);
    board.post(0, &increment, 0);
    board.launch(LONG);
    wait_until("it is up", || board.is_up());
    assert!(!board.is_gone());
    board.end();
    assert_eq!(ended(), [1, 0, 0]);
    board.launch(SHORT);
    wait_until("it is idle", || board.is_gone());
    assert_eq!((ended(), fake.lane_gos(), board.index(0)), ([1, 1, 0], gos, 0));

    // Behind its go as well.
    board.record(0, 1);
    board.launch([SHORT[0], LONG[1]]);
    board.go(0);
    wait_until("it is idle", || board.is_gone());
    assert_eq!(ended(), [1, 2, 0]);
    board.record(0, 0);

    // Late for ever, and still of no harm.
    fake.hold_lanes(true);
    board.launch(LONG);
    board.go(0);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!((board.is_up(), fake.held_lanes(), fake.held_launches()), (false, 1, 0));
    board.set(GO, 0);
    board.stop();
    fake.hold_lanes(false);
    wait_until("it is gone", || board.is_gone());
    assert_eq!((ended(), fake.held_lanes(), board.index(0)), ([2, 2, 0], 0, 0));
    // Those that hold launches of the copy kernel do not hold this one.
    fake.hold_launches(1);
    board.launch([SHORT[0] * 50, SHORT[1]]);
    board.go(0);
    wait_until("its life is over", || board.is_gone());
    assert_eq!((ended(), board.index(0), fake.lane_gos()), ([2, 2, 1], 1, gos + 2));
    fake.check();
}

/// What holds, ends and fails the copy kernel does so here; a lane whose copy is held does not hold up other warps.
#[test]
fn the_fakes_switches_work_on_lanes() {
    let fake = Fake::take();
    let mut board = Board::new(&fake, 9, Form::Bytes128, 16, 0);
    let lives = fake.lane_ends(LanesEnd::Life);
    let copy = Descriptor::new(Form::Bytes128, 2, OP_PUT | OP_SIGNAL_INC, 4096).with_signal(0, 1, false);
    let copy = copy.first(0, SOURCE).second(0, TARGET);
    (0..9).for_each(|i| board.record(i, 0));
    fake.hold(4096);
    board.launch(LONG);
    board.go(1);
    board.post(8, &copy, 0);
    wait_until("the copy is held", || fake.is_holding());
    let increment = board.increment(0, 0);
    board.post(0, &increment, 0);
    wait_until("the other is served", || board.index(0) == 1);
    board.stop();
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!((board.signal(8, 0), board.index(8), board.is_gone()), (0, 0, false));
    fake.hold(0);
    board.end();
    assert_eq!((board.signal(8, 0), board.index(8)), (1, 1));
    assert_eq!(board.target(0, 4096), board.source(0, 4096));

    for is_limited in [false, true] {
        fake.kernel_limits(0, is_limited.into());
        (0..9).for_each(|i| board.record(i, board.index(i)));
        board.launch(LONG);
        board.go(1);
        wait_until("it is up", || board.is_up());
        match is_limited {
            true => board.post(0, &increment, 0),
            false => fake.end_kernels(),
        }
        wait_until("it is ended", || board.is_gone());
    }
    assert_eq!(fake.lane_ends(LanesEnd::Life), lives + 2);
    fake.check();
}

/// An error of the GPU, or an address that it cannot reach: the stream has it, and nobody says that it is gone.
#[test]
fn errors_are_the_streams() {
    for (is_injected, code) in [(true, 719), (false, 700)] {
        let fake = Fake::take();
        let mut board = Board::new(&fake, 1, Form::Bytes128, 16, 0);
        board.record(0, 0);
        if !is_injected {
            // Of another GPU alone.
            board.set_record(0, 4, fake.alloc(1, 64, true));
        }
        board.launch(LONG);
        board.go(0);
        wait_until("it is up", || board.is_up());
        if is_injected {
            fake.inject("gpu", code);
        }
        let increment = board.increment(0, 0);
        board.post(0, &increment, 0);
        wait_until("the stream has it", || board.query() == code);
        assert!(!board.is_gone());
        fake.check();
    }
}
