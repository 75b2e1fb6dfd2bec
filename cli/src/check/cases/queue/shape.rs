//! Rooms and how they are used.

use super::super::Tally;
use super::{hand, neighbours, of, open, thread};
use crate::check::queue::crew;
use crate::check::world::{CaseEnv, Outcome};
use crate::device::Signal;
use crate::dice::Dice;
use crate::plugin::ContextConfig;

/// From here on a queue is as deep as was asked, rounded up to a power of two; smaller ones may be deeper.
const EXACT_FROM: i32 = 64;

/// Depths that programs ask for, and small ones; each queue is filled three times and more.
pub fn depths(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = Tally::default();
    let (next, _) = neighbours(env);
    for depth in [0, 1, 5, 193, 256, 1024] {
        let world = open(env, &ContextConfig { queue_depth: depth, ..of(2) })?;
        world.properties_are_sane()?;
        for number in 0..2 {
            let device = world.device()?;
            let size = device.queue_size(number);
            let wrong = depth >= EXACT_FROM && size != (depth as u32).next_power_of_two();
            tally.item(u64::from(wrong), || format!("context {number}: depth {depth} was asked for, {size} came"));
            for peer in 0..env.nranks as u32 {
                let state = device.untouched(number, peer);
                tally.item(u64::from(state.is_err()), || format!("new: {}", state.unwrap_err()));
                env.beat();
            }
            let mut thread = thread(&world, number, 1)?;
            let ones = (0..crate::check::queue::SIGNALS as u32).filter(|&id| thread.read_signal(id) != 0).count();
            tally.item(ones as u64, || format!("context {number}: {ones} new signals are not 0"));
            env.barrier()?;
            let count = u64::from(size) * 3 + 7;
            for i in 0..count {
                thread.signal(next, &Signal::inc((i % 2) as u32))?;
            }
            thread.flush()?;
            thread.wait_signal(0, count.div_ceil(2))?;
            thread.wait_signal(1, count / 2)?;
            env.barrier()?;
            let seen = thread.read_signal(0) + thread.read_signal(1);
            tally.item(u64::from(seen != count), || format!("depth {depth}: {seen} signals of {count}"));
        }
        let bad = world.has_error()?;
        tally.item(u64::from(bad), || "queryLastError is true without a reason".into());
        world.close(&[])?;
    }
    Ok(tally)
}

/// More producers than slots; the sums say whether a descriptor was lost, read twice or half written.
pub fn wrap(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const PRODUCERS: usize = 6;
    let each = env.rounds(1_500, 100_000);
    let mut tally = Tally::default();
    for depth in [2, 16] {
        let world = open(env, &ContextConfig { queue_depth: depth, ..of(1) })?;
        let device = world.device()?;
        let (nranks, rank) = (env.nranks as u64, env.rank as u64);
        env.barrier()?;
        // What each producer adds to signal 0, and how often to signal 1, by rank.
        let sent = crew(env, PRODUCERS, |i, limit| {
            let mut thread = hand(device, 0, rank << 8 | i as u64, limit);
            let mut dice = Dice(rank << 16 | i as u64);
            let mut sums = vec![0_u64; 2 * nranks as usize];
            for _ in 0..each {
                let (peer, value) = (dice.below(nranks), dice.roll());
                if value % 4 == 0 {
                    thread.signal(peer as u32, &Signal::inc(1))?;
                    sums[2 * peer as usize + 1] += 1;
                } else {
                    thread.signal(peer as u32, &Signal::add(0, value))?;
                    sums[2 * peer as usize] = sums[2 * peer as usize].wrapping_add(value);
                }
            }
            thread.flush()?;
            Ok(sums)
        })?;
        let total = |at: usize| sent.iter().fold(0_u64, |sum, one| sum.wrapping_add(one[at]));
        let mine: Vec<u8> = (0..2 * env.nranks).flat_map(|at| total(at).to_le_bytes()).collect();
        let all = env.gather(&mine)?;
        let wanted = |id: usize| {
            let at = (2 * env.rank + id) * 8;
            let word = |said: &Vec<u8>| said[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or(0);
            all.iter().map(word).fold(0_u64, u64::wrapping_add)
        };
        let thread = thread(&world, 0, 2)?;
        for id in [0, 1] {
            let (word, wanted) = (|| thread.read_signal(id), wanted(id as usize));
            let what = || format!("the sum of all producers in signal {id}, {wanted:#x}; it is {:#x}", word());
            env.until(what, || Ok((word() == wanted).then_some(())))?;
        }
        env.barrier()?;
        let more = thread.read_signal(0) != wanted(0) || thread.read_signal(1) != wanted(1);
        tally.item(u64::from(more), || "signals went on after all was there".into());
        tally.rounds += each * PRODUCERS as u64;
        world.close(&[])?;
    }
    Ok(tally)
}

/// As many signals and counters as NCCL 2.29.7 asks for; the last of them work and are apart.
pub fn most_signals(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const MOST: i32 = 524_288;
    let world = open(env, &ContextConfig { n_signals: MOST, n_counters: MOST, ..of(1) })?;
    let window = world.window(4096, 0)?;
    let (next, _) = neighbours(env);
    let mut thread = thread(&world, 0, 3)?;
    let mut tally = Tally::default();
    env.barrier()?;
    let ids = [0, 1, MOST as u32 / 2, MOST as u32 - 2, MOST as u32 - 1];
    for id in ids {
        let (from, to) = ((window.gin, 0), (window.gin, 2048));
        thread.put(next, from, to, 8, Some(&Signal::add(id, u64::from(id) + 1)), Some(id))?;
    }
    for id in ids {
        thread.wait_signal(id, u64::from(id) + 1)?;
        thread.wait_counter(id, 1)?;
    }
    env.barrier()?;
    let others = (0..MOST as u32).filter(|id| !ids.contains(id));
    let touched = others.filter(|&id| thread.read_signal(id) != 0 || thread.read_counter(id) != 0).count() as u64;
    tally.item(touched, || format!("{touched} signals or counters that nobody named are not 0"));
    let wrong = |&&id: &&u32| thread.read_signal(id) != u64::from(id) + 1 || thread.read_counter(id) != 1;
    let wrong = ids.iter().filter(wrong).count() as u64;
    tally.item(wrong, || format!("{wrong} signals or counters are wrong"));
    world.close(&[&window])?;
    Ok(tally)
}
