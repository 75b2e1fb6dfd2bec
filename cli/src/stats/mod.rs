//! `oxygin stats`: what the communicators of running processes have done, without stopping them.

mod json;
mod prometheus;
pub mod text;

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
    let (all, unread) = read(&args.pids);
    let missing: Vec<_> = args.pids.iter().filter(|pid| !all.iter().any(|set| set.pid == **pid)).collect();
    for &&pid in &missing {
        match unread.iter().find(|(of, _)| *of == pid) {
            Some((_, why)) => eprintln!("oxygin stats: {why}"),
            None => eprintln!("oxygin stats: process {pid} has no contexts of oxygin's, or OXYGIN_STATS is 0 in it"),
        }
    }
    match (args.json, args.prometheus) {
        (true, _) => println!("{:#}", json::object(&all)),
        (_, true) => print!("{}", prometheus::text(&all)),
        _ if all.is_empty() && missing.is_empty() => println!("no process with contexts of oxygin's may be read here"),
        _ => print!("{}", text::tables(&all)),
    }
    Ok(missing.is_empty())
}

/// Sets of contexts of these processes, or of all that may be read; and which of those that were asked for cannot be
/// read, with why: it takes nothing from the others.
pub(crate) fn read(pids: &[u32]) -> (Vec<Set>, Vec<(u32, String)>) {
    let (mut all, mut unread) = (Vec::new(), Vec::new());
    let skipped = |why: String| log::warn!("{why}");
    for &pid in pids {
        match sets(pid, skipped) {
            Ok(sets) => all.extend(sets),
            Err(error) => unread.push((pid, error.message().to_owned())),
        }
    }
    if pids.is_empty() {
        // Any of them may end, or not be ours to read.
        all.extend(processes().into_iter().filter_map(|pid| sets(pid, skipped).ok()).flatten());
    }
    (all, unread)
}
