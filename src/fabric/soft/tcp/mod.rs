//! Peers on other hosts. Until the transport is merged, operations to them fail with a sentence.

use super::lane::{Health, Task};
use crate::error::{Error, Result};
use crate::fabric::World;
use crate::memory::registry::Registry;
use nix::sys::eventfd::EventFd;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

/// No transport yet.
pub struct Tcp(EventFd);

/// How to reach a peer.
pub struct PeerInfo {
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
    /// Its secret.
    pub token: [u8; 16],
    /// Whether it can be reached.
    pub health: Arc<Health>,
}

impl Tcp {
    /// Opens nothing.
    pub fn open(_bind: &[SocketAddr], _token: [u8; 16], _stripes: u32, _registry: Arc<Registry>) -> Result<Self> {
        EventFd::new().map(Self).map_err(|e| Error::system(format!("eventfd failed: {e}")))
    }

    /// No addresses.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// Learns the peers.
    pub fn join(&self, _world: World, _peers: Vec<PeerInfo>) -> Result<()> {
        Ok(())
    }

    /// Fails the operation.
    pub fn post(&self, task: Task) {
        let peer = task.lane.peer;
        task.lane.health.fail(Error::remote(format!("rank {peer} is on another host, and TCP is not built in yet")));
    }

    /// Nothing moves.
    pub fn progress(&self) -> bool {
        false
    }

    /// Never readable.
    pub fn as_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }

    /// Nothing to end.
    pub fn close(&self) {}
}
