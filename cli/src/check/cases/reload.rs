//! Loading and unloading leaves nothing behind.

use super::Tally;
use crate::check::world::{add, CaseEnv, Outcome, World};
use std::time::{Duration, Instant};

/// How often.
const TIMES: u64 = 100;
/// Loads after which nothing may grow any more (allocator arenas and stack caches are warm).
const WARM: u64 = 20;
/// Allowed growth of what the process has mapped. A leak of one page an iteration stays below it, one of a buffer,
/// a stack or the library itself does not.
const MAPPED_SLACK_KIB: u64 = 16 << 10;
/// Allowed growth of the number of mappings.
const MAPPINGS_SLACK: u64 = 8;

#[derive(Clone, Copy, Debug)]
struct Holdings {
    threads: u64,
    descriptors: u64,
    mappings: u64,
    mapped_kib: u64,
}

impl Holdings {
    fn now() -> Self {
        let count = |dir: &str| std::fs::read_dir(dir).map(|d| d.count() as u64).unwrap_or(0);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let size = |line: &&str| {
            let (range, rights) = line.split_once(' ')?;
            let (from, to) = range.split_once('-')?;
            // What an allocator has merely reserved is not counted.
            let reserved = rights.starts_with("---");
            let bytes = u64::from_str_radix(to, 16).ok()? - u64::from_str_radix(from, 16).ok()?;
            Some(if reserved { 0 } else { bytes >> 10 })
        };
        let mapped_kib = maps.lines().filter_map(|line| size(&line)).sum();
        Self {
            threads: count("/proc/self/task"),
            descriptors: count("/proc/self/fd"),
            mappings: maps.lines().count() as u64,
            mapped_kib,
        }
    }

    fn excess(&self, before: &Self) -> Option<String> {
        let grown = |what: &str, now: u64, then: u64, slack: u64| {
            (now > then + slack).then(|| format!("{what} grew from {then} to {now}"))
        };
        grown("threads", self.threads, before.threads, 0)
            .or_else(|| grown("file descriptors", self.descriptors, before.descriptors, 0))
            .or_else(|| grown("mappings", self.mappings, before.mappings, MAPPINGS_SLACK))
            .or_else(|| grown("mapped KiB", self.mapped_kib, before.mapped_kib, MAPPED_SLACK_KIB))
    }
}

/// Each rank by itself: load, come up alone, put to oneself, go down, unload.
pub fn hundred_times(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = Tally::default();
    let cold = Holdings::now();
    let mut warm = cold;
    // What must be held no more of than before the first load.
    let mut base = any_mappings(&cold);
    let devices = device_descriptors();
    // One rank is enough; the machine's cores are few.
    if env.rank == 0 {
        for i in 1..=TIMES {
            let world = alone(env)?;
            let window = world.window(64 << 10, 1)?;
            let signal = add(&window, 0, i);
            let request = world.put_signal(0, 0, (&window, 4096), (&window, 8192), 4096, &signal)?;
            world.wait(request)?;
            world.wait_exactly(&window, 0, i, 0)?;
            world.close_among(&[env.rank], &[&window])?;
            window.free();
            env.beat();
            if i == 1 && is_mapped("librdmacm") {
                // It never closes the devices that it opened. A plugin that needs it (iWARP) can do no better than
                // load it once for good.
                base.descriptors += device_descriptors().saturating_sub(devices);
            }
            if i == WARM {
                warm = settled(&base);
            }
            env.progress_of(i, TIMES);
            tally.item(0, String::new);
        }
        let end = settled(&warm);
        let excess = end.excess(&warm).or_else(|| {
            // Threads and descriptors must be back to where they were before the first load, too.
            end.excess(&base)
        });
        tally.item(u64::from(excess.is_some()), || {
            format!("after {TIMES} loads: {} (since load {WARM})", excess.unwrap_or_default())
        });
        if still_mapped(env) {
            tally.note = Some("the library stays mapped after dlclose".into());
        } else if base.descriptors > cold.descriptors {
            let kept = base.descriptors - cold.descriptors;
            tally.note = Some(format!("librdmacm stays loaded and keeps {kept} descriptors of devices"));
        }
    }
    env.barrier()?;
    Ok(tally)
}

fn alone<'a>(env: &'a CaseEnv<'a>) -> Outcome<World<'a>> {
    env.enter("dlopen");
    let plugin = crate::plugin::Plugin::open(&env.plugin).map_err(|e| e.to_string())?;
    let table = plugin.table(env.way.kind).map_err(|e| e.to_string())?.clone();
    World::among(env, table, 1, &[env.rank])
}

/// Before the first load there is nothing to compare mappings with: the allocator and the linker are cold.
fn any_mappings(cold: &Holdings) -> Holdings {
    Holdings { mappings: u64::MAX / 2, mapped_kib: u64::MAX / 2, ..*cold }
}

/// What is held once threads that were joined have left the kernel's tables.
fn settled(before: &Holdings) -> Holdings {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let now = Holdings::now();
        if now.excess(before).is_none() || Instant::now() > deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn still_mapped(env: &CaseEnv<'_>) -> bool {
    env.plugin.file_name().and_then(|n| n.to_str()).is_some_and(is_mapped)
}

fn is_mapped(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap_or_default().contains(name)
}

/// Descriptors of RDMA devices and of their events.
fn device_descriptors() -> u64 {
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return 0 };
    let targets = all.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("infiniband")).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaked_descriptor_and_a_leaked_mapping_show() {
        let before = Holdings { threads: 1, descriptors: 3, mappings: 50, mapped_kib: 1000 };
        assert_eq!(before.excess(&before), None);
        assert!(Holdings { descriptors: 4, ..before }.excess(&before).is_some());
        assert!(Holdings { threads: 2, ..before }.excess(&before).is_some());
        assert!(Holdings { mapped_kib: 90_000, ..before }.excess(&before).is_some());
        assert!(Holdings { mappings: 58, ..before }.excess(&before).is_none());
        assert!(Holdings::now().mapped_kib > 100, "/proc is read");
    }
}
