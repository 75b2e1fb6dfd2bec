//! Pages of statistics of another process, or of this one, as `oxygin stats` reads them.
//!
//! Any process may have a file of that name: nothing in it is believed before it was held against its length.

use super::layout::{Header, Record, State, Way, BUCKETS, MAGIC, NAME, VERSION};
use super::now;
use crate::error::{Error, Result};
use crate::sys::memfd::{sealed_len, Mapping};
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A set of contexts, at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Set {
    /// The process.
    pub pid: u32,
    /// When it was read, on the clock of the times in it.
    pub at: u64,
    /// What fills it.
    pub way: Way,
    /// Number of the communicator in its process.
    pub comm: u64,
    /// Of the set in the communicator.
    pub set: u64,
    /// What NCCL calls the communicator.
    pub comm_id: u64,
    /// Its rank.
    pub rank: u64,
    /// Ranks.
    pub nranks: u64,
    /// Contexts.
    pub contexts: u64,
    /// Threads of the engine.
    pub threads: u64,
    /// Name of the fabric.
    pub fabric: String,
    /// Nanoseconds since the set was made.
    pub age: u64,
    /// Nanoseconds since somebody last looked after the page.
    pub published: u64,
    /// `OXYGIN_STALL` in nanoseconds; 0: nobody watches.
    pub stall: u64,
    /// Those that have carried something, or failed; by context, then peer, companions behind all others.
    pub lanes: Vec<Lane>,
}

/// A (context, peer), or the companion of its queue pair, at one moment. Counts are of one moment each.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// The context in its set.
    pub context: u64,
    /// The peer's rank.
    pub peer: u64,
    /// Whether it is the companion of a queue pair to that peer, which waits and adds to this rank's counters.
    pub is_companion: bool,
    /// Entries taken, or operations posted.
    pub entries: u64,
    /// What they move.
    pub bytes: u64,
    /// Batches in which they were posted.
    pub batches: u64,
    /// Those that are complete.
    pub completed: u64,
    /// Malformed entries.
    pub refused: u64,
    /// Entries that were dropped.
    pub dropped: u64,
    /// Entries that are not complete.
    pub under_way: u64,
    /// For how long the oldest of them has been under way, in nanoseconds.
    pub oldest: Option<u64>,
    /// What it is doing.
    pub state: State,
    /// From the look at the queue to posted, of some batches.
    pub posted: Histogram,
    /// From posted to complete, of entries.
    pub complete: Histogram,
}

/// Times, by powers of two.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// See [`super::layout::BUCKETS`].
    pub buckets: [u64; BUCKETS],
    /// Of all times, in nanoseconds; `None`: not kept.
    pub sum: Option<u64>,
}

impl Histogram {
    fn read(buckets: &[AtomicU64; BUCKETS], sum: Option<u64>) -> Self {
        Self { buckets: std::array::from_fn(|i| buckets[i].load(Ordering::Relaxed)), sum }
    }

    /// What it counts.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// An upper bound in nanoseconds, less than twice what it is, of the time that a share of all stay below.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let wanted = (self.count() as f64 * share).ceil().max(1.0);
        let mut sum = 0.0;
        let found = self.buckets.iter().position(|n| {
            sum += *n as f64;
            sum >= wanted
        });
        found.map(|i| 2 << i)
    }
}

/// Why a page was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// It is of a library with this version of the layout, and not with [`VERSION`].
    OtherVersion(u64),
    /// It is no page at all, or cannot be read, for this reason.
    Malformed(String),
}

/// The processes that have pages and let the caller read them.
pub fn processes() -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found: Vec<u32> = pids.filter(|&pid| files(pid).is_ok_and(|files| !files.is_empty())).collect();
    found.sort_unstable();
    found
}

/// All sets of contexts of a process, by communicator and set. Fails if there is no such process, or the caller may not
/// look at it. What is no page, or one of another version, is left out; `skipped` hears which file and why. A page that
/// the process has open more than once is read once.
pub fn sets(pid: u32, mut skipped: impl FnMut(&str, Skipped)) -> Result<Vec<Set>> {
    let (mut sets, mut seen) = (Vec::new(), HashSet::new());
    for path in files(pid)? {
        // It may have been closed just now.
        let Ok(file) = open(&path) else { continue };
        let Ok(metadata) = file.metadata() else { continue };
        if !seen.insert((metadata.dev(), metadata.ino())) {
            continue;
        }
        match set(pid, &file) {
            Ok(Some(set)) => sets.push(set),
            // Not filled in yet.
            Ok(None) => {}
            Err(why) => skipped(&path, why),
        }
    }
    sets.sort_by_key(|s| (s.comm, s.set));
    Ok(sets)
}

/// Opens what was named as pages are a moment ago. By now it may be anything: nothing that another process does or
/// leaves undone with it holds the caller up, as a pipe that nobody writes to would.
fn open(path: impl AsRef<Path>) -> std::io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// The files under `/proc` that are named as pages are.
fn files(pid: u32) -> Result<Vec<String>> {
    let folder = format!("/proc/{pid}/fd");
    let why = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Error::system(format!("there is no process {pid}")),
        _ => Error::system(format!("process {pid} cannot be looked at: {e}; be its user, or root")),
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(Path::new(&folder)).map_err(why)? {
        let Ok(entry) = entry else { continue };
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy();
        let name = target.strip_prefix("/memfd:").map(|t| t.strip_suffix(" (deleted)").unwrap_or(t));
        if name == Some(NAME) {
            found.push(entry.path().to_string_lossy().into_owned());
        }
    }
    Ok(found)
}

/// `None`: it is not ready.
fn set(pid: u32, file: &File) -> std::result::Result<Option<Set>, Skipped> {
    let malformed = |what: &str| Skipped::Malformed(format!("it is no page of statistics: {what}"));
    // Its maker seals it before anything else: who has not is about to, or is no maker of pages.
    let Some(len) = sealed_len(file.as_fd()) else { return Ok(None) };
    if len < size_of::<Header>() {
        return Err(malformed("it is too short"));
    }
    let mapping = Mapping::read_only(file.as_fd(), len).map_err(|e| Skipped::Malformed(e.message().to_owned()))?;
    // SAFETY: at least as long as a header, page-aligned, and of a file that cannot shrink; atomic loads alone.
    let h: &Header = unsafe { &*mapping.ptr().cast() };
    let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
    match h.magic.load(Ordering::Acquire) {
        0 => return Ok(None),
        MAGIC => {}
        _ => return Err(malformed("another magic number")),
    }
    let version = get(&h.version);
    if version != VERSION {
        return Err(Skipped::OtherVersion(version));
    }
    let (records, per_context, way) = (get(&h.records), get(&h.per_context), get(&h.way));
    let fits = get(&h.header_bytes) == size_of::<Header>() as u64
        && get(&h.record_bytes) == size_of::<Record>() as u64
        && records <= ((len - size_of::<Header>()) / size_of::<Record>()) as u64
        && (1..=2).contains(&way);
    if !fits {
        return Err(malformed("sizes that do not fit"));
    }
    let at = now();
    let name = get(&h.fabric).to_le_bytes();
    let since = |time: u64| at.saturating_sub(time);
    let mut set = Set {
        pid,
        at,
        way: if way == 1 { Way::Engine } else { Way::Table },
        comm: get(&h.comm),
        set: get(&h.set),
        comm_id: get(&h.comm_id),
        rank: get(&h.rank),
        nranks: get(&h.nranks),
        contexts: get(&h.contexts),
        threads: get(&h.threads),
        fabric: name.iter().take_while(|c| c.is_ascii_graphic()).map(|c| char::from(*c)).collect(),
        age: since(get(&h.created)),
        published: since(get(&h.published)),
        stall: get(&h.stall),
        lanes: Vec::new(),
    };
    let first_companion = get(&h.first_companion);
    for index in written(file, records as usize) {
        // SAFETY: below the number of records, for which the file has room.
        let record = unsafe { &*mapping.ptr().add(size_of::<Header>()).cast::<Record>().add(index) };
        let is_companion = first_companion > 0 && index as u64 >= first_companion;
        let index = index as u64 - if is_companion { first_companion } else { 0 };
        let (step, nth) = (get(&h.peer_step), index % per_context.max(1));
        let peer = nth.saturating_mul(step).saturating_add(get(&h.first_peer));
        let found = lane(record, index / per_context.max(1), peer, at);
        set.lanes.extend(found.map(|lane| Lane { is_companion, ..lane }));
    }
    Ok(Some(set))
}

/// The records of which any byte has been written: the holes between them are not touched, which would fill them.
fn written(file: &File, records: usize) -> Vec<usize> {
    let (mut found, mut next) = (Vec::new(), 0);
    let seek = |from: i64, whence| {
        // SAFETY: plain call on a descriptor of ours.
        let at = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
        (at >= 0).then_some(at)
    };
    let mut from = 0;
    while let Some(begin) = seek(from, libc::SEEK_DATA) {
        let Some(end) = seek(begin, libc::SEEK_HOLE).filter(|end| *end > begin) else { break };
        let record = |at: i64| (at as usize).saturating_sub(size_of::<Header>()) / size_of::<Record>();
        let last = (record(end - 1) + 1).min(records);
        found.extend(next.max(record(begin))..last);
        next = next.max(last);
        from = end;
    }
    found
}

/// `None`: nothing has happened on it.
fn lane(record: &Record, context: u64, peer: u64, at: u64) -> Option<Lane> {
    let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
    let state = match get(&record.state) {
        1 => State::Flushing,
        2 => State::Failed,
        3 => State::Stopped,
        _ => State::Open,
    };
    // Who stores them counts an entry first, then its bytes: in this order none has bytes that is not counted.
    let bytes = record.bytes.load(Ordering::Acquire);
    let (entries, under_way, oldest) = (get(&record.entries), get(&record.under_way), get(&record.oldest));
    (entries > 0 || state != State::Open).then(|| Lane {
        context,
        peer,
        is_companion: false,
        entries,
        bytes,
        batches: get(&record.batches),
        completed: get(&record.completed),
        refused: get(&record.refused),
        dropped: get(&record.dropped),
        under_way,
        oldest: (under_way > 0 && oldest > 0).then(|| at.saturating_sub(oldest)),
        state,
        posted: Histogram::read(&record.posted, None),
        complete: Histogram::read(&record.complete, Some(get(&record.complete_ns))),
    })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
