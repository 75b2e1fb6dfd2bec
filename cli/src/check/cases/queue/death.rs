//! One rank is killed: queues towards it must not stand, and the others go on.

use super::super::Tally;
use super::{of, open, thread};
use crate::check::pattern::{fill, wrong};
use crate::check::world::{CaseEnv, Outcome, Window, World};
use crate::device::gdaki::Status;
use crate::device::{Pen, Signal};
use crate::plugin::ContextConfig;
use std::sync::atomic::Ordering;
use std::time::Instant;

const DEPTH: i32 = 64;
const SIZE: usize = 3000;

struct Survivor<'a> {
    world: World<'a>,
    data: Window,
    /// Everybody but the last rank.
    ring: Vec<usize>,
    turns: u64,
    tally: Tally,
}

/// The last rank kills itself. The others' queryLastError must say so within the limit; descriptors towards it are
/// given credit before and after; traffic among the living, on the other context, turns all the while.
pub fn killed(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let world = open(env, &ContextConfig { queue_depth: DEPTH, ..of(2) })?;
    let data = world.window(64 << 10, 0)?;
    let victim = env.nranks - 1;
    // Some traffic with the victim first: queues that are in use.
    let mut thread = thread(&world, 0, 21)?;
    for _ in 0..50 {
        let peer = ((env.rank + 1) % env.nranks) as u32;
        thread.put(peer, (data.gin, 0), (data.gin, 32 << 10), 1000, Some(&Signal::inc(9)), None)?;
    }
    thread.wait_signal(9, 50)?;
    thread.flush()?;
    let early = world.has_error()?;
    env.barrier()?;
    if env.rank == victim {
        env.control.rank(env.slot).doomed.store(1, Ordering::Release);
        // SAFETY: ends this process, which is what the case is about.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    let mut own = Survivor { world, data, ring: (0..victim).collect(), turns: 0, tally: Tally::default() };
    own.tally.item(u64::from(early), || "queryLastError is true while all ranks live".into());
    own.until_everybody_knows(victim as u32)?;
    own.credits_go_on(victim as u32)?;
    (0..100).try_for_each(|_| own.turn())?;
    let error = own.world.has_error()?;
    own.tally.item(u64::from(!error), || "queryLastError has forgotten the killed rank".into());
    let Survivor { world, data, ring, tally, .. } = own;
    world.close_among(&ring, &[&data])?;
    Ok(tally)
}

impl Survivor<'_> {
    /// One round of verified traffic among the living.
    fn turn(&mut self) -> Outcome<()> {
        let Self { world, data, ring, turns, tally } = self;
        let env = world.env;
        *turns += 1;
        let (next, previous) = ((env.rank + 1) % ring.len(), (env.rank + ring.len() - 1) % ring.len());
        let seed = |rank: usize| rank as u64 * 100_000 + *turns;
        fill(data.bytes(0, SIZE), seed(env.rank));
        let mut thread = thread(world, 1, *turns)?;
        let (from, to) = ((data.gin, 0), (data.gin, 8192));
        let posted = thread.put(next as u32, from, to, SIZE as u64, Some(&Signal::inc(3)), None)?;
        thread.complete(&posted)?;
        thread.wait_signal(3, *turns)?;
        let (bad, _) = wrong(data.bytes(8192, SIZE), seed(previous));
        tally.item(bad, || format!("{bad} bytes from living rank {previous} are wrong"));
        env.barrier_among(ring)
    }

    /// Sends to the victim, no more than there are slots, until queryLastError says so on every rank.
    fn until_everybody_knows(&mut self, victim: u32) -> Outcome<()> {
        let env = self.world.env;
        let start = Instant::now();
        for attempt in 0.. {
            if attempt < DEPTH / 2 {
                self.world.device()?.thread(0, Pen::plain(), env).signal(victim, &Signal::inc(4))?;
            }
            let told = self.world.has_error()?;
            let knows = env.gather_among(&self.ring, &[u8::from(told)])?;
            if knows.iter().all(|k| k == &[1]) {
                break;
            }
            if start.elapsed() > env.death_limit {
                let unaware = self.ring.iter().zip(&knows).filter(|(_, k)| *k == &[0]).map(|(r, _)| r.to_string());
                return Err(format!(
                    "queryLastError of rank(s) {} says nothing of killed rank {victim} after {} s",
                    unaware.collect::<Vec<_>>().join(", "),
                    env.death_limit.as_secs()
                ));
            }
            self.turn()?;
        }
        self.tally.item(0, String::new);
        Ok(())
    }

    /// Towards the victim; device code that waits for it must not hang.
    fn credits_go_on(&mut self, victim: u32) -> Outcome<()> {
        if self.world.device()?.gdaki().is_some() {
            return self.entries_fail(victim);
        }
        // More than a queue full.
        let mut thread = thread(&self.world, 0, 22)?;
        let ended = (0..3 * DEPTH).try_for_each(|_| thread.signal(victim, &Signal::inc(4)).map(drop));
        ended.and_then(|()| thread.flush()).map_err(|e| format!("towards killed rank {victim}: {e}"))?;
        self.tally.item(0, String::new);
        Ok(())
    }

    /// Every entry towards the victim gets a completion entry, that of an error. Device code looks one lap ahead of the
    /// first that failed, so there is no more than that.
    fn entries_fail(&mut self, victim: u32) -> Outcome<()> {
        let Self { world, tally, .. } = self;
        let (env, kernel) = (world.env, world.device()?.gdaki().ok_or("there are no queue pairs")?);
        let queue = kernel.queue_pair(0, victim).ok_or("no queue pair towards the killed rank")?;
        let entry = kernel.add_signal(0, victim, 4, 1);
        for _ in 0..DEPTH / 4 {
            let last = queue.post(std::slice::from_ref(&entry), &mut Pen::plain(), env)?;
            let status = queue.wait(last, env).map_err(|e| format!("towards killed rank {victim}: {e}"))?;
            tally.item(u64::from(status == Status::Good), || {
                format!("an entry towards killed rank {victim} is complete without an error")
            });
        }
        Ok(())
    }
}
