//! `oxygin perf`.

use std::error::Error;

/// Options of `oxygin perf`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs it; true: everything is well, exit status 0.
pub fn run(_args: Args) -> Result<bool, Box<dyn Error>> {
    Err("oxygin perf is not written yet".into())
}
