//! Asynchronous events: what no completion tells.

use crate::harness::*;
use crate::support::logged::{collect, lines};
use log::Level;
use oxygin::error::Kind;
use oxygin::fabric::{Context, ContextSpec};
use oxygin::rma::op::Put;

/// Two ranks on two devices; the last queue pair is that of rank 1, its second context, to itself.
fn two(fake: &Fake) -> (Vec<Rank>, i64) {
    let spec = ContextSpec { contexts: 2, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    let ranks = Job { spec, devices: 2, ..Default::default() }.start();
    (ranks, fake.count("last_qp"))
}

#[test]
fn a_device_that_fails_ends_all_of_its_lanes() {
    let fake = Fake::take();
    let (ranks, _) = two(&fake);
    let [a, b] = &ranks[..] else { unreachable!() };
    fake.set("late", 2);
    let stuck: Vec<_> = [0, 1].map(|c| start_put(a, c, 1, &put(a, 0, b, 0, 8))).into();
    fake.set("device_fatal", 0);
    for (context, seq) in a.contexts.iter().zip(stuck) {
        let e = failure(context, 1, seq);
        assert!(e.kind() == Kind::DeviceFailed && e.message().contains("was taken away"), "{e}");
        assert!(context.flushed(0).is_err());
    }
    fake.set("late", 0);
    finish(&b.contexts[0], 1, start_put(b, 0, 1, &put(b, 0, b, 64, 8)));
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_queue_pair_that_fails_ends_one_lane_and_a_completion_queue_those_of_one_context() {
    let fake = Fake::take();
    let (ranks, last) = two(&fake);
    let [a, b] = &ranks[..] else { unreachable!() };
    fake.set("late", 2);
    let pair = start_put(b, 1, 1, &put(b, 0, b, 64, 8));
    fake.set("pair_fatal", last);
    let e = failure(&b.contexts[1], 1, pair);
    assert!(e.kind() == Kind::DeviceFailed && e.message().contains("the queue pair failed"), "{e}");
    let queue = start_put(b, 1, 0, &put(b, 0, a, 64, 8));
    fake.set("queue_fatal", last);
    let e = failure(&b.contexts[1], 0, queue);
    assert!(e.kind() == Kind::DeviceFailed && e.message().contains("the completion queue failed"), "{e}");
    fake.set("late", 0);
    finish(&b.contexts[0], 1, start_put(b, 0, 1, &put(b, 0, b, 64, 8)));
    assert!(!b.contexts[0].has_error());
    drop(ranks);
    fake.check_clean();
}

/// What ends no lane is told, where it is about this rank's port.
#[test]
fn ports_that_go_and_addresses_that_change_are_told() {
    let fake = Fake::take();
    let (ranks, last) = two(&fake);
    let [a, b] = &ranks[..] else { unreachable!() };
    collect();
    fake.set("late", 2);
    let stuck = start_put(b, 0, 0, &put(b, 0, a, 0, 8));
    let said = |part: &str| lines().iter().filter(|(level, line)| *level == Level::Warn && line.contains(part)).count();
    for (event, value, part) in [
        ("port_down", 1, "fake_1:1: the port went down"),
        ("port_up", 1, "fake_1:1: the port is up again"),
        ("lid_change", 1, "fake_1:1: the port has another LID"),
        ("pair_access", last, "fake_1:1: a queue pair refused what its peer sent (its address or key)"),
    ] {
        fake.set(event, value);
        until(part, || {
            assert!(!b.contexts[0].test(0, stuck).unwrap());
            said(part) > 0
        });
        assert_eq!(said(part), 1);
    }
    // Its GID is still there; then it is not.
    let part = "fake_1:1: GID 3 (::ffff:10.0.0.2) is no longer the port's";
    fake.set("gid_change", 1);
    (0..10_000).for_each(|_| assert!(!b.contexts[0].test(0, stuck).unwrap()));
    assert_eq!(said(part), 0);
    fake.set("gids@1", 3);
    fake.set("gid_change", 1);
    until(part, || {
        assert!(!b.contexts[0].test(0, stuck).unwrap());
        said(part) > 0
    });
    fake.set("gids@1", 4);
    fake.set("late", 0);
    fake.set("run", 0);
    finish(&b.contexts[0], 0, stuck);
    drop(ranks);
    fake.check_clean();
}

/// Where a thread receives, it is woken.
#[test]
fn a_rank_that_calls_nothing_hears_of_its_device() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let (ranks, _) = two(&fake);
    let [a, b] = &ranks[..] else { unreachable!() };
    fake.set("device_fatal", 1);
    until("the event", || b.contexts.iter().all(|context| context.has_error()));
    assert!(!a.contexts[0].has_error());
    // SAFETY: the windows outlive the operation.
    assert!(unsafe { b.contexts[0].put(0, &Put { signal: signal(a, 0, 1), ..put(b, 0, a, 0, 8) }) }.is_err());
    drop(ranks);
    fake.check_clean();
}

/// Nor does one whose contexts are gone, or not there yet, leave them there: whoever sleeps on them would not sleep.
#[test]
fn a_rank_without_contexts_hears_of_its_port() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let (mut ranks, _) = two(&fake);
    ranks.iter_mut().for_each(|rank| rank.contexts.clear());
    collect();
    for (event, part) in [("port_down", "fake_1:1: the port went down"), ("port_up", "fake_1:1: the port is up again")]
    {
        fake.set(event, 1);
        until(part, || lines().iter().any(|(level, line)| *level == Level::Warn && line.contains(part)));
    }
    drop(ranks);
    fake.check_clean();
}
