//! The CUDA driver: just what moving bytes needs.
//!
//! Types and constants are those of the driver API (its reference manual and `cuda.h` are the source of the numbers);
//! functions are resolved at run time. Nothing here waits for the GPU but making contexts and pinned memory, and
//! loading kernels; but any call in a context of the application can wait for calls of the application
//! (docs/gpu/private-context.md has the table).

mod calls;
mod dmabuf;
mod event;
mod group;
mod io;
mod kernel;
mod managed;
mod objects;
mod own;
mod pinned;
mod share;
mod stream;
mod symbols;
mod types;

pub use calls::{under_way, Call};
pub use dmabuf::*;
pub use event::Event;
pub use io::*;
pub use kernel::{CUfunction, CUmodule, Kernel};
pub use managed::{Managed, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS};
pub use objects::*;
pub use own::Words;
pub use pinned::Pinned;
pub use share::*;
pub use stream::*;
pub use symbols::{Cuda, ENV_PATH, SONAME};
pub use types::*;
