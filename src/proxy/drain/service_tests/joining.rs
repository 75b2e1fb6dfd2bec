//! Hundreds of lanes: those that come to rest late join the others, and those that carried something lately go with
//! them.

use super::super::hand_over::{JOIN_WITHIN, OTHERS_WITHIN, PLACE_WITHIN};
use super::*;

/// More than a kernel has [`TOGETHER`].
const MANY_LANES: usize = TOGETHER + 8;

impl Bench {
    fn many() -> Self {
        let bench = Self::new(MANY_LANES as u32);
        bench.told().room = 64;
        bench
    }

    fn let_serve_all_but_one() -> Self {
        Self::let_serve_all_but(1)
    }

    /// A kernel has all lanes but those whose entries are not complete.
    fn let_serve_all_but(late: u32) -> Self {
        let mut bench = Self::many();
        bench.write(4);
        (0..2).for_each(|_| bench.pass());
        assert_eq!(bench.standing(), [3; MANY_LANES], "one of each is under way");
        bench.told().stage = Stage::Ready;
        let posted = bench.fabric[0].posted.load(Ordering::Relaxed);
        bench.fabric[0].completed.store(posted - late, Ordering::Relaxed);
        bench.pass();
        assert_eq!(bench.told().stage, Stage::Ready, "the others may be there in a moment");
        std::thread::sleep(OTHERS_WITHIN);
        bench.pass();
        assert_eq!(bench.served(), (Stage::Serving, MANY_LANES - late as usize));
        bench
    }

    /// What the kernel does, and how many lanes it was given.
    fn served(&self) -> (Stage, usize) {
        let told = self.told();
        (told.stage, told.given)
    }

    /// The kernel ends by itself, and no other is behind it.
    fn end(&self) {
        let mut told = self.told();
        (told.stage, told.is_awaited) = (Stage::Over, false);
    }

    /// Lanes that take entries.
    fn open(&self) -> usize {
        let is_open = |i: &usize| {
            let place = &self.drain.places[*i];
            !place.lane.is_held() && !place.lane.is_served()
        };
        (0..MANY_LANES).filter(is_open).count()
    }
}

#[test]
fn a_lane_that_is_late_joins_the_others_while_they_are_served() {
    let mut bench = Bench::let_serve_all_but_one();
    let calls = bench.told().calls.len();
    (0..3).for_each(|_| bench.pass());
    assert_eq!(bench.told().calls.len(), calls + 1, "another launch is called for it");
    assert_eq!((bench.open(), bench.told().stage), (0, Stage::Serving), "the others go on, and it takes nothing");
    bench.complete();
    bench.pass();
    assert_eq!(bench.told().stage, Stage::Over, "it is at rest");
    bench.pass();
    assert_eq!(bench.served(), (Stage::Serving, MANY_LANES));
}

#[test]
fn those_at_rest_join_without_one_that_is_not() {
    let mut bench = Bench::let_serve_all_but(3);
    bench.pass();
    let posted = bench.fabric[0].posted.load(Ordering::Relaxed);
    bench.fabric[0].completed.store(posted - 1, Ordering::Relaxed);
    (0..2).for_each(|_| bench.pass());
    assert_eq!(bench.served(), (Stage::Serving, MANY_LANES - 3), "the third one may be there in a moment");
    std::thread::sleep(REST_WITHIN);
    (0..2).for_each(|_| bench.pass());
    std::thread::sleep(OTHERS_WITHIN);
    bench.pass();
    assert_eq!(bench.served(), (Stage::Serving, MANY_LANES - 1));
}

#[test]
fn one_that_was_too_late_is_not_held_again_in_that_service() {
    let mut bench = Bench::let_serve_all_but_one();
    bench.pass();
    std::thread::sleep(2 * JOIN_WITHIN);
    (0..2).for_each(|_| bench.pass());
    for _ in 0..3 {
        // It takes what comes, which says that it is for the kernel.
        bench.complete();
        assert_eq!((bench.open(), bench.told().stage), (1, Stage::Serving));
    }
    let stands = bench.standing().iter().sum::<u32>();
    assert!(stands < 3 * MANY_LANES as u32);
    // The next one has it.
    bench.told().stage = Stage::Over;
    (0..3).for_each(|_| bench.complete());
    assert_eq!(bench.served(), (Stage::Serving, MANY_LANES));
}

#[test]
fn one_that_is_too_late_goes_on_by_this_thread() {
    let mut bench = Bench::let_serve_all_but_one();
    bench.pass();
    std::thread::sleep(2 * JOIN_WITHIN);
    bench.pass();
    assert_eq!((bench.open(), bench.told().stage), (1, Stage::Serving));
    bench.complete();
    assert_eq!(bench.standing().iter().filter(|&&n| n < 3).count(), 1, "it takes its next entry");
}

#[test]
fn one_for_which_no_launch_comes_goes_on_by_this_thread() {
    for comes in [false, true] {
        let mut bench = Bench::let_serve_all_but_one();
        bench.told().hears = comes;
        bench.pass();
        assert_eq!(bench.open(), usize::from(!comes));
        if comes {
            // It is called, and given up; nor does another one come.
            bench.told().hears = false;
            bench.told().is_awaited = false;
            bench.pass();
            assert_eq!(bench.open(), 1);
        }
        // Nothing is left behind: the launch after that has it.
        bench.told().hears = true;
        bench.complete();
        (0..5).for_each(|_| bench.complete());
        assert_eq!(bench.served(), (Stage::Serving, MANY_LANES));
    }
}

#[test]
fn nobody_is_held_where_the_kernel_ends_first() {
    // By itself, with no other behind it; for a fault of the GPU; because the thread is asked back.
    for way in 0..3 {
        let mut bench = Bench::let_serve_all_but_one();
        bench.pass();
        match way {
            0 => bench.end(),
            1 => bench.told().stage = Stage::Failed,
            _ => bench.drain.wind_up(),
        }
        (0..2).for_each(|_| bench.pass());
        let held = (0..MANY_LANES).filter(|&i| bench.drain.places[i].lane.is_held()).count();
        assert_eq!(held, 0, "way {way}");
    }
}

#[test]
fn lanes_that_carried_something_lately_go_with_the_others() {
    let mut bench = Bench::many();
    bench.let_serve(MANY_LANES);
    bench.stands.iter().for_each(|stand| stand.entries.store(0, Ordering::Relaxed));
    bench.told().positions.iter_mut().for_each(|next| *next += 40);
    let mut given = Vec::new();
    for _ in 0..RECENT + 2 {
        bench.end();
        // All are cold.
        (0..2 * HOT_VISITS).for_each(|_| bench.pass());
        assert_eq!(bench.drain.hot.len(), 0);
        bench.write_first(4);
        (0..2).for_each(|_| bench.complete());
        bench.told().stage = Stage::Ready;
        (0..2).for_each(|_| bench.complete());
        assert_eq!(bench.told().stage, Stage::Serving);
        given.push(bench.told().given);
        bench.told().positions[0] += 40;
    }
    let (with, without) = given.split_at(RECENT as usize);
    assert!(with.iter().all(|&n| n == MANY_LANES), "{given:?}");
    assert!(without.iter().all(|&n| n == 1) && without.len() == 2, "{given:?}");
}

/// On a full GPU the next launch has no place before the present one has gone.
#[test]
fn the_present_kernel_goes_where_the_next_one_has_no_place_beside_it() {
    for waited in [Duration::ZERO, 2 * PLACE_WITHIN] {
        let mut bench = Bench::let_serve_all_but_one();
        (bench.told().has_place, bench.told().waited) = (false, waited);
        let calls = bench.told().calls.len();
        bench.pass();
        assert_eq!(bench.told().calls.len(), calls + 1, "it is called");
        if waited.is_zero() {
            assert_eq!(bench.told().stage, Stage::Serving, "it may come in a moment");
            continue;
        }
        assert_eq!(bench.told().stage, Stage::Over);
        bench.told().has_place = true;
        bench.complete();
        bench.pass();
        assert_eq!(bench.served(), (Stage::Serving, MANY_LANES));
    }
}
