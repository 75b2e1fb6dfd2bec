//! Peers on this host: each rank owns an inbox in shared memory that its peers write messages into; large transfers
//! skip it by cross-memory attach where the kernel allows that.

pub mod alive;
pub mod cma;
pub mod contact;
mod filter;
pub mod inbox;
pub mod message;
pub mod ring;
pub mod shm;
