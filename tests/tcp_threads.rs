//! The tests of `tcp_data` and `tcp_order` with threads for bulk.

#![allow(clippy::duplicate_mod, reason = "each brings its own copy of the helpers")]

#[path = "tcp_data.rs"]
mod data;
#[path = "tcp_order.rs"]
mod order;
