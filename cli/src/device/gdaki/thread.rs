//! What a thread of device code does: `gin_gdaki.h`, function by function.

use super::entry::{self, Raw, NOP};
use super::{Kernel, QueuePair, Status};
use crate::device::{Pen, Place, Posted, Request, Signal, Waiting, CHUNK};
use std::sync::atomic::Ordering;

/// One thread of device code on one context.
pub struct Thread<'a> {
    kernel: &'a Kernel<'a>,
    context: usize,
    pen: Pen,
    waiting: &'a dyn Waiting,
}

impl<'a> Thread<'a> {
    pub(super) fn new(kernel: &'a Kernel<'a>, context: usize, pen: Pen, waiting: &'a dyn Waiting) -> Self {
        Self { kernel, context, pen, waiting }
    }

    pub(in crate::device) fn number(&self) -> usize {
        self.context
    }

    pub(in crate::device) fn nranks(&self) -> u32 {
        self.kernel.nranks()
    }

    pub(in crate::device) fn waiting(&self) -> &'a dyn Waiting {
        self.waiting
    }

    fn queue_pair(&self, peer: u32) -> Result<&'a QueuePair, String> {
        let kernel = self.kernel;
        let none = || format!("context {} has no queue pair towards rank {peer}", self.context);
        kernel.queue_pair(self.context, peer).ok_or_else(none)
    }

    /// Writes entries and rings.
    pub fn post(&mut self, peer: u32, entries: &[Raw]) -> Result<Posted, String> {
        let last = self.queue_pair(peer)?.post(entries, &mut self.pen, self.waiting)?;
        Ok(Posted { context: self.context, peer, next: last + 1 })
    }

    /// The same, and on the companion a counter that goes up when the last is complete. Both are rung for when both are
    /// written.
    pub fn post_counted(&mut self, peer: u32, entries: &[Raw], counter: u32) -> Result<Posted, String> {
        let main = self.queue_pair(peer)?;
        let kernel = self.kernel;
        let companion = kernel.companion(self.context, peer).ok_or("there are no counters")?;
        let last = main.stage(entries, &mut self.pen, self.waiting)?;
        let count = kernel.count(self.context, peer, last, counter.into()).ok_or("there are no counters")?;
        let counted = companion.stage(&count, &mut self.pen, self.waiting)?;
        main.submit(last + 1, self.waiting)?;
        companion.submit(counted + 1, self.waiting)?;
        Ok(Posted { context: self.context, peer, next: last + 1 })
    }

    /// The addition that a signal is.
    fn addition(&self, peer: u32, signal: &Signal) -> Raw {
        let at = match signal.place {
            Place::Indexed(id) => self.kernel.signal_at(self.context, peer, id.into()),
            Place::Va { window, offset } => self.kernel.at(window, peer, offset),
        };
        entry::add(at, signal.add.unwrap_or(1), self.kernel.sink(self.context))
    }

    /// An entry for each piece; nothing is one that does nothing.
    fn pieces(bytes: u64, piece: impl Fn(u64, u32) -> Raw) -> Vec<Raw> {
        let entry = |i: u64| match (bytes - i * CHUNK).min(CHUNK) {
            0 => Raw::new(NOP, 0),
            len => piece(i * CHUNK, len as u32),
        };
        (0..bytes.div_ceil(CHUNK).max(1)).map(entry).collect()
    }

    /// Puts `bytes` bytes from (window, offset) here to (window, offset) there, as many entries as it takes, with the
    /// signal behind them.
    pub fn put(
        &mut self,
        peer: u32,
        from: (u64, u64),
        to: (u64, u64),
        bytes: u64,
        signal: Option<&Signal>,
        counter: Option<u32>,
    ) -> Result<Posted, String> {
        let (to, from) = (self.kernel.at(to.0, peer, to.1), self.kernel.own(from.0, from.1));
        let piece = |at: u64, len: u32| entry::write((to.0, to.1 + at), (from.0, from.1 + at), len);
        let mut entries = Self::pieces(bytes, piece);
        entries.extend(signal.map(|signal| self.addition(peer, signal)));
        match counter {
            Some(counter) => self.post_counted(peer, &entries, counter),
            None => self.post(peer, &entries),
        }
    }

    /// Puts a value of 1 to [`super::MOST_INLINE`] bytes, which the entry carries.
    pub fn put_value(
        &mut self,
        peer: u32,
        value: &[u8],
        to: (u64, u64),
        signal: Option<&Signal>,
    ) -> Result<Posted, String> {
        let mut entries = vec![entry::value(self.kernel.at(to.0, peer, to.1), value)];
        entries.extend(signal.map(|signal| self.addition(peer, signal)));
        self.post(peer, &entries)
    }

    /// A signal alone.
    pub fn signal(&mut self, peer: u32, signal: &Signal) -> Result<Posted, String> {
        let addition = self.addition(peer, signal);
        self.post(peer, &[addition])
    }

    /// Gets `bytes` bytes from (window, offset) there to (window, offset) here.
    pub fn get(&mut self, peer: u32, from: (u64, u64), to: (u64, u64), bytes: u64) -> Result<Option<Posted>, String> {
        let (from, to) = (self.kernel.at(from.0, peer, from.1), self.kernel.own(to.0, to.1));
        let piece = |at: u64, len: u32| entry::read((from.0, from.1 + at), (to.0, to.1 + at), len);
        let posted = self.post(peer, &Self::pieces(bytes, piece))?;
        if let Some((issued, _)) = self.kernel.gets(self.context, peer) {
            issued.fetch_max(posted.next, Ordering::Relaxed);
        }
        Ok(Some(posted))
    }

    fn status(&self, posted: &Posted) -> Result<Option<Status>, String> {
        let (Some(queue), Some(last)) =
            (self.kernel.queue_pair(posted.context, posted.peer), posted.next.checked_sub(1))
        else {
            return Ok(None);
        };
        let of = |e| format!("context {}, peer {}: {e}", posted.context, posted.peer);
        queue.wait(last, self.waiting).map(Some).map_err(of)
    }

    /// Waits until an operation is complete. That it failed is an error here; device code with an abort flag spins on,
    /// and without one goes on.
    pub fn complete(&self, posted: &Posted) -> Result<(), String> {
        match self.status(posted)? {
            Some(Status::Failed { syndrome }) => Err(self.kernel.failed(posted, syndrome)),
            _ => Ok(()),
        }
    }

    /// What a flush of one peer's queue will wait for. From 2.30.4 on, where a get is not known to be visible, it posts
    /// a dump; 2.30.4 does always.
    pub fn flush_async(&mut self, peer: u32) -> Result<Request, String> {
        let none = Posted { context: self.context, peer, next: 0 };
        let Ok(queue) = self.queue_pair(peer) else { return Ok(Request { posted: none, issued: 0 }) };
        let gets = self.kernel.gets(self.context, peer);
        let must = match gets {
            Some((issued, visible)) => issued.load(Ordering::Relaxed) > visible.load(Ordering::Relaxed),
            None => self.kernel.numbers.can_get(),
        };
        if !must || !self.kernel.contexts[self.context].dumps {
            let posted = Posted { next: queue.reserved(), ..none };
            return Ok(Request { posted, issued: 0 });
        }
        let posted = self.post(peer, &[entry::dump(self.kernel.sink(self.context).0)])?;
        if let Some((_, visible)) = gets {
            visible.fetch_max(posted.next, Ordering::Relaxed);
        }
        Ok(Request { posted, issued: 0 })
    }

    /// Waits for a flush: all that was posted before is complete, and what gets brought is visible.
    pub fn wait(&mut self, request: &Request) -> Result<(), String> {
        self.complete(&request.posted)
    }

    /// A signal's value.
    pub fn read_signal(&self, id: u32) -> u64 {
        self.kernel.signal(self.context, id).load(Ordering::Acquire)
    }

    /// Sets a signal back to 0.
    pub fn reset_signal(&self, id: u32) {
        self.kernel.signal(self.context, id).store(0, Ordering::Relaxed);
    }

    /// A counter's value.
    pub fn read_counter(&self, id: u32) -> u64 {
        self.kernel.counter(self.context, id).load(Ordering::Acquire)
    }

    /// Sets a counter back to 0.
    pub fn reset_counter(&self, id: u32) {
        self.kernel.counter(self.context, id).store(0, Ordering::Relaxed);
    }
}
