//! What the watchdog looks at, a few times a second: lanes that stand, and faults that nothing under way would show.

use super::{Drain, Place};
use crate::fabric::Context;
use crate::proxy::ring::Ring;
use std::time::{Duration, Instant};

/// Cold lanes that each look of the watchdog asks whether device code stands there: 4096 in 4 s, at 0.1 µs each.
const WATCHED_COLD: usize = 256;
/// Lanes that each look of the watchdog asks the fabric about, at least those of a context: some 10 µs.
const FAULTS_LOOKED_AT: usize = 2048;

impl<C: Context, R: Ring> Drain<C, R> {
    /// All of it, a few times a second.
    pub(super) fn look_after(&mut self, now: Instant, limit: Duration) {
        if self.has_failed {
            // The log has it, and nothing is waited for.
            return;
        }
        self.look_for_faults();
        self.watch_service(now, limit).inspect(|sentence| log::warn!("{sentence}"));
        self.find_full();
        for &index in self.hot.iter().chain(&self.full) {
            let place = &mut self.places[index as usize];
            let common = &self.commons[place.context as usize];
            let context = &self.contexts.get()[common.number as usize];
            if let Some(sentence) = place.lane.watch(common, context, now, limit) {
                log::warn!("{sentence}");
            }
        }
        if let Some(meter) = &self.meter {
            let told = |&hot: &u32| {
                let place = &self.places[hot as usize];
                (hot, place.lane.told(&self.commons[place.context as usize]))
            };
            meter.look(self.hot.iter().map(told));
        }
    }

    /// Keeps `full`: nothing else shows such a lane.
    fn find_full(&mut self) {
        let is_full = |place: &Place<R>| !place.is_hot && place.lane.is_full_of_unrung();
        self.full.retain(|&index| is_full(&self.places[index as usize]));
        for _ in 0..WATCHED_COLD.min(self.places.len()) {
            let index = self.next_watched;
            self.next_watched = (index + 1) % self.places.len();
            if is_full(&self.places[index]) && !self.full.contains(&(index as u32)) {
                self.full.push(index as u32);
            }
        }
    }

    /// Tells whoever asks for errors of what the fabric failed while nothing was under way here: a peer that is gone,
    /// or one that refused what had been complete. Some lanes a look, as there may be tens of thousands.
    fn look_for_faults(&mut self) {
        let Some(common) = self.commons.first().filter(|common| !common.has_failed()) else { return };
        let contexts = self.contexts.get();
        let most = (FAULTS_LOOKED_AT / self.places.len().div_ceil(self.commons.len()).max(1)).max(1);
        let looked_at = self.commons.iter().cycle().skip(self.next_asked).take(most.min(self.commons.len()));
        if looked_at.map(|c| &contexts[c.number as usize]).any(C::has_error) {
            common.fail();
        }
        self.next_asked = (self.next_asked + most) % self.commons.len();
    }
}
