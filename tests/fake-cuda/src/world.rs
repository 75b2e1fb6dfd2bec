//! What the driver knows: memory, contexts, and what tests asked for.

mod current;
mod reach;

use crate::memory::{Bytes, Kind, Memory, Range};
use crate::share::GRANULARITY;
pub use current::*;
use oxygin_ffi::cuda::{CUdevice, CUresult, CUDA_SUCCESS};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    /// What tests allocated.
    of_tests: Vec<u64>,
    kernels: i32,
    copies: usize,
    stores: usize,
    slices: usize,
    violations: Vec<String>,
    can_add: bool,
    delay_us: u64,
    call_ns: u64,
    copy_ns: u64,
    gpu_ns: u64,
    held_bytes: usize,
    /// A copy waits for that.
    is_holding: bool,
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
        self.inner().violations.push(what.to_owned());
    }

    pub fn violations(&mut self) -> &[String] {
        &self.inner().violations
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

    /// Contexts that were created and are not destroyed.
    pub fn created_contexts(&mut self) -> Vec<usize> {
        self.inner().created.clone()
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
        self.end(at);
        true
    }

    /// Ends the memory at an address, if it is there. It stays mapped, with zeros, should somebody still look.
    fn end(&mut self, at: u64) {
        if let Some(memory) = self.remove(|m| m.base == at) {
            memory.range.empty(at, memory.bytes);
            self.release(memory.of);
        }
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
        let all = self.inner();
        (all.held_bytes, all.is_holding) = (bytes, false);
    }

    pub fn is_held(&mut self, bytes: usize) -> bool {
        let all = self.inner();
        let is_held = all.held_bytes != 0 && bytes >= all.held_bytes;
        all.is_holding |= is_held;
        is_held
    }

    /// Whether a copy has come to where it waits, since the last call of `hold`.
    pub fn is_holding(&mut self) -> bool {
        self.inner().is_holding
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

    pub fn set_kernel_limits(&mut self, command_us: u64, most_commands: u64) {
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
    pub fn kernel_limits(&mut self) -> (u64, u64) {
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
        let at = self.alloc_as(device, bytes, private.then_some(device), false, Kind::Mapped);
        self.inner().of_tests.push(at);
        at
    }

    /// Memory as cudaMalloc or cudaMallocManaged makes it.
    pub fn malloc(&mut self, device: c_int, bytes: usize, managed: bool) -> u64 {
        let at = self.alloc_as(device, bytes, None, managed, Kind::Whole);
        self.inner().of_tests.push(at);
        at
    }

    /// Ends what tests allocated.
    pub fn free_of_tests(&mut self) {
        std::mem::take(&mut self.inner().of_tests).into_iter().for_each(|at| self.end(at));
    }

    fn alloc_as(&mut self, device: c_int, bytes: usize, only: Option<c_int>, managed: bool, kind: Kind) -> u64 {
        let is_exportable = kind == Kind::Mapped && only.is_none();
        let physical = Bytes::new(device, bytes, is_exportable as c_int);
        let range = Range::reserve(physical.bytes);
        range.map(range.base, physical.bytes, &physical);
        let (base, bytes) = (range.base, physical.bytes);
        let of = self.add_physical(physical);
        let access = if only.is_some() { 0 } else { self.inner().access };
        let only = only.map(|device| 1 << device);
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
        memory.only = Some(memory.only.unwrap_or(0) | 1 << device);
        Some(memory.base + memory.bytes as u64)
    }

    /// Physical memory of other processes that anything here keeps.
    pub fn foreign(&mut self) -> usize {
        self.inner().physical.values().filter(|p| p.imported).count()
    }
}
