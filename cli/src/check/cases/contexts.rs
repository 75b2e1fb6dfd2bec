//! Contexts and communicators keep apart.

use super::Tally;
use crate::check::pattern::{fill, wrong};
use crate::check::world::{add, inc, plain, spell, CaseEnv, Outcome, World};
use nccl_plugin_api::NcclResult;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// Moves a world into threads. The table's functions may be called from any of them.
struct Anywhere<T>(T);
// SAFETY: the plugin promises that any function may be called on any thread; each thread here has its own windows,
// context and requests, and the status words behind the `CaseEnv` are atomics or only written with relaxed meaning.
unsafe impl<T> Sync for Anywhere<T> {}

impl<T> Anywhere<T> {
    fn get(&self) -> &T {
        &self.0
    }
}

/// Four contexts, each driven by a thread of its own.
pub fn data(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const CONTEXTS: usize = 4;
    const STRIPE: usize = 64 << 10;
    let rounds = env.rounds(300, 20_000);
    let world = World::open(env, CONTEXTS)?;
    let (source, target) = (world.window(CONTEXTS * STRIPE, 0)?, world.window(CONTEXTS * STRIPE, 0)?);
    let flags = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    env.barrier()?;
    let shared = &Anywhere((&world, &source, &target, &flags));
    let one = move |context: usize| -> Outcome<Tally> {
        let &(world, source, target, flags) = shared.get();
        let mut tally = Tally::default();
        let (base, word) = (context * STRIPE, context * 128);
        for round in 1..=rounds {
            let size = [8, 1000, 4096, STRIPE][(round % 4) as usize];
            let seed = |rank: usize| (rank * 8 + context) as u64 * 1_000_000 + round;
            fill(source.bytes(base, size), seed(world.env.rank));
            let request = world.put_signal(context, next, (source, base), (target, base), size, &inc(flags, word))?;
            world.wait_signal(flags, word, round, previous)?;
            let (bad, _) = wrong(target.bytes(base, size), seed(previous));
            tally.item(bad, || format!("context {context}, round {round}: {bad} of {size} bytes are wrong"));
            world.wait(request)?;
            let ack = world.signal(context, previous, &inc(flags, word + 64))?;
            world.wait(ack)?;
            world.wait_signal(flags, word + 64, round, next)?;
        }
        Ok(tally)
    };
    let tallies: Vec<Outcome<Tally>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..CONTEXTS).map(|context| scope.spawn(move || one(context))).collect();
        let ended =
            |t: std::thread::ScopedJoinHandle<'_, _>| t.join().unwrap_or_else(|_| Err("a thread panicked".into()));
        threads.into_iter().map(ended).collect()
    });
    let mut sum = Tally::default();
    for tally in tallies {
        let tally = tally?;
        sum.rounds += tally.rounds;
        sum.wrong += tally.wrong;
        sum.first = sum.first.or(tally.first);
    }
    world.close(&[&source, &target, &flags])?;
    Ok(sum)
}

/// Large puts are queued on context 0, then one signal on context 1: it must show before the last of them has come, in
/// one of the rounds at least. On a busy machine the rank that looks may be late, but hardly each time.
pub fn independent(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const SIZE: usize = 32 << 20;
    const PUTS: u64 = 16;
    let rounds = 5;
    let world = World::open(env, 2)?;
    let (source, target) = (world.window(SIZE, 0)?, world.window(SIZE, 0)?);
    let flags = world.window(4096, 1)?;
    let (mut tally, mut early) = (Tally::default(), 0);
    // In pairs, so that a rank either sends or receives.
    let sends = env.rank % 2 == 0 && env.rank + 1 < env.nranks;
    let receives = env.rank % 2 == 1;
    for round in 1..=rounds {
        env.barrier()?;
        if sends {
            let mut requests = Vec::new();
            for _ in 0..PUTS {
                let large = inc(&flags, 0);
                requests.push(world.put_signal(0, env.rank + 1, (&source, 0), (&target, 0), SIZE, &large)?);
            }
            requests.push(world.signal(1, env.rank + 1, &inc(&flags, 64))?);
            for request in requests {
                world.wait(request)?;
            }
        }
        if receives {
            world.wait_signal(&flags, 64, round, env.rank - 1)?;
            let large = flags.word(0).load(Ordering::Acquire);
            early += u64::from(large < round * PUTS);
            tally.item(0, String::new);
            world.wait_signal(&flags, 0, round * PUTS, env.rank - 1)?;
        }
        env.barrier()?;
    }
    if receives && early == 0 {
        let mib = (SIZE as u64 * PUTS) >> 20;
        tally.item(1, || {
            format!(
                "in each of {rounds} rounds the signal on context 1 came after all {mib} MiB that context 0 was given \
                 before it"
            )
        });
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}

/// Two communicators of the same ranks in one process.
pub fn communicators(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let first = World::open(env, 1)?;
    let second = World::with_table(env, first.table.clone(), 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let mut tally = Tally::default();
    let windows = |w: &World<'_>| Ok::<_, String>((w.window(8192, 0)?, w.window(4096, 1)?));
    let pair = [windows(&first)?, windows(&second)?];
    for round in 1..=100_u64 {
        for (world, (data, flags), salt) in [(&first, &pair[0], 1), (&second, &pair[1], 2)] {
            let seed = |rank: usize| (rank as u64 * 2 + salt) * 1000 + round;
            fill(data.bytes(0, 512), seed(env.rank));
            let request = world.put_signal(0, next, (data, 0), (data, 4096), 512, &add(flags, 0, salt))?;
            world.wait(request)?;
            world.wait_exactly(flags, 0, salt * round, previous)?;
            let (bad, _) = wrong(data.bytes(4096, 512), seed(previous));
            tally.item(bad, || format!("communicator {salt}, round {round}: {bad} bytes are wrong"));
            env.barrier()?;
        }
    }
    if env.way.is_by_device_code() {
        // Nothing is refused: queue-bad and gdaki-bad have what becomes of what names nothing.
        let [(d1, f1), (d2, f2)] = &pair;
        first.close(&[d1, f1])?;
        second.close(&[d2, f2])?;
        return Ok(tally);
    }
    // The second communicator does not know the first one's window.
    let (foreign, own) = (&pair[0].0, &pair[1].0);
    for (what, put) in [
        ("source", plain(0, next, (foreign, 0), (own, 4096), 8)),
        ("target", plain(0, next, (own, 0), (foreign, 4096), 8)),
    ] {
        let mut raw = null_mut();
        let code = second.raw_put(&put, None, &mut raw);
        tally.item(u64::from(code == NcclResult::SUCCESS), || {
            format!("iput with a {what} window of another communicator returned {}", spell(code))
        });
    }
    // Whatever was wrongly accepted must not be under way while windows go.
    env.barrier()?;
    let [(d1, f1), (d2, f2)] = &pair;
    first.close(&[d1, f1])?;
    second.close(&[d2, f2])?;
    Ok(tally)
}
