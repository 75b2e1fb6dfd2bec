//! How the way to a peer is found: this process, this host, or TCP.

use super::{Link, Local, Question, Replies, Route, State};
use crate::config::SoftTransport;
use crate::error::{Error, Result};
use crate::fabric::soft::gpu::{self, Engine};
use crate::fabric::soft::lane::Task;
use crate::fabric::soft::local::cma;
use crate::fabric::soft::local::inbox::PeerInbox;
use crate::fabric::soft::local::status::PeerStatus;
use crate::fabric::soft::shared::Shared;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

/// How long a peer in this network namespace may take to answer before it is asked over TCP.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

impl Link {
    /// An operation touches GPU memory but the route was found without: changes it where the peer is in this process.
    /// `Ok(false)`: later, when what went the old way has arrived.
    #[cold]
    pub(super) fn route_by_gpu(&self, shared: &Shared, route: &mut Route, replies: &mut Replies) -> Result<bool> {
        match self.engine(shared)? {
            None if matches!(route, Route::Local(_)) => Ok(true),
            None => Err(self.no_gpu_route()),
            Some(engine) => {
                if let Route::Local(local) = route {
                    if !local.inbox.producer().is_drained() {
                        return Ok(false);
                    }
                }
                // The peer may go on asking through shared memory: it finds its routes by its own operations.
                if let Route::Local(local) = std::mem::replace(route, Route::Gpu(engine)) {
                    *replies = Replies::Through(local);
                }
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
        let question = match state.route {
            Route::Unknown if self.peer == shared.world.rank => {
                state.route = Route::Own;
                return;
            }
            Route::Unknown if shared.config.soft_transport == SoftTransport::Tcp => {
                return self.use_tcp(shared, state, "OXYGIN_SOFT_TRANSPORT=tcp");
            }
            Route::Asking(question) => Question::next(Some(question)),
            _ => Question::next(None),
        };
        if question.is_late(shared.config.peer_limit().min(ANSWER_WITHIN)) {
            return self.use_tcp(shared, state, "it is in this network namespace but does not answer");
        }
        if !question.is_due() {
            return;
        }
        match shared.ask(self.peer) {
            Ok(_) => state.route = Route::Asking(question.asked()),
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

    /// The peer sent its inbox; `status` is what it says of itself.
    pub fn attach(&self, shared: &Shared, file: OwnedFd, status: Arc<PeerStatus>, pid: libc::pid_t) {
        let mut state = self.state.lock();
        let is_route = matches!(state.route, Route::Asking(_));
        if !is_route && !matches!(state.replies, Replies::Asking(_)) {
            return;
        }
        let hello = &shared.hellos[self.peer as usize];
        let world = shared.world;
        match PeerInbox::attach(file.as_fd(), status, world.nranks as usize, world.rank as usize, &hello.token) {
            Ok(inbox) if is_route => {
                let (pid, how) = match self.try_cma(shared, pid, hello.probe, &hello.probe_value) {
                    Ok(()) => (Some(pid), "shared memory, large transfers by cross-memory attach".to_string()),
                    Err(why) => (None, format!("shared memory, two copies ({why})")),
                };
                log::info!("rank {}: on this host, {how}", self.peer);
                state.route = Route::Local(Box::new(Local { inbox, pid, behind: 0 }));
            }
            Ok(inbox) => state.replies = Replies::Through(Box::new(Local { inbox, pid: None, behind: 0 })),
            Err(e) if is_route => self.use_tcp(shared, &mut state, e.message()),
            Err(e) => self.fail_replies(&mut state, &format!(": {}", e.message())),
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
