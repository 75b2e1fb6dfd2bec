//! Errors, limits and bad days over the fake libibverbs.

use crate::harness::*;
use nccl_plugin_api::NcclResult;
use oxygin::config::Config;
use oxygin::error::Kind;
use oxygin::fabric::verbs::{devices, VerbsFabric};
use oxygin::fabric::{Context, ContextSpec, Fabric, Region, World};
use oxygin::memory::registry::Registry;
use oxygin::rma::op::{Op, Put};
use oxygin::rma::seq::Seq;
use std::sync::Arc;

fn issue(rank: &Rank, peer: u32, put: &Put) -> Seq {
    // SAFETY: windows outlive the contexts' operations in every test here.
    unsafe { rank.contexts[0].put(peer, put) }.unwrap()
}

#[test]
fn an_error_ends_one_peer_and_no_other() {
    let fake = Fake::take();
    let statuses = [
        (1, Kind::Internal, "report this"),
        (4, Kind::LocalProtection, "not registered"),
        (9, Kind::Protocol, "malformed"),
        (10, Kind::RemoteAccess, "window was deregistered"),
        (11, Kind::DeviceFailed, "could not carry"),
        (12, Kind::PeerGone, "check that the peer is alive"),
        (13, Kind::PeerGone, "no receive"),
        (19, Kind::DeviceFailed, "local device failed"),
    ];
    for (status, kind, words) in statuses {
        let spec = ContextSpec { contexts: 2, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let ranks = Job { ranks: 3, spec, ..Default::default() }.start();
        let me = &ranks[0];
        assert!(!me.contexts[0].has_error());
        let good = issue(me, 1, &put(me, 0, &ranks[1], 0, 8));
        fake.set("error_status", status);
        fake.set("error_in", 2);
        // The data goes through, the signal behind it fails.
        let p = Put { signal: signal(&ranks[1], 0, 1), ..put(me, 0, &ranks[1], 64, 8) };
        let bad = issue(me, 1, &p);
        let behind = issue(me, 1, &put(me, 0, &ranks[1], 0, 8));
        let e = failure(&me.contexts[0], 1, bad);
        assert_eq!((e.code(), e.kind()), (NcclResult::REMOTE_ERROR, kind));
        for part in ["rank 1", "queue pair", "a put of 8 bytes to 0x", "fake_0:1", words] {
            assert!(e.message().contains(part), "{part:?} is not in: {e}");
        }
        assert!(me.contexts[0].test(1, good).unwrap(), "what was complete stays complete");
        assert_eq!(
            failure(&me.contexts[0], 1, behind).message(),
            e.message(),
            "flushed work requests say the first error"
        );
        // SAFETY: as in `issue`.
        let refused = unsafe { me.contexts[0].put(1, &p) }.unwrap_err();
        assert_eq!(refused.code(), NcclResult::REMOTE_ERROR);
        assert!(me.contexts[0].flushed(1).is_err());
        assert!(me.contexts[0].has_error());
        // The others go on.
        for peer in [0, 2] {
            let p = Put { signal: signal(&ranks[peer], 1, 1), ..put(me, 0, &ranks[peer], 0, 8) };
            finish(&me.contexts[0], peer as u32, issue(me, peer as u32, &p));
            assert_eq!(ranks[peer].signals.memory.word(1), 1);
        }
        // So does the other context to the same peer, both ways.
        for (from, to, peer) in [(me, &ranks[1], 1), (&ranks[1], me, 0)] {
            let p = Put { signal: signal(to, 2, 1), ..put(from, 0, to, 0, 8) };
            // SAFETY: as in `issue`.
            let seq = unsafe { from.contexts[1].put(peer, &p) }.unwrap();
            finish(&from.contexts[1], peer, seq);
            assert_eq!(to.signals.memory.word(2), 1);
            assert!(!from.contexts[1].has_error());
        }
        drop(ranks);
        fake.check_clean();
    }
}

#[test]
fn an_error_in_the_middle_of_a_full_queue_drops_what_waits() {
    let fake = Fake::take();
    let spec = ContextSpec { contexts: 1, queue_depth: 8, traffic_class: None, rank_stride: 1 };
    let ranks = Job { ranks: 3, spec, ..Default::default() }.start();
    let me = &ranks[0];
    fake.set("late", 2);
    let seqs: Vec<_> = (0..1000).map(|_| issue(me, 1, &put(me, 0, &ranks[1], 0, 8))).collect();
    let other = issue(me, 2, &put(me, 0, &ranks[2], 0, 8));
    fake.set("error_status", 12);
    fake.set("error_in", 4);
    fake.set("late", 1);
    for &seq in &seqs[3..] {
        assert_eq!(failure(&me.contexts[0], 1, seq).code(), NcclResult::REMOTE_ERROR);
    }
    finish(&me.contexts[0], 2, other);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn wrong_keys_and_ranges_are_the_peers_error_and_nobody_crashes() {
    let fake = Fake::take();
    for wrong in 0..4 {
        let ranks = Job::default().start();
        let [a, b] = &ranks[..] else { unreachable!() };
        let mut p = Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 8) };
        match wrong {
            0 => p.rkey += 7777,
            1 => p.remote += b.data.memory.len(),
            2 => p.lkey += 7777,
            _ => p.signal.as_mut().unwrap().remote += 8 * b.signals.memory.0.len() as u64,
        }
        assert_eq!(failure(&a.contexts[0], 1, issue(a, 1, &p)).code(), NcclResult::REMOTE_ERROR);
        assert_eq!(b.signals.memory.word(0), 0);
        drop(ranks);
        fake.check_clean();
    }
}

#[test]
fn a_rank_that_is_gone_is_an_error_within_the_retries() {
    let fake = Fake::take();
    let mut ranks = Job { ranks: 3, ..Default::default() }.start();
    ranks.remove(1);
    let [a, c] = &ranks[..] else { unreachable!() };
    let p = Put { remote: 4096, rkey: 1, ..put(a, 0, c, 0, 8) };
    let e = failure(&a.contexts[0], 1, issue(a, 1, &p));
    assert!(e.message().contains("NCCL_IB_TIMEOUT"), "{e}");
    finish(&a.contexts[0], 2, issue(a, 2, &put(a, 0, c, 0, 8)));
    drop(ranks);
    fake.check_clean();
}

/// Nothing is under way to a peer that gives no credit: the device says nothing of it by itself.
#[test]
fn a_rank_that_is_gone_is_an_error_also_to_who_waits_for_its_credit() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let mut ranks = Job { devices: 2, ..Default::default() }.start();
    // What rank 1 says of its credit does not come through.
    fake.set("stopped@0", 1);
    let [a, b] = &ranks[..] else { unreachable!() };
    let p = Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 8) };
    let seqs: Vec<_> = (0..33).map(|_| issue(a, 1, &p)).collect();
    finish(&a.contexts[0], 1, seqs[31]);
    until("the signals", || b.signals.memory.word(0) == 32);
    // While it is there, that is asked for without a word.
    let before = fake.count("work_requests");
    until("the question", || {
        assert!(!a.contexts[0].test(1, seqs[32]).unwrap());
        fake.count("work_requests") > before
    });
    assert!(!a.contexts[0].test(1, seqs[32]).unwrap());
    ranks.remove(1);
    let e = failure(&ranks[0].contexts[0], 1, seqs[32]);
    assert!(e.kind() == Kind::PeerGone && e.message().contains("rank 1"), "{e}");
    drop(ranks);
    fake.check_clean();
}

#[test]
fn signal_messages_touch_registered_words_only() {
    let fake = Fake::take();
    fake.set("atomic_cap", 0);
    let outside = Memory::new(64);
    for wrong in 0..4 {
        let ranks = Job::default().start();
        let [a, b] = &ranks[..] else { unreachable!() };
        let mut p = Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 8) };
        let s = p.signal.as_mut().unwrap();
        match wrong {
            0 => s.remote = outside.base(),
            1 => s.remote += 4,
            2 => s.rkey += 1,
            // Registered with the device, but taken out of the registry.
            _ => b.registry.remove(1),
        }
        let seq = issue(a, 1, &p);
        finish(&a.contexts[0], 1, seq);
        until("the receiver's error", || b.contexts[0].has_error());
        assert_eq!((outside.word(0), b.signals.memory.word(0)), (0, 0));
        // The sender is not left waiting for credit, and nothing behind the refused signal arrives.
        let p = Put { signal: signal(b, 1, 1), ..put(a, 0, b, 0, 8) };
        // SAFETY: as in `issue`.
        let more = (0..40).try_fold(seq, |_, _| unsafe { a.contexts[0].put(1, &p) });
        let e = more.map_or_else(|e| e, |last| failure(&a.contexts[0], 1, last));
        assert!(e.code() == NcclResult::REMOTE_ERROR && b.signals.memory.word(1) == 0, "{e}");
        drop(ranks);
        fake.check_clean();
    }
}

#[test]
fn queues_shrink_to_what_the_device_has() {
    let fake = Fake::take();
    fake.set("qp_room", 70);
    let ranks = Job::default().start();
    assert_eq!(fake.count("last_depth"), 64);
    finish(&ranks[0].contexts[0], 1, issue(&ranks[0], 1, &put(&ranks[0], 0, &ranks[1], 0, 8)));
    drop(ranks);
    fake.check_clean();
    fake.set("qp_room", 1 << 20);
    fake.set("max_cqe", 100);
    let ranks = Job { ranks: 5, ..Default::default() }.start();
    assert_eq!(fake.count("last_depth"), 20);
    drop(ranks);
    fake.set("max_cqe", 12);
    let fabrics = Job { ranks: 5, ..Default::default() }.fabrics();
    let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    let e = fabrics[0].0.prepare_contexts(&spec).err().unwrap();
    assert!(e.message().contains("the device has 12"), "{e}");
    drop(fabrics);
    fake.check_clean();
}

/// The providers of soft devices queue a whole chain before they ring, and name no work request if that fails.
#[test]
fn what_a_device_may_have_taken_is_not_posted_again() {
    let fake = Fake::take();
    for late in [0, 2] {
        fake.set("late", late);
        let ranks = Job::default().start();
        let [a, b] = &ranks[..] else { unreachable!() };
        let ops: Vec<Op> = (0..4).map(|i| Op::Put(Put { signal: signal(b, i, 1), ..put(a, 0, b, 0, 8) })).collect();
        fake.set("ring_errno", libc::ENOMEM.into());
        assert_eq!(post_batch(a, 1, &ops).taken, 4);
        // SAFETY: as in `issue`.
        let e = unsafe { a.contexts[0].post(1, &ops) }.unwrap_err();
        assert!(e.kind() == Kind::DeviceFailed && e.message().contains("without a word on which"), "{e}");
        fake.set("late", 0);
        fake.set("run", 0);
        a.contexts[0].progress().unwrap();
        assert!((0..4).all(|i| b.signals.memory.word(i) <= 1));
        drop(ranks);
        fake.check_clean();
    }
}

/// Soft-RoCE (this vendor) sends for ever where 7 times are asked for: a peer that is gone would never show.
#[test]
fn soft_roce_sends_again_a_limited_number_of_times() {
    let fake = Fake::take();
    for (vendor, given, used) in [(0x2c9, 7, 7), (0x2c9, 5, 5), (0xff_ffff, 7, 6), (0xff_ffff, 5, 5)] {
        fake.set("vendor_id", vendor);
        drop(Job { config: Config { ib_retry_cnt: given, ..Config::default() }, ..Default::default() }.start());
        assert_eq!(fake.count("last_retry_cnt"), used, "{given} of vendor {vendor:#x}");
    }
    fake.check_clean();
}

#[test]
fn connections_take_the_smaller_limits_and_the_configured_values() {
    let fake = Fake::take();
    fake.set("active_mtu@1", 1);
    fake.set("max_qp_init_rd_atom", 9);
    fake.set("max_qp_rd_atom", 4);
    let config = Config { ib_tc: Some(40), ib_sl: Some(3), ib_timeout: 17, ib_retry_cnt: 5, ..Config::default() };
    let ranks = Job { devices: 2, config: config.clone(), ..Default::default() }.start();
    // The connection made last is that of rank 1 to itself; all of rank 1's have its MTU.
    for (what, value) in [
        ("last_path_mtu", 1),
        ("last_max_rd_atomic", 4),
        ("last_max_dest_rd_atomic", 4),
        ("last_traffic_class", 40),
        ("last_sl", 3),
        ("last_timeout", 17),
        ("last_retry_cnt", 5),
        ("last_sgid_index", 3),
    ] {
        assert_eq!(fake.count(what), value, "{what}");
    }
    for (from, to) in [(0, 1), (1, 0), (0, 0)] {
        finish(
            &ranks[from].contexts[0],
            to as u32,
            issue(&ranks[from], to as u32, &put(&ranks[from], 0, &ranks[to], 0, 8)),
        );
    }
    drop(ranks);
    // The environment wins over what createContext says.
    let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: Some(104), rank_stride: 1 };
    drop(Job { config, spec, ..Default::default() }.start());
    assert_eq!((fake.count("last_traffic_class"), fake.count("last_sl")), (40, 3));
    drop(Job { spec, ..Default::default() }.start());
    assert_eq!((fake.count("last_traffic_class"), fake.count("last_sl")), (104, 0));
    drop(Job { config: Config { ib_gid_index: Some(1), ..Config::default() }, ..Default::default() }.start());
    assert_eq!(fake.count("last_sgid_index"), 1);
    fake.check_clean();
}

#[test]
fn relaxed_ordering_is_for_data_only() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    assert_eq!(fake.count("relaxed_regions"), 2, "one data window a rank");
    drop(ranks);
    drop(Job { config: Config { ib_relaxed_ordering: false, ..Config::default() }, ..Default::default() }.start());
    assert_eq!(fake.count("relaxed_regions"), 2, "the environment forbids it");
    fake.check_clean();
}

#[test]
fn devices_that_cannot_be_used_say_why() {
    let fake = Fake::take();
    let config = Config::default();
    let first = |config: &Config| devices(config).unwrap().into_iter().next().unwrap();
    let usable = first(&config);
    assert!(usable.is_usable());
    assert_eq!((usable.name.as_str(), usable.port, usable.speed_mbps), ("fake_0", 1, 100_000));
    assert_eq!(usable.guid, 0x1122_3344_5566_0000u64.to_be());
    assert_eq!(usable.gid.unwrap().index, 3);
    assert!(usable.atomics && usable.relaxed_ordering && usable.dma_buf);
    for (key, value, words) in [
        ("port_state", 1, "port 1 of fake_0 is down"),
        ("gids", 0, "has no GID"),
        ("link_layer", 0, "neither InfiniBand nor Ethernet"),
        ("open_errno", libc::EACCES.into(), "give this user read and write access"),
        ("open_errno", libc::ENOENT.into(), "load the module ib_uverbs"),
        ("max_qp_wr", 2, "too small"),
    ] {
        fake.set(key, value);
        let device = first(&config);
        let problem = device.problem.clone().unwrap_or_default();
        assert!(problem.contains(words), "{key}={value}: {problem}");
        assert!(VerbsFabric::open(&device, &config, Arc::default()).is_err());
        fake.set("reset", 0);
    }
    let hca = Config { ib_hca: Some("=fake_1:1".into()), ..Config::default() };
    let list = devices(&hca).unwrap();
    assert_eq!(list.iter().map(|d| d.is_usable()).collect::<Vec<_>>(), [false, true]);
    assert!(list[0].problem.as_ref().unwrap().contains("NCCL_IB_HCA==fake_1:1"));
    let problem = |config: Config| first(&config).problem.clone().unwrap();
    assert!(problem(Config { ib_gid_index: Some(9), ..Config::default() }).contains("NCCL_IB_GID_INDEX=9"));
    assert!(problem(Config { ib_pkey: 3, ..Config::default() }).contains("NCCL_IB_PKEY=3"));
    fake.set("dmabuf", 0);
    assert!(!first(&config).dma_buf);
    fake.set("devices", 0);
    assert!(devices(&config).unwrap().is_empty());
    drop((usable, list));
    fake.check_clean();
}

#[test]
fn hellos_that_do_not_fit_are_refused_by_rank() {
    let fake = Fake::take();
    let list = devices(&Config::default()).unwrap();
    let open = || VerbsFabric::open(&list[0], &Config::default(), Arc::new(Registry::default())).unwrap();
    let fabric = open();
    let good = fabric.hello();
    let world = World { rank: 0, nranks: 2 };
    let mut infiniband = good.clone();
    infiniband[8] = 1;
    let mut version_one = good.clone();
    version_one[13] = 1;
    let mut ipv6 = good.clone();
    ipv6[16..32].copy_from_slice(&[0x20; 16]);
    for (bytes, words) in [
        (&b"junk"[..], "the hello of rank 1"),
        (&infiniband[..], "rank 1 is on InfiniBand and rank 0 on RoCE"),
        (&version_one[..], "rank 1 uses a RoCE v1 GID"),
        (&ipv6[..], "rank 1 uses an IPv6 address and rank 0 an IPv4 one; set NCCL_IB_GID_INDEX"),
    ] {
        let e = fabric.join(world, &[&good, bytes]).unwrap_err();
        assert!(e.message().contains(words), "{e}");
    }
    let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    assert!(fabric.prepare_contexts(&spec).is_err(), "nobody joined");
    fabric.join(world, &[&good, &good]).unwrap();
    assert!(fabric.join(world, &[&good, &good]).is_err(), "once only");
    let (pending, slices) = fabric.prepare_contexts(&spec).unwrap();
    let e = fabric.finish_contexts(pending, &[&slices[..slices.len() / 2], b"?"]).err().unwrap();
    assert!(e.message().contains("rank 1"), "{e}");
    drop((fabric, list));
    fake.check_clean();
}

#[test]
fn a_failed_registration_says_what_to_do() {
    let fake = Fake::take();
    let fabrics = Job::default().fabrics();
    let memory = Memory::new(4096);
    let region = Region { id: 4, base: memory.base(), len: memory.len(), strict: false, dma_buf: None };
    fake.set("reg_errno", libc::ENOMEM.into());
    let e = fabrics[0].0.register(&region).err().unwrap();
    assert!(e.message().contains("window 4") && e.message().contains("ulimit -l"), "{e}");
    fake.set("reg_errno", libc::EFAULT.into());
    let e = fabrics[0].0.register(&region).err().unwrap();
    assert!(e.message().contains("DMA-BUF"), "{e}");
    fake.set("reg_errno", 0);
    let empty = fabrics[0].0.register(&Region { len: 0, ..region }).unwrap();
    assert_eq!((empty.lkey, empty.rkey), (0, 0));
    drop((empty, fabrics));
    fake.check_clean();
}

#[test]
fn dma_bufs_carry_data_and_flushes_read_them_through_the_device() {
    let fake = Fake::take();
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    let page = 4096u64;
    // SAFETY: makes a descriptor.
    let fd = unsafe { libc::memfd_create(c"fake-dma-buf".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: the descriptor is ours.
    assert_eq!(unsafe { libc::ftruncate(fd, 2 * page as i64) }, 0);
    // A device address that is no host address.
    let base = 0x7700_0000_0000;
    let region = Region { id: 9, base, len: page, strict: false, dma_buf: Some((fd, page)) };
    let window = a.fabric.register(&region).unwrap();
    b.data.memory.store(0, 0xfeed);
    let mut g = get(a, 0, b, 0, 8);
    g.local = base + 16;
    g.lkey = window.lkey;
    fake.set("late", 1);
    let before = fake.count("work_requests");
    // SAFETY: the window outlives the operation.
    let seq = unsafe { a.contexts[0].get(1, &g) }.unwrap();
    let flush = a.contexts[0].flushed(1).unwrap().expect("device memory needs a read");
    let later = issue(a, 1, &put(a, 0, b, 64, 8));
    finish(&a.contexts[0], 1, later);
    assert!(a.contexts[0].test(1, flush).unwrap() && a.contexts[0].test(1, seq).unwrap());
    assert_eq!(fake.count("work_requests") - before, 3, "a get, a local read, a put");
    let mut got = 0u64;
    // SAFETY: reads eight bytes into a local variable.
    assert_eq!(unsafe { libc::pread(fd, (&raw mut got).cast(), 8, page as i64 + 16) }, 8);
    assert_eq!(got, 0xfeed);
    assert_eq!(a.contexts[0].flushed(1).unwrap(), None);
    fake.set("dmabuf", 0);
    let e = a.fabric.register(&region).err().unwrap();
    assert!(e.message().contains("does not register DMA-BUFs"), "{e}");
    drop(window);
    // SAFETY: the descriptor is ours.
    unsafe { libc::close(fd) };
    drop(ranks);
    fake.check_clean();
}

#[test]
fn teardown_in_any_order_leaves_nothing() {
    let fake = Fake::take();
    for atomics in [1, 0] {
        fake.set("atomic_cap", atomics);
        for order in 0..4 {
            fake.set("late", 2);
            let mut ranks = Job::default().start();
            for _ in 0..1000 {
                let (a, b) = (&ranks[0], &ranks[1]);
                issue(a, 1, &Put { signal: signal(b, 0, 1), ..put(a, 0, b, 0, 8) });
            }
            match order {
                0 => drop(ranks),
                1 => ranks.reverse(),
                2 => {
                    // The fabric goes before its contexts.
                    let Rank { contexts, data, signals, fabric, .. } = ranks.remove(0);
                    drop(fabric);
                    drop(contexts);
                    drop((data, signals));
                }
                _ => {
                    let Rank { contexts, data, signals, fabric, .. } = ranks.remove(0);
                    drop(data.registration);
                    drop(signals.registration);
                    drop((fabric, contexts));
                }
            }
            fake.set("late", 0);
        }
        // Half-way: contexts that were prepared only.
        let fabrics = Job::default().fabrics();
        let spec = ContextSpec { contexts: 3, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        drop(fabrics[0].0.prepare_contexts(&spec).unwrap());
        drop(fabrics);
        fake.check_clean();
    }
}

#[test]
fn a_library_without_a_needed_symbol_is_a_sentence_and_without_an_optional_one_still_works() {
    let _fake = Fake::take();
    std::env::set_var("OXYGIN_LIBIBVERBS", without("ibv_create_qp"));
    let e = devices(&Config::default()).err().unwrap();
    assert!(e.sentence().contains("has no function ibv_create_qp"), "{e}");
    std::env::set_var("OXYGIN_LIBIBVERBS", without("ibv_reg_dmabuf_mr"));
    let list = devices(&Config::default()).unwrap();
    assert!(list[0].is_usable() && !list[0].dma_buf);
    std::env::set_var("OXYGIN_LIBIBVERBS", without("ibv_reg_mr_iova2"));
    let list = devices(&Config::default()).unwrap();
    assert!(list[0].is_usable() && !list[0].relaxed_ordering);
    drop(Job::default().start());
    std::env::set_var("OXYGIN_LIBIBVERBS", "/nonexistent/libibverbs.so.1");
    let e = devices(&Config::default()).err().unwrap();
    assert!(e.sentence().contains("install rdma-core"), "{e}");
}
