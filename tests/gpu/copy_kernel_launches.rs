//! Launches of the copy kernel that are refused, late or never up: nothing is lost or done twice, others take over, and
//! what a late one needs stays. Through the RMA v16 table, on the fake CUDA driver.

use crate::harness::copy_kernel::{on_one_gpu, take, FIRST, LAUNCH_SLOTS};
use crate::harness::plan::*;
use crate::harness::*;
use crate::support::common::*;
use crate::support::logged;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// A refusal when it is needed, which is later.
#[test]
fn a_refused_launch_fails_nothing() {
    let fake = take();
    let before = fake.calls("cuLaunchKernel");
    // The first launches are those of registration.
    fake.inject_after("cuLaunchKernel", FIRST as u32, 701);
    traffic(&fake, Signals::Added, || fake.calls("cuLaunchKernel") > before + FIRST);
}

/// Refusals that pass, for want of memory: launches are tried again, less and less often, and the log says it once.
#[test]
fn launches_go_on_once_a_refusal_has_passed() {
    logged::install();
    let fake = take();
    let said = || logged::said(&["until a launch succeeds"]);
    with_bursts(&fake, |burst| {
        logged::collect();
        for _ in 0..3 {
            wait_until("all have ended", || fake.launched() == 0);
            fake.inject("cuLaunchKernel", 2);
            let before = fake.calls("cuLaunchKernel");
            repeat_until("a launch is refused", &mut *burst, || fake.calls("cuLaunchKernel") > before);
            let before = fake.commands();
            repeat_until("the kernel carries again", &mut *burst, || fake.commands() >= before + 8);
        }
    });
    let said = said();
    // Each rank's GPU may have the one that is refused.
    assert!((1..=2).contains(&said), "{:#?}", logged::lines());
    fake.check();
}

/// On a GPU without room for it everything goes by the stream, and closing does not wait for it for ever.
#[test]
fn one_that_never_starts_is_not_waited_for() {
    for kind in KINDS {
        let fake = take();
        let before = fake.commands();
        fake.hold_kernels(true);
        let plan = Plan::new(&draws(300), 2, Mix::Light);
        let flags = kind.set_up(&fake);
        job(2, 2, |r| {
            let _context = fake.enter(0);
            let host = r.window(plan.words, 0);
            let src = fake.window(r, 0, plan.words, 0);
            let dst = fake.window(r, 0, plan.words, 0);
            let sig = fake.signals(r, 0, 4, flags);
            r.job.barrier.wait();
            match r.rank {
                0 => plan.send(r, 1, 50, &Ends { host: &host, gpu: &src, dst: &dst, sig: &sig }, 1, 0),
                _ => watch(r, &plan, 2, 1, &dst, &sig, &[0; 4]),
            }
            r.job.barrier.wait();
        });
        assert_eq!(fake.commands(), before);
        fake.hold_kernels(false);
        wait_until("kernels have started and ended", || fake.launched() == 0);
        fake.check();
    }
}

/// It gets its place on the GPU at some time, between others: nothing is lost, nothing is done twice.
#[test]
fn one_that_starts_late_takes_over() {
    for kind in KINDS {
        let fake = take();
        let (before, held) = (fake.commands(), AtomicBool::new(false));
        let toggle = || {
            fake.hold_kernels(!held.fetch_xor(true, Ordering::AcqRel));
            std::thread::sleep(Duration::from_micros(700));
        };
        beside(toggle, || traffic(&fake, kind, || fake.commands() > before));
        fake.hold_kernels(false);
    }
}

/// Sixty small puts by two contexts, waited for.
fn put_burst<'a>(
    r: &Rank,
    [src, dst]: [&GpuWindow; 2],
    peer: usize,
    signal: impl Fn(u64) -> Option<(&'a Window, u64, u64)>,
) {
    let put = |i: u64| {
        let (from, to) = ((src.as_window(), 0), (dst.as_window(), i % 8 * 8));
        r.put(i as i32 % 2, from, 8, to, peer, signal(i))
    };
    let all: Vec<_> = (0..60).map(put).collect();
    all.into_iter().for_each(|q| r.wait(q));
}

/// A job in which rank 0 does something with bursts of small puts to rank 1, all of which arrive.
fn with_bursts(fake: &Fake, act: impl Fn(&mut dyn FnMut()) + Sync) {
    let sum = AtomicU64::new(0);
    on_one_gpu(fake, |r, [src, dst, sig]| {
        if r.rank == 0 {
            act(&mut || {
                put_burst(r, [src, dst], 1, |i| Some((sig.as_window(), 0, 1 + i % 3)));
                sum.fetch_add((0..60).map(|i| 1 + i % 3).sum(), Ordering::AcqRel);
            });
        }
        r.job.barrier.wait();
        if r.rank == 1 {
            let sum = sum.load(Ordering::Acquire);
            sig.wait(r, 0, sum);
            assert_eq!(sig.get(0), sum);
        }
    });
}

/// A launch waits for its turn and another one carries meanwhile. The late one ends, and its launch slot is used again:
/// there are more rounds than launch slots.
#[test]
fn another_slot_takes_over_from_a_late_launch() {
    let fake = take();
    with_bursts(&fake, |burst| {
        for round in 0..3 * LAUNCH_SLOTS {
            fake.hold_launches(1);
            repeat_until("a launch is late", &mut *burst, || fake.held_launches() == 1);
            let before = fake.commands();
            repeat_until("another one carries", &mut *burst, || fake.commands() >= before + 8);
            assert_eq!(fake.held_launches(), 1, "round {round}");
            fake.hold_launches(0);
            wait_until("all have ended", || fake.launched() == 0);
        }
    });
    fake.check();
    assert_eq!(fake.launched(), 0);
}

/// A stream is not free yet, and the driver takes its time to say so: the launch is late before it is none. Its slot
/// is used again: there are more rounds than launch slots.
#[test]
fn a_late_launch_that_never_was_leaves_its_slot() {
    let fake = take();
    with_bursts(&fake, |burst| {
        for _ in 0..3 * LAUNCH_SLOTS {
            wait_until("all have ended", || fake.launched() == 0);
            fake.slow_queries(2);
            repeat_until("queries are slow", &mut *burst, || fake.slow_queries_left() == 0);
            let before = fake.commands();
            repeat_until("another launch carries", &mut *burst, || fake.commands() >= before + 8);
        }
    });
    fake.check();
}

/// Where every launch is late there is one in each launch slot, no more, and traffic goes on without them. The closing
/// lines count them.
#[test]
fn there_are_no_more_late_launches_than_slots() {
    let fake = take();
    logged::collect();
    with_bursts(&fake, |burst| {
        logged::listen();
        fake.hold_launches(1000);
        repeat_until("all slots are late", &mut *burst, || fake.held_launches() == LAUNCH_SLOTS);
        let before = (fake.calls("cuLaunchKernel"), fake.commands());
        (0..50).for_each(|_| burst());
        assert_eq!((fake.calls("cuLaunchKernel"), fake.commands()), before);
        assert_eq!(fake.held_launches(), LAUNCH_SLOTS);
        fake.hold_launches(0);
        repeat_until("the kernel carries again", &mut *burst, || fake.commands() >= before.1 + 8);
    });
    fake.check();
    assert_eq!(fake.launched(), 0);
    let late = |line: &str| line.split_once(" of them late;")?.0.rsplit(' ').next()?.parse::<usize>().ok();
    let late: usize = logged::lines().iter().filter_map(|(_, line)| late(line)).sum();
    assert!(late >= LAUNCH_SLOTS, "{late} late launches");
}

/// A stream that has launches now and then keeps a hardware queue of the application's context: all ranks together have
/// as many streams as half of the eight queues, and those that find none free go on without.
#[test]
fn launches_of_all_ranks_leave_half_of_the_hardware_queues() {
    const RANKS: usize = 3;
    let fake = take();
    let (most, made) = (AtomicUsize::new(0), fake.calls("cuStreamCreateWithPriority"));
    job(RANKS, 2, |r| {
        let _context = fake.enter(0);
        let [src, dst] = [(), ()].map(|()| fake.window(r, 0, 8, 0));
        let peer = (r.rank + 1) % RANKS;
        let burst = || {
            put_burst(r, [&src, &dst], peer, |_| None);
            most.fetch_max(fake.held_launches(), Ordering::Relaxed);
        };
        if r.rank == 0 {
            fake.hold_launches(1000);
        }
        r.job.barrier.wait();
        repeat_until("as many as may be are late", burst, || most.load(Ordering::Relaxed) >= 4);
        (0..100).for_each(|_| burst());
        r.job.barrier.wait();
        if r.rank == 0 {
            fake.hold_launches(0);
        }
        let before = fake.commands();
        repeat_until("kernels carry again", burst, || fake.commands() >= before + 8);
        r.job.barrier.wait();
    });
    assert_eq!(most.into_inner(), 4);
    // Three of each engine's own, and one to ask for errors; one for all that brings memory, and four for launches.
    assert_eq!(fake.calls("cuStreamCreateWithPriority") - made, RANKS as u64 * 4 + 1 + 4);
    fake.check();
    assert_eq!(fake.launched(), 0);
}

/// Late launches of two ranks have all streams while the third one is set up: it has its kernel when they are gone.
#[test]
fn a_rank_that_finds_no_stream_at_set_up_has_its_kernel_later() {
    let fake = take();
    fake.hold_launches(1000);
    each_has_its_kernel(&fake, 3, || {
        assert_eq!(fake.held_launches(), 4, "first launches that stand");
        fake.hold_launches(0);
    });
}

/// The GPU has no memory for a launch at set-up, and has it later.
#[test]
fn a_rank_whose_first_launch_is_refused_for_now_has_its_kernel_later() {
    let fake = take();
    fake.inject("cuLaunchKernel", 2);
    each_has_its_kernel(&fake, 2, || ());
}

/// Ranks are set up and, after `then`, put one after another until the kernel carries, which is their own.
fn each_has_its_kernel(fake: &Fake, ranks: usize, then: impl Fn() + Sync) {
    job(ranks, 2, |r| {
        let _context = fake.enter(0);
        let [src, dst] = [(), ()].map(|()| fake.window(r, 0, 8, 0));
        r.job.barrier.wait();
        if r.rank == 0 {
            then();
        }
        for one in 0..ranks {
            r.job.barrier.wait();
            if r.rank == one {
                let (peer, before) = ((r.rank + 1) % ranks, fake.commands());
                let burst = || put_burst(r, [&src, &dst], peer, |_| None);
                repeat_until("its kernel carries", burst, || fake.commands() >= before + 8);
            }
        }
        r.job.barrier.wait();
    });
    fake.check();
    assert_eq!(fake.launched(), 0);
}

/// Now this launch is late, now that one, while all kinds of small operations are under way.
#[test]
fn order_is_kept_from_slot_to_slot() {
    for kind in KINDS {
        let fake = take();
        let (before, late, turn) = (fake.commands(), AtomicBool::new(false), AtomicUsize::new(0));
        let hold = || {
            fake.hold_launches(1 + turn.fetch_add(1, Ordering::Relaxed) % 3);
            std::thread::sleep(Duration::from_millis(2));
            late.fetch_or(fake.held_launches() > 0, Ordering::AcqRel);
            fake.hold_launches(0);
            std::thread::sleep(Duration::from_micros(300));
        };
        beside(hold, || traffic(&fake, kind, || fake.commands() > before && late.load(Ordering::Acquire)));
    }
}

/// A late launch keeps code and rings, and its stream, when the communicator closes; one that gets its turn meanwhile
/// keeps nothing.
#[test]
fn closing_leaves_to_a_late_launch_what_it_needs() {
    for gets_turn in [false, true] {
        let fake = take();
        let count = || ["cuModuleLoadData", "cuModuleUnload", "cuStreamDestroy"].map(|call| fake.calls(call));
        let before = count();
        with_bursts(&fake, |burst| {
            fake.hold_launches(1);
            repeat_until("a launch is late", &mut *burst, || fake.held_launches() == 1);
            let before = fake.commands();
            repeat_until("another one carries", &mut *burst, || fake.commands() >= before + 8);
            if gets_turn {
                fake.hold_launches(0);
            }
        });
        let after = count();
        let [loaded, unloaded, destroyed] = std::array::from_fn(|i| after[i] - before[i]);
        let left = u64::from(!gets_turn);
        assert_eq!((loaded, unloaded), (2, 2 - left), "its turn: {gets_turn}");
        // Three of each engine's own, and one to ask for errors; one for all that brings memory.
        assert_eq!(destroyed, 2 * 4 + FIRST + 1 - left, "its turn: {gets_turn}");
        assert_eq!(fake.launched() as u64, left);
        fake.hold_launches(0);
        wait_until("it has ended", || fake.launched() == 0);
        fake.check();
    }
}

/// The application's context fails while launches wait for their turn, and an engine that has nothing to do closes
/// before it hears of it: its streams have the error, and its launches may still come up. They keep code and rings.
#[test]
fn a_fault_does_not_end_launches_that_wait_for_their_turn() {
    let fake = take();
    let unloaded = fake.calls("cuModuleUnload");
    fake.hold_launches(FIRST as usize);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let _window = fake.window(r, 0, 8, 0);
        r.job.barrier.wait();
        if r.rank == 0 {
            assert_eq!(fake.held_launches() as u64, FIRST);
            fake.fault(0, 700);
        }
        r.job.barrier.wait();
    });
    assert_eq!(fake.calls("cuModuleUnload"), unloaded, "a late launch's code is gone");
    fake.hold_launches(0);
    wait_until("they have come up and ended", || fake.launched() == 0);
    fake.check();
}
