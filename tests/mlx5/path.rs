//! The ways that queue pairs go, and how they are rung.

use crate::harness::{here, on_kernels, Fake, Registered, V14_2};
use crate::support::apart::is_elsewhere;
use crate::support::common::{job, Rank};
use crate::support::kernel::Kernel;
use crate::support::logged::{collect, lines, listen};
use crate::support::nic::{write, Ask};
use nccl_plugin_api::{NcclResult, PTR_HOST};

fn one_put(r: &Rank, kernel: &Kernel, src: &Registered, dst: &Registered) {
    src.set(0, 3);
    let put = write(kernel.at(dst.gin, 1 - r.rank, 8), kernel.own(src.gin, 0), 8);
    kernel.qp(0, 1 - r.rank).post(&[put, kernel.add_signal(0, 1 - r.rank, 0, 1)]);
    kernel.wait_signal(0, 0, 1);
    assert_eq!(dst.get(1), 3);
    r.job.barrier.wait();
}

#[test]
fn what_the_environment_says_of_the_way_is_what_queue_pairs_have() {
    // The list of devices is the process's: what a device is cannot change in it.
    if is_elsewhere(concat!(module_path!(), "::what_the_environment_says_of_the_way_is_what_queue_pairs_have")) {
        return;
    }
    let fake = Fake::take();
    let environment =
        [("NCCL_IB_TC", "104"), ("NCCL_IB_SL", "3"), ("NCCL_IB_TIMEOUT", "17"), ("NCCL_IB_RETRY_CNT", "5")];
    environment.iter().for_each(|(name, value)| std::env::set_var(name, value));
    fake.set("active_mtu", 4);
    fake.set("max_qp_rd_atom", 8);
    on_kernels(2, V14_2, Ask::default(), |r, kernel, src, dst| {
        one_put(r, &kernel, src, dst);
        kernel.destroy();
    });
    environment.iter().for_each(|(name, _)| std::env::remove_var(name));
    let seen = ["mlx5_dscp", "mlx5_ack_timeout", "mlx5_retry_count", "mlx5_path_mtu"].map(|key| fake.count(key));
    assert_eq!(seen, [104 >> 2, 17, 5, 4]);
    assert_eq!((fake.count("mlx5_sra_max"), fake.count("mlx5_rra_max")), (3, 3));
    fake.check_clean();
}

#[test]
fn contexts_are_spread_over_the_ports_of_a_lag() {
    let fake = Fake::take();
    for (name, value) in [("lag_tx_port_affinity", 1), ("num_lag_ports", 2)] {
        fake.set(&format!("mlx5_cap.{name}"), value);
    }
    // The last is of firmware that forgets what it was told before the queue pair sent.
    for (contexts, last, forgets) in [(1, 1, 0), (2, 2, 0), (3, 1, 0), (2, 2, 1)] {
        fake.set("mlx5_lag_forgotten", forgets);
        fake.set("mlx5_cap.rts2rts_lag_tx_port_affinity", forgets);
        on_kernels(2, V14_2, Ask { contexts, counters: 0, ..Ask::default() }, |r, kernel, src, dst| {
            one_put(r, &kernel, src, dst);
            kernel.destroy();
        });
        assert_eq!(fake.count("mlx5_lag_port"), last, "{contexts} contexts");
    }
    // One port is none to choose.
    fake.set("mlx5_cap.num_lag_ports", 1);
    on_kernels(2, V14_2, Ask::default(), |r, kernel, src, dst| {
        one_put(r, &kernel, src, dst);
        kernel.destroy();
    });
    assert_eq!(fake.count("mlx5_lag_port"), 2, "what was told before");
    fake.set("mlx5_cap.num_lag_ports", 2);
    // A device that takes none then has the port of before.
    fake.set("mlx5_fail_opcode", 0x505);
    fake.set("mlx5_fail_in", 1);
    on_kernels(2, V14_2, Ask { contexts: 2, ..Ask::default() }, |r, kernel, src, dst| {
        one_put(r, &kernel, src, dst);
        kernel.destroy();
    });
    fake.check_clean();
}

#[test]
fn a_device_that_is_set_to_real_time_has_queue_pairs() {
    let fake = Fake::take();
    for clocks in [1, 2] {
        fake.set("mlx5_cap.qp_ts_format", clocks);
        on_kernels(2, V14_2, Ask { counters: 2, ..Ask::default() }, |r, kernel, src, dst| {
            one_put(r, &kernel, src, dst);
            kernel.destroy();
        });
        fake.check_clean();
    }
}

#[test]
fn infiniband_goes_by_lid() {
    if is_elsewhere(concat!(module_path!(), "::infiniband_goes_by_lid")) {
        return;
    }
    let fake = Fake::take();
    fake.set("link_layer", 1);
    on_kernels(2, V14_2, Ask::default(), |r, kernel, src, dst| {
        one_put(r, &kernel, src, dst);
        kernel.destroy();
    });
    fake.check_clean();
}

#[test]
fn a_page_that_all_share_does_where_there_is_none_of_ones_own() {
    let fake = Fake::take();
    fake.set("mlx5_uar_dedicated", 0);
    on_kernels(2, V14_2, Ask { contexts: 3, ..Ask::default() }, |r, kernel, src, dst| {
        one_put(r, &kernel, src, dst);
        assert_eq!(kernel.qp(0, 0).view.bell, kernel.qp(2, 1).view.bell);
        kernel.destroy();
    });
    fake.check_clean();
    fake.set("mlx5_uar_dedicated", 1);
    on_kernels(2, V14_2, Ask { contexts: 3, ..Ask::default() }, |r, kernel, _, _| {
        assert_ne!(kernel.qp(0, 0).view.bell, kernel.qp(2, 1).view.bell);
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.check_clean();
}

#[test]
fn doorbells_have_no_record_where_that_is_asked_for_and_possible() {
    let fake = Fake::take();
    // Here a doorbell counts by itself, not what a record says.
    fake.set("mlx5_strict_doorbells", 1);
    for (asked, can, handler) in [("0", 1, 2), ("1", 1, 10), ("2", 1, 10), ("2", 0, 2)] {
        std::env::set_var("NCCL_GDAKI_USE_RELIABLE_DB", asked);
        fake.set("mlx5_cap.send_dbr_mode_no_dbr_ext", can);
        on_kernels(2, V14_2, Ask::default(), |r, kernel, src, dst| {
            assert_eq!([0, 1].map(|peer| kernel.handler(0, peer)), [handler; 2], "asked {asked}");
            // The doorbell without a record is another register: 0x600 behind the page's beginning.
            assert_eq!(kernel.qp(0, 0).view.bell % 4096 == 0x600, handler == 10);
            one_put(r, &kernel, src, dst);
            kernel.destroy();
        });
        fake.check_clean();
    }
    std::env::remove_var("NCCL_GDAKI_USE_RELIABLE_DB");
}

#[test]
fn queues_that_are_too_deep_for_that_have_a_record() {
    let fake = Fake::take();
    fake.set("mlx5_strict_doorbells", 1);
    // They share one page, which has both registers.
    fake.set("mlx5_uar_dedicated", 0);
    fake.set("mlx5_cap.log_max_send_dbr_less_qp_sq", 5);
    std::env::set_var("NCCL_GDAKI_USE_RELIABLE_DB", "2");
    on_kernels(2, V14_2, Ask { depth: 64, ..Ask::default() }, |r, deep, src, dst| {
        let flat = Kernel::new(r, V14_2, Ask { depth: 32, ..Ask::default() }, &here);
        assert_eq!([&deep, &flat].map(|kernel| kernel.handler(0, 0)), [2, 10]);
        assert_eq!([&deep, &flat].map(|kernel| kernel.qp(0, 0).view.bell % 4096), [0x800, 0x600]);
        one_put(r, &deep, src, dst);
        one_put(r, &flat, src, dst);
        deep.destroy();
        flat.destroy();
    });
    std::env::set_var("NCCL_GDAKI_USE_RELIABLE_DB", "1");
    collect();
    job(2, 0, |r| {
        listen();
        let deep = Ask { depth: 64, ..Ask::default() };
        assert_eq!(V14_2.create(r, deep).err(), Some(NcclResult::INVALID_ARGUMENT));
        let kernel = Kernel::new(r, V14_2, Ask { depth: 32, ..Ask::default() }, &here);
        assert_eq!(kernel.handler(0, 0), 10);
        r.job.barrier.wait();
        kernel.destroy();
    });
    std::env::remove_var("NCCL_GDAKI_USE_RELIABLE_DB");
    let has_said = |words: &str| lines().iter().any(|line| line.1.contains(words));
    assert!(has_said("64 slots; the device has queues without a doorbell record of up to 32; set NCCL_GDAKI_USE"));
    fake.check_clean();
}

#[test]
fn windows_that_begin_inside_a_page_are_refused() {
    let fake = Fake::take();
    collect();
    job(2, 0, |r| {
        listen();
        let memory = r.not_registered(2048);
        let at = (memory.words.as_ptr() as u64).next_multiple_of(4096) + 64;
        let (mut mhandle, mut gin) = (std::ptr::null_mut(), std::ptr::null_mut());
        let register = oxygin::vtable::gin_v14::ncclGinPlugin_v14.reg_mr_sym.unwrap();
        // SAFETY: memory that stays, and pointers to locals.
        let refused = unsafe { register(r.coll, at as *mut _, 64, PTR_HOST, 0, &mut mhandle, &mut gin) };
        assert_eq!(refused, NcclResult::INVALID_ARGUMENT);
        // Nobody is out of step.
        let window = Registered::new(r, V14_2);
        assert_ne!(window.gin, 0);
    });
    assert!(lines().iter().any(|line| line.1.contains("page border")), "{:#?}", lines());
    fake.check_clean();
}

#[test]
fn calls_of_nccls_proxy_find_no_contexts() {
    let fake = Fake::take();
    job(2, 0, |r| {
        let mut ctx = std::ptr::null_mut();
        let mut config = nccl_plugin_api::rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        let create = oxygin::vtable::rma_v16::ncclRmaPlugin_v16.create_context.unwrap();
        // SAFETY: pointers to locals.
        assert_eq!(unsafe { create(r.coll, &mut config, &mut ctx) }, NcclResult::INVALID_USAGE);
        let kernel = Kernel::new(r, V14_2, Ask::default(), &here);
        r.job.barrier.wait();
        kernel.destroy();
    });
    fake.check_clean();
}
