//! Where everything of a set lies in its one allocation, and writing it there.

use super::emit::{emit_keys, Emit};
use super::layout::Layout;
use super::queue_pair::PeerQueues;
use super::shape::SetShape;
use crate::error::{Error, Result};
use nccl_plugin_api::gdaki::context_v1::ContextV1;
use nccl_plugin_api::gdaki::context_v2::ContextV2;
use nccl_plugin_api::gdaki::queue_pair_v2::{CompletionQueueV2, QueuePairV2};
use nccl_plugin_api::gdaki::table::BufferTable;
use std::mem::offset_of;

/// Where arrays begin: a border of a cache line of the GPU, so that what one context's threads write is not in a line
/// of another's.
pub const BORDER: usize = 128;

/// Counters or signals of all contexts: one region, in which the contexts' words are one behind the other. The same
/// keys belong to all contexts.
#[derive(Clone, Copy, Debug)]
pub struct Words<'a> {
    /// This rank's region, for device code; on a border of 8 bytes.
    pub buffer: u64,
    /// Words of each context; 0: there are none, and the rest is not looked at.
    pub each: u32,
    /// By rank: the key to that rank's region, as a number.
    pub rkeys: &'a [u32],
    /// The key to this rank's own, as a number.
    pub lkey: u32,
}

/// What a set is made of.
#[derive(Clone, Copy, Debug)]
pub struct Description<'a> {
    /// Context by context, in each the peers as [`SetShape::peers`] gives them.
    pub queues: &'a [PeerQueues],
    /// Counters.
    pub counters: Words<'a>,
    /// Signals.
    pub signals: Words<'a>,
    /// The key to 8 bytes of this rank, as a number: at address 0 of it arrives what nobody asked for.
    pub sink_lkey: u32,
    /// Whether a flush behind gets has to post a dump before their data is visible to the GPU. Kernels compiled before
    /// NCCL 2.32 post it whatever this says.
    pub dump_after_gets: bool,
}

/// Where everything lies, as bytes from the beginning. The array of contexts lies at 0: its address is the devHandle's
/// `handle`.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    layout: Layout,
    shape: SetShape,
    /// Queue pairs of a context, and how far the next context's are.
    queues: usize,
    queues_each: usize,
    /// Companions, likewise; `None`: there are no counters.
    companions: Option<usize>,
    /// Two arrays a context by peer, where device code notes its gets; `None`: it does not.
    gets: Option<usize>,
    gets_each: usize,
    /// Keys of counters and signals, by rank.
    keys: [usize; 2],
    bytes: usize,
}

impl Image {
    /// Where everything of such a set is to lie.
    pub fn new(layout: Layout, shape: SetShape, has_counters: bool) -> Result<Self> {
        shape.check()?;
        let too_large = || {
            let SetShape { ranks, contexts, .. } = shape;
            Error::argument(format!("{contexts} contexts of {ranks} ranks are more than memory can be addressed for"))
        };
        let (contexts, ranks) = (shape.contexts as usize, shape.ranks as usize);
        let mut bytes = 0_usize;
        // The place of so many arrays of this length, and bytes from one to the next.
        let mut arrays = |count: usize, length: usize, each: usize| {
            let at = bytes;
            let each = each.checked_mul(length).and_then(|bytes| bytes.checked_next_multiple_of(BORDER));
            let each = each.ok_or_else(too_large)?;
            bytes = each.checked_mul(count).and_then(|all| at.checked_add(all)).ok_or_else(too_large)?;
            Ok::<_, Error>((at, each))
        };
        arrays(1, contexts, layout.context_bytes())?;
        let (queues, queues_each) = arrays(contexts, ranks, layout.queue_pair_bytes())?;
        let companions = match has_counters {
            true => Some(arrays(contexts, ranks, layout.queue_pair_bytes())?.0),
            false => None,
        };
        let (gets, gets_each) = arrays(if layout.notes_gets() { 2 * contexts } else { 0 }, ranks, 8)?;
        let keys = [arrays(1, ranks, 4)?.0, arrays(1, ranks, 4)?.0];
        let gets = layout.notes_gets().then_some(gets);
        Ok(Self { layout, shape, queues, queues_each, companions, gets, gets_each, keys, bytes })
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where device code counts the completions of a queue pair, 8 bytes, from the beginning; of a layout in which
    /// others may count for it.
    pub fn count_at(&self, context: usize, peer: u32, is_companion: bool) -> Option<usize> {
        let first = if is_companion { self.companions? } else { self.queues };
        let pair = first + context * self.queues_each + peer as usize * self.layout.queue_pair_bytes();
        let count = offset_of!(QueuePairV2, cq_sq) + offset_of!(CompletionQueueV2, cqe_ci);
        (self.layout == Layout::V3).then_some(pair + count)
    }

    /// Writes all of it: `out` is [`Self::bytes`] long and is seen by device code at `address`, a multiple of
    /// [`BORDER`], or is copied there before device code looks. Nothing is written where something is refused.
    pub fn write(&self, of: &Description, out: &mut [u8], address: u64) -> Result<()> {
        let end = u64::try_from(self.bytes).ok().and_then(|bytes| address.checked_add(bytes));
        if out.len() != self.bytes || address == 0 || address % BORDER as u64 != 0 || end.is_none() {
            let (len, bytes) = (out.len(), self.bytes);
            return Err(Error::internal(format!("a set of contexts of {bytes} bytes in {len} at {address:#x}")));
        }
        self.check_queues(of.queues)?;
        let tables = [("counters", &of.counters), ("signals", &of.signals)];
        for (name, words) in tables {
            self.check_words(name, words)?;
        }
        if (of.counters.each > 0) != self.companions.is_some() {
            return Err(Error::internal("companions are there without counters, or counters without companions"));
        }
        out.fill(0);
        for (at, (_, words)) in self.keys.into_iter().zip(tables).filter(|(_, (_, words))| words.each > 0) {
            emit_keys(words.rkeys, out, at);
        }
        let peers: Vec<u32> = self.shape.peers().collect();
        for (context, queues) in of.queues.chunks_exact(peers.len()).enumerate() {
            for (peer, queues) in peers.iter().zip(queues) {
                self.write_queues(queues, context, *peer as usize, out);
            }
            self.write_context(of, context, out, address);
        }
        Ok(())
    }

    fn check_queues(&self, queues: &[PeerQueues]) -> Result<()> {
        let peers: Vec<u32> = self.shape.peers().collect();
        let (contexts, given) = (self.shape.contexts, queues.len());
        if given as u64 != u64::from(contexts) * peers.len() as u64 {
            let n = peers.len();
            return Err(Error::internal(format!("{given} queue pairs for {contexts} contexts of {n} peers")));
        }
        for (i, queues) in queues.iter().enumerate() {
            let of = || format!("context {} to rank {}", i / peers.len(), peers[i % peers.len()]);
            queues.main.check(self.layout, of)?;
            match (&queues.companion, self.companions) {
                (Some(companion), Some(_)) => companion.check(self.layout, || format!("{}, companion", of()))?,
                (None, None) => {}
                (None, Some(_)) => return Err(Error::internal(format!("{}: no companion, with counters", of()))),
                (Some(_), None) => return Err(Error::internal(format!("{}: a companion, without counters", of()))),
            }
        }
        Ok(())
    }

    fn check_words(&self, name: &str, words: &Words) -> Result<()> {
        let Words { buffer, each, rkeys, .. } = *words;
        let (ranks, contexts) = (self.shape.ranks as usize, self.shape.contexts);
        if each == 0 {
            return Ok(());
        }
        // Device code numbers them in 32 bits.
        let Some(all) = each.checked_mul(contexts) else {
            return Err(Error::argument(format!("{each} {name} in each of {contexts} contexts: 2³² are too many")));
        };
        let end = buffer.checked_add(8 * u64::from(all));
        if buffer == 0 || buffer % 8 != 0 || end.is_none() || rkeys.len() != ranks {
            let keys = rkeys.len();
            return Err(Error::internal(format!("{name} at {buffer:#x} with {keys} keys of {ranks} ranks")));
        }
        Ok(())
    }

    fn write_queues(&self, of: &PeerQueues, context: usize, peer: usize, out: &mut [u8]) {
        let within = context * self.queues_each + peer * self.layout.queue_pair_bytes();
        let companion = self.companions.zip(of.companion.as_ref());
        for (first, queue_pair) in [(self.queues, &of.main)].into_iter().chain(companion) {
            match self.layout {
                Layout::V1 => queue_pair.v1().emit(out, first + within),
                Layout::V2 | Layout::V3 => queue_pair.v2().emit(out, first + within),
            }
        }
    }

    fn write_context(&self, of: &Description, context: usize, out: &mut [u8], address: u64) {
        let at = |offset: usize| address + offset as u64;
        let table = |words: &Words, keys: usize| match words.each {
            0 => BufferTable::default(),
            each => {
                let offset = each * context as u32;
                let buffer = words.buffer + 8 * u64::from(offset);
                BufferTable { buffer, rkeys: at(keys), lkey: words.lkey.to_be(), offset }
            }
        };
        let gdqp = at(self.queues + context * self.queues_each);
        let companion_gdqp = self.companions.map_or(0, |first| at(first + context * self.queues_each));
        let counters_table = table(&of.counters, self.keys[0]);
        let signals_table = table(&of.signals, self.keys[1]);
        let sink_buffer_lkey = of.sink_lkey.to_be();
        let place = context * self.layout.context_bytes();
        match self.gets {
            None => {
                ContextV1 { gdqp, companion_gdqp, counters_table, signals_table, sink_buffer_lkey }.emit(out, place)
            }
            Some(gets) => ContextV2 {
                gdqp,
                companion_gdqp,
                counters_table,
                signals_table,
                sink_buffer_lkey,
                use_mcst: of.dump_after_gets,
                last_issued_get: at(gets + 2 * context * self.gets_each),
                last_visible_get: at(gets + (2 * context + 1) * self.gets_each),
            }
            .emit(out, place),
        }
    }
}
