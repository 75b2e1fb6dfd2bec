//! The CUDA driver: just what moving bytes needs.
//!
//! Types and constants are those of the driver API (its reference manual and `cuda.h` are the source of the numbers);
//! functions are resolved at run time. Nothing here waits for the GPU but allocating, mapping and unmapping.

mod dmabuf;
mod objects;
mod share;
mod symbols;
mod types;

pub use dmabuf::*;
pub use objects::*;
pub use share::*;
pub use symbols::{Cuda, ENV_PATH, SONAME};
pub use types::*;
