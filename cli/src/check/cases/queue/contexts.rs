//! Many contexts, contexts for some ranks only, contexts made twice.

use super::super::Tally;
use super::{neighbours, of, open, table, thread};
use crate::check::pattern::{fill, wrong};
use crate::check::world::{CaseEnv, Outcome, World};
use crate::device::{Deadline, Device, Pen, Signal};
use crate::plugin::ContextConfig;

/// What each context's signal 1 gets from a rank.
fn value(context: usize, rank: usize) -> u64 {
    (context as u64 + 1) << 32 | (rank as u64 + 1)
}

/// Traffic on every context with every rank of `peers`; each context's signals must be its own.
fn all_talk(world: &World<'_>, device: &Device, peers: &[usize], tally: &mut Tally) -> Outcome<()> {
    let env = world.env;
    for context in 0..device.len() {
        let mut thread = device.thread(context, Pen::wild(context as u64, 50), env);
        for &peer in peers {
            thread.signal(peer as u32, &Signal::add(1, value(context, env.rank)))?;
            thread.signal(peer as u32, &Signal::inc(2))?;
        }
        env.beat();
    }
    for context in 0..device.len() {
        let mut thread = device.thread(context, Pen::plain(), env);
        thread.wait_signal(2, peers.len() as u64)?;
        let sum: u64 = peers.iter().map(|&rank| value(context, rank)).sum();
        let seen = (thread.read_signal(1), thread.read_signal(2));
        let wanted = (sum, peers.len() as u64);
        tally.item(u64::from(seen != wanted), || format!("context {context}: signals are {seen:x?}, not {wanted:x?}"));
        // Over all ranks, those that have no queue here included.
        thread.flush()?;
    }
    Ok(())
}

/// Shapes that programs ask for.
pub fn shapes(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = Tally::default();
    let everyone: Vec<usize> = (0..env.nranks).collect();
    for (contexts, depth) in [(17, 1024), (65, 193), (129, 1024)] {
        let world = open(env, &ContextConfig { queue_depth: depth, ..of(contexts) })?;
        all_talk(&world, world.device()?, &everyone, &mut tally)?;
        world.close(&[])?;
        env.progress_of(contexts as u64, 129);
    }
    Ok(tally)
}

/// Only ranks that are congruent modulo the stride talk.
pub fn strides(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = Tally::default();
    for stride in 2..=env.nranks {
        let config = ContextConfig { rank_stride: stride as i32, queue_depth: 64, ..of(3) };
        let world = open(env, &config)?;
        let peers: Vec<usize> = (0..env.nranks).filter(|rank| rank % stride == env.rank % stride).collect();
        all_talk(&world, world.device()?, &peers, &mut tally)?;
        world.close(&[])?;
    }
    Ok(tally)
}

/// One window before the contexts, one after; a second set of contexts, which goes before the first.
pub fn sets(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const SIZE: usize = 4096;
    let everyone: Vec<usize> = (0..env.nranks).collect();
    let mut tally = Tally::default();
    let mut world = World::connected(env, table(env)?, &of(2), &everyone)?;
    let early = world.window(2 * SIZE, 0)?;
    world.equip(&of(2))?;
    let late = world.window(2 * SIZE, 0)?;
    let (next, previous) = neighbours(env);
    for round in 1..=3_u64 {
        let set = world.more_contexts(&ContextConfig { queue_depth: 16, ..of(2) })?;
        let limit = Deadline::new(env.limit);
        for (i, window) in [&early, &late].into_iter().enumerate() {
            let seed = |rank: u32| (u64::from(rank) + 1) * 100 + round * 10 + i as u64;
            fill(window.bytes(0, SIZE), seed(env.rank as u32));
            env.barrier()?;
            let (from, to) = ((window.gin, 0), (window.gin, SIZE as u64));
            set.device.thread(1, Pen::wild(round, 50), &limit).put(
                next,
                from,
                to,
                SIZE as u64,
                Some(&Signal::inc(0)),
                None,
            )?;
            set.device.thread(1, Pen::plain(), env).wait_signal(0, i as u64 + 1)?;
            let (bad, _) = wrong(window.bytes(SIZE, SIZE), seed(previous));
            tally.item(bad, || format!("{bad} bytes are wrong in window {i}, by the second contexts"));
            let first = thread(&world, 1, round)?.read_signal(0);
            tally
                .item(u64::from(first != 0), || format!("a signal of the second contexts shows in the first: {first}"));
        }
        all_talk(&world, &set.device, &everyone, &mut tally)?;
        env.barrier()?;
        world.end_contexts(set)?;
    }
    // The first ones have seen nothing of it.
    all_talk(&world, world.device()?, &everyone, &mut tally)?;
    world.close(&[&early, &late])?;
    Ok(tally)
}
