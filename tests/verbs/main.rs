//! The verbs fabric, on the fake libibverbs, which one test at a time has.

mod additions;
mod atomics;
mod confirmed;
mod data;
mod events;
mod faults;
mod flushes;
mod gdaki;
mod gpu;
mod gpu_table;
mod harness;
mod iwarp;
mod own;
mod ports;
mod room;
mod stride;
#[path = "../support/mod.rs"]
mod support;
mod words;
