//! Streams: work in order, on a thread of its own.

use crate::copies;
use crate::kernel::{self, Launch};
use crate::world::{device_of, is_primary, world};
use oxygin_ffi::cuda::{CUresult, MemOp, MemOpKind, CUDA_ERROR_NOT_READY, CUDA_SUCCESS};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{fence, AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A copy of rows of `width` bytes, mostly of one.
pub struct Copy {
    pub to: u64,
    pub from: u64,
    pub width: usize,
    pub height: usize,
    /// From row to row, of destination and source.
    pub pitches: (usize, usize),
}

impl Copy {
    pub fn plain(to: u64, from: u64, bytes: usize) -> Self {
        Self { to, from, width: bytes, height: 1, pitches: (bytes, bytes) }
    }

    pub fn bytes(&self) -> usize {
        self.width * self.height
    }

    /// Each row's destination and source.
    pub fn rows(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (to, from) = self.pitches;
        (0..self.height).map(move |i| (self.to + (i * to) as u64, self.from + (i * from) as u64))
    }
}

pub enum Work {
    /// Without order among themselves: the last is done first.
    Copies(Vec<Copy>),
    Ops(Vec<MemOp>),
    Kernel(Launch),
    /// For what another stream had been given at some moment.
    Wait(Mark),
}

impl Work {
    /// Whether it needs the GPU's processors, decided as it is queued.
    fn is_computed(&self) -> bool {
        match self {
            Self::Copies(all) => all.iter().any(copies::is_computed),
            Self::Ops(_) | Self::Kernel(_) => true,
            Self::Wait(_) => false,
        }
    }
}

/// What a stream had been given at some moment.
#[derive(Clone)]
pub struct Mark {
    of: Arc<Progress>,
    pieces: usize,
}

impl Mark {
    /// Waits until that is done. What fails fails those who wait for it.
    fn wait(&self) -> CUresult {
        while self.of.done.load(Ordering::Acquire) < self.pieces {
            std::thread::sleep(LOOK);
        }
        self.of.error.load(Ordering::Acquire)
    }
}

/// Work on its way through a stream.
struct Queued {
    work: Work,
    since: Instant,
    is_computed: bool,
}

/// What a context waits for the GPU's processors while a kernel of another one runs; a real one 2.4 ms.
const SLICE: Duration = Duration::from_millis(1);
/// How long a thread sleeps between two looks at what it waits for.
const LOOK: Duration = Duration::from_micros(50);

/// Streams whose threads have not ended. Locked alone, or as the last.
static STREAMS: Mutex<Vec<Arc<Progress>>> = Mutex::new(Vec::new());

fn streams() -> MutexGuard<'static, Vec<Arc<Progress>>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether any stream has work that may still draw a fault, unless its queue stands.
pub fn are_busy() -> bool {
    let all = streams().clone();
    all.iter().any(|s| s.undrawn.load(Ordering::Acquire) > 0 && !s.stands())
}

/// Faults of primary contexts: what one stream hits all of them show, as in a real driver. Locked alone, or as the
/// last.
static FAULTS: Mutex<Option<HashMap<usize, CUresult>>> = Mutex::new(None);

/// The error that a context has.
pub fn fault_of(context: usize) -> CUresult {
    let faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    faults.as_ref().and_then(|f| f.get(&context).copied()).unwrap_or(CUDA_SUCCESS)
}

/// Contexts are as new.
pub fn forget_faults() {
    *FAULTS.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// A fault of the application's own: a GPU's primary context has this error from now on. What is launched already
/// still comes up, and runs to its end: a driver does not say when it takes that away.
#[no_mangle]
pub extern "C" fn fake_fault(device: c_int, code: CUresult) {
    let context = crate::world::context_of(device) as usize;
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    faults.get_or_insert_with(HashMap::new).insert(context, code);
}

/// The contexts that the code under test has made so far have this error from now on, as after a fault of a stream's.
#[no_mangle]
pub extern "C" fn fake_lose_private_contexts(code: CUresult) {
    let created = world().created_contexts();
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    faults.get_or_insert_with(HashMap::new).extend(created.into_iter().map(|context| (context, code)));
}

/// How many streams of a context there are that are not destroyed.
pub fn live_in(context: usize) -> usize {
    streams().iter().filter(|s| s.context == context && !s.is_ended.load(Ordering::Acquire)).count()
}

/// `CUDA_ERROR_ILLEGAL_ADDRESS`.
pub const ILLEGAL_ADDRESS: CUresult = 700;

struct Progress {
    context: usize,
    is_ended: AtomicBool,
    /// It waits, or did until a moment ago, for `fake_block` to end; its next piece of work has drawn its fault.
    waits: AtomicBool,
    /// Pieces of work that it was ever given, and has done.
    given: AtomicUsize,
    done: AtomicUsize,
    /// Pieces of work that are not done; a kernel counts until it has drawn its fault, because what it does by and by
    /// is not known.
    undrawn: AtomicUsize,
    error: AtomicI32,
}

impl Progress {
    fn stands(&self) -> bool {
        self.waits.load(Ordering::Acquire) && world().is_blocked(device_of(self.context))
    }

    /// A piece of work is done, and has left its error.
    fn end_piece(&self, is_drawn: bool) {
        self.done.fetch_add(1, Ordering::AcqRel);
        if !is_drawn {
            self.undrawn.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits until the GPU's processors are there.
    fn wait_for_processors(&self) {
        let device = device_of(self.context);
        if !world().is_blocked(device) {
            return;
        }
        if !is_primary(self.context) {
            world().count_slice();
            std::thread::sleep(SLICE);
            return;
        }
        self.waits.store(true, Ordering::Release);
        while world().is_blocked(device) {
            std::thread::sleep(LOOK);
        }
        self.waits.store(false, Ordering::Release);
    }
}

pub struct FakeStream {
    pub context: usize,
    queue: Mutex<Option<Sender<Queued>>>,
    progress: Arc<Progress>,
}

impl FakeStream {
    pub fn start(context: usize) -> *mut Self {
        let (queue, work) = channel::<Queued>();
        let progress = Arc::new(Progress {
            context,
            is_ended: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            given: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            undrawn: AtomicUsize::new(0),
            error: AtomicI32::new(CUDA_SUCCESS),
        });
        streams().push(progress.clone());
        let own = progress.clone();
        std::thread::spawn(move || {
            for Queued { work, since, is_computed } in work {
                let is_kernel = matches!(work, Work::Kernel(_));
                let waits = matches!(work, Work::Wait(_));
                if own.error.load(Ordering::Acquire) == CUDA_SUCCESS {
                    // One statement each: a guard lives to the end of its statement.
                    let delay = world().delay_us();
                    let mut code = if waits { CUDA_SUCCESS } else { world().injected("gpu") };
                    if is_kernel {
                        own.undrawn.fetch_sub(1, Ordering::AcqRel);
                    }
                    let (latency, copy) = world().gpu_ns();
                    if latency > 0 {
                        let begin = (since + Duration::from_nanos(latency)).max(Instant::now());
                        let copies = if let Work::Copies(c) = &work { c.len() as u64 } else { 0 };
                        let end = begin + Duration::from_nanos(copies * copy);
                        while Instant::now() < end {
                            std::hint::spin_loop();
                        }
                    } else if !waits {
                        std::thread::sleep(Duration::from_micros(delay));
                    }
                    if let Work::Copies(copies) = &work {
                        let most = copies.iter().map(Copy::bytes).max().unwrap_or(0);
                        while world().is_held(most) {
                            std::thread::sleep(LOOK);
                        }
                    }
                    while is_kernel && world().are_kernels_held() {
                        std::thread::sleep(LOOK);
                    }
                    if is_computed {
                        own.wait_for_processors();
                    }
                    if code == CUDA_SUCCESS {
                        code = run(work);
                    } else {
                        drop(work);
                    }
                    own.error.store(code, Ordering::Release);
                    if code != CUDA_SUCCESS && is_primary(context) {
                        let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
                        faults.get_or_insert_with(HashMap::new).insert(context, code);
                    }
                } else {
                    // Before anybody can see that the stream is done with it.
                    drop(work);
                    if is_kernel {
                        own.undrawn.fetch_sub(1, Ordering::AcqRel);
                    }
                }
                own.end_piece(is_kernel);
            }
            streams().retain(|s| !Arc::ptr_eq(s, &own));
        });
        Box::into_raw(Box::new(Self { context, queue: Mutex::new(Some(queue)), progress }))
    }

    /// Lets the thread end after its work. The stream itself stays, small, for late callers.
    pub unsafe fn end(stream: *mut Self) {
        // SAFETY: made by `start` and never freed.
        let stream = unsafe { &*stream };
        stream.progress.is_ended.store(true, Ordering::Release);
        let sender = stream.queue.lock().map(|mut q| q.take());
        if !matches!(sender, Ok(Some(_))) {
            world().violation("a stream is destroyed twice");
        }
    }

    /// Its own, or its context's.
    fn error(&self) -> CUresult {
        match self.progress.error.load(Ordering::Acquire) {
            CUDA_SUCCESS => fault_of(self.context),
            code => code,
        }
    }

    pub fn push(&self, work: Work) -> CUresult {
        let error = self.error();
        if error != CUDA_SUCCESS {
            return error;
        }
        self.progress.given.fetch_add(1, Ordering::AcqRel);
        self.progress.undrawn.fetch_add(1, Ordering::AcqRel);
        let queued = Queued { is_computed: work.is_computed(), work, since: Instant::now() };
        match self.queue.lock().map(|q| q.as_ref().is_some_and(|q| q.send(queued).is_ok())) {
            Ok(true) => CUDA_SUCCESS,
            _ => {
                world().violation("work for a destroyed stream");
                ILLEGAL_ADDRESS
            }
        }
    }

    /// What it has been given by now.
    pub fn mark(&self) -> Mark {
        Mark { of: self.progress.clone(), pieces: self.progress.given.load(Ordering::Acquire) }
    }

    pub fn query(&self) -> CUresult {
        if is_primary(self.context) && take_slow_query() {
            std::thread::sleep(SLOW_QUERY);
            return CUDA_ERROR_NOT_READY;
        }
        // First: whoever has counted the last piece of work has left its error before.
        let is_unfinished = self.progress.done.load(Ordering::Acquire) < self.progress.given.load(Ordering::Acquire);
        match self.error() {
            CUDA_SUCCESS if is_unfinished => CUDA_ERROR_NOT_READY,
            code => code,
        }
    }
}

/// How long a slow query takes: a thread that a busy host holds up in the driver.
const SLOW_QUERY: Duration = Duration::from_millis(1);
static SLOW_QUERIES: AtomicUsize = AtomicUsize::new(0);

fn take_slow_query() -> bool {
    SLOW_QUERIES.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok()
}

/// The next `n` queries of streams of the application's contexts take a while and find work, as if the GPU had its turn
/// with another process before a kernel's end.
#[no_mangle]
pub extern "C" fn fake_slow_queries(n: usize) {
    SLOW_QUERIES.store(n, Ordering::Release);
}

/// How many of them are to come.
#[no_mangle]
pub extern "C" fn fake_slow_queries_left() -> usize {
    SLOW_QUERIES.load(Ordering::Acquire)
}

/// Memory was there when the work was queued, and was freed before it was done.
fn gone(bytes: usize) -> CUresult {
    world().violation(&format!("a stream touches {bytes} bytes that are neither device memory nor pinned any more"));
    ILLEGAL_ADDRESS
}

fn run(work: Work) -> CUresult {
    match work {
        Work::Copies(copies) => {
            for copy in copies.iter().rev() {
                world().count_copy(copy.from);
                let n = copy.width;
                for (to, from) in copy.rows() {
                    let to = world().resolve(to, n);
                    let from = world().resolve(from, n);
                    let (Some(to), Some(from)) = (to, from) else { return gone(n) };
                    // Whoever sees these bytes sees what the stream did before, also on machines with a weaker order.
                    fence(Ordering::Release);
                    // SAFETY: both ranges are mapped; device memory stays mapped for ever, pinned memory too.
                    unsafe { std::ptr::copy(from, to, n) };
                }
            }
        }
        Work::Kernel(launch) => return kernel::run(&launch),
        Work::Wait(mark) => return mark.wait(),
        Work::Ops(ops) => {
            world().count_stores(ops.len());
            for op in ops {
                let Some((at, kind)) = op.parse() else { return ILLEGAL_ADDRESS };
                let Some(word) = world().resolve(at, 4) else { return gone(4) };
                // SAFETY: an aligned word of mapped memory; alignment was checked when it was queued.
                unsafe {
                    match kind {
                        MemOpKind::Write32(v) => {
                            std::sync::atomic::AtomicU32::from_ptr(word.cast()).store(v, Ordering::Release)
                        }
                        MemOpKind::Write64(v) => AtomicU64::from_ptr(word.cast()).store(v, Ordering::Release),
                        MemOpKind::Add64(v) => {
                            AtomicU64::from_ptr(word.cast()).fetch_add(v, Ordering::AcqRel);
                        }
                    }
                }
            }
        }
    }
    CUDA_SUCCESS
}
