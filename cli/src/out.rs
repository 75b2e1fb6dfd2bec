//! Standard output and standard error. The macros `println` and `eprintln` would end the program in a panic where
//! nobody reads any more.

use std::io::{self, Write};

/// Prints this, and a line's end after it. A reader that has gone, as `head` and `grep -q` go, wanted no more: that is
/// no error, and the exit status says what it would have said. A full disk is one.
pub fn line(text: &str) -> io::Result<()> {
    text_of_lines(&format!("{text}\n"))
}

/// Says this on standard error, with a line's end after it. What nobody can read is not said.
pub fn say(text: &str) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// The same as `line` for text that has its lines' ends.
pub fn text_of_lines(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| io::Error::new(e.kind(), format!("standard output: {e}"))),
    }
}
