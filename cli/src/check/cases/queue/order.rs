//! What a signal says of the data before it.

use super::super::Tally;
use super::{hand, neighbours, of, open, thread};
use crate::check::queue::crew;
use crate::check::world::{CaseEnv, Outcome, Window, World};
use crate::device::Signal;
use crate::dice::Dice;
use std::sync::atomic::Ordering;

/// Bytes of a slot, and slots in flight.
const SLOT: usize = 72 << 10;
const SLOTS: u64 = 16;

fn stamp(window: &Window, at: usize, len: usize, round: u64) {
    (0..len / 8).for_each(|i| window.word(at + 8 * i).store(round, Ordering::Relaxed));
}

fn unstamped(window: &Window, at: usize, len: usize, round: u64) -> u64 {
    (0..len / 8).filter(|&i| window.word(at + 8 * i).load(Ordering::Relaxed) != round).count() as u64
}

/// The puts of one round: offsets in the slot and lengths, all multiples of 8.
fn puts_of(round: u64) -> Vec<(usize, usize)> {
    let mut dice = Dice(round);
    let mut puts: Vec<_> = (0..3).map(|i| (i * 512, 8 + 8 * dice.below(32) as usize)).collect();
    puts.extend((round % 8 == 5).then_some((4096, 4096)));
    puts.extend((round % 64 == 3).then_some((8192, 60 << 10)));
    let at = dice.below(puts.len() as u64) as usize;
    puts.swap(0, at);
    puts
}

/// First one thread with many rounds under way, then several that put and one that signals when they have posted.
pub fn strong(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = alone(env)?;
    let more = together(env)?;
    tally.rounds += more.rounds;
    tally.wrong += more.wrong;
    tally.first = tally.first.or(more.first);
    Ok(tally)
}

/// One thread: puts, a signal now and then in one descriptor with the last of them, up to 16 rounds ahead.
fn alone(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let rounds = env.rounds(6_000, 300_000);
    let world = open(env, &of(1))?;
    let room = SLOTS as usize * SLOT;
    let (source, target) = (world.window(room, 0)?, world.window(room, 0)?);
    let (next, previous) = neighbours(env);
    let mut thread = thread(&world, 0, 11)?;
    let mut tally = Tally::default();
    let (mut sent, mut seen) = (0_u64, 0_u64);
    let slot = |round: u64| (round % SLOTS) as usize * SLOT;
    env.barrier()?;
    while sent < rounds || seen < rounds {
        let moved = (sent, seen);
        if sent < rounds && sent - thread.read_signal(1) < SLOTS {
            sent += 1;
            let puts = puts_of(sent);
            for (i, &(off, len)) in puts.iter().enumerate() {
                let at = slot(sent) + off;
                stamp(&source, at, len, sent);
                let signal = (i + 1 == puts.len() && sent % 3 == 0).then_some(Signal::inc(0));
                let at = at as u64;
                thread.put(next, (source.gin, at), (target.gin, at), len as u64, signal.as_ref(), None)?;
            }
            if sent % 3 != 0 {
                thread.signal(next, &Signal::inc(0))?;
            }
        }
        while seen < rounds && thread.read_signal(0) > seen {
            seen += 1;
            let late: u64 =
                puts_of(seen).iter().map(|&(off, len)| unstamped(&target, slot(seen) + off, len, seen)).sum();
            tally.item(late, || format!("round {seen}: the strong signal shows before {late} words of its puts"));
            thread.signal(previous, &Signal::inc(1))?;
        }
        if moved == (sent, seen) {
            let what = || format!("ranks {next} and {previous}: {sent} rounds sent, {seen} seen");
            let ready = || thread.read_signal(0) > seen || (sent < rounds && sent - thread.read_signal(1) < SLOTS);
            env.until(what, || Ok(ready().then_some(())))?;
        }
        env.progress_of(seen, rounds);
    }
    thread.flush()?;
    world.close(&[&source, &target])?;
    Ok(tally)
}

/// Four threads put, each its own part; a fifth posts the signal once they have posted.
fn together(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const HANDS: usize = 4;
    let rounds = env.rounds(150, 5_000);
    let world = open(env, &of(1))?;
    let (source, target) = (world.window(HANDS * SLOT, 0)?, world.window(HANDS * SLOT, 0)?);
    let (next, _) = neighbours(env);
    let mut tally = Tally::default();
    for round in 1..=rounds {
        for part in 0..HANDS {
            for (off, len) in puts_of(round + part as u64) {
                stamp(&source, part * SLOT + off, len, round);
            }
        }
        env.barrier()?;
        posted_by_crew(&world, (source.gin, target.gin), next, round, HANDS)?;
        thread(&world, 0, round)?.signal(next, &Signal::inc(0))?;
        let thread = thread(&world, 0, round)?;
        thread.wait_signal(0, round)?;
        let late = |part: usize| -> u64 {
            let puts = puts_of(round + part as u64);
            puts.iter().map(|&(off, len)| unstamped(&target, part * SLOT + off, len, round)).sum()
        };
        let late: u64 = (0..HANDS).map(late).sum();
        tally.item(late, || format!("round {round}: {late} words that other threads put come after the signal"));
        env.barrier()?;
    }
    world.close(&[&source, &target])?;
    Ok(tally)
}

fn posted_by_crew(world: &World<'_>, (from, to): (u64, u64), next: u32, round: u64, hands: usize) -> Outcome<()> {
    let device = world.device()?;
    crew(world.env, hands, |part, limit| {
        let mut thread = hand(device, 0, round << 8 | part as u64, limit);
        for (off, len) in puts_of(round + part as u64) {
            let at = (part * SLOT + off) as u64;
            thread.put(next, (from, at), (to, at), len as u64, None, None)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Puts with weak signals in the same descriptor, each on a signal of its own.
pub fn weak(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let rounds = env.rounds(10_000, 500_000);
    let world = open(env, &of(1))?;
    let room = SLOTS as usize * SLOT;
    let (source, target) = (world.window(room, 0)?, world.window(room, 0)?);
    let (next, previous) = neighbours(env);
    let mut thread = thread(&world, 0, 12)?;
    let mut tally = Tally::default();
    let (mut sent, mut seen) = (0_u64, 0_u64);
    let slot = |round: u64| (round % SLOTS) as usize;
    // How often a slot was used up to a round, itself included.
    let uses = |round: u64| (round + SLOTS - 1 - (round + SLOTS - 1) % SLOTS) / SLOTS;
    let acks = SLOTS as u32;
    let came = |thread: &crate::device::Thread<'_>, round: u64| thread.read_signal(slot(round) as u32) >= uses(round);
    env.barrier()?;
    while sent < rounds || seen < rounds {
        let moved = (sent, seen);
        if sent < rounds && sent - thread.read_signal(acks) < SLOTS {
            sent += 1;
            let (at, len) = (slot(sent) * SLOT, puts_of(sent)[0].1);
            stamp(&source, at, len, sent);
            let signal = Signal::inc(slot(sent) as u32).weak();
            thread.put(next, (source.gin, at as u64), (target.gin, at as u64), len as u64, Some(&signal), None)?;
        }
        while seen < rounds && came(&thread, seen + 1) {
            seen += 1;
            let late = unstamped(&target, slot(seen) * SLOT, puts_of(seen)[0].1, seen);
            tally.item(late, || format!("round {seen}: the weak signal shows before {late} words of its own put"));
            thread.signal(previous, &Signal::inc(acks))?;
        }
        if moved == (sent, seen) {
            let what = || format!("ranks {next} and {previous}: {sent} rounds sent, {seen} seen");
            let room = || sent < rounds && sent - thread.read_signal(acks) < SLOTS;
            let ready = || room() || (seen < rounds && came(&thread, seen + 1));
            env.until(what, || Ok(ready().then_some(())))?;
        }
        env.progress_of(seen, rounds);
    }
    thread.flush()?;
    world.close(&[&source, &target])?;
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_of_a_round_stay_in_their_slot_and_do_not_overlap() {
        for round in 1..500 {
            let mut puts = puts_of(round);
            puts.sort();
            assert!(puts.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{puts:?}");
            assert!(puts.iter().all(|&(off, len)| off % 8 == 0 && len % 8 == 0 && off + len <= SLOT));
        }
    }
}
