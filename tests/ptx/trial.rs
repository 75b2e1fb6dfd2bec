//! The code of the kernel that tries an mlx5 device, `trial.ptx`: a device that is rung finds the entries and their
//! record, and what the kernel tells of a completion is what was written before it.

use crate::finds::finds;
use crate::machine::memory::Memory;
use crate::machine::program::Program;
use crate::machine::{Machine, Random};

const PTX: &str = include_str!("../../src/gdaki/mlx5/trial/trial.ptx");

const BOARD: u64 = 0x1_0000;
/// Where each of two queues has its part of the board, its ring, record, doorbell and completion entries.
const QUEUES: [[u64; 5]; 2] =
    [[BOARD + 32, 0x2_0000, 0x2_1004, 0x2_2000, 0x2_3000], [BOARD + 240, 0x2_4000, 0x2_5004, 0x2_6000, 0x2_7000]];
const LANDED: u64 = 0x2_8000;
const END: u64 = 0x3_0000;

// What is told, from the beginning of a queue's part and of the board.
const TOLD: u64 = 176;
const STATE: u64 = 16;
const FOUND: u64 = 448;

const NOBODY: u64 = 0xf1 << 56;
const RUNG: u64 = 0x5678;
const RECORD: u64 = 0x77;

/// What the device finds and writes, by place.
fn entry(i: u64) -> u64 {
    0xe000 + i
}

fn landed(i: u64) -> u64 {
    0xa000 + i
}

fn completed(i: u64) -> u64 {
    0xc000 + i
}

/// The queues are asked for; `has_record`: device code has one to write.
fn ask(gpu: &mut Machine, queues: &[[u64; 5]], has_record: bool, limit: u64) {
    (0..).zip([limit, LANDED, 0, 0]).for_each(|(i, word)| gpu.memory.write(BOARD + 8 * i, 8, word));
    for &[part, ring, record, bell, completions] in queues {
        let record = if has_record { record } else { 0 };
        let words = [ring, record, RECORD, bell, RUNG, completions].into_iter().chain((0..16).map(entry));
        (0..).zip(words).for_each(|(i, word)| gpu.memory.write(part + 8 * i, 8, word));
        [56, 120].iter().for_each(|at| gpu.memory.write(completions + at, 8, NOBODY));
    }
}

/// One run; `queues`: how many; `answers`: the device completes the entries.
fn run(ptx: &str, seed: u64, queues: usize, has_record: bool, answers: bool) {
    let mut random = Random(seed);
    let mut gpu = Machine::new(Program::parse(ptx, 0), Memory::new(END), random.next());
    let queues = &QUEUES[..queues];
    ask(&mut gpu, queues, has_record, if answers { 1 << 40 } else { 2000 });
    gpu.memory.part();
    gpu.late = [0, 3000][random.below(2) as usize];
    gpu.launch(1, 32, &[BOARD]);
    let mut turns = 0;
    // Of a device that answers nothing the second queue is not rung.
    for &[_, ring, record, bell, completions] in &queues[..if answers { queues.len() } else { 1 }] {
        while gpu.memory.far_read(bell, 8) != RUNG {
            gpu.run(1);
            turns += 1;
            assert!(turns < 100_000 && gpu.runs(), "it does not ring");
        }
        assert!((0..16).all(|i| gpu.memory.far_read(ring + 8 * i, 8) == entry(i)), "entries behind the doorbell");
        let wanted = if has_record { RECORD } else { 0 };
        assert_eq!(gpu.memory.far_read(record, 4), wanted, "the record behind the doorbell");
        gpu.run(random.below(500));
        if answers {
            (0..10).for_each(|i| gpu.memory.write(LANDED + 8 * i, 8, landed(i)));
            // A device's writes arrive in their order.
            for (i, at) in (0..).zip([48, 56, 112, 120]) {
                gpu.memory.release(completions + at, 8, completed(i));
            }
        }
    }
    while gpu.runs() {
        gpu.run(10);
        turns += 1;
        assert!(turns < 200_000, "it does not end");
    }
    gpu.memory.settle();
    assert_eq!(gpu.memory.read(BOARD + STATE, 8), if answers { 1 } else { 2 });
    let told = if answers { [0, 1, 2, 3].map(completed) } else { [0, NOBODY, 0, NOBODY] };
    for &[part, ..] in queues {
        let all = [0, 1, 2, 3].map(|i| gpu.memory.read(part + TOLD + 8 * i, 8));
        assert_eq!(all, told, "what is told of completions");
    }
    let found = |i| gpu.memory.read(BOARD + FOUND + 8 * i, 8) == if answers { landed(i) } else { 0 };
    assert!((0..10).all(found), "what is found behind them");
}

fn all(ptx: &str) {
    for seed in 0..400 {
        run(ptx, seed, 1 + (seed % 3 > 0) as usize, seed % 2 == 0, seed % 5 != 0);
    }
}

#[test]
fn a_device_finds_what_it_is_rung_for_and_the_kernel_what_is_complete() {
    all(PTX);
}

#[test]
fn each_fault_in_it_is_found() {
    let nth = |n: usize, text: &str, by: &str| {
        let at = PTX.match_indices(text).nth(n).unwrap_or_else(|| panic!("no {text} number {n}")).0;
        format!("{}{by}{}", &PTX[..at], &PTX[at + text.len()..])
    };
    let fence = "fence.acq_rel.sys;";
    for (what, faulty) in [
        ("no fence behind the entries", nth(0, fence, "")),
        ("no fence behind the record", nth(1, fence, "")),
        ("no fence behind the completion", nth(2, fence, "")),
        ("a fence of the GPU before the doorbell", PTX.replace(fence, "fence.acq_rel.gpu;")),
        ("seven words of eight", nth(0, "at, 128;", "at, 112;")),
        ("nine words of ten", nth(0, "at, 80;", "at, 72;")),
        ("one queue of two", nth(0, "behind, post, 416;", "behind, post, 208;")),
        ("no end without a completion", nth(0, "p, now, limit;", "p, now, 0xffffffffffffff;")),
    ] {
        assert!(finds(move || all(&faulty)), "{what}: nobody sees it");
    }
}
