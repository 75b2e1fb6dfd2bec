//! Descriptions that cannot be are refused by name, and nothing is written.

use crate::given::Given;
use oxygin::gdaki::view::{window, Description, Handler, Image, Layout, PeerQueues, QueuePair, SetShape};

const SHAPE: SetShape = SetShape { rank: 1, ranks: 4, stride: 2, contexts: 2 };

fn given(layout: Layout) -> Given {
    let (counters, signals, slots, handler) = (2, 3, 8, Handler::Doorbell);
    Given { layout, shape: SHAPE, counters, signals, slots, handler, dump: true, address: 4096 }
}

/// Writes what `change` makes of a good description: the sentence.
fn refusal(layout: Layout, change: impl FnOnce(&mut Description)) -> Option<String> {
    let given = given(layout);
    let room = given.room();
    let mut memory = vec![0xee; room.bytes()];
    let result = given.describe(|mut of| {
        change(&mut of);
        room.write(&of, &mut memory, given.address)
    });
    let is_untouched = memory.iter().all(|b| *b == 0xee);
    assert_eq!(result.is_err(), is_untouched);
    result.err().map(|e| e.message().to_owned())
}

/// The same of one queue pair: context 1 to rank 3.
fn queue_refusal(layout: Layout, change: impl FnOnce(&mut PeerQueues)) -> Option<String> {
    let mut queues = given(layout).queues();
    assert_eq!(queues.len(), 4);
    change(&mut queues[3]);
    refusal(layout, |of| {
        let changed: &'static [PeerQueues] = queues.leak();
        of.queues = changed;
    })
}

#[test]
fn queue_pairs_that_device_code_cannot_use() {
    type Change = fn(&mut QueuePair);
    let bad: [(Change, &str); 14] = [
        (|q| q.slots = 0, "0 slots"),
        (|q| q.slots = 12, "12 slots"),
        (|q| q.slots = 1 << 16, "65536 slots"),
        (|q| q.number = 1 << 24, "number 0x1000000"),
        (|q| q.completion_number = u32::MAX, "completion number 0xffffffff"),
        (|q| q.send_queue = 0, "send queue is at 0x0"),
        (|q| q.send_queue += 32, "send queue is at"),
        (|q| q.completion_queue = 0, "completion queue is at 0x0"),
        (|q| q.completion_queue += 8, "completion queue is at"),
        (|q| q.doorbell = 0, "doorbell is at 0x0"),
        (|q| q.doorbell += 4, "doorbell is at"),
        (|q| q.send_record = 0, "send doorbell record is at 0x0"),
        (|q| q.send_record += 2, "send doorbell record is at"),
        (|q| q.completion_record += 1, "completion doorbell record is at"),
    ];
    for layout in [Layout::V1, Layout::V2, Layout::V3] {
        for (change, part) in bad {
            let main = queue_refusal(layout, |queues| change(&mut queues.main)).expect(part);
            assert!(main.contains("context 1 to rank 3:") && main.contains(part), "{main}");
            let companion = |queues: &mut PeerQueues| change(queues.companion.as_mut().expect("counters"));
            let companion = queue_refusal(layout, companion).expect(part);
            assert!(companion.contains("context 1 to rank 3, companion:") && companion.contains(part), "{companion}");
        }
    }
}

#[test]
fn what_nobody_reads_may_lack() {
    type Change = fn(&mut QueuePair);
    let good: [Change; 4] = [
        |q| q.completion_record = 0,
        |q| (q.handler, q.send_record) = (Handler::CpuProxy, 0),
        |q| (q.handler, q.send_record) = (Handler::NoRecord, 0),
        |q| q.slots = 1 << 15,
    ];
    for layout in [Layout::V1, Layout::V2, Layout::V3] {
        for change in good {
            assert_eq!(queue_refusal(layout, |queues| change(&mut queues.main)), None);
        }
    }
}

#[test]
fn handlers_that_older_kernels_do_not_know() {
    let free_flow = |layout| queue_refusal(layout, |queues| queues.main.handler = Handler::FreeFlow);
    for layout in [Layout::V1, Layout::V2] {
        assert!(free_flow(layout).expect("unknown there").contains("free-flow"));
    }
    assert_eq!(free_flow(Layout::V3), None);
}

#[test]
fn sets_that_do_not_fit_together() {
    type Change = fn(&mut Description);
    let bad: [(Change, &str); 9] = [
        (|of| of.queues = &of.queues[1..], "3 queue pairs for 2 contexts of 2 peers"),
        (|of| of.queues = &[], "0 queue pairs"),
        (|of| of.counters.each = 0, "companions"),
        (|of| of.counters.rkeys = &of.counters.rkeys[1..], "counters at"),
        (|of| of.signals.rkeys = &[], "signals at"),
        (|of| of.signals.buffer = 0, "signals at 0x0"),
        (|of| of.signals.buffer += 4, "signals at"),
        (|of| of.signals.buffer = u64::MAX - 7, "signals at"),
        (|of| of.signals.each = 1 << 31, "2147483648 signals in each of 2 contexts"),
    ];
    for layout in [Layout::V1, Layout::V2, Layout::V3] {
        assert_eq!(refusal(layout, |_| ()), None);
        for (change, part) in bad {
            let sentence = refusal(layout, change).expect(part);
            assert!(sentence.contains(part), "{sentence}");
        }
        let lacks = queue_refusal(layout, |queues| queues.companion = None).expect("counters need it");
        assert!(lacks.contains("context 1 to rank 3: no companion"), "{lacks}");
    }
    // Without signals nothing of them is looked at.
    assert_eq!(refusal(Layout::V3, |of| (of.signals.each, of.signals.buffer, of.signals.rkeys) = (0, 0, &[])), None);
}

#[test]
fn companions_without_counters() {
    let given = Given { counters: 0, ..given(Layout::V3) };
    let (room, mut queues) = (given.room(), given.queues());
    queues[2].companion = Some(given.queue_pair(1, 1, true));
    let mut memory = vec![0; room.bytes()];
    let sentence =
        given.describe(|of| room.write(&Description { queues: &queues, ..of }, &mut memory, 4096)).unwrap_err();
    assert!(sentence.message().contains("context 1 to rank 1: a companion"), "{sentence}");
}

#[test]
fn memory_that_is_no_room() {
    let given = given(Layout::V3);
    let room = given.room();
    let mut memory = vec![0xee; room.bytes() + 1];
    let exact = room.bytes();
    let end = u64::MAX - 127;
    for (bytes, address) in [(exact - 1, 4096), (exact + 1, 4096), (exact, 0), (exact, 4096 + 64), (exact, end)] {
        let refused = given.describe(|of| room.write(&of, &mut memory[..bytes], address)).unwrap_err();
        assert!(refused.message().contains("bytes in"), "{refused}");
    }
    assert!(memory.iter().all(|b| *b == 0xee));
    for (bytes, address) in [(23, 8), (25, 8), (24, 0), (24, 12)] {
        assert!(window::write(&[1, 2], 3, &mut memory[..bytes], address).is_err(), "{bytes} at {address}");
    }
    assert!(memory.iter().all(|b| *b == 0xee));
}

#[test]
fn shapes_that_are_none() {
    let bad = [
        (SetShape { contexts: 0, ..SHAPE }, "0 contexts of rank 1 of 4"),
        (SetShape { rank: 4, ..SHAPE }, "rank 4 of 4"),
        (SetShape { ranks: 0, ..SHAPE }, "rank 1 of 0"),
        (SetShape { ranks: u32::MAX, contexts: u32::MAX, ..SHAPE }, "more than memory can be addressed"),
    ];
    for (shape, part) in bad {
        for layout in [Layout::V1, Layout::V2, Layout::V3] {
            let refused = Image::new(layout, shape, true).unwrap_err();
            assert!(refused.message().contains(part), "{refused}");
        }
    }
}
