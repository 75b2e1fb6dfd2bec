//! The tests of `data`, `order`, `strangers`, `refused`, `ends` and `gone` with threads for bulk.

#![allow(clippy::duplicate_mod, reason = "they take their ranks from the harness beside them, which is another here")]

use crate::support;

#[path = "harness.rs"]
mod harness;

#[path = "data.rs"]
mod data;
#[path = "ends.rs"]
mod ends;
#[path = "gone.rs"]
mod gone;
#[path = "order.rs"]
mod order;
#[path = "refused.rs"]
mod refused;
#[path = "strangers.rs"]
mod strangers;
