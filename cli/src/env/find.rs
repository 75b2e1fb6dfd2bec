//! The NCCL libraries of this machine and their versions.

use crate::doctor::child;
use std::collections::BTreeSet;
use std::ffi::{c_int, CStr, CString};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `2.30.7` for 23007.
pub fn spell(code: i32) -> String {
    match code {
        ..10000 => format!("{}.{}.{}", code / 1000, code / 100 % 10, code % 100),
        _ => format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100),
    }
}

/// 23007 for `2.30.7`; `None` for what is no version of NCCL with three numbers.
pub fn code_of(text: &str) -> Option<i32> {
    let mut numbers = text.strip_prefix('v').unwrap_or(text).split('.').map(str::parse::<i32>);
    let (major, minor, patch) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
    // From 2.9 on, as NCCL_VERSION has it.
    let plausible = (2..10).contains(&major) && (9..100).contains(&minor) && (0..100).contains(&patch);
    (plausible && numbers.next().is_none()).then_some(major * 10_000 + minor * 100 + patch)
}

/// Asks the library, or, if it does not load here, reads its strings.
pub fn version(path: &Path) -> Option<i32> {
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
        code_of(std::str::from_utf8(&text[..end]).ok()?)
    })
}

/// The path behind a library name, if it loads, with its links followed.
pub fn loads(name: &str) -> Result<String, String> {
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

/// Every NCCL or RCCL library that a program here could load, each file once; first those that it would find first:
/// what the library path has, then what Python packages bring (those beside this program, where it is in a wheel,
/// before others), then the system's.
pub fn libraries(variable: &dyn Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let lists = ["LD_LIBRARY_PATH", "PYTHONPATH"].map(|n| variable(n).unwrap_or_default());
    let mut packages: Vec<PathBuf> = std::env::split_paths(&lists[1]).collect();
    packages.extend(own_packages());
    for root in python_roots(variable) {
        for python in children(&root.join("lib")).filter(|p| name_of(p).starts_with("python3")) {
            packages.extend(["site-packages", "dist-packages"].map(|n| python.join(n)));
        }
        packages.push(root.join("lib/python3/dist-packages"));
    }
    let mut folders: Vec<PathBuf> = std::env::split_paths(&lists[0]).collect();
    folders.extend(["NCCL_HOME", "CUDA_HOME"].into_iter().filter_map(variable).map(|h| Path::new(&h).join("lib")));
    for package in packages {
        folders.extend(["nvidia/nccl/lib", "torch/lib"].map(|n| package.join(n)));
    }
    let system = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/local/nccl/lib",
        "/usr/local/cuda/lib64",
        "/opt/rocm/lib",
    ]
    .map(PathBuf::from);
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    // The linker's own choice comes before folders that it may look at.
    for path in libraries_of(&folders).chain(cached()).chain(libraries_of(&system)) {
        if let Ok(real) = path.canonicalize() {
            if seen.insert(real) {
                found.push(path);
            }
        }
    }
    found
}

/// Files in these folders whose names are those of NCCL or RCCL.
fn libraries_of(folders: &[PathBuf]) -> impl Iterator<Item = PathBuf> + '_ {
    folders
        .iter()
        .flat_map(|folder| children(folder))
        .filter(|path| name_of(path).starts_with("libnccl.so") || is_rccl(path))
}

/// Whether it is AMD's, by its name.
pub fn is_rccl(path: &Path) -> bool {
    name_of(path).starts_with("librccl.so")
}

/// The folder of Python packages that this program is in, as a wheel puts it: FOLDER/oxygin/bin/oxygin. Whoever starts
/// that one need not have said which environment is his.
fn own_packages() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.ancestors().nth(3)?;
    let is_of_packages = ["site-packages", "dist-packages"].contains(&name_of(folder).as_str());
    is_of_packages.then(|| folder.to_path_buf())
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
    use super::*;

    #[test]
    fn a_version_is_found_among_other_bytes() {
        assert_eq!(scan(b"\0xNCCL version %s\0NCCL version 2.30.7 compiled"), Some(23007));
        assert_eq!(scan(b"NCCL version 2.30"), None);
    }

    #[test]
    fn versions_are_read_as_they_are_written() {
        for (text, code) in [("2.30.7", Some(23007)), ("v2.29.7", Some(22907)), ("2.30", None), ("2.30.7.1", None)] {
            assert_eq!(code_of(text), code, "{text}");
        }
        for text in ["", "2.x.1", "2.-1.3", "1.30.7", "99999999999.1.1", "2.30.100"] {
            assert_eq!(code_of(text), None, "{text}");
        }
        assert_eq!(spell(23203), "2.32.3");
        assert_eq!(spell(2708), "2.7.8");
    }
}
