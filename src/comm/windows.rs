//! Registration of memory on every rank of a communicator, and its end.

use super::coll::{contribution, Coll, OwnedObjects};
use super::device_queues::DeviceQueues;
use super::fabrics::on_fabric;
use super::rendezvous::Call;
use crate::error::{Error, Result};
use crate::fabric::{Fabric, Region};
use crate::memory::gpu::{cuda_error, GpuMemory};
use crate::memory::registry::Extent;
use crate::memory::window::{Remote, Window, WindowFacts};
use crate::sys::handles;
use crate::sys::wire::{Reader, Writer};
use oxygin_ffi::cuda::Current;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// What is to become a window: memory of this rank, and how it is used.
pub struct WindowSpec {
    /// First byte, an address in this process, of host or GPU memory.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Signals live here.
    pub strict: bool,
    /// A DMA-BUF over it, and the offset in that.
    pub dma_buf: Option<(std::os::fd::RawFd, u64)>,
    /// It is GPU memory.
    pub gpu: Option<GpuMemory>,
}

impl Coll {
    /// Registers memory on every rank. Collective. `spec` reads this rank's arguments; what is wrong with them the
    /// others are told.
    pub fn register(&self, spec: impl FnOnce() -> Result<WindowSpec>) -> Result<*mut c_void> {
        self.check_open()?;
        self.exchange.call("regMrSym", |call| {
            let spec = spec()?;
            let place = handles::reserve()?;
            let claim = Claim { coll: self, id: self.held.lock().ids.take() };
            let region =
                Region { id: claim.id, base: spec.base, len: spec.len, strict: spec.strict, dma_buf: spec.dma_buf };
            let what = self.exchange_window(call, &region, spec.gpu.as_ref())?;
            self.life.window_registered()?;
            if let Some(memory) = spec.gpu {
                let _ = self.gpu.set(memory.context);
            }
            let window = self.window_pool.take();
            window.describe(what);
            // From here on deregistration gives the number back.
            std::mem::forget(claim);
            let handle = place.fill(window.clone());
            window.handle.store(handle as u64, Ordering::Relaxed);
            self.observer.window_added(&window);
            self.held.lock().windows.push(window);
            Ok(handle)
        })
    }

    /// Makes a context of this rank's GPU current, where the calling thread has that of another one, or none, and a
    /// window has told which it is: what is made for device code has to be where that runs. `None`: nothing is to do.
    pub(super) fn enter_gpu(&self) -> Result<Option<Current<'_>>> {
        let failed = |e| cuda_error("the GPU of this communicator's windows", &e);
        let Some(context) = self.gpu.get() else { return Ok(None) };
        match context.cuda().current().map_err(failed)? {
            Some((_, device)) if device == context.device() => Ok(None),
            _ => context.enter().map(Some).map_err(failed),
        }
    }

    fn exchange_window(&self, call: &mut Call<'_>, region: &Region, gpu: Option<&GpuMemory>) -> Result<WindowFacts> {
        let registration = on_fabric!(&self.fabric, f => match gpu {
            None => f.register(region),
            Some(memory) => f.register_gpu(region, memory),
        })?;
        // The CPU must not touch GPU memory: such windows are known to the fabric alone.
        if gpu.is_none() {
            self.registry.insert(region.id, Extent { base: region.base, len: region.len });
        }
        let offer = on_fabric!(&self.fabric, f => f.offer(region, gpu));
        let mine = Writer::new().u64(region.base).u64(region.len).u32(registration.rkey).bytes(&offer).finish();
        let gathered = call.step(contribution(mine))?;
        let mut offers = Vec::new();
        let remote = (0..self.world.nranks)
            .map(|rank| {
                let mut r = Reader::new(gathered.common(rank));
                (|| {
                    let remote = Remote { base: r.u64()?, len: r.u64()?, rkey: r.u32()? };
                    offers.push(r.bytes()?);
                    r.end()?;
                    remote.base.checked_add(remote.len)?;
                    Some(remote)
                })()
                .ok_or_else(|| Error::protocol(format!("rank {rank} sent a malformed description of its window")))
            })
            .collect::<Result<Box<[_]>>>();
        // All ranks have the same descriptions and offers: all come to the second step or none.
        if remote.is_err() || offers.iter().all(|offer| offer.is_empty()) {
            call.end();
        }
        let remote = remote?;
        self.share_window(call, region, &remote, &offers)?;
        Ok(WindowFacts { id: region.id, base: region.base, len: region.len, remote, registration })
    }

    /// A second step where any rank's window can be shared among processes of one host.
    fn share_window(&self, call: &mut Call<'_>, region: &Region, remote: &[Remote], offers: &[&[u8]]) -> Result<()> {
        let taken = on_fabric!(&self.fabric, f => f.take_offers(region, remote, offers))?;
        if offers.iter().all(|offer| offer.is_empty()) {
            return Ok(());
        }
        let gathered = call.step(contribution(taken))?;
        call.end();
        let reports: Vec<_> = (0..self.world.nranks).map(|rank| gathered.common(rank)).collect();
        on_fabric!(&self.fabric, f => f.settle_offers(region, &reports))
    }

    /// Ends a registration of this communicator, once what device code has left behind is carried out: a kernel may end
    /// behind entries that it has not waited for, and they may name the window. What comes meanwhile is not waited for.
    pub fn deregister(&self, handle: *mut c_void) -> Result<()> {
        self.window(handle)?;
        self.catch_up();
        self.deregister_unnamed(handle)
    }

    /// The window of this communicator that a handle is.
    #[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
    fn window(&self, handle: *mut c_void) -> Result<Arc<Window>> {
        let window = handles::clone::<Window>(handle).ok_or_else(|| not_live(handle))?;
        if window.coll != self.id {
            return Err(Error::argument(format!(
                "mhandle = {handle:p} was registered with another communicator; deregister it there"
            )));
        }
        Ok(window)
    }

    /// Ends a registration that no entry of device code names any more.
    #[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
    fn deregister_unnamed(&self, handle: *mut c_void) -> Result<()> {
        let window = self.window(handle)?;
        // A window that another thread deregisters at the same time is refused by one of the two.
        handles::remove::<Window>(handle).ok_or_else(|| not_live(handle))?;
        self.end_window(handle, window)
    }

    /// Ends the registration of memory of a set's own, once. closeColl may have done so already, or be about to: then
    /// this says whether nobody is at the memory any more.
    #[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
    pub(super) fn deregister_own(&self, handle: *mut c_void) -> Result<()> {
        match handles::remove::<Window>(handle) {
            Some(window) => self.end_window(handle, window),
            // Held until it is through with all of them.
            None => self.unended.lock().get(&(handle as u64)).map_or(Ok(()), |error| Err(error.clone())),
        }
    }

    /// Ends the registrations of all windows, whose handles are gone, once the fabric has closed.
    pub(super) fn end_registrations(&self, held: &OwnedObjects, unended: &mut HashMap<u64, Error>) {
        for window in &held.windows {
            let ended = window.registration().map_or(Ok(()), |registration| registration.guard.end());
            if let Err(error) = ended {
                log::warn!("closeColl: {}", error.message());
                let handle = window.handle.load(Ordering::Relaxed);
                unended.insert(handle, error);
                // What is a set's own would go with it.
                let queues = held.sets.iter().filter_map(|set| set.device());
                queues.filter(|q| q.windows().any(|own| own as u64 == handle)).for_each(DeviceQueues::keep_memory);
            }
            window.release();
        }
    }

    /// Of a window whose handle was just taken out.
    fn end_window(&self, handle: *mut c_void, window: Arc<Window>) -> Result<()> {
        self.observer.window_removed(&window);
        self.keys.remove(handle as u64);
        self.records.lock().remove(handle as u64);
        self.held.lock().sets.iter().for_each(|set| set.forget(handle as u64));
        let id = window.id();
        let ended = window.registration().map_or(Ok(()), |registration| registration.end(&self.registry, id));
        let mut held = self.held.lock();
        held.windows.retain(|w| !Arc::ptr_eq(w, &window));
        // Whoever is still at it would seem to be at the next one of that number.
        if ended.is_ok() {
            held.ids.give_back(id);
        }
        drop(held);
        self.window_pool.give_back(window);
        ended
    }
}

fn not_live(handle: *mut c_void) -> Error {
    Error::argument(format!(
        "mhandle = {handle:p} is no live memory handle: it was deregistered before, or never came from regMrSym; \
         deregister each handle once"
    ))
}

/// A window's number until the window exists: what comes to nothing gives it back.
struct Claim<'a> {
    coll: &'a Coll,
    id: u32,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.coll.registry.remove(self.id);
        self.coll.held.lock().ids.give_back(self.id);
    }
}
