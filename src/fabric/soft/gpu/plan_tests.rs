//! Who moves what, as tables.

use super::*;

const GPU_WINDOW: u32 = Key::gpu(1, false).0;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const LIMITS: PlanLimits = PlanLimits { kernel: 8 * KIB, has_workers: true, far: 2 * MIB, bulk: 4 * MIB };
const ON_GPU: SignalAt = SignalAt { is_on_gpu: true, is_aligned: true };
const TAKES: KernelState = KernelState::Takes(LaunchSize::Warp);
const SHARES: KernelState = KernelState::Takes(LaunchSize::Block);
const WORKS: KernelState = KernelState::Takes(LaunchSize::WorkerBlocks);

const fn window(key: u32) -> TransferEnd {
    TransferEnd::Window { key, addr: 0x1000 }
}

const fn caller(gpu: bool) -> TransferEnd {
    TransferEnd::Caller { addr: 0x2000, gpu }
}

/// A put with a signal between two GPUs, alone.
const fn far(len: u64, kernel: KernelState) -> Facts {
    Facts {
        from: caller(true),
        to: window(GPU_WINDOW),
        len,
        done: 0,
        signal: Some(ON_GPU),
        is_reading: false,
        is_open: true,
        has_turn: false,
        is_get: false,
        is_same_gpu: false,
        is_busy: false,
        windows_hold: true,
        lane_waits: false,
        crowd: 0,
        reads_signals: false,
        kernel,
        limits: LIMITS,
    }
}

/// The same within one GPU.
const fn near(len: u64, kernel: KernelState) -> Facts {
    Facts { is_same_gpu: true, ..far(len, kernel) }
}

/// Bytes of the host for a GPU window.
const fn value(len: u64, kernel: KernelState) -> Facts {
    Facts { from: caller(false), ..far(len, kernel) }
}

#[test]
fn the_stream_has_its_engines() {
    use KernelState::Absent;
    let host = TransferEnd::Window { key: 1, addr: 0x3000 };
    for (what, facts, mover) in [
        ("between GPUs", far(8, Absent), Mover::CopyEngine),
        ("between GPUs, just not bulk", far(4 * MIB - 1, Absent), Mover::CopyEngine),
        ("bulk", far(4 * MIB, Absent), Mover::BulkStream),
        ("bulk, back from being deferred", Facts { has_turn: true, ..far(4 * MIB, Absent) }, Mover::CopyEngine),
        ("bulk, half of it done", Facts { done: 2 * MIB, ..far(4 * MIB, Absent) }, Mover::CopyEngine),
        (
            "bulk, switched off",
            Facts { limits: PlanLimits { bulk: 0, ..LIMITS }, ..far(1 << 40, Absent) },
            Mover::CopyEngine,
        ),
        ("within a GPU", near(8, Absent), Mover::PinnedMemory),
        ("within a GPU, just not bulk", near(32 * MIB - 1, Absent), Mover::PinnedMemory),
        ("within a GPU, bulk", near(32 * MIB, Absent), Mover::BulkStream),
        ("within a busy GPU", Facts { is_busy: true, ..near(64 * MIB - 1, Absent) }, Mover::PinnedMemory),
        ("within a busy GPU, bulk", Facts { is_busy: true, ..near(64 * MIB, Absent) }, Mover::BulkStream),
        (
            "within a GPU, bulk set higher",
            Facts { limits: PlanLimits { bulk: 64 * MIB, ..LIMITS }, ..near(32 * MIB, Absent) },
            Mover::PinnedMemory,
        ),
        ("behind a bulk copy", Facts { lane_waits: true, ..far(8, Absent) }, Mover::Deferred),
        ("behind one, bulk", Facts { lane_waits: true, ..far(4 * MIB, Absent) }, Mover::BulkStream),
        ("behind one, back", Facts { lane_waits: true, has_turn: true, ..far(8, Absent) }, Mover::CopyEngine),
        ("a word", value(8, Absent), Mover::StreamStore),
        ("half a word", value(4, Absent), Mover::StreamStore),
        ("two bytes", value(2, Absent), Mover::PinnedMemory),
        ("a word, not aligned", Facts { to: window(GPU_WINDOW).plus(4), ..value(8, Absent) }, Mover::PinnedMemory),
        ("the last word of bytes", Facts { done: MIB, ..value(MIB + 8, Absent) }, Mover::StreamStore),
        ("bytes of the host", value(8 * MIB, Absent), Mover::PinnedMemory),
        ("bytes for the host", Facts { to: host, ..far(8, Absent) }, Mover::PinnedMemory),
        ("a signal", far(0, Absent), Mover::StreamStore),
        (
            "a signal in host memory",
            Facts { signal: Some(SignalAt { is_on_gpu: false, ..ON_GPU }), ..far(0, Absent) },
            Mover::Cpu,
        ),
        ("a marker", Facts { signal: None, ..far(0, Absent) }, Mover::Cpu),
        ("host to host", Facts { to: host, ..value(8, Absent) }, Mover::Cpu),
    ] {
        assert_eq!(plan(&facts), mover, "{what}");
    }
}

#[test]
fn the_copy_kernel_takes_what_is_small() {
    let crowded = |facts| Facts { crowd: CROWD, ..facts };
    let no_signal = |facts| Facts { signal: None, ..facts };
    for (what, facts, mover) in [
        ("a signal", far(0, TAKES), Mover::CopyKernel),
        ("a marker", no_signal(far(0, TAKES)), Mover::CopyKernel),
        ("a put", far(8, TAKES), Mover::CopyKernel),
        ("a get", Facts { from: window(GPU_WINDOW), to: caller(true), ..far(8, TAKES) }, Mover::CopyKernel),
        ("the longest", far(8 * KIB, TAKES), Mover::CopyKernel),
        ("longer", far(8 * KIB + 4, TAKES), Mover::CopyEngine),
        ("within a GPU", near(8 * KIB, TAKES), Mover::CopyKernel),
        ("within a GPU, longer", near(8 * KIB + 4, TAKES), Mover::PinnedMemory),
        ("not in words", far(9, TAKES), Mover::CopyEngine),
        ("not aligned", Facts { from: caller(true).plus(2), ..far(8, TAKES) }, Mover::CopyEngine),
        ("not open", Facts { is_open: false, ..far(8, TAKES) }, Mover::CopyEngine),
        ("a window that is gone", Facts { windows_hold: false, ..far(8, TAKES) }, Mover::CopyEngine),
        ("partly done", Facts { done: 4, ..far(8, TAKES) }, Mover::CopyEngine),
        ("its signal is being read", Facts { is_reading: true, ..far(0, TAKES) }, Mover::StreamStore),
        (
            "a signal not aligned",
            Facts { signal: Some(SignalAt { is_aligned: false, ..ON_GPU }), ..far(8, TAKES) },
            Mover::CopyEngine,
        ),
        (
            "a signal in host memory",
            Facts { signal: Some(SignalAt { is_on_gpu: false, ..ON_GPU }), ..far(8, TAKES) },
            Mover::CopyEngine,
        ),
        ("behind a bulk copy", Facts { lane_waits: true, ..far(8, TAKES) }, Mover::Deferred),
        ("bulk", far(4 * MIB, TAKES), Mover::BulkStream),
        ("in a crowd", crowded(far(256, TAKES)), Mover::CopyKernel),
        ("in a crowd, longer", crowded(far(260, TAKES)), Mover::CopyEngine),
        ("in a crowd, for all warps of a block", crowded(far(16 * KIB, SHARES)), Mover::CopyKernel),
        ("in a crowd, longer than that", crowded(far(16 * KIB + 4, SHARES)), Mover::CopyEngine),
        ("in a crowd, within a GPU", crowded(near(16 * KIB, SHARES)), Mover::CopyKernel),
        ("in a crowd, within a GPU, longer", crowded(near(16 * KIB + 4, SHARES)), Mover::PinnedMemory),
        ("one less than a crowd", Facts { crowd: CROWD - 1, ..far(260, TAKES) }, Mover::CopyKernel),
        ("one byte", value(1, TAKES), Mover::CopyKernel),
        ("three bytes", value(3, TAKES), Mover::PinnedMemory),
        ("a word", value(8, TAKES), Mover::CopyKernel),
        ("a word in a crowd", crowded(value(8, TAKES)), Mover::CopyKernel),
        ("a word, not aligned", Facts { to: window(GPU_WINDOW).plus(4), ..value(8, TAKES) }, Mover::CopyKernel),
        ("two bytes, not aligned", Facts { to: window(GPU_WINDOW).plus(1), ..value(2, TAKES) }, Mover::PinnedMemory),
    ] {
        assert_eq!(plan(&facts), mover, "{what}");
    }
}

#[test]
fn the_copy_kernel_takes_what_is_short_from_host_memory_and_to_it() {
    let crowded = |facts| Facts { crowd: CROWD, ..facts };
    let fetch = |len, kernel| Facts { from: window(GPU_WINDOW), to: caller(false), signal: None, ..far(len, kernel) };
    let limited = |facts| Facts { limits: PlanLimits { kernel: 64, ..LIMITS }, ..facts };
    let got = |len| Facts { from: window(1), to: caller(true), is_get: true, signal: None, ..far(len, TAKES) };
    for (what, facts, mover) in [
        ("the longest", value(16 * KIB, TAKES), Mover::CopyKernel),
        ("longer", value(16 * KIB + 4, TAKES), Mover::PinnedMemory),
        ("longer, with worker blocks", value(16 * KIB + 4, WORKS), Mover::PinnedMemory),
        ("not in words", value(4 * KIB + 2, TAKES), Mover::PinnedMemory),
        ("not aligned", Facts { to: window(GPU_WINDOW).plus(2), ..value(4 * KIB, TAKES) }, Mover::PinnedMemory),
        ("from wherever", Facts { from: caller(false).plus(1), ..value(4 * KIB, TAKES) }, Mover::CopyKernel),
        ("in a crowd", crowded(value(16 * KIB, WORKS)), Mover::CopyKernel),
        ("longer than twice what copies may be", limited(value(132, TAKES)), Mover::PinnedMemory),
        ("partly done", Facts { done: 4, ..value(4 * KIB, TAKES) }, Mover::PinnedMemory),
        ("for the host", fetch(16 * KIB, TAKES), Mover::CopyKernel),
        ("for the host, a word", fetch(8, TAKES), Mover::CopyKernel),
        ("for the host, longer", fetch(16 * KIB + 4, WORKS), Mover::PinnedMemory),
        ("for the host, not in words", fetch(6, TAKES), Mover::PinnedMemory),
        (
            "for the host, not aligned",
            Facts { from: window(GPU_WINDOW).plus(2), ..fetch(8, TAKES) },
            Mover::PinnedMemory,
        ),
        ("for the host, to wherever", Facts { to: caller(false).plus(1), ..fetch(8, TAKES) }, Mover::CopyKernel),
        ("for the host, in a crowd", crowded(fetch(16 * KIB, WORKS)), Mover::CopyKernel),
        // The signal would be there before the CPU has delivered the bytes.
        (
            "for the host, a get by its window",
            Facts { to: window(1), is_get: true, ..fetch(8, TAKES) },
            Mover::CopyKernel,
        ),
        ("for the host, with a signal", Facts { signal: Some(ON_GPU), ..fetch(8, TAKES) }, Mover::PinnedMemory),
        (
            "for a window of the host",
            Facts { to: TransferEnd::Window { key: 1, addr: 0x3000 }, ..fetch(8, TAKES) },
            Mover::PinnedMemory,
        ),
        ("got from the host", got(16 * KIB), Mover::CopyKernel),
        ("got from the host, a word", got(8), Mover::CopyKernel),
        ("got from the host, in a crowd", crowded(got(4 * KIB)), Mover::CopyKernel),
        ("got from the host, longer", got(16 * KIB + 4), Mover::PinnedMemory),
        ("got from the host, not in words", got(6), Mover::PinnedMemory),
        ("got from the host, not open", Facts { is_open: false, ..got(64) }, Mover::PinnedMemory),
    ] {
        assert_eq!(plan(&facts), mover, "{what}");
    }
}

#[test]
fn worker_blocks_take_what_is_large_within_a_gpu_and_lone_copies_from_others() {
    let read = |facts| Facts { reads_signals: true, ..facts };
    let crowded = |facts| Facts { crowd: CROWD, ..facts };
    let without = |facts| Facts { limits: PlanLimits { has_workers: false, ..LIMITS }, ..facts };
    let (called, awaited) = (KernelState::Callable, KernelState::Awaited);
    for (what, facts, mover) in [
        ("short", near(16 * KIB, WORKS), Mover::CopyKernel),
        ("longer", near(16 * KIB + 4, WORKS), Mover::WorkerBlocks),
        ("bulk", near(32 * MIB, WORKS), Mover::WorkerBlocks),
        ("the longest", near(512 * MIB, WORKS), Mover::WorkerBlocks),
        ("too long", near(512 * MIB + 4, WORKS), Mover::BulkStream),
        ("not in words", near(64 * KIB + 1, WORKS), Mover::PinnedMemory),
        ("a window that is gone", Facts { windows_hold: false, ..near(64 * KIB, WORKS) }, Mover::PinnedMemory),
        ("behind a bulk copy", Facts { lane_waits: true, ..near(64 * KIB, WORKS) }, Mover::Deferred),
        ("in a crowd", crowded(near(16 * KIB + 4, WORKS)), Mover::WorkerBlocks),
        ("in a crowd, short", crowded(near(16 * KIB, WORKS)), Mover::CopyKernel),
        ("switched off", without(near(64 * KIB, WORKS)), Mover::PinnedMemory),
        ("from another GPU", far(2 * MIB, WORKS), Mover::WorkerBlocks),
        ("from another GPU, longer", far(2 * MIB + 4, WORKS), Mover::CopyEngine),
        ("from another GPU, in a crowd", crowded(far(64 * KIB, WORKS)), Mover::CopyEngine),
        ("the same where signals are read", read(crowded(far(CROWDED_FAR, WORKS))), Mover::WorkerBlocks),
        ("the same, longer", read(crowded(far(CROWDED_FAR + 4, WORKS))), Mover::CopyEngine),
        ("longer and not in a crowd", read(far(CROWDED_FAR + 4, WORKS)), Mover::WorkerBlocks),
        ("none yet: worth a launch", near(16 * KIB, called), Mover::WorkerBlocks),
        ("none yet: not worth one", near(16 * KIB - 4, called), Mover::PinnedMemory),
        ("none yet: in a crowd", crowded(near(2 * KIB, called)), Mover::WorkerBlocks),
        ("none yet: from another GPU", far(MIB, called), Mover::CopyEngine),
        ("none yet: not open", Facts { is_open: false, ..near(MIB, called) }, Mover::PinnedMemory),
        ("none yet: behind a bulk copy", Facts { lane_waits: true, ..near(MIB, called) }, Mover::WorkerBlocks),
        ("none yet: partly done", Facts { done: KIB, ..near(MIB, called) }, Mover::PinnedMemory),
        ("launched: the shortest", near(2 * KIB, awaited), Mover::WorkerBlocks),
        ("launched: shorter", near(2 * KIB - 4, awaited), Mover::PinnedMemory),
        ("launched: from another GPU", far(MIB, awaited), Mover::CopyEngine),
        ("launched: a signal", near(0, awaited), Mover::StreamStore),
    ] {
        assert_eq!(plan(&facts), mover, "{what}");
    }
}

#[test]
fn what_a_block_does_by_itself_waits_for_no_worker_blocks() {
    let wanted = [2 * KIB, 16 * KIB, 16 * KIB + 4, MIB].map(|len| near(len, KernelState::Callable).wanted_size());
    assert_eq!(wanted[..2], [LaunchSize::Block; 2]);
    assert_eq!(wanted[2..], [LaunchSize::WorkerBlocks; 2]);
}

#[test]
fn windows_are_looked_up_wherever_they_can_matter() {
    for kernel in [KernelState::Absent, KernelState::Callable, KernelState::Awaited, TAKES, SHARES, WORKS] {
        for len in [0, 8, KIB, 2 * KIB, 16 * KIB, MIB, 64 * MIB] {
            for facts in [far(len, kernel), near(len, kernel)] {
                let other = Facts { windows_hold: false, ..facts };
                assert!(plan(&facts) == plan(&other) || facts.needs_windows(), "{kernel:?} {len}");
            }
        }
    }
}

#[test]
fn an_operation_on_the_stream_says_whether_the_copy_kernel_were_better() {
    for (what, facts, suits) in [
        ("a signal", far(0, KernelState::Absent), Suits::Kernel),
        ("a put", far(KIB, KernelState::Absent), Suits::Kernel),
        ("for more warps than one", far(KIB + 4, KernelState::Absent), Suits::With(LaunchSize::Block)),
        ("the longest for a block", far(16 * KIB, KernelState::Absent), Suits::With(LaunchSize::Block)),
        ("longer", far(16 * KIB + 4, KernelState::Absent), Suits::With(LaunchSize::WorkerBlocks)),
        ("the longest", far(2 * MIB, KernelState::Absent), Suits::With(LaunchSize::WorkerBlocks)),
        ("too long", far(2 * MIB + 4, KernelState::Absent), Suits::No),
        ("in a crowd", Facts { crowd: CROWD, ..far(260, KernelState::Absent) }, Suits::No),
        (
            "more in a crowd",
            Facts { crowd: CROWD, ..far(16 * KIB, KernelState::Absent) },
            Suits::With(LaunchSize::Block),
        ),
        ("more in a crowd, but for that", Facts { crowd: CROWD, ..far(16 * KIB + 4, KernelState::Absent) }, Suits::No),
        ("not open", Facts { is_open: false, ..far(8, KernelState::Absent) }, Suits::No),
        ("a value", value(4, KernelState::Absent), Suits::Kernel),
        ("bytes of the host", value(KIB, KernelState::Absent), Suits::Kernel),
        ("more of them", value(16 * KIB, KernelState::Absent), Suits::With(LaunchSize::Block)),
        ("in a crowd", Facts { crowd: CROWD, ..value(16 * KIB, KernelState::Absent) }, Suits::With(LaunchSize::Block)),
        ("too many", value(16 * KIB + 4, KernelState::Absent), Suits::No),
    ] {
        assert_eq!(facts.suits_kernel(), suits, "{what}");
    }
    let first = is_worth_a_launch(3, None);
    let (close, apart) = (is_worth_a_launch(1, Some(CLOSE)), is_worth_a_launch(3, Some(2 * CLOSE)));
    assert_eq!((first, close, apart, is_worth_a_launch(4, None)), (false, true, false, true));
}

#[test]
fn late_stores_go_by_copy_engine_where_they_are_few() {
    for (were_late, needs_stream, count, mover) in [
        (false, false, 1, Mover::StreamStore),
        (true, false, FEW_STORES, Mover::CopyEngine),
        (true, false, FEW_STORES + 1, Mover::StreamStore),
        (true, true, 1, Mover::StreamStore),
    ] {
        let stores = Stores { were_late, needs_stream, count };
        assert_eq!(stores.mover(), mover, "{stores:?}");
    }
}

#[test]
fn a_submission_starts_when_it_is_worth_its_cost() {
    let at = |in_flight, queued, left, from_gpu| Waiting { in_flight, most: 2, queued, gather: 8, left, from_gpu };
    for (waiting, is_due) in [
        (at(0, 0, 0, false), false),
        (at(0, 1, 8, true), true),
        (at(1, 7, 8, true), false),
        (at(1, 8, 8, true), true),
        (at(1, 1, 0, true), true),
        (at(1, 1, 8, false), true),
        (at(1, 1, 9, false), false),
        (at(1, 1, LARGE, true), true),
        (at(2, 8, LARGE, true), false),
    ] {
        assert_eq!(waiting.is_due(), is_due, "{waiting:?}");
    }
}
