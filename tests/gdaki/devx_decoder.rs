//! Send entries read twice: by the library's decoder, which the software NIC has, and by the fake's, which was written
//! from other sources. What both take means the same.

use crate::support::atomics::Random;
use fake_verbs::mlx5::entry::{Change, Head, Keyed, Source, Work};
use oxygin::gdaki::entry::send::{LocalRange, LocalRanges, RemotePlace, Request, SendEntry, View};
use oxygin::gdaki::entry::ENTRY_BYTES;
use oxygin::rma::atomic::Width;
use std::collections::BTreeMap;

/// Opcodes that the library knows.
const KNOWN: [u8; 8] = [0x00, 0x08, 0x0f, 0x10, 0x12, 0x14, 0x15, 0x23];

fn piece(of: &LocalRange) -> Keyed {
    Keyed { key: of.key, at: of.address, bytes: of.len.into() }
}

fn pieces(of: &LocalRanges) -> Vec<Keyed> {
    of.iter().map(piece).collect()
}

fn place(of: &RemotePlace) -> (u64, u32) {
    (of.address, of.key)
}

/// What the library read, in the fake's words.
fn translated(request: &Request) -> Work {
    match request {
        Request::Nop => Work::Nothing,
        Request::Write(to, from) => Work::Write { to: place(to), from: Source::Memory(pieces(from)) },
        Request::WriteInline(to, bytes) => Work::Write { to: place(to), from: Source::Inline(bytes.bytes().to_vec()) },
        Request::Read(from, to) => Work::Read { from: place(from), to: pieces(to) },
        Request::Add { remote, width, add, boundary, fetched } => Work::Atomic {
            at: place(remote),
            bytes: width.bytes(),
            change: Change::Add { value: *add, boundary: *boundary },
            to: vec![piece(fetched)],
        },
        Request::Swap { remote, swap, compare, swap_mask, compare_mask, fetched } => Work::Atomic {
            at: place(remote),
            bytes: Width::Four.bytes(),
            change: Change::Swap {
                swap: (*swap).into(),
                compare: (*compare).into(),
                swap_mask: (*swap_mask).into(),
                compare_mask: (*compare_mask).into(),
            },
            to: vec![piece(fetched)],
        },
        Request::Wait { queue, index } => Work::Wait { cq: *queue, index: *index },
        Request::Dump(from) => Work::Dump { from: vec![piece(from)] },
    }
}

/// Panics if both take this entry and do not mean the same, or the fake refuses what the library takes.
pub fn both_agree(bytes: &[u8; ENTRY_BYTES]) {
    if let Ok(ours) = SendEntry::parse(bytes) {
        let head = Head::read(bytes);
        assert_eq!((ours.opcode, ours.index, ours.queue), (head.opcode, head.index, head.queue));
        assert_eq!(ours.is_signalled, head.is_reported(), "{bytes:x?}");
        assert_eq!(Ok(translated(&ours.work)), head.work(bytes), "{bytes:x?}");
    }
}

/// An entry that could be one: random bytes, with a known opcode, few segments, and lengths that are short.
fn some_entry(random: &mut Random) -> [u8; ENTRY_BYTES] {
    let mut entry: [u8; ENTRY_BYTES] = std::array::from_fn(|_| random.next() as u8);
    entry[0] = [0, 0, 8, 9, random.next() as u8][random.below(5) as usize];
    entry[3] = match random.below(16) {
        0 => random.next() as u8,
        i => KNOWN[i as usize % 8],
    };
    entry[7] = (entry[7] & 0xc0) | (1 + random.below(4) as u8);
    for at in [16, 32, 48] {
        if random.below(8) > 0 {
            let inside = if random.below(4) == 0 { 1 << 31 } else { 0 };
            let short = [4, 8, 12, 28, random.below(1 << 20) as u32][random.below(5) as usize];
            // A remote address has its key there.
            if at > 16 || entry[3] == 0x23 {
                entry[at..at + 4].copy_from_slice(&(inside | short).to_be_bytes());
            }
        }
    }
    entry
}

/// The kinds that have readers of their own are told from all others, and mean the same.
#[test]
fn the_readers_of_usual_entries_say_what_the_parser_says() {
    let (mut random, mut taken) = (Random(6), [0; 3]);
    for _ in 0..200_000 {
        let bytes = some_entry(&mut random);
        let (mut put, mut value, mut addition) = (None, None, None);
        let view = View(&bytes);
        match view.work() {
            Ok(Request::Write(remote, LocalRanges { first, second: None })) => put = Some((remote, first)),
            Ok(Request::WriteInline(remote, inline)) => value = Some((remote, inline)),
            Ok(Request::Add { remote, add, fetched, .. }) if view.opcode() == 0x12 => {
                addition = Some((remote, add, fetched));
            }
            _ => {}
        }
        assert_eq!((view.put(), view.value(), view.addition()), (put, value, addition), "{bytes:x?}");
        let kinds = [put.is_some(), value.is_some(), addition.is_some()];
        taken.iter_mut().zip(kinds).for_each(|(n, is_one)| *n += u32::from(is_one));
    }
    assert!(taken.iter().all(|n| *n > 100), "{taken:?}");
}

#[test]
fn what_both_decoders_take_means_the_same() {
    let (mut random, mut taken) = (Random(5), BTreeMap::new());
    for _ in 0..200_000 {
        let bytes = some_entry(&mut random);
        let (ours, theirs) = (SendEntry::parse(&bytes), Head::read(&bytes));
        let work = theirs.work(&bytes);
        match (&ours, &work) {
            (Ok(ours), Ok(work)) => {
                assert_eq!((ours.opcode, ours.index, ours.queue), (theirs.opcode, theirs.index, theirs.queue));
                assert_eq!(ours.is_signalled, theirs.is_reported(), "{bytes:x?}");
                assert_eq!(translated(&ours.work), *work, "{bytes:x?}");
                *taken.entry(ours.opcode).or_insert(0) += 1;
            }
            // More than the bytes need: the fake takes nothing that nobody asked for.
            (Ok(ours), Err(_)) => assert!(matches!(ours.work, Request::WriteInline(..)), "{ours:?}: {work:?}"),
            // A device takes more than device code of NCCL writes; nothing of it may become something else.
            (Err(_), _) => {}
        }
    }
    assert!(taken.len() == KNOWN.len() && taken.values().all(|n| *n > 100), "{taken:?}");
}
