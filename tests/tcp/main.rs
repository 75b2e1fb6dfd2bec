//! The TCP transport: bytes, order, faults, peers that stop or die.

mod beats;
mod data;
mod death;
mod ends;
mod gone;
mod harness;
mod order;
mod refused;
mod strangers;
#[path = "../support/mod.rs"]
mod support;
mod threads;
