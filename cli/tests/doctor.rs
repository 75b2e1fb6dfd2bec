//! `oxygin doctor` as a user runs it.

use serde_json::Value;
use std::process::Command;

fn doctor(variables: &[(&str, &str)]) -> (Option<i32>, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
    command.args(["doctor", "--json"]);
    for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("NCCL_") || n.starts_with("OXYGIN_")) {
        command.env_remove(name);
    }
    let output = command.envs(variables.iter().copied()).output().expect("oxygin runs");
    let text = String::from_utf8_lossy(&output.stdout);
    (output.status.code(), serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
}

fn findings(report: &Value) -> Vec<&Value> {
    let sections = report["sections"].as_array().expect("sections");
    sections.iter().flat_map(|s| s["findings"].as_array().expect("findings")).collect()
}

fn wrong(report: &Value) -> Vec<String> {
    let wrong = findings(report).into_iter().filter(|f| f["verdict"] == "wrong");
    wrong.map(|f| f["subject"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn a_plain_environment_is_healthy_and_every_refusal_has_a_remedy() {
    let (code, report) = doctor(&[]);
    assert_eq!((code, &report["healthy"]), (Some(0), &Value::Bool(true)), "{report:#}");
    for finding in findings(&report) {
        let needs_remedy = finding["verdict"] == "no" || finding["verdict"] == "wrong";
        assert_eq!(needs_remedy, finding["remedy"].is_string(), "{finding}");
    }
}

#[test]
fn what_was_asked_for_and_cannot_work_is_named() {
    let (code, report) = doctor(&[
        ("OXYGIN_FABRIK", "soft"),
        ("NCCL_SOCKET_IFNAME", "=nonesuch"),
        ("NCCL_RMA_PLUGIN", "nonesuch"),
        ("NCCL_IB_TIMEOUT", "never"),
    ]);
    assert_eq!(code, Some(1), "{report:#}");
    assert_eq!(report["healthy"], false);
    let wrong = wrong(&report);
    for subject in ["OXYGIN_FABRIK", "choice", "NCCL_RMA_PLUGIN", "NCCL_IB_TIMEOUT"] {
        assert!(wrong.iter().any(|w| w == subject), "{subject} is not among {wrong:?}");
    }
}
