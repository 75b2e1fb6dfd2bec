//! `oxygin perf`: latency, rate and bandwidth of any plugin's operations, with perftest's flags and columns.

mod args;
mod floor;
mod lane;
mod latency;
mod machine;
mod measure;
mod pattern;
mod queue;
mod report;
mod samples;
mod setup;
mod stream;

pub use args::{Args, Op, Pin, Test};

use crate::out;
use crate::plugin::{library, log, Plugin, Way};
use crate::ranks::{self, End, Memory};
use std::error::Error;
use std::path::PathBuf;

/// Runs it; true: every byte was right.
pub fn run(args: Args) -> Result<bool, Box<dyn Error>> {
    args.validate()?;
    log::print_up_to(nccl_plugin_api::LOG_WARN + i32::from(args.verbose).min(3));
    let library = library::named(args.plugin.clone());
    let plan = args.plan();
    if let (ranks::Place::Root { listen, nranks }, false) = (&plan.place, args.json) {
        out::say(&format!("oxygin perf: waiting at {listen} for {} more with the same options", nranks - 1));
    }
    // Ranks that are forked share it; the others never look at it.
    let shared = Memory::shared(floor::SHARED_BYTES)?;
    let outcome = ranks::run(&plan, |ranks| {
        let report = measure::everything(&args, &library, ranks, &shared)?;
        Ok(serde_json::to_vec(&report)?)
    })?;
    let first = outcome.ends.iter().find_map(|(_, end)| match end {
        End::Done(bytes) => Some(bytes.clone()),
        _ => None,
    });
    outcome.results()?;
    if let (true, Some(bytes)) = (args.json, first) {
        let report: serde_json::Value = serde_json::from_slice(&bytes)?;
        out::line(&format!("{report:#}"))?;
    }
    Ok(true)
}

/// A library and the table to drive.
pub(crate) struct Subject {
    /// For reports: file, table, the plugin's own name.
    pub name: String,
    /// The table.
    pub table: crate::plugin::Table,
    /// How operations go in.
    pub way: Way,
}

impl Subject {
    /// Loads it.
    pub(crate) fn open(path: &PathBuf, way: Option<Way>) -> Result<Self, Box<dyn Error>> {
        let plugin = Plugin::open(path)?;
        let table = match way {
            Some(way) => plugin.table(way.kind)?,
            None => plugin.newest()?,
        };
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let way = way.unwrap_or(table.kind().into());
        Ok(Self { name: format!("{file} ({}, {way})", table.name()), table: table.clone(), way })
    }
}
