//! How long and how much it takes to bring communicators up.

use super::args::Args;
use super::lane::Fault;
use super::machine;
use crate::plugin::{ContextConfig, Table};
use crate::ranks::{Ranks, Session, Spec};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// One rank's numbers of one communicator.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct SetUp {
    /// Seconds in `connect`.
    pub connect: f64,
    /// Seconds in `createContext`.
    pub create_context: f64,
    /// Seconds in two `regMrSym`.
    pub register: f64,
    /// The three together.
    pub total: f64,
    /// Seconds in teardown.
    pub teardown: f64,
    /// Bytes of memory more than before `init`, windows not counted (they are untouched).
    pub memory: u64,
    /// Threads more.
    pub threads: u64,
    /// Descriptors more.
    pub descriptors: u64,
    /// TCP segments with data sent meanwhile in this network namespace, other programs' included; on rank 0.
    pub segments: u64,
}

/// All ranks' numbers in one line.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    /// The largest of each.
    pub max: SetUp,
    /// Mean of `memory`.
    pub memory_mean: f64,
    /// Segments a rank.
    pub segments_per_rank: f64,
}

/// Brings one communicator up and down; every rank gets the summary.
pub fn measure(table: &Table, ranks: &mut Ranks, args: &Args) -> Result<Summary, Fault> {
    let spec = Spec {
        device: args.device,
        config: ContextConfig { n_contexts: args.contexts as i32, queue_depth: args.queue_depth, ..Default::default() },
        data_bytes: 65536,
        signals: 512,
        ..Default::default()
    };
    ranks.barrier("set-up: start")?;
    let segments = machine::tcp_data_segments().unwrap_or(0);
    let (memory, threads, descriptors) = (machine::own_memory(), machine::threads(), machine::descriptors());
    let session = Session::open(table, ranks, &spec)?;
    let grown = |now: u64, before: u64| now.saturating_sub(before);
    let mut own = SetUp {
        connect: session.times.connect.as_secs_f64(),
        create_context: session.times.create_context.as_secs_f64(),
        register: session.times.register.as_secs_f64(),
        total: session.times.total().as_secs_f64(),
        memory: grown(machine::own_memory(), memory),
        threads: grown(machine::threads(), threads),
        descriptors: grown(machine::descriptors(), descriptors),
        ..Default::default()
    };
    ranks.barrier("set-up: connected")?;
    own.segments = grown(machine::tcp_data_segments().unwrap_or(0), segments);
    let start = Instant::now();
    session.close()?;
    own.teardown = start.elapsed().as_secs_f64();
    Ok(summarize(&ranks.gather_values("set-up: results", &own)?))
}

fn summarize(all: &[SetUp]) -> Summary {
    let seconds = |f: fn(&SetUp) -> f64| all.iter().map(f).fold(0.0, f64::max);
    let count = |f: fn(&SetUp) -> u64| all.iter().map(f).max().unwrap_or(0);
    let n = all.len().max(1) as f64;
    let max = SetUp {
        connect: seconds(|s| s.connect),
        create_context: seconds(|s| s.create_context),
        register: seconds(|s| s.register),
        total: seconds(|s| s.total),
        teardown: seconds(|s| s.teardown),
        memory: count(|s| s.memory),
        threads: count(|s| s.threads),
        descriptors: count(|s| s.descriptors),
        segments: all.first().map_or(0, |s| s.segments),
    };
    Summary {
        max,
        memory_mean: all.iter().map(|s| s.memory as f64).sum::<f64>() / n,
        segments_per_rank: max.segments as f64 / n,
    }
}
