//! `oxygin env`: the variables that have this machine's NCCL take oxygin, and why.

pub mod find;
pub mod select;

use crate::doctor::child;
use crate::out;
use crate::plugin::library;
use oxygin::comm::fabrics::{first_serves_kernels, foreseen_promise};
use oxygin::config::{Config, GdakiSignals};
use oxygin::memory::gpu::has_driver;
use select::{select, Selection, Wanted};
use serde::Serialize;
use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What NCCL has room for in the name of a plugin, its NUL not counted.
const LONGEST_NAME: usize = 253;

/// Options of `oxygin env`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The NCCL to select oxygin in: its library, a folder that has it, or its version such as 2.30.7; without it the
    /// one that programs here find first
    #[arg(long, value_name = "PATH|VERSION")]
    nccl: Option<String>,
    /// The plugin library, by its path, or by a name without / that the linker finds; without it
    /// liboxygin.so beside this program, in ../lib, or where the linker finds it
    #[arg(long, value_name = "PATH", env = "OXYGIN_PLUGIN")]
    plugin: Option<PathBuf>,
    /// Print lines for a shell only: eval "$(oxygin env --shell)"
    #[arg(long, conflicts_with = "json")]
    shell: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The NCCL that was asked about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Nccl {
    /// As `2.30.7`.
    version: String,
    /// Where it is; none if only a version was named.
    path: Option<PathBuf>,
    /// Others that are here.
    others: Vec<PathBuf>,
}

/// All that is printed.
#[derive(Debug, Serialize)]
struct Answer {
    nccl: Nccl,
    plugin: PathBuf,
    #[serde(flatten)]
    selection: Selection,
}

/// Runs it; always true.
pub fn run(args: Args) -> Result<bool, Box<dyn Error>> {
    let variable = |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
    let (nccl, code) = named(args.nccl.as_deref(), &variable)?;
    let plugin = file_of(args.plugin)?;
    let (config, _) = Config::parse(variable);
    let selected = select(code, wanted(&config, nccl.path.as_deref()), &value_of(&plugin)?);
    let selection = selected.map_err(|why| format!("{why}{}", which(&nccl)))?;
    let answer = Answer { nccl, plugin, selection };
    match (args.json, args.shell) {
        (true, _) => out::line(&serde_json::to_string_pretty(&answer)?),
        (_, true) => out::text_of_lines(&shell(&answer.selection)),
        _ => out::text_of_lines(&text(&answer)),
    }?;
    Ok(true)
}

/// What decides here beside the version of the NCCL in this file, if there is one. It may try a device. Without a CUDA
/// driver RCCL is taken at its word; NVIDIA's NCCL runs nowhere without one, so hosts are meant that have it.
pub fn wanted(config: &Config, library: Option<&Path>) -> Wanted {
    let limit = Duration::from_secs(20);
    let serves_kernels = child::holds(limit, || first_serves_kernels(config));
    let has_cuda = child::holds(limit, has_driver);
    let is_elsewhere = !has_cuda && !library.is_some_and(find::is_rccl);
    let has_cuda = has_cuda || is_elsewhere;
    let needs_all = config.gdaki_signals == GdakiSignals::AllPeers;
    let has_nic = !needs_all || child::holds(limit, || foreseen_promise(config).signals_of_all_peers);
    Wanted { engine: config.engine, gin_type: config.gin_type, has_cuda, serves_kernels, has_nic, is_elsewhere }
}

/// The NCCL that the option names, or the first that is found, with its version number.
fn named(asked: Option<&str>, variable: &dyn Fn(&str) -> Option<String>) -> Result<(Nccl, i32), String> {
    let of = |path: PathBuf, others| {
        let code =
            find::version(&path).ok_or_else(|| format!("{}: its version cannot be found out", path.display()))?;
        Ok((Nccl { version: find::spell(code), path: Some(path), others }, code))
    };
    match asked {
        Some(text) if find::code_of(text).is_some() => {
            let code = find::code_of(text).unwrap_or_default();
            Ok((Nccl { version: find::spell(code), path: None, others: Vec::new() }, code))
        }
        Some(text) => {
            let path = Path::new(text);
            let tried = [path.to_path_buf(), path.join("libnccl.so.2"), path.join("lib/libnccl.so.2")];
            let Some(file) = tried.into_iter().find(|p| p.is_file()) else {
                return Err(format!("{text} is no file, no folder with libnccl.so.2, and no version such as 2.30.7"));
            };
            // The linker would look for a name alone on its own paths.
            of(std::path::absolute(&file).unwrap_or(file), Vec::new())
        }
        None => {
            let mut all = find::libraries(variable).into_iter();
            let Some(first) = all.next() else {
                return Err(
                    "finds no libnccl.so in LD_LIBRARY_PATH, in Python environments or where the linker looks; name \
                            one by --nccl PATH, or its version by --nccl 2.30.7"
                        .into(),
                );
            };
            of(first, all.collect())
        }
    }
}

/// Which NCCL it is that nothing can be said for, and which others there are.
fn which(nccl: &Nccl) -> String {
    let Some(path) = &nccl.path else { return String::new() };
    let mut text = format!(" ({}", path.display());
    for (i, other) in nccl.others.iter().enumerate() {
        text += if i == 0 { "; also here, for --nccl PATH: " } else { ", " };
        text += &other.display().to_string();
    }
    text + ")"
}

/// The plugin's file.
fn file_of(asked: Option<PathBuf>) -> Result<PathBuf, String> {
    let name = library::named(asked);
    library::file(&name).map_err(|e| format!("no plugin at {}: {e}; --plugin PATH names it", name.display()))
}

/// What a variable is set to so that NCCL loads this file: its path, which needs no library path beside it.
fn value_of(plugin: &Path) -> Result<String, String> {
    let text = plugin.to_str().ok_or_else(|| format!("{} is not UTF-8", plugin.display()))?;
    // NCCL_GIN_PLUGIN is a list with commas between, and NCCL cuts longer names.
    if text.contains(',') || text.len() > LONGEST_NAME {
        return Err(format!("NCCL cannot load {text}: a path with a comma, or of more than {LONGEST_NAME} bytes"));
    }
    Ok(text.into())
}

/// A word that a shell takes as it is.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:=@".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.into(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Lines for a shell.
fn shell(selection: &Selection) -> String {
    selection.variables.iter().map(|v| format!("export {}={}\n", v.name, quoted(&v.value))).collect()
}

/// The same for people; a shell takes it as well.
fn text(answer: &Answer) -> String {
    let (nccl, s, mut out) = (&answer.nccl, &answer.selection, String::new());
    // Writing to a String does not fail.
    let _ = match &nccl.path {
        Some(path) => writeln!(out, "# NCCL {}: {}", nccl.version, path.display()),
        None => writeln!(out, "# NCCL {}", nccl.version),
    };
    for other in &nccl.others {
        let _ = writeln!(out, "# also here, and not looked at (--nccl PATH): {}", other.display());
    }
    let _ = writeln!(
        out,
        "# tables of oxygin that it takes: {}; queues of device code are drained by: {}",
        s.tables, s.engine
    );
    for v in &s.variables {
        let _ = writeln!(out, "\n# {}\nexport {}={}", v.why, v.name, quoted(&v.value));
    }
    if !s.notes.is_empty() {
        let _ = writeln!(out);
    }
    for note in &s.notes {
        let _ = writeln!(out, "# {note}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_take_any_path() {
        assert_eq!(quoted("/opt/oxygin/lib/liboxygin.so"), "/opt/oxygin/lib/liboxygin.so");
        for text in ["", "/a b/x.so", "/it's/x.so", "$(x)", "/é/x.so"] {
            let script = format!("printf %s {}", quoted(text));
            let out = std::process::Command::new("sh").args(["-c", &script]).output().expect("a shell");
            assert_eq!(String::from_utf8_lossy(&out.stdout), text);
        }
    }

    #[test]
    fn what_nccl_would_cut_or_split_is_refused() {
        assert!(value_of(Path::new("/a,b/liboxygin.so")).is_err());
        assert!(value_of(Path::new(&format!("/{}/liboxygin.so", "x".repeat(250)))).is_err());
        assert_eq!(value_of(Path::new("/a/liboxygin.so")), Ok("/a/liboxygin.so".into()));
    }
}
