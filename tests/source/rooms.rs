//! The rooms of the soft fabric import what lies below them, and the transports among them know no neighbour:
//! docs/architecture.md has the same list.

use crate::{are_tests, files, is_test, name, parse, root};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use syn::visit::{self, Visit};

/// The fabric's module, from the crate's root.
const FABRIC: [&str; 2] = ["fabric", "soft"];

/// The rooms that stand below `domain`, lowest first, and which of them each may use: nobody's arrow points down this
/// list, so there is no circle.
const ROOMS: [(&str, &[&str]); 14] = [
    ("atomic", &[]),
    ("hello", &[]),
    ("sentences", &[]),
    ("status", &[]),
    ("lane", &[]),
    ("refused", &[]),
    ("local", &[]),
    ("own", &["atomic", "local", "sentences"]),
    ("peer", &["status"]),
    ("shm", &["atomic", "sentences", "status"]),
    ("gate", &["peer", "status"]),
    ("gpu", &["atomic", "gate", "lane", "refused"]),
    // What goes into GPU memory goes there by its engine, whoever brings it.
    ("ipc", &["gpu", "status"]),
    ("tcp", &["atomic", "gpu", "lane", "local", "refused"]),
];

/// Those above, lowest first: each may use all that come before it.
const ABOVE: [&str; 9] = ["domain", "link", "links", "receive", "progress", "lanes", "windows", "thread", "context"];

/// Collects the absolute paths that a file's code names and that lead into the crate.
struct Named {
    module: Vec<String>,
    found: BTreeSet<Vec<String>>,
}

impl Named {
    fn new(module: Vec<String>) -> Self {
        Self { module, found: BTreeSet::new() }
    }

    /// Takes up a path if it begins with `crate`, `super` or `self`.
    fn path(&mut self, segments: &[String]) {
        let mut at = match segments.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("super" | "self") => self.module.clone(),
            _ => return,
        };
        for segment in segments {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => drop(at.pop()),
                _ => at.push(segment.clone()),
            }
        }
        self.found.insert(at);
    }

    fn tree(&mut self, tree: &syn::UseTree, before: &[String]) {
        let with = |ident: &syn::Ident| [before, &[ident.to_string()]].concat();
        match tree {
            syn::UseTree::Path(p) => self.tree(&p.tree, &with(&p.ident)),
            syn::UseTree::Group(g) => g.items.iter().for_each(|t| self.tree(t, before)),
            syn::UseTree::Name(n) => self.path(&with(&n.ident)),
            syn::UseTree::Rename(r) => self.path(&with(&r.ident)),
            syn::UseTree::Glob(_) => self.path(before),
        }
    }
}

impl<'ast> Visit<'ast> for Named {
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

    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        self.module.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.path(&path.segments.iter().map(|s| s.ident.to_string()).collect::<Vec<_>>());
        visit::visit_path(self, path);
    }
}

/// The module that a file of the library is, from the crate's root.
fn module_of(path: &Path) -> Vec<String> {
    let inside = path.strip_prefix(root().join("src")).expect("inside src").with_extension("");
    let mut module: Vec<String> = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if module.last().is_some_and(|last| last == "mod") {
        module.pop();
    }
    module
}

/// The room that a module of the crate is in, if it is one of this fabric.
fn room_of(module: &[String]) -> Option<&str> {
    let inside = module.iter().map(String::as_str).take(FABRIC.len()).eq(FABRIC);
    module.get(FABRIC.len()).filter(|_| inside).map(String::as_str)
}

/// Whether a room may use another one.
fn may_use(room: &str, other: &str) -> bool {
    match ABOVE.iter().position(|r| *r == room) {
        Some(at) => ABOVE[..at].contains(&other) || ROOMS.iter().any(|(r, _)| *r == other),
        None => ROOMS.iter().find(|(r, _)| *r == room).is_some_and(|(_, uses)| uses.contains(&other)),
    }
}

#[test]
fn rooms_know_no_neighbour() {
    let (tests, mut wrong) = (are_tests(), BTreeMap::<String, Vec<String>>::new());
    let known: BTreeSet<&str> = ROOMS.iter().map(|(room, _)| *room).chain(ABOVE).collect();
    let mut seen = BTreeSet::new();
    for path in files("src/fabric/soft")
        .iter()
        .filter(|p| !tests.iter().any(|t| name(p).starts_with(t.trim_end_matches(".rs"))))
    {
        let module = module_of(path);
        let Some(room) = room_of(&module).map(str::to_string) else { continue };
        assert!(known.contains(room.as_str()), "{room} is no room yet: give it a place in ROOMS or ABOVE");
        let mut named = Named::new(module);
        named.visit_file(&parse(path));
        for other in named.found.iter().filter_map(|m| room_of(m)) {
            // Types that the fabric's own module says again begin with a capital.
            if known.contains(other) && other != room && !may_use(&room, other) {
                wrong.entry(format!("{room} uses {other}")).or_default().push(name(path));
            }
        }
        seen.insert(room);
    }
    assert!(wrong.is_empty(), "arrows that point up or to a neighbour: {wrong:#?}");
    assert_eq!(seen.len(), known.len(), "a room is gone: take it out of ROOMS or ABOVE");
}

#[test]
fn the_list_of_rooms_has_no_circle() {
    for (at, (room, uses)) in ROOMS.iter().enumerate() {
        let below: Vec<_> = ROOMS[..at].iter().map(|(r, _)| *r).collect();
        assert!(uses.iter().all(|other| below.contains(other)), "{room} stands below what it may use");
    }
}

/// The words between backticks, folders without their slash.
fn named_in(cell: &str) -> BTreeSet<&str> {
    cell.split('`').skip(1).step_by(2).map(|word| word.trim_end_matches('/')).collect()
}

#[test]
fn the_map_has_the_same_list() {
    let map = std::fs::read_to_string(root().join("docs/architecture.md")).expect("the map");
    let mut rows = map.lines().skip_while(|line| !line.starts_with("| room in `fabric/soft/`")).skip(2);
    let table: Vec<_> = rows.by_ref().take_while(|line| line.starts_with("| ")).collect();
    let told = |room: &str| {
        let cells = table.iter().map(|row| row.split('|').collect::<Vec<_>>());
        cells.filter(|cells| named_in(cells[1]).contains(room)).map(|cells| named_in(cells[3])).next()
    };
    for (room, uses) in ROOMS {
        assert_eq!(told(room), Some(uses.iter().copied().collect()), "{room}");
    }
    assert!(ABOVE.iter().all(|room| told(room).is_some()), "all rooms have a row");
}

#[test]
fn paths_are_followed_from_where_they_stand() {
    let file = syn::parse_file(
        "use super::ring::Ring; use crate::fabric::soft::{lane::Lane, gpu as engine}; use self::cma; use std::fmt;
         fn f() { super::super::tcp::g(); }
         mod inner { use super::super::super::link::Link; }
         #[cfg(test)] mod tests { use crate::fabric::soft::thread; }",
    );
    let mut named = Named::new(["fabric", "soft", "shm", "inbox"].map(String::from).to_vec());
    named.visit_file(&file.expect("Rust"));
    let rooms: BTreeSet<_> = named.found.iter().filter_map(|m| room_of(m)).collect();
    assert_eq!(rooms.into_iter().collect::<Vec<_>>(), ["gpu", "lane", "link", "shm", "tcp"]);
    assert!(may_use("tcp", "gpu") && !may_use("gpu", "tcp") && !may_use("shm", "peer") && may_use("links", "link"));
}
