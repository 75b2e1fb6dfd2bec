//! Statistics of the software NIC: queue pairs and their companions, each with its context and peer.

use crate::harness::on_ranks;
use crate::support::nic::*;
use oxygin::config::Ringing;
use oxygin::telemetry::stats::layout::State;
use oxygin::telemetry::stats::read::{sets, Lane};
use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

/// The lanes of this rank's set, by (context, peer, whether it is a companion), when they are good.
fn until(nic: &Nic, good: impl Fn(&[Lane]) -> bool) -> Vec<Lane> {
    // While a page is looked at its reader has it open in this process, too.
    static LOOKING: Mutex<()> = Mutex::new(());
    let seen = RefCell::new(Vec::new());
    wait(
        || "the statistics".into(),
        || {
            let _looking = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
            let all = sets(std::process::id(), |_, _| {}).expect("this process");
            let own = all.into_iter().find(|set| (set.comm, set.set) == (nic.coll.id, nic.set.set.into()));
            *seen.borrow_mut() = own.map(|set| set.lanes).unwrap_or_default();
            good(&seen.borrow())
        },
    );
    seen.into_inner()
}

fn place(lane: &Lane) -> (u64, u64, bool) {
    (lane.context, lane.peer, lane.is_companion)
}

#[test]
fn companions_are_counted_beside_their_queue_pairs() {
    const N: u64 = 100;
    for (handler, stride) in [(Ringing::Doorbell, 1), (Ringing::FreeFlow, 2)] {
        on_ranks(3, Ask { contexts: 3, handler, stride, ..Ask::default() }, |r, nic, src, dst| {
            let peer = (r.rank + stride as usize) % 3;
            let peer = if nic.has(2, peer) { peer } else { r.rank };
            for i in 0..N as usize {
                nic.post_counted(2, peer, &[write(dst.at(i), src.at(i), 8)], 0);
            }
            assert_eq!(nic.companion(2, peer).flush(), Status::Good);
            nic.qp(0, r.rank).post(&[Raw::new(NOP, 0)]);
            assert_eq!(nic.qp(0, r.rank).flush(), Status::Good);
            let lanes = until(nic, |lanes| lanes.len() == 3 && lanes.iter().all(|l| l.entries == l.completed));
            let (peer, own) = (peer as u64, r.rank as u64);
            let told: Vec<_> = lanes.iter().map(|l| (place(l), l.entries, l.bytes)).collect();
            assert_eq!(
                told,
                [((0, own, false), 1, 0), ((2, peer, false), N, 8 * N), ((2, peer, true), 2 * N, 0)],
                "a wait and an addition for each"
            );
            assert!(lanes.iter().all(|l| (l.refused, l.dropped, l.under_way, l.state) == (0, 0, 0, State::Open)));
            assert_eq!(lanes[2].complete.count(), 2 * N);
            // A companion that is stopped, and its queue pair that is not.
            let companion = nic.companion(2, peer as usize);
            companion.post(&[Raw::new(0x7f, 0)]);
            assert_ne!(companion.flush(), Status::Good);
            (0..4).for_each(|_| _ = companion.post(&[Raw::new(NOP, 0)]));
            let lanes = until(nic, |lanes| lanes[2].completed == 2 * N + 5);
            assert_eq!((lanes[2].refused, lanes[2].dropped, lanes[2].state), (1, 4, State::Stopped));
            assert_eq!((lanes[1].refused, lanes[1].dropped, lanes[1].state), (0, 0, State::Open));
        });
    }
}
