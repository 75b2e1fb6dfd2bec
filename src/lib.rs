//! oxygin: NCCL's GPU-Initiated Networking on every cluster, with or without RDMA.
//!
//! The shared library exports the tables of [`vtable`]; NCCL loads it by `NCCL_GIN_PLUGIN` and `NCCL_RMA_PLUGIN`.
//! `docs/architecture.md` is the map.

pub mod comm;
pub mod config;
pub mod error;
pub mod fabric;
pub mod gdaki;
pub mod memory;
pub mod proxy;
pub mod rma;
pub mod sys;
pub mod telemetry;
pub mod vtable;
