//! What the peer asked for and is owed: bytes of gets, acknowledgements of copies, refusals. It goes into the peer's
//! inbox, also where operations towards it go another way: by a GPU's engine in this process, or over TCP because it
//! once did not answer.

use super::staged::{from_gpu, Step};
use super::{Link, RouteKind};
use crate::config::SoftTransport;
use crate::error::Error;
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::gpu::Bounce;
use crate::fabric::soft::peer::finding::{Finding, Silent};
use crate::fabric::soft::shm::message::GetRequest;
use crate::fabric::soft::shm::port::data_of;
use crate::fabric::soft::status::alive;
use crate::memory::key::Key;
use crate::rma::seq::Seq;
use nix::errno::Errno;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Something the peer asked for.
pub enum Response {
    /// Bytes of a get.
    Data {
        /// Where they start.
        from: u64,
        /// Key of their window.
        key: u32,
        /// How many, and what they belong to.
        request: GetRequest,
        /// Those that are sent.
        done: u64,
        /// The next ones on their way from the GPU.
        bounce: Option<Bounce>,
    },
    /// What a word held before an atomic operation, of which `request.len` bytes are wanted and not sent yet.
    Fetched {
        /// Whose it is.
        request: GetRequest,
        /// What it held.
        value: u64,
    },
    /// An operation of a context is refused.
    Refused {
        /// The peer's context.
        context: u32,
        /// The sentence for it.
        why: Error,
    },
    /// Pulls of its context up to this one are done.
    Pulled {
        /// The peer's context.
        context: u32,
        /// The last one.
        number: Seq,
    },
}

/// What is to be sent, in its order, and the way there.
#[derive(Default)]
pub struct Service {
    responses: VecDeque<Response>,
    /// The way back, where operations go another way.
    finding: Finding,
    /// The peer has closed its communicator, and waits for nothing.
    is_closed: bool,
}

impl Link {
    /// The peer asked for data, which was checked to be inside one of our windows.
    pub fn respond(&self, shared: &Domain, from: u64, key: u32, request: GetRequest) {
        self.queue_response(shared, Response::Data { from, key, request, done: 0, bounce: None });
    }

    /// The peer asked, in a context of its own, for something it may not have.
    pub fn refuse(&self, shared: &Domain, context: u32, why: Error) {
        self.queue_response(shared, Response::Refused { context, why });
    }

    pub(super) fn queue_response(&self, shared: &Domain, response: Response) {
        let mut service = self.service.lock();
        service.responses.push_back(response);
        self.owed.fetch_add(1, Ordering::Relaxed);
        self.backlog.fetch_add(1, Ordering::Relaxed);
        drop(service);
        shared.mark_pending(self.peer);
    }

    /// Whether the peer waits for something that only has to be sent.
    pub fn owes(&self) -> bool {
        !self.service.lock().responses.is_empty() && self.route.way() != RouteKind::Closed
    }

    /// Whether the peer is owed a refusal, and is there to read it: it is told, also where its rank has failed for this
    /// one, that it waits in vain.
    pub(super) fn owes_refusal(&self, shared: &Domain) -> bool {
        let is_there = || shared.neighbours.get(self.peer).is_some_and(|its| its.look() == alive::Liveness::Alive);
        self.service.lock().responses.iter().any(|r| matches!(r, Response::Refused { .. })) && is_there()
    }

    /// This rank has fetched everything up to pull `number` of the peer's context.
    pub fn acknowledge(&self, shared: &Domain, context: u32, number: Seq) {
        if self.add_acknowledgement(context, number) {
            shared.mark_pending(self.peer);
        }
    }

    /// Adds one to what is to be sent. `false`: one that waits there says it now.
    fn add_acknowledgement(&self, context: u32, number: Seq) -> bool {
        let mut service = self.service.lock();
        // What was not sent yet says it as well; nothing else follows acknowledgements.
        for response in service.responses.iter_mut().rev() {
            match response {
                Response::Pulled { context: of, number: last } if *of == context => {
                    // Two threads may have found out at once, and the one that found less comes second.
                    if last.is_done(number) {
                        *last = number;
                    }
                    return false;
                }
                Response::Pulled { .. } => {}
                _ => break,
            }
        }
        service.responses.push_back(Response::Pulled { context, number });
        self.owed.fetch_add(1, Ordering::Relaxed);
        self.backlog.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Sends what there is room for. Returns whether anything moved.
    pub(super) fn serve(&self, shared: &Domain) -> bool {
        let Some(mut service) = self.service.try_lock() else { return false };
        if service.responses.is_empty() {
            return false;
        }
        if self.route.port().is_none() || self.route.way() == RouteKind::Closed || service.is_closed {
            self.find_way_back(shared, &mut service);
            return false;
        }
        let mut moved = false;
        while let Some(response) = service.responses.front_mut() {
            let step = match response {
                Response::Data { from, key, request, done, bounce } => {
                    let is_on_gpu = Key(*key).is_on_gpu() && *done < request.len;
                    match is_on_gpu {
                        true => self.send_from_gpu(shared, (*key, *from), request, done, bounce),
                        false => self.send_data(shared, (*key, *from), request, done),
                    }
                }
                Response::Fetched { request, value } => {
                    let sent = self.route.port().is_some_and(|mut port| port.push_fetched(request, *value));
                    Ok(if sent { Step::Finished } else { Step::Full })
                }
                Response::Pulled { context, number } => {
                    let sent = self.route.port().is_some_and(|mut port| port.push_pulled(*context, *number));
                    Ok(if sent { Step::Finished } else { Step::Full })
                }
                Response::Refused { context, why } => {
                    let sent = self.route.port().is_some_and(|mut port| port.push_refused(*context, why));
                    Ok(if sent { Step::Finished } else { Step::Full })
                }
            };
            match step {
                Ok(Step::Full) => break,
                // Nothing else tells whoever would sleep now that it is there.
                Ok(Step::Fetching) => {
                    moved = true;
                    break;
                }
                Ok(Step::Finished) => {
                    service.responses.pop_front();
                    self.owed.fetch_sub(1, Ordering::Relaxed);
                    self.backlog.fetch_sub(1, Ordering::Relaxed);
                }
                Ok(_) => {}
                Err((context, why)) => *response = Response::Refused { context, why },
            }
            moved = true;
        }
        moved
    }

    /// One message of a get's data in host memory, or the one behind it.
    fn send_data(
        &self,
        shared: &Domain,
        (key, from): (u32, u64),
        request: &GetRequest,
        done: &mut u64,
    ) -> Result<Step, (u32, Error)> {
        // First: who holds the port waits for nothing.
        let held = shared.registry.hold();
        let Some(mut port) = self.route.port() else { return Ok(Step::Full) };
        let n = (request.len - *done).min(port.chunk());
        if n == 0 {
            return Ok(if port.push_get_done(request) { Step::Finished } else { Step::Full });
        }
        match held.resolve(key, from + *done, n) {
            // SAFETY: inside a window that is held in place.
            Some(at) if !unsafe { port.push_answer(data_of(request, *done, n), at) } => Ok(Step::Full),
            Some(_) => {
                *done += n;
                Ok(Step::Moved(n))
            }
            None => Err((request.context, Error::remote_access("the window was deregistered during a get"))),
        }
    }

    /// One message of a get's data in this rank's GPU memory.
    fn send_from_gpu(
        &self,
        shared: &Domain,
        (key, from): (u32, u64),
        request: &GetRequest,
        done: &mut u64,
        bounce: &mut Option<Bounce>,
    ) -> Result<Step, (u32, Error)> {
        from_gpu(shared, &self.route, (key, from), request, done, bounce).map_err(|why| (request.context, why))
    }

    /// The peer waits for something, and this rank has not its inbox: looks for the way back, or drops what it waits
    /// for.
    #[cold]
    fn find_way_back(&self, shared: &Domain, service: &mut Service) {
        if self.route.way() == RouteKind::Closed || service.is_closed {
            return self.drop_responses(service);
        }
        if shared.config.soft_transport == SoftTransport::Tcp {
            return self.fail_service(service, "; set OXYGIN_SOFT_TRANSPORT=tcp on all ranks");
        }
        let limit = shared.config.peer_limit();
        match service.finding.step(limit, || shared.ask(self.peer)) {
            Ok(()) => {}
            Err(Silent::Late) => {
                let why = format!(": it has not answered for {} s (OXYGIN_PEER_TIMEOUT)", limit.as_secs_f32());
                self.fail_service(service, &why);
            }
            // It has reached this rank: its socket was there.
            Err(Silent::Unreachable(Errno::ECONNREFUSED | Errno::ENOENT)) => {
                service.is_closed = true;
                self.drop_responses(service);
            }
            Err(Silent::Unreachable(e)) => self.fail_service(service, &format!(": {}", e.desc())),
        }
    }

    fn drop_responses(&self, service: &mut Service) {
        self.owed.fetch_sub(service.responses.len(), Ordering::Relaxed);
        self.backlog.fetch_sub(service.responses.len(), Ordering::Relaxed);
        service.responses.clear();
    }

    /// The peer has failed, and gets nothing more.
    pub(super) fn end_service(&self) {
        self.drop_responses(&mut self.service.lock());
    }

    /// The peer has closed its communicator: what it asked for reaches nobody any more.
    pub(super) fn close_service(&self) {
        let mut service = self.service.lock();
        service.is_closed = true;
        self.drop_responses(&mut service);
    }

    /// Whether operations of this rank are unfinished, rather than what the peer is owed.
    pub(super) fn is_unfinished(&self) -> bool {
        // What is owed counts in both, which change under this.
        let _service = self.service.lock();
        self.backlog.load(Ordering::Relaxed) != self.owed.load(Ordering::Relaxed)
    }

    /// Whether the peer was asked for the way back.
    pub(super) fn is_asked_back(&self) -> bool {
        self.service.lock().finding.is_asked()
    }

    /// There is no way back.
    pub(super) fn fail_answers(&self, why: &str) {
        self.fail_service(&mut self.service.lock(), why);
    }

    fn fail_service(&self, service: &mut Service, why: &str) {
        self.drop_responses(service);
        let peer = self.peer;
        self.health.fail(Error::remote(format!(
            "rank {peer} reaches this rank through shared memory, but not the other way round{why}"
        )));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn numbers(service: &Service) -> Vec<(u32, Seq)> {
        let numbers = service.responses.iter().map(|r| match r {
            Response::Pulled { context, number } => (*context, *number),
            _ => panic!("not an acknowledgement"),
        });
        numbers.collect()
    }

    #[test]
    fn an_acknowledgement_takes_none_back() {
        let link = Link::new(1, Arc::default());
        for (slot, number) in [(0, 3), (1, 1), (0, 9), (0, 5), (1, u32::MAX), (1, 2)] {
            link.add_acknowledgement(slot, Seq(number));
        }
        assert_eq!(numbers(&link.service.lock()), [(0, Seq(9)), (1, Seq(2))]);
        assert_eq!(link.backlog.load(Ordering::Relaxed), 2);
    }
}
