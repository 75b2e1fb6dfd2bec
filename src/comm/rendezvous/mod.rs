//! The ranks' own exchange during set-up: a star through rank 0's listener.
//!
//! A collective step is one message from each rank to rank 0, with what the
//! rank contributes, and one back, with what all contributed. The steps of a
//! call go over one connection; between calls nothing stays open but the
//! listener. [`gather`] (rank 0) and [`visit`] (everybody else) hold the logic
//! and do no I/O: they are handed bytes and times and say what to send.
//! `drive/` gives them sockets; the tests give them a simulated network.
//! `call.rs` is how the rest of the library takes steps.
//! `docs/rendezvous.md` describes the protocol.

mod beats;
mod call;
mod drive;
mod exchange;
pub mod gather;
mod host;
pub mod job;
mod listener;
mod routes;
#[cfg(test)]
mod simulated;
pub mod visit;
pub mod wire;

pub use call::Call;
pub use exchange::{Contribution, Exchange, Gathered};
pub use listener::Listener;
