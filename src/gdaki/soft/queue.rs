//! A queue pair's send queue, as the engine drains it, and the completion queue that it fills.

mod reading;
mod served;

use super::arrival::{why_absent, Arrival, Shown};
use super::capture::{CapturedEnd, Tape};
use super::doorbell::{DoorbellWords, Heard, Look};
use super::early::Early;
use super::meaning::{Terms, Windows};
use super::slots::{shown, EntrySlots};
use crate::config::Ringing;
use crate::fabric::lanes::LaneView;
use crate::gdaki::entry::completion::{Completion, Ring as Completions};
use crate::gdaki::entry::send::View;
use crate::gdaki::entry::Syndrome;
use crate::proxy::credits::{CreditWord, Owed};
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Ends, Entry, Finish, Ring, Stopped};
use std::cmp::Ordering::{Equal, Greater, Less};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Slots at most: indices in doorbells have 16 bits, of which one tells before from behind.
pub const SLOTS_MAX: u32 = 1 << 15;
/// So many entries behind the one that is read are brought nearer meanwhile.
const AHEAD: u64 = 8;
/// No entry.
const NEVER: u64 = u64::MAX;

/// Where a queue pair and what belongs to it lie, as this process sees it.
#[derive(Clone, Copy)]
pub struct QueuePairAddresses {
    /// Slot 0.
    pub slots: NonNull<AtomicU64>,
    /// Its address for device code.
    pub device_slots: u64,
    /// For device code the address of the first word that it rings.
    pub device_rings: u64,
    /// For device code the address of completion entry 0, where a kernel may write entries there: where the queue rings
    /// by a doorbell, and device code is on a GPU.
    pub device_completions: Option<u64>,
    /// All that device code writes, or reads in GPU memory while a kernel serves the queue, is in memory that may be
    /// brought to the GPU.
    pub is_managed: bool,
    /// Slots, a power of two up to [`SLOTS_MAX`]; as many entries has the completion queue.
    pub size: u32,
    /// Completion entry 0.
    pub completions: NonNull<u8>,
    /// Where completions are counted for device code, if they are; the completion queue is written all the same.
    pub credits: Option<CreditWord>,
    /// How device code rings.
    pub bell: DoorbellWords,
    /// The queue pair's number, which is its completion queue's, too.
    pub number: u32,
}

/// What is to be said of an entry that was read.
#[derive(Clone, Copy)]
struct Record {
    opcode: u8,
    syndrome: Option<Syndrome>,
    is_signalled: bool,
}

/// The send queue. Its memory is the owner's affair: see [`SendQueue::new`].
pub struct SendQueue {
    places: QueuePairAddresses,
    slots: EntrySlots,
    size: u64,
    windows: Windows,
    completions: Completions,
    /// By slot.
    records: Box<[Record]>,
    /// Entries taken off.
    next: u64,
    /// Entries given back.
    credited: u64,
    /// Entries rung; for free flow kept only where nobody rings.
    producer: u64,
    /// What the doorbell said last.
    heard: Heard,
    /// For free flow: whether device code knows it.
    arrival: Arrival,
    /// An entry that came before there was room for it.
    overrun: u64,
    /// One behind the newest entry that fetches something, and that changes something at the peer.
    fetches: u64,
    changes: u64,
    /// One behind the newest entry that the peer is known to have carried out.
    placed: u64,
    /// The entry that wrote the batch's last operation, if that may carry the signal of the entry behind it.
    writer: u64,
    early: Early,
    /// What a wait at the head of the queue waits for.
    waits_for: Option<(u32, u32)>,
    /// Completions that device code has not been told of, where they are counted for it.
    owed: Option<Owed>,
    is_stopped: bool,
    /// The first entry that the fabric failed.
    lost: u64,
    /// Where the entries are kept, if they are.
    tape: Option<Tape>,
}

// SAFETY: the places are shared with device code through atomics; one thread at a time uses the queue.
unsafe impl Send for SendQueue {}

impl SendQueue {
    /// Sets slots and completion entries as device code expects them.
    ///
    /// # Safety
    /// The places are valid as long as the queue lives, aligned to 8 bytes, and device code has not begun; its words to
    /// ring are 0. The peer is one of the ranks that `terms` says.
    pub unsafe fn new(places: QueuePairAddresses, terms: Arc<Terms>, peer: u32) -> Self {
        debug_assert!(places.size.is_power_of_two() && places.size <= SLOTS_MAX);
        let size = u64::from(places.size);
        let unread = Record { opcode: 0, syndrome: None, is_signalled: true };
        Self {
            places,
            // SAFETY: valid (caller).
            slots: unsafe { EntrySlots::new(places.slots, places.size) },
            size,
            windows: Windows::new(terms, peer),
            // SAFETY: valid (caller).
            completions: unsafe { Completions::new(places.completions, places.size) },
            records: vec![unread; places.size as usize].into(),
            next: 0,
            credited: 0,
            producer: 0,
            heard: Heard::default(),
            arrival: Arrival::new(),
            overrun: NEVER,
            fetches: 0,
            changes: 0,
            placed: 0,
            writer: NEVER,
            early: Early::default(),
            waits_for: None,
            // An operation with its signal is two entries: half of what is best for descriptors.
            owed: places.credits.map(|at| Owed::new(at, places.size / 8)),
            is_stopped: false,
            lost: NEVER,
            tape: None,
        }
    }

    /// Has `tape` keep what is taken from here on: before anything was.
    pub fn taped(mut self, tape: Option<Tape>) -> Self {
        self.tape = tape;
        self
    }

    /// The next `n` entries are taken: their slots are read once more.
    #[cold]
    fn tell_taken(&self, n: u32) {
        let Some(tape) = &self.tape else { return };
        tape.set_silent(self.arrival.is_silent());
        for nth in 0..u64::from(n) {
            tape.take(self.slots.read(self.next + nth), nth == 0, |key| self.windows.lengths(key));
        }
    }

    /// The oldest `n` entries are complete.
    #[cold]
    fn tell_completed(&self, n: u32) {
        let Some(tape) = &self.tape else { return };
        for index in self.credited..self.credited + u64::from(n) {
            let record = self.records[self.at(index)];
            let end = match record.syndrome {
                Some(syndrome) => CapturedEnd::Failed(syndrome),
                None if record.is_signalled => CapturedEnd::Good,
                None => CapturedEnd::Quiet,
            };
            tape.complete(index, end);
        }
    }

    #[inline(always)]
    fn at(&self, index: u64) -> usize {
        (index & (self.size - 1)) as usize
    }

    /// Looks at the doorbell.
    #[inline(always)]
    fn listen(&mut self) {
        if self.places.bell.handler == Ringing::FreeFlow {
            if self.arrival.is_silent() {
                self.listen_to_slots();
            }
            return;
        }
        // SAFETY: valid as long as the queue (promised to `new`).
        let n = unsafe { self.places.bell.rung(self.producer, self.places.number, &mut self.heard) }.min(1 << 32);
        let outstanding = self.producer - self.credited;
        if outstanding + n > self.size {
            self.overrun = self.overrun.min(self.credited + self.size);
        }
        // One more than there is room for is enough to be refused.
        self.producer += n.min(self.size + 1 - outstanding);
    }

    /// Counts entries whose slots alone say that they are there.
    #[cold]
    fn listen_to_slots(&mut self) {
        let newest = self.next.wrapping_sub(1);
        // SAFETY: valid as long as the queue (promised to `new`).
        if self.next > 0 && unsafe { self.places.bell.compare(newest, self.size) }.is_ge() {
            self.arrival.rings();
            return;
        }
        let end = self.credited + self.size;
        self.producer = self.arrival.settled(self.producer.max(self.next), |index| match index < end {
            true => self.slots.shown(index),
            false => Shown::No,
        });
    }

    /// The entry has begun to arrive, and no word says that it has been rung.
    #[cold]
    fn look_for_silence(&mut self, index: u64) {
        if self.slots.shown(index) != Shown::No && self.arrival.is_unrung(index) {
            log::warn!(
                "context {}, to rank {}: kernels write entries and do not ring as NCCL 2.31.2 and newer do: they were \
                 compiled with an older NCCL. Entries are found by their arrival, which is slow; compile the kernels \
                 with this NCCL's headers, or set OXYGIN_GDAKI_RINGING=doorbell",
                self.windows.terms().context,
                self.windows.peer(),
            );
        }
    }

    /// Whether the entry has been rung and its slot is not another's.
    #[inline(always)]
    fn is_rung(&mut self, index: u64) -> bool {
        let is_rung = match self.places.bell.handler {
            Ringing::FreeFlow => {
                // SAFETY: valid as long as the queue (promised to `new`).
                match unsafe { self.places.bell.compare(index, self.size) } {
                    Less if self.arrival.is_silent() => return index < self.producer,
                    Less => {
                        if index == self.next && self.arrival.is_open() {
                            self.look_for_silence(index);
                        }
                        return false;
                    }
                    Equal => {}
                    // It was overwritten before it was read.
                    Greater => self.overrun = self.overrun.min(index),
                }
                self.arrival.rings();
                true
            }
            Ringing::Doorbell | Ringing::Proxy => index < self.producer,
        };
        if is_rung && index - self.credited >= self.size {
            // Where the fabric counts completions they show here in a moment.
            if !self.is_counted_ahead() {
                self.overrun = self.overrun.min(index);
            }
            return false;
        }
        is_rung
    }

    /// Entries behind those that were taken whose words say that they are there, up to the first one that is not; where
    /// nobody has rung yet, those that have begun to arrive.
    fn rung_by_words(&self) -> u32 {
        let is_there = |&index: &u64| {
            // SAFETY: valid as long as the queue (promised to `new`).
            let has_word = unsafe { self.places.bell.compare(index, self.size) }.is_ge();
            // Where nobody has rung yet maybe nobody will.
            has_word || !self.arrival.has_rung() && self.slots.has_begun(index)
        };
        (self.next..self.next + self.size).take_while(is_there).count() as u32
    }

    /// What an entry gets that is not carried out.
    fn flush_syndrome(&self, index: u64) -> Syndrome {
        if index == self.lost {
            Syndrome::RetriesExceeded
        } else {
            Syndrome::Flushed
        }
    }

    /// Has those who wait for completions of this queue see them.
    #[inline(always)]
    fn tell_completions(&self) {
        if let Some(count) = self.windows.terms().counts.get(self.places.number) {
            // Where completions are counted device code has entries without one, and its waits name entries.
            let over = if self.owed.is_some() { self.credited } else { self.completions.written() };
            count.store(over, Ordering::Release);
        }
    }

    /// Whether device code may be told of completions before this side is, and writes slots again.
    #[inline(always)]
    fn is_counted_ahead(&self) -> bool {
        self.owed.as_ref().is_some_and(Owed::may_be_ahead) && !self.arrival.is_silent()
    }

    /// Says of the oldest entry that was taken what became of it. `is_held`: device code writes its slot again after
    /// that alone.
    #[inline(always)]
    fn complete(&mut self, is_held: bool) {
        let (index, record) = (self.credited, self.records[self.at(self.credited)]);
        if is_held && self.slots.has_begun(index) {
            self.overrun = self.overrun.min(index + self.size);
        }
        self.credited += 1;
        if record.is_signalled || record.syndrome.is_some() {
            self.completions.write(&Completion {
                index: index as u16,
                opcode: record.opcode,
                queue: self.places.number,
                syndrome: record.syndrome,
            });
        }
    }
}

impl Drop for SendQueue {
    fn drop(&mut self) {
        if self.early.entries() > 0 {
            log::info!(
                "context {}, to rank {}: of {} entries {} were rung for before all of them had arrived, and waited for",
                self.windows.terms().context,
                self.windows.peer(),
                self.next,
                self.early.entries(),
            );
        }
    }
}

impl Ring for SendQueue {
    type Head = Look;

    const ENDS: Ends = Ends::Ring;
    const JOINS: bool = true;

    #[inline(always)]
    fn head(&self) -> Look {
        // Where nobody rings, the next entry shows in its slot. Should the newest one be rung yet, device code knows
        // free flow, and waits to be told of completions as such.
        let rung = if self.arrival.is_silent() { self.next.saturating_sub(1) } else { self.next };
        self.places.bell.look(rung, self.size, self.slots.first_word(self.next))
    }

    fn capacity(&self) -> u32 {
        self.places.size
    }

    #[inline(always)]
    fn begin(&mut self) {
        self.writer = NEVER;
        self.windows.begin();
        self.listen();
    }

    #[inline(always)]
    fn read(&mut self, nth: u32, ops: &mut Ops) -> Entry {
        let index = self.next + u64::from(nth);
        if !self.is_rung(index) {
            return Entry::Absent;
        }
        // Not for a lone one, as with descriptors.
        if nth > 0 {
            self.slots.prefetch(index + AHEAD);
        }
        let bytes = self.slots.read(index);
        let shown = shown(&bytes, index);
        if shown == Shown::All && index < self.overrun && !self.is_stopped {
            if let Some(entry) = self.usual(&View(&bytes), index, ops) {
                return entry;
            }
        }
        self.read_other(&bytes, shown, index, ops)
    }

    fn rung(&mut self) -> u32 {
        self.listen();
        match self.places.bell.handler {
            Ringing::FreeFlow => self.rung_by_words(),
            Ringing::Doorbell | Ringing::Proxy => self.producer.saturating_sub(self.next) as u32,
        }
    }

    fn rung_at_most(&mut self) -> u32 {
        if self.places.bell.handler == Ringing::FreeFlow {
            return self.rung_by_words();
        }
        // Nothing is remembered of this look: device code may have been told of more completions than this side knows
        // of, and be ahead of `next` by more than the queue holds.
        // SAFETY: valid as long as the queue (promised to `new`).
        let n = unsafe { self.places.bell.rung(self.next, self.places.number, &mut { self.heard }) };
        n.min(self.size) as u32
    }

    #[inline(always)]
    fn take(&mut self, n: u32) {
        if self.tape.is_some() {
            self.tell_taken(n);
        }
        (self.next..self.next + u64::from(n)).for_each(|index| self.slots.clear(index));
        self.next += u64::from(n);
    }

    fn finish(&mut self, _: Finish) {}

    #[inline(always)]
    fn credit(&mut self, n: u32) {
        if self.tape.is_some() {
            self.tell_completed(n);
        }
        let is_held = !self.is_stopped && !self.is_counted_ahead();
        (0..n).for_each(|_| self.complete(is_held));
        self.tell_completions();
        if let Some(owed) = &mut self.owed {
            owed.add(n);
        }
    }

    fn outstanding(&self) -> u32 {
        (self.next - self.credited) as u32
    }

    #[inline(always)]
    fn owed(&mut self) -> Option<&mut Owed> {
        // Device code that does not ring knows no counted completions: it counts entries of the completion queue there.
        self.owed.as_mut().filter(|_| !self.arrival.is_silent())
    }

    fn stop(&mut self, why: Stopped) {
        if why == Stopped::Lost {
            if !self.is_stopped {
                self.lost = self.credited;
            }
            for index in self.credited..self.next {
                let (at, syndrome) = (self.at(index), self.flush_syndrome(index));
                self.records[at].syndrome.get_or_insert(syndrome);
            }
        }
        self.is_stopped = true;
    }

    fn can_be_served(&self) -> bool {
        self.suits_kernel()
    }

    fn can_be_watched(&self) -> bool {
        self.places.is_managed && self.can_be_read()
    }

    fn view(&mut self, is_watched: bool) -> Option<LaneView> {
        self.lane_view(is_watched)
    }

    fn served(&mut self, next: u32) -> u32 {
        self.note_served(next)
    }

    fn is_full_of_unrung(&self) -> bool {
        self.places.bell.handler != Ringing::FreeFlow && self.credited == self.producer && self.slots.is_full(self.next)
    }

    fn fenced(&mut self) {
        self.placed = self.credited;
    }

    fn why_absent(&self) -> String {
        if let Some((queue, index)) = self.waits_for {
            return format!("it waits for completion entry {index} of completion queue {queue}");
        }
        // SAFETY: valid as long as the queue (promised to `new`).
        let has_word = || unsafe { self.places.bell.compare(self.next, self.size) }.is_ge();
        let is_rung = self.places.bell.handler != Ringing::FreeFlow || has_word();
        why_absent(is_rung, self.slots.shown(self.next)).into()
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
