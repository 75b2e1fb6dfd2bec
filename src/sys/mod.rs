//! What the rest stands on and that knows nothing of NCCL: handles, locks, threads, sockets, bytes, pages, interfaces,
//! its own version.

pub mod datagram;
pub mod fork;
pub mod handles;
pub mod interfaces;
pub mod keyed;
pub mod memfd;
pub mod net;
pub mod pages;
pub mod prefetch;
pub mod secret;
pub mod spin;
pub mod sync;
pub mod thread;
pub mod version;
pub mod wait;
pub mod wire;
pub mod yielder;
