//! What device code sees of a plugin's own queues and queue pairs: the cases that calls have no like of.

mod bad;
mod contexts;
mod counters;
mod data;
mod death;
mod entries;
mod gets;
mod order;
mod ring;
mod shape;
mod signals;

use super::{Case, Needs, ANY};
use crate::check::world::{CaseEnv, Outcome, World};
use crate::device::{Deadline, Pen, Thread};
use crate::plugin::{ContextConfig, Plugin, Table};

const QUEUE: Needs = Needs { queue: true, ..ANY };
const PEERS: Needs = Needs { peers: true, ..QUEUE };
const QUEUE_PAIRS: Needs = Needs { queue_pairs: true, ..QUEUE };

/// The suite's part for queues, in the order it runs.
pub const ALL: &[Case] = &[
    Case {
        name: "queue-shape",
        about: "depths as asked, everything zero at first, room used again and again",
        needs: QUEUE,
        run: shape::depths,
    },
    Case {
        name: "queue-wrap",
        about: "many producers in a small queue, words in any order, slots cleared before they are given back",
        needs: QUEUE,
        run: shape::wrap,
    },
    Case {
        name: "queue-most",
        about: "524,288 signals and as many counters; the last of them work",
        needs: QUEUE,
        run: shape::most_signals,
    },
    Case {
        name: "queue-data",
        about: "puts of many sizes with an indexed signal in the same descriptor, or in the next entry",
        needs: QUEUE,
        run: data::sizes,
    },
    Case {
        name: "queue-values",
        about: "inline values of 1 to 8 bytes, in entries to 28, with every kind of signal",
        needs: QUEUE,
        run: data::values,
    },
    Case {
        name: "queue-big",
        about: "a put in two pieces, the signal with the last: only with --full",
        needs: QUEUE,
        run: data::big,
    },
    Case {
        name: "queue-signals",
        about: "exact sums of indexed signals from many producers on all ranks",
        needs: QUEUE,
        run: signals::sums,
    },
    Case {
        name: "queue-reset",
        about: "signals and counters that device code sets back to 0",
        needs: QUEUE,
        run: signals::resets,
    },
    Case {
        name: "queue-strong",
        about: "a strong indexed signal comes after all that was posted before it, by any thread",
        needs: QUEUE,
        run: order::strong,
    },
    Case {
        name: "queue-weak",
        about: "a weak indexed signal comes after its own put",
        needs: Needs { weak: true, ..QUEUE },
        run: order::weak,
    },
    Case {
        name: "queue-counters",
        about: "a counter goes up by one a put, when its source may be overwritten",
        needs: QUEUE,
        run: counters::reuse,
    },
    Case {
        name: "queue-gets",
        about: "gets by several threads are visible after device code's flush",
        needs: Needs { gets: true, ..QUEUE },
        run: gets::flushed,
    },
    Case {
        name: "queue-contexts",
        about: "17, 65 and 129 contexts, each with signals of its own",
        needs: QUEUE,
        run: contexts::shapes,
    },
    Case {
        name: "queue-stride",
        about: "contexts for every second, … rank only, with arrays as long as the ranks",
        needs: Needs { stride: true, ..PEERS },
        run: contexts::strides,
    },
    Case {
        name: "queue-sets",
        about: "windows before contexts and after; contexts made twice keep apart",
        needs: QUEUE,
        run: contexts::sets,
    },
    Case {
        name: "queue-bad",
        about: "malformed descriptors fail their context alone, touch nothing, and credits go on",
        needs: Needs { descriptors: true, ..QUEUE },
        run: bad::descriptors,
    },
    Case {
        name: "gdaki-ring",
        about: "doorbell before record and behind it, many producers, more entries than 16 bits count",
        needs: QUEUE_PAIRS,
        run: ring::orders,
    },
    Case {
        name: "gdaki-bad",
        about: "entries that cannot be get their syndrome, end their queue pair alone, and touch nothing",
        needs: QUEUE_PAIRS,
        run: entries::bad,
    },
    Case {
        name: "queue-dead",
        about: "SIGKILL of one rank: queryLastError says so, what goes to it does not stand, the others go on",
        needs: Needs { local: true, ..PEERS },
        run: death::killed,
    },
];

/// The table under test, loaded.
fn table(env: &CaseEnv<'_>) -> Outcome<Table> {
    env.enter("dlopen");
    let plugin = Plugin::open(&env.plugin).map_err(|e| e.to_string())?;
    Ok(plugin.table(env.way.kind).map_err(|e| e.to_string())?.clone())
}

/// A communicator of all ranks with contexts as asked.
fn open<'a>(env: &'a CaseEnv<'a>, config: &ContextConfig) -> Outcome<World<'a>> {
    let everyone: Vec<usize> = (0..env.nranks).collect();
    let mut world = World::connected(env, table(env)?, config, &everyone)?;
    world.equip(config)?;
    Ok(world)
}

/// So many contexts, the rest as usual.
fn of(n_contexts: usize) -> ContextConfig {
    ContextConfig { n_contexts: n_contexts as i32, ..ContextConfig::default() }
}

/// The ranks that this one sends to and hears from.
fn neighbours(env: &CaseEnv<'_>) -> (u32, u32) {
    (((env.rank + 1) % env.nranks) as u32, ((env.rank + env.nranks - 1) % env.nranks) as u32)
}

/// A thread of this rank's only one, which writes wildly.
fn thread<'a>(world: &'a World<'_>, context: usize, seed: u64) -> Outcome<Thread<'a>> {
    let pen = Pen::wild(seed << 8 | world.env.rank as u64, crate::check::queue::PAUSE);
    Ok(world.device()?.thread(context, pen, world.env))
}

/// One of a crew.
fn hand<'a>(world: &'a crate::device::Device, context: usize, seed: u64, limit: &'a Deadline<'a>) -> Thread<'a> {
    world.thread(context, Pen::wild(seed, crate::check::queue::PAUSE), limit)
}
