//! What an engine says at its end, against what the fake CUDA driver did.

use crate::harness::plan::*;
use crate::harness::*;
use crate::support::common::*;
use crate::support::logged;

/// The closing line counts each operation where it was done: what a copy kernel left undone is none of its own.
#[test]
fn what_they_leave_undone_is_not_counted_as_theirs() {
    let (fake, plan) = (Fake::take(), Plan::new(&draws(200), 3, Mix::Large));
    fake.kernel_limits(300, 8);
    logged::collect();
    let before = [fake.commands(), fake.worker_commands()];
    job(2, 3, |r| {
        let _context = fake.enter(0);
        let host = r.window(plan.words, 0);
        let src = fake.window(r, 0, plan.words, 0);
        let dst = fake.window(r, 0, plan.words, 0);
        let sig = fake.signals(r, 0, 6, NEVER_RESET);
        logged::listen();
        r.job.barrier.wait();
        match r.rank {
            0 => plan.send(r, 1, 50, &Ends { host: &host, gpu: &src, dst: &dst, sig: &sig }, 1, 0),
            _ => watch(r, &plan, 3, 1, &dst, &sig, &[0; 6]),
        }
        r.job.barrier.wait();
    });
    fake.check();
    let lines = logged::lines();
    let count = |what: &str| {
        let before = lines.iter().filter_map(|(_, line)| line.split_once(what)).map(|(before, _)| before);
        before.map(|b| b.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum::<u64>()
    };
    let said = [count(" operations by the copy kernel"), count(" of them by its worker blocks")];
    assert_eq!(said, [fake.commands() - before[0], fake.worker_commands() - before[1]]);
    assert!(lines
        .iter()
        .any(|(_, line)| line.starts_with("rank 1: ") && line.contains(" operations by the copy kernel")));
}
