//! What the GIN tables do where this library executes what device code writes: `OXYGIN_ENGINE`.

use super::guard::{null, shared, store};
use super::setup;
use crate::comm::backend::report::{queue_owner, Asking, QueueOwner};
use crate::comm::coll::Coll;
use crate::comm::contexts::{Contexts, EngineKind};
use crate::comm::device::DeviceSpec;
use crate::comm::device_queues::DeviceQueues;
use crate::comm::instance::Instance;
use crate::comm::nccl;
use crate::comm::nic::NicSpec;
use crate::config::{Config, Ringing};
use crate::error::{Error, Result};
use crate::fabric::ContextSpec;
use crate::gdaki::view;
use crate::memory::gpu;
use crate::proxy::descriptor::layout::{self, NcclVersion, Table};
use crate::sys::handles::Reserved;
use nccl_plugin_api::{DeviceHandle, NcclResult, PropertiesV11, PropertiesV12, DEVICE_GIN_GDAKI, DEVICE_GIN_PROXY};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::Arc;

/// The engine of a communicator for a caller that may have no place for a device handle: he drains queues of
/// descriptors himself. With GDAKI's engines windows have names that nobody but device code can use, so he is refused
/// there.
pub fn kind(coll: &Coll, dev_handle: *mut *mut DeviceHandle) -> EngineKind {
    match coll.engine_kind() {
        EngineKind::Own if dev_handle.is_null() => EngineKind::Nccl,
        kind => kind,
    }
}

/// Whose queues device code writes into, for a GIN table that is asked for its properties or connects; and why.
pub fn owner(config: &Config, is_v14: bool) -> (QueueOwner, &'static str) {
    let asking = Asking { is_v14, rma_in_use: Instance::is_rma_in_use(), nccl: nccl::last() };
    queue_owner(config, asking, &gpu::has_driver)
}

/// The type that the log has; 0: none.
static SAID: AtomicI32 = AtomicI32::new(0);

/// Says which type NCCL is told and why, once until that changes: NCCL asks for each communicator and connection.
fn say(kind: c_int, why: &str) {
    if SAID.swap(kind, Ordering::Relaxed) != kind {
        log::info!("device code's queues: type {kind} ({why})");
    }
}

/// The device type that stands for "the plugin drives its own device code": NCCL asks for no progress then, and takes
/// what kind of context it is from the device handle.
fn device_type(is_v14: bool) -> Option<c_int> {
    let config = Config::from_env();
    let (owner, why) = owner(&config, is_v14);
    // Older NCCLs compare it with nothing.
    let gin_type = config.gin_type.filter(|kind| is_v14 && *kind != DEVICE_GIN_GDAKI);
    if let (QueueOwner::Plugin, Some(kind)) = (owner, gin_type) {
        log::warn!(
            "{why} has no effect: NCCL_GIN_TYPE={kind} has NCCL skip this plugin, whose type is 3 then; unset \
             NCCL_GIN_TYPE"
        );
    }
    let kind = (owner == QueueOwner::Plugin).then_some(DEVICE_GIN_GDAKI);
    say(kind.unwrap_or(DEVICE_GIN_PROXY), why);
    kind
}

/// getProperties of GIN v12.
///
/// # Safety
/// As `PropertiesV11Fn`.
pub unsafe extern "C" fn get_properties_of_v12(dev: c_int, props: *mut PropertiesV11) -> NcclResult {
    // SAFETY: passed on; on success `props` was not NULL.
    unsafe {
        let result = setup::get_properties_v11(dev, props);
        if let (NcclResult::SUCCESS, Some(kind)) = (result, device_type(false)) {
            (*props).net_device_type = kind;
        }
        result
    }
}

/// getProperties of GIN v13.
///
/// # Safety
/// As `PropertiesV12Fn`.
pub unsafe extern "C" fn get_properties_of_v13(dev: c_int, props: *mut PropertiesV12) -> NcclResult {
    // SAFETY: passed on.
    unsafe { get_properties(dev, props, device_type(false)) }
}

/// getProperties of GIN v14.
///
/// # Safety
/// As `PropertiesV12Fn`.
pub unsafe extern "C" fn get_properties_of_v14(dev: c_int, props: *mut PropertiesV12) -> NcclResult {
    // SAFETY: passed on.
    unsafe { get_properties(dev, props, device_type(true)) }
}

/// # Safety
/// As `PropertiesV12Fn`.
unsafe fn get_properties(dev: c_int, props: *mut PropertiesV12, kind: Option<c_int>) -> NcclResult {
    // SAFETY: passed on; on success `props` was not NULL.
    unsafe {
        let result = setup::get_properties_v12(dev, props);
        if let (NcclResult::SUCCESS, Some(kind)) = (result, kind) {
            (*props).net_device_type = kind;
        }
        result
    }
}

/// What the configurations of the tables have in common.
#[derive(Clone, Copy)]
pub struct Asked {
    /// The table.
    pub table: Table,
    /// Signals a context.
    pub n_signals: c_int,
    /// Counters a context.
    pub n_counters: c_int,
    /// Contexts.
    pub n_contexts: c_int,
    /// Depth of queues.
    pub queue_depth: c_int,
    /// Traffic class.
    pub traffic_class: c_int,
    /// Distance of ranks that talk to each other.
    pub rank_stride: c_int,
}

fn number(name: &str, value: c_int) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::argument(format!("{name} = {value}; pass 0 or more")))
}

/// What is asked of the fabric: how many entries a device's work queue has is not what device code's queue has.
fn contexts(a: &Asked) -> Result<ContextSpec> {
    let rank_stride = u32::try_from(a.rank_stride).unwrap_or(0);
    Ok(ContextSpec { rank_stride, ..setup::spec(a.n_contexts, 0, a.traffic_class)? })
}

fn own_spec(instance: &Instance, a: &Asked) -> Result<DeviceSpec> {
    Ok(DeviceSpec {
        contexts: contexts(a)?,
        depth: a.queue_depth,
        signals: number("nSignals", a.n_signals)?,
        counters: number("nCounters", a.n_counters)?,
        layout: layout::Layout::choose(a.table, instance.nccl, instance.config.device_layout)?,
    })
}

/// The first NCCL whose device code knows free flow.
const FIRST_FREE_FLOW: NcclVersion = 23_102;

/// How device code of this layout is told to ring. What `backendVersion` says does not tell kernels that know free flow
/// from older ones in a newer library; the software NIC finds out about these.
fn ringing(asked: Option<Ringing>, layout: view::Layout, nccl: Option<NcclVersion>) -> Ringing {
    let knows_free_flow = layout == view::Layout::V3 && nccl.is_some_and(|version| version >= FIRST_FREE_FLOW);
    match asked {
        None if knows_free_flow => Ringing::FreeFlow,
        // Structures of other layouts have no room for it.
        Some(Ringing::FreeFlow) if layout != view::Layout::V3 => Ringing::Doorbell,
        None => Ringing::Doorbell,
        Some(ringing) => ringing,
    }
}

fn nic_spec(instance: &Instance, a: &Asked) -> Result<NicSpec> {
    let layout = view::Layout::choose(a.table, instance.nccl)?;
    Ok(NicSpec {
        contexts: contexts(a)?,
        depth: a.queue_depth,
        signals: number("nSignals", a.n_signals)?,
        counters: number("nCounters", a.n_counters)?,
        handler: ringing(instance.config.gdaki_ringing, layout, instance.nccl),
        layout: Some(layout),
    })
}

/// What its queues take, for the log.
fn memory_of(set: &Contexts) -> String {
    let bytes = set.device().map_or(0, DeviceQueues::shared_bytes);
    format!("{:.1} MiB of memory shared with device code", bytes as f64 / f64::from(1 << 20))
}

/// Which kernels an engine with queues of this library's suits, for the log.
fn suits(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Gdaki => {
            "suits kernels that are compiled for GDAKI. No mlx5 hardware has run this engine yet: it was tested \
             with NCCL's kernels, on a library that stands for libmlx5"
        }
        EngineKind::GdakiSoft => "suits kernels that are compiled for all backends, and those for GDAKI alone",
        EngineKind::Own | EngineKind::Nccl => {
            "suits kernels that are compiled for all backends, not those for GDAKI alone (OXYGIN_ENGINE=gdaki-soft for \
             these)"
        }
    }
}

/// Of kernels that ring the software NIC in a way that the lane kernel does not know, for the log.
const BY_CPU_ALONE: &str = ". CPUs alone can watch how they ring: OXYGIN_GDAKI_RINGING=proxy asks for that";

/// A set with queues of this library's, and the place for its handle. `asked` is boxed so that this, with all that it
/// calls, is compiled once and not once for each table.
fn create(
    kind: EngineKind,
    coll: &Arc<Coll>,
    asked: Box<dyn FnOnce() -> Result<Asked> + '_>,
) -> Result<(Arc<Contexts>, Reserved<Contexts>)> {
    if kind == EngineKind::Gdaki {
        let mut named = None;
        let (set, place) = coll.create_mlx5_contexts(|| {
            let asked = asked()?;
            let spec = nic_spec(&coll.instance, &asked)?;
            named = spec.layout.map(|layout| (asked.table, spec.contexts.contexts, layout));
            Ok(spec)
        })?;
        if let Some((table, contexts, structures)) = named {
            log::info!("engine gdaki: {contexts} contexts, {table:?}, structures {structures:?}; {}", suits(kind));
        }
        return Ok((set, place));
    }
    if kind == EngineKind::GdakiSoft {
        let mut named = None;
        let (set, place, _) = coll.create_nic_contexts(|| {
            let asked = asked()?;
            let spec = nic_spec(&coll.instance, &asked)?;
            named = spec.layout.map(|layout| (asked.table, layout, spec.handler));
            Ok(spec)
        })?;
        if let Some((table, structures, handler)) = named {
            log::info!(
                "engine gdaki-soft: {} contexts, {table:?}, structures {structures:?}, {}; {}{}",
                set.count(),
                memory_of(&set),
                suits(kind),
                if handler == Ringing::Proxy { BY_CPU_ALONE } else { "" }
            );
        }
        return Ok((set, place));
    }
    let mut named = None;
    let (set, place) = coll.create_device_contexts(|| {
        let asked = asked()?;
        let spec = own_spec(&coll.instance, &asked)?;
        named = Some((asked, spec));
        Ok(spec)
    })?;
    if let Some((asked, spec)) = named {
        log::info!(
            "engine own: {} contexts, {:?}, device contexts of {} bytes, {}; {}",
            spec.contexts.contexts,
            asked.table,
            spec.layout.context_bytes,
            memory_of(&set),
            suits(kind)
        );
    }
    Ok((set, place))
}

/// createContext with queues of this library's; `kind` says which. Collective.
///
/// # Safety
/// `ctx` and `dev_handle` are NULL or writable.
pub unsafe fn create_context(
    kind: EngineKind,
    coll_comm: *mut c_void,
    ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
    asked: impl FnOnce() -> Result<Asked>,
) -> Result<()> {
    let coll = shared::<Coll>(coll_comm)?;
    let asked = || {
        if ctx.is_null() || dev_handle.is_null() {
            return Err(null(if ctx.is_null() { "ginCtx" } else { "devHandle" }));
        }
        asked()
    };
    let (set, place) = create(kind, &coll, Box::new(asked))?;
    let handle = place.fill(set.clone());
    // SAFETY: the handle was made just now and nobody has it.
    unsafe { set.set_handle(handle) };
    coll.instance.adopt_contexts(handle);
    let device = set.device().ok_or_else(|| Error::internal("createContext: no device handle"))?.handle();
    // SAFETY: neither is NULL (checked above), hence both are writable.
    unsafe {
        store("devHandle", dev_handle, device)?;
        store("ginCtx", ctx, handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::instance::TableKind;

    /// The README's table of engines: NCCL's proxy takes kernels for GDAKI alone as little as the own engine does.
    #[test]
    fn who_has_kernels_for_gdaki_alone_is_sent_to_the_engine_that_takes_them() {
        let readme = include_str!("../../README.md");
        let row =
            |engine: &str| readme.lines().find(|line| line.starts_with(&format!("| `{engine}` | 2.29.7"))).unwrap();
        assert!(row("own").contains("**Not** kernels compiled for GDAKI alone") && row("nccl").contains("the same"));
        assert!(row("gdaki-soft").contains("kernels compiled for GDAKI alone"));
        assert!(suits(EngineKind::Own).contains("(OXYGIN_ENGINE=gdaki-soft for these)"));
    }

    #[test]
    fn each_nccl_of_a_process_gets_its_own_structures() {
        let instance = |nccl| Instance::new(Config::default(), 1, TableKind::Gin, Some(nccl));
        let all = [23_007, 23_203, 23_101].map(instance);
        let asked = |table| Asked {
            table,
            n_signals: 1,
            n_counters: 1,
            n_contexts: 1,
            queue_depth: 0,
            traffic_class: -1,
            rank_stride: 1,
        };
        let bytes = |i: &Instance| own_spec(i, &asked(Table::V14(2))).unwrap().layout.context_bytes;
        assert_eq!(all.each_ref().map(bytes), [72, 80, 72]);
        let rings = |i: &Instance| nic_spec(i, &asked(Table::V14(2))).unwrap().handler;
        assert_eq!(all.each_ref().map(rings), [Ringing::Doorbell, Ringing::FreeFlow, Ringing::Doorbell]);
    }
}
