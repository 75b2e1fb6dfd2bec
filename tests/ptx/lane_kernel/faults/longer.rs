//! Faults in which copies may be longer than the most of their lane, and in how warps share the pieces of one.

use super::super::longer::{
    serve_longer_descriptors, serve_longer_of_several, serve_longer_sends, serve_many_descriptors,
    serve_paused_descriptors, serve_paused_sends, serve_paused_too_long, serve_too_long_descriptors,
    serve_too_long_sends, serve_too_soon_behind_a_pause, serve_too_soon_descriptors, serve_too_soon_sends,
};
use super::Fault;

pub const LONGER: &[Fault] = &[
    ("none may be longer", "    @%p0 shl.b32    longest, most, 5;\n", "", serve_longer_descriptors),
    ("they may be longer yet", "longest, most, 5;", "longest, most, 6;", serve_too_long_descriptors),
    ("… send entries", "longest, most, 5;", "longest, most, 6;", serve_too_long_sends),
    (
        "other lanes of the warp wait for them",
        "setp.eq.u32     %p0, span, 8;\n    @%p0 shl.b32    longest",
        "setp.ne.u32     %p0, span, 0;\n    @%p0 shl.b32    longest",
        serve_longer_of_several,
    ),
    (
        "they come one behind another",
        "setp.lt.u32     %p1, others, 4;",
        "setp.lt.u32     %p1, others, 0;",
        serve_too_soon_descriptors,
    ),
    ("… send entries", "    @%p0 mov.u32    limit, soon;\n", "", serve_too_soon_sends),
    ("a pause makes no difference", "    @%p0 mov.u32    soon, paused;\n", "", serve_paused_descriptors),
    ("… once there was one", "    @%p0 mov.u32    soon, most;\n", "", serve_too_soon_behind_a_pause),
    (
        "a pause is behind each look in vain",
        "vain, 4;\n    @%p0 mov.u32    soon",
        "vain, 0;\n    @%p0 mov.u32    soon",
        serve_too_soon_behind_a_pause,
    ),
    ("behind a pause they are as long as behind others", "paused, most, 2;", "paused, most, 3;", serve_paused_too_long),
    ("… or shorter", "paused, most, 2;", "paused, most, 1;", serve_paused_sends),
    ("three others are enough", "others, 4;\n    and.pred", "others, 3;\n    and.pred", serve_too_soon_descriptors),
    ("five others are needed", "others, 4;\n    and.pred", "others, 5;\n    and.pred", serve_longer_descriptors),
    (
        "the launch's first one is refused",
        "mov.u32         others, 4;",
        "mov.u32         others, 0;",
        serve_longer_sends,
    ),
    ("others are not counted", "    add.u32         others, others, count;\n", "", serve_longer_descriptors),
    (
        "those behind it in its look are not counted",
        "@%p0 sub.u32    others, count, 1;",
        "@%p0 mov.u32    others, 0;",
        serve_longer_descriptors,
    ),
    (
        "it counts itself",
        "@%p0 sub.u32    others, count, 1;",
        "@%p0 mov.u32    others, count;",
        serve_too_soon_descriptors,
    ),
    ("it is no longer one", "    @%p0 sub.u32    others, count, 1;\n", "", serve_too_soon_sends),
    (
        "it is taken behind others of its look",
        "    and.b32         whole, whole, t0;\n    and.pred        is_good",
        "    and.pred        is_good",
        serve_too_soon_descriptors,
    ),
    (
        "what comes behind it is passed over",
        "    and.pred        is_ahead, is_ahead, %p1;\n",
        "",
        serve_longer_descriptors,
    ),
    (
        "what is like it is taken, too",
        "    setp.gt.u32     %p1, bytes, most;\n    or.pred         %p0, %p0, %p1;\n    not.pred        learns",
        "    not.pred        learns",
        serve_too_soon_descriptors,
    ),
    (
        "a half is stored twice",
        "st.global.v2.u64 [d3+4096], {z0, z1};",
        "st.global.v2.u64 [d3+4096], {y0, y1};",
        serve_longer_descriptors,
    ),
    (
        "… to the wrong place",
        "mul.wide.u32    d3, piece, 8192;",
        "mul.wide.u32    d3, piece, 4096;",
        serve_longer_sends,
    ),
    (
        "the next first half is not loaded",
        "    @q0 ld.volatile.global.v2.u64 {y0, y1}, [d2];\n",
        "",
        serve_longer_descriptors,
    ),
    (
        "the next second half is that of another piece",
        "@q0 ld.volatile.global.v2.u64 {z14, z15}, [d2+7680];",
        "@q0 ld.volatile.global.v2.u64 {z14, z15}, [d3+7680];",
        serve_longer_sends,
    ),
    (
        "there is a piece too many",
        "setp.lt.u32     q0, piece, pieces;",
        "setp.le.u32     q0, piece, pieces;",
        serve_longer_sends,
    ),
];

/// In how warps share the pieces of a copy.
pub const HELP: &[Fault] = &[
    ("nobody helps", "    @%p0 bra        help;\n", "", serve_many_descriptors),
    (
        "whoever helps takes up nothing",
        "atom.acquire.cta.shared.cas.b32 t4",
        "atom.relaxed.cta.shared.cas.b32 t4",
        serve_many_descriptors,
    ),
    (
        "… but its first thread does",
        "    // What its first thread has acquired all have.\n    bar.warp.sync   0xffffffff;\n",
        "",
        serve_many_descriptors,
    ),
    (
        "pieces are not released",
        "st.release.cta.shared.u32 [shared+8]",
        "st.volatile.shared.u32 [shared+8]",
        serve_many_descriptors,
    ),
    (
        "a piece is taken by whoever finds it",
        "    @is_first atom.acquire.cta.shared.cas.b32 t4, [shared+8], t0, t3;\n",
        "    @is_first st.volatile.shared.u32 [shared+8], t3;\n    mov.u32         t4, t0;\n",
        serve_many_descriptors,
    ),
    (
        "two copies are posted at once",
        "@is_first atom.acquire.cta.shared.cas.b32 t0, [shared+4], t1, t0;",
        "mov.u32         t0, 0;\n    @is_first st.volatile.shared.u32 [shared+4], 1;",
        serve_many_descriptors,
    ),
    (
        "whoever is through does not release what he knows",
        "@is_first st.release.cta.shared.u32 [shared+4], t0;",
        "@is_first st.volatile.shared.u32 [shared+4], t0;",
        serve_many_descriptors,
    ),
    ("nobody waits for others", "    @%p0 bra        long_await;\n", "", serve_many_descriptors),
    (
        "… with acquire",
        "@is_first ld.acquire.cta.shared.u32 t0, [shared+12];",
        "@is_first ld.volatile.shared.u32 t0, [shared+12];",
        serve_many_descriptors,
    ),
    (
        "others say so too early",
        "helped:\n    setp.ne.u32     is_helper, 0, 0;\n    bar.warp.sync   0xffffffff;\n",
        "helped:\n    setp.ne.u32     is_helper, 0, 0;\n",
        serve_many_descriptors,
    ),
    ("… without release", "red.release.cta.shared.add.u32", "red.relaxed.cta.shared.add.u32", serve_many_descriptors),
    (
        "… of one piece more",
        "    mov.u32         claimed, 0;\n    bra             long_claim;",
        "    mov.u32         claimed, 1;\n    bra             long_claim;",
        serve_many_descriptors,
    ),
    (
        "no other copy is posted",
        "    @is_first st.release.cta.shared.u32 [shared+4], t0;\n",
        "",
        serve_many_descriptors,
    ),
    ("the first piece is shared, too", "    or.b32          t2, t2, piece;\n", "", serve_many_descriptors),
    (
        "the rest begins where pieces do",
        "    add.u64         off, off, d0;\nlong_wide",
        "long_wide",
        serve_many_descriptors,
    ),
    ("a warp that helps has the rest, too", "    @is_helper bra  helped;\n", "", serve_many_descriptors),
    (
        "what is left of the last copy is not reset",
        "    @is_first st.volatile.shared.u32 [shared+12], t1;\n",
        "",
        serve_many_descriptors,
    ),
];
