//! What the peer asked for, and what it answered.

use super::push::Outcome;
use super::{ring, Link, Response, State};
use crate::fabric::soft::lane::Work;
use crate::fabric::soft::local::message::{GetRequest, Header, Kind};
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::GPU_BIT;
use crate::rma::seq::Seq;
use std::sync::atomic::Ordering;

impl Link {
    /// The data of a get has all arrived.
    pub fn get_done(&self, shared: &Shared, slot: u32, seq: Seq) {
        let mut state = self.state.lock();
        let Some(queue) = state.queues.get_mut(slot as usize) else { return };
        if queue.vacant && queue.waiting {
            (queue.engaged, queue.waiting) = (false, false);
            return;
        }
        if queue.tasks.front().is_some_and(|t| t.seq == seq && matches!(t.work, Work::Get(_))) {
            queue.tasks.pop_front();
            queue.waiting = false;
            self.finish(&mut state, slot, seq);
            state.active.push_back(slot);
            drop(state);
            self.advance(shared);
        }
    }

    /// The peer asked for data, which was checked to be inside one of our windows.
    pub fn respond(&self, shared: &Shared, from: u64, key: u32, request: GetRequest) {
        self.queue_response(shared, Response::Data { from, key, request, done: 0, bounce: None });
    }

    /// The peer asked for something it may not have.
    pub fn refuse(&self, shared: &Shared, why: String) {
        self.queue_response(shared, Response::Refused(why));
    }

    pub(super) fn queue_response(&self, shared: &Shared, response: Response) {
        self.state.lock().responses.push_back(response);
        self.backlog.fetch_add(1, Ordering::Relaxed);
        shared.mark_pending(self.peer);
    }

    pub(super) fn send_responses(&self, shared: &Shared, state: &mut State) -> bool {
        let mut moved = false;
        let Some(local) = ring(&mut state.route, &mut state.replies) else {
            self.find_way_back(shared, state);
            return false;
        };
        while let Some(response) = state.responses.front_mut() {
            let finished = match response {
                Response::Data { from, key, request, done, bounce } => {
                    let n = (request.len - *done).min(local.chunk());
                    if n > 0 && *key & GPU_BIT != 0 {
                        match local.push_from_gpu(shared, (*key, *from), request, done, bounce) {
                            Ok(Outcome::Full) => break,
                            // Nothing else tells whoever would sleep now that it is there.
                            Ok(Outcome::Fetching) => {
                                moved = true;
                                break;
                            }
                            Ok(_) => {}
                            Err(e) => *response = Response::Refused(e.message().to_string()),
                        }
                        false
                    } else if n == 0 {
                        let h = Header { kind: Kind::GetDone, len: 0, key: request.context, aux: request.seq, addr: 0 };
                        // SAFETY: no payload.
                        if !unsafe { local.inbox.producer().push(h, std::ptr::null()) } {
                            break;
                        }
                        true
                    } else {
                        let held = shared.registry.hold();
                        let h = Header {
                            kind: Kind::Put,
                            len: n as u32,
                            key: request.to_key,
                            aux: 0,
                            addr: request.to + *done,
                        };
                        match held.resolve(*key, *from + *done, n) {
                            // SAFETY: inside a window that is held in place.
                            Some(at) if !unsafe { local.inbox.producer().push(h, at) } => break,
                            Some(_) => *done += n,
                            None => {
                                drop(held);
                                *response = Response::Refused("the window was deregistered during a get".into());
                            }
                        }
                        false
                    }
                }
                Response::Pulled { slot, number } => {
                    if !local.push_pulled(*slot, *number) {
                        break;
                    }
                    true
                }
                Response::Refused(why) => {
                    let bytes = &why.as_bytes()[..why.len().min(512)];
                    let h = Header { kind: Kind::Refused, len: bytes.len() as u32, key: 0, aux: 0, addr: 0 };
                    // SAFETY: the payload is the string's own bytes.
                    if !unsafe { local.inbox.producer().push(h, bytes.as_ptr()) } {
                        break;
                    }
                    true
                }
            };
            moved = true;
            if finished {
                state.responses.pop_front();
                self.backlog.fetch_sub(1, Ordering::Relaxed);
            }
        }
        moved
    }
}
