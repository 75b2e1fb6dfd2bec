//! libibverbs: the ABI, its symbols at run time, and thin owners of its objects.

mod objects;
mod symbols;
/// The ABI itself.
#[allow(non_camel_case_types)]
pub mod types;

pub use objects::{Access, Channel, Context, Cq, DeviceRef, Mr, Pd, Qp};
pub use symbols::{Verbs, ENV_PATH, SONAME};
