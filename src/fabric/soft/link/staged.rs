//! One step of an operation with an end in GPU memory of another process: a source comes over host memory, unless the
//! peer fetches it; a destination is the peer's affair.

use super::pulls::{fetch, pull};
use super::route::Route;
use super::tx_queue::LaneQueue;
use crate::error::Result;
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::gpu::{Bounce, TransferEnd, Use};
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::link::remote::Until;
use crate::fabric::soft::local;
use crate::fabric::soft::shm::message::GetRequest;
use crate::fabric::soft::shm::port::{self, data_of};
use crate::memory::key::Key;
use crate::rma::op::{Put, Transfer};
use std::sync::atomic::AtomicUsize;
use std::sync::Arc;

/// What became of a step.
pub enum Step {
    /// So many bytes were moved.
    Moved(u64),
    /// The operation is locally complete.
    Finished,
    /// Whoever has it now completes it.
    HandedOver,
    /// It is on its way by somebody else's hands and complete after this; the window must stay meanwhile.
    Out(Until, Option<Use>),
    /// No room in the ring, or no way yet.
    Full,
    /// Its bytes are on their way from the GPU.
    Fetching,
    /// The peer's answer is awaited.
    Waiting,
}

impl From<port::PortStep> for Step {
    #[inline]
    fn from(step: port::PortStep) -> Self {
        match step {
            port::PortStep::Moved(n) => Self::Moved(n),
            port::PortStep::Finished => Self::Finished,
            port::PortStep::Full => Self::Full,
            port::PortStep::Waiting => Self::Waiting,
        }
    }
}

/// One step of the first operation of a lane's queue; `in_engine`: see `fetch`.
pub(super) fn to_gpu(
    shared: &Domain,
    route: &Route,
    in_engine: &Arc<AtomicUsize>,
    queue: &mut LaneQueue,
    lane: &Lane,
) -> Result<Step> {
    let context = lane.context;
    let LaneQueue { tasks, remote, pulls, .. } = queue;
    let Some(task) = tasks.front_mut() else { return Ok(Step::Full) };
    let put = match task.work.transfer() {
        Transfer::Get(get) => {
            if let Some(step) = fetch(shared, route, in_engine, &get, lane, remote)? {
                return Ok(step);
            }
            let Some(mut port) = route.near() else { return Ok(Step::Full) };
            return Ok(port.push_get(&get, context, task.seq).into());
        }
        Transfer::Put(put) => put,
        Transfer::Atomic(atomic) => {
            let Some(mut port) = route.near() else { return Ok(Step::Full) };
            return Ok(port.push_atomic(&atomic, context, task.seq).into());
        }
    };
    // First: who holds the port waits for nothing.
    let held = (!Key(put.lkey).is_on_gpu()).then(|| shared.registry.hold());
    let Some(mut port) = route.near() else { return Ok(Step::Full) };
    port.is_behind |= Key(put.rkey).is_on_gpu();
    if let Some(held) = &held {
        local::check(held, &task.work, task.done, put.len - task.done)?;
    }
    if held.is_some() || task.done == put.len {
        return Ok(port.push_put(&put, context, task.done, true).into());
    }
    if task.done == 0 && task.bounce.is_none() {
        if let Some(step) = pull(shared, &mut port, &put, lane, pulls) {
            return Ok(step);
        }
    }
    // What the engine does takes its time.
    drop(port);
    let bounce = task.bounce.get_or_insert_with(|| {
        // By its window: nothing is read once that is gone.
        let from = TransferEnd::Window { key: put.lkey, addr: put.local + task.done };
        Bounce::start(&shared.engine, lane.health.clone(), from, task.done, put.len - task.done)
    });
    if !bounce.is_full(&shared.engine)? {
        return Ok(Step::Fetching);
    }
    let end = bounce.end();
    let piece = Put { local: bounce.origin(), len: end, signal: None, ..put };
    let Some(mut port) = route.near() else { return Ok(Step::Full) };
    let step = port.push_put(&piece, context, task.done, true);
    drop(port);
    if matches!(step, port::PortStep::Moved(n) if task.done + n == end) {
        task.bounce = None;
    }
    Ok(step.into())
}

/// One message of a get's data that lies in this rank's GPU memory.
pub(super) fn from_gpu(
    shared: &Domain,
    route: &Route,
    (key, from): (u32, u64),
    request: &GetRequest,
    done: &mut u64,
    bounce: &mut Option<Bounce>,
) -> Result<Step> {
    let piece = bounce.get_or_insert_with(|| {
        let from = TransferEnd::Window { key, addr: from + *done };
        // Of its own: what fails here the peer is to learn, and the way to tell it stays open.
        Bounce::start(&shared.engine, Arc::default(), from, *done, request.len - *done)
    });
    if !piece.is_full(&shared.engine)? {
        return Ok(Step::Fetching);
    }
    let Some(mut port) = route.port() else { return Ok(Step::Full) };
    let n = (piece.end() - *done).min(port.chunk());
    let header = data_of(request, *done, n);
    // SAFETY: the bounce holds these bytes.
    if !unsafe { port.push_answer(header, (piece.origin() + *done) as *const u8) } {
        return Ok(Step::Full);
    }
    drop(port);
    *done += n;
    if *done == piece.end() {
        *bounce = None;
    }
    Ok(Step::Moved(n))
}
