//! Device code of NCCL's GDAKI backend: it writes the queues of an mlx5 device, rings its doorbells and polls its
//! completion entries, whoever plays the device.
//!
//! [`structures`] finds the way from a device handle as device code of each NCCL does, [`entry`] builds entries,
//! [`QueuePair`] reserves, rings and polls, and [`Thread`] puts these together to what `gin_gdaki.h` offers to kernels.

pub mod entry;
mod queue_pair;
pub mod structures;
mod thread;

pub use entry::{Raw, Remote, MOST_INLINE};
pub use queue_pair::{Addresses, Habits, QueuePair, QueueView, Ringing, Status};
pub use structures::{Numbers, NCCLS};
pub use thread::Thread;

use super::{Pen, Posted, Waiting};
use crate::plugin::ContextConfig;
use nccl_plugin_api::{DeviceHandle, DEVICE_GIN_GDAKI};
use std::sync::atomic::{AtomicU64, Ordering};
use structures::{Found, Structures, Table};

#[cfg(test)]
mod tests;

/// Addresses as this process sees them.
type See<'a> = Box<dyn Fn(u64) -> u64 + Send + Sync + 'a>;

/// Signals or counters of a context.
struct Words {
    /// Word 0 of this rank.
    own: u64,
    /// Word 0 of each rank.
    remote: Vec<Remote>,
    count: u32,
}

/// A queue pair and its companion, if there is one.
type Pair = (QueuePair, Option<QueuePair>);

/// What a kernel has found in a context.
struct Context {
    /// By rank; `None`: nobody made it.
    queues: Vec<Option<Pair>>,
    signals: Option<Words>,
    counters: Option<Words>,
    sink: u32,
    /// A flush behind gets posts a dump.
    dumps: bool,
    /// By rank, where gets are noted: the newest issued, the newest visible.
    gets: Vec<(u64, u64)>,
}

/// What device code of one rank sees of a `createContext`: its contexts.
pub struct Kernel<'a> {
    numbers: Numbers,
    rank: u32,
    contexts: Vec<Context>,
    see: See<'a>,
    /// The device handle's `handle`.
    pub handle: u64,
}

impl Kernel<'static> {
    /// Reads what is behind a device handle, and says what is wrong with it. `config` is what `createContext` was asked
    /// for.
    ///
    /// # Safety
    /// `handle` is what the plugin's `createContext` returned, in memory that the CPU addresses. The contexts behind it
    /// live as long as the result is used.
    pub unsafe fn open(
        numbers: Numbers,
        rank: u32,
        nranks: u32,
        config: &ContextConfig,
        handle: &DeviceHandle,
    ) -> Result<Self, String> {
        // SAFETY: as the caller promises.
        let kernel = unsafe { Kernel::seen(numbers, rank, nranks, config, handle, |at| at) }?;
        kernel.is_as_asked(nranks, config)?;
        Ok(kernel)
    }
}

impl<'a> Kernel<'a> {
    /// As [`Kernel::open`], in memory that this process sees as `see` says, without a look at what was asked for.
    ///
    /// # Safety
    /// As for [`Kernel::open`], with what `see` says for addresses.
    pub unsafe fn seen(
        numbers: Numbers,
        rank: u32,
        nranks: u32,
        config: &ContextConfig,
        handle: &DeviceHandle,
        see: impl Fn(u64) -> u64 + Send + Sync + 'a,
    ) -> Result<Self, String> {
        let DeviceHandle { net_device_type: kind, net_device_version: version, needs_proxy_progress, .. } = *handle;
        if kind != DEVICE_GIN_GDAKI {
            return Err(format!(
                "the device handle's netDeviceType is {kind}: no queue pairs, which is {DEVICE_GIN_GDAKI}"
            ));
        }
        if version != numbers.device_version {
            let (nccl, wanted) = (numbers.nccl, numbers.device_version);
            return Err(format!(
                "the device handle's netDeviceVersion is {version}; device code of NCCL {nccl} knows {wanted}"
            ));
        }
        if needs_proxy_progress != 0 {
            return Err(format!("needsProxyProgress is {needs_proxy_progress}: queue pairs need none"));
        }
        let handle = handle.handle as u64;
        if handle == 0 || handle % 8 != 0 {
            return Err(format!("the device handle's array is at {handle:#x}"));
        }
        let structures = Structures::live(numbers, handle, &see);
        let ranks = nranks as usize;
        let read = |c: usize| found(&structures, c, ranks, config, &see).map_err(|e| format!("context {c}: {e}"));
        let contexts = (0..config.n_contexts.max(1) as usize).map(read).collect::<Result<_, _>>()?;
        structures.is_all()?;
        drop(structures);
        Ok(Self { numbers, rank, contexts, see: Box::new(see), handle })
    }

    /// Whether queues, depths and words are those that were asked for.
    fn is_as_asked(&self, nranks: u32, config: &ContextConfig) -> Result<(), String> {
        let stride = config.rank_stride.max(1) as u32;
        for (number, context) in self.contexts.iter().enumerate() {
            for peer in 0..nranks {
                let wrong = |what: String| Err(format!("context {number}, peer {peer}: {what}"));
                let is_asked = peer % stride == self.rank % stride;
                match &context.queues[peer as usize] {
                    None if is_asked => return wrong("there is no queue pair".into()),
                    Some(_) if !is_asked => return wrong(format!("there is a queue pair, with a stride of {stride}")),
                    Some((main, _)) if i64::from(main.view.size) < config.queue_depth.into() => {
                        return wrong(format!("{} slots; {} were asked for", main.view.size, config.queue_depth));
                    }
                    Some((_, companion)) if companion.is_some() != (config.n_counters > 0) => {
                        let (what, asked) = (if companion.is_some() { "a" } else { "no" }, config.n_counters);
                        return wrong(format!("there is {what} companion, and {asked} counters were asked for"));
                    }
                    _ => {}
                }
            }
            for (what, words, asked) in
                [("signals", &context.signals, config.n_signals), ("counters", &context.counters, config.n_counters)]
            {
                if words.is_some() != (asked > 0) {
                    return Err(format!(
                        "context {number}: {asked} {what} were asked for, and their table says otherwise"
                    ));
                }
            }
        }
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in all.
    pub fn nranks(&self) -> u32 {
        self.contexts.first().map_or(0, |context| context.queues.len() as u32)
    }

    /// How many contexts there are.
    pub fn len(&self) -> usize {
        self.contexts.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.contexts.is_empty()
    }

    fn pair(&self, context: usize, peer: u32) -> Option<&Pair> {
        self.contexts[context].queues.get(peer as usize)?.as_ref()
    }

    /// The queue pair towards a peer.
    pub fn queue_pair(&self, context: usize, peer: u32) -> Option<&QueuePair> {
        self.pair(context, peer).map(|pair| &pair.0)
    }

    /// Its companion.
    pub fn companion(&self, context: usize, peer: u32) -> Option<&QueuePair> {
        self.pair(context, peer)?.1.as_ref()
    }

    /// Whether a context has signals, and counters.
    pub fn has_words(&self, context: usize) -> [bool; 2] {
        [self.contexts[context].signals.is_some(), self.contexts[context].counters.is_some()]
    }

    /// Where additions fetch to, of which nobody reads anything.
    pub fn sink(&self, context: usize) -> Remote {
        (self.contexts[context].sink, 0)
    }

    fn reader(&self) -> Structures<'_> {
        Structures::live(self.numbers, 0, &self.see)
    }

    /// Bytes of a window at a peer, by its handle for device code. The handle has to be one.
    pub fn at(&self, window: u64, peer: u32, offset: u64) -> Remote {
        (self.reader().window_key(window, peer as usize), offset)
    }

    /// Bytes of a window here, likewise.
    pub fn own(&self, window: u64, offset: u64) -> Remote {
        (self.reader().own_window_key(window), offset)
    }

    /// The place of a signal at a peer.
    ///
    /// # Panics
    /// If the context has no signals.
    pub fn signal_at(&self, context: usize, peer: u32, id: u64) -> Remote {
        let (key, first) = self.contexts[context].signals.as_ref().expect("signals").remote[peer as usize];
        (key, first + 8 * id)
    }

    /// The place of a counter of this rank's, for entries.
    ///
    /// # Panics
    /// If the context has no counters.
    pub fn counter_at(&self, context: usize, id: u64) -> Remote {
        let (key, first) = self.contexts[context].counters.as_ref().expect("counters").remote[self.rank as usize];
        (key, first + 8 * id)
    }

    /// An addition to a peer's signal.
    pub fn add_signal(&self, context: usize, peer: u32, id: u64, n: u64) -> Raw {
        entry::add(self.signal_at(context, peer, id), n, self.sink(context))
    }

    /// What a companion waits for and adds, so that a counter goes up by one when entry `last` is complete.
    pub fn count(&self, context: usize, peer: u32, last: u64, counter: u64) -> Option<[Raw; 2]> {
        let number = self.queue_pair(context, peer)?.view.completion_number;
        Some([entry::wait_for(last, number), entry::add(self.counter_at(context, counter), 1, self.sink(context))])
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        // SAFETY: a word of the set's, aligned (checked when it was read), shared by atomics.
        unsafe { AtomicU64::from_ptr((self.see)(at) as *mut u64) }
    }

    fn own_word(&self, words: &Option<Words>, id: u32) -> &AtomicU64 {
        let words = words.as_ref().expect("words");
        assert!(id < words.count, "number {id} of {}", words.count);
        self.word(words.own + 8 * u64::from(id))
    }

    /// A signal's word here.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn signal(&self, context: usize, id: u32) -> &AtomicU64 {
        self.own_word(&self.contexts[context].signals, id)
    }

    /// A counter's word here.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn counter(&self, context: usize, id: u32) -> &AtomicU64 {
        self.own_word(&self.contexts[context].counters, id)
    }

    /// The newest get issued to a peer, and the newest visible.
    fn gets(&self, context: usize, peer: u32) -> Option<(&AtomicU64, &AtomicU64)> {
        let (issued, visible) = self.contexts[context].gets.get(peer as usize)?;
        Some((self.word(*issued), self.word(*visible)))
    }

    /// What nobody has posted to yet: no completion entry is one of the first lap's, and no get is noted.
    pub(super) fn untouched(&self, context: usize, peer: u32) -> Result<(), String> {
        let Some((main, companion)) = self.pair(context, peer) else { return Ok(()) };
        for queue in [Some(main), companion.as_ref()].into_iter().flatten() {
            let early = (0..queue.view.size.into()).find(|&index| queue.poll(index).is_some());
            if let Some(index) = early {
                return Err(format!(
                    "context {context}, peer {peer}: completion entry {index} of a new queue pair is there"
                ));
            }
        }
        let gets =
            self.gets(context, peer).map(|(issued, visible)| [issued, visible].map(|w| w.load(Ordering::Relaxed)));
        match gets {
            Some(gets) if gets != [0, 0] => Err(format!("context {context}, peer {peer}: gets are noted: {gets:?}")),
            _ => Ok(()),
        }
    }

    pub(super) fn is_complete(&self, posted: &Posted) -> Result<bool, String> {
        let (Some(queue), Some(last)) = (self.queue_pair(posted.context, posted.peer), posted.next.checked_sub(1))
        else {
            return Ok(true);
        };
        match queue.poll(last) {
            None => Ok(false),
            Some(Status::Good) => Ok(true),
            Some(Status::Failed { syndrome }) => Err(self.failed(posted, syndrome)),
        }
    }

    fn failed(&self, posted: &Posted, syndrome: u8) -> String {
        let Posted { context, peer, next } = posted;
        format!("context {context}, peer {peer}: entry {} failed with syndrome {syndrome:#04x}", next.wrapping_sub(1))
    }

    pub(super) fn standing(&self, posted: &Posted) -> String {
        let Posted { context, peer, next } = *posted;
        let queue = self.queue_pair(context, peer).map(|queue| queue.standing(next.wrapping_sub(1)));
        format!("context {context}, peer {peer}: {}", queue.unwrap_or_default())
    }

    /// A thread of device code that uses context `number`.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn thread<'k>(&'k self, number: usize, pen: Pen, waiting: &'k dyn Waiting) -> Thread<'k> {
        assert!(number < self.len(), "context {number} of {}", self.len());
        Thread::new(self, number, pen, waiting)
    }
}

/// What is in a context.
fn found(
    structures: &Structures,
    context: usize,
    ranks: usize,
    config: &ContextConfig,
    see: &dyn Fn(u64) -> u64,
) -> Result<Context, String> {
    let habits = Habits { is_sm90: context % 2 == 0, record_first: structures.n.is_record_first() };
    let queue = |queue: Found| -> Result<QueuePair, String> {
        let QueueView { slots, completions, record, bell, .. } = queue.view()?;
        let [slots, completions, bell] = [slots, completions, bell].map(see);
        let record = if record == 0 { 0 } else { see(record) };
        let view = QueueView { slots, completions, record, bell, ..queue.view()? };
        let Addresses { reserved, ready, producer, lock, polled } = queue.counts();
        let [reserved, ready, producer, lock, polled] = [reserved, ready, producer, lock, polled].map(see);
        Ok(QueuePair::new(view, habits, Addresses { reserved, ready, producer, lock, polled }))
    };
    let pair = |peer: usize| -> Result<Option<Pair>, String> {
        let Some(main) = structures.main(context, peer) else { return structures.verdict().map(|()| None) };
        let companion = structures.companion(context, peer);
        if main.is_absent() {
            let beside = companion.is_some_and(|companion| !companion.is_absent());
            return if beside { Err("there is a companion of no queue pair".into()) } else { Ok(None) };
        }
        let companion = companion.map(queue).transpose().map_err(|e| format!("the companion: {e}"))?;
        Ok(Some((queue(main)?, companion)))
    };
    let queues =
        (0..ranks).map(|peer| pair(peer).map_err(|e| format!("peer {peer}: {e}"))).collect::<Result<Vec<_>, _>>()?;
    let words = |table: Table, count: i32| {
        let remote = |table: &Table| (0..ranks).map(|peer| table.remote(0, peer, ranks)).collect();
        let count = count.max(0) as u32;
        (!table.is_absent()).then(|| Words { own: table.own(0), remote: remote(&table), count })
    };
    let signals = words(structures.signals(context), config.n_signals);
    let counters = words(structures.counters(context), config.n_counters);
    let gets = (0..ranks).filter_map(|peer| structures.gets_at(context, peer)).collect();
    let (sink, dumps) = (structures.sink_key(context), structures.dumps(context));
    structures.verdict()?;
    if [&signals, &counters].into_iter().flatten().any(|words| words.own == 0 || words.own % 8 != 0) {
        return Err("signals or counters are at NULL, or not aligned to 8 bytes".into());
    }
    Ok(Context { queues, signals, counters, sink, dumps, gets })
}
