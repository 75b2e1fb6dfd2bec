//! How the way to a peer is found: this process, this host, or TCP.

use super::{Link, Local, Route, State, ANSWER_WITHIN, ASK_AGAIN, FORGET_QUESTION};
use crate::config::SoftTransport;
use crate::error::{Error, Result};
use crate::fabric::soft::gpu::{self, Engine};
use crate::fabric::soft::lane::Task;
use crate::fabric::soft::local::cma;
use crate::fabric::soft::local::inbox::PeerInbox;
use crate::fabric::soft::shared::Shared;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

impl Link {
    /// An operation touches GPU memory but the route was found without: changes it where the peer is in this process.
    /// `Ok(false)`: later, when what went the old way has arrived.
    #[cold]
    pub(super) fn route_by_gpu(&self, shared: &Shared, route: &mut Route) -> Result<bool> {
        match self.engine(shared)? {
            None if matches!(route, Route::Local(_)) => Ok(true),
            None => Err(self.no_gpu_route()),
            Some(engine) => {
                if let Route::Local(local) = route {
                    if !local.inbox.producer().is_drained() {
                        return Ok(false);
                    }
                }
                *route = Route::Gpu(engine);
                Ok(true)
            }
        }
    }

    #[cold]
    pub(super) fn no_gpu_route(&self) -> Error {
        Error::usage(format!(
            "an operation to rank {} names GPU memory, but neither rank has a GPU window; register it as type 2 (CUDA)",
            self.peer
        ))
    }

    /// The engine for a peer in this process, if any of the two has GPU memory.
    pub(super) fn engine(&self, shared: &Shared) -> Result<Option<Arc<Engine>>> {
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

    pub(super) fn find_route(&self, shared: &Shared, state: &mut State) {
        let now = Instant::now();
        if matches!(state.route, Route::Unknown) {
            match self.engine(shared) {
                Ok(None) => {}
                Ok(Some(engine)) => {
                    log::info!("rank {}: in this process, by copies on its GPU", self.peer);
                    state.route = Route::Gpu(engine);
                    return;
                }
                Err(error) => return self.health.fail(error),
            }
        }
        let since = match state.route {
            Route::Unknown if self.peer == shared.world.rank => {
                state.route = Route::Own;
                return;
            }
            Route::Unknown if shared.config.soft_transport == SoftTransport::Tcp => {
                return self.use_tcp(shared, state, "OXYGIN_SOFT_TRANSPORT=tcp");
            }
            // Nothing had to go there for a while, so nobody asked again.
            Route::Asking { last, .. } if now - last > FORGET_QUESTION => now,
            Route::Asking { since, .. } if now - since > ANSWER_WITHIN => {
                return self.use_tcp(shared, state, "it is in this network namespace but does not answer");
            }
            Route::Asking { last, .. } if now - last < ASK_AGAIN => return,
            Route::Asking { since, .. } => since,
            _ => now,
        };
        let hello = &shared.hellos[self.peer as usize];
        match shared.contact.ask(&hello.contact, &hello.token, shared.world.rank) {
            Ok(_) => state.route = Route::Asking { since, last: now },
            Err(e) => self.use_tcp(shared, state, &format!("no shared memory with it: {}", e.desc())),
        }
    }

    pub(super) fn use_tcp(&self, shared: &Shared, state: &mut State, why: &str) {
        log::info!("rank {}: over TCP ({why})", self.peer);
        state.route = Route::Tcp;
        shared.tcp_active();
        state.active.clear();
        for queue in &mut state.queues {
            queue.engaged = false;
            for task in queue.tasks.drain(..) {
                self.backlog.fetch_sub(1, Ordering::Relaxed);
                shared.tcp().post(Task { lane: queue.lane.clone(), seq: task.seq, work: task.work });
            }
        }
    }

    /// The peer sent its inbox.
    pub fn attach(&self, shared: &Shared, file: OwnedFd, pid: libc::pid_t) {
        let mut state = self.state.lock();
        if !matches!(state.route, Route::Asking { .. }) {
            return;
        }
        let hello = &shared.hellos[self.peer as usize];
        let world = shared.world;
        match PeerInbox::attach(file.as_fd(), world.nranks as usize, world.rank as usize, &hello.token) {
            Ok(inbox) => {
                let (pid, how) = match self.try_cma(shared, pid, hello.probe, &hello.probe_value) {
                    Ok(()) => (Some(pid), "shared memory, large transfers by cross-memory attach".to_string()),
                    Err(why) => (None, format!("shared memory, two copies ({why})")),
                };
                log::info!("rank {}: on this host, {how}", self.peer);
                state.route = Route::Local(Box::new(Local { inbox, pid, behind: 0 }));
            }
            Err(e) => self.use_tcp(shared, &mut state, e.message()),
        }
        drop(state);
        self.advance(shared);
    }

    pub(super) fn try_cma(
        &self,
        shared: &Shared,
        pid: libc::pid_t,
        probe: u64,
        value: &[u8; 16],
    ) -> std::result::Result<(), String> {
        if shared.config.soft_transport == SoftTransport::NoCma {
            return Err("OXYGIN_SOFT_TRANSPORT=no-cma".into());
        }
        if pid <= 0 {
            return Err("its process is not visible from here".into());
        }
        match cma::usable(pid, probe, value) {
            Ok(true) => Ok(()),
            Ok(false) => Err("its process number means another process here".into()),
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => Err(
                "cross-memory attach is not permitted: kernel.yama.ptrace_scope is not 0 and CAP_SYS_PTRACE is missing"
                    .into(),
            ),
            Err(e) => Err(format!("cross-memory attach failed: {e}")),
        }
    }
}
