//! Bringing ranks together: rendezvous, exchanges, deadlines.

pub mod handle;
pub mod interfaces;
pub mod rendezvous;
