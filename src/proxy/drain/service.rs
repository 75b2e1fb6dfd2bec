//! Lanes that a kernel serves by itself for a while ([`lanes`](crate::fabric::lanes)): when one is called, which lanes
//! it gets, and how they come back.
//!
//! A lane is handed over when all that was taken from it is complete and told, and comes back as a whole: at each
//! moment either this thread or the kernel reads it. Until the kernel runs, and between two launches, the lane is this
//! thread's.

mod hand_over;

use super::together::Together;
use super::{Drain, LanePlace, Pass, HOT_VISITS};
use crate::fabric::lanes::{LaneServer, Stage, LANES};
use crate::fabric::Context;
use crate::proxy::lane::Batch;
use crate::proxy::memory::Memory;
use crate::proxy::ring::Ring;
use crate::sys::wait::Wait;
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries are close together, and a launch is worth its cost, if no more time lies between two visits that found some,
/// or one found so many.
/// A thread of a test may be held up for longer in between.
const CLOSE: Duration = if cfg!(test) { Duration::from_secs(1) } else { Duration::from_micros(100) };
const MANY: u32 = 4;
/// While a kernel may be had soon, this thread takes no more than so many entries of all lanes that would be for it,
/// and of each no more than [`MANY`]: else device code that fills hundreds of places at once leaves lanes that come to
/// rest only milliseconds later.
const UNTIL_SERVED: u32 = 64;
/// A lane of which the kernel has refused an entry before it had taken [`SUITS`], or could not take it over, is this
/// thread's until so many entries in a row are for the kernel; twice as many each time, up to a limit.
const IN_A_ROW: u32 = 16;
const IN_A_ROW_MOST: u32 = 64;
/// Nothing was there for so long, and nothing under way: a pause of its queue, behind which the kernel takes longer
/// copies. It is some microseconds as the kernel counts it, too. Visits would not tell: where this thread has much to
/// do, few lie between two copies, and all-to-alls that have once left the kernel might not come back to it.
const PAUSE: Duration = Duration::from_micros(4);
/// A lane of which the kernel took so many entries in one service suits it.
const SUITS: u32 = 32;
/// A lane that carried something in one of the last so many services is handed over with the others, whether something
/// is there or not: device code that has hundreds comes to them one after another, and each that is not the kernel's
/// then has to wait for the next one.
const RECENT: u64 = 8;
/// How long the end waits for a kernel that serves: a hundred times what it has to live.
const END_WITHIN: Duration = Duration::from_millis(500);

/// A lane that is held for the kernel, or that it serves.
#[derive(Clone, Copy)]
struct Given {
    /// Index of the lane.
    lane: u32,
    /// Since when it is held.
    since: Instant,
    /// It is watched, and nothing of it is carried out.
    is_watched: bool,
    /// How far the kernel had come when it was asked last, modulo 2^32, and how many entries it has done in this
    /// service.
    next: u32,
    done: u32,
}

/// Lanes that are held for the next kernel while one serves others.
#[derive(Default)]
struct Joining {
    /// Those that are at rest, and the others.
    resting: Vec<Given>,
    busy: Vec<Given>,
}

impl Given {
    /// Held from `since` on.
    fn held(lane: u32, since: Instant, is_watched: bool) -> Self {
        Self { lane, since, is_watched, next: 0, done: 0 }
    }
}

impl Joining {
    fn is_empty(&self) -> bool {
        self.resting.is_empty() && self.busy.is_empty()
    }

    /// Since when the first one is.
    fn since(&self) -> Option<Instant> {
        self.resting.iter().chain(&self.busy).map(|given| given.since).min()
    }
}

/// What a thread keeps of a kernel that serves lanes.
pub struct KernelService {
    kernel: Box<dyn LaneServer>,
    /// In the order in which the kernel was given them.
    given: Vec<Given>,
    /// When those that it is about to get were chosen.
    held: Instant,
    joining: Joining,
    /// Services so far and [`RECENT`]; lanes that the last one had, and that carried something in one of the last
    /// [`RECENT`].
    services: u64,
    recent: Vec<u32>,
    /// Since when a kernel has them, and whether the log has it that this is for too long.
    served: Option<(Instant, bool)>,
    /// One is called, as far as was known when it was asked last; the last one that was called came in time.
    is_called: bool,
    comes_soon: bool,
    /// Lanes that the last one had, those apart that it watched.
    lately: usize,
    /// Whether it has all lanes of this thread.
    pub(super) together: Together,
    /// Entries come close together in lanes that this thread has.
    is_due: bool,
    /// The lanes carried something since the kernel was polled.
    has_moved: bool,
    /// When a visit found entries last.
    found: Option<Instant>,
    /// No kernel is called any more.
    ends: bool,
    /// The rings' memory: a kernel that does not end still reads it.
    memory: Arc<dyn Any + Send + Sync>,
}

impl KernelService {
    /// `memory` keeps the rings.
    pub fn new(kernel: Box<dyn LaneServer>, memory: Arc<dyn Any + Send + Sync>) -> Self {
        let together = Together::new(kernel.steady());
        Self {
            kernel,
            given: Vec::new(),
            held: Instant::now(),
            joining: Joining::default(),
            services: RECENT,
            recent: Vec::new(),
            served: None,
            is_called: false,
            comes_soon: true,
            lately: 0,
            together,
            is_due: false,
            has_moved: false,
            found: None,
            ends: false,
            memory,
        }
    }

    /// A visit has taken entries that a kernel could have.
    pub fn note(&mut self, taken: u32) {
        let now = Instant::now();
        self.is_due |= taken >= MANY || self.found.is_some_and(|found| now.saturating_duration_since(found) <= CLOSE);
        self.found = Some(now);
    }

    /// What has become of the launch that was called last, if it was not known.
    fn learn(&mut self, stage: Stage) {
        if self.is_called && (stage == Stage::Off || self.kernel.has_next()) {
            (self.is_called, self.comes_soon) = (false, stage != Stage::Off);
        }
    }

    /// Waits until the kernel has ended, if it serves. `false`: it has not.
    fn end(&mut self) -> bool {
        self.ends = true;
        let (end, wait) = (Instant::now() + END_WITHIN, Wait::begin());
        loop {
            match self.kernel.poll(false) {
                Stage::Serving if Instant::now() < end => self.kernel.stop(),
                Stage::Serving | Stage::Failed => return false,
                _ => return true,
            }
            wait.rest();
        }
    }
}

impl Drop for KernelService {
    fn drop(&mut self) {
        match self.end() {
            true => self.kernel.settle(),
            false => match self.memory.clone().downcast::<Memory>() {
                Ok(memory) => memory.keep(),
                Err(memory) => std::mem::forget(memory),
            },
        }
    }
}

impl<R: Ring> LanePlace<R> {
    /// It is left to this thread for a while.
    fn put_off(&mut self) {
        (self.suits, self.wanted) = (0, (2 * self.wanted).clamp(IN_A_ROW, IN_A_ROW_MOST));
    }

    /// The same, and it takes entries again: a kernel cannot have it.
    fn keep_from_kernel(&mut self) {
        self.lane.release();
        self.put_off();
    }

    /// A visit took so many entries of it, those of a batch.
    #[inline]
    pub(super) fn note(&mut self, taken: u32, batch: &Batch, service: &mut KernelService) {
        let suits = batch.suits_kernel(&mut self.apart);
        self.suits = if suits { self.suits.saturating_add(taken) } else { 0 };
        if self.is_for(service) {
            service.note(taken);
        }
    }

    /// A visit found nothing.
    #[inline]
    pub(super) fn note_vain(&mut self) {
        self.quiet += 1;
        if self.apart.may_pause() {
            let now = Instant::now();
            match self.quiet {
                1 => self.quiet_since = now,
                _ if now.saturating_duration_since(self.quiet_since) > PAUSE => self.apart.pause(),
                _ => {}
            }
        }
    }

    /// Whether the kernel may have it to watch, or does not need to: nothing was there lately, whatever that was.
    fn may_be_watched(&self, service: &KernelService) -> bool {
        let is_quiet = self.is_for(service) || !self.is_hot && !self.is_broken;
        is_quiet && self.lane.can_be_watched() && service.kernel.reaches(self.lane.peer)
    }

    /// Whether the kernel may have it.
    fn is_for(&self, service: &KernelService) -> bool {
        self.suits > 0 && self.may_come_to_be_for(service)
    }

    /// The same, or if its next entries are.
    fn may_come_to_be_for(&self, service: &KernelService) -> bool {
        let suits = self.suits >= self.wanted;
        suits && !self.is_broken && self.lane.can_be_served() && service.kernel.reaches(self.lane.peer)
    }

    /// How many entries that are for a kernel may be under way of those that this thread has taken, where so many lanes
    /// are hot.
    #[inline]
    pub(super) fn most(&self, service: Option<&KernelService>, hot: usize) -> u32 {
        match service {
            Some(service)
                if service.comes_soon && !service.ends && hot <= LANES && self.may_come_to_be_for(service) =>
            {
                (UNTIL_SERVED / (hot as u32).max(1)).clamp(1, MANY)
            }
            _ => u32::MAX,
        }
    }
}

impl<C: Context, R: Ring> Drain<C, R> {
    /// Looks after the kernel.
    pub(super) fn look_after_service(&mut self, pass: &mut Pass) {
        let Some(mut service) = self.service.take() else { return };
        let moved = std::mem::take(&mut service.has_moved);
        let mut stage = service.kernel.poll(moved);
        if stage == Stage::Over {
            self.follow(&mut service, pass);
            self.take_back(&mut service);
            // The lanes are at rest: where the next one is there, it has them before this thread takes anything.
            stage = service.kernel.poll(false);
        }
        service.learn(stage);
        match stage {
            Stage::Off => {
                self.release(&mut service);
                if std::mem::take(&mut service.is_due) && !service.ends {
                    self.call(&mut service);
                }
            }
            // Nothing serves, so nothing is held; what had served is taken back.
            Stage::Called | Stage::Over => self.release(&mut service),
            Stage::Ready if service.ends => self.release(&mut service),
            Stage::Ready => self.hand_over(&mut service),
            Stage::Serving => {
                pass.is_busy = true;
                self.follow(&mut service, pass);
                if service.together.is_to_bring(Instant::now()) {
                    service.kernel.bring();
                }
                match service.ends {
                    true => self.let_go(&mut service),
                    false => self.let_join(&mut service),
                }
            }
            Stage::Failed => return self.lose_served(&mut service),
        }
        self.service = Some(service);
    }

    /// A sentence about a kernel that has had lanes for `limit`, once: it lives for milliseconds.
    pub(super) fn watch_service(&mut self, now: Instant, limit: Duration) -> Option<String> {
        let service = self.service.as_mut()?;
        let (since, said) = service.served.as_mut()?;
        let age = now.saturating_duration_since(*since);
        if age < limit || std::mem::replace(said, true) {
            return None;
        }
        let places = service.given.iter().filter_map(|given| self.places.get(given.lane as usize));
        let mut kept = places.filter(|place| place.lane.is_served());
        let first = kept.next()?;
        Some(format!(
            "context {}, queue to rank {}, and {} others: a kernel of this library's has had them for {age:.1?} \
             (OXYGIN_STALL), which gives them back within milliseconds, so entries of device code in them wait: this \
             GPU stands, for a debugger, another process or a fault that its driver has not told of",
            self.commons[first.context as usize].number,
            first.lane.peer,
            kept.count()
        ))
    }

    /// Sees how far a kernel that serves has come.
    pub(super) fn follow_service(&mut self) {
        if let Some(mut service) = self.service.take() {
            self.follow(&mut service, &mut Pass::default());
            self.service = Some(service);
        }
    }

    /// Sees how far the kernel has come.
    fn follow(&mut self, service: &mut KernelService, pass: &mut Pass) {
        let (mut is_dead, mut has_moved) = (false, false);
        for (nth, given) in service.given.iter_mut().enumerate() {
            let place = &mut self.places[given.lane as usize];
            if !place.lane.is_served() {
                continue;
            }
            let common = &self.commons[place.context as usize];
            is_dead |= common.is_dead();
            let position = service.kernel.position(nth);
            if position.next != given.next {
                let n = place.lane.served_until(position.next);
                (given.next, given.done) = (position.next, given.done.saturating_add(n));
                pass.moved += n;
                pass.by_kernel += n;
                has_moved = true;
                if let Some(meter) = &mut self.meter {
                    meter.served(given.lane, n, place.lane.told(common));
                }
            }
            if position.is_over {
                place.lane.release();
                service.together.hold(false);
                match given.done >= SUITS {
                    _ if given.is_watched => {}
                    // What is not for the kernel comes behind much that was.
                    true => (place.suits, place.wanted) = (0, 0),
                    false => place.put_off(),
                }
                self.heads[given.lane as usize] = place.lane.head();
            }
        }
        if has_moved {
            service.has_moved = true;
            service.together.carry(Instant::now());
        }
        if is_dead {
            service.kernel.stop();
        }
    }

    /// The kernel has ended: the lanes are this thread's.
    fn take_back(&mut self, service: &mut KernelService) {
        service.together.hold(false);
        service.recent.clear();
        for given in service.given.drain(..) {
            let place = &mut self.places[given.lane as usize];
            if place.lane.is_served() {
                place.lane.release();
                self.heads[given.lane as usize] = place.lane.head();
                // This thread does not look long at one that carried nothing.
                place.quiet = if given.done > 0 { 0 } else { HOT_VISITS - 1 };
                if given.done > 0 {
                    place.carried_in = service.services;
                    if !std::mem::replace(&mut place.is_hot, true) {
                        self.hot.push(given.lane);
                    }
                }
                if !given.is_watched && place.carried_in + RECENT > service.services {
                    service.recent.push(given.lane);
                }
                if given.done >= SUITS {
                    place.wanted = 0;
                }
            }
            service.is_due |= given.done > 0;
        }
        service.kernel.settle();
    }

    /// The GPU has failed while a kernel served: nobody knows what of it is done.
    #[cold]
    fn lose_served(&mut self, service: &mut KernelService) {
        self.let_go(service);
        for given in &service.given {
            let place = &mut self.places[given.lane as usize];
            if place.lane.is_served() {
                place.lane.lose_served(&self.commons[place.context as usize]);
            }
        }
    }

    /// No kernel serves from here on, nor is one called, behind a fault. What one that does not end has is lost.
    #[cold]
    pub(super) fn end_service(&mut self) {
        let Some(mut service) = self.service.take() else { return };
        self.let_go(&mut service);
        let has_ended = service.end();
        if has_ended {
            self.follow(&mut service, &mut Pass::default());
            self.take_back(&mut service);
        }
        for given in &service.given {
            let place = &mut self.places[given.lane as usize];
            place.is_broken |= place.lane.is_served();
        }
    }

    /// No kernel is called any more, and one that serves ends soon.
    pub(super) fn wind_up_service(&mut self) {
        if let Some(service) = &mut self.service {
            service.ends = true;
            service.kernel.stop();
        }
    }
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
