//! Names are the field's: none that was retired comes back, and a type's name stands for one thing.

use crate::{are_tests, files, is_test, name, parse};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use syn::visit::{self, Visit};

/// Words that no identifier has in it, and what is said instead.
const RETIRED: [(&str, &str); 23] = [
    ("courier", "copy kernel"),
    ("hands", "worker blocks"),
    ("berth", "launch slot"),
    ("flight", "submission, or operation; what is in flight may be called so"),
    ("flights", "submissions, outstanding operations"),
    ("heavy", "bulk copy"),
    ("parked", "deferred"),
    ("joining", "coalesce"),
    ("leaving", "drain"),
    ("tally", "stats"),
    ("stager", "pinned pool"),
    ("lease", "pinned buffer"),
    ("outlet", "send buffer"),
    ("inlet", "receive buffer"),
    ("door", "acceptor"),
    ("goodbye", "FIN"),
    ("question", "probe"),
    ("replies", "reverse path"),
    ("outs", "remote completions"),
    ("straight", "direct post"),
    ("ticket", "request, or work request id"),
    ("seat", "transmit queue, or connection slot"),
    ("seats", "transmit queues"),
];

/// Of these, words that no comment and no sentence has either: they mean nothing else.
const NEVER: [&str; 8] = ["courier", "berth", "stager", "lease", "outlet", "inlet", "goodbye", "parked"];

/// What is read: the fabrics, what posts to them, and the tests of both.
const FOLDERS: [&str; 5] = ["src/fabric", "src/rma", "src/vtable", "src/config", "tests"];

/// Files that have a word all the same, and why.
const EXCEPTIONS: [(&str, &str); 3] = [
    // Words that users may still write into OXYGIN_GPU_ISSUE, and what says so.
    ("src/config/gpu_issue.rs", "courier"),
    ("src/config/variables.rs", "courier"),
    // The list itself.
    ("tests/source/names.rs", ""),
];

/// The words of an identifier, small.
fn words(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for c in identifier.chars() {
        if c == '_' || c.is_uppercase() && words.last().is_some_and(|w| w.ends_with(char::is_lowercase)) {
            words.push(String::new());
        }
        if let (true, Some(word)) = (c != '_', words.last_mut()) {
            word.extend(c.to_lowercase());
        }
    }
    words
}

/// Collects identifiers that are given a meaning here: names of items, fields, variants, arguments and variables.
#[derive(Default)]
struct Given(BTreeSet<String>);

impl<'ast> Visit<'ast> for Given {
    fn visit_ident(&mut self, ident: &'ast syn::Ident) {
        self.0.insert(ident.to_string());
    }
}

/// The retired words of a file: with `in` before it a flight is none.
fn retired(path: &Path) -> BTreeSet<&'static str> {
    let mut given = Given::default();
    given.visit_file(&parse(path));
    let mut found = BTreeSet::new();
    for identifier in &given.0 {
        let words = words(identifier);
        for (at, word) in words.iter().enumerate() {
            let is_in_flight = word == "flight" && at > 0 && words[at - 1] == "in";
            found.extend(RETIRED.iter().map(|(was, _)| *was).filter(|was| was == word && !is_in_flight));
        }
    }
    let text = std::fs::read_to_string(path).expect("a file").to_lowercase();
    let said: BTreeSet<&str> = text.split(|c: char| !c.is_alphabetic()).collect();
    found.extend(NEVER.into_iter().filter(|word| said.contains(word)));
    found
}

#[test]
fn no_retired_name_comes_back() {
    let mut wrong = Vec::new();
    let mut excused = BTreeSet::new();
    for path in FOLDERS.into_iter().flat_map(files) {
        let name = name(&path);
        for word in retired(&path) {
            match EXCEPTIONS.iter().find(|(file, is)| *file == name && (is.is_empty() || *is == word)) {
                Some(exception) => drop(excused.insert(*exception)),
                None => {
                    let instead = RETIRED.iter().find(|(was, _)| *was == word).map_or("", |(_, is)| is);
                    wrong.push(format!("{name}: {word:?} was retired; say {instead}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} places:\n{}", wrong.len(), wrong.join("\n"));
    let known: BTreeSet<_> = EXCEPTIONS.into_iter().collect();
    assert_eq!(excused, known, "not needed any more: take them out of EXCEPTIONS");
}

#[test]
fn words_are_found_in_identifiers() {
    assert_eq!(words("LeaseTable"), ["lease", "table"]);
    assert_eq!(words("old_door"), ["old", "door"]);
    assert_eq!(words("Release"), ["release"]);
}

/// Names that several files of the library define for others to use, and why that confuses nobody.
const TWICE: [(&str, &[&str]); 4] = [
    (
        "the same part of each fabric, or of each transport, and named with its module elsewhere",
        &[
            "Acceptor", "Bounce", "Context", "Device", "Failing", "Gpu", "Lane", "Op", "Peer", "Progress", "Refusals",
            "Windows",
        ],
    ),
    (
        "what one protocol each has, in its own file of formats",
        &["Answer", "Header", "Hello", "Layout", "Malformed", "Refusal", "Request"],
    ),
    (
        "what each format of a queue's entries has: what they are judged against, and what is wrong with one",
        &["Fault", "Terms"],
    ),
    ("what a module is named for, of two layers that never meet", &["Engine", "Event", "Kind", "Ring", "Table"]),
];

/// Collects the names of types that other files can see and that are no test's.
#[derive(Default)]
struct Types(BTreeSet<String>);

impl<'ast> Visit<'ast> for Types {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let (attributes, ident) = match item {
            syn::Item::Mod(m) => (&m.attrs, None),
            syn::Item::Fn(f) => (&f.attrs, None),
            syn::Item::Struct(s) => (&s.attrs, Some((&s.vis, &s.ident))),
            syn::Item::Enum(e) => (&e.attrs, Some((&e.vis, &e.ident))),
            syn::Item::Trait(t) => (&t.attrs, Some((&t.vis, &t.ident))),
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            let ident = ident.filter(|(vis, _)| !matches!(vis, syn::Visibility::Inherited));
            self.0.extend(ident.map(|(_, ident)| ident.to_string()));
            visit::visit_item(self, item);
        }
    }
}

#[test]
fn a_types_name_stands_for_one_thing() {
    let (tests, mut all) = (are_tests(), BTreeMap::<String, Vec<String>>::new());
    let is_test = |name: &str| tests.iter().any(|t| name.starts_with(t.trim_end_matches(".rs")));
    for path in files("src").iter().filter(|p| !is_test(&name(p))) {
        let mut types = Types::default();
        types.visit_file(&parse(path));
        types.0.into_iter().for_each(|t| all.entry(t).or_default().push(name(path)));
    }
    all.retain(|_, files| files.len() > 1);
    let allowed: BTreeSet<&str> = TWICE.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    let wrong = |(t, _): &(&String, &Vec<String>)| !allowed.contains(t.as_str());
    let wrong: Vec<_> = all.iter().filter(wrong).map(|(t, files)| format!("{t}: {}", files.join(", "))).collect();
    assert!(wrong.is_empty(), "{} names:\n{}", wrong.len(), wrong.join("\n"));
    let gone: Vec<_> = allowed.iter().filter(|name| !all.contains_key(**name)).collect();
    assert!(gone.is_empty(), "not defined twice any more: take them out of TWICE: {gone:?}");
}
