//! The software NIC over verbs: a signal of one sender says nothing of another's puts there, which kernels have to
//! accept.

use crate::harness::Fake;
use crate::support::apart::is_elsewhere;
use crate::support::common::{job, Job, Rank};
use crate::support::kernel::{Kernel, WAYS};
use crate::support::logged::{collect, lines, listen};
use crate::support::nic::{read, write, Ask, Status};
use nccl_plugin_api::{NcclResult, PTR_HOST};

#[test]
fn verbs_are_refused_unless_kernels_look_at_the_senders_puts_alone() {
    // The tables keep the process's list of devices, which others count as left.
    if is_elsewhere(concat!(module_path!(), "::verbs_are_refused_unless_kernels_look_at_the_senders_puts_alone")) {
        return;
    }
    let _fake = Fake::take();
    std::env::set_var("OXYGIN_FABRIC", "verbs");
    std::env::set_var("OXYGIN_ENGINE", "gdaki-soft");
    let through = WAYS[3];
    collect();
    let refused = Job::new(2);
    std::thread::scope(|s| {
        for rank in 0..2 {
            s.spawn({
                let refused = &refused;
                move || {
                    let joined = Rank::try_join(refused, rank, 1, listen);
                    assert_eq!(joined.err(), Some(NcclResult::INVALID_USAGE));
                }
            });
        }
    });
    let said = |level, words: &str| lines().iter().filter(|line| line.0 == level && line.1.contains(words)).count();
    assert!(said(log::Level::Warn, "OXYGIN_GDAKI_SIGNALS=per-peer") >= 2, "{:#?}", lines());
    std::env::set_var("OXYGIN_GDAKI_SIGNALS", "per-peer");
    job(2, 1, |r| {
        let peer = 1 - r.rank;
        let mut memory = r.not_registered(128);
        memory.words[..64].iter_mut().zip(1..).for_each(|(word, i)| *word = i << 8 | r.rank as u64);
        let (_, gin) = through.register(r, memory.words.as_ptr() as u64, 1024, PTR_HOST);
        let kernel = Kernel::new(r, through, Ask::default(), &|at| at);
        r.job.barrier.wait();
        let put = write(kernel.at(gin, peer, 512), kernel.own(gin, 0), 256);
        kernel.post_counted((0, peer), &[put, kernel.add_signal(0, peer, 1, 3)], 2);
        kernel.wait_signal(0, 1, 3);
        kernel.wait_counter(0, 2, 1);
        kernel.qp(0, peer).post(&[read(kernel.at(gin, peer, 256), kernel.own(gin, 768), 256)]);
        assert_eq!(kernel.qp(0, peer).flush(), Status::Good);
        let seen = |i: usize| {
            // SAFETY: inside the window.
            unsafe { memory.words.as_ptr().add(i).read_volatile() }
        };
        (0..64).for_each(|i| assert_eq!(seen(64 + i), (i as u64 + 1) << 8 | peer as u64, "word {i}"));
        assert!(!kernel.has_error());
        r.job.barrier.wait();
        kernel.destroy();
        r.job.barrier.wait();
    });
}
