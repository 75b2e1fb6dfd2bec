//! The way into the inbox of a peer on this host: puts, signals, gets and answers as messages in its ring.

use super::inbox::PeerInbox;
use super::message::{code_of, GetRequest, Header, MessageKind, PullRequest};
use crate::error::Error;
use crate::fabric::soft::atomic::AtomicRequest;
use crate::fabric::soft::status::WINDOW_BITS;
use crate::memory::key::Key;
use crate::rma::atomic::Atomic;
use crate::rma::op::{Get, Put, Signal};
use crate::rma::seq::Seq;

/// Puts up to here go through the ring although cross-memory attach works: below it the system call costs more than
/// the second copy (measured; docs/benchmarks.md).
pub const RING_MAX: u64 = 4096;
/// Bytes of one message where everything goes through the ring.
const RING_CHUNK: u64 = 16 << 10;
/// Bytes of a refusal's sentence.
const SENTENCE: usize = 512;

/// Where messages to one peer are pushed. What was pushed the peer sees once the inbox is published.
pub struct Port {
    /// The peer's inbox.
    pub inbox: PeerInbox,
    /// Its process, if cross-memory attach reaches it.
    pub pid: Option<libc::pid_t>,
    /// Something went into its GPU memory this way, and signals come behind it.
    pub is_behind: bool,
}

/// What became of a step.
pub enum PortStep {
    /// So many bytes were moved.
    Moved(u64),
    /// The operation is locally complete.
    Finished,
    /// No room in the ring.
    Full,
    /// The peer's answer is awaited.
    Waiting,
}

/// How far a small operation got at once.
pub enum Pushed {
    /// It is complete.
    All,
    /// No room for any of it.
    Nothing,
    /// Its signal has still to go.
    DataOnly,
}

/// The header of `n` bytes that a get asked for.
pub fn data_of(request: &GetRequest, done: u64, n: u64) -> Header {
    Header { kind: MessageKind::GetData, len: n as u32, key: request.context, aux: request.seq, addr: done }
}

impl Port {
    /// The process for cross-memory attach to a window: none if it cannot be told whether that still exists.
    pub fn pid_for(&self, window: u32) -> Option<libc::pid_t> {
        self.pid.filter(|_| (window as usize) < WINDOW_BITS)
    }

    /// Bytes of one message of a transfer that goes through the ring as a whole.
    pub fn chunk(&mut self) -> u64 {
        RING_CHUNK.min(self.inbox.producer().max_payload() as u64)
    }

    /// Pushes `n` bytes of a put, from `done` on in it. `false`: no room.
    #[inline]
    fn push_data(&mut self, put: &Put, context: u32, done: u64, n: u64) -> bool {
        let header =
            Header { kind: MessageKind::Put, len: n as u32, key: put.rkey, aux: context, addr: put.remote + done };
        // SAFETY: the source is readable until the operation completes (Context::post).
        unsafe { self.inbox.producer().push(header, (put.local + done) as *const u8) }
    }

    /// Pushes a signal of a context. `false`: no room.
    #[inline]
    fn push_signal(&mut self, signal: &Signal, context: u32) -> bool {
        let header = Header {
            kind: MessageKind::Signal,
            len: 8,
            key: Key(signal.rkey).behind(self.is_behind).0,
            aux: context,
            addr: signal.remote,
        };
        // SAFETY: the payload is the value's own 8 bytes.
        unsafe { self.inbox.producer().push(header, (&signal.value as *const u64).cast()) }
    }

    /// Pushes all of a put that fits into one message.
    #[inline]
    pub fn push_small(&mut self, put: &Put, context: u32) -> Pushed {
        if put.len > 0 && !self.push_data(put, context, 0, put.len) {
            return Pushed::Nothing;
        }
        if let Some(signal) = &put.signal {
            if !self.push_signal(signal, context) {
                return if put.len > 0 { Pushed::DataOnly } else { Pushed::Nothing };
            }
        }
        Pushed::All
    }

    /// One step of a put through the ring: the rest of its data, or its signal.
    pub fn push_put(&mut self, put: &Put, context: u32, done: u64, chunked: bool) -> PortStep {
        let left = put.len - done;
        if left > 0 {
            let n = left.min(if chunked { self.chunk() } else { RING_MAX });
            return if self.push_data(put, context, done, n) { PortStep::Moved(n) } else { PortStep::Full };
        }
        match &put.signal {
            Some(signal) if !self.push_signal(signal, context) => PortStep::Full,
            _ => PortStep::Finished,
        }
    }

    /// Asks for a get's bytes.
    pub fn push_get(&mut self, get: &Get, context: u32, seq: Seq) -> PortStep {
        if get.len == 0 {
            return PortStep::Finished;
        }
        let request = GetRequest { len: get.len, context, seq: seq.0 }.encode();
        let header =
            Header { kind: MessageKind::Get, len: request.len() as u32, key: get.rkey, aux: 0, addr: get.remote };
        // SAFETY: the payload is the request's own bytes.
        if unsafe { self.inbox.producer().push(header, request.as_ptr()) } {
            PortStep::Waiting
        } else {
            PortStep::Full
        }
    }

    /// Asks for an atomic operation, behind what was put into the peer's GPU memory this way.
    pub fn push_atomic(&mut self, atomic: &Atomic, context: u32, seq: Seq) -> PortStep {
        let request = AtomicRequest::of(atomic, seq.0).encode();
        let (key, len) = (Key(atomic.rkey).behind(self.is_behind).0, request.len() as u32);
        let header = Header { kind: MessageKind::Atomic, len, key, aux: context, addr: atomic.remote };
        // SAFETY: the payload is the request's own bytes.
        let pushed = unsafe { self.inbox.producer().push(header, request.as_ptr()) };
        if pushed {
            PortStep::Waiting
        } else {
            PortStep::Full
        }
    }

    /// The answer to one. `false`: there is no room for all of it yet.
    pub fn push_fetched(&mut self, request: &mut GetRequest, value: u64) -> bool {
        let (key, aux) = (request.context, request.seq);
        if request.len > 0 {
            let data = Header { kind: MessageKind::GetData, len: request.len as u32, key, aux, addr: 0 };
            // SAFETY: the payload are bytes of the value, which has 8.
            if !unsafe { self.inbox.producer().push(data, (&raw const value).cast()) } {
                return false;
            }
            request.len = 0;
        }
        self.push_get_done(request)
    }

    /// Pushes bytes that a get asked for. `false`: no room.
    ///
    /// # Safety
    /// As many bytes as `header` says are readable at `from`.
    pub unsafe fn push_answer(&mut self, header: Header, from: *const u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.inbox.producer().push(header, from) }
    }

    /// All of a get's data is pushed. `false`: no room.
    pub fn push_get_done(&mut self, request: &GetRequest) -> bool {
        let header = Header { kind: MessageKind::GetDone, len: 0, key: request.context, aux: request.seq, addr: 0 };
        // SAFETY: no payload.
        unsafe { self.inbox.producer().push(header, std::ptr::null()) }
    }

    /// An operation of the peer's context is refused. `false`: no room.
    #[cold]
    pub fn push_refused(&mut self, context: u32, why: &Error) -> bool {
        let text = why.message().as_bytes();
        let bytes = &text[..text.len().min(SENTENCE)];
        let (key, aux) = (context, code_of(why.kind()));
        let header = Header { kind: MessageKind::Refused, len: bytes.len() as u32, key, aux, addr: 0 };
        // SAFETY: the payload is the string's own bytes.
        unsafe { self.inbox.producer().push(header, bytes.as_ptr()) }
    }

    /// Asks the peer to fetch a put's bytes from memory that it has mapped. `false`: no room.
    pub fn push_pull(&mut self, put: &Put, context: u32, request: &PullRequest) -> bool {
        let request = request.encode();
        let header = Header {
            kind: MessageKind::Pull,
            len: request.len() as u32,
            key: put.rkey,
            aux: context,
            addr: put.remote,
        };
        // SAFETY: the payload is the request's own bytes.
        unsafe { self.inbox.producer().push(header, request.as_ptr()) }
    }

    /// Asks the peer to say when all that was pushed of a context before is in place. `false`: no room.
    pub fn push_fence(&mut self, context: u32, number: Seq) -> bool {
        let header = Header { kind: MessageKind::Fence, len: 0, key: 0, aux: context, addr: number.0.into() };
        // SAFETY: no payload.
        unsafe { self.inbox.producer().push(header, std::ptr::null()) }
    }

    /// Everything up to pull `number` of the peer's context is fetched. `false`: no room.
    pub fn push_pulled(&mut self, context: u32, number: Seq) -> bool {
        let header = Header { kind: MessageKind::Pulled, len: 0, key: context, aux: number.0, addr: 0 };
        // SAFETY: no payload.
        unsafe { self.inbox.producer().push(header, std::ptr::null()) }
    }
}
