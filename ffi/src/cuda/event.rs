//! Events: how one stream waits for another.

use super::objects::CudaError;
use super::stream::Stream;
use super::types::*;
use super::Cuda;
use std::ptr::null_mut;
use std::sync::Arc;

/// A place in a stream's work, for other streams of its context to wait for. Every method needs that context to be
/// current.
pub struct Event {
    cuda: Arc<Cuda>,
    raw: CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// One in the current context that takes no times.
    pub fn create(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        let mut raw = null_mut();
        // SAFETY: a place for the answer.
        cuda.call(&"cuEventCreate", || unsafe { (cuda.event_create)(&mut raw, CU_EVENT_DISABLE_TIMING) })?;
        Ok(Self { cuda: cuda.clone(), raw })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `create`, ended once; the driver keeps what waits.
        let _ = self.cuda.call(&"cuEventDestroy", || unsafe { (self.cuda.event_destroy)(self.raw) });
    }
}

impl Stream {
    /// What comes on this stream waits for what was started on `other` so far. `event` carries that, and is free for
    /// the next use at once: a stream waits for the record that was the last when it was told to.
    pub fn follow(&self, other: &Self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: streams and event live, in the current context.
        self.cuda.call(&"cuEventRecord", || unsafe { (self.cuda.event_record)(event.raw, other.raw) })?;
        // SAFETY: as above.
        self.cuda.call(&"cuStreamWaitEvent", || unsafe { (self.cuda.stream_wait)(self.raw, event.raw, 0) })
    }
}
