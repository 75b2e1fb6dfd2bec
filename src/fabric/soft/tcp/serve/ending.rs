//! A context of the peer goes: what is kept for it here goes, too, once nothing more of it can come.

use super::*;

impl Inbound {
    /// No more of a context comes on this connection; what came may still be on its way to GPU memory.
    pub(super) fn end(&mut self, lanes: &Lanes, context: u32, conns: u32) {
        if self.storing.is_empty() {
            return lanes.ended(context, conns);
        }
        self.storing.push_back(staged::Came::End { context, conns });
    }
}

impl Lanes<'_> {
    /// All that came of a context on this connection is in place, and no more will come.
    pub(super) fn ended(&self, context: u32, conns: u32) {
        let mut orders = self.serving.orders.lock();
        // Others may still bring something: it is noted here, as far as there is room.
        if orders.len() >= CONTEXTS && !orders.contains_key(&context) {
            return;
        }
        let order = orders.entry(context).or_insert_with(|| Order::counted_in(&self.serving.held));
        if order.ends(self.stripe, conns) {
            orders.remove(&context);
        }
        self.relieve();
    }
}
