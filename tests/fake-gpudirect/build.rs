//! Has the library need libcuda.so.1, so that whoever loads it in the driver's place finds all other functions of the
//! driver behind it. Machines that build it need not have that: a library of its name, without any function, stands in
//! for the linker.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let (source, library) = (out.join("empty.c"), out.join("libcuda.so.1"));
    std::fs::write(&source, "").expect("OUT_DIR can be written");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&library).arg(&source);
    let done = cc.status();
    assert!(done.as_ref().is_ok_and(|s| s.success()), "{cc:?} must make what stands in for the driver: {done:?}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--no-as-needed");
    println!("cargo:rustc-cdylib-link-arg={}", library.display());
}
