//! `oxygin`: env, doctor, perf, check, stats and top.

use clap::{CommandFactory, Parser, Subcommand};
use oxygin::sys::version::BUILD;
use oxygin_cli::{check, doctor, env, pages, perf, stats, top};
use std::panic;
use std::process::ExitCode;

/// Judge any NCCL GIN or RMA plugin: what it would use here, how fast it is, whether it keeps the contract.
#[derive(Parser)]
#[command(name = "oxygin", version = BUILD, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the variables that have this machine's NCCL take oxygin, and why
    Env(env::Args),
    /// Say for each fabric and device whether it would be used here, and if not why and what to do
    Doctor(doctor::Args),
    /// Measure latency, rate and bandwidth of a plugin's operations
    Perf(Box<perf::Args>),
    /// Test a plugin against the GIN and RMA contract
    Check(check::Args),
    /// Print what the communicators of running processes have done, without stopping them
    Stats(stats::Args),
    /// Show the same on a terminal, again and again
    Top(top::Args),
    /// Write man pages and completions of shells, for packages
    #[command(hide = true)]
    Pages(pages::Args),
}

/// As a shell has it for a program that SIGPIPE ended.
const READER_LEFT: i32 = 141;

/// Ends the program, in order, where standard output takes nothing more: `println!` would panic. Whoever reads it may
/// leave early; a full disk is said.
fn end_where_nobody_reads() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let said = info.payload().downcast_ref::<String>();
        match said.and_then(|said| said.strip_prefix("failed printing to stdout: ")) {
            Some(why) if why.contains("Broken pipe") => std::process::exit(READER_LEFT),
            Some(why) => {
                eprintln!("oxygin: standard output: {why}");
                std::process::exit(2)
            }
            None => usual(info),
        }
    }));
}

/// Children of this program are waited for, also where whoever started it ignores the ends of his own, which is
/// inherited.
fn take_ends_of_children() {
    // SAFETY: the signal's default action is none.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

fn main() -> ExitCode {
    env_logger::init();
    end_where_nobody_reads();
    take_ends_of_children();
    let outcome = match Cli::parse().command {
        Command::Env(args) => env::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Perf(args) => perf::run(*args),
        Command::Check(args) => check::run(args),
        Command::Stats(args) => stats::run(args),
        Command::Top(args) => top::run(args),
        Command::Pages(args) => pages::run(args, Cli::command()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("oxygin: {error}");
            ExitCode::from(2)
        }
    }
}
