//! Faults on demand, at every step: nothing is left, every rank is told, and the sentence names the step.

use crate::harness::{here, Fake, Registered, V14_2};
use crate::support::apart::is_elsewhere;
use crate::support::common::{job, refused_job};
use crate::support::kernel::Kernel;
use crate::support::logged::{collect, lines, listen};
use crate::support::nic::Ask;
use nccl_plugin_api::NcclResult;

/// Two ranks whose createContext fails, and then does not.
fn refused_set(fake: &Fake, ask: Ask, fault: impl Fn(&Fake) + Sync, mend: impl Fn(&Fake) + Sync) -> Vec<String> {
    collect();
    job(2, 0, |r| {
        listen();
        let _window = Registered::new(r, V14_2);
        r.job.barrier.wait();
        if r.rank == 0 {
            fault(fake);
        }
        r.job.barrier.wait();
        let refused = V14_2.create(r, ask);
        assert!(refused.is_err(), "it was to be refused");
        r.job.barrier.wait();
        if r.rank == 0 {
            for what in ["qps", "cqs", "umems", "uars", "channels"] {
                assert_eq!(fake.count(&format!("live_mlx5_{what}")), 0, "{what} are left");
            }
            mend(fake);
        }
        r.job.barrier.wait();
        // Nobody is out of step, and nothing is used up.
        let kernel = Kernel::new(r, V14_2, ask, &here);
        r.job.barrier.wait();
        assert!(!kernel.has_error());
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.check_clean();
    let said = lines().iter().filter(|line| line.0 <= log::Level::Warn).map(|line| line.1.clone()).collect();
    lines().clear();
    said
}

#[track_caller]
fn assert_said(said: &[String], words: &[&str]) {
    assert!(said.iter().any(|line| words.iter().all(|word| line.contains(word))), "{words:?} in {said:#?}");
}

#[test]
fn every_command_is_refused_in_turn() {
    let fake = Fake::take();
    // A rank with 2 peers in 1 context, with companions: 4 queue pairs and 3 responders.
    let ask = Ask { signals: 2, counters: 2, depth: 32, ..Ask::default() };
    for (opcode, name, times) in [
        (0x400, "CREATE_CQ", [1, 4]),
        (0x500, "CREATE_QP", [1, 7]),
        (0x502, "RST2INIT_QP", [1, 7]),
        (0x503, "INIT2RTR_QP", [2, 7]),
        (0x504, "RTR2RTS_QP", [1, 5]),
    ] {
        for nth in times {
            let fault = |fake: &Fake| {
                fake.set("mlx5_fail_opcode", opcode);
                fake.set("mlx5_fail_in", nth);
            };
            let said = refused_set(&fake, ask, fault, |fake| fake.set("mlx5_fail_opcode", 0));
            assert_said(&said, &[name, "status 0x3, syndrome 0x123456", "; "]);
            assert_said(&said, &["createContext: rank ", "fake_0:1", "context 0"]);
            assert_eq!(said.len(), 2, "a line a rank: {said:#?}");
        }
    }
}

#[test]
fn all_else_that_a_set_needs_is_refused_in_turn() {
    let fake = Fake::take();
    let cases: [(&str, i64, &[&str]); 7] = [
        ("mlx5_uar_errno", 12, &["a doorbell page", "and the page that all share"]),
        ("mlx5_umem_errno", 12, &["bytes for queues", "ulimit -l"]),
        ("mlx5_channel_errno", 95, &["no channel for the device's events", "Linux 5.3"]),
        ("mlx5_subscribe_errno", 12, &["events of", "of queue pair"]),
        ("reg_errno", 12, &["registering", "locked memory"]),
        ("ah_errno", 110, &["the next hop to", "ip neighbour"]),
        ("mlx5_cap_gone", 0, &[]),
    ];
    for (switch, errno, words) in cases.into_iter().filter(|case| !case.2.is_empty()) {
        let said = refused_set(&fake, Ask::default(), |fake| fake.set(switch, errno), |fake| fake.set(switch, 0));
        assert_said(&said, words);
    }
    // The second of the two umems.
    let fault = |fake: &Fake| {
        fake.set("mlx5_umem_errno", 12);
        fake.set("mlx5_umem_in", 2);
    };
    let mend = |fake: &Fake| {
        fake.set("mlx5_umem_errno", 0);
        fake.set("mlx5_umem_in", 0);
    };
    refused_set(&fake, Ask::default(), fault, mend);
}

/// Two ranks that do not come together. What was said of it.
fn refused_connect(fake: &Fake, why: &str) -> Vec<String> {
    collect();
    refused_job(2, 0, why, listen);
    fake.check_clean();
    let said = lines().iter().map(|line| line.1.clone()).collect();
    said
}

#[test]
fn what_a_device_lacks_is_said_at_connect() {
    let fake = Fake::take();
    let capability = |name: &str| format!("mlx5_cap.{name}");
    for (switch, value, normal, words) in [
        ("mlx5".to_owned(), 0, 1, ["is no mlx5 device for /", "OXYGIN_LIBMLX5"]),
        ("mlx5_open_errno".into(), 95, 0, ["cannot be opened for DevX commands", "mlx5_ib"]),
        (capability("rc"), 0, 1, ["reliable connections (rc)", "ConnectX-6 Dx"]),
        (capability("atomic"), 0, 1, ["atomic operations (atomic)", "ConnectX-6 Dx"]),
        ("mlx5_uar_errno".into(), 12, 0, ["a doorbell page", "and the page that all share"]),
        ("mlx5_umem_errno".into(), 14, 0, ["for queues", "cannot be given to the device"]),
        ("mlx5_channel_errno".into(), 95, 0, ["device's events", "rdma-core 25"]),
    ] {
        fake.set(&switch, value);
        let said = refused_connect(&fake, &switch);
        fake.set(&switch, normal);
        assert_said(&said, &["OXYGIN_ENGINE=gdaki (rank 0)", words[0], words[1]]);
    }
    fake.set("mlx5_cap.send_dbr_mode_no_dbr_ext", 0);
    std::env::set_var("NCCL_GDAKI_USE_RELIABLE_DB", "1");
    let said = refused_connect(&fake, "no record");
    assert_said(&said, &["send_dbr_mode_no_dbr_ext", "NCCL_GDAKI_USE_RELIABLE_DB to 0 or 2"]);
    std::env::remove_var("NCCL_GDAKI_USE_RELIABLE_DB");
}

#[test]
fn a_library_that_lacks_a_function_is_named_with_the_version_that_has_it() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    for (function, words) in [
        ("mlx5dv_devx_query_eqn", ["MLX5_1.7", "rdma-core to version 21"]),
        ("mlx5dv_devx_get_event", ["MLX5_1.11", "rdma-core to version 25"]),
    ] {
        let library = fake_verbs::mlx5::without(function, folder).unwrap();
        let fake = Fake::take_with(&library);
        assert_said(&refused_connect(&fake, function), &[function, words[0], words[1]]);
    }
    // Only GPU memory needs this one, or a kernel that knows what it says.
    let library = fake_verbs::mlx5::without("mlx5dv_devx_umem_reg_ex", folder).unwrap();
    for (library, pages) in [(&*library, 1), (std::path::Path::new(fake_verbs::mlx5::LIBRARY), 0)] {
        let fake = Fake::take_with(library);
        fake.set("mlx5_umem_pages", pages);
        job(2, 0, |r| {
            let kernel = Kernel::new(r, V14_2, Ask::default(), &here);
            r.job.barrier.wait();
            kernel.destroy();
        });
        fake.check_clean();
    }
}

#[test]
fn counters_need_entries_that_wait_and_depth_has_an_end() {
    let fake = Fake::take();
    fake.set("mlx5_cap.cd", 0);
    fake.set("mlx5_cap.log_max_qp_sz", 9);
    fake.set("mlx5_cap.log_max_qp", 4);
    collect();
    job(2, 0, |r| {
        listen();
        let without = Ask { counters: 0, ..Ask::default() };
        assert_eq!(V14_2.create(r, Ask::default()).err(), Some(NcclResult::INVALID_USAGE));
        assert_eq!(V14_2.create(r, Ask { depth: 1024, ..without }).err(), Some(NcclResult::INVALID_ARGUMENT));
        assert_eq!(V14_2.create(r, Ask { depth: -1, ..without }).err(), Some(NcclResult::INVALID_ARGUMENT));
        assert_eq!(V14_2.create(r, Ask { contexts: 6, ..without }).err(), Some(NcclResult::INVALID_ARGUMENT));
        let kernel = Kernel::new(r, V14_2, Ask { depth: 512, ..without }, &here);
        r.job.barrier.wait();
        kernel.destroy();
    });
    let said: Vec<String> = lines().iter().map(|line| line.1.clone()).collect();
    // The software NIC alone would be refused in its turn.
    assert_said(&said, &["nCounters > 0", "(cd)", "OXYGIN_ENGINE=gdaki-soft on all ranks"]);
    assert_said(&said, &["queueDepth: 1024 slots", "up to 512"]);
    assert_said(&said, &["nContexts = 6 makes 18 queue pairs", "fake_0:1 has 16"]);
    fake.check_clean();
}

#[test]
fn a_device_that_does_not_say_that_queues_may_be_overrun_is_tried() {
    let fake = Fake::take();
    fake.set("mlx5_cap.cq_oi", 0);
    let fault = |fake: &Fake| {
        fake.set("mlx5_fail_opcode", 0x400);
        fake.set("mlx5_fail_in", 1);
    };
    // Refused, that is a likely cause; the second try has its queues.
    let said = refused_set(&fake, Ask::default(), fault, |fake| fake.set("mlx5_fail_opcode", 0));
    assert_said(&said, &["CREATE_CQ", "status 0x3", "cq_oi"]);
}

#[test]
fn a_device_that_ends_nothing_holds_nobody_up() {
    // What it has not ended stays.
    if is_elsewhere(concat!(module_path!(), "::a_device_that_ends_nothing_holds_nobody_up")) {
        return;
    }
    let fake = Fake::take();
    collect();
    job(2, 0, |r| {
        listen();
        let kernel = Kernel::new(r, V14_2, Ask::default(), &here);
        r.job.barrier.wait();
        if r.rank == 0 {
            fake.set("mlx5_destroy_errno", 5);
        }
        r.job.barrier.wait();
        kernel.destroy();
    });
    ended_nothing(&fake);
}

#[test]
fn what_a_device_does_not_end_of_a_set_that_came_to_nothing_is_said() {
    if is_elsewhere(concat!(module_path!(), "::what_a_device_does_not_end_of_a_set_that_came_to_nothing_is_said")) {
        return;
    }
    let fake = Fake::take();
    collect();
    job(2, 0, |r| {
        listen();
        if r.rank == 0 {
            fake.set("mlx5_destroy_errno", 5);
            fake.set("mlx5_fail_opcode", 0x504);
            fake.set("mlx5_fail_in", 1);
        }
        r.job.barrier.wait();
        assert!(V14_2.create(r, Ask::default()).is_err());
    });
    ended_nothing(&fake);
}

/// Both ranks' devices refused to end queues: that is said, and what these need is still there.
fn ended_nothing(fake: &Fake) {
    let said: Vec<String> = lines().iter().map(|line| line.1.clone()).collect();
    assert_eq!(said.iter().filter(|line| line.contains("the device refused to end queues")).count(), 2, "{said:#?}");
    assert!(fake.count("live_mlx5_qps") > 0 && fake.count("live_mlx5_umems") > 0);
    assert_eq!((fake.count("misuse"), fake.count("live_pds")), (0, 2));
}
