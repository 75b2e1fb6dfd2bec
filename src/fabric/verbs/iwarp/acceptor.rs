//! Where one context takes connections of its peers.

use super::addresses;
use crate::error::{Error, Result};
use oxygin_ffi::rdmacm::{EventChannel, Id, RdmaCm};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Connect requests that may wait: the kernel's own limit.
const BACKLOG: u32 = 1024;

/// A listener with its event channel.
pub struct Acceptor {
    // Ended before the channel, which it holds too.
    pub(super) listener: Id,
    pub(super) channel: Arc<EventChannel>,
    pub(super) address: IpAddr,
}

impl Acceptor {
    /// Listens at a port of the kernel's choice.
    pub fn open(cm: &Arc<RdmaCm>, address: IpAddr) -> Result<Self> {
        let channel = addresses::open(cm).map_err(Error::system)?;
        let listen = || -> std::io::Result<Id> {
            let id = Id::new(&channel)?;
            id.bind(&SocketAddr::new(address, 0))?;
            id.listen(BACKLOG)?;
            Ok(id)
        };
        let listener = listen().map_err(|e| {
            Error::system(format!(
                "listening for iWARP connections at {address}: {e}; check that the interface still has this address"
            ))
        })?;
        Ok(Self { listener, channel, address })
    }

    /// Where to connect to.
    pub fn port(&self) -> u16 {
        self.listener.port()
    }
}
