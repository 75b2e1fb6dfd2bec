//! A send queue that a kernel serves by itself: what the kernel is told, and what is made up for when it has served.

use super::{Record, SendQueue, NEVER};
use crate::config::Ringing;
use crate::fabric::lanes::{Format, LaneView, Rings, DOORBELL_SLOTS};
use crate::gdaki::entry::send::opcode;
use crate::proxy::credits::Owed;

/// A kernel counts entries by the lower half of their index alone, and its launches take far fewer than these.
const BEFORE_A_WRAP: u32 = 1 << 24;

impl SendQueue {
    /// Whether a kernel could serve it. Not if nobody has rung yet, so that maybe nobody will, or if it cannot tell
    /// device code of completions.
    pub(super) fn suits_kernel(&self) -> bool {
        let may_tell = match self.places.bell.handler {
            Ringing::FreeFlow => self.arrival.has_rung() && self.owed.as_ref().is_some_and(Owed::suits_kernel),
            // Each entry has asked for a completion entry so far, which then has the place of its slot.
            _ => self.places.device_completions.is_some() && self.completions.written() == self.credited,
        };
        may_tell && self.can_be_read()
    }

    /// Whether a kernel could see entries come. Not if it rings in a way that kernels do not know, or nobody rings it;
    /// or something is wrong with it, which this side has to say.
    pub(super) fn can_be_read(&self) -> bool {
        let may_be_rung = match self.places.bell.handler {
            Ringing::FreeFlow => !self.arrival.is_silent(),
            Ringing::Doorbell => self.places.size <= DOORBELL_SLOTS,
            Ringing::Proxy => false,
        };
        may_be_rung && !self.is_stopped && self.overrun == NEVER && self.tape.is_none()
    }

    /// As a kernel has to know it that serves or watches it. `None`: it does not suit one, or its index is about to
    /// wrap.
    pub(super) fn lane_view(&mut self, is_watched: bool) -> Option<LaneView> {
        debug_assert_eq!(self.next, self.credited);
        let suits = if is_watched { self.can_be_read() } else { self.suits_kernel() };
        if !suits || u32::MAX - (self.next as u32) < BEFORE_A_WRAP {
            return None;
        }
        // Who watches it tells device code nothing.
        let at = self.places.device_rings;
        let (rings, index) = match self.places.bell.handler {
            Ringing::FreeFlow if is_watched => (Rings::Words(at), 0),
            Ringing::FreeFlow => (Rings::Words(at), self.owed.as_mut()?.for_kernel()?),
            _ => {
                let completions = self.places.device_completions?;
                (Rings::Doorbell { at, completions }, if is_watched { 0 } else { completions })
            }
        };
        Some(LaneView {
            peer: self.windows.peer(),
            slots: self.places.device_slots,
            size: self.places.size,
            format: Format::Entries { number: self.places.number, rings },
            next: self.next,
            index,
            windows: self.windows.views(),
            is_watched,
            ..LaneView::default()
        })
    }

    /// A kernel has carried out all before `next`, and told device code. It has written completion entries itself where
    /// completions are not counted; else they are written for device code that looks at them.
    pub(super) fn note_served(&mut self, next: u32) -> u32 {
        let n = next.wrapping_sub(self.next as u32);
        if self.places.bell.handler == Ringing::FreeFlow {
            for index in self.next..self.next + u64::from(n) {
                // Which of those that a kernel takes it was makes no difference to device code, nor whether it asked
                // for a completion entry: who looks at these asks for each.
                let at = self.at(index);
                self.records[at] = Record { opcode: opcode::WRITE, syndrome: None, is_signalled: true };
                self.complete(false);
            }
        } else {
            self.completions.note_written(n);
            self.credited += u64::from(n);
            self.producer = self.producer.max(self.credited);
        }
        self.next += u64::from(n);
        self.tell_completions();
        self.owed.iter_mut().for_each(|owed| owed.served(n));
        n
    }
}
