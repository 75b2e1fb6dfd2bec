//! Which NCCL libraries are here, what selects oxygin in each, and whether the variables now set do.

use super::child;
use super::report::Section;
use crate::env;
use crate::env::find::{libraries, loads, spell, version};
use crate::env::select::{select, Selection, ELSEWHERE, FIRST_WITH_GIN_V14, KEEPS_THE_PLUGIN};
use crate::plugin::{library, Plugin};
use nccl_plugin_api::{DEVICE_GIN_GDAKI, DEVICE_GIN_PROXY};
use oxygin::comm::backend::foresee::foresee;
use oxygin::comm::backend::report::{queue_owner, Asking, QueueOwner};
use oxygin::config::Config;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Looks for NCCL libraries and for the plugin that the variables name.
pub fn nccl(variable: &dyn Fn(&str) -> Option<String>) -> Section {
    let mut section = Section::new("NCCL");
    let found = libraries(variable);
    if found.is_empty() {
        section.note("libraries", "no libnccl.so or librccl.so in the linker's paths or in Python environments");
    }
    for path in found {
        let subject = path.display().to_string();
        match version(&path) {
            Some(code) => {
                section.note(&subject, format!("version {}", spell(code)));
                judge(&mut section, code, &path, variable);
            }
            None => section.no(&subject, "its version cannot be found out", "look at NCCL_DEBUG=VERSION"),
        }
    }
    section
}

/// The value that has NCCL load no external plugin.
const NONE: &str = "none";

/// Looks for the library behind `NCCL_GIN_PLUGIN`, `NCCL_RMA_PLUGIN`, and for liboxygin.so itself.
pub fn plugins(variable: &dyn Fn(&str) -> Option<String>) -> Section {
    let mut section = Section::new("Plugin");
    let kinds = [("NCCL_GIN_PLUGIN", "gin"), ("NCCL_RMA_PLUGIN", "rma")];
    let own = library::named(value_of(variable, "OXYGIN_PLUGIN").map(PathBuf::from));
    let remedy = "scripts/install PREFIX, then put PREFIX/lib into LD_LIBRARY_PATH";
    match library::file(&own) {
        Ok(path) => section.ok("liboxygin.so", path.display().to_string()),
        Err(e) if kinds.iter().any(|(name, kind)| leads_to_oxygin(variable, name, kind)) => {
            section.no("liboxygin.so", e, remedy)
        }
        Err(e) => section.wrong("liboxygin.so", e, remedy),
    }
    for (name, kind) in kinds {
        let value = value_of(variable, name);
        if value.as_deref().is_some_and(|v| v.eq_ignore_ascii_case(NONE)) {
            section.note(name, "none: NCCL loads no plugin for it");
            continue;
        }
        let tried = candidates(value.as_deref(), kind);
        let hit = tried.iter().find_map(|c| loads(c).ok());
        match (value, hit) {
            (Some(value), Some(path)) => section.ok(name, format!("{value} leads to {path}")),
            (Some(value), None) => section.wrong(
                name,
                format!("{value} leads to no library: tried {}", tried.join(", ")),
                "give a path, or put its folder into LD_LIBRARY_PATH",
            ),
            (None, Some(path)) => section.ok(name, format!("not set; NCCL finds {path} by itself")),
            (None, None) => section.note(name, format!("not set, and there is no {}", tried.join(", "))),
        }
    }
    section
}

/// The names that NCCL tries for a value, a list with commas, in its order.
pub fn candidates(value: Option<&str>, kind: &str) -> Vec<String> {
    let Some(value) = value else { return vec![format!("libnccl-{kind}.so")] };
    let names_of = |name: &str| match name {
        v if v.contains('/') || (v.starts_with("lib") && v.ends_with(".so")) => vec![v.to_owned()],
        v => vec![v.to_owned(), format!("libnccl-{kind}-{v}.so")],
    };
    value.split(',').filter(|name| !name.is_empty()).flat_map(names_of).collect()
}

/// A variable's value; empty is not set.
fn value_of(variable: &dyn Fn(&str) -> Option<String>, name: &str) -> Option<String> {
    variable(name).filter(|value| !value.is_empty())
}

/// Whether NCCL finds oxygin by the kind's variable.
fn leads_to_oxygin(variable: &dyn Fn(&str) -> Option<String>, name: &str, kind: &str) -> bool {
    candidates(value_of(variable, name).as_deref(), kind).iter().any(|name| names_oxygin(name))
}

/// The library is of this version and in this file.
fn judge(section: &mut Section, code: i32, library: &Path, variable: &dyn Fn(&str) -> Option<String>) {
    let subject = format!("selection in {}", spell(code));
    let (config, _) = Config::parse(variable);
    let foreseen = env::wanted(&config, Some(library));
    let wanted = match select(code, foreseen, "oxygin") {
        Ok(wanted) => wanted,
        Err(why) => return section.no(subject, why, "a newer NCCL"),
    };
    let line = wanted.variables.iter().map(|v| format!("{}={}", v.name, v.value)).collect::<Vec<_>>().join(" ");
    let decisive = wanted.variables[0].name;
    let value = value_of(variable, decisive);
    let is_v14 = code >= FIRST_WITH_GIN_V14;
    let rma_in_use = is_v14 && leads_to_oxygin(variable, "NCCL_RMA_PLUGIN", "rma");
    let asking = Asking { is_v14, rma_in_use, nccl: Some(code) };
    let has_cuda = foreseen.has_cuda;
    let (owner, decided_by) = queue_owner(&config, asking, &|| has_cuda);
    let has_queues = owner == QueueOwner::Plugin;
    let may_be = |kind| config.gin_type.is_none_or(|asked| asked == kind);
    // From 2.30.7 on a GIN plugin whose queues are NCCL's is skipped, and the RMA table driven by NCCL's proxy.
    let is_taken = if has_queues { may_be(DEVICE_GIN_GDAKI) } else { !is_v14 && may_be(DEVICE_GIN_PROXY) };
    let by_gin = is_taken && leads_to_oxygin(variable, "NCCL_GIN_PLUGIN", "gin");
    let chosen = by_gin || asking.rma_in_use && may_be(DEVICE_GIN_PROXY);
    let set_otherwise = |name: &str, value: &str| {
        name == "NCCL_GIN_TYPE" && config.gin_type.is_some_and(|t| t >= 0 && t.to_string() != value)
    };
    if wanted.variables.iter().any(|v| set_otherwise(v.name, &v.value)) {
        section.wrong(
            "NCCL_GIN_TYPE",
            format!("its value rules out the way that oxygin moves data on this version (engine {})", wanted.engine),
            "unset NCCL_GIN_TYPE",
        );
    }
    if chosen {
        note_unloading(section, &wanted, variable);
    }
    if foreseen.is_elsewhere {
        section.note("CUDA driver", ELSEWHERE);
    }
    if by_gin {
        let config = config.clone();
        // It may try a device.
        let foreseen = child::ask(Duration::from_secs(20), move || {
            foresee(&config, asking, has_cuda).map_err(|e| e.message().into())
        });
        match foreseen {
            Ok(engine) => section.note("engine", engine),
            Err(why) => section.wrong("engine", why, "mend that, or unset OXYGIN_ENGINE"),
        }
    } else if chosen {
        let why = match (has_queues, is_taken) {
            (false, _) => decided_by,
            (true, false) => "NCCL_GIN_TYPE",
            (true, true) => "NCCL_GIN_PLUGIN does not lead to oxygin",
        };
        section.note("engine", format!("nccl ({why}): NCCL's proxy drives the RMA table"));
    }
    match (chosen, value) {
        (true, _) => section.ok(subject, "oxygin, as the variables are now"),
        (false, Some(value)) => {
            section.note(subject, format!("{decisive}={value} selects something else; for oxygin: {line}"))
        }
        (false, None) => section.note(subject, format!("not oxygin; to select it: {line}")),
    }
}

/// Says what a process that makes communicators one after another needs, where this NCCL needs it and it is not set.
fn note_unloading(section: &mut Section, wanted: &Selection, variable: &dyn Fn(&str) -> Option<String>) {
    let Some(kept) = wanted.variables.iter().find(|v| v.name == KEEPS_THE_PLUGIN) else { return };
    let is_set = variable(kept.name).and_then(|v| v.trim().parse::<i64>().ok()).is_some_and(|count| count > 0);
    if !is_set {
        section.note(kept.name, format!("not set; {}={} {}", kept.name, kept.value, kept.why));
    }
}

/// Whether the library's newest table calls itself oxygin.
fn names_oxygin(name: &str) -> bool {
    let name = name.to_owned();
    let answer = child::ask(Duration::from_secs(20), move || {
        let plugin = Plugin::open(&name).map_err(|e| e.to_string())?;
        Ok(plugin.tables().last().map(|t| t.name()).unwrap_or_default())
    });
    answer.is_ok_and(|name| name.to_lowercase().contains("oxygin"))
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;
    use crate::env::select::Wanted;
    use oxygin::config::EngineChoice;

    #[test]
    fn names_are_tried_as_nccl_tries_them() {
        assert_eq!(candidates(None, "rma"), ["libnccl-rma.so"]);
        assert_eq!(candidates(Some("oxygin"), "rma"), ["oxygin", "libnccl-rma-oxygin.so"]);
        assert_eq!(candidates(Some("libx.so"), "gin"), ["libx.so"]);
        assert_eq!(candidates(Some("/a/b"), "gin"), ["/a/b"]);
        assert_eq!(candidates(Some("libx.so,oxygin"), "gin"), ["libx.so", "oxygin", "libnccl-gin-oxygin.so"]);
    }

    #[test]
    fn a_plugin_that_is_named_and_missing_is_wrong() {
        let section = plugins(&|name| (name == "NCCL_RMA_PLUGIN").then(|| "nonesuch".into()));
        let finding = section.findings.iter().find(|f| f.subject == "NCCL_RMA_PLUGIN").expect("judged");
        assert_eq!(finding.verdict, Verdict::Wrong);
        assert!(finding.detail.contains("libnccl-rma-nonesuch.so"), "{}", finding.detail);
    }

    #[test]
    fn without_the_library_nothing_can_run() {
        let verdict = |gin: Option<&str>| {
            let section = plugins(&|name| match name {
                "OXYGIN_PLUGIN" => Some("/nonesuch/liboxygin.so".into()),
                "NCCL_GIN_PLUGIN" => gin.map(String::from),
                _ => None,
            });
            section.findings.into_iter().find(|f| f.subject == "liboxygin.so").expect("judged").verdict
        };
        assert_eq!(verdict(None), Verdict::Wrong);
        let library = std::env::current_exe().expect("a path").with_file_name("liboxygin.so");
        assert_eq!(verdict(library.to_str()), Verdict::No);
    }

    #[test]
    fn a_plugin_that_is_none_on_purpose_is_not_wrong() {
        let section = plugins(&|name| (name == "NCCL_GIN_PLUGIN").then(|| "None".into()));
        let finding = section.findings.iter().find(|f| f.subject == "NCCL_GIN_PLUGIN").expect("judged");
        assert!(finding.verdict == Verdict::Note && finding.detail.starts_with("none:"), "{finding:?}");
    }

    #[test]
    fn the_way_of_nccls_proxy_has_a_reason() {
        let library = std::env::current_exe().expect("a path").with_file_name("liboxygin.so");
        let engine = |variables: &[(&str, &str)]| {
            let mut section = Section::new("NCCL");
            judge(&mut section, FIRST_WITH_GIN_V14, Path::new("libnccl.so.2"), &|name| match name {
                "NCCL_RMA_PLUGIN" => Some(library.to_str().expect("UTF-8").to_owned()),
                _ => variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()),
            });
            section.findings.into_iter().find(|f| f.subject == "engine").expect("said").detail
        };
        let said =
            [&[("NCCL_GIN_TYPE", "2")][..], &[("OXYGIN_ENGINE", "own")], &[("OXYGIN_ENGINE", "nccl")]].map(engine);
        for (said, why) in said.iter().zip(["NCCL_GIN_TYPE=2", "NCCL_GIN_PLUGIN does not lead", "OXYGIN_ENGINE=nccl"]) {
            assert!(said.starts_with(&format!("nccl ({why}")), "{said}");
        }
    }

    #[test]
    fn what_nccl_2_29_7_needs_to_keep_the_plugin_is_said_where_it_is_not_set() {
        let said = |code: i32, value: Option<&str>| {
            let mut section = Section::new("NCCL");
            let (engine, gin_type) = (EngineChoice::Auto, None);
            let (has_cuda, serves_kernels, has_nic, is_elsewhere) = (true, false, true, false);
            let foreseen = Wanted { engine, gin_type, has_cuda, serves_kernels, has_nic, is_elsewhere };
            let wanted = select(code, foreseen, "oxygin").expect("a version that has plugins");
            note_unloading(&mut section, &wanted, &|_| value.map(str::to_owned));
            section.findings.iter().any(|f| f.subject == "NCCL_GIN_PLUGIN_REF_COUNT" && f.detail.contains("forgets"))
        };
        assert_eq!([None, Some("0"), Some("1"), Some("2")].map(|value| said(22907, value)), [true, true, false, false]);
        assert!(!said(23004, None));
    }
}
