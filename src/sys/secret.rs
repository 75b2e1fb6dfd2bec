//! Comparing secrets.

use std::hint::black_box;

/// Whether two tokens are the same, in a time that does not depend on where they differ. Whoever can send guesses and
/// measure the answers must not find a token byte by byte: every comparison of one goes through here.
#[inline]
pub fn same(a: &[u8; 16], b: &[u8; 16]) -> bool {
    // One number of 128 bits: there is nothing to stop at. The box keeps the compiler from turning it into steps.
    black_box(u128::from_ne_bytes(*a) ^ u128::from_ne_bytes(*b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    #[test]
    fn every_bit_counts() {
        let token: [u8; 16] = std::array::from_fn(|i| i as u8 * 17);
        assert!(same(&token, &token.clone()));
        for bit in 0..128 {
            let mut other = token;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!same(&token, &other), "bit {bit}");
        }
    }

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }

    /// The words on both sides of each `==` and `!=` of a line, without what is put around them.
    fn compared(line: &str) -> impl Iterator<Item = &str> {
        let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.');
        line.match_indices("==").chain(line.match_indices("!=")).flat_map(move |(at, _)| {
            let before = line[..at].trim_end().rsplit(|c: char| !word(c)).next();
            let after = line[at + 2..].trim_start_matches([' ', '&', '*']).split(|c: char| !word(c)).next();
            before.into_iter().chain(after)
        })
    }

    /// No token is compared by `==`, which ends at the first byte that differs. `Token` of a handle has one of its own.
    #[test]
    fn tokens_are_compared_here_alone() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = Vec::new();
        sources(&root, &mut files);
        assert!(files.len() > 100, "{} files", files.len());
        let mut wrong = Vec::new();
        for file in files {
            let of_handles = file.starts_with(root.join("comm/rendezvous"));
            for (number, line) in std::fs::read_to_string(&file).unwrap().lines().enumerate() {
                let is_token = |word: &str| word.rsplit('.').next().is_some_and(|last| last.ends_with("token"));
                let is_comment = line.trim_start().starts_with("//");
                if !of_handles && !is_comment && compared(line).any(is_token) {
                    wrong.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
                }
            }
        }
        assert!(wrong.is_empty(), "use secret::same: {wrong:#?}");
    }
}
