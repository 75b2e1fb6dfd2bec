//! `oxygin check`: a conformance suite for any GIN or RMA plugin.

mod case_env;
mod cases;
mod control;
mod findings;
mod pattern;
mod probe;
mod queue;
mod report;
mod runner;
mod window;
mod world;

use crate::out;
use crate::plugin::{library, Kind, Way};
use crate::ranks::{is_absence, Place};
use report::{Report, Row, Verdict};
use runner::Options;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Options of `oxygin check`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The plugin library, by its path, or by a name without / that the linker finds; without it
    /// liboxygin.so beside this program, in ../lib, or where the linker finds it
    #[arg(long, value_name = "PATH", env = "OXYGIN_PLUGIN")]
    plugin: Option<PathBuf>,
    /// The table to test: gin-v11 … rma-v16; without it the newest that the library has. gin-v12-queue, gin-v13-queue,
    /// gin-v14-queue: not the table's calls but the queue that the plugin gives to device code; gin-v12-gdaki,
    /// gin-v13-gdaki, gin-v14-gdaki: the queue pairs that it gives to GDAKI's; gin-v14-gdaki-2.30.7 and the like: as
    /// device code of that NCCL uses them
    #[arg(long, value_name = "NAME", conflicts_with = "all_tables")]
    table: Option<Way>,
    /// Test every table that the library has, and every queue and queue pair
    #[arg(long)]
    all_tables: bool,
    /// Fork this many ranks on this machine
    #[arg(
        long, value_name = "N", default_value_t = 4, conflicts_with = "rank",
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    local: u32,
    /// Run as this rank of several machines; needs --nranks and --root
    #[arg(long, value_name = "R", requires = "nranks", requires = "root")]
    rank: Option<u32>,
    /// Ranks in all, over all machines
    #[arg(long, value_name = "N", requires = "rank", value_parser = clap::value_parser!(u32).range(1..=256))]
    nranks: Option<u32>,
    /// HOST:PORT at which rank 0 listens and the others find it
    #[arg(long, value_name = "HOST:PORT", requires = "rank")]
    root: Option<String>,
    /// The short form, a minute or two (the default)
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// The long form: millions of litmus rounds, puts over 1 GiB
    #[arg(long)]
    full: bool,
    /// Do this part of a form's rounds, 0.001 to 1, on a slow machine
    #[arg(long, value_name = "PART", default_value_t = 1.0, value_parser = part)]
    scale: f64,
    /// Only cases whose name contains one of these, separated by commas; `=NAME` for exactly that one
    #[arg(long, value_name = "PATTERN", value_delimiter = ',')]
    filter: Vec<String>,
    /// Print the cases and what each is about, run nothing
    #[arg(long)]
    list: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// How long any one wait may take, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    deadline: u64,
    /// How long a dead peer may stay unnoticed, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    death_deadline: u64,
}

/// A part of a whole, as the command line has it.
fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(part) if (0.001..=1.0).contains(&part) => Ok(part),
        _ => Err("not between 0.001 and 1".into()),
    }
}

/// Runs it; true: everything is well, exit status 0.
pub fn run(args: Args) -> Result<bool, Box<dyn Error>> {
    let chosen: Vec<&cases::Case> = cases::all().filter(|c| selected(c.name, &args.filter)).collect();
    if chosen.is_empty() {
        return Err(format!("no case matches {:?}; --list shows them", args.filter.join(",")).into());
    }
    if args.list {
        chosen.iter().try_for_each(|c| out::line(&format!("{:>20}  {}", c.name, c.about)))?;
        return Ok(true);
    }
    let plugin = library::named(args.plugin.clone());
    // A name without a slash is the linker's to find; a path must hold wherever a rank is.
    let plugin = if plugin.components().count() > 1 { plugin.canonicalize().unwrap_or(plugin) } else { plugin };
    let (name, tables) = probe::tables_of(&plugin)?;
    let ways = ways(&args, &plugin, &tables)?;
    let place = match (args.rank, args.nranks, args.root) {
        (Some(0), Some(nranks), Some(listen)) => Some(Place::Root { nranks, listen }),
        (Some(rank), Some(nranks), Some(_)) if rank >= nranks => {
            return Err(format!("--rank {rank} of --nranks {nranks}: ranks count from 0").into())
        }
        (Some(rank), Some(nranks), Some(root)) => Some(Place::Join { rank, nranks, root }),
        _ => None,
    };
    let options = Options {
        plugin: plugin.clone(),
        nranks: args.nranks.unwrap_or(args.local) as usize,
        place,
        full: args.full,
        scale: args.scale,
        limit: Duration::from_secs(args.deadline.max(1)),
        death_limit: Duration::from_secs(args.death_deadline.max(1)),
    };
    let form = if args.full { "full" } else { "quick" };
    let mut report = Report {
        plugin: plugin.display().to_string(),
        name,
        form,
        scale: args.scale,
        cases: Vec::new(),
        passed: 0,
        failed: 0,
        skipped: 0,
        ended: None,
    };
    if !args.json {
        report::print_heading(&report.plugin, &report.name, options.nranks, form, args.scale)?;
    }
    let mut add = |row: Row| {
        if !args.json {
            // What cannot be printed is still counted; the sum says that it cannot.
            let _ = report::print_row(&row);
        }
        report.cases.push(row);
    };
    let ended = run_all(&ways, &chosen, &options, &mut add);
    report.ended = ended;
    let count = |verdict| report.cases.iter().filter(|r| r.result == verdict).count();
    (report.passed, report.failed, report.skipped) = (count(Verdict::Pass), count(Verdict::Fail), count(Verdict::Skip));
    match args.json {
        true => out::line(&serde_json::to_string_pretty(&report)?),
        false => report::print_sum(&report),
    }?;
    // A run in which nothing ran has shown nothing.
    Ok(report.failed == 0 && report.passed > 0)
}

/// Runs the cases, each in all ways that it is for. Ends with a sentence where a rank of another process never came: it
/// would be waited for in each of the cases that follow.
fn run_all(ways: &[Way], cases: &[&cases::Case], options: &Options, add: &mut dyn FnMut(Row)) -> Option<String> {
    for &way in ways {
        way.ask_for();
        if let Some(why) = probe::other_way(&options.plugin, way) {
            add(Row::skipped("all", way, options.nranks, why));
            continue;
        }
        for case in cases.iter().filter(|c| c.is_for(way)) {
            let row = runner::run(case, way, options);
            let failure = row.why.clone().filter(|_| row.result == Verdict::Fail);
            add(row);
            if let Some(why) = failure.filter(|why| options.place.is_some() && is_absence(why)) {
                return Some(why);
            }
        }
    }
    None
}

/// What the options choose among the tables that are there.
fn ways(args: &Args, plugin: &Path, tables: &[Kind]) -> Result<Vec<Way>, String> {
    if args.all_tables {
        let queues = Way::by_device_code().filter(|way| tables.contains(&way.kind));
        return Ok(tables.iter().copied().map(Way::from).chain(queues).collect());
    }
    match args.table {
        Some(way) if tables.contains(&way.kind) => Ok(vec![way]),
        Some(Way { kind, .. }) => {
            let there = tables.iter().map(|k| k.label()).collect::<Vec<_>>().join(", ");
            Err(format!("{} has no table {kind}; it has {there}", plugin.display()))
        }
        None => Ok(tables.iter().rev().find(|k| k.has_data_operations()).map(|&k| k.into()).into_iter().collect()),
    }
}

fn selected(name: &str, patterns: &[String]) -> bool {
    let hit = |p: &String| match p.strip_prefix('=') {
        Some(exact) => name == exact,
        None => name.contains(p.as_str()),
    };
    patterns.is_empty() || patterns.iter().any(hit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_take_parts_and_exact_names() {
        let pick = |p: &[&str]| -> Vec<&str> {
            let patterns: Vec<String> = p.iter().map(ToString::to_string).collect();
            cases::all().map(|c| c.name).filter(|n| selected(n, &patterns)).collect()
        };
        assert_eq!(pick(&["=self"]), ["self"]);
        assert_eq!(pick(&["order-"]), ["order-strong", "order-put-signal", "order-weak"]);
        assert_eq!(pick(&[]).len(), cases::all().count());
    }

    #[test]
    fn a_part_is_above_nothing_and_at_most_all() {
        assert_eq!(part("0.25"), Ok(0.25));
        for bad in ["0", "-1", "1.5", "nan", "all"] {
            assert!(part(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = cases::all().map(|c| c.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), cases::all().count());
    }
}
