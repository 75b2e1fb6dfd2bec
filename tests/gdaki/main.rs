//! The software NIC, with CPU threads that play device code of NCCL's GDAKI backend.

#[path = "../support/mod.rs"]
mod support;

mod data;
mod faults;
mod harness;
mod model;
