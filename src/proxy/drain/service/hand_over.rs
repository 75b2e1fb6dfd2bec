//! Which lanes a kernel is called for, how they come to rest, and how it gets them.
//!
//! Lanes that come to rest late, some of hundreds, do not keep the others waiting: those begin, and the late ones join
//! them with the next launch, which is called for that. They take nothing until then, so that they come to rest.

use super::super::Common;
use super::{Drain, Given, Held, Joining, KernelService, LanePlace, MANY};
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

/// Whether all that was taken of a lane is done, and a kernel may begin with it.
fn is_at_rest<C: Context, R: Ring>(
    place: &mut LanePlace<R>,
    commons: &[Common],
    contexts: &[C],
    kernel: &dyn LaneServer,
) -> bool {
    let common = &commons[place.context as usize];
    // The CPU's last operations may have needed a rank's memory for themselves, until a moment behind their end.
    place.lane.is_at_rest(&contexts[common.number as usize], common) && kernel.is_let_in(place.lane.peer)
}

impl<C: Context, R: Ring> Drain<C, R> {
    /// Whether a kernel may have all lanes, so that their queues may be on the GPU.
    fn may_have_all(&self, service: &KernelService) -> bool {
        let is_live = |place: &LanePlace<R>| !self.commons[place.context as usize].is_dead();
        self.places.len() <= TOGETHER && self.places.iter().all(|place| is_live(place) && place.may_be_watched(service))
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
        for held in resting.drain(..).chain(busy.drain(..)) {
            self.places[held.lane as usize].lane.release();
        }
    }

    /// A kernel is ready: holds the lanes for it, and gives it those that are at rest.
    pub(super) fn hand_over(&mut self, service: &mut KernelService) {
        if service.given.is_empty() {
            self.hold(service);
        }
        let (contexts, now) = (self.contexts.get(), Instant::now());
        let (mut resting, mut busy) = (Vec::with_capacity(service.given.len()), Vec::new());
        for given in std::mem::take(&mut service.given) {
            let place = &mut self.places[given.lane as usize];
            match is_at_rest(place, &self.commons, contexts, &*service.kernel) {
                true => resting.push(given),
                false => busy.push(given),
            }
        }
        let may_begin_without = self.places.len() > TOGETHER && !resting.is_empty();
        let limit = if may_begin_without { JOIN_WITHIN } else { REST_WITHIN };
        busy.retain(|given| {
            let is_late = now.saturating_duration_since(given.since) > limit;
            if is_late {
                let place = &mut self.places[given.lane as usize];
                place.lane.release();
                place.late_in = service.services + 1;
                service.together.hold(false);
            }
            !is_late
        });
        if may_begin_without && now.saturating_duration_since(service.held) > OTHERS_WITHIN {
            service.joining.busy.extend(busy.drain(..).map(|Given { lane, since, .. }| Held { lane, since }));
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
        for Held { lane, since } in resting.into_iter().chain(busy) {
            match service.given.len() < room {
                true => service.given.push(Given { lane, since, is_watched: false, next: 0, done: 0 }),
                false => self.places[lane as usize].lane.release(),
            }
        }
        let recent = std::mem::take(&mut service.recent);
        let candidates: &mut dyn Iterator<Item = u32> = match all {
            true => &mut (0..self.places.len() as u32),
            false => &mut self.hot.iter().chain(&recent).copied(),
        };
        for lane in candidates {
            let place = &mut self.places[lane as usize];
            let (is_live, is_for) = (!self.commons[place.context as usize].is_dead(), place.is_for(service));
            // One that is held is in the list.
            if is_live && (is_for || all) && service.given.len() < room && place.lane.hold(MANY) {
                service.given.push(Given { lane, since: now, is_watched: !is_for, next: 0, done: 0 });
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
        let is_over = |since: Instant, limit| now.saturating_duration_since(since) > limit;
        if !service.kernel.has_next() {
            self.call(service);
            let is_late = service.joining.since().is_some_and(|since| is_over(since, JOIN_WITHIN));
            if is_late || !service.kernel.is_awaited() {
                self.let_go(service);
            }
            return;
        }
        if std::mem::take(&mut service.is_due) {
            self.hold_more(service, now);
        }
        let contexts = self.contexts.get();
        let Joining { resting, busy } = &mut service.joining;
        busy.retain(|held| {
            let place = &mut self.places[held.lane as usize];
            if is_at_rest(place, &self.commons, contexts, &*service.kernel) {
                resting.push(*held);
                return false;
            }
            let is_late = is_over(held.since, JOIN_WITHIN);
            if is_late {
                place.lane.release();
                place.late_in = service.services;
            }
            !is_late
        });
        // Those at rest wait no longer than this: the others are held on, for the launch behind that one.
        let have_waited = resting.iter().any(|held| is_over(held.since, REST_WITHIN));
        if !resting.is_empty() && (busy.is_empty() || have_waited) {
            service.kernel.stop();
        }
    }

    /// Holds lanes that carry something for the kernel that comes next, but for those that were late for it already,
    /// and those that it would not be let in for.
    fn hold_more(&mut self, service: &mut KernelService, now: Instant) {
        for &lane in &self.hot {
            let place = &mut self.places[lane as usize];
            let is_live = !self.commons[place.context as usize].is_dead() && place.late_in != service.services;
            let is_for = is_live && place.is_for(service) && service.kernel.is_let_in(place.lane.peer);
            if is_for && place.lane.hold(MANY) {
                service.joining.busy.push(Held { lane, since: now });
            }
        }
    }
}
