//! Gets, and the flush that makes them visible.

use super::super::Tally;
use super::{hand, of, open};
use crate::check::pattern::{fill, wrong_from};
use crate::check::queue::crew;
use crate::check::world::{CaseEnv, Outcome};
use crate::dice::Dice;

/// Each thread gets from every rank in turn, flushes as device code does, and what it got must be there.
pub fn flushed(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const HANDS: usize = 3;
    const ROOM: usize = 1 << 20;
    const PART: usize = 128 << 10;
    let rounds = env.rounds(60, 3_000);
    let world = open(env, &of(2))?;
    let (remote, local) = (world.window(ROOM, 0)?, world.window(HANDS * PART, 0)?);
    let seed = |rank: u64| rank + 77;
    fill(remote.bytes(0, ROOM), seed(env.rank as u64));
    env.barrier()?;
    let (device, nranks, rank) = (world.device()?, env.nranks as u64, env.rank as u64);
    let (from, to) = (remote.gin, local.gin);
    let mut tally = Tally::default();
    for round in 0..rounds {
        let got = crew(env, HANDS, |i, limit| {
            let mut thread = hand(device, i % 2, rank << 32 | round << 8 | i as u64, limit);
            let mut dice = Dice(rank << 40 | round << 8 | i as u64);
            let (mut at, mut got) = (i * PART, Vec::new());
            for _ in 0..6 {
                let peer = dice.below(nranks);
                let size = [0, 1, 8, 100, 4096, 16_000][dice.below(6) as usize] as usize;
                let off = dice.below((ROOM - size) as u64) / 8 * 8;
                thread.get(peer as u32, (from, off), (to, at as u64), size as u64)?;
                got.push((peer, off as usize, at, size));
                at += size + dice.below(9) as usize;
            }
            thread.flush()?;
            Ok(got)
        })?;
        for (peer, off, at, size) in got.into_iter().flatten() {
            let (bad, _) = wrong_from(local.bytes(at, size), seed(peer), off);
            tally.item(bad, || format!("{size} bytes from offset {off} of rank {peer}: {bad} bytes are wrong"));
            env.bytes.set(env.bytes.get() + size as u64);
        }
        local.bytes(0, HANDS * PART).fill(0xA5);
        env.progress_of(round, rounds);
    }
    env.barrier()?;
    world.close(&[&remote, &local])?;
    Ok(tally)
}
