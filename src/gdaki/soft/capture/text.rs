//! The text of a recording: lines of words, of which a line's first says what it is.
//!
//! ```text
//! oxygin gdaki capture 1
//! library 0.1.0 (commit 0123456789ab)
//! nccl 23102                                        unknown: none told
//! layout V3                                         none: device code was given no structures
//! fabric soft
//! memory gpu                                        where the queues lie: gpu, host
//! rank 0 2                                          this one, how many there are
//! set 7 1                                           of communicator 7, its set 1
//! contexts 4 1                                      how many, and the stride of ranks
//! sink 00000100                                     its key
//! signals 00000300 8                                their key, and how many each context has
//! counters 00000400 8
//! queue 0 1 main                                    context and peer; or companion, whose operations go to `rank`
//! number 1                                          of the queue and of its completion queue
//! slots 128
//! rings free-flow rung                              or unrung: device code did not ring
//! completions entries                               or counted
//! entries 1 1                                       kept, and taken in all
//! window 00000200 4096 4096                         key, bytes here and at the peer
//! window 00000500 none                              a key that named nothing
//! entry 0 + HEX HEX HEX HEX | what it means | good
//! end
//! ```
//!
//! From `queue` to the next one all lines are one queue's. An entry has its index, `+` if it is the first one of a look
//! at the queue, else `-`, the 64 bytes in the order in which they lie in memory, what was understood ([`meaning`]),
//! and what became of it: `open`, `good`, `quiet` or `failed` with the syndrome. What an entry's segments leave of its
//! slot is what was in it before. A file without `end` was cut by somebody else.

use super::{CapturedEnd, CapturedQueue, CapturedSet, Kept, Taken, SINK};
use crate::config::Ringing;
use crate::gdaki::entry::send::{LocalRange, LocalRanges, RemotePlace, Request, SendEntry};
use crate::gdaki::entry::ENTRY_BYTES;
use crate::sys::version::BUILD;
use std::fmt::Write;
use std::ops::Deref;

/// Bytes of a file at most.
pub const FILE_MAX: usize = 1 << 20;
/// No line of an entry is longer.
const LINE_MAX: usize = 512;
/// The last line.
const END: &str = "end\n";

/// The text of what was kept of a set's queues. Where that is more than [`FILE_MAX`], each has as many entries as the
/// others that have more; where not even the queues fit, the last ones are left out, which a line says.
pub(super) fn of(set: &CapturedSet, queues: &[impl Deref<Target = Kept>]) -> String {
    let mut text = header(set);
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut room = FILE_MAX - text.len() - END.len() - "left out 18446744073709551615\n".len();
    let mut sure = room;
    for kept in queues {
        let head = queue(kept, kept.entries.len());
        // One entry of each has its place.
        let Some(left) = sure.checked_sub(head.len() + LINE_MAX) else { break };
        (sure, room) = (left, room - head.len());
        lines.push(kept.entries.iter().enumerate().map(|(i, taken)| entry(i, taken)).collect());
    }
    let bytes = |most: usize| -> usize { lines.iter().flat_map(|all| all.iter().take(most)).map(String::len).sum() };
    let longest = lines.iter().map(Vec::len).max().unwrap_or(0);
    let (mut fits, mut too_many) = (0, longest + 1);
    while too_many - fits > 1 {
        let middle = fits + (too_many - fits) / 2;
        match bytes(middle) <= room {
            true => fits = middle,
            false => too_many = middle,
        }
    }
    for (kept, entries) in queues.iter().zip(&lines) {
        text += &queue(kept, entries.len().min(fits));
        entries.iter().take(fits).for_each(|line| text += line);
    }
    if lines.len() < queues.len() {
        _ = writeln!(text, "left out {}", queues.len() - lines.len());
    }
    text + END
}

fn header(set: &CapturedSet) -> String {
    let CapturedSet { fabric, rank, nranks, comm, set: number, contexts, stride, signals, counters, .. } = set;
    let nccl = set.nccl.map_or("unknown".into(), |version| version.to_string());
    let layout = set.layout.map_or("none".into(), |layout| format!("{layout:?}"));
    let memory = if set.is_on_gpu { "gpu" } else { "host" };
    format!(
        "oxygin gdaki capture 1\nlibrary {BUILD}\nnccl {nccl}\nlayout {layout}\nfabric {fabric}\nmemory {memory}\n\
         rank {rank} {nranks}\nset {comm} {number}\ncontexts {contexts} {stride}\nsink {SINK:08x}\n\
         signals {:08x} {}\ncounters {:08x} {}\n",
        signals.0, signals.1, counters.0, counters.1
    )
}

/// What stands before a queue's entries, of which so many follow.
fn queue(kept: &Kept, entries: usize) -> String {
    let CapturedQueue { context, peer, number, slots, .. } = kept.queue;
    let kind = if kept.queue.is_companion { "companion" } else { "main" };
    let rings = match kept.queue.handler {
        Ringing::Doorbell => "doorbell",
        Ringing::Proxy => "proxy",
        Ringing::FreeFlow => "free-flow",
    };
    let rung = if kept.is_silent { "unrung" } else { "rung" };
    let completions = if kept.queue.is_counted { "counted" } else { "entries" };
    let mut text = format!(
        "queue {context} {peer} {kind}\nnumber {number}\nslots {slots}\nrings {rings} {rung}\n\
         completions {completions}\nentries {entries} {}\n",
        kept.taken
    );
    for (key, lengths) in &kept.windows {
        _ = match lengths {
            Some((here, there)) => writeln!(text, "window {key:08x} {here} {there}"),
            None => writeln!(text, "window {key:08x} none"),
        };
    }
    text
}

fn entry(index: usize, taken: &Taken) -> String {
    let mut line = format!("entry {index} {}", if taken.is_first { '+' } else { '-' });
    for segment in taken.bytes.chunks_exact(16) {
        _ = write!(line, " {}", hex(segment));
    }
    let end = match taken.end {
        CapturedEnd::Open => "open".into(),
        CapturedEnd::Good => "good".into(),
        CapturedEnd::Quiet => "quiet".into(),
        CapturedEnd::Failed(syndrome) => format!("failed {:02x}", syndrome as u8),
    };
    _ = writeln!(line, " | {} | {end}", meaning(&taken.bytes));
    line
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn place(at: &RemotePlace) -> String {
    format!("{:08x}+{}", at.key, at.address)
}

fn range(of: &LocalRange) -> String {
    format!("{:08x}+{}*{}", of.key, of.address, of.len)
}

fn ranges(of: &LocalRanges) -> String {
    of.iter().map(range).collect::<Vec<_>>().join(" ")
}

/// What an entry means, in words that a replay compares. Places are KEY+OFFSET, ranges KEY+OFFSET*BYTES.
pub(super) fn meaning(bytes: &[u8; ENTRY_BYTES]) -> String {
    let entry = match SendEntry::parse(bytes) {
        Ok(entry) => entry,
        Err(malformed) => return format!("malformed {malformed:?}"),
    };
    let work = match &entry.work {
        Request::Nop => "nop".into(),
        Request::Write(to, from) => format!("write to {} from {}", place(to), ranges(from)),
        Request::WriteInline(to, inline) => format!("value to {} bytes {}", place(to), hex(inline.bytes())),
        Request::Read(from, to) => format!("read from {} to {}", place(from), ranges(to)),
        Request::Add { remote, width, add, boundary, fetched } => {
            format!("add{} to {} value {add} fields {boundary:x} old {}", width.bytes(), place(remote), range(fetched))
        }
        Request::Swap { remote, swap, compare, swap_mask, compare_mask, fetched } => format!(
            "swap4 at {} compare {compare:x} {compare_mask:x} write {swap:x} {swap_mask:x} old {}",
            place(remote),
            range(fetched)
        ),
        Request::Wait { queue, index } => format!("wait queue {queue} index {index}"),
        Request::Dump(local) => format!("dump {}", range(local)),
    };
    let SendEntry { index, opcode, queue, .. } = entry;
    let fenced = if entry.is_fenced { " fenced" } else { "" };
    let signalled = if entry.is_signalled { " signalled" } else { "" };
    format!("index {index} queue {queue} opcode {opcode:02x}{fenced}{signalled} {work}")
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
