//! `oxygin-fuzz SECONDS [TARGET...]`: each target gets mutated inputs for so many seconds. `oxygin-fuzz --list` names
//! the targets.
//!
//! A target fails by panicking (in a debug build also for overflow and bad indices). The input is then written to
//! `fuzz-TARGET.bin` in the present directory, and `oxygin-fuzz FILE TARGET` runs just that one. Build it by
//! `fuzz/run`.

mod coverage;
mod mutate;
mod targets;

use mutate::Mutator;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The corpus of a target grows up to this.
const MOST_INPUTS: usize = 4096;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next().unwrap_or_else(|| "5".into());
    let wanted: Vec<String> = arguments.collect();
    let all = targets::all();
    if first == "--list" {
        all.iter().for_each(|target| println!("{}", target.name));
        return ExitCode::SUCCESS;
    }
    if let Some(unknown) = wanted.iter().find(|w| !all.iter().any(|t| t.name == **w)) {
        let names: Vec<_> = all.iter().map(|t| t.name).collect();
        eprintln!("oxygin-fuzz: no target {unknown:?}; there are {}", names.join(", "));
        return ExitCode::from(2);
    }
    let chosen = all.into_iter().filter(|t| wanted.is_empty() || wanted.iter().any(|w| w == t.name));
    let mut failed = false;
    match first.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 => {
            for target in chosen {
                failed |= !fuzz(&target, Duration::from_secs_f64(seconds));
            }
        }
        _ => match std::fs::read(&first) {
            Ok(input) => chosen.for_each(|target| (target.run)(&input)),
            Err(e) => {
                eprintln!("oxygin-fuzz: {first} is neither a number of seconds nor an input: {e}");
                return ExitCode::from(2);
            }
        },
    }
    ExitCode::from(u8::from(failed))
}

/// Runs a target. False: it panicked.
fn fuzz(target: &targets::Target, time: Duration) -> bool {
    // The same inputs each time, so that a failure in CI is a failure at home.
    let mut mutator = Mutator::new(0x6f78_7967_696e);
    let mut corpus: Vec<Vec<u8>> = target.seeds.clone();
    let mut coverage = coverage::Coverage::new();
    let start = Instant::now();
    let mut runs = 0_u64;
    for at in 0.. {
        let input = match corpus.get(at).filter(|_| at < target.seeds.len()) {
            Some(seed) => seed.clone(),
            None if start.elapsed() >= time => break,
            None => mutator.next(&corpus),
        };
        coverage.start();
        runs += 1;
        if catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_err() {
            let file = format!("fuzz-{}.bin", target.name);
            let _ = std::fs::write(&file, &input);
            println!(
                "FAILED fuzz: {} panicked after {runs} inputs; the input of {} bytes is in {file}",
                target.name,
                input.len()
            );
            return false;
        }
        if coverage.is_new() && corpus.len() < MOST_INPUTS {
            corpus.push(input);
        }
    }
    println!(
        "ok fuzz: {} ({runs} inputs, {} regions of code, {} inputs kept)",
        target.name,
        coverage.reached(),
        corpus.len()
    );
    true
}
