//! Windows: memory that every rank of a communicator registered, and what peers may touch of it.

pub mod cache;
pub mod gpu;
pub mod ids;
pub mod registry;
pub mod window;
