//! A program that uses both of its backends in one communicator: NCCL 2.31.2 and newer, with `NCCL_RMA_PLUGIN` set too,
//! connect the GIN table, whose device code's queues this library drains, and NCCL's proxy over the RMA table. The
//! device numbers of the first serve both, and every window is registered with both.

use crate::harness::Fake;
use crate::support::apart::is_elsewhere;
use crate::support::common::{ok, Job, Rank, Window};
use crate::support::device::{entry, own, Ask, Device};
use crate::support::tasks;
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::gin_v14::GinV14;
use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::rma_v16::RmaV16;
use nccl_plugin_api::*;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as GIN;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as RMA;
use std::ffi::{c_int, c_void, CStr, CString};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Ranks of each job.
const RANKS: usize = 2;
/// Words that a put moves.
const WORDS: usize = 64;
/// Puts of each backend while the other one works.
const ROUNDS: u64 = 150;
/// NCCL's number for the communicator, the same for both tables.
const COMM_ID: u64 = 0x5eed;

/// What is alike in both tables.
trait Calls {
    fn init(&self) -> InitFn;
    fn listen(&self) -> ListenFn;
    fn connect(&self) -> ConnectFn;
    fn close_listen(&self) -> ObjectFn;
    fn properties(&self) -> (DevicesFn, PropertiesV12Fn);
    /// destroyContext, closeColl, finalize.
    fn ends(&self) -> [ObjectFn; 3];
}

macro_rules! calls {
    ($table:ty) => {
        impl Calls for $table {
            fn init(&self) -> InitFn {
                self.init.unwrap()
            }
            fn listen(&self) -> ListenFn {
                self.listen.unwrap()
            }
            fn connect(&self) -> ConnectFn {
                self.connect.unwrap()
            }
            fn close_listen(&self) -> ObjectFn {
                self.close_listen.unwrap()
            }
            fn properties(&self) -> (DevicesFn, PropertiesV12Fn) {
                (self.devices.unwrap(), self.get_properties.unwrap())
            }
            fn ends(&self) -> [ObjectFn; 3] {
                [self.destroy_context.unwrap(), self.close_coll.unwrap(), self.finalize.unwrap()]
            }
        }
    };
}

calls!(GinV14);
calls!(RmaV16);

/// What tells one device from another.
#[derive(Debug, PartialEq)]
struct Named {
    name: CString,
    pci_path: Option<CString>,
    guid: u64,
    port: c_int,
    speed: c_int,
    ptr_support: c_int,
}

/// The devices of a table, in its order; each has this device type.
fn devices(table: &impl Calls, kind: c_int) -> Vec<Named> {
    let (count, properties) = table.properties();
    let mut n = 0;
    // SAFETY: a place for the answer.
    ok(unsafe { count(&mut n) });
    let one = |device| {
        let mut props = std::mem::MaybeUninit::<PropertiesV12>::uninit();
        // SAFETY: a place for the answer, filled on success; its strings stay.
        unsafe {
            ok(properties(device, props.as_mut_ptr()));
            let props = props.assume_init();
            assert_eq!(props.net_device_type, kind);
            let text = |at: *const std::ffi::c_char| (!at.is_null()).then(|| CStr::from_ptr(at).to_owned());
            Named {
                name: text(props.name).unwrap(),
                pci_path: text(props.pci_path),
                guid: props.guid,
                port: props.port,
                speed: props.speed,
                ptr_support: props.ptr_support,
            }
        }
    };
    (0..n).map(one).collect()
}

/// Where the ranks of a job find each other's handles, once for each table.
type Board = Mutex<Vec<[u8; HANDLE_BYTES]>>;

/// Joins by one table, at this device; no contexts yet.
fn join(table: &impl Calls, job: &Arc<Job>, rank: usize, device: c_int, board: &Board) -> Rank {
    let (mut instance, mut listen, mut coll) = (null_mut(), null_mut(), null_mut());
    let mut handle = [0u8; HANDLE_BYTES];
    // SAFETY: all pointers are to locals that live through the calls.
    unsafe {
        ok(table.init()(&mut instance, COMM_ID, None));
        ok(table.listen()(instance, device, handle.as_mut_ptr().cast(), &mut listen));
        board.lock().unwrap()[rank] = handle;
        job.barrier.wait();
        let mut all = board.lock().unwrap().clone();
        let mut pointers: Vec<*mut c_void> = all.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
        ok(table.connect()(null_mut(), pointers.as_mut_ptr(), RANKS as c_int, rank as c_int, listen, &mut coll));
        ok(table.close_listen()(listen));
    }
    job.barrier.wait();
    Rank { job: job.clone(), rank, instance, coll, ctx: null_mut() }
}

/// Memory that both know.
struct Shared {
    window: Window,
    /// The GIN table's registration, and what device code calls it.
    gin: (*mut c_void, u64),
}

// SAFETY: the handles are numbers; what several threads write they write by the library.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(gin: &Rank, rma: &Rank, words: usize, flags: u64) -> Self {
        let window = rma.window(words, flags);
        let (mut registered, mut known) = (null_mut(), null_mut());
        let at = window.words.as_ptr().cast_mut().cast();
        // SAFETY: the vector does not move or shrink while registered.
        ok(unsafe { GIN.reg_mr_sym.unwrap()(gin.coll, at, 8 * words, PTR_HOST, flags, &mut registered, &mut known) });
        Self { window, gin: (registered, known as u64) }
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.window.words.len());
        // SAFETY: inside the window, which peers write, too.
        unsafe { &*self.window.words.as_ptr().add(i).cast() }
    }

    fn fill(&self, at: usize, value: u64) {
        (at..at + WORDS).for_each(|i| self.word(i).store(value, Ordering::Relaxed));
    }

    fn check(&self, at: usize, value: u64) {
        for i in at..at + WORDS {
            assert_eq!(self.word(i).load(Ordering::Relaxed), value, "word {i}");
        }
    }
}

/// A rank in both.
struct Both<'a> {
    gin: &'a Rank,
    rma: &'a Rank,
    device: &'a Device<'a>,
    data: &'a Shared,
    signals: &'a Shared,
}

// SAFETY: handles are numbers.
unsafe impl Sync for Both<'_> {}

/// The word that both backends add to.
const COMMON: usize = 7;

impl Both<'_> {
    fn peer(&self) -> usize {
        1 - self.gin.rank
    }

    /// Device code puts and signals in each of these rounds; the peer answers each.
    fn by_queue(&self, rounds: std::ops::RangeInclusive<u64>) {
        let (source, target) = (0, WORDS);
        let common = entry(OP_VA_SIGNAL | OP_SIGNAL_ADD, 0).first(8 * COMMON as u64, self.signals.gin.1);
        for n in rounds {
            self.data.fill(source, n << 8 | self.gin.rank as u64);
            let put = entry(OP_PUT | OP_SIGNAL_INC, 8 * WORDS as u64)
                .first(8 * source as u64, self.data.gin.1)
                .second(8 * target as u64, self.data.gin.1);
            self.device.post(0, self.peer(), put.with_signal(0, 0, true));
            self.device.post(0, self.peer(), common.with_signal(0, 1, true));
            self.device.wait_signal(0, 0, n);
            self.data.check(target, n << 8 | self.peer() as u64);
            self.device.post(0, self.peer(), entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(1, 0, true));
            self.device.wait_signal(0, 1, n);
            self.device.flush(0, self.peer());
        }
    }

    /// NCCL's proxy does the same by calls, elsewhere in the same memory.
    fn by_calls(&self, rounds: std::ops::RangeInclusive<u64>) {
        let (source, target, peer) = (2 * WORDS, 3 * WORDS, self.peer());
        let (data, signals) = (&self.data.window, &self.signals.window);
        for n in rounds {
            self.data.fill(source, n << 16 | self.rma.rank as u64);
            let at = |word: usize| 8 * word as u64;
            let put =
                self.rma.put(0, (data, at(source)), 8 * WORDS, (data, at(target)), peer, Some((signals, at(0), 1)));
            let common = self.rma.put(0, (data, 0), 0, (data, 0), peer, Some((signals, at(COMMON), 1 << 32)));
            self.rma.wait_signal(signals, 0, n);
            self.data.check(target, n << 16 | peer as u64);
            let answer = self.rma.put(0, (data, 0), 0, (data, 0), peer, Some((signals, at(1), 1)));
            self.rma.wait_signal(signals, 1, n);
            [put, common, answer].into_iter().for_each(|request| self.rma.wait(request));
        }
    }
}

/// How both end.
#[derive(Clone, Copy, Debug)]
enum End {
    GinFirst,
    RmaFirst,
    /// By finalize alone.
    GinFirstAtOnce,
    RmaFirstAtOnce,
}

impl End {
    fn is_gin_first(self) -> bool {
        matches!(self, Self::GinFirst | Self::GinFirstAtOnce)
    }
}

/// Ends a rank by its table.
fn end(table: &impl Calls, rank: &Rank, ctx: *mut c_void, at_once: bool) {
    let [destroy, close, finalize] = table.ends();
    // SAFETY: plain calls in NCCL's order; nothing is under way.
    unsafe {
        if !at_once {
            ok(destroy(ctx));
            ok(close(rank.coll));
        }
        ok(finalize(rank.instance));
    }
}

/// One rank from init to finalize; each backend goes on when the other one has ended.
fn life(job: &Arc<Job>, rank: usize, at: c_int, boards: &[Board; 2], how: End) {
    let gin = join(&GIN, job, rank, at, &boards[0]);
    let mut rma = join(&RMA, job, rank, at, &boards[1]);
    let device = Device::new(&gin, Ask { depth: 16, ..Ask::default() });
    let mut config = ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
    // SAFETY: pointers to locals.
    ok(unsafe { RMA.create_context.unwrap()(rma.coll, &mut config, &mut rma.ctx) });
    let (data, signals) = (Shared::new(&gin, &rma, 4 * WORDS, 0), Shared::new(&gin, &rma, 8, MR_FLAG_FORCE_SO));
    job.barrier.wait();
    let both = Both { gin: &gin, rma: &rma, device: &device, data: &data, signals: &signals };
    std::thread::scope(|s| {
        s.spawn(|| both.by_queue(1..=ROUNDS));
        both.by_calls(1..=ROUNDS);
    });
    let sum = ROUNDS | ROUNDS << 32;
    rma.wait_signal(&signals.window, COMMON, sum);
    job.barrier.wait();
    let common = signals.word(COMMON).load(Ordering::Acquire);
    assert_eq!(common, sum, "what both backends added to one word");
    assert!(!device.has_error());
    job.barrier.wait();
    let at_once = matches!(how, End::GinFirstAtOnce | End::RmaFirstAtOnce);
    let end_gin = || {
        if !at_once {
            for window in [&data, &signals] {
                // SAFETY: plain call.
                ok(unsafe { GIN.dereg_mr_sym.unwrap()(gin.coll, window.gin.0) });
            }
        }
        end(&GIN, &gin, device.ctx, at_once);
    };
    let end_rma = || {
        if !at_once {
            rma.dereg(&data.window);
            rma.dereg(&signals.window);
        }
        end(&RMA, &rma, rma.ctx, at_once);
    };
    let after = ROUNDS + 1..=ROUNDS + 20;
    if how.is_gin_first() {
        end_gin();
        job.barrier.wait();
        both.by_calls(after);
        job.barrier.wait();
        end_rma();
    } else {
        end_rma();
        job.barrier.wait();
        both.by_queue(after);
        job.barrier.wait();
        end_gin();
    }
    job.barrier.wait();
}

/// What the process has open, and the names of the library's threads.
fn left() -> (Vec<PathBuf>, Vec<String>) {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut open: Vec<_> = links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    // The folder that is being read has gone with it.
    open.retain(|one| !one.starts_with("/proc"));
    open.sort();
    let running = tasks::running().into_iter();
    let names = running.filter_map(|task| std::fs::read_to_string(task.join("comm")).ok());
    (open, names.filter(|name| name.starts_with("oxygin")).collect())
}

fn both_backends(count: usize, at: c_int) {
    let listed = devices(&GIN, DEVICE_GIN_GDAKI);
    assert_eq!(listed, devices(&RMA, DEVICE_GIN_PROXY));
    assert_eq!(listed.len(), count);
    let before = left();
    for how in [End::GinFirst, End::RmaFirst, End::GinFirstAtOnce, End::RmaFirstAtOnce] {
        let job = Job::new(RANKS);
        let boards = [(); 2].map(|()| Mutex::new(vec![[0; HANDLE_BYTES]; RANKS]));
        std::thread::scope(|s| {
            for rank in 0..RANKS {
                let (job, boards) = (&job, &boards);
                s.spawn(move || {
                    let life = std::panic::AssertUnwindSafe(|| life(job, rank, at, boards, how));
                    if let Err(panic) = std::panic::catch_unwind(life) {
                        job.barrier.fail();
                        std::panic::resume_unwind(panic);
                    }
                });
            }
        });
        assert_eq!(left(), before, "after {how:?}");
    }
}

#[test]
fn a_program_uses_both_over_the_soft_fabric() {
    if is_elsewhere(concat!(module_path!(), "::a_program_uses_both_over_the_soft_fabric")) {
        return;
    }
    let _turn = own();
    std::env::set_var("OXYGIN_FABRIC", "soft");
    both_backends(1, 0);
}

#[test]
fn a_program_uses_both_over_the_second_of_three_devices() {
    if is_elsewhere(concat!(module_path!(), "::a_program_uses_both_over_the_second_of_three_devices")) {
        return;
    }
    let fake = Fake::take();
    fake.set("devices", 3);
    std::env::set_var("OXYGIN_ENGINE", "own");
    std::env::set_var("OXYGIN_FABRIC", "verbs");
    both_backends(3, 1);
    for what in ["regions", "channels", "cqs", "qps"] {
        assert_eq!(fake.count(&format!("live_{what}")), 0, "{what} are left");
    }
}
