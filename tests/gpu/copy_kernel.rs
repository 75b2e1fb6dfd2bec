//! The copy kernel: what it moves arrives in order and once, beside the stream and by the stream where there is none.
//! Through the RMA v16 table, on the fake CUDA driver, whose copy kernel does in another order whatever the real one
//! may.

use crate::harness::copy_kernel::{on_one_gpu, take, FIRST};
use crate::harness::plan::*;
use crate::harness::*;
use crate::support::common::*;
use proptest::prelude::*;
use std::time::Duration;

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

/// Memory that other GPUs cannot load from: the copies go by the stream, and arrive.
#[test]
fn memory_that_is_closed_to_other_gpus_is_not_given_to_it() {
    for kind in KINDS {
        let fake = take();
        fake.access(1);
        traffic(&fake, kind, || true);
    }
}

/// Copies with few others are reported with their go, signals are not, and of a crowd not every copy is: a report
/// waits for the whole GPU. They come in eights, which call for the copy kernel however slow the fake is.
#[test]
fn few_copies_are_reported_at_once_and_crowds_together() {
    let fake = take();
    on_one_gpu(&fake, |r, [src, dst, sig]| {
        if r.rank == 0 {
            let (from, to, signal) = ((src.as_window(), 0), (dst.as_window(), 0), (sig.as_window(), 0, 1));
            let go = |what: &str, bytes, most: usize, is_enough: &dyn Fn(u64, u64) -> bool| {
                let before = (fake.commands(), fake.awaited_commands());
                let grown = || (fake.commands() - before.0, fake.awaited_commands() - before.1);
                let some = || {
                    let all: Vec<_> = (0..most).map(|_| r.put(0, from, bytes, to, 1, Some(signal))).collect();
                    all.into_iter().for_each(|q| r.wait(q));
                };
                repeat_until(what, some, || is_enough(grown().0, grown().1));
                grown()
            };
            let (all, awaited) = go("copies", 64, 8, &|all, _| all >= 20);
            assert_eq!(awaited, all, "a few copies");
            let (_, awaited) = go("signals", 0, 8, &|all, _| all >= 20);
            assert_eq!(awaited, 0, "signals");
            fake.kernel_limits(100, 0);
            go("a crowd", 64, 60, &|all, awaited| all >= 60 && awaited < all);
        }
    });
    fake.check();
}

/// Two submissions close together call for it, so that of copies which are waited for one by one all but the first go
/// by it. The fake's streams must not be slower than a GPU's for that ([`Fake::settings`]).
#[test]
fn lone_copies_that_come_close_together_go_by_the_copy_kernel() {
    for bytes in [0, 8, 64] {
        let fake = take();
        fake.settings(false, 0);
        on_one_gpu(&fake, |r, [src, dst, sig]| {
            if r.rank == 0 {
                let (from, to, signal) = ((src.as_window(), 0), (dst.as_window(), 0), (sig.as_window(), 0, 1));
                let before = fake.commands();
                let lone = || r.wait(r.put(0, from, bytes, to, 1, Some(signal)));
                repeat_until("lone ones go by the copy kernel", lone, || fake.commands() >= before + 20);
            }
        });
        fake.check();
    }
}
