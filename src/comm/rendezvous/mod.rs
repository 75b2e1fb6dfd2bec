//! The ranks' own exchange during set-up: a star through rank 0's listener.
//!
//! A collective step is one short connection from each rank to rank 0: it
//! brings what the rank contributes and takes away what all contributed.
//! Nothing stays open but the listener. [`gather`] (rank 0) and [`visit`]
//! (everybody else) hold the logic and do no I/O: they are handed bytes and
//! times and say what to send. `drive.rs` gives them sockets; the tests give
//! them a simulated network. `docs/rendezvous.md` describes the protocol.

mod drive;
mod exchange;
pub mod gather;
pub mod job;
mod listener;
#[cfg(test)]
mod simulated;
pub mod visit;
pub mod wire;

pub use exchange::{Contribution, Exchange, Gathered};
pub use listener::Listener;
