//! Faults in what is done with send entries.

use super::super::longer::serve_too_long_sends;
use super::super::order::serve_waiting_sends;
use super::super::sends_read::{serve_dumps, serve_held_words, serve_read_in_front, serve_reads, serve_reads_behind};
use super::super::sends_refused::{serve_refused_alone, serve_refused_send};
use super::super::sends_served::{
    serve_additions, serve_full_sends, serve_long_values, serve_nops, serve_puts, serve_sends, serve_unrung,
    serve_values,
};
use super::Fault;

/// A refusal, by its name.
macro_rules! refusal {
    ($name:literal) => {
        |ptx, seed| serve_refused_send(ptx, seed, $name)
    };
}

/// When an entry is there.
pub const THERE: &[Fault] = &[
    ("slots are emptied as those of descriptors", "    @is_entry not.b64 empty, empty;\n", "", serve_additions),
    ("any word is an entry's", "setp.eq.u32     is_rung, t2, t4;", "setp.ne.u32     is_rung, t2, 0;", serve_unrung),
    (
        "none need be rung",
        "    and.pred        %p0, is_rung, q0;\n",
        "    and.pred        %p0, is_open, q0;\n",
        serve_unrung,
    ),
    (
        "an entry may be read as it was before its word",
        "ld.acquire.sys.global.u64 ring, [ring_at]",
        "ld.relaxed.sys.global.u64 ring, [ring_at]",
        serve_sends,
    ),
    ("who waits acquires", "    @is_calm bra    calm_entries;\n", "", serve_waiting_sends),
    (
        "one of two words stands for both",
        "    setp.ne.u64     q1, u1, empty;\n    and.pred        q0, q0, q1;\n",
        "",
        serve_sends,
    ),
    ("… the other one", "setp.ne.u64     q0, u0, empty;", "setp.ne.u64     q0, u1, empty;", serve_puts),
    ("two segments are all", "setp.ge.u32     q1, sub, t4;", "setp.ge.u32     q1, sub, 2;", serve_puts),
    ("three segments are all", "setp.ge.u32     q1, sub, t4;", "setp.ge.u32     q1, sub, 3;", serve_additions),
    ("segments of another entry", "e1, t6, head, 31", "e1, t6, edge, 31", serve_sends),
    (
        "the high half of a value is there",
        "    and.pred        q2, q2, q3;\n    or.pred",
        "    or.pred",
        serve_long_values,
    ),
    (
        "half of a value's word stands for both",
        "    or.pred         q1, q1, q2;\n    and.pred        q0, q0, q1;\n    // Values of 4 and 8",
        "    // Values of 4 and 8",
        serve_long_values,
    ),
    ("the first look is behind a word", "    sub.u32         seen, seen, 1;\n", "", serve_sends),
    (
        "a look is behind a word that was not there",
        "    and.pred        q1, q1, is_rung;\n    @q1",
        "    @q1",
        serve_values,
    ),
    (
        "a look is behind a word that was not acquired",
        "    not.pred        q1, is_calm;\n    and.pred        q1, q1, is_rung;\n",
        "    mov.pred        q1, is_rung;\n",
        serve_values,
    ),
    ("… a word of another entry", "setp.eq.u32     q1, seen, t3;", "setp.ne.u32     q1, seen, 0;", serve_values),
    (
        "what may not be there never is",
        "    setp.eq.u32     q1, seen, t3;\n    or.pred         q0, q0, q1;\n",
        "",
        serve_values,
    ),
    ("words are those of the look before", "    mov.u64         u1, v1;\n", "", serve_full_sends),
    ("… where nothing came for long", "    @%p0 mov.u32    vain, 0;\n    setp", "    setp", serve_values),
];

/// What an entry means.
pub const MEANT: &[Fault] = &[
    (
        "indices have 16 bits",
        "    and.b32         t1, t1, 0xffff;\n    setp.eq.u32     is_good",
        "    setp.eq.u32     is_good",
        serve_additions,
    ),
    ("a count has 32 bits", "mov.b64         d1, {next, high};", "cvt.u64.u32     d1, next;", serve_additions),
    ("the halves of what is added change places", "increment, {t2, t3};", "increment, {t3, t2};", serve_additions),
    ("a value has 4 bytes", "mov.b64         value, {a6, a7};", "mov.b64         value, {a6, a6};", serve_values),
    ("a word is where a source would be", "    @is_va mov.u64  first, y0;\n", "", serve_additions),
    ("… in its window", "    @is_va mov.u64  second, y1;\n", "", serve_additions),
    ("additions have lengths", "    @is_va mov.u32  bytes, 8;\n", "", serve_additions),
    ("what asks for nothing has a length", "    @is_nop mov.u32 bytes, 0;\n", "", serve_nops),
    ("… or has none, and is not taken", "    or.pred         q0, q0, is_nop;\n    mov", "    mov", serve_nops),
    ("it is no operation", "    or.pred         q0, q0, is_nop;\n    and", "    and", serve_nops),
    ("all ask for a completion entry", OPERATION, ASKED, serve_sends),
    ("all that is closed is rung", "    and.pred        is_rung, is_rung, is_open;\n", "", serve_refused_alone),
];

// Behind this an entry's flags are looked at, in a fault.
const OPERATION: &str = "    // Its operation, without a modifier, and its segments: WRITE";
const ASKED: &str =
    "    shfl.sync.idx.b32 a1, t2, head, 31, 0xffffffff;\n    and.b32         t0, a1, 0x08000000;\n    \
                     setp.ne.u32     q0, t0, 0;\n    and.pred        is_good, is_good, q0;\n    // WRITE";

/// Reads, and what lies behind gets.
pub const READ: &[Fault] = &[
    ("a read goes the other way", EXCHANGED, "", serve_reads),
    ("… goes nowhere", "    @is_read mov.u64 from, d0;\n", "", serve_reads),
    (
        "a read is taken with what is sent before it",
        "    or.pred         %p0, %p0, %p2;\n    vote.sync.ballot.b32 t0",
        "    vote.sync.ballot.b32 t0",
        serve_reads_behind,
    ),
    (
        "… with what is sent after it",
        "    or.pred         %p0, %p0, %p2;\n    vote.sync.ballot.b32 t0",
        "    vote.sync.ballot.b32 t0",
        serve_read_in_front,
    ),
    (
        "a read passes signals that are held",
        "    @%p0 bra        end_held;\n    // The ends",
        "    // The ends",
        serve_held_words,
    ),
    (
        "what is only read is written to",
        "    or.pred         %p1, %p1, is_read;\n    and.pred        %p2, %p2, %p1;\n",
        "",
        refusal!("a write to what is only read"),
    ),
    (
        "… by a value",
        "    or.pred         %p1, %p1, is_read;\n    and.pred        %p2, %p2, %p1;\n",
        "",
        refusal!("value for what is only read"),
    ),
    (
        "… added to",
        "    not.pred        %p1, %p1;\n    and.pred        %p0, %p0, %p1;\n    setp.eq.u64     %p2, y1",
        "    setp.eq.u64     %p2, y1",
        refusal!("addition to what is only read"),
    ),
    ("all windows are only read", "setp.ne.u64     only_read, d1, 0;", "setp.eq.u64     only_read, 0, 0;", serve_puts),
    (
        "fences",
        "setp.gt.u32     q0, t2, 0x1fffffff;",
        "setp.gt.u32     q0, t2, 0xffffffff;",
        refusal!("the other fence"),
    ),
    ("… of the first kind", "0x1fffffff", "0x3fffffff", refusal!("a fence")),
    ("a dump is none", "    or.pred         is_nop, is_nop, is_dump;\n", "", serve_dumps),
    ("dumps of any key", "setp.eq.u32     q3, a3, 0x00010000;", ANY_DUMP, refusal!("a dump of a window")),
    ("dumps of any segments", "setp.eq.u32     q3, t0, 2;", ANY_DUMP, refusal!("a dump of three segments")),
    ("dumps of any length", "setp.lt.u32     q3, t2, 8;", ANY_DUMP, refusal!("a dump of many bytes")),
    ("dumps anywhere", "setp.le.u32     q3, t3, t2;", ANY_DUMP, refusal!("a dump behind the sink")),
    ("dumps far away", "setp.eq.u32     q3, a4, 0;", ANY_DUMP, refusal!("a dump far behind the sink")),
];

const EXCHANGED: &str = "    @is_read mov.u64 to, from;\n    @is_read mov.u64 from, d0;\n";
const ANY_DUMP: &str = "setp.eq.u32     q3, 0, 0;";

/// What is not for the kernel.
pub const REFUSED: &[Fault] = &[
    (
        "any index",
        "setp.eq.u32     is_good, t0, t1;",
        "setp.eq.u32     is_good, 0, 0;",
        refusal!("the next one's index"),
    ),
    (
        "indices of 8 bits",
        "0x4412;\n    add.u32         t1, next, slot;\n    and.b32         t1, t1, 0xffff;",
        "0x4442;\n    add.u32         t1, next, slot;\n    and.b32         t1, t1, 0xff;",
        refusal!("the high byte of another index"),
    ),
    (
        "any queue pair",
        "setp.eq.u32     q0, t0, signals;",
        "setp.eq.u32     q0, 0, 0;",
        refusal!("… in the middle one"),
    ),
    ("modifiers", "0xff0000ff", "0xff000000", refusal!("modifier")),
    ("opcodes of 5 bits", "0xff0000ff", "0x1f0000ff", refusal!("an opcode of 8 bits")),
    (
        "values that are read",
        "and.pred        is_inline, q0, q1;",
        "mov.pred        is_inline, q1;",
        refusal!("value that is read"),
    ),
    (
        "bytes of any operation",
        "and.pred        is_data, q0, q1;",
        "mov.pred        is_data, q1;",
        refusal!("an opcode of 5 bits"),
    ),
    (
        "segments of 5 bits",
        "and.b32         t0, t0, 63;",
        "and.b32         t0, t0, 31;",
        refusal!("segments of 6 bits"),
    ),
    (
        "what asks for nothing has any segments",
        "    and.pred        is_nop, is_nop, q3;\n",
        "",
        refusal!("nothing of two segments"),
    ),
    ("any operation of a segment", "is_nop, t0, 0;", "is_nop, 0, 0;", refusal!("wait of one segment")),
    ("two ranges", "and.pred        q0, q0, is_data;", "mov.pred        q0, is_data;", refusal!("two ranges")),
    (
        "values of any segments",
        "and.pred        q2, q2, is_inline;",
        "mov.pred        q2, is_inline;",
        refusal!("value of five segments"),
    ),
    (
        "additions of any segments",
        "and.pred        q1, q1, is_va;",
        "mov.pred        q1, is_va;",
        refusal!("addition of three segments"),
    ),
    ("no bytes", "setp.ne.u32     q0, bytes, 0;", "setp.eq.u32     q0, 0, 0;", refusal!("no bytes")),
    ("any length", "setp.le.u32     q1, bytes, t0;", "setp.eq.u32     q1, 0, 0;", serve_too_long_sends),
    ("values as long as copies", "    @is_inline mov.u32 t0, 8;\n", "", refusal!("a value of 16 bytes")),
    (
        "lengths of a byte",
        "bytes, a5, 0, 0x0123;",
        "bytes, a5, 0, 0x4443;",
        refusal!("a value longer than a byte tells"),
    ),
    (
        "values of any length",
        "    or.pred         q1, q1, q2;\n    and.pred        q0, q0, q1;\n    and.pred        is_good",
        "    and.pred        is_good",
        refusal!("a value of 3 bytes"),
    ),
    (
        "anywhere in the sink",
        "or.b32          t0, a11, a12;",
        "mov.b32         t0, a11;",
        refusal!("old value behind the sink"),
    ),
    (
        "… far behind it",
        "or.b32          t0, a11, a12;",
        "mov.b32         t0, a12;",
        refusal!("old value far behind the sink"),
    ),
    (
        "old values of any length",
        "setp.eq.u32     q1, a9, 0x08000000;",
        "setp.eq.u32     q1, 0, 0;",
        refusal!("old value of 4 bytes"),
    ),
    (
        "old values to any key",
        "setp.eq.u32     q1, a10, 0x00010000;",
        "setp.eq.u32     q1, 0, 0;",
        refusal!("old value to a window"),
    ),
    (
        "sources of 32 bits",
        "prmt.b32        t3, a7, 0, 0x0123;",
        "mov.u32         t3, 0;",
        refusal!("source is far away"),
    ),
    (
        "targets of 32 bits",
        "prmt.b32        t3, a2, 0, 0x0123;",
        "mov.u32         t3, 0;",
        refusal!("target is far away"),
    ),
];
