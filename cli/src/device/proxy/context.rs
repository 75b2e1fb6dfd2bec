//! One context as device code sees it.

use super::Format;
use crate::device::Posted;
use crate::plugin::ContextConfig;
use nccl_plugin_api::descriptor::{Descriptor, Form};
use nccl_plugin_api::device_context::{ContextV1, ContextV2};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Whether index `a` is not past `b`, both counted modulo 2^32.
pub(super) fn rolling_less_eq(a: u32, b: u32) -> bool {
    b.wrapping_sub(a) <= u32::MAX >> 1
}

/// The memory of one context. All access is atomic: engine and device code share it.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    number: usize,
    form: Form,
    v1: ContextV1,
    v2: Option<ContextV2>,
    n_signals: u32,
    n_counters: u32,
}

impl Context {
    /// Reads one element of the array and checks it against what was asked for.
    ///
    /// # Safety
    /// `at` is an element of a device handle's array in this format, which lives as long as the result is used.
    pub(super) unsafe fn read(
        at: *const u8,
        number: usize,
        format: &Format,
        nranks: u32,
        config: &ContextConfig,
    ) -> Result<Self, String> {
        // SAFETY: as the caller promises; every layout begins with the first one's fields.
        let v1 = unsafe { at.cast::<ContextV1>().read_unaligned() };
        // SAFETY: as above.
        let v2 = format.has_offsets().then(|| unsafe { at.cast::<ContextV2>().read_unaligned() });
        let wrong = |what: String| {
            let bytes = format.element();
            Err(format!("context {number}, read as elements of {bytes} bytes: {what}"))
        };
        if v1.nranks != nranks as i32 {
            return wrong(format!("nranks is {}, not {nranks}", v1.nranks));
        }
        if !v1.queue_size.is_power_of_two() || (v1.queue_size as i64) < config.queue_depth.into() {
            let asked = config.queue_depth;
            return wrong(format!("queueSize is {}: not a power of two, or less than {asked}", v1.queue_size));
        }
        let placed = |at: u64, align: u64| at != 0 && at % align == 0;
        let (signals, counters) = (config.n_signals > 0, config.n_counters > 0);
        let mut places = vec![("queues", v1.queues, 16), ("pis", v1.pis, 4), ("cis", v1.cis, 4)];
        places.extend(signals.then_some(("signals", v1.signals, 8)));
        places.extend(counters.then_some(("counters", v1.counters, 8)));
        if let Some(v2) = v2 {
            places.extend(signals.then_some(("signalOffsets", v2.signal_offsets, 8)));
            places.extend([("lastIssuedGet", v2.last_issued_get, 4), ("lastVisibleGet", v2.last_visible_get, 4)]);
        }
        if let Some((name, at, align)) = places.into_iter().find(|&(_, at, align)| !placed(at, align)) {
            return wrong(format!("{name} is at {at:#x}: NULL, or not aligned to {align} bytes"));
        }
        let (n_signals, n_counters) = (config.n_signals.max(0) as u32, config.n_counters.max(0) as u32);
        Ok(Self { number, form: format.form(), v1, v2, n_signals, n_counters })
    }

    /// Its number.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Slots of each queue.
    pub fn queue_size(&self) -> u32 {
        self.v1.queue_size
    }

    /// What nobody has posted to yet: indices are equal, and no word of any slot is valid.
    pub fn untouched(&self, peer: u32) -> Result<(), String> {
        let (pi, ci) = (self.pi(peer).load(Ordering::Relaxed), self.ci(peer).load(Ordering::Acquire));
        if pi != ci {
            return Err(format!("{}: producer index {pi} and consumer index {ci} differ", self.of(peer)));
        }
        (0..self.v1.queue_size).try_for_each(|i| self.cleared(peer, i))
    }

    /// "context 1, peer 2", for messages.
    pub fn of(&self, peer: u32) -> String {
        format!("context {}, peer {peer}", self.number)
    }

    fn word32(&self, array: u64, peer: u32) -> &AtomicU32 {
        assert!((peer as i32) < self.v1.nranks, "peer {peer} of {}", self.v1.nranks);
        // SAFETY: an entry of an array as long as the ranks, aligned (checked when it was read), shared by atomics.
        unsafe { AtomicU32::from_ptr((array as *mut u32).add(peer as usize)) }
    }

    fn word64(&self, array: u64, id: u32, count: u32) -> &AtomicU64 {
        assert!(id < count, "number {id} of {count}");
        // SAFETY: an entry of an array of `count`, aligned (checked when it was read), shared by atomics.
        unsafe { AtomicU64::from_ptr((array as *mut u64).add(id as usize)) }
    }

    /// Descriptors begun, by peer.
    pub(super) fn pi(&self, peer: u32) -> &AtomicU32 {
        self.word32(self.v1.pis, peer)
    }

    /// Descriptors complete, by peer.
    pub(super) fn ci(&self, peer: u32) -> &AtomicU32 {
        self.word32(self.v1.cis, peer)
    }

    /// The newest get, by peer, and the newest known to be visible, where device code counts them.
    pub(super) fn gets(&self, peer: u32) -> Option<(&AtomicU32, &AtomicU32)> {
        let v2 = self.v2?;
        Some((self.word32(v2.last_issued_get, peer), self.word32(v2.last_visible_get, peer)))
    }

    /// A signal's word, and the offset to subtract where there is one.
    pub(super) fn signal(&self, id: u32) -> (&AtomicU64, Option<&AtomicU64>) {
        let offset = self.v2.map(|v2| self.word64(v2.signal_offsets, id, self.n_signals));
        (self.word64(self.v1.signals, id, self.n_signals), offset)
    }

    /// A counter's word.
    pub(super) fn counter(&self, id: u32) -> &AtomicU64 {
        self.word64(self.v1.counters, id, self.n_counters)
    }

    /// Slot `index` (modulo the queue's size) of a peer's queue.
    pub(super) fn slot(&self, peer: u32, index: u32) -> *mut u64 {
        let (size, bytes) = (self.v1.queue_size as usize, self.form.bytes());
        let slot = peer as usize * size + (index as usize & (size - 1));
        (self.v1.queues as usize + slot * bytes) as *mut u64
    }

    /// Whether the plugin has taken no more than what was posted: one that does not clear slots takes old entries for
    /// new ones, for ever.
    pub fn within(&self, peer: u32) -> Result<(), String> {
        // In this order: what is posted meanwhile is no fault.
        let taken = self.ci(peer).load(Ordering::Acquire);
        let posted = self.pi(peer).load(Ordering::Acquire);
        if taken.wrapping_sub(posted) as i32 <= 0 {
            return Ok(());
        }
        let of = self.of(peer);
        Err(format!(
            "{of}: the consumer index is {taken} with {posted} entries posted: slots that were taken are still valid"
        ))
    }

    /// Whether the words that say something were taken out of a slot before it was given back. A valid word that stayed
    /// would be read as the next descriptor's.
    pub(super) fn cleared(&self, peer: u32, index: u32) -> Result<(), String> {
        let slot = self.slot(peer, index);
        // SAFETY: inside the queue; the slot is this thread's, and shared by atomics.
        let word = |i: usize| unsafe { AtomicU64::from_ptr(slot.add(i)) }.load(Ordering::Relaxed);
        match (0..nccl_plugin_api::descriptor::WORDS).find(|&i| word(i) & 1 != 0) {
            None => Ok(()),
            Some(i) => Err(format!(
                "{}: slot {} was given back for index {index} with word {i} still valid ({:#x})",
                self.of(peer),
                index & (self.v1.queue_size - 1),
                word(i)
            )),
        }
    }

    /// Whether a descriptor is complete.
    pub fn is_complete(&self, posted: &Posted) -> bool {
        rolling_less_eq(posted.next as u32, self.ci(posted.peer).load(Ordering::Acquire))
    }

    /// Says where the queue of a descriptor stands that is not complete.
    pub fn standing(&self, posted: &Posted) -> String {
        let (pi, ci) = (self.pi(posted.peer), self.ci(posted.peer));
        format!(
            "{}: index {} to be complete; the consumer index is {}, the producer index {}",
            self.of(posted.peer),
            (posted.next as u32).wrapping_sub(1),
            ci.load(Ordering::Relaxed),
            pi.load(Ordering::Relaxed)
        )
    }

    /// An operation of this context's form.
    pub(super) fn descriptor(&self, version: u8, op: u16, size: u64) -> Descriptor {
        Descriptor::new(self.form, version, op, size)
    }
}
