//! Gets of the software NIC's queues that a kernel serves: out of GPU memory and out of host memory that the driver
//! made for GPUs, of the own rank, of ranks of the same process and of other processes. DeepEP's engrams are such
//! gets.

use crate::harness::lanes::tables::*;
use crate::harness::*;
use crate::lanes_nic::{take, take_rung_by};
use crate::support::common::{job, Rank};
use crate::support::kernel::{Kernel, WAYS};
use crate::support::nic::{read, value, Ask, Status};
use crate::support::processes::processes;
use std::sync::atomic::{AtomicU64, Ordering};

/// Fetches until a kernel has taken `least` entries, and many more than that were for nobody else.
fn fetch(fake: &Fake, r: &Rank, (gpu, who): (i32, u64), meet: &dyn Fn(), is_enough: &dyn Fn() -> bool) {
    let _context = fake.enter(gpu);
    let tables = Tables::new(fake, r, gpu, who, |at, kind| WAYS[5].register(r, at, BYTES, kind).1);
    let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
    let ask = Ask { contexts: CONTEXTS as u32, signals: 4, depth: 64, ..Ask::default() };
    let kernel = Kernel::new(r, WAYS[5], ask, &see);
    let ranks = r.job.nranks;
    for round in 0.. {
        let which = round % 2;
        tables.landing.iter().for_each(|at| at.store(0, Ordering::Release));
        meet();
        for nth in 0..EACH {
            for (context, peer) in (0..CONTEXTS).flat_map(|context| (0..ranks).map(move |peer| (context, peer))) {
                let from = entry_at(round, context, peer, nth);
                let to = kernel.own(tables.names[2], place(r, context, peer, nth));
                kernel.qp(context, peer).post(&[read(kernel.at(tables.names[which], peer, from), to, ENTRY as u32)]);
            }
        }
        for (context, peer) in (0..CONTEXTS).flat_map(|context| (0..ranks).map(move |peer| (context, peer))) {
            assert_eq!(kernel.qp(context, peer).flush(), Status::Good);
            tables.check(r, round, context, peer);
        }
        meet();
        if round >= 4 && is_enough() {
            break;
        }
        assert!(round < 4000, "no kernel takes reads");
    }
    // What is written is read behind that.
    for n in 1..=50_u64 {
        let (context, peer) = (n as usize % CONTEXTS, (r.rank + 1) % ranks);
        let (mine, back) = (8 * (r.rank as u64 + 2), 8 * (r.rank as u64 + 64));
        let at = kernel.at(tables.names[1], peer, mine);
        let bytes = (n << 8 | r.rank as u64).to_le_bytes();
        kernel.qp(context, peer).post(&[value(at, &bytes), read(at, kernel.own(tables.names[2], back), 8)]);
        assert_eq!(kernel.qp(context, peer).flush(), Status::Good);
        assert_eq!(tables.landing[back as usize / 8].load(Ordering::Acquire), u64::from_le_bytes(bytes));
    }
    assert!(!kernel.has_error());
    meet();
    kernel.destroy();
    meet();
}

fn between_threads(fake: Fake, gpus: i32) {
    let before = fake.lane_entries();
    let agreed = AtomicU64::new(0);
    job(2, 1, |r| {
        let meet = || r.job.barrier.wait();
        // All leave in the same round.
        let is_enough = || {
            if r.rank == 0 {
                agreed.store(fake.lane_entries() - before, Ordering::Release);
            }
            meet();
            let taken = agreed.load(Ordering::Acquire);
            meet();
            taken >= 2000
        };
        fetch(&fake, r, (r.rank as i32 % gpus, u64::MAX), &meet, &is_enough);
    });
    fake.check();
}

#[test]
fn the_kernel_gets_from_host_memory_of_its_process() {
    for gpus in [1, 2] {
        between_threads(take(), gpus);
    }
}

#[test]
fn the_kernel_gets_where_a_doorbell_rings() {
    between_threads(take_rung_by("doorbell"), 2);
}

#[test]
fn the_kernel_gets_from_host_memory_of_other_processes() {
    processes("the_kernel_gets_from_host_memory_of_other_processes", 2, &[], |place| {
        let fake = take();
        let r = place.join(1);
        let meet = || place.barrier();
        let is_enough = || {
            place.word(r.rank).store(fake.lane_entries(), Ordering::Release);
            meet();
            let least = (0..2).map(|rank| place.word(rank).load(Ordering::Acquire)).min();
            meet();
            least >= Some(1000)
        };
        fetch(&fake, &r, (r.rank as i32, 1 << r.rank), &meet, &is_enough);
        r.leave();
        assert_eq!(fake.foreign(), 0, "memory of other processes is still mapped");
        fake.check();
    });
}
