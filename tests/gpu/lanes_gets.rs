//! Gets and flushes of the own engine's queues that a kernel serves: out of GPU memory and out of host memory that the
//! driver made for GPUs, of the own rank, of ranks of the same process and of other processes.

use crate::harness::lanes::meeting::{rounds, Meeting};
use crate::harness::lanes::serve_by_kernel;
use crate::harness::lanes::served::device;
use crate::harness::lanes::tables::*;
use crate::harness::*;
use crate::support::common::{job, ok, Rank};
use crate::support::device::{entry, Ask};
use crate::support::processes::processes;
use nccl_plugin_api::descriptor::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// What device code calls a window of so many bytes.
fn register(r: &Rank, at: u64, kind: i32) -> u64 {
    let mut handle = null_mut();
    // SAFETY: memory that stays, and a pointer to a local.
    ok(unsafe { T.reg_mr_sym.unwrap()(r.coll, at as *mut c_void, BYTES, kind, 0, &mut handle) });
    handle as u64
}

/// Fetches in rounds until all ranks have enough.
fn fetch(fake: &Fake, r: &Rank, (gpu, who): (i32, u64), meeting: &Meeting, is_enough: &dyn Fn() -> bool) {
    let _context = fake.enter(gpu);
    let tables = Tables::new(fake, r, gpu, who, |at, kind| register(r, at, kind));
    let ask = Ask { contexts: CONTEXTS as i32, signals: 4, depth: 64, ..Ask::default() };
    let device = device(fake, r, ask);
    let (ranks, landing) = (r.job.nranks, tables.names[2]);
    let round = |round: usize| {
        tables.landing.iter().for_each(|at| at.store(0, Ordering::Release));
        meeting.wait();
        let queues = || (0..CONTEXTS).flat_map(|context| (0..ranks).map(move |peer| (context, peer)));
        for (nth, (context, peer)) in (0..EACH).flat_map(|nth| queues().map(move |queue| (nth, queue))) {
            let get = entry(OP_GET, ENTRY as u64).first(entry_at(round, context, peer, nth), tables.names[round % 2]);
            device.post(context, peer, get.second(place(r, context, peer, nth), landing));
        }
        for (context, peer) in queues() {
            device.flush_gets(context, peer, r.rank);
            tables.check(r, round, context, peer);
        }
    };
    meeting.wait();
    rounds(meeting, "gets by a kernel", round, is_enough);
    // What is written is got behind that.
    for n in 1..=50_u64 {
        let (context, peer) = (n as usize % CONTEXTS, (r.rank + 1) % ranks);
        let (mine, back) = (8 * (r.rank as u64 + 2), 8 * (r.rank as u64 + 64));
        let value = n << 8 | r.rank as u64;
        device.post(context, peer, entry(OP_PUT | OP_INLINE, 8).value(value).second(mine, tables.names[1]));
        device.post(context, peer, entry(OP_GET, 8).first(mine, tables.names[1]).second(back, landing));
        device.flush_gets(context, peer, r.rank);
        assert_eq!(tables.landing[back as usize / 8].load(Ordering::Acquire), value);
    }
    assert!(!device.has_error());
    meeting.wait();
    device.destroy();
    meeting.wait();
}

#[test]
fn the_kernel_gets_for_descriptors() {
    for gpus in [1, 2] {
        let fake = Fake::take();
        serve_by_kernel();
        let (against, before) = (AtomicU64::new(0), fake.lane_descriptors());
        job(2, 1, |r| {
            let meeting = Meeting::new(|| r.job.barrier.wait(), &against);
            let is_enough = || fake.lane_descriptors() - before >= 2000;
            fetch(&fake, r, (r.rank as i32 % gpus, u64::MAX), &meeting, &is_enough);
        });
        fake.check();
    }
}

#[test]
fn the_kernel_gets_for_descriptors_of_other_processes() {
    processes("the_kernel_gets_for_descriptors_of_other_processes", 2, &[], |place| {
        let fake = Fake::take();
        serve_by_kernel();
        let r = place.join(1);
        let meeting = Meeting::new(|| place.barrier(), place.word(0));
        let is_enough = || fake.lane_descriptors() >= 1000;
        fetch(&fake, &r, (r.rank as i32, 1 << r.rank), &meeting, &is_enough);
        r.leave();
        assert_eq!(fake.foreign(), 0, "memory of other processes is still mapped");
        fake.check();
    });
}
