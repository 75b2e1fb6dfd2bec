//! Device code of NCCL's proxy backend, played by CPU threads: it claims slots, waits for credits, writes descriptors.

use super::common::{ok, Rank};
use super::turn;
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::device_context::{ContextV1, ContextV2};
use nccl_plugin_api::gin_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::sys::wait;
use oxygin::vtable::gin_v14::ncclGinPlugin_v14 as GIN;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long device code waits before the test fails.
const LIMIT: Duration = Duration::from_secs(60);

/// What createContext is asked for.
#[derive(Clone, Copy)]
pub struct Ask {
    pub contexts: c_int,
    pub signals: c_int,
    pub counters: c_int,
    pub depth: c_int,
    pub stride: c_int,
}

impl Default for Ask {
    fn default() -> Self {
        Self { contexts: 1, signals: 8, counters: 8, depth: 0, stride: 1 }
    }
}

impl Ask {
    pub fn config(self) -> ConfigV14 {
        ConfigV14 {
            n_signals: self.signals,
            n_counters: self.counters,
            n_contexts: self.contexts,
            queue_depth: self.depth,
            traffic_class: -1,
            backend_version: 2,
            rank_stride: self.stride,
        }
    }
}

/// A set of contexts, as device code has it.
pub struct Device<'a> {
    pub ctx: *mut c_void,
    array: u64,
    context_bytes: usize,
    /// Where this process sees an address of device code's.
    see: Box<dyn Fn(u64) -> u64 + Sync + 'a>,
}

// SAFETY: device code runs in many threads.
unsafe impl Sync for Device<'_> {}

/// Waits for the turn, and has the library drain queues itself.
pub fn own() -> turn::Turn {
    let turn = turn::take();
    std::env::set_var("OXYGIN_ENGINE", "own");
    turn
}

/// Waits until something is there; `what` says it where it does not come.
pub fn wait(what: impl Fn() -> String, mut until: impl FnMut() -> bool) {
    assert!(wait::until(Instant::now() + LIMIT, &mut until), "{} has not come in {LIMIT:?}", what());
}

impl<'a> Device<'a> {
    /// On a machine without a GPU.
    pub fn new(r: &Rank, ask: Ask) -> Self {
        Self::seen_by(r, ask, |at| at)
    }

    /// Device code whose addresses this process sees as `see` says.
    pub fn seen_by(r: &Rank, ask: Ask, see: impl Fn(u64) -> u64 + Sync + 'a) -> Self {
        let (mut ctx, mut handle) = (null_mut(), null_mut());
        let mut config = ask.config();
        // SAFETY: pointers to locals; the handle is the library's until destroyContext.
        unsafe {
            ok(GIN.create_context.unwrap()(r.coll, &mut config, &mut ctx, &mut handle));
            assert_eq!(((*handle).net_device_type, (*handle).needs_proxy_progress), (DEVICE_GIN_PROXY, 0));
            Self { ctx, array: (*handle).handle as u64, context_bytes: 80, see: Box::new(see) }
        }
    }

    pub fn destroy(self) {
        // SAFETY: no device code runs any more.
        ok(unsafe { GIN.destroy_context.unwrap()(self.ctx) });
    }

    pub fn has_error(&self) -> bool {
        let mut has = false;
        // SAFETY: a place for the answer.
        ok(unsafe { GIN.query_last_error.unwrap()(self.ctx, &mut has) });
        has
    }

    pub fn context(&self, c: usize) -> ContextV2 {
        // SAFETY: the library made the array, and `c` is one of its contexts.
        unsafe { ((self.see)(self.array + (c * self.context_bytes) as u64) as *const ContextV2).read_unaligned() }
    }

    fn v1(&self, c: usize) -> ContextV1 {
        self.context(c).v1
    }

    fn u32_at(&self, base: u64, i: usize) -> &AtomicU32 {
        // SAFETY: an array of the library's with a word for each rank.
        unsafe { &*((self.see)(base + 4 * i as u64) as *const AtomicU32) }
    }

    fn u64_at(&self, base: u64, i: usize) -> &AtomicU64 {
        // SAFETY: an array of the library's; `i` is one of the numbers that were asked for.
        unsafe { &*((self.see)(base + 8 * i as u64) as *const AtomicU64) }
    }

    pub fn pi(&self, c: usize, peer: usize) -> &AtomicU32 {
        self.u32_at(self.v1(c).pis, peer)
    }

    pub fn ci(&self, c: usize, peer: usize) -> u32 {
        self.u32_at(self.v1(c).cis, peer).load(Ordering::Acquire)
    }

    /// Whether device code that has claimed the next entry may write it.
    pub fn has_credit(&self, c: usize, peer: usize) -> bool {
        let next = self.pi(c, peer).load(Ordering::Relaxed);
        next.wrapping_sub(self.ci(c, peer)) < self.v1(c).queue_size
    }

    /// Writes a descriptor; `order` permutes its words.
    pub fn post_in(&self, c: usize, peer: usize, d: &Descriptor, order: &[usize], pause: impl Fn()) {
        let v1 = self.v1(c);
        let index = self.pi(c, peer).fetch_add(1, Ordering::Relaxed);
        wait(
            || format!("a credit of context {c} to rank {peer} for entry {index}"),
            || index.wrapping_sub(self.ci(c, peer)) < v1.queue_size,
        );
        let words = d.form.bytes() / 8;
        let slot = (peer * v1.queue_size as usize + (index & (v1.queue_size - 1)) as usize) * words;
        for &word in order.iter().filter(|&&word| word < words) {
            let value = d.words.get(word).copied().unwrap_or(1);
            self.u64_at(v1.queues, slot + word).store(value, Ordering::Release);
            pause();
        }
    }

    pub fn post(&self, c: usize, peer: usize, d: Descriptor) {
        self.post_in(c, peer, &d, &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0], || {});
    }

    /// Waits until all that was posted to a peer is complete.
    pub fn flush(&self, c: usize, peer: usize) {
        let begun = self.pi(c, peer).load(Ordering::Relaxed);
        wait(
            || format!("entry {begun} of context {c} to rank {peer} (complete: {})", self.ci(c, peer)),
            || self.ci(c, peer).wrapping_sub(begun) as i32 >= 0,
        );
    }

    /// After gets: waits until what they brought is visible.
    pub fn flush_gets(&self, c: usize, peer: usize, own: usize) {
        self.flush(c, peer);
        self.post(c, own, Descriptor::new(Form::Bytes128, 2, OP_FLUSH, 0));
        self.flush(c, own);
    }

    pub fn signal(&self, c: usize, id: usize) -> u64 {
        self.u64_at(self.v1(c).signals, id).load(Ordering::Acquire)
    }

    pub fn wait_signal(&self, c: usize, id: usize, least: u64) {
        wait(
            || format!("signal {id} of context {c} >= {least} (it is {})", self.signal(c, id)),
            || self.signal(c, id) >= least,
        );
    }

    pub fn counter(&self, c: usize, id: usize) -> u64 {
        self.u64_at(self.v1(c).counters, id).load(Ordering::Acquire)
    }
}

/// A descriptor of the newest form.
pub fn entry(op: u16, size: u64) -> Descriptor {
    Descriptor::new(Form::Bytes128, 2, op, size)
}
