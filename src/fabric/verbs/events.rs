//! Asynchronous events of a device: what goes wrong without a completion. A device that failed or was taken away, and a
//! completion queue that overran, have polls find nothing for ever.

use crate::sys::sync::Mutex;
use oxygin_ffi::verbs::types::{IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_QP_FATAL};
use oxygin_ffi::verbs::Context as Device;
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

/// The events of an open device, for all contexts on it: whoever looks takes them for the others too.
pub struct Events {
    device: Arc<Device>,
    is_watched: bool,
    /// Oldest first. Each context remembers how many it has seen.
    all: Mutex<Vec<Trouble>>,
}

impl Events {
    /// Those of a device from here on.
    pub fn new(device: &Arc<Device>) -> Self {
        let is_watched = device.watch();
        if !is_watched {
            log::debug!("asynchronous events of the device are not watched");
        }
        Self { device: device.clone(), is_watched, all: Mutex::default() }
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
                // Ports that come and go, and what completions tell as well.
                other => {
                    log::debug!("asynchronous event {other} of the device");
                    continue;
                }
            };
            self.all.lock().push(trouble);
        }
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
