//! Faults in what is done with gets and flushes among descriptors.

use super::super::gets::{
    serve_flushes, serve_get_in_front, serve_gets, serve_gets_behind, serve_puts_behind, serve_refused_behind,
    serve_refused_get,
};
use super::super::refused::serve_refusal;
use super::Fault;

/// A get that is refused, by the name of the reason.
macro_rules! refused {
    ($name:literal) => {
        |ptx, seed| serve_refused_get(ptx, seed, $name)
    };
}

pub const GETS: &[Fault] = &[
    ("a get names its own end first", NAMED, "", serve_gets),
    ("a get goes the other way", "    @is_read mov.u64 to, from;\n    @is_read mov.u64 from, d0;\n", "", serve_gets),
    ("a get is learned", "    or.pred         %p0, %p0, is_read;\n", "", serve_refused_behind),
    ("a get is none", "    or.pred         is_good, is_good, is_read;\n", "", serve_gets),
    ("what is like the last one comes here", "    mov.pred        is_read, is_inline;\n", "", serve_puts_behind),
    (
        "a get is taken with what is sent before it",
        "    or.pred         %p0, %p0, %p2;\n    vote.sync.ballot.b32 t0",
        "    vote.sync.ballot.b32 t0",
        serve_gets_behind,
    ),
    (
        "… with what is sent after it",
        "    or.pred         %p0, %p0, %p2;\n    vote.sync.ballot.b32 t0",
        "    vote.sync.ballot.b32 t0",
        serve_get_in_front,
    ),
    ("a flush is none", "    or.pred         is_good, is_good, is_nop;\n", "", serve_flushes),
    ("… has nothing to do", "    or.pred         %p1, %p1, is_nop;\n    and", "    and", serve_flushes),
    ("… has a size", "    @is_nop mov.u64 size, 0;\n    @is_nop mov.u32 bytes, 0;\n", "", serve_flushes),
    ("gets with anything", "setp.eq.u32     is_read, op, 64;", "setp.ge.u32     is_read, op, 64;", |ptx, seed| {
        serve_refusal(ptx, seed, "get as well")
    }),
    ("flushes with anything", "setp.eq.u32     is_nop, op, 128;", "setp.ge.u32     is_nop, op, 128;", |ptx, seed| {
        serve_refusal(ptx, seed, "flush as well")
    }),
    (
        "what is only read is written to",
        "    or.pred         %p1, %p1, is_read;\n    and.pred        %p2, %p2, %p1;\n",
        "",
        refused!("a put to what is only read"),
    ),
    (
        "gets from anywhere",
        "setp.le.u64     %p1, size, d0;\n    and.pred        %p2",
        "setp.eq.u64     %p1, 0, 0;\n    and.pred        %p2",
        refused!("it ends behind the peer's window"),
    ),
    (
        "… to anywhere",
        "setp.le.u64     %p1, x2, d0;",
        "setp.eq.u64     %p1, 0, 0;",
        refused!("it ends behind the own window"),
    ),
];

const NAMED: &str =
    "    @is_read mov.u64 first, y0;\n    @is_read mov.u64 second, y1;\n    @is_read mov.u64 y0, d0;\n    \
                     @is_read mov.u64 y1, d1;\n";
