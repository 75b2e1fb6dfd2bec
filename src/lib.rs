//! oxygin: NCCL's GPU-Initiated Networking on every cluster.

pub mod comm;
pub mod config;
pub mod error;
pub mod fabric;
pub mod memory;
pub mod rma;
pub mod telemetry;
