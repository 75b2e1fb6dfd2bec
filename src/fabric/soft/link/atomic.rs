//! Atomic operations towards a peer on this host: a message asks for one, and the answer is that of a get. What follows
//! on the lane waits for it.

use super::service::Response;
use super::Link;
use crate::fabric::soft::atomic::AtomicRequest;
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::shm::message::GetRequest;
use crate::rma::atomic::Atomic;
use crate::rma::op::Get;

/// The get of what the word holds that its answer looks like; of no bytes, if they are not wanted.
pub(super) fn as_get(atomic: &Atomic) -> Get {
    let (local, lkey, len) = atomic.fetched.map_or((0, 0, 0), |f| (f.local, f.lkey, atomic.width.bytes()));
    Get { local, lkey, rkey: atomic.rkey, remote: atomic.remote, len, more: false }
}

impl Link {
    /// An operation that the peer asked for in its `context` has been carried out on a word that held `value`.
    pub fn answer_atomic(&self, shared: &Domain, context: u32, request: &AtomicRequest, value: u64) {
        let len = if request.fetches { request.width.bytes() } else { 0 };
        let request = GetRequest { len, context, seq: request.seq };
        self.queue_response(shared, Response::Fetched { request, value });
    }
}
