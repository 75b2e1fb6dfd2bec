//! The software NIC over verbs: kernels take any visible signal to say that every put before it has arrived, from any
//! peer.

use crate::harness::Fake;
use crate::support::apart::is_elsewhere;
use crate::support::common::{job, refused_job};
use crate::support::kernel::{Kernel, WAYS};
use crate::support::logged::{collect, lines, listen};
use crate::support::nic::{read, write, Ask, Status};
use nccl_plugin_api::PTR_HOST;

/// The fake, and a software NIC over it. The tables keep the process's list of devices.
fn take(signals: &str) -> Fake {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_FABRIC", "verbs");
    std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
    std::env::set_var("OXYGIN_GDAKI_SIGNALS", signals);
    collect();
    fake
}

/// Rank 2 puts to rank 1 and waits until that is complete; then it signals rank 0, which signals rank 1. Whether that
/// finds the put behind the signal, on a device whose writes come to memory late. Before that ranks put, count and get.
fn finds_a_third_ranks_put(fake: &Fake) -> bool {
    let (through, finds) = (WAYS[3], std::sync::atomic::AtomicBool::new(false));
    job(3, 0, |r| {
        let next = (r.rank + 1) % 3;
        let mut memory = r.not_registered(128);
        memory.words[..64].iter_mut().zip(1..).for_each(|(word, i)| *word = i << 8 | r.rank as u64);
        let (_, gin) = through.register(r, memory.words.as_ptr() as u64, 1024, PTR_HOST);
        let kernel = Kernel::new(r, through, Ask::default(), &|at| at);
        let seen = |i: usize| {
            // SAFETY: inside the window.
            unsafe { memory.words.as_ptr().add(i).read_volatile() }
        };
        r.job.barrier.wait();
        let put = write(kernel.at(gin, next, 512), kernel.own(gin, 0), 256);
        kernel.post_counted((0, next), &[put, kernel.add_signal(0, next, 1, 3)], 2);
        kernel.wait_signal(0, 1, 3);
        kernel.wait_counter(0, 2, 1);
        let of = (r.rank + 2) % 3;
        (0..32).for_each(|i| assert_eq!(seen(64 + i), (i as u64 + 1) << 8 | of as u64, "word {i}"));
        kernel.qp(0, next).post(&[read(kernel.at(gin, next, 256), kernel.own(gin, 768), 256)]);
        assert_eq!(kernel.qp(0, next).flush(), Status::Good);
        (0..32).for_each(|i| assert_eq!(seen(96 + i), (i as u64 + 33) << 8 | next as u64, "word {i}"));
        r.job.barrier.wait();
        fake.set("lazy_writes", 10_000);
        match r.rank {
            2 => {
                kernel.qp(0, 1).post(&[write(kernel.at(gin, 1, 512), kernel.own(gin, 256), 8)]);
                assert_eq!(kernel.qp(0, 1).flush(), Status::Good);
                kernel.qp(0, 0).post(&[kernel.add_signal(0, 0, 2, 1)]);
            }
            0 => {
                kernel.wait_signal(0, 2, 1);
                kernel.qp(0, 1).post(&[kernel.add_signal(0, 1, 2, 1)]);
            }
            _ => {
                kernel.wait_signal(0, 2, 1);
                finds.store(seen(64) == 33 << 8 | 2, std::sync::atomic::Ordering::Relaxed);
            }
        }
        assert!(!kernel.has_error());
        r.job.barrier.wait();
        kernel.destroy();
        r.job.barrier.wait();
    });
    finds.into_inner()
}

#[test]
fn a_signal_tells_of_all_peers_puts() {
    if is_elsewhere(concat!(module_path!(), "::a_signal_tells_of_all_peers_puts")) {
        return;
    }
    let fake = take("all-peers");
    assert!(finds_a_third_ranks_put(&fake));
    drop(fake);
    let fake = take("per-peer");
    assert!(!finds_a_third_ranks_put(&fake));
}

#[test]
fn iwarp_devices_are_refused_unless_kernels_look_at_the_senders_puts_alone() {
    if is_elsewhere(concat!(
        module_path!(),
        "::iwarp_devices_are_refused_unless_kernels_look_at_the_senders_puts_alone"
    )) {
        return;
    }
    let fake = take("all-peers");
    fake.set("iwarp", 1);
    refused_job(2, 1, "iWARP", listen);
    let said = |level, words: &str| lines().iter().filter(|line| line.0 == level && line.1.contains(words)).count();
    assert!(said(log::Level::Warn, "OXYGIN_GDAKI_SIGNALS=per-peer") >= 2, "{:#?}", lines());
}
