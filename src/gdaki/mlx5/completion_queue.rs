//! Completion queues.

use super::command::completion_queue::{arming, number, Answer, NewCompletionQueue, ARMED_BY_NOBODY, FIRST_SEQUENCE};
use super::doorbell::DoorbellPage;
use super::memory::QueueUmem;
use super::nic::Mlx5Nic;
use crate::error::{Error, Result};
use oxygin_ffi::mlx5::Object;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;

/// A completion queue of sends: a ring of 64-byte entries in memory of device code, which tells of its first error.
pub struct Mlx5CompletionQueue {
    /// Ended before what it uses.
    pub(super) object: Object,
    number: u32,
    /// Its entries, bytes from the beginning of `ring`.
    ring_at: u64,
    ring: Arc<QueueUmem>,
    /// Its doorbell record, in host memory: bytes from the beginning of `records`.
    record_at: u64,
    records: Arc<QueueUmem>,
    page: Arc<DoorbellPage>,
}

/// Where a queue's parts lie, in bytes from the beginning of their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePlace {
    /// Its entries, in device code's memory.
    pub ring: u64,
    /// Its doorbell record: of a completion queue in host memory, of a send queue in device code's.
    pub record: u64,
    /// Entries, as a power of two.
    pub log_entries: u32,
}

impl Mlx5CompletionQueue {
    /// Makes one in such memory. `stays` is set if the device refuses to end it later.
    pub fn new(
        nic: &Mlx5Nic,
        place: &QueuePlace,
        (ring, records): (&Arc<QueueUmem>, &Arc<QueueUmem>),
        page: &Arc<DoorbellPage>,
        stays: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let command = NewCompletionQueue {
            log_entries: place.log_entries,
            ring: ring.place(place.ring),
            record: records.place(place.record),
            uar: page.number(),
            event_queue: nic.event_queue,
        }
        .create();
        // Zeros would arm it for whatever completes, from its beginning on.
        write_arming(records, place.record, ARMED_BY_NOBODY);
        let mut answer = Answer::default();
        let object = Object::create(&nic.port.devx, command.bytes(), answer.bytes_mut(), stays).map_err(|e| {
            let remedy = match nic.capabilities.cq_overrun {
                true => "ask for fewer contexts",
                false => "the device does not say that completion queues may be overrun (cq_oi); use a newer firmware",
            };
            Error::system(format!(
                "a completion queue of {} entries (CREATE_CQ): {e}; {remedy}",
                1_u64 << place.log_entries
            ))
        })?;
        let (ring_at, ring, number) = (place.ring, ring.clone(), number(&answer));
        let (record_at, records, page) = (place.record, records.clone(), page.clone());
        let object = object.using((ring.clone(), records.clone(), page.clone()));
        Ok(Self { object, number, ring_at, ring, record_at, records, page })
    }

    /// Has it tell of its next completion that is an error. Once, before anything completes.
    pub fn arm(&self) {
        let word = arming(FIRST_SEQUENCE, 0);
        write_arming(&self.records, self.record_at, word);
        self.page.ring_completions(u64::from(word) << 32 | u64::from(self.number));
    }

    /// By which queue pairs, and entries that wait, name it.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its entries, for device code.
    pub fn for_kernels(&self) -> u64 {
        self.ring.for_kernels(self.ring_at)
    }
}

/// Writes the second word of the doorbell record that begins `record_at` bytes behind the beginning of `records`, which
/// is one of a completion queue.
fn write_arming(records: &QueueUmem, record_at: u64, word: u32) {
    let at = (records.for_kernels(record_at) + 4) as *mut u32;
    // SAFETY: aligned, and in host memory that `records` holds; the device alone reads it.
    let place = unsafe { AtomicU32::from_ptr(at) };
    place.store(word.to_be(), Ordering::Release);
}
