//! The software fabric: shared memory to ranks on this host, TCP to the others.
//!
//! `shm` moves bytes between processes of one host, `ipc` shares GPU windows between them, `tcp` moves bytes between
//! hosts, `gpu` to and from GPU memory; none of them knows another, but that what goes to a GPU goes by its engine.
//! `peer` finds out which of them reaches a rank, and whether it lives; a `link` to each peer hands operations to one
//! of them and queues what finds no room. Callers make progress inside their calls, the helper `thread` when nobody
//! calls.

pub mod atomic;
pub mod context;
mod domain;
pub mod gate;
pub mod gpu;
pub mod hello;
pub mod ipc;
pub mod lane;
mod lanes;
mod link;
mod links;
mod local;
mod own;
pub mod peer;
mod progress;
mod receive;
pub mod refused;
mod sentences;
pub mod shm;
pub mod status;
pub mod tcp;
pub mod thread;
mod windows;

#[cfg(test)]
mod near_tests;

pub use context::Context;

use self::domain::Domain;
use self::hello::SoftHello;
use self::peer::contact::Contact;
use self::progress::Progress;
use self::tcp::{Tcp, Timing};
use self::windows::Registered;
use super::{ContextSpec, Fabric, Region, World};
use crate::config::{Config, SoftTransport};
use crate::error::{Error, Result};
use crate::memory::gpu::GpuMemory;
use crate::memory::registry::{Extent, Registry};
use crate::memory::window::{Registration, Remote};
use crate::sys::interfaces;
use crate::sys::sync::Mutex;
use crate::sys::thread::Thread;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long closing waits until peers know that what they wait for is done.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// One communicator's software fabric.
pub struct SoftFabric {
    config: Arc<Config>,
    registry: Arc<Registry>,
    hello: SoftHello,
    /// What `hello.probe` points at.
    _probe: Box<[u8; 16]>,
    /// Until `join` moves them into `shared`.
    parts: Mutex<Option<(Contact, Tcp)>>,
    shared: OnceLock<Arc<Progress>>,
    /// The helper thread, and the movers.
    threads: Mutex<Vec<Thread>>,
    contexts: AtomicU32,
    /// Contexts call a put complete when it is visible at the peer: [`Fabric::confirm_puts`].
    confirms: AtomicBool,
    has_closed: AtomicBool,
}

impl SoftFabric {
    /// Opens sockets; nothing runs yet.
    pub fn open(config: &Arc<Config>, registry: Arc<Registry>) -> Result<Self> {
        let mut random = [0u8; 32];
        getrandom::fill(&mut random).map_err(|e| Error::system(format!("no random numbers: {e}")))?;
        let (token, probe) = random.split_at(16);
        let token: [u8; 16] = token.try_into().map_err(|_| Error::internal("token"))?;
        let probe: Box<[u8; 16]> = Box::new(probe.try_into().map_err(|_| Error::internal("probe"))?);
        let contact = Contact::open(token)?;
        let bind: Vec<_> = interfaces::choose(config)?.into_iter().map(|i| i.address).collect();
        let (stripes, timing) = (config.tcp_stripes.unwrap_or(1), Timing::of(config.peer_limit()));
        let tcp = Tcp::open_with(&bind, token, stripes, registry.clone(), timing)?;
        let hello = SoftHello {
            token,
            contact: contact.name().to_vec(),
            probe: probe.as_ptr() as u64,
            probe_value: *probe,
            tcp: tcp.addresses(),
        };
        Ok(Self {
            config: config.clone(),
            registry,
            hello,
            _probe: probe,
            parts: Mutex::new(Some((contact, tcp))),
            shared: OnceLock::new(),
            threads: Mutex::default(),
            contexts: AtomicU32::new(0),
            confirms: AtomicBool::new(false),
            has_closed: AtomicBool::new(false),
        })
    }

    pub(in crate::fabric::soft) fn shared(&self) -> Result<&Arc<Progress>> {
        self.shared.get().ok_or_else(|| Error::internal("the soft fabric is used before its ranks have joined"))
    }
}

/// A window of this rank is about to get this number: who remembers that another one with it is gone forgets that.
fn admit(shared: &Progress, id: u32) {
    let me = shared.world.rank;
    shared.engine.admit_caller(me, id);
    shared.engines_of_peers().iter().for_each(|(_, engine)| engine.admit_caller(me, id));
}

fn extent(region: &Region) -> Extent {
    Extent { base: region.base, len: region.len }
}

impl Drop for SoftFabric {
    fn drop(&mut self) {
        self.close();
    }
}

impl Fabric for SoftFabric {
    type Context = Context;
    type Pending = Vec<Context>;

    /// Rings and registrations exist before any rank can learn of them.
    const BARRIER_AFTER_CONTEXTS: bool = false;

    fn hello(&self) -> Vec<u8> {
        self.hello.encode()
    }

    fn join(&self, world: World, hellos: &[&[u8]]) -> Result<()> {
        let hellos =
            hellos.iter().enumerate().map(|(r, m)| SoftHello::parse(r as u32, m)).collect::<Result<Vec<_>>>()?;
        let (contact, mut tcp) =
            self.parts.lock().take().ok_or_else(|| Error::internal("the soft fabric joined its ranks twice"))?;
        // Peers on this host never come by TCP unless told to.
        let here = |h: &SoftHello| h.is_on_host_of(&self.hello);
        if world.nranks > 1 && (self.config.soft_transport == SoftTransport::Tcp || !hellos.iter().all(here)) {
            let movers = self.config.tcp_threads.unwrap_or_else(thread::movers);
            tcp.set_movers(movers, self.config.tcp_stripes.unwrap_or((movers / 2).clamp(1, 16)))?;
        }
        let domain = Domain::new(world, self.config.clone(), self.registry.clone(), hellos, contact, tcp)?;
        let shared = Arc::new(Progress::new(domain)?);
        // Before threads: whatever fails from here on, `close` ends those that run.
        let _ = self.shared.set(shared.clone());
        self.threads.lock().push(thread::start(shared.clone())?);
        for number in 0..shared.tcp().movers() {
            self.threads.lock().push(thread::start_mover(shared.clone(), number)?);
        }
        Ok(())
    }

    fn prepare_contexts(&self, spec: &ContextSpec) -> Result<(Self::Pending, Vec<u8>)> {
        let shared = self.shared()?;
        let first = self.contexts.fetch_add(spec.contexts, Ordering::Relaxed);
        let confirms = self.confirms.load(Ordering::Relaxed);
        Ok((Context::make(shared, first..first + spec.contexts, confirms), Vec::new()))
    }

    fn finish_contexts(&self, pending: Self::Pending, _from: &[&[u8]]) -> Result<Vec<Context>> {
        Ok(pending)
    }

    fn can_confirm_puts(&self) -> bool {
        true
    }

    /// What peers fetch, and what goes within a process, is visible when it is complete. A put through a ring or over
    /// TCP is complete once its source is free, and may be behind the signals of others: its peer is asked.
    fn confirm_puts(&self) {
        self.confirms.store(true, Ordering::Relaxed);
    }

    fn register(&self, region: &Region) -> Result<Registration> {
        let shared = self.shared()?.clone();
        admit(&shared, region.id);
        shared.engine.add_host_window(region.id, extent(region));
        shared.status.set_window(region.id, true);
        let guard = Registered::new(shared, region.id, false);
        Ok(Registration { lkey: region.id, rkey: region.id, guard: Box::new(guard) })
    }

    /// Ends the helper thread and all connections. Operations that are unfinished stay so.
    fn close(&self) {
        let Some(shared) = self.shared.get() else { return };
        // What has not ended by the first time will not by another: a GPU that stands is waited for once.
        if self.has_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if !shared.is_stopping() {
            shared.flush(FLUSH_WITHIN);
        }
        shared.request_stop();
        shared.tcp().wake_movers();
        self.threads.lock().drain(..).for_each(Thread::join);
        shared.tcp().close();
        shared.tcp().gpu().close();
        let idle = shared.engine.close();
        shared.share.close(idle);
    }

    /// Registers GPU memory.
    fn register_gpu(&self, region: &Region, memory: &GpuMemory) -> Result<Registration> {
        let shared = self.shared()?.clone();
        let extent = extent(region);
        let key = shared.engine.add_window(region.id, extent, memory)?;
        admit(&shared, region.id);
        shared.status.set_window(region.id, true);
        let guard = Registered::new(shared.clone(), region.id, true);
        shared.add_gpu_window(region.id, extent)?;
        Ok(Registration { lkey: key, rkey: key, guard: Box::new(guard) })
    }

    /// What peers on this host are to know of a window that was just registered, so that they can share it; empty: it
    /// is memory that GPUs are not let to, or none of theirs.
    fn offer(&self, region: &Region, gpu: Option<&GpuMemory>) -> Vec<u8> {
        let is_wanted = |shared: &Progress| match gpu {
            Some(memory) => memory.is_shared,
            None => shared.engine.host_memory(region.id).is_some(),
        };
        match self.shared.get().filter(|shared| is_wanted(shared)) {
            Some(shared) => shared.share.offer(&shared.engine, region.id, extent(region), region.strict),
            None => Vec::new(),
        }
    }

    /// Maps what peers on this host offered; each has the window at one of `remotes`. Returns what they are to know.
    fn take_offers(&self, region: &Region, remotes: &[Remote], offers: &[&[u8]]) -> Result<Vec<u8>> {
        let shared = self.shared()?;
        Ok(shared.share.fetch(&**shared, region.id, remotes, offers))
    }

    /// Learns who has mapped this rank's window, from what each rank's `take_offers` returned.
    fn settle_offers(&self, region: &Region, reports: &[&[u8]]) -> Result<()> {
        let shared = self.shared()?;
        shared.share.settle(shared.world.rank, region.id, extent(region), reports);
        Ok(())
    }
}
