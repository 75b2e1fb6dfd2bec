//! Counters and the local completion that they stand for.

use super::super::Tally;
use super::{hand, neighbours, of, open, thread};
use crate::check::pattern::{fill, wrong};
use crate::check::queue::crew;
use crate::check::world::{CaseEnv, Outcome};
use crate::device::Signal;

/// Once the counter has gone up the source is scribbled over; then several threads count on one counter.
pub fn reuse(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const ROOM: usize = 1 << 20;
    let rounds = env.rounds(600, 30_000);
    let world = open(env, &of(1))?;
    let (source, target) = (world.window(ROOM, 0)?, world.window(ROOM, 0)?);
    let (next, previous) = neighbours(env);
    let mut tally = Tally::default();
    {
        let mut thread = thread(&world, 0, 13)?;
        for round in 1..=rounds {
            let size = match round % 8 {
                0 if round % 64 == 0 => ROOM,
                0 => 2048,
                n => [8, 256, 4096, 65_536, 100, 1 << 14, 1][n as usize - 1],
            };
            let seed = |rank: u32| u64::from(rank) * rounds + round;
            fill(source.bytes(0, size), seed(env.rank as u32));
            thread.put(next, (source.gin, 0), (target.gin, 0), size as u64, None, Some(4))?;
            env.bytes.set(env.bytes.get() + size as u64);
            thread.wait_counter(4, round)?;
            source.bytes(0, size).fill(0xEE);
            thread.signal(next, &Signal::inc(0))?;
            thread.wait_signal(0, round)?;
            let (bad, _) = wrong(target.bytes(0, size), seed(previous));
            tally.item(bad, || format!("round {round}: {bad} of {size} bytes were read after the counter went up"));
            let counted = thread.read_counter(4);
            tally.item(u64::from(counted != round), || format!("{round} puts were counted {counted} times"));
            thread.signal(previous, &Signal::inc(1))?;
            thread.wait_signal(1, round)?;
            env.progress_of(round, rounds);
        }
    }
    // Those that are done write into the targets of all.
    env.barrier()?;
    const HANDS: u64 = 4;
    let each = env.rounds(500, 50_000);
    let (device, nranks, rank) = (world.device()?, env.nranks as u64, env.rank as u64);
    let (from, to) = (source.gin, target.gin);
    crew(env, HANDS as usize, |i, limit| {
        let mut thread = hand(device, 0, rank << 8 | i as u64, limit);
        for round in 0..each {
            let peer = (round % nranks) as u32;
            thread.put(peer, (from, 64), (to, 8 * (rank * HANDS + i as u64)), 8, None, Some(15))?;
        }
        thread.flush()
    })?;
    let thread = thread(&world, 0, 14)?;
    thread.wait_counter(15, HANDS * each)?;
    env.barrier()?;
    let counted = thread.read_counter(15);
    tally.item(u64::from(counted != HANDS * each), || format!("{} puts were counted {counted} times", HANDS * each));
    world.close(&[&source, &target])?;
    Ok(tally)
}
