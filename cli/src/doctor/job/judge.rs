//! What a process used, in a few lines, and the first reason why it was not the best.

use super::log::{Facts, Kind, Processes};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Processes that used the same.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Their ranks.
    pub ranks: BTreeSet<u32>,
    /// Their hosts and numbers, as `host:4711`.
    pub processes: Vec<String>,
    /// What each of them used; ways to peers are those of all.
    pub used: Facts,
    /// The first reason why that is not the best there is; none: it is.
    pub reason: Option<String>,
}

/// Puts processes together that used the same.
pub fn groups(processes: Processes) -> Vec<Group> {
    let mut all: Vec<Group> = Vec::new();
    for ((host, number), facts) in processes {
        let (name, reason) = (format!("{host}:{number}"), reason(&facts));
        let same = all.iter_mut().find(|g| g.reason == reason && likeness(&g.used) == likeness(&facts));
        match same {
            Some(group) => {
                group.ranks.extend(&facts.ranks);
                group.processes.push(name);
                for (way, peers) in facts.paths {
                    group.used.paths.entry(way).or_default().extend(peers);
                }
                group.used.gpus.extend(facts.gpus);
            }
            None => {
                all.push(Group { ranks: facts.ranks.clone(), processes: vec![name], used: facts, reason });
            }
        }
    }
    all.sort_by_key(|g| g.ranks.first().copied());
    all
}

/// What must be the same in a group: all that is not about single ranks.
fn likeness(f: &Facts) -> impl PartialEq + '_ {
    let ways: Vec<&String> = f.paths.keys().collect();
    (&f.nccl, &f.loaded, &f.tables, &f.assigned, &f.build, (&f.fabric, &f.engine, &f.against_engines, ways, &f.warning))
}

/// The first reason, from the plugin down to the way that bytes go.
fn reason(f: &Facts) -> Option<String> {
    let obstacle = |about: &[&str]| f.obstacles.iter().find(|o| about.iter().any(|a| o.contains(a))).cloned();
    if f.build.is_none() && !f.uses_oxygin() {
        let found =
            obstacle(&[".so: "]).or_else(|| obstacle(&["Failed to load"])).or_else(|| obstacle(&["Could not find"]));
        return Some(match found {
            Some(why) => format!("NCCL did not load oxygin: {why}"),
            None => "NCCL did not load oxygin: no variable names it (oxygin env)".into(),
        });
    }
    if !f.uses_oxygin() {
        return Some(match obstacle(&["Skipping "]).or_else(|| obstacle(&["Failed to init"])) {
            Some(why) => format!("NCCL loaded oxygin and did not take it: {why}"),
            None => "NCCL loaded oxygin, and nothing used GIN or RMA".into(),
        });
    }
    let way = |begin: &str| f.paths.keys().find(|way| way.starts_with(begin));
    match &f.fabric {
        None => return Some("no connections: nothing used GIN or RMA".into()),
        Some((name, why)) if name == "soft" => return Some(format!("no RDMA: {why}")),
        Some(_) => {}
    }
    way("over TCP").cloned().or_else(|| obstacle(&["no copy kernel"]))
}

/// What else keeps a process on the soft fabric from its best ways.
fn further(f: &Facts) -> Vec<&str> {
    let slow = |way: &&String| {
        way.starts_with("over TCP") || way.contains("two copies (") || way.contains("goes there through host memory")
    };
    let kernel = f.obstacles.iter().filter(|o| o.contains("no copy kernel"));
    f.paths.keys().filter(slow).chain(kernel).map(String::as_str).collect()
}

/// `0-3, 7`.
pub fn ranges(numbers: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let one = |(a, b): (u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.into_iter().map(one).collect::<Vec<_>>().join(", ")
}

/// For people.
pub fn text(groups: &[Group]) -> String {
    let mut out = String::new();
    for group in groups {
        let f = &group.used;
        let processes = match &group.processes[..] {
            [one] => one.clone(),
            [first, rest @ ..] => format!("{first} and {} more", rest.len()),
            [] => String::new(),
        };
        let ranks = match group.ranks.is_empty() {
            true => "no rank".into(),
            false => format!("rank {}", ranges(&group.ranks)),
        };
        // Writing to a String does not fail.
        let _ = writeln!(out, "{ranks} ({processes})");
        let mut line = |name: &str, what: &str| {
            let _ = writeln!(out, "  {name:8} {what}");
        };
        line("NCCL", f.nccl.as_deref().unwrap_or("its version is not in the log"));
        for (kind, begin) in Kind::ALL {
            let word = &begin[..3];
            let from = f.loaded.get(&kind).map(|path| format!(" from {path}")).unwrap_or_default();
            let took = f.assigned.get(&kind).map(|name| format!("; operations go to {name}")).unwrap_or_default();
            if let Some(table) = f.tables.get(&kind) {
                line(word, &format!("{table}{from}{took}"));
            } else if !took.is_empty() {
                line(word, &took[2..]);
            }
        }
        if let Some(build) = &f.build {
            line("oxygin", build);
        }
        if let Some((name, why)) = &f.fabric {
            line("fabric", &format!("{name}: {why}"));
            line("engine", &f.engine.clone().unwrap_or_else(|| "NCCL's proxy".into()));
            f.against_engines.iter().for_each(|why| line("", &format!("not {why}")));
        }
        for (way, peers) in &f.paths {
            line("path", &format!("to {}: {way}", ranges(peers)));
        }
        for gpu in &f.gpus {
            line("GPU", gpu);
        }
        if let Some(warning) = &f.warning {
            line("WARN", warning);
        }
        match &group.reason {
            None => line("", "nothing better was to be had"),
            Some(reason) => line("->", reason),
        }
        further(f).into_iter().filter(|f| group.reason.as_deref() != Some(f)).for_each(|why| line("->", why));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::log::{read, tests::GOOD};
    use super::*;

    fn of(text: &str) -> Vec<Group> {
        let mut processes = Processes::new();
        read(text, &mut processes);
        groups(processes)
    }

    #[test]
    fn ranks_that_used_the_same_are_one_group() {
        let other = GOOD
            .replace(":4711:", ":4712:")
            .replace("rank 0 nranks", "rank 1 nranks")
            .replace("(rank 0 of", "(rank 1 of");
        let third = GOOD.replace("node1:4711:", "node2:9:").replace("rank 0 nranks", "rank 2 nranks");
        let third = third
            .replace("(rank 0 of", "(rank 2 of")
            .replace("on this host, shared memory, large", "over TCP (x) large");
        let groups = of(&[GOOD, &other, &third].concat());
        let ranks: Vec<String> = groups.iter().map(|g| ranges(&g.ranks)).collect();
        assert_eq!(ranks, ["0-1", "2"]);
        let text = text(&groups);
        for words in
            ["rank 0-1 (node1:4711 and 1 more)", "oxygin (v16) from /opt/oxygin/lib/liboxygin.so", "NCCL's proxy"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(text.contains("-> ") && text.contains("no RDMA: rank 0 cannot use verbs: no usable port"), "{text}");
        assert!(text.lines().count() < 40, "a screen: {text}");
    }

    #[test]
    fn the_first_reason_is_named() {
        let head = "a:1:2 [0] NCCL INFO ";
        let loaded = "oxygin 0.1.0 (debug build), communicator 0x1";
        let verbs = "fabric verbs: every rank has a usable port (rank 0 of 2)";
        for (lines, reason) in [
            (&["Bootstrap: Using eth0"][..], Some("no variable names it")),
            (&["RMA/Plugin: Could not find: oxygin libnccl-rma-oxygin.so"], Some("Could not find: oxygin")),
            (
                &["GIN/Plugin: Skipping plugin oxygin index 0 type 2: NCCL_GIN_TYPE=3", loaded],
                Some("did not take it: GIN: Ski"),
            ),
            (&[loaded], Some("nothing used GIN or RMA")),
            (&[loaded, "fabric soft: rank 1 has OXYGIN_FABRIC=soft (rank 0 of 2)"], Some("no RDMA: rank 1 has")),
            (&[loaded, verbs], None),
        ] {
            let text: String = lines.iter().map(|line| format!("{head}{line}\n")).collect();
            let groups = of(&text);
            let said = groups[0].reason.as_deref();
            let fits = match (said, reason) {
                (Some(said), Some(reason)) => said.contains(reason),
                (said, reason) => said == reason,
            };
            assert!(fits, "{lines:?}: {said:?}");
        }
    }

    #[test]
    fn ranks_are_written_as_ranges() {
        assert_eq!(ranges(&BTreeSet::from([0, 1, 2, 5, 7, 8])), "0-2, 5, 7-8");
        assert_eq!(ranges(&BTreeSet::new()), "");
    }
}
