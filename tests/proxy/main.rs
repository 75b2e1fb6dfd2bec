//! The engine that drains queues of device code, through the GIN tables, with CPU threads that play device code.

#[path = "../verbs/harness/mod.rs"]
mod harness;
#[path = "../support/mod.rs"]
mod support;

mod aborted;
mod both_tables;
mod data;
mod deregistered;
mod faults;
mod shapes;
mod telemetry;
mod unfinished;
