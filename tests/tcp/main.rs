//! The TCP transport: bytes, order, faults, peers that stop or die.

mod beats;
mod cut;
mod data;
mod death;
mod faults;
mod harness;
mod order;
#[path = "../support/mod.rs"]
mod support;
mod threads;
