//! What arrives in the inbox: found, checked, applied.
//!
//! A ring that has had news is *hot*: it is looked at directly, and its news bit stays set so that its sender need not
//! write it again. A ring that stays empty for a while cools down.

use super::gpu::Source;
use super::local::inbox::Inbox;
use super::local::message::{GetRequest, Kind, PullRequest};
use super::local::ring::{Consumer, Malformed, Message};
use super::shared::Shared;
use crate::error::Error;
use crate::memory::gpu::{BEHIND_GPU_BIT, GPU_BIT};
use crate::memory::registry::Held;
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicU64, Ordering};

/// Looks at an empty ring before it cools down.
const COOL_AFTER: u32 = 1024;
/// Bytes read from a ring before its room is given back.
const RELEASE_EVERY: usize = 8 << 10;

struct Hot {
    sender: u32,
    empty: u32,
}

/// The reading side of all rings. One at a time reads: the caller that polls, or the helper thread.
pub struct Receiver {
    consumers: Box<[Option<Consumer>]>,
    hot: Vec<Hot>,
    /// The senders in `hot`, as bits.
    hot_bits: Box<[u64]>,
}

/// Adds to a signal, atomically with respect to everybody who does.
#[inline(always)]
pub fn add(at: *mut u8, value: u64) {
    debug_assert_eq!(at as usize % 8, 0);
    // SAFETY: the caller resolved 8 aligned bytes inside a window that is held; all who write signals use this.
    unsafe { AtomicU64::from_ptr(at.cast()) }.fetch_add(value, Ordering::SeqCst);
}

impl Receiver {
    /// Nothing hot yet.
    pub fn new(inbox: &Inbox, nranks: usize) -> Self {
        Self {
            consumers: (0..nranks).map(|r| Some(inbox.consumer(r))).collect(),
            hot: Vec::new(),
            hot_bits: vec![0; nranks.div_ceil(64)].into(),
        }
    }

    fn find_news(&mut self, inbox: &Inbox) {
        for word in 0..self.hot_bits.len() {
            let mut bits = inbox.news(word) & !self.hot_bits[word];
            while bits != 0 {
                let sender = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                // Bits past the last rank are a peer's nonsense.
                if self.consumers.get(sender).is_some_and(Option::is_some) {
                    self.hot_bits[word] |= 1 << (sender % 64);
                    self.hot.push(Hot { sender: sender as u32, empty: 0 });
                }
            }
        }
    }

    /// Applies everything that has arrived so far. Returns whether there was anything.
    #[inline]
    pub fn drain(&mut self, shared: &Shared) -> bool {
        self.find_news(&shared.inbox);
        let mut moved = false;
        let mut at = 0;
        while at < self.hot.len() {
            let sender = self.hot[at].sender;
            let Some(consumer) = &mut self.consumers[sender as usize] else {
                self.forget(at);
                continue;
            };
            let head = consumer.head();
            if consumer.is_at(head) {
                self.hot[at].empty += 1;
                if self.hot[at].empty > COOL_AFTER && self.cool(shared, at) {
                    continue;
                }
                at += 1;
                continue;
            }
            self.hot[at].empty = 0;
            moved = true;
            if read(consumer, head, shared, sender).is_err() {
                shared.link(sender).health.fail(Error::remote(format!(
                    "rank {sender} wrote a malformed message into shared memory; both ranks must run the same build"
                )));
                self.consumers[sender as usize] = None;
            }
            at += 1;
        }
        moved
    }

    fn forget(&mut self, at: usize) {
        let sender = self.hot.swap_remove(at).sender as usize;
        self.hot_bits[sender / 64] &= !(1 << (sender % 64));
    }

    /// Takes a ring off the hot list. `false`: something arrived meanwhile, it stays.
    fn cool(&mut self, shared: &Shared, at: usize) -> bool {
        let sender = self.hot[at].sender as usize;
        shared.inbox.clear_news(sender);
        if self.consumers[sender].as_ref().is_some_and(|c| !c.is_empty()) {
            shared.inbox.keep_news(sender);
            self.hot[at].empty = 0;
            return false;
        }
        self.forget(at);
        true
    }

    /// Cools everything. `true`: nothing had arrived, the next message will set its news bit.
    pub fn cool_down(&mut self, shared: &Shared) -> bool {
        let mut at = 0;
        while at < self.hot.len() {
            if !self.cool(shared, at) {
                at += 1;
            }
        }
        self.find_news(&shared.inbox);
        self.hot.is_empty()
    }
}

fn read(consumer: &mut Consumer, head: u64, shared: &Shared, sender: u32) -> Result<(), Malformed> {
    // Not across anything that takes other locks: who has one of those may wait for the registry, and that behind a
    // registration, which waits for us.
    let mut held = None;
    let mut unreleased = 0;
    let result = loop {
        match consumer.peek(head) {
            Ok(Some(message)) => {
                if message.header.key & GPU_BIT != 0 && shared.received.is_full() {
                    break Ok(());
                }
                if !apply(&message, &mut held, shared, sender) {
                    break Ok(());
                }
                unreleased += message.header.len as usize + 32;
                consumer.pop(&message);
                if unreleased > RELEASE_EVERY {
                    consumer.release();
                    unreleased = 0;
                }
            }
            Ok(None) => break Ok(()),
            Err(e) => break Err(e),
        }
    };
    consumer.release();
    result
}

/// `false`: there is no room for it yet.
#[inline(always)]
fn apply<'a>(message: &Message, held: &mut Option<Held<'a>>, shared: &'a Shared, sender: u32) -> bool {
    let h = message.header;
    match h.kind {
        Kind::Put => {
            match held.get_or_insert_with(|| shared.registry.hold()).resolve(h.key, h.addr, u64::from(h.len)) {
                Some(to) => {
                    // SAFETY: the payload is `len` bytes inside the ring, the destination `len` bytes inside a held window.
                    unsafe { place(message.payload, to, h.len as usize) };
                    return true;
                }
                None => *held = None,
            }
        }
        Kind::Signal => match held.get_or_insert_with(|| shared.registry.hold()).resolve(h.key, h.addr, 8) {
            Some(at) if h.addr % 8 == 0 => {
                // SAFETY: a signal's payload is 8 aligned bytes inside the ring (Header::parse, ring layout).
                add(at, unsafe { message.payload.cast::<u64>().read_volatile() });
                return true;
            }
            _ => *held = None,
        },
        _ => *held = None,
    }
    match h.kind {
        Kind::Put | Kind::Signal => not_here(message, shared, sender),
        Kind::Pull => pull(message, shared, sender),
        Kind::GetData => return shared.link(sender).get_data(shared, message),
        _ => rare(message, shared, sender),
    }
    true
}

/// Copies what a peer sent to its place: without a reference to either, which others may write meanwhile.
///
/// # Safety
/// `len` bytes are readable at `from` and writable at `to`.
#[inline(always)]
pub unsafe fn place(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise; payloads are 8-byte aligned.
    unsafe {
        if len == 8 {
            // The most common size, as one store: a reader that polls the word sees all of it or nothing.
            to.cast::<u64>().write_unaligned(from.cast::<u64>().read_volatile());
        } else {
            std::ptr::copy_nonoverlapping(from, to, len);
        }
    }
}

/// A put or signal that is in no host window: for GPU memory, or refused.
#[cold]
#[inline(never)]
fn not_here(message: &Message, shared: &Shared, sender: u32) {
    let h = message.header;
    let (received, engine) = (&shared.received, &shared.engine);
    let source = Source { rank: sender, context: h.aux };
    match h.kind {
        Kind::Put if h.key & GPU_BIT != 0 && engine.is_open() => {
            // SAFETY: the ring is mapped as long as this rank has its inbox.
            received.put(engine, source, unsafe { message.copy() }, h.key, h.addr);
        }
        Kind::Signal if h.key & (GPU_BIT | BEHIND_GPU_BIT) != 0 && engine.is_open() => {
            // SAFETY: a signal's payload is 8 aligned bytes inside the ring (Header::parse, ring layout).
            let value = unsafe { message.payload.cast::<u64>().read_volatile() };
            received.signal(engine, source, h.key, h.addr, value);
        }
        Kind::Put => refuse(shared, sender, "put", h.key, h.addr, u64::from(h.len)),
        _ => refuse(shared, sender, "signal", h.key, h.addr, 8),
    }
}

/// Bytes that the sender wants fetched from its GPU memory.
fn pull(message: &Message, shared: &Shared, sender: u32) {
    let h = message.header;
    // SAFETY: a pull's payload has this many bytes (Header::parse); copied, because the sender may still change it.
    let payload = unsafe { message.payload.cast::<[u8; PullRequest::LEN]>().read_volatile() };
    let Some(request) = PullRequest::parse(&payload) else {
        return refuse(shared, sender, "malformed copy", h.key, h.addr, 0);
    };
    match shared.share.find(sender, request.window, request.from, request.len) {
        Some(from) if h.key & GPU_BIT != 0 => {
            let source = Source { rank: sender, context: h.aux };
            shared.received.pull(&shared.engine, source, (h.key, h.addr), &request, from)
        }
        Some(_) => refuse(shared, sender, "copy", h.key, h.addr, request.len),
        None => {
            let why = format!(
                "{} bytes at {:#x} of its window {} are not shared with rank {}",
                request.len, request.from, request.window, shared.world.rank
            );
            shared.link(sender).refuse(shared, why);
        }
    }
}

#[cold]
#[inline(never)]
fn rare(message: &Message, shared: &Shared, sender: u32) {
    let h = message.header;
    let link = shared.link(sender);
    // SAFETY: the ring is mapped as long as this rank has its inbox.
    let payload = unsafe { message.copy() };
    match h.kind {
        Kind::Get => {
            if let Some(request) = GetRequest::parse(&payload) {
                let here = shared.registry.hold().resolve(h.key, h.addr, request.len);
                match here {
                    Some(_) => link.respond(shared, h.addr, h.key, request),
                    // Checked where the bytes are fetched.
                    None if h.key & GPU_BIT != 0 && shared.engine.is_open() => {
                        link.respond(shared, h.addr, h.key, request)
                    }
                    None => refuse(shared, sender, "get", h.key, h.addr, request.len),
                }
            }
        }
        Kind::GetDone => link.get_done(shared, h.key, Seq(h.aux)),
        Kind::Refused => {
            let why: String = String::from_utf8_lossy(&payload).chars().filter(|c| !c.is_control()).collect();
            link.health.fail(Error::remote(format!("rank {sender} refused an operation: {why}")));
        }
        Kind::Pulled => link.pulled(shared, h.key, Seq(h.aux)),
        Kind::Pad | Kind::Put | Kind::Signal | Kind::Pull | Kind::GetData => {}
    }
}

#[cold]
#[inline(never)]
fn refuse(shared: &Shared, sender: u32, what: &str, key: u32, addr: u64, len: u64) {
    let rank = shared.world.rank;
    let why = format!(
        "a {what} of {len} bytes at {addr:#x} lies outside window {key} of rank {rank}, or the window was deregistered"
    );
    log::info!("refused for rank {sender}: {why}");
    shared.link(sender).refuse(shared, why);
}
