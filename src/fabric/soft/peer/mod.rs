//! How a peer is reached, and whether it lives: who is asked for shared memory and how often, what was answered, and
//! what a look at a peer's mark of life means. What is done with it is for others.

pub mod contact;
mod filter;
pub mod finding;
mod folder;
pub mod life;
pub mod neighbours;
mod probe;
