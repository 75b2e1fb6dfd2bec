//! What is described is what device code of each NCCL reads, whatever the ranks, strides and contexts.

use crate::given::{key, own_key, Given, COUNTERS, SIGNALS, SINK_KEY};
use oxygin::gdaki::view::{window, Handler, Image, Layout, QueuePair, SetShape};
use oxygin::proxy::descriptor::layout::Table as Gin;
use oxygin::proxy::memory::Memory;
use oxygin_cli::device::gdaki::structures::{Found, Numbers, Structures, Table, NCCLS};
use proptest::prelude::*;

/// How each NCCL asks.
fn layout(nccl: &str) -> Layout {
    let (table, version) = match nccl {
        "2.29.7" => (Gin::V12, 22_907),
        "2.30.4" => (Gin::V13, 23_004),
        "2.30.7" => (Gin::V14(2), 23_007),
        "2.31.2" => (Gin::V14(2), 23_102),
        _ => (Gin::V14(2), 23_203),
    };
    Layout::choose(table, Some(version)).expect("known")
}

/// `nic_handler` as NCCL's headers number it.
fn handler_code(handler: Handler) -> u32 {
    match handler {
        Handler::CpuProxy => 1,
        Handler::Doorbell => 2,
        Handler::NoRecord => 10,
        Handler::FreeFlow => 17,
    }
}

fn compare(queue: &Found, is: &QueuePair, n: Numbers) {
    assert!(queue.is_fresh());
    for segments in 0..=n.segments {
        assert_eq!(queue.word(segments), is.number << 8 | segments);
    }
    assert_eq!(queue.rung_number(), is.number << 8);
    assert_eq!(queue.completion_number(), is.completion_number);
    assert_eq!(queue.ring(), (handler_code(is.handler), is.doorbell, is.send_record));
    assert_eq!(queue.slots(), u64::from(is.slots));
    assert_eq!(queue.memory_types(), [2, 2]);
    assert_eq!(queue.completion_rest(), (64, u64::from(is.slots) - 1, is.completion_record));
    let slots = u64::from(is.slots);
    for index in [0, 1, slots - 1, slots, 3 * slots - 1, 65_535, 65_536, 1 << 40] {
        let place = 64 * (index % slots);
        assert_eq!(queue.slot(index), is.send_queue + place);
        assert_eq!(queue.completion(index), (is.completion_queue + place, index / slots % 2 == 1));
    }
}

fn compare_words(table: &Table, which: u32, region: u64, each: u32, context: usize, ranks: usize) {
    if each == 0 {
        assert!(table.is_absent());
        return;
    }
    let before = u64::from(each) * context as u64;
    for id in [0, u64::from(each) - 1] {
        assert_eq!(table.own(id), region + 8 * (before + id));
        for peer in 0..ranks {
            assert_eq!(table.remote(id, peer, ranks), (key(which, peer), 8 * (before + id)));
        }
    }
    assert_eq!(table.own_key(), own_key(which));
}

/// Looks at everything as a kernel of that NCCL does.
fn read(given: &Given, n: Numbers, memory: &[u8]) {
    let device = Structures::copied(n, given.address, memory);
    let SetShape { rank, ranks, stride, contexts } = given.shape;
    for context in 0..contexts as usize {
        for peer in 0..ranks {
            let main = device.main(context, peer as usize).expect("an array of queue pairs");
            let companion = device.companion(context, peer as usize);
            assert_eq!(companion.is_some(), given.counters > 0);
            // Whom a stride leaves out, worked out another way than in the library.
            if rank.abs_diff(peer) % stride.max(1) != 0 {
                assert!(main.is_absent() && companion.is_none_or(|queue| queue.is_absent()));
            } else {
                compare(&main, &given.queue_pair(context, peer as usize, false), n);
                if let Some(companion) = companion {
                    compare(&companion, &given.queue_pair(context, peer as usize, true), n);
                }
            }
            let gets = device.gets(context, peer as usize);
            assert!(gets.is_none_or(|gets| gets == (0, 0)));
        }
        compare_words(&device.counters(context), 0, COUNTERS, given.counters, context, ranks as usize);
        compare_words(&device.signals(context), 1, SIGNALS, given.signals, context, ranks as usize);
        assert_eq!(device.sink_key(context), SINK_KEY);
        assert_eq!(device.dumps(context), given.dump || !n.has_mcst);
    }
    device.is_all().unwrap();
    // As many bytes as arrays on borders of 128 bytes take.
    let up = |count: usize, bytes: usize| count * (bytes * ranks as usize).next_multiple_of(128);
    let (contexts, companions) = (contexts as usize, usize::from(given.counters > 0));
    let expected = (contexts * n.context).next_multiple_of(128)
        + up(contexts * (1 + companions), n.queue_pair)
        + up(if n.has_gets { 2 * contexts } else { 0 }, 8)
        + up(2, 4);
    assert_eq!(memory.len(), expected);
}

fn given(nccl: &'static str) -> impl Strategy<Value = Given> {
    let layout = layout(nccl);
    let handlers = match layout {
        Layout::V3 => vec![Handler::Doorbell, Handler::CpuProxy, Handler::NoRecord, Handler::FreeFlow],
        _ => vec![Handler::Doorbell, Handler::CpuProxy, Handler::NoRecord],
    };
    let ranks = prop_oneof![1..=4_u32, Just(8), 5..=40_u32];
    let shape = (ranks, any::<prop::sample::Index>(), prop::sample::select(vec![0, 1, 2, 3, 4, 8]), 1..=9_u32);
    let words = || prop_oneof![Just(0_u32), 1..70_u32];
    let set = (words(), words(), 0..=15_u32, prop::sample::select(handlers), any::<bool>(), 1..1_u64 << 40);
    (shape, set).prop_map(move |((ranks, rank, stride, contexts), (counters, signals, slots, handler, dump, at))| {
        let shape = SetShape { rank: rank.index(ranks as usize) as u32, ranks, stride, contexts };
        Given { layout, shape, counters, signals, slots: 1 << slots, handler, dump, address: 128 * at }
    })
}

fn any_given() -> impl Strategy<Value = (usize, Given)> {
    (0..NCCLS.len()).prop_flat_map(|i| (Just(i), given(NCCLS[i].nccl)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn device_code_of_each_nccl_reads_what_was_described((i, given) in any_given()) {
        read(&given, NCCLS[i], &given.written());
    }

    #[test]
    fn a_window_is_its_keys(keys in prop::collection::vec(any::<u32>(), 1..40), lkey: u32, at in 1..1_u64 << 40) {
        let (address, mut memory) = (8 * at, vec![0xee; window::bytes(keys.len())]);
        window::write(&keys, lkey, &mut memory, address).unwrap();
        let word = |from: usize| u32::from_be_bytes(memory[from..from + 4].try_into().unwrap());
        let at = u64::from_le_bytes(memory[..8].try_into().unwrap()) - address;
        prop_assert_eq!(word(8), lkey);
        prop_assert!(memory[12..16].iter().all(|b| *b == 0));
        prop_assert_eq!(at as usize + 4 * keys.len(), memory.len());
        prop_assert!(keys.iter().enumerate().all(|(rank, key)| word(at as usize + 4 * rank) == *key));
    }
}

/// The shapes of real programs: DeepEP's hybrid mode, NCCL EP's two, NCCL's own kernels, each on 16 nodes of 8.
#[test]
fn the_shapes_of_programs() {
    for (stride, contexts, slots, counters, signals) in
        [(8, 129, 1024, 0, 132), (8, 33, 256, 0, 4), (1, 4, 128, 0, 257), (8, 4, 128, 64, 8192)]
    {
        for n in NCCLS {
            let shape = SetShape { rank: 77, ranks: 128, stride, contexts };
            let handler = Handler::Doorbell;
            let layout = layout(n.nccl);
            let given = Given { layout, shape, counters, signals, slots, handler, dump: true, address: 1 << 21 };
            read(&given, n, &given.written());
        }
    }
}

/// In memory as a set has it where there is no GPU: written at the CPU's address, read at the device's.
#[test]
fn memory_that_both_sides_see() {
    for n in NCCLS {
        let shape = SetShape { rank: 1, ranks: 3, stride: 1, contexts: 2 };
        let (layout, handler) = (layout(n.nccl), Handler::Doorbell);
        let mut given = Given { layout, shape, counters: 3, signals: 5, slots: 16, handler, dump: false, address: 0 };
        let (room, mut memory) = (given.room(), Memory::here().unwrap());
        let block = memory.shared(room.bytes()).unwrap();
        // SAFETY: as many bytes as were just allocated, which nobody else has.
        let bytes = unsafe { std::slice::from_raw_parts_mut(block.cpu.as_ptr(), room.bytes()) };
        given.address = block.device;
        given.describe(|of| room.write(&of, bytes, block.device)).unwrap();
        read(&given, n, bytes);
    }
}

/// A kernel compiled before 2.32 reads the same whatever stands in its padding, and one before 2.30.5 has no such byte.
#[test]
fn the_flag_of_2_32_is_where_others_have_padding() {
    let shape = SetShape { rank: 0, ranks: 2, stride: 1, contexts: 2 };
    for n in NCCLS {
        let (layout, handler) = (layout(n.nccl), Handler::Doorbell);
        let set = |dump| Given { layout, shape, counters: 0, signals: 1, slots: 2, handler, dump, address: 128 };
        let (with, without) = (set(true).written(), set(false).written());
        let differ: Vec<usize> = (0..with.len()).filter(|&i| with[i] != without[i]).collect();
        let flags = if n.has_gets { vec![68, 68 + 88] } else { vec![] };
        assert_eq!(differ, flags, "{}", n.nccl);
    }
}

#[test]
fn a_room_is_no_larger_without_what_is_not_asked_for() {
    let shape = SetShape { rank: 0, ranks: 64, stride: 8, contexts: 16 };
    let bytes = |layout, counters| Image::new(layout, shape, counters).unwrap().bytes();
    let companions = 16 * (64 * 296_usize).next_multiple_of(128);
    assert_eq!(bytes(Layout::V3, true) - bytes(Layout::V3, false), companions);
    assert!(bytes(Layout::V2, false) < bytes(Layout::V3, false));
}
