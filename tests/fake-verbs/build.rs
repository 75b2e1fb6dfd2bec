//! Makes `libfake_mlx5.so`: the functions of libmlx5 in the versions that the real one has, each of them a way into
//! `libfake_verbs.so`. A Rust library cannot have versions of its own symbols: rustc gives the linker a list without.

use std::path::{Path, PathBuf};
use std::process::Command;

/// rdma-core, `providers/mlx5/libmlx5.map`: what is new in a version. Every version follows the one before it.
const VERSIONS: [(&str, &[&str]); 8] = [
    ("MLX5_1.2", &["mlx5dv_init_obj"]),
    (
        "MLX5_1.7",
        &[
            "mlx5dv_devx_alloc_uar",
            "mlx5dv_devx_free_uar",
            "mlx5dv_devx_general_cmd",
            "mlx5dv_devx_obj_create",
            "mlx5dv_devx_obj_destroy",
            "mlx5dv_devx_obj_modify",
            "mlx5dv_devx_obj_query",
            "mlx5dv_devx_query_eqn",
            "mlx5dv_devx_umem_dereg",
            "mlx5dv_devx_umem_reg",
            "mlx5dv_open_device",
        ],
    ),
    ("MLX5_1.8", &["mlx5dv_is_supported"]),
    (
        "MLX5_1.9",
        &[
            "mlx5dv_devx_create_cmd_comp",
            "mlx5dv_devx_destroy_cmd_comp",
            "mlx5dv_devx_get_async_cmd_comp",
            "mlx5dv_devx_obj_query_async",
        ],
    ),
    (
        "MLX5_1.11",
        &[
            "mlx5dv_devx_create_event_channel",
            "mlx5dv_devx_destroy_event_channel",
            "mlx5dv_devx_get_event",
            "mlx5dv_devx_subscribe_devx_event",
        ],
    ),
    ("MLX5_1.19", &["mlx5dv_devx_umem_reg_ex"]),
    ("MLX5_1.25", &["mlx5dv_get_data_direct_sysfs_path", "mlx5dv_reg_dmabuf_mr"]),
    ("MLX5_1.26", &["mlx5dv_devx_uar_export_dmabuf_fd"]),
];

/// What the fake library with the functions is called by the dynamic linker.
const FAKE: &str = "libfake_verbs.so";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{FAKE}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut ways = String::new();
    let (mut stand_in, mut map, mut before) = (String::new(), String::new(), String::new());
    for (version, names) in VERSIONS {
        map += &format!("{version} {{ global: ");
        for name in names {
            // The function's address is found when its symbol is: so the way needs to know nothing of its arguments.
            ways += &format!(
                "void {name}_fake(void);\nstatic void (*way_{name}(void))(void) {{ return {name}_fake; }}\n\
                 void {name}(void) __attribute__((ifunc(\"way_{name}\")));\n"
            );
            stand_in += &format!("void {name}_fake(void) {{}}\n");
            map += &format!("{name}; ");
        }
        map += if before.is_empty() { "local: *; }" } else { "} " };
        map += &format!("{before};\n");
        before = version.to_owned();
    }
    let [ways, stand_in, map] =
        [("ways.c", ways), ("stand_in.c", stand_in), ("versions.map", map)].map(|(name, text)| {
            let path = out.join(name);
            std::fs::write(&path, text).expect("OUT_DIR can be written");
            path
        });
    // The library itself does not exist yet; the linker wants one of its name with these symbols.
    let needed = out.join(FAKE);
    link(&needed, &stand_in, &[format!("-Wl,-soname,{FAKE}")]);
    let library = out.join("libfake_mlx5.so");
    let map = format!("-Wl,--version-script={}", map.display());
    // Beside the programs, where nobody has loaded it before.
    let path = "-Wl,-rpath,$ORIGIN/../../../deps".to_owned();
    link(&library, &ways, &[map, path, "-Wl,-soname,libfake_mlx5.so".into(), needed.display().to_string()]);
    // What merely stands in must not be found in its place.
    std::fs::remove_file(&needed).expect("it was just made");
    println!("cargo:rustc-env=FAKE_MLX5={}", library.display());
}

/// Links a shared library by the compiler that rustc links with, too.
fn link(library: &Path, source: &Path, more: &[String]) {
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-shared", "-fPIC", "-O1", "-w", "-o"]).arg(library).arg(source).args(more);
    let done = cc.status();
    assert!(done.as_ref().is_ok_and(|s| s.success()), "{cc:?} must make the fake libmlx5: {done:?}");
}
