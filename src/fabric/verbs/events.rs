//! Asynchronous events of a device: what goes wrong without a completion. A device that failed or was taken away, and a
//! completion queue that overran, have polls find nothing for ever.

use super::gid::GidEntry;
use crate::sys::sync::Mutex;
use oxygin_ffi::verbs::types::*;
use oxygin_ffi::verbs::Context as Device;
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What an event says, with the address of the object that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The device failed, or was taken away.
    Device,
    /// A completion queue failed.
    Queue(usize),
    /// A queue pair failed.
    Pair(usize),
}

/// The port that connections go out from.
pub struct WatchedPort {
    /// Device and port, for messages.
    pub label: String,
    /// From 1.
    pub port: u8,
    /// Its GID; not on iWARP, where that is another thing.
    pub gid: Option<GidEntry>,
}

/// The events of an open device, for all contexts on it: whoever looks takes them for the others too.
pub struct Events {
    device: Arc<Device>,
    port: WatchedPort,
    is_watched: bool,
    /// Oldest first. Each context remembers how many it has seen.
    all: Mutex<Vec<Trouble>>,
}

impl Events {
    /// Those of a device from here on.
    pub fn new(device: &Arc<Device>, port: WatchedPort) -> Self {
        let is_watched = device.watch();
        if !is_watched {
            log::debug!("{}: asynchronous events of the device are not watched", port.label);
        }
        Self { device: device.clone(), port, is_watched, all: Mutex::default() }
    }

    /// Takes those that wait.
    pub fn take(&self) {
        if !self.is_watched {
            return;
        }
        while let Some(event) = self.device.take_async_event() {
            let trouble = match event.event_type {
                IBV_EVENT_DEVICE_FATAL => Trouble::Device,
                IBV_EVENT_CQ_ERR => Trouble::Queue(event.element as usize),
                IBV_EVENT_QP_FATAL => Trouble::Pair(event.element as usize),
                // No lane ends: a port may come back in time, and completions tell of the rest.
                _ => {
                    self.tell(&event);
                    continue;
                }
            };
            self.all.lock().push(trouble);
        }
    }

    /// Says what an event means that ends nothing by itself.
    fn tell(&self, event: &ibv_async_event) {
        let WatchedPort { label, port, gid } = &self.port;
        let is_here = event.element as u32 == u32::from(*port);
        match event.event_type {
            IBV_EVENT_PORT_ERR if is_here => log::warn!(
                "{label}: the port went down; operations fail when NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT have passed; \
                 check cable and switch"
            ),
            IBV_EVENT_PORT_ACTIVE if is_here => log::warn!("{label}: the port is up again"),
            IBV_EVENT_LID_CHANGE if is_here => log::warn!(
                "{label}: the port has another LID: what peers send to the old one is lost; start the job anew, and \
                 look at the subnet manager"
            ),
            IBV_EVENT_GID_CHANGE if is_here => {
                if let Some(gone) = gid.filter(|entry| !self.has(entry)) {
                    log::warn!(
                        "{label}: GID {} ({:?}) is no longer the port's: what peers send to it is lost; give the \
                         network interface its address again",
                        gone.index,
                        Ipv6Addr::from(gone.gid.raw)
                    );
                }
            }
            IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => log::warn!(
                "{label}: a queue pair refused what its peer sent ({}); the error in the peer's log tells which \
                 operation",
                if event.event_type == IBV_EVENT_QP_REQ_ERR { "a malformed request" } else { "its address or key" }
            ),
            other => log::debug!("{label}: asynchronous event {other} of the device"),
        }
    }

    /// Whether the port's table still has the entry.
    fn has(&self, entry: &GidEntry) -> bool {
        self.device.query_gid(self.port.port, entry.index.into()).is_ok_and(|(gid, _)| gid == entry.gid)
    }

    /// How many there have been.
    pub fn count(&self) -> usize {
        self.all.lock().len()
    }

    /// Number `n` of them.
    pub fn get(&self, n: usize) -> Option<Trouble> {
        self.all.lock().get(n).copied()
    }

    /// Readable when one waits; `None`: they are not watched.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor is the open device's, which `self` holds.
        self.is_watched.then(|| unsafe { BorrowedFd::borrow_raw(self.device.async_fd()) })
    }
}
