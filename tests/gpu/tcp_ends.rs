//! Windows, contexts and ranks that go, and GPUs that fail, over TCP: nothing hangs, what was promised arrives, and
//! nothing else is written or read afterwards. Through the RMA v16 table, on the fake CUDA driver.

use crate::harness::tcp::{apart, BYTES, CHUNK};
use crate::harness::*;
use crate::support::children::again;
use crate::support::common::*;
use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Rank 0's GPU fails: rank 0's operation does, and rank 1 learns that something is wrong.
/// The first one, or, where the fault has to be found out, a later one.
fn fails(bytes: usize, at_once: bool, inject: impl Fn(&Fake) + Sync) {
    [0, 2].into_iter().for_each(|threads| fails_by(bytes, at_once, threads, &inject));
}

fn fails_by(bytes: usize, at_once: bool, threads: u32, inject: &(impl Fn(&Fake) + Sync)) {
    let fake = apart(1, threads);
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let src = fake.window(r, r.rank as i32, BYTES / 8, 0);
        let dst = fake.window(r, r.rank as i32, BYTES / 8, 0);
        let sig = fake.signals(r, r.rank as i32, 1, NEVER_RESET);
        if r.rank == 0 {
            let signal = Some((sig.as_window(), 0, 1));
            r.wait(r.put(0, (src.as_window(), 0), 8, (dst.as_window(), 0), 1, signal));
        } else {
            sig.wait(r, 0, 1);
        }
        // The connections are up and rank 1's GPU has nothing to do: the fault is rank 0's.
        r.job.barrier.wait();
        if r.rank == 0 {
            inject(&fake);
            let put_fails = || {
                let mut request = null_mut();
                // SAFETY: registered windows.
                let put = unsafe {
                    let (from, to) = (src.as_window().handle, dst.as_window().handle);
                    T.iput.unwrap()(r.ctx, 0, 0, from, bytes, 0, to, 1, 0, &mut request)
                };
                put != NcclResult::SUCCESS || !comes_out(r, request)
            };
            let end = Instant::now() + Duration::from_secs(60);
            while !put_fails() {
                assert!(!at_once && Instant::now() < end, "an operation came out well");
            }
        }
        // It is rank 0's to tell: rank 1 has lost nothing of its own, and its connections stay.
        let end = Instant::now() + Duration::from_secs(60);
        let mut error = r.rank != 0;
        while !error {
            // SAFETY: plain call.
            ok(unsafe { T.query_last_error.unwrap()(r.ctx, &mut error) });
            assert!(Instant::now() < end, "rank {} sees no error", r.rank);
        }
        r.job.barrier.wait();
        fake.destroy_context(0, false);
    });
    fake.check();
}

#[test]
fn a_refused_copy_fails_the_operation() {
    [100, BYTES].into_iter().for_each(|n| {
        fails(n, true, |fake| {
            fake.inject("cuMemcpyBatchAsync", 1);
            fake.inject("cuMemcpyAsync", 1);
        })
    });
}

#[test]
fn a_fault_on_the_gpu_fails_the_operation() {
    [100, BYTES].into_iter().for_each(|n| fails(n, true, |fake| fake.inject("gpu", 700)));
}

#[test]
fn a_destroyed_context_fails_the_operation() {
    [100, BYTES].into_iter().for_each(|n| fails(n, false, |fake| fake.destroy_context(0, true)));
}

/// A rank leaves once its put is locally complete, while the bytes are on their way into the other's GPU memory: they
/// arrive, and their signal rings, on either side of the bus.
#[test]
fn what_a_rank_sent_before_it_left_still_counts() {
    for (threads, on_host) in [(0, true), (0, false), (2, true)] {
        let fake = apart(2, threads);
        let job = Job::new(2);
        let left = AtomicU64::new(0);
        let bytes = 2 * CHUNK + 4096;
        let run = |rank: usize| {
            let r = Rank::join(&job, rank, 1);
            let _context = fake.enter(rank as i32);
            let mut src = r.window(BYTES / 8, 0);
            src.words.fill(5);
            let dst = fake.window(&r, rank as i32, BYTES / 8, 0);
            let sig = fake.signals(&r, rank as i32, 1, NEVER_RESET);
            let host_sig = r.window(1, 1);
            let signal = if on_host { &host_sig } else { sig.as_window() };
            fake.hold(CHUNK);
            job.barrier.wait();
            if rank == 0 {
                r.wait(r.put(0, (&src, 0), bytes, (dst.as_window(), 0), 1, Some((signal, 0, 1))));
                r.leave();
                left.store(1, Ordering::Release);
                return;
            }
            // It hears of the end while the GPU has the bytes.
            let mut polls = 0;
            while polls < 200 {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                std::thread::sleep(Duration::from_millis(1));
                polls += left.load(Ordering::Acquire);
            }
            assert_eq!(dst.get(1).max(sig.get(0)).max(host_sig.words[0]), 0, "nothing was held");
            fake.hold(0);
            match on_host {
                true => r.wait_signal(&host_sig, 0, 1),
                false => sig.wait(&r, 0, 1),
            }
            assert!((0..bytes / 8).all(|i| dst.get(i) == 5));
            r.leave();
        };
        std::thread::scope(|s| {
            s.spawn(|| run(0));
            run(1);
        });
        fake.check();
    }
}

/// Ranks leave with large and small traffic both ways unfinished; then a new communicator works.
#[test]
fn teardown_with_traffic_in_flight() {
    for threads in [0, 0, 2, 2] {
        let fake = apart(2, threads);
        job(2, 2, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, BYTES / 8, 0);
            let dst = fake.window(r, gpu, BYTES / 8, 0);
            r.wait(r.put(0, (src.as_window(), 0), 8, (dst.as_window(), 0), 1 - r.rank, None));
            for n in 0..40 {
                let size = [BYTES, 64][n % 2];
                r.put(n as i32 % 2, (src.as_window(), 0), size, (dst.as_window(), 0), 1 - r.rank, None);
                r.get(n as i32 % 2, (dst.as_window(), 0), size, (src.as_window(), 0), 1 - r.rank);
            }
        });
        fake.check();
    }
}

/// Sets of contexts go while copies stand for all of them, by the rank's engine and by its streams for TCP: they wait
/// once.
#[test]
fn sets_take_their_time_once() {
    const LIMIT: Duration = Duration::from_secs(10);
    let fake = apart(1, 0);
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let [src, dst] = [(), ()].map(|()| fake.window(r, r.rank as i32, BYTES / 8, 0));
        let mut config = ConfigV14 { n_contexts: 3, traffic_class: -1, rank_stride: 1 };
        let sets = [(), ()].map(|()| {
            let mut set = Rank { job: r.job.clone(), ctx: null_mut(), ..*r };
            // SAFETY: pointers to locals.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut set.ctx) });
            set
        });
        r.job.barrier.wait();
        if r.rank == 0 {
            // The connections are up from here on.
            r.wait(r.put(0, (src.as_window(), 0), CHUNK, (dst.as_window(), 0), 1, None));
            fake.hold(CHUNK);
            for (set, context, peer) in sets.iter().flat_map(|set| (0..6).map(move |i| (set, i / 2, i as usize % 2))) {
                set.put(context, (src.as_window(), 0), CHUNK, (dst.as_window(), 0), peer, None);
            }
            let end = Instant::now() + LIMIT / 40;
            while Instant::now() < end {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(sets[0].ctx) });
            }
            assert!(fake.is_holding());
        }
        let began = Instant::now();
        // SAFETY: plain calls.
        sets.iter().for_each(|set| ok(unsafe { T.destroy_context.unwrap()(set.ctx) }));
        let took = began.elapsed();
        assert!(r.rank != 0 || (LIMIT..LIMIT * 3 / 2).contains(&took), "it took {took:?}");
        fake.hold(0);
        r.job.barrier.wait();
    });
    fake.check();
}

/// A window goes that copies stand on by the rank's engine and by its streams for TCP: both have one time together.
#[test]
fn a_deregistration_takes_its_time_once() {
    const LIMIT: Duration = Duration::from_secs(1);
    let fake = apart(1, 0);
    std::env::set_var("OXYGIN_DEREG_TIMEOUT", "1");
    job(2, 1, |r| {
        let _context = fake.enter(r.rank as i32);
        let [src, dst] = [(), ()].map(|()| fake.window(r, r.rank as i32, BYTES / 8, 0));
        r.job.barrier.wait();
        if r.rank == 0 {
            // The connections are up from here on.
            r.wait(r.put(0, (src.as_window(), 0), CHUNK, (dst.as_window(), 0), 1, None));
            fake.hold(CHUNK);
            // To itself by the engine, to the other one by way of pinned memory.
            r.put(0, (src.as_window(), 0), CHUNK, (dst.as_window(), 0), 0, None);
            r.put(0, (src.as_window(), 0), CHUNK, (dst.as_window(), 0), 1, None);
            let end = Instant::now() + LIMIT / 4;
            while Instant::now() < end {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            }
            assert!(fake.is_holding());
            let began = Instant::now();
            // SAFETY: plain call.
            let ended = unsafe { T.dereg_mr_sym.unwrap()(r.coll, src.as_window().handle) };
            assert_ne!(ended, NcclResult::SUCCESS, "the GPU is still at the window");
            let took = began.elapsed();
            assert!((LIMIT..LIMIT * 3 / 2).contains(&took), "it took {took:?}");
            fake.hold(0);
            fake.rest();
        }
        r.job.barrier.wait();
    });
    std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
    fake.check();
}

/// A window goes with traffic for it in flight: nothing touches it afterwards, the sender is told.
#[test]
fn a_deregistered_window_stays_untouched() {
    [0, 2].into_iter().for_each(deregister);
}

fn deregister(threads: u32) {
    let fake = apart(1, threads);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, BYTES / 8, 0);
        let dst = fake.window(r, gpu, BYTES / 8, 0);
        (0..BYTES / 8).for_each(|i| src.set(i, 7));
        r.job.barrier.wait();
        if r.rank == 0 {
            let requests: Vec<_> =
                (0..20).map(|_| r.put(0, (src.as_window(), 0), BYTES, (dst.as_window(), 0), 1, None)).collect();
            let last = requests[requests.len() - 1];
            let end = Instant::now() + Duration::from_secs(60);
            let (mut done, mut result) = (0, NcclResult::SUCCESS);
            while done == 0 && result == NcclResult::SUCCESS {
                // SAFETY: plain call.
                result = unsafe { T.test.unwrap()(r.coll, last, &mut done) };
                assert!(Instant::now() < end, "neither done nor failed");
            }
        } else {
            while dst.get(0) == 0 {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            }
            r.dereg(dst.as_window());
            (0..BYTES / 8).for_each(|i| dst.set(i, 9));
            for _ in 0..200 {
                // SAFETY: plain call.
                let _ = unsafe { T.rma_progress.unwrap()(r.ctx) };
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!((0..BYTES / 8).all(|i| dst.get(i) == 9));
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// A context goes while the GPU copies out of its memory, or into it: once it is gone the memory may go, too, and
/// nothing of what it had asked for comes.
#[test]
fn destroying_a_context_waits_for_copies_of_its_memory() {
    [0, 2].into_iter().for_each(destroy);
}

fn destroy(threads: u32) {
    const WORDS: usize = 64 * CHUNK / 8;
    /// What the operations behind it leave alone.
    const REST: usize = 4 * CHUNK / 8;
    let fake = apart(1, threads);
    let released = AtomicU64::new(0);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let mine = fake.window(r, gpu, WORDS, 0);
        let theirs = r.window(WORDS, 0);
        // SAFETY: aligned words of the window.
        let their = |i: usize| unsafe { AtomicU64::from_ptr(theirs.words.as_ptr().add(i).cast_mut()) };
        for (round, is_get) in (1..).zip([false, true]) {
            (0..WORDS).for_each(|i| mine.set(i, 1));
            (0..WORDS).for_each(|i| their(i).store(3, Ordering::Relaxed));
            let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            let mut ctx = null_mut();
            // SAFETY: pointers to locals; a collective call.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let other = Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
            let start = |r: &Rank, bytes| match is_get {
                true => r.get(0, (&theirs, 0), bytes, (mine.as_window(), 0), 1),
                false => r.put(0, (mine.as_window(), 0), bytes, (&theirs, 0), 1, None),
            };
            if r.rank == 0 {
                r.wait(start(r, 8));
            }
            r.job.barrier.wait();
            if r.rank == 0 {
                fake.hold(CHUNK);
                let request = start(&other, 8 * WORDS);
                wait_until("the first copy", || {
                    assert!(!test(r, request));
                    fake.is_holding()
                });
            }
            r.job.barrier.wait();
            if r.rank == 1 {
                std::thread::sleep(Duration::from_millis(100));
                released.store(round, Ordering::SeqCst);
                fake.hold(0);
            }
            // SAFETY: destroyed once.
            ok(unsafe { T.destroy_context.unwrap()(ctx) });
            assert_eq!(released.load(Ordering::SeqCst), round, "get: {is_get}: the copy is still on its way");
            if r.rank == 0 {
                if is_get {
                    assert!((1..WORDS).any(|i| mine.get(i) == 1), "all had come");
                } else {
                    (0..WORDS).for_each(|i| mine.set(i, 2));
                }
                let rest = || (REST..WORDS).map(|i| mine.get(i)).collect::<Vec<_>>();
                let before = rest();
                // Behind everything of the other, on all connections.
                for bytes in [8, 64 << 10, 4 * CHUNK, 8] {
                    r.wait(start(r, bytes));
                }
                assert!(rest() == before, "bytes came later");
            }
            r.job.barrier.wait();
            if r.rank == 1 && !is_get {
                assert!((REST..WORDS).all(|i| their(i).load(Ordering::Acquire) != 2), "read later");
            }
            r.job.barrier.wait();
        }
    });
    fake.check();
}

/// Joins a job of two with another process: lines with this rank's handle out, the other's in.
fn join_by_pipe(rank: usize, mut tell: impl Write, hear: impl Read) -> Rank {
    Rank::join_by(&Job::new(2), rank, 2, |own| {
        let hex: String = own.iter().map(|b| format!("{b:02x}")).collect();
        writeln!(tell, "HANDLE {hex}").unwrap();
        tell.flush().unwrap();
        // The test harness writes to the same pipe, also without ending its line.
        let mut lines = BufReader::new(hear).lines().map(Result::unwrap);
        let line = lines.find_map(|l| l.split("HANDLE ").nth(1).map(str::to_string)).expect("a handle");
        let mut other = [0; HANDLE_BYTES];
        for (b, x) in other.iter_mut().zip(line.as_bytes().chunks(2)) {
            *b = u8::from_str_radix(std::str::from_utf8(x).unwrap(), 16).unwrap();
        }
        if rank == 0 {
            vec![own, other]
        } else {
            vec![other, own]
        }
    })
}

/// Large and small traffic to the other rank, kept up until something fails.
fn keep_up(r: &Rank, src: &GpuWindow, dst: &GpuWindow, sig: &GpuWindow, on: impl Fn() -> bool) {
    let mut requests = std::collections::VecDeque::new();
    while on() {
        let size = [BYTES, 64][requests.len() % 2];
        let (context, mut request) = ((requests.len() % 2) as i32, null_mut());
        // SAFETY: registered windows that stay.
        let result = unsafe {
            let (from, to) = (src.as_window().handle, dst.as_window().handle);
            let (word, add) = (sig.as_window().handle, SIGNAL_OP_ADD);
            let put = T.iput_signal.unwrap();
            put(r.ctx, context, 0, from, size, 0, to, 1 - r.rank as u32, 0, word, 1, add, true, 0, &mut request)
        };
        if result != NcclResult::SUCCESS {
            return;
        }
        requests.push_back(request);
        while requests.len() > 8 {
            let Some(&first) = requests.front() else { break };
            let mut done = 0;
            // SAFETY: plain call.
            if unsafe { T.test.unwrap()(r.coll, first, &mut done) } != NcclResult::SUCCESS {
                return;
            }
            if done != 0 {
                requests.pop_front();
            }
        }
    }
}

/// Windows of either process.
fn windows(fake: &Fake, r: &Rank) -> [GpuWindow; 3] {
    let gpu = r.rank as i32;
    let flags = NEVER_RESET;
    [fake.window(r, gpu, BYTES / 8, 0), fake.window(r, gpu, BYTES / 8, 0), fake.signals(r, gpu, 1, flags)]
}

/// A process that is killed in the middle of traffic both ways: this one learns of it, nothing hangs, all can be taken
/// down and pinned memory is whole for what comes after.
#[test]
fn a_peer_that_is_killed() {
    for threads in [0, 2] {
        let fake = apart(2, threads);
        let mut child = again("the_process_that_is_killed")
            .env("OXYGIN_TEST_CHILD", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let r = join_by_pipe(0, child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let _context = fake.enter(0);
        let [src, dst, sig] = windows(&fake, &r);
        let start = Instant::now();
        let killed_at = std::cell::Cell::new(None);
        let child = std::cell::RefCell::new(&mut child);
        keep_up(&r, &src, &dst, &sig, || {
            assert!(start.elapsed() < Duration::from_secs(60), "{} signals", sig.get(0));
            if sig.get(0) > 20 && killed_at.get().is_none() {
                child.borrow_mut().kill().unwrap();
                killed_at.set(Some(Instant::now()));
            }
            true
        });
        assert!(killed_at.get().is_some(), "failed before anybody was killed");
        child.borrow_mut().wait().unwrap();
        let mut error = false;
        // SAFETY: plain call.
        ok(unsafe { T.query_last_error.unwrap()(r.ctx, &mut error) });
        assert!(error);
        [&src, &dst, &sig].into_iter().for_each(|w| r.dereg(w.as_window()));
        r.leave();
        fake.check();
    }
}

#[test]
#[ignore = "the other process of a_peer_that_is_killed"]
fn the_process_that_is_killed() {
    assert!(std::env::var_os("OXYGIN_TEST_CHILD").is_some(), "run a_peer_that_is_killed, which starts this");
    let threads = std::env::var("OXYGIN_TCP_THREADS").unwrap().parse().unwrap();
    let fake = apart(2, threads);
    let r = join_by_pipe(1, std::io::stdout(), std::io::stdin());
    let _context = fake.enter(1);
    let [src, dst, sig] = windows(&fake, &r);
    let start = Instant::now();
    keep_up(&r, &src, &dst, &sig, || start.elapsed() < Duration::from_secs(100));
}
