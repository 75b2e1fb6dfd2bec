//! The target's side: what one peer's connections bring is applied to memory, and its gets are answered.

mod answer;
mod arrived;
mod atomics;
mod closing;
mod due;
mod ending;
mod fences;
mod gathered;
mod landing;
mod limit;
mod refusing;
mod staged;

pub use self::arrived::Arrived;

use self::answer::{Answer, Awaits};
use self::due::Due;
use super::gpu::{Awaited, Gpu};
use super::order::{Order, WaitingSignals, EXPRESS};
use super::receive_buffer::{Got, ReceiveBuffer};
use super::sock::{self, Moved};
use super::wire::{parse_counts, Bell, Counts, Frame, Refusal, WindowBytes, HEADER, MAX_STRIPES};
use crate::error::Error;
use crate::fabric::soft::gpu::{PinnedBuffer, Source};
use crate::memory::key::Key;
use crate::memory::registry::{Held, Registry};
use crate::sys::fork::Private;
use crate::sys::sync::Mutex;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};

/// Bytes received on one connection before others get their turn.
const TURN: usize = 512 * 1024;

/// Unanswered gets above which a connection is not read: its peer keeps asking without taking answers.
const BACKLOG: usize = 4096;

/// Contexts that one peer may have with chunks or signals behind such.
const CONTEXTS: usize = 1 << 16;

/// A put on its way in.
struct Landing {
    context: u32,
    place: WindowBytes,
    bell: Option<(Bell, Counts)>,
    got: usize,
    /// The bytes are thrown away.
    refused: bool,
    /// Where they go on their way to GPU memory.
    way: staged::PutWay,
}

/// One accepted connection.
pub struct Inbound {
    fd: Private<OwnedFd>,
    receive_buffer: ReceiveBuffer,
    landing: Option<Landing>,
    answers: VecDeque<Answer>,
    fin: bool,
    used: bool,
    /// Bytes that were ever received.
    received: u64,
    /// What ever left `storing`.
    stored: u64,
    /// Puts on their way to GPU memory, and those that must not overtake them.
    storing: VecDeque<staged::Came>,
    /// The put that arrives is for GPU memory and finds no buffer, or its signal would be one too many of those that
    /// wait, here or in the engine: the connection is not read.
    starved: bool,
    /// The first answer's bytes are on their way from the GPU, or find no buffer.
    fetching: bool,
    /// Whether somebody counts it among those that wait for the GPU.
    pub noted: bool,
    /// What epoll watches for.
    pub interest: Option<u32>,
    /// Epoll told of its end: nothing new will come.
    pub over: bool,
}

/// How a connection is after a turn.
#[derive(Debug)]
pub enum Outcome {
    /// It goes on; `true`: something moved.
    Open(bool),
    /// The peer has sent its FIN; something of it is still on its way to its place.
    Parting,
    /// The peer closed in good order.
    Closed,
}

/// The place of one connection.
#[derive(Default)]
pub struct ConnectionSlot {
    conn: Mutex<Option<Inbound>>,
    /// Whoever holds the connection has to look at it again.
    pub again: AtomicBool,
}

/// All connections that one peer opened to this rank. Each is served by one thread at a time, all of them by several.
#[derive(Default)]
pub struct Serving {
    slots: [ConnectionSlot; MAX_STRIPES],
    /// Connections that there are or will be; 0: not known yet.
    stripes: AtomicUsize,
    /// Held while signals are applied, so that those of a lane keep their order.
    orders: Mutex<HashMap<u32, Order<Due>>>,
    /// Signals in `orders` that wait.
    held: WaitingSignals,
    /// The express connection is not read because of them. Changed with `orders` locked.
    choked: AtomicBool,
    /// It may be read again, and nobody has been told.
    relieved: AtomicBool,
    /// Contexts of which something was refused.
    refusals: refusing::Refusals,
    sender: u32,
    gpu: Arc<Gpu>,
    fault: Mutex<Option<Error>>,
}

impl Serving {
    /// No connections of rank `sender` yet.
    pub fn new(sender: u32, gpu: Arc<Gpu>) -> Self {
        Self { sender, gpu, ..Self::default() }
    }

    /// Takes a greeted connection as stripe `stripe` of `stripes`. Refuses one that would displace a connection in use
    /// or contradicts the others.
    pub fn admit(&self, fd: Private<OwnedFd>, stripe: usize, stripes: usize, interest: u32) -> bool {
        let known = self.stripes.compare_exchange(0, stripes, Ordering::AcqRel, Ordering::Acquire);
        let mut slot = self.slots[stripe].conn.lock();
        if known.is_err_and(|n| n != stripes) || slot.as_ref().is_some_and(|c| c.used) {
            return false;
        }
        *slot = Some(Inbound {
            fd,
            receive_buffer: ReceiveBuffer::default(),
            landing: None,
            answers: VecDeque::new(),
            fin: false,
            used: false,
            received: 0,
            stored: 0,
            storing: VecDeque::new(),
            starved: false,
            fetching: false,
            noted: slot.take().is_some_and(|c| c.noted),
            interest: Some(interest),
            over: false,
        });
        true
    }

    /// Connections that there are or will be.
    pub fn stripes(&self) -> usize {
        self.stripes.load(Ordering::Acquire)
    }

    /// The place of a stripe.
    pub fn slot(&self, stripe: usize) -> &ConnectionSlot {
        &self.slots[stripe]
    }

    /// Whether somebody has to look at a connection again that was not read.
    pub fn was_relieved(&self) -> bool {
        self.relieved.load(Ordering::Relaxed) && self.relieved.swap(false, Ordering::AcqRel)
    }

    /// Why transfers to or from this rank's GPU cannot go on, once nothing is copied any more. Until then connections
    /// wait for the GPU, and are looked at again for that.
    pub fn take_fault(&self, gpu: &Gpu) -> Option<Error> {
        self.fault.lock().take_if(|why| gpu.may_tell(why))
    }

    /// Receives, applies and answers on one connection for a while; without `io`, only what needs no system call.
    pub fn advance(
        &self,
        conn: &mut Inbound,
        stripe: usize,
        registry: &Registry,
        must_read: bool,
        io: bool,
    ) -> io::Result<Outcome> {
        let Self { sender, gpu, fault, .. } = self;
        let mut lanes = Lanes {
            serving: self,
            stripe,
            stripes: self.stripes(),
            sender: *sender,
            gpu,
            fault,
            gathered: Default::default(),
        };
        let mut total = 0;
        let mut moved = conn.advance_staged(&mut lanes, registry);
        conn.refuse_late(&lanes);
        if std::mem::take(&mut conn.starved) {
            // What is staged comes first.
            conn.take_frames(&mut lanes, registry)?;
            moved |= !conn.starved;
        }
        if conn.fin {
            return Ok(conn.part());
        }
        if !io {
            conn.fetch_answers(&mut lanes);
            conn.fetching = conn.answers.front().is_some_and(|a| !a.is_here());
            return Ok(Outcome::Open(moved));
        }
        let mut dry = conn.is_backlogged() && !must_read;
        while !dry && !conn.starved && total < TURN {
            let got = conn.receive(&lanes, registry)?;
            dry = got.dry;
            total += got.direct + got.staged;
            conn.received += (got.direct + got.staged) as u64;
            conn.used |= got.direct + got.staged > 0;
            moved |= got.direct + got.staged > 0;
            conn.take_frames(&mut lanes, registry)?;
            if conn.fin {
                return Ok(conn.part());
            }
            if got.ended {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            dry |= conn.is_backlogged();
        }
        if conn.starved && conn.over && conn.lacks_rest() {
            return Err(sock::end_of(&conn.fd));
        }
        moved |= conn.answer(&mut lanes, registry)?;
        Ok(Outcome::Open(moved))
    }
}

impl ConnectionSlot {
    /// The connection, if nobody else has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Option<Inbound>>> {
        self.conn.try_lock()
    }

    /// The connection.
    pub fn lock(&self) -> MutexGuard<'_, Option<Inbound>> {
        self.conn.lock()
    }
}

/// The orders of a peer's lanes, seen from one stripe.
struct Lanes<'a> {
    serving: &'a Serving,
    stripe: usize,
    stripes: usize,
    sender: u32,
    gpu: &'a Gpu,
    fault: &'a Mutex<Option<Error>>,
    gathered: gathered::GatheredMessages,
}

impl Lanes<'_> {
    /// Bytes of a header, with the counts behind it if it has them.
    fn header(&self, counted: bool) -> usize {
        HEADER + if counted { 4 * self.stripes } else { 0 }
    }
}

impl Inbound {
    /// The socket.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Bytes that were ever received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// After the peer's FIN: whoever left still had its puts reported complete, so they are to count as arrived.
    fn part(&self) -> Outcome {
        if self.storing.is_empty() {
            Outcome::Closed
        } else {
            Outcome::Parting
        }
    }

    /// Whether an end with `error` cuts off what the peer sent here: there was no FIN.
    pub fn is_cut_off(&self, error: &io::Error) -> bool {
        self.used && (self.landing.is_some() || error.kind() == io::ErrorKind::UnexpectedEof)
    }

    /// Whether the put that arrives is cut off: its rest will never come.
    fn lacks_rest(&self) -> bool {
        let left = self.landing.as_ref().map_or(0, |l| l.place.len as usize - l.got);
        sock::rest(&self.fd).is_some_and(|n| self.receive_buffer.staged().len() + n < left)
    }

    /// What epoll should watch for: bytes unless backlogged, room if answers wait for it. Nothing after a FIN.
    /// `None`: its end was told and is not looked into before the GPU has moved on.
    pub fn wanted(&self) -> Option<u32> {
        let read = if self.is_backlogged() || self.starved { 0 } else { libc::EPOLLIN };
        let write = if self.answers.is_empty() || self.fetching { 0 } else { libc::EPOLLOUT };
        let bits = if self.fin { 0 } else { (read | write) as u32 };
        (!self.over || bits != 0).then_some(bits)
    }

    fn is_backlogged(&self) -> bool {
        self.answers.len() >= BACKLOG
    }

    fn receive(&mut self, lanes: &Lanes, registry: &Registry) -> io::Result<Got> {
        let Some(landing) = &mut self.landing else {
            // SAFETY: nothing but the stage is written.
            return unsafe { self.receive_buffer.fill(self.fd.as_raw_fd(), None) };
        };
        let left = landing.place.len as usize - landing.got;
        if let (Some(to), false) = (landing.way.place(landing.got), landing.refused) {
            // SAFETY: the rest of a buffer of the payload's size that is this put's alone.
            let got = unsafe { self.receive_buffer.fill(self.fd.as_raw_fd(), Some((to, left))) }?;
            landing.got += got.direct;
            return Ok(got);
        }
        if landing.way.is_pinned() && !landing.refused {
            // It gets one when it is here.
            // SAFETY: nothing but the stage is written.
            return unsafe { self.receive_buffer.fill(self.fd.as_raw_fd(), None) };
        }
        if !landing.refused {
            // Resolved anew for each receive: a window may be gone by now, and a held registry would make its
            // deregistration wait for the peer.
            let held = registry.hold();
            if let Some(to) = held.resolve(landing.place.rkey, landing.place.addr + landing.got as u64, left as u64) {
                // SAFETY: inside a registered window, which stays one while `held` lives.
                match unsafe { self.receive_buffer.fill(self.fd.as_raw_fd(), Some((to, left))) } {
                    Ok(got) => {
                        landing.got += got.direct;
                        return Ok(got);
                    }
                    // Registered, but not mapped any more.
                    Err(e) if e.raw_os_error() == Some(libc::EFAULT) => {}
                    Err(e) => return Err(e),
                }
            }
            drop(held);
            self.refuse(lanes, Refusal::Put);
        }
        // SAFETY: nothing but the stage is written.
        unsafe { self.receive_buffer.fill(self.fd.as_raw_fd(), None) }
    }

    /// Consumes what is staged, up to a partial header.
    fn take_frames(&mut self, lanes: &mut Lanes, registry: &Registry) -> io::Result<()> {
        let taken = self.take_whole_frames(lanes, registry);
        lanes.hand_over();
        taken
    }

    fn take_whole_frames(&mut self, lanes: &mut Lanes, registry: &Registry) -> io::Result<()> {
        let held = registry.hold();
        loop {
            if self.landing.is_some() {
                if !self.has_place(lanes) || !self.land(lanes, &held) {
                    return Ok(());
                }
                self.landed(lanes, &held);
                continue;
            }
            let Some(frame) = self.receive_buffer.header() else { return Ok(()) };
            match frame.map_err(|m| io::Error::new(io::ErrorKind::InvalidData, m.0))? {
                Frame::Put { context, place, bell } => {
                    let counted = bell.is_some_and(|b| b.counted);
                    let header = lanes.header(counted);
                    let staged = self.receive_buffer.staged();
                    if staged.len() < header {
                        return Ok(());
                    }
                    if counted && lanes.is_choked() || lanes.is_full_for(context, bell) {
                        self.starved = true;
                        return Ok(());
                    }
                    let counts = match counted {
                        true => parse_counts(&staged[HEADER..], lanes.stripes),
                        false => [0; MAX_STRIPES],
                    };
                    self.receive_buffer.consume(header);
                    let bell = bell.map(|b| (b, counts));
                    let way = staged::PutWay::of(&place, lanes, self.receive_buffer.staged().len())?;
                    let refused = lanes.is_refused(context);
                    self.landing = Some(Landing { context, place, bell, got: 0, refused, way });
                    if refused {
                        // Its bytes are thrown away.
                    } else if place.len > 0 && Key(place.rkey).is_on_gpu() {
                        if !lanes.gpu.holds(place.rkey, place.addr, place.len as u64) {
                            self.refuse(lanes, Refusal::Put);
                        }
                    } else if place.len > 0 && held.resolve(place.rkey, place.addr, place.len as u64).is_none() {
                        self.refuse(lanes, Refusal::Put);
                    }
                }
                Frame::Get { context, place } => {
                    self.receive_buffer.consume(HEADER);
                    self.take_get(lanes, &held, context, place);
                }
                Frame::Atomic { context, place, counted } => {
                    if !self.take_atomic(lanes, &held, (context, place, counted))? {
                        return Ok(());
                    }
                }
                Frame::Fence { context, number, counted } => {
                    if !self.take_fence(lanes, &held, (context, number, counted))? {
                        return Ok(());
                    }
                }
                Frame::End { context, conns } => {
                    self.receive_buffer.consume(HEADER);
                    self.end(lanes, context, conns);
                }
                Frame::Fin => {
                    self.receive_buffer.consume(HEADER);
                    self.fin = true;
                    return Ok(());
                }
                Frame::Data { .. } | Frame::Fetched { .. } | Frame::Fenced { .. } | Frame::Refused { .. } => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer where a request is due"));
                }
            }
        }
    }

    /// A peer asks for bytes.
    fn take_get(&mut self, lanes: &Lanes, held: &Held, context: u32, place: WindowBytes) {
        let on_gpu = staged::may_fetch(&place, lanes.gpu);
        let is_there = || on_gpu || held.resolve(place.rkey, place.addr, place.len as u64).is_some();
        if lanes.is_refused(context) || !is_there() {
            return self.say_refused(lanes, Refusal::Get, context, place);
        }
        let header = Frame::Data { len: place.len }.emit();
        self.answers.push_back(Answer { header, context, place, sent: 0, bare: false, buffer: None, awaited: None });
    }

    /// Copies what is staged of the current put to its place; `true`: it is complete.
    fn land(&mut self, lanes: &Lanes, held: &Held) -> bool {
        let Some(landing) = &mut self.landing else { return false };
        let left = landing.place.len as usize - landing.got;
        let staged = self.receive_buffer.staged();
        let n = left.min(staged.len());
        if let (Some(to), true, false) = (landing.way.place(landing.got), n > 0, landing.refused) {
            // SAFETY: `n` bytes of the buffer, which is this put's alone; the stage is ours.
            unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), to, n) };
            self.receive_buffer.consume(n);
            landing.got += n;
        } else if n > 0 {
            let to = held.resolve(landing.place.rkey, landing.place.addr.wrapping_add(landing.got as u64), n as u64);
            match to {
                Some(to) if !landing.refused => {
                    // SAFETY: `to` names `n` bytes of a registered window, which stays one while `held` lives; the
                    // stage is ours alone. A raw copy: the window is shared with the application.
                    unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), to, n) };
                }
                _ => {
                    if !landing.refused {
                        self.refuse(lanes, Refusal::Put);
                    }
                }
            }
            self.receive_buffer.consume(n);
            if let Some(landing) = &mut self.landing {
                landing.got += n;
            }
        }
        left == n
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
