//! Modules and the kernels in them. What runs here is the copy kernel (`copy_kernel.rs`), the lane kernel
//! (`lane_kernel.rs`), and the one that tries an mlx5 device (`trial_kernel.rs`).

use crate::copy_kernel::CopyKernel;
use crate::lane_kernel::LaneKernel;
use crate::memory::Kind;
use crate::stream::{Work, ILLEGAL_ADDRESS};
use crate::trial_kernel::TrialKernel;
use crate::world::{current, device_of, world, INVALID_CONTEXT};
use crate::{blocking, call, enqueue, give, in_context};
use oxygin_ffi::cuda::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// `CUDA_ERROR_INVALID_PTX`.
const INVALID_PTX: CUresult = 218;
/// `CUDA_ERROR_INVALID_HANDLE`.
const INVALID_HANDLE: CUresult = 400;
/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: CUresult = 500;
/// `CUDA_ERROR_MISALIGNED_ADDRESS`.
pub const MISALIGNED: CUresult = 716;

/// How much slower than a GPU kernels are here: their clock goes so much slower, too.
pub const SLOWNESS: u32 = 50;
/// Polls in vain before a kernel sleeps between two.
const HASTY: u32 = 50;
const NAP: Duration = Duration::from_micros(20);

/// What a kernel does after a poll in vain.
pub fn rest(vain: &mut u32) {
    *vain += 1;
    match *vain {
        ..HASTY => std::thread::yield_now(),
        _ => std::thread::sleep(NAP),
    }
}

/// A GPU's memory, as a kernel there finds it.
#[derive(Clone, Copy)]
pub struct Reach(CUdevice);

impl Reach {
    /// The GPU that the kernel runs on.
    pub fn device(self) -> CUdevice {
        self.0
    }

    /// A range.
    pub fn at(self, at: u64, bytes: usize) -> Result<*mut u8, CUresult> {
        world().kernel_reach(at, bytes, self.0).ok_or(ILLEGAL_ADDRESS)
    }

    /// A word.
    pub fn word(self, at: u64) -> Result<&'static AtomicU64, CUresult> {
        if at % 8 != 0 {
            return Err(MISALIGNED);
        }
        let word = self.at(at, 8)?;
        // SAFETY: an aligned word of mapped memory, which is never unmapped.
        Ok(unsafe { AtomicU64::from_ptr(word.cast()) })
    }

    /// Tells the host something.
    pub fn answer(self, at: u64, value: u64) -> Result<(), CUresult> {
        self.word(at)?.store(value, Ordering::Release);
        Ok(())
    }
}

/// Which of the kernels that are known here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    Copy,
    Lanes,
    Trial,
}

impl Which {
    fn of(function: &Function) -> Option<Self> {
        match (&function.name[..], function.parameters) {
            (CopyKernel::NAME, CopyKernel::PARAMETERS) => Some(Self::Copy),
            (LaneKernel::NAME, LaneKernel::PARAMETERS) => Some(Self::Lanes),
            (TrialKernel::NAME, TrialKernel::PARAMETERS) => Some(Self::Trial),
            _ => None,
        }
    }
}

/// A loaded text. Handles are never used again.
struct Module {
    handle: usize,
    context: usize,
    ptx: String,
}

/// An entry of a module.
struct Function {
    handle: usize,
    module: usize,
    name: String,
    parameters: usize,
    most_threads: c_uint,
}

/// A kernel from its launch to its end.
struct Launched {
    id: usize,
    which: Which,
    module: usize,
    parameters: Vec<u64>,
    runs: bool,
    /// As if its stream shared a hardware queue with a kernel that spins.
    is_held: bool,
}

#[derive(Default)]
struct Kernels {
    next: usize,
    modules: Vec<Module>,
    functions: Vec<Function>,
    launched: Vec<Launched>,
    /// How many of the copy kernel's next launches are held.
    to_hold: usize,
    /// All launches of the lane kernel are.
    are_lanes_held: bool,
}

impl Kernels {
    fn release(&mut self, which: Which) {
        self.launched.iter_mut().filter(|l| l.which == which).for_each(|l| l.is_held = false);
    }

    fn held(&self, which: Which) -> usize {
        self.launched.iter().filter(|l| l.which == which && l.is_held).count()
    }
}

static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);
/// Launches since the process began that had no worker blocks.
static LAUNCHES_WITHOUT_WORKERS: AtomicU64 = AtomicU64::new(0);
/// Those of them that had more warps than one.
static LAUNCHES_OF_A_BLOCK: AtomicU64 = AtomicU64::new(0);

/// Locked before the world or alone, never after it.
struct Guard(MutexGuard<'static, Option<Kernels>>);

impl Guard {
    fn get(&mut self) -> &mut Kernels {
        self.0.get_or_insert_with(Kernels::default)
    }

    fn new_handle(&mut self) -> usize {
        self.get().next += 16;
        0x0d01_0000 + self.get().next
    }
}

fn kernels() -> Guard {
    Guard(KERNELS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A launched kernel, on its way through its stream. Counts as running until it is dropped or says that it ends.
pub struct Launch {
    id: usize,
    which: Which,
    pub context: usize,
    pub parameters: Vec<u64>,
    /// Warps beside the first.
    pub workers: u32,
    /// Warps of a block.
    pub block_warps: u32,
}

impl Launch {
    /// Whether its queue stands still.
    fn is_held(&self) -> bool {
        kernels().get().launched.iter().any(|l| l.id == self.id && l.is_held)
    }

    /// The GPU begins with it.
    pub fn begin(&self) {
        let mut kernels = kernels();
        let all = &mut kernels.get().launched;
        let clash = all.iter().any(|l| l.runs && l.parameters.first() == self.parameters.first());
        if let Some(own) = all.iter_mut().find(|l| l.id == self.id) {
            own.runs = true;
        }
        if clash {
            world().violation("two kernels work on one ring or board");
        }
    }

    /// From here on its module may be unloaded and its memory freed: before the host can see that it is gone.
    pub fn end(&self) {
        kernels().get().launched.retain(|l| l.id != self.id);
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        self.end();
    }
}

/// Whether a kernel that was launched and has not ended works on a range of pinned memory.
pub fn use_memory(at: u64, bytes: usize) -> bool {
    let inside = |p: &u64| (at..at + bytes as u64).contains(p);
    kernels().get().launched.iter().any(|l| l.parameters.iter().any(inside))
}

/// The text between an entry's parentheses and what stands before its body.
fn entry<'a>(ptx: &'a str, name: &str) -> Option<(&'a str, &'a str)> {
    let head = &ptx[ptx.find(&format!(".entry {name}("))?..];
    let (open, close) = (head.find('(')?, head.find(')')?);
    let body = close + head[close..].find('{')?;
    Some((head.get(open + 1..close)?, &head[close + 1..body]))
}

#[no_mangle]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> CUresult {
    blocking!("cuModuleLoadData");
    let ptx = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned();
    // The driver takes nothing but ASCII.
    let parts = [".version ", ".target sm_", ".address_size 64", ".entry "];
    if !ptx.is_ascii() || !parts.iter().all(|part| ptx.contains(part)) {
        return INVALID_PTX;
    }
    let mut kernels = kernels();
    let handle = kernels.new_handle();
    kernels.get().modules.push(Module { handle, context: current(), ptx });
    unsafe { give(module, handle as *mut c_void) }
}

#[no_mangle]
pub unsafe extern "C" fn cuModuleUnload(module: *mut c_void) -> CUresult {
    blocking!("cuModuleUnload");
    let (mut kernels, module) = (kernels(), module as usize);
    let all = kernels.get();
    let Some(at) = all.modules.iter().position(|m| m.handle == module) else {
        world().violation("cuModuleUnload of a module that is none");
        return INVALID_HANDLE;
    };
    if all.modules[at].context != current() {
        world().violation("cuModuleUnload in another context");
        return INVALID_CONTEXT;
    }
    if all.launched.iter().any(|l| l.module == module) {
        world().violation("cuModuleUnload while a kernel of the module runs");
    }
    all.modules.swap_remove(at);
    all.functions.retain(|f| f.module != module);
    CUDA_SUCCESS
}

/// Where modules are loaded lazily this is when a real driver loads the kernel.
#[no_mangle]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> CUresult {
    blocking!("cuModuleGetFunction");
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut kernels = kernels();
    let Some(of) = kernels.get().modules.iter().find(|m| m.handle == module as usize) else {
        world().violation("cuModuleGetFunction of a module that is none");
        return INVALID_HANDLE;
    };
    let Some((parameters, directives)) = entry(&of.ptx, &name) else { return NOT_FOUND };
    let parameters = parameters.matches(".param .u64 ").count();
    let threads = directives.split(".maxntid").nth(1).and_then(|t| t.split(',').next()?.trim().parse().ok());
    let most_threads = threads.unwrap_or(1024);
    let handle = kernels.new_handle();
    kernels.get().functions.push(Function { handle, module: module as usize, name, parameters, most_threads });
    unsafe { give(function, handle as *mut c_void) }
}

#[no_mangle]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared_bytes: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    in_context!("cuLaunchKernel");
    let mut kernels = kernels();
    let all = kernels.get();
    let function = function as usize;
    let Some(function) = all.functions.iter().find(|f| f.handle == function) else {
        drop(kernels);
        world().violation("cuLaunchKernel of a function that is none, or of an unloaded module");
        return INVALID_HANDLE;
    };
    let is_here = all.modules.iter().any(|m| m.handle == function.module && m.context == current());
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    // The first warp is what the emulation stands for; the others may do what is for worker blocks.
    let warps = grid_x * block_x / 32;
    let is_line = grid[1..] == [1; 2] && block[1..] == [1; 2];
    if !is_line || warps == 0 || block_x % 32 != 0 || function.most_threads < block_x {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let Some(which) = Which::of(function).filter(|_| is_here) else {
        drop(kernels);
        world().violation("cuLaunchKernel of a kernel of another context, or of one that is not known here");
        return INVALID_HANDLE;
    };
    if which == Which::Lanes && (grid_x > LaneKernel::BLOCKS || !LaneKernel::THREADS.contains(&block_x)) {
        drop(kernels);
        world().violation("a lane kernel of another size than one to 16 blocks of 128 or 256 threads");
        return CUDA_ERROR_INVALID_VALUE;
    }
    let read = |i: usize| unsafe { (*parameters.add(i)).cast::<u64>().read_unaligned() };
    let (module, parameters): (_, Vec<u64>) = (function.module, (0..function.parameters).map(read).collect());
    let id = kernels.new_handle();
    let all = kernels.get();
    let is_held = match which {
        Which::Copy => all.to_hold > 0,
        Which::Lanes => all.are_lanes_held,
        Which::Trial => false,
    };
    all.to_hold -= usize::from(is_held && which == Which::Copy);
    all.launched.push(Launched { id, which, module, parameters: parameters.clone(), runs: false, is_held });
    drop(kernels);
    if which == Which::Copy {
        LAUNCHES_WITHOUT_WORKERS.fetch_add(u64::from(grid_x == 1), Ordering::Relaxed);
        LAUNCHES_OF_A_BLOCK.fetch_add(u64::from(grid_x == 1 && warps > 1), Ordering::Relaxed);
    }
    let (context, block_warps) = (current(), block_x / 32);
    let launch = Launch { id, which, context, parameters, workers: warps - 1, block_warps };
    unsafe { enqueue("cuLaunchKernel", stream, Work::Kernel(launch)) }
}

#[no_mangle]
pub extern "C" fn cuFuncSetAttribute(_function: *mut c_void, which: c_int, value: c_int) -> CUresult {
    call!("cuFuncSetAttribute");
    // How much of a multiprocessor's shared memory it would like, of a hundred parts.
    match (which, value) {
        (9, -1..=100) => CUDA_SUCCESS,
        _ => CUDA_ERROR_INVALID_VALUE,
    }
}

/// Which GPUs may load from and store to memory: real drivers know it of memory of cuMemCreate alone.
#[no_mangle]
pub unsafe extern "C" fn cuMemGetAccess(flags: *mut u64, place: *const CUmemLocation, at: CUdeviceptr) -> CUresult {
    call!("cuMemGetAccess");
    let place = unsafe { *place };
    if place.kind != CU_MEM_LOCATION_TYPE_DEVICE || !(0..crate::devices::COUNT).contains(&place.id) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let found = world().find(at, 1);
    let Some(open) = found.filter(|m| m.kind == Kind::Mapped).map(|m| m.is_open_to(place.id)) else {
        return CUDA_ERROR_INVALID_VALUE;
    };
    unsafe { give(flags, if open { CU_MEM_ACCESS_FLAGS_PROT_READWRITE.into() } else { 0 }) }
}

/// Runs a launched kernel to its end on the stream's thread. `Err`: what the stream has from then on.
pub fn run(launch: &Launch) -> CUresult {
    while launch.is_held() {
        std::thread::sleep(Duration::from_micros(50));
    }
    launch.begin();
    let device = device_of(launch.context);
    let code = match launch.which {
        Which::Copy => CopyKernel::new(launch, Reach(device)).run(),
        Which::Lanes => LaneKernel::run_all(launch, (launch.workers + 1) / launch.block_warps, Reach(device)),
        Which::Trial => TrialKernel::new(launch, Reach(device)).run(),
    };
    launch.end();
    code
}

// What tests use.

/// Who may touch what `fake_alloc` makes from here on, unless it is private, with loads and stores, as `cuMemGetAccess`
/// tells: all GPUs (0), its own alone (1). Copies reach it always.
#[no_mangle]
pub extern "C" fn fake_access(who: c_int) {
    world().set_access(who);
}

/// Launched kernels do not start until this is called with `false`.
#[no_mangle]
pub extern "C" fn fake_hold_kernels(held: bool) {
    world().hold_kernels(held);
}

/// Of the copy kernel's next launches so many do not start, others do: as if their streams alone shared a hardware
/// queue with a kernel that spins. 0: those that are held start.
#[no_mangle]
pub extern "C" fn fake_hold_launches(n: usize) {
    let mut kernels = kernels();
    let all = kernels.get();
    all.to_hold = n;
    if n == 0 {
        all.release(Which::Copy);
    }
}

/// How many launches are held in this way.
#[no_mangle]
pub extern "C" fn fake_held_launches() -> usize {
    kernels().get().held(Which::Copy)
}

/// No launch of the lane kernel from here on starts until this is called with `false`.
#[no_mangle]
pub extern "C" fn fake_hold_lanes(held: bool) {
    let mut kernels = kernels();
    let all = kernels.get();
    all.are_lanes_held = held;
    if !held {
        all.release(Which::Lanes);
    }
}

/// How many launches are held in this way.
#[no_mangle]
pub extern "C" fn fake_held_lanes() -> usize {
    kernels().get().held(Which::Lanes)
}

/// What each command takes a copy kernel, and each descriptor or entry a lane kernel, µs; and after how many of them,
/// at random up to so many, its life is over, 0: only after its time.
#[no_mangle]
pub extern "C" fn fake_kernel_limits(command_us: u64, most_commands: u64) {
    world().set_kernel_limits(command_us, most_commands);
}

/// Kernels that run now end now, whatever is in their rings and queues.
#[no_mangle]
pub extern "C" fn fake_end_kernels() {
    world().end_kernels();
}

/// How many launched kernels have not ended.
#[no_mangle]
pub extern "C" fn fake_launched() -> usize {
    kernels().get().launched.len()
}

/// How many of the commands of copy kernels were counted at an index of their poster's.
#[no_mangle]
pub extern "C" fn fake_credits() -> u64 {
    crate::copy_kernel::credits()
}

/// How many commands copy kernels have done since the process began.
#[no_mangle]
pub extern "C" fn fake_commands() -> u64 {
    crate::copy_kernel::commands()
}

/// How many of them were to be reported with their go.
#[no_mangle]
pub extern "C" fn fake_awaited_commands() -> u64 {
    crate::copy_kernel::awaited_commands()
}

/// How many commands the copy kernels have done that nobody was known to wait for.
#[no_mangle]
pub extern "C" fn fake_unawaited_commands() -> u64 {
    crate::copy_kernel::unawaited_commands()
}

/// How many of them had signals that came behind others.
#[no_mangle]
pub extern "C" fn fake_ordered_commands() -> u64 {
    crate::copy_kernel::ordered_commands()
}

/// How many of them their worker blocks did.
#[no_mangle]
pub extern "C" fn fake_worker_commands() -> u64 {
    crate::copy_kernel::worker_commands()
}

/// How many launches since the process began had no worker blocks.
#[no_mangle]
pub extern "C" fn fake_launches_without_workers() -> u64 {
    LAUNCHES_WITHOUT_WORKERS.load(Ordering::Relaxed)
}

/// How many of those had a block of more warps than one.
#[no_mangle]
pub extern "C" fn fake_launches_of_a_block() -> u64 {
    LAUNCHES_OF_A_BLOCK.load(Ordering::Relaxed)
}
