//! What connections bring: the heads of requests, requests, and bytes behind them.

use super::{Brought, Conn, Gather, Link, Phase, Stage, SETTLE};
use crate::comm::rendezvous::job::call_of;
use crate::comm::rendezvous::wire::{self, Failure, Request, RequestHead};
use nccl_plugin_api::NcclResult;
use std::time::Instant;

impl Gather {
    /// Bytes came.
    pub fn received(&mut self, conn: Conn, bytes: &[u8], now: Instant) {
        let Some(link) = self.links.get_mut(&conn).filter(|_| !bytes.is_empty()) else { return };
        match link.stage {
            Stage::Stranger(_) | Stage::KeptConnection(_) => {
                // Its deadline in the step before passed while the answer was on its way.
                let late = matches!(link.stage, Stage::KeptConnection(_))
                    && link.bytes.is_empty()
                    && bytes[0] == wire::EXPIRED;
                link.bytes.extend_from_slice(&bytes[usize::from(late)..]);
                match RequestHead::parse(&link.bytes) {
                    Ok(None) => {}
                    Ok(Some(head)) if head.token == self.job.token => {
                        link.stage = Stage::Head(head);
                        self.strangers.remove(&conn);
                        self.whole(conn, now);
                    }
                    bad => {
                        let why = bad.err().map_or("a wrong token", |malformed| malformed.0);
                        log::debug!("{}: dropped a connection from {}: {why}", self.name, link.peer);
                        self.close(conn);
                    }
                }
            }
            Stage::Head(head) => {
                // Nobody of ours sends more than the request and one byte; what is more is not kept.
                let room = (head.total() + 2).saturating_sub(link.bytes.len());
                link.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
                self.whole(conn, now);
            }
            Stage::Waiting { rank, .. } => self.more(conn, rank, bytes, now),
            Stage::Answering { .. } => {}
        }
    }

    /// Takes a request if it is complete.
    fn whole(&mut self, conn: Conn, now: Instant) {
        let Some(link) = self.links.get_mut(&conn) else { return };
        let Stage::Head(head) = link.stage else { return };
        if link.bytes.len() < head.total() {
            return;
        }
        let mut bytes = std::mem::take(&mut link.bytes);
        let rest = bytes.split_off(head.total());
        self.request(conn, head, bytes, now);
        if let Some(Link { stage: Stage::Waiting { rank, .. }, .. }) = self.links.get(&conn) {
            self.more(conn, *rank, &rest, now);
        }
    }

    /// A complete request with the right token.
    fn request(&mut self, conn: Conn, head: RequestHead, bytes: Vec<u8>, now: Instant) {
        let peer = self.links[&conn].peer;
        let (rank, mine) = (head.rank, self.job.nranks());
        let (name, failure) = match Request::parse(&bytes) {
            Ok(request) => (request.name.to_owned(), request.common.err()),
            Err(malformed) => {
                let sentence = format!("{}: {peer} shows this job's token but sent {malformed}", self.name);
                self.fail(NcclResult::REMOTE_ERROR, sentence, now);
                return self.close(conn);
            }
        };
        if head.step < self.step {
            return self.too_late(conn, &head, &name);
        }
        let who = if rank < mine { self.job.rank(rank) } else { format!("rank {rank} (at {peer})") };
        if head.step > self.step {
            // Never in the middle of a step that goes well: a rank leaves one only with its answer, or in despair.
            let sentence = format!("{}: {who} has given this step up and is in {name} already", self.name);
            self.fail(NcclResult::REMOTE_ERROR, sentence, now);
            return self.answer(conn, wire::encode_again(head.step).into(), None);
        }
        let wrong = if head.nranks != mine {
            Some(format!("{who} says that there are {} ranks while rank 0 says {mine}", head.nranks))
        } else if rank == 0 {
            Some(format!("a second process, at {peer}, says that it is rank 0"))
        } else if name != self.name {
            Some(format!("{who} is in {name} while rank 0 is in {}", self.name))
        } else if let Some(first) = &self.brought[rank as usize] {
            let first = self.links.get(&first.conn).map_or("a connection closed since".into(), |l| l.peer.to_string());
            Some(format!("{who} came twice, from {first} and from {peer}"))
        } else {
            None
        };
        self.set_stage(conn, Stage::Waiting { rank, expired: false });
        match wrong {
            None => self.keep(conn, head, failure, bytes),
            Some(wrong) => self.fail(NcclResult::INVALID_USAGE, format!("{}: {wrong}", self.name), now),
        }
        let waits = matches!(self.links.get(&conn), Some(Link { stage: Stage::Waiting { .. }, .. }));
        if let (Phase::Failing { failure, .. }, true) = (&self.phase, waits) {
            let bytes = wire::encode_failed(head.step, failure);
            self.answer(conn, bytes.into(), Some(rank));
        }
    }

    /// Answers a rank that comes to a step that is over.
    fn too_late(&mut self, conn: Conn, head: &RequestHead, name: &str) {
        let mut sentence = format!("{name}: over before {} came", self.job.rank(head.rank));
        if let Some((_, why)) = self.earlier.as_ref().filter(|(step, _)| call_of(*step) == call_of(head.step)) {
            sentence = format!("{sentence}; {why}");
        }
        sentence +=
            "; if it was not late, it has made a call less than the others, with a collComm that is none, and is \
                     behind for good: close this communicator on all ranks";
        self.behind.insert(head.rank);
        let failure = Failure { code: NcclResult::TIMEOUT.0, sentence };
        self.answer(conn, wire::encode_failed(head.step, &failure).into(), None);
    }

    /// Stores a contribution to this step. The step is concluded at the next tick, when whatever else has happened is
    /// known: a rank that gave up has perhaps left its request and its farewell in one piece.
    pub(super) fn keep(&mut self, conn: Conn, head: RequestHead, failure: Option<Failure>, bytes: Vec<u8>) {
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        let Ok(request) = Request::parse(&bytes) else { return };
        let common = request.common.as_ref().map_or(0, |common| common.len());
        let addressed = bytes.len() - request.addressed.len();
        let common = addressed - common..addressed;
        let slice = request.addressed.len() / self.brought.len();
        if let Some(failure) = failure {
            self.failed.insert(head.rank, failure);
        }
        self.brought[head.rank as usize] = Some(Brought { bytes, common, addressed, slice, conn });
        self.missing -= 1;
    }

    /// Bytes behind a request: the one that says that its sender's deadline passed, or nonsense.
    fn more(&mut self, conn: Conn, rank: u32, bytes: &[u8], now: Instant) {
        match bytes {
            [] => {}
            [wire::EXPIRED] => {
                self.set_stage(conn, Stage::Waiting { rank, expired: true });
                self.settle.get_or_insert(now + SETTLE);
            }
            _ => {
                let sentence = format!("{}: {} sent bytes behind its request", self.name, self.job.rank(rank));
                self.fail(NcclResult::REMOTE_ERROR, sentence, now);
            }
        }
    }
}
