//! Atomic operations: asked for on the express connection behind the lane's signals, answered by context and number on
//! whichever connection brought what they waited for.

use super::*;
use crate::error::Result;
use crate::fabric::soft::atomic::AtomicRequest;
use crate::rma::atomic::{Atomic, Fetched, Width};
use crate::rma::seq::Seq;

/// An operation that waits for its answer.
pub struct Fetching {
    context: u32,
    seq: u32,
    width: Width,
    to: Option<Fetched>,
    /// Where the value goes on its way to GPU memory.
    buffer: Option<PinnedBuffer>,
    pub(super) owner: FrameOwner,
}

impl Initiator {
    /// A turn of a lane whose first operation is atomic. `Empty`: it is asked for, or its lane has failed.
    pub(super) fn turn_atomic(&mut self, at: usize, seq: Seq, atomic: &Atomic) -> Turn {
        self.try_atomic(at, seq, atomic).unwrap_or_else(|e| self.refuse(at, e))
    }

    fn try_atomic(&mut self, at: usize, seq: Seq, atomic: &Atomic) -> Result<Turn> {
        let stripes = self.conns.len();
        let Some(lane) = self.lanes[at].as_deref_mut() else { return Ok(Turn::Blocked) };
        let send_buffer = &mut self.conns[EXPRESS].send_buffer;
        if !send_buffer.has_room(HEADER + 4 * stripes + AtomicRequest::LEN) {
            return Ok(Turn::Blocked);
        }
        let buffer = match atomic.fetched {
            Some(to) if Key(to.lkey).is_on_gpu() => {
                // Answers to gets arrive in front of this one's, and need buffers, too.
                let buffer = self.gpu.opened()?.buffer_for_long()?;
                if buffer.is_none() {
                    self.hungry = true;
                    return Ok(Turn::Blocked);
                }
                buffer
            }
            _ => None,
        };
        let (context, id) = (lane.lane.context, lane.begin_or_go_on(seq, false));
        let place = WindowBytes { rkey: atomic.rkey, addr: atomic.remote, len: atomic.width.bytes() as u32 };
        send_buffer.copy(&Frame::Atomic { context, place, counted: lane.bulk }.emit());
        if lane.bulk {
            copy_counts(lane, send_buffer, stripes);
        }
        send_buffer.copy(&AtomicRequest::of(atomic, seq.0).encode());
        let owner = FrameOwner { lane: at as u32, operation: id };
        let (width, to) = (atomic.width, atomic.fetched);
        self.fetching.push_back(Fetching { context, seq: seq.0, width, to, buffer, owner });
        lane.advance(id, place.len as usize, true);
        Ok(Turn::Empty)
    }

    /// Completes operations whose answers have come on a connection. Answers of contexts that are gone are nobody's.
    pub(super) fn take_fetched(&mut self, stripe: usize) {
        for (context, seq, value) in std::mem::take(&mut self.conns[stripe].fetched) {
            let waits = |f: &Fetching| f.context == context && f.seq == seq;
            let Some(fetching) = self.fetching.iter().position(waits).and_then(|at| self.fetching.remove(at)) else {
                continue;
            };
            self.land_fetched(fetching, value);
        }
    }

    fn land_fetched(&mut self, fetching: Fetching, value: u64) {
        let Fetching { width, to, buffer, owner, .. } = fetching;
        let (bytes, held) = (width.bytes(), self.registry.hold());
        let at = match (to, &buffer) {
            (None, _) => None,
            (Some(_), Some(buffer)) => Some(buffer.host()),
            // Nor does a window that is gone get it.
            (Some(to), None) => held.resolve(to.lkey, to.local, bytes),
        };
        if let Some(at) = at {
            // SAFETY: a buffer of this operation's own, or the caller's memory, which is writable until the operation
            // is complete; x86 has the low bytes first.
            unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast(), at, bytes as usize) };
        }
        match (to, buffer) {
            (Some(to), Some(mut buffer)) => {
                // A window that is gone gets nothing, and nobody waits for it.
                if let Some(pools) = self.gpu.pools() {
                    pools.store(&mut buffer, to.lkey, to.local, bytes);
                }
                self.conns[EXPRESS].storing.push_back((buffer, owner));
            }
            _ => finished(&mut self.lanes, owner),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::answers::tests::{link, post};
    use super::*;
    use crate::fabric::soft::lane::{Health, Lane};
    use crate::rma::atomic::Change;
    use crate::rma::op::Op;
    use std::io::{Read, Write};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Answers come on any connection and in any order; those of a context that is gone go nowhere, and those that
    /// nobody asked for change nothing.
    #[test]
    fn an_answer_is_its_operations() {
        let (mut link, mut peer) = link();
        let [gone, stays] = [0, 1].map(|context| Arc::new(Lane::new(context, 1, Arc::new(Health::default()))));
        let here = [0; 4].map(AtomicU64::new);
        let add = |i: usize, width| {
            let fetched = Some(Fetched { local: here[i].as_ptr() as u64, lkey: 0 });
            Op::Atomic(Atomic { change: Change::add(7), width, remote: 64, rkey: 3, fetched, more: false })
        };
        post(&mut link, &gone, add(0, Width::Eight));
        let [a, b] = [(1, Width::Eight), (2, Width::Four)].map(|(i, width)| post(&mut link, &stays, add(i, width)));
        let mut asked = [0; 3 * (HEADER + AtomicRequest::LEN)];
        peer[EXPRESS].read_exact(&mut asked).unwrap();
        for (i, bytes) in asked.chunks(HEADER + AtomicRequest::LEN).enumerate() {
            let (context, len) = (u32::from(i > 0), if i == 2 { 4 } else { 8 });
            let place = WindowBytes { rkey: 3, addr: 64, len };
            let frame = Frame::Atomic { context, place, counted: false };
            assert_eq!(Frame::parse(bytes.first_chunk().unwrap()), Ok(frame));
            let request = AtomicRequest::parse(&bytes[HEADER..]).unwrap();
            assert_eq!((request.change, request.seq, request.fetches), (Change::add(7), 1 + u32::from(i == 2), true));
        }
        link.drop_lane(&gone);
        let answer = |context, seq, value| Frame::Fetched { context, seq, value }.emit();
        peer[STRIPES].write_all(&[answer(1, 2, u64::MAX), answer(0, 1, 5), answer(9, 9, 5)].concat()).unwrap();
        link.receive(STRIPES).unwrap();
        assert!(!stays.test(a).unwrap() && !stays.test(b).unwrap(), "operations complete in their order");
        peer[EXPRESS].write_all(&answer(1, 1, 6)).unwrap();
        link.receive(EXPRESS).unwrap();
        assert!(stays.test(b).unwrap() && !link.is_busy());
        assert_eq!(here.map(|w| w.load(Ordering::Relaxed)), [0, 6, u32::MAX.into(), 0]);
    }
}
