//! What one thread drains of one set of contexts: which lanes are looked at, and how often.
//!
//! Lanes that carried something lately are hot and looked at on every pass. Of the others only the word that shows that
//! something has begun to arrive is, a slice of them a pass: an idle communicator of 16 contexts and 256 ranks has 4096
//! such words.

mod place;
mod service;
mod together;

use super::idle::Rest;
use super::lane::{Batch, Common, Lane};
use super::meter::Meter;
use super::ring::{Head, Ring};
use crate::fabric::lanes::LaneServer;
use crate::fabric::Context;
use place::LanePlace;
use service::KernelService;
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Cold lanes looked at on a pass where nothing is hot: four passes see 4096.
const SWEEP_IDLE: usize = 1024;
/// The same beside hot ones, which must not wait for it.
const SWEEP_BUSY: usize = 64;
/// Cold lanes that each look of the watchdog asks whether device code stands there: 4096 in 4 s, at 0.1 µs each.
const WATCHED_COLD: usize = 256;
/// Lanes that a line of the log names.
const NAMED_AT_MOST: usize = 8;
/// Visits without anything after which a lane is cold again.
const HOT_VISITS: u32 = 512;

/// How many of so many lanes a pass looks at. All of them where the thread sleeps between passes: an entry that comes
/// meanwhile waits for one sleep.
fn slice(rest: Rest, is_cold: bool, lanes: usize) -> usize {
    match (rest, is_cold) {
        (Rest::Sleeps, _) => lanes,
        (_, true) => SWEEP_IDLE,
        (_, false) => SWEEP_BUSY,
    }
}

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Entries taken or completed.
    pub moved: u32,
    /// Those of them that a kernel carried out by itself.
    pub by_kernel: u32,
    /// Something is unfinished.
    pub is_busy: bool,
}

/// How far a lane had been written and rung when somebody asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneMark {
    pub(super) lane: u32,
    /// Entries given back once it has been passed.
    pub(super) until: u64,
}

/// What is left before some marks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Entries.
    pub entries: u64,
    /// All of these lanes were given up before, and have not moved since.
    pub stands: bool,
}

/// Something that a thread of the engine works on, pass by pass.
pub trait Work: Send {
    /// Looks at what there is, moves what can be moved. Never blocks. A thread that rests between passes leaves what
    /// peers send to the fabric's own threads, unless something is under way.
    fn pass(&mut self, rest: Rest) -> Pass;

    /// The watchdog's look, every now and then.
    fn watch(&mut self, now: Instant, limit: Duration);

    /// A fault inside the library hit it: whoever asks for errors is told from here on. Passes that follow do no more
    /// than what device code needs to come to its end.
    fn fail(&mut self);

    /// It is asked back: what of it others do comes to an end soon.
    fn wind_up(&mut self) {}

    /// What it is, for the log.
    fn name(&self) -> String;

    /// What of it is unfinished, and whom that waits for, for the log.
    fn unfinished(&self) -> String;

    /// How far device code has come by now, in each lane where that is not complete. The next passes look at these.
    fn mark(&mut self) -> Vec<LaneMark> {
        Vec::new()
    }

    /// Drops marks that have been passed, and says what is left before the others.
    fn left(&self, _marks: &mut Vec<LaneMark>) -> Left {
        Left::default()
    }

    /// What is left before these marks is waited for no longer: what and whom that is, for the log.
    fn give_up(&mut self, _marks: &[LaneMark]) -> String {
        String::new()
    }
}

/// Contexts of a set, and who keeps them alive.
pub struct Kept<C> {
    contexts: NonNull<[C]>,
    _owner: Arc<dyn Send + Sync>,
}

// SAFETY: a shared reference to contexts, which are `Sync`, with its owner.
unsafe impl<C: Sync> Send for Kept<C> {}

impl<C> Clone for Kept<C> {
    fn clone(&self) -> Self {
        Self { contexts: self.contexts, _owner: self._owner.clone() }
    }
}

impl<C> Kept<C> {
    /// # Safety
    /// The contexts live, and stay where they are, as long as `owner`.
    pub unsafe fn new(contexts: &[C], owner: Arc<dyn Send + Sync>) -> Self {
        Self { contexts: NonNull::from(contexts), _owner: owner }
    }

    fn get(&self) -> &[C] {
        // SAFETY: they live as long as the owner (promised to `new`).
        unsafe { self.contexts.as_ref() }
    }
}

/// The lanes of some contexts of a set.
pub struct Drain<C: Context, R: Ring> {
    contexts: Kept<C>,
    commons: Vec<Common>,
    /// On which pass a context made progress last.
    progressed: Vec<u64>,
    places: Vec<LanePlace<R>>,
    /// By lane: where to look.
    heads: Vec<R::Head>,
    hot: Vec<u32>,
    /// Cold lanes that are full of what device code has not rung.
    full: Vec<u32>,
    next_cold: usize,
    next_watched: usize,
    next_context: usize,
    passes: u64,
    batch: Batch,
    meter: Option<Meter>,
    /// A fault inside the library hit it.
    has_failed: bool,
    /// By lane, entries given back when somebody waited for more, and gave up.
    stood_at: BTreeMap<u32, u64>,
    /// Of a kernel that serves lanes by itself, where there is one.
    service: Option<Box<KernelService>>,
    /// Memory that the rings lie in.
    memory: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `heads` point into memory that `memory` keeps; the rest is `Send` by itself.
unsafe impl<C: Context, R: Ring> Send for Drain<C, R> {}

impl<C: Context, R: Ring> Drain<C, R> {
    /// `lanes` names for each lane the index of its context in `commons`. `memory` keeps the rings' memory.
    pub fn new(
        contexts: Kept<C>,
        commons: Vec<Common>,
        lanes: Vec<(u32, Lane<R>)>,
        memory: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        debug_assert!(lanes.iter().all(|(c, _)| (*c as usize) < commons.len()));
        debug_assert!(commons.iter().all(|c| (c.number as usize) < contexts.get().len()));
        let heads = lanes.iter().map(|(_, lane)| lane.head()).collect();
        let places: Vec<_> = lanes.into_iter().map(|(context, lane)| LanePlace::new(lane, context)).collect();
        Self {
            contexts,
            progressed: vec![0; commons.len()],
            commons,
            heads,
            places,
            hot: Vec::new(),
            full: Vec::new(),
            next_cold: 0,
            next_watched: 0,
            next_context: 0,
            passes: 0,
            batch: Batch::default(),
            meter: None,
            has_failed: false,
            stood_at: BTreeMap::new(),
            service: None,
            memory,
        }
    }

    /// Has `meter`, whose lanes are these in their order, count what they do.
    pub fn metered(self, meter: Option<Meter>) -> Self {
        Self { meter, ..self }
    }

    /// Has a kernel serve lanes where it can.
    pub fn served(mut self, kernel: Option<Box<dyn LaneServer>>) -> Self {
        self.service = kernel.map(|kernel| Box::new(KernelService::new(kernel, self.memory.clone())));
        self
    }

    /// Lets contexts advance: all at once where the fabric has it so, else those with hot lanes and one more.
    fn progress(&mut self) {
        let contexts = self.contexts.get();
        if C::SHARES_PROGRESS {
            // What fails shows in its lane.
            let _ = contexts.first().map(C::progress);
            return;
        }
        for &hot in &self.hot {
            let c = self.places[hot as usize].context as usize;
            if self.progressed[c] != self.passes {
                self.progressed[c] = self.passes;
                let _ = contexts[self.commons[c].number as usize].progress();
            }
        }
        if let Some(common) = self.commons.get(self.next_context) {
            let _ = contexts[common.number as usize].progress();
        }
        self.next_context = (self.next_context + 1) % self.commons.len().max(1);
    }

    /// Returns whether it stays hot.
    #[inline]
    fn visit(&mut self, index: u32, pass: &mut Pass) -> bool {
        let place = &mut self.places[index as usize];
        let common = &mut self.commons[place.context as usize];
        let seen = self.meter.as_ref().map_or(0, Meter::before);
        let most = place.most(self.service.as_deref(), self.hot.len());
        let found = place.lane.visit(most, self.contexts.get(), common, &mut self.batch);
        if found.taken + found.completed > 0 || found.has_failed {
            if let Some(meter) = &mut self.meter {
                meter.after(index, seen, &found, place.lane.told(common), &self.batch);
            }
        }
        pass.moved += found.taken + found.completed;
        pass.is_busy |= found.is_busy;
        if found.taken > 0 {
            self.heads[index as usize] = place.lane.head();
            if let Some(service) = &mut self.service {
                place.note(found.taken, &self.batch, service);
            }
        }
        if found.taken + found.completed > 0 || found.is_busy {
            place.quiet = 0;
            return true;
        }
        place.note_vain();
        place.is_hot = place.quiet < HOT_VISITS;
        place.is_hot
    }

    /// Keeps `full`: nothing else shows such a lane.
    fn find_full(&mut self) {
        let is_full = |place: &LanePlace<R>| !place.is_hot && place.lane.is_full_of_unrung();
        self.full.retain(|&index| is_full(&self.places[index as usize]));
        for _ in 0..WATCHED_COLD.min(self.places.len()) {
            let index = self.next_watched;
            self.next_watched = (index + 1) % self.places.len();
            if is_full(&self.places[index]) && !self.full.contains(&(index as u32)) {
                self.full.push(index as u32);
            }
        }
    }

    /// Looks at a slice of the cold lanes.
    fn sweep(&mut self, rest: Rest, pass: &mut Pass) {
        if self.service.as_mut().is_some_and(|service| service.together.has_all()) {
            return;
        }
        let most = slice(rest, self.hot.is_empty(), self.heads.len());
        if most >= self.heads.len() {
            self.next_cold = 0;
        }
        let end = (self.next_cold + most).min(self.heads.len());
        let mut from = self.next_cold;
        // SAFETY: of a ring, whose memory `memory` keeps.
        let is_there = |head: &R::Head| unsafe { head.is_there() };
        while let Some(found) = self.heads[from..end].iter().position(is_there) {
            let index = from + found;
            from = index + 1;
            let place = &mut self.places[index];
            if !place.is_hot {
                (place.is_hot, place.quiet) = (true, 0);
                self.hot.push(index as u32);
                self.visit(index as u32, pass);
                // If it has begun to arrive, the rest is no sleep away.
                pass.is_busy = true;
            }
        }
        self.next_cold = if end == self.heads.len() { 0 } else { end };
    }

    /// So many entries of these lanes, in words.
    fn named<'a>(&self, left: impl Iterator<Item = (&'a LanePlace<R>, u64)>) -> String {
        let named = left.take(NAMED_AT_MOST).map(|(place, n)| {
            let number = self.commons[place.context as usize].number;
            format!("{n} entries to rank {} (context {number})", place.lane.peer)
        });
        named.collect::<Vec<_>>().join(", ")
    }

    /// A pass behind a fault: everything that device code writes is dropped and given back. What failed may fail again,
    /// in some lanes or in the fabric: the others go on.
    #[cold]
    fn give_back_all(&mut self) -> Pass {
        let contexts = self.contexts.get();
        // Payments of credits are operations of the fabric.
        let enough = if C::SHARES_PROGRESS { 1 } else { contexts.len() };
        contexts.iter().take(enough).for_each(|context| {
            let _ = unbroken(|| context.progress());
        });
        let (mut pass, batch, commons) = (Pass::default(), &mut self.batch, &self.commons);
        for place in self.places.iter_mut().filter(|place| !place.is_broken) {
            let context = &contexts[commons[place.context as usize].number as usize];
            let lane = &mut place.lane;
            match unbroken(|| lane.give_back_all(context, batch)) {
                Some((dropped, owes)) => {
                    pass.moved += dropped;
                    pass.is_busy |= owes;
                }
                None => place.is_broken = true,
            }
        }
        pass
    }
}

/// What a call returns; `None`: it panicked.
fn unbroken<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}

impl<C: Context, R: Ring> Work for Drain<C, R> {
    fn pass(&mut self, rest: Rest) -> Pass {
        if self.has_failed {
            return self.give_back_all();
        }
        self.passes += 1;
        if let Some(meter) = &mut self.meter {
            meter.begin_pass();
        }
        if rest == Rest::Awake || !self.hot.is_empty() {
            self.progress();
        }
        let mut pass = Pass::default();
        self.look_after_service(&mut pass);
        let mut i = 0;
        while i < self.hot.len() {
            match self.visit(self.hot[i], &mut pass) {
                true => i += 1,
                false => {
                    self.hot.swap_remove(i);
                }
            }
        }
        self.sweep(rest, &mut pass);
        pass
    }

    fn watch(&mut self, now: Instant, limit: Duration) {
        if self.has_failed {
            // The log has it, and nothing is waited for.
            return;
        }
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

    fn wind_up(&mut self) {
        self.wind_up_service();
    }

    fn fail(&mut self) {
        self.has_failed = true;
        self.end_service();
        let commons = &self.commons;
        commons.iter().for_each(Common::fail);
        for place in &mut self.places {
            let (lane, common) = (&mut place.lane, &commons[place.context as usize]);
            place.is_broken = place.is_broken || unbroken(|| lane.lose(common)).is_none();
        }
    }

    fn name(&self) -> String {
        let numbers: Vec<_> = self.commons.iter().map(|common| common.number.to_string()).collect();
        format!("contexts {}", numbers.join(", "))
    }

    fn unfinished(&self) -> String {
        let left = self.places.iter().filter_map(|place| Some((place, place.lane.unfinished()?.into())));
        match self.named(left) {
            none if none.is_empty() => "entries that have not arrived as a whole".into(),
            named => named,
        }
    }

    fn mark(&mut self) -> Vec<LaneMark> {
        let mut marks = Vec::new();
        if self.has_failed {
            // Nothing is carried out any more.
            return marks;
        }
        self.follow_service();
        for (index, place) in (0..).zip(&mut self.places) {
            let Some(until) = place.lane.mark() else { continue };
            marks.push(LaneMark { lane: index, until });
            if !place.is_hot {
                (place.is_hot, place.quiet) = (true, 0);
                self.hot.push(index);
            }
        }
        marks
    }

    fn left(&self, marks: &mut Vec<LaneMark>) -> Left {
        let mut left = Left { entries: 0, stands: true };
        marks.retain(|mark| {
            let place = &self.places[mark.lane as usize];
            let credited = place.lane.credited();
            let n = mark.until.saturating_sub(credited);
            left.entries += n;
            left.stands &= n == 0 || self.stood_at.get(&mark.lane) == Some(&credited);
            n > 0
        });
        left
    }

    fn give_up(&mut self, marks: &[LaneMark]) -> String {
        let places = &self.places;
        let credited = |mark: &LaneMark| places[mark.lane as usize].lane.credited();
        self.stood_at.extend(marks.iter().map(|mark| (mark.lane, credited(mark))));
        self.named(marks.iter().map(|mark| (&places[mark.lane as usize], mark.until.saturating_sub(credited(mark)))))
    }
}

#[cfg(test)]
#[path = "drain_tests.rs"]
mod fault_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_looks_at_all_before_it_sleeps_again() {
        for lanes in [1, SWEEP_IDLE, 8 * SWEEP_IDLE + 1] {
            assert_eq!([true, false].map(|is_cold| slice(Rest::Sleeps, is_cold, lanes)), [lanes; 2]);
        }
        assert_eq!((slice(Rest::Naps, true, 9000), slice(Rest::Awake, false, 9000)), (SWEEP_IDLE, SWEEP_BUSY));
    }
}
