//! A GIN/RMA plugin whose only virtues are that it is short and plainly right.
//!
//! Ranks of one host, one TCP connection over loopback for every (context, peer) and direction, one thread at each
//! end of it. The sending thread takes operations off an unbounded queue in order; the receiving thread applies them
//! in order. So everything is ordered, nothing is fast, and no rank has to call in to receive.
//!
//! With `REFERENCE_PLUGIN_QUEUE=1` the GIN table gives device code a queue (`queue.rs`).
//!
//! `REFERENCE_PLUGIN_DEFECT` breaks it in one named way (see [`defect`]), so that the tests of `oxygin check` can
//! prove that each case of the suite fails when it should.

mod arguments;
mod comm;
pub mod defect;
mod inbox;
mod objects;
mod operations;
mod outbox;
mod queue;
mod setup;
mod tables;
mod wire;

pub use tables::{ncclGinPlugin_v13, ncclRmaPlugin_v14, ncclRmaPlugin_v16};
