//! Ports and addresses: which a rank takes, how it comes from there to its peers, and what it registers of its own.

use crate::harness::*;
use oxygin::config::Config;
use oxygin::fabric::verbs::{devices, VerbsFabric};
use oxygin::fabric::{Context, ContextSpec, Fabric, Region};
use oxygin::rma::op::{Op, Payload, Value};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// On RoCE the kernel asks the network for a peer's hardware address, and where many ask at once answers get lost.
#[test]
fn a_queue_pair_that_times_out_on_its_way_to_a_peer_is_tried_again() {
    let fake = Fake::take();
    let config = Config { ib_modify_pause: Duration::from_millis(1), ..Config::default() };
    fake.set("rtr_timeouts", 5);
    let ranks = Job { config: config.clone(), ..Default::default() }.start();
    assert_eq!(fake.count("rtr_refusals"), 5);
    let seq = start_put(&ranks[0], 0, 1, &put(&ranks[0], 0, &ranks[1], 0, 8));
    finish(&ranks[0].contexts[0], 1, seq);
    drop(ranks);
    // For another reason only where that is asked for.
    for (all, refusals) in [(true, 2), (false, 1)] {
        fake.set("reset", 0);
        fake.set("rtr_timeouts", 2);
        fake.set("rtr_errno", libc::ENOMEM as i64);
        let job = Job { ranks: 1, config: Config { ib_modify_retry_all: all, ..config.clone() }, ..Default::default() };
        let fabrics = job.fabrics();
        let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let (pending, slices) = fabrics[0].0.prepare_contexts(&spec).unwrap();
        assert_eq!(fabrics[0].0.finish_contexts(pending, &[&slices]).is_ok(), all);
        assert_eq!(fake.count("rtr_refusals"), refusals);
        drop(fabrics);
    }
    // As often as asked for, and not beyond half of the time that set-up has.
    let brief = Config { ib_modify_retries: 1000, timeout: Duration::from_millis(200), ..config.clone() };
    for (config, most) in [(Config { ib_modify_retries: 3, ..config }, 4), (brief, 100)] {
        fake.set("reset", 0);
        fake.set("rtr_timeouts", 1000);
        let fabrics = Job { ranks: 1, config, ..Default::default() }.fabrics();
        let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let (pending, slices) = fabrics[0].0.prepare_contexts(&spec).unwrap();
        let since = Instant::now();
        let e = fabrics[0].0.finish_contexts(pending, &[&slices]).err().unwrap();
        assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
        assert!((2..=most).contains(&fake.count("rtr_refusals")), "{}", fake.count("rtr_refusals"));
        for part in ["to RTR", "to ::ffff:10.0.0.1", "ip route", "NCCL_IB_MQP_RETRY_CNT"] {
            assert!(e.message().contains(part), "{e}");
        }
        drop(fabrics);
    }
    fake.check_clean();
}

/// Of the options that one device offers the other takes those that it knows, and both connect with these. Where one
/// knows none, or nobody wants any, they connect without.
#[test]
fn devices_agree_on_options_of_their_connections() {
    let fake = Fake::take();
    let on = Config { ib_ece: true, ..Config::default() };
    for (options, config, agreed) in [
        ([0b1011, 0b0111], on.clone(), 0b0011),
        ([0b0111, 0b1011], on.clone(), 0b0011),
        ([0b1011, 0], on.clone(), 0),
        ([0, 0], on.clone(), 0),
        ([0b1011, 0b0111], Config { ib_ece: false, ..on.clone() }, 0),
    ] {
        fake.set("reset", 0);
        (0..2).for_each(|device| fake.set(&format!("ece@{device}"), options[device]));
        let spec = ContextSpec { contexts: 2, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let ranks = Job { spec, config, devices: 2, ..Default::default() }.start();
        let pairs = if agreed > 0 { 2 } else { 0 };
        assert_eq!(fake.count(&format!("ece_agreed_{agreed}")), pairs, "{options:?}");
        assert_eq!(fake.count("ece_apart"), 0, "{options:?}");
        for (from, to) in [(0, 1), (1, 0)] {
            let seq = start_put(&ranks[from], 0, to as u32, &put(&ranks[from], 0, &ranks[to], 0, 8));
            finish(&ranks[from].contexts[0], to as u32, seq);
        }
        drop(ranks);
    }
    // A device that refuses what the other end has taken already.
    fake.set("reset", 0);
    fake.set("ece", 3);
    let fabrics = Job { config: on, ..Default::default() }.fabrics();
    let spec = ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 };
    let (mut pendings, slices): (Vec<_>, Vec<_>) = fabrics.iter().map(|f| f.0.prepare_contexts(&spec).unwrap()).unzip();
    let agree = |me: usize, pending: &mut _| fabrics[me].0.agree(pending, &for_rank(&slices, me)).unwrap().unwrap();
    let agreed: Vec<Vec<u8>> = pendings.iter_mut().enumerate().map(|(me, pending)| agree(me, pending)).collect();
    fabrics[0].0.take_agreed(&mut pendings[0], &for_rank(&agreed, 0)).unwrap();
    fake.set("ece_refusals", 1);
    let e = fabrics[0].0.finish_contexts(pendings.remove(0), &for_rank(&slices, 0)).err().unwrap();
    assert!(["rank 1", "options 0x3", "NCCL_IB_ECE_ENABLE=0"].iter().all(|part| e.message().contains(part)), "{e}");
    drop((pendings, fabrics));
    fake.check_clean();
}

/// A port in several subnets has GIDs in each, and a fabric often leads through one of them only.
#[test]
fn the_environment_chooses_among_the_addresses_of_a_port() {
    let fake = Fake::take();
    fake.set("gids", 8);
    let parsed = |set: &[(&str, &str)]| {
        Config::from(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    };
    for (set, index) in [
        (&[][..], 3),
        (&[("NCCL_IB_ADDR_RANGE", "10.0.1.0/24")], 5),
        (&[("NCCL_IB_ADDR_RANGE", "10.0.1.0/24"), ("NCCL_IB_ROCE_VERSION_NUM", "1")], 4),
        (&[("NCCL_IB_ADDR_RANGE", "10.0.1.0/24"), ("NCCL_IB_GID_INDEX", "1")], 1),
        (&[("NCCL_IB_ADDR_FAMILY", "AF_INET6")], 7),
        (&[("NCCL_IB_ADDR_RANGE", "192.0.2.0/24")], 3),
    ] {
        let config = parsed(set);
        assert_eq!(devices(&config).unwrap()[1].gid.unwrap().index, index, "{set:?}");
        let ranks = Job { devices: 2, config, ..Default::default() }.start();
        assert_eq!(fake.count("last_sgid_index"), i64::from(index), "{set:?}");
        let seq = start_put(&ranks[0], 0, 1, &put(&ranks[0], 0, &ranks[1], 0, 8));
        finish(&ranks[0].contexts[0], 1, seq);
    }
    fake.check_clean();
}

/// Where `ibv_fork_init` was called and the kernel or the library is old, forked children lack every page that
/// something is registered in: with a word of the heap they lack other memory of the program, and crash at it.
#[test]
fn what_the_fabric_registers_of_its_own_is_in_pages_of_its_own() {
    let fake = Fake::take();
    for atomics in [1, 0] {
        fake.set("reset", 0);
        fake.set("atomic_cap", atomics);
        let fabrics = Job::default().fabrics();
        let contexts = connect(&fabrics, &Job::default().spec);
        assert!(fake.count("live_regions") >= if atomics == 1 { 2 } else { 4 });
        let window = Memory::new(64);
        let region = Region { id: 0, base: window.base(), len: 64, strict: false, dma_buf: None };
        let there = fabrics[1].0.register(&region).unwrap();
        let within = fake.count("regions_within_pages");
        let payload = Payload::new(&7u64.to_ne_bytes()).unwrap();
        let (remote, rkey) = (window.base(), there.rkey);
        let value = Value { payload, rkey, remote, signal: None, more: false };
        // SAFETY: the window outlives the operation.
        let posted = unsafe { contexts[0][0].post(1, &[Op::Value(value)]) }.unwrap();
        finish(&contexts[0][0], 1, posted.last);
        assert_eq!(window.word(0), 7);
        let own = i64::from(window.base() % 4096 != 0);
        assert_eq!((fake.count("regions_within_pages"), within), (own, own), "none but the window");
        drop((contexts, there, fabrics));
    }
    fake.check_clean();
}

/// GPUs that share several NICs take them in the order of this list, so that it has to be the same on all hosts.
#[test]
fn devices_are_listed_by_their_pci_addresses() {
    let fake = Fake::take();
    fake.set("devices", 5);
    let sysfs = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sysfs-{}", std::process::id()));
    let places = [
        ("fake_0", "0000:c0:00.0"),
        ("fake_1", "0000:3b:02.1"),
        ("fake_3", "0000:3b:00.1"),
        ("fake_4", "0000:5e:00.1/mlx5_core.sf.4"),
    ];
    for (name, function) in places {
        let real = sysfs.join("pci0000:00").join(function);
        std::fs::create_dir_all(&real).unwrap();
        std::fs::create_dir_all(sysfs.join(name)).unwrap();
        std::os::unix::fs::symlink(real, sysfs.join(name).join("device")).unwrap();
    }
    std::env::set_var("FAKE_VERBS_SYSFS", &sysfs);
    let listed = |config: Config| -> Vec<_> {
        let place = |path: String| path.rsplit_once('/').unwrap().1.to_owned();
        devices(&config).unwrap().into_iter().map(|d| (d.name, d.pci_path.map(place).unwrap_or_default())).collect()
    };
    let usual = listed(Config::default());
    let other = listed(Config { ib_pci_order: false, ib_merge_vfs: false, ..Config::default() });
    std::env::remove_var("FAKE_VERBS_SYSFS");
    std::fs::remove_dir_all(sysfs).unwrap();
    let are = |list: Vec<(String, String)>, wanted: [(&str, &str); 5]| {
        assert_eq!(list, wanted.map(|(name, place)| (name.to_owned(), place.to_owned())));
    };
    let (merged, of_bus) = ("0000:3b:00.0", "0000:3b:02.0");
    let (alone, of_card) = (("fake_0", "0000:c0:00.0"), ("fake_4", "0000:5e:00.0"));
    are(usual, [("fake_3", merged), ("fake_1", merged), of_card, alone, ("fake_2", "")]);
    are(other, [alone, ("fake_1", of_bus), ("fake_2", ""), ("fake_3", merged), of_card]);
    fake.check_clean();
}

/// Old kernels tell no types of GIDs. RoCE needs them; on InfiniBand there is one.
#[test]
fn infiniband_needs_no_types_of_gids() {
    let fake = Fake::take_from(&without("_ibv_query_gid_ex"));
    let of_first = || devices(&Config::default()).unwrap().swap_remove(0);
    // What stands for sysfs has none either.
    assert!(of_first().problem.unwrap().contains("has no GID"));
    fake.set("link_layer", 1);
    let first = of_first();
    assert!(first.is_usable());
    assert_eq!(first.gid.unwrap().index, 0);
    drop(first);
    fake.check_clean();
}

/// Drivers of some devices do not say how long messages may be, and refuse data inside work requests in their own way.
#[test]
fn what_a_device_does_not_say_or_have_is_done_without() {
    let fake = Fake::take();
    fake.set("max_msg_sz_unsaid", 1);
    fake.set("max_inline", 0);
    fake.set("inline_errno", libc::EOPNOTSUPP.into());
    let ranks = Job::default().start();
    let [a, b] = &ranks[..] else { unreachable!() };
    a.data.memory.store(0, 7);
    finish(&a.contexts[0], 1, start_put(a, 0, 1, &put(a, 0, b, 8, 8)));
    assert_eq!(b.data.memory.word(1), 7);
    drop(ranks);
    fake.check_clean();
}

#[test]
fn devices_without_reliable_connections_are_left_alone() {
    let fake = Fake::take();
    // As EFA: no transport that libibverbs has a name for.
    fake.set("transport@0", 4);
    fake.set("open_errno@0", libc::EIO.into());
    let list = devices(&Config::default()).unwrap();
    assert!(list[0].problem.as_ref().unwrap().contains("no reliable connections"), "{:?}", list[0].problem);
    assert!(list[1].is_usable());
    drop(list);
    fake.check_clean();
}

/// Devices are listed once a process, and each communicator opens its own.
#[test]
fn a_port_is_looked_at_again_when_it_is_opened() {
    let fake = Fake::take();
    let list = devices(&Config::default()).unwrap();
    let open = || VerbsFabric::open(&list[0], &Config::default(), Arc::default());
    let mtu = |fabric: VerbsFabric| fabric.hello()[9];
    assert_eq!(mtu(open().unwrap()), 3);
    fake.set("active_mtu", 2);
    assert_eq!(mtu(open().unwrap()), 2);
    let gid = |fabric: VerbsFabric| fabric.hello()[28..32].to_vec();
    assert_eq!(gid(open().unwrap()), [10, 0, 0, 1]);
    // Its addresses go, but for a link-local one.
    fake.set("gids", 2);
    assert_eq!(gid(open().unwrap()), [0, 0, 0, 1]);
    fake.set("port_state", 1);
    assert!(open().err().unwrap().message().contains("port 1 of fake_0 is down; check cable"));
    drop(list);
    fake.check_clean();
}
