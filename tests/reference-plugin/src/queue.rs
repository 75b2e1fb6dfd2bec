//! A queue of its own for device code, on request (`REFERENCE_PLUGIN_QUEUE=1`): one thread takes descriptors out of
//! slots and does with each what a caller of the table would, one queue after the other, and gives slots back in order.

use crate::comm::{Comm, ContextSet, Signal, Window};
use crate::defect::{self, Defect};
use crate::objects::{answer, bad, find, Object, Refusal};
use crate::outbox::Request;
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::device_context::{ContextV1, PROXY_VERSION};
use nccl_plugin_api::gin_v13::ConfigV13;
use nccl_plugin_api::{DeviceHandle, NcclResult, DEVICE_GIN_PROXY, SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const FORM: Form = Form::Bytes128;
/// Words of a slot.
const SLOT: usize = FORM.bytes() / 8;
/// Slots where nobody says how many.
const DEPTH: i32 = 64;
/// Slots up to which a queue has the defect of reading too early: in all of them no case would pass.
const HASTY_SLOTS: usize = 16;
/// Passes in vain, of some 80 µs each, before the thread sleeps longer between two.
const PATIENT: u32 = 1000;

/// Whether device code is to get a queue.
pub fn wanted() -> bool {
    std::env::var_os("REFERENCE_PLUGIN_QUEUE").is_some_and(|v| v == "1")
}

/// What device code sees.
struct Memory {
    nranks: usize,
    size: usize,
    n_signals: u32,
    n_counters: u32,
    slots: Vec<AtomicU64>,
    indices: Vec<AtomicU32>,
    words: Vec<AtomicU64>,
}

impl Memory {
    fn new(nranks: usize, config: &ConfigV13) -> Self {
        let contexts = config.n_contexts as usize;
        let depth = if config.queue_depth > 0 { config.queue_depth } else { DEPTH };
        let depth = if defect::on(Defect::ShallowQueue) { depth / 2 } else { depth };
        let size = (depth.max(1) as usize).next_power_of_two();
        let zeros = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        let per_context = (config.n_signals + config.n_counters) as usize;
        Self {
            nranks,
            size,
            n_signals: config.n_signals as u32,
            n_counters: config.n_counters as u32,
            // One word more, to begin at a multiple of 16 bytes.
            slots: zeros(contexts * nranks * size * SLOT + 1),
            indices: (0..2 * contexts * nranks).map(|_| AtomicU32::new(0)).collect(),
            words: zeros(contexts * per_context),
        }
    }

    fn slot(&self, queue: usize, index: u32) -> &[AtomicU64] {
        let first = (self.slots.as_ptr() as usize % 16) / 8;
        &self.slots[first + (queue * self.size + index as usize % self.size) * SLOT..][..SLOT]
    }

    fn consumer(&self, queue: usize) -> &AtomicU32 {
        &self.indices[2 * (queue - queue % self.nranks) + self.nranks + queue % self.nranks]
    }

    /// Number of a signal's word.
    fn signal(&self, context: usize, id: u32) -> usize {
        let context = if defect::on(Defect::SharedSignals) { 0 } else { context };
        context * (self.n_signals + self.n_counters) as usize + id as usize
    }

    fn counter(&self, context: usize, id: u32) -> &AtomicU64 {
        let first = context * (self.n_signals + self.n_counters) as usize + self.n_signals as usize;
        &self.words[first + id as usize]
    }

    fn array(&self, contexts: usize) -> Vec<ContextV1> {
        let address = |words: &[AtomicU64]| words.as_ptr() as u64;
        let one = |context: usize| ContextV1 {
            nranks: self.nranks as i32,
            queue_size: self.size as u32,
            queues: address(self.slot(context * self.nranks, 0)),
            pis: self.indices[2 * context * self.nranks..].as_ptr() as u64,
            cis: self.consumer(context * self.nranks).as_ptr() as u64,
            counters: address(&self.words[context * (self.n_signals + self.n_counters) as usize..])
                + 8 * u64::from(self.n_signals),
            signals: address(&self.words[context * (self.n_signals + self.n_counters) as usize..]),
        };
        (0..contexts).map(one).collect()
    }
}

/// The queue of a set of contexts, and its thread.
pub struct Queue {
    memory: Arc<Memory>,
    stop: Arc<AtomicBool>,
    /// A descriptor could not be carried out.
    pub failed: Arc<AtomicBool>,
    handle: Box<DeviceHandle>,
    _array: Vec<ContextV1>,
    thread: Mutex<Option<JoinHandle<()>>>,
    signals: u64,
    comm: Arc<Comm>,
}

// SAFETY: the pointer in the handle is device code's; nothing here follows it.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Queue {
    /// Makes the memory and starts to serve it. Collective, for the signals are a window.
    pub fn start(set: &Arc<ContextSet>, config: &ConfigV13) -> Result<Self, Refusal> {
        let asked = [config.n_signals, config.n_counters, config.queue_depth];
        if asked.iter().any(|n| !(0..1 << 20).contains(n)) {
            return Err(bad(format!("signals, counters, depth: {asked:?}")));
        }
        let comm = set.comm.clone();
        let memory = Arc::new(Memory::new(comm.peers.len(), config));
        let mut array = memory.array(config.n_contexts as usize);
        let handle = Box::new(DeviceHandle {
            net_device_type: DEVICE_GIN_PROXY,
            net_device_version: PROXY_VERSION,
            handle: array.as_mut_ptr().cast(),
            size: size_of_val(&array[..]),
            needs_proxy_progress: 0,
        });
        let (base, len) = (memory.words.as_ptr() as usize, 8 * memory.words.len());
        let signals = comm.inbox.register(base, len);
        let window = Window { number: signals, comm: comm.clone(), base, len };
        let (stop, failed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut server = Server {
            set: set.clone(),
            memory: memory.clone(),
            window,
            failed: failed.clone(),
            queues: (0..config.n_contexts as usize * comm.peers.len()).map(|_| VecDeque::new()).collect(),
            broken: vec![false; config.n_contexts as usize],
        };
        let end = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut vain = 0_u32;
            while !end.load(Ordering::Relaxed) {
                vain = if server.pass() { 0 } else { vain.saturating_add(1) };
                match vain {
                    0 => {}
                    1..PATIENT => std::thread::sleep(Duration::from_micros(20)),
                    _ => std::thread::sleep(Duration::from_micros(250)),
                }
            }
        });
        let thread = Mutex::new(Some(thread));
        Ok(Self { memory, stop, failed, handle, _array: array, thread, signals, comm })
    }

    /// What device code is given.
    pub fn handle(&self) -> *mut DeviceHandle {
        (&raw const *self.handle).cast_mut()
    }

    /// Ends the thread.
    pub fn close(&self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.lock().unwrap().take() {
            let _ = thread.join();
            self.comm.inbox.deregister(self.signals);
            debug_assert!(Arc::strong_count(&self.memory) == 1);
        }
    }
}

/// A descriptor under way.
struct Started {
    request: Option<Arc<Request>>,
    counter: Option<u32>,
    /// An inline value, which must stay where it is.
    _value: Option<Box<u64>>,
}

struct Server {
    set: Arc<ContextSet>,
    memory: Arc<Memory>,
    window: Window,
    failed: Arc<AtomicBool>,
    queues: Vec<VecDeque<Started>>,
    /// By context: a malformed descriptor was there.
    broken: Vec<bool>,
}

impl Server {
    /// Looks at every queue once; whether anything moved.
    fn pass(&mut self) -> bool {
        (0..self.queues.len()).fold(false, |moved, queue| self.take(queue) | self.give_back(queue) | moved)
    }

    /// Starts the next descriptor of a queue if all of it is there.
    fn take(&mut self, queue: usize) -> bool {
        let (context, peer) = (queue / self.memory.nranks, queue % self.memory.nranks);
        let ahead = self.queues[queue].len() as u32;
        if ahead as usize == self.memory.size {
            return false;
        }
        let index = self.memory.consumer(queue).load(Ordering::Relaxed).wrapping_add(ahead);
        let slot = self.memory.slot(queue, index);
        let is_hasty = self.memory.size <= HASTY_SLOTS && defect::on(Defect::HalfRead);
        let needed = if is_hasty { 1 } else { SLOT };
        if slot[..needed].iter().any(|word| word.load(Ordering::Acquire) & 1 == 0) {
            return false;
        }
        let words = std::array::from_fn(|i| slot[i].load(Ordering::Acquire));
        if !defect::on(Defect::Uncleared) {
            slot.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        let descriptor = Descriptor { words, form: FORM };
        let nothing = Started { request: None, counter: None, _value: None };
        let started = match self.broken[context] {
            true => nothing,
            false => self.start(context, peer as u32, &descriptor).unwrap_or_else(|refusal| {
                let unsaid = match refusal.0 {
                    NcclResult::REMOTE_ERROR => Defect::DeafToDeath,
                    _ => Defect::FaultUnsaid,
                };
                if !defect::on(unsaid) {
                    self.broken[context] = true;
                    self.failed.store(true, Ordering::Release);
                }
                answer("descriptor", Err(refusal));
                nothing
            }),
        };
        self.queues[queue].push_back(started);
        true
    }

    /// Gives slots back whose descriptors are complete, in order.
    fn give_back(&mut self, queue: usize) -> bool {
        let context = queue / self.memory.nranks;
        if self.broken[context] && defect::on(Defect::FaultStops) {
            return false;
        }
        let mut moved = false;
        while let Some(first) = self.queues[queue].front() {
            let (done, failed) = first
                .request
                .as_ref()
                .map_or((true, false), |r| (r.done.load(Ordering::Acquire), r.failed.load(Ordering::Acquire)));
            if !done && !failed {
                break;
            }
            if failed && !defect::on(Defect::DeafToDeath) {
                self.failed.store(true, Ordering::Release);
            }
            if let Some(id) = first.counter.filter(|_| done) {
                let now = self.memory.counter(context, id).fetch_add(1, Ordering::Release);
                if now % 50 == 49 && defect::on(Defect::LostCount) {
                    self.memory.counter(context, id).fetch_sub(1, Ordering::Release);
                }
            }
            self.queues[queue].pop_front();
            let consumer = self.memory.consumer(queue);
            consumer.store(consumer.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
            moved = true;
        }
        moved
    }

    fn window(&self, handle: u64) -> Result<Arc<Window>, Refusal> {
        match find(handle as *mut c_void) {
            Some(Object::Window(window)) if Arc::ptr_eq(&window.comm, &self.set.comm) => Ok(window),
            _ => Err(bad(format!("window handle {handle:#x} is unknown"))),
        }
    }

    fn start(&self, context: usize, peer: u32, d: &Descriptor) -> Result<Started, Refusal> {
        let (op, size) = (d.op(), d.size());
        let signal_op = match op & (OP_SIGNAL_INC | OP_SIGNAL_ADD) {
            0 => None,
            OP_SIGNAL_INC => Some(SIGNAL_OP_INC),
            OP_SIGNAL_ADD => Some(SIGNAL_OP_ADD),
            _ => return Err(bad(format!("operation {op:#x}"))),
        };
        if !(1..=FORM.newest_version()).contains(&d.version()) {
            return Err(bad(format!("version {}", d.version())));
        }
        let at = context as i32;
        let base = op & !(OP_SIGNAL_INC | OP_SIGNAL_ADD);
        let mut started = Started { request: None, counter: None, _value: None };
        let request = match (base, signal_op) {
            (OP_FLUSH, None) => return Ok(started),
            (OP_GET, None) => {
                let (remote, local) = (self.window(d.first_handle())?, self.window(d.second_handle())?);
                self.set.get(at, peer, (&remote, d.first_offset()), (&local, d.second_offset()), size as usize)?
            }
            (OP_VA_SIGNAL, Some(op)) => {
                let window = self.window(d.first_handle())?;
                let signal = Signal { offset: d.first_offset(), window: &window, value: d.signal_value(), op };
                self.set.put(at, peer, None, None, 0, Some(signal))?
            }
            (base, op) if base & OP_PUT != 0 && base & !(OP_PUT | OP_INLINE | OP_COUNTER) == 0 => {
                let signal = op.map(|op| self.indexed(context, d, op)).transpose()?;
                if base & OP_COUNTER != 0 {
                    if d.counter() >= self.memory.n_counters {
                        return Err(bad(format!("counter {} of {}", d.counter(), self.memory.n_counters)));
                    }
                    started.counter = Some(d.counter());
                }
                self.put(at, peer, d, signal, &mut started)?
            }
            _ => return Err(bad(format!("operation {op:#x}"))),
        };
        started.request = Some(request);
        Ok(started)
    }

    fn indexed(&self, context: usize, d: &Descriptor, op: u32) -> Result<Signal<'_>, Refusal> {
        if d.signal() >= self.memory.n_signals {
            return Err(bad(format!("signal {} of {}", d.signal(), self.memory.n_signals)));
        }
        let offset = 8 * self.memory.signal(context, d.signal()) as u64;
        Ok(Signal { offset, window: &self.window, value: d.signal_value(), op })
    }

    fn put(
        &self,
        context: i32,
        peer: u32,
        d: &Descriptor,
        signal: Option<Signal<'_>>,
        started: &mut Started,
    ) -> Result<Arc<Request>, Refusal> {
        let size = d.size() as usize;
        if size == 0 {
            return self.set.put(context, peer, None, None, 0, signal);
        }
        let target = self.window(d.second_handle())?;
        let to = Some((&*target, d.second_offset()));
        if d.op() & OP_INLINE == 0 {
            let source = self.window(d.first_handle())?;
            return self.set.put(context, peer, Some((&source, d.first_offset())), to, size, signal);
        }
        if size > 8 {
            return Err(bad(format!("an inline value of {size} bytes")));
        }
        let size = if defect::on(Defect::WideValues) { 8 } else { size };
        let value = Box::new(d.inline_value());
        let source =
            Window { number: u64::MAX, comm: self.set.comm.clone(), base: (&raw const *value) as usize, len: 8 };
        let request = self.set.put(context, peer, Some((&source, 0)), to, size, signal)?;
        started._value = Some(value);
        Ok(request)
    }
}
