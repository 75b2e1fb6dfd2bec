//! Which variables have an NCCL take oxygin, and why: the one place that knows it.

use super::find::spell;
use oxygin::comm::backend::report::{queue_owner, Asking, QueueOwner};
use oxygin::config::{Config, EngineChoice};
use serde::Serialize;

/// The newest NCCL that oxygin was run with; what comes later is taken for one like it.
pub const NEWEST: i32 = 23203;

/// Before it the name of a GIN plugin is lost when it is unloaded (`ncclGinPluginUnload`, NCCL's `src/plugin/gin.cc`).
const FIRST_THAT_LOADS_AGAIN: i32 = 23003;

/// The first NCCL with the table GIN v14, which skips a GIN plugin whose queues are NCCL's and has its proxy drive an
/// RMA plugin.
pub const FIRST_WITH_GIN_V14: i32 = 23007;

/// How many communicators beside its own NCCL counts for a GIN plugin: with one it never unloads it.
pub const KEEPS_THE_PLUGIN: &str = "NCCL_GIN_PLUGIN_REF_COUNT";

/// What `NCCL_GIN_TYPE` calls queues that NCCL's proxy drains.
const PROXY: i32 = nccl_plugin_api::DEVICE_GIN_PROXY;
/// What it calls queues of a plugin's own.
const OF_THE_PLUGIN: i32 = nccl_plugin_api::DEVICE_GIN_GDAKI;

/// A variable to set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What to set it to.
    pub value: String,
    /// What it does there.
    pub why: &'static str,
}

/// What selects oxygin in a version of NCCL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Selection {
    /// To be set; the first of them is the one without which nothing of oxygin is used.
    pub variables: Vec<Variable>,
    /// The tables that this NCCL takes from oxygin, in words.
    pub tables: &'static str,
    /// Who drains the queues of device code, as `OXYGIN_ENGINE` calls it.
    pub engine: &'static str,
    /// What else there is to know.
    pub notes: Vec<String>,
}

impl Selection {
    fn set(&mut self, name: &'static str, value: impl Into<String>, why: &'static str) {
        self.variables.push(Variable { name, value: value.into(), why });
    }
}

/// What decides beside NCCL's version.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// What `OXYGIN_ENGINE` asks for.
    pub engine: EngineChoice,
    /// The present value of `NCCL_GIN_TYPE`.
    pub gin_type: Option<i32>,
    /// There is a CUDA driver, here or on the machine that is meant.
    pub has_cuda: bool,
    /// Queues of this machine's RDMA device serve kernels, as far as can be tried without a GPU.
    pub serves_kernels: bool,
    /// The software NIC suits kernels here: everywhere but over iWARP.
    pub has_nic: bool,
    /// The machine that is meant is not this one: see [`ELSEWHERE`].
    pub is_elsewhere: bool,
}

/// What is said where this machine has no CUDA driver, as a login node has none, and the library is NVIDIA's, which
/// needs one: hosts are meant that have it.
pub const ELSEWHERE: &str = "There is no CUDA driver here, which this NCCL needs: said for hosts that have one";

/// The tables that the NCCL of this version number takes. `Err` says why there are none.
fn tables(code: i32) -> Result<&'static str, String> {
    Ok(match code {
        ..22807 => return Err(format!("NCCL {} is too old: plugin tables for GIN begin with 2.28.7", spell(code))),
        22807..22907 => {
            return Err(format!(
            "NCCL {} takes a GIN table out of a NET plugin only (NCCL_NET_PLUGIN), which oxygin is not; use 2.29.7 or \
                 newer",
            spell(code)
        ))
        }
        22907..23003 => "GIN v12",
        23003..FIRST_WITH_GIN_V14 => "GIN v13",
        FIRST_WITH_GIN_V14..23100 => "RMA v14, GIN v14",
        23100..23200 => "RMA v15, GIN v14",
        _ => "RMA v16, GIN v14",
    })
}

/// What selects the plugin `value` (a path, or `oxygin`) in the NCCL of this version number. `Err` says why nothing
/// can.
pub fn select(code: i32, wanted: Wanted, value: &str) -> Result<Selection, String> {
    let Wanted { engine, gin_type, has_cuda, serves_kernels, has_nic, is_elsewhere } = wanted;
    let tables = tables(code)?;
    let is_v14 = code >= FIRST_WITH_GIN_V14;
    let asked = gin_type.filter(|kind| *kind >= 0);
    // A type that oxygin has none of is replaced below.
    let gin_type_that_counts = asked.filter(|kind| [PROXY, OF_THE_PLUGIN].contains(kind));
    let config = Config { engine, gin_type: gin_type_that_counts, ..Config::default() };
    let asking = Asking { is_v14, rma_in_use: true, nccl: Some(code) };
    let own = queue_owner(&config, asking, &|| has_cuda).0 == QueueOwner::Plugin;
    let name = match (own, engine) {
        (false, _) => "nccl",
        (true, EngineChoice::Gdaki) => "gdaki",
        (true, EngineChoice::GdakiSoft) => "gdaki-soft",
        (true, EngineChoice::Auto) if is_v14 && serves_kernels => "gdaki",
        (true, EngineChoice::Auto) if is_v14 && has_nic => "gdaki-soft",
        (true, _) => "own",
    };
    let mut s = Selection { variables: Vec::new(), tables, engine: name, notes: Vec::new() };
    match (code, own) {
        (..FIRST_WITH_GIN_V14, _) => {
            s.set(
                "NCCL_GIN_PLUGIN",
                value,
                "this NCCL takes GIN from its GIN plugin, and calls of the host between hosts from none",
            );
            if code < FIRST_THAT_LOADS_AGAIN {
                s.set(
                    KEEPS_THE_PLUGIN,
                    "1",
                    "keeps the plugin: this NCCL forgets its name with the last communicator, and has no GIN then",
                );
            }
        }
        (_, true) => {
            s.set("NCCL_GIN_PLUGIN", value, "device code's queues are its own, which NCCL takes as they are");
            s.set(
                "NCCL_RMA_PLUGIN",
                value,
                "operations from the CPU, and device code that asks for NCCL's proxy, go here",
            );
        }
        (_, false) => {
            s.set("NCCL_RMA_PLUGIN", value, "from 2.30.7 on NCCL drives its proxy itself, over the RMA plugin");
            s.set(
                "NCCL_GIN_TYPE",
                PROXY.to_string(),
                "has NCCL take its proxy, and with it oxygin, also where an RDMA card would have it choose GDAKI",
            );
        }
    }
    let wanted = if own { OF_THE_PLUGIN } else { PROXY };
    // Older ones compare it with nothing.
    let excluded = is_v14 && asked.is_some_and(|kind| kind != wanted);
    if excluded && !s.variables.iter().any(|v| v.name == "NCCL_GIN_TYPE") {
        s.set("NCCL_GIN_TYPE", "-1", "any; its present value rules out the way that oxygin moves data on this version");
    }
    if own {
        s.notes.push(suits(engine, is_v14 && has_nic).into());
    }
    s.notes.extend(is_elsewhere.then(|| ELSEWHERE.into()));
    if code > NEWEST {
        let (this, newest) = (spell(code), spell(NEWEST));
        s.notes.push(match (own, engine) {
            (false, EngineChoice::Auto) => format!(
                "NCCL {this} is newer than what oxygin was run with, and its device structures are not known: NCCL's \
                 proxy is taken, where {newest} has oxygin's own queues"
            ),
            _ => format!("NCCL {this} is newer than what oxygin was run with; this is what {newest} needs"),
        });
    }
    Ok(s)
}

/// Which kernels the plugin's queues suit.
fn suits(engine: EngineChoice, has_nic: bool) -> &'static str {
    match engine {
        EngineChoice::Gdaki => {
            "the kernels must be compiled for all backends, as NCCL's headers do by default, or for GDAKI alone; no \
             mlx5 hardware has run this engine before its release, so each rank tries its device at connect"
        }
        EngineChoice::Auto if has_nic => suits(EngineChoice::GdakiSoft, has_nic),
        EngineChoice::GdakiSoft => {
            "the kernels must be compiled for all backends, as NCCL's headers do by default, or for GDAKI alone"
        }
        _ => {
            "the kernels must be compiled for all backends, as NCCL's headers do by default; those for GDAKI alone \
             need OXYGIN_ENGINE=gdaki-soft"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EngineChoice::*;

    fn wanted(engine: EngineChoice, gin_type: Option<i32>) -> Wanted {
        Wanted { engine, gin_type, has_cuda: true, serves_kernels: false, has_nic: true, is_elsewhere: false }
    }

    fn names(code: i32, engine: EngineChoice, gin_type: Option<i32>) -> Vec<&'static str> {
        let s = select(code, wanted(engine, gin_type), "oxygin").expect("a version that has plugins");
        assert!(s.variables.iter().all(|v| !v.why.is_empty() && !v.value.is_empty()));
        s.variables.iter().map(|v| v.name).collect()
    }

    #[test]
    fn each_version_has_its_variables() {
        for old in [2708, 22806, 22903] {
            let why = select(old, wanted(Auto, None), "oxygin").expect_err("too old");
            assert!(why.contains(&spell(old)), "{why}");
        }
        assert_eq!(names(22907, Auto, None), ["NCCL_GIN_PLUGIN", "NCCL_GIN_PLUGIN_REF_COUNT"]);
        for code in [23003, 23004] {
            assert_eq!(names(code, Auto, None), ["NCCL_GIN_PLUGIN"]);
            // These compare the type of an external plugin with nothing.
            assert_eq!(names(code, Own, Some(4)), ["NCCL_GIN_PLUGIN"]);
        }
        for code in [23007, 23102, 23203, 23300] {
            assert_eq!(names(code, Nccl, None), ["NCCL_RMA_PLUGIN", "NCCL_GIN_TYPE"]);
            for engine in [Own, GdakiSoft] {
                assert_eq!(names(code, engine, None), ["NCCL_GIN_PLUGIN", "NCCL_RMA_PLUGIN"]);
            }
            assert_eq!(select(code, wanted(GdakiSoft, None), "oxygin").expect("newer").engine, "gdaki-soft");
            // Device structures of later ones are not known.
            let by_itself = select(code, wanted(Auto, None), "oxygin").expect("newer").engine;
            let (engine, variables) = match code {
                23300 => ("nccl", ["NCCL_RMA_PLUGIN", "NCCL_GIN_TYPE"]),
                _ => ("gdaki-soft", ["NCCL_GIN_PLUGIN", "NCCL_RMA_PLUGIN"]),
            };
            assert_eq!((by_itself, names(code, Auto, None)), (engine, variables.to_vec()));
        }
        let with_mlx5 = Wanted { serves_kernels: true, ..wanted(Auto, None) };
        assert_eq!(
            [23004, 23203].map(|code| select(code, with_mlx5, "oxygin").expect("known").engine),
            ["own", "gdaki"]
        );
        let over_iwarp = select(23203, Wanted { has_nic: false, ..wanted(Auto, None) }, "oxygin").expect("known");
        assert!(
            over_iwarp.engine == "own" && over_iwarp.notes[0].contains("OXYGIN_ENGINE=gdaki-soft"),
            "{over_iwarp:?}"
        );
        let tables = |code| select(code, wanted(Auto, None), "oxygin").expect("newer").tables;
        let all = [22907, 23004, 23007, 23102, 23203].map(tables);
        let want = ["GIN v12", "GIN v13", "RMA v14, GIN v14", "RMA v15, GIN v14", "RMA v16, GIN v14"];
        assert_eq!(all, want);
        assert!(select(23203, wanted(Nccl, None), "oxygin").expect("known").notes.is_empty());
        assert!(select(23301, wanted(Auto, None), "oxygin").expect("later").notes[0].contains("2.33.1"));
    }

    #[test]
    fn a_type_that_rules_oxygin_out_is_replaced() {
        // The proxy is of type 2, oxygin's own engine of type 3; auto follows the type where it may.
        for (code, engine, gin_type, excluded) in [
            (23004, Auto, Some(2), false),
            (23004, Auto, Some(3), false),
            (23004, Auto, Some(4), false),
            (23004, Nccl, Some(3), false),
            (23004, Own, Some(2), false),
            (23004, Own, Some(-1), false),
            (23203, Auto, Some(3), false),
            (23203, Auto, Some(4), true),
            (23203, Own, Some(2), true),
            (23203, Own, Some(3), false),
        ] {
            let chosen = select(code, wanted(engine, gin_type), "oxygin").expect("a version that has plugins");
            let any = chosen.variables.iter().any(|v| (v.name, v.value.as_str()) == ("NCCL_GIN_TYPE", "-1"));
            assert_eq!(any, excluded, "{code} {engine:?} {gin_type:?}");
        }
    }

    /// From 2.30.7 on, too, `NCCL_GIN_TYPE=3` asks for a plugin's queues.
    #[test]
    fn a_type_that_oxygin_has_is_followed() {
        assert_eq!(names(23203, Auto, Some(3)), ["NCCL_GIN_PLUGIN", "NCCL_RMA_PLUGIN"]);
        assert_eq!(names(23203, Auto, Some(2)), ["NCCL_RMA_PLUGIN", "NCCL_GIN_TYPE"]);
        assert_eq!(names(23203, Gdaki, None), ["NCCL_GIN_PLUGIN", "NCCL_RMA_PLUGIN"]);
    }

    #[test]
    fn a_path_is_kept_as_it_is() {
        let s = select(23007, wanted(Auto, None), "/a b/liboxygin.so").expect("known");
        assert_eq!(s.variables[0].value, "/a b/liboxygin.so");
    }
}
