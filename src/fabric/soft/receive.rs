//! What arrives in the inbox: found, checked, applied.
//!
//! What is refused ends its context's lane: its sender is told, and what else comes of that context is dropped, so
//! that no signal announces bytes that are not there.
//!
//! A ring that has had news is *hot*: it is looked at directly, and its news bit stays set so that its sender need not
//! write it again. A ring that stays empty for a while cools down.

use super::atomic::{self, AtomicRequest};
use super::gpu::{Pull, Source};
use super::links::Links;
use super::refused::Refused;
use super::shm::inbox::Inbox;
use super::shm::message::{kind_of, GetRequest, Header, MessageKind, PullRequest};
use super::shm::ring::{place, Consumer, Malformed, Message};
use crate::error::{Error, Result};
use crate::memory::key::Key;
use crate::memory::registry::Held;
use crate::rma::seq::Seq;

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
    /// By sender.
    refused: Box<[Refused]>,
}

impl Receiver {
    /// Nothing hot yet.
    pub fn new(inbox: &Inbox, nranks: usize) -> Self {
        Self {
            consumers: (0..nranks).map(|r| Some(inbox.consumer(r))).collect(),
            hot: Vec::new(),
            hot_bits: vec![0; nranks.div_ceil(64)].into(),
            refused: (0..nranks).map(|_| Refused::default()).collect(),
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
    pub fn drain(&mut self, shared: &Links) -> bool {
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
            if read(consumer, head, shared, sender, &mut self.refused[sender as usize]).is_err() {
                shared.link(sender).health.fail(Error::protocol(format!(
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
    fn cool(&mut self, shared: &Links, at: usize) -> bool {
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

    /// Up to where each ring is filled by now, of those that are not empty.
    pub fn marks(&mut self, inbox: &Inbox) -> Vec<(u32, u64)> {
        self.find_news(inbox);
        let head = |sender: u32| self.consumers[sender as usize].as_ref().map(Consumer::head);
        self.hot.iter().filter_map(|hot| Some((hot.sender, head(hot.sender)?))).collect()
    }

    /// Whether everything up to these marks is applied.
    pub fn has_passed(&self, marks: &[(u32, u64)]) -> bool {
        let consumer = |sender: u32| self.consumers[sender as usize].as_ref();
        marks.iter().all(|&(sender, head)| consumer(sender).is_none_or(|c| c.has_passed(head)))
    }

    /// Whether the ring of a sender holds nothing, or nothing that will be read.
    pub fn has_read(&self, sender: u32) -> bool {
        self.consumers[sender as usize].as_ref().is_none_or(Consumer::is_empty)
    }

    /// Cools everything. `true`: nothing had arrived, the next message will set its news bit.
    pub fn cool_down(&mut self, shared: &Links) -> bool {
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

fn read(
    consumer: &mut Consumer,
    head: u64,
    shared: &Links,
    sender: u32,
    refused: &mut Refused,
) -> std::result::Result<(), Malformed> {
    // Not across anything that takes other locks: who has one of those may wait for the registry, and that behind a
    // registration, which waits for us.
    let mut held = None;
    let mut unreleased = 0;
    let result = loop {
        match consumer.peek(head) {
            Ok(Some(message)) => {
                if Key(message.header.key).is_on_gpu() && shared.received.is_full() {
                    break Ok(());
                }
                if !apply(&message, &mut held, shared, sender, refused) {
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
fn apply<'a>(
    message: &Message,
    held: &mut Option<Held<'a>>,
    shared: &'a Links,
    sender: u32,
    refused: &mut Refused,
) -> bool {
    let h = message.header;
    if matches!(
        h.kind,
        MessageKind::Put | MessageKind::Signal | MessageKind::Pull | MessageKind::Atomic | MessageKind::Fence
    ) && refused.has(h.aux)
    {
        return true;
    }
    match h.kind {
        MessageKind::Put => {
            match held.get_or_insert_with(|| shared.registry.hold()).resolve(h.key, h.addr, u64::from(h.len)) {
                Some(to) => {
                    // SAFETY: the payload is `len` bytes inside the ring, the destination `len` bytes inside a held
                    // window.
                    unsafe { place(message.payload, to, h.len as usize) };
                    return true;
                }
                None => *held = None,
            }
        }
        MessageKind::Signal => {
            // SAFETY: a signal's payload is 8 aligned bytes inside the ring (Header::parse, ring layout).
            let value = unsafe { message.payload.cast::<u64>().read_volatile() };
            if held.get_or_insert_with(|| shared.registry.hold()).add(h.key, h.addr, value) {
                return true;
            }
            *held = None;
        }
        _ => *held = None,
    }
    match h.kind {
        MessageKind::Put | MessageKind::Signal => not_here(message, shared, sender, refused),
        MessageKind::Pull => pull(message, shared, sender, refused),
        MessageKind::GetData => return shared.link(sender).get_data(shared, message),
        _ => rare(message, shared, sender, refused),
    }
    true
}

/// A put or signal that is in no host window: for GPU memory, or refused.
#[cold]
#[inline(never)]
fn not_here(message: &Message, shared: &Links, sender: u32, refused: &mut Refused) {
    let h = message.header;
    let (received, engine) = (&shared.received, &shared.engine);
    let source = Source::near(sender, h.aux);
    match h.kind {
        MessageKind::Put if Key(h.key).is_on_gpu() && engine.is_open() => {
            // SAFETY: the ring is mapped as long as this rank has its inbox.
            received.put(engine, source, unsafe { message.copy() }, h.key, h.addr);
        }
        MessageKind::Signal if Key(h.key).is_behind() && engine.is_open() => {
            // SAFETY: a signal's payload is 8 aligned bytes inside the ring (Header::parse, ring layout).
            let value = unsafe { message.payload.cast::<u64>().read_volatile() };
            received.signal(engine, source, h.key, h.addr, value);
        }
        MessageKind::Put => refuse(shared, source, refused, outside(shared, "put", h.key, h.addr, u64::from(h.len))),
        _ => refuse(shared, source, refused, outside(shared, "signal", h.key, h.addr, 8)),
    }
}

/// Bytes that the sender wants fetched from its GPU memory.
fn pull(message: &Message, shared: &Links, sender: u32, refused: &mut Refused) {
    let h = message.header;
    let source = Source::near(sender, h.aux);
    // SAFETY: a pull's payload has this many bytes (Header::parse); copied, because the sender may still change it.
    let payload = unsafe { message.payload.cast::<[u8; PullRequest::LEN]>().read_volatile() };
    let Some(request) = PullRequest::parse(&payload) else {
        let why = format!("a malformed request to copy to {:#x} in window {}", h.addr, h.key);
        return refuse(shared, source, refused, Error::protocol(why));
    };
    match shared.share.find(sender, request.window, request.from, request.len) {
        Some(from) if Key(h.key).is_on_gpu() => {
            let PullRequest { len, number, signal, .. } = request;
            let pull = Pull { len, number: Seq(number), signal };
            shared.received.pull(&shared.engine, source, (h.key, h.addr), &pull, from)
        }
        Some(_) => refuse(shared, source, refused, outside(shared, "copy", h.key, h.addr, request.len)),
        None => {
            let why = format!(
                "{} bytes at {:#x} of its window {} are not shared with rank {}",
                request.len, request.from, request.window, shared.world.rank
            );
            refuse(shared, source, refused, Error::local_protection(why));
        }
    }
}

#[cold]
#[inline(never)]
fn rare(message: &Message, shared: &Links, sender: u32, refused: &mut Refused) {
    let h = message.header;
    let link = shared.link(sender);
    // SAFETY: the ring is mapped as long as this rank has its inbox.
    let payload = unsafe { message.copy() };
    match h.kind {
        MessageKind::Get => {
            if let Some(request) = GetRequest::parse(&payload).filter(|r| !refused.has(r.context)) {
                let here = shared.registry.hold().resolve(h.key, h.addr, request.len);
                match here {
                    Some(_) => link.respond(shared, h.addr, h.key, request),
                    // Checked where the bytes are fetched.
                    None if Key(h.key).is_on_gpu() && shared.engine.is_open() => {
                        link.respond(shared, h.addr, h.key, request)
                    }
                    None => {
                        let source = Source::near(sender, request.context);
                        refuse(shared, source, refused, outside(shared, "get", h.key, h.addr, request.len));
                    }
                }
            }
        }
        MessageKind::GetDone => link.get_done(shared, h.key, Seq(h.aux)),
        MessageKind::Refused => {
            let why: String = String::from_utf8_lossy(&payload).chars().filter(|c| !c.is_control()).collect();
            let why = Error::remote(format!("rank {sender} refused an operation: {why}"));
            link.refused(shared, h.key, why.of_kind(kind_of(h.aux)));
        }
        MessageKind::Pulled => link.pulled(shared, h.key, Seq(h.aux)),
        MessageKind::Fence => shared.received.fence(shared, Source::near(sender, h.aux), Seq(h.addr as u32)),
        MessageKind::Atomic => {
            if let Err(why) = atomic(shared, sender, &h, &payload) {
                refuse(shared, Source::near(sender, h.aux), refused, why);
            }
        }
        MessageKind::Pad | MessageKind::Put | MessageKind::Signal | MessageKind::Pull | MessageKind::GetData => {}
    }
}

/// A peer on this host asks for an atomic operation: carries it out, or leaves it to this rank's engine, and answers.
/// Fails where it is refused.
fn atomic(shared: &Links, sender: u32, h: &Header, payload: &[u8]) -> Result<()> {
    let Some(request) = AtomicRequest::parse(payload) else {
        return Err(Error::protocol(format!("a malformed atomic operation at {:#x} in window {}", h.addr, h.key)));
    };
    let width = request.width;
    let refused = || Err(outside(shared, "atomic operation", h.key, h.addr, width.bytes()));
    if h.addr % width.bytes() != 0 {
        return refused();
    }
    if Key(h.key).is_behind() && shared.engine.is_open() {
        shared.received.atomic(&shared.engine, Source::near(sender, h.aux), (h.key, h.addr), request);
        return Ok(());
    }
    let held = shared.registry.hold();
    let Some(at) = held.resolve(Key(h.key).signalled().0, h.addr, width.bytes()) else {
        drop(held);
        return refused();
    };
    // SAFETY: an aligned word inside a window that is held.
    let value = unsafe { atomic::change(at, &request.change, width) };
    drop(held);
    shared.link(sender).answer_atomic(shared, h.aux, &request, value);
    Ok(())
}

#[cold]
#[inline(never)]
fn refuse(shared: &Links, source: Source, refused: &mut Refused, why: Error) {
    if refused.add(source.context) {
        log::info!("refused for context {} of rank {}: {}", source.context, source.rank, why.message());
        shared.received.refuse(shared, source, why);
    }
}

#[cold]
fn outside(shared: &Links, what: &str, key: u32, addr: u64, len: u64) -> Error {
    let rank = shared.world.rank;
    Error::remote_access(format!(
        "a {what} of {len} bytes at {addr:#x} lies outside window {key} of rank {rank}, or the window was deregistered"
    ))
}
