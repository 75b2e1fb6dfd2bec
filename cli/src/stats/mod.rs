//! `oxygin stats`: what the communicators of running processes have done, without stopping them.

mod json;
mod prometheus;
pub mod text;

use crate::out;
use oxygin::sys::version::BUILD;
use oxygin::telemetry::stats::layout::VERSION;
use oxygin::telemetry::stats::read::{processes, sets, Set, Skipped};
use std::collections::BTreeSet;
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
    let found = read(&args.pids);
    let (obstacles, Found { sets: all, without, .. }) = (found.obstacles(), found);
    for why in &obstacles {
        out::say(&format!("oxygin stats: {why}"));
    }
    for pid in &without {
        out::say(&format!("oxygin stats: process {pid} has no contexts of oxygin's, or OXYGIN_STATS is 0 in it"));
    }
    let is_missing = !without.is_empty() || !obstacles.is_empty();
    match (args.json, args.prometheus) {
        (true, _) => out::line(&format!("{:#}", json::object(&all))),
        (_, true) => out::text_of_lines(&prometheus::text(&all)),
        _ if all.is_empty() && !is_missing => out::line("no process with contexts of oxygin's may be read here"),
        _ => out::text_of_lines(&text::tables(&all)),
    }?;
    // Of all processes that there are, some may be of any version.
    Ok(args.pids.is_empty() || !is_missing)
}

/// What there is of the processes that were asked for.
#[derive(Default)]
pub(crate) struct Found {
    /// Their sets of contexts.
    pub sets: Vec<Set>,
    /// Those that have none.
    pub without: Vec<u32>,
    /// A sentence for each that has ended or may not be read; the others are read all the same.
    pub unreadable: Vec<String>,
    /// Statistics that another version of the library has laid out otherwise.
    pub other_versions: BTreeSet<OtherVersion>,
}

/// A process whose statistics, or some of them, have another layout than this program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OtherVersion {
    pid: u32,
    version: u64,
}

impl OtherVersion {
    /// What it is and what to do. Which process and which version come first: a screen of 80 columns cuts the rest.
    pub fn sentence(&self) -> String {
        let Self { pid, version } = self;
        format!(
            "process {pid} has statistics of version {version}, not {VERSION}: use the oxygin of its library, which is \
             another build than this one, {BUILD}"
        )
    }
}

/// Looks at these processes, or at all that may be read.
pub(crate) fn read(pids: &[u32]) -> Found {
    let mut found = Found::default();
    for &pid in pids {
        if let Err(why) = found.add(pid) {
            found.unreadable.push(why);
        }
    }
    if pids.is_empty() {
        for pid in processes() {
            // It may have ended, or not be ours to read.
            let _ = found.add(pid);
        }
        found.without.clear();
    }
    found
}

impl Found {
    /// A sentence for whatever cannot be read.
    pub fn obstacles(&self) -> Vec<String> {
        let versions = self.other_versions.iter().map(OtherVersion::sentence);
        self.unreadable.iter().cloned().chain(versions).collect()
    }

    fn add(&mut self, pid: u32) -> Result<(), String> {
        let mut others = BTreeSet::new();
        let skipped = |file: &str, why| match why {
            Skipped::OtherVersion(version) => drop(others.insert(OtherVersion { pid, version })),
            Skipped::Malformed(why) => log::warn!("{file}: {why}"),
        };
        let sets = sets(pid, skipped).map_err(|error| error.message().to_owned())?;
        if sets.is_empty() && others.is_empty() {
            self.without.push(pid);
        }
        self.sets.extend(sets);
        self.other_versions.append(&mut others);
        Ok(())
    }
}
