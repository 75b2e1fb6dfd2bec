//! Bringing ranks together: rendezvous, exchanges, deadlines.

pub mod backend;
pub mod backpressure;
mod capture;
pub mod coll;
pub mod contexts;
mod credits;
pub mod device;
pub mod device_queues;
pub mod fabrics;
mod gdaki;
pub mod handle;
pub mod hello;
pub mod instance;
pub mod listen;
mod mlx5;
pub mod nccl;
pub mod nic;
mod observe;
mod records;
pub mod rendezvous;
pub mod windows;
