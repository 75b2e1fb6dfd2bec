//! GPU memory of the fake CUDA driver for the ranks of `common`.

#![allow(dead_code, reason = "a program that has it for itself uses a part")]

pub mod board;
pub mod copy_kernel;
mod end;
pub mod lanes;
pub mod memory;
pub mod plan;
pub mod tcp;
pub mod traffic;

use crate::support::common::{ok, Rank, Window};
use crate::support::device::wait;
use crate::support::turn::{self, Turn};
use crate::support::violations;
use nccl_plugin_api::{NcclResult, MR_FLAG_FORCE_SO, MR_FLAG_SIGNALS_NEVER_RESET, PTR_CUDA};
pub use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void, CString};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Flags of a window whose signals kernels never reset.
pub const NEVER_RESET: u64 = MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET;

/// The fake driver, its settings at their defaults. One test at a time has it.
pub struct Fake {
    library: libloading::Library,
    violations: usize,
    _turn: Turn,
}

/// A context that is current.
pub struct Entered<'a>(&'a Fake);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut was: *mut c_void = null_mut();
        // SAFETY: the fake has a function of this type.
        unsafe { self.0.call::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>(b"cuCtxPopCurrent_v2")(&mut was) };
    }
}

impl Fake {
    /// Waits for the turn and takes the fake.
    pub fn take() -> Self {
        let turn = turn::take();
        let exe = std::env::current_exe().unwrap();
        let path = exe.parent().unwrap().join("libfake_cuda.so");
        assert!(path.exists(), "{} is not there; build the package fake-cuda", path.display());
        std::env::set_var("OXYGIN_LIBCUDA", &path);
        std::env::set_var("OXYGIN_FABRIC", "soft");
        for name in ["OXYGIN_SOFT_TRANSPORT", "OXYGIN_TCP_STRIPES", "OXYGIN_TCP_THREADS"] {
            std::env::remove_var(name);
        }
        // SAFETY: our own library.
        let library = unsafe { libloading::Library::new(path) }.unwrap();
        let mut fake = Self { library, violations: 0, _turn: turn };
        fake.settings(false, 3);
        fake.costs(0, 0, 0);
        fake.hold(0);
        (0..4).for_each(|gpu| fake.block(gpu, false));
        fake.access(0);
        fake.hold_kernels(false);
        fake.capture(false);
        fake.hold_launches(0);
        fake.reset_lanes();
        fake.slow_queries(0);
        fake.kernel_limits(0, 0);
        fake.calm();
        fake.set_issue("");
        std::env::remove_var("OXYGIN_ENGINE");
        std::env::remove_var("OXYGIN_GDAKI_RINGING");
        std::env::remove_var("OXYGIN_STALL");
        fake.violations = violations::count(&fake.library);
        fake
    }

    /// Has the ranks of the next job treat each other as processes of one host.
    pub fn set_transport(&self, transport: &str) {
        std::env::set_var("OXYGIN_SOFT_TRANSPORT", transport);
    }

    /// # Safety
    /// The fake has a function of this name and type.
    pub unsafe fn call<F: Copy>(&self, name: &[u8]) -> F {
        // SAFETY: passed on.
        unsafe { *self.library.get::<F>(name).unwrap() }
    }

    /// How often this test has used the driver in a way that a real one would not stand.
    pub fn violations(&self) -> usize {
        violations::count(&self.library) - self.violations
    }

    /// Fails the test if it ever did.
    pub fn check(&self) {
        violations::check(&self.library, self.violations);
    }

    /// Whether streams add, and what each piece of work takes, µs. More than 0 is at least as long as a thread sleeps,
    /// some 60 µs, and a lone copy has several pieces: two such submissions are then further apart than the 100 µs
    /// within which they call for the copy kernel.
    pub fn settings(&self, can_add: bool, delay_us: u64) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(bool, u64)>(b"fake_settings")(can_add, delay_us) }
    }

    /// What a call, a copy, and the GPU's beginning cost, ns.
    pub fn costs(&self, call: u64, copy: u64, gpu: u64) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(u64, u64, u64)>(b"fake_costs")(call, copy, gpu) }
    }

    /// Copies of so many bytes and more wait until this is called with 0.
    pub fn hold(&self, bytes: usize) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(usize)>(b"fake_hold")(bytes) }
    }

    /// Whether a copy waits for that now.
    pub fn is_holding(&self) -> bool {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> bool>(b"fake_is_holding")() }
    }

    /// The queues of a GPU's primary context stand, or go again: what needs the GPU's processors waits there, and in
    /// other contexts for a time slice.
    pub fn block(&self, gpu: c_int, on: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int, bool)>(b"fake_block")(gpu, on) }
    }

    /// The application of a GPU enters a call that waits for its kernels, or leaves it: whoever calls in its context
    /// waits.
    pub fn busy(&self, gpu: c_int, on: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int, bool)>(b"fake_busy")(gpu, on) }
    }

    /// How many calls have waited for that so far, but for those of the library's thread for the application's context.
    pub fn waits(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_waits")() }
    }

    /// How often work waited for a time slice because of that, so far.
    pub fn slices(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_slices")() }
    }

    /// Waits until no stream has work that can run, kernels aside.
    pub fn rest(&self) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn()>(b"fake_rest")() }
    }

    /// Who may touch memory from `alloc` with loads and stores from here on: all GPUs (0), its own (1).
    pub fn access(&self, who: c_int) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int)>(b"fake_access")(who) }
    }

    /// The application has a fault of its own: a GPU's primary context has this error from now on.
    pub fn fault(&self, gpu: c_int, code: c_int) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int, c_int)>(b"fake_fault")(gpu, code) }
    }

    /// The contexts that the library has made so far have this error from now on.
    pub fn lose_private_contexts(&self, code: c_int) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int)>(b"fake_lose_private_contexts")(code) }
    }

    /// Launched kernels do not start, or start again.
    pub fn hold_kernels(&self, held: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(bool)>(b"fake_hold_kernels")(held) }
    }

    /// So many of the next launches do not start; 0: those that did not do so now.
    pub fn hold_launches(&self, n: usize) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(usize)>(b"fake_hold_launches")(n) }
    }

    /// How many launches do not start because of that.
    pub fn held_launches(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_held_launches")() }
    }

    /// What a copy kernel's command takes, µs, and after at most how many it ends, at random; 0: when its time is over.
    pub fn kernel_limits(&self, command_us: u64, most_commands: u64) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(u64, u64)>(b"fake_kernel_limits")(command_us, most_commands) }
    }

    /// Copy kernels that run end now.
    pub fn end_kernels(&self) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn()>(b"fake_end_kernels")() }
    }

    /// Kernels that were launched and have not ended.
    pub fn launched(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_launched")() }
    }

    /// Commands that copy kernels have done so far.
    pub fn commands(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_commands")() }
    }

    /// How many of them their worker blocks did.
    pub fn worker_commands(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_worker_commands")() }
    }

    /// How many of them were counted at an index of their poster's.
    pub fn credits(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_credits")() }
    }

    /// How many launches had no worker blocks so far.
    pub fn launches_without_workers(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_launches_without_workers")() }
    }

    /// How many of those had a block of more warps than one.
    pub fn launches_of_a_block(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_launches_of_a_block")() }
    }

    /// How often a driver function was called so far.
    pub fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe { self.call::<unsafe extern "C" fn(*const c_char) -> u64>(b"fake_calls")(name.as_ptr()) }
    }

    /// How the ranks of the next jobs use the driver; without a lane kernel, unless the words say something of it.
    pub fn set_issue(&self, how: &str) {
        std::env::set_var("OXYGIN_GPU_ISSUE", lanes::words(how));
    }

    /// The driver knows host memory there as its own.
    pub fn know_host(&self, at: u64) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(u64)>(b"fake_know_host")(at) }
    }

    /// The application captures a stream, or no longer.
    pub fn capture(&self, on: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(bool)>(b"fake_capture")(on) }
    }

    /// A kernel starts (1) or ends (-1).
    pub fn kernel(&self, change: c_int) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int)>(b"fake_kernel")(change) }
    }

    /// The next call of a function fails.
    pub fn inject(&self, name: &str, code: c_int) {
        self.inject_after(name, 0, code);
    }

    fn calm(&self) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn()>(b"fake_calm")() }
    }

    /// A function fails after `after` more calls of it.
    pub fn inject_after(&self, name: &str, after: u32, code: c_int) {
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe {
            self.call::<unsafe extern "C" fn(*const c_char, c_uint, c_int)>(b"fake_inject")(name.as_ptr(), after, code)
        }
    }

    /// Destroys the context of a GPU, or puts it back.
    pub fn destroy_context(&self, gpu: c_int, destroyed: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int, bool)>(b"fake_destroy_context")(gpu, destroyed) }
    }

    /// Makes a GPU's context current on this thread.
    pub fn enter(&self, gpu: c_int) -> Entered<'_> {
        // SAFETY: as above.
        unsafe {
            let context = self.call::<extern "C" fn(c_int) -> *mut c_void>(b"fake_context")(gpu);
            assert_eq!(self.call::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxPushCurrent_v2")(context), 0);
        }
        Entered(self)
    }

    /// Device memory, as ncclMemAlloc makes it, or as NCCL allocates signals.
    pub fn alloc(&self, gpu: c_int, bytes: usize, private: bool) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int, usize, bool) -> u64>(b"fake_alloc")(gpu, bytes, private) }
    }

    /// Device memory, as cudaMalloc or cudaMallocManaged makes it.
    pub fn malloc(&self, gpu: c_int, bytes: usize, managed: bool) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int, usize, bool) -> u64>(b"fake_malloc")(gpu, bytes, managed) }
    }

    fn register(&self, r: &Rank, gpu: c_int, words: usize, flags: u64, private: bool) -> GpuWindow {
        self.register_at(r, self.alloc(gpu, words * 8, private), words, flags)
    }

    /// Where a kernel sees device memory.
    pub fn peek(&self, at: u64) -> *mut u8 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(u64) -> *mut u8>(b"fake_peek")(at) }
    }

    /// A window over device memory.
    pub fn register_at(&self, r: &Rank, at: u64, words: usize, flags: u64) -> GpuWindow {
        let mut window = r.not_registered(0);
        // SAFETY: as above; device memory that stays.
        unsafe {
            let result =
                T.reg_mr_sym.unwrap()(r.coll, at as *mut c_void, words * 8, PTR_CUDA, flags, &mut window.handle);
            ok(result);
            GpuWindow { window, alias: self.peek(at).cast(), words }
        }
    }

    /// Allocations side by side, made so that they can be exported or not.
    pub fn segments(&self, gpu: c_int, sizes: &[usize], exportable: bool) -> u64 {
        // SAFETY: as above.
        unsafe {
            let alloc =
                self.call::<unsafe extern "C" fn(c_int, *const usize, usize, bool) -> u64>(b"fake_alloc_segments");
            alloc(gpu, sizes.as_ptr(), sizes.len(), exportable)
        }
    }

    /// Pieces of other processes' memory that are mapped here.
    pub fn foreign(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_foreign")() }
    }

    /// Copies that this process's streams have made.
    pub fn copies(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_copies")() }
    }

    /// Stores and additions that this process's streams have made, flags among them.
    pub fn stores(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_stores")() }
    }

    /// A window in GPU memory that every GPU reaches.
    pub fn window(&self, r: &Rank, gpu: c_int, words: usize, flags: u64) -> GpuWindow {
        self.register(r, gpu, words, flags, false)
    }

    /// A window in memory of one GPU alone, as NCCL's signals are.
    pub fn signals(&self, r: &Rank, gpu: c_int, words: usize, flags: u64) -> GpuWindow {
        self.register(r, gpu, words, flags, true)
    }
}

/// A window in GPU memory; `get` and `set` are what kernels do.
pub struct GpuWindow {
    window: Window,
    alias: *mut u64,
    words: usize,
}

impl GpuWindow {
    /// For the calls of `Rank`.
    pub fn as_window(&self) -> &Window {
        &self.window
    }

    /// As a kernel sees it.
    pub fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.words);
        // SAFETY: inside the mapping, aligned.
        unsafe { AtomicU64::from_ptr(self.alias.add(i)) }
    }

    /// A kernel reads.
    pub fn get(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Acquire)
    }

    /// A kernel writes.
    pub fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Release);
    }

    /// A kernel waits for a signal; this rank's progress thread meanwhile makes progress.
    pub fn wait(&self, r: &Rank, i: usize, value: u64) {
        r.await_signal(i, value, || self.get(i));
    }
}

/// Where a test's signals live and what may happen to them.
#[derive(Clone, Copy, Debug)]
pub enum Signals {
    /// Counted by the engine.
    NeverReset,
    /// Added to by the stream.
    Added,
    /// Read and written back.
    ReadBack,
}

/// All of them.
pub const KINDS: [Signals; 3] = [Signals::NeverReset, Signals::Added, Signals::ReadBack];

impl Signals {
    /// Sets the fake up for them. Returns the flags to register their window with.
    pub fn set_up(self, fake: &Fake) -> u64 {
        fake.settings(matches!(self, Self::Added), 3);
        match self {
            Self::NeverReset => NEVER_RESET,
            _ => MR_FLAG_FORCE_SO,
        }
    }
}

/// Waits until an operation has come out; whether well.
pub fn comes_out(r: &Rank, request: *mut c_void) -> bool {
    let (end, mut done) = (Instant::now() + Duration::from_secs(60), 0);
    while done == 0 {
        // SAFETY: plain call.
        if unsafe { T.test.unwrap()(r.coll, request, &mut done) } != NcclResult::SUCCESS {
            return false;
        }
        assert!(Instant::now() < end, "neither done nor failed");
    }
    true
}

pub fn test(r: &Rank, request: *mut c_void) -> bool {
    let mut done = 0;
    // SAFETY: plain call.
    ok(unsafe { T.test.unwrap()(r.coll, request, &mut done) });
    done != 0
}

/// As NCCL's proxy does: each context's unfinished operations are tested, then one more is started, then progress;
/// until each context has done `n` operations, at most `depth` of them at a time. `put` starts one: context, number.
pub fn as_the_proxy_does(r: &Rank, contexts: usize, n: usize, depth: usize, put: impl Fn(usize, u64) -> *mut c_void) {
    let mut unfinished: Vec<VecDeque<(*mut c_void, bool)>> = vec![VecDeque::new(); contexts];
    let mut started = vec![0; contexts];
    loop {
        for (c, list) in unfinished.iter_mut().enumerate() {
            for entry in list.iter_mut().filter(|e| !e.1) {
                entry.1 = test(r, entry.0);
            }
            while list.front().is_some_and(|e| e.1) {
                list.pop_front();
            }
            if started[c] < n && list.len() < depth {
                list.push_back((put(c, started[c] as u64), false));
                started[c] += 1;
            }
        }
        // SAFETY: plain call.
        ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
        if unfinished.iter().all(VecDeque::is_empty) && started.iter().all(|&s| s == n) {
            break;
        }
    }
}

/// Waits for something that other threads bring about.
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    wait(|| what.to_string(), is_so);
}
