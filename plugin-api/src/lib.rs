//! The C ABI of NCCL's GIN and RMA plugin tables.
//!
//! One file a table version, and the structures that device code shares with whoever serves it: descriptors and
//! contexts of the proxy backend, and [`gdaki`]. Nothing here has behaviour. A plugin fills one of
//! the tables and exports it under the symbol that the file names; NCCL (or a
//! tool that stands in for it) finds the symbol with `dlsym` and calls through
//! the function pointers.
//!
//! Every function pointer is an `Option`, because a table that somebody else
//! filled may hold NULL where NCCL permits it (`ginProgress`, `iflush`).
//! Layouts are those of the C headers on 64-bit Linux; `tests/layout.rs`
//! and `tests/gdaki.rs` compare each size and offset with what a C compiler computes.

#![no_std]

pub mod common;
pub mod descriptor;
pub mod device_context;
pub mod gdaki;
pub mod gin_v11;
pub mod gin_v12;
pub mod gin_v13;
pub mod gin_v14;
pub mod rma_v13;
pub mod rma_v14;
pub mod rma_v15;
pub mod rma_v16;

pub use common::*;
