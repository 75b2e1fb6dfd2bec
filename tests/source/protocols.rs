//! The numbers of protocols in `docs/compatibility.md`: those of the source.

use super::root;

/// The constant `VERSION` of a file, or the last byte of the greeting `CALL`.
fn number_in(path: &str) -> Option<u32> {
    let text = std::fs::read_to_string(root().join(path)).ok()?;
    let after = |mark: &str| text.lines().find_map(|line| line.split_once(mark).map(|(_, rest)| rest.to_owned()));
    let constant =
        ["const VERSION: u16 = ", "const VERSION: u32 = ", "const VERSION: u64 = "].into_iter().find_map(after);
    let (text, radix) = match constant {
        Some(text) => (text.trim_end_matches(';').to_owned(), 10),
        None => (after("const CALL: ")?.rsplit_once("\\x")?.1.trim_end_matches("\";").to_owned(), 16),
    };
    u32::from_str_radix(&text, radix).ok()
}

#[test]
fn the_page_has_the_numbers_of_the_source() {
    let page = std::fs::read_to_string(root().join("docs/compatibility.md")).expect("the page");
    let mut rows = 0;
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, what, number, _, file, _] = cells[..] else { continue };
        let Some(path) = file.strip_prefix('`').and_then(|f| f.strip_suffix('`')).filter(|f| f.ends_with(".rs")) else {
            continue;
        };
        assert_eq!(number.parse().ok(), number_in(path), "{what}, {path}");
        rows += 1;
    }
    assert_eq!(rows, 6, "the table is read");
}
