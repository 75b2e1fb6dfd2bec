//! The copy kernel: what it moves arrives in order and once, whenever it starts, ends or fails. Through the RMA v16
//! table, on the fake CUDA driver, whose copy kernel does in another order whatever the real one may.

use crate::harness::plan::*;
use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::*;
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Places where each rank's copy kernel can be launched; each has a launch when it is made, which carries nothing.
const LAUNCH_SLOTS: usize = 4;
/// Launches when two ranks register.
const FIRST: u64 = 2 * LAUNCH_SLOTS as u64;

const NEVER_RESET: u64 = MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET;

/// The fake driver, the copy kernel asked for.
fn take() -> Fake {
    let fake = Fake::take();
    fake.set_issue("kernel=4096");
    fake
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// Small puts and signals of many contexts, on copy kernels that take their time and end when they like.
    #[test]
    fn small_puts_and_signals_arrive_in_order_and_once(
        draws in prop::collection::vec(any::<u64>(), 20..300),
        kind in any_kind(),
        contexts in 1..5usize,
        depth in prop::sample::select(vec![1, 4, 40, 1000]),
        issue in prop::sample::select(vec![
            "kernel=1024", "kernel=64", "kernel=4096,submissions=4,gather=1", "merge=0,kernel=4096",
        ]),
        (command_us, most) in prop::sample::select(vec![(0, 0), (0, 5), (30, 0), (100, 40)]),
        (gpus, light) in (1..3, any::<bool>()),
    ) {
        let fake = take();
        fake.set_issue(issue);
        fake.kernel_limits(command_us, most);
        let plan = Plan::new(&draws, contexts, if light { Mix::Light } else { Mix::Any });
        transfer(&fake, kind, &plan, contexts, depth, gpus);
    }
}

#[test]
fn the_copy_kernel_takes_operations() {
    for kind in KINDS {
        let fake = take();
        let before = (fake.commands(), fake.calls("cuLaunchKernel"));
        traffic(&fake, kind, || fake.commands() > before.0 && fake.calls("cuLaunchKernel") > before.1 + FIRST);
    }
}

#[test]
fn there_is_none_where_it_is_off() {
    let fake = take();
    fake.set_issue("kernel=0");
    let before = (fake.calls("cuModuleLoadData"), fake.calls("cuLaunchKernel"));
    traffic(&fake, Signals::NeverReset, || true);
    assert_eq!((fake.calls("cuModuleLoadData"), fake.calls("cuLaunchKernel")), before);
}

/// A driver that does not load it, or does not start it.
#[test]
fn without_it_all_goes_by_the_stream() {
    for call in ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"] {
        let fake = take();
        fake.inject(call, 218);
        traffic(&fake, Signals::NeverReset, || true);
    }
}

/// A refusal when it is needed, which is later.
#[test]
fn a_refused_launch_fails_nothing() {
    let fake = take();
    let before = fake.calls("cuLaunchKernel");
    // The first launches are those of registration.
    fake.inject_after("cuLaunchKernel", FIRST as u32, 701);
    traffic(&fake, Signals::Added, || fake.calls("cuLaunchKernel") > before + FIRST);
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

/// A job in which rank 0 does something with bursts of small puts to rank 1, all of which arrive.
fn with_bursts(fake: &Fake, act: impl Fn(&mut dyn FnMut()) + Sync) {
    let sum = AtomicU64::new(0);
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, 8, 0);
        let dst = fake.window(r, 0, 8, 0);
        let sig = fake.signals(r, 0, 1, NEVER_RESET);
        r.job.barrier.wait();
        if r.rank == 0 {
            act(&mut || {
                let put = |i: u64| {
                    let (from, to) = ((src.as_window(), 0), (dst.as_window(), i % 8 * 8));
                    r.put(i as i32 % 2, from, 8, to, 1, Some((sig.as_window(), 0, 1 + i % 3)))
                };
                let all: Vec<_> = (0..60).map(put).collect();
                all.into_iter().for_each(|q| r.wait(q));
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

/// Where every launch is late there is one in each launch slot, no more, and traffic goes on without them.
#[test]
fn there_are_no_more_late_launches_than_slots() {
    let fake = take();
    with_bursts(&fake, |burst| {
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
        // Two of each engine's own, and one to ask for errors.
        assert_eq!(destroyed, 2 * 3 + FIRST - left, "its turn: {gets_turn}");
        assert_eq!(fake.launched() as u64, left);
        fake.hold_launches(0);
        wait_until("it has ended", || fake.launched() == 0);
        fake.check();
    }
}

/// It ends with commands in its ring: they go by the stream, once, and the sums that the engine keeps stay right.
#[test]
fn what_it_leaves_undone_goes_by_the_stream() {
    for (kind, command_us) in KINDS.into_iter().flat_map(|k| [(k, 0), (k, 300)]) {
        let fake = take();
        fake.kernel_limits(command_us, 20);
        let before = (fake.commands(), fake.calls("cuLaunchKernel"));
        traffic(&fake, kind, || fake.commands() > before.0 && fake.calls("cuLaunchKernel") > before.1 + FIRST + 2);
        // And from outside, at any time.
        fake.kernel_limits(command_us, 0);
        let end = || {
            fake.end_kernels();
            std::thread::sleep(Duration::from_micros(300));
        };
        beside(end, || traffic(&fake, kind, || true));
    }
}

/// Several senders to the same signals.
#[test]
fn sums_of_many_senders_are_exact() {
    for (kind, most) in KINDS.into_iter().flat_map(|k| [(k, 0), (k, 10)]) {
        let fake = take();
        fake.kernel_limits(0, most);
        let flags = kind.set_up(&fake);
        let n = if matches!(kind, Signals::ReadBack) { 300 } else { 2000 };
        job(4, 2, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, 8, 0);
            let dst = fake.window(r, gpu, 32, 0);
            let sig = fake.signals(r, gpu, 3, flags);
            let put = |i: u64| {
                let to = (dst.as_window(), r.rank as u64 * 64);
                let size = [0, 8, 64, 4][i as usize % 4];
                r.put(i as i32 % 2, (src.as_window(), 0), size, to, 0, Some((sig.as_window(), i % 3 * 8, 1 + i % 5)))
            };
            let requests: Vec<_> = (0..n).map(put).collect();
            requests.into_iter().for_each(|q| r.wait(q));
            r.job.barrier.wait();
            if r.rank == 0 {
                for s in 0..3 {
                    let sum = 4 * (0..n).filter(|i| i % 3 == s).map(|i| 1 + i % 5).sum::<u64>();
                    sig.wait(r, s as usize, sum);
                    assert_eq!(sig.get(s as usize), sum);
                }
            }
        });
        fake.check();
    }
}

/// Small ones, large ones that have a stream of their own, and gets: each behind what it follows.
#[test]
fn large_and_small_and_gets() {
    for (issue, kind) in [
        ("bulk=65536,kernel=4096", Signals::NeverReset),
        ("bulk=0,kernel=4096", Signals::Added),
        ("bulk=65536,kernel=4096", Signals::ReadBack),
    ] {
        let fake = take();
        fake.set_issue(issue);
        let flags = kind.set_up(&fake);
        let (before, contexts, large) = (fake.commands(), 2, 16_384);
        job(2, contexts, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, large, 0);
            let dst = fake.window(r, gpu, 2 * large, 0);
            let back = fake.window(r, gpu, 2 * large, 0);
            let sig = fake.signals(r, gpu, 3, flags);
            for round in 1..=20u64 {
                if r.rank == 0 {
                    (0..large).step_by(61).for_each(|i| src.set(i, round));
                    let mut all = Vec::new();
                    for i in 0..90u64 {
                        let c = i % 2;
                        let to = c * large as u64 * 8;
                        let n = match i % 30 {
                            14 | 15 => large * 8,
                            _ => 8 << (i % 5),
                        };
                        let signal = Some((sig.as_window(), c * 8, 1));
                        all.push(r.put(c as i32, (src.as_window(), 0), n, (dst.as_window(), to), 1, signal));
                    }
                    all.into_iter().for_each(|q| r.wait(q));
                    sig.wait(r, 2, round);
                } else {
                    for c in 0..2 {
                        sig.wait(r, c, 45 * round);
                        assert_eq!(sig.get(c), 45 * round);
                        (0..large)
                            .step_by(61)
                            .for_each(|i| assert_eq!(dst.get(c * large + i), round, "{issue}: word {i}"));
                    }
                    // Its own and the peer's, in both directions.
                    let gets: Vec<_> = (0..40u64)
                        .map(|i| {
                            let n = if i % 20 / 2 == 3 { large * 8 } else { 8 << (i % 6) };
                            let to = (back.as_window(), i % 2 * large as u64 * 8);
                            r.get(i as i32 % 2, (src.as_window(), 0), n, to, 0)
                        })
                        .collect();
                    gets.into_iter().for_each(|q| r.wait(q));
                    for i in (0..large).step_by(61) {
                        assert_eq!(
                            (back.get(i), back.get(large + i)),
                            (round, round),
                            "{issue}: word {i} that was got"
                        );
                    }
                    r.wait(r.put(0, (src.as_window(), 0), 0, (src.as_window(), 0), 0, Some((sig.as_window(), 16, 1))));
                }
            }
        });
        fake.check();
        assert!(fake.commands() > before, "{issue}: the kernel by_kernel nothing");
    }
}

/// Puts that go on until a copy kernel is at work.
fn keep_busy(fake: &Fake, put: impl FnMut()) {
    let before = fake.commands();
    repeat_until("a kernel is at work", put, || fake.commands() >= before + 8);
}

/// Posts a put with a signal; `None`: it was refused.
fn post(
    r: &Rank,
    context: i32,
    src: &Window,
    n: usize,
    dst: &GpuWindow,
    peer: u32,
    sig: &GpuWindow,
) -> Option<*mut c_void> {
    let mut request = null_mut();
    let (d, g) = (dst.as_window().handle, sig.as_window().handle);
    // SAFETY: handles of windows that this rank has registered; the source stays.
    let put = unsafe {
        T.iput_signal.unwrap()(
            r.ctx,
            context,
            0,
            src.handle,
            n,
            0,
            d,
            peer,
            0,
            g,
            1,
            SIGNAL_OP_ADD,
            true,
            0,
            &mut request,
        )
    };
    (put == NcclResult::SUCCESS).then_some(request)
}

/// Its owner takes a window away while the copy kernel is at work there: once that is done nothing changes it. Other
/// windows, and other peers, go on.
#[test]
fn a_window_that_goes_is_left_alone_and_fails_one_peer_alone() {
    let fake = take();
    fake.kernel_limits(200, 0);
    job(3, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, 8, 0);
        let goes = fake.window(r, 0, 8, 0);
        let stays = fake.window(r, 0, 8, 0);
        let sig = fake.signals(r, 0, 3, NEVER_RESET);
        src.set(0, 1);
        r.job.barrier.wait();
        if r.rank == 2 {
            keep_busy(&fake, || ok(progress(r)));
            r.dereg(goes.as_window());
            let left = [goes.get(0), goes.get(1)];
            goes.set(0, 77);
            r.job.barrier.wait();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(goes.get(0), 77, "it was written after it was deregistered (was {left:?})");
        } else {
            let mut sent = 0;
            let mut all = Vec::new();
            let end = Instant::now() + Duration::from_secs(60);
            let mut failed = false;
            let before = fake.commands();
            // Rank 0 until the window is gone, rank 1 for as long as there is something to see.
            while !failed && (r.rank == 0 || sent < 600 || fake.commands() < before + 20) {
                let dst = if r.rank == 0 { &goes } else { &stays };
                for _ in 0..30 {
                    match post(r, 0, src.as_window(), 8, dst, 2, &sig) {
                        Some(request) => all.push(request),
                        None => failed = true,
                    }
                    sent += 1;
                }
                let outcome: Vec<_> = all.drain(..).map(|q| comes_out(r, q)).collect();
                failed |= outcome.contains(&false);
                assert!(Instant::now() < end, "rank {}: nothing failed in 60 s", r.rank);
            }
            assert_eq!(failed, r.rank == 0, "rank {}", r.rank);
            if r.rank == 1 {
                assert_eq!(stays.get(0), 0);
            }
            r.job.barrier.wait();
        }
        r.job.barrier.wait();
        if r.rank == 2 {
            assert_eq!(stays.get(0), 1);
        }
    });
    fake.check();
}

fn progress(r: &Rank) -> NcclResult {
    // SAFETY: plain call.
    unsafe { T.rma_progress.unwrap()(r.ctx) }
}

/// A fault while commands are up: every operation comes out, the later ones with an error, and nothing hangs.
#[test]
fn a_fault_while_it_is_at_work_hangs_nothing() {
    for (call, after, code) in [("gpu", 3, 700), ("gpu", 40, 700), ("cuMemcpyAsync", 2, 1)] {
        for kind in [Signals::NeverReset, Signals::Added] {
            let fake = take();
            fake.kernel_limits(20, 0);
            let flags = kind.set_up(&fake);
            job(2, 2, |r| {
                let _context = fake.enter(0);
                let src = fake.window(r, 0, 64, 0);
                let dst = fake.window(r, 0, 64, 0);
                let sig = fake.signals(r, 0, 1, flags);
                r.job.barrier.wait();
                if r.rank == 0 {
                    let burst = || {
                        let all: Vec<_> =
                            (0..100).map(|i| post(r, i % 2, src.as_window(), 8 << (i % 3), &dst, 1, &sig)).collect();
                        all.into_iter().filter(|q| !q.is_some_and(|q| comes_out(r, q))).count()
                    };
                    keep_busy(&fake, || assert_eq!(burst(), 0));
                    fake.inject_after(call, after, code);
                    let end = Instant::now() + Duration::from_secs(60);
                    while burst() == 0 {
                        assert!(Instant::now() < end, "{call}: everything came out well");
                    }
                    assert_eq!(burst(), 100, "{call}: some came out well after the fault");
                }
                r.job.barrier.wait();
            });
            fake.check();
        }
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

/// Memory that other GPUs cannot load from: the copies go by the stream, and arrive.
#[test]
fn memory_that_is_closed_to_other_gpus_is_not_given_to_it() {
    for kind in KINDS {
        let fake = take();
        fake.access(1);
        traffic(&fake, kind, || true);
    }
}

/// The communicator closes right behind the last operation.
#[test]
fn it_has_ended_when_the_communicator_has_closed() {
    let fake = take();
    let (mut rounds, mut met) = (0, 0);
    let end = Instant::now() + Duration::from_secs(60);
    while rounds < 20 || met == 0 {
        let alive = AtomicBool::new(false);
        job(2, 1, |r| {
            let _context = fake.enter(r.rank as i32);
            let src = fake.window(r, r.rank as i32, 8, 0);
            let sig = fake.signals(r, r.rank as i32, 1, NEVER_RESET);
            r.job.barrier.wait();
            if r.rank == 0 {
                let put = |_| r.put(0, (src.as_window(), 0), 8, (src.as_window(), 8), 1, Some((sig.as_window(), 0, 1)));
                let all: Vec<_> = (0..60).map(put).collect();
                all.into_iter().for_each(|q| r.wait(q));
                alive.fetch_or(fake.launched() > 0, Ordering::AcqRel);
            }
        });
        assert_eq!(fake.launched(), 0);
        fake.check();
        met += usize::from(alive.load(Ordering::Acquire));
        rounds += 1;
        assert!(Instant::now() < end, "none was alive at the end of any of {rounds} jobs");
    }
}

/// Contexts go in the middle of their puts, beside one that stays and on copy kernels that end when they like: what is
/// left of theirs is neither done by the next copy kernel nor by the stream, for its memory may be gone.
#[test]
fn nothing_is_done_for_a_context_that_is_gone() {
    const ROUNDS: u64 = 40;
    const PUTS: usize = 100;
    const GONE: u64 = u64::MAX;
    let fake = take();
    fake.kernel_limits(30, 8);
    let checked = AtomicU64::new(0);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, PUTS, 0);
        let dst = fake.window(r, 0, PUTS, 0);
        for round in 1..=ROUNDS {
            let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            let mut ctx = null_mut();
            // SAFETY: pointers to locals; a collective call.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let goes = Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
            let put = |by: &Rank, i: usize, to| {
                let at = i as u64 * 8;
                by.put(0, (src.as_window(), at), 8, (to, at), 1, None)
            };
            if r.rank == 0 {
                (0..PUTS).for_each(|i| src.set(i, round));
                for i in 0..PUTS {
                    put(&goes, i, dst.as_window());
                }
            } else {
                // The same engine's, all the while.
                while checked.load(Ordering::SeqCst) < round && !r.job.barrier.has_failed() {
                    let all: Vec<_> = (0..4).map(|i| put(r, i, src.as_window())).collect();
                    all.into_iter().for_each(|q| r.wait(q));
                }
            }
            // SAFETY: destroyed once.
            ok(unsafe { T.destroy_context.unwrap()(ctx) });
            (0..PUTS).for_each(|i| src.set(i, if r.rank == 0 { GONE } else { 0 }));
            std::thread::sleep(Duration::from_millis(if r.rank == 0 { 5 } else { 0 }));
            if r.rank == 0 {
                checked.store(round, Ordering::SeqCst);
            }
            r.job.barrier.wait();
            let is_gone = r.rank == 1 && (0..PUTS).any(|i| dst.get(i) == GONE);
            assert!(!is_gone, "round {round}: copied after its context was gone");
        }
    });
    fake.check();
}
