//! The Rust types against a C compiler, three ways.
//!
//! 1. cbindgen turns the crate's sources into a header; the C compiler's size of every struct and offset and size of
//!    every field in it must be Rust's.
//! 2. `facts.h` declares the same tables by hand, from what NCCL is known to expect; every field must lie at the same
//!    offset and, argument for argument, have the same type (passed through C's type rules, so `uint64_t` for
//!    `size_t` is an error even where both take eight bytes).
//! 3. Sizes worked out on paper.

use nccl_plugin_api::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// One struct as a compiler sees it: its size, and (offset, size) of each field.
#[derive(Debug, PartialEq, Eq, Default)]
struct Layout {
    size: usize,
    fields: BTreeMap<String, (usize, usize)>,
}

/// Size of the field that `of` picks out of a struct (never called with one).
fn size_by<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Rust's layout of structs, keyed by the name they have in the generated header, and the name in `facts.h`.
macro_rules! layouts {
    ($($module:ident :: $name:ident as $fact:ident { $($field:ident),* $(,)? })*) => {{
        let mut all = BTreeMap::new();
        $({
            type T = $module::$name;
            let mut layout = Layout { size: size_of::<T>(), ..Layout::default() };
            $(
                let size = size_by(|t: &T| &t.$field);
                layout.fields.insert(stringify!($field).into(), (std::mem::offset_of!(T, $field), size));
            )*
            all.insert(c_name(stringify!($module), stringify!($name)), (stringify!($fact), layout));
        })*
        all
    }};
}

fn rust() -> BTreeMap<String, (&'static str, Layout)> {
    layouts! {
        common::VDeviceProps4 as f_vprops4 { ndevs, devs }
        common::VDeviceProps8 as f_vprops8 { ndevs, devs }
        common::PropertiesV11 as f_props11 {
            name, pci_path, guid, ptr_support, reg_is_global, force_flush, speed, port, latency, max_comms, max_recvs,
            net_device_type, net_device_version, v_props, max_p2p_bytes, max_coll_bytes, max_multi_request_size,
        }
        common::PropertiesV12 as f_props12 {
            name, pci_path, guid, ptr_support, reg_is_global, force_flush, speed, port, latency, max_comms, max_recvs,
            net_device_type, net_device_version, v_props, max_p2p_bytes, max_coll_bytes, max_multi_request_size,
            rail_id, plane_id,
        }
        device_context::ContextV1 as f_context1 { nranks, queue_size, queues, pis, cis, counters, signals }
        device_context::ContextV2 as f_context2 { v1, signal_offsets, last_issued_get, last_visible_get }
        device_context::ContextV3 as f_context3 { v2, flushes_all_puts_on_any_signal }
        common::DeviceHandle as f_dev { net_device_type, net_device_version, handle, size, needs_proxy_progress }
        gin_v11::GinV11 as f_gin11 {
            name, init, devices, get_properties, listen, connect, create_context, reg_mr_sym, reg_mr_sym_dma_buf,
            dereg_mr_sym, destroy_context, close_coll, close_listen, iput, iput_signal, test, gin_progress,
            query_last_error, finalize,
        }
        gin_v12::GinV12 as f_gin12 {
            name, init, devices, get_properties, listen, connect, create_context, reg_mr_sym, reg_mr_sym_dma_buf,
            dereg_mr_sym, destroy_context, close_coll, close_listen, iput, iput_signal, test, gin_progress,
            query_last_error, finalize,
        }
        gin_v13::ConfigV13 as f_gin13_config { n_signals, n_counters, n_contexts, queue_depth, traffic_class }
        gin_v13::GinV13 as f_gin13 {
            name, init, devices, get_properties, listen, connect, create_context, reg_mr_sym, reg_mr_sym_dma_buf,
            dereg_mr_sym, destroy_context, close_coll, close_listen, iput, iput_signal, iget, iflush, test,
            gin_progress, query_last_error, finalize,
        }
        gin_v14::GinPropertiesV14 as f_gin14_props { supports_strong_signals, supports_va_signals }
        gin_v14::ConfigV14 as f_gin14_config {
            n_signals, n_counters, n_contexts, queue_depth, traffic_class, backend_version, rank_stride,
        }
        gin_v14::GinV14 as f_gin14 {
            name, init, devices, get_gin_properties, get_properties, listen, connect, create_context, reg_mr_sym,
            reg_mr_sym_dma_buf, dereg_mr_sym, destroy_context, close_coll, close_listen, gin_progress,
            query_last_error, finalize,
        }
        rma_v14::ConfigV14 as f_rma14_config { n_contexts, traffic_class, rank_stride }
        rma_v14::RmaV14 as f_rma14 {
            name, init, devices, get_properties, listen, connect, create_context, reg_mr_sym, reg_mr_sym_dma_buf,
            dereg_mr_sym, destroy_context, close_coll, close_listen, iput, iput_signal, iget, iflush, test,
            rma_progress, query_last_error, finalize,
        }
        rma_v15::RmaV15 as f_rma15 {
            name, init, devices, get_properties, listen, connect, create_context, reg_mr_sym, reg_mr_sym_dma_buf,
            dereg_mr_sym, destroy_context, close_coll, close_listen, iput, iput_signal, iget, iflush, test,
            rma_progress, query_last_error, finalize,
        }
        rma_v16::RmaPropertiesV16 as f_rma16_props { flushes_all_puts_on_any_signal }
        rma_v16::RmaV16 as f_rma16 {
            name, init, devices, get_rma_properties, get_properties, listen, connect, create_context, reg_mr_sym,
            reg_mr_sym_dma_buf, dereg_mr_sym, destroy_context, close_coll, close_listen, iput, iput_signal, iget,
            iflush, test, rma_progress, query_last_error, finalize,
        }
    }
}

/// A header has one name space, the crate one a file: names of version files get the file's name in front.
fn c_name(module: &str, name: &str) -> String {
    if module == "common" {
        name.into()
    } else {
        format!("{module}_{name}")
    }
}

/// The names that a source file defines, and what kind of item each is.
fn definitions(source: &str) -> impl Iterator<Item = (&str, &str)> {
    source.lines().filter_map(|line| {
        let (kind, rest) = line.strip_prefix("pub ")?.split_once(' ')?;
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        matches!(kind, "struct" | "type").then_some((kind, name))
    })
}

/// The fields of each struct, read off the source text.
fn struct_fields(source: &str) -> BTreeMap<String, Vec<String>> {
    let mut structs = BTreeMap::<String, Vec<String>>::new();
    let mut open: Option<String> = None;
    for line in source.lines() {
        if let Some(name) = line.strip_prefix("pub struct ").and_then(|rest| rest.strip_suffix(" {")) {
            structs.insert(name.into(), Vec::new());
            open = Some(name.into());
        } else if line == "}" {
            open = None;
        } else if let (Some(name), Some(field)) = (&open, line.strip_prefix("    pub ")) {
            let field = field.split(':').next().expect("split yields one piece").to_owned();
            structs.get_mut(name).expect("inserted when opened").push(field);
        }
    }
    structs
}

/// `source` with every identifier that `names` holds replaced.
fn rename(source: &str, names: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    let mut word = String::new();
    for c in source.chars().chain(['\n']) {
        if c.is_alphanumeric() || c == '_' {
            word.push(c);
        } else {
            out.push_str(names.get(&word).unwrap_or(&word));
            word.clear();
            out.push(c);
        }
    }
    out
}

/// The source files as (module, text), `common` first; `rma_v13` only re-exports and has nothing to lay out,
/// `descriptor` has words whose bits its own tests check, and `tests/gdaki.rs` is about the folder `gdaki`.
fn sources() -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut modules: Vec<String> = std::fs::read_dir(&dir)
        .expect("the crate's sources")
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| path.is_file())
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .filter(|module| module != "lib" && module != "descriptor")
        .collect();
    modules.sort();
    assert_eq!(modules[0], "common");
    modules.into_iter().map(|m| (m.clone(), std::fs::read_to_string(dir.join(format!("{m}.rs"))).unwrap())).collect()
}

/// The crate in one file without clashes of names, made into a header by cbindgen.
fn header() -> &'static Path {
    static HEADER: OnceLock<PathBuf> = OnceLock::new();
    HEADER.get_or_init(generate_header)
}

fn generate_header() -> PathBuf {
    let mut single = String::new();
    let mut defined = BTreeMap::<String, BTreeMap<String, String>>::new();
    for (module, text) in sources() {
        let mut names = BTreeMap::new();
        // What comes in by name from another version file has that file's name in front.
        for line in text.lines().filter(|line| line.starts_with("use crate::") && !line.contains("common")) {
            let (from, list) = line["use crate::".len()..].split_once("::").expect("a path in `use`");
            for name in list.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()) {
                names.insert(name.to_owned(), defined[from][name].clone());
            }
        }
        for (_, name) in definitions(&text) {
            names.insert(name.to_owned(), c_name(&module, name));
        }
        let body: Vec<&str> = text.lines().filter(|l| !l.starts_with("//!") && !l.contains("SYMBOL")).collect();
        // cbindgen knows `Option<fn(…)>` as a pointer, but not behind an alias; the pointer is the same either way.
        let body = body.join("\n").replace("Option<", "").replace("Fn>", "Fn").replace("DebugLogger>", "DebugLogger");
        single.push_str(&rename(&body, &names));
        defined.insert(module, names);
    }
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (source, header) = (dir.join("plugin_api.rs"), dir.join("plugin_api.h"));
    // A function that names every struct, because cbindgen drops what nothing uses.
    let mut keep = String::from("#[no_mangle]\npub extern \"C\" fn keep(");
    for (name, _) in rust() {
        let _ = write!(keep, "{}: *const {name}, ", name.to_lowercase());
    }
    std::fs::write(&source, format!("{single}\n{keep}) {{}}\n")).unwrap();
    let config =
        cbindgen::Config { language: cbindgen::Language::C, style: cbindgen::Style::Type, ..Default::default() };
    let bindings = cbindgen::Builder::new().with_src(&source).with_config(config).generate().expect("a header");
    bindings.write_to_file(&header);
    header
}

/// Compiles `program` as C11 with every warning an error, runs it, and returns what it prints.
fn run_c(name: &str, program: &str) -> String {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (source, binary) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&source, program).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Werror", "-o"])
        .args([&binary, &source])
        .output()
        .unwrap_or_else(|e| panic!("{compiler}: {e}; install a C compiler (scripts/deps test) or set CC"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&binary).output().expect("the program just compiled");
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// Every struct and field of the sources is in the list above: nothing escapes by being new.
#[test]
fn the_list_is_complete() {
    let listed: BTreeMap<String, Vec<String>> =
        rust().into_iter().map(|(name, (_, layout))| (name, layout.fields.into_keys().collect())).collect();
    let mut written = BTreeMap::new();
    for (module, text) in sources() {
        for (name, mut fields) in struct_fields(&text) {
            fields.sort();
            written.insert(c_name(&module, &name), fields);
        }
    }
    assert_eq!(listed, written);
}

#[test]
fn sizes_and_offsets_are_those_of_the_generated_header() {
    let header = header();
    let mut program = format!("#include \"{}\"\n#include <stddef.h>\n#include <stdio.h>\n", header.display());
    program.push_str("int main(void) {\n");
    for (name, (_, layout)) in rust() {
        let _ = writeln!(program, "printf(\"{name} %zu\\n\", sizeof({name}));");
        for field in layout.fields.keys() {
            let _ = writeln!(
                program,
                "printf(\"{name} {field} %zu %zu\\n\", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));"
            );
        }
    }
    program.push_str("return 0;\n}\n");
    let mut seen = BTreeMap::<String, Layout>::new();
    for line in run_c("layout_generated", &program).lines() {
        match *line.split(' ').collect::<Vec<_>>() {
            [name, size] => seen.entry(name.into()).or_default().size = size.parse().unwrap(),
            [name, field, offset, size] => {
                let place = (offset.parse().unwrap(), size.parse().unwrap());
                seen.entry(name.into()).or_default().fields.insert(field.into(), place);
            }
            _ => panic!("unexpected line {line:?}"),
        }
    }
    for (name, (_, layout)) in rust() {
        assert_eq!(seen.remove(&name), Some(layout), "{name}");
    }
    assert!(seen.is_empty(), "{seen:?}");
}

#[test]
fn offsets_and_argument_types_are_those_of_the_facts() {
    let facts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/facts.h");
    let mut generated = std::fs::read_to_string(header()).unwrap();
    let all = rust();
    // Both headers must mean the same struct where one is an argument: the generated header's structs become the
    // facts' ones, once their own layout has been compared.
    let mut program = format!("#include \"{}\"\n#include <stdio.h>\n", facts.display());
    let names = all.iter().map(|(name, (fact, _))| (name.clone(), format!("G_{fact}"))).collect();
    generated = rename(&generated, &names);
    for (_, (fact, _)) in all.iter().filter(|(name, _)| !is_table(name)) {
        // Every struct that is passed by pointer is one type for both.
        generated = cut_struct(&generated, &format!("G_{fact}"));
        let _ = writeln!(program, "#define G_{fact} {fact}");
    }
    program.push_str(&generated);
    for (name, (fact, layout)) in &all {
        let ours = if is_table(name) { format!("G_{fact}") } else { (*fact).to_owned() };
        let _ = writeln!(program, "_Static_assert(sizeof({fact}) == {}, \"size of {name}\");", layout.size);
        for (field, (offset, size)) in &layout.fields {
            let _ = writeln!(
                program,
                "_Static_assert(offsetof({fact}, {field}) == {offset}, \"offset of {name}.{field}\");\n\
                 _Static_assert(sizeof((({fact} *)0)->{field}) == {size}, \"size of {name}.{field}\");\n\
                 _Static_assert(__builtin_types_compatible_p(__typeof__((({fact} *)0)->{field}), \
                 __typeof__((({ours} *)0)->{field})), \"type of {name}.{field}\");"
            );
        }
    }
    program.push_str("int main(void) { return 0; }\n");
    run_c("layout_facts", &program);
}

fn is_table(name: &str) -> bool {
    name.contains("_Gin") && !name.contains("Properties") || name.contains("_RmaV")
}

/// `text` without the definition of the struct `name`.
fn cut_struct(text: &str, name: &str) -> String {
    let end = format!("}} {name};");
    let (before, after) = text.split_once(&end).unwrap_or_else(|| panic!("the header has no {name}"));
    let start = before.rfind("typedef struct").expect("a typedef");
    format!("{}{after}", &before[..start])
}

/// Pointers take 8 bytes, ints 4: fields counted and padded by hand.
#[test]
fn sizes_worked_out_on_paper() {
    assert_eq!(size_of::<VDeviceProps4>(), 4 * (1 + 4));
    assert_eq!(size_of::<VDeviceProps8>(), 4 * (1 + 8));
    // 2 pointers, guid, 10 four-byte fields, 20 bytes of devices, 4 of padding, 2 sizes, 1 int, 4 of padding.
    assert_eq!(size_of::<PropertiesV11>(), 24 + 40 + 20 + 4 + 16 + 8);
    // 2 pointers, guid, 10 four-byte fields, 36 bytes of devices, 4 of padding, 2 sizes, 1 int, 2 shorts.
    assert_eq!(size_of::<PropertiesV12>(), 24 + 40 + 36 + 4 + 16 + 8);
    assert_eq!(size_of::<DeviceHandle>(), 32);
    assert_eq!(size_of::<device_context::ContextV1>(), 48);
    assert_eq!(size_of::<device_context::ContextV2>(), 72);
    assert_eq!(size_of::<device_context::ContextV3>(), 80);
    assert_eq!(size_of::<gin_v13::ConfigV13>(), 20);
    assert_eq!(size_of::<gin_v14::ConfigV14>(), 28);
    assert_eq!(size_of::<rma_v14::ConfigV14>(), 12);
    assert_eq!(size_of::<gin_v14::GinPropertiesV14>(), 2);
    assert_eq!(size_of::<rma_v16::RmaPropertiesV16>(), 1);
    assert_eq!(size_of::<gin_v11::GinV11>(), 19 * 8);
    assert_eq!(size_of::<gin_v12::GinV12>(), 19 * 8);
    assert_eq!(size_of::<gin_v13::GinV13>(), 21 * 8);
    assert_eq!(size_of::<rma_v13::RmaV13>(), 21 * 8);
    assert_eq!(size_of::<gin_v14::GinV14>(), 17 * 8);
    assert_eq!(size_of::<rma_v14::RmaV14>(), 21 * 8);
    assert_eq!(size_of::<rma_v15::RmaV15>(), 21 * 8);
    assert_eq!(size_of::<rma_v16::RmaV16>(), 22 * 8);
}
