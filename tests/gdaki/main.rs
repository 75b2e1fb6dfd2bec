//! What GDAKI's device code is given, read as it reads it; and the software NIC, with CPU threads that play device
//! code.

#[path = "../support/mod.rs"]
mod support;

mod data;
mod faults;
mod given;
mod harness;
mod model;
mod refused;
mod tables;
mod view;
