//! A kernel that was compiled for NCCL's GDAKI backend, played by CPU threads: it is given `devHandle` and `ginHandle`s
//! as the GIN tables return them. How it walks the structures and writes entries is the command-line tool's
//! ([`oxygin_cli::device::gdaki`]); what is here asks for contexts and waits as tests do.

use super::common::{ok, Rank};
use super::nic::{read, value, wait, write, Ask, Place, Qp, Raw, Status, DUMP};
use nccl_plugin_api::gin_v13::ConfigV13;
use nccl_plugin_api::gin_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::vtable::gin_v12::ncclGinPlugin_v12 as V12;
use oxygin::vtable::gin_v13::ncclGinPlugin_v13 as V13;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as V14;
use oxygin_cli::device::gdaki::{self, Numbers};
use oxygin_cli::plugin::ContextConfig;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// A table, what it is asked for, and the NCCL that the kernel was compiled with.
#[derive(Clone, Copy, Debug)]
pub struct Through {
    pub table: c_int,
    /// `backendVersion`, where the table has it.
    pub backend: c_int,
    pub nccl: &'static str,
    /// What `netDeviceVersion` has to be.
    pub version: c_int,
}

/// Every layout by every table that has it, read by every NCCL that reads it.
pub const WAYS: [Through; 6] = [
    Through { table: 12, backend: 0, nccl: "2.29.7", version: 100 },
    Through { table: 13, backend: 0, nccl: "2.30.4", version: 200 },
    Through { table: 14, backend: 1, nccl: "2.30.4", version: 200 },
    Through { table: 14, backend: 2, nccl: "2.30.7", version: 200 },
    Through { table: 14, backend: 2, nccl: "2.31.2", version: 200 },
    Through { table: 14, backend: 2, nccl: "2.32.3", version: 200 },
];

impl Through {
    fn numbers(self) -> Numbers {
        Numbers::of(self.nccl).expect("known")
    }

    /// createContext. On success the context and the device handle.
    pub fn create(self, r: &Rank, ask: Ask) -> Result<(*mut c_void, *mut DeviceHandle), NcclResult> {
        let (mut ctx, mut handle) = (null_mut(), null_mut());
        let (signals, counters, contexts) = (ask.signals as c_int, ask.counters as c_int, ask.contexts as c_int);
        // SAFETY: pointers to locals.
        let result = unsafe {
            match self.table {
                12 => V12.create_context.unwrap()(r.coll, signals, counters, contexts, &mut ctx, &mut handle),
                13 => {
                    let mut config = ConfigV13 {
                        n_signals: signals,
                        n_counters: counters,
                        n_contexts: contexts,
                        queue_depth: ask.depth,
                        traffic_class: -1,
                    };
                    V13.create_context.unwrap()(r.coll, &mut config, &mut ctx, &mut handle)
                }
                _ => {
                    let mut config = ConfigV14 {
                        n_signals: signals,
                        n_counters: counters,
                        n_contexts: contexts,
                        queue_depth: ask.depth,
                        traffic_class: -1,
                        backend_version: self.backend,
                        rank_stride: ask.stride as c_int,
                    };
                    V14.create_context.unwrap()(r.coll, &mut config, &mut ctx, &mut handle)
                }
            }
        };
        match result {
            NcclResult::SUCCESS => Ok((ctx, handle)),
            refused => {
                assert!(ctx.is_null() && handle.is_null());
                Err(refused)
            }
        }
    }

    /// regMrSym: the handle for calls, and the one for device code.
    pub fn register(self, r: &Rank, at: u64, bytes: usize, kind: c_int) -> (*mut c_void, u64) {
        let (mut mhandle, mut gin) = (null_mut(), null_mut());
        let register = match self.table {
            12 => V12.reg_mr_sym,
            13 => V13.reg_mr_sym,
            _ => V14.reg_mr_sym,
        };
        // SAFETY: memory that stays, and pointers to locals.
        ok(unsafe { register.unwrap()(r.coll, at as *mut c_void, bytes, kind, 0, &mut mhandle, &mut gin) });
        (mhandle, gin as u64)
    }

    pub fn destroy(self, ctx: *mut c_void) {
        let destroy = match self.table {
            12 => V12.destroy_context,
            13 => V13.destroy_context,
            _ => V14.destroy_context,
        };
        // SAFETY: no device code runs any more.
        ok(unsafe { destroy.unwrap()(ctx) });
    }

    pub fn has_error(self, ctx: *mut c_void) -> bool {
        let query = match self.table {
            12 => V12.query_last_error,
            13 => V13.query_last_error,
            _ => V14.query_last_error,
        };
        let mut has = false;
        // SAFETY: a place for the answer.
        ok(unsafe { query.unwrap()(ctx, &mut has) });
        has
    }
}

/// The kernel.
pub struct Kernel<'a> {
    pub through: Through,
    pub ctx: *mut c_void,
    /// The device handle's `handle`.
    pub handle: u64,
    found: gdaki::Kernel<'a>,
}

// SAFETY: `ctx` is a number here, and device code runs in many threads.
unsafe impl Sync for Kernel<'_> {}

impl<'a> Kernel<'a> {
    /// Makes contexts and has a kernel find its way in them. This process sees an address of device code's as `see`
    /// says.
    pub fn new(r: &Rank, through: Through, ask: Ask, see: &'a (dyn Fn(u64) -> u64 + Send + Sync)) -> Self {
        let (ctx, handle) = through.create(r, ask).expect("a set");
        // SAFETY: the library's until destroyContext.
        let handle = unsafe { &*handle };
        let (n_signals, n_counters) = (ask.signals as i32, ask.counters as i32);
        let config =
            ContextConfig { n_contexts: ask.contexts as i32, n_signals, n_counters, ..ContextConfig::default() };
        let numbers = through.numbers();
        assert_eq!(numbers.device_version, through.version);
        let (rank, ranks) = (r.rank as u32, r.job.nranks as u32);
        // SAFETY: as above, where `see` says.
        let found = unsafe { gdaki::Kernel::seen(numbers, rank, ranks, &config, handle, see) };
        Self { through, ctx, handle: handle.handle as u64, found: found.expect("structures as they have to be") }
    }

    /// Bytes of a window at a peer, by its `ginHandle`.
    pub fn at(&self, gin: u64, peer: usize, offset: u64) -> Place {
        self.found.at(gin, peer as u32, offset)
    }

    /// Bytes of a window here.
    pub fn own(&self, gin: u64, offset: u64) -> Place {
        self.found.own(gin, offset)
    }

    pub fn has(&self, context: usize, peer: usize) -> bool {
        self.found.queue_pair(context, peer as u32).is_some()
    }

    pub fn has_companion(&self, context: usize, peer: usize) -> bool {
        self.found.companion(context, peer as u32).is_some()
    }

    pub fn has_words(&self, context: usize) -> [bool; 2] {
        self.found.has_words(context)
    }

    /// The number of a queue pair's completion queue.
    pub fn completions(&self, context: usize, peer: usize) -> u32 {
        self.qp(context, peer).view.completion_number
    }

    /// How a queue pair is rung.
    pub fn handler(&self, context: usize, peer: usize) -> u32 {
        self.qp(context, peer).view.nic_handler
    }

    pub fn qp(&self, context: usize, peer: usize) -> Qp<'_> {
        Qp(self.found.queue_pair(context, peer as u32).expect("a queue pair"))
    }

    pub fn companion(&self, context: usize, peer: usize) -> Qp<'_> {
        Qp(self.found.companion(context, peer as u32).expect("a companion"))
    }

    pub fn sink(&self, context: usize) -> Place {
        self.found.sink(context)
    }

    pub fn add_signal(&self, context: usize, peer: usize, id: u64, n: u64) -> Raw {
        self.found.add_signal(context, peer as u32, id, n)
    }

    /// Posts entries, and on the companion a counter that goes up when they are complete.
    pub fn post_counted(&self, (context, peer): (usize, usize), entries: &[Raw], counter: u64) {
        let last = self.qp(context, peer).post(entries);
        let count = self.found.count(context, peer as u32, last, counter).expect("a queue pair");
        self.companion(context, peer).post(&count);
    }

    pub fn signal(&self, context: usize, id: u64) -> u64 {
        self.found.signal(context, id as u32).load(Ordering::Acquire)
    }

    /// As device code of every version resets a signal: by a store.
    pub fn reset_signal(&self, context: usize, id: u64) {
        self.found.signal(context, id as u32).store(0, Ordering::Release);
    }

    pub fn counter(&self, context: usize, id: u64) -> u64 {
        self.found.counter(context, id as u32).load(Ordering::Acquire)
    }

    pub fn wait_signal(&self, context: usize, id: u64, least: u64) {
        wait(
            || format!("signal {id} of context {context} >= {least} (it is {})", self.signal(context, id)),
            || self.signal(context, id) >= least,
        );
    }

    pub fn wait_counter(&self, context: usize, id: u64, least: u64) {
        wait(
            || format!("counter {id} of context {context} >= {least} (it is {})", self.counter(context, id)),
            || self.counter(context, id) >= least,
        );
    }

    pub fn has_error(&self) -> bool {
        self.through.has_error(self.ctx)
    }

    pub fn destroy(self) {
        self.through.destroy(self.ctx);
    }
}

/// A registered window: what device code calls it, and its words.
pub struct Seen<'a> {
    pub gin: u64,
    pub words: &'a [AtomicU64],
}

impl Seen<'_> {
    fn get(&self, i: usize) -> u64 {
        self.words[i].load(Ordering::Acquire)
    }

    fn set(&self, i: usize, value: u64) {
        self.words[i].store(value, Ordering::Release)
    }
}

/// One of three kernels with two contexts: puts around the ring with signals and counters, values, gets.
pub fn finds_its_way(r: &Rank, kernel: &Kernel, src: &Seen, dst: &Seen) {
    let (next, before) = ((r.rank + 1) % 3, (r.rank + 2) % 3);
    let held = |rank: usize, i: u64| (i << 8) + rank as u64 + 1;
    (0..64).for_each(|i| src.set(i as usize, held(r.rank, i)));
    r.job.barrier.wait();
    for round in 1..=100u64 {
        let (c, at) = (round as usize % 2, 8 * (round % 64));
        let put = write(kernel.at(dst.gin, next, at), kernel.own(src.gin, at), 8);
        let entries = [put, kernel.add_signal(c, next, 3, 1)];
        kernel.post_counted((c, next), &entries, 5);
        kernel.wait_signal(c, 3, round.div_ceil(2));
        assert_eq!(dst.get(at as usize / 8), held(before, round % 64), "{:?}, round {round}", kernel.through);
        r.job.barrier.wait();
    }
    kernel.wait_counter(0, 5, 50);
    kernel.wait_counter(1, 5, 50);
    assert_eq!([0, 1].map(|c| (kernel.counter(c, 5), kernel.counter(c, 4))), [(50, 0); 2]);
    // Values, to a peer and to oneself.
    let bytes: Vec<u8> = (1..=28).collect();
    for (slot, peer) in [(100, before), (200, r.rank)] {
        let to = kernel.at(dst.gin, peer, 8 * slot);
        kernel.qp(1, peer).post(&[value(to, &bytes), kernel.add_signal(1, peer, 7, 10)]);
    }
    kernel.wait_signal(1, 7, 20);
    for slot in [100, 200] {
        let got: Vec<u8> = (slot..slot + 4).flat_map(|i| dst.get(i).to_le_bytes()).collect();
        assert!(got[..28] == bytes[..] && got[28..] == [0; 4]);
    }
    // Gets, with the dump behind them that a flush may post.
    let got = read(kernel.at(src.gin, next, 0), kernel.own(dst.gin, 8 * 300), 512);
    kernel.qp(0, next).post(&[got, Raw::new(DUMP, 0).data(kernel.sink(0).0, 0, 1)]);
    assert_eq!(kernel.qp(0, next).flush(), Status::Good);
    (0..64).for_each(|i| assert_eq!(dst.get(300 + i as usize), held(next, i)));
}
