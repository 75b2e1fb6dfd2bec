//! What `connect` makes: the ranks of one communicator, the fabric they settled on, their windows and contexts.

use super::backend::choose::{choose, FabricPromise};
use super::backend::life::Life;
use super::backend::offer::EngineOffer;
use super::backend::report::QueueOwner;
use super::backpressure::Backpressure;
use super::contexts::{Contexts, EngineKind, Name};
use super::device_queues::DeviceQueues;
use super::fabrics::{on_fabric, queues_on, AnyFabric, Opened, Queues};
use super::hello::Hello;
use super::instance::Instance;
use super::listen::Listen;
use super::records::Records;
use super::rendezvous::{Call, Contribution, Exchange};
use crate::error::{Error, Result};
use crate::fabric::{ContextSpec, Fabric, World};
use crate::gdaki::mlx5::Mlx5Nic;
use crate::gdaki::soft::keys::Keys;
use crate::memory::ids::WindowIds;
use crate::memory::registry::Registry;
use crate::memory::window::Window;
use crate::memory::window_pool::WindowPool;
use crate::proxy::engine::{Engine, Settings};
use crate::rma::request::{RequestForm, MAX_CONTEXTS, MAX_SETS};
use crate::sys::handles::{self, Kind, Object, Reserved};
use crate::sys::sync::Mutex;
use crate::sys::wire::{Reader, Writer};
use oxygin_ffi::cuda::Context;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A communicator.
pub struct Coll {
    /// Number in this process, never used twice.
    pub id: u64,
    /// This rank among all.
    pub world: World,
    /// Where the contexts of table versions live whose operations name the communicator (GIN v11, v12): set 1.
    sets: [AtomicPtr<Contexts>; MAX_SETS],
    pub(super) exchange: Exchange,
    pub(super) fabric: AnyFabric,
    pub(super) registry: Arc<Registry>,
    pub(super) window_pool: Arc<WindowPool>,
    /// How operations wait for room.
    backpressure: Backpressure,
    pub(super) observer: Box<dyn Observer>,
    /// The `init` this communicator belongs to, and ends with at the latest.
    pub instance: Arc<Instance>,
    pub(super) held: Mutex<OwnedObjects>,
    /// Why closeColl could not end a window, by its handle.
    pub(super) unended: Mutex<HashMap<u64, Error>>,
    /// Its threads run from the first set with queues of this library's on.
    engine: Mutex<Option<Arc<Engine>>>,
    /// The context of its first window in GPU memory: that GPU is this rank's.
    pub(super) gpu: OnceLock<Arc<Context>>,
    /// Of windows, for entries of the software NIC.
    pub(super) keys: Arc<Keys>,
    /// The port whose queues device code gets, with the engine of mlx5 devices.
    pub(super) mlx5: Option<Arc<Mlx5Nic>>,
    /// What device code of GDAKI is given of windows.
    pub(super) records: Mutex<Records>,
    pub(super) life: Life,
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

/// What the table that connects has told NCCL of itself.
#[derive(Clone, Copy, Debug)]
pub struct Connecting {
    /// Whose queues device code writes into.
    pub owner: QueueOwner,
    /// Kernels may be compiled for GDAKI alone.
    pub gdaki_first: bool,
}

/// What lives with a communicator.
#[derive(Default)]
pub(super) struct OwnedObjects {
    /// Numbers of windows that are taken.
    pub(super) ids: WindowIds,
    /// Its windows.
    pub(super) windows: Vec<Arc<Window>>,
    /// Its sets of contexts.
    pub(super) sets: Vec<Arc<Contexts>>,
}

impl Object for Coll {
    const KIND: Kind = Kind::Coll;
}

static NEXT_COLL: AtomicU64 = AtomicU64::new(1);

impl Coll {
    /// Whether a visible signal implies every put received before it, from any peer, as NCCL is told. A fabric sees to
    /// that where it is told to confirm puts ([`Fabric::confirm_puts`]), which costs an answer behind them; it is told
    /// so for device code alone that cannot be told otherwise, that of GDAKI.
    pub const FLUSHES_ALL_PUTS_ON_ANY_SIGNAL: bool = false;

    /// Joins the ranks whose 128-byte handles are given. Collective. `arguments`: what is wrong with this rank's, a
    /// handle that is not there among it, which the others are told. Also returns the place for the handle.
    pub fn connect(
        listen: &Listen,
        world: World,
        handles: &[Option<[u8; 128]>],
        arguments: Result<()>,
        table: Connecting,
        observer: Box<dyn Observer>,
    ) -> Result<(Arc<Self>, Reserved<Self>)> {
        let config = &listen.instance.config;
        let mut exchange = match Exchange::new(config, world, handles, listen.listener.clone()) {
            Ok(exchange) => exchange,
            Err(nobody_to_tell) => return Err(arguments.err().unwrap_or(nobody_to_tell)),
        };
        exchange.ends_with(listen.instance.is_over().clone());
        let registry = Arc::new(Registry::default());
        let life = Life::default();
        let ((fabric, mlx5), place) = exchange.call("connect", |call| {
            arguments?;
            exchange.check_handles()?;
            let place = handles::reserve()?;
            life.probing()?;
            let opened = Opened::open(config, listen.device, &registry, (table.owner, table.gdaki_first))?;
            let engine = EngineOffer::new(config, table.owner, opened.mlx5());
            let gathered = call.step(contribution(opened.hello(config, engine).encode()))?;
            let hellos = (0..world.nranks).map(|r| Hello::parse(r, gathered.common(r))).collect::<Result<Vec<_>>>()?;
            let fabric = opened.settle(world, &hellos)?;
            let engines: Vec<_> = hellos.into_iter().map(|hello| hello.engine).collect();
            let is_verbs = matches!(fabric, AnyFabric::Verbs(_));
            let promise =
                FabricPromise { signals_of_all_peers: on_fabric!(&fabric, f => f.can_confirm_puts()), is_verbs };
            // All ranks come to the same.
            let chosen = choose(&engines, promise, table.gdaki_first).inspect_err(|_| call.end())?;
            if chosen.kind != EngineKind::Nccl {
                log::info!("engine {} (rank {} of {})", chosen.sentence(), world.rank, world.nranks);
            }
            if chosen.kind == EngineKind::GdakiSoft && engines.iter().any(|offer| offer.signals_of_all_peers) {
                on_fabric!(&fabric, f => f.confirm_puts());
            }
            let mlx5 = match (chosen.kind, &fabric) {
                (EngineKind::Gdaki, AnyFabric::Verbs(fabric)) => Some(Mlx5Nic::open(fabric, config)?),
                _ => None,
            };
            life.choose(chosen)?;
            // A rank whose fabric did not come up must not be waited for later.
            call.step(Contribution::default())?;
            call.end();
            Ok(((fabric, mlx5), place))
        })?;
        let id = NEXT_COLL.fetch_add(1, Ordering::Relaxed);
        let coll = Arc::new(Self {
            id,
            world,
            sets: [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_SETS],
            exchange,
            mlx5,
            fabric,
            registry,
            window_pool: Arc::new(WindowPool::new(id, world.nranks as usize)),
            backpressure: Backpressure::of(config),
            observer,
            instance: listen.instance.clone(),
            held: Mutex::default(),
            unended: Mutex::default(),
            engine: Mutex::default(),
            gpu: OnceLock::new(),
            keys: Arc::default(),
            records: Mutex::default(),
            life,
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

    pub(super) fn check_open(&self) -> Result<()> {
        self.life.check_open()
    }

    /// Who executes what device code of this communicator writes, as all ranks agreed at connect.
    pub fn engine_kind(&self) -> EngineKind {
        self.life.engine()
    }

    /// Makes a set of contexts of this kind. Collective. `spec` reads this rank's arguments; what is wrong with them
    /// the others are told. Also returns the place for the set's handle.
    pub fn create_contexts(
        self: &Arc<Self>,
        kind: EngineKind,
        spec: impl FnOnce() -> Result<ContextSpec>,
    ) -> Result<(Arc<Contexts>, Reserved<Contexts>)> {
        let (set, place, ()) = self.add_set(|call| {
            if self.mlx5.is_some() {
                return Err(Error::usage(
                    "the contexts of this communicator are for device code of GDAKI alone (OXYGIN_ENGINE=gdaki)",
                ));
            }
            let spec = spec()?;
            check_contexts(spec.contexts)?;
            let queues = queues_on!(&self.fabric, f => self.contexts_on(call, f, kind, &spec)?);
            Ok((queues, ()))
        })?;
        Ok((set, place))
    }

    /// Makes a set of contexts out of what `make` makes, which takes all steps of the call. Also returns the place for
    /// the set's handle.
    pub(super) fn add_set<T>(
        self: &Arc<Self>,
        make: impl FnOnce(&mut Call<'_>) -> Result<(Queues, T)>,
    ) -> Result<(Arc<Contexts>, Reserved<Contexts>, T)> {
        self.check_open()?;
        self.exchange.call("createContext", |call| {
            let sets = RequestForm::of(self.world.nranks).sets();
            let Some(set) = (1..sets).find(|&s| self.sets[s].load(Ordering::Acquire).is_null()) else {
                return Err(Error::usage(format!(
                    "createContext was called {} times without destroyContext, which is the limit; destroy unused ones",
                    sets - 1
                )));
            };
            let place = handles::reserve()?;
            let (queues, made) = make(call)?;
            let name = Name { coll: self.id, nranks: self.world.nranks, set: set as u32 };
            let owner = Arc::downgrade(self);
            let contexts = Arc::new(Contexts::new(owner, name, self.backpressure, queues, self.window_pool.clone()));
            self.life.active()?;
            self.observer.contexts_added(&contexts);
            let mut held = self.held.lock();
            held.sets.push(contexts.clone());
            self.sets[set].store(Arc::as_ptr(&contexts) as *mut _, Ordering::Release);
            Ok((contexts, place, made))
        })
    }

    fn contexts_on<F: Fabric>(
        &self,
        call: &mut Call<'_>,
        fabric: &F,
        kind: EngineKind,
        spec: &ContextSpec,
    ) -> Result<Vec<F::Context>> {
        let (mut pending, addressed) = fabric.prepare_contexts(spec)?;
        let mine = told(kind, spec).finish();
        let gathered = call.step(Contribution { common: mine, addressed })?;
        if let Some(why) = (0..self.world.nranks).find_map(|r| differs(kind, spec, r, gathered.common(r))) {
            // All ranks see it.
            call.end();
            return Err(Error::usage(why));
        }
        let from: Vec<&[u8]> = (0..self.world.nranks).map(|r| gathered.addressed(r)).collect();
        if let Some(addressed) = fabric.agree(&mut pending, &from)? {
            let agreed = call.step(Contribution { common: Vec::new(), addressed })?;
            let agreed: Vec<&[u8]> = (0..self.world.nranks).map(|r| agreed.addressed(r)).collect();
            fabric.take_agreed(&mut pending, &agreed)?;
        }
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

    /// By which entries of the software NIC name this communicator's windows.
    pub fn keys(&self) -> &Arc<Keys> {
        &self.keys
    }

    /// The engine, started with `settings` if there is none. Fails where it cannot take anything up any more.
    pub(super) fn engine(&self, settings: impl FnOnce() -> Settings) -> Result<Arc<Engine>> {
        let mut engine = self.engine.lock();
        self.check_open()?;
        if engine.is_none() {
            *engine = Some(Arc::new(Engine::start(&settings())?));
        }
        let engine = engine.clone().ok_or_else(|| Error::internal("no engine"))?;
        engine.check()?;
        Ok(engine)
    }

    /// Waits until the engine has carried out what device code of this communicator has rung by now.
    pub(super) fn catch_up(&self) {
        let engine = self.engine.lock().clone();
        if let Some(engine) = engine {
            engine.catch_up();
        }
    }

    /// Lets all contexts advance.
    pub fn progress(&self) -> Result<()> {
        let sets: Vec<_> = self.held.lock().sets.clone();
        sets.iter().try_for_each(|s| s.progress())
    }

    /// Ends everything: contexts, windows, threads, sockets. Handles of contexts stay valid for destroyContext alone;
    /// what sets have on the GPU goes without it, as NCCL may call neither that nor finalize.
    pub fn close(&self) {
        if !self.life.destroy() {
            return;
        }
        self.exchange.end();
        let held = std::mem::take(&mut *self.held.lock());
        for set in &held.sets {
            set.close();
            self.sets[set.set as usize].store(std::ptr::null_mut(), Ordering::Release);
        }
        // Its threads are joined without the lock, for which a deregistration may wait.
        let engine = self.engine.lock().take();
        drop(engine);
        let mut unended = self.unended.lock();
        for window in &held.windows {
            self.registry.remove(window.id());
            self.observer.window_removed(window);
            handles::remove::<Window>(window.handle.load(Ordering::Relaxed) as *mut c_void);
        }
        *self.records.lock() = Records::default();
        on_fabric!(&self.fabric, f => f.close());
        self.end_registrations(&held, &mut unended);
        held.sets.iter().filter_map(|set| set.device()).for_each(DeviceQueues::leave_memory);
        self.instance.forget_coll(self);
    }
}

impl Drop for Coll {
    fn drop(&mut self) {
        self.close();
    }
}

pub(super) fn contribution(common: Vec<u8>) -> Contribution {
    Contribution { common, addressed: Vec::new() }
}

/// Whether a set can have so many contexts.
pub(super) fn check_contexts(contexts: u32) -> Result<()> {
    if contexts == 0 || contexts > MAX_CONTEXTS {
        return Err(Error::argument(format!("nContexts = {contexts}, but a set has 1 to {MAX_CONTEXTS} contexts")));
    }
    Ok(())
}

/// What ranks tell each other first of contexts that they are about to make.
pub(super) fn told(kind: EngineKind, spec: &ContextSpec) -> Writer {
    let mut message = Writer::new();
    message.u32(spec.contexts).u8(kind.number()).u32(spec.rank_stride);
    message
}

/// Why contexts of which a rank told this are others than this rank's; `None`: they are the same.
pub(super) fn differs(kind: EngineKind, spec: &ContextSpec, rank: u32, told: &[u8]) -> Option<String> {
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
    let theirs = told.u32();
    if theirs.map(|stride| stride.max(1)) != Some(spec.rank_stride.max(1)) {
        return Some(format!(
            "createContext: this rank asks for rankStride = {} and rank {rank} for {}; ask for the same on all ranks",
            spec.rank_stride,
            theirs.map_or("an unreadable number".into(), |n| n.to_string()),
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_ask_for_other_contexts_are_told_apart() {
        let spec = |contexts, rank_stride| ContextSpec { contexts, queue_depth: 0, traffic_class: None, rank_stride };
        let seen = |mine, kind, theirs| differs(EngineKind::Own, &mine, 3, &told(kind, &theirs).finish());
        assert_eq!(seen(spec(4, 8), EngineKind::Own, spec(4, 8)), None);
        assert_eq!(seen(spec(4, 0), EngineKind::Own, spec(4, 1)), None, "both reach all");
        for (kind, theirs, named) in [
            (EngineKind::GdakiSoft, spec(4, 8), "rank 3's those of OXYGIN_ENGINE=gdaki-soft"),
            (EngineKind::Own, spec(5, 8), "4 contexts and rank 3 for 5"),
            (EngineKind::Own, spec(4, 2), "rankStride = 8 and rank 3 for 2"),
        ] {
            let why = seen(spec(4, 8), kind, theirs).unwrap();
            assert!(why.contains(named), "{why}");
        }
        let cut = told(EngineKind::Own, &spec(4, 8)).finish();
        let why = differs(EngineKind::Own, &spec(4, 8), 3, &cut[..6]);
        assert!(why.is_some_and(|why| why.contains("unreadable")));
    }
}
