//! `oxygin doctor`: what oxygin would use on this machine, and if something not, why and what to do.

pub(crate) mod child;
mod env;
mod gpu;
mod host;
mod nccl;
mod report;
mod verbs;

use report::Report;
use std::error::Error;
use std::path::Path;

/// Options of `oxygin doctor`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs it; true: oxygin can run here and nothing that was asked for is impossible.
pub fn run(args: Args) -> Result<bool, Box<dyn Error>> {
    let all: Vec<(String, String)> = std::env::vars_os()
        .map(|(n, v)| (n.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()))
        .collect();
    let variable = |name: &str| all.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let (config, variables) = env::variables(&all);
    let report = Report::new(vec![
        nccl::plugins(&variable),
        verbs::verbs(Path::new("/sys"), Path::new("/dev"), &config),
        host::soft(),
        host::interfaces(&config),
        gpu::gpu(),
        nccl::nccl(&variable),
        variables,
    ]);
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{}", report.text()),
    }
    Ok(report.healthy)
}
