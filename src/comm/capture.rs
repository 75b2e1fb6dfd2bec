//! Recordings of what device code writes for the software NIC: `OXYGIN_GDAKI_CAPTURE`.

use super::coll::Coll;
use super::contexts::Contexts;
use super::fabrics::on_queues;
use super::nic::NicSpec;
use crate::fabric::Context;
use crate::gdaki::soft::capture::{Capture, CapturedQueue, CapturedSet};
use crate::gdaki::soft::QueueView;
use std::sync::Arc;

impl Coll {
    /// What keeps the entries of a set's queues, if any are to be kept. `keys` are those of signals and counters.
    pub(super) fn capture(
        &self,
        set: &Contexts,
        spec: &NicSpec,
        keys: [u32; 2],
        is_on_gpu: bool,
    ) -> Option<Arc<Capture>> {
        fn name<C: Context>(_: &[C]) -> &'static str {
            C::NAME
        }
        let prefix = self.instance.config.gdaki_capture.as_ref()?;
        let of = CapturedSet {
            nccl: self.instance.nccl,
            layout: spec.layout,
            fabric: on_queues!(set.queues(), q => name(q)),
            is_on_gpu,
            rank: self.world.rank,
            nranks: self.world.nranks,
            comm: self.id,
            set: set.set,
            contexts: spec.contexts.contexts,
            stride: spec.contexts.rank_stride.max(1),
            signals: (keys[0], spec.signals),
            counters: (keys[1], spec.counters),
        };
        Some(Capture::new(prefix, of))
    }
}

/// What a recording says of a queue of the (context, peer).
pub(super) fn captured(view: &QueueView, context: usize, peer: u32, is_companion: bool) -> CapturedQueue {
    CapturedQueue {
        context: context as u32,
        peer,
        is_companion,
        number: view.number,
        slots: view.size,
        handler: view.handler,
        is_counted: view.is_counted,
    }
}
