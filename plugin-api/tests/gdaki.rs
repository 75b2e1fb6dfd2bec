//! What GDAKI's device code reads, against NCCL's own headers, in two steps: `gdaki_layouts.txt` has the numbers that a
//! C++ compiler found in them, which the Rust types must agree with; and where the headers are at hand, they are
//! compiled again and must give the numbers of the file:
//!
//! ```text
//! OXYGIN_TEST_NCCL=DIR[:DIR…] cargo test -p nccl-plugin-api --test gdaki -- --include-ignored
//! ```
//!
//! A DIR is an unpacked NCCL with `include/`, for instance the folder `nvidia/nccl` of a wheel `nvidia-nccl-cu12`.

use nccl_plugin_api::gdaki::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const NCCLS: [&str; 5] = ["2.29.7", "2.30.4", "2.30.7", "2.31.2", "2.32.3"];

/// A C name with its numbers: a struct's size, a field's offset and size, a constant's value.
type Numbers = BTreeMap<String, Vec<usize>>;

/// The file, by NCCL version. A line at the margin names versions, then a struct and its size, or a constant and its
/// value; an indented one a field of the struct, its offset and its size.
fn recorded() -> BTreeMap<&'static str, Numbers> {
    let mut all: BTreeMap<_, Numbers> = NCCLS.into_iter().map(|nccl| (nccl, Numbers::new())).collect();
    let (mut versions, mut of) = (Vec::new(), "");
    for line in include_str!("gdaki_layouts.txt").lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
        let is_field = line.starts_with(' ');
        let words: Vec<&str> = match line.split_once(": ") {
            Some((list, rest)) => {
                versions = list.split(' ').collect();
                rest.split(' ').collect()
            }
            None => line.trim_start().split(' ').collect(),
        };
        if !is_field {
            of = words[0];
        }
        let name = if is_field { format!("{of}.{}", words[0]) } else { of.to_owned() };
        let numbers: Vec<usize> = words[1..].iter().map(|n| n.parse().expect("a number")).collect();
        for version in &versions {
            let twice = all.get_mut(version).expect("one of NCCLS").insert(name.clone(), numbers.clone());
            assert_eq!(twice, None, "{line}");
        }
    }
    all
}

/// Size of the field that `of` picks out of a struct (never called with one).
fn size_by<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Adds the numbers of Rust types under the names that the headers have for them. A field that a list lacks does not
/// compile, so nothing escapes by being new.
macro_rules! add {
    ($all:ident: $($c:literal is $module:ident :: $name:ident { $($field:ident),* $(,)? })*) => {$({
        type T = $module::$name;
        let _ = |t: T| { let $module::$name { $($field: _),* } = t; };
        $all.insert($c.to_owned(), vec![size_of::<T>()]);
        $({
            let numbers = vec![std::mem::offset_of!(T, $field), size_by(|t: &T| &t.$field)];
            $all.insert(format!("{}.{}", $c, stringify!($field)), numbers);
        })*
    })*};
}

fn contexts(all: &mut Numbers, nccl: &str) {
    add! { all:
        "ncclGinGdakiGlobalGPUBufferTable" is table::BufferTable { buffer, rkeys, lkey, offset }
        "ncclGinGdakiMemHandle" is window::WindowHandle { rkeys, lkey }
    }
    match nccl {
        "2.29.7" | "2.30.4" => {
            add! { all:
                "ncclGinGdakiGPUContext" is context_v1::ContextV1 {
                    gdqp, companion_gdqp, counters_table, signals_table, sink_buffer_lkey,
                }
            }
        }
        _ => {
            add! { all:
                "ncclGinGdakiGPUContext" is context_v2::ContextV2 {
                    gdqp, companion_gdqp, counters_table, signals_table, sink_buffer_lkey, use_mcst, last_issued_get,
                    last_visible_get,
                }
            }
        }
    }
}

fn queue_pairs(all: &mut Numbers, nccl: &str) {
    match nccl {
        "2.29.7" => {
            add! { all:
                "doca_gpu_dev_verbs_cq" is queue_pair_v1::CompletionQueueV1 {
                    cqe_daddr, cq_num, cqe_num, dbrec, cqe_ci, cqe_mask, cqe_size, cqe_rsvd, mem_type,
                }
                "doca_gpu_dev_verbs_qp" is queue_pair_v1::QueuePairV1 {
                    sq_rsvd_index, sq_ready_index, sq_wqe_pi, sq_num, sq_num_shift8, sq_num_shift8_be,
                    sq_num_shift8_be_1ds, sq_num_shift8_be_2ds, sq_num_shift8_be_3ds, sq_num_shift8_be_4ds, sq_lock,
                    sq_wqe_num, sq_wqe_mask, sq_wqe_daddr, sq_dbrec, sq_db, reserved1, cq_sq, reserved2,
                    nic_handler, mem_type,
                }
            }
        }
        _ => {
            add! { all:
                "doca_gpu_dev_verbs_cq" is queue_pair_v2::CompletionQueueV2 {
                    cqe_daddr, cq_num, cqe_num, dbrec, cqe_ci, cqe_mask, cqe_size, cq_type, reserved1, cqe_rsvd,
                    mem_type, reserved2,
                }
                "doca_gpu_dev_verbs_qp" is queue_pair_v2::QueuePairV2 {
                    sq_rsvd_index, sq_ready_index, sq_wqe_pi, sq_num, sq_num_shift8, sq_num_shift8_be,
                    sq_num_shift8_be_1ds, sq_num_shift8_be_2ds, sq_num_shift8_be_3ds, sq_num_shift8_be_4ds,
                    sq_num_shift8_be_5ds, sq_lock,
                    sq_wqe_num, sq_wqe_mask, sq_wqe_daddr, sq_dbrec, sq_db, reserved1, reserved2, cq_sq, reserved3,
                    nic_handler, mem_type,
                }
            }
        }
    }
}

/// Rust's numbers for one NCCL.
fn rust(nccl: &str) -> Numbers {
    let mut all = Numbers::new();
    contexts(&mut all, nccl);
    queue_pairs(&mut all, nccl);
    let version = if nccl == "2.29.7" { queue_pair_v1::VERSION } else { queue_pair_v2::VERSION };
    let mut values = vec![
        ("NCCL_GIN_GDAKI_VERSION", version as usize),
        ("DOCA_GPUNETIO_VERBS_NIC_HANDLER_CPU_PROXY", HANDLER_CPU_PROXY as usize),
        ("DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_DB", HANDLER_GPU_DOORBELL as usize),
        ("DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_NO_DBR", HANDLER_GPU_NO_RECORD as usize),
        ("DOCA_GPUNETIO_VERBS_MEM_TYPE_GPU", MEMORY_GPU as usize),
    ];
    if matches!(nccl, "2.31.2" | "2.32.3") {
        values.push(("DOCA_GPUNETIO_VERBS_NIC_HANDLER_CPU_PROXY_FREE_FLOW", HANDLER_FREE_FLOW as usize));
        values.push(("DOCA_GPUNETIO_VERBS_CQ_64B", COMPLETION_RING as usize));
    }
    all.extend(values.into_iter().map(|(name, value)| (name.to_owned(), vec![value])));
    all
}

/// The file's numbers, with what Rust has otherwise: where later NCCLs put a field into what an older one leaves alone
/// Rust has the field, and what is left of a receive queue in an older one is reserved.
fn expected(nccl: &str) -> Numbers {
    let mut all = recorded().remove(nccl).expect("one of NCCLS");
    let renamed: &[(&str, &str)] = match nccl {
        "2.29.7" => &[("rq_num", "reserved1"), ("cq_rq", "reserved2")],
        _ => &[],
    };
    const QP: &str = "doca_gpu_dev_verbs_qp";
    let qp = |field: &str| format!("{QP}.{field}");
    for (theirs, ours) in renamed {
        let (at, end) = match *theirs {
            // All up to what follows them.
            "rq_num" => (all[&qp("rq_num")][0], all[&qp("cq_sq")][0]),
            _ => (all[&qp(theirs)][0], all[&qp("nic_handler")][0]),
        };
        all.retain(|name, n| !(name.starts_with(&qp("")) && n[0] >= at && n[0] < end));
        all.insert(qp(ours), vec![at, end - at]);
    }
    if matches!(nccl, "2.30.4" | "2.30.7") {
        let cq = "doca_gpu_dev_verbs_cq";
        assert_eq!(all[&format!("{cq}.reserved1")], [37, 3]);
        all.insert(format!("{cq}.cq_type"), vec![37, 1]);
        all.insert(format!("{cq}.reserved1"), vec![38, 2]);
    }
    if matches!(nccl, "2.30.7" | "2.31.2") {
        let context = "ncclGinGdakiGPUContext";
        let end = all[&format!("{context}.sink_buffer_lkey")].iter().sum::<usize>();
        assert!(end <= 68 && all[&format!("{context}.last_issued_get")][0] > 68, "68 is padding");
        all.insert(format!("{context}.use_mcst"), vec![68, 1]);
    }
    all
}

#[test]
fn rust_agrees_with_the_numbers_of_every_nccl() {
    for nccl in NCCLS {
        assert_eq!(rust(nccl), expected(nccl), "{nccl}");
    }
}

/// Offsets that other people's kernels rely on, or that were seen on GPUs.
#[test]
fn numbers_worked_out_on_paper() {
    use std::mem::offset_of;
    assert_eq!([size_of::<context_v1::ContextV1>(), size_of::<context_v2::ContextV2>()], [72, 88]);
    assert_eq!([size_of::<queue_pair_v1::QueuePairV1>(), size_of::<queue_pair_v2::QueuePairV2>()], [280, 296]);
    // DeepEP reads the address of signals at 40.
    assert_eq!(offset_of!(context_v2::ContextV2, signals_table), 40);
    // Three indices, eight words, lock and two halves of slots, four pointers and a reserved word, 64 reserved bytes.
    assert_eq!(offset_of!(queue_pair_v2::QueuePairV2, cq_sq), 24 + 32 + 8 + 32 + 64);
}

/// Version of an unpacked NCCL.
fn version(nccl: &Path) -> String {
    let header = nccl.join("include/nccl.h");
    let text = std::fs::read_to_string(&header).unwrap_or_else(|e| panic!("{}: {e}", header.display()));
    let part = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(&format!("#define {name} ")));
        line.unwrap_or_else(|| panic!("{} defines no {name}", header.display())).trim().to_owned()
    };
    format!("{}.{}.{}", part("NCCL_MAJOR"), part("NCCL_MINOR"), part("NCCL_PATCH"))
}

/// A program that prints a line for each name of the file.
fn program(names: &Numbers) -> String {
    let mut text = String::from(
        "#include <climits>\n#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n\
         #include \"nccl_device/gin/gdaki/gin_gdaki_device_host_common.h\"\n\
         #include \"nccl_device/gin/gdaki/doca_gpunetio/common/doca_gpunetio_verbs_dev.h\"\n\
         using Table = ncclGinGdakiGlobalGPUBufferTable<uint64_t>;\nint main() {\n",
    );
    for name in names.keys() {
        let c = name.replace("ncclGinGdakiGlobalGPUBufferTable", "Table");
        let value = match c.split_once('.') {
            Some((of, field)) => format!("offsetof({of}, {field}), sizeof((({of} *)0)->{field})"),
            None if c.contains(char::is_lowercase) => format!("sizeof({c}), (size_t)0"),
            None => format!("(size_t)({c}), (size_t)0"),
        };
        let _ = writeln!(text, "printf(\"{name} %zu %zu\\n\", {value});");
    }
    text + "}\n"
}

#[test]
#[ignore = "needs NCCL's headers: OXYGIN_TEST_NCCL=DIR[:DIR…]"]
fn the_file_has_the_numbers_of_the_headers() {
    let list = std::env::var("OXYGIN_TEST_NCCL").expect("OXYGIN_TEST_NCCL: folders of unpacked NCCLs");
    let recorded = recorded();
    for nccl in list.split(':').map(Path::new) {
        let version = version(nccl);
        let names = recorded.get(version.as_str());
        let names = names.unwrap_or_else(|| panic!("NCCL {version} is not in gdaki_layouts.txt: compare its headers"));
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        // Of this process alone, as others may run the same test.
        let binary = dir.join(format!("gdaki_{version}_{}", std::process::id()));
        let source = dir.join(format!("gdaki_{version}_{}.cc", std::process::id()));
        std::fs::write(&source, program(names)).expect("a source file");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let include = nccl.join("include");
        let mut command = Command::new(&compiler);
        command.args(["-std=c++17", "-w", "-I"]).arg(&include).arg("-o").args([&binary, &source]);
        let output = command.output().unwrap_or_else(|e| panic!("{compiler}: {e}; install a C++ compiler or set CXX"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let output = Command::new(&binary).output().expect("the program just compiled");
        for file in [&source, &binary] {
            std::fs::remove_file(file).expect("just made");
        }
        let mut seen = Numbers::new();
        for line in String::from_utf8(output.stdout).expect("text").lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let numbers: Vec<usize> = words[1..].iter().map(|n| n.parse().expect("a number")).collect();
            let take = if words[0].contains('.') { 2 } else { 1 };
            seen.insert(words[0].to_owned(), numbers[..take].to_vec());
        }
        assert_eq!(&seen, names, "{version}");
    }
}
