//! Which NCCL libraries are here, what selects oxygin in each, and whether the variables now set do.

use super::child;
use super::report::Section;
use std::collections::BTreeSet;
use std::ffi::{c_int, CStr, CString};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Looks for NCCL libraries and for the plugin that the variables name.
pub fn nccl(variable: &dyn Fn(&str) -> Option<String>) -> Section {
    let mut section = Section::new("NCCL");
    let found = libraries(variable);
    if found.is_empty() {
        section.note("libraries", "no libnccl.so or librccl.so in the linker's paths or in Python environments");
    }
    for path in found {
        let subject = path.display().to_string();
        match version(&path) {
            Some(code) => {
                section.note(&subject, format!("version {}", spell(code)));
                judge(&mut section, code, variable);
            }
            None => section.no(&subject, "its version cannot be found out", "look at NCCL_DEBUG=VERSION"),
        }
    }
    section
}

/// Looks for the library behind `NCCL_GIN_PLUGIN`, `NCCL_RMA_PLUGIN`, and for liboxygin.so itself.
pub fn plugins(variable: &dyn Fn(&str) -> Option<String>) -> Section {
    let mut section = Section::new("Plugin");
    let own = crate::check::default_plugin();
    match loads(&own.display().to_string()) {
        Ok(path) => section.ok("liboxygin.so", path),
        Err(e) => section.no("liboxygin.so", e, "scripts/install PREFIX, then put PREFIX/lib into LD_LIBRARY_PATH"),
    }
    for (name, kind) in [("NCCL_GIN_PLUGIN", "gin"), ("NCCL_RMA_PLUGIN", "rma")] {
        let value = variable(name).filter(|v| !v.is_empty());
        let tried = candidates(value.as_deref(), kind);
        let hit = tried.iter().find_map(|c| loads(c).ok());
        match (value, hit) {
            (Some(value), Some(path)) => section.ok(name, format!("{value} leads to {path}")),
            (Some(value), None) => section.wrong(
                name,
                format!("{value} leads to no library: tried {}", tried.join(", ")),
                "give a path, or put its folder into LD_LIBRARY_PATH",
            ),
            (None, Some(path)) => section.ok(name, format!("not set; NCCL finds {path} by itself")),
            (None, None) => section.note(name, format!("not set, and there is no {}", tried.join(", "))),
        }
    }
    section
}

/// The names that NCCL tries for a value, in its order.
pub fn candidates(value: Option<&str>, kind: &str) -> Vec<String> {
    match value {
        None => vec![format!("libnccl-{kind}.so")],
        Some(v) if v.contains('/') || (v.starts_with("lib") && v.ends_with(".so")) => vec![v.to_owned()],
        Some(v) => vec![v.to_owned(), format!("libnccl-{kind}-{v}.so")],
    }
}

/// What has to be set for a version, as (variable, value) pairs; `Err` says why nothing can be.
pub fn needs(code: i32) -> Result<&'static [(&'static str, &'static str)], &'static str> {
    match code {
        ..22807 => Err("too old: plugin tables for GIN begin with 2.28.7"),
        22807..22907 => Err(
            "loads a GIN table out of a NET plugin only (NCCL_NET_PLUGIN), which oxygin is not; use 2.29.7 or newer",
        ),
        22907..23007 => Ok(&[("NCCL_GIN_PLUGIN", "oxygin")]),
        _ => Ok(&[("NCCL_RMA_PLUGIN", "oxygin"), ("NCCL_GIN_PLUGIN", "oxygin")]),
    }
}

fn judge(section: &mut Section, code: i32, variable: &dyn Fn(&str) -> Option<String>) {
    let subject = format!("selection in {}", spell(code));
    let wanted = match needs(code) {
        Ok(wanted) => wanted,
        Err(why) => return section.no(subject, why, "a newer NCCL"),
    };
    let line = wanted.iter().map(|(n, v)| format!("{n}={v}")).collect::<Vec<_>>().join(" ");
    // From 2.30.7 on a GIN plugin of device type PROXY is skipped and the RMA table carries the data.
    let (decisive, kind) = (wanted[0].0, if wanted[0].0 == "NCCL_RMA_PLUGIN" { "rma" } else { "gin" });
    let value = variable(decisive).filter(|v| !v.is_empty());
    let chosen = candidates(value.as_deref(), kind).iter().any(|c| names_oxygin(c));
    let kind_of_gin = variable("NCCL_GIN_TYPE").filter(|v| !v.is_empty());
    match kind_of_gin.as_deref() {
        Some("2") | None => {}
        Some(other) => section.wrong(
            "NCCL_GIN_TYPE",
            format!("{other} rules the proxy (2) out, which is how oxygin moves data on this version"),
            "unset NCCL_GIN_TYPE",
        ),
    }
    match (chosen, value) {
        (true, _) => section.ok(subject, "oxygin, as the variables are now"),
        (false, Some(value)) => {
            section.note(subject, format!("{decisive}={value} selects something else; for oxygin: {line}"))
        }
        (false, None) => section.note(subject, format!("not oxygin; to select it: {line}")),
    }
}

/// The path behind a library name, if it loads, with its links followed.
fn loads(name: &str) -> Result<String, String> {
    let name = CString::new(name).map_err(|e| e.to_string())?;
    child::ask(Duration::from_secs(20), move || {
        // SAFETY: loads a library in a process of its own and asks the linker where it came from.
        unsafe {
            let handle = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
            if handle.is_null() {
                return Err(CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned());
            }
            let mut map: *mut LinkMap = std::ptr::null_mut();
            if libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) != 0 {
                return Ok(name.to_string_lossy().into_owned());
            }
            let path = CStr::from_ptr((*map).name).to_string_lossy().into_owned();
            let real = Path::new(&path).canonicalize().map(|p| p.display().to_string());
            Ok(real.unwrap_or(path))
        }
    })
}

/// Whether the library's newest table calls itself oxygin.
fn names_oxygin(name: &str) -> bool {
    let name = name.to_owned();
    let answer = child::ask(Duration::from_secs(20), move || {
        let plugin = crate::plugin::Plugin::open(&name).map_err(|e| e.to_string())?;
        Ok(plugin.tables().last().map(|t| t.name()).unwrap_or_default())
    });
    answer.is_ok_and(|name| name.to_lowercase().contains("oxygin"))
}

/// `2.30.7` for 23007.
fn spell(code: i32) -> String {
    match code {
        ..10000 => format!("{}.{}.{}", code / 1000, code / 100 % 10, code % 100),
        _ => format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100),
    }
}

/// Asks the library, or, if it does not load here, reads its strings.
fn version(path: &Path) -> Option<i32> {
    let asked = child::ask(Duration::from_secs(30), || {
        type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: a NCCL library in a process of its own; the function has had this type since NCCL 2.3.
        unsafe {
            let library = libloading::Library::new(path).map_err(|e| e.to_string())?;
            let get: libloading::Symbol<'_, GetVersion> = library.get(b"ncclGetVersion").map_err(|e| e.to_string())?;
            let mut code = 0;
            let result = get(&mut code);
            std::mem::forget(library);
            if result == 0 {
                Ok(code.to_string())
            } else {
                Err(format!("ncclGetVersion returned {result}"))
            }
        }
    });
    asked.ok().and_then(|text| text.parse().ok()).or_else(|| scan(&std::fs::read(path).ok()?))
}

/// Finds `NCCL version 2.30.7` among the bytes of a library.
fn scan(bytes: &[u8]) -> Option<i32> {
    const MARK: &[u8] = b"NCCL version ";
    bytes.windows(MARK.len()).enumerate().filter(|(_, w)| *w == MARK).find_map(|(at, _)| {
        let text = &bytes[at + MARK.len()..(at + MARK.len() + 16).min(bytes.len())];
        let end = text.iter().position(|b| !b.is_ascii_digit() && *b != b'.').unwrap_or(text.len());
        let mut numbers = std::str::from_utf8(&text[..end]).ok()?.split('.').map(str::parse::<i32>);
        let (major, minor, patch) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        Some(major * 10_000 + minor * 100 + patch)
    })
}

/// Every NCCL or RCCL library that a program here could load, each file once.
fn libraries(variable: &dyn Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    let lists = ["LD_LIBRARY_PATH", "PYTHONPATH"].map(|n| variable(n).unwrap_or_default());
    folders.extend(std::env::split_paths(&lists[0]));
    folders.extend(["NCCL_HOME", "CUDA_HOME"].into_iter().filter_map(variable).map(|h| Path::new(&h).join("lib")));
    folders.extend(
        [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/local/lib",
            "/usr/local/nccl/lib",
            "/usr/local/cuda/lib64",
            "/opt/rocm/lib",
        ]
        .map(PathBuf::from),
    );
    let mut packages: Vec<PathBuf> = std::env::split_paths(&lists[1]).collect();
    for root in python_roots(variable) {
        for python in children(&root.join("lib")).filter(|p| name_of(p).starts_with("python3")) {
            packages.extend(["site-packages", "dist-packages"].map(|n| python.join(n)));
        }
        packages.push(root.join("lib/python3/dist-packages"));
    }
    for package in packages {
        folders.extend(["nvidia/nccl/lib", "torch/lib"].map(|n| package.join(n)));
    }
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    let named = folders.iter().flat_map(|f| children(f).collect::<Vec<_>>()).filter(|p| {
        let name = name_of(p);
        name.starts_with("libnccl.so") || name.starts_with("librccl.so")
    });
    for path in named.chain(cached()) {
        if let Ok(real) = path.canonicalize() {
            if seen.insert(real) {
                found.push(path);
            }
        }
    }
    found
}

fn python_roots(variable: &dyn Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).map(PathBuf::from).collect();
    roots.extend(["/usr", "/usr/local", "/opt/conda", "/opt/venv"].map(PathBuf::from));
    if let Some(home) = variable("HOME").map(PathBuf::from) {
        roots.extend(children(&home.join(".pyenv/versions")));
        roots.push(home.join(".local"));
    }
    roots
}

fn children(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    all.sort();
    all.into_iter()
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// What the linker finds by itself.
fn cached() -> Vec<PathBuf> {
    ["libnccl.so.2", "librccl.so.1"].into_iter().filter_map(|name| loads(name).ok()).map(PathBuf::from).collect()
}

/// The beginning of glibc's `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const std::ffi::c_char,
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    #[test]
    fn names_are_tried_as_nccl_tries_them() {
        assert_eq!(candidates(None, "rma"), ["libnccl-rma.so"]);
        assert_eq!(candidates(Some("oxygin"), "rma"), ["oxygin", "libnccl-rma-oxygin.so"]);
        assert_eq!(candidates(Some("libx.so"), "gin"), ["libx.so"]);
        assert_eq!(candidates(Some("/a/b"), "gin"), ["/a/b"]);
    }

    #[test]
    fn each_version_has_its_variables() {
        assert!(needs(22806).is_err() && needs(22903).is_err());
        assert_eq!(needs(22907).map(|n| n[0].0), Ok("NCCL_GIN_PLUGIN"));
        assert_eq!(needs(23004).map(|n| n.len()), Ok(1));
        assert_eq!(needs(23007).map(|n| n[0].0), Ok("NCCL_RMA_PLUGIN"));
        assert_eq!(spell(23203), "2.32.3");
        assert_eq!(spell(2708), "2.7.8");
    }

    #[test]
    fn a_version_is_found_among_other_bytes() {
        assert_eq!(scan(b"\0xNCCL version %s\0NCCL version 2.30.7 compiled"), Some(23007));
        assert_eq!(scan(b"NCCL version 2.30"), None);
    }

    #[test]
    fn a_plugin_that_is_named_and_missing_is_wrong() {
        let section = plugins(&|name| (name == "NCCL_RMA_PLUGIN").then(|| "nonesuch".into()));
        let finding = section.findings.iter().find(|f| f.subject == "NCCL_RMA_PLUGIN").expect("judged");
        assert_eq!(finding.verdict, Verdict::Wrong);
        assert!(finding.detail.contains("libnccl-rma-nonesuch.so"), "{}", finding.detail);
    }
}
