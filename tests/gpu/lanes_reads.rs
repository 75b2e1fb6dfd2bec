//! Gets of the software NIC's queues that a kernel serves: out of GPU memory and out of host memory that the driver
//! made for GPUs, of the own rank, of ranks of the same process and of other processes. DeepEP's engrams are such
//! gets.

use crate::harness::memory::pattern;
use crate::harness::*;
use crate::lanes_nic::{take, take_rung_by};
use crate::support::common::{job, Rank};
use crate::support::kernel::{Kernel, WAYS};
use crate::support::nic::{read, value, Ask, Status};
use crate::support::processes::processes;
use nccl_plugin_api::{PTR_CUDA, PTR_HOST};
use std::sync::atomic::{AtomicU64, Ordering};

const CONTEXTS: usize = 8;
/// Entries of a table, their words, and how many are fetched at once from a rank through a context.
const ENTRIES: usize = 512;
const WORDS: usize = 32;
const EACH: usize = 24;
const BYTES: usize = ENTRIES * WORDS * 8;

/// A rank's tables, one in host memory and one on its GPU, and where entries come to.
struct Tables<'a> {
    gin: [u64; 3],
    landing: &'a [AtomicU64],
}

/// What a rank's table holds at a word; `which`: of the two.
fn word(which: usize, rank: usize, i: usize) -> u64 {
    pattern(rank, i) ^ (which as u64) << 48
}

impl Tables<'_> {
    /// `who`: GPUs that the host memory is made for.
    fn new(fake: &Fake, r: &Rank, gpu: i32, who: u64) -> Self {
        // SAFETY: a function of the fake driver, of this type.
        let host = unsafe { fake.call::<extern "C" fn(usize, u64) -> u64>(b"fake_alloc_host")(BYTES, who) };
        let [table, landing] = [(), ()].map(|()| fake.segments(gpu, &[BYTES], true));
        // SAFETY: windows of so many words, which stay.
        let words = |at| unsafe { std::slice::from_raw_parts(at as *const AtomicU64, BYTES / 8) };
        for (which, all) in [words(host), words(fake.peek(table) as u64)].into_iter().enumerate() {
            (0..).zip(all).for_each(|(i, at)| at.store(word(which, r.rank, i), Ordering::Release));
        }
        let kinds = [(host, PTR_HOST), (table, PTR_CUDA), (landing, PTR_CUDA)];
        // GPU windows first: what is registered before them is host memory like any other.
        let mut gin = [0; 3];
        for which in [1, 2, 0] {
            let (at, kind) = kinds[which];
            gin[which] = WAYS[5].register(r, at, BYTES, kind).1;
        }
        Self { gin, landing: words(fake.peek(landing) as u64) }
    }
}

/// Which entry comes to a place.
fn entry_of(round: usize, context: usize, peer: usize, nth: usize) -> usize {
    (round * 7919 + context * 104_729 + peer * 1299 + nth * 37) % ENTRIES
}

/// Fetches until a kernel has taken `least` entries, and many more than that were for nobody else.
fn fetch(fake: &Fake, r: &Rank, (gpu, who): (i32, u64), meet: &dyn Fn(), is_enough: &dyn Fn() -> bool) {
    let _context = fake.enter(gpu);
    let tables = Tables::new(fake, r, gpu, who);
    let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
    let ask = Ask { contexts: CONTEXTS as u32, signals: 4, depth: 64, ..Ask::default() };
    let kernel = Kernel::new(r, WAYS[5], ask, &see);
    let ranks = r.job.nranks;
    // A place for each of one round.
    assert!(CONTEXTS * ranks * EACH <= ENTRIES);
    let place = |context: usize, peer: usize, nth: usize| ((context * ranks + peer) * EACH + nth) * WORDS;
    for round in 0.. {
        let which = round % 2;
        tables.landing.iter().for_each(|at| at.store(0, Ordering::Release));
        meet();
        for nth in 0..EACH {
            for (context, peer) in (0..CONTEXTS).flat_map(|context| (0..ranks).map(move |peer| (context, peer))) {
                let from = (entry_of(round, context, peer, nth) * WORDS * 8) as u64;
                let to = kernel.own(tables.gin[2], 8 * place(context, peer, nth) as u64);
                kernel.qp(context, peer).post(&[read(kernel.at(tables.gin[which], peer, from), to, 8 * WORDS as u32)]);
            }
        }
        for (context, peer) in (0..CONTEXTS).flat_map(|context| (0..ranks).map(move |peer| (context, peer))) {
            assert_eq!(kernel.qp(context, peer).flush(), Status::Good);
            for nth in 0..EACH {
                let entry = entry_of(round, context, peer, nth);
                let wrong = (0..WORDS).find(|i| {
                    let found = tables.landing[place(context, peer, nth) + i].load(Ordering::Acquire);
                    found != word(which, peer, entry * WORDS + i)
                });
                assert_eq!(wrong, None, "round {round}, context {context}, entry {entry} of rank {peer}");
            }
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
        let at = kernel.at(tables.gin[1], peer, mine);
        let bytes = (n << 8 | r.rank as u64).to_le_bytes();
        kernel.qp(context, peer).post(&[value(at, &bytes), read(at, kernel.own(tables.gin[2], back), 8)]);
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
