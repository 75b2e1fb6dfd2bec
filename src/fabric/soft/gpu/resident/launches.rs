//! The launches of one kernel: which launch slot has one, what has become of the one that was asked for last, and when
//! there may be another. Makes no call of the driver.

use super::backoff::{choose, Backoff, LAUNCH_SLOTS};
use super::launcher::{Code, Fate, Launch, Launcher, Request, SlotMemory};
use crate::fabric::soft::gpu::app::{AppThread, SET_UP_WITHIN};
use crate::fabric::soft::gpu::DRAIN_WITHIN;
use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long before its end the next one is asked for, while there is work: a launch takes some 50 µs from there until
/// it runs, and meanwhile everything would go another way.
pub const RELAY: Duration = Duration::from_micros(600);
/// Time after which a launch that is not up is given up. In a free queue of a GPU with room it takes some 10 µs, so
/// such a one has something before it that may last; a longer wait would cost what the kernel saves, of which each
/// launch has two milliseconds only.
const LATE: Duration = Duration::from_micros(300);
/// Polls for each look at the clock.
pub const LOOK_EVERY: u32 = 16;
/// How long closing waits for all of them: on a GPU that others fill one may get its place late.
const GONE_WITHIN: Duration = Duration::from_secs(1);

/// What a kernel's launch slot knows of its last launch.
pub trait Slot {
    /// It has begun to run.
    fn is_up(&self) -> bool;
    /// It has come and gone, or there was none.
    fn is_gone(&self) -> bool;
    /// It runs, as far as it has said.
    fn runs(&self) -> bool {
        self.is_up() && !self.is_gone()
    }
    /// It never was.
    fn take_back(&mut self);
    /// Has it end, once it has done what it was given. Nothing is launched here any more.
    fn stop(&self);
}

/// One kernel's launch slots, by number, and its launches.
pub struct Launches<S> {
    rank: u32,
    app: Arc<AppThread>,
    launcher: Arc<Launcher>,
    slots: Vec<S>,
    /// The last launch that was asked for, as long as it is not known what has become of it, and in which launch slot.
    request: Option<(usize, Arc<Request>)>,
    backoff: Backoff,
    /// Launches that were given up, for the closing line.
    late: u64,
    /// The driver did not take a launch, and never will: there are no more.
    is_refused: bool,
}

impl<S: Slot> Launches<S> {
    /// Loads the kernel and runs it once for each launch slot, as `first` says ([`Launcher::open`]). `slot` makes a
    /// launch slot, one that has been run, of its number and memory, which is a part of its own, zeroed, and stays
    /// until `close` says that all have ended. Set-up only: it may wait for kernels.
    pub fn open(
        rank: u32,
        app: &Arc<AppThread>,
        code: Code,
        first: impl Fn(usize, SlotMemory) -> Launch + Send + 'static,
        slot: impl Fn(usize, SlotMemory) -> S + Send + 'static,
    ) -> Result<Self, String>
    where
        S: Send + 'static,
    {
        let queues = app.hardware_queues();
        let opened = app.run(SET_UP_WITHIN, move |context| {
            let (launcher, memories, run) = Launcher::open(context, queues, code, first).map_err(|e| e.to_string())?;
            let mut slots: Vec<S> =
                memories.into_iter().enumerate().map(|(number, memory)| slot(number, memory)).collect();
            slots[run..].iter_mut().for_each(Slot::take_back);
            Ok::<_, String>((launcher, slots))
        });
        let opened = opened.ok_or("the application's context is gone, or a call of the driver stands")?;
        let (launcher, slots) = opened?;
        let (app, backoff) = (app.clone(), Backoff::default());
        Ok(Self { rank, app, launcher, slots, request: None, backoff, late: 0, is_refused: false })
    }

    /// Asks for a launch in the first launch slot from `last` on where none is left and one `may_be`: what `prepare`
    /// says. Which one that is; `None`: there can be none now.
    pub fn ask(
        &mut self,
        now: Instant,
        last: usize,
        may_be: impl Fn(usize) -> bool,
        prepare: impl FnOnce(usize, &mut S) -> Launch,
    ) -> Option<usize> {
        self.forget_request(now);
        if self.is_refused || self.request.is_some() || !self.backoff.allows(now) {
            return None;
        }
        let number = choose(last, LAUNCH_SLOTS, |i| may_be(i) && self.slots[i].is_gone())?;
        let what = prepare(number, &mut self.slots[number]);
        self.request = Some((number, Request::post(&self.app, &self.launcher, self.rank, what)));
        Some(number)
    }

    /// Forgets the last request if it is known what has become of it. While the thread stands in it there is no other.
    /// Its launch slot is free again if nothing was launched, which may show long after it was late.
    fn forget_request(&mut self, now: Instant) {
        let Some((number, request)) = &self.request else { return };
        let fate = request.fate();
        match fate {
            Fate::Waits | Fate::Taken => return,
            Fate::Launched => {}
            Fate::NotFree | Fate::Refused | Fate::RefusedForNow | Fate::Cancelled => self.slots[*number].take_back(),
        }
        if fate == Fate::RefusedForNow {
            self.backoff.refused(now);
        }
        self.is_refused |= fate == Fate::Refused;
        self.request = None;
    }

    /// One was up in time.
    pub fn in_time(&mut self) {
        self.backoff.in_time();
    }

    /// Whether the launch in a launch slot, which is not up, is given up: there is none after all, or it is late. It
    /// was asked for at `since`.
    pub fn give_up_if_late(&mut self, number: usize, since: Instant, now: Instant) -> bool {
        let is_late = now.saturating_duration_since(since) > LATE;
        let request = self.request.as_ref().filter(|(its, _)| *its == number).map(|(_, request)| request);
        // One that is late and that the thread has not come to is none from here on.
        let is_none = request.is_some_and(|request| request.fate().is_none() || is_late && request.cancel());
        if !is_none && !is_late {
            return false;
        }
        match request.map(|request| request.fate()) {
            Some(Fate::NotFree) => self.backoff.no_stream(now),
            _ => self.backoff.late(now),
        }
        self.late += 1;
        if is_none {
            self.forget_request(now);
        } else {
            let launcher = self.launcher.clone();
            self.app.post(move || launcher.put_stream_last(number));
        }
        true
    }

    /// How many launches were not there in time.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Has ranges of managed memory, of so many bytes each, brought to the GPU. Never waits.
    pub fn bring(&self, ranges: Vec<(u64, u64)>) {
        let (launcher, context) = (self.launcher.clone(), self.app.context().clone());
        self.app.post(move || launcher.bring(&context, &ranges));
    }

    /// Whether the thread stands in the driver's call for the last one.
    pub fn stands(&self) -> bool {
        self.request.as_ref().is_some_and(|(_, request)| request.fate() == Fate::Taken)
    }

    /// Whether the driver has the launch in a launch slot, so that it waits for its place on the GPU if for anything.
    pub fn has_driver(&self, number: usize) -> bool {
        self.request.as_ref().is_none_or(|(its, request)| *its != number || request.fate() == Fate::Launched)
    }

    /// Whether the application's context is gone, and all launches with it.
    pub fn are_lost(&self) -> bool {
        self.app.check().is_err()
    }

    /// All launch slots.
    pub fn slots(&self) -> &[S] {
        &self.slots
    }

    /// Ends them. They have nothing to do any more, or the GPU has failed, and is not `healthy`. `false`: one may still
    /// run, or is late and will; code and memory are left to the process, and the streams.
    pub fn close(self, healthy: bool) -> bool {
        if !healthy {
            return false;
        }
        // One that was not launched will not be; one that is late ends as soon as it comes up.
        if let Some((_, request)) = &self.request {
            request.cancel();
        }
        self.slots.iter().for_each(Slot::stop);
        let launcher = self.launcher.clone();
        // A context that is gone has taken all of it.
        self.app.run(DRAIN_WITHIN, move |_| launcher.end(GONE_WITHIN)).unwrap_or_else(|| self.are_lost())
    }
}

impl<S> Index<usize> for Launches<S> {
    type Output = S;
    fn index(&self, number: usize) -> &S {
        &self.slots[number]
    }
}

impl<S> IndexMut<usize> for Launches<S> {
    fn index_mut(&mut self, number: usize) -> &mut S {
        &mut self.slots[number]
    }
}
