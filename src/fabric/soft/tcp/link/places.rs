//! Where a link keeps its lanes. A context gives its place back when it goes, so what is here does not grow with the
//! contexts that there have been; their numbers do, and are never used twice.

use super::*;
use crate::fabric::soft::lane::Lane;
use std::collections::HashMap;

/// Who has which of the link's places.
#[derive(Default)]
pub struct Places {
    of: HashMap<u32, u32>,
    free: Vec<u32>,
}

impl Initiator {
    /// The place of a lane, which has one from its first operation on.
    #[inline]
    pub(super) fn place_of(&mut self, lane: &Arc<Lane>) -> usize {
        let at = lane.place() as usize;
        match self.lanes.get(at) {
            Some(Some(queue)) if Arc::ptr_eq(&queue.lane, lane) => at,
            _ => self.give_place(lane),
        }
    }

    #[cold]
    fn give_place(&mut self, lane: &Arc<Lane>) -> usize {
        let (places, lanes) = (&mut self.places, &mut self.lanes);
        let at = *places.of.entry(lane.context).or_insert_with(|| {
            places.free.pop().unwrap_or_else(|| {
                lanes.push(None);
                lanes.len() as u32 - 1
            })
        });
        let queue = lanes[at as usize].get_or_insert_with(|| Box::new(TaskQueue::new(lane.clone())));
        if queue.is_idle() {
            queue.lane = lane.clone();
        }
        lane.set_place(at);
        at as usize
    }

    /// The lane of a context that has a place.
    pub(super) fn lane_of(&self, context: u32) -> Option<Arc<Lane>> {
        let at = *self.places.of.get(&context)?;
        Some(self.lanes.get(at as usize)?.as_ref()?.lane.clone())
    }

    /// Takes a lane from its place, which nobody else gets before [`Initiator::reuse`].
    pub(super) fn vacate(&mut self, lane: &Arc<Lane>) -> Option<(u32, Box<TaskQueue>)> {
        let place = self.lanes.get_mut(lane.place() as usize)?;
        let queue = place.take_if(|q| Arc::ptr_eq(&q.lane, lane))?;
        self.places.of.remove(&lane.context);
        Some((lane.place(), queue))
    }

    /// Nothing names this place any more.
    pub(super) fn reuse(&mut self, place: u32) {
        self.places.free.push(place);
    }
}
