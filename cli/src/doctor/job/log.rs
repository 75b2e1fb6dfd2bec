//! What NCCL's log says of a process: which plugin it took, and what oxygin did in it.
//!
//! The sentences are NCCL's of 2.29.7 to 2.32.3 (`src/plugin/*.cc`, `src/init.cc`, `src/debug.cc` there) and oxygin's
//! own; a line that is none of them is passed over.

use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// How what oxygin says of an engine of its own begins, behind "engine ".
const ENGINES: [&str; 3] = ["own: ", "gdaki-soft: ", "gdaki: "];

/// What one process used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// The ranks that it was, in all its communicators.
    pub ranks: BTreeSet<u32>,
    /// NCCL's version; a process may leave it to rank 0's to say.
    pub nccl: Option<String>,
    /// The library that NCCL loaded, by the kind of plugin.
    pub loaded: BTreeMap<Kind, String>,
    /// The tables that it took, as `oxygin (v16)`.
    pub tables: BTreeMap<Kind, String>,
    /// Whose operations a communicator was given, as NCCL calls them.
    pub assigned: BTreeMap<Kind, String>,
    /// Release and commit of oxygin.
    pub build: Option<String>,
    /// The fabric, and why it is that one.
    pub fabric: Option<(String, String)>,
    /// What is said of the own engine, if it made queues.
    pub engine: Option<String>,
    /// What spoke against each engine that would have been better, best first.
    pub against_engines: Vec<String>,
    /// How peers were reached: the way, then the peers.
    pub paths: BTreeMap<String, BTreeSet<u32>>,
    /// How GPU memory moves.
    pub gpus: BTreeSet<String>,
    /// Sentences that say why something was not used, in their order.
    pub obstacles: Vec<String>,
    /// The first warning.
    pub warning: Option<String>,
}

/// Kinds of plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `NCCL_GIN_PLUGIN`.
    Gin,
    /// `NCCL_RMA_PLUGIN`.
    Rma,
}

impl Kind {
    /// As NCCL's log has it in front of sentences.
    pub const ALL: [(Self, &'static str); 2] = [(Self::Gin, "GIN/Plugin: "), (Self::Rma, "RMA/Plugin: ")];
}

/// Processes by host and number.
pub type Processes = BTreeMap<(String, u32), Facts>;

/// Reads a log, of one process or of several.
pub fn read(text: &str, processes: &mut Processes) {
    let mut version = None;
    let mut seen = BTreeSet::new();
    for line in text.lines() {
        // Behind the header if there is one: who shows the version alone leaves it out.
        if let Some(v) = line.find("NCCL version ").map(|at| &line[at + 13..]) {
            version = v.split(['+', ' ']).next().map(str::to_owned);
        }
        let Some((who, is_warning, message)) = parts(line) else { continue };
        seen.insert(who.clone());
        let facts = processes.entry(who).or_default();
        match is_warning {
            true => drop(facts.warning.get_or_insert_with(|| message.to_owned())),
            false => facts.take(message),
        }
    }
    for who in seen {
        if let Some(facts) = processes.get_mut(&who) {
            facts.nccl = facts.nccl.take().or_else(|| version.clone());
        }
    }
}

/// Host and process, whether it is a warning, and the message of `host:pid:tid [device] NCCL INFO message`; NCCL puts a
/// date in front where it is asked to, and a source file into warnings.
fn parts(line: &str) -> Option<((String, u32), bool, &str)> {
    let (head, is_warning, message) = match (line.split_once(" NCCL INFO "), line.split_once(" NCCL WARN ")) {
        (Some((head, message)), _) => (head, false, message),
        (_, Some((head, message))) => (head, true, message),
        _ => return None,
    };
    let who = head.split(' ').find_map(|word| {
        let mut fields = word.rsplitn(3, ':');
        let _thread: u32 = fields.next()?.parse().ok()?;
        let process = fields.next()?.parse().ok()?;
        Some((fields.next()?.to_owned(), process))
    })?;
    Some((who, is_warning, message.trim_end()))
}

impl Facts {
    /// Whether NCCL gave a communicator to oxygin, by what it says or by what oxygin then did.
    pub fn uses_oxygin(&self) -> bool {
        self.fabric.is_some() || self.assigned.values().any(|name| name == "oxygin")
    }

    fn take(&mut self, message: &str) {
        for (kind, begin) in Kind::ALL {
            if let Some(said) = message.strip_prefix(begin) {
                return self.take_plugin(kind, said);
            }
        }
        if let Some(rank) = message.find(" nranks ").and_then(|at| number_behind(&message[..at], "rank ")) {
            if message.contains(" Init START") || message.contains(" Init COMPLETE") {
                self.ranks.insert(rank);
            }
        } else if let Some((build, _)) = message.strip_prefix("oxygin ").and_then(|m| m.split_once(", communicator ")) {
            self.build = Some(build.to_owned());
        } else if let Some((name, why)) = message.strip_prefix("fabric ").and_then(|m| m.split_once(": ")) {
            let (why, rank) = why.rsplit_once(" (rank ").unwrap_or((why, ""));
            self.ranks.extend(rank.split(' ').next().and_then(|r| r.parse::<u32>().ok()));
            self.fabric = Some((name.to_owned(), why.to_owned()));
        } else if let Some(said) =
            message.strip_prefix("engine ").filter(|said| ENGINES.iter().any(|e| said.starts_with(e)))
        {
            self.engine = Some(said.split(';').next().unwrap_or(said).to_owned());
        } else if let Some((_, against)) = message.strip_prefix("engine ").and_then(|m| m.split_once(" chosen; ")) {
            let against = against.rsplit_once(" (rank ").map_or(against, |(against, _)| against);
            self.against_engines = against.split("; not ").map(|a| a.trim_start_matches("not ").to_owned()).collect();
        } else if let Some((peer, how)) = message.strip_prefix("rank ").and_then(|m| m.split_once(": ")) {
            if let Ok(rank) = peer.parse() {
                self.take_path(rank, how);
            }
        }
    }

    fn take_plugin(&mut self, kind: Kind, said: &str) {
        if let Some(path) = said.strip_prefix("Successfully loaded external plugin ") {
            self.loaded.insert(kind, path.to_owned());
        } else if let Some(table) = said.strip_prefix("Loaded gin plugin ").or(said.strip_prefix("Loaded rma plugin "))
        {
            self.tables.insert(kind, table.to_owned());
        } else if let Some(name) = said.strip_prefix("Assigned plugin ") {
            self.assigned.insert(kind, name.split(' ').next().unwrap_or(name).to_owned());
        } else if ["Could not find:", "Failed to", "Skipping ", "Disabling external"]
            .iter()
            .any(|b| said.starts_with(b))
        {
            let word = if kind == Kind::Gin { "GIN" } else { "RMA" };
            self.obstacles.push(format!("{word}: {said}"));
        } else if said.contains(".so: ") {
            // What the linker said of a library that is there and does not load.
            self.obstacles.push(said.to_owned());
        }
    }

    /// What oxygin says of a rank: how it is reached, or of this one, how its GPU's memory moves.
    fn take_path(&mut self, rank: u32, how: &str) {
        if how.starts_with("GPU ") {
            self.gpus.insert(how.split(';').next().unwrap_or(how).to_owned());
        } else if how.starts_with("no copy kernel") {
            self.obstacles.push(how.to_owned());
        } else if ["over TCP", "on this host", "in this process"].iter().any(|begin| how.starts_with(begin)) {
            self.paths.entry(how.to_owned()).or_default().insert(rank);
        }
    }
}

/// The number behind the last `mark`.
fn number_behind(text: &str, mark: &str) -> Option<u32> {
    text[text.rfind(mark)? + mark.len()..].split(' ').next()?.parse().ok()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// As NCCL 2.32.3 and oxygin write it: two ranks of one host, by shared memory.
    pub const GOOD: &str = "\
NCCL version 2.32.3+cuda13.0
node1:4711:4711 [0] NCCL INFO NCCL_RMA_PLUGIN set by environment to /opt/oxygin/lib/liboxygin.so
node1:4711:4730 [0] NCCL INFO RMA/Plugin: Loaded rma plugin oxygin (v16)
node1:4711:4730 [0] NCCL INFO RMA/Plugin: Successfully loaded external plugin /opt/oxygin/lib/liboxygin.so
node1:4711:4730 [0] NCCL INFO oxygin 0.1.0 (commit 0123456789ab), communicator 0x5a5a
node1:4711:4730 [0] NCCL INFO RMA/Plugin: Assigned plugin oxygin to comm
node1:4711:4730 [0] NCCL INFO GIN/Plugin: Could not find: libnccl-gin.so
node1:4711:4730 [0] NCCL INFO GIN/Plugin: Assigned plugin GIN_PROXY type 2 to comm
node1:4711:4730 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x2 - Init COMPLETE
[2026-11-23 05:06:07] node1:4711:4731 [0] NCCL INFO fabric soft: rank 0 cannot use verbs: no usable port (rank 0 of 2)
node1:4711:4731 [0] NCCL INFO rank 0: GPU 0, copies on streams in a private context; signals are added to
node1:4711:4731 [0] NCCL INFO rank 1: on this host, shared memory, large transfers by cross-memory attach
";

    #[test]
    fn what_was_used_is_read_from_the_log() {
        let mut processes = Processes::new();
        read(GOOD, &mut processes);
        assert_eq!(processes.len(), 1);
        let facts = &processes[&("node1".to_owned(), 4711)];
        assert_eq!(facts.ranks, BTreeSet::from([0]));
        assert_eq!(facts.nccl.as_deref(), Some("2.32.3"));
        assert_eq!(facts.loaded, BTreeMap::from([(Kind::Rma, "/opt/oxygin/lib/liboxygin.so".to_owned())]));
        assert_eq!(facts.tables, BTreeMap::from([(Kind::Rma, "oxygin (v16)".to_owned())]));
        assert_eq!(facts.assigned[&Kind::Gin], "GIN_PROXY");
        assert_eq!(facts.build.as_deref(), Some("0.1.0 (commit 0123456789ab)"));
        assert_eq!(facts.fabric, Some(("soft".into(), "rank 0 cannot use verbs: no usable port".into())));
        assert_eq!(facts.gpus, BTreeSet::from(["GPU 0, copies on streams in a private context".to_owned()]));
        let way = "on this host, shared memory, large transfers by cross-memory attach";
        assert_eq!(facts.paths, BTreeMap::from([(way.to_owned(), BTreeSet::from([1]))]));
        assert!(facts.uses_oxygin() && facts.warning.is_none() && facts.engine.is_none());
    }

    #[test]
    fn warnings_refusals_and_engines_are_seen() {
        let mut processes = Processes::new();
        read(
            "a:1:2 [3] src/x.cc:7 (f) NCCL WARN first\na:1:2 [3] src/x.cc:8 NCCL WARN second\n\
             a:1:2 [3] NCCL INFO GIN/Plugin: Skipping external proxy plugin oxygin index 0; using NCCL GIN proxy\n\
             a:1:2 [3] NCCL INFO engine own: 4 contexts, GinV13, device contexts of 72 bytes; suits kernels\n\
             a:1:2 [3] NCCL INFO engine own chosen; not gdaki: rank 1: no DevX; not gdaki-soft: verbs (rank 0 of 2)\n\
             b:1:2 [3] NCCL INFO RMA/Plugin: /x/liboxygin.so: wrong ELF class\nno line of NCCL's: 5\n",
            &mut processes,
        );
        let a = &processes[&("a".to_owned(), 1)];
        assert_eq!(a.warning.as_deref(), Some("first"));
        assert!(a.obstacles[0].starts_with("GIN: Skipping external proxy plugin oxygin"), "{:?}", a.obstacles);
        assert_eq!(a.engine.as_deref(), Some("own: 4 contexts, GinV13, device contexts of 72 bytes"));
        assert_eq!(a.against_engines, ["gdaki: rank 1: no DevX", "gdaki-soft: verbs"]);
        read("a:1:2 [3] NCCL INFO engine gdaki-soft: 1 contexts, V14(2); suits\n", &mut processes);
        let a = &processes[&("a".to_owned(), 1)];
        assert_eq!(a.engine.as_deref(), Some("gdaki-soft: 1 contexts, V14(2)"));
        assert_eq!(processes[&("b".to_owned(), 1)].obstacles, ["/x/liboxygin.so: wrong ELF class"]);
        assert!(!a.uses_oxygin());
    }
}
