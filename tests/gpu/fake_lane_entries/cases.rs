//! Entries that a lane's kernel takes, and all kinds that it does not.

use super::*;

/// What an entry is, whether it is taken, and the entry.
type Case = (&'static str, bool, Entry);

/// All of them. `room`: a place of the destination; `end`: its end.
pub fn cases(room: u64, end: u64) -> Vec<Case> {
    let copy = |from, to, bytes| Entry::copy(from, to, bytes);
    let put = copy(16, room, 8);
    let value = |n: usize, to| Entry::value(&[7; 8][..n], to, 3);
    let add = Entry::addition(8 * OTHER, 5);
    let far = u64::MAX >> 1;
    let mut all = vec![
        ("bytes", true, put),
        ("the longest copy", true, copy(16, room, MOST as u32)),
        ("the last bytes", true, copy(SOURCE_BYTES - 8, end - 8, 8)),
        ("a value at the end", true, value(8, end - 8)),
        ("a value of four segments", true, Entry::value(&[7; 8], room, 4)),
        ("a value of -1", true, Entry::value(&[0xff; 8], room, 4)),
        ("a short value of -1", true, Entry::value(&[0xff; 2], room, 3)),
        ("an addition", true, add),
        ("an addition of -1", true, Entry::addition(8 * OTHER, u64::MAX)),
        ("the last word of a window", true, Entry::addition(8 * (SIGNALS - 1), 5)),
        ("nothing", true, Entry::nothing()),
        ("nothing, with all that it does not say", true, Entry::nothing().with(8, &[0xff; 3]).with(12, &[7; 52])),
        ("no completion entry", true, put.flip(11, 8)),
        ("none of an addition", true, add.with(11, &[0x17])),
        ("all flags but a fence, and an immediate value", true, put.with(8, &[0xff; 8]).with(11, &[0x1f])),
        (
            "all that an addition does not say",
            true,
            add.with(8, &[0xff; 8]).with(11, &[0x1f]).with(28, &[0xff; 4]).with(40, &[0xff; 8]),
        ),
        ("a fence", false, put.with(11, &[0x28])),
        ("the other fence", false, add.with(11, &[0x48])),
        ("all fences", false, Entry::nothing().with(11, &[0x80])),
        ("nothing, of two segments", false, Entry::nothing().with(7, &[2])),
        ("nothing, of none", false, Entry::nothing().with(7, &[0])),
        ("nothing, with a modifier", false, Entry::nothing().flip(0, 8)),
        ("nothing of another queue pair", false, Entry::nothing().flip(6, 1)),
        ("another entry's index", false, put.flip(2, 1)),
        ("an index of another lap", false, put.flip(1, 1)),
        ("another queue pair's", false, put.flip(6, 1)),
        ("one of a far queue pair", false, put.flip(4, 0x80)),
        ("a modifier", false, put.flip(0, 8)),
        (
            "a gather of two ranges",
            false,
            put.with(7, &[4]).with(48, &[0, 0, 0, 8, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0]),
        ),
        ("a write of two segments", false, put.with(7, &[2])),
        ("a value of two segments", false, value(8, room).with(7, &[2])),
        ("a value of five segments", false, value(8, room).with(7, &[5])),
        ("an addition of three segments", false, add.with(7, &[3])),
        ("no bytes", false, copy(16, room, 0)),
        ("more bytes than a copy ever has", false, copy(16, room, LONGEST as u32 + 4)),
        ("odd bytes", false, copy(16, room, 6)),
        ("an odd source", false, copy(18, room, 8)),
        ("an odd destination", false, copy(16, room + 2, 8)),
        ("an unknown source", false, put.with(36, &[1, 2, 3, 5])),
        ("a source without a window", false, put.with(36, &[0; 4])),
        ("a source of the peer's alone", false, put.with(36, &TARGET_KEY.to_be_bytes())),
        ("a source of all ones", false, put.with(36, &[0xff; 4])),
        ("an unknown destination", false, put.with(24, &[5, 6, 7, 9])),
        ("a destination the wrong way round", false, put.with(24, &TARGET_KEY.to_le_bytes())),
        ("more than the source has", false, copy(SOURCE_BYTES - 4, room, 8)),
        ("more than the destination has", false, copy(16, end - 4, 8)),
        ("an offset that wraps", false, copy(far - 3, room, 8)),
        ("an offset of all ones", false, copy(u64::MAX, room, 8)),
        ("a destination of all ones", false, copy(16, u64::MAX, 8)),
    ];
    all.extend(reads(room, end));
    all.extend(values(room, end));
    let others = [0x00, 0x0f, 0x14, 0x15, 0x23, 0xff];
    all.extend(others.map(|opcode| ("another opcode", false, put.with(3, &[opcode]))));
    all.extend(others.map(|opcode| ("another opcode of an addition", false, add.with(3, &[opcode]))));
    all
}

/// The same of what reads.
fn reads(room: u64, end: u64) -> Vec<Case> {
    let read = Entry::read(16, room, 8);
    vec![
        ("a read", true, read),
        ("the longest read", true, Entry::read(16, room, MOST as u32)),
        ("a read of the last bytes", true, Entry::read(SOURCE_BYTES - 8, end - 8, 8)),
        ("a read of what is written, too", true, read.with(24, &SOURCE_KEY.to_be_bytes()).with(16, &[0; 8])),
        ("a read of more than there is", false, Entry::read(SOURCE_BYTES - 4, room, 8)),
        ("a read to behind the end", false, Entry::read(16, end - 4, 8)),
        ("a read to nowhere here", false, read.with(36, &TARGET_KEY.to_be_bytes())),
        ("a read of an unknown window", false, read.with(24, &[5, 6, 7, 9])),
        ("a read of odd bytes", false, Entry::read(16, room, 6)),
        ("a read of no bytes", false, Entry::read(16, room, 0)),
        ("a read from an odd place", false, Entry::read(18, room, 8)),
        ("a read to an odd place", false, Entry::read(16, room + 2, 8)),
        ("a read with a fence", false, read.with(11, &[0x48])),
        ("a read of two ranges", false, read.with(7, &[4])),
        ("a read into the entry", false, Entry::read(16, room, 1 << 31 | 8)),
        ("a dump of nothing", true, Entry::dump(8, 1 << 8, 0)),
        ("a dump of no bytes", false, Entry::dump(0, 1 << 8, 0)),
        ("a dump behind that", false, Entry::dump(8, 1 << 8, 1)),
        ("a dump of more", false, Entry::dump(9, 1 << 8, 0)),
        ("a dump far behind that", false, Entry::dump(8, 1 << 8, 1 << 32)),
        ("a dump of a window", false, Entry::dump(8, READ_KEY, 0)),
        ("a dump of three segments", false, Entry::dump(8, 1 << 8, 0).with(7, &[3])),
    ]
}

/// The same of values and additions, which go where something may be written.
fn values(room: u64, end: u64) -> Vec<Case> {
    let put = Entry::copy(16, room, 8);
    let value = |n: usize, to| Entry::value(&[7; 8][..n], to, 3);
    let add = Entry::addition(8 * OTHER, 5);
    vec![
        ("bytes for what is only read", false, put.with(24, &READ_KEY.to_be_bytes())),
        ("a value for what is only read", false, value(8, 0).with(24, &READ_KEY.to_be_bytes())),
        ("an addition to what is only read", false, add.with(24, &READ_KEY.to_be_bytes())),
        ("a value of three bytes", false, value(3, room)),
        ("a value of no bytes", false, value(0, room)),
        ("a value of twelve bytes", false, Entry::value(&[7; 12], room, 3)),
        ("a value beside its word", false, value(4, room + 2)),
        ("a value behind the end", false, value(8, end)),
        ("a value that goes nowhere", false, value(8, room).with(24, &[0, 0, 1, 0])),
        ("an addition beside a word", false, Entry::addition(4, 5)),
        ("an addition behind the end", false, Entry::addition(8 * SIGNALS, 5)),
        ("an addition of an unknown window", false, add.with(24, &[5, 6, 7, 9])),
        ("an addition that fetches four bytes", false, add.with(51, &[4])),
        ("an addition that fetches to a window", false, add.with(52, &SOURCE_KEY.to_be_bytes())),
        ("an addition that fetches to the second word", false, add.with(63, &[8])),
    ]
}
