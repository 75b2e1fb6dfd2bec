//! `oxygin stats` as a user runs it: over pages of this process, whose numbers are known, and over a running `oxygin
//! perf`.

#[path = "support/page.rs"]
mod page;

use oxygin::telemetry::stats::layout::{Way, VERSION};
use page::{page, turn, Stranger};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const OXYGIN: &str = env!("CARGO_BIN_EXE_oxygin");
const LIMIT: Duration = Duration::from_secs(60);

/// The library, which cargo builds beside this test. A cargo that this test starts would build it with other features
/// of its dependencies, where other programs have it loaded, and the next one would build all that depends on it anew.
fn plugin() -> PathBuf {
    std::env::current_exe().expect("this test").with_file_name("liboxygin.so")
}

fn stats(line: &str) -> Output {
    let mut command = Command::new(OXYGIN);
    command.arg("stats").args(line.split_whitespace()).stdin(Stdio::null()).output().expect("oxygin runs")
}

fn good(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn all_forms_have_the_numbers() {
    const COMM: u64 = 4242;
    let _turn = turn();
    let (page, me) = (page(COMM, Way::Engine), std::process::id());
    let text = good(stats(&me.to_string()));
    let line = |begin: &str| text.lines().find(|l| l.contains(begin)).unwrap_or_else(|| panic!("{begin}: {text}"));
    assert!(
        line("communicator 4242").contains("rank 0 of 3, fabric soft, 2 contexts by the engine, 1 thread"),
        "{text}"
    );
    let words: Vec<_> = line("12345678").split_whitespace().collect();
    assert_eq!(words[..5], ["1", "1", "12345678", "12345677", "1"]);
    assert_eq!(words[6..], ["5.0G", "8.2us", "131.1us", "512ns", "700000", "0", "0", "open"]);
    assert!(words[5].starts_with("60") && words[5].ends_with('s'), "{words:?}");
    let words: Vec<_> = line(" 606 ").split_whitespace().collect();
    assert_eq!(words[..5], ["1", "1c", "606", "604", "2"], "{text}");
    assert!(text.contains("c: companions"), "{text}");
    assert!(line("FAILED").split_whitespace().rev().nth(1) == Some("7"), "{text}");

    let json: Value = serde_json::from_str(&good(stats(&format!("{me} --json")))).expect("JSON");
    let set = json["sets"].as_array().unwrap().iter().find(|s| s["communicator"] == COMM).expect("the set");
    assert_eq!((&set["pid"], &set["fabric"], &set["way"]), (&me.into(), &"soft".into(), &"engine".into()));
    let lane = &set["lanes"][1];
    assert_eq!((&lane["entries"], &lane["under_way"]), (&12_345_678.into(), &1.into()));
    assert_eq!(lane["posted_to_complete"]["buckets"][12], 12_000_000);
    assert_eq!((&set["lanes"][1]["companion"], &set["lanes"][2]["companion"]), (&false.into(), &true.into()));
    assert_eq!((&set["lanes"][2]["peer"], &set["lanes"][2]["entries"]), (&1.into(), &606.into()));
    assert!(lane["oldest_ns"].as_u64().unwrap() >= 600_000_000_000);

    let text = good(stats(&format!("{me} --prometheus")));
    let labels = format!(r#"pid="{me}",communicator="4242",set="1",rank="0",fabric="soft",way="engine""#);
    for line in [
        format!(r#"oxygin_entries_total{{{labels},context="1",peer="1"}} 12345678"#),
        format!(r#"oxygin_entries_total{{{labels},context="1",peer="1",queue="companion"}} 606"#),
        format!(r#"oxygin_dropped_total{{{labels},context="0",peer="2"}} 7"#),
        format!(r#"oxygin_failed{{{labels},context="0",peer="2"}} 1"#),
        format!(r#"oxygin_posted_to_complete_seconds_bucket{{{labels},context="1",peer="1",le="8.192e-6"}} 12000000"#),
        format!(r#"oxygin_posted_to_complete_seconds_bucket{{{labels},context="1",peer="1",le="+Inf"}} 12345677"#),
        format!(r#"oxygin_posted_to_complete_seconds_sum{{{labels},context="1",peer="1"}} 1.5"#),
        "# TYPE oxygin_posted_to_complete_seconds histogram".to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    check_exposition(&text);
    drop(page);
    let json: Value = serde_json::from_slice(&stats(&format!("{me} --json")).stdout).expect("JSON");
    assert!(json["sets"].as_array().unwrap().iter().all(|s| s["communicator"] != COMM), "gone with its page");
}

/// Every series belongs to a metric that was announced, once, and has a number.
fn check_exposition(text: &str) {
    let mut metrics = std::collections::HashSet::new();
    let mut series = std::collections::HashSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            assert!(metrics.insert(rest.split(' ').next().unwrap().to_owned()), "twice: {line}");
        } else if !line.starts_with("# HELP ") {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            assert!(value.parse::<f64>().is_ok() && name.ends_with('}'), "{line}");
            assert!(series.insert(name), "twice: {line}");
            let name = name.split('{').next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            assert!(metrics.contains(name) || metrics.contains(base), "{line}");
        }
    }
}

#[test]
fn who_cannot_be_read_is_said_so() {
    let output = stats("4194999");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no process 4194999"), "{output:?}");
    let mut other = Command::new("sleep").arg("60").spawn().expect("sleep runs");
    let output = stats(&other.id().to_string());
    other.kill().and_then(|()| other.wait().map(drop)).expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("has no contexts of oxygin's"), "{output:?}");
}

#[test]
fn those_that_live_are_read_beside_one_that_has_ended() {
    const COMM: u64 = 57;
    let _turn = turn();
    let (_page, me) = (page(COMM, Way::Engine), std::process::id());
    let output = stats(&format!("4194999 {me} --prometheus"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no process 4194999"), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains(r#"communicator="57""#), "{output:?}");
}

/// A perf that runs until it is dropped.
struct Perf(Child);

impl Perf {
    fn run(line: &str, engine: &str) -> Self {
        let mut command = Command::new(OXYGIN);
        command.arg("perf").args(line.split_whitespace()).arg("--plugin").arg(plugin()).env("OXYGIN_ENGINE", engine);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("oxygin runs"))
    }

    /// Sets of its ranks with something in them, when there are so many.
    fn sets(&mut self, n: usize, way: &str) -> Vec<Value> {
        let end = Instant::now() + LIMIT;
        loop {
            let output = good(stats("--json"));
            let json: Value = serde_json::from_str(&output).expect("JSON");
            let mut sets = json["sets"].as_array().expect("sets").clone();
            sets.retain(|s| s["way"] == way && self.is_parent(&s["pid"]) && s["lanes"][0]["completed"] != Value::Null);
            if sets.len() >= n {
                return sets;
            }
            assert_eq!(self.0.try_wait().expect("a child"), None, "it still runs");
            assert!(Instant::now() < end, "{output}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_parent(&self, pid: &Value) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        parent == Some(self.0.id().to_string().as_str())
    }
}

impl Drop for Perf {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_running_job_is_seen_by_queue_and_by_table() {
    for (table, way) in [("gin-v14-queue", "engine"), ("gin-v13", "table"), ("rma-v16", "table")] {
        let line = format!("--local 2 --table {table} --op put-signal --test rate -s 8 -q 2 --duration 300");
        let mut perf = Perf::run(&line, if way == "engine" { "own" } else { "nccl" });
        let entries = |sets: &[Value]| -> u64 {
            let lanes = sets.iter().flat_map(|s| s["lanes"].as_array().unwrap());
            lanes.map(|l| l["entries"].as_u64().unwrap()).sum()
        };
        let first = perf.sets(2, way);
        let end = Instant::now() + LIMIT;
        loop {
            let later = perf.sets(2, way);
            let times =
                |s: &Value| s["lanes"].as_array().unwrap().iter().any(|l| l["posted_to_complete"]["count"] != 0);
            if entries(&later) > entries(&first) + 100 && later.iter().any(times) {
                let mut bytes = 0;
                for lane in later.iter().flat_map(|s| s["lanes"].as_array().unwrap()) {
                    let number = |name: &str| lane[name].as_u64().expect(name);
                    assert!(number("completed") <= number("entries") && number("context") < 2, "{lane}");
                    bytes += number("bytes");
                }
                // Some are signals alone.
                assert!(bytes > 0 && bytes <= 8 * entries(&later), "{table}: {later:#?}");
                break;
            }
            assert!(Instant::now() < end, "{table}: {first:#?} {later:#?}");
        }
        let pid = &first[0]["pid"];
        check_exposition(&good(stats(&format!("{pid} --prometheus"))));
        assert!(good(stats(&pid.to_string())).contains(&format!("process {pid} oxygin")));
    }
}

#[test]
fn statistics_of_another_version_are_named() {
    let stranger = Stranger::new(99);
    let pid = stranger.pid().to_string();
    let said = format!("process {pid} has statistics of version 99, not {VERSION}: use the oxygin of its library");
    for line in [&*pid, &format!("{pid} --json"), &format!("{pid} --prometheus"), ""] {
        let output = stats(line);
        let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(error.lines().filter(|l| l.contains(&said)).count(), 1, "{line}: {error}");
        assert!(!error.contains("has no contexts") && !out.contains("no process"), "{line}: {out} {error}");
        assert_eq!(output.status.code(), Some(if line.is_empty() { 0 } else { 1 }), "{line}");
        assert!(!line.ends_with("--json") || serde_json::from_str::<Value>(&out).is_ok(), "{out}");
    }
}
