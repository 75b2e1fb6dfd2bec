//! A lane's turn: its head operations by the link's route, as far as they go for now.

use super::copy::Piece;
use super::*;

/// What became of a lane's turn.
pub(super) enum Step {
    /// More to do.
    Again,
    /// The head's bytes are on their way from the GPU.
    Fetching,
    /// Nothing left.
    Idle,
    /// The ring is full.
    Full,
    /// The head waits for the peer.
    Waiting,
    /// The peer failed.
    Failed,
}

impl Link {
    /// Runs the head operations of one lane for a turn. May let go of the lock in between.
    pub(super) fn run_lane<'a>(
        &'a self,
        shared: &Shared,
        mut state: MutexGuard<'a, State>,
        slot: u32,
    ) -> (MutexGuard<'a, State>, Step) {
        let mut budget = QUANTUM;
        for _ in 0..BURST {
            let s = &mut *state;
            let queue = &mut s.queues[slot as usize];
            let Some(task) = queue.tasks.front_mut() else { return (state, Step::Idle) };
            let left = task.work.len() - task.done;
            let on_gpu = task.work.is_on_gpu();
            if on_gpu && !matches!(s.route, Route::Gpu(_)) {
                match self.route_by_gpu(shared, &mut s.route, &mut s.replies) {
                    Ok(true) => {}
                    Ok(false) => return (state, Step::Full),
                    Err(error) => {
                        self.health.fail(error);
                        self.drop_all(&mut state);
                        return (state, Step::Failed);
                    }
                }
            }
            let outcome = match (&mut s.route, &task.work) {
                (Route::Gpu(engine), _) => {
                    self.submit(shared, engine, &queue.lane, task);
                    Ok(Outcome::HandedOver)
                }
                (Route::Local(local), _) if on_gpu => {
                    local.push_gpu(shared, task, slot, self.peer, (&mut queue.pulls, &queue.outs))
                }
                (Route::Own, work) => shared.do_own(work, task.done, left.min(budget)),
                (Route::Local(local), Work::Put(put)) => match local.pid_for(put.rkey) {
                    Some(pid) if left > RING_MAX => {
                        let (from, to) = (put.local + task.done, put.remote + task.done);
                        let n = left.min(budget) as usize;
                        let piece = Piece { what: "write", window: put.rkey, remote: to, len: n };
                        // SAFETY: the source is readable until the operation completes (Context::put).
                        let write = || unsafe { cma::write(pid, from, to, n) };
                        let (back, result) = self.copy(shared, state, slot, &piece, write);
                        state = back;
                        result
                    }
                    pid => local.push_put(put, slot, task.done, pid.is_none()),
                },
                (Route::Local(local), Work::Get(get)) => match local.pid_for(get.rkey) {
                    Some(pid) => {
                        let (to, from) = (get.local + task.done, get.remote + task.done);
                        let n = left.min(budget) as usize;
                        let piece = Piece { what: "read", window: get.rkey, remote: from, len: n };
                        // SAFETY: the destination is writable until the operation completes (Context::get).
                        let read = || unsafe { cma::read(pid, to, from, n) };
                        let (back, result) = self.copy(shared, state, slot, &piece, read);
                        state = back;
                        result
                    }
                    None => local.push_get(get, slot, task.seq),
                },
                _ => return (state, Step::Full),
            };
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) => {
                    self.health.fail(error);
                    self.drop_all(&mut state);
                    return (state, Step::Failed);
                }
            };
            let queue = &mut state.queues[slot as usize];
            let Some(task) = queue.tasks.front_mut() else { return (state, Step::Idle) };
            let finished = match outcome {
                Outcome::Moved(n) => {
                    task.done += n;
                    budget = budget.saturating_sub(n);
                    task.done == task.work.len() && task.work.signal().is_none()
                }
                Outcome::Finished => true,
                Outcome::HandedOver => {
                    queue.tasks.pop_front();
                    self.backlog.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                Outcome::Out(until, used) => {
                    let seq = task.seq;
                    queue.tasks.pop_front();
                    if queue.outs.is_empty() {
                        state.out.push(slot);
                    }
                    state.queues[slot as usize].outs.push(seq, until, Some(used));
                    continue;
                }
                Outcome::Full => return (state, Step::Full),
                Outcome::Fetching => return (state, Step::Fetching),
                Outcome::Waiting => return (state, Step::Waiting),
            };
            if finished {
                let seq = task.seq;
                queue.tasks.pop_front();
                self.finish(&mut state, slot, seq);
            }
            if budget == 0 {
                break;
            }
        }
        let step = if state.queues[slot as usize].tasks.is_empty() { Step::Idle } else { Step::Again };
        (state, step)
    }

    /// Hands an operation to the engine that moves it.
    pub(super) fn submit(&self, shared: &Shared, engine: &Engine, lane: &Arc<Lane>, task: &Running) {
        self.in_engine.fetch_add(1, Ordering::Relaxed);
        let owner = Owner { lane: lane.clone(), seq: task.seq, backlog: self.in_engine.clone() };
        shared.mark_pending(self.peer);
        engine.submit(Op::new(owner, shared.world.rank, shared.engine.gpu(), &task.work, task.done));
    }
}
