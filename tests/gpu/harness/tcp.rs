//! What the tests of GPU windows over TCP share.

use super::*;

/// A chunk, as the library cuts large puts.
pub const CHUNK: usize = 256 << 10;
/// Bytes of the windows.
pub const BYTES: usize = 3 * CHUNK + 4096;

/// The fake driver, ranks apart, `stripes` connections for bulk served by `threads` threads.
pub fn apart(stripes: u32, threads: u32) -> Fake {
    let fake = Fake::take();
    fake.set_transport("tcp");
    std::env::set_var("OXYGIN_TCP_STRIPES", stripes.to_string());
    std::env::set_var("OXYGIN_TCP_THREADS", threads.to_string());
    fake
}
