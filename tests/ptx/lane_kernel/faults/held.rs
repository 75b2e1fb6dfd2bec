//! Faults in what is done with a full look that is held until the next one is dealt with.

use super::super::alike::serve_alike;
use super::super::held::{
    serve_held, serve_held_life, serve_held_new, serve_held_new_sends, serve_held_refused, serve_held_signals,
    serve_held_stopped,
};
use super::Fault;

/// What is held, and when that ends. That bytes of what is held call for a fence before its signals (`held_moved`) is
/// none of these: the one behind a hold does as well, on this GPU.
pub const HELD: &[Fault] = &[
    (
        "signals of what is held are not added",
        "    @%p0 red.relaxed.sys.global.add.u64 [held_signal], held_increment;\n",
        "",
        serve_held,
    ),
    (
        "… are by all threads of a group",
        "and.pred        %p0, held_adds, leads;",
        "mov.pred        %p0, held_adds;",
        serve_held,
    ),
    ("… where there are none", "mov.pred        held_adds, adds;", "mov.pred        held_adds, takes;", serve_held),
    ("… are the next look's", "    mov.u64         held_signal, signal;\n", "", serve_held),
    ("… add something else", "    mov.u64         held_increment, increment;\n", "", serve_held),
    ("… are added again", "    mov.pred        held_adds, is_held;\n    mov.pred        held_moved", AGAIN, serve_held),
    (
        "slots of what is held are not emptied",
        "    @is_held st.global.v2.u64 [held_at], {empty, empty};\n",
        "",
        serve_held,
    ),
    ("… are others", "    mov.u64         held_at, at;\n", "", serve_held),
    ("… are looked at ahead", "    @is_held add.u32 t0, t0, span;\n", "", serve_held),
    ("what is in a small queue is held", "    and.pred        %p0, %p0, is_ahead;\n", "", serve_alike),
    (
        "a look of which one is refused is held",
        "setp.eq.u32     %p0, accepted, 0x11111111;",
        "setp.ne.u32     %p0, accepted, 0;",
        serve_held_refused,
    ),
    ("two are held", "    or.pred         %p1, is_held, is_bell;\n", "    mov.pred        %p1, is_bell;\n", serve_held),
    ("what was held stays so", "    setp.ne.u32     is_held, 0, 0;\n", "", serve_held),
    (
        "descriptors behind what is held are used without acquire",
        "    fence.acq_rel.gpu;\n    @!is_like bra   learn;\n    bra             learned;\nstops:",
        "    @!is_like bra   learn;\n    bra             learned;\nstops:",
        serve_held_new,
    ),
    (
        "… entries",
        "    fence.acq_rel.gpu;\n    @!is_like bra   learn;\n    bra             learned;\nstops:",
        "    @!is_like bra   learn;\n    bra             learned;\nstops:",
        serve_held_new_sends,
    ),
    ("held signals before bytes, on another GPU", "    or.pred         has_far, has_far, held_far;\n", "", serve_held),
    ("… as nobody knows of them", "    mov.pred        held_far, has_far;\n", "", serve_held),
    (
        "… as the next look has none",
        "    or.pred         %p3, adds, held_adds;\n",
        "    mov.pred        %p3, adds;\n",
        serve_held_signals,
    ),
    ("how far it is stays as it was", HELD_NEXT, HELD_NEXT_LOST, serve_held),
    ("no index where all that was taken was held", "    or.pred         %p0, %p0, is_held;\n", "", serve_held),
    ("what is held waits for the next one", "    @is_held bra    end_held;\n", "", serve_held),
    (
        "what is held is lost where the next one is refused",
        "    not.pred        %p1, is_held;\n    and.pred        %p0, %p0, %p1;\n    @%p0 bra        refusals;",
        "    @%p0 bra        refusals;",
        serve_held_refused,
    ),
    ("… where it is stopped", "    @!is_held bra   leave;\n", "    bra             leave;\n", serve_held_stopped),
    (
        "… where its life ends",
        "    setp.ne.u32     %p1, t0, 15;\n    and.pred        %p0, %p0, %p1;\n",
        "",
        serve_held_life,
    ),
    (
        "… what is there then is refused",
        "    mov.u32         whole, 0;\n    mov.u32         accepted, 0;\n",
        "    mov.u32         accepted, 0;\n",
        serve_held_stopped,
    ),
    (
        "… is emptied",
        "    setp.ne.u32     takes, 0, 0;\n    mov.pred        adds, takes;",
        "    setp.eq.u32     takes, 0, 0;\n    setp.ne.u32     adds, 0, 0;",
        serve_held_stopped,
    ),
    ("… counts", "    mov.u32         count, 0;\n    mov.u32         whole", "    mov.u32         whole", serve_held),
];

// Texts of which faults are made.
const AGAIN: &str = "    mov.pred        held_moved";
const HELD_NEXT: &str = "    add.u32         next, next, count;\n    bar.warp.sync";
const HELD_NEXT_LOST: &str = "    bar.warp.sync";
