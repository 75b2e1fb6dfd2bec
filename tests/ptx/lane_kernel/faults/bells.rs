//! Faults in how a doorbell is heard, and in completion entries.

use super::super::bells::{serve_bell_additions, serve_bells, serve_full_bells, serve_held_bells, serve_unrung_bells};
use super::super::sends_refused::serve_unasked;
use super::Fault;

pub const BELLS: &[Fault] = &[
    (
        "a doorbell is taken for words of slots",
        "setp.eq.u64     %p0, d1, 2;",
        "setp.eq.u64     %p0, d1, 3;",
        serve_bells,
    ),
    ("all is rung", "setp.lt.u32     is_rung, slot, a0;", "setp.eq.u32     is_rung, slot, slot;", serve_unrung_bells),
    (
        "one more is rung",
        "setp.lt.u32     is_rung, slot, a0;",
        "setp.le.u32     is_rung, slot, a0;",
        serve_unrung_bells,
    ),
    (
        "a doorbell that lags is far ahead",
        "setp.le.u32     q0, a0, mask;",
        "setp.le.u32     q0, 0, mask;",
        serve_unrung_bells,
    ),
    ("a full queue is not rung", "    sub.u32         a0, a0, 1;\n", "", serve_bells),
    ("any queue pair's", "setp.eq.u32     q0, a1, signals;", "setp.eq.u32     q0, 0, 0;", serve_unrung_bells),
    ("indices have 8 bits", "a0, a0, 0, 0x4412;", "a0, a0, 0, 0x4442;", serve_bells),
    (
        "what asks for no completion entry is taken",
        "    and.b32         a0, a0, 0x08000000;\n",
        "    or.b32          a0, a0, 0x08000000;\n",
        serve_unasked,
    ),
    ("completion entries have no lap", "    @q0 or.b32      a1, a1, 0x01000000;\n", "", serve_bell_additions),
    (
        "… the one before",
        "setp.ne.u32     q0, t0, 0;\n    @q0 or.b32",
        "setp.eq.u32     q0, t0, 0;\n    @q0 or.b32",
        serve_bells,
    ),
    (
        "… no index",
        "    and.b32         a1, a1, 0xffff;\n    add",
        "    and.b32         a1, a1, 0;\n    add",
        serve_bells,
    ),
    ("… no opcode", "    or.b32          a0, a0, t0;\n    shr", "    shr", serve_bells),
    ("… no queue pair", "shl.b32         a0, signals, 8;", "mov.u32         a0, 0;", serve_bells),
    ("… the place of another's", "and.b32         a0, t1, mask;", "and.b32         a0, next, mask;", serve_full_bells),
    (
        "only the first one of a look is told",
        "    @!q0 bra        tell;\n    bar",
        "    bra             tell;\n    bar",
        serve_full_bells,
    ),
    ("all of a look are told at once", ONE_BY_ONE, AT_ONCE, serve_bell_additions),
    (
        "they are told in any order",
        "    bar.warp.sync   0xffffffff;\n    fence.acq_rel.gpu;\n    bra             complete_next;\n",
        "    bra             complete_next;\n",
        serve_bell_additions,
    ),
    (
        "they are held",
        "    or.pred         %p1, is_held, is_bell;\n",
        "    mov.pred        %p1, is_held;\n",
        serve_held_bells,
    ),
    ("all are told before anything is done", DONE_BEFORE, TOLD_BEFORE, serve_bells),
];

// Completion entries of a lane.
const ONE_BY_ONE: &str = "    setp.eq.u32     q0, slot, t0;\n    and.pred        q0, q0, %p4;\n";
const AT_ONCE: &str = "    mov.pred        q0, %p4;\n";
// Between what an entry does, or clears, and its completion entry.
const DONE_BEFORE: &str = "    fence.acq_rel.gpu;\n    @is_bell bra    complete;\n";
const TOLD_BEFORE: &str = "    @is_bell bra    complete;\n    fence.acq_rel.gpu;\n";
