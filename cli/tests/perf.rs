//! `oxygin perf` as a user runs it, over oxygin and over a plugin that is wrong on purpose. No test looks at how fast
//! anything is: only that what was asked for is measured, that wrong bytes are found, and what failures say.

#[path = "support/port.rs"]
mod port;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const OXYGIN: &str = env!("CARGO_BIN_EXE_oxygin");

/// A library that cargo builds beside this test: tests/stats.rs says why no other.
fn library(file: &str) -> PathBuf {
    std::env::current_exe().expect("this test").with_file_name(file)
}

fn plugin() -> PathBuf {
    library("liboxygin.so")
}

fn broken_plugin() -> PathBuf {
    library("libreference_plugin.so")
}

fn perf(line: &str) -> Command {
    let mut command = Command::new(OXYGIN);
    command.arg("perf").args(line.split_whitespace()).arg("--plugin").arg(plugin());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn good(output: Output) -> String {
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn json(output: Output) -> Value {
    serde_json::from_str(&good(output)).expect("one JSON object")
}

fn run_json(line: &str) -> Value {
    json(perf(&format!("{line} --json")).output().expect("oxygin runs"))
}

fn rows(report: &Value) -> &Vec<Value> {
    report["results"].as_array().expect("rows")
}

#[test]
fn rounds_may_take_longer_than_anybody_waits() {
    let report = run_json("--local 2 --timeout 1 --rounds 1 -D 2.5 --test completion,bandwidth -s 64K");
    assert_eq!(rows(&report).len(), 2);
}

#[test]
fn every_row_that_was_asked_for_is_there() {
    let report = run_json(
        "--local 2 --test latency,completion,rate,bandwidth --op put-signal -s 1,8,5000,1M -n 60 -q 3 -t 16 -l 4",
    );
    assert_eq!(rows(&report).len(), 16);
    for row in rows(&report) {
        assert_eq!(row["result"]["iterations"], 60, "{row}");
        let number = |name: &str| row["result"][name].as_f64().expect(name);
        match row["test"].as_str() {
            Some("latency" | "completion") => {
                assert!(0.0 < number("min") && number("min") <= number("typical"), "{row}");
                assert!(number("typical") <= number("p99") && number("p99") <= number("max"), "{row}");
            }
            _ => assert!(0.0 < number("average") && number("median") <= number("peak"), "{row}"),
        }
    }
}

#[test]
fn every_table_drives_every_operation_it_has() {
    let tables = ["gin-v11", "gin-v12", "gin-v13", "rma-v13", "rma-v14", "rma-v15", "rma-v16"];
    for table in tables {
        for op in ["put", "put-signal", "signal", "get"] {
            let has = op != "get" || !["gin-v11", "gin-v12"].contains(&table);
            let contexts = if table == "gin-v11" { 1 } else { 2 };
            let line = format!("--local 2 --table {table} --op {op} -s 8,70000 -n 40 -q {contexts}");
            let output = perf(&line).output().expect("oxygin runs");
            assert_eq!(output.status.success(), has, "{line}: {}", text(&output.stderr));
            if !has {
                assert!(text(&output.stderr).contains("no iget; choose gin-v13 or an RMA table"));
            }
        }
    }
}

/// Measures through the queue of the reference plugin, or of oxygin's own engine.
fn through_queue(line: &str, library: &Path) -> Output {
    let mut command = Command::new(OXYGIN);
    command.arg("perf").args(line.split_whitespace()).arg("--json").arg("--plugin").arg(library);
    command.env("REFERENCE_PLUGIN_QUEUE", "1").env("OXYGIN_ENGINE", "own");
    command.stdin(Stdio::null()).output().expect("oxygin runs")
}

#[test]
fn queues_are_measured_with_any_number_of_producers_and_contexts() {
    for table in ["gin-v12-queue", "gin-v13-queue", "gin-v14-queue"] {
        for (producers, contexts) in [(1, 1), (3, 2), (2, 3), (5, 2)] {
            for op in ["put", "put-signal", "signal", "get"] {
                let tests = if op == "put" { "completion,rate" } else { "latency,rate" };
                let has = op != "get" || table != "gin-v12-queue";
                let line = format!(
                    "--local 2 --table {table} --op {op} --test {tests} -s 8,70000 -n 41 -q {contexts} \
                     --producers {producers} --queue-depth 16"
                );
                let output = through_queue(&line, &plugin());
                assert_eq!(output.status.success(), has, "{line}: {}", text(&output.stderr));
                if has {
                    let report = json(output);
                    assert_eq!(rows(&report).len(), if op == "signal" { 2 } else { 4 }, "{line}");
                    let rate = rows(&report).iter().find(|row| row["test"] == "rate").expect("a rate");
                    assert_eq!((&rate["producers"], &rate["result"]["iterations"]), (&producers.into(), &41.into()));
                }
            }
        }
    }
    let sleeping = through_queue("--local 2 --table gin-v14-queue --test rate -n 2000 --receiver-sleeps", &plugin());
    assert!(sleeping.status.success(), "{}", text(&sleeping.stderr));
    let all = through_queue("--local 3 --table gin-v14-queue --alltoall -s 100 -n 50 --weak --producers 2", &plugin());
    assert_eq!(rows(&json(all)).iter().filter(|r| r["alltoall"] == true && r["op"] == "put-signal").count(), 2);
}

#[test]
fn wrong_bytes_and_lost_signals_through_a_queue_make_no_numbers() {
    assert!(through_queue("--local 2 --table gin-v13-queue -n 30 --timeout 20", &broken_plugin()).status.success());
    let put = broken("lost-chunk", "--local 2 --table gin-v13-queue --test bandwidth -s 2M -n 20 --timeout 60");
    assert!(put.contains("rank 1: wrong data: 1048576 of 2097152 bytes from rank 0"), "{put}");
    let get = broken("short-get", "--local 2 --table gin-v13-queue --op get -s 100 -n 20 --timeout 60");
    assert!(get.contains("wrong data: 1 of 100 bytes from rank 1 differ, the first at byte 99"), "{get}");
    let lost = broken("drop-signal", "--local 2 --table gin-v13-queue --test latency -n 20 --timeout 2");
    assert!(lost.contains("of context 0 to reach"), "{lost}");
}

#[test]
fn what_queues_have_not_is_refused_with_a_remedy() {
    for (options, remedy) in [
        ("-t 16", "--queue-depth"),
        ("-l 4", "--queue-depth"),
        ("--no-progress", "leave that option away"),
        ("--setup", "leave \"-queue\" away"),
        ("--test latency --op put", "choose --op put-signal"),
    ] {
        let output = through_queue(&format!("--local 2 --table gin-v14-queue {options}"), &plugin());
        assert_eq!(output.status.code(), Some(2), "{options}");
        assert!(text(&output.stderr).contains(remedy), "{options}: {}", text(&output.stderr));
    }
    let output = perf("--local 2 --table gin-v13-queue").env("OXYGIN_ENGINE", "nccl").output().expect("oxygin runs");
    assert!(
        !output.status.success() && text(&output.stderr).contains("no queue of its own"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn the_set_up_table_has_no_data_operations() {
    let output = perf("--local 2 --table gin-v14").output().expect("oxygin runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("no data operations"), "{}", text(&output.stderr));
}

#[test]
fn both_directions_all_to_all_and_weak_signals() {
    let both = run_json("--local 2 --test bandwidth -s 4K -n 50 -b");
    assert_eq!(rows(&both)[0]["bidirectional"], true);
    let all = run_json("--local 4 --alltoall -s 100 -n 50 --op put-signal --weak");
    assert_eq!(rows(&all).iter().filter(|r| r["alltoall"] == true).count(), 2);
}

#[test]
fn a_receiver_that_only_looks_at_memory_receives() {
    let report = run_json("--local 2 --test latency,rate -n 50 --no-progress --op put-signal");
    assert_eq!(rows(&report).len(), 2);
    let report = run_json("--local 2 --test latency,rate -n 50 --receiver-sleeps");
    assert_eq!(rows(&report).len(), 2);
}

#[test]
fn comparisons_and_floors_carry_their_ratios() {
    let report = run_json("--local 2 --test latency,rate --against-table rma-v14 -n 50 --floor");
    for row in rows(&report) {
        assert!(row["against"].is_object() && row["ratio"].is_object(), "{row}");
        assert!(row["floor"]["flag_typical"].as_f64().expect("floor") > 0.0);
    }
    let table = good(perf("--local 2 --test latency --against-table rma-v14 -n 50").output().expect("oxygin runs"));
    assert!(table.contains("ratio") && table.contains("rma-v14"), "{table}");
}

#[test]
fn the_columns_are_perftests() {
    let table = good(perf("--local 2 --test latency,bandwidth -n 20").output().expect("oxygin runs"));
    let has = |columns: &[&str]| table.lines().any(|line| columns.iter().all(|column| line.contains(column)));
    assert!(
        has(&[
            "#bytes",
            "#iterations",
            "t_min[usec]",
            "t_max[usec]",
            "t_typical[usec]",
            "t_avg[usec]",
            "t_stdev[usec]",
            "99% percentile[usec]",
            "99.9% percentile[usec]"
        ]),
        "{table}"
    );
    assert!(has(&["#bytes", "#iterations", "BW peak[MB/sec]", "BW average[MB/sec]", "MsgRate[Mpps]"]), "{table}");
    assert!(table.contains("t = RTT/2"), "{table}");
}

#[test]
fn set_up_is_measured() {
    let report = run_json("--local 8 -q 4 --setup -n 2");
    assert_eq!(rows(&report).len(), 2);
    for row in rows(&report) {
        assert!(row["result"]["max"]["total"].as_f64().expect("seconds") > 0.0, "{row}");
    }
}

fn start(mut command: Command) -> Child {
    command.spawn().expect("oxygin runs")
}

fn end(child: Child) -> Output {
    child.wait_with_output().expect("oxygin ends")
}

#[test]
fn server_and_client_both_report() {
    let port = port::free();
    let server = start(perf(&format!("-p {port} --test latency,rate -n 40 --json")));
    let client = start(perf(&format!("-p {port} 127.0.0.1 --test latency,rate -n 40 --json")));
    let (server, client) = (json(end(server)), json(end(client)));
    assert_eq!(rows(&server).len(), 2);
    assert_eq!(server["results"], client["results"]);
}

#[test]
fn ranks_started_by_hand_meet_at_the_root() {
    let root = format!("127.0.0.1:{}", port::free());
    let line = |rank| format!("--rank {rank} --nranks 3 --root {root} --alltoall -s 64 -n 30 --json");
    let ranks: Vec<_> = (0..3).map(|rank| start(perf(&line(rank)))).collect();
    for rank in ranks {
        assert_eq!(rows(&json(end(rank))).len(), 2);
    }
}

#[test]
fn a_client_with_other_options_is_told_so() {
    let queue = "--table gin-v14-queue --timeout 2";
    let pairs = [
        ("-n 40 --timeout 2", "-n 41 --timeout 2", "here `iters Some(41)`, there `iters Some(40)`"),
        (queue, &format!("{queue} --producers 3"), "here `producers 3`, there `producers 1`"),
        (queue, &format!("{queue} --queue-depth 64"), "here `queue-depth 64`, there `queue-depth 0`"),
    ];
    // All at once: each server waits for its client as long as it may.
    let ends = pairs.map(|(here, there, said)| {
        let port = port::free();
        let server = start(perf(&format!("-p {port} {here}")));
        (server, start(perf(&format!("-p {port} 127.0.0.1 {there}"))), said)
    });
    for (server, client, said) in ends {
        let client = end(client);
        assert_eq!(client.status.code(), Some(2));
        let told = format!("started with other options than the root: {said}");
        assert!(text(&client.stderr).contains(&told), "{}", text(&client.stderr));
        let server = end(server);
        assert!(text(&server.stderr).contains("rank 1 (never connected)"), "{}", text(&server.stderr));
    }
}

/// Runs over the plugin that is broken in one way; it must fail, without a number, and say why.
fn broken(defect: &str, line: &str) -> String {
    let mut command = Command::new(OXYGIN);
    command.arg("perf").args(line.split_whitespace()).arg("--plugin").arg(broken_plugin());
    command.env("REFERENCE_PLUGIN_QUEUE", "1").env("REFERENCE_PLUGIN_DEFECT", defect);
    let output = command.output().expect("oxygin runs");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    let numbers = text(&output.stdout).lines().any(|l| l.trim_start().starts_with(|c: char| c.is_ascii_digit()));
    assert!(!numbers, "{}", text(&output.stdout));
    text(&output.stderr)
}

#[test]
fn wrong_bytes_make_no_numbers() {
    let put = broken("lost-chunk", "--local 2 --test bandwidth -s 2M -n 20 --timeout 60");
    assert!(put.contains("rank 1: wrong data: 1048576 of 2097152 bytes from rank 0"), "{put}");
    let get = broken("short-get", "--local 2 --op get -s 100 -n 20 --timeout 60");
    assert!(get.contains("wrong data: 1 of 100 bytes from rank 1 differ, the first at byte 99"), "{get}");
}

#[test]
fn a_lost_signal_is_waited_for_until_the_deadline_and_named() {
    let why = broken("drop-signal", "--local 2 --test latency -n 20 --timeout 2");
    assert!(why.contains("signal word") && why.contains("from rank"), "{why}");
}

#[test]
fn a_killed_rank_ends_the_run_and_is_named() {
    let launcher = start(perf("--local 3 --alltoall -D 600 --timeout 600"));
    let children = format!("/proc/{0}/task/{0}/children", launcher.id());
    let start = Instant::now();
    let ranks = loop {
        let list = std::fs::read_to_string(&children).expect("the launcher runs");
        let ranks: Vec<i32> = list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        if ranks.len() == 3 {
            break ranks;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "three ranks should have been forked: {list}");
        std::thread::sleep(Duration::from_millis(10));
    };
    // SAFETY: a rank of ours, a child of the launcher above, which has not been reaped by us.
    assert_eq!(unsafe { libc::kill(ranks[2], libc::SIGKILL) }, 0);
    let output = end(launcher);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("rank 2 died: killed by signal 9"), "{}", text(&output.stderr));
    for pid in ranks {
        // SAFETY: signal 0 only asks whether the process exists.
        assert_eq!(unsafe { libc::kill(pid, 0) }, -1, "rank {pid} was left behind");
    }
}
