//! What `listen` makes: a socket on which the other ranks find this one, and the device that it wants to use.

use super::instance::Instance;
use super::rendezvous::Listener;
use crate::sys::handles::{Kind, Object};
use std::sync::Arc;

/// One `listen`. `connect` takes everything it needs from here: some NCCL versions pass it a foreign ctx.
pub struct Listen {
    /// The instance that listened.
    pub instance: Arc<Instance>,
    /// Device number, as `devices` counts.
    pub device: usize,
    /// The listening socket; shared with the communicator, so that closeListen may come at once.
    pub listener: Arc<Listener>,
}

impl Object for Listen {
    const KIND: Kind = Kind::Listen;
}
