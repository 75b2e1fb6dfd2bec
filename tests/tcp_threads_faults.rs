//! The tests of `tcp_faults` with threads for bulk.

#[path = "tcp_faults.rs"]
mod faults;
