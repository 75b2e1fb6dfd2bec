use super::super::*;
use super::*;

fn set() -> CapturedSet {
    CapturedSet {
        nccl: Some(23_102),
        layout: None,
        fabric: "soft",
        is_on_gpu: false,
        rank: 1,
        nranks: 2,
        comm: 7,
        set: 3,
        contexts: 4,
        stride: 1,
        signals: (0x300, 8),
        counters: (0, 0),
    }
}

fn shape(context: u32) -> CapturedQueue {
    let handler = Ringing::Doorbell;
    CapturedQueue { context, peer: 0, is_companion: false, number: 1 + context, slots: 128, handler, is_counted: false }
}

/// A put of 64 bytes from byte 8 of window 2 to byte 16 of window 5.
fn put(index: u16, key: u32) -> [u8; ENTRY_BYTES] {
    let words = [
        u32::from(index) << 8 | 0x08,
        1 << 8 | 3,
        0x48,
        0,
        0,
        16,
        0x500,
        0,
        64,
        key,
        0,
        8,
        u32::MAX,
        u32::MAX,
        u32::MAX,
        u32::MAX,
    ];
    words.map(u32::to_be_bytes).concat().try_into().unwrap()
}

fn text(capture: &Capture) -> String {
    let queues = capture.queues.lock();
    let kept: Vec<_> = queues.iter().map(|queue| queue.lock()).filter(|kept| kept.taken > 0).collect();
    of(&capture.set, &kept)
}

#[test]
fn a_recording_is_a_text() {
    let capture = Capture::new("nowhere", set());
    let (tape, _idle) = (capture.tape(shape(0)), capture.tape(shape(1)));
    let window = |key| (key == 0x500).then_some((4096, 8192));
    tape.take(put(0, 0x200), true, window);
    tape.take([0xff; 64], false, window);
    tape.complete(0, CapturedEnd::Failed(Syndrome::LocalProtection));
    let lines: Vec<_> = text(&capture).lines().map(str::to_owned).collect();
    let expected = [
        "nccl 23102",
        "layout none",
        "fabric soft",
        "memory host",
        "rank 1 2",
        "set 7 3",
        "contexts 4 1",
        "sink 00000100",
        "signals 00000300 8",
        "counters 00000000 0",
        "queue 0 0 main",
        "number 1",
        "slots 128",
        "rings doorbell rung",
        "completions entries",
        "entries 2 2",
        "window 00000500 4096 8192",
        "window 00000200 none",
        "entry 0 + 00000008000001030000004800000000 00000000000000100000050000000000 \
         00000040000002000000000000000008 ffffffffffffffffffffffffffffffff | index 0 queue 1 opcode 08 fenced \
         signalled write to 00000500+16 from 00000200+8*64 | failed 04",
        "entry 1 - ffffffffffffffffffffffffffffffff ffffffffffffffffffffffffffffffff \
         ffffffffffffffffffffffffffffffff ffffffffffffffffffffffffffffffff | malformed Opcode(255, 255) | open",
        "end",
    ];
    assert_eq!(lines[0], "oxygin gdaki capture 1");
    assert!(lines[1].starts_with("library "));
    assert_eq!(lines[2..], expected);
}

/// Every queue has a part of the file, however much the others have, and the file has its bound.
#[test]
fn a_recording_is_no_longer_than_its_bound() {
    let capture = Capture::new("nowhere", set());
    let window = |_| Some((4096, 4096));
    let tapes: Vec<_> = (0..40).map(|context| capture.tape(shape(context))).collect();
    for (context, tape) in tapes.iter().enumerate() {
        let n = if context == 39 { 20 } else { 3000 };
        (0..n).for_each(|i| tape.take(put(i, 0x200), i % 32 == 0, window));
    }
    let kept: Vec<_> = capture.queues.lock().iter().map(|queue| queue.lock().entries.len()).collect();
    assert_eq!((kept[0], kept[38], kept[39]), (ENTRIES_OF_QUEUE, ENTRIES_SURE, ENTRIES_SURE));
    let text = text(&capture);
    assert!(text.len() <= FILE_MAX && text.len() > FILE_MAX - 16 * 1024, "{} bytes", text.len());
    assert!(text.ends_with("\nend\n") && !text.contains("left out"));
    let of: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("entries ")).collect();
    assert_eq!((of.len(), of[38], of[39]), (40, "16 3000", "16 20"));
    assert!(of[0] == of[15] && of[0].ends_with(" 3000"), "{of:?}");

    let capture = Capture::new("nowhere", set());
    let tapes: Vec<_> = (0..10_000).map(|context| capture.tape(shape(context))).collect();
    tapes.iter().for_each(|tape| tape.take(put(0, 0x200), true, window));
    let text = super::tests::text(&capture);
    assert!(text.len() <= FILE_MAX);
    let queues = text.lines().filter(|line| line.starts_with("queue ")).count();
    let left: usize = text.lines().find_map(|line| line.strip_prefix("left out ")).unwrap().parse().unwrap();
    assert_eq!((queues + left, text.matches("\nentry 0 + ").count()), (10_000, queues));
}

/// An entry whose key has no place ends what is kept, so that what is kept can be replayed.
#[test]
fn keys_are_bounded_too() {
    let capture = Capture::new("nowhere", set());
    let tape = capture.tape(shape(0));
    (0..400).for_each(|i| tape.take(put(i, 0x1_0000 + (u32::from(i) << 8)), true, |_| Some((64, 64))));
    let queue = capture.queues.lock()[0].clone();
    let kept = queue.lock();
    // The peer's window is one of them.
    assert_eq!((kept.entries.len(), kept.windows.len(), kept.taken), (KEYS_OF_QUEUE - 1, KEYS_OF_QUEUE, 400));
}
