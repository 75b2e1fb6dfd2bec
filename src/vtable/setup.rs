//! The calls that all table versions share: everything but the data operations and createContext.

use super::fast::Ways;
use super::guard::{dead, guard, null, object, shared, store};
use super::own;
use crate::comm::backend::report::QueueOwner;
use crate::comm::coll::Coll;
use crate::comm::coll::Connecting;
use crate::comm::contexts::{Contexts, EngineKind};
use crate::comm::instance::{Instance, TableKind};
use crate::comm::listen::Listen;
use crate::comm::nccl;
use crate::comm::rendezvous::Listener;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fabric::devices::{self, Device, DeviceKind};
use crate::fabric::{ContextSpec, World};
use crate::proxy::memory::Memory;
use crate::rma::request::MAX_RANKS;
use crate::sys::handles::{self, Kind, Reserved};
use crate::sys::version;
use crate::telemetry;
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// `init` of the GIN tables.
///
/// # Safety
/// As `InitFn`.
pub unsafe extern "C" fn init(ctx: *mut *mut c_void, comm_id: u64, logger: Option<DebugLogger>) -> NcclResult {
    // SAFETY: passed on.
    unsafe { init_of(ctx, comm_id, logger, TableKind::Gin) }
}

/// `init` of the RMA tables: GIN tables look whether NCCL has one of them (see [`own::owner`]).
///
/// # Safety
/// As `InitFn`.
pub unsafe extern "C" fn init_rma(ctx: *mut *mut c_void, comm_id: u64, logger: Option<DebugLogger>) -> NcclResult {
    // SAFETY: passed on.
    unsafe { init_of(ctx, comm_id, logger, TableKind::Rma) }
}

/// # Safety
/// As `InitFn`.
unsafe fn init_of(ctx: *mut *mut c_void, comm_id: u64, logger: Option<DebugLogger>, table: TableKind) -> NcclResult {
    guard("init", || {
        telemetry::panic::silence();
        // SAFETY: NCCL's logger is a function of the process, valid as long as the plugin is loaded.
        unsafe { telemetry::log::install(logger) };
        log::info!("oxygin {}, communicator {comm_id:#x}", version::BUILD);
        let nccl = nccl::learn_from(logger.map_or(std::ptr::null(), |function| function as *const c_void));
        if ctx.is_null() {
            return Err(null("ctx"));
        }
        let config = Config::from_env();
        // RDMA devices carry queues out by themselves.
        let is_soft = || devices::all(&config).iter().any(|device| matches!(device.kind, DeviceKind::Soft));
        if config.may_bring_queues() && is_soft() {
            Memory::make_first_managed();
        }
        let instance = Arc::new(Instance::new(config, comm_id, table, nccl));
        // SAFETY: `ctx` is not NULL.
        unsafe { store("ctx", ctx, handles::insert(instance)?) }
    })
}

/// # Safety
/// As `DevicesFn`.
pub unsafe extern "C" fn devices(ndev: *mut c_int) -> NcclResult {
    guard("devices", || {
        let n = devices::all(&Config::from_env()).len();
        // SAFETY: the caller passes NULL or a writable int.
        unsafe { store("ndev", ndev, n as c_int) }
    })
}

fn device(dev: c_int) -> Result<&'static Device> {
    let all = devices::all(&Config::from_env());
    usize::try_from(dev).ok().and_then(|d| all.get(d)).ok_or_else(|| {
        Error::argument(format!("dev = {dev}, but there are devices 0 to {}", all.len().saturating_sub(1)))
    })
}

/// # Safety
/// As `PropertiesV11Fn`.
pub unsafe extern "C" fn get_properties_v11(dev: c_int, props: *mut PropertiesV11) -> NcclResult {
    // SAFETY: the caller passes NULL or a writable struct.
    guard("getProperties", || unsafe { store("props", props, device(dev)?.properties_v11(dev)) })
}

/// Of RMA tables: NCCL's proxy drives them.
///
/// # Safety
/// As `PropertiesV12Fn`.
pub unsafe extern "C" fn get_properties_v12(dev: c_int, props: *mut PropertiesV12) -> NcclResult {
    // SAFETY: the caller passes NULL or a writable struct.
    guard("getProperties", || unsafe { store("props", props, device(dev)?.properties_v12(dev)) })
}

/// # Safety
/// As `ListenFn`.
pub unsafe extern "C" fn listen(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: passed on.
    unsafe { listen_with(ctx, dev, handle, listen_comm, false) }
}

/// `listen` of the tables that NCCL 2.29.7 and 2.30 load: 2.29.7 keeps one plugin context a communicator and
/// overwrites oxygin's with that of its own RMA plugin, NULL where that one finds no device. The context is used
/// if it is oxygin's, and made anew otherwise.
///
/// # Safety
/// As `ListenFn`, but any `ctx`.
pub unsafe extern "C" fn listen_any(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: passed on.
    unsafe { listen_with(ctx, dev, handle, listen_comm, true) }
}

/// # Safety
/// As `ListenFn`; any `ctx` if `foreign`.
unsafe fn listen_with(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
    foreign: bool,
) -> NcclResult {
    guard("listen", || {
        if handle.is_null() || listen_comm.is_null() {
            return Err(null(if handle.is_null() { "handle" } else { "listenComm" }));
        }
        let instance = match handles::clone::<Instance>(ctx) {
            None if foreign => Arc::new(Instance::new(Config::from_env(), 0, TableKind::Gin, nccl::last())),
            other => other.ok_or_else(|| dead(Kind::Instance, ctx))?,
        };
        device(dev)?;
        let listener = Arc::new(Listener::open(&instance.config)?);
        let bytes = listener.handle();
        let made = handles::insert(Arc::new(Listen { instance: instance.clone(), device: dev as usize, listener }))?;
        instance.adopt_listen(made);
        // SAFETY: both are not NULL; the handle has room for HANDLE_BYTES by the interface.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), handle.cast::<u8>(), HANDLE_BYTES);
            store("listenComm", listen_comm, made)
        }
    })
}

/// Which table connects, as far as that matters for who executes what device code writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connector {
    /// An RMA table, or GIN v11: their operations are called.
    Calls,
    /// GIN v12 and v13.
    Gin,
    /// GIN v14.
    GinV14,
}

impl Connector {
    fn says(self, config: &Config) -> Connecting {
        let gdaki_first = self == Self::GinV14;
        let owner = match self {
            Self::Calls => QueueOwner::Nccl,
            Self::Gin | Self::GinV14 => own::owner(config, gdaki_first).0,
        };
        Connecting { owner, gdaki_first }
    }
}

/// Connect of the tables in which it says nothing of connections.
macro_rules! connects {
    ($($(#[$doc:meta])* $name:ident as $connector:ident;)+) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As `ConnectFn`; the ctx argument is never touched.
        pub unsafe extern "C" fn $name(
            _ctx: *mut c_void,
            handles: *mut *mut c_void,
            nranks: c_int,
            rank: c_int,
            listen_comm: *mut c_void,
            coll_comm: *mut *mut c_void,
        ) -> NcclResult {
            // SAFETY: passed on.
            guard("connect", || unsafe {
                let (coll, place) = join(handles, nranks, rank, listen_comm, coll_comm, Connector::$connector)?;
                let handle = place.fill(coll.clone());
                coll.set_handle(handle);
                store("collComm", coll_comm, handle)
            })
        }
    )+};
}

connects! {
    /// Of the RMA tables.
    connect as Calls;
    /// Of GIN v13.
    connect_gin as Gin;
    /// Of GIN v14.
    connect_gin_v14 as GinV14;
}

/// The part of connect that all versions share. `coll_comm` is only checked.
///
/// What is wrong with the arguments is told to the other ranks, as long as they say who they are and which rank this
/// one is: that takes a live listenComm, a number of ranks, this rank's own handle or else its number, and rank 0's
/// handle.
///
/// # Safety
/// `handles` is NULL or holds `nranks` pointers, each NULL or to HANDLE_BYTES bytes.
pub(super) unsafe fn join(
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
    connector: Connector,
) -> Result<(Arc<Coll>, Reserved<Coll>)> {
    let listen = shared::<Listen>(listen_comm)?;
    let mut wrong = None;
    let mut note = |error| {
        wrong.get_or_insert(error);
    };
    if coll_comm.is_null() {
        note(null("collComm"));
    }
    let own = listen.listener.handle();
    let ranks = usize::try_from(nranks).ok().filter(|&n| n <= MAX_RANKS as usize).unwrap_or(0);
    let given = usize::try_from(rank).ok().filter(|&rank| rank < ranks);
    if given.is_none() {
        note(Error::argument(format!(
            "rank = {rank} of nranks = {nranks}; rank must be 0 to nranks - 1, and nranks at most {MAX_RANKS}"
        )));
    }
    let mut all = vec![None; ranks];
    if handles.is_null() {
        note(null("handles"));
    } else {
        for (r, bytes) in all.iter_mut().enumerate() {
            // SAFETY: r < nranks (caller's promise about `handles`).
            let one = unsafe { handles.add(r).read() };
            if one.is_null() {
                note(Error::argument(format!("handles[{r}] is NULL; pass the handle that rank {r} listened with")));
            } else {
                // SAFETY: not NULL, hence HANDLE_BYTES readable bytes (caller); alignment 1.
                *bytes = Some(unsafe { one.cast::<[u8; HANDLE_BYTES]>().read_unaligned() });
            }
        }
    }
    // A rank that took another one's number would gather where nobody comes, or come twice for that one.
    let is_own = |&r: &usize| all[r] == Some(own);
    let found = given.filter(is_own).or_else(|| (0..ranks).find(is_own));
    if let (Some(given), Some(found)) = (given, found.filter(|found| given != Some(*found))) {
        note(Error::argument(format!("rank = {given}, but handles[{found}] is the one that this rank listened with")));
    }
    match (found.or(given), wrong) {
        (Some(rank), wrong) => {
            let world = World { rank: rank as u32, nranks: ranks as u32 };
            let table = connector.says(&listen.instance.config);
            Coll::connect(&listen, world, &all, wrong.map_or(Ok(()), Err), table, Box::<Ways>::default())
        }
        (None, wrong) => Err(wrong.unwrap_or_else(|| Error::internal("connect: no rank"))),
    }
}

/// NCCL's "undefined" for configuration integers (`NCCL_CONFIG_UNDEF_INT` is `INT_MIN`; some paths pass -1).
pub(super) fn traffic_class(value: c_int) -> Option<u8> {
    u8::try_from(value).ok()
}

/// The shared part of createContext: makes the set and stores its handle. `asked` reads the configuration.
///
/// # Safety
/// `ctx` is NULL or writable.
pub(super) unsafe fn create_context(
    coll_comm: *mut c_void,
    ctx: *mut *mut c_void,
    asked: impl FnOnce() -> Result<ContextSpec>,
) -> Result<()> {
    let coll = shared::<Coll>(coll_comm)?;
    let checked = || if ctx.is_null() { Err(null("ginCtx / rmaCtx")) } else { asked() };
    let (set, place) = coll.create_contexts(EngineKind::Nccl, checked)?;
    let handle = place.fill(set.clone());
    // SAFETY: the handle was made just now and nobody has it.
    unsafe { set.set_handle(handle) };
    coll.instance.adopt_contexts(handle);
    // SAFETY: `ctx` is not NULL.
    unsafe { store("ginCtx", ctx, handle) }
}

pub(super) fn spec(n_contexts: c_int, queue_depth: c_int, traffic: c_int) -> Result<ContextSpec> {
    let contexts = u32::try_from(n_contexts)
        .map_err(|_| Error::argument(format!("nContexts = {n_contexts}; ask for at least one context")))?;
    // Zero and NCCL's "undefined" (a negative number) both leave the depth to the fabric.
    let queue_depth = u32::try_from(queue_depth).unwrap_or(0);
    // NCCL's proxy may call for any peer.
    Ok(ContextSpec { contexts, queue_depth, traffic_class: traffic_class(traffic), rank_stride: 1 })
}

/// # Safety
/// As `ObjectFn`.
pub unsafe extern "C" fn destroy_context(ctx: *mut c_void) -> NcclResult {
    guard("destroyContext", || {
        let set = handles::remove::<Contexts>(ctx).ok_or_else(|| dead(Kind::Contexts, ctx))?;
        set.destroy();
        Ok(())
    })
}

/// # Safety
/// As `ObjectFn`.
pub unsafe extern "C" fn close_coll(coll_comm: *mut c_void) -> NcclResult {
    guard("closeColl", || {
        handles::remove::<Coll>(coll_comm).ok_or_else(|| dead(Kind::Coll, coll_comm))?.close();
        Ok(())
    })
}

/// # Safety
/// As `ObjectFn`.
pub unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> NcclResult {
    guard("closeListen", || {
        handles::remove::<Listen>(listen_comm).map(drop).ok_or_else(|| dead(Kind::Listen, listen_comm))
    })
}

/// # Safety
/// As `ObjectFn`.
pub unsafe extern "C" fn finalize(ctx: *mut c_void) -> NcclResult {
    guard("finalize", || {
        handles::remove::<Instance>(ctx).ok_or_else(|| dead(Kind::Instance, ctx))?.close();
        Ok(())
    })
}

/// `finalize` of GIN tables: a context that is not oxygin's is none of its business (see [`listen_any`]), and one that
/// has ended already is no error. NCCL 2.30.7 finalizes the context of a plugin that it has skipped at once, and once
/// more with the communicator, whose end an error would cut short.
///
/// # Safety
/// As `FinalizeFn`, but any `ctx`.
pub unsafe extern "C" fn finalize_any(ctx: *mut c_void) -> NcclResult {
    guard("finalize", || {
        match handles::remove::<Instance>(ctx) {
            Some(instance) => instance.close(),
            None if handles::maker(ctx).is_some() => return Err(dead(Kind::Instance, ctx)),
            None => log::info!("finalize: the context {ctx:p} has ended before, or is another plugin's; left alone"),
        }
        Ok(())
    })
}

/// ginProgress and rmaProgress of tables whose operations name a context set.
///
/// # Safety
/// As `ObjectFn`.
pub unsafe extern "C" fn progress(ctx: *mut c_void) -> NcclResult {
    // SAFETY: NCCL does not destroy the set during a call with it.
    guard("progress", || unsafe { object::<Contexts>(ctx)?.progress() })
}

/// ginProgress of tables whose operations name the communicator.
///
/// # Safety
/// As `ObjectFn`.
pub unsafe extern "C" fn coll_progress(coll_comm: *mut c_void) -> NcclResult {
    // SAFETY: NCCL does not close the communicator during a call with it.
    guard("ginProgress", || unsafe { object::<Coll>(coll_comm)?.progress() })
}

/// queryLastError of the GIN tables that NCCL 2.30.3 and 2.30.4 use: their proxy passes its own context in place of
/// ours (gin_host_proxy.cc, ncclGinProxyQueryLastError). What does not come from here is asked of all that live in
/// the process.
///
/// # Safety
/// As `QueryLastErrorFn`, but any `ctx`.
pub unsafe extern "C" fn query_last_error_any(ctx: *mut c_void, has_error: *mut bool) -> NcclResult {
    guard("queryLastError", || {
        let found = match handles::ask(ctx, Contexts::has_error) {
            Some(found) => found,
            None if handles::maker(ctx).is_some() => return Err(dead(Kind::Contexts, ctx)),
            None => handles::any::<Contexts>(Contexts::has_error),
        };
        // SAFETY: `has_error` is NULL or writable.
        unsafe { store("hasError", has_error, found) }
    })
}

/// queryLastError of the other tables. `ncclCommGetAsyncError` asks from any thread, while another one destroys the
/// device communicator.
///
/// # Safety
/// As `QueryLastErrorFn`.
pub unsafe extern "C" fn query_last_error(ctx: *mut c_void, has_error: *mut bool) -> NcclResult {
    guard("queryLastError", || {
        let found = handles::ask(ctx, Contexts::has_error).ok_or_else(|| dead(Kind::Contexts, ctx))?;
        // SAFETY: NULL or writable.
        unsafe { store("hasError", has_error, found) }
    })
}
