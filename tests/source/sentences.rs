//! docs/troubleshooting.md quotes what the log says: each sentence in its tables is one that the code has.

use crate::{files, root};

/// Sentences of others: NCCL's, libibverbs', the kernel's.
const OF_OTHERS: [&str; 8] = [
    "GIN not supported",
    "GIN backend type",
    "Skipping external proxy plugin",
    "Cannot allocate memory",
    "Connection timed out",
    "local protection error",
    "remote operation error",
    "retry counter exceeded",
];

/// So many words in a row say what sentence it is; the others may be what is put into it.
const WORDS: usize = 3;

/// The library's and the wrappers' source, each string on one line, and a NUL for whatever is put into it and each
/// number.
fn source() -> String {
    let mut text = String::new();
    for path in ["src", "ffi/src"].into_iter().flat_map(files) {
        let mut lines = std::fs::read_to_string(path).expect("a file").lines().map(str::to_owned).collect::<Vec<_>>();
        for at in (1..lines.len()).rev() {
            if lines[at - 1].ends_with('\\') {
                let rest = lines.remove(at);
                lines[at - 1].pop();
                lines[at - 1] += rest.trim_start();
            }
        }
        text += &lines.join("\n");
    }
    let mut plain = String::new();
    let mut rest = text.as_str();
    while let Some((before, behind)) = rest.split_once('{') {
        plain += before;
        let end = behind.find(|c: char| c.is_whitespace() || c == '{' || c == '"').unwrap_or(behind.len());
        match behind[..end].split_once('}') {
            Some((name, _)) => (plain, rest) = (plain + "\0", &behind[name.len() + 1..]),
            None => (plain, rest) = (plain + "{", behind),
        }
    }
    without_numbers(&(plain + rest))
}

/// What is between quotation marks in the first cell of a table's row.
fn quoted(row: &str) -> Vec<&str> {
    let cell = row.strip_prefix("| ").and_then(|row| row.split(" | ").next()).unwrap_or_default();
    cell.split('"').skip(1).step_by(2).collect()
}

/// Whether the source says so: `WORDS` words in a row, or all where there are fewer. Numbers are what is put in.
fn is_said(sentence: &str, source: &str) -> bool {
    sentence.split('…').any(|part| {
        let words: Vec<_> = part.split_whitespace().map(without_numbers).collect();
        let n = WORDS.min(words.len());
        n > 0 && words.windows(n).any(|run| source.contains(&run.join(" ")))
    })
}

fn without_numbers(text: &str) -> String {
    let mut plain = String::new();
    for c in text.chars() {
        match c.is_ascii_digit() {
            true if plain.ends_with('\0') => {}
            true => plain.push('\0'),
            false => plain.push(c),
        }
    }
    plain
}

#[test]
fn the_page_about_trouble_quotes_what_the_log_says() {
    let page = std::fs::read_to_string(root().join("docs/troubleshooting.md")).expect("the page");
    let source = source();
    let ours = |sentence: &&str| !OF_OTHERS.iter().any(|theirs| sentence.contains(theirs));
    let sentences: Vec<_> = page.lines().flat_map(quoted).filter(ours).collect();
    let wrong: Vec<_> = sentences.iter().filter(|sentence| !is_said(sentence, &source)).collect();
    assert!(wrong.is_empty(), "nobody says so any more: {wrong:#?}");
    assert!(sentences.len() > 40, "only {} sentences were compared: the tables are not read", sentences.len());
}

#[test]
fn sentences_are_found_whatever_is_put_into_them() {
    assert_eq!(quoted("| \"a b\" or \"c\" (x) | \"d\" |"), ["a b", "c"]);
    let source = "\"rank \0 has said nothing for \0 s\" \"no room\"";
    for said in ["rank 12 has said nothing for 35 s", "… nothing for 7 s: …", "no room"] {
        assert!(is_said(said, source), "{said}");
    }
    for unsaid in ["rank 2 says nothing for long", "has said little", "no rooms"] {
        assert!(!is_said(unsaid, source), "{unsaid}");
    }
}
