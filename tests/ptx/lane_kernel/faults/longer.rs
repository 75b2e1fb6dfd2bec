//! Faults in which copies may be longer than the most of their lane.

use super::super::longer::{
    serve_longer_descriptors, serve_longer_of_several, serve_longer_sends, serve_too_long_descriptors,
    serve_too_long_sends, serve_too_soon_descriptors, serve_too_soon_sends,
};
use super::Fault;

pub const LONGER: &[Fault] = &[
    ("none may be longer", "    @%p0 shl.b32    longest, most, 3;\n", "", serve_longer_descriptors),
    ("they may be longer yet", "longest, most, 3;", "longest, most, 4;", serve_too_long_descriptors),
    ("… send entries", "longest, most, 3;", "longest, most, 4;", serve_too_long_sends),
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
    ("… send entries", "    @%p0 mov.u32    limit, most;\n", "", serve_too_soon_sends),
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
        "the next first half is not loaded",
        "    @q0 ld.volatile.global.v2.u64 {y0, y1}, [d2+8192];\n",
        "",
        serve_longer_descriptors,
    ),
    (
        "the next second half is this one",
        "@q0 ld.volatile.global.v2.u64 {z14, z15}, [d2+15872];",
        "@q0 ld.volatile.global.v2.u64 {z14, z15}, [d2+7680];",
        serve_longer_sends,
    ),
    ("there is a round too many", "setp.lt.u64     q0, off, d0;", "setp.le.u64     q0, off, d0;", serve_longer_sends),
];
