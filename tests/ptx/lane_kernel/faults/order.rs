//! Faults in the order in which things become visible.

use super::super::alike::serve_alike;
use super::super::ends::serve_stop;
use super::super::order::{serve_later, serve_signalled, serve_signals};
use super::super::refused::serve_all_refused;
use super::super::serve;
use super::Fault;

/// In what order things become visible.
pub const ORDER: &[Fault] = &[
    ("slots may be used before they are empty", TELL, "tell:", serve_signals),
    ("… as far as other threads empty them", TELL, "    fence.acq_rel.gpu;\ntell:", serve_signals),
    ("signals before bytes, on this GPU", NEAR, "    bra             signal_all;\nmoved_far:", serve_signalled),
    (
        "… of other threads",
        NEAR,
        "    fence.acq_rel.gpu;\n    bra             signal_all;\nmoved_far:",
        serve_signalled,
    ),
    ("signals before bytes, on another GPU", FAR, "moved_far:\n", serve_signalled),
    ("… as this GPU alone sees them", FAR, FAR_AS_NEAR, serve_signalled),
    ("… of other threads", "moved_far:\n    bar.warp.sync   0xffffffff;\n", "moved_far:\n", serve_signalled),
    (
        "signals before bytes of their look",
        "    @!%p3 bra       signal_all;\n",
        "    bra             signal_all;\n",
        serve_signalled,
    ),
    ("… on another GPU, unless others were unfenced", "    or.pred         %p2, %p2, has_far;\n", "", serve_signalled),
    (
        "bytes are told that another GPU does not see, as no signal of their look goes there",
        "    and.pred        %p2, %p2, %p0;\n    or.pred         %p2, %p2, has_far;\n",
        "    or.pred         %p2, %p2, has_far;\n    and.pred        %p2, %p2, %p0;\n",
        serve_later,
    ),
    ("all peers are on this GPU", "setp.ne.u32     is_far, t1, 0;", "setp.ne.u32     is_far, 0, 0;", serve_signalled),
    (
        "nobody's peer is the one of another queue",
        "vote.sync.any.pred has_far, %p1, 0xffffffff;",
        "vote.sync.all.pred has_far, %p1, 0xffffffff;",
        serve_alike,
    ),
    (
        "signals overtake those of the look before",
        "setp.ne.u32     %p2, unfenced, 0;",
        "setp.ne.u32     %p2, 0, 0;",
        serve_signals,
    ),
    ("… as nobody knows of them", SIGNALLED, "    and.pred        %p3, %p3, has_moved;", serve_signals),
    ("… behind a fence", FAR, FAR_FORGOTTEN, serve_signals),
    (
        "… of one queue of several",
        "vote.sync.any.pred %p0, %p0, 0xffffffff;\n    setp.ne.u32     %p2, unfenced",
        "vote.sync.all.pred %p0, %p0, 0xffffffff;\n    setp.ne.u32     %p2, unfenced",
        serve_alike,
    ),
    ("… behind a look in vain", VAIN, "    mov.u32         unfenced, 0;\nno_signals:", serve_signals),
    (
        "… as this GPU alone sees them",
        VAIN,
        "    fence.acq_rel.gpu;\n    mov.u32         unfenced, 0;\nno_signals:",
        serve_signals,
    ),
    (
        "sources may be read as they were before",
        "ld.acquire.sys.global.v2.u64 {u0, u1}",
        "ld.volatile.global.v2.u64 {u0, u1}",
        serve,
    ),
    (
        "… by threads that have not acquired anything",
        "    // What any thread has acquired all have.\n    bar.warp.sync   0xffffffff;\n",
        "",
        serve,
    ),
    ("what was found without acquire is used", "    @is_calm bra    look;\n", "", serve),
    (
        "records may be those of another launch",
        "ld.acquire.sys.global.u64 d0, [board];",
        "ld.volatile.global.u64 d0, [board];",
        serve,
    ),
    (
        "… as the host has not released them to this GPU",
        "ld.acquire.sys.global.u64 d0, [board];",
        "ld.acquire.gpu.global.u64 d0, [board];",
        serve,
    ),
    (
        "… to other warps",
        "    bar.warp.sync   0xffffffff;\n    bar.sync        0;\n    ld.volatile.shared",
        "    ld.volatile.shared",
        serve,
    ),
    ("ended before all is visible", ENDED, "    bar.sync        0;\n    @!watches bra   out;\n", serve_stop),
    (
        "… to the host",
        ENDED,
        "    fence.acq_rel.gpu;\n    bar.sync        0;\n    @!watches bra   out;\n    fence.acq_rel.gpu;\n",
        serve_stop,
    ),
    (
        "ended before other warps have",
        "    bar.sync        0;\n    @!watches bra   out;\n",
        "    @!watches bra   out;\n",
        serve,
    ),
    ("refused before all before it is visible", REFUSES, "\n", serve_all_refused),
    ("… to the host", REFUSES, "\n    fence.acq_rel.gpu;\n", serve_all_refused),
];

// Texts of which several faults are made.
const TELL: &str = "    bar.warp.sync   0xffffffff;\n    fence.acq_rel.gpu;\n    @is_bell bra    complete;\ntell:";
const NEAR: &str =
    "    bar.warp.sync   0xffffffff;\n    fence.acq_rel.gpu;\n    bra             signal_all;\nmoved_far:";
const FAR: &str =
    "moved_far:\n    bar.warp.sync   0xffffffff;\n    fence.acq_rel.sys;\n    mov.u32         unfenced, 0;\n    \
     @%p0 mov.u32    unfenced, 1;\n";
const FAR_FORGOTTEN: &str =
    "moved_far:\n    bar.warp.sync   0xffffffff;\n    fence.acq_rel.sys;\n    mov.u32         unfenced, 0;\n";
const FAR_AS_NEAR: &str =
    "moved_far:\n    bar.warp.sync   0xffffffff;\n    fence.acq_rel.gpu;\n    mov.u32         unfenced, 1;\n";
const SIGNALLED: &str = "    @%p0 mov.u32    unfenced, 1;\n    and.pred        %p3, %p3, has_moved;";
const VAIN: &str = "    fence.acq_rel.sys;\n    mov.u32         unfenced, 0;\nno_signals:";
const ENDED: &str =
    "    fence.acq_rel.sys;\n    bar.sync        0;\n    @!watches bra   out;\n    fence.acq_rel.sys;\n";
const REFUSES: &str = "told by this one.\n    fence.acq_rel.sys;\n";
