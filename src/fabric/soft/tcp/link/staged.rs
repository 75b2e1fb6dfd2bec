//! Operations whose bytes come from this rank's GPU, or go there: through pinned buffers, several on their way at once.

use super::*;
use crate::error::Result;
use crate::fabric::soft::gpu::PinnedPools;
use crate::rma::op::Op;
use crate::rma::seq::Seq;

/// Chunks of GPU memory that a stripe has on its way: one that the socket takes, the others coming from the GPU.
const AHEAD: usize = 4;
/// Small puts of a lane whose bytes are fetched before their turn.
const PREFETCH: usize = 32;
/// From here on a small put is sent from the buffer that it was fetched to, rather than copied to the stage: a vector
/// more for the system call costs less than the copy.
const SENT_FROM_BUFFER: u64 = 1 << 10;

/// Bytes in buffers that a peer's connection may have at a time: an eighth of what all peers share.
const LENT: usize = 256 << 10;

/// A chunk for a stripe.
pub struct Chunk {
    pub(super) place: WindowBytes,
    context: u32,
    addr: u64,
    pub(super) owner: FrameOwner,
    buffer: Option<PinnedBuffer>,
}

/// Whether the source is GPU memory.
#[inline]
pub fn is_from_gpu(put: &Put) -> bool {
    Key(put.lkey).is_on_gpu() && put.len > 0
}

/// Starts to fetch the bytes of a lane's next small puts, as far as there are buffers. Not behind an operation that
/// will need a buffer itself: it might wait for one that is given back behind it only. Nor for a peer that takes
/// nothing on `express`, or is not connected yet: others need buffers.
#[inline]
pub fn prefetch(lane: &mut TaskQueue, gpu: &Gpu, express: &Conn) -> Result<()> {
    while !express.blocked && lane.looked < lane.tasks.len().min(PREFETCH) {
        match &lane.tasks[lane.looked].work {
            Op::Put(p) if is_from_gpu(p) && p.len as usize <= SMALL => {
                let Some(buffer) = gpu.fetch(p.lkey, p.local, p.len)? else { break };
                lane.fetched.push_back(buffer);
            }
            Op::Put(p) if !is_from_gpu(p) => {}
            Op::Value(_) => {}
            _ => break,
        }
        lane.looked += 1;
    }
    Ok(())
}

impl AskedGet {
    /// Whether its bytes are for GPU memory and have no buffer yet.
    pub(super) fn lacks_buffer(&self) -> bool {
        Key(self.lkey).is_on_gpu() && self.buffer.is_none()
    }

    /// Where the next byte goes.
    pub(super) fn place(&self) -> *mut u8 {
        let start = self.buffer.as_ref().map_or(self.to as *mut u8, PinnedBuffer::host);
        start.wrapping_add(self.got)
    }
}

impl Conn {
    /// Queues a chunk behind those that are on their way.
    #[inline]
    pub(super) fn push_chunk(
        &mut self,
        lane: &TaskQueue,
        place: WindowBytes,
        addr: u64,
        owner: FrameOwner,
        buffer: Option<PinnedBuffer>,
    ) {
        let chunk = Chunk { place, context: lane.lane.context, addr, owner, buffer };
        if chunk.buffer.is_none() && self.line.is_empty() && !self.lent {
            return self.send_chunk(chunk);
        }
        self.line_bytes += place.len as usize;
        self.line.push_back(chunk);
    }

    #[inline]
    fn send_chunk(&mut self, c: Chunk) {
        self.send_buffer.copy(&Frame::Put { context: c.context, place: c.place, bell: None }.emit());
        self.send_buffer.borrow(c.addr, c.place.len as usize, c.owner, c.buffer);
    }

    /// Hands chunks whose bytes have come to the socket's queue, and completes gets whose bytes are in place.
    fn advance_staged(&mut self, lanes: &mut [Option<Box<TaskQueue>>]) -> Result<bool> {
        let mut moved = false;
        while let Some(chunk) = self.line.front().filter(|_| !self.lent) {
            if !chunk.buffer.as_ref().map_or(Ok(true), PinnedBuffer::has_landed)? {
                break;
            }
            let Some(chunk) = self.line.pop_front() else { break };
            self.line_bytes -= chunk.place.len as usize;
            self.send_chunk(chunk);
            moved = true;
        }
        while self.storing.front().map_or(Ok(false), |(buffer, _)| buffer.has_landed())? {
            let Some((_, owner)) = self.storing.pop_front() else { break };
            finished(lanes, owner);
            moved = true;
        }
        Ok(moved)
    }

    fn is_staging(&self) -> bool {
        !self.line.is_empty() || !self.storing.is_empty() || self.starved
    }

    /// Whether the answer that arrives has somewhere to go. If not, the connection is starved until it has, or more
    /// of the answer is to be received first.
    pub(super) fn has_place(&mut self, gpu: &Gpu) -> Result<bool> {
        self.starved = match self.asked.front_mut() {
            Some(a) if a.lacks_buffer() => {
                if PinnedPools::gathers(a.len, self.receive_buffer.staged().len()) {
                    self.starved = false;
                    return Ok(false);
                }
                a.buffer = gpu.opened()?.buffer(a.len as u64)?;
                a.buffer.is_none()
            }
            _ => false,
        };
        Ok(!self.starved)
    }

    /// Starts to bring a complete answer to GPU memory. `false`: it is in place.
    pub(super) fn store(&mut self, asked: AskedGet, gpu: &Gpu) -> bool {
        let Some(mut buffer) = asked.buffer else { return false };
        // A window that is gone gets nothing, and nobody waits for it.
        if let Some(pools) = gpu.pools() {
            pools.store(&mut buffer, asked.lkey, asked.to, asked.len as u64);
        }
        self.storing.push_back((buffer, asked.owner));
        true
    }
}

impl Initiator {
    /// A turn of a lane whose first operation is a put from GPU memory. `Empty`: it was small and is done with.
    pub(super) fn turn_staged(&mut self, at: usize, seq: Seq, put: &Put) -> Turn {
        self.try_staged(at, seq, put).unwrap_or_else(|e| self.refuse(at, e))
    }

    fn try_staged(&mut self, at: usize, seq: Seq, put: &Put) -> Result<Turn> {
        let Some(lane) = self.lanes[at].as_deref_mut() else { return Ok(Turn::Blocked) };
        let stripes = self.conns.len();
        if put.len as usize <= SMALL {
            let conn = &mut self.conns[EXPRESS];
            prefetch(lane, &self.gpu, conn)?;
            let Some(buffer) = lane.fetched.front() else {
                self.hungry |= !conn.blocked;
                return Ok(Turn::Blocked);
            };
            let from = Put { local: buffer.host() as u64, ..*put };
            if !buffer.has_landed()? {
                return Ok(Turn::Blocked);
            }
            if put.len < SENT_FROM_BUFFER || conn.blocked || conn.send_buffer.borrowed() >= LENT {
                if !stage(lane, conn, &from, stripes) {
                    return Ok(Turn::Blocked);
                }
                lane.fetched.pop_front();
            } else {
                if !conn.send_buffer.has_room(HEADER + 4 * stripes) {
                    return Ok(Turn::Blocked);
                }
                let buffer = lane.fetched.pop_front();
                let place = WindowBytes { rkey: put.rkey, addr: put.remote, len: put.len as u32 };
                head(lane, conn, place, put.signal, stripes);
                // Nobody waits for these bytes any more: the source is free, and the buffer is the connection's.
                conn.send_buffer.borrow(from.local, put.len as usize, FrameOwner::NOBODY, buffer);
            }
            lane.pop();
            lane.done(seq, true);
            return Ok(Turn::Empty);
        }
        let Some(stripe) = self.spread.for_put(&self.conns, put.len, AHEAD * CHUNK) else { return Ok(Turn::Blocked) };
        let left = put.len - lane.cut;
        let len = left.min(CHUNK as u64) as usize;
        let Some(buffer) = self.gpu.fetch(put.lkey, put.local + lane.cut, len as u64)? else {
            self.hungry = true;
            return Ok(Turn::Blocked);
        };
        let id = lane.begin_or_go_on(seq, true);
        let place = WindowBytes { rkey: put.rkey, addr: put.remote.wrapping_add(lane.cut), len: len as u32 };
        let owner = FrameOwner { lane: at as u32, operation: id };
        let addr = buffer.host() as u64;
        self.conns[stripe].push_chunk(lane, place, addr, owner, Some(buffer));
        let last = left == len as u64;
        finish_chunk(lane, &mut self.conns, stripe, put, place, last);
        lane.advance(id, len, last);
        Ok(Turn::Moved)
    }

    /// Gives back the small buffers with bytes for a peer that takes none at the moment: others may wait for them.
    /// Bytes on their way are copied, others are fetched again. Returns whether there were any.
    pub fn give_buffers_back(&mut self) -> bool {
        let express = &mut self.conns[EXPRESS];
        if !express.blocked {
            return false;
        }
        let mut any = express.send_buffer.give_buffers_back();
        for lane in self.lanes.iter_mut().flatten() {
            any |= !lane.fetched.is_empty();
            lane.fetched.clear();
            lane.looked = 0;
        }
        any
    }

    /// Moves on what copies from or to the GPU have finished. Returns whether there was any.
    pub(super) fn advance_staged(&mut self) -> bool {
        let mut moved = false;
        for conn in &mut self.conns {
            if conn.is_staging() {
                match conn.advance_staged(&mut self.lanes) {
                    Ok(m) => moved |= m,
                    Err(e) => drop(self.fault.get_or_insert(e)),
                }
            }
        }
        moved
    }

    /// A connection that is not read for want of a buffer, from number `first` on.
    pub fn starved(&self, first: usize) -> Option<usize> {
        (first..self.conns.len()).find(|&i| self.conns[i].starved)
    }

    /// Whether anything waits for the GPU, or for room on the way from or to it.
    pub fn is_staging(&self) -> bool {
        self.gpu.pools().is_some()
            && (self.hungry
                || self.fault.is_some()
                || !self.failing.is_empty()
                || self.conns.iter().any(Conn::is_staging)
                || self.ring.iter().any(|&l| self.lanes[l as usize].as_ref().is_some_and(|l| !l.fetched.is_empty())))
    }
}
