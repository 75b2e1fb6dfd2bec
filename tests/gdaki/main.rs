//! What GDAKI's device code is given, read as it reads it; and the software NIC, with CPU threads that play device
//! code.

#[path = "../support/mod.rs"]
mod support;

mod capture;
mod data;
mod devx_commands;
mod devx_decoder;
mod devx_entries;
mod devx_harness;
mod devx_memory;
mod devx_pair;
mod effects;
mod faults;
mod given;
mod harness;
mod model;
mod prm;
mod prm_provider;
mod recording;
mod refused;
mod replay;
mod stats;
mod tables;
mod unrung;
mod view;
