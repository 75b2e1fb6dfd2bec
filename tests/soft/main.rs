//! Ranks of one host that look after each other through shared memory.

mod atomics;
mod children;
mod life;
mod pid;
mod room;
#[path = "../support/mod.rs"]
mod support;
