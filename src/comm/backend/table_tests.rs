//! The README's table of every combination of `OXYGIN_ENGINE`, `NCCL_GIN_TYPE` and `NCCL_RMA_PLUGIN` is what the code
//! does.

use super::choose::{choose, FabricPromise};
use super::offer::EngineOffer;
use super::report::{queue_owner, Asking, QueueOwner};
use crate::config::{Config, EngineChoice};
use nccl_plugin_api::{DEVICE_GIN_GDAKI, DEVICE_GIN_PROXY};

const SKIPPED: &str = "not taken";

/// Who executes device code's operations: NCCL's selection, as it was read in its sources, and the library's choice.
fn outcome(engine: EngineChoice, gin_type: Option<i32>, is_v14: bool, rma: bool) -> &'static str {
    let config = Config { engine, gin_type, ..Config::default() };
    let (owner, _) = queue_owner(
        &config,
        Asking { is_v14, rma_in_use: rma, nccl: Some(if is_v14 { 23_203 } else { 23_004 }) },
        &|| true,
    );
    let reported = if owner == QueueOwner::Plugin { DEVICE_GIN_GDAKI } else { DEVICE_GIN_PROXY };
    // Up to 2.30.4 NCCL takes whatever plugin is named (`setLocalGinType` of src/gin/gin_host.cc). From 2.30.7 on one
    // of the type that is asked for, and none of the proxy's: it drives RMA instead.
    let taken = !is_v14 || gin_type.is_none_or(|asked| asked == reported) && reported != DEVICE_GIN_PROXY;
    if taken {
        let offer = EngineOffer::new(&config, owner, Ok(()));
        // The table is that of the soft fabric, but for the engine which needs the other one.
        let is_verbs = engine == EngineChoice::Gdaki;
        let any = FabricPromise { signals_of_all_peers: true, is_verbs };
        return choose(&[offer], any, is_v14).map_or("refused", |chosen| chosen.kind.name());
    }
    match is_v14 && rma && gin_type.is_none_or(|asked| asked == DEVICE_GIN_PROXY) {
        true => "nccl",
        false => SKIPPED,
    }
}

#[test]
fn the_readme_has_this_table() {
    let engines = [
        ("`auto` (unset)", EngineChoice::Auto),
        ("`own`", EngineChoice::Own),
        ("`nccl`", EngineChoice::Nccl),
        ("`gdaki-soft`", EngineChoice::GdakiSoft),
        ("`gdaki`", EngineChoice::Gdaki),
    ];
    let readme = include_str!("../../../README.md");
    let mut missing = Vec::new();
    for (name, engine) in engines {
        for (kind, gin_type) in [("unset", None), ("2", Some(2)), ("3", Some(3))] {
            let columns = [(false, false), (true, true), (true, false)];
            let [early, both, alone] = columns.map(|(is_v14, rma)| outcome(engine, gin_type, is_v14, rma));
            let row = format!("| {name} | {kind} | {early} | {both} | {alone} |");
            if !readme.contains(&row) {
                missing.push(row);
            }
        }
    }
    assert!(missing.is_empty(), "README.md lacks:\n{}", missing.join("\n"));
}

#[test]
fn who_executes_does_not_change_unnoticed() {
    use EngineChoice::*;
    for (engine, gin_type, is_v14, rma, want) in [
        (Auto, None, false, false, "own"),
        (Auto, None, true, true, "gdaki-soft"),
        (Auto, None, true, false, "gdaki-soft"),
        (Auto, Some(2), true, true, "nccl"),
        (Auto, Some(2), true, false, SKIPPED),
        (Auto, Some(3), true, true, "gdaki-soft"),
        (Own, Some(2), false, false, "own"),
        (Nccl, Some(3), false, false, "nccl"),
        (Own, Some(2), true, true, "nccl"),
        (Nccl, Some(3), true, true, SKIPPED),
        (Nccl, None, false, false, "nccl"),
        (GdakiSoft, None, true, true, "gdaki-soft"),
        (Gdaki, None, true, false, "gdaki"),
    ] {
        assert_eq!(outcome(engine, gin_type, is_v14, rma), want, "{engine:?} {gin_type:?} {is_v14} {rma}");
    }
}
