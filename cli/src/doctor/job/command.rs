//! Runs the job's command, and ends all of it when this program is asked to end.

use crate::signals::Signals;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long a job may take to end once it is asked to. Container runtimes kill 10 s after they have asked, Slurm 30: by
/// then the report is there.
const ENDS_WITHIN: Duration = Duration::from_secs(7);
/// How long what is killed may take to go; what stands in a driver does not.
const KILLED_WITHIN: Duration = Duration::from_secs(1);

/// How a job ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// That of its command; `None`: it was killed and is there all the same.
    pub status: Option<ExitStatus>,
    /// By which this program was asked to end, if it was.
    pub stopped_by: Option<Signal>,
}

/// Runs it to its end. `signals` has [`Signal::SIGCHLD`], too.
pub fn run(mut command: Command, signals: &mut Signals) -> io::Result<Ended> {
    let mask = signals.before();
    // SAFETY: a system call between fork and exec.
    unsafe { command.pre_exec(move || mask.thread_set_mask().map_err(Into::into)) };
    // What a job's processes leave behind when they end is still found below this one.
    set_child_subreaper(true)?;
    let root = command.spawn()?.id() as libc::pid_t;
    let mut status = None;
    let mut asked: Option<(Signal, Instant)> = None;
    loop {
        let is_over = !reap(root, &mut status);
        // What a job leaves behind by itself goes on.
        let has_ended = is_over || status.is_some() && asked.is_none();
        let left = asked.map(|(_, since)| ENDS_WITHIN.saturating_sub(since.elapsed()));
        if left == Some(Duration::ZERO) && !has_ended {
            end_the_rest(root, &mut status);
            break;
        }
        // What has ended the job may wait here for this program as well.
        let event = match signals.next(if has_ended { Some(Duration::ZERO) } else { left })? {
            None if has_ended => break,
            Some(event) if event.signal != Signal::SIGCHLD => event,
            _ => continue,
        };
        asked.get_or_insert((event.signal, Instant::now()));
        if !event.is_of_terminal {
            // As a terminal and scancel do it: to all of them. A shell hands nothing on to what it waits for.
            send(event.signal, root, status);
        }
    }
    Ok(Ended { status, stopped_by: asked.map(|(signal, _)| signal) })
}

/// Kills all that there is below this process.
fn end_the_rest(root: libc::pid_t, status: &mut Option<ExitStatus>) {
    let start = Instant::now();
    while reap(root, status) && start.elapsed() < KILLED_WITHIN {
        send(Signal::SIGKILL, root, *status);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Takes the ends of children, that of `root` into `status`. Whether there are others.
fn reap(root: libc::pid_t, status: &mut Option<ExitStatus>) -> bool {
    loop {
        let mut raw = 0;
        // SAFETY: nobody else in this process waits for children.
        match unsafe { libc::waitpid(-1, &mut raw, libc::WNOHANG) } {
            0 => return true,
            pid if pid == root => *status = Some(ExitStatus::from_raw(raw)),
            pid if pid > 0 => {}
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
}

/// Sends a signal to all processes below this one, `root` among them if it has not ended.
fn send(signal: Signal, root: libc::pid_t, status: Option<ExitStatus>) {
    let mut pids = below(std::process::id() as libc::pid_t);
    if status.is_none() && !pids.contains(&root) {
        pids.push(root);
    }
    for pid in pids {
        // It may have ended, or be another user's.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// The children of this process, theirs, and so on, by what /proc says.
fn below(own: libc::pid_t) -> Vec<libc::pid_t> {
    // That of another PID namespace has other numbers.
    if std::fs::read_link("/proc/self").ok().as_deref() != Some(Path::new(&own.to_string())) {
        return Vec::new();
    }
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<libc::pid_t>().ok());
    let with_parents: Vec<_> = pids.filter_map(|pid| Some((pid, parent_of(pid)?))).collect();
    let mut found = vec![own];
    for at in 0.. {
        let Some(&parent) = found.get(at) else { break };
        found.extend(with_parents.iter().filter(|p| p.1 == parent).map(|p| p.0));
    }
    found.split_off(1)
}

fn parent_of(pid: libc::pid_t) -> Option<libc::pid_t> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name, which may have any characters in it, is in parentheses.
    stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()
}
