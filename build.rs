//! Finds the commit that this source is, for `oxygin --version`, the log's first line and the sentences in which two
//! builds refuse each other (`src/sys/version.rs`). Nothing but files is read, so that neither a network nor git is
//! needed.
//!
//! Only optimised builds name their commit: a developer's tests would all be compiled anew behind each commit.

use std::path::{Path, PathBuf};

/// Digits of a commit's name that are shown: git's own rule for a repository of this size and some more.
const DIGITS: usize = 12;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let (origin, watched) = match std::env::var("PROFILE").as_deref() {
        Ok("release") => origin(&root),
        _ => ("debug build".into(), Vec::new()),
    };
    for path in watched {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    println!("cargo:rustc-env=OXYGIN_ORIGIN={origin}");
}

/// Where the source in this folder is from, in words, and the files of which one changes when that does. Cargo runs a
/// script whose watched file is missing each time, so only those are watched that are there.
pub fn origin(root: &Path) -> (String, Vec<PathBuf>) {
    let mut watched = Vec::new();
    let found = from_git(root, &mut watched).or_else(|| from_package(root, &mut watched));
    watched.retain(|path| path.exists());
    (found.unwrap_or_else(|| "built outside git".into()), watched)
}

/// What is checked out, if this is a checkout of its own and not a folder in somebody else's.
fn from_git(root: &Path, watched: &mut Vec<PathBuf>) -> Option<String> {
    let entry = root.join(".git");
    // A linked worktree has a file there that leads to its folder.
    let git = match std::fs::read_to_string(&entry) {
        Ok(link) => root.join(link.trim().strip_prefix("gitdir: ")?),
        Err(_) if entry.is_dir() => entry,
        Err(_) => return None,
    };
    let common = match std::fs::read_to_string(git.join("commondir")) {
        Ok(folder) => git.join(folder.trim()),
        Err(_) => git.clone(),
    };
    let head = std::fs::read_to_string(git.join("HEAD")).ok()?;
    watched.push(git.join("HEAD"));
    let commit = match head.trim().strip_prefix("ref: ") {
        None => named(&head),
        Some(branch) => of_branch(&git, &common, branch, watched),
    };
    // A repository kept in a way that this file cannot read (reftable) is git all the same.
    Some(commit.unwrap_or_else(|| "commit unknown".into()))
}

/// The commit of a branch, which is in a file of its own or in the list of packed ones.
fn of_branch(git: &Path, common: &Path, branch: &str, watched: &mut Vec<PathBuf>) -> Option<String> {
    let loose = common.join(branch);
    if let Ok(commit) = std::fs::read_to_string(&loose) {
        watched.push(loose);
        return named(&commit);
    }
    // The next commit makes the loose file and appends to the log of HEAD.
    watched.extend([common.join("packed-refs"), git.join("logs/HEAD")]);
    let packed = std::fs::read_to_string(common.join("packed-refs")).ok()?;
    packed.lines().find_map(|line| named(line.strip_suffix(branch)?.strip_suffix(' ')?))
}

/// What `cargo package` or `git archive` wrote into a source package.
fn from_package(root: &Path, watched: &mut Vec<PathBuf>) -> Option<String> {
    let cargo = root.join(".cargo_vcs_info.json");
    if let Ok(json) = std::fs::read_to_string(&cargo) {
        watched.push(cargo);
        return named(json.split_once("\"sha1\"")?.1.split('"').nth(1)?);
    }
    let archive = root.join("packaging/commit");
    let text = std::fs::read_to_string(&archive).ok()?;
    watched.push(archive);
    named(&text)
}

/// `commit 0123456789ab`, if that is a commit's full name.
fn named(text: &str) -> Option<String> {
    let text = text.trim();
    let is_hash = text.len() >= 40 && text.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| format!("commit {}", &text[..DIGITS]))
}
