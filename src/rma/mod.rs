//! What must be ordered with what: operations, their numbers, whether they may be started, and what NCCL holds while
//! they run. Knows windows and nothing else.

pub mod args;
pub mod atomic;
pub mod check;
pub mod op;
pub mod reach;
pub mod refusal;
pub mod request;
pub mod seq;
