//! What the library tells about itself.

pub mod log;
pub mod panic;
pub mod stats;
pub mod trace;
