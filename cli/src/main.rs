//! `oxygin`: env, doctor, perf, check, stats and top.

use clap::{CommandFactory, Parser, Subcommand};
use oxygin::sys::version::BUILD;
use oxygin_cli::ending::Ending;
use oxygin_cli::{check, doctor, env, out, pages, perf, stats, top};
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

/// Children of this program are waited for, also where whoever started it ignores the ends of his own, which is
/// inherited.
fn take_ends_of_children() {
    // SAFETY: the signal's default action is none.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Ends the first process of a container, with the code of a shell whose program a signal has ended; any other process,
/// a forked child, by the signal itself.
extern "C" fn end(signal: libc::c_int) {
    // SAFETY: all of these may be called in a handler. A signal that is raised in its own comes behind it.
    unsafe {
        if libc::getpid() == 1 {
            libc::_exit(128 + signal);
        }
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// The kernel drops what would end a container's first process by a default action: Ctrl-C, and what `docker stop`
/// sends.
fn end_as_first_process() {
    if std::process::id() != 1 {
        return;
    }
    let handler: extern "C" fn(libc::c_int) = end;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler does what a handler may; nobody else has set one yet.
        unsafe {
            if libc::signal(signal, handler as libc::sighandler_t) == libc::SIG_IGN {
                libc::signal(signal, libc::SIG_IGN);
            }
        }
    }
}

fn main() -> ExitCode {
    if std::env::var_os("OXYGIN_PLUGIN").is_some_and(|value| value.is_empty()) {
        // Empty means not set, as for the library's variables; options would take it for a name.
        std::env::remove_var("OXYGIN_PLUGIN");
    }
    env_logger::init();
    take_ends_of_children();
    end_as_first_process();
    let outcome = match Cli::parse().command {
        Command::Env(args) => env::run(args).map(Ending::from),
        Command::Doctor(args) => doctor::run(args),
        Command::Perf(args) => perf::run(*args).map(Ending::from),
        Command::Check(args) => check::run(args).map(Ending::from),
        Command::Stats(args) => stats::run(args).map(Ending::from),
        Command::Top(args) => top::run(args),
        Command::Pages(args) => pages::run(args, Cli::command()).map(Ending::from),
    };
    match outcome {
        Ok(ending) => ending.into(),
        Err(error) => {
            out::say(&format!("oxygin: {error}"));
            ExitCode::from(2)
        }
    }
}
