//! Bringing ranks together: rendezvous, exchanges, deadlines.

pub mod coll;
pub mod handle;
pub mod hello;
pub mod instance;
pub mod interfaces;
pub mod listen;
pub mod rendezvous;
