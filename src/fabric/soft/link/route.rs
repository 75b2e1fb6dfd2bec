//! Which transport takes operations to a peer: decided at the first one, and here alone.

use super::Link;
use crate::config::SoftTransport;
use crate::error::{Error, Result};
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::gpu::{self, Engine};
use crate::fabric::soft::peer::finding::Silent;
use crate::fabric::soft::shm::cma;
use crate::fabric::soft::shm::inbox::PeerInbox;
use crate::fabric::soft::shm::port::Port;
use crate::fabric::soft::status::PeerStatus;
use crate::sys::spin::{Spin, SpinGuard};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a peer in this network namespace may take to answer before it is asked over TCP.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// How bytes get to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RouteKind {
    /// Not found yet.
    Unknown,
    /// It is this rank itself.
    Own,
    /// On this host: through its inbox.
    Near,
    /// In this process, and one of the two ranks has GPU memory: its engine moves the bytes.
    Gpu,
    /// Anywhere else: by TCP.
    Far,
    /// It has closed its communicator in good order.
    Closed,
}

/// The way, and what stands at its end. Read by all; each lane reads it under its own lock.
pub struct Route {
    way: AtomicU8,
    engine: OnceLock<Arc<Engine>>,
    port: OnceLock<Spin<Port>>,
}

impl Route {
    /// Not found yet.
    pub fn new() -> Self {
        Self { way: AtomicU8::new(RouteKind::Unknown as u8), engine: OnceLock::new(), port: OnceLock::new() }
    }

    /// The way now.
    #[inline]
    pub fn way(&self) -> RouteKind {
        match self.way.load(Ordering::Acquire) {
            0 => RouteKind::Unknown,
            1 => RouteKind::Own,
            2 => RouteKind::Near,
            3 => RouteKind::Gpu,
            4 => RouteKind::Far,
            _ => RouteKind::Closed,
        }
    }

    fn set(&self, way: RouteKind) {
        self.way.store(way as u8, Ordering::Release);
    }

    /// The peer's inbox, once this rank has it, whether operations go there or only answers.
    #[inline]
    pub fn port(&self) -> Option<SpinGuard<'_, Port>> {
        self.port.get().map(Spin::lock)
    }

    /// The peer's inbox, if operations go there. While it is held they do.
    #[inline]
    pub fn near(&self) -> Option<SpinGuard<'_, Port>> {
        let port = self.port.get()?.lock();
        (self.way.load(Ordering::Relaxed) == RouteKind::Near as u8).then_some(port)
    }

    /// The engine that moves the bytes, if one does.
    pub fn engine(&self) -> Option<&Arc<Engine>> {
        self.engine.get().filter(|_| self.way() == RouteKind::Gpu)
    }

    /// From here on operations go by `engine`.
    fn take_engine(&self, engine: Arc<Engine>) {
        let _ = self.engine.set(engine);
        self.set(RouteKind::Gpu);
    }

    /// Nothing goes there any more.
    pub fn close(&self) {
        let _port = self.port();
        self.set(RouteKind::Closed);
    }
}

impl Link {
    /// Finds the way now: others will need it.
    pub fn find(&self, shared: &Domain) {
        if self.route.way() == RouteKind::Unknown {
            self.find_route(shared);
        }
    }

    /// An operation touches GPU memory but the way was found without: changes it where the peer is in this process.
    /// `Ok(false)`: later, when what went the old way has arrived.
    #[cold]
    pub(super) fn route_by_gpu(&self, shared: &Domain) -> Result<bool> {
        match self.engine(shared)? {
            None if self.route.way() == RouteKind::Near => Ok(true),
            None => Err(self.no_gpu_route()),
            Some(engine) => {
                // Held until the way has changed: who pushes next finds that.
                let mut port = self.route.port();
                if port.as_mut().is_some_and(|port| !port.inbox.producer().is_drained()) {
                    return Ok(false);
                }
                // The peer may go on asking through shared memory: it finds its ways by its own operations.
                self.route.take_engine(engine);
                Ok(true)
            }
        }
    }

    #[cold]
    fn no_gpu_route(&self) -> Error {
        Error::usage(format!(
            "an operation to rank {} names GPU memory, but neither rank has a GPU window; register it as type 2 (CUDA)",
            self.peer
        ))
    }

    /// The engine for a peer in this process, if any of the two has GPU memory.
    fn engine(&self, shared: &Domain) -> Result<Option<Arc<Engine>>> {
        let apart = matches!(shared.config.soft_transport, SoftTransport::Staged | SoftTransport::Tcp);
        if apart && self.peer != shared.world.rank {
            return Ok(None);
        }
        let Some(engine) = gpu::of_token(&shared.hellos[self.peer as usize].token) else { return Ok(None) };
        if !engine.is_open() {
            if !shared.engine.is_open() {
                return Ok(None);
            }
            engine.open_like(&shared.engine)?;
        }
        Ok(Some(engine))
    }

    /// Looks for the way. One thread at a time does.
    pub(super) fn find_route(&self, shared: &Domain) {
        let Some(mut finding) = self.finding.try_lock() else { return };
        if self.route.way() != RouteKind::Unknown {
            return;
        }
        if !finding.is_asked() {
            match self.engine(shared) {
                Ok(None) => {}
                Ok(Some(engine)) => {
                    log::info!("rank {}: in this process, by copies on its GPU", self.peer);
                    return self.route.take_engine(engine);
                }
                Err(error) => return self.fail_waiting(shared, &error),
            }
        }
        if self.peer == shared.world.rank {
            return self.route.set(RouteKind::Own);
        }
        if shared.config.soft_transport == SoftTransport::Tcp {
            return self.use_tcp(shared, "OXYGIN_SOFT_TRANSPORT=tcp");
        }
        let limit = shared.config.peer_limit().min(ANSWER_WITHIN);
        match finding.step(limit, || shared.ask(self.peer)) {
            Ok(()) => {}
            Err(Silent::Late) => self.use_tcp(shared, "it is in this network namespace but does not answer"),
            Err(Silent::Unreachable(e)) => self.use_tcp(shared, &format!("no shared memory with it: {}", e.desc())),
        }
    }

    /// What waits goes over TCP from each lane's next turn on.
    fn use_tcp(&self, shared: &Domain, why: &str) {
        log::info!("rank {}: over TCP ({why})", self.peer);
        self.route.set(RouteKind::Far);
        shared.tcp_active();
    }

    /// The peer sent its inbox; `status` is what it says of itself.
    pub fn attach(&self, shared: &Domain, file: OwnedFd, status: Arc<PeerStatus>, pid: libc::pid_t) {
        let finding = self.finding.lock();
        let is_route = finding.is_asked() && self.route.way() == RouteKind::Unknown;
        if self.route.port.get().is_some() || !is_route && !self.is_asked_back() {
            return;
        }
        let hello = &shared.hellos[self.peer as usize];
        let world = shared.world;
        match PeerInbox::attach(file.as_fd(), status, world.nranks as usize, world.rank as usize, &hello.token) {
            Ok(inbox) => {
                let mut port = Port { inbox, pid: None, is_behind: false };
                if is_route {
                    let reached = match shared.config.soft_transport {
                        SoftTransport::NoCma => Err("OXYGIN_SOFT_TRANSPORT=no-cma".into()),
                        _ => cma::try_reach(pid, hello.probe, &hello.probe_value),
                    };
                    let how = match reached {
                        Ok(()) => "shared memory, large transfers by cross-memory attach".to_string(),
                        Err(ref why) => format!("shared memory, two copies ({why})"),
                    };
                    port.pid = reached.ok().map(|()| pid);
                    log::info!("rank {}: on this host, {how}", self.peer);
                }
                let _ = self.route.port.set(Spin::new(port));
                if is_route {
                    self.route.set(RouteKind::Near);
                }
            }
            Err(e) if is_route => self.use_tcp(shared, e.message()),
            Err(e) => self.fail_answers(&format!(": {}", e.message())),
        }
        drop(finding);
        self.advance(shared);
    }
}
