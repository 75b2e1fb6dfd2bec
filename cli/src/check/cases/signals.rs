//! Signals are 64-bit additions, none lost, none invented.

use super::Tally;
use crate::check::world::{add, inc, CaseEnv, Outcome, World};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Increments, with values that must be ignored.
pub fn increments(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let world = World::open(env, 1)?;
    let flags = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let mut tally = Tally::default();
    for round in 1..=200_u64 {
        let mut signal = inc(&flags, 64);
        signal.value = round.wrapping_mul(0x0101_0101_0101_0101);
        let request = world.signal(0, next, &signal)?;
        world.wait(request)?;
        world.wait_exactly(&flags, 64, round, previous)?;
        tally.item(0, String::new);
        env.barrier()?;
    }
    world.close(&[&flags])?;
    Ok(tally)
}

/// Additions whose carries, high bits and wrap-around show what kind of adder is at work.
pub fn additions(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const VALUES: [u64; 16] = [
        1,
        u32::MAX as u64,
        1,
        1 << 31,
        1 << 32,
        1 << 63,
        u64::MAX,
        1,
        1 << 63,
        0x0123_4567_89AB_CDEF,
        0xFEDC_BA98_7654_3210,
        0xFFFF_FFFF_0000_0000,
        u64::MAX - 6,
        0x8000_0000_8000_0000,
        0xFFFF,
        0x0001_0000,
    ];
    let world = World::open(env, 1)?;
    let (data, flags) = (world.window(4096, 0)?, world.window(4096, 1)?);
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let mut tally = Tally::default();
    for with_data in [false, true] {
        let off = if with_data { 8 } else { 4088 };
        let mut sum = 0_u64;
        for value in VALUES {
            let signal = add(&flags, off, value);
            let request = match with_data {
                true => world.put_signal(0, next, (&data, 0), (&data, 2048), 8, &signal)?,
                false => world.signal(0, next, &signal)?,
            };
            world.wait(request)?;
            let before = sum;
            sum = sum.wrapping_add(value);
            world.wait_exactly(&flags, off, sum, previous).map_err(|e| format!("{before:#x} + {value:#x}: {e}"))?;
            tally.item(0, String::new);
            env.barrier()?;
        }
    }
    world.close(&[&data, &flags])?;
    Ok(tally)
}

/// Many words side by side, each with its own sum.
pub fn words(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const WORDS: usize = 4096;
    let world = World::open(env, 1)?;
    let flags = world.window(8 * WORDS + 8, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let value = |sender: usize, i: usize| ((sender as u64 + 1) << 48) | (i as u64 * 3 + 1);
    let mut requests = VecDeque::new();
    for i in 0..WORDS {
        requests.push_back(world.signal(0, next, &add(&flags, 8 * i, value(env.rank, i)))?);
        world.reap(&mut requests, 256)?;
    }
    requests.push_back(world.signal(0, next, &inc(&flags, 8 * WORDS))?);
    world.reap(&mut requests, 0)?;
    world.wait_exactly(&flags, 8 * WORDS, 1, previous)?;
    let mut tally = Tally::default();
    for i in 0..WORDS {
        let (seen, wanted) = (flags.word(8 * i).load(Ordering::Acquire), value(previous, i));
        tally.item(u64::from(seen != wanted), || format!("word {i} is {seen:#x}, not {wanted:#x}"));
    }
    env.barrier()?;
    world.close(&[&flags])?;
    Ok(tally)
}

/// Every rank adds to one word of every rank as fast as it can.
pub fn fan_in(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let each = env.rounds(2_000, 200_000);
    let world = World::open(env, 1)?;
    let flags = world.window(4096, 1)?;
    let value = |sender: usize| (1_u64 << (8 * (sender % 4))) + (1 << 33);
    let mut requests = VecDeque::new();
    env.barrier()?;
    for round in 0..each {
        for peer in 0..env.nranks {
            requests.push_back(world.signal(0, peer, &add(&flags, 128, value(env.rank)))?);
        }
        world.reap(&mut requests, 128)?;
        env.progress_of(round, each);
    }
    world.reap(&mut requests, 0)?;
    let sum = (0..env.nranks).fold(0_u64, |sum, r| sum.wrapping_add(value(r).wrapping_mul(each)));
    let word = flags.word(128);
    let what = || format!("the sum of all ranks' additions, {sum:#x}; it is {:#x}", word.load(Ordering::Acquire));
    env.until(what, || {
        world.progress()?;
        Ok((word.load(Ordering::Acquire) == sum).then_some(()))
    })?;
    env.barrier()?;
    // Nobody has anything under way now; whatever came twice is there.
    let end = word.load(Ordering::Acquire);
    let mut tally = Tally { rounds: each * env.nranks as u64, ..Tally::default() };
    tally.item(u64::from(end != sum), || format!("the sum went on to {end:#x}, it should be {sum:#x}"));
    world.close(&[&flags])?;
    Ok(tally)
}
