//! What the peer asked for, and what it answered.

use super::outs::Until;
use super::push::{data_of, Outcome};
use super::{ring, Link, Queue, Response, State};
use crate::error::Error;
use crate::fabric::soft::lane::Work;
use crate::fabric::soft::local::message::{GetRequest, Header, Kind};
use crate::fabric::soft::local::ring::Message;
use crate::fabric::soft::receive::place;
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::GPU_BIT;
use crate::rma::op::Get;
use crate::rma::seq::Seq;
use std::sync::atomic::Ordering;

impl Queue {
    /// The get with this number, if its answer is awaited.
    fn awaited(&self, seq: Seq) -> Option<Get> {
        let task = self.tasks.front().filter(|t| self.waiting && t.seq == seq)?;
        match task.work {
            Work::Get(get) => Some(get),
            Work::Put(_) => None,
        }
    }
}

impl Link {
    /// The data of a get has all arrived.
    pub fn get_done(&self, shared: &Shared, slot: u32, seq: Seq) {
        let mut state = self.state.lock();
        let Some(queue) = state.queues.get_mut(slot as usize) else { return };
        if queue.vacant && queue.waiting {
            (queue.engaged, queue.waiting) = (false, false);
            return;
        }
        let Some(get) = queue.awaited(seq) else { return };
        let in_engine = get.lkey & GPU_BIT != 0 && !queue.outs.fetches.is_idle();
        queue.tasks.pop_front();
        queue.waiting = false;
        if in_engine {
            let is_first = queue.outs.is_empty();
            queue.outs.push(seq, Until::Fetched(queue.outs.fetches.last()), None);
            if is_first {
                state.out.push(slot);
            }
        } else {
            self.finish(&mut state, slot, seq);
        }
        state.active.push_back(slot);
        drop(state);
        self.advance(shared);
    }

    /// Bytes of a get, from `at` on in it. They go where this rank's own operation says, and nowhere if its context is gone:
    /// then nobody vouches for that memory any more. `false`: there is no room for them yet.
    pub fn get_data(&self, shared: &Shared, message: &Message) -> bool {
        let Header { key: slot, aux: seq, addr: at, len, .. } = message.header;
        let mut state = self.state.lock();
        let queue = state.queues.get(slot as usize);
        let Some((queue, get)) = queue.and_then(|q| Some((q, q.awaited(Seq(seq))?))) else { return true };
        if at.checked_add(u64::from(len)).is_none_or(|end| end > get.len) {
            let why = format!("rank {} sent {len} bytes at {at} of a get of {} bytes", self.peer, get.len);
            self.health.fail(Error::remote(why));
            self.drop_all(&mut state);
            return true;
        }
        let to = get.local + at;
        if get.lkey & GPU_BIT != 0 {
            let lane = &queue.outs.fetches;
            // SAFETY: a message in place.
            return shared.received.fetched(&shared.engine, lane, || unsafe { message.copy() }, get.lkey, to);
        }
        let held = shared.registry.hold();
        match held.resolve(get.lkey, to, u64::from(len)) {
            // SAFETY: the payload is `len` bytes inside the ring, the destination `len` bytes inside a held window, which is
            // the operation's for as long as it is in the queue, and the queue is locked.
            Some(to) => unsafe { place(message.payload, to, len as usize) },
            None => {
                drop(held);
                let why =
                    format!("the window that a get from rank {} writes to was deregistered before its end", self.peer);
                self.health.fail(Error::usage(why));
                self.drop_all(&mut state);
            }
        }
        true
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
                        let h = data_of(request, *done, n);
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
