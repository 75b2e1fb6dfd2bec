//! `oxygin` as the first process of a PID namespace, which a container's ENTRYPOINT is: signals end it although the
//! kernel takes no default action there.

#[path = "support/port.rs"]
mod port;

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);

/// Ended with its namespace.
struct Inside(Child);

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program as the first process of a namespace.
fn inside(program: &str) -> Command {
    // SAFETY: plain call.
    let as_root: &[&str] = if unsafe { libc::geteuid() } == 0 { &[] } else { &["--user", "--map-root-user"] };
    let mut command = Command::new("unshare");
    command.args(as_root).args(["--pid", "--fork", "--kill-child", program]);
    command
}

/// Whether this machine lends namespaces, or the tests may do without.
fn may_run() -> bool {
    let out = inside("true").output().expect("unshare, from util-linux");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() || std::env::var_os("OXYGIN_TEST_NO_NETNS").is_some(), "{said}");
    out.status.success()
}

/// Runs `oxygin` there.
fn start(line: &str) -> Inside {
    let mut command = inside(env!("CARGO_BIN_EXE_oxygin"));
    command.args(line.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Inside(command.spawn().expect("unshare"))
}

/// The first child of a process, as this test sees it, once it runs `name`.
fn child_of(parent: u32, name: &str) -> i32 {
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok());
        let runs =
            |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
        if let Some(pid) = { children }.find(runs) {
            return pid;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("process {parent} has no child {name}");
}

/// Whether a process catches a signal.
fn catches(pid: i32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map_or("0", str::trim);
    u64::from_str_radix(caught, 16).unwrap_or(0) >> (signal - 1) & 1 == 1
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not after {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn send(pid: i32, signal: i32) {
    // SAFETY: a process of this test's own.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

#[test]
fn signals_end_it() {
    if !may_run() {
        return;
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // It waits for a rank that does not come.
        let line = format!("perf --rank 0 --nranks 2 --root 127.0.0.1:{}", port::free());
        let mut inside = start(&line);
        let pid = child_of(inside.0.id(), "oxygin");
        until("its handlers", || catches(pid, signal));
        send(pid, signal);
        let mut status = None;
        until("its end", || {
            status = inside.0.try_wait().expect("unshare");
            status.is_some()
        });
        assert_eq!(status.and_then(|s| s.code()), Some(128 + signal), "{status:?}");
    }
}

/// As of any other process: the job ends, and the report comes.
#[test]
fn a_job_ends_by_signals() {
    if !may_run() {
        return;
    }
    let mut inside = start("doctor --job sleep 60");
    let pid = child_of(inside.0.id(), "oxygin");
    child_of(pid as u32, "sleep");
    send(pid, libc::SIGTERM);
    let mut status = None;
    until("its end", || {
        status = inside.0.try_wait().expect("unshare");
        status.is_some()
    });
    assert_eq!(status.and_then(|s| s.code()), Some(128 + libc::SIGTERM), "{status:?}");
}

/// What it forks takes a signal's default action, and is known to have ended by it.
#[test]
fn its_children_end_by_the_signal() {
    if !may_run() {
        return;
    }
    let library = std::env::current_exe().expect("this test").with_file_name("liboxygin.so");
    let mut inside = start(&format!("perf --local 2 -D 60 --test bandwidth -s 64K --plugin {}", library.display()));
    let pid = child_of(inside.0.id(), "oxygin");
    let rank = child_of(pid as u32, "oxygin");
    send(rank, libc::SIGTERM);
    let mut said = String::new();
    inside.0.stderr.take().expect("a pipe").read_to_string(&mut said).expect("what it says");
    assert!(said.contains("killed by signal 15 (SIGTERM)"), "{said}");
}
