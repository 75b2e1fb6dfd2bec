//! A put that has arrived: counted, and its signal applied when all that it follows is in place.

use super::*;
use crate::fabric::soft::gpu::GpuMessage;

impl Inbound {
    /// The current put is complete: it is in place, or goes on to GPU memory.
    pub(super) fn landed(&mut self, lanes: &mut Lanes, held: &Held) {
        let Some(Landing { context, place, bell, mut refused, way, .. }) = self.landing.take() else { return };
        let way = if refused { staged::PutWay::Direct } else { way };
        if let staged::PutWay::Engine(bytes) = way {
            let source = Source::far(lanes.sender, context);
            lanes.gather(GpuMessage::Put { source, bytes, key: place.rkey, addr: place.addr, signal: None });
        } else if lanes.stripe != EXPRESS && (way.is_pinned() || !self.storing.is_empty()) {
            match self.store(lanes, way, &place) {
                Some(buffer) => {
                    let put = staged::Storing { buffer, context, place, bell, refused };
                    return self.storing.push_back(staged::Came::Put(put));
                }
                None => {
                    self.say_refused(lanes, Refusal::Put, context, place);
                    refused = true;
                }
            }
        }
        self.arrived(lanes, held, staged::Storing { buffer: None, context, place, bell, refused });
    }

    /// A put is in place: counts it, and rings what is due.
    pub(super) fn arrived(&mut self, lanes: &mut Lanes, held: &Held, put: staged::Storing) {
        let staged::Storing { context, place, bell, refused, .. } = put;
        // A signal must not announce bytes that are not there.
        let bell = bell.filter(|_| !refused && !lanes.is_refused(context));
        if lanes.stripe == EXPRESS && !bell.is_some_and(|(b, _)| b.counted) {
            if let Some((bell, _)) = bell {
                self.ring(lanes, context, &bell, held);
            }
            return;
        }
        // Other connections' threads may carry out what comes to stand there.
        lanes.hand_over();
        let serving = lanes.serving;
        let mut orders = serving.orders.lock();
        if lanes.is_refused(context) {
            // Connections that have ended say so once: that is kept until all have.
            if orders.get_mut(&context).is_some_and(Order::forgets) {
                orders.remove(&context);
            }
            lanes.relieve();
            return;
        }
        if !orders.contains_key(&context) && orders.len() >= CONTEXTS {
            self.say_refused(lanes, Refusal::Contexts, context, place);
            return;
        }
        let order = orders.entry(context).or_insert_with(|| Order::counted_in(&lanes.serving.held));
        // A refused chunk never counts as arrived: signals behind it must not ring.
        if lanes.stripe != EXPRESS && !refused {
            order.arrived(lanes.stripe);
        }
        while let Some(due) = order.release() {
            self.carry_out(lanes, context, &due, held);
        }
        lanes.relieve();
        match bell {
            Some((bell, counts)) if bell.counted => {
                if let Some(due) = order.rings(counts, Due::Bell(bell)) {
                    self.carry_out(lanes, context, &due, held);
                }
            }
            Some((bell, _)) => self.ring(lanes, context, &bell, held),
            None => {}
        }
        lanes.hand_over();
    }

    pub(super) fn ring(&mut self, lanes: &mut Lanes, context: u32, bell: &Bell, held: &Held) {
        if lanes.is_refused(context) || lanes.gather_signal(context, bell, held) {
            return;
        }
        if !held.add(bell.rkey, bell.addr, bell.value) {
            self.say_refused(lanes, Refusal::Signal, context, WindowBytes { rkey: bell.rkey, addr: bell.addr, len: 8 });
        }
    }
}
