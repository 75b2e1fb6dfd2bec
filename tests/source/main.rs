//! What the source itself must keep to: layers without circles, and files, functions and lines that can be read; and
//! what its build script says of it.

mod layers;
mod names;
mod origin;
mod protocols;
mod rooms;
mod sentences;
mod sizes;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The workspace's root.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust files below a folder of the workspace, in order.
fn files(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of the workspace") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A file as the compiler's parser sees it.
fn parse(path: &Path) -> syn::File {
    let text = std::fs::read_to_string(path).expect("a file of the workspace");
    syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A path as people write it: from the workspace's root.
fn name(path: &Path) -> String {
    path.strip_prefix(root()).expect("inside the workspace").display().to_string()
}

/// Whether an item exists in tests only.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|a| match &a.meta {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        syn::Meta::NameValue(_) => false,
    })
}

/// Files that a `#[cfg(test)] mod name;` stands for.
fn are_tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for path in files("src") {
        let folder = match path.file_stem() {
            Some(stem) if stem == "mod" || stem == "lib" => path.parent().expect("a folder").to_path_buf(),
            _ => path.with_extension(""),
        };
        for item in parse(&path).items {
            if let syn::Item::Mod(m) = item {
                if m.content.is_none() && is_test(&m.attrs) {
                    found.insert(name(&folder.join(format!("{}.rs", m.ident))));
                }
            }
        }
    }
    found
}
