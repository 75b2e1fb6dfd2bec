//! What a library has, looked up in a child, so that no rank inherits a loaded library.

use crate::doctor::child;
use crate::plugin::{log, Kind, Plugin, Way};
use nccl_plugin_api::{NcclResult, DEVICE_GIN_GDAKI};
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
    if !Way::QUEUES.iter().any(|queue| queue.kind == way.kind) {
        return None;
    }
    let kind = device_type(plugin, way.kind).ok()?;
    match (way.queue, kind == DEVICE_GIN_GDAKI) {
        (true, false) => Some(format!(
            "{} has no queue of its own: getProperties says netDeviceType {kind}, and NCCL gives device code a \
             plugin's queue only with {DEVICE_GIN_GDAKI}",
            way.kind
        )),
        (false, true) => Some(format!(
            "getProperties says netDeviceType {kind}: NCCL gives device code the queue and calls no operation; judge \
             --table {}-queue",
            way.kind
        )),
        _ => None,
    }
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
