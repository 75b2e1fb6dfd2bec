//! What the watchdog says of entries of device code that a GPU holds up: which queue, which peer, what it waits for,
//! and that once.

use crate::queues::{on_gpus, with_queues};
use crate::support::device::{entry, wait};
use crate::support::logged;
use nccl_plugin_api::descriptor::*;
use std::time::{Duration, Instant};

/// Copies that the GPU does not do: the log says which entry waits for them, once, and nothing is lost.
#[test]
fn the_watchdog_names_what_a_gpu_holds_up() {
    logged::install();
    on_gpus("auto", 2, |r, fake, device, src, dst| {
        logged::listen();
        if r.rank == 0 {
            logged::lines().clear();
        }
        r.job.barrier.wait();
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

/// Puts are done, and the rank's GPU takes no store: the log says why device code has no credits, once.
#[test]
fn the_watchdog_names_credits_that_a_gpu_does_not_take() {
    logged::install();
    with_queues(
        "auto",
        2,
        0,
        |fake| fake.set_issue("own=0,kernel=0"),
        |r, fake, device, src, dst| {
            logged::listen();
            let peer = 1 - r.rank;
            let put = entry(OP_PUT, 8 << 10).first(0, src).second(0, dst);
            device.post(0, peer, put);
            device.flush(0, peer);
            r.job.barrier.wait();
            (0..2).for_each(|gpu| fake.block(gpu, true));
            r.job.barrier.wait();
            // Of one rank alone: the other's put may be carried out on this rank's GPU, behind the store that waits.
            if r.rank == 0 {
                device.post(0, peer, put);
                let begin =
                    format!("context 0, queue to rank {peer}, fabric soft: all entries of device code are complete");
                let said = || {
                    logged::lines().iter().filter(|l| l.1.starts_with(&begin)).map(|l| l.1.clone()).collect::<Vec<_>>()
                };
                wait(|| format!("a line, not {:#?}", logged::lines()), || !said().is_empty());
                std::thread::sleep(Duration::from_secs(1));
                let said = said();
                assert!(said.len() == 1 && said[0].contains("this rank's GPU takes no store"), "{said:#?}");
            }
            r.job.barrier.wait();
            (0..2).for_each(|gpu| fake.block(gpu, false));
            device.flush(0, peer);
        },
    );
}
