//! What a rank tries at connect before its device's queue pairs are handed to kernels, and what comes of it.

use crate::harness::{here, verbs_path, Fake, Registered, V14_2};
use crate::support::children::again;
use crate::support::common::{job_begun, refused_job};
use crate::support::cuda::Cuda;
use crate::support::kernel::Kernel;
use crate::support::logged::{collect, lines, listen, said};
use crate::support::nic::{write, Ask};
use oxygin::comm::fabrics::first_serves_kernels;
use oxygin::config::Config;

const TRIED: &str = "a put with a signal and a counter through a queue pair to itself, written and rung by ";

/// The fake, with `OXYGIN_ENGINE` and `OXYGIN_GDAKI_TRIAL` at these values; device code is to write this library's
/// queues, whichever.
fn take(engine: &str, trial: &str) -> Fake {
    let fake = Fake::take();
    std::env::set_var("NCCL_GIN_TYPE", "3");
    std::env::set_var("OXYGIN_ENGINE", engine);
    std::env::set_var("OXYGIN_GDAKI_TRIAL", trial);
    collect();
    fake
}

#[track_caller]
fn assert_said(times: usize, words: &[&str]) {
    assert_eq!(said(words), times, "{words:?} in {:#?}", lines());
}

/// Two ranks that take the software NIC, for this reason.
#[track_caller]
fn others_are_taken(fake: &Fake, words: &[&str]) {
    job_begun(2, 0, |_| listen(), |_| ());
    assert_said(2, &[&["engine gdaki-soft chosen; not gdaki: rank "], words].concat());
    fake.check_clean();
}

/// Two ranks that are refused, for this reason.
#[track_caller]
fn refused(fake: &Fake, words: &[&str]) {
    refused_job(2, 0, "a device that does not serve", listen);
    assert!(said(&[&["OXYGIN_ENGINE=gdaki (rank 0): "], words].concat()) > 0, "{words:?}: {:#?}", lines());
    fake.check_clean();
}

#[test]
fn a_device_that_was_tried_is_taken_by_itself() {
    let fake = take("auto", "1");
    job_begun(
        2,
        0,
        |_| listen(),
        |r| {
            let (src, dst) = (Registered::new(r, V14_2), Registered::new(r, V14_2));
            let kernel = Kernel::new(r, V14_2, Ask::default(), &here);
            src.set(0, 7);
            r.job.barrier.wait();
            let peer = 1 - r.rank;
            let put = write(kernel.at(dst.gin, peer, 8), kernel.own(src.gin, 0), 8);
            kernel.qp(0, peer).post(&[put, kernel.add_signal(0, peer, 1, 1)]);
            kernel.wait_signal(0, 1, 1);
            assert_eq!(dst.get(1), 7);
            r.job.barrier.wait();
            kernel.destroy();
        },
    );
    assert_said(2, &["engine gdaki chosen (rank "]);
    assert_said(2, &["fake_0:1: ", TRIED, "a processor, arrived"]);
    // Users are told of what they run alone.
    assert!(!lines().iter().any(|line| line.0 < log::Level::Debug && line.1.contains("trial")), "{:#?}", lines());
    fake.check_clean();
}

#[test]
fn a_kernel_tries_it_where_there_is_a_gpu() {
    let fake = take("auto", "1");
    let cuda = Cuda::meet(&verbs_path());
    // The doorbell alone counts, by whichever register, and by way of this process where the GPU cannot ring.
    fake.set("mlx5_strict_doorbells", 1);
    fake.set("mlx5_cap.log_max_send_dbr_less_qp_sq", 3);
    for (reliable, is_refused) in [("0", false), ("1", false), ("2", false), ("0", true)] {
        std::env::set_var("NCCL_GDAKI_USE_RELIABLE_DB", reliable);
        cuda.refuse_registers(if is_refused { 801 } else { 0 });
        job_begun(
            2,
            0,
            |rank| {
                listen();
                cuda.enter(rank as i32)
            },
            |_| (),
        );
        assert_said(2, &["engine gdaki chosen (rank "]);
        assert_said(2, &["fake_0:1: ", TRIED, "a kernel, arrived"]);
        fake.check_clean();
        cuda.check();
        lines().clear();
    }
    std::env::remove_var("NCCL_GDAKI_USE_RELIABLE_DB");
}

#[test]
fn a_device_that_does_nothing_or_lies_is_not_taken() {
    for (switch, words) in [
        ("stopped", ["did not complete within 1s: it lost a doorbell or a completion entry", "is in state RTS"]),
        (
            "mlx5_lost_writes",
            ["completed, and word 0 of what it was to write is 0x0000000000000000", "is in state RTS"],
        ),
    ] {
        let fake = take("auto", "1");
        fake.set(switch, 1);
        others_are_taken(&fake, &["fake_0:1: ", TRIED, words[0], words[1]]);
        drop(fake);
        let fake = take("gdaki", "1");
        fake.set(switch, 1);
        refused(&fake, &[TRIED, words[0], "set OXYGIN_GDAKI_TRIAL=0"]);
    }
}

#[test]
fn one_rank_whose_device_refuses_an_entry_has_all_take_another_engine() {
    let fake = take("auto", "1");
    // The first of all entries, of whichever rank.
    fake.set("mlx5_error_in", 1);
    fake.set("mlx5_error_syndrome", 0x04);
    others_are_taken(&fake, &[TRIED, "failed: its completion entry 0 has opcode 13 and syndrome 0x04"]);
}

#[test]
fn before_ranks_meet_each_knows_of_its_own_device() {
    let fake = take("auto", "1");
    assert!(first_serves_kernels(&Config::from_env()));
    fake.set("stopped", 1);
    assert!(!first_serves_kernels(&Config::from_env()));
    assert_said(1, &["no queues of an RDMA device's for kernels: fake_0:1: ", TRIED, "did not complete"]);
    fake.check_clean();
}

#[test]
fn a_device_without_counters_is_taken_by_name_alone() {
    let fake = take("auto", "1");
    fake.set("mlx5_cap.cd", 0);
    others_are_taken(
        &fake,
        &["fake_0:1 has no entries that wait for completions (cd)", "OXYGIN_ENGINE=gdaki takes it"],
    );
    drop(fake);
    let fake = take("gdaki", "1");
    fake.set("mlx5_cap.cd", 0);
    job_begun(2, 0, |_| listen(), |_| ());
    assert_said(2, &["engine gdaki chosen (rank "]);
    assert_said(2, &[TRIED, "arrived"]);
    fake.check_clean();
}

#[test]
fn what_a_companion_does_wrong_is_found() {
    let fake = take("auto", "1");
    // Its wait is the third entry of the one rank that there is.
    fake.set("mlx5_error_in", 3);
    fake.set("mlx5_error_syndrome", 0x02);
    job_begun(1, 0, |_| listen(), |_| ());
    assert_said(1, &["engine gdaki-soft chosen", TRIED, "failed: its companion's completion entry 0", "syndrome 0x02"]);
    fake.check_clean();
}

#[test]
fn what_is_not_tried_is_taken_by_name_alone() {
    let fake = take("auto", "0");
    others_are_taken(&fake, &["OXYGIN_GDAKI_TRIAL=0; OXYGIN_ENGINE=gdaki takes it untried"]);
    drop(fake);
    let fake = take("gdaki", "0");
    // A trial would find it.
    fake.set("stopped", 1);
    job_begun(2, 0, |_| listen(), |_| ());
    assert_said(2, &["engine gdaki chosen (rank "]);
    assert_said(0, &[TRIED]);
    fake.check_clean();
}

#[test]
fn a_gpu_that_does_not_come_to_it_is_not_waited_for_without_end() {
    assert!(again("in_a_process_whose_gpu_is_held").status().unwrap().success());
}

#[test]
#[ignore = "run by the test above, in a process of its own: what the kernel may still use stays"]
fn in_a_process_whose_gpu_is_held() {
    let fake = take("auto", "1");
    let cuda = Cuda::meet(&verbs_path());
    cuda.hold_kernels(true);
    let begun = |rank| {
        listen();
        cuda.enter(rank as i32)
    };
    job_begun(1, 0, begun, |_| ());
    assert_said(1, &["engine gdaki-soft chosen; not gdaki: rank 0", "has not ended for 10s", "hold the GPU"]);
    // Late, and nothing that it uses is gone.
    cuda.hold_kernels(false);
    std::thread::sleep(std::time::Duration::from_millis(200));
    job_begun(1, 0, begun, |_| ());
    assert_said(1, &["engine gdaki chosen (rank 0"]);
    drop(fake);
}
