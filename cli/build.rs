//! Compiles the one function that Rust cannot define: the variadic logger that a plugin calls.

fn main() {
    println!("cargo:rerun-if-changed=src/plugin/log_shim.c");
    cc::Build::new().file("src/plugin/log_shim.c").warnings(true).compile("oxygin_cli_log_shim");
}
