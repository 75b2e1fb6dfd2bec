//! Recordings under `captured/`, written once more: each entry is understood as it was, does what it says, and
//! completes as it did.
//!
//! A recorded queue pair becomes one of the same shape, with windows of the same sizes in host memory. In its entries
//! keys and numbers of queues are those of the new ones; every other bit is as it was recorded.

use crate::effects::{Effect, Memory, Window};
use crate::harness::Folder;
use crate::recording::{RecordedEntry, RecordedQueue, Recording};
use crate::support::apart::is_elsewhere;
use crate::support::common::{job, ok, Rank};
use crate::support::nic::*;
use nccl_plugin_api::PTR_HOST;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

/// Keys that name nothing: above those of all windows.
const NO_WINDOW: u32 = 0xff00_0000;
/// Faults that an entry has by itself. Flushed ones, and those of peers that did not answer, have other causes.
const OF_ITSELF: [&str; 3] = ["failed 01", "failed 02", "failed 12"];
/// Faults of keys and ranges. A window may have gone meanwhile, which a replay does not repeat.
const OF_WINDOWS: [&str; 2] = ["failed 04", "failed 13"];

/// Every window that a recording names, with its bytes here and at peers, if it ever was one.
type Windows = BTreeMap<u32, Option<(u64, u64)>>;

/// The entries of a queue that say by themselves what they come to: up to the first that failed, or did not complete.
/// A companion's waits are for completion entries of its queue pair, of which there are `waited`.
fn again<'a>(queue: &'a RecordedQueue, windows: &Windows, waited: Option<usize>) -> &'a [RecordedEntry] {
    let entries = &queue.entries[..];
    let waits = |entry: &RecordedEntry| {
        let index = entry.meaning.split_once(" wait queue ").and_then(|(_, rest)| rest.split_once(" index "));
        index.map(|(_, index)| index.parse::<usize>().expect("an index"))
    };
    let is_sound = |entry: &RecordedEntry| ["good", "quiet"].contains(&&entry.end[..]);
    let goes = |entry: &RecordedEntry| is_sound(entry) && waits(entry).zip(waited).is_none_or(|(i, n)| i < n);
    let n = entries.iter().position(|entry| !goes(entry)).unwrap_or(entries.len());
    match entries.get(n) {
        Some(failed) if OF_ITSELF.contains(&&failed.end[..]) => &entries[..=n],
        Some(failed) if OF_WINDOWS.contains(&&failed.end[..]) && is_outside(failed, windows) => &entries[..=n],
        _ => &entries[..n],
    }
}

/// Whether an entry names what never was a window, or a place that is in none.
fn is_outside(entry: &RecordedEntry, windows: &Windows) -> bool {
    entry.meaning.split(' ').filter_map(|word| word.split_once('+')).any(|(key, range)| {
        let key = u32::from_str_radix(key, 16).expect("a key");
        let at: u64 = range.split('*').next().unwrap().parse().expect("an offset");
        windows.get(&key).is_some_and(|lengths| lengths.is_none_or(|(here, there)| at >= here.max(there)))
    })
}

/// Completion entries of these.
fn told(entries: &[RecordedEntry]) -> usize {
    entries.iter().filter(|entry| entry.end != "quiet").count()
}

/// Where the keys of an entry stand, by its opcode and segments; written from NCCL's copy of DOCA GPUNetIO.
fn key_places(bytes: &[u8; 64]) -> &'static [usize] {
    match (bytes[3], bytes[7] & 0x3f) {
        (WRITE, _) if bytes[32] & 0x80 != 0 => &[24],
        (WRITE | READ, 3) => &[24, 36],
        (WRITE | READ, 4) => &[24, 36, 52],
        (FETCH_ADD | MASKED_ADD | MASKED_SWAP, _) => &[24, 52],
        (DUMP, _) => &[20],
        _ => &[],
    }
}

/// What stands for recorded keys and numbers of queues.
struct Names {
    keys: BTreeMap<u32, u32>,
    queues: BTreeMap<u32, u32>,
}

impl Names {
    /// The same entry for the new queues.
    fn bytes(&self, recorded: &[u8; 64]) -> [u8; 64] {
        let mut bytes = *recorded;
        let mut change = |at: usize, to: &dyn Fn(u32) -> u32| {
            let word = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
            bytes[at..at + 4].copy_from_slice(&to(word).to_be_bytes());
        };
        let queue = |number: u32| self.queues.get(&number).copied().unwrap_or(number);
        change(4, &|word| queue(word >> 8) << 8 | word & 0xff);
        if recorded[3] == WAIT {
            change(28, &|word| queue(word & 0xff_ffff) | word & 0xff00_0000);
        }
        for &at in key_places(recorded) {
            change(at, &|key| self.keys.get(&key).copied().unwrap_or(key));
        }
        bytes
    }

    /// The same meaning.
    fn meaning(&self, recorded: &str) -> String {
        let mut words: Vec<String> = recorded.split(' ').map(str::to_owned).collect();
        for i in 0..words.len() {
            if let Some((key, rest)) = words[i].split_once('+') {
                let key = u32::from_str_radix(key, 16).expect("a key");
                words[i] = format!("{:08x}+{rest}", self.keys.get(&key).copied().unwrap_or(key));
            } else if i > 0 && words[i - 1] == "queue" {
                let number = words[i].parse().expect("a number");
                words[i] = self.queues.get(&number).copied().unwrap_or(number).to_string();
            }
        }
        words.join(" ")
    }
}

/// Writes recorded entries into a queue and rings as device code did, those of one look of the NIC's at once. Returns
/// when all are complete.
fn write_again(qp: Qp, queue: &RecordedQueue, entries: &[RecordedEntry], names: &Names) {
    let mut from = 0;
    while from < entries.len() {
        let n = 1 + entries[from + 1..].iter().take_while(|entry| !entry.is_first).count();
        wait_for_room(qp, entries, from, n);
        for (index, entry) in (from..).zip(&entries[from..from + n]) {
            let bytes = names.bytes(&entry.bytes);
            let slot = (qp.view.slots + 64 * (index as u64 % u64::from(qp.view.size))) as *const AtomicU64;
            for at in (0..8).rev() {
                let word = u64::from_ne_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap());
                // SAFETY: a word of a slot that is free.
                unsafe { (*slot.add(at)).store(word, Ordering::Release) };
            }
        }
        if queue.is_rung {
            qp.ready(from as u64, (from + n) as u64 - 1);
            qp.submit((from + n) as u64);
        }
        from += n;
    }
    // The last one that has a completion entry; those behind it are found in the recording.
    if let Some(last) = entries.iter().rfind(|entry| entry.end != "quiet") {
        let syndrome = last.end.strip_prefix("failed ").map(|s| u8::from_str_radix(s, 16).expect("a syndrome"));
        let expected = syndrome.map_or(Status::Good, |syndrome| Status::Failed { syndrome });
        assert_eq!(qp.wait(told(entries) as u64 - 1), expected, "{last:?}");
    }
}

/// Waits until `n` slots from that of entry `from` on are free: until the first completion entry which says so. Entries
/// that have none are told of by the next one's.
fn wait_for_room(qp: Qp, entries: &[RecordedEntry], from: usize, n: usize) {
    let Some(before) = (from + n).checked_sub(qp.view.size as usize + 1) else { return };
    let telling = (before..from).find(|&i| entries[i].end != "quiet");
    let telling = telling.expect("a completion entry that tells of a free slot");
    assert_eq!(qp.wait(told(&entries[..telling]) as u64), Status::Good);
}

/// A queue pair with its companion; either may have carried nothing.
#[derive(Clone, Copy, Default)]
struct Pair<'a> {
    main: Option<&'a RecordedQueue>,
    companion: Option<&'a RecordedQueue>,
}

fn pairs(recording: &Recording) -> Vec<Pair<'_>> {
    let mut pairs = BTreeMap::<_, Pair>::new();
    for queue in &recording.queues {
        let pair = pairs.entry((queue.context, queue.peer)).or_default();
        let place = if queue.is_companion { &mut pair.companion } else { &mut pair.main };
        assert!(place.replace(queue).is_none(), "one queue a (context, peer)");
    }
    pairs.into_values().collect()
}

fn windows(recording: &Recording) -> Windows {
    let mut windows = Windows::new();
    for window in recording.queues.iter().flat_map(|queue| &queue.windows) {
        let known = windows.entry(window.key).or_insert(window.lengths);
        *known = known.or(window.lengths);
        assert!(window.lengths.is_none_or(|lengths| *known == Some(lengths)), "{:08x} has one length", window.key);
    }
    windows
}

/// Memory of these lengths, registered.
fn register(r: &Rank, bytes: u64) -> crate::support::common::Window {
    let mut window = r.not_registered(bytes.div_ceil(8) as usize);
    // SAFETY: the vector does not move or shrink while registered.
    unsafe {
        let at = window.words.as_mut_ptr().cast();
        ok(T.reg_mr_sym.unwrap()(r.coll, at, bytes as usize, PTR_HOST, 0, &mut window.handle));
    }
    window
}

/// Rank 0 writes all of it, to rank 1 or to itself. Returns how many entries that were, and of how many the memory
/// showed what they did.
fn replay(recording: &Recording) -> (usize, usize) {
    let (pairs, windows) = (pairs(recording), windows(recording));
    let handler = recording.queues[0].handler;
    let counters = u32::from(pairs.iter().any(|pair| pair.companion.is_some()));
    let depth = recording.queues[0].slots as i32;
    let ask = Ask { contexts: pairs.len() as u32, signals: 1, counters, depth, handler, ..Ask::default() };
    let (memory, done) = (Mutex::new([Vec::new(), Vec::new()]), Mutex::new((0, 0)));
    job(2, 1, |r| {
        let lengths = windows.values().flatten().map(|&(here, there)| if r.rank == 0 { here } else { there });
        let registered: Vec<_> = lengths.map(|bytes| register(r, bytes)).collect();
        memory.lock().unwrap()[r.rank] =
            registered.iter().map(|window| Window::new(window.words.as_ptr() as u64, window.words.len())).collect();
        let nic = Nic::new(r, ask);
        r.job.barrier.wait();
        if r.rank == 0 {
            let mut names = Names { keys: BTreeMap::from([(recording.sink, nic.view.sink)]), queues: BTreeMap::new() };
            let mut named = registered.iter();
            for (i, (&key, lengths)) in windows.iter().enumerate() {
                let new = lengths.map(|_| nic.key(named.next().expect("as many as have lengths").handle));
                names.keys.insert(key, new.unwrap_or(NO_WINDOW | (i as u32) << 8));
            }
            let live = windows.iter().filter(|(_, lengths)| lengths.is_some()).map(|(key, _)| *key);
            let memory = Memory::new(live.collect(), std::mem::take(&mut *memory.lock().unwrap()));
            *done.lock().unwrap() = replay_pairs(&nic, recording, (&pairs, &windows), names, memory);
        }
        r.job.barrier.wait();
        nic.destroy();
    });
    done.into_inner().unwrap()
}

fn replay_pairs(
    nic: &Nic,
    recording: &Recording,
    (pairs, windows): (&[Pair], &Windows),
    mut names: Names,
    memory: Memory,
) -> (usize, usize) {
    let peer = |queue: &RecordedQueue| usize::from(queue.peer != recording.rank);
    let (mut effects, mut entries) = (Vec::new(), 0);
    let mut parts = Vec::new();
    for (context, pair) in pairs.iter().enumerate() {
        let main = pair.main.map_or(&[][..], |queue| again(queue, windows, None));
        let companion = pair.companion.map_or(&[][..], |queue| again(queue, windows, Some(told(main))));
        let to = pair.main.or(pair.companion).map_or(0, peer);
        parts.push((context, to, main, companion));
        for (queue, new) in [
            (pair.main, nic.qp(context, to).view.number),
            (pair.companion, if pair.companion.is_some() { nic.companion(context, to).view.number } else { 0 }),
        ] {
            names.queues.extend(queue.map(|queue| (queue.number, new)));
        }
        for (all, side) in [(main, to), (companion, 0)] {
            entries += all.len();
            let sound = all.iter().filter(|entry| !entry.end.starts_with("failed"));
            effects.extend(sound.map(|entry| Effect::read(&entry.meaning, side, &memory)));
        }
    }
    memory.fill(&effects);
    let names = &names;
    for (pair, &(context, to, main, companion)) in pairs.iter().zip(&parts) {
        // Both at once: a companion waits for its queue pair.
        std::thread::scope(|s| {
            if let Some(queue) = pair.companion {
                s.spawn(move || write_again(nic.companion(context, to), queue, companion, names));
            }
            if let Some(queue) = pair.main {
                write_again(nic.qp(context, to), queue, main, names);
            }
        });
    }
    (entries, memory.check(&effects))
}

/// What was written again of each queue, and how the replay recorded it.
fn matched<'a>(
    old: &'a Recording,
    new: &'a Recording,
) -> Vec<(&'a RecordedQueue, &'a [RecordedEntry], &'a RecordedQueue)> {
    let (windows, mut matched) = (windows(old), Vec::new());
    for (context, pair) in pairs(old).into_iter().enumerate() {
        let waited = pair.main.map_or(0, |queue| told(again(queue, &windows, None)));
        for (queue, waited) in [(pair.main, None), (pair.companion, Some(waited))] {
            let Some(queue) = queue else { continue };
            let entries = again(queue, &windows, waited);
            let is_it = |q: &&RecordedQueue| (q.context, q.is_companion) == (context, queue.is_companion);
            match new.queues.iter().find(is_it) {
                Some(new) => matched.push((queue, entries, new)),
                None => assert!(entries.is_empty(), "queue {} {} has carried nothing", queue.context, queue.peer),
            }
        }
    }
    matched
}

/// What the replay's own recording says is what the old one says, in the new names.
fn compare(old: &Recording, new: &Recording, name: &str) {
    let matched = matched(old, new);
    assert_eq!(matched.len(), new.queues.len(), "{name}");
    let names = new_names(old, new, &matched);
    for (old, entries, new) in matched {
        let place = format!("{name}: queue {} {}", old.context, old.peer);
        assert_eq!((new.slots, new.handler, new.is_rung), (old.slots, old.handler, old.is_rung), "{place}");
        assert_eq!(new.entries.len(), entries.len(), "{place}");
        for (i, (old, new)) in entries.iter().zip(&new.entries).enumerate() {
            let recorded = (names.bytes(&old.bytes), names.meaning(&old.meaning), &old.end);
            assert_eq!((new.bytes, new.meaning.clone(), &new.end), recorded, "{place}, entry {i}");
            crate::devx_decoder::both_agree(&old.bytes);
        }
    }
}

/// The new names, found again by the order in which queues and their entries name them.
fn new_names(
    old: &Recording,
    new: &Recording,
    matched: &[(&RecordedQueue, &[RecordedEntry], &RecordedQueue)],
) -> Names {
    let mut names = Names { keys: BTreeMap::from([(old.sink, new.sink)]), queues: BTreeMap::new() };
    for (old, _, new) in matched {
        names.queues.insert(old.number, new.number);
        for (old, new) in old.windows.iter().zip(&new.windows) {
            assert_eq!(*names.keys.entry(old.key).or_insert(new.key), new.key, "{:08x}", old.key);
        }
    }
    names
}

/// The recordings that are kept.
fn kept() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gdaki/captured");
    let files = std::fs::read_dir(folder).expect("the folder").map(|file| file.unwrap().path());
    let mut all: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "txt")).collect();
    all.sort();
    all
}

#[test]
fn recordings_say_where_they_are_from() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gdaki/captured/README.md");
    let page = std::fs::read_to_string(page).expect("a page");
    for path in kept() {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(page.contains(&format!("| `{name}` |")), "{name} has no line in captured/README.md");
    }
}

#[test]
fn recordings_are_understood_as_they_were() {
    // The variable is the process's.
    if is_elsewhere(concat!(module_path!(), "::recordings_are_understood_as_they_were")) {
        return;
    }
    let folder = Folder::new("replay");
    std::env::set_var("OXYGIN_GDAKI_CAPTURE", folder.0.join("run"));
    let all = kept();
    assert!(!all.is_empty());
    for path in all {
        let name = path.file_name().unwrap().to_str().unwrap();
        let recording = Recording::read(&std::fs::read_to_string(&path).expect("a text"));
        let (entries, seen) = replay(&recording);
        assert!(entries > 0, "{name}: no entry of it says by itself what it comes to");
        let made = folder.take();
        assert_eq!(made.len(), 1, "{name}: rank 0 alone writes entries");
        let new = Recording::read(&made[0].1);
        compare(&recording, &new, name);
        assert!(seen > 0, "{name}: nothing that it did shows in memory");
        println!("{name}: {entries} entries, of which {seen} show in memory");
    }
}
