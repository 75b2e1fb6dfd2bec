//! The library as it is shipped.

use std::path::PathBuf;
use std::process::Command;

/// Builds the release library if need be and says where it is. With the packages of scripts/test's step `build`: with
/// others its dependencies have other features, and both it and that step's programs would be built anew.
pub fn library() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(env!("CARGO"))
        .args(["build", "--release", "--package", "oxygin", "--package", "oxygin-cli"])
        .args(["--lib", "--message-format", "json"])
        .current_dir(&root)
        .output()
        .expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout).expect("cargo writes UTF-8");
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact" && message["target"]["name"] == "oxygin")
        .flat_map(|message| message["filenames"].as_array().cloned().unwrap_or_default())
        .filter_map(|file| file.as_str().map(PathBuf::from))
        .find(|file| file.extension().is_some_and(|e| e == "so"))
        .expect("cargo names the shared library")
}
