//! Tests that run in a process of their own.

use std::panic::Location;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// Set in the process that a test has for itself.
const APART: &str = "OXYGIN_TEST_APART";

/// This program, which runs one of its tests alone: one of `file`.
pub fn again_from(test: &str, file: &Location<'_>) -> Command {
    let program = std::env::current_exe().unwrap();
    let path = path(test, file);
    let mut command = Command::new(program);
    command.args([&path, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// What a test is called on the command line: as it is in the program's first file, behind its module in another. A
/// name that is none would run nothing and fail nothing.
fn path(test: &str, file: &Location<'_>) -> String {
    let module = Path::new(file.file()).file_stem().unwrap().to_str().unwrap();
    let is_one = |path: &String| tests().lines().any(|line| line.strip_suffix(": test") == Some(path));
    let mut paths = [test.to_owned(), format!("{module}::{test}")].into_iter();
    paths.find(is_one).unwrap_or_else(|| panic!("{file} names no test of this program: {test}"))
}

/// The tests of this program, a line each.
fn tests() -> &'static str {
    static LIST: OnceLock<String> = OnceLock::new();
    LIST.get_or_init(|| {
        let this = std::env::current_exe().unwrap();
        let list = Command::new(this).args(["--list", "--format", "terse"]).output().unwrap();
        String::from_utf8(list.stdout).unwrap()
    })
}

/// Runs a test in a process of its own, because of what the process has or keeps. True: that is another, and has
/// passed. `test` is its name with all modules, the crate's before them.
#[track_caller]
pub fn is_elsewhere(test: &str) -> bool {
    if std::env::var_os(APART).is_some() {
        return false;
    }
    let (_, path) = test.split_once("::").expect("a crate and a test");
    let mut process = again_from(path, Location::caller());
    assert!(process.env(APART, "1").status().unwrap().success(), "{path} failed in its process");
    true
}
