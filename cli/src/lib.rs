//! The parts of the `oxygin` command: a loader for any NCCL GIN or RMA plugin, ranks to drive it with, and the tools
//! on top of both.

pub mod check;
pub mod device;
mod dice;
pub mod doctor;
pub mod ending;
pub mod env;
pub mod out;
pub mod pages;
pub mod perf;
pub mod plugin;
pub mod ranks;
mod signals;
pub mod stats;
pub mod top;
