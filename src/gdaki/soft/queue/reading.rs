//! Entries of a send queue become operations, or what is to be said of them.

use super::{Record, SendQueue, NEVER};
use crate::gdaki::entry::send::{Request, View};
use crate::gdaki::entry::ENTRY_BYTES;
use crate::gdaki::soft::arrival::Shown;
use crate::gdaki::soft::keys::SINK;
use crate::gdaki::soft::meaning::Fault;
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Entry, Finish};
use crate::rma::atomic::Width;
use crate::rma::op::{Op, Signal};
use std::sync::atomic::Ordering;

impl SendQueue {
    #[inline(always)]
    fn note(&mut self, index: u64, record: Record) {
        let at = self.at(index);
        self.records[at] = record;
    }

    /// The entry cannot be.
    #[cold]
    fn refuse(&mut self, index: u64, bytes: &[u8; ENTRY_BYTES], fault: Fault) -> Entry {
        let view = View(bytes);
        self.note(index, Record { opcode: view.opcode(), syndrome: Some(fault.syndrome()), is_signalled: true });
        let sentence = format!(
            "device code wrote an entry that cannot be: {} (queue pair {}, entry {index}: opcode {:#04x}, {} segments; \
             syndrome {:#04x}); this queue pair takes nothing from here on",
            fault.sentence(),
            self.places.number,
            view.opcode(),
            view.segments(),
            fault.syndrome() as u8,
        );
        Entry::Refused(sentence.into())
    }

    /// Whether a wait is over.
    pub(super) fn is_over(&mut self, queue: u32, index: u32) -> Result<bool, Fault> {
        let written = self.windows.terms().counts.get(queue).ok_or(Fault::Wait(queue))?;
        let behind = (written.load(Ordering::Acquire) as u32).wrapping_sub(index.wrapping_add(1));
        let is_over = behind as i32 >= 0;
        self.waits_for = (!is_over).then_some((queue, index));
        Ok(is_over)
    }

    /// Whether an entry that has a fence may not start yet.
    #[inline(always)]
    fn has_to_wait(&self, view: &View, index: u64) -> bool {
        // Fetches behind it were read when it had its turn before, and there was no room for it.
        view.is_fenced() && self.fetches <= index && self.fetches > self.credited
    }

    /// An entry that adds to a signal. Device code writes a put with a signal as two entries. One operation carries
    /// both: half as many for the fabric, and none that has to wait for the one before it.
    #[inline(always)]
    fn add_signal(&mut self, signal: Signal, index: u64, ops: &mut Ops) -> Entry {
        let is_behind = self.writer.wrapping_add(1) == index;
        self.writer = NEVER;
        if is_behind && ops.attach(signal) {
            return Entry::Joined;
        }
        ops.push_signal(signal);
        Entry::Op(Finish::NONE)
    }

    /// What device code writes in rows: a put from one range or of a value, and a signal. `None`: it is none of them,
    /// has to wait, or cannot be; [`SendQueue::read_other`] says which.
    #[inline(always)]
    pub(super) fn usual(&mut self, view: &View, index: u64, ops: &mut Ops) -> Option<Entry> {
        if view.queue() != self.places.number || self.has_to_wait(view, index) {
            return None;
        }
        let entry = if let Some((remote, from)) = view.put() {
            ops.push(Op::Put(self.windows.put(&remote, &from).ok()?));
            self.writer = index;
            Entry::Op(Finish::NONE)
        } else if let Some((remote, inline)) = view.value() {
            ops.push(Op::Value(self.windows.value(&remote, &inline).ok()?));
            self.writer = index;
            Entry::Op(Finish::NONE)
        } else {
            let (remote, add, fetched) = view.addition().filter(|(.., fetched)| fetched.key == SINK)?;
            let signal = self.windows.signal(&remote, add, &fetched).ok()?;
            self.add_signal(signal, index, ops)
        };
        self.changes = self.changes.max(index + 1);
        self.note(index, Record { opcode: view.opcode(), syndrome: None, is_signalled: view.is_signalled() });
        Some(entry)
    }

    /// An entry that has been rung and is not [usual](SendQueue::usual), by its bytes and how much of it they show.
    #[inline(never)]
    pub(super) fn read_other(&mut self, bytes: &[u8; ENTRY_BYTES], shown: Shown, index: u64, ops: &mut Ops) -> Entry {
        let view = View(bytes);
        if index >= self.overrun && !self.is_stopped {
            return self.refuse(index, bytes, Fault::Overrun);
        }
        if shown != Shown::All && !self.early.is_overdue(index, shown) {
            return Entry::Absent;
        }
        if self.is_stopped {
            let syndrome = Some(self.flush_syndrome(index));
            self.note(index, Record { opcode: view.opcode(), syndrome, is_signalled: true });
            return Entry::Nothing(Finish::NONE);
        }
        if shown == Shown::No {
            return self.refuse(index, bytes, Fault::Missing(view.index()));
        }
        match self.carry(&view, index, ops) {
            Ok(entry) => entry,
            Err(fault) => self.refuse(index, bytes, fault),
        }
    }

    /// What the entry asks for. Does with what is usual what [`SendQueue::usual`] does: it may have had to wait.
    fn carry(&mut self, view: &View, index: u64, ops: &mut Ops) -> Result<Entry, Fault> {
        let work = view.work().map_err(Fault::Malformed)?;
        if view.queue() != self.places.number {
            return Err(Fault::Queue(view.queue()));
        }
        if self.has_to_wait(view, index) {
            return Ok(Entry::Absent);
        }
        if let Request::Wait { queue, index } = work {
            if !self.is_over(queue, index)? {
                return Ok(Entry::Absent);
            }
        }
        match work {
            // It brings what was sent before it, and a fabric carries out what it has at the same time. What is
            // behind it was read when it had its turn before, and there was no room for it.
            Request::Read(..) if self.changes <= index && self.changes > self.placed => {
                return Ok(if self.changes > self.credited { Entry::Absent } else { Entry::Fenced });
            }
            Request::Write(..) | Request::WriteInline(..) | Request::Add { .. } | Request::Swap { .. } => {
                self.changes = self.changes.max(index + 1);
            }
            Request::Read(..) | Request::Wait { .. } | Request::Dump(_) | Request::Nop => {}
        }
        self.note(index, Record { opcode: view.opcode(), syndrome: None, is_signalled: view.is_signalled() });
        if let Request::Add { remote, width: Width::Eight, add, boundary: 0, fetched } = work {
            if fetched.key == SINK {
                let signal = self.windows.signal(&remote, add, &fetched)?;
                return Ok(self.add_signal(signal, index, ops));
            }
        }
        let entry = self.windows.carry(&work, ops)?;
        self.writer = if let Request::Write(..) | Request::WriteInline(..) = work { index } else { NEVER };
        if let Entry::Gets(_) = entry {
            self.fetches = self.fetches.max(index + 1);
        }
        Ok(entry)
    }
}
