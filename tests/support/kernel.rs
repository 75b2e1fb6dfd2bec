//! A kernel that was compiled for NCCL's GDAKI backend, played by CPU threads: it is given `devHandle` and `ginHandle`s
//! as the GIN tables return them, walks the structures ([`super::structures`]) and writes entries ([`super::nic`]).

use super::common::{ok, Rank};
use super::nic::{add, wait, Ask, Place, Qp, Raw, WAIT};
use super::structures::{self, Numbers, NCCLS};
use nccl_plugin_api::gin_v13::ConfigV13;
use nccl_plugin_api::gin_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::gdaki::soft::doorbell::Ringing;
use oxygin::gdaki::soft::QueueView;
use oxygin::vtable::gin_v12::ncclGinPlugin_v12 as V12;
use oxygin::vtable::gin_v13::ncclGinPlugin_v13 as V13;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as V14;
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
        NCCLS.iter().find(|(name, _)| *name == self.nccl).expect("known").1
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

/// Signals or counters of a context.
struct Words {
    /// Word 0 of this rank.
    own: u64,
    /// Word 0 of each rank.
    remote: Vec<Place>,
}

/// The queue pairs of a (context, peer).
struct Queues {
    main: Qp,
    /// The number of its completion queue.
    completions: u32,
    /// How it is to be rung.
    handler: u32,
    companion: Option<Qp>,
}

/// What a kernel has found in a context.
struct Context {
    /// By rank; `None`: nobody made it.
    queues: Vec<Option<Queues>>,
    signals: Option<Words>,
    counters: Option<Words>,
    sink: u32,
}

/// The kernel.
pub struct Kernel<'a> {
    pub through: Through,
    pub ctx: *mut c_void,
    /// The device handle's `handle`.
    pub handle: u64,
    contexts: Vec<Context>,
    see: &'a (dyn Fn(u64) -> u64 + Sync),
}

// SAFETY: `ctx` is a number here, and device code runs in many threads.
unsafe impl Sync for Kernel<'_> {}

fn found(device: &structures::Device, context: usize, ranks: usize, see: &(dyn Fn(u64) -> u64 + Sync)) -> Context {
    let qp = |queue: structures::Queue| {
        let (handler, bell, record) = queue.ring();
        // By the doorbell with its record, or without.
        assert!([2, 10].contains(&handler) && queue.is_fresh());
        let view = QueueView {
            slots: see(queue.slot(0)),
            size: queue.slots() as u32,
            completions: see(queue.completion(0).0),
            record: see(record),
            bell: see(bell),
            handler: Ringing::Doorbell,
            number: queue.rung_number() >> 8,
        };
        (0..=device.n.segments).for_each(|n| assert_eq!(queue.word(n), view.number << 8 | n));
        Qp::new(view, Ask { is_sm90: context % 2 == 0, record_first: device.n.segments == 4, ..Ask::default() })
    };
    let queues = (0..ranks).map(|peer| {
        let (main, companion) = (device.main(context, peer), device.companion(context, peer));
        if main.is_absent() {
            assert!(companion.is_none_or(|companion| companion.is_absent()));
            return None;
        }
        let (completions, (handler, ..)) = (main.completion_number(), main.ring());
        Some(Queues { main: qp(main), completions, handler, companion: companion.map(qp) })
    });
    let words = |table: structures::Table| {
        (!table.is_absent())
            .then(|| Words { own: table.own(0), remote: (0..ranks).map(|peer| table.remote(0, peer, ranks)).collect() })
    };
    let (signals, counters) = (words(device.signals(context)), words(device.counters(context)));
    Context { queues: queues.collect(), signals, counters, sink: device.sink_key(context) }
}

impl<'a> Kernel<'a> {
    /// Makes contexts and has a kernel find its way in them. This process sees an address of device code's as `see`
    /// says.
    pub fn new(r: &Rank, through: Through, ask: Ask, see: &'a (dyn Fn(u64) -> u64 + Sync)) -> Self {
        let (ctx, handle) = through.create(r, ask).expect("a set");
        // SAFETY: the library's until destroyContext.
        let handle = unsafe { &*handle };
        let said = (handle.net_device_type, handle.net_device_version, handle.needs_proxy_progress);
        assert_eq!(said, (DEVICE_GIN_GDAKI, through.version, 0));
        let device = structures::Device::live(through.numbers(), handle.handle as u64, see);
        let contexts = (0..ask.contexts as usize).map(|c| found(&device, c, r.job.nranks, see)).collect();
        Self { through, ctx, handle: handle.handle as u64, contexts, see }
    }

    fn reader(&self) -> structures::Device<'_> {
        structures::Device::live(self.through.numbers(), 0, self.see)
    }

    /// Bytes of a window at a peer, by its `ginHandle`.
    pub fn at(&self, gin: u64, peer: usize, offset: u64) -> Place {
        (self.reader().window_key(gin, peer), offset)
    }

    /// Bytes of a window here.
    pub fn own(&self, gin: u64, offset: u64) -> Place {
        (self.reader().own_window_key(gin), offset)
    }

    pub fn has(&self, context: usize, peer: usize) -> bool {
        self.contexts[context].queues[peer].is_some()
    }

    pub fn has_companion(&self, context: usize, peer: usize) -> bool {
        self.contexts[context].queues[peer].as_ref().is_some_and(|queues| queues.companion.is_some())
    }

    pub fn has_words(&self, context: usize) -> [bool; 2] {
        [self.contexts[context].signals.is_some(), self.contexts[context].counters.is_some()]
    }

    fn queues(&self, context: usize, peer: usize) -> &Queues {
        self.contexts[context].queues[peer].as_ref().expect("a queue pair")
    }

    /// The number of a queue pair's completion queue.
    pub fn completions(&self, context: usize, peer: usize) -> u32 {
        self.queues(context, peer).completions
    }

    /// How a queue pair is rung.
    pub fn handler(&self, context: usize, peer: usize) -> u32 {
        self.queues(context, peer).handler
    }

    pub fn qp(&self, context: usize, peer: usize) -> &Qp {
        &self.queues(context, peer).main
    }

    pub fn companion(&self, context: usize, peer: usize) -> &Qp {
        self.queues(context, peer).companion.as_ref().expect("a companion")
    }

    pub fn sink(&self, context: usize) -> Place {
        (self.contexts[context].sink, 0)
    }

    pub fn add_signal(&self, context: usize, peer: usize, id: u64, n: u64) -> Raw {
        let (key, first) = self.contexts[context].signals.as_ref().expect("signals").remote[peer];
        add((key, first + 8 * id), n, self.sink(context))
    }

    /// Posts entries, and on the companion a counter that goes up when they are complete.
    pub fn post_counted(&self, (context, peer, rank): (usize, usize, usize), entries: &[Raw], counter: u64) {
        let (main, companion) = (self.qp(context, peer), self.companion(context, peer));
        let last = main.post(entries);
        let (key, first) = self.contexts[context].counters.as_ref().expect("counters").remote[rank];
        let waits = Raw::new(WAIT, 0).four([0, 0, last as u32, self.completions(context, peer)]);
        companion.post(&[waits, add((key, first + 8 * counter), 1, self.sink(context))]);
    }

    fn word(&self, first: u64, id: u64) -> u64 {
        // SAFETY: a word of the set's.
        unsafe { (*((self.see)(first + 8 * id) as *const AtomicU64)).load(Ordering::Acquire) }
    }

    pub fn signal(&self, context: usize, id: u64) -> u64 {
        self.word(self.contexts[context].signals.as_ref().expect("signals").own, id)
    }

    pub fn counter(&self, context: usize, id: u64) -> u64 {
        self.word(self.contexts[context].counters.as_ref().expect("counters").own, id)
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
