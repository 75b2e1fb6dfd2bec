//! `oxygin stats`: what the communicators of running processes have done, without stopping them.

mod json;
mod prometheus;
pub mod text;

use crate::out;
use oxygin::telemetry::stats::read::{processes, sets, Set};
use std::error::Error;

/// Options of `oxygin stats`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Processes; none: all that have statistics and may be read
    #[arg(value_name = "PID")]
    pids: Vec<u32>,
    /// Print one JSON object
    #[arg(long, conflicts_with = "prometheus")]
    json: bool,
    /// Print in Prometheus' text format
    #[arg(long)]
    prometheus: bool,
}

/// Runs it; true: every process that was asked for has statistics.
pub fn run(args: Args) -> Result<bool, Box<dyn Error>> {
    let Found { sets: all, without, unreadable } = read(&args.pids);
    for why in &unreadable {
        out::say(&format!("oxygin stats: {why}"));
    }
    for pid in &without {
        out::say(&format!("oxygin stats: process {pid} has no contexts of oxygin's, or OXYGIN_STATS is 0 in it"));
    }
    let is_missing = !without.is_empty() || !unreadable.is_empty();
    match (args.json, args.prometheus) {
        (true, _) => out::line(&format!("{:#}", json::object(&all))),
        (_, true) => out::text_of_lines(&prometheus::text(&all)),
        _ if all.is_empty() && !is_missing => out::line("no process with contexts of oxygin's may be read here"),
        _ => out::text_of_lines(&text::tables(&all)),
    }?;
    Ok(!is_missing)
}

/// What there is of the processes that were asked for.
pub(crate) struct Found {
    /// Their sets of contexts.
    pub sets: Vec<Set>,
    /// Those that have none.
    pub without: Vec<u32>,
    /// A sentence for each that has ended or may not be read; the others are read all the same.
    pub unreadable: Vec<String>,
}

/// Looks at these processes, or at all that may be read.
pub(crate) fn read(pids: &[u32]) -> Found {
    let mut found = Found { sets: Vec::new(), without: Vec::new(), unreadable: Vec::new() };
    let skipped = |why: String| log::warn!("{why}");
    for &pid in pids {
        match sets(pid, skipped) {
            Ok(none) if none.is_empty() => found.without.push(pid),
            Ok(some) => found.sets.extend(some),
            Err(error) => found.unreadable.push(error.message().to_owned()),
        }
    }
    if pids.is_empty() {
        // Any of them may end, or not be ours to read.
        found.sets.extend(processes().into_iter().filter_map(|pid| sets(pid, skipped).ok()).flatten());
    }
    found
}
