//! What a thread of device code does: `gin_proxy.h`, function by function.

use super::context::{rolling_less_eq, Context};
use super::Kernel;
use crate::device::{Pen, Place, Posted, Request, Signal, Waiting, CHUNK};
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::Ordering;

impl Signal {
    fn op(&self) -> u16 {
        if self.add.is_some() {
            OP_SIGNAL_ADD
        } else {
            OP_SIGNAL_INC
        }
    }

    /// What stands in the value's place: of an increment something that would show if it were added.
    fn value(&self) -> u64 {
        self.add.unwrap_or(0x7777_0000_7777)
    }
}

/// One thread of device code on one context.
pub struct Thread<'a> {
    kernel: &'a Kernel,
    context: &'a Context,
    pen: Pen,
    waiting: &'a dyn Waiting,
}

impl<'a> Thread<'a> {
    pub(super) fn new(kernel: &'a Kernel, context: &'a Context, pen: Pen, waiting: &'a dyn Waiting) -> Self {
        Self { kernel, context, pen, waiting }
    }

    pub(in crate::device) fn number(&self) -> usize {
        self.context.number()
    }

    pub(in crate::device) fn nranks(&self) -> u32 {
        self.kernel.nranks()
    }

    pub(in crate::device) fn waiting(&self) -> &'a dyn Waiting {
        self.waiting
    }

    fn until(&self, what: impl Fn() -> String, mut ready: impl FnMut() -> bool) -> Result<(), String> {
        if ready() {
            return Ok(());
        }
        self.waiting.until(&what, &mut ready)
    }

    /// An empty descriptor of the format that device code of this table uses.
    pub fn descriptor(&self, op: u16, size: u64) -> Descriptor {
        self.context.descriptor(self.kernel.format().version(), op, size)
    }

    /// Claims a slot, waits for credit, writes the descriptor. The error of a slot that was given back uncleared comes
    /// from here, too.
    pub fn post(&mut self, peer: u32, descriptor: &Descriptor) -> Result<Posted, String> {
        let context = self.context;
        let (size, ci) = (context.queue_size(), context.ci(peer));
        let index = context.pi(peer).fetch_add(1, Ordering::Relaxed);
        self.until(
            || {
                let ci = ci.load(Ordering::Relaxed);
                format!("credit for index {index} of {}: consumer index {ci}, {size} slots", context.of(peer))
            },
            || size > index.wrapping_sub(ci.load(Ordering::Acquire)) || context.within(peer).is_err(),
        )?;
        context.within(peer)?;
        context.cleared(peer, index)?;
        // SAFETY: the slot is inside the queue, and ours: there is credit for it and nobody else has its index.
        unsafe { self.pen.write(context.slot(peer, index), descriptor) };
        let posted = Posted { context: context.number(), peer, next: index.wrapping_add(1).into() };
        if descriptor.op() & OP_GET != 0 {
            self.issued(&posted);
        }
        Ok(posted)
    }

    /// Raises the index of the newest get.
    fn issued(&self, posted: &Posted) {
        let Some((issued, _)) = self.context.gets(posted.peer) else { return };
        let (mut current, next) = (issued.load(Ordering::Relaxed), posted.next as u32);
        while !rolling_less_eq(next, current) {
            match issued.compare_exchange_weak(current, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => current = now,
            }
        }
    }

    /// With an indexed signal in it, or with nothing: signals by address have descriptors of their own.
    fn signalled(&self, op: u16, size: u64, signal: Option<&Signal>) -> Descriptor {
        match signal {
            Some(signal @ &Signal { place: Place::Indexed(id), strong, .. }) => {
                self.descriptor(op | signal.op(), size).with_signal(id, signal.value(), strong)
            }
            _ => self.descriptor(op, size),
        }
    }

    /// The signal by address that follows a put, if there is one.
    fn follow(&mut self, peer: u32, signal: Option<&Signal>) -> Result<Option<Posted>, String> {
        let Some(signal @ &Signal { place: Place::Va { window, offset }, strong, .. }) = signal else {
            return Ok(None);
        };
        let descriptor = self.descriptor(OP_VA_SIGNAL | signal.op(), 0);
        let descriptor = descriptor.first(offset, window).with_signal(0, signal.value(), strong);
        self.post(peer, &descriptor).map(Some)
    }

    /// Puts `bytes` bytes from (window, offset) here to (window, offset) there. Windows are handles for device code.
    /// The last of its descriptors is returned.
    pub fn put(
        &mut self,
        peer: u32,
        from: (u64, u64),
        to: (u64, u64),
        bytes: u64,
        signal: Option<&Signal>,
        counter: Option<u32>,
    ) -> Result<Posted, String> {
        let (mut left, mut done) = (bytes, 0);
        let place = |d: Descriptor, done: u64| d.first(from.1 + done, from.0).second(to.1 + done, to.0);
        while left > CHUNK {
            let piece = place(self.descriptor(OP_PUT, CHUNK), done);
            self.post(peer, &piece)?;
            (left, done) = (left - CHUNK, done + CHUNK);
        }
        let op = OP_PUT | if counter.is_some() { OP_COUNTER } else { 0 };
        let last = place(self.signalled(op, left, signal), done).with_counter(counter.unwrap_or(0));
        let posted = self.post(peer, &last)?;
        Ok(self.follow(peer, signal)?.unwrap_or(posted))
    }

    /// Puts a value of 1 to 8 bytes.
    pub fn put_value(
        &mut self,
        peer: u32,
        value: &[u8],
        to: (u64, u64),
        signal: Option<&Signal>,
    ) -> Result<Posted, String> {
        let mut word = [0; 8];
        word[..value.len()].copy_from_slice(value);
        let descriptor = self.signalled(OP_PUT | OP_INLINE, value.len() as u64, signal);
        let descriptor = descriptor.value(u64::from_le_bytes(word)).second(to.1, to.0);
        let posted = self.post(peer, &descriptor)?;
        Ok(self.follow(peer, signal)?.unwrap_or(posted))
    }

    /// A signal alone.
    pub fn signal(&mut self, peer: u32, signal: &Signal) -> Result<Posted, String> {
        match self.follow(peer, Some(signal))? {
            Some(posted) => Ok(posted),
            None => {
                let descriptor = self.signalled(OP_PUT, 0, Some(signal)).first(0, 0).second(0, 0);
                self.post(peer, &descriptor)
            }
        }
    }

    /// Gets `bytes` bytes from (window, offset) there to (window, offset) here. With 0 bytes device code posts nothing.
    pub fn get(&mut self, peer: u32, from: (u64, u64), to: (u64, u64), bytes: u64) -> Result<Option<Posted>, String> {
        let (mut left, mut done, mut last) = (bytes, 0, None);
        while left > 0 {
            let size = left.min(CHUNK);
            let piece = self.descriptor(OP_GET, size).first(from.1 + done, from.0).second(to.1 + done, to.0);
            last = Some(self.post(peer, &piece)?);
            (left, done) = (left - size, done + size);
        }
        Ok(last)
    }

    /// Waits until a descriptor is complete: its source may be reused.
    pub fn complete(&self, posted: &Posted) -> Result<(), String> {
        self.until(|| self.context.standing(posted), || self.context.is_complete(posted))
    }

    /// What a flush of one peer's queue will wait for.
    pub fn flush_async(&self, peer: u32) -> Result<Request, String> {
        // Before the producer index: another thread may be posting gets.
        let issued = self.context.gets(peer).map_or(0, |(issued, _)| issued.load(Ordering::Acquire));
        let next = self.context.pi(peer).load(Ordering::Relaxed).into();
        Ok(Request { posted: Posted { context: self.context.number(), peer, next }, issued })
    }

    /// Waits for a flush: all that was posted before is complete, and what gets brought is visible.
    pub fn wait(&mut self, request: &Request) -> Result<(), String> {
        self.complete(&request.posted)?;
        if !self.kernel.format().has_gets() {
            return Ok(());
        }
        let visible = self.context.gets(request.posted.peer).map(|(_, visible)| visible);
        if visible.is_some_and(|v| rolling_less_eq(request.issued, v.load(Ordering::Relaxed))) {
            return Ok(());
        }
        let flush = self.descriptor(OP_FLUSH, 0);
        let posted = self.post(self.kernel.rank(), &flush)?;
        self.complete(&posted)?;
        if let Some(visible) = visible {
            // May move backwards beside other flushes, which then flush once more.
            visible.store(request.issued, Ordering::Relaxed);
        }
        Ok(())
    }

    /// A signal's value.
    pub fn read_signal(&self, id: u32) -> u64 {
        let (word, offset) = self.context.signal(id);
        let offset = offset.map_or(0, |o| o.load(Ordering::Relaxed));
        word.load(Ordering::Acquire).wrapping_sub(offset)
    }

    /// Sets a signal back to 0 for this device code.
    pub fn reset_signal(&self, id: u32) {
        match self.context.signal(id) {
            (word, Some(offset)) => offset.store(word.load(Ordering::Relaxed), Ordering::Relaxed),
            (word, None) => word.store(0, Ordering::Relaxed),
        }
    }

    /// A counter's value.
    pub fn read_counter(&self, id: u32) -> u64 {
        self.context.counter(id).load(Ordering::Acquire)
    }

    /// Sets a counter back to 0.
    pub fn reset_counter(&self, id: u32) {
        self.context.counter(id).store(0, Ordering::Relaxed);
    }
}
