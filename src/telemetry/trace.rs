//! `OXYGIN_TRACE`: what the engine's threads did with each entry and when, as a file for ui.perfetto.dev.
//!
//! Each thread has a ring of the last [`EVENTS`] entries, so a trace takes no more memory however long the communicator
//! lives; the file is written once, when the threads have ended. It has the JSON form of Chrome's trace events: for
//! each entry a slice from seen to complete, and inside it one to posted and one from there.

use crate::sys::sync::Mutex;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Error, ErrorKind, Result, Write};
use std::os::unix::fs::OpenOptionsExt;

/// Entries that the ring of a thread holds: 3 MiB.
pub const EVENTS: usize = 1 << 16;

/// What an entry asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A put.
    Put,
    /// A put with a signal.
    PutSignal,
    /// A signal alone.
    Signal,
    /// A value inside the entry.
    Value,
    /// A get.
    Get,
    /// An atomic operation.
    Atomic,
    /// Nothing to move: a counter alone, a flush, or one that was dropped.
    Nothing,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::PutSignal => "put+signal",
            Self::Signal => "signal",
            Self::Value => "value",
            Self::Get => "get",
            Self::Atomic => "atomic",
            Self::Nothing => "no data",
        }
    }
}

/// One entry. Times are those of [`super::stats::now`].
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Of the set of contexts in the communicator.
    pub set: u32,
    /// The context in it.
    pub context: u32,
    /// The peer's rank.
    pub peer: u32,
    /// What it asked for.
    pub kind: Kind,
    /// What it moves.
    pub bytes: u64,
    /// The thread began to read the batch that it is in.
    pub seen: u64,
    /// The fabric had the batch.
    pub posted: u64,
    /// The thread saw it complete and gave its place back.
    pub complete: u64,
}

#[derive(Default)]
struct Ring {
    events: Vec<Event>,
    /// Of the oldest, once it is full.
    next: usize,
    /// Overwritten.
    lost: u64,
}

/// The rings of a communicator, and where they go.
pub struct Trace {
    path: String,
    name: String,
    rings: Box<[Mutex<Ring>]>,
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trace").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The file of a communicator: `%p` becomes PID-COMMUNICATOR-RANK-HOST; without it that is appended. Processes of
/// several containers may have one number, and one folder.
fn path(template: &str, pid: u32, (comm, rank): (u64, u32), host: &str) -> String {
    let own = format!("{pid}-{comm}-{rank}-{host}");
    match template.contains("%p") {
        true => template.replace("%p", &own),
        false => format!("{template}-{own}.json"),
    }
}

/// This host's name, of characters that may stand in the name of a file and in a string of JSON.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-._".contains(c) { c } else { '_' };
    match name.trim() {
        "" => "host".into(),
        name => name.chars().take(64).map(plain).collect(),
    }
}

/// Has `print` write a file, readable by this user alone, that has its name once all of it is written.
fn write_whole(path: &str, print: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let part = format!("{path}.part");
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part).map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => Error::new(
            e.kind(),
            format!("{part} is there: another process writes it, or was ended as it did; remove it then"),
        ),
        _ => e,
    })?;
    let written = print(&mut BufWriter::with_capacity(1 << 18, file)).and_then(|()| std::fs::rename(&part, path));
    // What is there of it is no trace.
    written.inspect_err(|_| _ = std::fs::remove_file(&part))
}

impl Trace {
    /// Of communicator `comm` of this process, `rank` of `nranks`, with a ring for each of so many threads.
    pub fn new(template: &str, comm: u64, (rank, nranks): (u32, u32), threads: usize) -> Self {
        let host = host();
        Self {
            path: path(template, std::process::id(), (comm, rank), &host),
            name: format!("rank {rank} of {nranks} on {host}, communicator {comm}"),
            rings: (0..threads).map(|_| Mutex::default()).collect(),
        }
    }

    /// Remembers entries; their thread's oldest ones are overwritten.
    pub fn record(&self, thread: usize, events: impl Iterator<Item = Event>) {
        let Some(ring) = self.rings.get(thread) else { return };
        let mut ring = ring.lock();
        for event in events {
            if ring.events.len() < EVENTS {
                ring.events.push(event);
                continue;
            }
            let at = ring.next;
            ring.events[at] = event;
            ring.next = (at + 1) % EVENTS;
            ring.lost += 1;
        }
    }

    /// Writes the file, readable by this user alone. What goes wrong is said in the log.
    pub fn write(&self) {
        let (events, lost) = self.rings.iter().fold((0, 0), |(events, lost), ring| {
            let ring = ring.lock();
            (events + ring.events.len(), lost + ring.lost)
        });
        match write_whole(&self.path, |out| self.print(out, lost)) {
            Ok(()) => log::info!("OXYGIN_TRACE: {events} entries in {}, {lost} older ones are lost", self.path),
            Err(error) => log::warn!("OXYGIN_TRACE: {} could not be written: {error}", self.path),
        }
    }

    fn print(&self, out: &mut impl Write, lost: u64) -> Result<()> {
        let pid = std::process::id();
        writeln!(out, r#"{{"displayTimeUnit":"ns","otherData":{{"lost":{lost},"kept a thread":{EVENTS}}},"#)?;
        write!(
            out,
            r#""traceEvents":[{{"ph":"M","name":"process_name","pid":{pid},"args":{{"name":"{}"}}}}"#,
            self.name
        )?;
        let mut id = 0u64;
        for (thread, ring) in self.rings.iter().enumerate() {
            let ring = ring.lock();
            let (newer, older) = ring.events.split_at(ring.next.min(ring.events.len()));
            for event in older.iter().chain(newer) {
                id += 1;
                event.print(out, pid, thread, id)?;
            }
        }
        writeln!(out, "\n]}}")?;
        out.flush()
    }
}

impl Event {
    /// Slices of one entry have its number; Perfetto puts those with one name below each other on one track.
    fn print(&self, out: &mut impl Write, pid: u32, thread: usize, id: u64) -> Result<()> {
        let Self { set, context, peer, bytes, .. } = self;
        let kind = self.kind.name();
        let mut slice = |ph: char, name: &str, time: u64, args: &str| {
            let (us, ns) = (time / 1000, time % 1000);
            write!(
                out,
                ",\n{{\"ph\":\"{ph}\",\"cat\":\"oxygin\",\"id\":\"{id:#x}\",\"name\":\"{name}\",\"pid\":{pid},\
                 \"tid\":{thread},\"ts\":{us}.{ns:03}{args}}}"
            )
        };
        let name = format!("set {set} context {context} to rank {peer}: {kind}");
        let args =
            format!(r#","args":{{"set":{set},"context":{context},"peer":{peer},"kind":"{kind}","bytes":{bytes}}}"#);
        slice('b', &name, self.seen, &args)?;
        slice('b', "seen to posted", self.seen, "")?;
        slice('e', "seen to posted", self.posted, "")?;
        slice('b', "posted to complete", self.posted, "")?;
        slice('e', "posted to complete", self.complete, "")?;
        slice('e', &name, self.complete, "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_names_process_communicator_rank_and_host() {
        assert_eq!(path("/tmp/t", 12, (3, 0), "a"), "/tmp/t-12-3-0-a.json");
        assert_eq!(path("/tmp/t.%p.json", 12, (3, 0), "a"), "/tmp/t.12-3-0-a.json");
        assert_ne!(path("t", 12, (3, 1), "a"), path("t", 12, (3, 0), "a"));
        assert!(!host().is_empty() && !host().contains(['/', '"', '\\', '\n']));
    }

    #[test]
    fn a_file_has_its_name_once_all_of_it_is_written() {
        let folder = std::env::temp_dir().join(format!("oxygin-trace-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let names = || {
            let all = std::fs::read_dir(&folder).unwrap();
            let mut names: Vec<_> = all.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let path = folder.join("t.json").to_str().unwrap().to_owned();
        let cut = |out: &mut BufWriter<File>| {
            out.write_all(b"{\"half\":")?;
            assert_eq!(names(), ["t.json.part"]);
            Err(Error::from(ErrorKind::StorageFull))
        };
        assert_eq!(write_whole(&path, cut).unwrap_err().kind(), ErrorKind::StorageFull);
        assert!(names().is_empty(), "{:?}", names());
        let whole = |out: &mut BufWriter<File>| out.write_all(b"{}").and_then(|()| out.flush());
        write_whole(&path, whole).unwrap();
        assert_eq!(names(), ["t.json"]);
        // Somebody else's is left alone.
        File::create(format!("{path}.part")).unwrap();
        assert!(write_whole(&path, whole).unwrap_err().to_string().contains("remove it"));
        assert_eq!(names(), ["t.json", "t.json.part"]);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_newest_entries_are_kept_and_the_lost_counted() {
        let trace = Trace::new("unused", 1, (0, 2), 1);
        let event = |n: u64| Event {
            set: 1,
            context: 2,
            peer: 3,
            kind: Kind::PutSignal,
            bytes: n,
            seen: 1_000_000 + n,
            posted: 1_000_001 + n,
            complete: 1_002_003 + n,
        };
        trace.record(0, (0..EVENTS as u64 + 5).map(event));
        trace.record(7, (0..1).map(event));
        let mut text = Vec::new();
        let lost = trace.rings[0].lock().lost;
        trace.print(&mut text, lost).unwrap();
        let text = String::from_utf8(text).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["otherData"]["lost"], 5);
        let events = json["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 1 + 6 * EVENTS);
        let bytes: Vec<u64> = events.iter().filter_map(|e| e["args"]["bytes"].as_u64()).collect();
        assert!(bytes.iter().copied().eq(5..EVENTS as u64 + 5), "oldest first");
        let last = &events[events.len() - 6..];
        assert_eq!(last[0]["name"], "set 1 context 2 to rank 3: put+signal");
        assert_eq!(last[0]["ts"].as_f64(), Some((1_000_000 + EVENTS as u64 + 4) as f64 / 1000.0));
        let begun = last.iter().filter(|e| e["ph"] == "b").count();
        assert_eq!((begun, last.iter().filter(|e| e["ph"] == "e").count()), (3, 3));
    }
}
