//! Private contexts beside the application's, on the fake CUDA driver: their life, copies by copy engine, and who
//! goes on where the application's queues stand.

use crate::harness::*;
use oxygin::fabric::soft::gpu::{AppThread, PinnedPools};
use oxygin::memory::key::Key;
use oxygin::memory::registry::Extent;
use oxygin_ffi::cuda::{Context, Copies, Cuda, CudaError, Kernel, MemOp, Pinned, Stream, Words};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

const INVALID_VALUE: c_int = 1;
const INVALID_CONTEXT: c_int = 201;
const ILLEGAL_ADDRESS: c_int = 700;

fn driver(_: &Fake) -> Arc<Cuda> {
    Cuda::load().expect("the fake driver")
}

fn wait(stream: &Stream) -> Result<(), CudaError> {
    let end = Instant::now() + Duration::from_secs(60);
    while !stream.is_done()? {
        assert!(Instant::now() < end, "a stream has work after 60 s");
        std::thread::yield_now();
    }
    Ok(())
}

fn copies(all: &[(u64, u64, usize)]) -> Copies {
    let mut made = Copies::default();
    all.iter().for_each(|&(to, from, bytes)| made.push(to, from, bytes));
    made
}

/// A 64-bit word where a kernel sees it.
fn word(fake: &Fake, at: u64) -> u64 {
    // SAFETY: an aligned word of device memory of the tests.
    unsafe { fake.peek(at).cast::<u64>().read_volatile() }
}

fn push(fake: &Fake, context: *mut c_void) -> c_int {
    // SAFETY: the fake has a function of this type.
    unsafe { fake.call::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxPushCurrent_v2")(context) }
}

#[test]
fn contexts_begin_and_end() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    let destroyed = fake.calls("cuCtxDestroy");
    let context = Context::create(&cuda, 2).unwrap();
    assert_eq!(cuda.current().unwrap(), None, "its creation leaves nothing current");
    let raw = {
        let _current = context.enter().unwrap();
        let (raw, device) = cuda.current().unwrap().unwrap();
        assert_eq!(device, 2);
        let primary = fake.enter(2);
        assert_ne!(cuda.current().unwrap().unwrap().0, raw);
        drop(primary);
        raw
    };
    // The primary one's end is not its own.
    fake.destroy_context(2, true);
    drop(context.enter().unwrap());
    fake.destroy_context(2, false);
    drop(context);
    assert_eq!(fake.calls("cuCtxDestroy"), destroyed + 1);
    assert_eq!(push(&fake, raw), INVALID_CONTEXT);
    fake.check();
    // SAFETY: the fake has a function of this type.
    let destroy = unsafe { fake.call::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxDestroy_v2") };
    // SAFETY: the fake knows which contexts there are.
    assert_eq!(unsafe { destroy(raw) }, INVALID_CONTEXT);
    assert_eq!(fake.violations(), 1, "destroyed twice");
}

#[test]
fn a_refused_context_is_an_error() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    fake.inject("cuCtxCreate", 2);
    let e = Context::create(&cuda, 0).err().expect("refused");
    assert_eq!((e.call, e.code), ("cuCtxCreate", 2));
    assert_eq!(cuda.current().unwrap(), None);
    assert!(Context::create(&cuda, 99).is_err(), "no such GPU");
    fake.check();
}

#[test]
fn what_lives_in_a_destroyed_context_is_told() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    let context = Context::create(&cuda, 0).unwrap();
    let current = context.enter().unwrap();
    let stream = Stream::create(&cuda).unwrap();
    drop(current);
    drop(context);
    assert_eq!(fake.violations(), 1, "a stream");
    drop(stream);

    let context = Context::create(&cuda, 0).unwrap();
    let current = context.enter().unwrap();
    let words = Words::alloc(&cuda, 64).unwrap();
    drop(current);
    drop(context);
    assert_eq!(fake.violations(), 2, "device memory");
    let _primary = fake.enter(0);
    drop(words);

    let context = Context::create(&cuda, 0).unwrap();
    let current = context.enter().unwrap();
    let pinned = Pinned::alloc(&cuda, 64).unwrap();
    drop(current);
    drop(context);
    assert_eq!(fake.violations(), 3, "pinned memory");
    drop(pinned);

    let context = Context::create(&cuda, 0).unwrap();
    {
        let _current = context.enter().unwrap();
        let _all =
            (Stream::create(&cuda).unwrap(), Words::alloc(&cuda, 64).unwrap(), Pinned::alloc(&cuda, 64).unwrap());
    }
    drop(context);
    assert_eq!(fake.violations(), 3, "all ended before");
}

/// Short copies from the host, each by copy engine but a single byte.
#[test]
fn copies_in_arrive_intact() {
    const GAP: usize = 16;
    let sizes = [1usize, 2, 3, 8, 4097, 16_384, 32_767, 32_768, 40_000];
    let fake = Fake::take();
    let cuda = driver(&fake);
    let room: usize = sizes.iter().map(|n| n + GAP).sum::<usize>() + GAP;
    let context = Context::create(&cuda, 1).unwrap();
    {
        let _current = context.enter().unwrap();
        let (pinned, to) = (Pinned::alloc(&cuda, room).unwrap(), fake.alloc(1, room, true));
        let pattern = |i: usize| (i * 7 + i / 256 * 31) as u8 | 1;
        // SAFETY: within both, which nobody else uses now.
        unsafe {
            (0..room).for_each(|i| pinned.host().add(i).write(pattern(i)));
            fake.peek(to).write_bytes(0, room);
        }
        let (mut at, mut all, mut expected) = (GAP, Copies::default(), vec![0; room]);
        for n in sizes {
            all.push(to + at as u64, pinned.device() + at as u64, n);
            (at..at + n).for_each(|i| expected[i] = pattern(i));
            at += n + GAP;
        }
        let stream = Stream::create(&cuda).unwrap();
        let calls = ["cuMemcpy2DAsync", "cuMemcpyAsync"].map(|name| fake.calls(name));
        // SAFETY: both live until the stream is done.
        unsafe { stream.copy_in(&all) }.unwrap();
        wait(&stream).unwrap();
        // SAFETY: the stream is done.
        let got = unsafe { std::slice::from_raw_parts(fake.peek(to), room) };
        assert!(got == expected, "first wrong: {:?}", (0..room).find(|&i| got[i] != expected[i]));
        // Odd ones take two.
        assert_eq!(fake.calls("cuMemcpy2DAsync") - calls[0], 3 + 2 * 3);
        assert_eq!(fake.calls("cuMemcpyAsync") - calls[1], 3);
        // Out of bounds: one byte beyond the memory, which comes in pieces of 64 KiB.
        let end = to + room.next_multiple_of(64 << 10) as u64;
        // SAFETY: the fake looks before it copies.
        let e = unsafe { stream.copy_in(&copies(&[(end - 7, pinned.device(), 8)])) }.unwrap_err();
        assert_eq!((e.call, e.code), ("cuMemcpy2DAsync", INVALID_VALUE));
        assert_eq!(fake.violations(), 1);
    }
    drop(context);
    assert_eq!(fake.violations(), 1);
}

#[test]
fn words_are_there_until_they_are_dropped() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    let context = Context::create(&cuda, 3).unwrap();
    {
        let _current = context.enter().unwrap();
        let (words, pinned) = (Words::alloc(&cuda, 64).unwrap(), Pinned::alloc(&cuda, 64).unwrap());
        assert_eq!(cuda.pointer(words.at()).unwrap().device, 3);
        let (stream, at) = (Stream::create(&cuda).unwrap(), words.at());
        // SAFETY: both live until the stream is done.
        unsafe {
            stream.mem_ops(&mut [MemOp::write64(at, 11), MemOp::write64(at + 56, 12)]).unwrap();
            stream.copy(&copies(&[(pinned.device(), at, 64)])).unwrap();
        }
        wait(&stream).unwrap();
        // SAFETY: the stream is done.
        let got = unsafe { std::slice::from_raw_parts(pinned.host().cast::<u64>(), 8) };
        assert_eq!((got[0], got[7]), (11, 12));
        fake.check();
        drop(words);
        assert!(!cuda.pointer(at).unwrap().is_device);
        // SAFETY: the fake looks before it stores.
        let e = unsafe { stream.mem_ops(&mut [MemOp::write64(at, 13)]) }.unwrap_err();
        assert_eq!(e.code, INVALID_VALUE);
        // SAFETY: the fake has a function of this type, and knows what there is to free.
        let code = unsafe { fake.call::<unsafe extern "C" fn(u64) -> c_int>(b"cuMemFree_v2")(at) };
        assert_eq!((code, fake.violations()), (INVALID_VALUE, 2));
    }
    drop(context);
    assert_eq!(fake.violations(), 2);
}

#[test]
fn set_up_while_a_kernel_runs_is_told() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    fake.kernel(1);
    let context = Context::create(&cuda, 0).unwrap();
    assert_eq!(fake.violations(), 1);
    {
        let _current = context.enter().unwrap();
        let words = Words::alloc(&cuda, 8).unwrap();
        assert_eq!(fake.violations(), 2);
        drop(words);
        assert_eq!(fake.violations(), 3);
    }
    drop(context);
    assert_eq!(fake.violations(), 4);
    fake.kernel(-1);
}

/// Where queues stand: what waits in the primary context, what does not, and that other contexts work.
#[test]
fn only_what_needs_processors_stands() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    let own = Context::create(&cuda, 0).unwrap();
    let [here, there] = [0, 1].map(|gpu| fake.alloc(gpu, 1 << 17, false));
    let primary = fake.enter(0);
    let pinned = Pinned::alloc(&cuda, 1 << 17).unwrap();
    let host = pinned.device();
    let stream = || Stream::create(&cuda).unwrap();
    let (stores, within, short, batch) = (stream(), stream(), stream(), stream());
    let (out, across, long, rows) = (stream(), stream(), stream(), stream());
    // SAFETY: all memory lives until all streams are done; `host` holds 1s, which nobody changes before.
    unsafe {
        pinned.host().write_bytes(1, 1 << 16);
        fake.block(0, true);
        stores.mem_ops(&mut [MemOp::write64(here, 5)]).unwrap();
        // By copy engine, but behind that.
        stores.copy_one(host + (1 << 16), here, 8).unwrap();
        within.copy_one(here + 8, here + 4096, 1 << 10).unwrap();
        short.copy_one(here + 2048, host, (32 << 10) - 1).unwrap();
        batch.copy(&copies(&[(here + 65_536, host, 8), (here + 65_544, host, 40_000)])).unwrap();

        out.copy_one(host + (1 << 16) + 64, here + (1 << 16) - 8, 8).unwrap();
        across.copy(&copies(&[(there, here + (1 << 16) - 8, 8), (here + (1 << 16) - 8, there + 8, 8)])).unwrap();
        long.copy_one(there + 4096, host, 32 << 10).unwrap();
        rows.copy_in(&copies(&[(there + 2048, host, 8)])).unwrap();
    }
    for stream in [&out, &across, &long, &rows] {
        wait(stream).unwrap();
    }
    assert_eq!([there + 2048, there + 4096].map(|at| word(&fake, at)), [0x0101_0101_0101_0101; 2]);
    drop(primary);

    // Another context of that GPU, and another GPU's primary one.
    {
        let _current = own.enter().unwrap();
        let (stream, began, slices) = (Stream::create(&cuda).unwrap(), Instant::now(), fake.slices());
        // SAFETY: as above.
        unsafe {
            stream.mem_ops(&mut [MemOp::write64(here + 120_000, 6)]).unwrap();
            stream.copy_one(here + 120_008, here + 120_000, 8).unwrap();
        }
        wait(&stream).unwrap();
        assert_eq!(word(&fake, here + 120_008), 6);
        assert!(began.elapsed() >= Duration::from_millis(2), "two time slices, 1 ms each");
        assert_eq!(fake.slices(), slices + 2);
        let _other = fake.enter(1);
        let stream = Stream::create(&cuda).unwrap();
        // SAFETY: as above.
        unsafe { stream.mem_ops(&mut [MemOp::write64(there + 120_000, 7)]) }.unwrap();
        wait(&stream).unwrap();
    }

    let _primary = fake.enter(0);
    let standing = [&stores, &within, &short, &batch];
    for stream in standing {
        assert_eq!(stream.is_done(), Ok(false));
    }
    assert_eq!([here, here + 2048, here + 65_536].map(|at| word(&fake, at)), [0; 3]);
    fake.block(0, false);
    for stream in standing {
        wait(stream).unwrap();
    }
    assert_eq!([here, here + 65_536].map(|at| word(&fake, at)), [5, 0x0101_0101_0101_0101]);
    // SAFETY: the streams are done.
    assert_eq!(unsafe { pinned.host().add(1 << 16).cast::<u64>().read() }, 5);
    drop(pinned);
    fake.check();
}

/// The fault that a test asks for while queues stand is that of the next piece of work, not of what stands.
#[test]
fn a_fault_goes_by_what_stands() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    let own = Context::create(&cuda, 0).unwrap();
    let at = fake.alloc(0, 64, false);
    let primary = fake.enter(0);
    let stands = Stream::create(&cuda).unwrap();
    fake.block(0, true);
    // SAFETY: memory that stays.
    unsafe { stands.mem_ops(&mut [MemOp::write64(at, 1)]) }.unwrap();
    fake.inject("gpu", ILLEGAL_ADDRESS);
    drop(primary);
    {
        let _current = own.enter().unwrap();
        let stream = Stream::create(&cuda).unwrap();
        // SAFETY: as above.
        unsafe { stream.mem_ops(&mut [MemOp::write64(at + 8, 1)]) }.unwrap();
        assert_eq!(wait(&stream).unwrap_err().code, ILLEGAL_ADDRESS);
    }
    fake.block(0, false);
    let _primary = fake.enter(0);
    wait(&stands).unwrap();
    assert_eq!([at, at + 8].map(|at| word(&fake, at)), [1, 0]);
    fake.check();
}

#[test]
fn a_kernel_does_not_start_where_queues_stand() {
    let fake = Fake::take();
    let cuda = driver(&fake);
    let own = Context::create(&cuda, 0).unwrap();
    let ptx = c".version 6.0 .target sm_70 .address_size 64 .visible .entry oxygin_copy(.param .u64 a, \
        .param .u64 b, .param .u64 c, .param .u64 d, .param .u64 e, .param .u64 f, .param .u64 g) { ret; }";
    let primary = fake.enter(0);
    let pinned = Pinned::alloc(&cuda, 1 << 16).unwrap();
    let answer = |i: usize| {
        // SAFETY: aligned words of pinned memory.
        unsafe { pinned.host().add(1 << 15).cast::<u64>().add(i * 64).read_volatile() }
    };
    // Ring, words for answers, commands done, number of the copy kernel; it leaves at once.
    let parameters = |i: u64| [pinned.device(), pinned.device() + (1 << 15) + i * 512, 0, i + 1, 0, 0, 0];
    let kernel = Kernel::load(&cuda, ptx, c"oxygin_copy").unwrap();
    let stream = Stream::create(&cuda).unwrap();
    fake.block(0, true);
    // SAFETY: the copy kernel's parameters; the memory stays until the stream is done.
    unsafe { kernel.launch(&stream, 1, 32, &mut parameters(0)) }.unwrap();
    drop(primary);
    {
        let _current = own.enter().unwrap();
        let kernel = Kernel::load(&cuda, ptx, c"oxygin_copy").unwrap();
        let stream = Stream::create(&cuda).unwrap();
        // SAFETY: as above.
        unsafe { kernel.launch(&stream, 1, 32, &mut parameters(1)) }.unwrap();
        wait(&stream).unwrap();
        assert_eq!(answer(1), 2);
    }
    assert_eq!((fake.launched(), answer(0)), (1, 0));
    fake.block(0, false);
    let _primary = fake.enter(0);
    wait(&stream).unwrap();
    assert_eq!((fake.launched(), answer(0)), (0, 1));
    drop((kernel, pinned));
    fake.check();
}

/// A window goes while another thread is in the driver with a copy to it.
#[test]
fn a_window_waits_for_a_copy_that_is_being_started() {
    let fake = Fake::take();
    let _context = fake.enter(0);
    let (cuda, at) = (driver(&fake), fake.alloc(0, 4096, false));
    let context = Arc::new(Context::of(&cuda, &cuda.pointer(at).unwrap()).unwrap());
    let pools = PinnedPools::open(0, &AppThread::start(0, context, 8).unwrap(), false, 1).unwrap();
    pools.add_window(3, Extent { base: at, len: 4096 });
    let mut buffer = pools.buffer(8).unwrap().unwrap();
    // SAFETY: a slot of at least 8 bytes, aligned.
    unsafe { buffer.host().cast::<u64>().write(7) };
    let before = fake.calls("cuMemcpy2DAsync");
    // So long does the driver think about it.
    fake.costs(0, 100_000_000, 0);
    std::thread::scope(|s| {
        s.spawn(|| {
            assert!(pools.store(&mut buffer, Key::gpu(3, false).0, at, 8));
            pools.launch();
        });
        let end = Instant::now() + Duration::from_secs(60);
        while fake.calls("cuMemcpy2DAsync") == before {
            assert!(Instant::now() < end, "no copy was started");
            std::thread::yield_now();
        }
        assert!(pools.remove_window(3, Duration::from_secs(10)));
        assert_eq!(word(&fake, at), 7, "it comes later");
    });
    fake.costs(0, 0, 0);
    drop(buffer);
    drop(pools);
    fake.check();
}
