//! What the driver knows: memory, contexts, and what tests asked for.

use crate::memory::{Bytes, Kind, Memory, Range, PAGE};
use crate::share::GRANULARITY;
use oxygin_ffi::cuda::{CUcontext, CUdevice, CUresult, CUDA_SUCCESS, CU_STREAM_CAPTURE_MODE_RELAXED};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `CUDA_ERROR_INVALID_CONTEXT`.
pub const INVALID_CONTEXT: CUresult = 201;
/// Primary contexts, 16 apart, one a device; the `n`-th that is created lies `n` times [`GENERATION`] behind its device's.
const FIRST_CONTEXT: usize = 0xc0de_0000;
const GENERATION: usize = 0x1000;

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub const CAPTURE_UNSUPPORTED: CUresult = 900;
/// The application captures a stream.
pub static CAPTURED: AtomicBool = AtomicBool::new(false);

/// Whether a call of this thread spoils captures of others.
pub fn spoils_captures() -> bool {
    CAPTURED.load(Ordering::SeqCst) && MODE.get() != CU_STREAM_CAPTURE_MODE_RELAXED
}

pub fn exchange_capture_mode(mode: c_uint) -> c_uint {
    MODE.replace(mode)
}

thread_local! {
    static MODE: Cell<c_uint> = const { Cell::new(0) };
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's context, 0 for none.
pub fn current() -> usize {
    STACK.with_borrow(|s| s.last().copied().unwrap_or(0))
}

#[allow(non_snake_case)]
pub fn PUSH(context: usize) {
    STACK.with_borrow_mut(|s| s.push(context));
}

#[allow(non_snake_case)]
pub fn POP() -> usize {
    match STACK.with_borrow_mut(Vec::pop) {
        Some(context) => context,
        None => {
            world().violation("cuCtxPopCurrent without a push");
            0
        }
    }
}

pub fn context_of(device: CUdevice) -> CUcontext {
    (FIRST_CONTEXT + device as usize * 16) as CUcontext
}

/// Of any context, also of a destroyed one.
pub fn device_of(context: usize) -> CUdevice {
    ((context - FIRST_CONTEXT) % GENERATION / 16) as CUdevice
}

/// Whether a context is a device's primary one.
pub fn is_primary(context: usize) -> bool {
    (FIRST_CONTEXT..FIRST_CONTEXT + GENERATION).contains(&context)
}

#[derive(Default)]
struct Inner {
    memory: Vec<Memory>,
    ranges: Vec<Range>,
    physical: HashMap<u64, Physical>,
    next: u64,
    /// Where, how many bytes, and in which context it was made.
    pinned: Vec<(u64, usize, usize)>,
    injected: HashMap<String, (u32, CUresult)>,
    /// Primary contexts.
    destroyed: Vec<usize>,
    /// Contexts that were created and are not destroyed.
    created: Vec<usize>,
    generations: usize,
    /// What cuMemAlloc made, and in which context.
    allocated: Vec<(u64, usize)>,
    kernels: i32,
    copies: usize,
    stores: usize,
    slices: usize,
    violations: usize,
    can_add: bool,
    delay_us: u64,
    call_ns: u64,
    copy_ns: u64,
    gpu_ns: u64,
    held_bytes: usize,
    /// GPUs whose primary context's queues stand.
    blocked: Vec<CUdevice>,
    access: c_int,
    kernels_held: bool,
    command_us: u64,
    most_commands: u64,
    kernel_ends: u64,
    calls: HashMap<&'static str, u64>,
}

/// Physical memory and how many handles and mappings keep it.
pub struct Physical {
    pub bytes: Bytes,
    references: usize,
    imported: bool,
}

pub struct World(MutexGuard<'static, Option<Inner>>);

static WORLD: Mutex<Option<Inner>> = Mutex::new(None);

/// The one world.
pub fn world() -> World {
    let mut guard = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_with(Inner::default);
    World(guard)
}

impl World {
    fn inner(&mut self) -> &mut Inner {
        self.0.get_or_insert_with(Inner::default)
    }

    pub fn injected(&mut self, name: &str) -> CUresult {
        match self.inner().injected.get_mut(name) {
            Some((0, code)) => {
                let code = *code;
                self.inner().injected.remove(name);
                code
            }
            Some((after, _)) => {
                *after -= 1;
                CUDA_SUCCESS
            }
            None => CUDA_SUCCESS,
        }
    }

    pub fn inject(&mut self, name: String, after: u32, code: CUresult) {
        self.inner().injected.insert(name, (after, code));
    }

    pub fn calm(&mut self) {
        self.inner().injected.clear();
    }

    pub fn violation(&mut self, what: &str) {
        eprintln!("fake CUDA driver: violation: {what}");
        self.inner().violations += 1;
    }

    pub fn violations(&mut self) -> usize {
        self.inner().violations
    }

    pub fn kernel(&mut self, change: c_int) {
        self.inner().kernels += change;
    }

    /// Counts a copy out of the application's device memory.
    pub fn count_copy(&mut self, from: u64) {
        let found = self.find(from, 1).is_some_and(|m| !self.inner().allocated.iter().any(|a| a.0 == m.base));
        self.inner().copies += usize::from(found);
    }

    pub fn copies(&mut self) -> usize {
        self.inner().copies
    }

    pub fn count_stores(&mut self, n: usize) {
        self.inner().stores += n;
    }

    pub fn stores(&mut self) -> usize {
        self.inner().stores
    }

    pub fn count_slice(&mut self) {
        self.inner().slices += 1;
    }

    pub fn slices(&mut self) -> usize {
        self.inner().slices
    }

    pub fn kernels(&mut self) -> c_int {
        self.inner().kernels
    }

    pub fn destroy(&mut self, device: c_int, destroyed: bool) {
        let context = context_of(device) as usize;
        self.inner().destroyed.retain(|&c| c != context);
        if destroyed {
            self.inner().destroyed.push(context);
        }
    }

    /// Whether a context can be made current.
    pub fn is_context(&mut self, context: usize) -> bool {
        let inner = self.inner();
        inner.created.contains(&context) || (is_primary(context) && !inner.destroyed.contains(&context))
    }

    pub fn create_context(&mut self, device: CUdevice) -> usize {
        let inner = self.inner();
        inner.generations += 1;
        let context = context_of(device) as usize + inner.generations * GENERATION;
        inner.created.push(context);
        context
    }

    /// `false`: it was not created, or is destroyed.
    pub fn forget_context(&mut self, context: usize) -> bool {
        let before = self.inner().created.len();
        self.inner().created.retain(|&c| c != context);
        self.inner().created.len() < before
    }

    /// Pieces of memory, of the device and pinned, that were made in a context and live.
    pub fn memory_in(&mut self, context: usize) -> usize {
        let inner = self.inner();
        let allocated = inner.allocated.iter().filter(|a| a.1 == context).count();
        allocated + inner.pinned.iter().filter(|p| p.2 == context).count()
    }

    /// Device memory, as cuMemAlloc makes it.
    pub fn alloc_in(&mut self, context: usize, device: CUdevice, bytes: usize) -> u64 {
        let at = self.alloc_as(device, bytes, None, false, Kind::Whole);
        self.inner().allocated.push((at, context));
        at
    }

    /// Ends it; `false`: there is none. It stays mapped, but touching it from a stream is an error from here on.
    pub fn free(&mut self, at: u64) -> bool {
        let Some(i) = self.inner().allocated.iter().position(|a| a.0 == at) else { return false };
        self.inner().allocated.swap_remove(i);
        if let Some(memory) = self.remove(|m| m.base == at) {
            self.release(memory.of);
        }
        true
    }

    pub fn set(&mut self, can_add: bool, delay_us: u64) {
        let inner = self.inner();
        (inner.can_add, inner.delay_us) = (can_add, delay_us);
    }

    pub fn can_add(&mut self) -> bool {
        self.inner().can_add
    }

    pub fn delay_us(&mut self) -> u64 {
        self.inner().delay_us
    }

    pub fn set_costs(&mut self, call: u64, copy: u64, gpu: u64) {
        let inner = self.inner();
        (inner.call_ns, inner.copy_ns, inner.gpu_ns) = (call, copy, gpu);
    }

    pub fn copy_ns(&mut self) -> u64 {
        self.inner().copy_ns
    }

    /// When the GPU begins after the call, and how long a copy takes there; 0: no such model.
    pub fn gpu_ns(&mut self) -> (u64, u64) {
        (self.inner().gpu_ns, self.inner().copy_ns)
    }

    /// From how many bytes on copies do not run now; 0: all run.
    pub fn hold(&mut self, bytes: usize) {
        self.inner().held_bytes = bytes;
    }

    pub fn is_held(&mut self, bytes: usize) -> bool {
        let from = self.inner().held_bytes;
        from != 0 && bytes >= from
    }

    pub fn block(&mut self, device: CUdevice, on: bool) {
        self.inner().blocked.retain(|&d| d != device);
        if on {
            self.inner().blocked.push(device);
        }
    }

    /// Whether the queues of a GPU's primary context stand.
    pub fn is_blocked(&mut self, device: CUdevice) -> bool {
        self.inner().blocked.contains(&device)
    }

    pub fn set_access(&mut self, who: c_int) {
        self.inner().access = who;
    }

    pub fn hold_kernels(&mut self, held: bool) {
        self.inner().kernels_held = held;
    }

    pub fn are_kernels_held(&mut self) -> bool {
        self.inner().kernels_held
    }

    pub fn set_courier(&mut self, command_us: u64, most_commands: u64) {
        (self.inner().command_us, self.inner().most_commands) = (command_us, most_commands);
    }

    /// What a command takes, µs.
    pub fn command_us(&mut self) -> u64 {
        self.inner().command_us
    }

    pub fn end_kernels(&mut self) {
        self.inner().kernel_ends += 1;
    }

    /// How often all running kernels were ended, and how many commands one does at most; 0: no limit.
    pub fn courier_limits(&mut self) -> (u64, u64) {
        (self.inner().kernel_ends, self.inner().most_commands)
    }

    /// Counts a call; returns what it costs.
    pub fn count(&mut self, name: &'static str) -> u64 {
        *self.inner().calls.entry(name).or_default() += 1;
        self.inner().call_ns
    }

    pub fn calls(&mut self, name: &str) -> u64 {
        self.inner().calls.get(name).copied().unwrap_or(0)
    }

    /// Memory as ncclMemAlloc makes it; `private`: as NCCL allocates signals.
    pub fn alloc(&mut self, device: c_int, bytes: usize, private: bool) -> u64 {
        let bytes = bytes.next_multiple_of(GRANULARITY);
        self.alloc_as(device, bytes, private.then_some(device), false, Kind::Mapped)
    }

    /// Memory as cudaMalloc or cudaMallocManaged makes it.
    pub fn malloc(&mut self, device: c_int, bytes: usize, managed: bool) -> u64 {
        self.alloc_as(device, bytes, None, managed, Kind::Whole)
    }

    fn alloc_as(&mut self, device: c_int, bytes: usize, only: Option<c_int>, managed: bool, kind: Kind) -> u64 {
        let is_exportable = kind == Kind::Mapped && only.is_none();
        let physical = Bytes::new(device, bytes, is_exportable as c_int);
        let range = Range::reserve(physical.bytes);
        range.map(range.base, physical.bytes, &physical);
        let (base, bytes) = (range.base, physical.bytes);
        let of = self.add_physical(physical);
        let access = if only.is_some() { 0 } else { self.inner().access };
        self.add(Memory { base, bytes, range, device, only, managed, access, of, kind });
        base
    }

    /// The context that memory belongs to, 0 for none.
    pub fn owner(&mut self, at: u64) -> usize {
        let Some(memory) = self.find(at, 1).filter(|m| m.kind == Kind::Whole) else { return 0 };
        let made = self.inner().allocated.iter().find(|a| a.0 == memory.base).map(|a| a.1);
        made.unwrap_or(context_of(memory.device) as usize)
    }

    pub fn add(&mut self, memory: Memory) {
        self.inner().memory.push(memory);
    }

    pub fn remove(&mut self, which: impl Fn(&Memory) -> bool) -> Option<Memory> {
        let at = self.inner().memory.iter().position(which)?;
        Some(self.inner().memory.swap_remove(at))
    }

    pub fn ranges(&mut self) -> &mut Vec<Range> {
        &mut self.inner().ranges
    }

    /// New physical memory with one reference.
    pub fn add_physical(&mut self, bytes: Bytes) -> u64 {
        self.inner().next += 1;
        let id = self.inner().next;
        self.inner().physical.insert(id, Physical { bytes, references: 1, imported: false });
        id
    }

    /// Memory of another process.
    pub fn import(&mut self, bytes: Bytes) -> u64 {
        self.inner().next += 1;
        let id = self.inner().next;
        self.inner().physical.insert(id, Physical { bytes, references: 1, imported: true });
        id
    }

    pub fn physical(&mut self, id: u64) -> Option<&Physical> {
        self.inner().physical.get(&id)
    }

    pub fn retain(&mut self, id: u64) -> u64 {
        if let Some(physical) = self.inner().physical.get_mut(&id) {
            physical.references += 1;
        }
        id
    }

    /// Gives up one reference. `false`: there is no such memory.
    pub fn release(&mut self, id: u64) -> bool {
        let Some(physical) = self.inner().physical.get_mut(&id) else { return false };
        physical.references -= 1;
        if physical.references == 0 {
            self.inner().physical.remove(&id);
        }
        true
    }

    /// Lets a device touch the mapping at `at`. Returns where the next one starts.
    pub fn allow(&mut self, at: u64, device: c_int) -> Option<u64> {
        let memory = self.inner().memory.iter_mut().find(|m| m.kind == Kind::Mapped && m.base == at)?;
        memory.only = Some(device);
        Some(memory.base + memory.bytes as u64)
    }

    /// Physical memory of other processes that anything here keeps.
    pub fn foreign(&mut self) -> usize {
        self.inner().physical.values().filter(|p| p.imported).count()
    }

    pub fn find(&mut self, at: u64, n: usize) -> Option<Memory> {
        self.inner().memory.iter().find(|m| m.holds(at, n)).copied()
    }

    /// What lies under a range, mapping by mapping; `None`: there is a hole.
    fn all(&mut self, at: u64, n: usize) -> Option<Vec<Memory>> {
        let (mut from, end) = (at, at + n as u64);
        let mut found = Vec::new();
        loop {
            let memory = self.find(from, 1)?;
            found.push(memory);
            from = memory.base + memory.bytes as u64;
            if from >= end {
                return Some(found);
            }
        }
    }

    pub fn pin(&mut self, context: usize, n: usize) -> *mut u8 {
        // Whole pages, as from a real driver.
        let memory = vec![0_u64; n.next_multiple_of(PAGE) / 8 + PAGE / 8].leak();
        let at = memory.as_mut_ptr().cast::<u8>();
        let at = at.wrapping_add(at.align_offset(PAGE));
        self.inner().pinned.push((at as u64, n, context));
        at
    }

    /// Pinned memory is not reused, but touching it from a stream is an error from here on. Returns how many bytes it had.
    pub fn unpin(&mut self, at: u64) -> usize {
        let Some(i) = self.inner().pinned.iter().position(|p| p.0 == at) else { return 0 };
        self.inner().pinned.swap_remove(i).1
    }

    fn is_pinned(&mut self, at: u64, n: usize) -> bool {
        self.inner().pinned.iter().any(|&(base, len, _)| at >= base && at + n as u64 <= base + len as u64)
    }

    /// Whether GPU `device` may touch the range.
    pub fn reach(&mut self, at: u64, n: usize, device: CUdevice) -> bool {
        if let Some(all) = self.all(at, n) {
            return all.iter().all(|m| m.only.is_none_or(|only| only == device));
        }
        if !self.is_pinned(at, n) {
            self.violation(&format!("{n} bytes at {at:#x} are neither device memory nor pinned"));
            return false;
        }
        true
    }

    /// Where a kernel on GPU `device` finds a range that it may load from and store to.
    pub fn kernel_reach(&mut self, at: u64, n: usize, device: CUdevice) -> Option<*mut u8> {
        match self.all(at, n) {
            Some(all) if all.iter().all(|m| m.is_open_to(device)) => all.first().map(|m| m.at(at)),
            Some(_) => {
                eprintln!("fake CUDA driver: a kernel on GPU {device} may not touch {n} bytes at {at:#x}");
                None
            }
            None if self.is_pinned(at, n) => Some(at as *mut u8),
            None => {
                self.violation(&format!("a kernel touches {n} bytes at {at:#x}: neither device memory nor pinned"));
                None
            }
        }
    }

    /// Where the stream finds an address now.
    pub fn resolve(&mut self, at: u64, n: usize) -> Option<*mut u8> {
        match self.all(at, n) {
            // Mappings side by side lie side by side for the GPU as well.
            Some(all) => all.first().map(|m| m.at(at)),
            None => self.is_pinned(at, n).then_some(at as *mut u8),
        }
    }
}
