//! Bytes through descriptors.

use super::super::Tally;
use super::{neighbours, of, open, thread};
use crate::check::pattern::{fill, wrong};
use crate::check::world::{CaseEnv, Outcome, Window};
use crate::device::{Place, Signal, CHUNK};

const UNTOUCHED: u8 = 0xA5;
const GUARD: usize = 64;

/// Whether bytes are as they should be and those around them untouched; how many are not.
fn wrong_at(target: &Window, at: usize, size: usize, seed: u64) -> u64 {
    let around = |from: usize| target.bytes(from, GUARD).iter().filter(|&&b| b != UNTOUCHED).count() as u64;
    wrong(target.bytes(at, size), seed).0 + around(at - GUARD) + around(at + size)
}

/// One descriptor for data, signal and counter.
pub fn sizes(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const ROOM: usize = (4 << 20) + (64 << 10);
    let world = open(env, &of(2))?;
    let (source, target) = (world.window(ROOM, 0)?, world.window(ROOM, 0)?);
    let (next, previous) = neighbours(env);
    let mut tally = Tally::default();
    let mut round = 0_u64;
    for size in [0, 1, 7, 8, 63, 64, 100, 1023, 4096, 4097, 65_536, 65_537, (1 << 20) + 1, 4 << 20] {
        for (from, to) in [(0, 0), (1, 4), (4095, 4097), (8, 61)] {
            round += 1;
            let context = round as usize % 2;
            let mut thread = thread(&world, context, round)?;
            let seed = |rank: u32| u64::from(rank) << 32 | round;
            let to = GUARD + to;
            fill(source.bytes(from, size), seed(env.rank as u32));
            target.bytes(to - GUARD, size + 2 * GUARD).fill(UNTOUCHED);
            env.barrier()?;
            let (from, there) = ((source.gin, from as u64), (target.gin, to as u64));
            thread.put(next, from, there, size as u64, Some(&Signal::add(3, round)), Some(5))?;
            env.bytes.set(env.bytes.get() + size as u64);
            let earlier = || (1..=round).filter(|r| *r as usize % 2 == context);
            let (sum, count) = (earlier().sum::<u64>(), earlier().count() as u64);
            thread.wait_signal(3, sum)?;
            let bad = wrong_at(&target, to, size, seed(previous)) + u64::from(thread.read_signal(3) != sum);
            tally.item(bad, || format!("{size} bytes to offset {to} of context {context}: {bad} bytes are wrong"));
            thread.wait_counter(5, count)?;
            let counted = thread.read_counter(5);
            tally.item(u64::from(counted != count), || format!("{count} puts were counted {counted} times"));
        }
    }
    world.close(&[&source, &target])?;
    Ok(tally)
}

/// Values that are carried by the descriptor or the entry itself, up to the most that fits.
pub fn values(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let rounds = env.rounds(400, 20_000);
    let world = open(env, &of(1))?;
    let (target, flags) = (world.window(4096, 0)?, world.window(4096, 1)?);
    let (next, previous) = neighbours(env);
    let mut thread = thread(&world, 0, 3)?;
    let mut tally = Tally::default();
    let most = world.device()?.most_inline();
    let value = |rank: u32, round: u64, size: usize| {
        let mut value = vec![0; size];
        fill(&mut value, u64::from(rank) << 40 ^ round);
        value
    };
    let va = Signal { place: Place::Va { window: flags.gin, offset: 8 }, add: Some(3), strong: true };
    for round in 1..=rounds {
        let (size, at) = (1 + round as usize % most, GUARD as u64 + round % 16);
        target.bytes(0, 256).fill(UNTOUCHED);
        env.barrier()?;
        let (mine, there) = (value(env.rank as u32, round, size), (target.gin, at));
        match round % 3 {
            0 => thread.put_value(next, &mine, there, Some(&Signal::add(1, 5)))?,
            1 => {
                thread.put_value(next, &mine, there, None)?;
                thread.signal(next, &Signal::add(1, 5))?
            }
            _ => {
                thread.put_value(next, &mine, there, Some(&va))?;
                thread.signal(next, &Signal::add(1, 5))?
            }
        };
        thread.wait_signal(1, 5 * round)?;
        let (wanted, at) = (value(previous, round, size), at as usize);
        let seen = target.bytes(at, size);
        let strays = |from: usize, len: usize| target.bytes(from, len).iter().filter(|&&b| b != UNTOUCHED).count();
        let strays = strays(0, at) + strays(at + size, 64);
        let bad = (0..size).filter(|&i| seen[i] != wanted[i]).count() + strays;
        tally.item(bad as u64, || format!("a value of {size} bytes: {seen:?}, not {wanted:?}; {strays} strays"));
        let by_address = flags.word(8).load(std::sync::atomic::Ordering::Acquire);
        let sum = 3 * (1..=round).filter(|r| r % 3 == 2).count() as u64;
        tally.item(u64::from(by_address != sum), || format!("signals by address add up to {by_address}, not {sum}"));
        env.barrier()?;
    }
    world.close(&[&target, &flags])?;
    Ok(tally)
}

/// More than one piece.
pub fn big(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = Tally::default();
    if !env.full {
        tally.note = Some("only with --full: needs 2 GiB a rank".into());
        return Ok(tally);
    }
    const STEP: usize = 4 << 20;
    let size = CHUNK as usize + 4097;
    let world = open(env, &of(1))?;
    let (source, target) = (world.window(size, 0)?, world.window(size, 0)?);
    let (next, previous) = neighbours(env);
    let mut thread = thread(&world, 0, 4)?;
    let seed = |rank: u32, step: usize| u64::from(rank) << 32 | step as u64;
    for at in (0..size).step_by(STEP) {
        fill(source.bytes(at, STEP.min(size - at)), seed(env.rank as u32, at));
        env.beat();
    }
    env.barrier()?;
    thread.put(next, (source.gin, 0), (target.gin, 0), size as u64, Some(&Signal::inc(0)), Some(0))?;
    env.bytes.set(size as u64);
    thread.wait_signal(0, 1)?;
    for at in (0..size).step_by(STEP) {
        let (bad, first) = wrong(target.bytes(at, STEP.min(size - at)), seed(previous, at));
        tally.item(bad, || format!("{bad} bytes are wrong, the first at {:?}", first.map(|f| f + at)));
        env.beat();
    }
    thread.wait_counter(0, 1)?;
    let counted = thread.read_counter(0);
    tally.item(u64::from(counted != 1), || format!("the put was counted {counted} times"));
    world.close(&[&source, &target])?;
    Ok(tally)
}
