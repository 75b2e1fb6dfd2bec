//! The test of `tcp_contexts` with threads for bulk.

#[path = "tcp_contexts.rs"]
mod contexts;
