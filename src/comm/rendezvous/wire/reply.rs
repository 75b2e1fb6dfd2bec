//! What rank 0 answers.

use super::{check_start, u32_at, Failure, Malformed, MAX_RANKS, MAX_REPLY_BODY, VERSION};
use std::ops::Range;

/// Where each thing is in the head, and its values.
mod field {
    pub const MAGIC: [u8; 4] = *b"oxyA";
    pub const KIND: usize = 6;
    pub const STEP: usize = 8;
    pub const SHARED_LEN: usize = 12;
    pub const OWN_LEN: usize = 16;
    pub const HEAD: usize = 20;
    pub const GATHERED: u8 = 0;
    pub const FAILED: u8 = 1;
    pub const AGAIN: u8 = 2;
}

/// The fixed part of a reply.
#[derive(Clone, Copy, Debug)]
pub struct ReplyHead {
    /// The step it answers.
    pub step: u32,
    kind: u8,
    shared_len: usize,
    own_len: usize,
}

impl ReplyHead {
    /// Reads the head. `None`: so far so good, but more bytes are needed.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        check_start(bytes, field::MAGIC)?;
        if bytes.len() < field::HEAD {
            return Ok(None);
        }
        let head = Self {
            step: u32_at(bytes, field::STEP),
            kind: bytes[field::KIND],
            shared_len: u32_at(bytes, field::SHARED_LEN) as usize,
            own_len: u32_at(bytes, field::OWN_LEN) as usize,
        };
        if head.shared_len as u64 + head.own_len as u64 > MAX_REPLY_BODY {
            return Err(Malformed("a reply that is too large"));
        }
        Ok(Some(head))
    }

    /// Bytes of the whole reply.
    pub fn total(&self) -> usize {
        field::HEAD + self.shared_len + self.own_len
    }
}

/// What rank 0 answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// All ranks came. Where in the message each rank's common bytes are, and its bytes for the receiver.
    Gathered {
        /// By rank.
        common: Vec<Range<usize>>,
        /// By sender.
        addressed: Vec<Range<usize>>,
    },
    /// The step failed for everybody.
    Failed(Failure),
    /// Rank 0 is still in an earlier step: come again.
    Again,
}

impl Reply {
    /// Reads a whole reply and nothing but it, for a job of `nranks`.
    pub fn parse(bytes: &[u8], nranks: u32) -> Result<Self, Malformed> {
        let head = ReplyHead::parse(bytes)?.ok_or(Malformed("a reply that ends in its head"))?;
        if bytes.len() != head.total() {
            return Err(Malformed("a reply of another length than it says"));
        }
        let own = field::HEAD + head.shared_len;
        match head.kind {
            field::GATHERED => Ok(Self::Gathered {
                common: parse_list(bytes, field::HEAD..own, nranks)?,
                addressed: parse_list(bytes, own..bytes.len(), nranks)?,
            }),
            field::FAILED => Failure::parse(&bytes[field::HEAD..own]).map(Self::Failed),
            field::AGAIN => Ok(Self::Again),
            _ => Err(Malformed("a reply of unknown kind")),
        }
    }
}

/// Stands where a list's common length would: the lengths differ and follow, one a rank.
const LENGTHS_DIFFER: u32 = u32::MAX;

/// Where the entries of a list of `count` are; the list fills `within`.
fn parse_list(bytes: &[u8], within: Range<usize>, count: u32) -> Result<Vec<Range<usize>>, Malformed> {
    const SHORT: Malformed = Malformed("a list that ends too early");
    let list = &bytes[within.clone()];
    if count > MAX_RANKS {
        return Err(Malformed("more ranks than can be"));
    }
    if list.len() < 4 {
        return Err(SHORT);
    }
    let uniform = u32_at(list, 0);
    let lengths = if uniform == LENGTHS_DIFFER { count as usize } else { 0 };
    if list.len() - 4 < lengths * 4 {
        return Err(SHORT);
    }
    let mut at = within.start + 4 + lengths * 4;
    let mut ranges = Vec::with_capacity(count as usize);
    for i in 0..count as usize {
        let len = if uniform == LENGTHS_DIFFER { u32_at(list, 4 + 4 * i) } else { uniform } as usize;
        if within.end - at < len {
            return Err(SHORT);
        }
        ranges.push(at..at + len);
        at += len;
    }
    if at != within.end {
        return Err(Malformed("a list that is too long"));
    }
    Ok(ranges)
}

/// A list as bytes. The caller keeps the sum below [`MAX_REPLY_BODY`].
pub fn encode_list<'a>(entries: impl Iterator<Item = &'a [u8]> + Clone) -> Vec<u8> {
    let mut lengths = entries.clone().map(<[u8]>::len);
    let first = lengths.next().unwrap_or(0);
    let mut bytes;
    if lengths.all(|len| len == first) {
        bytes = (first as u32).to_le_bytes().to_vec();
    } else {
        bytes = LENGTHS_DIFFER.to_le_bytes().to_vec();
        entries.clone().for_each(|entry| bytes.extend_from_slice(&(entry.len() as u32).to_le_bytes()));
    }
    entries.for_each(|entry| bytes.extend_from_slice(entry));
    bytes
}

fn reply_head(kind: u8, step: u32, shared: usize, own: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field::HEAD);
    bytes.extend_from_slice(&field::MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[kind, 0]);
    for number in [step, shared as u32, own as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    debug_assert_eq!(bytes.len(), field::HEAD);
    bytes
}

/// Head of a reply that carries `shared` and then `own` bytes of lists.
pub fn gathered_head(step: u32, shared: usize, own: usize) -> Vec<u8> {
    reply_head(field::GATHERED, step, shared, own)
}

/// A reply that says why the step failed.
pub fn encode_failed(step: u32, failure: &Failure) -> Vec<u8> {
    let body = failure.encode();
    let mut bytes = reply_head(field::FAILED, step, body.len(), 0);
    bytes.extend_from_slice(&body);
    bytes
}

/// A reply that says to come again.
pub fn encode_again(step: u32) -> Vec<u8> {
    reply_head(field::AGAIN, step, 0, 0)
}
