//! A CUDA driver for tests, loaded in place of libcuda.so.1 by `OXYGIN_LIBCUDA`.
//!
//! Device memory is mapped without access at the address that the application sees, and once more, writable, where only
//! this library looks: code under test that touches it with the CPU dies. Streams run on threads of their own. What a
//! real driver would forbid, or what would hang behind a kernel that spins, is an error or a *violation*, which tests
//! read at their end.

#![allow(non_snake_case, reason = "the driver's own names")]
#![allow(clippy::missing_safety_doc, reason = "the driver's functions; its manual says what they need")]
#![allow(missing_docs, reason = "as above")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "each relies on what the driver's manual asks of its callers")]

mod busy;
mod contexts;
mod copies;
mod copy_kernel;
mod devices;
mod dmabuf;
mod event;
mod kernel;
mod lane_counts;
mod lane_effect;
mod lane_entry;
mod lane_kernel;
mod lane_longer;
mod lane_record;
mod lane_slots;
mod managed;
mod memory;
mod random;
mod registers;
mod share;
mod stream;
mod trial_kernel;
mod world;

use oxygin_ffi::cuda::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stream::{FakeStream, Work};
use world::{context_of, current, device_of, world, INVALID_CONTEXT, POP, PUSH};

/// What a call costs its caller.
fn spin(ns: u64) {
    if ns > 0 {
        let end = Instant::now() + Duration::from_nanos(ns);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    }
}

/// Stores an answer.
unsafe fn give<T>(place: *mut T, value: T) -> CUresult {
    // SAFETY: the caller of the driver passes a place for the answer.
    unsafe { place.write(value) };
    CUDA_SUCCESS
}

/// The injected error of a call, if its turn has come.
macro_rules! call {
    ($name:literal) => {
        let spent = world().count($name);
        crate::spin(spent);
        let code = world().injected($name);
        if code != CUDA_SUCCESS {
            return code;
        }
    };
}

/// A call that needs a current context.
macro_rules! in_context {
    ($name:literal) => {
        call!($name);
        if current() == 0 {
            world().violation(concat!($name, " without a current context"));
            return INVALID_CONTEXT;
        }
        crate::busy::enter_current();
        if crate::world::spoils_captures() {
            world().violation(concat!($name, " while a stream is captured"));
            return crate::world::CAPTURE_UNSUPPORTED;
        }
    };
}

/// A call that waits for kernels.
macro_rules! blocking {
    ($name:literal) => {
        in_context!($name);
        if world().kernels() > 0 {
            world().violation(concat!($name, " while a kernel runs"));
        }
    };
}

pub(crate) use {blocking, call, in_context};

#[no_mangle]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> CUresult {
    call!("cuInit");
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    unsafe { give(version, 13_000) }
}

#[no_mangle]
pub unsafe extern "C" fn cuGetErrorName(code: CUresult, name: *mut *const c_char) -> CUresult {
    let text = match code {
        1 => c"CUDA_ERROR_INVALID_VALUE",
        201 => c"CUDA_ERROR_INVALID_CONTEXT",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => return CUDA_ERROR_INVALID_VALUE,
    };
    unsafe { give(name, text.as_ptr()) }
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: CUdevice) -> CUresult {
    /// `CU_DEVICE_ATTRIBUTE_PCI_BUS_ID`, `_PCI_DEVICE_ID`, `_PCI_DOMAIN_ID`.
    const PCI: [c_int; 3] = [33, 34, 50];
    let first_bus = FIRST_BUS.load(std::sync::atomic::Ordering::SeqCst);
    match which {
        bus if bus == PCI[0] && first_bus > 0 => unsafe { give(value, first_bus + device) },
        other if PCI.contains(&other) && first_bus > 0 => unsafe { give(value, 0) },
        CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED => unsafe { give(value, world().can_add() as c_int) },
        CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS => unsafe { give(value, managed::is_concurrent() as c_int) },
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED => unsafe { give(value, dmabuf::is_supported() as c_int) },
        _ => CUDA_ERROR_INVALID_VALUE,
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    call!("cuDevicePrimaryCtxRetain");
    unsafe { give(context, context_of(device)) }
}

#[no_mangle]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: CUdevice) -> CUresult {
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> CUresult {
    unsafe { give(mode, world::exchange_capture_mode(*mode)) }
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    unsafe { give(context, current() as CUcontext) }
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    call!("cuCtxPushCurrent");
    if !world().is_context(context as usize) {
        return INVALID_CONTEXT;
    }
    busy::enter(context as usize);
    PUSH(context as usize);
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult {
    world().count("cuCtxPopCurrent");
    unsafe { give(context, POP() as CUcontext) }
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut CUdevice) -> CUresult {
    call!("cuCtxGetDevice");
    if current() == 0 {
        return INVALID_CONTEXT;
    }
    unsafe { give(device, device_of(current())) }
}

#[no_mangle]
pub unsafe extern "C" fn cuPointerGetAttributes(
    n: c_uint,
    which: *mut c_uint,
    places: *mut *mut c_void,
    at: CUdeviceptr,
) -> CUresult {
    call!("cuPointerGetAttributes");
    let found = world().find(at, 1);
    for i in 0..n as usize {
        unsafe {
            let place = *places.add(i);
            match *which.add(i) {
                CU_POINTER_ATTRIBUTE_CONTEXT => {
                    let known = found.filter(|m| m.kind != memory::Kind::Mapped).map(|m| context_of(m.device));
                    place.cast::<CUcontext>().write(known.unwrap_or(std::ptr::null_mut()));
                }
                CU_POINTER_ATTRIBUTE_MEMORY_TYPE => place.cast::<c_uint>().write(match found {
                    Some(memory) if memory.device == memory::HOST => CU_MEMORYTYPE_HOST,
                    Some(_) => CU_MEMORYTYPE_DEVICE,
                    None if KNOWN_HOST.load(Ordering::Relaxed) == at => CU_MEMORYTYPE_HOST,
                    None => 0,
                }),
                CU_POINTER_ATTRIBUTE_IS_MANAGED => place.cast::<u8>().write(found.is_some_and(|m| m.managed) as u8),
                CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
                    place.cast::<bool>().write(dmabuf::is_rdma_capable())
                }
                CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => place.cast::<c_int>().write(found.map_or(-2, |m| m.device)),
                _ => return CUDA_ERROR_INVALID_VALUE,
            }
        }
    }
    CUDA_SUCCESS
}

/// Where host memory is that the driver knows as its own.
static KNOWN_HOST: AtomicU64 = AtomicU64::new(0);

/// The driver knows host memory at `at` as its own.
#[no_mangle]
pub extern "C" fn fake_know_host(at: u64) {
    KNOWN_HOST.store(at, Ordering::Relaxed);
}

/// The highest priority of this driver's streams; real ones have -5.
const HIGHEST: c_int = -3;

#[no_mangle]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(lowest: *mut c_int, highest: *mut c_int) -> CUresult {
    in_context!("cuCtxGetStreamPriorityRange");
    unsafe {
        lowest.write(0);
        give(highest, HIGHEST)
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) -> CUresult {
    in_context!("cuStreamCreateWithPriority");
    if flags != CU_STREAM_NON_BLOCKING {
        world().violation("a stream in order with the legacy stream");
    }
    if priority != HIGHEST {
        world().violation("a stream that is not of the highest priority");
    }
    let fault = stream::fault_of(current());
    if fault != CUDA_SUCCESS {
        return fault;
    }
    unsafe { give(stream, FakeStream::start(current()) as CUstream) }
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    call!("cuStreamDestroy");
    unsafe { FakeStream::end(stream.cast()) };
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamQuery(stream: CUstream) -> CUresult {
    in_context!("cuStreamQuery");
    unsafe { (*stream.cast::<FakeStream>()).query() }
}

/// Checks a stream's context and queues work.
unsafe fn enqueue(name: &str, stream: CUstream, work: Work) -> CUresult {
    let stream = unsafe { &*stream.cast::<FakeStream>() };
    if stream.context != current() {
        world().violation(&format!("{name} on a stream of another context"));
        return INVALID_CONTEXT;
    }
    stream.push(work)
}

#[no_mangle]
pub unsafe extern "C" fn cuStreamBatchMemOp_v2(
    stream: CUstream,
    n: c_uint,
    ops: *mut MemOp,
    flags: c_uint,
) -> CUresult {
    in_context!("cuStreamBatchMemOp");
    // "Must be less than 256", says the manual.
    if n == 0 || n >= 256 || flags != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let ops = unsafe { std::slice::from_raw_parts(ops, n as usize) }.to_vec();
    unsafe { store(stream, ops) }
}

unsafe fn store(stream: CUstream, ops: Vec<MemOp>) -> CUresult {
    let (device, can_add) = (device_of(current()), world().can_add());
    for op in &ops {
        let ok = match op.parse() {
            Some((at, MemOpKind::Write32(_))) => at % 4 == 0 && world().reach(at, 4, device),
            Some((at, MemOpKind::Write64(_))) => at % 8 == 0 && world().reach(at, 8, device),
            Some((at, MemOpKind::Add64(_))) => can_add && at % 8 == 0 && world().reach(at, 8, device),
            None => false,
        };
        if !ok {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    unsafe { enqueue("cuStreamBatchMemOp", stream, Work::Ops(ops)) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostAlloc(place: *mut *mut c_void, n: usize, _flags: c_uint) -> CUresult {
    blocking!("cuMemHostAlloc");
    unsafe { give(place, world().pin(current(), n).cast()) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemFreeHost(host: *mut c_void) -> CUresult {
    blocking!("cuMemFreeHost");
    let bytes = world().unpin(host as u64);
    if kernel::use_memory(host as u64, bytes) {
        world().violation("cuMemFreeHost of memory that a launched kernel works on");
    }
    CUDA_SUCCESS
}

// What tests use.

/// Device memory on GPU `device`, as ncclMemAlloc makes it. `private`: mapped for that GPU alone and not to be
/// exported, as NCCL allocates signals.
#[no_mangle]
pub extern "C" fn fake_alloc(device: c_int, bytes: usize, private: bool) -> u64 {
    world().alloc(device, bytes, private)
}

/// Device memory as cudaMalloc makes it, or cudaMallocManaged.
#[no_mangle]
pub extern "C" fn fake_malloc(device: c_int, bytes: usize, managed: bool) -> u64 {
    world().malloc(device, bytes, managed)
}

/// Ends all memory that tests have allocated so far.
#[no_mangle]
pub extern "C" fn fake_free_all() {
    world().free_of_tests();
}

/// Where the GPU sees device memory: what a kernel of the tests works on.
#[no_mangle]
pub extern "C" fn fake_peek(at: u64) -> *mut u8 {
    world().find(at, 1).map_or(std::ptr::null_mut(), |m| m.at(at))
}

/// The context of a device, to make current.
#[no_mangle]
pub extern "C" fn fake_context(device: c_int) -> CUcontext {
    context_of(device)
}

/// The application of GPU `device` enters a call that waits for its kernels, or leaves it: until then every call in
/// that GPU's primary context waits, and every copy to or from its memory that is no ncclMemAlloc's.
#[no_mangle]
pub extern "C" fn fake_busy(device: c_int, on: bool) {
    busy::set(context_of(device) as usize, on);
}

/// How many calls have waited for that, but for those of the library's thread for the application's context.
#[no_mangle]
pub extern "C" fn fake_waits() -> u64 {
    busy::waits()
}

/// The PCI bus of device 0; 0: nothing is said of where devices are.
static FIRST_BUS: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(0);

/// Device 0 of this process is on this PCI bus, and the others behind it: two processes with different ones see
/// different GPUs by the same numbers, as with `CUDA_VISIBLE_DEVICES`.
#[no_mangle]
pub extern "C" fn fake_first_bus(bus: c_int) {
    FIRST_BUS.store(bus, std::sync::atomic::Ordering::SeqCst);
}

/// The application captures a stream, or no longer. In the mode that captures begin with, calls of other threads
/// spoil it.
#[no_mangle]
pub extern "C" fn fake_capture(on: bool) {
    world::CAPTURED.store(on, std::sync::atomic::Ordering::SeqCst);
}

/// A kernel starts (1) or ends (-1).
#[no_mangle]
pub extern "C" fn fake_kernel(change: c_int) {
    world().kernel(change);
}

/// Makes the `after`-th next call of a function fail with `code`; the name "gpu" is the streams' own work, of which all
/// that was queued before is done first, and "lanes of N" what the lane kernel of GPU N takes.
#[no_mangle]
pub unsafe extern "C" fn fake_inject(name: *const c_char, after: c_uint, code: CUresult) {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    if name == "gpu" {
        fake_rest();
    }
    world().inject(name, after, code);
}

/// Forgets injected errors whose turn has not come, and those that contexts have.
#[no_mangle]
pub extern "C" fn fake_calm() {
    stream::forget_faults();
    world().calm();
}

/// A device's primary context, destroyed, refuses to be pushed.
#[no_mangle]
pub extern "C" fn fake_destroy_context(device: c_int, destroyed: bool) {
    world().destroy(device, destroyed);
}

/// Whether streams can add, and how long each piece of work takes, in µs.
#[no_mangle]
pub extern "C" fn fake_settings(can_add: bool, delay_us: u64) {
    world().set(can_add, delay_us);
}

/// What things cost, ns: each call and each copy its caller's time; `gpu` passes until the GPU begins with a piece of
/// work, and it takes the copies' time for copies. All 0: nothing but what `fake_settings` says.
#[no_mangle]
pub extern "C" fn fake_costs(call: u64, copy: u64, gpu: u64) {
    world().set_costs(call, copy, gpu);
}

/// Copies of so many bytes and more wait until this is called with 0.
#[no_mangle]
pub extern "C" fn fake_hold(bytes: usize) {
    world().hold(bytes);
}

/// Whether a copy waits for that now.
#[no_mangle]
pub extern "C" fn fake_is_holding() -> bool {
    world().is_holding()
}

/// The application has something queued behind a kernel that spins on GPU `device`: until this is called with `false`
/// nothing that needs the GPU's processors (kernels, stores, copies within the GPU, short ones from the host) begins in
/// its primary context, nor what is behind that in the same stream; in other contexts it waits for a time slice. What
/// copy engines do goes on.
#[no_mangle]
pub extern "C" fn fake_block(device: c_int, on: bool) {
    world().block(device, on);
}

/// How often work had to wait for a time slice because of `fake_block` since the process began.
#[no_mangle]
pub extern "C" fn fake_slices() -> usize {
    world().slices()
}

/// Waits until no stream has work, but for kernels and for what stands.
#[no_mangle]
pub extern "C" fn fake_rest() {
    while stream::are_busy() {
        std::thread::yield_now();
    }
}

/// How often a function was called since the process began.
#[no_mangle]
pub unsafe extern "C" fn fake_calls(name: *const c_char) -> u64 {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    world().calls(&name)
}

/// How many violations there were; they are printed as they happen.
#[no_mangle]
pub extern "C" fn fake_violations() -> usize {
    world().violations().len()
}

/// The words of the violation with this number: so many bytes of them, up to `room`.
#[no_mangle]
pub unsafe extern "C" fn fake_violation(number: usize, into: *mut u8, room: usize) -> usize {
    let mut world = world();
    let words = world.violations().get(number).map_or("", |words| words);
    let n = words.len().min(room);
    unsafe { into.copy_from_nonoverlapping(words.as_ptr(), n) };
    n
}
