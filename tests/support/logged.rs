//! What the library logged.

use log::Level;
use std::sync::{Mutex, MutexGuard, PoisonError};

static LINES: Mutex<Vec<(Level, String)>> = Mutex::new(Vec::new());

struct Logged;

impl log::Log for Logged {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, record: &log::Record) {
        lines().push((record.level(), record.args().to_string()));
    }
    fn flush(&self) {}
}

/// The lines since `collect`.
pub fn lines() -> MutexGuard<'static, Vec<(Level, String)>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many of them have all these words.
pub fn said(words: &[&str]) -> usize {
    lines().iter().filter(|line| words.iter().all(|word| line.1.contains(word))).count()
}

/// Has this be the process's logger. The tables' first `init` would have it be the library's, so it comes before that.
pub fn install() {
    let _ = log::set_logger(&Logged);
}

/// Collects what is logged from now on. The tables' `init` without a logger turns the log off: `listen` turns it on
/// again.
pub fn collect() {
    install();
    listen();
    lines().clear();
}

/// Turns the log on.
pub fn listen() {
    log::set_max_level(log::LevelFilter::Trace);
}
