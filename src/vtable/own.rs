//! What the GIN tables do where this library drains the queues of device code itself: `OXYGIN_ENGINE`.

use super::guard::{null, shared, store};
use super::setup;
use crate::comm::coll::Coll;
use crate::comm::device::DeviceSpec;
use crate::comm::nccl;
use crate::config::{Config, EngineChoice};
use crate::error::{Error, Result};
use crate::proxy::descriptor::layout::{Layout, Table};
use nccl_plugin_api::{DeviceHandle, NcclResult, PropertiesV11, PropertiesV12, DEVICE_GIN_GDAKI};
use std::ffi::{c_int, c_void};

/// Whether contexts of a GIN table have queues of this library's.
///
/// Up to NCCL 2.30.4 (tables v12 and v13), that is the default: its own proxy takes one descriptor of a queue a pass,
/// and refuses depths. From 2.30.7 on (v14) a kernel that was compiled for GDAKI alone would take such a context for
/// one of GDAKI's, so it has to be asked for.
pub fn is_own(config: &Config, is_v14: bool) -> bool {
    match config.engine {
        EngineChoice::Own => true,
        EngineChoice::Nccl => false,
        EngineChoice::Auto => !is_v14 && config.gin_type.is_none_or(|kind| kind == DEVICE_GIN_GDAKI),
    }
}

/// The device type that stands for "the plugin drives its own device code": NCCL asks for no progress then, and takes
/// what kind of context it is from the device handle.
fn device_type(is_v14: bool) -> Option<c_int> {
    let config = Config::from_env();
    if let Some(kind) = config.gin_type.filter(|kind| *kind != DEVICE_GIN_GDAKI) {
        if config.engine == EngineChoice::Own {
            log::warn!(
                "OXYGIN_ENGINE=own has no effect: NCCL_GIN_TYPE={kind} has NCCL skip this plugin, whose type is 3 \
                 then; unset NCCL_GIN_TYPE"
            );
        }
    }
    is_own(&config, is_v14).then_some(DEVICE_GIN_GDAKI)
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

fn spec(config: &Config, a: &Asked) -> Result<DeviceSpec> {
    let number = |name: &str, value: c_int| {
        u32::try_from(value).map_err(|_| Error::argument(format!("{name} = {value}; pass 0 or more")))
    };
    Ok(DeviceSpec {
        // How many entries a device's work queue has is not what device code's queue has.
        contexts: setup::spec(a.n_contexts, 0, a.traffic_class)?,
        depth: a.queue_depth,
        signals: number("nSignals", a.n_signals)?,
        counters: number("nCounters", a.n_counters)?,
        rank_stride: u32::try_from(a.rank_stride).unwrap_or(0),
        layout: Layout::choose(a.table, nccl::version(), config.device_layout)?,
    })
}

/// createContext with queues of this library's. Collective.
///
/// # Safety
/// `ctx` and `dev_handle` are NULL or writable.
pub unsafe fn create_context(
    coll_comm: *mut c_void,
    ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
    asked: impl FnOnce() -> Result<Asked>,
) -> Result<()> {
    let coll = shared::<Coll>(coll_comm)?;
    let mut named = None;
    let (set, place) = coll.create_device_contexts(|| {
        if ctx.is_null() || dev_handle.is_null() {
            return Err(null(if ctx.is_null() { "ginCtx" } else { "devHandle" }));
        }
        let asked = asked()?;
        let spec = spec(&coll.instance.config, &asked)?;
        named = Some((asked, spec));
        Ok(spec)
    })?;
    if let Some((asked, spec)) = named {
        log::info!(
            "engine own: {} contexts, {:?}, device contexts of {} bytes; suits kernels that are compiled for all \
             backends, not those for GDAKI alone (OXYGIN_ENGINE=nccl and NCCL_RMA_PLUGIN for these)",
            spec.contexts.contexts,
            asked.table,
            spec.layout.context_bytes
        );
    }
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

    #[test]
    fn who_drains_queues() {
        for (engine, gin_type, is_v14, own) in [
            (EngineChoice::Auto, None, false, true),
            (EngineChoice::Auto, None, true, false),
            (EngineChoice::Auto, Some(2), false, false),
            (EngineChoice::Auto, Some(3), false, true),
            (EngineChoice::Own, None, true, true),
            (EngineChoice::Nccl, None, false, false),
        ] {
            let config = Config { engine, gin_type, ..Config::default() };
            assert_eq!(is_own(&config, is_v14), own, "{engine:?}, {gin_type:?}, {is_v14}");
        }
    }
}
