//! What `connect` makes: the ranks of one communicator, the fabric they settled on, their windows and contexts.

use super::contexts::{Contexts, EngineKind, Name};
use super::fabrics::{on_fabric, queues_on, AnyFabric, Opened};
use super::hello::Hello;
use super::instance::Instance;
use super::listen::Listen;
use super::records::Records;
use super::rendezvous::{Call, Contribution, Exchange};
use super::room::Room;
use crate::error::{Error, Result};
use crate::fabric::{ContextSpec, Fabric, Region, World};
use crate::gdaki::soft::keys::Keys;
use crate::memory::gpu::GpuMemory;
use crate::memory::ids::WindowIds;
use crate::memory::registry::{Extent, Registry};
use crate::memory::window::{Remote, Window};
use crate::proxy::engine::{Engine, Settings};
use crate::rma::request::{MAX_CONTEXTS, MAX_SETS};
use crate::sys::handles::{self, Kind, Object, Reserved};
use crate::sys::sync::Mutex;
use crate::sys::wire::{Reader, Writer};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::Arc;

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
    /// How operations wait for room.
    room: Room,
    observer: Box<dyn Observer>,
    /// The `init` this communicator belongs to, and ends with at the latest.
    pub instance: Arc<Instance>,
    held: Mutex<Held>,
    /// Its threads run from the first set with queues of this library's on.
    engine: Mutex<Option<Arc<Engine>>>,
    /// Of windows, for entries of the software NIC.
    keys: Arc<Keys>,
    /// What device code of GDAKI is given of windows.
    records: Mutex<Records>,
    closed: AtomicBool,
    /// Depth of queues that connect asked for, where a table's connect does.
    connected_depth: AtomicI32,
    /// What NCCL calls this communicator; 0 until it has a name for it.
    handle: AtomicU64,
}

/// Who is told what a communicator has, to find it by a shorter way. Nothing here depends on it.
pub trait Observer: Send + Sync {
    /// A window has its handle; operations may name it from here on.
    fn window_added(&self, window: &Window);
    /// A window's registration is about to end.
    fn window_removed(&self, window: &Window);
    /// A set of contexts is connected; nobody has used it yet.
    fn contexts_added(&self, set: &Contexts);
    /// The communicator has this handle from here on.
    fn coll_named(&self, handle: *mut c_void);
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
    /// Joins the ranks whose 128-byte handles are given. Collective. `arguments`: what is wrong with this rank's, a
    /// handle that is not there among it, which the others are told. Also returns the place for the handle.
    pub fn connect(
        listen: &Listen,
        world: World,
        handles: &[Option<[u8; 128]>],
        arguments: Result<()>,
        observer: Box<dyn Observer>,
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
            room: Room::of(config),
            observer,
            instance: listen.instance.clone(),
            held: Mutex::default(),
            engine: Mutex::default(),
            keys: Arc::default(),
            records: Mutex::default(),
            closed: AtomicBool::new(false),
            connected_depth: AtomicI32::new(0),
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

    /// Depth of queues that connect asked for; 0: it left that open.
    pub fn connected_depth(&self) -> i32 {
        self.connected_depth.load(Ordering::Relaxed)
    }

    /// What connect asked for.
    pub fn set_connected_depth(&self, depth: i32) {
        self.connected_depth.store(depth, Ordering::Relaxed);
    }

    /// What NCCL calls this communicator.
    pub fn handle(&self) -> *mut c_void {
        self.handle.load(Ordering::Acquire) as *mut c_void
    }

    /// NCCL gets this handle.
    pub fn set_handle(&self, handle: *mut c_void) {
        self.handle.store(handle as u64, Ordering::Release);
        self.observer.coll_named(handle);
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::usage("this communicator is closed; make no more calls with it"));
        }
        Ok(())
    }

    /// Makes a set of contexts of this kind. Collective. `spec` reads this rank's arguments; what is wrong with them
    /// the others are told. Also returns the place for the set's handle.
    pub fn create_contexts(
        self: &Arc<Self>,
        kind: EngineKind,
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
            let queues = queues_on!(&self.fabric, f => self.contexts_on(call, f, kind, &spec)?);
            let name = Name { coll: self.id, nranks: self.world.nranks, set: set as u32 };
            let contexts = Arc::new(Contexts::new(Arc::downgrade(self), name, self.room, queues));
            self.observer.contexts_added(&contexts);
            let mut held = self.held.lock();
            held.sets.push(contexts.clone());
            self.sets[set].store(Arc::as_ptr(&contexts) as *mut _, Ordering::Release);
            Ok((contexts, place))
        })
    }

    fn contexts_on<F: Fabric>(
        &self,
        call: &mut Call<'_>,
        fabric: &F,
        kind: EngineKind,
        spec: &ContextSpec,
    ) -> Result<Vec<F::Context>> {
        let (pending, addressed) = fabric.prepare_contexts(spec)?;
        let mine = Writer::new().u32(spec.contexts).u8(kind.number()).finish();
        let gathered = call.step(Contribution { common: mine, addressed })?;
        if let Some(why) = (0..self.world.nranks).find_map(|r| differs(kind, spec, r, gathered.common(r))) {
            // All ranks see it.
            call.end();
            return Err(Error::usage(why));
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
            self.observer.window_added(&window);
            self.held.lock().windows.push(window);
            Ok(handle)
        })
    }

    fn exchange_window(&self, call: &mut Call<'_>, region: &Region, gpu: Option<&GpuMemory>) -> Result<Window> {
        let registration = on_fabric!(&self.fabric, f => match gpu {
            None => f.register(region),
            Some(memory) => f.register_gpu(region, memory),
        })?;
        // The CPU must not touch GPU memory: such windows are known to the fabric alone.
        if gpu.is_none() {
            self.registry.insert(region.id, Extent { base: region.base, len: region.len });
        }
        let offer = on_fabric!(&self.fabric, f => f.offer(region, gpu.is_some()));
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
        if offers.iter().all(|offer| offer.is_empty()) {
            return Ok(());
        }
        let extents: Vec<_> = remote.iter().map(|r| Extent { base: r.base, len: r.len }).collect();
        let taken = on_fabric!(&self.fabric, f => f.take_offers(region, &extents, offers))?;
        let gathered = call.step(contribution(taken))?;
        call.end();
        let reports: Vec<_> = (0..self.world.nranks).map(|rank| gathered.common(rank)).collect();
        on_fabric!(&self.fabric, f => f.settle_offers(region, &reports))
    }

    /// Ends a registration of this communicator.
    #[allow(clippy::not_unsafe_ptr_arg_deref, reason = "a handle is a number: it is looked up, never followed")]
    pub fn deregister(&self, handle: *mut c_void) -> Result<()> {
        // A window that another thread deregisters at the same time is refused by one of the two.
        let not_live = || {
            Error::argument(format!(
                "mhandle = {handle:p} is no live memory handle: it was deregistered before, or never came from \
                 regMrSym; deregister each handle once"
            ))
        };
        let window = handles::clone::<Window>(handle).ok_or_else(not_live)?;
        if window.coll != self.id {
            return Err(Error::argument(format!(
                "mhandle = {handle:p} was registered with another communicator; deregister it there"
            )));
        }
        handles::remove::<Window>(handle).ok_or_else(not_live)?;
        self.observer.window_removed(&window);
        self.keys.remove(handle as u64);
        self.records.lock().remove(handle as u64);
        self.held.lock().sets.iter().for_each(|set| set.forget(handle as u64));
        // Its number is free when nobody is at it any more.
        let ended = window.registration.end(&self.registry, window.id);
        let mut held = self.held.lock();
        held.windows.retain(|w| !Arc::ptr_eq(w, &window));
        held.ids.give_back(window.id);
        ended
    }

    /// By which entries of the software NIC name this communicator's windows.
    pub fn keys(&self) -> &Arc<Keys> {
        &self.keys
    }

    /// What device code of GDAKI is given of this communicator's windows.
    pub(super) fn records(&self) -> &Mutex<Records> {
        &self.records
    }

    /// The engine, started with `settings` if there is none.
    pub(super) fn engine(&self, settings: impl FnOnce() -> Settings) -> Result<Arc<Engine>> {
        let mut engine = self.engine.lock();
        self.check_open()?;
        if engine.is_none() {
            *engine = Some(Arc::new(Engine::start(&settings())?));
        }
        engine.clone().ok_or_else(|| Error::internal("no engine"))
    }

    /// Lets all contexts advance.
    pub fn progress(&self) -> Result<()> {
        let sets: Vec<_> = self.held.lock().sets.clone();
        sets.iter().try_for_each(|s| s.progress())
    }

    /// Whether a visible signal implies every put received before it, from any peer.
    pub fn flushes_all_puts_on_any_signal(&self) -> bool {
        fn of<F: Fabric>(_: &F) -> bool {
            F::FLUSHES_ALL_PUTS_ON_ANY_SIGNAL
        }
        on_fabric!(&self.fabric, f => of(f))
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
        drop(self.engine.lock().take());
        for window in &held.windows {
            self.registry.remove(window.id);
            self.observer.window_removed(window);
            handles::remove::<Window>(window.handle.load(Ordering::Relaxed) as *mut c_void);
        }
        *self.records.lock() = Records::default();
        on_fabric!(&self.fabric, f => f.close());
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

/// Why contexts of which a rank told this are others than this rank's; `None`: they are the same.
fn differs(kind: EngineKind, spec: &ContextSpec, rank: u32, told: &[u8]) -> Option<String> {
    let mut told = Reader::new(told);
    let (contexts, theirs) = (told.u32(), told.u8().and_then(EngineKind::from_number));
    if theirs != Some(kind) {
        return Some(format!(
            "createContext: this rank's contexts are those of OXYGIN_ENGINE={} and rank {rank}'s those of {}; set \
             OXYGIN_ENGINE and NCCL_GIN_TYPE the same on all ranks",
            kind.name(),
            theirs.map_or("one that it does not know".into(), |theirs| format!("OXYGIN_ENGINE={}", theirs.name())),
        ));
    }
    if contexts != Some(spec.contexts) {
        return Some(format!(
            "createContext: this rank asks for {} contexts and rank {rank} for {}; ask for the same on all ranks",
            spec.contexts,
            contexts.map_or("an unreadable number".into(), |n| n.to_string()),
        ));
    }
    None
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
