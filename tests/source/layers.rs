//! Top-level modules import what lies below them: docs/architecture.md has the same list.

use crate::{are_tests, files, is_test, name, parse, root};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// The layers, lowest first. A module may use those before it in the list and nothing else of this crate.
const LAYERS: [&str; 11] =
    ["config", "error", "sys", "telemetry", "memory", "rma", "fabric", "proxy", "gdaki", "comm", "vtable"];

/// Collects the first segment behind `crate` of every path that is no test's.
#[derive(Default)]
struct Used(BTreeSet<String>);

impl Used {
    fn tree(&mut self, tree: &syn::UseTree, behind_crate: bool) {
        match tree {
            syn::UseTree::Path(p) if behind_crate => {
                self.0.insert(p.ident.to_string());
            }
            syn::UseTree::Path(p) if p.ident == "crate" => self.tree(&p.tree, true),
            syn::UseTree::Group(g) => g.items.iter().for_each(|t| self.tree(t, behind_crate)),
            syn::UseTree::Name(n) if behind_crate => {
                self.0.insert(n.ident.to_string());
            }
            _ => {}
        }
    }
}

impl<'ast> Visit<'ast> for Used {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(m) => &m.attrs[..],
            syn::Item::Fn(f) => &f.attrs,
            syn::Item::Use(u) => &u.attrs,
            syn::Item::Impl(i) => &i.attrs,
            _ => &[],
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(&item.tree, false);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let mut segments = path.segments.iter();
        if segments.next().is_some_and(|s| s.ident == "crate") {
            self.0.extend(segments.next().map(|s| s.ident.to_string()));
        }
        visit::visit_path(self, path);
    }
}

#[test]
fn arrows_point_down() {
    let (tests, mut wrong) = (are_tests(), BTreeMap::<String, Vec<String>>::new());
    let mut seen = BTreeSet::new();
    for path in files("src").iter().filter(|p| !tests.contains(&name(p))) {
        let inside = path.strip_prefix(root().join("src")).expect("inside src");
        let top = inside.components().next().expect("a name").as_os_str().to_string_lossy().replace(".rs", "");
        if top == "lib" {
            continue;
        }
        let layer = LAYERS.iter().position(|l| *l == top);
        let layer = layer.unwrap_or_else(|| panic!("{top} is no layer yet: give it a place in LAYERS"));
        seen.insert(top.clone());
        let mut used = Used::default();
        used.visit_file(&parse(path));
        for module in used.0.iter().filter(|m| **m != top && !LAYERS[..layer].contains(&m.as_str())) {
            wrong.entry(format!("{top} uses {module}")).or_default().push(name(path));
        }
    }
    assert!(wrong.is_empty(), "arrows that point up: {wrong:#?}");
    assert_eq!(seen.len(), LAYERS.len(), "a layer is gone: take it out of LAYERS");
}

#[test]
fn paths_and_uses_are_seen_and_tests_are_not() {
    let file = syn::parse_file(
        "use crate::{rma::op, comm}; use std::crate_name;
         fn f() { crate::sys::f(); let x: Vec<crate::error::Error> = g(crate::memory::h); }
         #[cfg(test)] mod tests { use crate::vtable::data; }
         #[test] fn t() { crate::fabric::x(); }",
    );
    let mut used = Used::default();
    used.visit_file(&file.expect("Rust"));
    assert_eq!(used.0.into_iter().collect::<Vec<_>>(), ["comm", "error", "memory", "rma", "sys"]);
}
