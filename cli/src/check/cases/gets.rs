//! Gets bring the peer's bytes, all of them, and fresh ones.

use super::Tally;
use crate::check::pattern::{byte, fill};
use crate::check::world::{inc, CaseEnv, Outcome, World};
use std::sync::atomic::Ordering;

/// Sizes and offsets, from every other rank in turn.
pub fn sizes(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const ROOM: usize = 4 << 20;
    let world = World::open(env, 1)?;
    let (remote, local) = (world.window(ROOM, 0)?, world.window(ROOM, 0)?);
    let seed = |rank: usize| rank as u64 + 77;
    fill(remote.bytes(0, ROOM), seed(env.rank));
    env.barrier()?;
    let mut tally = Tally::default();
    let mut turn = 0;
    for size in [0, 1, 2, 7, 8, 9, 63, 64, 65, 1023, 4095, 4096, 4097, 65_537, (1 << 20) + 1, (3 << 20) + 5] {
        for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 8), (4095, 4097), (8, 61)] {
            turn += 1;
            let peer = (env.rank + turn) % env.nranks;
            let guarded = local.bytes(0, 64 + to + size + 64);
            guarded.fill(0xA5);
            let request = world.get(0, peer, (&remote, from), (&local, 64 + to), size)?;
            world.wait(request)?;
            world.flush(0, peer, &local)?;
            let bad = |i: &usize| match i.checked_sub(64 + to) {
                Some(at) if at < size => guarded[*i] != byte(seed(peer), from + at),
                _ => guarded[*i] != 0xA5,
            };
            let count = (0..guarded.len()).filter(bad).count() as u64;
            tally.item(count, || format!("{size} bytes from offset {from} of rank {peer}: {count} bytes are wrong"));
        }
    }
    env.barrier()?;
    world.close(&[&remote, &local])?;
    Ok(tally)
}

/// The owner changes its memory, signals, and the peer's next get must see the change.
pub fn fresh(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const WORDS: usize = 64;
    let rounds = env.rounds(3_000, 200_000);
    let world = World::open(env, 1)?;
    let (owned, fetched) = (world.window(4096, 0)?, world.window(4096, 0)?);
    let flags = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let mut tally = Tally::default();
    for round in 1..=rounds {
        (0..WORDS).for_each(|i| owned.word(8 * i).store(round, Ordering::Release));
        let request = world.signal(0, next, &inc(&flags, 0))?;
        world.wait_signal(&flags, 0, round, previous)?;
        let got = world.get(0, previous, (&owned, 0), (&fetched, 0), 8 * WORDS)?;
        world.wait(got)?;
        world.flush(0, previous, &fetched)?;
        let stale = (0..WORDS).filter(|&i| fetched.word(8 * i).load(Ordering::Acquire) != round).count() as u64;
        tally.item(stale, || format!("round {round}: {stale} of {WORDS} words from rank {previous} are stale"));
        world.wait(request)?;
        // The owner may change its memory when the reader has read.
        let request = world.signal(0, previous, &inc(&flags, 8))?;
        world.wait(request)?;
        world.wait_signal(&flags, 8, round, next)?;
        env.progress_of(round, rounds);
    }
    world.close(&[&owned, &fetched, &flags])?;
    Ok(tally)
}
