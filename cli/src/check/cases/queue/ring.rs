//! Doorbells: in which order they and their records are written, by how many, and how far the index goes.

use super::super::Tally;
use super::{neighbours, of, open};
use crate::check::queue::{crew, PAUSE};
use crate::check::world::{CaseEnv, Outcome, World};
use crate::device::gdaki::{Kernel, QueuePair, Raw, Ringing};
use crate::device::{Deadline, Pen, Waiting};
use crate::dice::Dice;
use crate::plugin::ContextConfig;

/// Slots of a queue.
const DEPTH: i32 = 64;
/// Threads that ring one queue.
const PRODUCERS: usize = 4;
/// Entries have 16 bits for their index, and the record as many.
const LAP: u64 = 1 << 16;

/// What one step of the order does.
#[derive(Clone, Copy)]
enum Step {
    Doorbell,
    Record,
    /// Some time passes.
    Pause,
    /// The doorbell of the entry before the last: one that came late.
    Again,
}

/// Orders in which the parts of a doorbell may reach the device.
const ORDERS: [(&str, &[Step]); 5] = [
    ("doorbell, record, doorbell", &[Step::Doorbell, Step::Record, Step::Doorbell]),
    ("record, doorbell", &[Step::Record, Step::Doorbell]),
    ("doorbell, much later the record", &[Step::Doorbell, Step::Pause, Step::Record]),
    ("record, much later the doorbell", &[Step::Record, Step::Pause, Step::Doorbell]),
    ("the doorbell before once more", &[Step::Again, Step::Record, Step::Doorbell, Step::Doorbell]),
];

/// Every order by one producer, then more entries than the index has numbers, then many producers.
pub fn orders(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = Tally::default();
    let contexts = ORDERS.len() + 2;
    let world = open(env, &ContextConfig { queue_depth: DEPTH, ..of(contexts) })?;
    let kernel = world.device()?.gdaki().ok_or("there are no queue pairs")?;
    let (next, _) = neighbours(env);
    env.barrier()?;
    let queue = kernel.queue_pair(0, next).ok_or("no queue pair")?;
    if queue.view.handler == Ringing::Doorbell {
        for (context, (what, order)) in ORDERS.into_iter().enumerate() {
            in_order(&world, kernel, (context, next), order, &mut tally).map_err(|e| format!("{what}: {e}"))?;
        }
    } else {
        tally.note = Some(format!("rung by {:?}: no doorbell whose order there is", queue.view.handler));
    }
    far(&world, kernel, (contexts - 2, next), &mut tally)?;
    together(&world, kernel, (contexts - 1, next), &mut tally)?;
    env.barrier()?;
    let error = world.has_error()?;
    tally.item(u64::from(error), || "queryLastError is true without a reason".into());
    world.close(&[])?;
    Ok(tally)
}

/// Waits for a signal's sum, and looks once more when nobody has anything under way.
fn sum(world: &World<'_>, kernel: &Kernel<'_>, context: usize, wanted: u64, tally: &mut Tally) -> Outcome<()> {
    let word = || kernel.signal(context, 0).load(std::sync::atomic::Ordering::Acquire);
    let what = || format!("all {wanted} additions on context {context}; there are {}", word());
    world.env.until(what, || Ok((word() >= wanted).then_some(())))?;
    world.env.barrier()?;
    tally.item(word().abs_diff(wanted), || format!("context {context}: {} additions of {wanted}", word()));
    Ok(())
}

/// Ahead of the last entry there is none yet: rings step by step, and waits for the completion entry each time.
fn in_order(
    world: &World<'_>,
    kernel: &Kernel<'_>,
    (context, next): (usize, u32),
    order: &[Step],
    tally: &mut Tally,
) -> Outcome<()> {
    let env = world.env;
    let rounds = env.rounds(300, 20_000);
    let queue = kernel.queue_pair(context, next).ok_or("no queue pair")?;
    let (entry, mut pen, mut dice) =
        (kernel.add_signal(context, next, 0, 1), Pen::wild(context as u64, PAUSE), Dice(3));
    for _ in 0..rounds {
        let count = 1 + dice.below(3) as usize;
        let last = queue.stage(&vec![entry.clone(); count], &mut pen, env)?;
        for step in order {
            match step {
                Step::Doorbell => queue.doorbell(last + 1),
                Step::Record => queue.record(last + 1),
                Step::Pause => (0..dice.below(2000)).for_each(|_| std::hint::spin_loop()),
                Step::Again => queue.doorbell(last + 1 - count as u64),
            }
        }
        // Now and then several rings in a row.
        if dice.below(3) != 0 {
            queue.wait(last, env)?;
        }
    }
    queue.flush(env)?;
    sum_of_mine(world, kernel, context, queue.reserved(), tally)
}

/// All ranks have sent as many as they were sent: what this one did is what the one before did.
fn sum_of_mine(world: &World<'_>, kernel: &Kernel<'_>, context: usize, sent: u64, tally: &mut Tally) -> Outcome<()> {
    let all = world.env.gather(&sent.to_le_bytes())?;
    let (_, previous) = neighbours(world.env);
    let said = all[previous as usize].as_slice().try_into().map(u64::from_le_bytes).unwrap_or(0);
    sum(world, kernel, context, said, tally)
}

/// Entries in batches, past what 16 bits count, twice with `--full`.
fn far(world: &World<'_>, kernel: &Kernel<'_>, (context, next): (usize, u32), tally: &mut Tally) -> Outcome<()> {
    let env = world.env;
    let queue = kernel.queue_pair(context, next).ok_or("no queue pair")?;
    let count = env.rounds(LAP + 1000, 2 * LAP + 1000);
    if count < LAP {
        tally.note = Some(format!("no more than {count} entries in a row: --scale"));
    }
    let (entry, mut pen) = (kernel.add_signal(context, next, 0, 1), Pen::plain());
    while queue.reserved() < count {
        queue.post(&vec![entry.clone(); 16], &mut pen, env)?;
        env.progress_of(queue.reserved(), count);
    }
    queue.flush(env)?;
    sum_of_mine(world, kernel, context, queue.reserved(), tally)
}

/// Threads that reserve, write and ring as they come, each of them several entries now and then.
fn together(world: &World<'_>, kernel: &Kernel<'_>, (context, next): (usize, u32), tally: &mut Tally) -> Outcome<()> {
    let env = world.env;
    let each = env.rounds(1_000, 50_000);
    let queue = kernel.queue_pair(context, next).ok_or("no queue pair")?;
    let entry = kernel.add_signal(context, next, 0, 1);
    crew(env, PRODUCERS, |i, limit| produce(queue, &entry, each, i as u64, limit))?;
    queue.flush(env)?;
    tally.rounds += queue.reserved();
    sum_of_mine(world, kernel, context, queue.reserved(), tally)
}

fn produce(queue: &QueuePair, entry: &Raw, rounds: u64, seed: u64, limit: &Deadline<'_>) -> Outcome<()> {
    let (mut pen, mut dice) = (Pen::wild(seed, PAUSE), Dice(seed << 8 | 5));
    let limit: &dyn Waiting = limit;
    for _ in 0..rounds {
        let count = 1 + dice.below(4) as usize;
        queue.post(&vec![entry.clone(); count], &mut pen, limit)?;
    }
    Ok(())
}
