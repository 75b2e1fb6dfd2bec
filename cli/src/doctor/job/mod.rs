//! `oxygin doctor --job`: what a job's ranks really used, by NCCL's and oxygin's log.

mod command;
mod judge;
mod log;

use crate::ending::Ending;
use crate::out;
use crate::signals::Signals;
use command::Ended;
use judge::Group;
use nix::sys::signal::Signal;
use serde_json::{json, Value};
use std::error::Error;
use std::ffi::{CString, OsString};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs the command with the log on, reads what its processes wrote, says what they used. All is well if the command
/// succeeded and all ranks used oxygin. `logs`: where the log is to be kept.
pub fn run(command: &[OsString], logs: Option<PathBuf>, json: bool) -> Result<Ending, Box<dyn Error>> {
    let [program, arguments @ ..] = command else { return Err("--job needs a command".into()) };
    // A job that hangs is what one wants the report of. They come back to what they were behind the report.
    let mut signals = Signals::catch(&[Signal::SIGCHLD])?;
    let folder = Folder::new(logs)?;
    let mut job = Command::new(program);
    job.args(arguments)
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET")
        .env("NCCL_DEBUG_FILE", folder.path.join("nccl.%h.%p.log"));
    if json {
        // Standard output has the object and nothing else.
        job.stdout(std::io::stderr().as_fd().try_clone_to_owned()?);
    }
    let ended = command::run(job, &mut signals).map_err(|e| format!("{}: {e}", program.to_string_lossy()))?;
    let groups = judge::groups(folder.processes()?);
    let all_used = !groups.is_empty() && groups.iter().all(|g| g.used.uses_oxygin());
    match json {
        true => out::line(&serde_json::to_string_pretty(&object(&ended, &groups))?),
        false => out::text_of_lines(&text(&program.to_string_lossy(), &ended, &groups)),
    }?;
    Ok(match ended.stopped_by {
        Some(signal) => Ending::Stopped(signal),
        None => (ended.status.is_some_and(|status| status.success()) && all_used).into(),
    })
}

fn object(ended: &Ended, groups: &[Group]) -> Value {
    json!({
        "status": ended.status.and_then(|status| status.code()),
        "signal": ended.status.and_then(|status| status.signal()),
        "stopped_by": ended.stopped_by.map(Signal::as_str),
        "groups": groups,
    })
}

fn text(program: &str, ended: &Ended, groups: &[Group]) -> String {
    let how = ended.status.map_or("killed, and has not ended".into(), |status| status.to_string());
    let mut text = format!("\n{program} ended: {how}\n");
    if let Some(signal) = ended.stopped_by {
        text += &format!("by {signal}, which oxygin doctor was sent: this is what it used until then\n");
    }
    text + &match groups.is_empty() {
        true => {
            "no process of it wrote a log of NCCL's: none got as far as initialising it, or they are on other hosts \
                 (--logs DIR, a folder that all share)\n"
                .to_owned()
        }
        false => judge::text(groups),
    }
}

/// Where the log is written; goes with the value unless it was asked for.
struct Folder {
    path: PathBuf,
    is_ours: bool,
}

impl Folder {
    fn new(asked: Option<PathBuf>) -> Result<Self, String> {
        let (path, is_ours) = match asked {
            Some(path) => (std::path::absolute(&path).unwrap_or(path), false),
            None => (temporary()?, true),
        };
        std::fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let folder = Self { path, is_ours };
        // What an earlier job left would be taken for this one's.
        match folder.files()?.is_empty() {
            true => Ok(folder),
            false => Err(format!("{} has logs in it; name another folder", folder.path.display())),
        }
    }

    fn files(&self) -> Result<Vec<PathBuf>, String> {
        let entries = std::fs::read_dir(&self.path).map_err(|e| format!("{}: {e}", self.path.display()))?;
        let is_log = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("nccl."));
        Ok(entries.flatten().map(|e| e.path()).filter(is_log).collect())
    }

    fn processes(&self) -> Result<log::Processes, String> {
        let mut processes = log::Processes::new();
        for file in self.files()? {
            log::read(&text_of(&file)?, &mut processes);
        }
        Ok(processes)
    }
}

/// A new folder for this job alone. A process's number would not do: in a container it is 1 each time.
fn temporary() -> Result<PathBuf, String> {
    let pattern = std::env::temp_dir().join("oxygin-job-XXXXXX");
    let mut name = CString::new(pattern.as_os_str().as_bytes()).map_err(|e| e.to_string())?.into_bytes_with_nul();
    // SAFETY: a string with a NUL, ours to change.
    let made = unsafe { libc::mkdtemp(name.as_mut_ptr().cast()) };
    if made.is_null() {
        return Err(format!("{}: {}", pattern.display(), std::io::Error::last_os_error()));
    }
    name.pop();
    Ok(OsString::from_vec(name).into())
}

fn text_of(file: &Path) -> Result<String, String> {
    let bytes = std::fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
