//! The lane kernel's code itself, `lanes.ptx`, thread by thread on the CPU: what it takes from queues of device code
//! is done once, in order, and before it says so, whoever's turn it is; what it does not understand it leaves alone.
//! Slots hold descriptors, or send entries that are rung in either way.

mod alike;
mod bells;
mod bench;
mod checks;
mod ends;
mod faults;
mod gets;
mod held;
mod longer;
mod order;
mod queue;
mod reads;
mod refused;
mod ring;
mod sends;
mod sends_read;
mod sends_refused;
mod sends_served;
mod watched;

use crate::machine::memory::Memory;
use crate::machine::program::Program;
use crate::machine::{Machine, Random};
use bench::Bench;
use queue::Slots;

const PTX: &str = include_str!("../../src/fabric/soft/gpu/lane_kernel/lanes.ptx");

// Where all of it lies here.
/// The first block's board; that of each other block lies behind the one before.
const BOARDS: u64 = 0x8000;
const BOARD_BYTES: u64 = 17408;
/// The blocks that there are room for, and those that the kernel runs as.
const BLOCKS: u64 = 4;
const RUN_AS: [u64; 3] = [0, 1, 3];
const QUEUES: u64 = 0x2_0000;
/// Of each queue: 64 slots of 128 bytes.
const QUEUE_BYTES: u64 = 64 * 128;
const INDICES: u64 = QUEUES + 64 * QUEUE_BYTES;
/// Of each queue: a word for each of 64 slots, or a doorbell.
const RINGS: u64 = 0xb_0000;
const RING_BYTES: u64 = 64 * 8;
/// Of each queue: 64 completion entries.
const COMPLETIONS: u64 = RINGS + 64 * RING_BYTES;
const COMPLETION_BYTES: u64 = 64 * 64;
const SIGNALS: u64 = 0x10_0000;
const SOURCES: u64 = 0x20_0000;
const TARGETS: u64 = SOURCES + 64 * queue::ROOM;
const END: u64 = TARGETS + 64 * queue::ROOM;
/// In what the kernel has no business with.
const GARBAGE: u64 = 0xdead_beef_dead_beef;

/// The looks in vain after which the kernel is calm, and a text that is so after the first.
const CALM: &str = "is_calm, vain, 64;";
const CALM_AT_ONCE: &str = "is_calm, vain, 1;";

/// Turns after which something hangs.
const TOO_LONG: u64 = 600_000;
/// Longer than any test.
const NEVER: u64 = 1 << 40;

/// Some launches, one after the other; the last one takes all that is left.
fn serve(ptx: &str, seed: u64) {
    serve_slots(Slots::Descriptors, ptx, seed);
}

/// The same with slots of one kind or the other.
fn serve_slots(slots: Slots, ptx: &str, seed: u64) {
    let mut random = Random(!seed);
    let spread = seed % 4;
    let queues = [1, 2, 5, 8 << spread][random.below(4) as usize];
    serve_launches(Bench::of(slots, ptx, seed, spread, queues));
}

/// The same on a bench.
fn serve_launches(mut bench: Bench) {
    for _ in 0..3 {
        let entries = bench.below(60);
        // Some end with work undone.
        let life = [5_000 + bench.below(60_000), NEVER][bench.below(2) as usize];
        serve_launch(&mut bench, entries, life);
    }
    bench.launch(NEVER, NEVER);
    bench.go();
    bench.run_until(|b| b.left() == 0);
    bench.finish();
}

/// A launch that is given up to so many entries at the times that it likes, and has ended.
fn serve_launch(bench: &mut Bench, entries: u64, life: u64) {
    bench.launch(60_000, life);
    let mut left = entries;
    // Some are there before it looks.
    if bench.below(2) == 0 {
        left -= bench.post_some(entries / 2);
    }
    bench.go();
    let mut turns = 0;
    while !bench.is_gone() {
        if left > 0 && bench.below(3) > 0 {
            let most = [2, 9, 30][bench.below(3) as usize].min(left);
            left -= bench.post_some(most);
        }
        if bench.below(300) == 0 {
            bench.stop();
        }
        let n = 1 + bench.below(400);
        bench.run(n);
        turns += n;
        bench.check();
        assert!(turns < TOO_LONG, "{} entries are left in launch {}", bench.left(), bench.launches);
    }
    bench.check_end();
}

#[test]
fn what_it_says_is_so() {
    (0..16).for_each(|seed| serve(PTX, seed));
}

/// The text for queues of one kind, as `lane_kernel/text.rs` makes it for the driver: what the board says of their
/// kind is not looked at.
fn of_kind(slots: Slots) -> String {
    let set = [("is_entry", slots != Slots::Descriptors), ("is_bell", slots == Slots::Bells)];
    set.iter().fold(PTX.to_string(), |text, (name, value)| {
        let line = format!("vote.sync.any.pred {name}, %p0, 0xffffffff;");
        assert_eq!(text.matches(&line).count(), 1, "{name}");
        text.replace(&line, &format!("setp.{}.u32 {name}, 0, 0;", if *value { "eq" } else { "ne" }))
    })
}

#[test]
fn what_the_text_for_one_kind_says_is_so() {
    for slots in [Slots::Descriptors, Slots::Sends, Slots::Bells] {
        let text = of_kind(slots);
        (0..6).for_each(|seed| serve_slots(slots, &text, seed));
    }
}
