//! `oxygin doctor` as a user runs it.

use serde_json::Value;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

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

/// A fake library of the tests.
fn fake(name: &str) -> String {
    let exe = std::env::current_exe().expect("this program");
    let path = exe.parent().expect("a folder").join(name);
    assert!(path.exists(), "{} is not there; build the fakes", path.display());
    path.to_string_lossy().into_owned()
}

fn about<'a>(report: &'a Value, title: &str, subject: &str) -> &'a Value {
    let sections = report["sections"].as_array().expect("sections");
    let section = sections.iter().find(|s| s["title"] == title).unwrap_or_else(|| panic!("no {title}: {report:#}"));
    let findings = section["findings"].as_array().expect("findings");
    findings.iter().find(|f| f["subject"] == subject).unwrap_or_else(|| panic!("no {subject}: {section:#}"))
}

#[test]
fn devices_are_those_of_the_library_that_is_loaded_and_gpu_memory_is_judged_for_each() {
    let (verbs, cuda) = (fake("libfake_verbs.so"), fake("libfake_cuda.so"));
    let base = [("OXYGIN_LIBIBVERBS", &*verbs), ("OXYGIN_LIBCUDA", &*cuda)];
    let (code, report) = doctor(&[&base[..], &[("NCCL_IB_HCA", "fake_1")]].concat());
    assert_eq!(code, Some(0), "{report:#}");
    assert!(about(&report, "Verbs fabric", "libibverbs")["detail"].as_str().unwrap_or("").contains("libfake_verbs.so"));
    let left_out = about(&report, "Verbs fabric", "fake_0 port 1");
    assert_eq!((&left_out["verdict"], left_out["remedy"].is_string()), (&"no".into(), true), "{left_out}");
    assert_eq!(about(&report, "Verbs fabric", "fake_1 port 1")["verdict"], "ok");
    assert_eq!(about(&report, "Verbs fabric", "verbs fabric")["detail"], "would be used, 1 port(s)");
    let (_, disabled) = doctor(&[&base[..], &[("NCCL_IB_DISABLE", "1")]].concat());
    let said = &about(&disabled, "Verbs fabric", "verbs fabric")["detail"];
    assert_eq!(said, "NCCL_IB_DISABLE is set: not used, although 2 port(s) could be");
    let gpu = about(&report, "GPU memory over RDMA", "fake_1");
    assert_eq!((&gpu["verdict"], &gpu["detail"]), (&"ok".into(), &"GPU memory is registered by DMA-BUF".into()));
    assert_eq!(about(&report, "GPU memory", "GPU 1")["verdict"], "ok");

    let (_, report) = doctor(&[&base[..], &[("NCCL_DMABUF_ENABLE", "0")]].concat());
    let gpu = about(&report, "GPU memory over RDMA", "fake_0");
    if std::path::Path::new("/sys/module/nvidia_peermem").exists() {
        assert_eq!(gpu["verdict"], "ok", "{gpu}");
    } else {
        assert_eq!(gpu["verdict"], "no", "{gpu}");
        assert!(gpu["remedy"].as_str().unwrap_or_default().contains("nvidia-peermem"), "{gpu}");
        let port = about(&report, "Verbs fabric", "fake_0 port 1");
        assert!(port["detail"].as_str().unwrap_or_default().contains("cannot register GPU memory"), "{port}");
        assert_eq!(about(&report, "Verbs fabric", "verbs fabric")["verdict"], "note", "auto takes the soft fabric");
    }

    let (code, report) = doctor(&[("OXYGIN_LIBIBVERBS", "/nowhere/libibverbs.so.1"), ("OXYGIN_FABRIC", "verbs")]);
    assert_eq!(code, Some(1));
    let missing = about(&report, "Verbs fabric", "libibverbs");
    assert!(missing["detail"].as_str().unwrap_or_default().contains("/nowhere/libibverbs.so.1"), "{missing}");
    assert!(missing["remedy"].as_str().unwrap_or_default().contains("install rdma-core"), "{missing}");
}

/// What a provider of somebody else's does when it is loaded ends a try, not the report.
#[test]
fn a_library_that_crashes_is_named() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, library) = (folder.join("crash.c"), folder.join("libcrash.so"));
    let crash = "#include <stdlib.h>\n__attribute__((constructor)) static void crash(void) { abort(); }\n";
    std::fs::write(&source, crash).expect("a file");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(built.expect("a C compiler").success());
    let library = library.to_string_lossy();
    for (fabric, status) in [("auto", 1), ("soft", 0)] {
        let (code, report) = doctor(&[("OXYGIN_LIBIBVERBS", &*library), ("OXYGIN_FABRIC", fabric)]);
        assert_eq!(code, Some(status), "{report:#}");
        let said = about(&report, "Verbs fabric", "libibverbs");
        assert!(said["detail"].as_str().unwrap_or_default().contains("signal 6"), "{said}");
    }
}

/// As `head` and `grep -q` leave what is before them.
#[test]
fn a_reader_that_goes_is_no_failure_and_a_full_disk_is_one() {
    for (arguments, status) in [(&["check", "--list"][..], 0), (&["env", "--nccl", "2.30.7"], 0), (&["stats"], 0)] {
        let (reader, writer) = UnixStream::pair().expect("a pair");
        drop(reader);
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
        for (out, status, said) in
            [(Stdio::from(OwnedFd::from(writer)), status, ""), (full.into(), 2, "standard output: ")]
        {
            let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
            let beside = std::env::current_exe().expect("this test").with_file_name("liboxygin.so");
            let output =
                command.args(arguments).env("OXYGIN_PLUGIN", beside).stdout(out).output().expect("oxygin runs");
            let words = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(status), "{arguments:?}: {words}");
            assert!(words.contains(said) && !words.contains("panicked"), "{arguments:?}: {words}");
        }
    }
}
