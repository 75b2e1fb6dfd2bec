//! What must be ordered with what: operations, their numbers, and what NCCL holds while they run.

pub mod call;
pub mod contexts;
pub mod lanes;
pub mod op;
pub mod seq;
pub mod ticket;
