//! The table, as nccl-tests prints them, the same as JSON, and progress for those who wait.

use crate::out;
use crate::plugin::Way;
use serde::Serialize;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Nothing wrong.
    Pass,
    /// Something wrong.
    Fail,
    /// Not run; `why` says why.
    Skip,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The case.
    pub name: &'static str,
    /// The table under test.
    pub table: &'static str,
    /// Ranks that took part.
    pub ranks: usize,
    /// Bytes that all local ranks handed to the plugin.
    pub bytes: u64,
    /// Rounds or items checked, of all local ranks.
    pub rounds: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// Wrong items, bytes or calls; 1 for a case that could not end.
    pub wrong: u64,
    /// How it ended.
    pub result: Verdict,
    /// What was wrong first, why it was skipped, or what was left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Row {
    /// A case that is not run.
    pub fn skipped(name: &'static str, way: Way, ranks: usize, why: impl Into<String>) -> Self {
        let (result, why) = (Verdict::Skip, Some(why.into()));
        Self { name, table: way.label(), ranks, bytes: 0, rounds: 0, seconds: 0.0, wrong: 0, result, why }
    }
}

/// The whole run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The library under test.
    pub plugin: String,
    /// What it calls itself.
    pub name: String,
    /// `quick` or `full`.
    pub form: &'static str,
    /// The part of the form's rounds that was asked for, at most 1.
    pub scale: f64,
    /// The lines.
    pub cases: Vec<Row>,
    /// How many cases passed.
    pub passed: usize,
    /// How many failed.
    pub failed: usize,
    /// How many were skipped.
    pub skipped: usize,
    /// Why it ended before all cases were run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

/// Prints the heading.
pub fn print_heading(plugin: &str, name: &str, ranks: usize, form: &str, scale: f64) -> io::Result<()> {
    let part = if scale < 1.0 { format!(", {scale} of the rounds") } else { String::new() };
    out::line(&format!(
        "# {plugin} ({name}), {ranks} ranks, {form}{part}\n#{:>21} {:>13} {:>5} {:>12} {:>9} {:>9} {:>7}  result",
        "case", "table", "ranks", "bytes", "rounds", "time", "#wrong"
    ))
}

/// Prints one line, and what there is to say about it.
pub fn print_row(row: &Row) -> io::Result<()> {
    let Row { name, table, ranks, bytes, rounds, seconds, wrong, result, why } = row;
    let result_text = match result {
        Verdict::Pass => "ok",
        Verdict::Fail => "FAILED",
        Verdict::Skip => "skipped",
    };
    let numbers = match result {
        Verdict::Skip => format!("{:>12} {:>9} {:>9} {:>7}", "-", "-", "-", "-"),
        _ => format!("{bytes:>12} {rounds:>9} {seconds:>8.2}s {wrong:>7}"),
    };
    let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    out::line(&format!("{name:>22} {table:>13} {ranks:>5} {numbers}  {result_text}{why}"))
}

/// Prints the sum.
pub fn print_sum(report: &Report) -> io::Result<()> {
    out::line(&format!("# {} passed, {} failed, {} skipped", report.passed, report.failed, report.skipped))?;
    let failed: Vec<String> = report
        .cases
        .iter()
        .filter(|r| r.result == Verdict::Fail)
        .map(|r| format!("{} ({})", r.name, r.table))
        .collect();
    if !failed.is_empty() {
        out::line(&format!("# failed: {}", failed.join(", ")))?;
    }
    match &report.ended {
        Some(why) => out::line(&format!("# ended here, no further case was run: {why}")),
        None => Ok(()),
    }
}

/// Progress on standard error: continuously on a terminal, else every ten seconds.
pub struct Progress {
    label: String,
    terminal: bool,
    start: Instant,
    last: Instant,
    shown: bool,
}

impl Progress {
    /// For one case.
    pub fn new(label: String) -> Self {
        let now = Instant::now();
        Self { label, terminal: std::io::stderr().is_terminal(), start: now, last: now, shown: false }
    }

    /// Shows how far the slowest rank is, if it is time to.
    pub fn show(&mut self, done: u64, total: u64) {
        let every = if self.terminal { Duration::from_millis(500) } else { Duration::from_secs(10) };
        if self.last.elapsed() < every {
            return;
        }
        self.last = Instant::now();
        let elapsed = self.start.elapsed().as_secs_f64();
        let line = match (done, total) {
            (0, _) | (_, 0) => format!("{}: {elapsed:.0} s", self.label),
            (done, total) => {
                let share = (done as f64 / total as f64).min(1.0);
                format!("{}: {:.0} %, about {:.0} s left", self.label, share * 100.0, elapsed / share - elapsed)
            }
        };
        if self.terminal {
            eprint!("\r\x1b[K{line}");
            self.shown = true;
        } else {
            out::say(&line);
        }
    }

    /// Clears the line.
    pub fn end(self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
