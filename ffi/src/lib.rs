//! Foreign libraries that oxygin uses when they are there: types, and symbols
//! resolved at run time. Nothing here is linked; a missing library is a
//! [`Missing`] value with a sentence for the log.

pub mod cuda;
mod library;
pub mod mlx5;
pub mod nvml;
pub mod rdmacm;
pub mod verbs;

use library::InUse;
pub use library::{Library, Missing};
