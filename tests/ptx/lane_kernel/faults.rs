//! Faults put into the lane kernel's code, one at a time: the tests beside find each of them.

mod alike;
mod bells;
mod gets;
mod held;
mod longer;
mod order;
mod sends;

use super::ends::{serve_idle, serve_life, serve_stop};
use super::longer::serve_too_long_descriptors;
use super::order::{serve_gap, serve_signals};
use super::refused::serve_refusal;
use super::watched::{serve_watched_descriptors, serve_watched_sends};
use super::{serve, PTX};
use crate::finds::finds;

/// What finds a fault.
type Finder = fn(&str, u64);

/// What is wrong then, the text that is right, what replaces it, and what finds it.
type Fault = (&'static str, &'static str, &'static str, Finder);

/// What is taken, and where it goes.
const TAKEN: &[Fault] = &[
    ("slots are not emptied", "    @takes st.global.v2.u64 [at], {empty, empty};\n", "", serve_signals),
    ("… or those that are not taken", "@takes st.global.v2.u64 [at]", "@is_open st.global.v2.u64 [at]", serve_gap),
    ("one of two words stands for both", "and.b64         d0, u0, u1;", "mov.b64         d0, u0;", serve_gap),
    (
        "one thread's words stand for another's",
        "shr.u32         t0, whole, 1;",
        "shr.u32         t0, whole, 0;",
        serve_gap,
    ),
    ("… for two others'", "shr.u32         t0, whole, 2;", "shr.u32         t0, whole, 0;", serve_gap),
    ("a queue goes on in the next one's groups", "    or.b32          t0, t0, bound;\n", "", serve),
    ("all queues are like a warp's first", "shl.b32         edge, edge, 2;", "mov.u32         edge, 0;", serve),
    ("a short queue is looked at twice", "setp.le.u32     %p0, slot, mask;", "setp.le.u32     %p0, 0, mask;", serve),
    ("slots end where the queue does not", "and.b32         t0, t0, mask;", "and.b32         t0, t0, 63;", serve),
    ("a value ends too early", "setp.eq.u32     %p2, bytes, 4;", "setp.eq.u32     %p2, bytes, 5;", serve),
    ("a value of another place", "shl.b64         d1, d1, 48;", "shl.b64         d1, d1, 40;", serve),
    ("bytes in words of 4 end too early", "setp.gt.u32     q5, t6, 32;", "setp.gt.u32     q5, t6, 36;", serve),
    ("… too late", "setp.gt.u32     q4, t6, 16;", "setp.ge.u32     q4, t6, 16;", serve),
    ("bytes in words of 8 end too early", "setp.gt.u32     q2, t7, 32;", "setp.gt.u32     q2, t7, 40;", serve),
    ("bytes in words of 16 end too late", "    @!%p1 mov.u32   t5, 0;\n", "", serve),
    ("bytes by a group end too early", "setp.gt.u64     q3, d1, 192;", "setp.gt.u64     q3, d1, 256;", serve),
    ("… at 512", "    @q1 bra         group_wide;\n", "", serve),
    ("bytes by a warp end too early", "setp.gt.u64     q3, d1, 1536;", "setp.gt.u64     q3, d1, 2048;", serve),
    ("… in words of 4", "setp.gt.u64     q3, d1, 384;", "setp.gt.u64     q3, d1, 512;", serve),
    ("… one of 8 KiB", "[d3+7680], {z14, z15};", "[d3+7168], {z14, z15};", serve),
    ("only one long copy of a look", "    and.b32         long, long, t1;\n", "    mov.u32         long, 0;\n", serve),
    (
        "the other copy's length",
        "shfl.sync.idx.b32 a4, bytes, t0, 31, 0xffffffff;",
        "shfl.sync.idx.b32 a4, bytes, head, 31, 0xffffffff;\n    min.u32         a4, a4, 8192;",
        serve,
    ),
    ("what is added is 1", "    @%p0 mov.u64    increment, 1;\n", "    mov.u64         increment, 1;\n", serve),
    ("… is never 1", "    @%p0 mov.u64    increment, 1;\n", "", serve),
    ("… has 48 bits", "shl.b64         d1, d1, 16;", "shl.b64         d1, d1, 32;", serve),
    ("all threads of a group signal", "and.pred        %p0, adds, leads;", "mov.pred        %p0, adds;", serve),
    ("signals of what is not taken", "and.pred        adds, adds, takes;", "", serve_gap),
    ("a signal by window adds to the context's", "    @is_va mov.u64  signal, from;\n", "", serve),
    ("a signal by window is here", "    @is_va mov.u64  x0, peer;\n", "", serve),
    ("a signal by window has a size", "    @is_va mov.u64  x2, 8;\n", "", serve),
    (
        "a signal by window has a number",
        "or.pred         %p0, %p0, is_va;\n    not.pred        %p1, adds;",
        "not.pred        %p1, adds;",
        serve,
    ),
    (
        "an index goes on in 64 bits",
        "st.relaxed.sys.global.u32 [index_at], next",
        "st.relaxed.sys.global.u64 [index_at], d0",
        serve,
    ),
    ("positions are not told", "    @%p0 st.relaxed.sys.global.u64 [position+256], d0;\n", "", serve),
];

/// A refusal, by its name.
macro_rules! refusal {
    ($name:literal) => {
        |ptx, seed| serve_refusal(ptx, seed, $name)
    };
}

/// What is not for the kernel.
const REFUSED: &[Fault] = &[
    (
        "any window",
        "or.pred         %p0, %p0, %p1;\n    and.pred        is_good, is_good, %p0;\n    \
         not.pred        %p1, stores;",
        "not.pred        %p1, stores;",
        refusal!("first window unknown"),
    ),
    ("any second window", "    and.pred        is_good, is_good, %p2;\n", "", refusal!("second window unknown")),
    ("no window is one", "    @%p0 mov.u64    handle, 0xffffffffffffffff;\n", "", refusal!("second window none")),
    (
        "a source begins anywhere",
        "setp.le.u64     %p1, first, x1;",
        "setp.eq.u64     %p1, 0, 0;",
        refusal!("source begins behind its window"),
    ),
    (
        "a source ends anywhere",
        "setp.le.u64     %p1, x2, d0;",
        "setp.eq.u64     %p1, 0, 0;",
        refusal!("source ends behind its window"),
    ),
    (
        "a target begins anywhere",
        "setp.le.u64     %p1, y0, peer_bytes;",
        "setp.eq.u64     %p1, 0, 0;",
        refusal!("target begins behind its window"),
    ),
    (
        "a target ends anywhere",
        "setp.le.u64     %p1, size, d0;\n    and.pred        %p2",
        "setp.eq.u64     %p1, 0, 0;\n    and.pred        %p2",
        refusal!("target ends behind its window"),
    ),
    (
        "a signal ends as its window does here",
        "    @is_va mov.u64  x1, peer_bytes;\n",
        "",
        refusal!("signal ends behind its window"),
    ),
    ("any version", "setp.lt.u32     %p0, t0, newest;", "setp.eq.u32     %p0, 0, 0;", refusal!("newer version")),
    (
        "version 0",
        "setp.lt.u32     %p0, t0, newest;",
        "add.u32         t0, t0, 1;\n    setp.le.u32     %p0, t0, newest;",
        refusal!("no version"),
    ),
    (
        "any length",
        "    setp.le.u64     %p1, size, d0;\n    or.pred         %p1, %p1, is_va;\n    \
         and.pred        is_good, is_good, %p1;\n",
        "",
        serve_too_long_descriptors,
    ),
    ("values as long as copies", "    @is_inline mov.u64 d0, 8;\n", "", refusal!("a value of 16 bytes")),
    (
        "values of any length",
        "    or.pred         %p1, %p1, %p0;\n    and.pred        is_good, is_good, %p1;\n    // The signal",
        "    // The signal",
        refusal!("a value of 3 bytes"),
    ),
    (
        "any signal",
        "setp.lt.u32     %p0, id, signals;",
        "setp.le.u32     %p0, id, signals;",
        refusal!("signal beyond the context's"),
    ),
    (
        "signals of 16 bits",
        "and.b32         id, id, 0xffffff;",
        "and.b32         id, id, 0xff;",
        refusal!("signal far beyond"),
    ),
    (
        "operations of 8 bits",
        "and.b32         t1, t1, 0xffff;",
        "and.b32         t1, t1, 0xff;",
        refusal!("an operation of 9 bits"),
    ),
    (
        "operations of 6 bits",
        "and.b32         t1, t1, 0xffff;",
        "and.b32         t1, t1, 0x3f;",
        refusal!("flush as well"),
    ),
    ("no operation", "0x00010100000a0a0a", "0x00010100000a0a0b", refusal!("no operation")),
    ("counters", "0x00010100000a0a0a", "0x00010100000a0a2a", refusal!("counter alone")),
    ("both signals", "0x00010100000a0a0a", "0x00010100020a0a0a", refusal!("both signals, no data")),
    ("signals without put", "0x00010100000a0a0a", "0x00010100000a0b0a", refusal!("signal without put")),
    ("both signals by window", "0x00010100000a0a0a", "0x01010100000a0a0a", refusal!("both signals by window")),
    (
        "nothing to do",
        "    or.pred         %p1, %p1, is_nop;\n    and.pred        is_good, is_good, %p1;\n",
        "",
        refusal!("nothing to do"),
    ),
    ("sources anywhere", "or.b32          t4, t4, t6;", "mov.b32         t4, t6;", refusal!("source is not aligned")),
    ("targets anywhere", "or.b32          t4, t4, t6;", "", refusal!("target is not aligned")),
    ("odd lengths", "    @is_data or.b32 t4, t4, bytes;\n", "", refusal!("size is not aligned")),
    (
        "values at multiples of 4",
        "    @!is_inline mov.u32 t1, 3;\n",
        "    mov.u32         t1, 3;\n",
        refusal!("value is not aligned"),
    ),
    ("signals at multiples of 4", "    @is_va mov.u32  t1, 7;\n", "", refusal!("signal by window is not aligned")),
    (
        "what was refused is looked at again",
        "    and.pred        is_open, is_open, %p0;\n    vote",
        "    vote",
        refusal!("nothing to do"),
    ),
    ("what was refused is still there", "    @%p0 mov.u64    u0, empty;\n", "", refusal!("nothing to do")),
    (
        "all queues are closed",
        "    not.pred        %p0, %p0;\n    and.pred        is_open",
        "    setp.ne.u32     %p0, 0, 0;\n    and.pred        is_open",
        refusal!("nothing to do"),
    ),
    (
        "what is behind it is taken",
        "and.b32         accepted, accepted, whole;\n",
        "mov.b32         accepted, whole;\n",
        refusal!("nothing to do"),
    ),
];

/// When it ends.
const ENDS: &[Fault] = &[
    (
        "stop is not seen",
        "    setp.eq.u64     %p2, stop, number;\n    or.pred         %p1, %p1, %p2;\n",
        "",
        serve_stop,
    ),
    (
        "others are not told to leave",
        "    setp.ne.u32     %p1, t1, 0;\n    setp.eq.u64     %p2, stop",
        "    setp.ne.u32     %p1, 0, 0;\n    setp.eq.u64     %p2, stop",
        serve_stop,
    ),
    (
        "who has no queue is not told to leave",
        "    @%p0 bra        ended;\n    @!%p1 bra       rest;",
        "    @!%p1 bra       rest;",
        serve_stop,
    ),
    ("all blocks have the first one's board", "    add.u64         board, board, d0;\n", "", serve_stop),
    ("boards lie closer", "mul.lo.u32      t0, t0, 17408;", "mul.lo.u32      t0, t0, 16384;", serve_stop),
    ("its life has no end", "setp.ge.u64     %p1, d2, life;", "setp.ne.u64     %p1, 0, 0;", serve_life),
    ("nobody knows what other warps take", "and.b32         t0, thread, 7;", "mov.u32         t0, 0;", serve_idle),
    ("nobody knows what is taken", "    mov.u32         fresh, 1;\n", "", serve_idle),
    (
        "what was taken once counts for ever",
        "    mov.u32         fresh, 0;\n    @is_other bra   place;",
        "    @is_other bra   place;",
        serve_idle,
    ),
    ("it is never idle", "setp.lt.u64     %p0, d2, idle;", "setp.eq.u64     %p0, 0, 0;", serve_idle),
];

/// Lanes that are watched.
const WATCHED: &[Fault] = &[
    ("it is taken", "    and.pred        is_good, is_good, is_taken;\n", "", serve_watched_descriptors),
    ("… as a send entry", "    and.pred        is_good, is_good, is_taken;\n", "", serve_watched_sends),
    ("all of it has to be there", "    @!is_taken mov.pred %p0, %p1;\n", "", serve_watched_descriptors),
    (
        "others' words are waited for",
        "    setp.ne.u32     %p2, sub, 0;\n    or.pred         %p1, %p1, %p2;\n    @!is_taken",
        "    @!is_taken",
        serve_watched_descriptors,
    ),
    (
        "something is there always",
        "    setp.ne.u64     %p1, u0, empty;\n",
        "    setp.eq.u32     %p1, sub, sub;\n",
        serve_watched_sends,
    ),
    ("lanes with a far peer are watched", "and.b32         t1, t0, 2;", "and.b32         t1, t0, 3;", serve),
];

/// Seeds that find what few others do: asked early, since each takes its time.
const LATE: [u64; 22] = [10, 35, 5, 78, 19, 37, 12, 36, 14, 41, 16, 13, 20, 18, 104, 123, 22, 26, 27, 59, 81, 98];

fn find_faults(faults: &[Fault]) {
    let is_found = |&&(fault, right, wrong, finder): &&Fault| {
        assert!(PTX.contains(right), "{fault}: no such text");
        let text = PTX.replace(right, wrong);
        (0..4).chain(LATE).chain(4..80).any(|seed| finds(|| finder(&text, seed)))
    };
    let missed: Vec<_> = faults.iter().filter(|f| !is_found(f)).map(|f| (f.0, f.2)).collect();
    assert!(missed.is_empty(), "not found: {missed:#?}");
}

#[test]
fn faults_in_the_order() {
    find_faults(order::ORDER);
}

#[test]
fn faults_in_what_is_alike() {
    find_faults(alike::ALIKE);
}

#[test]
fn faults_in_how_long_copies_are() {
    find_faults(longer::LONGER);
}

#[test]
fn faults_in_who_helps() {
    find_faults(longer::HELP);
}

#[test]
fn faults_in_what_a_doorbell_rings() {
    find_faults(bells::BELLS);
}

#[test]
fn faults_in_what_is_held() {
    find_faults(held::HELD);
}

#[test]
fn faults_in_what_is_taken() {
    find_faults(TAKEN);
}

#[test]
fn faults_in_what_is_refused() {
    find_faults(REFUSED);
}

#[test]
fn faults_in_what_is_watched() {
    find_faults(WATCHED);
}

#[test]
fn faults_in_the_ends() {
    find_faults(ENDS);
}

#[test]
fn faults_in_when_a_send_entry_is_there() {
    find_faults(sends::THERE);
}

#[test]
fn faults_in_gets() {
    find_faults(gets::GETS);
}

#[test]
fn faults_in_reads() {
    find_faults(sends::READ);
}

#[test]
fn faults_in_what_send_entries_mean() {
    find_faults(sends::MEANT);
    find_faults(sends::REFUSED);
}
