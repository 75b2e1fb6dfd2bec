//! The table of protocols in docs/compatibility.md has the numbers that the code has.

use crate::root;

/// The number in the constant that a file's `VERSION` is, or in the last byte of the mark of its `CALL`.
fn number(file: &str) -> Option<u64> {
    let text = std::fs::read_to_string(root().join(file)).ok()?;
    let value = |line: &str| {
        let (name, value) = line.trim_start().trim_start_matches("pub ").strip_prefix("const ")?.split_once(" = ")?;
        let value = value.trim_end_matches(';');
        match name.split_once(": ")? {
            ("VERSION", "u16" | "u32" | "u64") => value.parse().ok(),
            ("CALL", _) => u64::from_str_radix(value.trim_end_matches('"').rsplit_once("\\x")?.1, 16).ok(),
            _ => None,
        }
    };
    text.lines().find_map(value)
}

#[test]
fn the_page_about_compatibility_has_the_protocols_numbers() {
    let page = std::fs::read_to_string(root().join("docs/compatibility.md")).expect("the page");
    let mut found = 0;
    for row in page.lines() {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [_, told, _, file] = cells[..] else { continue };
        let file = file.trim_matches('`');
        if !file.ends_with(".rs") {
            continue;
        }
        assert_eq!(number(file), told.parse().ok(), "{file}");
        found += 1;
    }
    assert_eq!(found, 6, "protocols in the table");
}
