//! What TCP knows of this rank's GPU: pinned buffers for bulk, and the engine that owns signals and takes small puts.

use super::sock::Poller;
use super::FLUSH;
use crate::error::{Error, Result};
use crate::fabric::soft::atomic::AtomicRequest;
use crate::fabric::soft::gpu::{
    Answered, Engine, GpuMessage, PinnedBuffer, PinnedPools, Received, Source, DRAIN_WITHIN,
};
use crate::memory::key::Key;
use crate::memory::registry::Extent;
use crate::sys::sync::Mutex;
use crate::sys::wait::until;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Empty until there is a GPU window.
#[derive(Default)]
pub struct Gpu {
    pools: OnceLock<PinnedPools>,
    engine: OnceLock<(Arc<Engine>, Arc<Received>)>,
    /// Several threads serve a sender, but its operations reach the engine one by one.
    order: Mutex<()>,
    /// Submissions that had landed when somebody last looked; and whether a buffer came back that others wait for.
    landed: AtomicU64,
    fed: AtomicBool,
    /// Fetches of the engine that were over then.
    fetched: AtomicU64,
    /// Fetches that the engine was ever given, and those of them that are under way.
    fetches: AtomicU64,
    fetching: Arc<AtomicUsize>,
    /// Some of them wait for the engine to be polled.
    asked: AtomicBool,
    /// Somebody found the engine full.
    full: AtomicBool,
    /// The engine got something to do; set behind that, for whoever takes it away polls the engine and may then sleep.
    stirred: AtomicBool,
    /// Held by each answer that is not sent, as the engine has not done what it tells of.
    awaited: Arc<()>,
}

/// An atomic operation of a peer that the engine has, or what it put before: while there are any, who waits looks
/// again.
pub struct Awaited {
    answered: Answered,
    _one: Arc<()>,
}

impl Awaited {
    /// See [`Answered::value`].
    pub fn value(&self) -> Result<Option<u64>> {
        self.answered.value()
    }
}

impl Gpu {
    /// Tells which engine is this rank's. Once, before anything moves.
    pub fn set_engine(&self, engine: Arc<Engine>, received: Arc<Received>) {
        let _ = self.engine.set((engine, received));
    }

    /// Lets peers, and operations to them, touch a GPU window; the first one opens the pinned memory, for `conns`
    /// connections with bulk. Set-up calls come one at a time.
    pub fn add_window(&self, id: u32, extent: Extent, conns: u32) -> Result<()> {
        let Some((engine, _)) = self.engine.get() else { return Ok(()) };
        if self.pools.get().is_none() {
            let app = engine.app().ok_or_else(|| Error::internal("a GPU window before the GPU's streams"))?;
            let _ = self.pools.set(PinnedPools::open(engine.rank, &app, engine.wants_private_context(), conns)?);
        }
        self.opened()?.add_window(id, extent);
        Ok(())
    }

    /// Ends that; waits until nothing touches it any more. `false`: something still may, after that time.
    pub fn remove_window(&self, id: u32, within: Duration) -> bool {
        self.pools.get().is_none_or(|pools| pools.remove_window(id, within))
    }

    /// Until when somebody who goes waits for copies in flight, with time until `end`.
    pub fn wait_by(&self, end: Instant) -> Instant {
        self.pools().map_or(end, |pools| pools.wait_by(end))
    }

    /// Waits for copies that are up: buffers may be freed afterwards.
    pub fn close(&self) {
        until(Instant::now() + DRAIN_WITHIN, || !self.advance_fetches());
        if self.pools().is_some_and(|s| !s.drain(DRAIN_WITHIN)) || self.advance_fetches() {
            log::info!("a communicator is closed with copies unfinished on its GPU; their pinned memory stays");
        }
    }

    /// The pinned memory, if there is any.
    #[inline]
    pub fn pools(&self) -> Option<&PinnedPools> {
        self.pools.get()
    }

    /// The pinned memory, for a transfer that needs it.
    pub fn opened(&self) -> Result<&PinnedPools> {
        self.pools.get().ok_or_else(|| Error::usage("an operation names GPU memory, but no GPU window is registered"))
    }

    /// Has `len` bytes, at most [`PinnedPools::LARGE`], brought from a window to a buffer, from [`Gpu::settle`] on:
    /// short ones by the copy kernel while one runs. `None`: no buffer is free now.
    pub fn fetch(&self, key: u32, addr: u64, len: u64) -> Result<Option<PinnedBuffer>> {
        let (pools, engine) = (self.opened()?, self.engine.get().map(|(engine, _)| engine));
        let Some(engine) = engine.filter(|_| len <= PinnedPools::SMALL) else { return pools.fetch(key, addr, len) };
        if engine.fetches_now(addr, len) {
            let buffer = pools.fetch_by(engine, &self.fetching, key, addr, len)?;
            self.fetches.fetch_add(u64::from(buffer.is_some()), Ordering::AcqRel);
            self.asked.store(true, Ordering::Release);
            return Ok(buffer);
        }
        let buffer = pools.fetch(key, addr, len)?;
        engine.miss_kernel(addr, len);
        Ok(buffer)
    }

    /// Advances what the engine fetches. Whether there is any left.
    #[inline]
    fn advance_fetches(&self) -> bool {
        let is_fetching = || self.fetching.load(Ordering::Acquire) > 0;
        if let (true, Some((engine, _))) = (is_fetching(), self.engine.get()) {
            engine.poll();
        }
        is_fetching()
    }

    /// Waits until what was given up before is no longer copied, at most until `end`. `false`: it is, or has failed.
    pub fn settle_copies(&self, end: Instant) -> bool {
        let Some(pools) = self.pools() else { return true };
        let filled_by = self.engine.get().map_or(end, |(engine, _)| engine.wait_by(end));
        let is_given_up = || {
            let is_filled = pools.is_filled_in_vain();
            if is_filled {
                self.advance_fetches();
            }
            !is_filled
        };
        until(filled_by, is_given_up) && pools.settle(end)
    }

    /// Whether peers may be told to have failed by a fault of this rank's GPU: nothing is copied for callers any more.
    /// Until then those who wait for copies have to look again.
    #[cold]
    pub fn may_tell(&self, fault: &Error) -> bool {
        let Some(pools) = self.pools() else { return true };
        let has_ended = self.engine.get().is_some_and(|(engine, _)| engine.has_failed()) || pools.has_failed();
        !has_ended || pools.ends(fault)
    }

    /// Whether a peer may touch `len` bytes of GPU memory at `addr`.
    pub fn holds(&self, key: u32, addr: u64, len: u64) -> bool {
        Key(key).is_on_gpu() && self.pools().is_some_and(|s| s.holds(key, addr, len))
    }

    /// Whether so much is on its way through the engine that no more shall be read.
    pub fn is_full(&self) -> bool {
        let full = self.engine.get().is_some_and(|(_, received)| received.is_full());
        if full {
            self.full.store(true, Ordering::Release);
        }
        full
    }

    /// Hands messages of a sender to the engine, in their order. `messages` is empty afterwards.
    pub fn take(&self, messages: &mut Vec<GpuMessage>) {
        if messages.is_empty() {
            return;
        }
        if let Some((engine, received)) = self.engine.get() {
            let _order = self.order.lock();
            received.take(engine, messages.drain(..));
            self.stirred.store(true, Ordering::Release);
        }
        messages.clear();
    }

    /// Whether a signal in host memory has to go by the engine: it follows what its sender put into GPU memory.
    pub fn has_before(&self, source: Source) -> bool {
        self.engine.get().is_some_and(|(_, received)| received.has_before(source))
    }

    /// An atomic operation of `sender`, on a word in GPU memory or, behind what it put there, in host memory. `None`:
    /// it is in host memory and nothing is in front of it; in it none: what comes of its context is dropped.
    pub fn atomic(&self, source: Source, key: u32, addr: u64, request: &AtomicRequest) -> Option<Option<Awaited>> {
        let (engine, received) = self.engine.get()?;
        if !Key(key).is_on_gpu() && !received.has_before(source) {
            return None;
        }
        let _order = self.order.lock();
        let answered = received.atomic(engine, source, (key, addr), *request);
        self.stirred.store(true, Ordering::Release);
        Some(answered.map(|answered| Awaited { answered, _one: self.awaited.clone() }))
    }

    /// What a sender's context has put before is in place, or will be when this has a value.
    pub fn in_place(&self, source: Source) -> Option<Awaited> {
        let (_, received) = self.engine.get()?;
        Some(Awaited { answered: received.in_place(source)?, _one: self.awaited.clone() })
    }

    /// Has the engine start the fetches that it was given since. Before a send, too: the copy kernel brings the bytes
    /// meanwhile.
    #[inline]
    pub fn start_fetches(&self) {
        if self.asked.load(Ordering::Acquire) && self.asked.swap(false, Ordering::AcqRel) {
            self.advance_fetches();
        }
    }

    /// Starts copies that were queued, and has somebody call `progress` if buffers came back that others wait for.
    #[inline]
    pub fn settle(&self, poller: &Poller) {
        if let Some(pools) = self.pools() {
            pools.launch();
            self.start_fetches();
            if pools.was_fed() {
                self.fed.store(true, Ordering::Release);
                poller.arm_flush(FLUSH);
            }
        }
    }

    /// Whether the engine got something to do since this was last asked: somebody has to poll it.
    #[inline]
    pub fn was_stirred(&self) -> bool {
        self.stirred.load(Ordering::Relaxed) && self.stirred.swap(false, Ordering::AcqRel)
    }

    /// Has the engine start what it got, rather than when it is next polled.
    #[inline]
    pub fn stir(&self) {
        if let (true, Some((engine, _))) = (self.was_stirred(), self.engine.get()) {
            engine.poll();
        }
    }

    /// Whether the next caller of [`Gpu::poll`] will look again.
    pub fn is_renewed(&self) -> bool {
        self.fed.load(Ordering::Acquire)
    }

    /// Whether this caller is to look again; then the next one is not.
    #[inline]
    fn was_renewed(&self) -> bool {
        self.is_renewed() && self.fed.swap(false, Ordering::AcqRel)
    }

    /// Has the next caller of [`Gpu::poll`] look again.
    #[inline]
    pub fn renew(&self) {
        self.fed.store(true, Ordering::Release);
    }

    /// Whether operations are up, and whether anybody who waits for one, for a buffer, or for room should look again.
    #[inline]
    pub fn poll(&self) -> (bool, bool) {
        let is_fetching = self.advance_fetches();
        let (up, mut news) = self.poll_pools();
        // One that begins meanwhile makes this differ once more, which costs a look.
        let fetched = self.fetches.load(Ordering::Acquire).wrapping_sub(self.fetching.load(Ordering::Acquire) as u64);
        news |= has_become(&self.fetched, fetched);
        news |= Arc::strong_count(&self.awaited) > 1;
        if self.full.load(Ordering::Acquire) && !self.is_full() {
            self.full.store(false, Ordering::Release);
            news = true;
        }
        (up | is_fetching, news)
    }

    /// The same of what goes by the streams alone, for threads that have nothing to do with the engine.
    #[inline]
    pub fn poll_pools(&self) -> (bool, bool) {
        let Some(pools) = self.pools() else { return (false, self.was_renewed()) };
        let (up, landed) = (pools.poll(), pools.landed());
        let news = has_become(&self.landed, landed);
        // Buffers come back also from the engine, where nothing else happens to anybody here.
        let fed = self.was_renewed() | pools.was_fed();
        (up, news | fed | pools.has_failed())
    }
}

/// Has a word hold `value`; whether it held another one. All threads that move bytes look all the time, and a word that
/// one writes the others fetch again: so only what changes is written.
fn has_become(word: &AtomicU64, value: u64) -> bool {
    word.load(Ordering::Acquire) != value && word.swap(value, Ordering::AcqRel) != value
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Who finds the note polls the engine, and may go to sleep afterwards.
    #[test]
    fn the_engine_has_its_work_before_anybody_is_told() {
        for _ in 0..100 {
            let received = Arc::new(Received::new(1));
            let gpu = Gpu::default();
            gpu.set_engine(Engine::new(0, [0; 16], Arc::default(), &Default::default()), received.clone());
            std::thread::scope(|s| {
                let signal =
                    GpuMessage::Signal { source: Source::far(0, 0), key: Key::gpu(0, false).0, addr: 0, value: 1 };
                s.spawn(|| gpu.take(&mut vec![signal]));
                let end = Instant::now() + Duration::from_secs(30);
                while !gpu.was_stirred() {
                    assert!(Instant::now() < end, "nobody was told");
                }
                assert!(received.has_before(Source::far(0, 0)));
            });
        }
    }
}
