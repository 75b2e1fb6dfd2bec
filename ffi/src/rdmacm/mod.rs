//! librdmacm: the ABI, its symbols at run time, and thin owners of its objects. Only iWARP devices need it.

mod objects;
mod symbols;
/// The ABI itself.
#[allow(non_camel_case_types)]
pub mod types;

pub use objects::{Event, EventChannel, Id};
pub use symbols::{RdmaCm, ENV_PATH, SONAME};
