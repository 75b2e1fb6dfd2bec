//! What became of the operations of one context: counts that `test` reads without a lock, and the first error of each
//! peer.

use super::lane::Logged;
use super::status::meaning;
use crate::error::{Error, Kind, Result};
use oxygin_ffi::verbs::types::ibv_wc;
use oxygin_ffi::verbs::Verbs;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Outcomes of one context.
pub struct Outcomes {
    /// By peer: the newest operation that is locally complete, and with it all before.
    pub completed: Box<[AtomicU32]>,
    errors: Box<[OnceLock<Error>]>,
    /// Some peer has an error: whoever looks for one looks further.
    any: AtomicBool,
    /// An operation failed, or will.
    failed: AtomicBool,
    verbs: Arc<Verbs>,
    context: u32,
    device: String,
}

impl Outcomes {
    /// Nothing has happened yet. `device` names device and port, for messages.
    pub fn new(nranks: u32, context: u32, device: String, verbs: Arc<Verbs>) -> Self {
        Self {
            completed: (0..nranks).map(|_| AtomicU32::new(0)).collect(),
            errors: (0..nranks).map(|_| OnceLock::new()).collect(),
            any: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            verbs,
            context,
            device,
        }
    }

    /// Every operation to `peer` up to `number` is locally complete.
    pub fn complete(&self, peer: u32, number: u32) {
        if let Some(count) = self.completed.get(peer as usize) {
            count.store(number, Ordering::Release);
        }
    }

    /// The newest operation to `peer` that is complete.
    pub fn completed(&self, peer: u32) -> u32 {
        self.completed.get(peer as usize).map_or(0, |count| count.load(Ordering::Acquire))
    }

    /// The error that ended the lane to `peer`, if one did.
    #[inline]
    pub fn check(&self, peer: u32) -> Result<()> {
        if self.any.load(Ordering::Acquire) {
            if let Some(error) = self.errors.get(peer as usize).and_then(OnceLock::get) {
                self.failed.store(true, Ordering::Release);
                return Err(error.clone().logged());
            }
        }
        Ok(())
    }

    /// What `test` says of an unfinished operation after something failed.
    #[cold]
    #[inline(never)]
    pub fn verdict(&self, peer: u32) -> Result<bool> {
        self.check(peer).map(|()| false)
    }

    /// Whether some peer's operations may fail: [`Outcomes::check`] says whose.
    pub fn is_suspect(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Whether anything failed.
    pub fn has_error(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Notes the first error of a peer; returns it if this is the first.
    fn note(&self, peer: u32, error: Error) -> Option<&Error> {
        let slot = self.errors.get(peer as usize)?;
        let is_first = slot.set(error).is_ok();
        self.any.store(true, Ordering::Release);
        slot.get().filter(|_| is_first)
    }

    /// The connection to a peer ended in order, with nothing unfinished: an error only to those who go on using it.
    #[cold]
    pub fn close(&self, peer: u32) {
        let error = Error::remote(format!(
            "context {}, rank {peer}, {}: the peer has closed the connection; it destroyed its context, or ended",
            self.context, self.device
        ));
        if let Some(error) = self.note(peer, error) {
            log::debug!("{}", error.message());
        }
    }

    /// There is no connection to a peer, which nobody was to talk to: an error only to those who do.
    pub fn leave_out(&self, peer: u32, stride: u32) {
        let error = Error::usage(format!(
            "context {}, rank {peer}, {}: these contexts were made with rankStride = {stride}: only ranks that differ \
             from this one by a multiple of it are connected; ask for a rankStride that reaches it",
            self.context, self.device
        ));
        self.note(peer, error);
    }

    /// Notes and logs the first error of a peer, which is one of this communicator.
    #[cold]
    pub fn fail(&self, peer: u32, kind: Kind, sentence: String) {
        let sentence = format!("context {}, rank {peer}, {}: {sentence}", self.context, self.device);
        if let Some(error) = self.note(peer, Error::remote(sentence).of_kind(kind)) {
            log::warn!("{}", error.message());
        }
        self.failed.store(true, Ordering::Release);
    }

    /// An error completion of the queue pair towards `peer`, in words.
    #[cold]
    pub fn explain(&self, peer: u32, wc: &ibv_wc, logged: Option<Logged>) -> String {
        let (meaning, remedy) = meaning(wc.status);
        let logged = logged.map_or_else(|| "no operation of this rank".to_owned(), |l| l.to_string());
        format!(
            "queue pair {} towards rank {peer} failed on {logged}: {} (status {}, vendor error {:#x}): {meaning}; \
             {remedy}",
            wc.qp_num,
            self.verbs.status_text(wc.status),
            wc.status,
            wc.vendor_err,
        )
    }
}
