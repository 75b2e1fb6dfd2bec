//! The ordering contract, as a litmus test: a ring of slots, stamped with round numbers, checked the moment a signal
//! shows, acknowledged so that no slot is overwritten before it was checked.

use super::Tally;
use crate::check::pattern::Dice;
use crate::check::world::{add, inc, CaseEnv, Outcome, Request, Window, World};
use crate::plugin::Signal;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Slots in flight a context.
const SLOTS: u64 = 32;
/// Bytes a slot.
const SLOT: usize = 72 << 10;
/// The receiver acknowledges this often.
const ACK_EVERY: u64 = 8;

/// What a sender does in one round: puts, at these offsets of the slot and this long; multiples of 8.
fn puts_of(round: u64, context: usize) -> Vec<(usize, usize)> {
    let mut dice = Dice(round * 16 + context as u64);
    let mut puts = Vec::new();
    if round % 64 == 3 {
        puts.push((8192, 60 << 10));
    } else if round % 8 == 5 {
        puts.push((4096, 4096));
    }
    for i in 0..1 + dice.below(3) as usize {
        puts.push((i * 512 + 8 * dice.below(8) as usize, 8 + 8 * dice.below(16) as usize));
    }
    // The large one is first, in the middle or last.
    let at = dice.below(puts.len() as u64) as usize;
    puts.swap(0, at);
    puts
}

fn stamp(round: u64, context: usize) -> u64 {
    (round << 8) | context as u64
}

/// How many of rounds 1 to `round` also added to the second word before the main signal.
fn extras(round: u64) -> u64 {
    round / 4
}

struct Lane {
    context: usize,
    /// Rounds sent, as a sender.
    sent: u64,
    /// Rounds checked, as a receiver.
    seen: u64,
    requests: VecDeque<Request>,
}

impl Lane {
    fn slot(&self, round: u64) -> usize {
        (self.context * SLOTS as usize + (round % SLOTS) as usize) * SLOT
    }

    /// Signal words of this lane: main, extra, acknowledged; 64 bytes apart. Weak ones follow, one a slot.
    fn word(&self, which: usize) -> usize {
        (self.context * (3 + SLOTS as usize) + which) * 64
    }
}

struct Litmus<'a> {
    world: World<'a>,
    source: Window,
    target: Window,
    flags: Window,
    next: usize,
    previous: usize,
    rounds: u64,
    weak: bool,
}

impl<'a> Litmus<'a> {
    fn open(env: &'a CaseEnv<'a>, rounds: u64, weak: bool) -> Outcome<Self> {
        let world = World::open(env, 3)?;
        let room = world.contexts * SLOTS as usize * SLOT;
        let (source, target) = (world.window(room, 0)?, world.window(room, 0)?);
        let flags = world.window(world.contexts * (3 + SLOTS as usize) * 64, 1)?;
        let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
        Ok(Self { world, source, target, flags, next, previous, rounds, weak })
    }

    fn run(self) -> Outcome<Tally> {
        let env = self.world.env;
        let new = |context| Lane { context, sent: 0, seen: 0, requests: VecDeque::new() };
        let mut lanes: Vec<Lane> = (0..self.world.contexts).map(new).collect();
        let share = self.rounds / lanes.len() as u64;
        let mut tally = Tally::default();
        env.barrier()?;
        while lanes.iter().any(|l| l.sent < share || l.seen < share) {
            let before: u64 = lanes.iter().map(|l| l.sent + l.seen).sum();
            let mut moved = false;
            for lane in &mut lanes {
                moved |= self.send(lane, share)?;
                moved |= self.receive(lane, share, &mut tally)?;
                self.world.reap(&mut lane.requests, 512)?;
            }
            env.progress_of(before / 2, share * self.world.contexts as u64);
            if !moved {
                // Nothing to do: wait for either a credit or a signal.
                let what = || {
                    let list = lanes.iter().map(|l| format!("context {}: sent {}, seen {}", l.context, l.sent, l.seen));
                    format!(
                        "a signal from rank {} or an acknowledgement from rank {} ({})",
                        self.previous,
                        self.next,
                        list.collect::<Vec<_>>().join("; ")
                    )
                };
                env.until(what, || {
                    self.world.progress()?;
                    let ready = lanes.iter().any(|l| self.may_send(l, share) || self.arrived(l, share));
                    Ok(ready.then_some(()))
                })?;
            }
        }
        for lane in &mut lanes {
            self.world.reap(&mut lane.requests, 0)?;
        }
        self.world.close(&[&self.source, &self.target, &self.flags])?;
        Ok(tally)
    }

    fn may_send(&self, lane: &Lane, share: u64) -> bool {
        lane.sent < share && lane.sent - self.flags.word(lane.word(2)).load(Ordering::Acquire) < SLOTS
    }

    fn arrived(&self, lane: &Lane, share: u64) -> bool {
        if lane.seen >= share {
            return false;
        }
        let round = lane.seen + 1;
        match self.weak {
            false => self.flags.word(lane.word(0)).load(Ordering::Acquire) >= round,
            // A slot's word counts the uses of that slot.
            true => {
                let uses = (round - round % SLOTS) / SLOTS + u64::from(round % SLOTS != 0);
                let slot = (round % SLOTS) as usize;
                let first = if slot == 0 { 0 } else { 1 };
                let uses = if slot == 0 { round / SLOTS } else { uses.max(first) };
                self.flags.word(lane.word(3 + slot)).load(Ordering::Acquire) >= uses
            }
        }
    }

    fn send(&self, lane: &mut Lane, share: u64) -> Outcome<bool> {
        if !self.may_send(lane, share) {
            return Ok(false);
        }
        lane.sent += 1;
        let (round, slot) = (lane.sent, lane.slot(lane.sent));
        let puts = puts_of(round, lane.context);
        for &(off, len) in &puts {
            (0..len / 8).for_each(|i| {
                self.source.word(slot + off + 8 * i).store(stamp(round, lane.context), Ordering::Relaxed);
            });
        }
        let (world, next, context) = (&self.world, self.next, lane.context);
        let put = |&(off, len): &(usize, usize)| {
            world.put(context, next, (&self.source, slot + off), (&self.target, slot + off), len)
        };
        let put_signal = |&(off, len): &(usize, usize), signal: &Signal| {
            world.put_signal(context, next, (&self.source, slot + off), (&self.target, slot + off), len, signal)
        };
        if self.weak {
            let signal = Signal { strong: false, ..inc(&self.flags, lane.word(3 + (round % SLOTS) as usize)) };
            lane.requests.push_back(put_signal(&puts[0], &signal)?);
            return Ok(true);
        }
        let signal = add(&self.flags, lane.word(0), 1);
        if round % 4 == 0 {
            lane.requests.push_back(world.signal(context, next, &inc(&self.flags, lane.word(1)))?);
        }
        let (last, earlier) = puts.split_last().expect("at least one");
        for part in earlier {
            lane.requests.push_back(put(part)?);
        }
        if round % 3 == 0 {
            lane.requests.push_back(put_signal(last, &signal)?);
        } else {
            lane.requests.push_back(put(last)?);
            lane.requests.push_back(world.signal(context, next, &signal)?);
        }
        Ok(true)
    }

    fn receive(&self, lane: &mut Lane, share: u64, tally: &mut Tally) -> Outcome<bool> {
        let mut moved = false;
        while self.arrived(lane, share) {
            moved = true;
            lane.seen += 1;
            let (round, slot) = (lane.seen, lane.slot(lane.seen));
            let mut puts = puts_of(round, lane.context);
            if self.weak {
                puts.truncate(1);
            }
            let wanted = stamp(round, lane.context);
            let mut late = 0;
            for &(off, len) in &puts {
                let word = |i: usize| self.target.word(slot + off + 8 * i).load(Ordering::Relaxed);
                late += (0..len / 8).filter(|&i| word(i) != wanted).count() as u64;
            }
            let extra = self.flags.word(lane.word(1)).load(Ordering::Relaxed);
            let early = u64::from(!self.weak && extra < extras(round));
            tally.item(late + early, || {
                let sizes = puts.iter().map(|p| p.1.to_string()).collect::<Vec<_>>().join(", ");
                let context = lane.context;
                match late {
                    0 => format!(
                        "round {round} of context {context}: the signal overtook an earlier signal \
                         ({extra} of {})",
                        extras(round)
                    ),
                    n => format!(
                        "round {round} of context {context}: the signal shows before {n} words of its \
                         puts ({sizes} bytes)"
                    ),
                }
            });
            if round % ACK_EVERY == 0 || round == share {
                let acked = if round % ACK_EVERY == 0 { ACK_EVERY } else { round % ACK_EVERY };
                let ack = add(&self.flags, lane.word(2), acked);
                lane.requests.push_back(self.world.signal(lane.context, self.previous, &ack)?);
            }
        }
        Ok(moved)
    }
}

fn rounds(env: &CaseEnv<'_>) -> u64 {
    env.rounds(50_000, 3_000_000)
}

/// Puts of mixed sizes, an earlier signal now and then, then a strong signal.
pub fn strong(env: &CaseEnv<'_>) -> Outcome<Tally> {
    Litmus::open(env, rounds(env), false)?.run()
}

/// Puts with weak signals, each on its own word.
pub fn weak(env: &CaseEnv<'_>) -> Outcome<Tally> {
    Litmus::open(env, rounds(env) / 2, true)?.run()
}

/// One put with its signal at a time, every word looked at as soon as the signal shows.
pub fn put_signal(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const ROOM: usize = 2 << 20;
    let rounds = env.rounds(2_000, 100_000);
    let world = World::open(env, 1)?;
    let (source, target) = (world.window(ROOM, 0)?, world.window(ROOM, 0)?);
    let flags = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let mut tally = Tally::default();
    for round in 1..=rounds {
        let len = match round % 16 {
            0 => ROOM >> (round / 16 % 6),
            n => 8 << (n % 12),
        };
        (0..len / 8).for_each(|i| source.word(8 * i).store(round, Ordering::Relaxed));
        let request = world.put_signal(0, next, (&source, 0), (&target, 0), len, &inc(&flags, 0))?;
        world.wait_signal(&flags, 0, round, previous)?;
        let late = (0..len / 8).filter(|&i| target.word(8 * i).load(Ordering::Relaxed) != round).count() as u64;
        tally.item(late, || format!("round {round}: {late} words of {len} bytes come after their signal"));
        world.wait(request)?;
        let ack = world.signal(0, previous, &inc(&flags, 64))?;
        world.wait(ack)?;
        world.wait_signal(&flags, 64, round, next)?;
        env.progress_of(round, rounds);
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}
