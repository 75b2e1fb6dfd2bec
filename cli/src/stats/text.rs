//! Statistics for people.

use oxygin::telemetry::stats::layout::{State, Way};
use oxygin::telemetry::stats::read::{Lane, Set};
use std::fmt::Write;

/// Who moves what a set is asked for.
pub fn way(way: Way) -> &'static str {
    match way {
        Way::Engine => "engine",
        Way::Table => "table",
    }
}

/// A state in a word.
pub fn state(state: State) -> &'static str {
    match state {
        State::Open => "open",
        State::Flushing => "flush",
        State::Failed => "FAILED",
        State::Stopped => "STOPPED",
    }
}

/// A count in at most six characters.
pub fn count(n: u64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut unit) = (n as f64, 0);
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => n.to_string(),
        _ => format!("{value:.1}{}", UNITS[unit]),
    }
}

/// A time, in at most seven characters up to a year.
pub fn time(ns: u64) -> String {
    match ns {
        0..=999 => format!("{ns}ns"),
        1_000..=999_949 => format!("{:.1}us", ns as f64 / 1e3),
        999_950..=999_949_999 => format!("{:.1}ms", ns as f64 / 1e6),
        999_950_000..=3_599_999_999_999 => format!("{:.1}s", ns as f64 / 1e9),
        _ => format!("{:.1}h", ns as f64 / 3.6e12),
    }
}

/// The name of a process; empty where it cannot be read.
pub fn program(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().chars().filter(|c| !c.is_control()).collect()
}

/// A set in a line.
pub fn title(s: &Set) -> String {
    let by = match (s.way, s.threads) {
        (Way::Engine, 1) => "the engine, 1 thread".into(),
        (Way::Engine, n) => format!("the engine, {n} threads"),
        (Way::Table, _) => "a table's calls".to_owned(),
    };
    format!(
        "communicator {} ({:#x}) set {}: rank {} of {}, fabric {}, {} contexts by {by}",
        s.comm, s.comm_id, s.set, s.rank, s.nranks, s.fabric, s.contexts
    )
}

/// The peer of a lane, with a mark where it is the companion of a queue pair to it.
pub fn peer(l: &Lane) -> String {
    format!("{}{}", l.peer, if l.is_companion { "c" } else { "" })
}

/// A paragraph a process, a table a set.
pub fn tables(sets: &[Set]) -> String {
    let mut out = String::new();
    let mut last = None;
    for s in sets {
        if last != Some(s.pid) {
            let _ = writeln!(out, "{}process {} {}", if last.is_some() { "\n" } else { "" }, s.pid, program(s.pid));
            last = Some(s.pid);
        }
        let _ = writeln!(out, "{}, {} old, looked after {} ago", title(s), time(s.age), time(s.published));
        if s.lanes.is_empty() {
            let _ = writeln!(out, "  nothing yet");
            continue;
        }
        let engine = s.way == Way::Engine;
        let _ = write!(
            out,
            "  {:>4} {:>5} {:>12} {:>12} {:>6} {:>8}",
            "ctx", "peer", "entries", "complete", "open", "oldest"
        );
        let _ = write!(out, " {:>8} {:>8} {:>8}", "bytes", "p50<", "p99<");
        let _ = match engine {
            true => {
                writeln!(out, " {:>8} {:>9} {:>7} {:>7} state", "posted<", "batches", "refused", "dropped")
            }
            false => writeln!(out),
        };
        for l in &s.lanes {
            let oldest = l.oldest.map_or("-".into(), time);
            let _ = write!(
                out,
                "  {:>4} {:>5} {:>12} {:>12} {:>6} {:>8}",
                l.context,
                peer(l),
                l.entries,
                l.completed,
                l.under_way,
                oldest
            );
            let at = |time_of: Option<u64>| time_of.map_or("-".into(), time);
            let (half, most) = (at(l.complete.quantile(0.5)), at(l.complete.quantile(0.99)));
            let _ = write!(out, " {:>8} {half:>8} {most:>8}", count(l.bytes));
            if engine {
                let _ = write!(
                    out,
                    " {:>8} {:>9} {:>7} {:>7} {}",
                    at(l.posted.quantile(0.5)),
                    l.batches,
                    l.refused,
                    l.dropped,
                    state(l.state)
                );
            }
            let _ = writeln!(out);
        }
        if s.lanes.iter().any(|l| l.is_companion) {
            let _ = writeln!(out, "  c: companions of queue pairs to that peer, which wait and add to counters");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fit_their_columns() {
        assert_eq!([0, 999, 1000, 999_949, 999_950].map(count), ["0", "999", "1.0k", "999.9k", "1.0M"]);
        assert_eq!([0, 999, 1000, 999_950, 1_500_000_000].map(time), ["0ns", "999ns", "1.0us", "1.0ms", "1.5s"]);
        for n in (0..64).map(|i| u64::MAX >> i) {
            assert!(count(n).len() <= 6 && (n > 1 << 60 || time(n).len() <= 9), "{n}: {} {}", count(n), time(n));
        }
    }
}
