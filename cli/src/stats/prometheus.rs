//! Statistics in Prometheus' text format, version 0.0.4.

use super::text::way;
use oxygin::telemetry::stats::layout::{State, Way};
use oxygin::telemetry::stats::read::{Histogram, Lane, Set};
use std::fmt::Write;

type Value = fn(&Lane) -> Option<f64>;

/// Name, type, help, value, and whether a table's calls have it too.
const METRICS: [(&str, &str, &str, Value, bool); 10] = [
    ("entries_total", "counter", "Entries taken off a queue, or operations posted", |l| Some(l.entries as f64), true),
    ("completed_total", "counter", "Entries or operations complete", |l| Some(l.completed as f64), true),
    ("under_way", "gauge", "Entries or operations not complete", |l| Some(l.under_way as f64), true),
    ("oldest_seconds", "gauge", "Age of the oldest of them", |l| Some(l.oldest.map_or(0.0, seconds)), true),
    ("bytes_total", "counter", "Bytes that they move", |l| Some(l.bytes as f64), true),
    ("batches_total", "counter", "Batches posted", |l| Some(l.batches as f64), false),
    ("refused_total", "counter", "Malformed entries", |l| Some(l.refused as f64), false),
    ("dropped_total", "counter", "Entries that came to nothing", |l| Some(l.dropped as f64), false),
    ("failed", "gauge", "1: the fabric failed it", |l| Some((l.state == State::Failed).into()), false),
    ("stopped", "gauge", "1: an entry was malformed", |l| Some((l.state == State::Stopped).into()), false),
];

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// All metrics of all sets. Each begins with `oxygin_`.
pub fn text(sets: &[Set]) -> String {
    let mut out = String::new();
    let lanes: Vec<(String, &Set, &Lane)> =
        sets.iter().flat_map(|set| set.lanes.iter().map(move |lane| (labels(set, lane), set, lane))).collect();
    for (name, kind, help, value, is_common) in METRICS {
        head(&mut out, name, kind, help);
        for (labels, _, lane) in lanes.iter().filter(|(_, set, _)| is_common || set.way == Way::Engine) {
            if let Some(value) = value(lane) {
                let _ = writeln!(out, "oxygin_{name}{{{labels}}} {value}");
            }
        }
    }
    let engine = || lanes.iter().filter(|(_, set, _)| set.way == Way::Engine);
    head(&mut out, "seen_to_posted_seconds", "histogram", "From the look at the queue to posted, of some batches");
    engine().for_each(|(labels, _, lane)| histogram(&mut out, "seen_to_posted_seconds", labels, &lane.posted));
    head(&mut out, "posted_to_complete_seconds", "histogram", "From posted to complete, of entries or some operations");
    lanes
        .iter()
        .for_each(|(labels, _, lane)| histogram(&mut out, "posted_to_complete_seconds", labels, &lane.complete));
    head(&mut out, "published_seconds", "gauge", "Since somebody looked after a set's statistics");
    for set in sets {
        let _ = writeln!(out, "oxygin_published_seconds{{{}}} {}", of_set(set), seconds(set.published));
    }
    out
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP oxygin_{name} {help}.\n# TYPE oxygin_{name} {kind}");
}

/// The fabric's name is ASCII without quotes, as `read` leaves it; the rest are numbers.
fn of_set(s: &Set) -> String {
    let fabric: String = s.fabric.chars().filter(|c| !"\"\\".contains(*c)).collect();
    format!(
        r#"pid="{}",communicator="{}",set="{}",rank="{}",fabric="{fabric}",way="{}""#,
        s.pid,
        s.comm,
        s.set,
        s.rank,
        way(s.way)
    )
}

fn labels(s: &Set, l: &Lane) -> String {
    let queue = if l.is_companion { r#",queue="companion""# } else { "" };
    format!(r#"{},context="{}",peer="{}"{queue}"#, of_set(s), l.context, l.peer)
}

/// Buckets from 128 ns to 34 s are said, each with all that are below: the others are rare, and series cost.
fn histogram(out: &mut String, name: &str, labels: &str, h: &Histogram) {
    let mut sum = 0u64;
    for (i, n) in h.buckets.iter().enumerate() {
        sum = sum.saturating_add(*n);
        if (6..=34).contains(&i) && i % 2 == 0 {
            let _ = writeln!(out, "oxygin_{name}_bucket{{{labels},le=\"{:e}\"}} {sum}", seconds(2 << i));
        }
    }
    let _ = writeln!(out, "oxygin_{name}_bucket{{{labels},le=\"+Inf\"}} {sum}");
    // Where no sum is kept, the middle of each bucket stands for what it counts.
    let about = || h.buckets.iter().enumerate().map(|(i, n)| 1.5 * (1u64 << i) as f64 / 1e9 * *n as f64).sum();
    let _ = writeln!(out, "oxygin_{name}_sum{{{labels}}} {}", h.sum.map_or_else(about, seconds));
    let _ = writeln!(out, "oxygin_{name}_count{{{labels}}} {sum}");
}
