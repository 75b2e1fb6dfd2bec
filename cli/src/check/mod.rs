//! `oxygin check`.

use std::error::Error;

/// Options of `oxygin check`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs it; true: everything is well, exit status 0.
pub fn run(_args: Args) -> Result<bool, Box<dyn Error>> {
    Err("oxygin check is not written yet".into())
}
