//! Communicators, context sets and windows.

use crate::defect::{self, Defect};
use crate::inbox::Inbox;
use crate::objects::{bad, Refusal};
use crate::outbox::{Job, Local, Outbox, Remote, Request};
use crate::queue::Queue;
use crate::wire::Token;
use nccl_plugin_api::{NcclResult, SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The ranks of a communicator.
pub struct Comm {
    /// This rank.
    pub rank: u32,
    /// Where each rank listens.
    pub peers: Vec<(u16, Token)>,
    /// What peers send here.
    pub inbox: Arc<Inbox>,
    /// The defect `refusal-breaks` struck.
    pub broken: AtomicBool,
    /// The defect `refusal-hangs` struck.
    pub hangs: AtomicBool,
}

/// A registered range.
pub struct Window {
    /// Number, the same on every rank.
    pub number: u64,
    /// Whose it is.
    pub comm: Arc<Comm>,
    /// First byte.
    pub base: usize,
    /// Bytes.
    pub len: usize,
}

impl Window {
    /// Checks that `offset..offset + len` lies inside.
    pub fn check(&self, what: &str, offset: u64, len: u64) -> Result<(), Refusal> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len as u64);
        if inside || defect::on(Defect::AcceptPastEnd) {
            return Ok(());
        }
        Err(bad(format!("{what} offset {offset} size {len} does not fit the window of {} bytes", self.len)))
    }

    fn holds(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len as u64)
    }
}

/// What `createContext` made.
pub struct ContextSet {
    /// The communicator.
    pub comm: Arc<Comm>,
    /// Device code's queue, if it has one.
    pub queue: OnceLock<Queue>,
    contexts: usize,
    outboxes: Vec<Outbox>,
}

/// A signal as the caller gave it.
pub struct Signal<'a> {
    /// Bytes into the window.
    pub offset: u64,
    /// The window.
    pub window: &'a Window,
    /// The value argument.
    pub value: u64,
    /// `SIGNAL_OP_*`.
    pub op: u32,
}

impl ContextSet {
    /// Connects `contexts` queues to every rank.
    pub fn open(comm: Arc<Comm>, contexts: usize) -> Result<Self, Refusal> {
        let mut outboxes = Vec::new();
        for _ in 0..contexts {
            for (peer, &(port, token)) in comm.peers.iter().enumerate() {
                let outbox = Outbox::open(port, token, comm.rank, peer as u32, comm.inbox.clone())
                    .map_err(|e| Refusal(NcclResult::REMOTE_ERROR, format!("rank {peer}: {e}")))?;
                outboxes.push(outbox);
            }
        }
        Ok(Self { comm, queue: OnceLock::new(), contexts, outboxes })
    }

    /// Sends what is queued and ends the threads.
    pub fn close(&self) {
        if let Some(queue) = self.queue.get() {
            queue.close();
        }
        self.outboxes.iter().for_each(Outbox::close);
    }

    fn outbox(&self, context: i32, rank: u32) -> Result<&Outbox, Refusal> {
        let nranks = self.comm.peers.len();
        let (mut context, mut rank) = (context, rank as usize);
        if rank >= nranks && defect::on(Defect::AcceptBadRank) {
            rank = nranks - 1;
        }
        if defect::on(Defect::AcceptBadContext) {
            context = context.clamp(0, self.contexts as i32 - 1);
        }
        if rank >= nranks {
            return Err(bad(format!("rank {rank} of {nranks}")));
        }
        if context < 0 || context as usize >= self.contexts {
            return Err(bad(format!("context {context} of {}", self.contexts)));
        }
        if self.comm.inbox.is_dead(rank as u32) {
            return Err(Refusal(NcclResult::REMOTE_ERROR, format!("rank {rank} is gone")));
        }
        if self.comm.broken.load(Ordering::Relaxed) {
            return Err(Refusal(NcclResult::INTERNAL_ERROR, "broken by an earlier refusal".into()));
        }
        let context = if defect::on(Defect::OneQueue) { 0 } else { context as usize };
        Ok(&self.outboxes[context * nranks + rank])
    }

    /// Queues a put; `source` and `target` may be missing when there is nothing to move.
    #[allow(clippy::too_many_arguments)]
    pub fn put(
        &self,
        context: i32,
        rank: u32,
        source: Option<(&Window, u64)>,
        target: Option<(&Window, u64)>,
        size: usize,
        signal: Option<Signal<'_>>,
    ) -> Result<Arc<Request>, Refusal> {
        hang_when_told();
        let outbox = self.outbox(context, rank)?;
        let request = Arc::new(Request::default());
        let mut from = Local { address: 0, len: 0 };
        let mut to = Remote { window: 0, offset: 0 };
        if size > 0 {
            let (source, target) =
                (source.ok_or_else(|| bad("source handle NULL"))?, target.ok_or_else(|| bad("target handle NULL"))?);
            source.0.check("source", source.1, size as u64)?;
            target.0.check("target", target.1, size as u64)?;
            if source.0.holds(source.1, size as u64) && target.0.holds(target.1, size as u64) {
                from = Local { address: source.0.base + source.1 as usize, len: size };
                to = Remote { window: target.0.number, offset: target.1 };
            }
        }
        let signal = signal.map(checked_signal).transpose()?.flatten();
        if outbox.unfinished.load(Ordering::SeqCst) >= 1024 && defect::on(Defect::QueueFull) {
            return Err(Refusal(NcclResult::SYSTEM_ERROR, "no room".into()));
        }
        self.push(outbox, rank, Job::Put { from, to, signal, request: request.clone() })?;
        Ok(request)
    }

    /// Queues a get.
    pub fn get(
        &self,
        context: i32,
        rank: u32,
        source: (&Window, u64),
        target: (&Window, u64),
        size: usize,
    ) -> Result<Arc<Request>, Refusal> {
        let outbox = self.outbox(context, rank)?;
        source.0.check("remote", source.1, size as u64)?;
        target.0.check("local", target.1, size as u64)?;
        let fits = source.0.holds(source.1, size as u64) && target.0.holds(target.1, size as u64);
        let len = if fits { size } else { 0 };
        let request = Arc::new(Request::default());
        let from = Remote { window: source.0.number, offset: source.1 };
        let to = Local { address: target.0.base.wrapping_add(target.1 as usize), len };
        self.push(outbox, rank, Job::Get { from, to, request: request.clone() })?;
        Ok(request)
    }

    /// Checks a flush; there is nothing to do, a get is in memory when its request is done.
    pub fn flush(&self, context: i32, rank: u32) -> Result<(), Refusal> {
        self.outbox(context, rank).map(|_| ())
    }

    fn push(&self, outbox: &Outbox, rank: u32, job: Job) -> Result<(), Refusal> {
        if outbox.push(job) {
            return Ok(());
        }
        Err(Refusal(NcclResult::REMOTE_ERROR, format!("the queue to rank {rank} is closed")))
    }
}

/// The place and the sum, or nothing where a defect says to look away.
fn checked_signal(signal: Signal<'_>) -> Result<Option<(Remote, u64)>, Refusal> {
    let Signal { offset, window, value, op } = signal;
    window.check("signal", offset, 8)?;
    if !window.holds(offset, 8) {
        return Ok(None);
    }
    if (window.base as u64 + offset) % 8 != 0 && !defect::on(Defect::AcceptMisaligned) {
        return Err(bad(format!("signal offset {offset} is not 8-byte aligned")));
    }
    let value = match op {
        SIGNAL_OP_INC if !defect::on(Defect::IncAddsValue) => 1,
        SIGNAL_OP_INC | SIGNAL_OP_ADD => value,
        _ if defect::on(Defect::AcceptBadOp) => value,
        _ => return Err(bad(format!("signal op {op}"))),
    };
    Ok(Some((Remote { window: window.number, offset: offset / 8 * 8 }, value)))
}

fn hang_when_told() {
    static PUTS: AtomicUsize = AtomicUsize::new(0);
    if defect::on(Defect::Hang) && PUTS.fetch_add(1, Ordering::Relaxed) == 99 {
        hang();
    }
}

/// Never returns.
pub fn hang() -> ! {
    loop {
        std::thread::park();
    }
}
