//! The streams of launches: those of one context, for all kernels and ranks of the process.
//!
//! CUDA gives a stream a hardware queue when it gets work. Once all are taken streams share them, and then what an
//! application has queued behind a kernel that waits stands in front of other streams' kernels, for which it may wait.
//! A stream keeps its queue when its work is done (docs/gpu/private-context.md has what was measured, and
//! `cuda/hardware_queues.cu` measures it): what counts is how many streams have work now and then, not how many have
//! some at a time. So launches of all kernels and ranks share no more streams than half of the queues, each takes the
//! first one that is free, and the other half is the application's. A stream whose launch was late, perhaps since it
//! shares a queue that stands, comes last from then on.
//!
//! Streams are made at set-up alone: to make one can wait for the application's kernels.

use super::LAUNCH_SLOTS;
use crate::sys::keyed::Keyed;
use crate::sys::sync::Mutex;
use crate::sys::wait::until;
use oxygin_ffi::cuda::{Context, Cuda, CudaError, Stream};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// By context.
static ALL: Keyed<usize, LaunchStreams> = Keyed::empty();

/// The streams of launches in one context.
struct LaunchStreams {
    most: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// In the order in which they are taken.
    places: Vec<Place<Arc<Stream>>>,
    /// For memory that is to be brought to the GPU: never behind a launch.
    bringing: Option<Arc<Stream>>,
    /// Kernels that have joined and not left, and all that have while there was one.
    members: usize,
    joined: u64,
}

/// A stream, and what it is used for.
struct Place<S> {
    stream: S,
    used: Use,
}

/// What a stream is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// It was seen to be empty.
    Free,
    /// Somebody launches in it, and may stand in the driver.
    Taken,
    /// This launch was not seen to have ended.
    Launched(Launched),
}

/// Whose launch, in which launch slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Launched {
    member: u64,
    slot: usize,
}

impl LaunchStreams {
    /// Those of a context with so many hardware queues. Makes none. With the context current.
    fn of(context: &Context, hardware_queues: u32) -> Arc<Self> {
        let most = part_of(hardware_queues);
        loop {
            let Ok(streams) =
                ALL.get_or_make(context.id(), || Ok::<_, Infallible>(Self { most, inner: Mutex::default() }));
            if !streams.have_failed() {
                return streams;
            }
            ALL.forget(&streams);
        }
    }

    /// What they were in has failed, and whoever has launched there may not have closed yet.
    fn have_failed(&self) -> bool {
        self.inner.lock().places.iter().any(|place| place.used != Use::Taken && place.stream.is_done().is_err())
    }

    /// One member more, with streams for its launch slots as far as there may be more: which one it is.
    fn join(&self, cuda: &Arc<Cuda>) -> Result<u64, CudaError> {
        // Who launches waits for this lock, on threads for which nobody waits either.
        let mut inner = self.inner.lock();
        let wanted = ((inner.members + 1) * LAUNCH_SLOTS).min(self.most);
        while inner.places.len() < wanted {
            inner.places.push(Place { stream: Arc::new(Stream::create(cuda)?), used: Use::Free });
        }
        if inner.bringing.is_none() {
            inner.bringing = Some(Arc::new(Stream::create(cuda)?));
        }
        inner.members += 1;
        inner.joined += 1;
        Ok(inner.joined)
    }
}

impl Drop for LaunchStreams {
    fn drop(&mut self) {
        // Of a kernel that could not be ended, or in a context that is gone.
        let inner = std::mem::take(&mut *self.inner.lock());
        std::mem::forget((inner.places, inner.bringing));
    }
}

/// How many streams launches have in a context with so many hardware queues: one for each launch slot at least, since
/// of so few queues every one is shared anyway.
fn part_of(hardware_queues: u32) -> usize {
    (hardware_queues as usize / 2).max(LAUNCH_SLOTS)
}

/// Takes the first stream that is free, or is found to be by `is_done`, for a launch, unless the one before in its
/// launch slot has not ended.
fn take<S: Clone, E>(
    places: &mut [Place<S>],
    launch: Launched,
    is_done: impl Fn(&S) -> Result<bool, E>,
) -> Result<Option<S>, E> {
    if let Some(before) = places.iter_mut().find(|place| place.used == Use::Launched(launch)) {
        if !is_done(&before.stream)? {
            return Ok(None);
        }
        before.used = Use::Free;
    }
    for place in places {
        if matches!(place.used, Use::Launched(_)) && is_done(&place.stream)? {
            place.used = Use::Free;
        }
        if place.used == Use::Free {
            place.used = Use::Taken;
            return Ok(Some(place.stream.clone()));
        }
    }
    Ok(None)
}

/// The stream of a launch comes last from here on.
fn put_last<S>(places: &mut Vec<Place<S>>, launch: Launched) {
    if let Some(at) = places.iter().position(|place| place.used == Use::Launched(launch)) {
        let place = places.remove(at);
        places.push(place);
    }
}

/// One kernel's part of the streams. It does not leave by itself.
pub struct Member {
    id: u64,
    streams: Arc<LaunchStreams>,
}

impl Member {
    /// A kernel's part of the streams of a context with so many hardware queues, which is current. Set-up only: it may
    /// wait for kernels.
    pub fn join(context: &Context, hardware_queues: u32) -> Result<Self, CudaError> {
        let streams = LaunchStreams::of(context, hardware_queues);
        Ok(Self { id: streams.join(context.cuda())?, streams })
    }

    /// Launches for a launch slot, in a stream that is free or comes free `within` a time. `false`: none was, or the
    /// launch before in that slot has not ended. With the context current.
    pub fn launch(
        &self,
        slot: usize,
        within: Duration,
        launch: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<bool, CudaError> {
        let what = Launched { member: self.id, slot };
        let Some(stream) = self.take(what, Instant::now() + within)? else { return Ok(false) };
        let launched = launch(&stream);
        let becomes = if launched.is_ok() { Use::Launched(what) } else { Use::Free };
        let places = &mut self.streams.inner.lock().places;
        // It is there as long as there is a member.
        if let Some(place) = places.iter_mut().find(|place| Arc::ptr_eq(&place.stream, &stream)) {
            place.used = becomes;
        }
        launched.map(|()| true)
    }

    fn take(&self, launch: Launched, end: Instant) -> Result<Option<Arc<Stream>>, CudaError> {
        let mut taken = Ok(None);
        until(end, || {
            taken = take(&mut self.streams.inner.lock().places, launch, |stream| stream.is_done());
            !matches!(taken, Ok(None))
        });
        taken
    }

    /// The launch for a launch slot is late: its stream comes last from here on.
    pub fn put_last(&self, slot: usize) {
        put_last(&mut self.streams.inner.lock().places, Launched { member: self.id, slot });
    }

    /// The stream by which memory is brought to the GPU.
    pub fn bringing(&self) -> Option<Arc<Stream>> {
        self.streams.inner.lock().bringing.clone()
    }

    /// Whether all of its launches have ended. An error: the context has failed, and nothing can be said of them.
    pub fn are_done(&self) -> Result<bool, CudaError> {
        for place in &mut self.streams.inner.lock().places {
            if matches!(place.used, Use::Launched(Launched { member, .. }) if member == self.id) {
                if !place.stream.is_done()? {
                    return Ok(false);
                }
                place.used = Use::Free;
            }
        }
        Ok(true)
    }

    /// It launches no more. With the last one the streams go, with the context current; those with a launch that has
    /// not ended are left to the process.
    pub fn leave(&self) {
        let mut inner = self.streams.inner.lock();
        inner.members -= 1;
        if inner.members > 0 {
            return;
        }
        let was = std::mem::take(&mut *inner);
        drop(inner);
        for Place { stream, .. } in was.places {
            if !stream.is_done().unwrap_or(false) {
                std::mem::forget(stream);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const NEXT: Launched = Launched { member: 9, slot: 0 };
    const OTHER: Launched = Launched { member: 9, slot: 1 };
    const STRANGE: Launched = Launched { member: 7, slot: 0 };

    /// Streams by number.
    fn places<const N: usize>(uses: [Use; N]) -> Vec<Place<usize>> {
        uses.into_iter().enumerate().map(|(stream, used)| Place { stream, used }).collect()
    }

    fn uses(places: &[Place<usize>]) -> Vec<Use> {
        places.iter().map(|place| place.used).collect()
    }

    #[test]
    fn half_of_the_queues_are_left_but_a_launch_can_always_follow_one_that_runs() {
        assert_eq!([1, 2, 3, 4, 5, 8, 32].map(part_of), [2, 2, 2, 2, 2, 4, 16]);
    }

    #[test]
    fn the_first_free_stream_is_taken_and_the_driver_asked_only_of_launches() {
        let mut all = places([Use::Launched(STRANGE), Use::Taken, Use::Launched(OTHER), Use::Free, Use::Free]);
        let asked = RefCell::new(Vec::new());
        let with = |done: [bool; 5]| {
            let asked = &asked;
            move |&stream: &usize| {
                asked.borrow_mut().push(stream);
                Ok::<_, ()>(done[stream])
            }
        };
        assert_eq!(take(&mut all, NEXT, with([false; 5])), Ok(Some(3)));
        assert_eq!(asked.take(), [0, 2], "who launches may stand in the driver");
        assert_eq!(take(&mut all, NEXT, with([false, true, true, true, true])), Ok(Some(2)));
        assert_eq!(uses(&all), [Use::Launched(STRANGE), Use::Taken, Use::Taken, Use::Taken, Use::Free]);
        assert_eq!(take(&mut all, NEXT, with([false; 5])), Ok(Some(4)));
        assert_eq!(take(&mut all, NEXT, with([false; 5])), Ok(None));
        assert_eq!(take(&mut all, NEXT, |_| Err("gone")), Err("gone"));
        assert_eq!(take(&mut all, NEXT, with([true; 5])), Ok(Some(0)));
    }

    #[test]
    fn a_slot_has_one_launch_at_a_time() {
        let mut all = places([Use::Free, Use::Launched(NEXT), Use::Free]);
        assert_eq!(take(&mut all, NEXT, |_| Ok::<_, ()>(false)), Ok(None));
        assert_eq!(take(&mut all, OTHER, |_| Ok::<_, ()>(false)), Ok(Some(0)));
        assert_eq!(take(&mut all, NEXT, |_| Ok::<_, ()>(true)), Ok(Some(1)));
        assert_eq!(uses(&all), [Use::Taken, Use::Taken, Use::Free]);
    }

    #[test]
    fn a_stream_with_a_late_launch_comes_last() {
        let mut all = places([Use::Launched(NEXT), Use::Free, Use::Taken]);
        put_last(&mut all, OTHER);
        assert_eq!(all.iter().map(|place| place.stream).collect::<Vec<_>>(), [0, 1, 2], "it has none");
        put_last(&mut all, NEXT);
        assert_eq!(all.iter().map(|place| place.stream).collect::<Vec<_>>(), [1, 2, 0]);
        let is_done = |_: &usize| Ok::<_, ()>(true);
        assert_eq!([(), ()].map(|()| take(&mut all, NEXT, is_done)), [Ok(Some(1)), Ok(Some(0))]);
    }
}
