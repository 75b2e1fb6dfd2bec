//! What the rest stands on and that knows nothing of NCCL: handles, locks, threads, sockets, bytes, interfaces, its own
//! version.

pub mod fork;
pub mod handles;
pub mod interfaces;
pub mod memfd;
pub mod net;
pub mod secret;
pub mod spin;
pub mod sync;
pub mod thread;
pub mod version;
pub mod wire;
pub mod yielder;
