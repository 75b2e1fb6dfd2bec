//! Kernels of ours that stay on the GPU while there is work for them, and how they are launched.
//!
//! A launch may wait for its turn for as long as the application likes, and so may the driver's call that makes it: the
//! thread for the application's context makes it, and whoever wants it looks whether it has come up. There are two
//! *launch slots*, each a piece of pinned memory: one for a launch that runs or is late, and one for the
//! next.

mod backoff;
mod launcher;
mod launches;
mod streams;

pub use backoff::LAUNCH_SLOTS;
pub use launcher::{Code, Launch, SlotMemory};
pub use launches::{Launches, Slot, LOOK_EVERY, RELAY};
