//! How the engine uses the driver: limits, what gathers and merges, what fails and who
//! learns of it. Through the RMA v16 table, on the fake CUDA driver.

use crate::harness::*;
use crate::support::apart::is_elsewhere;
use crate::support::common::*;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Every way that `OXYGIN_GPU_ISSUE` offers.
const WAYS: [&str; 6] =
    ["merge=1", "kernel=0", "own=0,kernel=0", "submissions=1", "submissions=4,gather=1,merge=0", "bulk=65536"];

/// A submission as full as it gets: the driver takes fewer than 256 stores a call.
#[test]
fn submissions_of_many_values_go_in_calls_of_255() {
    for issue in ["merge=0", "merge=1", "merge=0,kernel=4096"] {
        let fake = Fake::take();
        fake.set_issue(issue);
        // Long enough for more than one submission's worth to gather behind the first.
        fake.settings(false, 5000);
        let n = 1500;
        job(2, 3, |r| {
            let _context = fake.enter(0);
            let mut src = r.window(n, 0);
            let dst = fake.window(r, 0, n, 0);
            let sig = fake.signals(r, 0, n, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
            if r.rank == 0 {
                (0..n).for_each(|i| src.words[i] = i as u64 + 1);
                let put = |i: usize| {
                    let at = i as u64 * 8;
                    r.put((i % 3) as i32, (&src, at), 8, (dst.as_window(), at), 1, Some((sig.as_window(), at, 7)))
                };
                let requests: Vec<_> = (0..n).map(put).collect();
                requests.into_iter().for_each(|q| r.wait(q));
            } else {
                for i in 0..n {
                    sig.wait(r, i, 7);
                    assert_eq!((dst.get(i), sig.get(i)), (i as u64 + 1, 7));
                }
            }
        });
        fake.check();
    }
}

/// Strong signals over three contexts, after puts of every kind, with another context's traffic between them, on a
/// driver whose stores overtake whatever they may.
#[test]
fn signals_stay_behind_what_they_follow_in_every_way() {
    for (issue, can_add, flags) in WAYS
        .into_iter()
        .flat_map(|w| [(w, false, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET), (w, true, MR_FLAG_FORCE_SO)])
    {
        let fake = Fake::take();
        fake.set_issue(issue);
        fake.settings(can_add, 100);
        let (contexts, rounds, words) = (3, 60u64, 20_000);
        job(2, contexts, |r| {
            let _context = fake.enter(r.rank as i32);
            let gpu = r.rank as i32;
            let src = fake.window(r, gpu, words * 3, 0);
            let dst = fake.window(r, gpu, words * 3 + 3, 0);
            // Of each context two signals; the last word counts the answers.
            let sig = fake.signals(r, gpu, 7, flags);
            let mut value = r.window(3 * rounds as usize, 0);
            if r.rank == 0 {
                (0..value.words.len()).for_each(|i| value.words[i] = i as u64 / 3 + 1);
                for round in 1..=rounds {
                    if round % 8 == 0 {
                        // The peer has seen everything.
                        sig.wait(r, 6, round / 8 - 1);
                    }
                    let mut all = Vec::new();
                    for c in 0..3u64 {
                        let at = c * words as u64 * 8;
                        (0..words).step_by(1999).for_each(|i| src.set(c as usize * words + i, round));
                        let put = |from: (&Window, u64), n: usize, to: u64, signal| {
                            r.put(c as i32, from, n, (dst.as_window(), to), 1, signal)
                        };
                        let s = |i: u64| Some((sig.as_window(), (2 * c + i) * 8, 1));
                        // Pieces that continue one another, a large one, a value, in changing order.
                        let mut puts = [(8, 0), (8, 8), (64, 16), (words * 8 - 80, 80)];
                        puts.rotate_left((round + c) as usize % 4);
                        for (n, from) in puts {
                            all.push(put((src.as_window(), at + from), n, at + from, None));
                        }
                        all.push(put((src.as_window(), 0), 0, 0, s(0)));
                        let word = ((round - 1) * 3 + c) * 8;
                        all.push(put((&value, word), 8, (3 * words as u64 + c) * 8, s(1)));
                    }
                    all.into_iter().for_each(|q| r.wait(q));
                }
                sig.wait(r, 6, rounds / 8);
            } else {
                for round in 1..=rounds {
                    for c in 0..3 {
                        sig.wait(r, 2 * c, round);
                        let seen = |i: usize| dst.get(c * words + i);
                        for i in (0..words).step_by(1999) {
                            assert!(seen(i) >= round, "{issue}: context {c}, word {i} is {} in {round}", seen(i));
                        }
                        sig.wait(r, 2 * c + 1, round);
                        let value = dst.get(3 * words + c);
                        assert!(value >= round, "{issue}: context {c}, the value is {value} in {round}");
                        // The second of a round comes after the first.
                        let second = sig.get(2 * c + 1);
                        assert!(sig.get(2 * c) >= second, "{issue}: context {c}: {} < {second}", sig.get(2 * c));
                    }
                    if round % 8 == 0 {
                        r.wait(r.put(
                            0,
                            (src.as_window(), 0),
                            0,
                            (dst.as_window(), 0),
                            0,
                            Some((sig.as_window(), 48, 1)),
                        ));
                    }
                }
            }
        });
        fake.check();
    }
}

/// Puts that continue one another become one copy, signals to one word one store, contexts in turn or not.
#[test]
fn neighbours_travel_together() {
    for contexts in [1usize, 8] {
        let fake = Fake::take();
        fake.settings(false, 20_000);
        let each = 32;
        job(2, contexts as i32, |r| {
            let _context = fake.enter(0);
            let n = each * contexts;
            let src = fake.window(r, 0, n, 0);
            let dst = fake.window(r, 0, n, 0);
            let sig = fake.signals(r, 0, contexts, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
            if r.rank == 0 {
                (0..n).for_each(|i| src.set(i, i as u64 + 1));
                let calls = || ["cuMemcpyAsync", "cuMemcpyBatchAsync", "cuStreamBatchMemOp"].map(|c| fake.calls(c));
                let before = calls();
                let mut requests = Vec::new();
                for i in 0..each {
                    for c in 0..contexts {
                        let at = (c * each + i) as u64 * 8;
                        let signal = Some((sig.as_window(), c as u64 * 8, 1));
                        let to = (dst.as_window(), at);
                        requests.push(r.put(c as i32, (src.as_window(), at), 8, to, 1, signal));
                    }
                }
                requests.into_iter().for_each(|q| r.wait(q));
                let spent: u64 = calls().iter().zip(before).map(|(after, before)| after - before).sum();
                // One operation alone, then a few submissions of two calls each.
                assert!(spent <= 12, "{n} operations of {contexts} contexts took {spent} driver calls");
            } else {
                (0..contexts).for_each(|c| sig.wait(r, c, each as u64));
                assert!((0..n).all(|i| dst.get(i) == i as u64 + 1));
            }
        });
        fake.check();
    }
}

/// What is small overtakes another context's large copy, and nothing overtakes one of its own.
#[test]
fn small_operations_do_not_wait_for_large_copies_of_others() {
    let fake = Fake::take();
    fake.set_issue("bulk=65536");
    job(2, 2, |r| {
        // Between two GPUs: within one, copies of this size do not go that way.
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let large = 1 << 15;
        let src = fake.window(r, gpu, large, 0);
        let dst = fake.window(r, gpu, large + 1, 0);
        let sig = fake.signals(r, gpu, 2, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
        if r.rank == 0 {
            (0..large).for_each(|i| src.set(i, 5));
            fake.hold(1 << 16);
        }
        r.job.barrier.wait();
        if r.rank == 0 {
            let to = (dst.as_window(), 0);
            let first = r.put(0, (src.as_window(), 0), large * 8, to, 1, Some((sig.as_window(), 0, 1)));
            let behind = r.put(0, (src.as_window(), 0), 0, to, 1, Some((sig.as_window(), 0, 1)));
            let to = (dst.as_window(), large as u64 * 8);
            r.wait(r.put(1, (src.as_window(), 0), 8, to, 1, Some((sig.as_window(), 8, 1))));
            for request in [first, behind] {
                let mut done = 1;
                // SAFETY: plain call.
                ok(unsafe { T.test.unwrap()(r.coll, request, &mut done) });
                assert_eq!(done, 0);
            }
            r.job.barrier.wait();
            fake.hold(0);
            [first, behind].into_iter().for_each(|q| r.wait(q));
        } else {
            sig.wait(r, 1, 1);
            assert_eq!((dst.get(large), sig.get(0)), (5, 0));
            r.job.barrier.wait();
            sig.wait(r, 0, 2);
            assert!((0..large).all(|i| dst.get(i) == 5));
        }
    });
    fake.check();
}

/// A stream is made ready at set-up, which waits for that: a GPU that does not move is found out there.
#[test]
fn a_gpu_that_stands_still_gets_no_window() {
    if is_elsewhere(concat!(module_path!(), "::a_gpu_that_stands_still_gets_no_window")) {
        return;
    }
    let fake = Fake::take();
    job(1, 1, |r| {
        let _context = fake.enter(0);
        fake.hold(8);
        let (at, mut handle) = (fake.alloc(0, 64, false), null_mut());
        // SAFETY: device memory that stays.
        let refused = unsafe { T.reg_mr_sym.unwrap()(r.coll, at as *mut c_void, 64, PTR_CUDA, 0, &mut handle) };
        assert_ne!(refused, NcclResult::SUCCESS);
        fake.hold(0);
        fake.window(r, 0, 8, 0);
    });
    fake.check();
}

/// An application may capture a stream on any of its threads, which calls of others must not spoil.
#[test]
fn captures_are_not_spoilt() {
    for transport in ["auto", "staged", "tcp"] {
        let fake = Fake::take();
        fake.set_transport(transport);
        fake.capture(true);
        job(2, 1, |r| {
            let _context = fake.enter(0);
            let src = fake.window(r, 0, 1 << 13, 0);
            let dst = fake.window(r, 0, 1 << 13, 0);
            let sig = fake.signals(r, 0, 1, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
            let puts = 200;
            r.job.barrier.wait();
            if r.rank == 0 {
                src.set(1, 7);
                let signal = Some((sig.as_window(), 0, 1));
                let put = |bytes| r.put(0, (src.as_window(), 0), bytes, (dst.as_window(), 0), 1, signal);
                let requests: Vec<_> = (0..puts).map(|i| put(if i % 50 == 0 { 1 << 16 } else { 16 })).collect();
                requests.into_iter().for_each(|q| r.wait(q));
            } else {
                sig.wait(r, 0, puts);
                assert_eq!(dst.get(1), 7);
            }
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// Large puts of one context that are in several submissions: each comes back while later ones are still up.
#[test]
fn large_operations_of_one_context_complete_one_after_another() {
    let fake = Fake::take();
    fake.set_issue("bulk=65536");
    fake.settings(true, 200);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        // A submission of large copies is full with 16 MiB.
        let (large, puts) = (2 << 20, 7);
        let src = fake.window(r, gpu, large, 0);
        let dst = fake.window(r, gpu, large, 0);
        let sig = fake.signals(r, gpu, 1, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
        if r.rank == 0 {
            (0..large).for_each(|i| src.set(i, i as u64));
        }
        r.job.barrier.wait();
        if r.rank == 0 {
            let signal = Some((sig.as_window(), 0, 1));
            let put = |bytes| r.put(0, (src.as_window(), 0), bytes, (dst.as_window(), 0), 1, signal);
            let requests: Vec<_> = (0..puts).flat_map(|_| [put(large * 8), put(8)]).collect();
            requests.into_iter().for_each(|q| r.wait(q));
        }
        if r.rank == 1 {
            sig.wait(r, 0, 2 * puts);
            assert!((0..large).all(|i| dst.get(i) == i as u64));
        }
        r.job.barrier.wait();
    });
    fake.check();
}

fn has_error(r: &Rank) -> bool {
    let mut error = false;
    // SAFETY: plain call.
    ok(unsafe { T.query_last_error.unwrap()(r.ctx, &mut error) });
    error
}

fn comes_to_have_an_error(r: &Rank) {
    let end = Instant::now() + Duration::from_secs(60);
    while !has_error(r) {
        assert!(Instant::now() < end, "rank {}: no error after 60 s", r.rank);
        // SAFETY: plain call; its result may be the error.
        unsafe { T.rma_progress.unwrap()(r.ctx) };
    }
}

/// The owner of a GPU that failed learns of it as its peers do; so does who puts there afterwards.
#[test]
fn a_fault_shows_on_both_sides() {
    for transport in ["auto", "staged"] {
        let fake = Fake::take();
        fake.set_transport(transport);
        job(2, 1, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = r.window(8, 0);
            let dst = fake.window(r, gpu, 64, 0);
            if r.rank == 0 {
                fake.inject("gpu", 700);
                for _ in 0..2 {
                    let mut request = null_mut();
                    // SAFETY: registered windows.
                    let put = unsafe {
                        T.iput.unwrap()(r.ctx, 0, 0, src.handle, 64, 0, dst.as_window().handle, 1, 0, &mut request)
                    };
                    // Through host memory an operation is locally complete before the GPU has seen it.
                    let well = put == NcclResult::SUCCESS && comes_out(r, request);
                    assert!(!well || transport == "staged");
                    comes_to_have_an_error(r);
                }
            } else {
                comes_to_have_an_error(r);
            }
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// A fault in the middle of much: each operation comes out, well or not, and nothing hangs.
#[test]
fn a_fault_among_many_operations_hangs_nothing() {
    for (call, after, code, issue) in [
        ("gpu", 5, 700, "merge=0,kernel=0"),
        ("gpu", 5, 700, "bulk=4096,kernel=0"),
        ("cuStreamBatchMemOp", 0, 1, "kernel=0"),
        ("cuMemcpy2DAsync", 5, 1, "kernel=0"),
        ("cuMemcpyAsync", 0, 1, "bulk=4096,kernel=0"),
        ("cuCtxPushCurrent", 5, 201, "merge=1,kernel=0"),
    ] {
        // A copy kernel whose launch meets the fault is done without, and all comes out well: see
        // `copy_kernel_launches`.
        let fake = Fake::take();
        fake.set_issue(issue);
        job(2, 2, |r| {
            let _context = fake.enter(0);
            let src = fake.window(r, 0, 1024, 0);
            let dst = fake.window(r, 0, 1024, 0);
            let sig = fake.signals(r, 0, 1, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
            r.job.barrier.wait();
            if r.rank == 0 {
                fake.inject_after(call, after, code);
                // How many calls 400 puts take depends on what gathers: on until one of them meets the fault.
                let mut failed = 0;
                for _ in 0..100 {
                    let (mut requests, mut refused) = (Vec::new(), 0);
                    for i in 0..400 {
                        let (n, mut request) = (if i % 7 == 0 { 8192 } else { 8 }, null_mut());
                        let (s, d, g) = (src.as_window().handle, dst.as_window().handle, sig.as_window().handle);
                        // SAFETY: registered windows.
                        let put = unsafe {
                            T.iput_signal.unwrap()(
                                r.ctx,
                                i % 2,
                                0,
                                s,
                                n,
                                0,
                                d,
                                1,
                                0,
                                g,
                                1,
                                SIGNAL_OP_ADD,
                                true,
                                0,
                                &mut request,
                            )
                        };
                        match put {
                            NcclResult::SUCCESS => requests.push(request),
                            _ => refused += 1,
                        }
                    }
                    failed = requests.into_iter().filter(|&q| !comes_out(r, q)).count() + refused;
                    if failed > 0 {
                        break;
                    }
                }
                assert!(failed > 0, "{call}: everything came out well");
                assert!(has_error(r));
            }
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// What the receiver cannot place comes back to its sender, in and out of its process.
#[test]
fn a_put_into_a_window_that_is_gone_comes_back() {
    for transport in ["auto", "staged"] {
        let fake = Fake::take();
        fake.set_transport(transport);
        job(2, 1, |r| {
            let _context = fake.enter(0);
            let src = r.window(8, 0);
            let dst = fake.window(r, 0, 8, 0);
            let stays = fake.window(r, 0, 8, 0);
            r.job.barrier.wait();
            if r.rank == 0 {
                r.wait(r.put(0, (&src, 0), 8, (stays.as_window(), 0), 1, None));
            } else {
                r.dereg(dst.as_window());
            }
            r.job.barrier.wait();
            if r.rank == 0 {
                let mut request = null_mut();
                // SAFETY: the handle is this rank's own and lives.
                unsafe { T.iput.unwrap()(r.ctx, 0, 0, src.handle, 64, 0, dst.as_window().handle, 1, 0, &mut request) };
                comes_to_have_an_error(r);
            }
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// The GPU stands with a copy to a window for longer than deregistration waits: the memory is not said to be free.
#[test]
fn a_window_that_the_gpu_is_still_at_is_not_said_to_be_free() {
    const BYTES: usize = 4096;
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    std::env::set_var("OXYGIN_DEREG_TIMEOUT", "0.2");
    let started = || ["cuMemcpyAsync", "cuMemcpyBatchAsync"].map(|call| fake.calls(call)).iter().sum::<u64>();
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let [src, dst] = [(); 2].map(|()| fake.window(r, 0, BYTES / 8, 0));
        let before = started();
        r.job.barrier.wait();
        let request = (r.rank == 0).then(|| {
            fake.hold(BYTES);
            r.put(0, (src.as_window(), 0), BYTES, (dst.as_window(), 0), 1, None)
        });
        r.job.barrier.wait();
        let end = Instant::now() + Duration::from_secs(60);
        while started() == before {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            assert!(Instant::now() < end, "the copy is not started after 60 s");
        }
        r.job.barrier.wait();
        if r.rank == 1 {
            // SAFETY: plain call.
            let refused = unsafe { T.dereg_mr_sym.unwrap()(r.coll, dst.as_window().handle) };
            assert_eq!(refused, NcclResult::REMOTE_ERROR);
            fake.hold(0);
        }
        r.job.barrier.wait();
        request.map(|q| comes_out(r, q));
        r.dereg(src.as_window());
    });
    std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
    fake.check();
}

/// One communicator, one GPU: a window on another is refused, and the first one goes on working.
#[test]
fn windows_on_two_gpus_are_refused() {
    let fake = Fake::take();
    job(1, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, 8, 0);
        let other = fake.alloc(1, 64, false);
        let mut handle = null_mut();
        // SAFETY: device memory that stays.
        let result = unsafe { T.reg_mr_sym.unwrap()(r.coll, other as *mut c_void, 64, PTR_CUDA, 0, &mut handle) };
        assert_eq!(result, NcclResult::INVALID_USAGE);
        src.set(0, 9);
        r.wait(r.put(0, (src.as_window(), 0), 8, (src.as_window(), 8), 0, None));
        assert_eq!(src.get(1), 9);
    });
    fake.check();
}
