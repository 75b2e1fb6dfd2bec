//! What `connect` makes: the ranks of one communicator, the fabric they settled on, their windows and contexts.

use super::hello::{settle, Hello, Settled};
use super::instance::Instance;
use super::listen::Listen;
use super::rendezvous::{Call, Contribution, Exchange};
use crate::config::{Config, FabricChoice};
use crate::error::{Error, Result};
use crate::fabric::devices::{self, DeviceKind};
use crate::fabric::soft::SoftFabric;
use crate::fabric::verbs::{self, VerbsFabric};
use crate::fabric::{ContextSpec, Fabric, Region, World};
use crate::handles::{self, Kind, Object, Reserved};
use crate::memory::cache::WindowCache;
use crate::memory::gpu::GpuMemory;
use crate::memory::ids::WindowIds;
use crate::memory::registry::{Extent, Registry};
use crate::memory::window::{Remote, Window};
use crate::rma::contexts::{Contexts, Queues};
use crate::rma::ticket::{MAX_CONTEXTS, MAX_SETS};
use crate::sync::Mutex;
use crate::wire::{Reader, Writer};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::Arc;

/// The fabric a communicator runs on.
pub enum AnyFabric {
    /// RDMA devices.
    Verbs(VerbsFabric),
    /// Shared memory and TCP.
    Soft(SoftFabric),
}

/// A communicator.
pub struct Coll {
    /// Number in this process, never used twice.
    pub id: u64,
    /// This rank among all.
    pub world: World,
    /// Where the contexts of table versions live whose operations name the communicator (GIN v11, v12): set 1.
    sets: [AtomicPtr<Contexts>; MAX_SETS],
    exchange: Exchange,
    fabric: AnyFabric,
    registry: Arc<Registry>,
    cache: Arc<WindowCache>,
    /// The `init` this communicator belongs to, and ends with at the latest.
    pub instance: Arc<Instance>,
    held: Mutex<Held>,
    closed: AtomicBool,
    /// What NCCL calls this communicator; 0 until it has a name for it.
    handle: AtomicU64,
}

/// Memory to register.
pub struct Memory {
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

#[derive(Default)]
struct Held {
    ids: WindowIds,
    windows: Vec<Arc<Window>>,
    sets: Vec<Arc<Contexts>>,
}

impl Object for Coll {
    const KIND: Kind = Kind::Coll;
}

static NEXT_COLL: AtomicU64 = AtomicU64::new(1);

impl Coll {
    /// Joins the ranks whose 128-byte handles are given. Collective. `arguments`: what is wrong with this rank's, a handle
    /// that is not there among it, which the others are told. Also returns the place for the handle.
    pub fn connect(
        listen: &Listen,
        world: World,
        handles: &[Option<[u8; 128]>],
        arguments: Result<()>,
    ) -> Result<(Arc<Self>, Reserved<Self>)> {
        let config = &listen.instance.config;
        let exchange = match Exchange::new(config, world, handles, listen.listener.clone()) {
            Ok(exchange) => exchange,
            Err(nobody_to_tell) => return Err(arguments.err().unwrap_or(nobody_to_tell)),
        };
        let registry = Arc::new(Registry::default());
        let (fabric, place) = exchange.call("connect", |call| {
            arguments?;
            exchange.check_handles()?;
            let place = reserve()?;
            let opened = Opened::open(config, listen.device, &registry)?;
            let gathered = call.step(contribution(opened.hello(config).encode()))?;
            let hellos = (0..world.nranks).map(|r| Hello::parse(r, gathered.common(r))).collect::<Result<Vec<_>>>()?;
            let fabric = opened.settle(world, &hellos)?;
            // A rank whose fabric did not come up must not be waited for later.
            call.step(Contribution::default())?;
            call.end();
            Ok((fabric, place))
        })?;
        let coll = Arc::new(Self {
            id: NEXT_COLL.fetch_add(1, Ordering::Relaxed),
            world,
            sets: [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_SETS],
            exchange,
            fabric,
            registry,
            cache: Arc::default(),
            instance: listen.instance.clone(),
            held: Mutex::default(),
            closed: AtomicBool::new(false),
            handle: AtomicU64::new(0),
        });
        listen.instance.adopt_coll(&coll);
        Ok((coll, place))
    }

    /// Refuses a collective call, on every rank.
    pub fn refuse(&self, call: &str, why: Error) -> Result<()> {
        self.check_open()?;
        self.exchange.call(call, |_| Err(why))
    }

    /// What NCCL calls this communicator.
    pub fn handle(&self) -> *mut c_void {
        self.handle.load(Ordering::Acquire) as *mut c_void
    }

    /// NCCL gets this handle.
    pub fn set_handle(&self, handle: *mut c_void) {
        self.handle.store(handle as u64, Ordering::Release);
        self.held.lock().sets.iter().for_each(|set| set.announce(handle as u64));
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::usage("this communicator is closed; make no more calls with it"));
        }
        Ok(())
    }

    /// Makes a set of contexts. Collective. `spec` reads this rank's arguments; what is wrong with them the others are
    /// told. Also returns the place for the set's handle.
    pub fn create_contexts(
        self: &Arc<Self>,
        spec: impl FnOnce() -> Result<ContextSpec>,
    ) -> Result<(Arc<Contexts>, Reserved<Contexts>)> {
        self.check_open()?;
        self.exchange.call("createContext", |call| {
            let spec = spec()?;
            if spec.contexts == 0 || spec.contexts > MAX_CONTEXTS {
                return Err(Error::argument(format!(
                    "nContexts = {}, but a set has 1 to {MAX_CONTEXTS} contexts",
                    spec.contexts
                )));
            }
            let Some(set) = (1..MAX_SETS).find(|&s| self.sets[s].load(Ordering::Acquire).is_null()) else {
                return Err(Error::usage(format!(
                    "createContext was called {} times without destroyContext, which is the limit; destroy unused ones",
                    MAX_SETS - 1
                )));
            };
            let place = reserve()?;
            let queues = match &self.fabric {
                AnyFabric::Verbs(f) => Queues::Verbs(self.contexts_on(call, f, &spec)?.into()),
                AnyFabric::Soft(f) => Queues::Soft(self.contexts_on(call, f, &spec)?.into()),
            };
            let contexts = Arc::new(Contexts::new(
                Arc::downgrade(self),
                self.id,
                self.world.nranks,
                set as u32,
                self.cache.clone(),
                queues,
            ));
            contexts.announce(self.handle() as u64);
            let mut held = self.held.lock();
            held.sets.push(contexts.clone());
            self.sets[set].store(Arc::as_ptr(&contexts) as *mut _, Ordering::Release);
            Ok((contexts, place))
        })
    }

    fn contexts_on<F: Fabric>(&self, call: &mut Call<'_>, fabric: &F, spec: &ContextSpec) -> Result<Vec<F::Context>> {
        let (pending, addressed) = fabric.prepare_contexts(spec)?;
        let gathered = call.step(Contribution { common: Writer::new().u32(spec.contexts).finish(), addressed })?;
        let different = |rank: &u32| Reader::new(gathered.common(*rank)).u32() != Some(spec.contexts);
        if let Some(rank) = (0..self.world.nranks).find(different) {
            // All ranks see it.
            call.end();
            let theirs = Reader::new(gathered.common(rank)).u32();
            return Err(Error::usage(format!(
                "createContext: this rank asks for {} contexts and rank {rank} for {}; ask for the same on all ranks",
                spec.contexts,
                theirs.map_or("an unreadable number".into(), |n| n.to_string()),
            )));
        }
        let from: Vec<&[u8]> = (0..self.world.nranks).map(|r| gathered.addressed(r)).collect();
        if !F::BARRIER_AFTER_CONTEXTS {
            call.end();
        }
        let contexts = fabric.finish_contexts(pending, &from)?;
        if F::BARRIER_AFTER_CONTEXTS {
            call.step(Contribution::default())?;
            call.end();
        }
        Ok(contexts)
    }

    /// Destroys a set; its operations are refused from here on.
    pub fn destroy_contexts(&self, set: &Contexts) {
        set.close();
        let mut held = self.held.lock();
        self.sets[set.set as usize].store(std::ptr::null_mut(), Ordering::Release);
        held.sets.retain(|s| !std::ptr::eq(Arc::as_ptr(s), set));
    }

    /// The set with this number.
    ///
    /// # Safety
    /// The set is not destroyed during `'a` (see [`handles`]).
    #[inline(always)]
    pub unsafe fn set<'a>(&self, set: u32) -> Option<&'a Contexts> {
        let set = self.sets.get(set as usize)?.load(Ordering::Acquire);
        // SAFETY: a non-null pointer is an Arc's that `held` keeps until destroy_contexts clears it.
        unsafe { set.as_ref() }
    }

    /// The first set: GIN v11 and v12 name no set in their operations.
    ///
    /// # Safety
    /// As for [`Coll::set`].
    #[inline(always)]
    pub unsafe fn first_set<'a>(&self) -> Option<&'a Contexts> {
        // SAFETY: passed on.
        unsafe { self.set(1) }
    }

    /// The first set, shared: what createContext of GIN v11 and v12 hands out.
    pub fn first_set_shared(&self) -> Result<Arc<Contexts>> {
        self.check_open()?;
        self.held.lock().sets.iter().find(|s| s.set == 1).cloned().ok_or_else(|| {
            Error::usage("this communicator has no connections; it was connected through another table version")
        })
    }

    /// Registers memory on every rank. Collective. `memory` reads this rank's arguments; what is wrong with them the
    /// others are told.
    pub fn register(&self, memory: impl FnOnce() -> Result<Memory>) -> Result<*mut c_void> {
        self.check_open()?;
        self.exchange.call("regMrSym", |call| {
            let memory = memory()?;
            let place = reserve()?;
            let claim = Claim { coll: self, id: self.held.lock().ids.take() };
            let region = Region {
                id: claim.id,
                base: memory.base,
                len: memory.len,
                strict: memory.strict,
                dma_buf: memory.dma_buf,
            };
            let window = Arc::new(self.exchange_window(call, &region, memory.gpu.as_ref())?);
            // From here on deregistration gives the number back.
            std::mem::forget(claim);
            let handle = place.fill(window.clone());
            window.handle.store(handle as u64, Ordering::Relaxed);
            self.cache.insert(&window);
            self.held.lock().windows.push(window);
            Ok(handle)
        })
    }

    fn exchange_window(&self, call: &mut Call<'_>, region: &Region, gpu: Option<&GpuMemory>) -> Result<Window> {
        let registration = match (&self.fabric, gpu) {
            (AnyFabric::Verbs(f), None) => f.register(region),
            (AnyFabric::Soft(f), None) => f.register(region),
            (AnyFabric::Soft(f), Some(memory)) => f.register_gpu(region, memory),
            (AnyFabric::Verbs(f), Some(memory)) => f.register_gpu(region, memory),
        }?;
        // The CPU must not touch GPU memory: such windows are known to the fabric alone.
        if gpu.is_none() {
            self.registry.insert(region.id, Extent { base: region.base, len: region.len });
        }
        let offer = match &self.fabric {
            AnyFabric::Soft(f) => f.offer(region, gpu.is_some()),
            AnyFabric::Verbs(_) => Vec::new(),
        };
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
                .ok_or_else(|| Error::remote(format!("rank {rank} sent a malformed description of its window")))
            })
            .collect::<Result<Box<[_]>>>();
        // All ranks have the same descriptions and offers: all come to the second step or none.
        if remote.is_err() || offers.iter().all(|offer| offer.is_empty()) {
            call.end();
        }
        let remote = remote?;
        self.share_window(call, region, &remote, &offers)?;
        Ok(Window {
            coll: self.id,
            id: region.id,
            base: region.base,
            len: region.len,
            lkey: registration.lkey,
            remote,
            registration,
            handle: AtomicU64::new(0),
        })
    }

    /// A second step where any rank's window can be shared among processes of one host.
    fn share_window(&self, call: &mut Call<'_>, region: &Region, remote: &[Remote], offers: &[&[u8]]) -> Result<()> {
        let fabric = match &self.fabric {
            AnyFabric::Soft(fabric) if offers.iter().any(|offer| !offer.is_empty()) => fabric,
            _ => return Ok(()),
        };
        let extents: Vec<_> = remote.iter().map(|r| Extent { base: r.base, len: r.len }).collect();
        let gathered = call.step(contribution(fabric.take_offers(region, &extents, offers)?))?;
        call.end();
        let reports: Vec<_> = (0..self.world.nranks).map(|rank| gathered.common(rank)).collect();
        fabric.settle_offers(region, &reports)
    }

    /// Ends a registration of this communicator.
    #[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
    pub fn deregister(&self, handle: *mut c_void) -> Result<()> {
        // A window that another thread deregisters at the same time is refused by one of the two.
        let window = handles::clone::<Window>(handle).ok_or_else(|| {
            Error::argument(format!(
                "mhandle = {handle:p} is no live memory handle: it was deregistered before, or never came from \
                 regMrSym; deregister each handle once"
            ))
        })?;
        if window.coll != self.id {
            return Err(Error::argument(format!(
                "mhandle = {handle:p} was registered with another communicator; deregister it there"
            )));
        }
        if handles::remove::<Window>(handle).is_some() {
            self.cache.remove(&window);
            self.held.lock().sets.iter().for_each(|set| set.forget(handle as u64));
            self.registry.remove(window.id);
            let mut held = self.held.lock();
            held.windows.retain(|w| !Arc::ptr_eq(w, &window));
            held.ids.give_back(window.id);
        }
        Ok(())
    }

    /// Lets all contexts advance.
    pub fn progress(&self) -> Result<()> {
        let sets: Vec<_> = self.held.lock().sets.clone();
        sets.iter().try_for_each(|s| s.progress())
    }

    /// Whether a visible signal implies every put received before it, from any peer.
    pub fn flushes_all_puts_on_any_signal(&self) -> bool {
        match &self.fabric {
            // Puts and signals are CPU stores of this rank's own memory, in order, or a completed kernel copy.
            AnyFabric::Soft(_) => true,
            // A signal of one queue pair says nothing of another's puts, which may still be on their way through PCIe.
            AnyFabric::Verbs(_) => false,
        }
    }

    /// Ends everything: contexts, windows, threads, sockets. Handles of contexts stay valid for destroyContext alone.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let held = std::mem::take(&mut *self.held.lock());
        for set in &held.sets {
            set.close();
            self.sets[set.set as usize].store(std::ptr::null_mut(), Ordering::Release);
        }
        for window in &held.windows {
            self.registry.remove(window.id);
            self.cache.remove(window);
            handles::remove::<Window>(window.handle.load(Ordering::Relaxed) as *mut c_void);
        }
        match &self.fabric {
            AnyFabric::Soft(f) => f.close(),
            // Its threads and queues end with the last context and registration.
            AnyFabric::Verbs(_) => {}
        }
    }
}

impl Drop for Coll {
    fn drop(&mut self) {
        self.close();
    }
}

fn contribution(common: Vec<u8>) -> Contribution {
    Contribution { common, addressed: Vec::new() }
}

/// A place for a handle, before the step after which the other ranks count on it.
fn reserve<T: Object>() -> Result<Reserved<T>> {
    handles::reserve().ok_or_else(|| {
        Error::system("more than 262144 objects are live; close unused communicators, contexts and windows")
    })
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

/// The fabrics this rank could use, before the ranks have settled on one.
struct Opened {
    soft: Option<SoftFabric>,
    verbs: std::result::Result<VerbsFabric, String>,
}

impl Opened {
    fn open(config: &Arc<Config>, device: usize, registry: &Arc<Registry>) -> Result<Self> {
        let verbs = match (config.fabric, devices::all(config).get(device).map(|d| &d.kind)) {
            (FabricChoice::Soft, _) => Err("OXYGIN_FABRIC=soft".into()),
            (_, Some(DeviceKind::Verbs(info))) => {
                VerbsFabric::open(info, config, registry.clone()).map_err(|e| e.message().to_string())
            }
            _ => Err(devices::why_no_verbs(config)),
        };
        let soft = match config.fabric {
            FabricChoice::Verbs => None,
            _ => Some(SoftFabric::open(config, registry.clone())?),
        };
        Ok(Self { soft, verbs })
    }

    fn hello(&self, config: &Config) -> Hello {
        Hello {
            choice: config.fabric,
            verbs: self.verbs.as_ref().map(|f| f.hello()).map_err(String::clone),
            soft: self.soft.as_ref().map(|f| f.hello()).unwrap_or_default(),
        }
    }

    fn settle(self, world: World, hellos: &[Hello]) -> Result<AnyFabric> {
        match settle(hellos, verbs::mismatch)? {
            Settled::Verbs => {
                let fabric = self.verbs.map_err(Error::internal)?;
                log::info!("fabric verbs: every rank has a usable port");
                let verbs: Vec<&[u8]> = hellos.iter().map(|h| h.verbs.as_deref().unwrap_or_default()).collect();
                fabric.join(world, &verbs)?;
                Ok(AnyFabric::Verbs(fabric))
            }
            Settled::Soft(why) => {
                let fabric = self.soft.ok_or_else(|| Error::internal("settled on soft, which was never opened"))?;
                log::info!("fabric soft: {why}");
                let soft: Vec<&[u8]> = hellos.iter().map(|h| &h.soft[..]).collect();
                fabric.join(world, &soft)?;
                Ok(AnyFabric::Soft(fabric))
            }
        }
    }
}
