//! The rendezvous, and collective calls that some rank refuses.

mod closed;
mod exchange;
mod lost;
mod ranks;
mod refused_steps;
mod tables;
