//! One step of an operation: messages into the ring of a peer on this host, or copies where the peer is this rank.

use super::outs::{Outs, Until};
use super::share::Pulls;
use super::{gone, Local, Running, RING_CHUNK, RING_MAX};
use crate::error::{Error, Result};
use crate::fabric::soft::gpu::share::Use;
use crate::fabric::soft::gpu::{Bounce, Side};
use crate::fabric::soft::lane::Work;
use crate::fabric::soft::local::message::{GetRequest, Header, Kind};
use crate::fabric::soft::receive;
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::{BEHIND_GPU_BIT, GPU_BIT};
use crate::rma::op::{Get, Put, Signal};
use crate::rma::seq::Seq;
use std::sync::Arc;

/// What became of a step.
pub(super) enum Outcome {
    /// So many bytes were moved.
    Moved(u64),
    /// The operation is locally complete.
    Finished,
    /// Whoever has it now completes it.
    HandedOver,
    /// It is on its way by somebody else's hands and complete after this; the window must stay meanwhile.
    Out(Until, Use),
    /// No room in the ring.
    Full,
    /// Its bytes are on their way from the GPU.
    Fetching,
    /// The peer's answer is awaited.
    Waiting,
}

/// How far a small operation got at once.
pub(super) enum Pushed {
    All { wake: bool },
    Nothing,
    DataOnly,
}

/// The header of `n` bytes that a get asked for.
pub(super) fn data_of(request: &GetRequest, done: u64, n: u64) -> Header {
    Header { kind: Kind::GetData, len: n as u32, key: request.context, aux: request.seq, addr: done }
}

impl Local {
    /// One step of an operation with an end in GPU memory: a source comes over host memory, a destination is the peer's
    /// affair.
    pub(super) fn push_gpu(
        &mut self,
        shared: &Shared,
        task: &mut Running,
        slot: u32,
        peer: u32,
        (pulls, outs): (&mut Pulls, &Outs),
    ) -> Result<Outcome> {
        let put = match task.work {
            Work::Get(get) => {
                return match self.fetch(shared, &get, peer, &outs.fetches)? {
                    Some(outcome) => Ok(outcome),
                    None => self.push_get(&get, slot, task.seq),
                }
            }
            Work::Put(put) => put,
        };
        if put.rkey & GPU_BIT != 0 {
            self.behind = BEHIND_GPU_BIT;
        }
        if put.lkey & GPU_BIT == 0 || task.done == put.len {
            return self.push_put(&put, slot, task.done, true);
        }
        if task.done == 0 && task.bounce.is_none() {
            if let Some(outcome) = self.push_pull(shared, &put, slot, peer, pulls) {
                return Ok(outcome);
            }
        }
        let bounce = task.bounce.get_or_insert_with(|| {
            let from = Side::Caller { addr: put.local + task.done, gpu: true };
            Bounce::start(&shared.engine, outs.fetches.health.clone(), from, task.done, put.len - task.done)
        });
        if !bounce.is_full(&shared.engine)? {
            return Ok(Outcome::Fetching);
        }
        let end = bounce.end();
        let piece = Put { local: bounce.origin(), len: end, signal: None, ..put };
        let outcome = self.push_put(&piece, slot, task.done, true)?;
        if matches!(outcome, Outcome::Moved(n) if task.done + n == end) {
            task.bounce = None;
        }
        Ok(outcome)
    }

    /// One message of a get's data that lies in this rank's GPU memory.
    pub(super) fn push_from_gpu(
        &mut self,
        shared: &Shared,
        (key, from): (u32, u64),
        request: &GetRequest,
        done: &mut u64,
        bounce: &mut Option<Bounce>,
    ) -> Result<Outcome> {
        let piece = bounce.get_or_insert_with(|| {
            let from = Side::Window { key, addr: from + *done };
            // Of its own: what fails here the peer is to learn, and the way to tell it stays open.
            Bounce::start(&shared.engine, Arc::default(), from, *done, request.len - *done)
        });
        if !piece.is_full(&shared.engine)? {
            return Ok(Outcome::Fetching);
        }
        let n = (piece.end() - *done).min(self.chunk());
        let header = data_of(request, *done, n);
        // SAFETY: the bounce holds these bytes.
        if !unsafe { self.inbox.producer().push(header, (piece.origin() + *done) as *const u8) } {
            return Ok(Outcome::Full);
        }
        *done += n;
        if *done == piece.end() {
            *bounce = None;
        }
        Ok(Outcome::Moved(n))
    }

    /// Bytes of one message of a transfer that goes through the ring as a whole.
    pub(super) fn chunk(&mut self) -> u64 {
        RING_CHUNK.min(self.inbox.producer().max_payload() as u64)
    }

    #[inline]
    pub(super) fn push_data(&mut self, put: &Put, slot: u32, done: u64, n: u64) -> bool {
        let header = Header { kind: Kind::Put, len: n as u32, key: put.rkey, aux: slot, addr: put.remote + done };
        // SAFETY: the source is readable until the operation completes (Context::put).
        unsafe { self.inbox.producer().push(header, (put.local + done) as *const u8) }
    }

    #[inline]
    pub(super) fn push_signal(&mut self, signal: &Signal, slot: u32) -> bool {
        let header =
            Header { kind: Kind::Signal, len: 8, key: signal.rkey | self.behind, aux: slot, addr: signal.remote };
        // SAFETY: the payload is the value's own 8 bytes.
        unsafe { self.inbox.producer().push(header, (&signal.value as *const u64).cast()) }
    }

    #[inline]
    pub(super) fn push_small(&mut self, put: &Put, slot: u32) -> Pushed {
        if put.len > 0 && !self.push_data(put, slot, 0, put.len) {
            return Pushed::Nothing;
        }
        if let Some(signal) = &put.signal {
            if !self.push_signal(signal, slot) {
                self.inbox.publish();
                return if put.len > 0 { Pushed::DataOnly } else { Pushed::Nothing };
            }
        }
        Pushed::All { wake: self.inbox.publish() }
    }

    /// One step of a put through the ring: the rest of its data, or its signal.
    pub(super) fn push_put(&mut self, put: &Put, slot: u32, done: u64, chunked: bool) -> Result<Outcome> {
        let left = put.len - done;
        if left > 0 {
            let n = left.min(if chunked { self.chunk() } else { RING_MAX });
            return Ok(if self.push_data(put, slot, done, n) { Outcome::Moved(n) } else { Outcome::Full });
        }
        Ok(match &put.signal {
            Some(signal) if !self.push_signal(signal, slot) => Outcome::Full,
            _ => Outcome::Finished,
        })
    }

    pub(super) fn push_get(&mut self, get: &Get, slot: u32, seq: Seq) -> Result<Outcome> {
        if get.len == 0 {
            return Ok(Outcome::Finished);
        }
        let request = GetRequest { len: get.len, context: slot, seq: seq.0 }.encode();
        let header = Header { kind: Kind::Get, len: request.len() as u32, key: get.rkey, aux: 0, addr: get.remote };
        // SAFETY: the payload is the request's own bytes.
        Ok(if unsafe { self.inbox.producer().push(header, request.as_ptr()) } {
            Outcome::Waiting
        } else {
            Outcome::Full
        })
    }
}

impl Shared {
    /// One step of an operation to oneself.
    pub(super) fn do_own(&self, work: &Work, done: u64, n: u64) -> Result<Outcome> {
        let held = self.registry.hold();
        let missing = || Error::remote(gone(self.world.rank));
        match work {
            Work::Put(put) if n > 0 => {
                let to = held.resolve(put.rkey, put.remote + done, n).ok_or_else(missing)?;
                // SAFETY: the source is readable (Context::put), the destination inside a held window; they may overlap.
                unsafe { std::ptr::copy((put.local + done) as *const u8, to, n as usize) };
                Ok(Outcome::Moved(n))
            }
            Work::Put(put) => {
                if let Some(s) = &put.signal {
                    let at = held.resolve(s.rkey, s.remote, 8).ok_or_else(missing)?;
                    receive::add(at, s.value);
                }
                Ok(Outcome::Finished)
            }
            Work::Get(get) if n > 0 => {
                let from = held.resolve(get.rkey, get.remote + done, n).ok_or_else(missing)?;
                // SAFETY: the source is inside a held window, the destination writable (Context::get).
                unsafe { std::ptr::copy(from, (get.local + done) as *mut u8, n as usize) };
                Ok(Outcome::Moved(n))
            }
            Work::Get(_) => Ok(Outcome::Finished),
        }
    }
}
