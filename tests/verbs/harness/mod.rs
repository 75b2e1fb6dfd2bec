//! Ranks over the fake libibverbs: all in this process, each with a fabric, contexts and two windows of its own.

#![allow(dead_code, reason = "a program that has it for itself uses a part")]

use crate::support::turn::{self, Turn};
use oxygin::comm::backpressure::Backpressure;
use oxygin::config::Config;
use oxygin::error::Result;
use oxygin::fabric::verbs::{devices, Pending, VerbsContext, VerbsFabric};
use oxygin::fabric::{Context, ContextSpec, Fabric, Posted, Region, World};
use oxygin::memory::registry::{Extent, Registry};
use oxygin::memory::window::Registration;
use oxygin::rma::op::{Get, Op, Put, Signal};
use oxygin::rma::seq::Seq;
use std::ffi::{c_char, CString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a test waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The fake library, its settings at their defaults. One test at a time has it.
pub struct Fake {
    library: libloading::Library,
    _turn: Turn,
}

/// Where cargo put the fake.
pub fn fake_path() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let deps = if deps.ends_with("examples") { deps.with_file_name("deps") } else { deps.to_owned() };
    let path = deps.join("libfake_verbs.so");
    assert!(path.exists(), "{} is not there; build the package fake-verbs", path.display());
    path
}

/// A copy of the fake that lacks a symbol.
pub fn without(name: &str) -> PathBuf {
    let mut bytes = std::fs::read(fake_path()).unwrap();
    let needle = [b"\0", name.as_bytes(), b"\0"].concat();
    let mut found = 0;
    for at in 0..bytes.len() - needle.len() {
        if bytes[at..at + needle.len()] == needle[..] {
            bytes[at + 2] = b'?';
            found += 1;
        }
    }
    assert!(found > 0, "{name} is not in the fake");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libfake_without_{name}.so"));
    // A file of its own each time: it may be loaded already.
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, bytes).unwrap();
    path
}

impl Fake {
    /// Waits for the turn and takes the fake.
    pub fn take() -> Self {
        Self::take_from(&fake_path())
    }

    /// The same, of a fake elsewhere.
    pub fn take_from(path: &Path) -> Self {
        let turn = turn::take();
        for name in ["OXYGIN_FABRIC", "OXYGIN_LIBCUDA"] {
            std::env::remove_var(name);
        }
        std::env::set_var("OXYGIN_LIBIBVERBS", path);
        std::env::set_var("OXYGIN_LIBRDMACM", path);
        // SAFETY: our own library.
        let library = unsafe { libloading::Library::new(path) }.unwrap();
        let fake = Self { library, _turn: turn };
        fake.set("reset", 0);
        fake
    }

    /// Sets a limit or fault.
    pub fn set(&self, key: &str, value: i64) {
        let name = CString::new(key).unwrap();
        // SAFETY: the fake exports a function of this type.
        let rc = unsafe {
            let f: libloading::Symbol<unsafe extern "C" fn(*const c_char, i64) -> i64> =
                self.library.get(b"fake_verbs_control").unwrap();
            f(name.as_ptr(), value)
        };
        assert_eq!(rc, 0, "the fake knows no {key}");
    }

    /// Reads a count.
    pub fn count(&self, key: &str) -> i64 {
        let name = CString::new(key).unwrap();
        // SAFETY: the fake exports a function of this type.
        unsafe {
            let f: libloading::Symbol<unsafe extern "C" fn(*const c_char) -> i64> =
                self.library.get(b"fake_verbs_query").unwrap();
            f(name.as_ptr())
        }
    }

    /// Nothing overran, nothing is left.
    pub fn check_clean(&self) {
        assert_eq!(self.count("completion_overruns"), 0, "a completion queue overran");
        for what in
            ["lists", "contexts", "pds", "regions", "channels", "cqs", "qps", "cm_channels", "cm_ids", "cm_events"]
        {
            assert_eq!(self.count(&format!("live_{what}")), 0, "{what} are left");
        }
        assert_eq!(self.count("misuse"), 0);
    }
}

/// Memory with atomic words, for data and signals alike.
pub struct Memory(pub Box<[AtomicU64]>);

impl Memory {
    /// Zeroed.
    pub fn new(bytes: usize) -> Self {
        Self((0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect())
    }
    /// First byte.
    pub fn base(&self) -> u64 {
        self.0.as_ptr() as u64
    }
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.0.len() as u64 * 8
    }
    /// A word.
    pub fn word(&self, i: usize) -> u64 {
        self.0[i].load(Ordering::Acquire)
    }
    /// Writes a word.
    pub fn store(&self, i: usize, v: u64) {
        self.0[i].store(v, Ordering::Release);
    }
}

/// A registered window.
pub struct Window {
    pub registration: Registration,
    pub memory: Memory,
}

/// One rank. Fields drop in the order contexts, windows, fabric.
pub struct Rank {
    pub contexts: Vec<VerbsContext>,
    pub data: Window,
    pub signals: Window,
    pub fabric: VerbsFabric,
    pub registry: Arc<Registry>,
    pub rank: u32,
}

/// What a job is made from.
#[derive(Clone)]
pub struct Job {
    pub ranks: u32,
    pub spec: ContextSpec,
    pub config: Config,
    /// Bytes of the data window.
    pub bytes: usize,
    /// Words of the signal window.
    pub words: usize,
    /// Devices in use: rank r opens number r modulo this.
    pub devices: usize,
    /// Puts are complete when they are visible at the peer.
    pub confirms: bool,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            ranks: 2,
            spec: ContextSpec { contexts: 1, queue_depth: 0, traffic_class: None, rank_stride: 1 },
            config: Config::default(),
            bytes: 1 << 16,
            words: 64,
            devices: 1,
            confirms: false,
        }
    }
}

impl Job {
    /// Opens and introduces everybody.
    pub fn fabrics(&self) -> Vec<(VerbsFabric, Arc<Registry>)> {
        let list = devices(&self.config).unwrap();
        let fabrics: Vec<_> = (0..self.ranks)
            .map(|r| {
                let registry = Arc::new(Registry::default());
                let device = &list[r as usize % self.devices];
                (VerbsFabric::open(device, &self.config, registry.clone()).unwrap(), registry)
            })
            .collect();
        let hellos: Vec<_> = fabrics.iter().map(|f| f.0.hello()).collect();
        let hellos: Vec<_> = hellos.iter().map(Vec::as_slice).collect();
        for (r, f) in fabrics.iter().enumerate() {
            f.0.join(World { rank: r as u32, nranks: self.ranks }, &hellos).unwrap();
        }
        fabrics
    }

    /// Everything up to the first operation.
    pub fn start(&self) -> Vec<Rank> {
        let fabrics = self.fabrics();
        if self.confirms {
            fabrics.iter().for_each(|f| f.0.confirm_puts());
        }
        let contexts = match devices(&self.config).unwrap()[0].iwarp {
            true => connect_together(&fabrics, &self.spec).into_iter().map(Result::unwrap).collect(),
            false => connect(&fabrics, &self.spec),
        };
        fabrics
            .into_iter()
            .zip(contexts)
            .enumerate()
            .map(|(r, ((fabric, registry), contexts))| {
                let window = |id: u32, bytes: usize, strict: bool| {
                    let memory = Memory::new(bytes);
                    let region = Region { id, base: memory.base(), len: memory.len(), strict, dma_buf: None };
                    let registration = fabric.register(&region).unwrap();
                    registry.insert(id, Extent { base: memory.base(), len: memory.len() });
                    Window { registration, memory }
                };
                let data = window(0, self.bytes, false);
                let signals = window(1, self.words * 8, true);
                Rank { contexts, data, signals, fabric, registry, rank: r as u32 }
            })
            .collect()
    }
}

/// One operation at a time, which waits for room as the tables' calls do.
pub trait Start {
    /// # Safety
    /// As for `Context::post`.
    unsafe fn put(&self, peer: u32, put: &Put) -> Result<Seq>;
    /// # Safety
    /// As for `Context::post`.
    unsafe fn get(&self, peer: u32, get: &Get) -> Result<Seq>;
    fn flushed(&self, peer: u32) -> Result<Option<Seq>>;
    /// With the local key of the window that is flushed.
    fn flushed_into(&self, peer: u32, window: u32) -> Result<Option<Seq>>;
}

const BACKPRESSURE: Backpressure = Backpressure { limit: PATIENCE, operations: 0 };

impl Start for VerbsContext {
    unsafe fn put(&self, peer: u32, put: &Put) -> Result<Seq> {
        // SAFETY: passed on.
        unsafe { BACKPRESSURE.start(self, peer, &Op::Put(*put), || Ok(())) }
    }
    unsafe fn get(&self, peer: u32, get: &Get) -> Result<Seq> {
        // SAFETY: passed on.
        unsafe { BACKPRESSURE.start(self, peer, &Op::Get(*get), || Ok(())) }
    }
    fn flushed(&self, peer: u32) -> Result<Option<Seq>> {
        BACKPRESSURE.flush(self, peer, None, || Ok(()))
    }
    fn flushed_into(&self, peer: u32, window: u32) -> Result<Option<Seq>> {
        BACKPRESSURE.flush(self, peer, Some(window), || Ok(()))
    }
}

/// Starts a put between windows that outlive the contexts' operations.
pub fn start_put(rank: &Rank, context: usize, peer: u32, put: &Put) -> Seq {
    // SAFETY: the windows do, in every test.
    unsafe { rank.contexts[context].put(peer, put) }.unwrap()
}

/// Posts one batch by a rank's first context, between windows that outlive its operations.
pub fn post_batch(rank: &Rank, peer: u32, ops: &[Op]) -> Posted {
    // SAFETY: the windows do, in every test.
    unsafe { rank.contexts[0].post(peer, ops) }.unwrap()
}

/// Ranks on devices of their own, with little room: eight work requests are with the device, 1024 operations wait.
pub fn little_room(ranks: u32) -> Vec<Rank> {
    let spec = ContextSpec { contexts: 1, queue_depth: 8, traffic_class: None, rank_stride: 1 };
    let config = Config { max_operations: 1024, ..Config::default() };
    Job { ranks, spec, config, devices: ranks as usize, ..Default::default() }.start()
}

/// What each rank said to rank `me`, out of what each said to all.
pub fn for_rank(slices: &[Vec<u8>], me: usize) -> Vec<&[u8]> {
    let n = slices.len();
    slices.iter().map(|all| &all[me * (all.len() / n)..(me + 1) * (all.len() / n)]).collect()
}

/// Makes contexts on all ranks: `[rank][context]`.
pub fn connect(fabrics: &[(VerbsFabric, Arc<Registry>)], spec: &ContextSpec) -> Vec<Vec<VerbsContext>> {
    let prepared: Vec<(Pending, Vec<u8>)> = fabrics.iter().map(|f| f.0.prepare_contexts(spec).unwrap()).collect();
    let (mut pendings, slices): (Vec<_>, Vec<_>) = prepared.into_iter().unzip();
    let ranks = || fabrics.iter().map(|f| &f.0).enumerate();
    let agreed: Vec<_> = ranks()
        .zip(&mut pendings)
        .map(|((me, fabric), pending)| fabric.agree(pending, &for_rank(&slices, me)).unwrap())
        .collect();
    // All or none.
    let count = agreed.iter().flatten().count();
    assert!(count == 0 || count == fabrics.len());
    let agreed: Vec<Vec<u8>> = agreed.into_iter().flatten().collect();
    for ((me, fabric), pending) in ranks().zip(&mut pendings).filter(|_| count > 0) {
        fabric.take_agreed(pending, &for_rank(&agreed, me)).unwrap();
    }
    let finish = |((me, fabric), pending): ((usize, &VerbsFabric), Pending)| {
        fabric.finish_contexts(pending, &for_rank(&slices, me)).unwrap()
    };
    ranks().zip(pendings).map(finish).collect()
}

/// The same with a thread a rank: iWARP devices are connected by all ranks at once.
pub fn connect_together(
    fabrics: &[(VerbsFabric, Arc<Registry>)],
    spec: &ContextSpec,
) -> Vec<oxygin::error::Result<Vec<VerbsContext>>> {
    let prepared: Vec<(Pending, Vec<u8>)> = fabrics.iter().map(|f| f.0.prepare_contexts(spec).unwrap()).collect();
    let n = fabrics.len();
    let (pendings, slices): (Vec<_>, Vec<_>) = prepared.into_iter().unzip();
    let slices = &slices;
    std::thread::scope(|scope| {
        let threads: Vec<_> = pendings
            .into_iter()
            .enumerate()
            .map(|(me, pending)| {
                scope.spawn(move || {
                    let from: Vec<&[u8]> =
                        slices.iter().map(|all| all.chunks(all.len() / n).nth(me).unwrap()).collect();
                    fabrics[me].0.finish_contexts(pending, &from)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// A put of `len` bytes from `from`'s data window at `local` to `to`'s at `remote`.
pub fn put(from: &Rank, local: u64, to: &Rank, remote: u64, len: u64) -> Put {
    Put {
        local: from.data.memory.base() + local,
        lkey: from.data.registration.lkey,
        rkey: to.data.registration.rkey,
        remote: to.data.memory.base() + remote,
        len,
        signal: None,
        more: false,
    }
}

/// An addition to word `word` of `to`'s signals.
pub fn signal(to: &Rank, word: usize, value: u64) -> Option<Signal> {
    Some(Signal {
        remote: to.signals.memory.base() + 8 * word as u64,
        rkey: to.signals.registration.rkey,
        value,
        strong: true,
    })
}

/// A get of `len` bytes from `of`'s data window at `remote` to `to`'s at `local`.
pub fn get(to: &Rank, local: u64, of: &Rank, remote: u64, len: u64) -> Get {
    Get {
        local: to.data.memory.base() + local,
        lkey: to.data.registration.lkey,
        rkey: of.data.registration.rkey,
        remote: of.data.memory.base() + remote,
        len,
        more: false,
    }
}

/// Tests an operation until it is done.
pub fn finish(context: &VerbsContext, peer: u32, seq: Seq) {
    let since = Instant::now();
    while !context.test(peer, seq).unwrap() {
        assert!(since.elapsed() < PATIENCE, "operation {seq:?} to rank {peer} is not done");
    }
}

/// Tests an operation until it fails.
pub fn failure(context: &VerbsContext, peer: u32, seq: Seq) -> oxygin::error::Error {
    let since = Instant::now();
    loop {
        match context.test(peer, seq) {
            Ok(done) => assert!(!done, "the operation succeeded"),
            Err(e) => return e,
        }
        assert!(since.elapsed() < PATIENCE, "operation {seq:?} to rank {peer} does not fail");
    }
}

/// Waits until `condition` holds.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let since = Instant::now();
    while !condition() {
        assert!(since.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}
