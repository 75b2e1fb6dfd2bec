//! `oxygin doctor --job`: what a job's ranks really used, by NCCL's and oxygin's log.

mod judge;
mod log;

use serde_json::json;
use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs the command with the log on, reads what its processes wrote, says what they used; true: the command succeeded
/// and all ranks used oxygin. `logs`: where the log is to be kept.
pub fn run(command: &[OsString], logs: Option<PathBuf>, json: bool) -> Result<bool, Box<dyn Error>> {
    let [program, arguments @ ..] = command else { return Err("--job needs a command".into()) };
    let folder = Folder::new(logs)?;
    let status = Command::new(program)
        .args(arguments)
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET")
        .env("NCCL_DEBUG_FILE", folder.path.join("nccl.%h.%p.log"))
        .status()
        .map_err(|e| format!("{}: {e}", program.to_string_lossy()))?;
    let groups = judge::groups(folder.processes()?);
    let all_used = !groups.is_empty() && groups.iter().all(|g| g.used.uses_oxygin());
    if json {
        let report = json!({"status": status.code(), "signal": std::os::unix::process::ExitStatusExt::signal(&status),
            "groups": groups});
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("\n{} ended: {status}", program.to_string_lossy());
        match groups.is_empty() {
            true => println!(
                "no process of it wrote a log of NCCL's: none got as far as initialising it, or they are on other \
                 hosts (--logs DIR, a folder that all share)"
            ),
            false => print!("{}", judge::text(&groups)),
        }
    }
    Ok(status.success() && all_used)
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
            None => (std::env::temp_dir().join(format!("oxygin-job-{}", std::process::id())), true),
        };
        let made = match is_ours {
            true => std::fs::create_dir(&path),
            false => std::fs::create_dir_all(&path),
        };
        made.map_err(|e| format!("{}: {e}", path.display()))?;
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
