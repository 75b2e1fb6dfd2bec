//! The tests of `data`, `faults` and `order` with threads for bulk.

#![allow(clippy::duplicate_mod, reason = "they take their ranks from the harness beside them, which is another here")]

use crate::support;

#[path = "harness.rs"]
mod harness;

#[path = "data.rs"]
mod data;
#[path = "faults.rs"]
mod faults;
#[path = "order.rs"]
mod order;
