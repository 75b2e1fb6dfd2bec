//! `oxygin doctor --job` with jobs that write what NCCL would.

use nix::pty::openpty;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// A job of two processes on two hosts that writes its log as NCCL does, where NCCL is told to, and ends with this
/// status.
fn job(status: i32) -> String {
    format!(
        r#"test "$NCCL_DEBUG" = INFO || exit 9
        for rank in 0 1; do
            file=$(echo "$NCCL_DEBUG_FILE" | sed "s/%h/node$rank/; s/%p/4$rank/")
            while read -r line; do echo "node$rank:4$rank:7 [0] NCCL INFO $line"; done >"$file" <<END
        RMA/Plugin: Loaded rma plugin oxygin (v15)
        RMA/Plugin: Successfully loaded external plugin /opt/liboxygin.so
        oxygin 0.1.0 (commit 0123456789ab), communicator 0x5a5a
        RMA/Plugin: Assigned plugin oxygin to comm
        ncclCommInitRank comm 0x1 rank $rank nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0x2 - Init COMPLETE
        fabric soft: rank 1 cannot use verbs: no usable port (rank $rank of 2)
        rank $((1 - rank)): over TCP (no shared memory with it)
END
        done
        echo said by the job
        exit {status}"#
    )
}

fn doctor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oxygin")).arg("doctor").args(arguments).output().expect("oxygin runs")
}

#[test]
fn a_job_s_ranks_say_what_they_used() {
    let output = doctor(&["--job", "sh", "-c", &job(0)]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    for words in [
        "said by the job",
        "rank 0-1 (node0:40 and 1 more)",
        "RMA      oxygin (v15) from /opt/liboxygin.so",
        "0.1.0 (commit 0123456789ab)",
        "soft: rank 1 cannot use verbs: no usable port",
        "to 0-1: over TCP (no shared memory with it)",
        "->       no RDMA: rank 1 cannot use verbs: no usable port",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn logs_are_kept_where_they_are_wanted_and_the_job_s_status_counts() {
    let folder: PathBuf = std::env::temp_dir().join(format!("oxygin-doctor-job-{}", std::process::id()));
    let path = folder.display().to_string();
    let output = doctor(&["--json", "--logs", &path, "--job", "sh", "-c", &job(3)]);
    assert_eq!(output.status.code(), Some(1));
    // What the job says does not get into the object.
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("said by the job\n"), "{output:?}");
    assert_eq!((&report["status"], &report["groups"][0]["ranks"]), (&3.into(), &serde_json::json!([0, 1])));
    assert_eq!(report["groups"][0]["used"]["tables"]["rma"], "oxygin (v15)");
    assert_eq!(std::fs::read_dir(&folder).expect("kept").count(), 2);
    // A second job's ranks must not be mixed with these.
    let again = doctor(&["--logs", &path, "--job", "true"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("name another folder"));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_job_without_nccl_or_that_cannot_start_says_so() {
    let output = doctor(&["--job", "true"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && text.contains("no process of it wrote a log"), "{text}");
    let output = doctor(&["--job", "/nowhere/program", "--its-option"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("/nowhere/program: No such file"), "{said}");
}

/// What a job does before it hangs.
fn begun() -> String {
    job(0).replace("exit 0", "")
}

/// Reads a process's output until it says that it is ready.
fn until_ready(child: &mut Child) -> BufReader<ChildStdout> {
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.ends_with("ready\n") {
        assert!(out.read_line(&mut line).expect("text") > 0, "{line}");
    }
    out
}

fn send(pid: i32, signal: i32) {
    // SAFETY: a plain system call, for a process of this test's own or its group.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

#[test]
fn a_job_that_is_interrupted_is_reported_and_leaves_nothing() {
    let folder: PathBuf = std::env::temp_dir().join(format!("oxygin-doctor-keys-{}", std::process::id()));
    // Of a process that had the same number.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    // What a job of a process with the same number has left, as in a container, where it is 1 each time.
    let script = "mkdir $TMPDIR/oxygin-job-$$; exec \"$0\" doctor --job sh -c \"$1\"";
    // A shell between fork and exec of its child would lose the signal, and its child as well.
    let hangs = format!("{}\necho ready; exec sleep 60", begun());
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_oxygin"), &hangs]).env("TMPDIR", &folder).process_group(0);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("oxygin runs");
    let mut out = until_ready(&mut child);
    // As a terminal sends it: to the whole group.
    send(-(child.id() as i32), libc::SIGINT);
    let mut text = String::new();
    out.read_to_string(&mut text).expect("text");
    assert_eq!(child.wait().expect("a child").code(), Some(130), "{text}");
    assert!(text.contains("ended: signal: 2") && text.contains("rank 0-1 (node0:40 and 1 more)"), "{text}");
    let left: Vec<_> = std::fs::read_dir(&folder).expect("a folder").flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 1, "{left:?}");
    let _ = std::fs::remove_dir_all(folder);
}

/// As `kill` does it, and a batch system: nobody sends it to the job, and shells hand on nothing.
#[test]
fn a_job_ends_with_what_it_has_started_when_the_doctor_is_to_end() {
    for (signal, name) in [(libc::SIGTERM, "SIGTERM"), (libc::SIGINT, "SIGINT"), (libc::SIGHUP, "SIGHUP")] {
        // The pipe that is read to its end stays open as long as one of them lives.
        let hangs = format!("{}\nsh -c 'echo ready; exec sleep 60' | cat; echo not reached", begun());
        let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
        command.args(["doctor", "--job", "sh", "-c", &hangs]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("oxygin runs");
        let mut out = until_ready(&mut child);
        send(child.id() as i32, signal);
        let mut text = String::new();
        out.read_to_string(&mut text).expect("text");
        assert_eq!(child.wait().expect("a child").code(), Some(128 + signal), "{text}");
        for words in [format!("ended: signal: {signal}"), format!("by {name}, which"), "rank 0-1 (node0:40".into()] {
            assert!(text.contains(&words) && !text.contains("not reached"), "{words}: {text}");
        }
    }
}

#[test]
fn what_does_not_end_is_killed_and_reported() {
    // Its child is nobody's when it has ended.
    let hangs = format!("{}\n(trap '' TERM; echo ready >&2; while :; do sleep 0.1; done) & exit 3", begun());
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
    let stubborn = format!("trap '' TERM; sh -c {} & wait $!; wait; sleep 60", quoted(&hangs));
    command.args(["doctor", "--json", "--job", "sh", "-c", &stubborn]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("oxygin runs");
    let mut said = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.ends_with("ready\n") {
        assert!(said.read_line(&mut line).expect("text") > 0, "{line}");
    }
    send(child.id() as i32, libc::SIGTERM);
    let mut text = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
    // Nobody has it any more who was started there.
    said.read_to_string(&mut line).expect("text");
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!((&report["signal"], &report["stopped_by"]), (&9.into(), &"SIGTERM".into()), "{report:#}");
    assert_eq!(report["groups"][0]["ranks"], serde_json::json!([0, 1]), "{report:#}");
    assert_eq!(child.wait().expect("a child").code(), Some(143));
}

/// All processes in a terminal's foreground have what its keys send: twice would end some programs without ceremony.
#[test]
fn what_a_terminal_sends_to_the_job_is_not_sent_again() {
    let pty = openpty(None, None).expect("a terminal");
    let counts =
        "import signal, time; signal.signal(2, lambda *_: print('got it', flush=True)); print('ready', flush=True); \
                  time.sleep(1)";
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
    command.args(["doctor", "--job", "python3", "-c", counts]);
    command.stdin(pty.slave).stdout(Stdio::piped());
    // SAFETY: two system calls alone: the terminal is that of a session of its own.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    };
    let mut child = command.spawn().expect("oxygin runs");
    let mut out = until_ready(&mut child);
    let mut keyboard = File::from(pty.master);
    keyboard.write_all(b"\x03").expect("a terminal");
    let mut text = String::new();
    out.read_to_string(&mut text).expect("text");
    assert_eq!(child.wait().expect("a child").code(), Some(130), "{text}");
    assert!(text.matches("got it").count() == 1 && text.contains("python3 ended: exit status: 0"), "{text}");
}

/// A word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
