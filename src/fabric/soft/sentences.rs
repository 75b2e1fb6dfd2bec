//! What is said of a peer in more than one place.

use crate::error::Error;

/// A window that an operation names is not there.
#[cold]
pub fn gone(peer: u32) -> String {
    format!("rank {peer} has deregistered the window that an operation names; deregister after the last operation")
}

/// A peer's process has ended.
#[cold]
pub fn dead(rank: u32) -> Error {
    Error::remote(format!(
        "rank {rank} is gone: its process has ended without closing the communicator; its own log has its last words"
    ))
}
