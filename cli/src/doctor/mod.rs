//! `oxygin doctor`: what oxygin would use on this machine, and if something not, why and what to do.

pub(crate) mod child;
mod env;
mod gpu;
mod gpu_rdma;
mod host;
mod job;
mod nccl;
mod report;
mod verbs;

use crate::ending::Ending;
use crate::out;
use oxygin::fabric::verbs::peermem;
use oxygin::memory::gpu::has_driver;
use report::Report;
use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Options of `oxygin doctor`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Print one JSON object; what a job prints goes to standard error then
    #[arg(long)]
    json: bool,
    /// Run this command, everything behind --job, with NCCL_DEBUG=INFO, and say which plugin, table, fabric, engine and
    /// ways its ranks really used
    #[arg(long, value_name = "COMMAND", num_args = 1.., allow_hyphen_values = true)]
    job: Vec<OsString>,
    /// Keep the job's logs in this folder; one that all its hosts share shows their ranks too
    #[arg(long, value_name = "DIR", requires = "job")]
    logs: Option<PathBuf>,
}

/// Runs it. All is well if oxygin can run here and nothing that was asked for is impossible.
pub fn run(args: Args) -> Result<Ending, Box<dyn Error>> {
    if !args.job.is_empty() {
        return job::run(&args.job, args.logs, args.json);
    }
    let all: Vec<(String, String)> = std::env::vars_os()
        .map(|(n, v)| (n.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()))
        .collect();
    let variable = |name: &str| all.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let (config, variables) = env::variables(&all);
    // What forks comes before libraries that may start threads.
    let (gpu, exports) = gpu::gpu();
    let soft = host::soft();
    let (plugins, nccl) = (nccl::plugins(&variable), nccl::nccl(&variable));
    let sys = Path::new("/sys");
    let (verbs, ports) = verbs::verbs(sys, &config, has_driver());
    let report = Report::new(vec![
        plugins,
        verbs,
        gpu_rdma::section(&ports, config.dma_buf, exports, peermem(sys)),
        soft,
        host::interfaces(&config),
        gpu,
        nccl,
        variables,
    ]);
    match args.json {
        true => out::line(&serde_json::to_string_pretty(&report)?),
        false => out::text_of_lines(&report.text()),
    }?;
    Ok(report.healthy.into())
}
