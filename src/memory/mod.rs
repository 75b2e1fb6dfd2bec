//! Windows: memory that every rank of a communicator registered, and what peers may touch of it.

pub mod gpu;
pub mod ids;
pub mod key;
pub mod registry;
pub mod table;
pub mod window;
pub mod window_pool;
