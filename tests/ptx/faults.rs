//! Faults put into the copy kernel's code, one at a time: the tests of [`crate::copy_kernel`] find each of them.

use crate::copy_kernel::{serve, serve_awaited, serve_pieces, serve_signals, serve_stream, serve_unawaited, PTX};
use crate::finds::finds;

/// What is wrong then, the text that is right, and what replaces it.
const FAULTS: &[(&str, &str, &str)] = &[
    ("a worker warp says done before its bytes are visible", "fence.acq_rel.gpu;\n    @is_first red", "@is_first red"),
    ("… before other lanes have stored", "worker_done:\n    bar.warp.sync   0xffffffff;", "worker_done:"),
    ("the first warp does not wait for worker warps", "@%p9 bra        tickets_wait;", ""),
    (
        "tickets are out before their copies",
        "st.release.gpu.global.u64 [board], tickets",
        "st.volatile.global.u64 [board], tickets",
    ),
    ("a piece goes beyond its copy", "min.u64         end, end, d3;", ""),
    (
        "a ticket is taken for the copy before its own",
        "setp.gt.u64     %p1, d2, ticket",
        "setp.ge.u64     %p1, d2, ticket",
    ),
    ("the next board is not cleared", "st.global.v2.u64 [d1], {d2, d2};", ""),
    ("launches share a board", "and.b64         d0, number, 1;", "and.b64         d0, number, 0;"),
    ("worker warps are not told to leave", "@is_first st.release.gpu.global.u64 [board], d0;", ""),
    ("signals before bytes", "fence.acq_rel.gpu;\nsignals:", "signals:"),
    (
        "done before signals",
        "fence.acq_rel.sys;\n    @is_first st.volatile.global.u64 [words+64], count;",
        "@is_first st.volatile.global.u64 [words+64], count;",
    ),
    (
        "what was loaded ahead is used without acquire",
        "    fence.acq_rel.sys;\n    @is_first st.volatile.global.u64 [words+64], count;\n    \
         mov.u64         reported, count;\n    mov.u32         awaited, 0;\n    bra             loaded;",
        "    bra             loaded;",
    ),
    (
        "… as the host has not released it to this GPU",
        "    fence.acq_rel.sys;\n    @is_first st.volatile.global.u64 [words+64], count;\n    \
         mov.u64         reported, count;\n    mov.u32         awaited, 0;\n    bra             loaded;",
        "    fence.acq_rel.gpu;\n    bra             loaded;",
    ),
    ("what was loaded ahead is taken in another order", "mov.u64         u2, u4;", ""),
    ("a copy by its own lanes ends too early", "setp.gt.u64     q3, d1, 192;", "setp.gt.u64     q3, d1, 256;"),
    ("… by all lanes", "setp.gt.u64     q3, d1, 1536;", "setp.gt.u64     q3, d1, 2048;"),
    ("who waits for one learns of it with the others", "@%p3 bra        report;", ""),
    ("who waits for one learns of it as late as of others", "@%p3 mov.u32    awaited, 1;", ""),
    ("what nobody waits for is never told", "setp.lt.u32     %p11, vain, 2;", "setp.ge.u32     %p11, vain, 0;"),
    (
        "bytes of a go without signals are not there before the next go's",
        "    @!%p10 bra      signals;",
        "    bra             signals;",
    ),
    ("signals overtake", "and.pred        %p3, %p3, %p4;", "setp.ne.u32     %p3, 0, 0;"),
    (
        "signals of one go overtake",
        "fence.acq_rel.gpu;\n    bra             next_signals;",
        "bra             next_signals;",
    ),
    ("signals of one go have no order at all", "@%p10 bra       in_order;", ""),
    ("signals come behind those of other commands", "shr.u32         t4, t4, 7;", "shr.u32         t4, t4, 6;"),
    (
        "signals do not wait for the last of those before them",
        "and.b32         t4, t4, 0x03030303;",
        "and.b32         t4, t4, 0x03030301;",
    ),
    (
        "completions are counted of commands that are not there",
        "and.pred        %p3, %p3, %p2;\n    and.pred        %p3, %p3, leads;\n    @%p5",
        "and.pred        %p3, %p3, leads;\n    @%p5",
    ),
    ("… by all lanes of a command", "and.pred        %p3, %p3, leads;\n    @%p5", "@%p5"),
    ("… at what an inline command stores", "@%p5 mov.u64    value, from;", ""),
    ("… as one where it is two entries", "shr.u32         t5, flags, 7;", "mov.u32         t5, 0;"),
    (
        "… in 8 bytes of an index of 4",
        "setp.ne.u32     %p9, t4, 0;\n    and.pred        %p9, %p9, %p3;",
        "mov.pred        %p9, %p3;",
    ),
    (
        "the stamp of one of two words stands for both",
        "prmt.b32        t1, t1, t3, 0x7632",
        "prmt.b32        t1, t1, t1, 0x7632",
    ),
    ("… that of the other", "prmt.b32        t1, t1, t3, 0x7632", "prmt.b32        t1, t3, t3, 0x7632"),
    (
        "sources may be read as they were before their command",
        "ld.acquire.sys.global.v2.u64 {u0, u1}",
        "ld.volatile.global.v2.u64 {u0, u1}",
    ),
    (
        "… as the host has not released them to this GPU",
        "ld.acquire.sys.global.v2.u64 {u0, u1}",
        "ld.acquire.gpu.global.v2.u64 {u0, u1}",
    ),
    (
        "… by lanes that have not acquired anything",
        "poll;\n    // What any lane has acquired all have.\n    bar.warp.sync   0xffffffff;",
        "poll;",
    ),
    (
        "worker warps may find other copies than those that are out",
        "ld.acquire.gpu.global.u64 d0, [board];",
        "ld.relaxed.gpu.global.u64 d0, [board];",
    ),
    ("a command is used that was found without acquire", "@is_calm bra    poll;", ""),
    (
        "worker warps copy what they have found out without acquire",
        "@!%p0 bra       worker_waits;",
        "@!%p0 bra       worker_waits;\n    setp.ne.u64     %p0, d0, 0xffffffffffffffff;\n    \
         vote.sync.all.pred %p0, %p0, 0xffffffff;\n    @%p0 bra        worker_copies;",
    ),
    ("a register that is in use", "ld.volatile.global.u32 a7, [d2+896];", "ld.volatile.global.u32 t6, [d2+896];"),
    (
        "the first warp does not wait for those that share",
        "    bar.sync        0;\n    @is_helper bra  helper;",
        "    @is_helper bra  helper;",
    ),
    (
        "copies are shared before all are told of them",
        "    bar.warp.sync   0xffffffff;\n    bar.sync        0;\n\nshare:",
        "\nshare:",
    ),
    ("slices go beyond their copy", "min.u32         c2, c2, g_bytes;", ""),
    ("slices leave something between them", "shl.b32         t7, t7, 9;", "shl.b32         t7, t7, 8;"),
    ("those who share do the same copy", "shr.u32         t6, unit, cut;", "mov.u32         t6, 0;"),
    ("a warp alone does one copy of several", "shr.u32         t7, units, cut;", "mov.u32         t7, 8;"),
    ("a copy by single words ends too early", "setp.gt.u64     q3, d1, 384;", "setp.gt.u64     q3, d1, 512;"),
    (
        "those who share are not told to leave",
        "    @is_first st.shared.u32 [list], t5;\n    bar.warp.sync   0xffffffff;\n    bar.sync        0;\n    \
         @is_first st.volatile.global.u64 [words+128], number;",
        "    @is_first st.volatile.global.u64 [words+128], number;",
    ),
    (
        "the list is written while others are at it",
        "    mov.u32         is_read, 0;\n    bar.sync        0;\nlist_is_free:",
        "list_is_free:",
    ),
    (
        "a ticket that is not out yet is lost",
        "    @!%p0 bra       share_done;\n    mov.u32         held, 0;",
        "    mov.u32         held, 0;\n    @!%p0 bra       share_done;",
    ),
];

/// Every second one, from number `first` on, so that two processors share the work.
fn find_faults(first: usize) {
    for &(fault, right, wrong) in FAULTS.iter().skip(first).step_by(2) {
        assert!(PTX.contains(right), "{fault}: no such text");
        let text = PTX.replace(right, wrong);
        // Where all kinds of commands find it late.
        let serve = match fault {
            "… before other lanes have stored" => serve_pieces,
            "who waits for one learns of it with the others" => serve_awaited,
            "signals overtake" => serve_signals,
            "who waits for one learns of it as late as of others" | "what nobody waits for is never told" => {
                serve_unawaited
            }
            "what was loaded ahead is used without acquire" | "… as the host has not released it to this GPU" => {
                serve_stream
            }
            _ => serve,
        };
        let is_found = |seed| finds(|| serve(&text, seed));
        // The seeds before that take long and do not find it.
        let first = match fault {
            "done before signals" => 5,
            "a copy by its own lanes ends too early" => 6,
            "what was loaded ahead is taken in another order" => 9,
            "signals do not wait for the last of those before them" => 14,
            _ => 0,
        };
        assert!((first..80).any(is_found), "not found: {fault}");
    }
}

#[test]
fn faults_with_even_numbers_are_found() {
    find_faults(0);
}

#[test]
fn faults_with_odd_numbers_are_found() {
    find_faults(1);
}
