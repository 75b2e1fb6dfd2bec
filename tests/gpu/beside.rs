//! The helper thread beside the callers: transfers that come thick, through the RMA v16 table, on the fake CUDA driver.

use crate::harness::*;
use crate::support::common::*;
use crate::support::logged::{collect, lines, listen};

/// Blocks of the all-to-all, each with a signal of its own in either barrier.
const BLOCKS: usize = 16;
const ROUNDS: u64 = 60;
const BYTES: usize = 3 << 20;
/// Signals of the first barrier, of the second, and of the puts.
const SECOND: usize = BLOCKS;
const PUTS: usize = 2 * BLOCKS;

/// One step of nccl-tests' all-to-all between barriers: signals of all blocks, a put + signal to every rank, signals
/// again. Each waits for what the one before brings, so an operation that is left lying shows.
fn alltoall(fake: &Fake, r: &Rank, gpus: i32) {
    let gpu = r.rank as i32 % gpus;
    let _context = fake.enter(gpu);
    let (src, dst) = (fake.window(r, gpu, BYTES / 8, 0), fake.window(r, gpu, BYTES / 8 * r.job.nranks, 0));
    let sig = fake.signals(r, gpu, PUTS + 1, NEVER_RESET);
    r.job.barrier.wait();
    let (n, me) = (r.job.nranks, r.rank);
    let others = || (0..n).filter(move |&p| p != me);
    let barrier =
        |first: usize, round: u64| {
            let mut all = Vec::new();
            for block in 0..BLOCKS {
                let at = 8 * (first + block) as u64;
                all.extend(others().map(|p| {
                    r.put(0, (src.as_window(), 0), 0, (dst.as_window(), 0), p, Some((sig.as_window(), at, 1)))
                }));
            }
            (0..BLOCKS).for_each(|block| sig.wait(r, first + block, round * (n as u64 - 1)));
            all
        };
    for round in 1..=ROUNDS {
        let bytes = [8, 512, 8 << 10, 64 << 10, 600 << 10, BYTES][round as usize % 6];
        src.set(bytes / 8 - 1, round << 8 | me as u64);
        let mut all = barrier(0, round);
        for p in 0..n {
            let to = (dst.as_window(), (me * BYTES) as u64);
            all.push(r.put(0, (src.as_window(), 0), bytes, to, p, Some((sig.as_window(), 8 * PUTS as u64, 1))));
        }
        sig.wait(r, PUTS, round * n as u64);
        for p in 0..n {
            assert_eq!(dst.get((p * BYTES + bytes) / 8 - 1), round << 8 | p as u64, "round {round}, from rank {p}");
        }
        all.extend(barrier(SECOND, round));
        all.into_iter().for_each(|q| r.wait(q));
    }
    r.job.barrier.wait();
}

/// `beside`: whether a helper thread comes to its callers' side. Where all ranks are in one process each poster does
/// the work.
fn thick(transport: &str, ranks: usize, gpus: i32, beside: bool) {
    let fake = Fake::take();
    collect();
    fake.set_transport(transport);
    fake.set_issue("helper=2");
    let said = lines().len();
    job(ranks, 1, |r| {
        listen();
        alltoall(&fake, r, gpus);
    });
    let times = lines()[said..]
        .iter()
        .filter_map(|(_, text)| text.split_once(" times the helper thread")?.0.rsplit(' ').next()?.parse::<u64>().ok())
        .sum::<u64>();
    assert_eq!(times > 0, beside, "{transport}: {times} times a helper thread worked beside its callers");
    fake.check();
}

#[test]
fn ranks_of_one_process() {
    thick("auto", 2, 2, false);
}

#[test]
fn ranks_of_one_process_on_one_gpu() {
    thick("auto", 4, 1, false);
}

#[test]
fn through_shared_memory() {
    thick("staged", 2, 2, true);
}

#[test]
fn over_tcp() {
    thick("tcp", 2, 2, true);
}
