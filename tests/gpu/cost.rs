//! What the engine asks of the driver, and how long our part of an operation takes: a benchmark on the fake CUDA
//! driver, whose calls take as long as real ones (docs/results/limits-2xH200.txt). One thread stands for NCCL's proxy.
//!
//! `cargo test --release --test gpu -- cost:: --skip tcp_cost:: --ignored --nocapture`

use crate::harness::*;
use crate::support::common::*;
use crate::support::processes::processes;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::time::Instant;

const CALLS: [&str; 5] =
    ["cuCtxPushCurrent", "cuCtxPopCurrent", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuStreamBatchMemOp"];

/// ns: a call, a copy, and what passes before the GPU begins; `COSTS=0,0,5000` for our own time alone.
fn costs() -> Vec<u64> {
    let text = std::env::var("COSTS").unwrap_or_else(|_| "700,600,5000".into());
    text.split(',').map(|n| n.parse().expect("COSTS: three numbers of ns")).collect()
}

/// This thread's processor time, µs: what others do on the machine does not count.
fn cpu_us() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) }, 0);
    t.tv_sec as f64 * 1e6 + t.tv_nsec as f64 / 1e3
}

/// As NCCL's proxy does: each context's unfinished operations are tested, then one more is started, then progress.
/// Returns µs an operation and the driver calls of one.
fn flood(
    fake: &Fake,
    r: &Rank,
    contexts: usize,
    n: usize,
    depth: usize,
    put: impl Fn(usize, u64) -> *mut c_void,
) -> f64 {
    let before = CALLS.map(|c| fake.calls(c));
    let (since, cpu) = (Instant::now(), cpu_us());
    as_the_proxy_does(r, contexts, n, depth, put);
    let all = (n * contexts) as f64;
    let each = since.elapsed().as_secs_f64() * 1e6 / all;
    let cpu = (cpu_us() - cpu) / all;
    let spent: Vec<String> = CALLS
        .iter()
        .zip(before)
        .filter(|&(name, before)| fake.calls(name) > before)
        .map(|(name, before)| format!("{name} {:.2}", (fake.calls(name) - before) as f64 / all))
        .collect();
    println!(
        "{contexts} contexts, {depth} in flight: {each:.2} µs ({cpu:.2} of this thread), {:.2} M/s; an operation: {}",
        1.0 / each,
        spent.join(", ")
    );
    each
}

#[test]
#[ignore = "a benchmark"]
fn cost() {
    let ways = std::env::var("WAYS").unwrap_or_else(|_| {
        "merge=1 merge=0 gather=1 gather=1,merge=0 gather=16 gather=32 submissions=1 submissions=3 kernel=4096".into()
    });
    for way in ways.split(' ') {
        let fake = Fake::take();
        fake.set_issue(way);
        println!("== {way}");
        let cost = costs();
        job(2, 8, |r| {
            let _context = fake.enter(0);
            let words = 8 * 1024;
            let src = fake.window(r, 0, words, 0);
            let dst = fake.window(r, 0, words, 0);
            let sig = fake.signals(r, 0, 8, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
            r.job.barrier.wait();
            if r.rank == 0 {
                fake.costs(cost[0], cost[1], cost[2]);
                let put = |bytes: usize, c: usize, i: u64| {
                    let at = (c as u64 * 1024 + i % 1024) * 8;
                    let to = (dst.as_window(), at);
                    r.put(c as i32, (src.as_window(), at), bytes, to, 1, Some((sig.as_window(), c as u64 * 8, 1)))
                };
                for (what, bytes) in [("signals", 0), ("8-byte puts with signals", 8)] {
                    println!("{what}");
                    flood(&fake, r, 1, 2000, 1, |c, i| put(bytes, c, i));
                    flood(&fake, r, 1, 10_000, 256, |c, i| put(bytes, c, i));
                    flood(&fake, r, 1, 10_000, 64, |c, i| put(bytes, c, i));
                    flood(&fake, r, 8, 4000, 256, |c, i| put(bytes, c, i));
                }
            }
            r.job.barrier.wait();
        });
        fake.costs(0, 0, 0);
        fake.check();
    }
}

/// The same from one process to another: the receiver's engine fetches.
#[test]
#[ignore = "a benchmark"]
fn cost_between_processes() {
    processes("cost_between_processes", 2, &[], |place| {
        let fake = Fake::take();
        let cost = costs();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(8);
        let words = 8 * 1024;
        let bytes = (words * 8usize).next_multiple_of(65_536);
        let [src, dst] = [0; 2].map(|_| fake.register_at(&r, fake.segments(gpu, &[bytes], true), words, 0));
        let sig = fake.signals(&r, gpu, 8, MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET);
        fake.costs(cost[0], cost[1], cost[2]);
        let mut sent = [0; 8];
        for (contexts, n, depth) in [(1, 2000, 1), (1, 10_000, 256), (8, 4000, 256)] {
            place.barrier();
            sent[..contexts].iter_mut().for_each(|s| *s += n as u64);
            if r.rank == 0 {
                let put = |c: usize, i: u64| {
                    let at = (c as u64 * 1024 + i % 1024) * 8;
                    let to = (dst.as_window(), at);
                    r.put(c as i32, (src.as_window(), at), 8, to, 1, Some((sig.as_window(), c as u64 * 8, 1)))
                };
                flood(&fake, &r, contexts, n, depth, put);
            } else {
                let (copies, stores, cpu) = (fake.copies(), fake.stores(), cpu_us());
                let before = CALLS.map(|c| fake.calls(c));
                (0..contexts).for_each(|c| sig.wait(&r, c, sent[c]));
                let all = (n * contexts) as f64;
                let calls = CALLS.iter().zip(before).map(|(c, b)| (c, fake.calls(c) - b)).filter(|c| c.1 > 0);
                println!(
                    "receiver, an operation: {:.2} copies, {:.2} stores, {:.2} µs of its thread; {:?}",
                    (fake.copies() - copies) as f64 / all,
                    (fake.stores() - stores) as f64 / all,
                    (cpu_us() - cpu) / all,
                    calls.collect::<Vec<_>>()
                );
            }
            place.barrier();
        }
        fake.costs(0, 0, 0);
        r.leave();
        fake.check();
    });
}
