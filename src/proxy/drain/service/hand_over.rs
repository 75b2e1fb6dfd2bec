//! Which lanes a kernel is called for, how they come to rest, and how it gets them.
//!
//! Lanes that come to rest late, some of hundreds, do not keep the others waiting: those begin, and the late ones join
//! them with the next launch, which is called for that. They take nothing until then, so that they come to rest.

use super::{Drain, Given, Joining, KernelService, LanePlace, MANY};
use crate::fabric::lanes::{LaneServer, LaneView, LANES, TOGETHER};
use crate::fabric::Context;
use crate::proxy::ring::Ring;
use std::time::{Duration, Instant};

/// A thread of a test may be held up for longer.
const SLOWER: u64 = if cfg!(test) { 100 } else { 1 };
/// How long lanes that are held have time to come to rest: more than most operations take, and less than a launch
/// waits.
pub(super) const REST_WITHIN: Duration = Duration::from_micros(300 * SLOWER);
/// How long others that are at rest wait for them, in a set of more than [`TOGETHER`]: as long as an operation takes by
/// itself.
pub(super) const OTHERS_WITHIN: Duration = Duration::from_micros(30 * SLOWER);
/// How long lanes that join a kernel's have time for it: the others go on meanwhile. A launch waits for longer, if it
/// is not there before they are held.
pub(super) const JOIN_WITHIN: Duration = Duration::from_micros(700 * SLOWER);
/// How long more lanes than a kernel has [`TOGETHER`] wait for the next launch before the present one is told to end:
/// several times what a launch takes that finds a place. On a GPU that others fill it has none beside the present one,
/// and comes as soon as that has gone.
pub(super) const PLACE_WITHIN: Duration = Duration::from_micros(60 * SLOWER);

/// Whether more than so much time is between the two.
fn is_over(since: Instant, now: Instant, limit: Duration) -> bool {
    now.saturating_duration_since(since) > limit
}

impl<C: Context, R: Ring> Drain<C, R> {
    /// Whether a kernel may have all lanes, so that their queues may be on the GPU.
    fn may_have_all(&self, service: &KernelService) -> bool {
        let may_be = |place: &LanePlace<R>| place.is_live(&self.commons) && place.may_be_watched(service);
        self.places.len() <= TOGETHER && self.places.iter().all(may_be)
    }

    /// Calls a kernel for the lanes that would be for it now, unless one is awaited.
    pub(super) fn call(&self, service: &mut KernelService) {
        if service.kernel.is_awaited() {
            return;
        }
        // Device code comes to its queues one after another: it had so many the last time.
        let lanes = match self.may_have_all(service) {
            true => self.places.len(),
            false => self.wanted(service).max(service.lately).min(LANES),
        };
        service.kernel.call(Instant::now(), lanes);
        service.is_called = service.kernel.is_awaited();
        service.comes_soon &= service.is_called;
    }

    /// How many lanes a kernel would have that came now.
    fn wanted(&self, service: &KernelService) -> usize {
        let place = |&lane: &u32| &self.places[lane as usize];
        let served = service.given.iter().filter(|given| place(&given.lane).lane.is_served()).count();
        let more = self.hot.iter().map(place).filter(|place| !place.lane.is_served() && place.is_for(service)).count();
        let cold = service.recent.iter().map(place).filter(|place| !place.is_hot && place.is_for(service)).count();
        served + more + cold
    }

    /// Lanes that were held for a kernel take entries again.
    pub(super) fn release(&mut self, service: &mut KernelService) {
        service.together.hold(false);
        service.served = None;
        for given in service.given.drain(..) {
            self.places[given.lane as usize].lane.release();
        }
        self.let_go(service);
    }

    /// So do those that were held for the next one.
    pub(super) fn let_go(&mut self, service: &mut KernelService) {
        let Joining { resting, busy } = &mut service.joining;
        for given in resting.drain(..).chain(busy.drain(..)) {
            self.places[given.lane as usize].lane.release();
        }
    }

    /// Moves those that are at rest from one list to the other: all that was taken of them is done, and the kernel may
    /// begin with them.
    fn settle(&mut self, kernel: &dyn LaneServer, busy: &mut Vec<Given>, resting: &mut Vec<Given>) {
        let contexts = self.contexts.get();
        busy.retain(|given| {
            let place = &mut self.places[given.lane as usize];
            let common = &self.commons[place.context as usize];
            // The CPU's last operations may have needed a rank's memory for themselves, until a moment behind their
            // end.
            let is_at_rest =
                place.lane.is_at_rest(&contexts[common.number as usize], common) && kernel.is_let_in(place.lane.peer);
            if is_at_rest {
                resting.push(*given);
            }
            !is_at_rest
        });
    }

    /// Those that have been held for longer than `limit` take entries again, late in that service.
    fn give_up_late(&mut self, busy: &mut Vec<Given>, now: Instant, limit: Duration, service: u64) {
        busy.retain(|given| {
            let is_late = is_over(given.since, now, limit);
            if is_late {
                let place = &mut self.places[given.lane as usize];
                place.lane.release();
                place.late_in = service;
            }
            !is_late
        });
    }

    /// A kernel is ready: holds the lanes for it, and gives it those that are at rest.
    pub(super) fn hand_over(&mut self, service: &mut KernelService) {
        if service.given.is_empty() {
            self.hold(service);
        }
        let now = Instant::now();
        let (mut busy, mut resting) = (std::mem::take(&mut service.given), Vec::new());
        self.settle(&*service.kernel, &mut busy, &mut resting);
        let may_begin_without = self.places.len() > TOGETHER && !resting.is_empty();
        let (limit, held) = (if may_begin_without { JOIN_WITHIN } else { REST_WITHIN }, busy.len());
        self.give_up_late(&mut busy, now, limit, service.services + 1);
        if busy.len() < held {
            service.together.hold(false);
        }
        if may_begin_without && is_over(service.held, now, OTHERS_WITHIN) {
            service.joining.busy.append(&mut busy);
        }
        if !busy.is_empty() {
            // Those at rest are so for as long as they are held.
            busy.append(&mut resting);
            service.given = busy;
            return;
        }
        self.begin(service, resting);
    }

    /// Holds lanes for a kernel: those that were held before, and those that carry something or did so lately; or all.
    fn hold(&mut self, service: &mut KernelService) {
        let room = service.kernel.room();
        let all = self.places.len() <= room && self.may_have_all(service);
        let now = Instant::now();
        let Joining { resting, busy } = std::mem::take(&mut service.joining);
        for given in resting.into_iter().chain(busy) {
            match service.given.len() < room {
                true => service.given.push(given),
                false => self.places[given.lane as usize].lane.release(),
            }
        }
        let recent = std::mem::take(&mut service.recent);
        let candidates: &mut dyn Iterator<Item = u32> = match all {
            true => &mut (0..self.places.len() as u32),
            false => &mut self.hot.iter().chain(&recent).copied(),
        };
        for lane in candidates {
            let place = &mut self.places[lane as usize];
            let (is_live, is_for) = (place.is_live(&self.commons), place.is_for(service));
            // One that is held is in the list.
            if is_live && (is_for || all) && service.given.len() < room && place.lane.hold(MANY) {
                service.given.push(Given::held(lane, now, !is_for));
            }
        }
        if service.given.is_empty() {
            service.recent = recent;
        }
        service.held = now;
        service.together.hold(service.given.len() == self.places.len());
    }

    /// Has the kernel serve those of the lanes, which are at rest, that it can.
    fn begin(&mut self, service: &mut KernelService, resting: Vec<Given>) {
        let (mut views, mut viewed): (Vec<LaneView>, Vec<Given>) = Default::default();
        for given in resting {
            let place = &mut self.places[given.lane as usize];
            match place.lane.view(given.is_watched) {
                Some(view) => {
                    viewed.push(Given { next: view.next as u32, ..given });
                    views.push(view);
                }
                None => place.keep_from_kernel(),
            }
        }
        // From here on it says that lanes carry traffic which this thread has.
        service.is_due = false;
        let mut served = if views.is_empty() { Vec::new() } else { service.kernel.serve(&views) }.into_iter();
        for given in viewed {
            let place = &mut self.places[given.lane as usize];
            if served.next() == Some(true) {
                place.lane.begin_served();
                service.given.push(given);
            } else {
                place.keep_from_kernel();
            }
        }
        service.services += u64::from(!service.given.is_empty());
        service.served = (!service.given.is_empty()).then(|| (Instant::now(), false));
        service.lately = service.given.iter().filter(|given| !given.is_watched).count();
        let may_bring = self.places.iter().all(|place| place.lane.can_be_watched());
        service.together.begin(service.given.len() == self.places.len(), may_bring, Instant::now());
    }

    /// Lanes that this thread has carry traffic as well: as soon as the next kernel is there they are held for it, and
    /// once they are at rest the present one is told to end, and that one gets all.
    pub(super) fn let_join(&mut self, service: &mut KernelService) {
        if service.joining.is_empty() && !service.is_due {
            return;
        }
        let now = Instant::now();
        if !service.kernel.has_next() {
            self.call(service);
            let has_no_place = service.kernel.awaited_since().is_some_and(|since| is_over(since, now, PLACE_WITHIN));
            if has_no_place && self.places.len() > TOGETHER {
                service.kernel.stop();
            }
            let is_late = service.joining.since().is_some_and(|since| is_over(since, now, JOIN_WITHIN));
            if is_late || !service.kernel.is_awaited() {
                self.let_go(service);
            }
            return;
        }
        if std::mem::take(&mut service.is_due) {
            self.hold_more(service, now);
        }
        let Joining { resting, busy } = &mut service.joining;
        self.settle(&*service.kernel, busy, resting);
        self.give_up_late(busy, now, JOIN_WITHIN, service.services);
        // Those at rest wait no longer than this: the others are held on, for the launch behind that one.
        let have_waited = resting.iter().any(|given| is_over(given.since, now, REST_WITHIN));
        if !resting.is_empty() && (busy.is_empty() || have_waited) {
            service.kernel.stop();
        }
    }

    /// Holds lanes that carry something for the kernel that comes next, but for those that were late for it already,
    /// and those that it would not be let in for.
    fn hold_more(&mut self, service: &mut KernelService, now: Instant) {
        for &lane in &self.hot {
            let place = &mut self.places[lane as usize];
            let may_be = place.is_live(&self.commons) && place.late_in != service.services;
            let is_for = may_be && place.is_for(service) && service.kernel.is_let_in(place.lane.peer);
            if is_for && place.lane.hold(MANY) {
                service.joining.busy.push(Given::held(lane, now, false));
            }
        }
    }
}
