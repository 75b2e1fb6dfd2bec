//! What a peer asks for behind what its lane sent before: done in the order of that lane, once all of that is in place.

use super::*;
use crate::fabric::soft::atomic::AtomicRequest;

/// What is done once what its lane sent before is in place.
#[derive(Clone, Copy)]
pub enum Due {
    /// A signal.
    Bell(Bell),
    /// An atomic operation on the word at a place.
    Atomic(WindowBytes, AtomicRequest),
    /// The sender is told, by its number.
    Fence(u32),
}

impl Inbound {
    /// Does what has come for a context, or keeps it until it is due where it has counts. `place` is named if the order
    /// of so many contexts is not kept.
    pub(super) fn take_due(
        &mut self,
        lanes: &mut Lanes,
        held: &Held,
        (context, place): (u32, WindowBytes),
        counts: Option<Counts>,
        due: Due,
    ) {
        let Some(counts) = counts else { return self.carry_out(lanes, context, &due, held) };
        lanes.hand_over();
        let serving = lanes.serving;
        let mut orders = serving.orders.lock();
        if lanes.is_refused(context) {
            return;
        }
        if !orders.contains_key(&context) && orders.len() >= CONTEXTS {
            return self.say_refused(lanes, Refusal::Contexts, context, place);
        }
        let order = orders.entry(context).or_insert_with(|| Order::counted_in(&lanes.serving.held));
        if let Some(due) = order.rings(counts, due) {
            self.carry_out(lanes, context, &due, held);
            lanes.hand_over();
        }
    }

    /// Does what is due.
    pub(super) fn carry_out(&mut self, lanes: &mut Lanes, context: u32, due: &Due, held: &Held) {
        match due {
            Due::Bell(bell) => self.ring(lanes, context, bell, held),
            Due::Atomic(place, request) => self.change(lanes, context, place, request, held),
            Due::Fence(number) => self.confirm(lanes, context, *number),
        }
    }
}
