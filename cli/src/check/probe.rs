//! What a library has, looked up in a child, so that no rank inherits a loaded library.

use crate::device::Compiled;
use crate::doctor::child;
use crate::plugin::{self, log, ContextConfig, Kind, Plugin, Way};
use nccl_plugin_api::{DeviceHandle, NcclResult, DEVICE_GIN_GDAKI, DEVICE_GIN_PROXY, HANDLE_BYTES};
use std::ffi::c_void;
use std::path::Path;
use std::ptr::null_mut;
use std::time::Duration;

/// How long a look may take.
const LIMIT: Duration = Duration::from_secs(30);

/// What the library calls itself and the tables it has.
pub fn tables_of(plugin: &Path) -> Result<(String, Vec<Kind>), String> {
    let text = child::ask(LIMIT, || {
        let plugin = Plugin::open(plugin).map_err(|e| e.to_string())?;
        let name = plugin.tables().last().map(|t| t.name()).unwrap_or_default();
        let labels: Vec<_> = plugin.tables().iter().map(|t| t.kind().label()).collect();
        Ok(format!("{}\n{name}", labels.join(" ")))
    })?;
    let (labels, name) = text.split_once('\n').unwrap_or((&text, ""));
    let kinds = labels.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    Ok((name.to_owned(), kinds))
}

/// Why nothing can be judged this way, because NCCL would let operations in by another: it goes by what getProperties
/// says. `None`: something can, or there was no answer, and the cases will say why.
pub fn other_way(plugin: &Path, way: Way) -> Option<String> {
    if !Way::by_device_code().any(|known| known.kind == way.kind) {
        return None;
    }
    let kind = device_type(plugin, way.kind).ok()?;
    match (way.is_by_device_code(), kind == DEVICE_GIN_GDAKI) {
        (true, false) => Some(format!(
            "{} has no queue of its own: getProperties says netDeviceType {kind}, and NCCL gives device code a \
             plugin's queue only with {DEVICE_GIN_GDAKI}",
            way.kind
        )),
        (true, true) => {
            let (given, wanted) = (handle_type(plugin, way).ok()?, type_of(way));
            (given != wanted).then(|| {
                format!(
                    "createContext of {} gives a device handle of netDeviceType {given}, not {wanted}: what device \
                     code finds behind it is {}; judge --table {0}-{}",
                    way.kind,
                    if given == DEVICE_GIN_GDAKI { "queue pairs" } else { "a queue of descriptors" },
                    if given == DEVICE_GIN_GDAKI { "gdaki" } else { "queue" },
                )
            })
        }
        (false, true) => Some(format!(
            "getProperties says netDeviceType {kind}: NCCL gives device code the queue and calls no operation; judge \
             --table {}-queue or {0}-gdaki",
            way.kind
        )),
        _ => None,
    }
}

/// What the device handle says of itself that device code of this way understands.
fn type_of(way: Way) -> i32 {
    if way.is_gdaki() {
        DEVICE_GIN_GDAKI
    } else {
        DEVICE_GIN_PROXY
    }
}

/// What the device handle says of itself, with one rank that is alone.
fn handle_type(plugin: &Path, way: Way) -> Result<i32, String> {
    let text = child::ask(LIMIT, || {
        let plugin = Plugin::open(plugin).map_err(|e| e.to_string())?;
        let table = plugin.table(way.kind).map_err(|e| e.to_string())?;
        let backend_version = Compiled::of(way)?.map_or(0, Compiled::backend_version);
        let config = ContextConfig { n_signals: 1, n_counters: 1, backend_version, ..ContextConfig::default() };
        let (mut instance, mut listener, mut coll_comm) = (null_mut(), null_mut(), null_mut());
        let (mut ctx, mut device, mut handle) = (null_mut(), null_mut(), [0_u8; HANDLE_BYTES]);
        let mut handles: [*mut c_void; 1] = [handle.as_mut_ptr().cast()];
        // SAFETY: as NCCL does, with places for results. The child ends with what it made.
        let given = unsafe {
            let handles = handles.as_mut_ptr();
            check("init", table.init(&mut instance, 1, log::logger()))?;
            check("listen", table.listen(instance, 0, *handles, &mut listener))?;
            check("connect", table.connect(instance, handles, 1, 0, &config, listener, &mut coll_comm))?;
            check("createContext", table.create_context(coll_comm, Some(&config), &mut ctx, &mut device))?;
            let given = device.as_ref().map(|device: &DeviceHandle| device.net_device_type);
            table.destroy_context(ctx);
            table.close_coll(coll_comm);
            table.close_listen(listener);
            table.finalize(instance);
            given
        };
        Ok(given.ok_or("there is no device handle")?.to_string())
    })?;
    text.trim().parse().map_err(|e| format!("{text:?} is no device type: {e}"))
}

fn check(call: &'static str, code: NcclResult) -> Result<(), String> {
    plugin::check(call, code).map_err(|e| e.to_string())
}

fn device_type(plugin: &Path, kind: Kind) -> Result<i32, String> {
    let text = child::ask(LIMIT, || {
        let plugin = Plugin::open(plugin).map_err(|e| e.to_string())?;
        let table = plugin.table(kind).map_err(|e| e.to_string())?;
        let (mut instance, mut count) = (null_mut(), 0);
        // SAFETY: as NCCL does, with places for results.
        let properties = unsafe {
            let up = table.init(&mut instance, 1, log::logger());
            if up != NcclResult::SUCCESS || table.devices(&mut count) != NcclResult::SUCCESS {
                return Err("init or devices failed".into());
            }
            let properties = table.properties(0).map_err(|e| e.to_string())?;
            table.finalize(instance);
            properties
        };
        Ok(properties.net_device_type.to_string())
    })?;
    text.trim().parse().map_err(|e| format!("{text:?} is no device type: {e}"))
}
