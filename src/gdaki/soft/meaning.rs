//! Which operations a send entry is: its keys and ranges held against windows.

use super::keys::{Keys, SINK, SINK_BYTES};
use crate::fabric::lanes::{Named, WindowView, WINDOWS};
use crate::gdaki::entry::send::{Inline, LocalRange, LocalRanges, Malformed, RemotePlace, Request};
use crate::gdaki::entry::Syndrome;
use crate::proxy::ops::Ops;
use crate::proxy::ring::{Entry, Finish};
use crate::rma::args::{AtomicArgs, Place};
use crate::rma::atomic::{Atomics, Change, Width};
use crate::rma::check::{self, inside, Live};
use crate::rma::op::{Get, Op, Payload, Put, Signal, Value};
use crate::rma::refusal::Target;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// What the entries of a queue pair are held against.
pub struct Terms {
    /// The communicator, its contexts and ranks.
    pub target: Target,
    /// The context's number in its set.
    pub context: u32,
    /// The communicator's keys.
    pub keys: Arc<Keys>,
    /// Which atomic operations the context carries out.
    pub atomics: Atomics,
    /// The completion queues that a wait may name.
    pub counts: Arc<Counts>,
    /// Goes up when a window of the communicator ends.
    pub ended: Arc<AtomicU64>,
}

/// How many completion entries each completion queue of a set has.
pub struct Counts {
    /// The number of the first queue.
    first: u32,
    written: Box<[AtomicU64]>,
}

impl Counts {
    /// Of `n` queues, numbered from `first` on.
    pub fn new(first: u32, n: usize) -> Self {
        Self { first, written: (0..n).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Of the queue with this number, if it is one.
    #[inline(always)]
    pub fn get(&self, queue: u32) -> Option<&AtomicU64> {
        self.written.get(queue.checked_sub(self.first)? as usize)
    }
}

/// What is wrong with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Its form.
    Malformed(Malformed),
    /// It says that it is for this queue pair.
    Queue(u32),
    /// It waits for this completion queue.
    Wait(u32),
    /// A local range of what this key names, or does not name.
    Local(LocalRange),
    /// A range of so many bytes at the peer.
    Remote(RemotePlace, u64),
    /// An atomic operation that this word, or this fabric, does not have.
    Atomic(RemotePlace),
    /// It has been rung, and never came.
    Missing(u16),
    /// It is one more than the ring has room for.
    Overrun,
}

impl Fault {
    /// What the device writes for it.
    pub fn syndrome(self) -> Syndrome {
        match self {
            Self::Malformed(malformed) => malformed.syndrome(),
            Self::Queue(_) | Self::Wait(_) | Self::Missing(_) | Self::Overrun => Syndrome::LocalOperation,
            Self::Local(_) => Syndrome::LocalProtection,
            Self::Remote(..) => Syndrome::RemoteAccess,
            Self::Atomic(_) => Syndrome::RemoteInvalid,
        }
    }

    /// In words.
    #[cold]
    pub fn sentence(self) -> String {
        match self {
            Self::Malformed(malformed) => malformed.sentence(),
            Self::Queue(queue) => format!("it is written for queue pair {queue}"),
            Self::Wait(queue) => format!("it waits for completion queue {queue}, which is none of this set"),
            Self::Local(LocalRange { address, key, len }) => format!(
                "lkey {key:#010x} names no window of this communicator that has {len} bytes at {address}: was it \
                 deregistered?"
            ),
            Self::Remote(RemotePlace { address, key }, len) => format!(
                "rkey {key:#010x} names no window of this communicator that has {len} bytes at {address} at the peer: \
                 was it deregistered?"
            ),
            Self::Atomic(RemotePlace { address, key }) => format!(
                "no atomic operation can be done at {address} of rkey {key:#010x}: a word lies at a multiple of its \
                 bytes, and the fabric needs atomic operations"
            ),
            Self::Missing(found) => format!(
                "it has been rung and did not come (its slot holds index {found}): a doorbell without its entry"
            ),
            Self::Overrun => {
                "its slot was written before the entry that was in it was complete: more is outstanding than the \
                 queue has slots"
                    .into()
            }
        }
    }
}

/// A window that entries of a queue have named: what looking it up would bring.
#[derive(Clone, Copy, Default)]
struct Known {
    /// 0: none.
    key: u32,
    lkey: u32,
    rkey: u32,
    base: u64,
    len: u64,
    /// At the queue's peer.
    remote_base: u64,
    remote_len: u64,
    handle: u64,
}

/// The windows that entries of a queue pair name.
pub struct Windows {
    terms: Arc<Terms>,
    peer: u32,
    /// Those of the last entries: a window for data here, one there, and one for signals.
    known: [Known; 3],
    /// Which of them is the next to go.
    oldest: usize,
    /// Keys of the windows that entries have named.
    named: Named<u32>,
    /// `terms.ended` when they were learned.
    ended: u64,
}

impl Windows {
    /// Of a queue pair to `peer`.
    pub fn new(terms: Arc<Terms>, peer: u32) -> Self {
        let ended = terms.ended.load(Ordering::Acquire);
        Self { terms, peer, known: Default::default(), oldest: 0, named: Named::default(), ended }
    }

    /// The queue pair's peer.
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// What they are held against.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Forgets what is gone.
    #[inline(always)]
    pub fn begin(&mut self) {
        let ended = self.terms.ended.load(Ordering::Acquire);
        if ended != self.ended {
            (self.ended, self.known) = (ended, Default::default());
        }
    }

    #[inline(always)]
    fn find(&mut self, key: u32) -> Option<&Known> {
        if key == 0 {
            return None;
        }
        let at = match self.known.iter().position(|known| known.key == key) {
            Some(at) => at,
            None => self.learn(key)?,
        };
        Some(&self.known[at])
    }

    #[cold]
    fn learn(&mut self, key: u32) -> Option<usize> {
        let known = self.look_up(key)?;
        let at = self.oldest;
        self.oldest = (at + 1) % self.known.len();
        self.known[at] = known;
        self.named.note(key);
        Some(at)
    }

    /// What a kernel is told of the windows that entries have named lately.
    pub fn views(&self) -> [WindowView; WINDOWS] {
        self.named.views(|key| {
            let Known { lkey, rkey, base, len, remote_base, remote_len, .. } = self.look_up(key)?;
            Some(WindowView { handle: key.to_be().into(), lkey, base, len, rkey, remote_base, remote_len })
        })
    }

    fn look_up(&self, key: u32) -> Option<Known> {
        let handle = self.terms.keys.find(key)?;
        // SAFETY: who drains a set's queues keeps the set; the peer is a rank.
        let (here, there) = unsafe { Live(self.terms.target.coll).ends(handle as usize as *mut c_void, self.peer) }?;
        Some(Known {
            key,
            lkey: here.lkey,
            rkey: there.rkey,
            base: here.base,
            len: here.len,
            remote_base: there.base,
            remote_len: there.len,
            handle,
        })
    }

    /// How many bytes of what a key names are here, and at the peer; `None`: it names nothing.
    #[cold]
    pub fn lengths(&self, key: u32) -> Option<(u64, u64)> {
        self.look_up(key).map(|known| (known.len, known.remote_len))
    }

    /// Address and key of a local range.
    #[inline(always)]
    fn local(&mut self, local: &LocalRange) -> Result<(u64, u32), Fault> {
        match self.find(local.key).filter(|known| inside(local.address, local.len.into(), known.len)) {
            Some(known) => Ok((known.base + local.address, known.lkey)),
            None => Err(Fault::Local(*local)),
        }
    }

    /// Address and key of a range at the peer.
    #[inline(always)]
    fn remote(&mut self, remote: &RemotePlace, len: u64) -> Result<(u64, u32), Fault> {
        match self.find(remote.key).filter(|known| inside(remote.address, len, known.remote_len)) {
            Some(known) => Ok((known.remote_base + remote.address, known.rkey)),
            None => Err(Fault::Remote(*remote, len)),
        }
    }

    /// Where a fetched value goes; `None`: nowhere.
    fn fetched(&mut self, local: &LocalRange) -> Result<Option<Place>, Fault> {
        if local.key == SINK {
            return self.sink(local).map(|()| None);
        }
        self.local(local)?;
        let handle = self.find(local.key).ok_or(Fault::Local(*local))?.handle;
        Ok(Some(Place::new(local.address, handle as usize as *mut c_void)))
    }

    fn sink(&self, local: &LocalRange) -> Result<(), Fault> {
        match inside(local.address, local.len.into(), SINK_BYTES) {
            true => Ok(()),
            false => Err(Fault::Local(*local)),
        }
    }

    /// A write of one range.
    #[inline(always)]
    pub fn put(&mut self, remote: &RemotePlace, from: &LocalRange) -> Result<Put, Fault> {
        let (local, lkey) = self.local(from)?;
        let len = from.len.into();
        let (remote, rkey) = self.remote(remote, len)?;
        Ok(Put { local, lkey, rkey, remote, len, signal: None, more: false })
    }

    /// A write of bytes that stand in the entry.
    #[inline(always)]
    pub fn value(&mut self, remote: &RemotePlace, inline: &Inline) -> Result<Value, Fault> {
        let payload = Payload::new(inline.bytes()).ok_or(Fault::Malformed(Malformed::Inline(0)))?;
        let (remote, rkey) = self.remote(remote, inline.bytes().len() as u64)?;
        Ok(Value { payload, rkey, remote, signal: None, more: false })
    }

    /// An addition to a word of 8 bytes whose old value goes into the sink.
    #[inline(always)]
    pub fn signal(&mut self, remote: &RemotePlace, add: u64, sink: &LocalRange) -> Result<Signal, Fault> {
        self.sink(sink)?;
        let (word, rkey) = self.remote(remote, 8)?;
        match word % 8 {
            0 => Ok(Signal { remote: word, rkey, value: add, strong: true }),
            _ => Err(Fault::Atomic(*remote)),
        }
    }

    /// The operations of `work`, which is no wait, and no addition that is a [signal](Windows::signal). They are
    /// appended to `ops`, or none is.
    #[inline(never)]
    pub fn carry(&mut self, work: &Request, ops: &mut Ops) -> Result<Entry, Fault> {
        match *work {
            Request::Write(remote, LocalRanges { first, second: None }) => {
                ops.push(Op::Put(self.put(&remote, &first)?));
                Ok(Entry::Op(Finish::NONE))
            }
            Request::Write(remote, gather) => self.moves(remote, gather, ops, false),
            Request::WriteInline(remote, ref inline) => {
                ops.push(Op::Value(self.value(&remote, inline)?));
                Ok(Entry::Op(Finish::NONE))
            }
            Request::Read(remote, gather) => self.moves(remote, gather, ops, true),
            Request::Add { remote, width, add, boundary, fetched } => {
                self.atomic(remote, width, Change::FetchAdd { add, boundary }, &fetched, ops)
            }
            Request::Swap { remote, swap, compare, swap_mask, compare_mask, fetched } => {
                let [compare, compare_mask] = [compare, compare_mask].map(u64::from);
                let [swap, swap_mask] = [swap, swap_mask].map(u64::from);
                let change = Change::CompareSwap { compare, compare_mask, swap, swap_mask };
                self.atomic(remote, Width::Four, change, &fetched, ops)
            }
            Request::Dump(local) if local.key == SINK => self.sink(&local).map(|()| Entry::Nop),
            Request::Dump(local) => self.local(&local).map(|_| Entry::Nothing(Finish::NONE)),
            Request::Nop => Ok(Entry::Nop),
            Request::Wait { .. } => Ok(Entry::Nothing(Finish::NONE)),
        }
    }

    /// An operation for each range.
    fn moves(
        &mut self,
        remote: RemotePlace,
        gather: LocalRanges,
        ops: &mut Ops,
        is_read: bool,
    ) -> Result<Entry, Fault> {
        let all = gather.iter().map(|l| u64::from(l.len)).sum();
        let (mut remote, rkey) = self.remote(&remote, all)?;
        let mut made = [None; 2];
        for (made, local) in made.iter_mut().zip(gather.iter()) {
            let len = local.len.into();
            let (local, lkey) = self.local(local)?;
            *made = Some(match is_read {
                true => Op::Get(Get { local, lkey, rkey, remote, len, more: false }),
                false => Op::Put(Put { local, lkey, rkey, remote, len, signal: None, more: false }),
            });
            remote += len;
        }
        let n = made.iter().flatten().count() as u8;
        made.into_iter().flatten().for_each(|op| ops.push(op));
        Ok(if is_read { Entry::Gets(n) } else { Entry::Ops(n) })
    }

    fn atomic(
        &mut self,
        remote: RemotePlace,
        width: Width,
        change: Change,
        fetched: &LocalRange,
        ops: &mut Ops,
    ) -> Result<Entry, Fault> {
        let fetched = self.fetched(fetched)?;
        self.remote(&remote, width.bytes())?;
        let handle = self.find(remote.key).ok_or(Fault::Remote(remote, width.bytes()))?.handle;
        let asked = AtomicArgs {
            context: self.terms.context as i32,
            change,
            width: width.bytes() as u32,
            remote: Place::new(remote.address, handle as usize as *mut c_void),
            fetched,
            rank: self.peer,
            more: false,
        };
        // SAFETY: who drains a set's queues keeps the set; the peer is a rank.
        let made = unsafe { check::atomic(&Live(self.terms.target.coll), &self.terms.atomics, &asked) };
        ops.push(Op::Atomic(made.ok_or(Fault::Atomic(remote))?));
        Ok(if fetched.is_some() { Entry::Gets(1) } else { Entry::Op(Finish::NONE) })
    }
}
