//! libmlx5: what device code of GDAKI needs of an mlx5 device beyond libibverbs. DevX objects, doorbell pages, memory
//! for queues, events. Its ABI, its symbols at run time, and thin owners of its objects.

mod objects;
mod symbols;
/// The ABI itself.
#[allow(non_camel_case_types)]
pub mod types;

pub use objects::{no_page_sizes, CommandError, DevxDevice, EventChannel, Object, Uar, UarKind, Umem};
pub use symbols::{Mlx5, ENV_PATH, SONAME};
