//! Indexed signals: additions of 64 bits in the context's own words, which device code may set back.

use super::super::Tally;
use super::{hand, neighbours, of, open, thread};
use crate::check::queue::crew;
use crate::check::world::{CaseEnv, Outcome};
use crate::device::Signal;

/// Every thread of every rank adds to two signals of every rank, itself included, on two contexts.
pub fn sums(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const PRODUCERS: usize = 4;
    const CONTEXTS: usize = 2;
    let each = env.rounds(1_000, 100_000);
    let world = open(env, &of(CONTEXTS))?;
    let (device, nranks) = (world.device()?, env.nranks as u32);
    // Carries, high bits and wrap-around: what a sender adds on a context.
    let value = |rank: usize, context: usize| (1_u64 << 63 | u64::from(u32::MAX)) + (rank * 8 + context) as u64;
    let rank = env.rank;
    env.barrier()?;
    crew(env, PRODUCERS, |i, limit| {
        let context = i % CONTEXTS;
        let mut thread = hand(device, context, (rank << 8 | i) as u64, limit);
        for _ in 0..each {
            for peer in 0..nranks {
                thread.signal(peer, &Signal::add(7, value(rank, context)))?;
                thread.signal(peer, &Signal::inc(63))?;
            }
        }
        thread.flush()
    })?;
    let mut tally = Tally { rounds: each * PRODUCERS as u64 * u64::from(nranks) * 2, ..Tally::default() };
    let senders = each * (PRODUCERS / CONTEXTS) as u64;
    let mut wanted = Vec::new();
    for context in 0..CONTEXTS {
        let add = (0..env.nranks).fold(0_u64, |s, r| s.wrapping_add(value(r, context).wrapping_mul(senders)));
        wanted.push([(7, add), (63, senders * u64::from(nranks))]);
        let thread = thread(&world, context, 5)?;
        for (id, sum) in wanted[context] {
            let what = || format!("signal {id} of context {context}: {:#x}, not {sum:#x}", thread.read_signal(id));
            env.until(what, || Ok((thread.read_signal(id) == sum).then_some(())))?;
        }
    }
    env.barrier()?;
    // Nobody has anything under way now; whatever came twice is there.
    for (context, wanted) in wanted.iter().enumerate() {
        let thread = thread(&world, context, 6)?;
        for &(id, sum) in wanted {
            let seen = thread.read_signal(id);
            tally.item(u64::from(seen != sum), || format!("signal {id} went on to {seen:#x}, it should be {sum:#x}"));
        }
        let others = (0..63).filter(|&id| id != 7 && thread.read_signal(id) != 0).count() as u64;
        tally.item(others, || format!("{others} signals of context {context} that nobody adds to are not 0"));
    }
    world.close(&[])?;
    Ok(tally)
}

/// Device code begins again from 0, round after round, while the plugin goes on as before.
pub fn resets(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let rounds = env.rounds(200, 10_000);
    let world = open(env, &of(1))?;
    let window = world.window(4096, 0)?;
    let (next, _) = neighbours(env);
    let mut thread = thread(&world, 0, 7)?;
    let mut tally = Tally::default();
    for round in 1..=rounds {
        // All ranks have set theirs back before anybody adds.
        env.barrier()?;
        for _ in 0..round % 4 {
            thread.signal(next, &Signal::inc(2))?;
            thread.put(next, (window.gin, 0), (window.gin, 2048), 16, Some(&Signal::add(9, round << 40)), Some(1))?;
        }
        let count = round % 4;
        thread.wait_signal(2, count)?;
        thread.wait_signal(9, count.wrapping_mul(round << 40))?;
        thread.wait_counter(1, count)?;
        let seen = (thread.read_signal(2), thread.read_signal(9), thread.read_counter(1));
        let wanted = (count, count.wrapping_mul(round << 40), count);
        tally.item(u64::from(seen != wanted), || format!("round {round}: {seen:?}, not {wanted:?}"));
        thread.reset_signal(2);
        thread.reset_signal(9);
        thread.reset_counter(1);
        let seen = (thread.read_signal(2), thread.read_signal(9), thread.read_counter(1));
        tally.item(u64::from(seen != (0, 0, 0)), || format!("round {round}: after the reset {seen:?}"));
    }
    world.close(&[&window])?;
    Ok(tally)
}
