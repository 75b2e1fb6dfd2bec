//! One rank is killed; its peers must learn of it and go on.

use super::Tally;
use crate::check::pattern::{fill, wrong};
use crate::check::world::{add, inc, spell, CaseEnv, Outcome, Request, Window, World};
use nccl_plugin_api::NcclResult;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

struct Survivor<'a> {
    world: World<'a>,
    data: Window,
    flags: Window,
    /// Everybody but the last rank.
    ring: Vec<usize>,
    rounds: u64,
    tally: Tally,
}

/// The last rank kills itself. Operations to it must fail with ncclRemoteError, and queryLastError must say so,
/// within the limit; the ring of the others turns all the while.
pub fn killed(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let world = World::open(env, 1)?;
    let (data, flags) = (world.window(1 << 20, 0)?, world.window(4096, 1)?);
    let victim = env.nranks - 1;
    // Some traffic with the victim first: queues that are in use.
    let next = (env.rank + 1) % env.nranks;
    for _ in 0..50 {
        let request = world.put_signal(0, next, (&data, 0), (&data, 512 << 10), 1000, &inc(&flags, 2048))?;
        world.wait(request)?;
    }
    world.wait_signal(&flags, 2048, 50, (env.rank + env.nranks - 1) % env.nranks)?;
    env.barrier()?;
    if env.rank == victim {
        env.control.rank(env.slot).doomed.store(1, Ordering::Release);
        // SAFETY: ends this process, which is what the case is about.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    let ring = (0..victim).collect();
    let mut own = Survivor { world, data, flags, ring, rounds: 0, tally: Tally::default() };
    own.until_everybody_knows(victim)?;
    own.error_is_reported(victim)?;
    for _ in 0..200 {
        own.turn()?;
    }
    own.later_operations_fail(victim)?;
    own.turn()?;
    let Survivor { world, data, flags, ring, tally, .. } = own;
    world.close_among(&ring, &[&data, &flags])?;
    Ok(tally)
}

impl Survivor<'_> {
    /// One round of verified traffic among the living.
    fn turn(&mut self) -> Outcome<()> {
        let Self { world, data, flags, ring, rounds, tally } = self;
        let env = world.env;
        if ring.len() > 1 {
            *rounds += 1;
            let (next, previous) = ((env.rank + 1) % ring.len(), (env.rank + ring.len() - 1) % ring.len());
            let seed = |rank: usize| rank as u64 * 100_000 + *rounds;
            fill(data.bytes(0, 3000), seed(env.rank));
            let request = world.put_signal(0, next, (data, 0), (data, 4096), 3000, &add(flags, 0, 1))?;
            world.wait(request)?;
            world.wait_exactly(flags, 0, *rounds, previous)?;
            let (bad, _) = wrong(data.bytes(4096, 3000), seed(previous));
            tally.item(bad, || format!("{bad} bytes from living rank {previous} are wrong"));
        }
        env.barrier_among(ring)
    }

    /// Sends to the victim until an operation fails as it should, on every rank, with the ring turning in between.
    fn until_everybody_knows(&mut self, victim: usize) -> Outcome<()> {
        let env = self.world.env;
        let start = Instant::now();
        let mut told = false;
        let mut pending: Vec<Request> = Vec::new();
        loop {
            if !told {
                told = self.attempt(victim, &mut pending)?;
            }
            let knows = env.gather_among(&self.ring.clone(), &[u8::from(told)])?;
            if knows.iter().all(|k| k == &[1]) {
                break;
            }
            if start.elapsed() > env.death_limit {
                let unaware = self.ring.iter().zip(&knows).filter(|(_, k)| *k == &[0]).map(|(r, _)| r.to_string());
                return Err(format!(
                    "rank(s) {} had no ncclRemoteError for operations to killed rank {victim} after {} s",
                    unaware.collect::<Vec<_>>().join(", "),
                    env.death_limit.as_secs()
                ));
            }
            self.turn()?;
        }
        // What was started before must not stay open for ever.
        for request in pending {
            let left = env.death_limit.saturating_sub(start.elapsed()).max(Duration::from_secs(1));
            let deadline = Instant::now() + left;
            while self.world.raw_test(request) == (NcclResult::SUCCESS, false) {
                if Instant::now() > deadline {
                    return Err(format!("an operation to killed rank {victim} neither ends nor fails"));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.tally.item(0, String::new);
        Ok(())
    }

    /// Starts one more operation and tests the earlier ones; true when one failed with ncclRemoteError.
    fn attempt(&mut self, victim: usize, pending: &mut Vec<Request>) -> Outcome<bool> {
        let world = &self.world;
        let put = super::super::world::plain(0, victim, (&self.data, 0), (&self.data, 8192), 64);
        let signal = inc(&self.flags, 1024);
        let mut raw = null_mut();
        match world.raw_put(&put, Some(&signal), &mut raw) {
            NcclResult::SUCCESS => pending.push(Request::of(raw, victim)),
            NcclResult::REMOTE_ERROR => return Ok(true),
            other => return Err(format!("iputSignal to killed rank {victim} returned {}, not 6", spell(other))),
        }
        let mut told = false;
        let mut odd = None;
        pending.retain(|&request| match world.raw_test(request) {
            (NcclResult::SUCCESS, done) => !done,
            (NcclResult::REMOTE_ERROR, _) => {
                told = true;
                false
            }
            (other, _) => {
                odd = Some(other);
                false
            }
        });
        match odd {
            Some(code) => Err(format!("test of an operation to killed rank {victim} returned {}, not 6", spell(code))),
            None => Ok(told),
        }
    }

    fn error_is_reported(&mut self, victim: usize) -> Outcome<()> {
        let deadline = Instant::now() + self.world.env.death_limit;
        while !self.world.has_error()? {
            if Instant::now() > deadline {
                return Err(format!("queryLastError says nothing of killed rank {victim}"));
            }
            self.world.progress()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        self.tally.item(0, String::new);
        Ok(())
    }

    /// Once a rank is known to be dead, no operation to it succeeds.
    fn later_operations_fail(&mut self, victim: usize) -> Outcome<()> {
        let mut pending = Vec::new();
        let deadline = Instant::now() + self.world.env.death_limit;
        while !self.attempt(victim, &mut pending)? {
            if Instant::now() > deadline {
                return Err(format!("operations to killed rank {victim} succeed again"));
            }
        }
        self.tally.item(0, String::new);
        Ok(())
    }
}
