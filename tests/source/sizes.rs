//! No file over 500 lines, no function over 80, no line over 120 columns.

use crate::{files, name, parse};
use std::collections::BTreeSet;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

const FILE_LINES: usize = 500;
const FUNCTION_LINES: usize = 80;
const COLUMNS: usize = 120;

/// Everything that is read: the crates and their tests.
const FOLDERS: [&str; 7] = ["src", "plugin-api", "ffi", "cli", "fuzz", "tests", "examples"];

/// Tables: a list of one thing that is no easier to read in pieces.
const TABLES: [&str; 1] = ["ffi/src/verbs/types.rs"];

/// Functions that are tables, by their file and name.
const TABLE_FUNCTIONS: [(&str, &str); 1] = [("ffi/tests/verbs_layout.rs", "expected")];

struct Functions(Vec<(String, usize)>);

impl Functions {
    fn note(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let lines = block.span().end().line - signature.span().start().line + 1;
        if lines > FUNCTION_LINES {
            self.0.push((signature.ident.to_string(), lines));
        }
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, f: &'ast syn::ItemFn) {
        self.note(&f.sig, &f.block);
        visit::visit_item_fn(self, f);
    }

    fn visit_impl_item_fn(&mut self, f: &'ast syn::ImplItemFn) {
        self.note(&f.sig, &f.block);
        visit::visit_impl_item_fn(self, f);
    }
}

#[test]
fn files_functions_and_lines_can_be_read() {
    let (mut wrong, mut functions_seen) = (Vec::new(), BTreeSet::new());
    for path in FOLDERS.into_iter().flat_map(files) {
        let (name, text) = (name(&path), std::fs::read_to_string(&path).expect("a file"));
        let count = text.lines().count();
        if count > FILE_LINES && !TABLES.contains(&name.as_str()) {
            wrong.push(format!("{name}: {count} lines"));
        }
        let wide = text.lines().enumerate().filter(|(_, line)| line.chars().count() > COLUMNS);
        wrong.extend(wide.map(|(i, line)| format!("{name}:{}: {} columns", i + 1, line.chars().count())));
        let mut functions = Functions(Vec::new());
        functions.visit_file(&parse(&path));
        for (function, lines) in functions.0 {
            let known = (name.as_str(), function.as_str());
            match TABLE_FUNCTIONS.contains(&known) {
                true => drop(functions_seen.insert((name.clone(), function))),
                false => wrong.push(format!("{name}: fn {function} has {lines} lines")),
            }
        }
    }
    assert!(wrong.is_empty(), "{} places:\n{}", wrong.len(), wrong.join("\n"));
    let known: BTreeSet<_> =
        TABLE_FUNCTIONS.into_iter().map(|(file, function)| (file.to_owned(), function.to_owned())).collect();
    assert_eq!(functions_seen, known, "no longer long: take them out of their list");
}
