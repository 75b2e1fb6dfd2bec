//! The test of `contexts` with threads for bulk.

#[path = "contexts.rs"]
mod contexts;
