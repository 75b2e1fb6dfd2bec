//! Queues of device code that the library drains itself, over GPU memory: pinned where the CPU looks, GPU memory where
//! only device code does.

use crate::harness::Fake;
use crate::support::common::{job, Rank};
use crate::support::device::{entry, Ask, Device};
use crate::support::logged;
use nccl_plugin_api::descriptor::*;
use std::time::{Duration, Instant};

/// Seconds after which the watchdog speaks.
const STALL: &str = "0.5";

/// Every rank on a GPU of its own among `gpus`, with two windows of 4096 words.
fn on_gpus(transport: &str, gpus: i32, body: impl Fn(&Rank, &Fake, &Device, u64, u64) + Send + Sync) {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_ENGINE", "own");
    fake.set_transport(transport);
    std::env::set_var("OXYGIN_STALL", STALL);
    job(2, 1, |r| {
        let gpu = r.rank as i32 % gpus;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, 4096, 0);
        let dst = fake.window(r, gpu, 4096, 0);
        (0..4096).for_each(|i| src.set(i, ((i as u64) << 8) + r.rank as u64 + 1));
        let (from, to) = (src.as_window().handle as u64, dst.as_window().handle as u64);
        // Pinned memory has one address for both.
        let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
        let device = Device::seen_by(r, Ask { contexts: 2, ..Ask::default() }, see);
        r.job.barrier.wait();
        body(r, &fake, &device, from, to);
        r.job.barrier.wait();
        let peer = 1 - r.rank as u64;
        (0..64)
            .for_each(|i| assert_eq!(dst.get(i), ((i as u64) << 8) + peer + 1, "{transport}, {gpus} GPUs, word {i}"));
        assert!(!device.has_error());
        device.destroy();
    });
    fake.check();
}

#[test]
fn puts_values_signals_and_gets() {
    for (transport, gpus) in [("auto", 1), ("auto", 2), ("staged", 1), ("tcp", 2)] {
        on_gpus(transport, gpus, |r, _, device, src, dst| {
            let peer = 1 - r.rank;
            for round in 1..=50 {
                let put = entry(OP_PUT | OP_SIGNAL_INC | OP_COUNTER, 512).first(0, src).second(0, dst);
                device.post(0, peer, put.with_signal(2, 0, true).with_counter(1));
                let value = entry(OP_PUT | OP_INLINE | OP_SIGNAL_ADD, 8).value(77).second(8 * 100, dst);
                device.post(1, peer, value.with_signal(3, 10, true));
                device.wait_signal(0, 2, round);
                device.wait_signal(1, 3, 10 * round);
            }
            device.flush(0, peer);
            assert_eq!(device.counter(0, 1), 50);
            device.post(0, peer, entry(OP_GET, 64).first(8 * 1000, src).second(8 * 2000, dst));
            device.flush_gets(0, peer, r.rank);
        });
    }
}

/// The application's queues stand, and its threads are in driver calls: what device code asked for is done all the
/// same.
#[test]
fn an_application_in_the_driver_holds_nothing_up() {
    for gpus in [1, 2] {
        on_gpus("auto", gpus, |r, fake, device, src, dst| {
            let peer = 1 - r.rank;
            let put = entry(OP_PUT | OP_SIGNAL_INC, 512).first(0, src).second(0, dst).with_signal(2, 0, true);
            device.post(0, peer, put);
            device.wait_signal(0, 2, 1);
            r.job.barrier.wait();
            (0..2).for_each(|gpu| fake.block(gpu, true));
            r.job.barrier.wait();
            for round in 2..=20 {
                device.post(0, peer, put);
                device.wait_signal(0, 2, round);
            }
            r.job.barrier.wait();
            (0..2).for_each(|gpu| fake.block(gpu, false));
        });
    }
}

/// Copies that the GPU does not do: the log says which entry waits for them, once, and nothing is lost.
#[test]
fn the_watchdog_names_what_a_gpu_holds_up() {
    logged::install();
    on_gpus("auto", 2, |r, fake, device, src, dst| {
        logged::listen();
        let peer = 1 - r.rank;
        let put = entry(OP_PUT | OP_SIGNAL_INC, 16 << 10).first(0, src).second(0, dst).with_signal(2, 0, true);
        device.post(0, peer, put);
        device.wait_signal(0, 2, 1);
        r.job.barrier.wait();
        fake.hold(16 << 10);
        r.job.barrier.wait();
        device.post(0, peer, put);
        let begin = format!("context 0, queue to rank {peer}, fabric soft: the oldest entry of device code has been");
        let said =
            || logged::lines().iter().filter(|l| l.1.starts_with(&begin)).map(|l| l.1.clone()).collect::<Vec<_>>();
        let end = Instant::now() + Duration::from_secs(30);
        while said().is_empty() {
            assert!(Instant::now() < end, "{:#?}", logged::lines());
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_secs(1));
        let said = said();
        assert_eq!(said.len(), 1, "once: {said:#?}");
        let why = format!("fabric soft has not reported it complete: rank {peer}, or this GPU, takes nothing");
        assert!(said[0].contains("OXYGIN_STALL") && said[0].contains(&why), "{said:#?}");
        r.job.barrier.wait();
        fake.hold(0);
        device.wait_signal(0, 2, 2);
        device.flush(0, peer);
    });
}
