//! Data arrives whole, where it belongs, and nowhere else.

use super::Tally;
use crate::check::pattern::{byte, fill, fill_from, wrong, wrong_from, Dice};
use crate::check::world::{add, CaseEnv, Outcome, Window, World};
use std::sync::atomic::Ordering;

/// Bytes on both sides of a target that must stay as they were.
const GUARD: usize = 64;
/// What untouched bytes hold.
const UNTOUCHED: u8 = 0xA5;

/// Large memory is filled and checked in steps, with a sign of life between them.
const STEP: usize = 4 << 20;

/// One put to check.
#[derive(Clone, Copy)]
struct Item {
    size: usize,
    from: usize,
    to: usize,
}

impl Item {
    fn describe(&self, sender: usize) -> String {
        format!("{} bytes from offset {} of rank {sender} to offset {}", self.size, self.from, self.to)
    }
}

/// Lays items out in a window of `room` bytes so that none, with its guards, touches another.
fn lay_out(shapes: &[(usize, usize, usize)], room: usize) -> Vec<Vec<Item>> {
    let mut batches = vec![Vec::new()];
    let mut at = 0;
    for &(size, from, to) in shapes {
        let span = (size + from.max(to) + 2 * GUARD).next_multiple_of(4096) + 4096;
        if at + span > room {
            batches.push(Vec::new());
            at = 0;
        }
        let item = Item { size, from: at + 4096 + from, to: at + 4096 + to };
        batches.last_mut().expect("there is one").push(item);
        at += span;
    }
    batches
}

/// Every rank puts the items to the next rank; half of them carry their signal, half are followed by one.
fn run_batches(env: &CaseEnv<'_>, shapes: &[(usize, usize, usize)], room: usize) -> Outcome<Tally> {
    let world = World::open(env, 1)?;
    world.properties_are_sane()?;
    let (source, target) = (world.window(room, 0)?, world.window(room, 0)?);
    let flags = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    let seed = |rank: usize, batch: usize| (rank * 1000 + batch) as u64 + 1;
    let mut tally = Tally::default();
    let mut signalled = 0;
    for (batch, items) in lay_out(shapes, room).iter().enumerate() {
        for at in (0..room).step_by(STEP) {
            let len = STEP.min(room - at);
            fill_from(source.bytes(at, len), seed(env.rank, batch), at);
            target.bytes(at, len).fill(UNTOUCHED);
            env.beat();
        }
        env.barrier()?;
        let mut requests = Vec::new();
        for (i, item) in items.iter().enumerate() {
            let (from, to) = ((&source, item.from), (&target, item.to));
            if i % 2 == 0 {
                requests.push(world.put_signal(0, next, from, to, item.size, &add(&flags, 0, 1))?);
            } else {
                requests.push(world.put(0, next, from, to, item.size)?);
                requests.push(world.signal(0, next, &add(&flags, 0, 1))?);
            }
        }
        for request in requests {
            world.wait(request)?;
        }
        signalled += items.len() as u64;
        world.wait_exactly(&flags, 0, signalled, previous)?;
        for item in items {
            check_item(env, &mut tally, item, &target, seed(previous, batch), previous);
        }
        env.progress_of(tally.rounds, shapes.len() as u64);
        env.barrier()?;
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}

fn check_item(env: &CaseEnv<'_>, tally: &mut Tally, item: &Item, target: &Window, seed: u64, sender: usize) {
    let (mut count, mut first) = (0, None);
    for at in (0..item.size).step_by(STEP) {
        let data = target.bytes(item.to + at, STEP.min(item.size - at));
        let (bad, place) = wrong_from(data, seed, item.from + at);
        count += bad;
        first = first.or(place.map(|p| p + at));
        env.beat();
    }
    let around = |from: usize| target.bytes(from, GUARD).iter().filter(|&&b| b != UNTOUCHED).count() as u64;
    let strays = around(item.to - GUARD) + around(item.to + item.size);
    tally.item(count + strays, || match first {
        Some(at) => format!("{}: byte {at} is wrong ({count} in all)", item.describe(sender)),
        None => format!("{}: {strays} bytes around it were written", item.describe(sender)),
    });
}

/// Small, odd and large sizes at every pairing of offsets.
pub fn put_sizes(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut shapes = Vec::new();
    for size in
        [0, 1, 2, 3, 7, 8, 9, 15, 16, 31, 63, 64, 65, 127, 255, 256, 511, 1000, 1023, 1024, 1025, 4095, 4096, 4097]
    {
        for from in [0, 1, 3, 8, 63] {
            for to in [0, 1, 4, 7, 8, 61] {
                shapes.push((size, from, to));
            }
        }
    }
    for size in [16_383, 65_535, 65_536, 65_537, 262_144, 1 << 20, (1 << 20) + 1, (4 << 20) + 3] {
        for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 7)] {
            shapes.push((size, from, to));
        }
    }
    run_batches(env, &shapes, 16 << 20)
}

/// Ranges that begin or end just before, at and after a page boundary.
pub fn put_pages(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let edges = [4095, 4096, 4097, 8191, 8192];
    let mut shapes = Vec::new();
    for size in [1, 2, 4095, 4096, 4097, 8192, 8193] {
        for from in edges {
            shapes.extend(edges.map(|to| (size, from, to)));
        }
    }
    run_batches(env, &shapes, 16 << 20)
}

/// One put larger than whatever it is cut into.
pub fn put_big(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut note = None;
    let mut size = (64 << 20) + 4097;
    if env.full {
        let wanted = (1_usize << 30) + 4097;
        // Source and target on each rank, and as much again for the plugin and everybody else.
        let needed = (2 * env.nranks as u64 + 2) * wanted as u64;
        match available_memory() {
            free if free >= needed => size = wanted,
            free => {
                note = Some(format!("over 1 GiB left out: needs {} GiB free, there are {}", needed >> 30, free >> 30))
            }
        }
    } else {
        note = Some("over 1 GiB only with --full".into());
    }
    let mut tally = run_batches(env, &[(size, 1, 3)], size + (1 << 20))?;
    tally.note = note;
    Ok(tally)
}

fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib: u64 = line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse().ok()).unwrap_or(0);
    kib << 10
}

/// Random sizes, offsets, contexts and targets; each rank owns a stripe of every window, so one array is the model.
pub fn put_random(env: &CaseEnv<'_>) -> Outcome<Tally> {
    const PUTS: usize = 16;
    const PART: usize = 64 << 10;
    const STRIPE: usize = PUTS * PART;
    let rounds = env.rounds(20, 200) as usize;
    let world = World::open(env, 2)?;
    let source = world.window(STRIPE, 0)?;
    let target = world.window(STRIPE * env.nranks, 0)?;
    let flags = world.window(4096, 1)?;
    // What every rank has written into this rank's window: the senders' dice are known.
    let mut model = vec![0_u8; STRIPE * env.nranks];
    let mut dice: Vec<Dice> = (0..env.nranks).map(|r| Dice(r as u64 + 99)).collect();
    let mut tally = Tally::default();
    for round in 0..rounds {
        fill(source.bytes(0, STRIPE), seed(env.rank, round));
        let mut requests = Vec::new();
        for (sender, dice) in dice.iter_mut().enumerate() {
            for part in 0..PUTS {
                let peer = dice.below(env.nranks as u64) as usize;
                let most = [16, 300, 5000, PART as u64][dice.below(4) as usize];
                let size = dice.below(most + 1) as usize;
                let from = dice.below((STRIPE - size + 1) as u64) as usize;
                // Puts are unordered among themselves, so those of one round do not overlap.
                let to = part * PART + dice.below((PART - size + 1) as u64) as usize;
                if sender == env.rank {
                    let at = (&target, sender * STRIPE + to);
                    let context = dice_context(round, part, world.contexts);
                    let request =
                        world.put_signal(context, peer, (&source, from), at, size, &add(&flags, 8 * sender, 1))?;
                    world.wait(request)?;
                    requests.push(peer);
                }
                if peer == env.rank {
                    let into = &mut model[sender * STRIPE + to..][..size];
                    into.iter_mut().enumerate().for_each(|(i, b)| *b = byte(seed(sender, round), from + i));
                }
            }
        }
        // How many came from whom is what everybody says they sent.
        let mut counts = vec![0_u8; env.nranks];
        requests.iter().for_each(|&peer| counts[peer] += 1);
        let all = env.gather(&counts)?;
        for (sender, counts) in all.iter().enumerate() {
            let before = flags.word(2048 + 8 * sender).load(Ordering::Relaxed);
            let expected = before + u64::from(counts[env.rank]);
            flags.word(2048 + 8 * sender).store(expected, Ordering::Relaxed);
            world.wait_exactly(&flags, 8 * sender, expected, sender)?;
        }
        let seen = target.bytes(0, target.len());
        let differing = seen.iter().zip(&model).filter(|(a, b)| a != b).count() as u64;
        tally.item(differing, || format!("round {round}: {differing} bytes differ from the model"));
        env.progress_of(round as u64, rounds as u64);
        env.barrier()?;
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}

fn dice_context(round: usize, part: usize, contexts: usize) -> usize {
    (round + part) % contexts
}

fn seed(rank: usize, round: usize) -> u64 {
    (rank * 100_000 + round) as u64 + 1
}

/// A rank is its own peer.
pub fn to_self(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let world = World::open(env, 1)?;
    let (source, target) = (world.window(1 << 20, 0)?, world.window(1 << 20, 0)?);
    let flags = world.window(4096, 1)?;
    let mut tally = Tally::default();
    for (round, size) in [1, 8, 1000, 65_537, 1 << 20].into_iter().enumerate() {
        let seed = (env.rank * 10 + round) as u64 + 1;
        fill(source.bytes(0, size), seed);
        let request = world.put_signal(0, env.rank, (&source, 0), (&target, 0), size, &add(&flags, 0, 1))?;
        world.wait(request)?;
        world.wait_exactly(&flags, 0, round as u64 + 1, env.rank)?;
        let (bad, first) = wrong(target.bytes(0, size), seed);
        tally.item(bad, || format!("put of {size} bytes to oneself: byte {first:?} is wrong"));
        if env.way.has_gets() {
            source.bytes(0, size).fill(0);
            let request = world.get(0, env.rank, (&target, 0), (&source, 0), size)?;
            world.wait(request)?;
            world.flush(0, env.rank, &source)?;
            let (bad, first) = wrong(source.bytes(0, size), seed);
            tally.item(bad, || format!("get of {size} bytes from oneself: byte {first:?} is wrong"));
        }
    }
    world.close(&[&source, &target, &flags])?;
    Ok(tally)
}
