//! Two processes put between their GPUs: that the bytes are right, what a round trip and a large put cost, shared and
//! through host memory; and which driver calls of sharing wait for a running kernel.
//!
//! `cargo run --release --example gpu_share`; ranks take GPUs 0 and 1, or share the only one. Signals are in host
//! memory, where this program can see them without a kernel, so a round trip contains two landings seen by a CPU.

use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use oxygin_ffi::cuda::{Allocation, CUmemAllocationProp, CUmemHandle, Cuda, Mapped};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SIZE: usize = 64 << 20;
const ENV: &str = "GPU_SHARE_RANK";

fn ok(result: NcclResult) {
    assert_eq!(result, NcclResult::SUCCESS);
}

/// The driver's functions that this program calls itself.
struct Driver(libloading::Library);

impl Driver {
    fn load() -> Self {
        let path = std::env::var("OXYGIN_LIBCUDA").unwrap_or("libcuda.so.1".into());
        // SAFETY: the driver.
        Self(unsafe { libloading::Library::new(path) }.expect("the CUDA driver"))
    }

    /// # Safety
    /// The driver has a function of this name and type.
    unsafe fn get<F: Copy>(&self, name: &str) -> F {
        // SAFETY: passed on.
        unsafe { *self.0.get::<F>(name.as_bytes()).unwrap_or_else(|e| panic!("{name}: {e}")) }
    }

    fn enter(&self, device: c_int) {
        // SAFETY: functions of these types.
        unsafe {
            assert_eq!(self.get::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit")(0), 0);
            let mut context: *mut c_void = null_mut();
            let retain = self.get::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>("cuDevicePrimaryCtxRetain");
            assert_eq!(retain(&mut context, device), 0);
            assert_eq!(self.get::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuCtxPushCurrent_v2")(context), 0);
        }
    }

    fn devices(&self) -> c_int {
        let mut n = 1;
        // SAFETY: as above; the fake driver of the tests has no such function, and any number of GPUs.
        unsafe {
            assert_eq!(self.get::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit")(0), 0);
            if let Ok(count) = self.0.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDeviceGetCount") {
                count(&mut n);
            }
        }
        n
    }

    fn create(&self, device: c_int, bytes: usize) -> CUmemHandle {
        type Create = unsafe extern "C" fn(*mut CUmemHandle, usize, *const CUmemAllocationProp, u64) -> c_int;
        // SAFETY: plain data, for which zero is a value.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        (properties.kind, properties.requested_handle_types) = (1, 1);
        (properties.location.kind, properties.location.id) = (1, device);
        let mut handle = 0;
        // SAFETY: as above.
        assert_eq!(unsafe { self.get::<Create>("cuMemCreate")(&mut handle, bytes, &properties, 0) }, 0);
        handle
    }

    /// `segments` allocations side by side, of `SIZE` bytes in all.
    fn segments(&self, cuda: &std::sync::Arc<Cuda>, device: c_int, segments: usize) -> Mapped {
        let bytes = SIZE / segments;
        let parts: Vec<_> =
            (0..segments).map(|_| (self.import(cuda, self.create(device, bytes)), bytes as u64)).collect();
        Mapped::new(cuda, &parts, device).unwrap()
    }

    /// Through a descriptor, because that is the way that the library has.
    fn import(&self, cuda: &std::sync::Arc<Cuda>, handle: CUmemHandle) -> Allocation {
        let mut fd: c_int = -1;
        type Export = unsafe extern "C" fn(*mut c_void, CUmemHandle, c_int, u64) -> c_int;
        // SAFETY: as above; the descriptor is ours.
        let fd = unsafe {
            let export = self.get::<Export>("cuMemExportToShareableHandle");
            assert_eq!(export((&mut fd as *mut c_int).cast(), handle, 1, 0), 0);
            std::os::fd::FromRawFd::from_raw_fd(fd)
        };
        let fd: std::os::fd::OwnedFd = fd;
        let made = Allocation::import(cuda, fd.as_fd()).unwrap();
        // SAFETY: the one reference of cuMemCreate.
        unsafe { self.get::<unsafe extern "C" fn(CUmemHandle) -> c_int>("cuMemRelease")(handle) };
        made
    }
}

/// Files in a directory, by which two processes meet.
struct Meeting {
    dir: PathBuf,
    rank: usize,
    round: std::cell::Cell<usize>,
}

impl Meeting {
    fn exchange(&self, mine: &[u8]) -> [Vec<u8>; 2] {
        let round = self.round.replace(self.round.get() + 1);
        let name = |rank: usize| self.dir.join(format!("{round}-{rank}"));
        let hidden = self.dir.join(format!("hidden-{}", self.rank));
        std::fs::write(&hidden, mine).unwrap();
        std::fs::rename(hidden, name(self.rank)).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        [0, 1].map(|rank| loop {
            match std::fs::read(name(rank)) {
                Ok(bytes) => return bytes,
                Err(_) => std::thread::sleep(Duration::from_micros(200)),
            }
            assert!(Instant::now() < end, "the other rank does not come");
        })
    }
}

struct Rank {
    rank: usize,
    coll: *mut c_void,
    ctx: *mut c_void,
}

impl Rank {
    fn register(&self, at: u64, bytes: usize, kind: c_int) -> *mut c_void {
        let mut handle = null_mut();
        // SAFETY: memory that lives until the process ends.
        ok(unsafe { T.reg_mr_sym.unwrap()(self.coll, at as *mut c_void, bytes, kind, 0, &mut handle) });
        handle
    }

    #[allow(clippy::too_many_arguments)]
    fn put(
        &self,
        from: (*mut c_void, usize),
        to: (*mut c_void, usize),
        bytes: usize,
        peer: usize,
        signal: Option<*mut c_void>,
    ) -> *mut c_void {
        let mut request = null_mut();
        let (f, t) = (from.1 as u64, to.1 as u64);
        // SAFETY: registered windows.
        ok(unsafe {
            match signal {
                None => T.iput.unwrap()(self.ctx, 0, f, from.0, bytes, t, to.0, peer as u32, 0, &mut request),
                Some(s) => T.iput_signal.unwrap()(
                    self.ctx,
                    0,
                    f,
                    from.0,
                    bytes,
                    t,
                    to.0,
                    peer as u32,
                    0,
                    s,
                    1,
                    SIGNAL_OP_ADD,
                    true,
                    0,
                    &mut request,
                ),
            }
        });
        request
    }

    fn wait(&self, request: *mut c_void) {
        let mut done = 0;
        let end = Instant::now() + Duration::from_secs(60);
        while done == 0 {
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(self.coll, request, &mut done) });
            assert!(Instant::now() < end, "a request is not done after 60 s");
        }
    }

    fn wait_signal(&self, word: &AtomicU64, value: u64) {
        let end = Instant::now() + Duration::from_secs(60);
        while word.load(Ordering::Acquire) < value {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(self.ctx) });
            assert!(Instant::now() < end, "a signal does not come");
        }
    }
}

/// A rank with what its transfers need besides a window on GPU memory.
struct Bench<'a> {
    r: Rank,
    peer: usize,
    meeting: &'a Meeting,
    /// As much host memory as a window has.
    host: Vec<u64>,
    host_window: *mut c_void,
    /// What the peer adds to, and how often it has.
    signal: &'static AtomicU64,
    signal_window: *mut c_void,
    signalled: u64,
}

impl<'a> Bench<'a> {
    fn new(r: Rank, meeting: &'a Meeting) -> Self {
        let host = vec![0u64; SIZE / 8];
        let host_window = r.register(host.as_ptr() as u64, SIZE, PTR_HOST);
        let signal: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
        let signal_window = r.register(signal as *const AtomicU64 as u64, 8, PTR_HOST);
        Self { peer: 1 - r.rank, r, meeting, host, host_window, signal, signal_window, signalled: 0 }
    }

    fn wait_signal(&mut self) {
        self.signalled += 1;
        self.r.wait_signal(self.signal, self.signalled);
    }

    /// The right bytes: half a window that crosses segments.
    fn check(&mut self, window: *mut c_void, kind: &str) {
        let (own, peer) = ((self.r.rank as u64) << 40, (self.peer as u64) << 40);
        for (i, word) in self.host.iter_mut().enumerate() {
            *word = own + i as u64 + 7;
        }
        let r = &self.r;
        r.wait(r.put((self.host_window, 0), (window, 0), SIZE / 2, r.rank, None));
        self.meeting.exchange(b"");
        r.wait(r.put((window, 0), (window, SIZE / 2), SIZE / 2, self.peer, Some(self.signal_window)));
        self.wait_signal();
        let r = &self.r;
        r.wait(r.put((window, SIZE / 2), (self.host_window, 0), SIZE / 2, r.rank, None));
        assert!((0..SIZE / 16).all(|i| self.host[i] == peer + i as u64 + 7), "{kind}: wrong bytes");
        self.meeting.exchange(b"");
    }

    /// What a round trip of 8 bytes takes, µs.
    fn round_trip(&mut self, window: *mut c_void) -> f64 {
        let rounds = std::env::var("GPU_SHARE_ROUNDS").map_or(2000, |n| n.parse().unwrap());
        let mut start = Instant::now();
        for round in 0..rounds + 200 {
            if round == 200 {
                start = Instant::now();
            }
            if self.r.rank == 0 {
                self.r.put((window, 0), (window, SIZE / 2), 8, self.peer, Some(self.signal_window));
            }
            self.wait_signal();
            if self.r.rank == 1 {
                self.r.put((window, 0), (window, SIZE / 2), 8, self.peer, Some(self.signal_window));
            }
        }
        let round_trip = start.elapsed().as_secs_f64() / f64::from(rounds) * 1e6;
        self.meeting.exchange(b"");
        round_trip
    }

    /// Large puts, from rank 0 to rank 1: GB/s.
    fn bandwidth(&mut self, window: *mut c_void) -> f64 {
        let (n, depth) = (60, 4);
        let mut bandwidth = 0.0;
        let half = SIZE / 2;
        if self.r.rank == 0 {
            let r = &self.r;
            let mut requests = std::collections::VecDeque::new();
            let start = Instant::now();
            for _ in 0..n {
                requests.push_back(r.put((window, 0), (window, half), half, self.peer, None));
                if requests.len() == depth {
                    r.wait(requests.pop_front().unwrap());
                }
            }
            // The other rank has it all, and says so.
            requests.push_back(r.put((window, 0), (window, half), 0, self.peer, Some(self.signal_window)));
            requests.into_iter().for_each(|q| r.wait(q));
            self.wait_signal();
            bandwidth = (n * half) as f64 / start.elapsed().as_secs_f64() / 1e9;
        } else {
            self.wait_signal();
            let r = &self.r;
            r.wait(r.put((window, 0), (window, half), 0, self.peer, Some(self.signal_window)));
        }
        self.meeting.exchange(b"");
        bandwidth
    }

    /// All of it on one piece of GPU memory.
    fn measure(&mut self, transport: &str, kind: &str, base: u64) {
        let start = Instant::now();
        let window = self.r.register(base, SIZE, PTR_CUDA);
        let registered = start.elapsed();
        self.check(window, kind);
        let (round_trip, bandwidth) = (self.round_trip(window), self.bandwidth(window));
        if self.r.rank == 0 {
            println!(
                "{transport:7} {kind:24} registration {:6.2} ms, round trip of 8 bytes {round_trip:6.1} us, puts of 32 \
                 MiB {bandwidth:6.1} GB/s",
                registered.as_secs_f64() * 1e3
            );
        }
        let start = Instant::now();
        // SAFETY: plain call.
        ok(unsafe { T.dereg_mr_sym.unwrap()(self.r.coll, window) });
        self.meeting.exchange(b"");
        if self.r.rank == 0 {
            println!("{:32} deregistration {:6.2} ms", "", start.elapsed().as_secs_f64() * 1e3);
        }
    }
}

fn transfers(driver: &Driver, rank: usize, meeting: &Meeting, device: c_int) {
    let cuda = Cuda::load().unwrap();
    let (mut instance, mut listen, mut coll, mut ctx) = (null_mut(), null_mut(), null_mut(), null_mut());
    let mut handle = [0u8; HANDLE_BYTES];
    // SAFETY: all pointers are to locals that live through the calls.
    unsafe {
        ok(T.init.unwrap()(&mut instance, 1, None));
        ok(T.listen.unwrap()(instance, 0, handle.as_mut_ptr().cast(), &mut listen));
        let mut all = meeting.exchange(&handle);
        let mut pointers: Vec<*mut c_void> = all.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
        ok(T.connect.unwrap()(null_mut(), pointers.as_mut_ptr(), 2, rank as c_int, listen, &mut coll));
        ok(T.close_listen.unwrap()(listen));
        let mut config = ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        ok(T.create_context.unwrap()(coll, &mut config, &mut ctx));
    }
    let mut bench = Bench::new(Rank { rank, coll, ctx }, meeting);
    let transport = std::env::var("OXYGIN_SOFT_TRANSPORT").unwrap_or("auto".into());
    let (one, four) = (driver.segments(&cuda, device, 1), driver.segments(&cuda, device, 4));
    for (kind, base) in [("cuMemCreate", one.base()), ("cuMemCreate, 4 segments", four.base())] {
        bench.measure(&transport, kind, base);
    }
    // SAFETY: plain calls in NCCL's order.
    unsafe {
        ok(T.destroy_context.unwrap()(ctx));
        ok(T.close_coll.unwrap()(coll));
        ok(T.finalize.unwrap()(instance));
    }
}

/// Spins until a word of host memory is not 0.
const SPIN: &std::ffi::CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 word) {
    .reg .u64 %at;
    .reg .u32 %value;
    .reg .pred %again;
    ld.param.u64 %at, [word];
again:
    ld.volatile.global.u32 %value, [%at];
    setp.eq.u32 %again, %value, 0;
    @%again bra again;
    ret;
}";

/// How long calls take while a kernel spins; a watchdog ends the kernel after a second.
fn waits(driver: &Driver, rank: usize, meeting: &Meeting, device: c_int) {
    let cuda = Cuda::load().unwrap();
    let allocation = driver.segments(&cuda, device, 1);
    // The first time of everything, without a kernel.
    let cycle = |timed: &mut dyn FnMut(&str, &mut dyn FnMut())| {
        let (mut found, mut fd, mut imported, mut mapped) = (None, None, None, None);
        timed("cuMemGetAddressRange", &mut || _ = cuda.address_range(allocation.base()).unwrap());
        timed("cuMemRetainAllocationHandle", &mut || found = Some(Allocation::at(&cuda, allocation.base()).unwrap()));
        timed("cuMemExportToShareableHandle", &mut || fd = found.as_ref().map(|f| f.export().unwrap()));
        timed("cuMemImportFromShareableHandle", &mut || {
            imported = fd.as_ref().map(|fd| Allocation::import(&cuda, fd.as_fd()).unwrap())
        });
        timed("reserve, map, set access", &mut || {
            mapped = Some(Mapped::new(&cuda, &[(imported.take().unwrap(), SIZE as u64)], device).unwrap())
        });
        timed("unmap, free addresses", &mut || drop(mapped.take()));
    };
    cycle(&mut |_, call| call());
    meeting.exchange(b"");
    if rank == 0 {
        type Load = unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> c_int;
        type Function = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const std::ffi::c_char) -> c_int;
        type Launch = unsafe extern "C" fn(
            *mut c_void,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            *mut c_void,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> c_int;
        let (mut module, mut function, mut stream, mut word) = (null_mut(), null_mut(), null_mut(), null_mut());
        // SAFETY: functions of these types; all pointers are to locals.
        unsafe {
            assert_eq!(driver.get::<Load>("cuModuleLoadData")(&mut module, SPIN.as_ptr().cast()), 0);
            assert_eq!(driver.get::<Function>("cuModuleGetFunction")(&mut function, module, c"spin".as_ptr()), 0);
            let create = driver.get::<unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int>("cuStreamCreate");
            assert_eq!(create(&mut stream, 1), 0);
            let alloc = driver.get::<unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int>("cuMemHostAlloc");
            assert_eq!(alloc(&mut word, 8, 3), 0);
        }
        let flag = word as usize;
        // SAFETY: an aligned word of the pinned memory.
        let set = move |v: u64| unsafe { AtomicU64::from_ptr(flag as *mut u64) }.store(v, Ordering::SeqCst);
        cycle(&mut |name, call| {
            set(0);
            let mut argument = flag as u64;
            let mut arguments = [(&mut argument as *mut u64).cast::<c_void>()];
            // SAFETY: one block of one thread, one argument.
            unsafe {
                let launch = driver.get::<Launch>("cuLaunchKernel");
                assert_eq!(launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut()), 0);
            }
            std::thread::sleep(Duration::from_millis(20));
            let watchdog = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(500));
                set(1);
            });
            let start = Instant::now();
            call();
            let took = start.elapsed();
            watchdog.join().unwrap();
            // SAFETY: the stream lives.
            unsafe { driver.get::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuStreamSynchronize")(stream) };
            let verdict = if took > Duration::from_millis(400) { "WAITS for the kernel" } else { "does not wait" };
            println!("while a kernel runs: {name:32} {:9.3} ms, {verdict}", took.as_secs_f64() * 1e3);
        });
    }
    meeting.exchange(b"");
}

fn main() {
    let Ok(spec) = std::env::var(ENV) else {
        for (i, transport) in ["auto", "staged"].into_iter().enumerate() {
            let dir = std::env::temp_dir().join(format!("gpu-share-{}-{i}", std::process::id()));
            std::fs::create_dir(&dir).unwrap();
            let children: Vec<_> = (0..2)
                .map(|rank| {
                    std::process::Command::new(std::env::current_exe().unwrap())
                        .env(ENV, format!("{rank} {}", dir.display()))
                        .env("OXYGIN_FABRIC", "soft")
                        .env("OXYGIN_SOFT_TRANSPORT", transport)
                        .spawn()
                        .unwrap()
                })
                .collect();
            let ok = children.into_iter().map(|mut c| c.wait().unwrap().success()).fold(true, |a, b| a & b);
            let _ = std::fs::remove_dir_all(dir);
            assert!(ok, "a rank failed");
        }
        return;
    };
    let (rank, dir) = spec.split_once(' ').unwrap();
    let rank: usize = rank.parse().unwrap();
    let meeting = Meeting { dir: dir.into(), rank, round: 0.into() };
    let driver = Driver::load();
    let device = rank as c_int % driver.devices();
    driver.enter(device);
    transfers(&driver, rank, &meeting, device);
    let is_fake = std::env::var("OXYGIN_LIBCUDA").is_ok();
    if !is_fake && std::env::var("OXYGIN_SOFT_TRANSPORT").as_deref() == Ok("auto") {
        waits(&driver, rank, &meeting, device);
    }
}
