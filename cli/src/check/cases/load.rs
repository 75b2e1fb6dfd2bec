//! Requests, queues and receivers under load.

use super::Tally;
use crate::check::pattern::{byte, fill, wrong};
use crate::check::world::{add, inc, CaseEnv, Outcome, World};
use std::sync::atomic::Ordering;

/// Once `test` says true the source is scribbled over; the peer must still get what was there before.
pub fn source_reuse(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const ROOM: usize = 1 << 20;
    let rounds = env.rounds(1_000, 50_000);
    let world = World::open(env, 1)?;
    let (source, target) = (world.window(ROOM, 0)?, world.window(ROOM, 0)?);
    let flags = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let mut tally = Tally::default();
    for round in 1..=rounds {
        let size = [8, 256, 4096, 65_536, 100, 1 << 14, 1, ROOM][(round % 8) as usize];
        let size = if size == ROOM && round % 64 != 7 { 2048 } else { size };
        fill(source.bytes(0, size), round + env.rank as u64 * rounds);
        let request = world.put(0, next, (&source, 0), (&target, 0), size)?;
        world.wait(request)?;
        source.bytes(0, size).fill(0xEE);
        let request = world.signal(0, next, &inc(&flags, 0))?;
        world.wait_signal(&flags, 0, round, previous)?;
        let (bad, _) = wrong(target.bytes(0, size), round + previous as u64 * rounds);
        tally.item(bad, || format!("round {round}: {bad} of {size} bytes were read after test had said true"));
        world.wait(request)?;
        let ack = world.signal(0, previous, &inc(&flags, 8))?;
        world.wait(ack)?;
        world.wait_signal(&flags, 8, round, next)?;
        env.progress_of(round, rounds);
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}

/// As many operations as the issue demands before the first test.
pub fn outstanding(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const COUNT: usize = 65_536;
    let world = World::open(env, 1)?;
    let (source, target) = (world.window(8 * COUNT, 0)?, world.window(8 * COUNT, 0)?);
    let flags = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let seed = |rank: usize| rank as u64 + 4242;
    fill(source.bytes(0, 8 * COUNT), seed(env.rank));
    env.barrier()?;
    let mut requests = Vec::with_capacity(COUNT);
    for i in 0..COUNT {
        // From the last word to the first, so that nothing can be merged.
        let at = 8 * (COUNT - 1 - i);
        let request = match i % 4 {
            3 => world.put_signal(0, next, (&source, at), (&target, at), 8, &inc(&flags, 0)),
            _ => world.put(0, next, (&source, at), (&target, at), 8),
        };
        requests.push(request.map_err(|e| format!("{e}; {i} operations are unfinished"))?);
        env.progress_of(i as u64, COUNT as u64);
    }
    for request in requests {
        world.wait(request)?;
    }
    world.wait_exactly(&flags, 0, COUNT as u64 / 4, previous)?;
    let data = target.bytes(0, 8 * COUNT);
    let mut tally = Tally::default();
    for i in 0..COUNT {
        let bad = (8 * i..8 * i + 8).filter(|&at| data[at] != byte(seed(previous), at)).count() as u64;
        tally.item(bad, || format!("operation {} of {COUNT}: {bad} bytes are wrong", COUNT - 1 - i));
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}

/// The receiver looks at its memory and calls nothing, not even progress.
pub fn passive(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const SIZE: usize = 3 << 20;
    let rounds: u64 = 20;
    let world = World::open(env, 2)?;
    let (source, target) = (world.window(SIZE, 0)?, world.window(SIZE, 0)?);
    let flags = world.window(4096, 1)?;
    let gets = env.way.has_gets();
    let mut tally = Tally::default();
    // In turn each rank is the one that does not call.
    for quiet in 0..env.nranks {
        let senders = env.nranks as u64 - 1;
        let seed = |sender: usize, round: u64| sender as u64 * 1000 + round + quiet as u64 * 1_000_000;
        let stripe = SIZE / env.nranks / 4096 * 4096;
        let was = flags.word(0).load(Ordering::Acquire);
        // Long enough for a helper that follows the caller to fall asleep.
        std::thread::sleep(std::time::Duration::from_millis(60));
        env.barrier()?;
        for round in 1..=rounds {
            if env.rank == quiet {
                let word = flags.word(0);
                let what = || {
                    let came = word.load(Ordering::Acquire) - was;
                    format!("{} signals while calling nothing; {came} came", round * senders)
                };
                env.until(what, || Ok((word.load(Ordering::Acquire) - was >= round * senders).then_some(())))?;
                for sender in (0..env.nranks).filter(|&s| s != quiet) {
                    let (bad, _) = wrong(target.bytes(sender * stripe, stripe), seed(sender, round));
                    tally.item(bad, || format!("round {round}: {bad} bytes from rank {sender} are wrong"));
                }
            } else {
                fill(source.bytes(0, stripe), seed(env.rank, round));
                let to = (&target, env.rank * stripe);
                let request = world.put_signal(0, quiet, (&source, 0), to, stripe, &add(&flags, 0, 1))?;
                world.wait(request)?;
                if gets {
                    // Its answer needs the quiet rank's side, too.
                    let request = world.get(1, quiet, (&source, 0), (&target, 0), 64)?;
                    world.wait(request).map_err(|e| format!("{e}; that rank is calling nothing"))?;
                }
            }
            env.barrier()?;
        }
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}
