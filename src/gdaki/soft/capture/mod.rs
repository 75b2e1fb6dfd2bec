//! `OXYGIN_GDAKI_CAPTURE`: the entries that device code wrote, kept as a text that tests replay.
//!
//! Each send queue of a set keeps the first entries that it took in memory; `text.rs` has the form of the file, which
//! is written once, by whoever ends the set, when the engine's threads have let go of its queues.

mod text;

use super::keys::SINK;
use crate::config::Ringing;
use crate::gdaki::entry::send::{Request, SendEntry};
use crate::gdaki::entry::{Syndrome, ENTRY_BYTES};
use crate::gdaki::view::Layout;
use crate::sys::sync::Mutex;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// Entries that are kept of a send queue at most.
pub const ENTRIES_OF_QUEUE: usize = 2048;
/// Entries that are kept of a set at most, beside the first [`ENTRIES_SURE`] of each queue: 3 MiB.
pub const ENTRIES_OF_SET: u32 = 1 << 15;
/// Entries that are kept of each queue, whatever others have kept.
pub const ENTRIES_SURE: usize = 16;
/// Keys that are kept of a send queue at most: an entry with one more ends what is kept of its queue.
const KEYS_OF_QUEUE: usize = 256;

/// What a recording says of its set.
#[derive(Clone, Debug)]
pub struct CapturedSet {
    /// The version of the NCCL that loaded this library; `None`: not known.
    pub nccl: Option<i32>,
    /// In which structures device code found its queues; `None`: in none.
    pub layout: Option<Layout>,
    /// Name of the fabric.
    pub fabric: &'static str,
    /// Whether the queues lie where a GPU reaches them.
    pub is_on_gpu: bool,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub nranks: u32,
    /// Number of the communicator in this process.
    pub comm: u64,
    /// This set among the communicator's.
    pub set: u32,
    /// Contexts.
    pub contexts: u32,
    /// Distance of ranks that talk to each other.
    pub stride: u32,
    /// The key of the signals of all contexts, and how many each has.
    pub signals: (u32, u32),
    /// The same of counters.
    pub counters: (u32, u32),
}

/// What a recording says of a send queue.
#[derive(Clone, Copy, Debug)]
pub struct CapturedQueue {
    /// Its context.
    pub context: u32,
    /// The rank that its queue pair is of: operations of a companion go to this rank itself.
    pub peer: u32,
    /// Whether it is a companion, which waits and adds to counters.
    pub is_companion: bool,
    /// Its number, and its completion queue's.
    pub number: u32,
    /// Slots.
    pub slots: u32,
    /// How device code was told to ring.
    pub handler: Ringing,
    /// Completions are counted for device code, which does not look at completion entries.
    pub is_counted: bool,
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapturedEnd {
    /// It was not complete when the set ended.
    Open,
    /// It succeeded, and a completion entry says so.
    Good,
    /// It succeeded, and asked for no completion entry.
    Quiet,
    /// A completion entry says why it failed.
    Failed(Syndrome),
}

/// An entry as it was taken.
#[derive(Clone, Copy)]
struct Taken {
    bytes: [u8; ENTRY_BYTES],
    /// It is the first one that a look at the queue found.
    is_first: bool,
    end: CapturedEnd,
}

/// Bytes of a window here and at the queue's peer; `None`: the key named none.
type Lengths = Option<(u64, u64)>;

/// What is kept of a send queue.
struct Kept {
    queue: CapturedQueue,
    /// The first ones, in their order: entry i is the queue's entry i.
    entries: Vec<Taken>,
    /// By key, in the order in which entries named them.
    windows: Vec<(u32, Lengths)>,
    /// Entries taken, kept or not.
    taken: u64,
    /// Device code wrote entries and rang nothing.
    is_silent: bool,
    /// Nothing more is kept.
    is_full: bool,
}

/// What is kept of a set, and where it goes.
pub struct Capture {
    prefix: String,
    set: CapturedSet,
    /// Entries for which there is room beside the sure ones.
    left: AtomicU32,
    queues: Mutex<Vec<Arc<Mutex<Kept>>>>,
}

/// What a send queue tells of its entries. Used by the thread that drains it.
pub struct Tape {
    capture: Arc<Capture>,
    kept: Arc<Mutex<Kept>>,
}

/// Recordings that this process has written: a part of their names.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

impl Capture {
    /// Of a set, into a file whose name begins with `prefix`.
    pub fn new(prefix: &str, set: CapturedSet) -> Arc<Self> {
        let (prefix, left) = (prefix.to_owned(), AtomicU32::new(ENTRIES_OF_SET));
        Arc::new(Self { prefix, set, left, queues: Mutex::default() })
    }

    /// For a send queue of the set.
    pub fn tape(self: &Arc<Self>, queue: CapturedQueue) -> Tape {
        let kept = Kept { queue, entries: Vec::new(), windows: Vec::new(), taken: 0, is_silent: false, is_full: false };
        let kept = Arc::new(Mutex::new(kept));
        self.queues.lock().push(kept.clone());
        Tape { capture: self.clone(), kept }
    }

    /// Takes one of the places for entries that are not sure.
    fn has_room(&self) -> bool {
        // Whoever finds the last place gone leaves it so.
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        taken.is_ok()
    }

    /// Writes the file, readable by this user alone, unless device code did nothing; once. Nothing is kept from here
    /// on. What goes wrong is said in the log.
    pub fn write(&self) {
        let queues = std::mem::take(&mut *self.queues.lock());
        let kept: Vec<_> = queues.iter().map(|queue| queue.lock()).filter(|kept| kept.taken > 0).collect();
        if kept.is_empty() {
            return;
        }
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let path = format!("{}.{}.{}.{number}.txt", self.prefix, self.set.rank, std::process::id());
        let text = text::of(&self.set, &kept);
        let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
        match opened.and_then(|mut file| file.write_all(text.as_bytes())) {
            Ok(()) => log::info!("OXYGIN_GDAKI_CAPTURE: entries of {} send queues in {path}", kept.len()),
            Err(error) => log::warn!("OXYGIN_GDAKI_CAPTURE: {path} could not be written: {error}"),
        }
    }
}

impl Tape {
    /// The next entry of the queue was taken: these bytes. `is_first`: with a new look at the queue. `window` says how
    /// long what a key names is here and at the peer.
    pub fn take(&self, bytes: [u8; ENTRY_BYTES], is_first: bool, window: impl Fn(u32) -> Lengths) {
        let mut kept = self.kept.lock();
        kept.taken += 1;
        let n = kept.entries.len();
        let has_room = || n < ENTRIES_SURE || n < ENTRIES_OF_QUEUE && self.capture.has_room();
        if kept.is_full || !has_room() || !kept.learn(&bytes, window) {
            kept.is_full = true;
            return;
        }
        kept.entries.push(Taken { bytes, is_first, end: CapturedEnd::Open });
    }

    /// Device code rings nothing, or does after all.
    pub fn set_silent(&self, is_silent: bool) {
        self.kept.lock().is_silent = is_silent;
    }

    /// This became of entry `index`.
    pub fn complete(&self, index: u64, end: CapturedEnd) {
        if let Some(taken) = self.kept.lock().entries.get_mut(index as usize) {
            taken.end = end;
        }
    }
}

impl Kept {
    /// Learns the windows that an entry names. `false`: they are too many.
    fn learn(&mut self, bytes: &[u8; ENTRY_BYTES], window: impl Fn(u32) -> Lengths) -> bool {
        let Ok(entry) = SendEntry::parse(bytes) else { return true };
        for key in keys(&entry.work).into_iter().flatten() {
            if key == SINK || self.windows.iter().any(|(known, _)| *known == key) {
                continue;
            }
            if self.windows.len() == KEYS_OF_QUEUE {
                return false;
            }
            self.windows.push((key, window(key)));
        }
        true
    }
}

/// The keys that an entry names.
fn keys(work: &Request) -> [Option<u32>; 3] {
    match work {
        Request::Nop | Request::Wait { .. } => [None; 3],
        Request::Write(remote, local) | Request::Read(remote, local) => {
            [Some(remote.key), Some(local.first.key), local.second.map(|second| second.key)]
        }
        Request::WriteInline(remote, _) => [Some(remote.key), None, None],
        Request::Add { remote, fetched, .. } | Request::Swap { remote, fetched, .. } => {
            [Some(remote.key), Some(fetched.key), None]
        }
        Request::Dump(local) => [Some(local.key), None, None],
    }
}
