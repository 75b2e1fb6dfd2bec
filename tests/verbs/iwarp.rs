//! iWARP over the fake libibverbs and librdmacm: set-up, data, and what stands in the way of either.

use crate::harness::*;
use oxygin::config::Config;
use oxygin::fabric::verbs::{devices, mismatch, VerbsFabric};
use oxygin::fabric::{Context, ContextSpec, Fabric, World};
use oxygin::rma::op::Put;
use std::sync::Arc;
use std::time::Duration;

fn take() -> Fake {
    let fake = Fake::take();
    fake.set("iwarp", 1);
    fake
}

/// Rank 0's words after `ranks` ranks tried to connect.
fn refused(ranks: u32, config: Config) -> Vec<String> {
    let job = Job { ranks, config, ..Default::default() };
    let fabrics = job.fabrics();
    let outcomes = connect_together(&fabrics, &job.spec);
    outcomes.into_iter().map(|o| o.err().map_or_else(String::new, |e| e.message().to_owned())).collect()
}

fn hasty() -> Config {
    Config { timeout: Duration::from_millis(600), ..Config::default() }
}

#[test]
fn every_pair_of_ranks_exchanges_data_and_signals() {
    let fake = take();
    for (count, contexts, late) in [(1, 1, 0), (2, 1, 1), (3, 2, 1), (5, 1, 0)] {
        fake.set("late", late);
        let spec = ContextSpec { contexts, queue_depth: 0, traffic_class: Some(96), rank_stride: 1 };
        let ranks = Job { ranks: count, spec, ..Default::default() }.start();
        for c in 0..contexts as usize {
            for a in &ranks {
                for b in &ranks {
                    a.data.memory.store(1, 100 + u64::from(a.rank));
                    let word = 8 * (2 + u64::from(a.rank));
                    let put = Put { signal: signal(b, a.rank as usize, 1), ..put(a, 8, b, word, 8) };
                    // SAFETY: the windows outlive the operations.
                    let seq = unsafe { a.contexts[c].put(b.rank, &put) }.unwrap();
                    finish(&a.contexts[c], b.rank, seq);
                    until("the signal", || b.signals.memory.word(a.rank as usize) == 1 + c as u64);
                    assert_eq!(b.data.memory.word(2 + a.rank as usize), 100 + u64::from(a.rank));
                    // SAFETY: as above.
                    let seq = unsafe { a.contexts[c].get(b.rank, &get(a, 256, b, word, 8)) }.unwrap();
                    finish(&a.contexts[c], b.rank, seq);
                    assert_eq!(a.data.memory.word(32), 100 + u64::from(a.rank));
                }
            }
        }
        // More than all receives, so that credit must flow on every connection, the one to oneself included.
        for a in &ranks {
            for b in &ranks {
                for _ in 0..200 {
                    let put = Put { len: 0, signal: signal(b, 40, 1), ..put(a, 0, b, 0, 0) };
                    // SAFETY: as above.
                    unsafe { a.contexts[0].put(b.rank, &put) }.unwrap();
                }
            }
        }
        until("all signals", || {
            ranks.iter().for_each(|r| r.contexts[0].progress().unwrap());
            ranks.iter().all(|r| r.signals.memory.word(40) == 200 * u64::from(count))
        });
        assert_eq!((fake.count("last_tos"), fake.count("last_initiator_depth")), (96, 16));
        assert!(ranks.iter().all(|r| r.contexts.iter().all(|c| !c.has_error())));
        fake.set("late", 0);
        drop(ranks);
        fake.check_clean();
    }
}

#[test]
fn reads_are_as_many_as_both_ends_take() {
    let fake = take();
    fake.set("max_qp_init_rd_atom", 9);
    fake.set("max_qp_rd_atom", 4);
    drop(Job::default().start());
    assert_eq!((fake.count("last_initiator_depth"), fake.count("last_responder_resources")), (4, 4));
    fake.check_clean();
}

#[test]
fn devices_that_cannot_be_connected_say_why() {
    let fake = take();
    let first = || devices(&Config::default()).unwrap().into_iter().next().unwrap();
    let usable = first();
    assert!(usable.is_usable() && usable.iwarp && !usable.atomics, "{:?}", usable.problem);
    for (key, value, words) in [
        ("cm_errno", i64::from(libc::ENOENT), "load the module rdma_ucm"),
        ("cm_address", 0, "no IP address of this host leads to it"),
        ("port_state", 1, "is down"),
    ] {
        fake.set(key, value);
        let device = first();
        let problem = device.problem.clone().unwrap_or_default();
        assert!(problem.contains(words), "{key}={value}: {problem}");
        assert!(VerbsFabric::open(&device, &Config::default(), Arc::default()).is_err());
        fake.set("reset", 0);
        fake.set("iwarp", 1);
    }
    std::env::set_var("OXYGIN_LIBRDMACM", "/nonexistent/librdmacm.so.1");
    let problem = first().problem.unwrap_or_default();
    assert!(problem.contains("/nonexistent/librdmacm.so.1") && problem.contains("librdmacm1"), "{problem}");
    // It went after the device was found.
    let e = VerbsFabric::open(&usable, &Config::default(), Arc::default()).err().unwrap();
    assert!(e.message().contains("librdmacm1"), "{e}");
    // Nobody else needs it.
    fake.set("iwarp", 0);
    assert!(first().is_usable());
    drop(usable);
    fake.check_clean();
}

#[test]
fn connections_that_fail_name_the_rank_and_the_reason() {
    let fake = take();
    for (key, value, words) in [
        ("cm_resolve", i64::from(libc::ENETUNREACH), "its address cannot be resolved: Network is unreachable"),
        ("cm_connect", i64::from(libc::ETIMEDOUT), "the connection cannot be made: Connection timed out"),
    ] {
        fake.set(key, value);
        let said = refused(2, hasty());
        // Rank 0 connects to itself first.
        assert!(said[0].contains("rank 0 at") && said[0].contains(words), "{key}: {}", said[0]);
        assert!(said[0].contains("iWARP device fake_0"), "{}", said[0]);
        assert!(said[1].contains("rank 1 at") && said[1].contains(words), "{key}: {}", said[1]);
        fake.set(key, 0);
        fake.check_clean();
    }
}

#[test]
fn ranks_that_do_not_answer_are_named_when_the_time_is_over() {
    let fake = take();
    for (key, words) in [("cm_resolve", "its address is not resolved"), ("cm_connect", "it does not answer")] {
        fake.set(key, -1);
        let said = refused(2, hasty());
        for part in ["after 300ms", "rank 0 at", "rank 1 at", words] {
            assert!(said[0].contains(part), "{key}: {part:?} is not in: {}", said[0]);
        }
        // Rank 0 was to connect to rank 1.
        assert!(said[1].contains("it has not connected"), "{key}: {}", said[1]);
        fake.set(key, 0);
        fake.check_clean();
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let fake = take();
    let job = Job { ranks: 2, config: hasty(), ..Default::default() };
    let fabrics = job.fabrics();
    let (one, slices) = fabrics[0].0.prepare_contexts(&job.spec).unwrap();
    let (other, others) = fabrics[1].0.prepare_contexts(&job.spec).unwrap();
    let from = |slices: &[u8], to: usize| slices.chunks(slices.len() / 2).nth(to).unwrap().to_vec();
    // Rank 0 failed before it could connect, and its listener is gone.
    drop(one);
    let e = fabrics[1].0.finish_contexts(other, &[&from(&slices, 1), &from(&others, 1)]).err().unwrap();
    assert!(e.message().contains("rank 0 at") && e.message().contains("it has not connected"), "{e}");
    let (other, others) = fabrics[0].0.prepare_contexts(&job.spec).unwrap();
    let e = fabrics[0].0.finish_contexts(other, &[&from(&others, 0), &from(&slices, 0)]).err().unwrap();
    assert!(e.message().contains("rank 1 at") && e.message().contains("it refuses the connection"), "{e}");
    drop(fabrics);
    fake.check_clean();
}

#[test]
fn strangers_at_the_port_are_refused_and_disturb_nobody() {
    let fake = take();
    fake.set("cm_garbage", 1);
    let ranks = Job::default().start();
    assert_eq!(fake.count("cm_rejected"), 3, "one stranger a connection");
    // SAFETY: the windows outlive the operation.
    let seq = unsafe { ranks[0].contexts[0].put(1, &put(&ranks[0], 0, &ranks[1], 0, 8)) }.unwrap();
    finish(&ranks[0].contexts[0], 1, seq);
    drop(ranks);
    // A greeting with another job's token is a stranger's too.
    fake.set("cm_garbage", 2);
    let said = refused(2, hasty());
    assert!(said[0].contains("it refuses the connection"), "{}", said[0]);
    fake.check_clean();
    // One that knocks when all peers are in is never looked at, and goes with the listener.
    fake.set("cm_garbage", 3);
    let before = fake.count("cm_rejected");
    let ranks = Job { ranks: 1, ..Default::default() }.start();
    assert_eq!(fake.count("cm_rejected"), before);
    assert_eq!(fake.count("live_cm_ids"), 2, "both ends of one connection");
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_peer_that_closes_is_an_error_only_to_who_goes_on() {
    let fake = take();
    let mut ranks = Job { ranks: 3, ..Default::default() }.start();
    let gone = ranks.remove(2);
    let rkey = gone.data.registration.rkey;
    drop(gone);
    let [a, b] = &ranks[..] else { unreachable!() };
    a.contexts[0].progress().unwrap();
    assert!(!a.contexts[0].has_error(), "nothing was under way");
    // SAFETY: the windows outlive the operation.
    let seq = unsafe { a.contexts[0].put(1, &put(a, 0, b, 0, 8)) }.unwrap();
    finish(&a.contexts[0], 1, seq);
    let lost = Put { rkey, ..put(a, 0, b, 0, 8) };
    // SAFETY: as above.
    let e = match unsafe { a.contexts[0].put(2, &lost) } {
        Ok(seq) => failure(&a.contexts[0], 2, seq),
        Err(e) => e,
    };
    assert!(e.message().contains("rank 2") && e.message().contains("closed the connection"), "{e}");
    assert!(a.contexts[0].has_error());
    drop(ranks);
    fake.check_clean();
}

#[test]
fn a_get_is_complete_with_its_data_though_devices_let_others_overtake_it() {
    let fake = take();
    fake.set("late", 1);
    fake.set("overtake", 1);
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    for round in 1..200 {
        b.data.memory.store(0, round);
        // SAFETY: the windows outlive the operations.
        let (first, second) = unsafe {
            let first = a.contexts[0].get(1, &get(a, 0, b, 0, 8)).unwrap();
            // In one chain with the get, and in one of its own.
            let more = Put { more: round % 2 == 0, signal: signal(b, 0, 1), ..put(a, 8, b, 8, 8) };
            a.contexts[0].put(1, &more).unwrap();
            (first, a.contexts[0].put(1, &put(a, 8, b, 8, 8)).unwrap())
        };
        finish(&a.contexts[0], 1, first);
        assert_eq!(a.data.memory.word(0), round);
        finish(&a.contexts[0], 1, second);
    }
    drop(ranks);
    fake.check_clean();
}

#[test]
fn iwarp_and_roce_do_not_meet() {
    let fake = take();
    fake.set("iwarp@1", 0);
    let list = devices(&Config::default()).unwrap();
    let open = |i: usize| VerbsFabric::open(&list[i], &Config::default(), Arc::default()).unwrap();
    let (iwarp, roce) = (open(0), open(1));
    let hellos = [iwarp.hello(), roce.hello()];
    let hellos = [&hellos[0][..], &hellos[1][..]];
    let sentence = mismatch(&hellos).unwrap();
    assert!(sentence.contains("rank 1 is on RoCE and rank 0 on iWARP"), "{sentence}");
    assert!(iwarp.join(World { rank: 0, nranks: 2 }, &hellos).is_err());
    assert_eq!(mismatch(&[hellos[0], hellos[0]]), None);
    let mut ipv6 = iwarp.hello();
    ipv6[16..32].copy_from_slice(&[0x20; 16]);
    let sentence = mismatch(&[&ipv6, hellos[0]]).unwrap();
    assert!(sentence.contains("rank 1 uses an IPv4 address and rank 0 an IPv6 one; give the devices"), "{sentence}");
    drop((iwarp, roce, list));
    fake.check_clean();
}
