//! A page of statistics as its writers have it.

use super::layout::{Header, Record, Way, MAGIC, NAME, VERSION};
use super::now;
use crate::error::{Error, Result};
use crate::sys::fork::Private;
use crate::sys::memfd::{create_named, seal_writing, Mapping};
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{fence, Ordering};
use std::time::Duration;

/// What a page is about.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// What fills it.
    pub way: Way,
    /// Number of the communicator in this process.
    pub comm: u64,
    /// Of the set of contexts in the communicator.
    pub set: u32,
    /// What NCCL calls the communicator.
    pub comm_id: u64,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub nranks: u32,
    /// Contexts of the set.
    pub contexts: u32,
    /// Only peers whose rank differs by a multiple of it have records; 0 and 1: all.
    pub stride: u32,
    /// Each (context, peer) has a companion, with a record of its own.
    pub companions: bool,
    /// Threads of the engine.
    pub threads: u32,
    /// Name of the fabric.
    pub fabric: &'static str,
    /// When an entry counts as stalled; zero: nobody watches.
    pub stall: Duration,
}

/// A page. Its file is closed when it is dropped.
pub struct Page {
    mapping: Mapping,
    records: usize,
    per_context: usize,
    /// Records before those of companions.
    mains: usize,
    step: u32,
    /// What readers find in `/proc`.
    _file: Private<OwnedFd>,
}

impl Page {
    /// Makes it, with all counts 0.
    pub fn create(about: &About) -> Result<Self> {
        let step = about.stride.max(1);
        let first = about.rank % step;
        let per_context = about.nranks.saturating_sub(first).div_ceil(step) as usize;
        let mains = per_context * about.contexts as usize;
        let records = if about.companions { 2 * mains } else { mains };
        let len = size_of::<Header>() + records * size_of::<Record>();
        let name = CString::new(NAME).map_err(|_| Error::internal("the name of a page of statistics"))?;
        let file = create_named(&name, len)?;
        let mapping = Mapping::new(file.as_fd(), 0, len)?;
        // Readers cannot write then; where the kernel is too old for it, they are of the same user all the same.
        seal_writing(file.as_fd());
        let page = Self { mapping, records, per_context, mains, step, _file: Private::new(file) };
        let mut fabric = [0; 8];
        about.fabric.bytes().zip(&mut fabric).for_each(|(from, to)| *to = from);
        let (h, time) = (page.header(), now());
        let way = if about.way == Way::Engine { 1 } else { 2 };
        for (word, value) in [
            (&h.version, VERSION),
            (&h.header_bytes, size_of::<Header>() as u64),
            (&h.record_bytes, size_of::<Record>() as u64),
            (&h.records, records as u64),
            (&h.per_context, per_context as u64),
            (&h.first_peer, first.into()),
            (&h.peer_step, step.into()),
            (&h.way, way),
            (&h.comm, about.comm),
            (&h.set, about.set.into()),
            (&h.comm_id, about.comm_id),
            (&h.rank, about.rank.into()),
            (&h.nranks, about.nranks.into()),
            (&h.contexts, about.contexts.into()),
            (&h.threads, about.threads.into()),
            (&h.fabric, u64::from_le_bytes(fabric)),
            (&h.created, time),
            (&h.published, time),
            (&h.stall, about.stall.as_nanos() as u64),
            (&h.first_companion, if about.companions { mains as u64 } else { 0 }),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        fence(Ordering::Release);
        h.magic.store(MAGIC, Ordering::Release);
        Ok(page)
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is page-aligned, at least as long as a header, and lives as long as `self`; all fields
        // are atomic.
        unsafe { &*self.mapping.ptr().cast() }
    }

    /// The number of the record of a (context, peer); both have one.
    pub fn index(&self, context: u32, peer: u32) -> usize {
        context as usize * self.per_context + (peer / self.step) as usize
    }

    /// The number of the record of a (context, peer)'s companion, which has one.
    pub fn companion_index(&self, context: u32, peer: u32) -> usize {
        self.mains + self.index(context, peer)
    }

    /// Records.
    pub fn len(&self) -> usize {
        self.records
    }

    /// Whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// A record; panics where there is none. One thread at a time writes it.
    #[inline(always)]
    pub fn record(&self, index: usize) -> &Record {
        assert!(index < self.records);
        // SAFETY: below the number of records, for which `create` made room behind the header.
        unsafe { &*self.mapping.ptr().add(size_of::<Header>()).cast::<Record>().add(index) }
    }

    /// Somebody has looked after it.
    pub fn set_published(&self, now: u64) {
        self.header().published.store(now, Ordering::Relaxed);
    }
}
