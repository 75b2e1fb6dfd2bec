//! The private context that all engines of a GPU share, its life and its absence, and stores that leave the stream
//! memory operations when those are slow: through the RMA v16 table, on the fake CUDA driver.

mod harness;
mod read_back;
#[path = "../support/mod.rs"]
mod support;

use harness::*;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Mutex;
use support::common::*;
use support::logged::{collect, lines, listen};

/// Submissions that store by copies after a slow one, as the library has it.
const BY_COPY: u64 = 256;

/// The fake, its calls counted, the log collected once a rank has said so.
struct Counting {
    fake: Fake,
    created: u64,
    destroyed: u64,
}

impl Counting {
    fn new() -> Self {
        let fake = Fake::take();
        collect();
        Self { created: fake.calls("cuCtxCreate"), destroyed: fake.calls("cuCtxDestroy"), fake }
    }

    /// Contexts that were made and ended since then.
    fn contexts(&self) -> (u64, u64) {
        (self.fake.calls("cuCtxCreate") - self.created, self.fake.calls("cuCtxDestroy") - self.destroyed)
    }
}

fn warnings(what: &str) -> usize {
    lines().iter().filter(|(level, text)| *level == log::Level::Warn && text.contains(what)).count()
}

/// Rank 0 puts to rank 1, and gets; each on its GPU of so many.
fn exchange(fake: &Fake, r: &Rank, gpus: i32) {
    let gpu = r.rank as i32 % gpus;
    let _context = fake.enter(gpu);
    let src = fake.window(r, gpu, 512, 0);
    let dst = fake.window(r, gpu, 512, 0);
    let sig = fake.signals(r, gpu, 1, NEVER_RESET);
    (0..512).for_each(|i| src.set(i, i as u64 + 1000 * (1 + r.rank as u64)));
    r.job.barrier.wait();
    let peer = (r.rank + 1) % r.job.nranks;
    for n in [8, 4096] {
        r.wait(r.put(0, (src.as_window(), 0), n, (dst.as_window(), 0), peer, Some((sig.as_window(), 0, 1))));
    }
    sig.wait(r, 0, 2);
    assert!((0..512).all(|i| dst.get(i) == i as u64 + 1000 * (1 + peer as u64)));
    r.job.barrier.wait();
    (0..512).for_each(|i| dst.set(i, 0));
    r.wait(r.get(0, (src.as_window(), 0), 4096, (dst.as_window(), 0), peer));
    assert!((0..512).all(|i| dst.get(i) == i as u64 + 1000 * (1 + peer as u64)));
    r.job.barrier.wait();
}

#[test]
fn ranks_of_a_gpu_share_one_and_the_last_ends_it() {
    for transport in ["auto", "staged", "tcp"] {
        for gpus in [1, 2] {
            let count = Counting::new();
            count.fake.set_transport(transport);
            for round in 1..=2 {
                job(2, 1, |r| {
                    exchange(&count.fake, r, gpus);
                    let ended = gpus as u64 * (round - 1);
                    assert_eq!(count.contexts(), (gpus as u64 * round, ended), "{transport}, {gpus} GPUs, {round}");
                });
                let all = gpus as u64 * round;
                assert_eq!(count.contexts(), (all, all), "{transport}, {gpus} GPUs, round {round}");
            }
            count.fake.check();
        }
    }
}

/// Two communicators side by side have one, which lives as long as either.
#[test]
fn communicators_of_a_gpu_share_one() {
    let count = Counting::new();
    let open = || {
        let rank = Rank::join(&Job::new(1), 0, 1);
        exchange(&count.fake, &rank, 1);
        rank
    };
    let (first, second) = (open(), open());
    assert_eq!(count.contexts(), (1, 0));
    first.leave();
    assert_eq!(count.contexts(), (1, 0));
    exchange(&count.fake, &second, 1);
    second.leave();
    assert_eq!(count.contexts(), (1, 1));
    open().leave();
    assert_eq!(count.contexts(), (2, 2));
    count.fake.check();
}

/// One that has failed goes on with those who have it; a communicator that comes then has another one. What its streams
/// were given before is not done when the ranks end, and finds its memory.
#[test]
fn one_that_has_failed_serves_nobody_else() {
    let count = Counting::new();
    count.fake.settings(false, 20_000);
    job(2, 1, |r| {
        let _context = count.fake.enter(0);
        let src = count.fake.window(r, 0, 512, 0);
        r.job.barrier.wait();
        if r.rank == 0 {
            count.fake.lose_private_contexts(700);
            let (handle, mut request) = (src.as_window().handle, null_mut());
            // SAFETY: a registered window.
            let put = unsafe { T.iput.unwrap()(r.ctx, 0, 0, handle, 64, 64, handle, 1, 0, &mut request) };
            assert!(put != NcclResult::SUCCESS || !comes_out(r, request), "it came out well");
        }
        r.job.barrier.wait();
    });
    assert_eq!(count.contexts(), (1, 0), "what has failed is left to the process");
    count.fake.settings(false, 3);
    job(2, 1, |r| exchange(&count.fake, r, 1));
    assert_eq!(count.contexts(), (2, 1));
    count.fake.check();
}

#[test]
fn it_ends_although_the_applications_queues_stand() {
    let count = Counting::new();
    job(2, 1, |r| {
        exchange(&count.fake, r, 1);
        count.fake.block(0, true);
        r.job.barrier.wait();
        exchange(&count.fake, r, 1);
    });
    assert_eq!(count.contexts(), (1, 1));
    count.fake.block(0, false);
    while count.fake.launched() > 0 {
        std::thread::yield_now();
    }
    count.fake.check();
}

#[test]
fn there_is_none_where_none_is_wanted() {
    let count = Counting::new();
    count.fake.set_issue("own=0");
    job(2, 1, |r| {
        listen();
        exchange(&count.fake, r, 1);
    });
    assert_eq!((count.contexts(), warnings("no private context")), ((0, 0), 0));
    count.fake.check();
}

/// No memory for one: all goes on in the application's context, and that is said.
#[test]
fn a_refused_one_is_said_and_done_without() {
    let count = Counting::new();
    count.fake.inject("cuCtxCreate", 2);
    // One rank alone: whoever came second would get one.
    job(1, 1, |r| {
        listen();
        exchange(&count.fake, r, 1);
        assert_eq!(warnings("GPU 0: no private context (cuCtxCreate"), 1);
    });
    assert_eq!(count.contexts(), (1, 0));
    // The next communicator asks again.
    job(1, 1, |r| exchange(&count.fake, r, 1));
    assert_eq!(count.contexts(), (2, 1));
    count.fake.check();
}

/// One rank has it, the other has not: they understand each other all the same.
#[test]
fn ranks_with_and_without_one() {
    for (transport, gpus) in [("auto", 1), ("auto", 2), ("staged", 1), ("tcp", 2)] {
        let count = Counting::new();
        count.fake.set_transport(transport);
        count.fake.inject("cuCtxCreate", 2);
        job(2, 1, |r| {
            listen();
            exchange(&count.fake, r, gpus);
        });
        let (created, destroyed) = count.contexts();
        assert_eq!((created, warnings("no private context")), (destroyed + 1, 1), "{transport}, {gpus} GPUs");
        count.fake.check();
    }
}

/// What is refused inside it refuses the window, and leaves nothing behind.
#[test]
fn no_memory_in_it_refuses_the_window() {
    // The first stream is the one in the application's context.
    for (call, after) in [("cuMemAlloc", 0), ("cuMemHostAlloc", 0), ("cuStreamCreateWithPriority", 1)] {
        let count = Counting::new();
        job(1, 1, |r| {
            let _context = count.fake.enter(0);
            let (at, mut handle) = (count.fake.alloc(0, 64, false), null_mut());
            count.fake.inject_after(call, after, 2);
            // SAFETY: device memory that stays.
            let refused = unsafe { T.reg_mr_sym.unwrap()(r.coll, at as *mut c_void, 64, PTR_CUDA, 0, &mut handle) };
            assert_ne!(refused, NcclResult::SUCCESS, "{call}");
            assert_eq!(count.contexts(), (1, 1), "{call}");
            exchange(&count.fake, r, 1);
        });
        assert_eq!(count.contexts(), (2, 2), "{call}");
        count.fake.check();
    }
}

/// Between two GPUs, so that copies of data and stores are different calls; one operation at a time, each a submission.
fn stores(issue: &str, act: impl Fn(&Fake, &Rank, &dyn Fn(usize, usize, u64) -> *mut c_void) + Sync) {
    const WORDS: usize = 64;
    let fake = Fake::take();
    fake.set_issue(issue);
    let done = Mutex::new(vec![0u64; WORDS]);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let mut values = r.window(WORDS, 0);
        (0..WORDS).for_each(|i| values.words[i] = 0x0101_0101 * (i as u64 + 1) + ((i as u64 + 1) << 40));
        let dst = fake.window(r, gpu, WORDS, 0);
        let sig = fake.signals(r, gpu, WORDS, NEVER_RESET);
        r.job.barrier.wait();
        if r.rank == 0 {
            // A put of so many bytes from word `i` to word `i`, and an addition to signal `i`.
            act(&fake, r, &|n, i, value| {
                done.lock().unwrap()[i] += value;
                let at = i as u64 * 8;
                r.put(0, (&values, at), n, (dst.as_window(), at), 1, Some((sig.as_window(), at, value)))
            });
        }
        r.job.barrier.wait();
        if r.rank == 1 {
            for (i, sum) in done.lock().unwrap().iter().enumerate() {
                assert_eq!(sig.get(i), *sum, "signal {i}");
                let low = values.words[i] & 0xffff_ffff;
                assert!([0, low, values.words[i]].contains(&dst.get(i)), "word {i} is {:#x}", dst.get(i));
                assert!(*sum == 0 || i % 3 == 0 || dst.get(i) != 0, "word {i} did not arrive");
            }
        }
    });
    fake.check();
}

/// Calls for stores by the stream, and for stores (and short copies from the host) by copy engine.
fn calls(fake: &Fake) -> (u64, u64) {
    (fake.calls("cuStreamBatchMemOp"), fake.calls("cuMemcpy2DAsync"))
}

/// A submission whose stores take long: the next ones store by copies, and after so many the stream is tried again.
#[test]
fn slow_stores_give_way_to_copies_for_a_while() {
    stores("kernel=0", |fake, r, put| {
        for _ in 0..2 {
            let before = calls(fake);
            fake.settings(false, 2000);
            r.wait(put(0, 0, 1));
            fake.settings(false, 0);
            assert_eq!(calls(fake), (before.0 + 1, before.1), "the stream, and slow");
            let mut expected = calls(fake);
            for i in 0..BY_COPY {
                // A signal alone, or a value and a signal.
                let word = 1 + i as usize % 60;
                let n = [0, 4, 8][word % 3];
                r.wait(put(n, word, 1));
                expected.1 += if n == 0 { 1 } else { 2 };
                assert_eq!(calls(fake), expected, "submission {i}");
            }
        }
        // And once more, which ends the second time.
        let before = calls(fake);
        r.wait(put(0, 0, 1));
        assert_eq!(calls(fake), (before.0 + 1, before.1));
    });
}

/// A signal whose submission is up and held: what comes from here on waits for it. Who submits it may be another
/// thread, which would take what follows along.
fn held(fake: &Fake, put: &dyn Fn(usize, usize, u64) -> *mut c_void) -> *mut c_void {
    fake.hold(8);
    let first = put(0, 3, 1);
    while !fake.is_holding() {
        std::thread::yield_now();
    }
    first
}

/// What copies cannot do as well stays with the stream: a value that must be seen whole, and many.
#[test]
fn some_stores_stay_with_the_stream() {
    stores("kernel=0,submissions=1", |fake, r, put| {
        fake.settings(false, 2000);
        r.wait(put(0, 0, 1));
        fake.settings(false, 0);
        let before = calls(fake);
        r.wait(put(0, 0, 1));
        assert_eq!(calls(fake), (before.0, before.1 + 1), "by copy");
        // The upper half changes with the lower one.
        r.wait(put(0, 0, u64::from(u32::MAX)));
        assert_eq!(calls(fake), (before.0 + 1, before.1 + 1), "past 2^32");
        // What comes while a submission is up goes with the next one.
        let first = held(fake, put);
        let many: Vec<_> = (0..20).map(|i| put(0, 3 * i, 1)).collect();
        fake.hold(0);
        [first].into_iter().chain(many).for_each(|q| r.wait(q));
        assert_eq!(calls(fake), (before.0 + 1, before.1 + 22), "21 by copy");
        let first = held(fake, put);
        let many: Vec<_> = (0..40).map(|i| put([0, 4, 8][i % 3], i, 1)).collect();
        fake.hold(0);
        [first].into_iter().chain(many).for_each(|q| r.wait(q));
        assert_eq!(calls(fake), (before.0 + 2, before.1 + 23), "67 by the stream");
    });
}
