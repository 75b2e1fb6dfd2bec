//! Small puts and signals on their way to the engine: those that arrive together are handed over together, in their
//! order. Each hand-over by itself takes the engine's locks, which the threads that poll it want meanwhile.

use super::*;
use crate::fabric::soft::gpu::GpuMessage;

/// How many are handed over at once: some microseconds of work, for which threads of other connections wait.
const TOGETHER: usize = 32;

/// Messages of one connection that the engine does not have yet.
#[derive(Default)]
pub(super) struct GatheredMessages(Vec<GpuMessage>);

impl Lanes<'_> {
    /// One more for the engine.
    pub(super) fn gather(&mut self, message: GpuMessage) {
        let apart = match self.gathered.0.last_mut() {
            Some(last) => last.join(message),
            None => Some(message),
        };
        self.gathered.0.extend(apart);
        if self.gathered.0.len() >= TOGETHER {
            self.hand_over();
        }
    }

    /// Has the engine take what was gathered. Before anything that has to follow it and goes another way: what other
    /// connections' threads carry out, and what is done at once.
    pub(super) fn hand_over(&mut self) {
        self.gpu.take(&mut self.gathered.0);
    }

    /// Gathers a signal if it is in GPU memory, or must follow what is on its way there.
    pub(super) fn gather_signal(&mut self, context: u32, bell: &Bell, held: &Held) -> bool {
        let on_gpu = Key(bell.rkey).is_on_gpu();
        let is_there = match on_gpu {
            false => held.resolve(bell.rkey, bell.addr, 8).is_some(),
            true => self.gpu.holds(bell.rkey, bell.addr, 8),
        };
        let source = Source::far(self.sender, context);
        let is_due = on_gpu || !self.gathered.0.is_empty() || self.gpu.has_before(source);
        if !(is_there && bell.addr % 8 == 0 && is_due) {
            return false;
        }
        self.gather(GpuMessage::Signal { source, key: bell.rkey, addr: bell.addr, value: bell.value });
        true
    }
}

impl Drop for Lanes<'_> {
    fn drop(&mut self) {
        self.hand_over();
    }
}
