//! libibverbs: the ABI, its symbols at run time, and thin owners of its objects.

mod objects;
mod regions;
mod symbols;
/// The ABI itself.
#[allow(non_camel_case_types)]
pub mod types;

pub use objects::{Channel, Context, Cq, DeviceRef, Pd, Qp};
pub use regions::{Access, Mr};
pub use symbols::{Verbs, ENV_PATH, SONAME};
