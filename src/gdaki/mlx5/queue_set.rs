//! The queue pairs of a set of contexts: made, connected, described, watched, ended.

use super::command::path::{udp_port, Ethernet, PortPath};
use super::command::queue_pair::DoorbellMode;
use super::command::transition::{Patience, RcConnection};
use super::completion_queue::Mlx5CompletionQueue;
use super::doorbell::DoorbellPage;
use super::memory::QueueUmem;
use super::nic::Mlx5Nic;
use super::plan::QueuePlan;
use super::probe::mode;
use super::queue_pair::{Mlx5QueuePair, Role, Rung};
use super::ringer::{RingWork, Ringer, RungQueue, WORD_BYTES};
use super::watch::ErrorWatch;
use crate::config::ReliableDoorbell;
use crate::error::{Error, Result};
use crate::gdaki::view::{PeerQueues, SetShape};
use crate::proxy::memory::{Block, Memory};
use crate::sys::sync::Mutex;
use crate::sys::wire::{Reader, Writer};
use oxygin_ffi::cuda::Context;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// What is asked of a set's queues.
#[derive(Clone, Copy, Debug)]
pub struct SetRequest {
    /// Ranks and contexts.
    pub shape: SetShape,
    /// Slots of each send queue, as a power of two.
    pub log_slots: u32,
    /// Whether there are companions.
    pub counts: bool,
    /// Traffic class; `None`: the environment's.
    pub traffic_class: Option<u8>,
}

/// What a (context, peer) has.
struct Pair {
    context: u32,
    peer: u32,
    main: Mlx5QueuePair,
    companion: Option<Mlx5QueuePair>,
}

/// The other ends of a context's connections to this rank.
struct Responders {
    of_main: Option<Mlx5QueuePair>,
    /// As many as companions, in their order.
    of_companions: Vec<Mlx5QueuePair>,
}

/// The queues of a set.
pub struct QueueSet {
    nic: Arc<Mlx5Nic>,
    request: SetRequest,
    /// Context by context, in each the peers as the shape gives them.
    pairs: Vec<Pair>,
    /// By context.
    responders: Vec<Responders>,
    watch: ErrorWatch,
    /// Those that this process rings, until a thread has them, and the memory in which they are.
    bells: Mutex<Vec<RungQueue>>,
    memory: (Arc<Memory>, Arc<QueueUmem>),
    /// The device refused to end something.
    stays: Arc<AtomicBool>,
}

/// Where a set's queues are in memory that is there already.
pub struct QueueMemory {
    plan: QueuePlan,
    /// First bytes, of device code's memory and of host memory.
    at: [u64; 2],
    /// Where kernels write how far they are, if this process rings for them.
    words: Option<Block>,
}

impl QueueMemory {
    /// Takes it for such queues, if the device can have them.
    pub fn allocate(nic: &Mlx5Nic, request: &SetRequest, memory: &mut Memory) -> Result<Self> {
        check(nic, request).map_err(|e| e.context(nic.label()))?;
        let (contexts, peers) = (request.shape.contexts as usize, request.shape.peers().count());
        let of_pair = if request.counts { 2 } else { 1 };
        let responders = if request.counts { contexts * (peers + 1) } else { contexts };
        let plan = QueuePlan::new(contexts * peers * of_pair, responders, request.log_slots)?;
        let most = nic.capabilities.queue_pairs;
        if plan.queue_pairs() > most.into() {
            return Err(Error::argument(format!(
                "nContexts = {contexts} makes {} queue pairs; {} has {most}",
                plan.queue_pairs(),
                nic.label()
            )));
        }
        let queues = memory.filled(plan.bytes() as usize, |begin, piece| plan.write(begin, piece))?;
        let records = memory.host(plan.host_bytes() as usize)?;
        let words = match nic.ringer(memory)? {
            Ringer::Kernels => None,
            Ringer::Process => Some(memory.shared(WORD_BYTES * plan.queues())?),
        };
        Ok(Self { plan, at: [queues, records.cpu.as_ptr() as u64], words })
    }
}

/// What queues are made of while a set is made.
struct Builder<'a> {
    nic: &'a Arc<Mlx5Nic>,
    /// How kernels ring the queues, if they do.
    mode: DoorbellMode,
    words: Option<Block>,
    bells: Vec<RungQueue>,
    plan: QueuePlan,
    memory: Arc<QueueUmem>,
    records: Arc<QueueUmem>,
    stays: Arc<AtomicBool>,
    queues: usize,
    responders: usize,
}

impl Builder<'_> {
    /// A queue pair with its completion queue.
    fn requester(&mut self, role: Role, page: &Arc<DoorbellPage>) -> Result<Mlx5QueuePair> {
        let (i, (memory, records)) = (self.queues, (&self.memory, &self.records));
        self.queues += 1;
        let place = self.plan.completion_queue(i);
        let completions = Mlx5CompletionQueue::new(self.nic, &place, (memory, records), page, &self.stays)?;
        // SAFETY: there are as many words as queues.
        let word = self.words.map(|words| unsafe { words.at(WORD_BYTES * i) });
        let (rung, place, records) = match word {
            None => (Rung::ByKernels(self.mode), self.plan.send_queue(i), memory),
            Some(word) => (Rung::ByProcess { word: word.device }, self.plan.send_queue_of_host(i), records),
        };
        let ends = (&Arc::new(completions), page);
        let pair = Mlx5QueuePair::new(self.nic, (role, rung), place, (memory, records), ends, &self.stays)?;
        if let Some(word) = word {
            // SAFETY: the set's memory, which those who have the bell keep.
            self.bells.push(unsafe { RungQueue::new(word, pair.record(), &pair, page) });
        }
        Ok(pair)
    }

    /// The other end of a queue pair's connection to this rank. It sends nothing, so that nothing of it ever completes:
    /// it needs no completion queue of its own.
    fn responder(&mut self, of: &Mlx5QueuePair, page: &Arc<DoorbellPage>) -> Result<Mlx5QueuePair> {
        let place = self.plan.responder(self.responders);
        self.responders += 1;
        // Nobody rings it.
        let what = (Role::Responder, Rung::ByKernels(DoorbellMode::Record));
        let memory = (&self.memory, &self.memory);
        Mlx5QueuePair::new(self.nic, what, place, memory, (&of.completions, page), &self.stays)
    }
}

impl QueueSet {
    /// Makes the queues of a set, in memory that was taken for them. Returns them and, for each rank in turn, an
    /// equally long slice that this rank alone needs to know.
    pub fn prepare(
        nic: &Arc<Mlx5Nic>,
        request: SetRequest,
        places: &QueueMemory,
        memory: &Arc<Memory>,
    ) -> Result<(Self, Vec<u8>)> {
        let with_label = |e: Error| e.context(nic.label());
        let (devx, plan) = (&nic.port.devx, places.plan);
        let queues = QueueUmem::on_device(devx, memory, places.at[0], plan.bytes() as usize, nic.dma_buf);
        let records = QueueUmem::on_host(devx, memory, places.at[1], plan.host_bytes() as usize);
        let mut builder = Builder {
            nic,
            mode: mode(&nic.capabilities, nic.reliable_doorbell, 1 << request.log_slots),
            words: places.words,
            bells: Vec::new(),
            plan,
            memory: Arc::new(queues.map_err(with_label)?),
            records: Arc::new(records.map_err(with_label)?),
            stays: Arc::default(),
            queues: 0,
            responders: 0,
        };
        let watch = ErrorWatch::new(nic)?;
        let (stays, no_pairs) = (builder.stays.clone(), Vec::new());
        // From here on what was made is the set's: whatever fails below ends with it.
        let (nic, bells, memory) = (nic.clone(), Mutex::default(), (memory.clone(), builder.records.clone()));
        let mut set = Self { nic, request, pairs: no_pairs, responders: Vec::new(), watch, bells, memory, stays };
        let nic = builder.nic;
        for context in 0..request.shape.contexts {
            let by_kernels = builder.words.is_none();
            let page = doorbell_page(nic, set.memory.0.context().filter(|_| by_kernels)).map_err(with_label)?;
            set.add_context(&mut builder, context, &page)
                .map_err(|e| e.context(format_args!("{}, context {context}", nic.label())))?;
        }
        *set.bells.lock() = builder.bells;
        let slices = set.slices();
        Ok((set, slices))
    }

    fn add_context(&mut self, builder: &mut Builder, context: u32, page: &Arc<DoorbellPage>) -> Result<()> {
        self.responders.push(Responders { of_main: None, of_companions: Vec::new() });
        let rank = self.request.shape.rank;
        for peer in self.request.shape.peers() {
            let main = builder.requester(Role::Main, page)?;
            let companion = match self.request.counts {
                true => Some(builder.requester(Role::Companion, page)?),
                false => None,
            };
            self.pairs.push(Pair { context, peer, main, companion });
            let (Some(pair), Some(responders)) = (self.pairs.last(), self.responders.last_mut()) else { continue };
            if peer == rank {
                responders.of_main = Some(builder.responder(&pair.main, page)?);
            }
            if let Some(companion) = &pair.companion {
                responders.of_companions.push(builder.responder(companion, page)?);
            }
            let index = 2 * (self.pairs.len() - 1);
            self.watch.add(&pair.main, index, builder.nic.label())?;
            if let Some(companion) = &pair.companion {
                self.watch.add(companion, index + 1, builder.nic.label())?;
            }
        }
        Ok(())
    }

    /// What each rank is to know: the numbers of the queue pairs towards it, by context; 0: there is none.
    fn slices(&self) -> Vec<u8> {
        let SetShape { ranks, contexts, .. } = self.request.shape;
        let mut numbers = vec![0; ranks as usize * contexts as usize];
        for pair in &self.pairs {
            numbers[(pair.peer * contexts + pair.context) as usize] = pair.main.number();
        }
        let mut slices = Writer::new();
        numbers.into_iter().for_each(|number| {
            slices.u32(number);
        });
        slices.finish()
    }

    /// Connects all queue pairs; `from[r]` is the slice that rank r addressed to this rank.
    pub fn connect(&self, from: &[&[u8]]) -> Result<()> {
        let SetShape { rank, contexts, .. } = self.request.shape;
        let mut ways: Vec<Option<PeerPath>> = from.iter().map(|_| None).collect();
        for pair in &self.pairs {
            let (context, peer) = (pair.context, pair.peer);
            let of = |e: Error| e.context(format_args!("context {context}, rank {peer}"));
            let slice = *from.get(peer as usize).ok_or_else(|| Error::internal("a peer that said nothing"))?;
            let theirs = numbers(slice, contexts)
                .ok_or_else(|| Error::protocol(format!("what rank {peer} says of its queue pairs cannot be used")))?
                [context as usize];
            let own = self.path(&mut ways, rank).map_err(of)?;
            let there = self.path(&mut ways, peer).map_err(of)?;
            let responders = self.responders.get(context as usize);
            match responders.and_then(|r| r.of_main.as_ref()).filter(|_| peer == rank) {
                Some(responder) => self.join(&pair.main, responder, context, &own),
                None if theirs == 0 => Err(Error::usage(format!(
                    "rank {peer} has no queue pair for this one; ask for the same rankStride on all ranks"
                ))),
                None => self.connect_one(&pair.main, theirs, context, &there),
            }
            .map_err(of)?;
        }
        let own = self.path(&mut ways, rank)?;
        let companions = self.pairs.iter().filter_map(|p| Some((p.context, p.companion.as_ref()?)));
        let responders = self.responders.iter().flat_map(|r| &r.of_companions);
        companions.zip(responders).try_for_each(|((context, companion), responder)| {
            self.join(companion, responder, context, &own).map_err(|e| e.context(format_args!("context {context}")))
        })
    }

    /// Connects two queue pairs of this rank with each other.
    fn join(&self, a: &Mlx5QueuePair, b: &Mlx5QueuePair, context: u32, path: &PeerPath) -> Result<()> {
        self.connect_one(b, a.number(), context, path)?;
        self.connect_one(a, b.number(), context, path)
    }

    fn connect_one(&self, pair: &Mlx5QueuePair, peer: u32, context: u32, path: &PeerPath) -> Result<()> {
        let (nic, capabilities) = (&self.nic, &self.nic.capabilities);
        let mut port_path = path.path;
        if let Some(Ethernet { udp_port: Some(port), .. }) = &mut port_path.ethernet {
            *port = udp_port(capabilities.udp_ports, pair.number(), peer);
        }
        let lag_port = match capabilities.lag_ports {
            0 => 0,
            ports => (context % u32::from(ports)) as u8 + 1,
        };
        let connection = RcConnection {
            peer,
            mtu: path.mtu,
            log_message: capabilities.log_message.min(30),
            reads_in: path.reads_in.min(capabilities.reads_in),
            path: port_path,
            lag_port,
            lag_counts: capabilities.lag_in_rtr,
            // Some firmware is said to need it, of queue pairs that were told when they were made (NVIDIA/nccl, pull
            // request 2315).
            lag_again: capabilities.lag_in_rts && capabilities.lag_ports > 0,
        };
        let patience = Patience {
            timeout: nic.port.timeout,
            retries: nic.port.retries,
            reads_out: path.reads_out.min(capabilities.reads_out),
        };
        pair.connect(nic, &connection, &patience)
    }

    /// The way to a rank, looked up once.
    fn path(&self, known: &mut [Option<PeerPath>], peer: u32) -> Result<PeerPath> {
        let place = known.get_mut(peer as usize).ok_or_else(|| Error::internal("a peer that is no rank"))?;
        if let Some(path) = place {
            return Ok(*path);
        }
        let port = &self.nic.port;
        let way = port.way(peer, self.request.traffic_class);
        let ethernet = match port.is_ethernet() {
            false => None,
            true => {
                let mac = port.devx.next_hop(&port.pd, &way.address).map_err(|e| {
                    Error::system(format!(
                        "{}: the next hop to {:?} is not known: {e}; check `ip route` and `ip neighbour`",
                        port.label,
                        std::net::Ipv6Addr::from(way.address.grh.dgid.raw)
                    ))
                })?;
                Some(Ethernet { mac, udp_port: port.has_udp.then_some(0) })
            }
        };
        let path = PortPath { way: way.address, pkey_index: port.pkey_index, ethernet };
        let found = PeerPath { path, mtu: way.mtu, reads_out: way.reads_out, reads_in: way.reads_in };
        *place = Some(found);
        Ok(found)
    }

    /// What device code is told of them, as the structures want it.
    pub fn queues(&self) -> Vec<PeerQueues> {
        let queues = |pair: &Pair| PeerQueues {
            main: pair.main.for_kernels(),
            companion: pair.companion.as_ref().map(Mlx5QueuePair::for_kernels),
        };
        self.pairs.iter().map(queues).collect()
    }

    /// What `threads` threads have to do, so that the queues are rung: nothing, where kernels ring. To be asked once;
    /// `failed` is set if one of them ends.
    pub fn ringing(&self, threads: usize, failed: &Arc<AtomicBool>) -> Vec<RingWork> {
        let mut bells = std::mem::take(&mut *self.bells.lock());
        let each = bells.len().div_ceil(threads.max(1)).max(1);
        let mut all = Vec::new();
        while !bells.is_empty() {
            let rest = bells.split_off(each.min(bells.len()));
            all.push(RingWork::new(std::mem::replace(&mut bells, rest), self.memory.clone(), failed.clone()));
        }
        all
    }

    /// Whether this process rings the queues, and no thread has them yet.
    pub fn wants_ringing(&self) -> bool {
        !self.bells.lock().is_empty()
    }

    /// Whether any queue pair has failed. Any thread may ask at any time; it costs a system call.
    pub fn has_failed(&self) -> bool {
        self.watch.look(self.nic.label(), |index| {
            let pair = self.pairs.get(index / 2)?;
            let words = format!("of context {} towards rank {}", pair.context, pair.peer);
            match index % 2 {
                0 => Some((&pair.main, words)),
                _ => Some((pair.companion.as_ref()?, words)),
            }
        })
    }

    /// In words, how far the device has come with the first queue pair.
    pub(super) fn state_of_first(&self) -> String {
        match self.pairs.first().map(|pair| pair.main.state()) {
            Some(Ok((state, taken, rung))) => {
                format!("is in state {state}, and the device took entry {taken} of {rung} that it was rung for")
            }
            Some(Err(e)) => format!("cannot be asked for its state (QUERY_QP: {e})"),
            None => "is not there".into(),
        }
    }

    /// Ends everything. The device flushes what still waits, so that kernels which look while it does find errors. Then
    /// the memory may be freed.
    pub fn end(self) {
        for pair in &self.pairs {
            // One that has failed already, or whose device is gone, is as good.
            let _ = pair.main.stop();
            let _ = pair.companion.as_ref().map(Mlx5QueuePair::stop);
        }
        drop(self);
    }
}

impl Drop for QueueSet {
    fn drop(&mut self) {
        self.pairs.clear();
        self.responders.clear();
        // What was made for a set that came to nothing is ended before this, too.
        if self.stays.load(Ordering::Acquire) {
            log::warn!("{}: the device refused to end queues of a set; see the kernel log", self.nic.label());
        }
    }
}

/// The way to a rank.
#[derive(Clone, Copy)]
struct PeerPath {
    path: PortPath,
    mtu: u8,
    reads_out: u32,
    reads_in: u32,
}

/// The numbers in a slice, by context: 24 bits each.
fn numbers(slice: &[u8], contexts: u32) -> Option<Vec<u32>> {
    let mut reader = Reader::new(slice);
    let numbers: Option<Vec<u32>> = (0..contexts).map(|_| reader.u32().filter(|n| *n < 1 << 24)).collect();
    reader.end()?;
    numbers
}

/// Whether the device has what is asked for.
fn check(nic: &Mlx5Nic, request: &SetRequest) -> Result<()> {
    let capabilities = &nic.capabilities;
    if request.counts && !capabilities.cross_channel {
        return Err(Error::usage(
            "nCounters > 0: the device has no entries that wait for completions (cd), by which counters are \
             incremented; use kernels without counters, or OXYGIN_ENGINE=gdaki-soft on all ranks",
        ));
    }
    let (slots, most) = (1_u64 << request.log_slots, capabilities.send_slots.min(capabilities.completions));
    if slots > most.into() {
        return Err(Error::argument(format!("queueDepth: {slots} slots; the device has queues of up to {most}")));
    }
    let most = capabilities.no_record_slots;
    if nic.reliable_doorbell == ReliableDoorbell::On && slots > most.into() {
        return Err(Error::argument(format!(
            "queueDepth: {slots} slots; the device has queues without a doorbell record of up to {most}; set \
             NCCL_GDAKI_USE_RELIABLE_DB to 0 or 2, or ask for less depth"
        )));
    }
    Ok(())
}

/// A page for a context: one of its own while there are any, else the one that all share.
/// `context`: as for [`DoorbellPage::take`].
fn doorbell_page(nic: &Mlx5Nic, context: Option<&Arc<Context>>) -> Result<Arc<DoorbellPage>> {
    let devx = &nic.port.devx;
    DoorbellPage::dedicated(devx, context).map(Arc::new).or_else(|first| {
        let mut shared = nic.shared_page.lock();
        if let Some(page) = shared.upgrade() {
            return Ok(page);
        }
        let page = DoorbellPage::shared(devx, context);
        let page = Arc::new(page.map_err(|e| e.context(format_args!("{first}; and the page that all share")))?);
        *shared = Arc::downgrade(&page);
        Ok(page)
    })
}
