//! What must be ordered with what: operations, their numbers, and what NCCL holds while they run.

pub mod args;
pub mod call;
pub mod contexts;
mod explain;
pub mod lanes;
pub mod op;
pub mod seq;
mod sets;
pub mod ticket;
