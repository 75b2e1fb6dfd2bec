//! Which build this is: in the log's first line, in `oxygin --version`, and in what ranks tell each other.

/// The release and where its source came from, as `0.1.0 (commit 0123456789ab)`; `build.rs` finds out. Of an
/// unoptimised build `0.1.0 (debug build)`, without git `0.1.0 (built outside git)`.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("OXYGIN_ORIGIN"), ")");

/// Room for [`BUILD`] where it has a fixed place: in a handle.
pub const MAX_BYTES: usize = 64;

const _: () = assert!(BUILD.len() <= MAX_BYTES);

/// A peer's [`BUILD`] out of bytes of its: one line of at most [`MAX_BYTES`], up to the first NUL. Earlier versions
/// left it empty.
pub fn of_peer(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    let text = bytes.split(|&b| b == 0).next().unwrap_or_default();
    match text {
        [] => "of an earlier version".into(),
        text => text.iter().map(|&b| if matches!(b, b' '..=b'~') { b as char } else { '?' }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_has_a_release_and_an_origin() {
        assert!(BUILD.starts_with(concat!(env!("CARGO_PKG_VERSION"), " (")) && BUILD.ends_with(')'), "{BUILD}");
    }

    #[test]
    fn what_a_peer_says_of_itself_is_one_short_line() {
        assert_eq!(of_peer(BUILD.as_bytes()), BUILD);
        assert_eq!(of_peer(b"0.2.0 (x)\0\0rest"), "0.2.0 (x)");
        assert_eq!(of_peer(b"a\n\x1b[2Jb"), "a??[2Jb");
        assert_eq!(of_peer(b"\0\0"), "of an earlier version");
        assert_eq!(of_peer(&[b'x'; 1000]).len(), MAX_BYTES);
        // What was read once and sent on is read the same, and as long.
        assert_eq!(of_peer(of_peer(&[0xff; 100]).as_bytes()), "?".repeat(MAX_BYTES));
    }
}
