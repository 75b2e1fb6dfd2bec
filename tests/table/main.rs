//! Whatever fabric the environment names, through the tables, and what the shipped file shows.

mod contract;
mod data;
mod exports;
#[path = "../support/mod.rs"]
mod support;
