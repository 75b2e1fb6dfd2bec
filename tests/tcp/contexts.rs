//! Contexts that come and go, more than there can be at a time, leave nothing behind over TCP.
//!
//! One test in this file: it counts the bytes that the process has allocated.

mod harness;
#[path = "../support/mod.rs"]
mod support;

use harness as tcp;
use nccl_plugin_api::rma_v14::ConfigV14;
use oxygin::rma::op::Op;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::AtomicIsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use support::common;

/// Counts what is allocated and not freed.
struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as isize, SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as isize, SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that may come and go meanwhile: queues that are longer at one moment than at another.
const NOISE: isize = 100 << 10;
/// Of each put: more than is staged, so that both sides count it.
const BYTES: usize = 9000;

/// The transport alone, with more contexts than a communicator can have at a time.
fn many_lanes() {
    const ROUNDS: u64 = 700;
    const AT_ONCE: u64 = 100;
    let all = tcp::ranks(2, 1, 4096);
    let (a, b) = (&all[0], &all[1]);
    let source = tcp::words(4096);
    let mut before = 0;
    for round in 0..ROUNDS {
        let lanes: Vec<_> = (0..AT_ONCE).map(|i| a.lane((round * AT_ONCE + i) as u32, 1)).collect();
        for lane in &lanes {
            let mut put = tcp::put(tcp::address(&source), tcp::address(&b.data), BYTES);
            put.signal = tcp::bell(&b.signals[0], 1, true);
            a.post(lane, Op::Put(put));
        }
        tcp::until("signals", || b.signals[0].load(SeqCst) == (round + 1) * AT_ONCE);
        for lane in &lanes {
            tcp::until("completion", || lane.is_idle());
            a.tcp.drop_lane(lane, Instant::now() + Duration::from_secs(10));
        }
        if round == ROUNDS / 7 {
            before = LIVE.load(SeqCst);
        }
    }
    assert!(all.iter().all(|r| r.health.iter().all(|h| !h.has_failed())));
    tcp::until("as many bytes as before", || LIVE.load(SeqCst) - before < NOISE);
}

/// Through the table, as an application does.
fn many_contexts() {
    const ROUNDS: u64 = 120;
    const AT_ONCE: u64 = 16;
    std::env::set_var("OXYGIN_FABRIC", "soft");
    std::env::set_var("OXYGIN_SOFT_TRANSPORT", "tcp");
    let before = AtomicIsize::new(0);
    common::job(2, 1, |r| {
        let (data, signals) = (r.window(4096, 0), r.window(1, 1));
        for round in 0..ROUNDS {
            let mut config = ConfigV14 { n_contexts: AT_ONCE as i32, traffic_class: -1, rank_stride: 1 };
            let mut ctx = null_mut();
            // SAFETY: pointers to locals; the communicator is alive.
            common::ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let one = common::Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
            let to = 1 - r.rank;
            let requests: Vec<_> = (0..AT_ONCE)
                .map(|c| one.put(c as i32, (&data, 0), BYTES, (&data, 16 << 10), to, Some((&signals, 0, 1))))
                .collect();
            requests.into_iter().for_each(|q| one.wait(q));
            one.wait_signal(&signals, 0, (round + 1) * AT_ONCE);
            // SAFETY: alive, and nobody uses it any more.
            common::ok(unsafe { T.destroy_context.unwrap()(ctx) });
            r.job.barrier.wait();
            if round == ROUNDS / 6 && r.rank == 0 {
                before.store(LIVE.load(SeqCst), SeqCst);
            }
        }
        tcp::until("as many bytes as before", || LIVE.load(SeqCst) - before.load(SeqCst) < NOISE);
        r.job.barrier.wait();
    });
}

#[test]
fn contexts_leave_nothing_behind() {
    many_lanes();
    many_contexts();
}
