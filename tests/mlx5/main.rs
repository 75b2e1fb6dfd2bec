//! `OXYGIN_ENGINE=gdaki`: queue pairs of an mlx5 device, which a library that stands for libmlx5 executes. Device code
//! is played by CPU threads, which find their way from what the GIN tables return.

#[path = "../support/mod.rs"]
mod support;

mod commands;
mod connections;
mod data;
mod errors;
mod faults;
mod gpu;
mod gpudirect;
mod harness;
mod path;
mod trial;
