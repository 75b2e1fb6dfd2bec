//! `oxygin env` as a user runs it.

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

fn env(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
    for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("NCCL_") || n.starts_with("OXYGIN_")) {
        command.env_remove(name);
    }
    command.arg("env").args(arguments).envs(variables.iter().copied()).output().expect("oxygin runs")
}

fn out(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json(arguments: &[&str], variables: &[(&str, &str)]) -> Value {
    let text = out(&env(&[&["--json"], arguments].concat(), variables));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The library that was built with this test.
fn plugin() -> String {
    let beside = std::env::current_exe().expect("this test").with_file_name("liboxygin.so");
    beside.canonicalize().expect("the library beside this test").display().to_string()
}

/// A folder with a file that says of itself which NCCL it is, which is all that is looked at where it does not load.
struct Nccl(PathBuf);

impl Nccl {
    fn new(version: &str) -> Self {
        Self::named("libnccl.so.2", version)
    }

    fn named(file: &str, version: &str) -> Self {
        // Of its own for each test.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (process, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(format!("oxygin-env-{process}-{n}-{version}"));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let text = format!("no ELF file\0NCCL version {version} compiled with CUDA 12.9\0");
        std::fs::write(folder.join(file), text).expect("a file");
        Self(folder)
    }
}

/// The engine that `oxygin doctor` says, where both variables lead to the plugin.
fn doctors_engine(folder: &str, variables: &[(&str, &str)]) -> String {
    let plugin = plugin();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
    for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("NCCL_") || n.starts_with("OXYGIN_")) {
        command.env_remove(name);
    }
    command.env("NCCL_GIN_PLUGIN", &plugin).env("NCCL_RMA_PLUGIN", &plugin).env("LD_LIBRARY_PATH", folder);
    let output = command.args(["doctor", "--json"]).envs(variables.iter().copied()).output().expect("oxygin runs");
    let report: Value = serde_json::from_str(&String::from_utf8_lossy(&output.stdout)).expect("JSON");
    let section = report["sections"].as_array().expect("sections").iter().find(|s| s["title"] == "NCCL");
    let findings = section.expect("a section")["findings"].as_array().expect("findings");
    // That of the library that is found first.
    let engine = findings.iter().find(|f| f["subject"] == "engine").expect("an engine")["detail"].as_str();
    engine.expect("words").split([' ', ';']).next().expect("a word").to_owned()
}

/// NVIDIA's NCCL runs on other hosts then, and AMD's as it is.
#[test]
fn without_a_cuda_driver_env_and_doctor_say_the_same() {
    let (cuda, rocm) = (Nccl::new("2.32.3"), Nccl::named("librccl.so.1", "2.32.2"));
    let no_driver = ("OXYGIN_LIBCUDA", "/nowhere/libcuda.so.1");
    for (nccl, engine, elsewhere) in [(&cuda, "gdaki-soft", true), (&rocm, "nccl", false)] {
        let folder = nccl.0.display().to_string();
        let answer = json(&["--plugin", &plugin()], &[("LD_LIBRARY_PATH", &folder), no_driver]);
        assert_eq!(answer["engine"], engine, "{answer:#}");
        assert_eq!(doctors_engine(&folder, &[no_driver]), engine);
        let notes = answer["notes"].as_array().expect("a list");
        let is_said = notes.iter().any(|n| n.as_str().is_some_and(|n| n.contains("no CUDA driver here")));
        assert_eq!(is_said, elsewhere, "{answer:#}");
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_version_or_a_library_gives_its_variables() {
    let plugin = plugin();
    let (old, new) = (Nccl::new("2.30.4"), Nccl::new("2.32.3"));
    let folder = |nccl: &Nccl| nccl.0.display().to_string();
    for asked in ["2.30.4", &folder(&old), &format!("{}/libnccl.so.2", folder(&old))] {
        let answer = json(&["--nccl", asked, "--plugin", &plugin], &[]);
        assert_eq!(answer["nccl"]["version"], "2.30.4", "{answer:#}");
        let variables = answer["variables"].as_array().expect("a list");
        assert_eq!(variables.len(), 1, "{answer:#}");
        assert_eq!(
            (&variables[0]["name"], &variables[0]["value"]),
            (&"NCCL_GIN_PLUGIN".into(), &plugin.clone().into())
        );
    }
    // Without --nccl the library path's comes first, and the other is named.
    let path = format!("{}:{}", folder(&new), folder(&old));
    let answer = json(&["--plugin", &plugin], &[("LD_LIBRARY_PATH", &path)]);
    assert_eq!(answer["nccl"]["version"], "2.32.3", "{answer:#}");
    assert_eq!(answer["variables"][0]["name"], "NCCL_GIN_PLUGIN");
    let others = answer["nccl"]["others"].as_array().expect("a list");
    assert!(others.iter().any(|o| o.as_str().is_some_and(|o| o.starts_with(&folder(&old)))), "{answer:#}");
}

#[test]
fn a_shell_takes_what_is_printed() {
    let plugin = plugin();
    for format in [&["--shell"][..], &[]] {
        let arguments = [&["--nccl", "2.30.7", "--plugin", &plugin], format].concat();
        for (engine, shown) in [("nccl", format!("-{plugin}-2")), ("auto", format!("{plugin}-{plugin}-"))] {
            let lines = out(&env(&arguments, &[("OXYGIN_ENGINE", engine)]));
            let script = format!("{lines}\necho \"$NCCL_GIN_PLUGIN-$NCCL_RMA_PLUGIN-$NCCL_GIN_TYPE\"");
            let shell = Command::new("sh").args(["-c", &script]).output().expect("a shell");
            assert_eq!(out(&shell).trim(), shown, "{engine}");
        }
    }
    let arguments = ["--nccl", "2.32.3", "--plugin", &plugin, "--shell"];
    let script = out(&env(&arguments, &[("OXYGIN_ENGINE", "own"), ("NCCL_GIN_TYPE", "2")]));
    assert!(script.starts_with("export NCCL_GIN_PLUGIN=") && script.ends_with("NCCL_GIN_TYPE=-1\n"), "{script}");
}

#[test]
fn what_cannot_be_is_said_and_the_exit_status_is_2() {
    let plugin = plugin();
    for (arguments, words) in [
        (["--nccl", "2.29.3", "--plugin", &*plugin], "use 2.29.7 or newer"),
        (["--nccl", "/nowhere", "--plugin", &plugin], "no version such as"),
        (["--nccl", &plugin, "--plugin", &plugin], "its version cannot be found out"),
        (["--nccl", "2.30.7", "--plugin", "/nowhere/liboxygin.so"], "no plugin at /nowhere/liboxygin.so"),
    ] {
        let output = env(&arguments, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(words), "{arguments:?}: {said}");
    }
}

/// A wheel's program need not be told which environment it is in.
#[test]
fn the_program_of_a_wheel_looks_beside_itself_first() {
    let plugin = plugin();
    let (packages, other) = (Nccl::new("2.30.3"), Nccl::new("2.28.3"));
    let site = packages.0.join("lib/python3.9/site-packages");
    let (bin, nccl) = (site.join("oxygin/bin"), site.join("nvidia/nccl/lib"));
    for folder in [&bin, &nccl] {
        std::fs::create_dir_all(folder).expect("a temporary folder");
    }
    // By another process: a file that this one has open for writing may be so in a child that another test forks, too,
    // and cannot be run as long as it is.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_oxygin")).arg(bin.join("oxygin")).status();
    assert!(copied.expect("cp").success());
    std::fs::rename(packages.0.join("libnccl.so.2"), nccl.join("libnccl.so.2")).expect("a file");
    let run = |variables: &[(&str, &str)]| {
        let mut command = Command::new(bin.join("oxygin"));
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_HOME", "CUDA_HOME"] {
            command.env_remove(name);
        }
        command.args(["env", "--plugin", &plugin]).envs(variables.iter().copied()).output().expect("oxygin runs")
    };
    let text = out(&run(&[]));
    assert!(text.contains(&format!("# NCCL 2.30.3: {}", nccl.display())), "{text}");
    // One that is too old is named, and the others with it.
    let folder = other.0.display().to_string();
    let output = run(&[("LD_LIBRARY_PATH", &folder)]);
    let said = String::from_utf8_lossy(&output.stderr);
    for words in ["NCCL 2.28.3 is too old", &format!("({folder}/libnccl.so.2; also here"), &nccl.display().to_string()]
    {
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// Whoever starts this may ignore the ends of his children, which they inherit: the tries in children end all the same.
#[test]
fn ends_of_children_are_seen_whatever_is_inherited() {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxygin"));
    command.args(["env", "--nccl", "2.32.3", "--plugin", &plugin()]);
    // SAFETY: one call, which is allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            Ok(())
        });
    }
    let output = command.output().expect("oxygin runs");
    assert!(output.status.success(), "{output:?}");
}

/// As NCCL has names in its variables: a file here of that name alone is not looked at.
#[test]
fn a_name_alone_is_the_linkers_to_find_for_every_tool() {
    const NAME: &str = "libanyone.so";
    let found = std::env::temp_dir().join(format!("oxygin-env-linker-{}", std::process::id()));
    let here = found.join("here");
    std::fs::create_dir_all(&here).expect("a temporary folder");
    std::os::unix::fs::symlink(plugin(), found.join(NAME)).expect("a link");
    std::fs::copy(plugin(), here.join(NAME)).expect("a copy");
    let run = |command: &[&str], folder: &str| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_oxygin"));
        program.args(command).env("OXYGIN_PLUGIN", NAME).env("LD_LIBRARY_PATH", folder).current_dir(&here);
        let output = program.output().expect("oxygin runs");
        (output.status, String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let tools = [
        &["env", "--nccl", "2.32.3"][..],
        &["doctor"],
        &["check", "--local", "1", "--filter", "=self"],
        &["perf", "--local", "2"],
    ];
    let folder = found.display().to_string();
    for tool in &tools[..2] {
        let (_, said) = run(tool, &folder);
        assert!(said.contains(&plugin()) && !said.contains(&here.display().to_string()), "{tool:?}: {said}");
    }
    for tool in tools {
        let (status, said) = run(tool, "");
        assert!(!status.success() && said.contains(&format!("the file is ./{NAME}")), "{tool:?}: {said}");
    }
    let _ = std::fs::remove_dir_all(found);
}
