//! Contexts whose device code talks to some ranks alone: there are queue pairs to those, and to no others.

use crate::harness::*;
use oxygin::fabric::{Context, ContextSpec};
use oxygin::rma::op::{Op, Put};

#[test]
fn peers_that_a_stride_leaves_out_have_no_queue_pairs() {
    let fake = Fake::take();
    let spec = ContextSpec { contexts: 3, queue_depth: 0, traffic_class: None, rank_stride: 2 };
    let ranks = Job { ranks: 4, spec, ..Job::default() }.start();
    assert_eq!(fake.count("live_qps"), 4 * 3 * 2, "to oneself, and to the rank two further on");
    for (me, rank) in ranks.iter().enumerate() {
        let peer = (me + 2) % 4;
        rank.data.memory.store(0, 100 + me as u64);
        for to in [me, peer] {
            let at = &ranks[to];
            let p = Put { signal: signal(at, 1, 1), ..put(rank, 0, at, 8 * (1 + me as u64), 8) };
            let last = start_put(rank, 2, to as u32, &p);
            finish(&rank.contexts[2], to as u32, last);
            assert_eq!(at.data.memory.word(1 + me), 100 + me as u64);
        }
    }
    assert!(ranks.iter().all(|rank| rank.signals.memory.word(1) == 2));
    // One that is left out is an error to whoever talks to it, and to nobody else.
    let [first, left_out, peer, _] = &ranks[..] else { unreachable!() };
    let context = &first.contexts[0];
    assert!(!context.has_error());
    // SAFETY: the window lives as long as the test.
    let refused = unsafe { context.post(1, &[Op::Put(put(first, 0, left_out, 0, 8))]) };
    let refused = refused.expect_err("there is no way to it");
    assert!(refused.message().contains("rankStride = 2"), "{}", refused.message());
    assert!(context.flush(1, None).is_err() && context.has_error());
    let last = start_put(first, 0, 2, &Put { signal: signal(peer, 3, 7), ..put(first, 0, peer, 0, 8) });
    finish(context, 2, last);
    assert_eq!(peer.signals.memory.word(3), 7);
    drop(ranks);
    fake.check_clean();
}

/// Signals by message count credits for every rank: such a device connects all.
#[test]
fn without_atomics_all_are_connected() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 2 };
    let ranks = Job { ranks: 3, spec, ..Job::default() }.start();
    assert_eq!(fake.count("live_qps"), 9);
    let last = start_put(&ranks[0], 0, 1, &put(&ranks[0], 0, &ranks[1], 0, 8));
    finish(&ranks[0].contexts[0], 1, last);
    drop(ranks);
    fake.check_clean();
}
