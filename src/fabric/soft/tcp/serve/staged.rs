//! What a peer puts into this rank's GPU memory, and gets from it: through pinned buffers, several on their way
//! at once.
//!
//! Puts on the express connection are small: the engine takes them, in the order of its stream, and so it does with
//! signals. Chunks on a stripe go to a buffer and from there to their place; they count as arrived when they are there,
//! in the order of their arrival.

use super::*;
use crate::error::Kind;
use crate::fabric::soft::gpu::{ArrivedBytes, PinnedBytes, PinnedPools};

/// Answers of a connection whose bytes are fetched before their turn.
const AHEAD: usize = 4;
/// The shortest message on the express connection that is received into pinned memory, where the GPU reads it.
const WORTH_A_BUFFER: usize = 1 << 10;

/// How a put's bytes get to their place.
pub enum PutWay {
    /// Straight, or nowhere.
    Direct,
    /// All of them, to the engine.
    Engine(ArrivedBytes),
    /// Through a buffer, once there is one.
    Pinned(Option<PinnedBuffer>),
}

impl PutWay {
    /// The way of a put that begins, of whose bytes `here` have come.
    pub(super) fn of(place: &WindowBytes, lanes: &Lanes, here: usize) -> io::Result<Self> {
        if !Key(place.rkey).is_on_gpu() || place.len == 0 {
            return Ok(PutWay::Direct);
        }
        if lanes.stripe == EXPRESS {
            return Ok(PutWay::Engine(lanes.payload(place.len as usize, here)));
        }
        if u64::from(place.len) > PinnedPools::LARGE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a chunk for GPU memory that is too long"));
        }
        Ok(PutWay::Pinned(None))
    }

    /// Where byte number `at` of the payload goes, unless it goes straight to its place.
    pub fn place(&mut self, at: usize) -> Option<*mut u8> {
        match self {
            PutWay::Engine(bytes) => Some(bytes.as_mut_ptr().wrapping_add(at)),
            PutWay::Pinned(buffer) => buffer.as_ref().map(|l| l.host().wrapping_add(at)),
            PutWay::Direct => None,
        }
    }

    /// Whether it is by a buffer.
    pub fn is_pinned(&self) -> bool {
        matches!(self, PutWay::Pinned(_))
    }
}

/// A put that has arrived here but perhaps not at its place.
pub struct Storing {
    /// The buffer that it is in.
    pub buffer: Option<PinnedBuffer>,
    pub context: u32,
    pub place: WindowBytes,
    pub bell: Option<(Bell, Counts)>,
    pub refused: bool,
}

/// What came on a connection and waits for puts before it to be in place, if not for its own.
pub enum Came {
    Put(Storing),
    /// No more of a context comes here; its connections, a bit each.
    End {
        context: u32,
        conns: u32,
    },
}

/// Whether a get may have these bytes of GPU memory.
pub fn may_fetch(place: &WindowBytes, gpu: &Gpu) -> bool {
    u64::from(place.len) <= PinnedPools::LARGE && gpu.holds(place.rkey, place.addr, place.len as u64)
}

impl Answer {
    /// Whether its bytes can be sent.
    pub fn is_here(&self) -> bool {
        if self.awaited.is_some() {
            return false;
        }
        self.bare
            || self.place.len == 0
            || !Key(self.place.rkey).is_on_gpu()
            || self.buffer.as_ref().is_some_and(|l| matches!(l.has_landed(), Ok(true)))
    }
}

impl Inbound {
    /// Whether anything waits for the GPU, or for buffers.
    pub fn is_staging(&self) -> bool {
        !self.storing.is_empty() || self.starved || self.fetching
    }

    /// Whether the put that arrives has somewhere to go. If not, the connection is starved until it has, or more of
    /// the put is to be received first.
    pub(super) fn has_place(&mut self, lanes: &mut Lanes) -> bool {
        let Some(landing) = &mut self.landing else { return true };
        if landing.refused {
            return true;
        }
        self.starved = match &mut landing.way {
            PutWay::Direct => false,
            PutWay::Engine(_) => landing.got == 0 && lanes.gpu.is_full(),
            PutWay::Pinned(buffer) => {
                if buffer.is_none()
                    && PinnedPools::gathers(landing.place.len as usize, self.receive_buffer.staged().len())
                {
                    self.starved = false;
                    return false;
                }
                if buffer.is_none() {
                    *buffer = lanes.buffer(&landing.place);
                }
                buffer.is_none()
            }
        };
        !self.starved
    }

    /// Starts to bring a complete chunk to its place. `None`: the window is gone.
    pub(super) fn store(&mut self, lanes: &Lanes, way: PutWay, place: &WindowBytes) -> Option<Option<PinnedBuffer>> {
        let PutWay::Pinned(Some(mut buffer)) = way else { return Some(None) };
        let pools = lanes.gpu.pools()?;
        pools.store(&mut buffer, place.rkey, place.addr, place.len as u64).then_some(Some(buffer))
    }

    /// Counts chunks that are in place by now.
    pub(super) fn advance_staged(&mut self, lanes: &mut Lanes, registry: &Registry) -> bool {
        let mut moved = false;
        while let Some(first) = self.storing.front() {
            let buffer = match first {
                Came::Put(put) => put.buffer.as_ref(),
                Came::End { .. } => None,
            };
            match buffer.map_or(Ok(true), PinnedBuffer::has_landed) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => {
                    lanes.fault.lock().get_or_insert(e);
                    break;
                }
            }
            self.stored += 1;
            match self.storing.pop_front() {
                Some(Came::Put(put)) => self.arrived(lanes, &registry.hold(), put),
                Some(Came::End { context, conns }) => lanes.ended(context, conns),
                None => break,
            }
            moved = true;
        }
        moved
    }

    /// Starts to bring the bytes of the first answers from the GPU.
    pub(super) fn fetch_answers(&mut self, lanes: &mut Lanes) {
        self.take_fetched();
        if lanes.gpu.pools().is_none() {
            return;
        }
        for a in self.answers.iter_mut().take(AHEAD) {
            if a.bare || a.place.len == 0 || !Key(a.place.rkey).is_on_gpu() {
                continue;
            }
            let fetched = match &a.buffer {
                Some(buffer) => buffer.has_landed().map(drop),
                None => lanes.gpu.fetch(a.place.rkey, a.place.addr, a.place.len as u64).map(|buffer| a.buffer = buffer),
            };
            match fetched {
                // The window has gone since; the engine says so in the words of an operation that names it.
                Err(e) if matches!(e.kind(), Kind::LocalProtection | Kind::RemoteAccess) && a.sent == 0 => {
                    a.refuse(lanes);
                    continue;
                }
                Err(e) => drop(lanes.fault.lock().get_or_insert(e)),
                Ok(()) => {}
            }
            if a.buffer.is_none() {
                break;
            }
        }
    }
}

impl Lanes<'_> {
    /// Room for a message of `len` bytes, of which `here` have come. A peer that stops in the middle of one holds no
    /// pinned buffer, which others need; shorter ones are not worth one.
    fn payload(&self, len: usize, here: usize) -> ArrivedBytes {
        let pools =
            self.gpu.pools().filter(|_| here >= len && len >= WORTH_A_BUFFER && len as u64 <= PinnedPools::SMALL);
        match pools.and_then(|pools| pools.buffer(len as u64).ok().flatten()) {
            Some(buffer) => ArrivedBytes::Pinned(Box::new(PinnedBytes { buffer, len })),
            None => ArrivedBytes::Boxed(vec![0; len].into()),
        }
    }

    fn buffer(&mut self, place: &WindowBytes) -> Option<PinnedBuffer> {
        let buffer = self.gpu.opened().and_then(|s| s.buffer(place.len as u64));
        buffer.unwrap_or_else(|e| {
            self.fault.lock().get_or_insert(e);
            None
        })
    }
}
