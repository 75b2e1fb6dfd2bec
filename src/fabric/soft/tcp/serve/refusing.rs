//! What this rank refuses a peer. A refusal ends the lane of its context: what else comes of that one is thrown away,
//! so that no signal announces bytes that are not there, and each of its gets is answered by another refusal. Others
//! go on.

use super::*;
use crate::fabric::soft::refused::Refused;

/// Contexts of one peer of which something was refused.
#[derive(Default)]
pub(super) struct Refusals {
    any: AtomicBool,
    contexts: Mutex<Refused>,
    /// Those that the GPU's engine refused, and that the peer is to be told of.
    late: Mutex<Vec<u32>>,
    is_late: AtomicBool,
}

impl Serving {
    /// What came of a context and was on its way to GPU memory found no place.
    pub fn refuse_late(&self, context: u32) {
        self.refusals.late.lock().push(context);
        self.refusals.is_late.store(true, Ordering::Release);
    }
}

impl Lanes<'_> {
    /// Whether what comes of a context is thrown away.
    #[inline]
    pub(super) fn is_refused(&self, context: u32) -> bool {
        let refusals = &self.serving.refusals;
        refusals.any.load(Ordering::Acquire) && refusals.contexts.lock().has(context)
    }

    /// Whether it is the first refusal of this context.
    #[cold]
    fn refuse(&self, context: u32) -> bool {
        let refusals = &self.serving.refusals;
        let is_first = refusals.contexts.lock().add(context);
        refusals.any.store(true, Ordering::Release);
        is_first
    }
}

impl Inbound {
    /// Refuses the put that arrives.
    #[cold]
    pub(super) fn refuse(&mut self, lanes: &Lanes, why: Refusal) {
        let Some(landing) = &mut self.landing else { return };
        landing.refused = true;
        let (context, place) = (landing.context, landing.place);
        self.say_refused(lanes, why, context, place);
    }

    /// The first refusal ends the initiator's lane; more would tell it nothing new, except that each get is answered.
    #[cold]
    pub(super) fn say_refused(&mut self, lanes: &Lanes, why: Refusal, context: u32, place: WindowBytes) {
        if lanes.refuse(context) || why == Refusal::Get {
            let header = Frame::Refused { why, context, place }.emit();
            self.answers.push_back(Answer { header, context, place, sent: 0, bare: true, buffer: None, awaited: None });
        }
    }

    /// Tells what the GPU's engine refused, on the express connection.
    #[inline]
    pub(super) fn refuse_late(&mut self, lanes: &Lanes) {
        let refusals = &lanes.serving.refusals;
        if lanes.stripe != EXPRESS || !refusals.is_late.load(Ordering::Relaxed) {
            return;
        }
        refusals.is_late.store(false, Ordering::Release);
        for context in std::mem::take(&mut *refusals.late.lock()) {
            self.say_refused(lanes, Refusal::Late, context, WindowBytes { rkey: 0, addr: 0, len: 0 });
        }
    }
}

impl Answer {
    /// Says that its window has gone since it was asked for, as far as nothing of it is out.
    #[inline]
    pub(super) fn refuse_if_withdrawn(&mut self, lanes: &Lanes, held: &Held) {
        let WindowBytes { rkey, addr, len } = self.place;
        let may = self.bare || self.sent > 0 || Key(rkey).is_on_gpu();
        if !may && held.resolve(rkey, addr, len.into()).is_none() {
            self.refuse(lanes);
        }
    }

    /// It was to bring bytes, and says now that they are not to be had.
    #[cold]
    pub(super) fn refuse(&mut self, lanes: &Lanes) {
        lanes.refuse(self.context);
        self.header = Frame::Refused { why: Refusal::Get, context: self.context, place: self.place }.emit();
        (self.bare, self.buffer) = (true, None);
    }
}
