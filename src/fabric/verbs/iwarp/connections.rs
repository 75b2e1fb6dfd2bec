//! What holds a context's connections, and how they end.

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use oxygin_ffi::rdmacm::types::RDMA_CM_EVENT_DISCONNECTED;
use oxygin_ffi::rdmacm::{EventChannel, Id};
use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the end of a context waits for its peers to take what was sent. A peer that lives answers without its
/// process doing anything.
const FAREWELL: Duration = Duration::from_secs(1);

/// The connections of one context.
pub struct Connections {
    ids: Vec<Id>,
    channel: Arc<EventChannel>,
}

impl Connections {
    pub(super) fn new(ids: Vec<Id>, channel: Arc<EventChannel>) -> Self {
        Self { ids, channel }
    }

    /// Ends the connections in order, before their queue pairs go. A completed write has left this rank's memory, no
    /// more: a connection that is cut loses what is still on the way.
    pub fn close(&self) {
        let mut open: HashSet<usize> = self.ids.iter().filter(|id| id.disconnect().is_ok()).map(Id::key).collect();
        let end = Instant::now() + FAREWELL;
        while !open.is_empty() {
            match self.channel.take() {
                Ok(Some(event)) => {
                    if event.kind == RDMA_CM_EVENT_DISCONNECTED {
                        open.remove(&event.key);
                    }
                }
                Ok(None) if wait(&self.channel, end) => {}
                _ => return,
            }
        }
    }
}

/// Waits for an event; false when the time is over.
pub fn wait(channel: &EventChannel, end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    // SAFETY: the channel outlives the call.
    let fd = unsafe { BorrowedFd::borrow_raw(channel.fd()) };
    let milliseconds = PollTimeout::try_from(left.as_millis().clamp(1, 60_000)).unwrap_or(PollTimeout::MAX);
    // Interrupted or too early: whoever calls looks at the clock again.
    let _ = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], milliseconds);
    true
}
