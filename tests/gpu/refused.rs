//! An operation of one context names a GPU window that is gone: that context fails, others to the same peer go on
//! both ways, and once it is gone new ones reach the peer.

use crate::harness::*;
use crate::support::common::*;
use crate::support::processes::processes;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const BYTES: usize = 1 << 20;

/// What is asked of the window that is gone.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Put(usize),
    Get(usize),
}

const WRONGS: [Wrong; 4] = [Wrong::Put(64), Wrong::Put(BYTES), Wrong::Get(64), Wrong::Get(BYTES)];

/// A set of two contexts. Collective.
fn contexts(r: &Rank) -> *mut c_void {
    let mut config = rma_v14::ConfigV14 { n_contexts: 2, traffic_class: -1, rank_stride: 1 };
    let mut ctx = null_mut();
    // SAFETY: all pointers are to locals that live through the call.
    ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
    ctx
}

fn window(fake: &Fake, r: &Rank, flags: u64) -> GpuWindow {
    let gpu = r.rank as i32;
    fake.register_at(r, fake.segments(gpu, &[2 << 20], true), BYTES / 8, flags)
}

/// One wrong operation of rank 0's first context, and what must go on beside it. Both ranks' part; `r.ctx` is replaced.
fn scene(fake: &Fake, r: &mut Rank, barrier: &dyn Fn(), wrong: Wrong) {
    let peer = 1 - r.rank;
    let [src, dst, gone] = [(); 3].map(|()| window(fake, r, 0));
    let sig = window(fake, r, Signals::NeverReset.set_up(fake));
    (0..BYTES / 8).for_each(|i| src.set(i, (r.rank * BYTES + i) as u64 + 1));
    // The way is found, and all windows are known.
    r.wait(r.put(0, (src.as_window(), 0), 64, (gone.as_window(), 0), peer, None));
    barrier();
    if r.rank == 1 {
        r.dereg(gone.as_window());
    }
    barrier();
    if r.rank == 0 {
        let end = Instant::now() + Duration::from_secs(60);
        let ring = Some((sig.as_window(), 0, 1));
        let mut request = match wrong {
            Wrong::Put(len) => r.put(0, (src.as_window(), 0), len, (gone.as_window(), 0), 1, ring),
            Wrong::Get(len) => r.get(0, (gone.as_window(), 0), len, (dst.as_window(), 0), 1),
        };
        // Small ones may be complete before: what is posted later says it.
        let result = loop {
            let mut done = 0;
            // SAFETY: plain call.
            let result = unsafe { T.test.unwrap()(r.coll, request, &mut done) };
            if result != NcclResult::SUCCESS {
                break result;
            }
            assert!(Instant::now() < end, "{wrong:?}: neither done nor failed");
            if done != 0 {
                assert!(matches!(wrong, Wrong::Put(_)), "the get came out well");
                let (from, to) = (src.as_window().handle, dst.as_window().handle);
                // SAFETY: registered windows.
                let put = unsafe { T.iput.unwrap()(r.ctx, 0, 0, from, 8, 0, to, 1, 0, &mut request) };
                if put != NcclResult::SUCCESS {
                    break put;
                }
            }
        };
        assert_eq!(result, NcclResult::REMOTE_ERROR, "{wrong:?}");
    }
    // SAFETY: a place for the answer.
    let has_failed = |ctx| unsafe {
        let mut error = false;
        ok(T.query_last_error.unwrap()(ctx, &mut error));
        error
    };
    assert_eq!(has_failed(r.ctx), r.rank == 0, "{wrong:?}, rank {}", r.rank);
    barrier();
    // The other context of both, and all of new ones.
    let traffic = |r: &Rank, context: i32, before: u64| {
        let ring = Some((sig.as_window(), 8, 1));
        for (n, len) in [(1, 64), (2, BYTES)] {
            r.wait(r.put(context, (src.as_window(), 0), len, (dst.as_window(), 0), peer, ring));
            sig.wait(r, 1, before + n);
        }
        assert!((0..BYTES / 8).all(|i| dst.get(i) == (peer * BYTES + i) as u64 + 1), "{wrong:?}, context {context}");
        barrier();
        r.wait(r.get(context, (dst.as_window(), 0), BYTES, (dst.as_window(), 0), r.rank));
        barrier();
    };
    traffic(r, 1, 0);
    barrier();
    assert_eq!(sig.get(0), 0, "{wrong:?}: a signal announces what is not there");
    // SAFETY: plain call; nothing of it is under way.
    ok(unsafe { T.destroy_context.unwrap()(r.ctx) });
    r.ctx = contexts(r);
    traffic(r, 0, 2);
    traffic(r, 1, 4);
    assert!(!has_failed(r.ctx), "{wrong:?}");
    barrier();
    assert_eq!(sig.get(0), 0, "{wrong:?}: a signal announces what is not there");
    if r.rank == 0 {
        r.dereg(gone.as_window());
    }
    [src, dst, sig].iter().for_each(|w| r.dereg(w.as_window()));
    barrier();
}

fn in_one_process(transport: &str) {
    let fake = Fake::take();
    fake.set_transport(transport);
    let job = Job::new(2);
    std::thread::scope(|s| {
        for rank in 0..2 {
            let (job, fake) = (job.clone(), &fake);
            s.spawn(move || {
                let mut r = Rank::join(&job, rank, 2);
                let _context = fake.enter(rank as i32);
                for wrong in WRONGS {
                    scene(fake, &mut r, &|| job.barrier.wait(), wrong);
                }
                r.leave();
            });
        }
    });
    fake.check();
}

#[test]
fn in_one_process_it_fails_its_context_alone() {
    in_one_process("auto");
}

#[test]
fn through_host_memory_it_fails_its_context_alone() {
    in_one_process("staged");
}

#[test]
fn over_tcp_it_fails_its_context_alone() {
    in_one_process("tcp");
}

#[test]
fn between_processes_it_fails_its_context_alone() {
    processes("between_processes_it_fails_its_context_alone", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(place.rank as i32);
        let mut r = place.join(2);
        for wrong in WRONGS {
            scene(&fake, &mut r, &|| place.barrier(), wrong);
        }
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

/// Rank 0's window goes while the engine of rank 1, in this process, has copies from there: one under way is waited for
/// and named where it takes too long; one that waits is not begun, and its operation fails.
#[test]
fn a_window_that_goes_takes_along_what_the_engines_of_other_ranks_have_of_it() {
    const WORDS: usize = 8;
    let fake = Fake::take();
    fake.set_transport("auto");
    fake.set_issue("kernel=0,submissions=1");
    std::env::set_var("OXYGIN_DEREG_TIMEOUT", "0.2");
    job(2, 2, |r| {
        let _context = fake.enter(r.rank as i32);
        let [first, second, dst] = [(); 3].map(|()| window(&fake, r, 0));
        (0..2 * WORDS).for_each(|i| dst.set(i, 7));
        (0..WORDS).for_each(|i| second.set(i, 9));
        r.job.barrier.wait();
        if r.rank == 0 {
            let bytes = 8 * WORDS;
            r.wait(r.put(0, (first.as_window(), 0), bytes, (dst.as_window(), 0), 1, None));
            fake.hold(bytes);
            let under_way = r.put(0, (first.as_window(), 0), bytes, (dst.as_window(), 0), 1, None);
            let held = Instant::now() + Duration::from_secs(20);
            while !fake.is_holding() {
                assert!(Instant::now() < held, "no copy is held");
                std::thread::yield_now();
            }
            let waiting = r.put(1, (second.as_window(), 0), bytes, (dst.as_window(), bytes as u64), 1, None);
            for gone in [&first, &second] {
                // SAFETY: a plain call.
                let code = unsafe { T.dereg_mr_sym.unwrap()(r.coll, gone.as_window().handle) };
                assert_eq!(code, NcclResult::REMOTE_ERROR, "rank 1's GPU is still at it");
            }
            fake.hold(0);
            r.wait(under_way);
            let end = Instant::now() + Duration::from_secs(20);
            let result = loop {
                let mut done = 0;
                // SAFETY: a plain call.
                let result = unsafe { T.test.unwrap()(r.coll, waiting, &mut done) };
                assert!(done == 0 && Instant::now() < end, "it was carried out: {done}");
                if result != NcclResult::SUCCESS {
                    break result;
                }
            };
            println!("{result:?}");
        }
        r.job.barrier.wait();
        if r.rank == 1 {
            (WORDS..2 * WORDS).for_each(|i| assert_eq!(dst.get(i), 7, "nothing came from a window that is gone"));
        }
        r.job.barrier.wait();
    });
    std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
    fake.check();
}
