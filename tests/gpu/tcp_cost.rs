//! What GPU windows cost over TCP: round trips and floods of puts with signals, a benchmark on the fake CUDA driver,
//! whose calls and copies take about as long as real ones. Each rank is a thread that stands for NCCL's proxy.
//!
//! `cargo test --release --test gpu -- tcp_cost:: --ignored --nocapture`; `THREADS=0,2` tries numbers of movers,
//! `COSTS=700,600,5000` sets ns for a call, a copy and the GPU's beginning, `WHERE=host` or `gpu` chooses memory,
//! `SIZES=8,65536` bytes of the round trips.

use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes of a window.
const BYTES: usize = 16 << 20;
/// Contexts of a rank.
const CONTEXTS: usize = 8;
/// Operations that a context has unfinished at most, as NCCL's proxy does.
const DEPTH: usize = 64;

/// What starts work on the GPUs of both ranks.
const CALLS: [&str; 4] = ["cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpyBatchAsync", "cuStreamBatchMemOp"];

fn numbers(name: &str, default: &str) -> Vec<u64> {
    let text = std::env::var(name).unwrap_or_else(|_| default.into());
    text.split(',').map(|n| n.parse().unwrap_or_else(|_| panic!("{name}: numbers with commas between"))).collect()
}

/// A rank's windows: data, and signals.
struct Place {
    gpu: Option<(GpuWindow, GpuWindow)>,
    host: (Window, Window),
}

impl Place {
    fn on(fake: &Fake, r: &Rank, gpu: bool) -> Self {
        let flags = MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET;
        let gpu = gpu.then(|| (fake.window(r, 0, BYTES / 8, 0), fake.signals(r, 0, CONTEXTS, flags)));
        let words = if gpu.is_some() { 8 } else { BYTES / 8 };
        Self { gpu, host: (r.window(words, 0), r.window(CONTEXTS, MR_FLAG_FORCE_SO)) }
    }

    fn data(&self) -> &Window {
        self.gpu.as_ref().map_or(&self.host.0, |g| g.0.as_window())
    }

    fn signals(&self) -> &Window {
        self.gpu.as_ref().map_or(&self.host.1, |g| g.1.as_window())
    }

    fn signal(&self, i: usize) -> u64 {
        match &self.gpu {
            Some((_, signals)) => signals.get(i),
            None => {
                // SAFETY: an aligned word of the window, added to atomically.
                unsafe { AtomicU64::from_ptr(self.host.1.words.as_ptr().add(i).cast_mut()) }.load(Ordering::Acquire)
            }
        }
    }

    fn put(&self, r: &Rank, context: usize, bytes: usize) -> *mut c_void {
        let at = ((context << 20) % BYTES) as u64;
        let signal = Some((self.signals(), 8 * context as u64, 1));
        r.put(context as i32, (self.data(), at), bytes, (self.data(), at), 1 - r.rank, signal)
    }

    fn wait(&self, r: &Rank, i: usize, value: u64) {
        while self.signal(i) < value {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
        }
    }
}

/// Round trips; `before` of them were made already. Returns the median, µs.
fn round_trips(r: &Rank, place: &Place, bytes: usize, n: u64, before: u64) -> f64 {
    let mut took = Vec::new();
    for i in before + 1..=before + n {
        let since = Instant::now();
        if r.rank == 1 {
            place.wait(r, 0, i);
        }
        let request = place.put(r, 0, bytes);
        if r.rank == 0 {
            place.wait(r, 0, i);
        }
        while !test(r, request) {}
        took.push(since.elapsed().as_secs_f64() * 1e6);
    }
    took.sort_by(f64::total_cmp);
    took[took.len() / 2]
}

/// As NCCL's proxy does: each context's unfinished operations are tested, then one more is started, then progress.
/// Returns M operations a second.
fn flood(r: &Rank, place: &Place, contexts: usize, n: usize, bytes: usize) -> f64 {
    let since = Instant::now();
    as_the_proxy_does(r, contexts, n, DEPTH, |c, _| place.put(r, c, bytes));
    (n * contexts) as f64 / since.elapsed().as_secs_f64() / 1e6
}

fn bench(fake: &Fake, on_gpu: bool, costs: &[u64]) {
    job(2, CONTEXTS as i32, |r| {
        let _context = fake.enter(0);
        let place = Place::on(fake, r, on_gpu);
        r.job.barrier.wait();
        fake.costs(costs[0], costs[1], costs[2]);
        round_trips(r, &place, 0, 200, 0);
        let mut before = 200;
        for bytes in numbers("SIZES", "0,8,1024,16384,65536,1048576") {
            let (bytes, n) = (bytes as usize, (200 << 20) / (bytes + (100 << 10)));
            let median = round_trips(r, &place, bytes, n, before);
            before += n;
            if r.rank == 0 {
                println!("  round trip of {bytes} bytes: {median:.1} µs");
            }
        }
        let mut seen: Vec<u64> = (0..CONTEXTS).map(|c| if c == 0 { before } else { 0 }).collect();
        for (bytes, contexts, n) in
            [(8, 1, 20_000), (8, 8, 5000), (7 << 10, 8, 5000), (64 << 10, 1, 5000), (64 << 10, 8, 1000)]
        {
            r.job.barrier.wait();
            if r.rank == 0 {
                let before = CALLS.map(|c| fake.calls(c));
                let rate = flood(r, &place, contexts, n, bytes);
                let each = |(c, before): (&str, u64)| (fake.calls(c) - before) as f64 / (n * contexts) as f64;
                let calls: f64 = CALLS.into_iter().zip(before).map(each).sum();
                println!("  flood of {bytes} bytes, {contexts} contexts: {rate:.3} M/s, {calls:.2} driver calls each");
            }
            for (c, seen) in seen.iter_mut().enumerate().take(contexts) {
                *seen += n as u64;
                if r.rank == 1 {
                    place.wait(r, c, *seen);
                }
            }
        }
        r.job.barrier.wait();
    });
    fake.costs(0, 0, 0);
}

#[test]
#[ignore = "a benchmark"]
fn cost() {
    let wanted = std::env::var("WHERE").unwrap_or_default();
    for threads in numbers("THREADS", "0,2") {
        for (name, on_gpu) in [("host", false), ("gpu", true)] {
            if !wanted.is_empty() && wanted != name {
                continue;
            }
            let fake = Fake::take();
            fake.set_transport("tcp");
            std::env::set_var("OXYGIN_TCP_THREADS", threads.to_string());
            println!("== {name} memory, {threads} threads for bulk");
            bench(&fake, on_gpu, &numbers("COSTS", "700,600,5000"));
            fake.check();
        }
    }
}
