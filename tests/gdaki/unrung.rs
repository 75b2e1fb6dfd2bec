//! Queues that device code fills and does not ring: nothing happens there, and the log says why.

use crate::harness::on_ranks;
use crate::support::apart::is_elsewhere;
use crate::support::logged;
use crate::support::nic::{Ask, Status};
use oxygin::config::Ringing;
use std::time::{Duration, Instant};

const DEPTH: u64 = 8;

/// Lines about such a queue of this rank's to `peer`.
fn said(peer: usize) -> Vec<String> {
    let queue = format!("context 0, queue to rank {peer}: for");
    let lines = logged::lines();
    lines.iter().map(|(_, line)| line.clone()).filter(|line| line.contains(&queue)).collect()
}

#[test]
fn a_queue_that_is_full_of_what_nobody_has_rung_is_named_once() {
    // What is logged is the process's, and whoever calls `init` meanwhile turns it off; so is the variable.
    if is_elsewhere(concat!(module_path!(), "::a_queue_that_is_full_of_what_nobody_has_rung_is_named_once")) {
        return;
    }
    std::env::set_var("OXYGIN_STALL", "0.5");
    logged::install();
    for handler in [Ringing::Doorbell, Ringing::Proxy] {
        let ask = Ask { depth: DEPTH as i32, handler, ..Ask::default() };
        on_ranks(2, ask, |r, nic, _, _| {
            let peer = 1 - r.rank;
            if r.rank == 0 {
                logged::collect();
            }
            r.job.barrier.wait();
            let qp = nic.qp(0, peer);
            let first = qp.reserve(DEPTH);
            let entry = nic.add_signal(0, 0, 1);
            // One is missing: whoever writes it may ring for all.
            (first..first + DEPTH - 1).for_each(|index| qp.put_entry(index, &entry));
            std::thread::sleep(Duration::from_secs(1));
            assert_eq!(said(peer), [""; 0], "{handler:?}");
            qp.put_entry(first + DEPTH - 1, &entry);
            let end = Instant::now() + Duration::from_secs(60);
            while said(peer).is_empty() {
                assert!(Instant::now() < end, "{handler:?}: nothing is said");
                std::thread::sleep(Duration::from_millis(10));
            }
            std::thread::sleep(Duration::from_secs(1));
            let lines = said(peer);
            assert!(lines.len() == 1 && lines[0].contains("its 8 places have been full"), "{handler:?}: {lines:#?}");
            // It is as good as ever.
            qp.ready(first, first + DEPTH - 1);
            qp.submit(first + DEPTH);
            assert_eq!(qp.flush(), Status::Good, "{handler:?}");
            nic.wait_signal(0, 0, DEPTH);
            r.job.barrier.wait();
        });
    }
}
