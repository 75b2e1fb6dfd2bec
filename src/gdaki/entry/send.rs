//! A send entry: what device code asks the device to do.
//!
//! A control segment of 16 bytes, then up to three more segments. [`View::work`] is the one place where bytes become
//! meaning: whatever it returns has passed every check that needs no knowledge of the queue pair.

use super::{Syndrome, ENTRY_BYTES};
use crate::rma::atomic::Width;

/// Where things are, in bytes.
mod field {
    /// Modifier, index, opcode.
    pub const OPERATION: usize = 0;
    /// Queue pair number, and the number of segments in the low 6 bits.
    pub const QUEUE: usize = 4;
    pub const FLAGS: usize = 11;
    pub const REMOTE_ADDRESS: usize = 16;
    pub const REMOTE_KEY: usize = 24;
    /// Of a wait, in its second segment.
    pub const WAIT_INDEX: usize = 24;
    pub const WAIT_QUEUE: usize = 28;
    /// The third and the fourth segment.
    pub const THIRD: usize = 32;
    pub const FOURTH: usize = 48;
    /// The second, where there is no remote address.
    pub const SECOND: usize = 16;
}

/// Opcodes of the entries that there are.
pub mod opcode {
    /// Nothing.
    pub const NOP: u8 = 0x00;
    /// Write to the peer.
    pub const WRITE: u8 = 0x08;
    /// Wait for another queue's completion.
    pub const WAIT: u8 = 0x0f;
    /// Read from the peer.
    pub const READ: u8 = 0x10;
    /// Fetch-and-add of 8 bytes.
    pub const FETCH_ADD: u8 = 0x12;
    /// Masked compare-and-swap.
    pub const MASKED_SWAP: u8 = 0x14;
    /// Masked fetch-and-add.
    pub const MASKED_ADD: u8 = 0x15;
    /// Read local memory, and drop it.
    pub const DUMP: u8 = 0x23;
}

/// Modifiers of masked atomic operations: the width of the word.
const FOUR_BYTES: u8 = 0x08;
const EIGHT_BYTES: u8 = 0x09;
/// A data segment's length with this bit: the bytes stand in the entry.
const INLINE: u32 = 1 << 31;
/// Bytes that stand in an entry at most: two segments without their length.
pub const INLINE_MAX: usize = 28;
/// Bytes of a message at most: `log_max_msg` of the queue pairs is 30, and device code splits what is longer.
pub const MESSAGE_MAX: u64 = 1 << 30;

/// A place at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePlace {
    /// From the start of what the key names.
    pub address: u64,
    /// The peer's key, as this side's device knows it.
    pub key: u32,
}

/// A range here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRange {
    /// From the start of what the key names.
    pub address: u64,
    /// This rank's key.
    pub key: u32,
    /// Bytes.
    pub len: u32,
}

/// One range, or two that follow each other in the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRanges {
    /// The first.
    pub first: LocalRange,
    /// What follows it.
    pub second: Option<LocalRange>,
}

impl LocalRanges {
    /// Both.
    pub fn iter(&self) -> impl Iterator<Item = &LocalRange> {
        std::iter::once(&self.first).chain(&self.second)
    }
}

/// Bytes that stand in the entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inline {
    bytes: [u8; INLINE_MAX],
    len: u8,
}

impl Inline {
    /// Them.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// What an entry asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Nothing.
    Nop,
    /// Bytes from here to the peer.
    Write(RemotePlace, LocalRanges),
    /// Bytes of the entry to the peer.
    WriteInline(RemotePlace, Inline),
    /// Bytes from the peer to here.
    Read(RemotePlace, LocalRanges),
    /// A fetch-and-add of a word of the peer.
    Add {
        /// The word.
        remote: RemotePlace,
        /// Its bytes.
        width: Width,
        /// What is added.
        add: u64,
        /// A one at the highest bit of each field; 0: the word is one field.
        boundary: u64,
        /// Where what it held goes.
        fetched: LocalRange,
    },
    /// A masked compare-and-swap of a word of 4 bytes of the peer.
    Swap {
        /// The word.
        remote: RemotePlace,
        /// What is written.
        swap: u32,
        /// What is expected.
        compare: u32,
        /// Which bits are written.
        swap_mask: u32,
        /// Which bits are compared.
        compare_mask: u32,
        /// Where what it held goes.
        fetched: LocalRange,
    },
    /// Everything behind it waits until completion entry `index` of a completion queue is written.
    Wait {
        /// The completion queue's number.
        queue: u32,
        /// The entry's index; modulo 2^32.
        index: u32,
    },
    /// A read of local memory: what was written there before is visible when it completes.
    Dump(LocalRange),
}

/// A send entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendEntry {
    /// The low 16 bits of its index.
    pub index: u16,
    /// Its opcode.
    pub opcode: u8,
    /// The queue pair that it says it is for.
    pub queue: u32,
    /// Starts when the reads and atomic operations before it have completed.
    pub is_fenced: bool,
    /// A completion entry is written also if it succeeds.
    pub is_signalled: bool,
    /// What it asks for.
    pub work: Request,
}

/// What is wrong with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// No opcode that device code of NCCL writes, or a modifier that it does not have.
    Opcode(u8, u8),
    /// An opcode with so many segments.
    Segments(u8, u8),
    /// So many bytes in the entry, or more than there are segments for.
    Inline(u32),
    /// A message or an operand of so many bytes.
    Length(u64),
}

impl Malformed {
    /// What the device writes for it.
    pub fn syndrome(self) -> Syndrome {
        match self {
            Self::Opcode(..) | Self::Segments(..) => Syndrome::LocalOperation,
            Self::Inline(_) | Self::Length(_) => Syndrome::LocalLength,
        }
    }

    /// In words.
    pub fn sentence(self) -> String {
        match self {
            Self::Opcode(opcode, modifier) => format!("opcode {opcode:#04x} with modifier {modifier} is no operation"),
            Self::Segments(opcode, n) => format!("an entry of opcode {opcode:#04x} does not have {n} segments"),
            Self::Inline(n) => format!("{n} bytes inside an entry are more than its segments, or {INLINE_MAX}, hold"),
            Self::Length(n) => format!("{n} bytes are no length that this operation can have"),
        }
    }
}

/// The bytes of an entry.
pub struct View<'a>(pub &'a [u8; ENTRY_BYTES]);

impl View<'_> {
    /// The word at `at`, which is inside.
    #[inline(always)]
    fn u32(&self, at: usize) -> u32 {
        self.0[at..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
    }

    #[inline(always)]
    fn u64(&self, at: usize) -> u64 {
        self.0[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }

    /// The low 16 bits of its index.
    #[inline(always)]
    pub fn index(&self) -> u16 {
        (self.u32(field::OPERATION) >> 8) as u16
    }

    /// Its opcode.
    #[inline(always)]
    pub fn opcode(&self) -> u8 {
        self.u32(field::OPERATION) as u8
    }

    /// The queue pair that it says it is for.
    #[inline(always)]
    pub fn queue(&self) -> u32 {
        self.u32(field::QUEUE) >> 8
    }

    /// Whether it starts when the reads and atomic operations before it have completed.
    #[inline(always)]
    pub fn is_fenced(&self) -> bool {
        self.0[field::FLAGS] >> 5 != 0
    }

    /// Whether a completion entry is written also if it succeeds.
    #[inline(always)]
    pub fn is_signalled(&self) -> bool {
        self.0[field::FLAGS] & 0x08 != 0
    }

    #[inline(always)]
    fn modifier(&self) -> u8 {
        (self.u32(field::OPERATION) >> 24) as u8
    }

    /// Segments of 16 bytes that it says it has.
    #[inline(always)]
    pub fn segments(&self) -> u8 {
        self.0[field::QUEUE + 3] & 0x3f
    }

    #[inline(always)]
    fn remote(&self) -> RemotePlace {
        RemotePlace { address: self.u64(field::REMOTE_ADDRESS), key: self.u32(field::REMOTE_KEY) }
    }

    /// The data segment at `at`. A length of 0 stands for 2^31 bytes, as devices have it.
    #[inline(always)]
    fn local(&self, at: usize) -> Result<LocalRange, Malformed> {
        let (len, key) = (self.u32(at), self.u32(at + 4));
        match len {
            0 => Err(Malformed::Length(1 << 31)),
            _ if len & INLINE != 0 => Err(Malformed::Inline(len & !INLINE)),
            _ => Ok(LocalRange { address: self.u64(at + 8), key, len }),
        }
    }

    /// One or two data segments from the third on.
    #[inline(always)]
    fn gather(&self) -> Result<LocalRanges, Malformed> {
        let first = self.local(field::THIRD)?;
        let second = match self.segments() {
            4 => Some(self.local(field::FOURTH)?),
            _ => None,
        };
        let len = u64::from(first.len) + second.map_or(0, |s| u64::from(s.len));
        match len > MESSAGE_MAX {
            true => Err(Malformed::Length(len)),
            false => Ok(LocalRanges { first, second }),
        }
    }

    fn inline(&self) -> Result<Inline, Malformed> {
        let len = self.u32(field::THIRD) & !INLINE;
        let room = 16 * (usize::from(self.segments()) - 2) - 4;
        if len == 0 || len as usize > room {
            return Err(Malformed::Inline(len));
        }
        let (mut bytes, n) = ([0; INLINE_MAX], len as usize);
        bytes[..n].copy_from_slice(&self.0[field::THIRD + 4..field::THIRD + 4 + n]);
        Ok(Inline { bytes, len: len as u8 })
    }

    /// Where an atomic operation's word of `width` goes.
    #[inline(always)]
    fn fetched(&self, width: Width) -> Result<LocalRange, Malformed> {
        let local = self.local(field::FOURTH)?;
        match u64::from(local.len) == width.bytes() {
            true => Ok(local),
            false => Err(Malformed::Length(local.len.into())),
        }
    }

    /// The width of a masked operation's word.
    fn width(&self) -> Result<Width, Malformed> {
        match self.modifier() {
            FOUR_BYTES => Ok(Width::Four),
            EIGHT_BYTES => Ok(Width::Eight),
            other => Err(Malformed::Opcode(self.opcode(), other)),
        }
    }

    fn masked_add(&self) -> Result<Request, Malformed> {
        let (width, at) = (self.width()?, field::THIRD);
        let (add, boundary) = match width {
            Width::Four => (self.u32(at).into(), self.u32(at + 4).into()),
            Width::Eight => (self.u64(at), self.u64(at + 8)),
        };
        Ok(Request::Add { remote: self.remote(), width, add, boundary, fetched: self.fetched(width)? })
    }

    /// That of 8 bytes has five segments, which is more than one slot holds.
    fn masked_swap(&self) -> Result<Request, Malformed> {
        let (width, at) = (self.width()?, field::THIRD);
        if width == Width::Eight {
            return Err(Malformed::Segments(self.opcode(), self.segments()));
        }
        Ok(Request::Swap {
            remote: self.remote(),
            swap: self.u32(at),
            compare: self.u32(at + 4),
            swap_mask: self.u32(at + 8),
            compare_mask: self.u32(at + 12),
            fetched: self.fetched(width)?,
        })
    }

    /// Whether it has this opcode without a modifier, and so many segments.
    #[inline(always)]
    fn is_plain(&self, opcode: u8, segments: u8) -> bool {
        self.opcode() == opcode && self.modifier() == 0 && self.segments() == segments
    }

    /// A write from one range, if it is that: what [`View::work`] says of it, told from the rest by fewer looks.
    #[inline(always)]
    pub fn put(&self) -> Option<(RemotePlace, LocalRange)> {
        if !self.is_plain(opcode::WRITE, 3) {
            return None;
        }
        let from = self.local(field::THIRD).ok()?;
        (u64::from(from.len) <= MESSAGE_MAX).then(|| (self.remote(), from))
    }

    /// A write of bytes that stand in the entry, if it is that. As [`View::put`].
    #[inline(always)]
    pub fn value(&self) -> Option<(RemotePlace, Inline)> {
        if !(self.is_plain(opcode::WRITE, 3) || self.is_plain(opcode::WRITE, 4)) || self.0[field::THIRD] & 0x80 == 0 {
            return None;
        }
        self.inline().ok().map(|inline| (self.remote(), inline))
    }

    /// An addition to a word of 8 bytes, if it is one without a modifier: the word, what is added, and where what it
    /// held goes. As [`View::put`].
    #[inline(always)]
    pub fn addition(&self) -> Option<(RemotePlace, u64, LocalRange)> {
        if !self.is_plain(opcode::FETCH_ADD, 4) {
            return None;
        }
        let fetched = self.fetched(Width::Eight).ok()?;
        Some((self.remote(), self.u64(field::THIRD), fetched))
    }

    /// What it asks for, or what is wrong with it.
    pub fn work(&self) -> Result<Request, Malformed> {
        let (opcode, segments) = (self.opcode(), self.segments());
        let only = |right: bool| if right { Ok(()) } else { Err(Malformed::Segments(opcode, segments)) };
        if self.modifier() != 0 && !matches!(opcode, opcode::MASKED_ADD | opcode::MASKED_SWAP) {
            return Err(Malformed::Opcode(opcode, self.modifier()));
        }
        match opcode {
            opcode::WRITE => {
                only(segments == 3 || segments == 4)?;
                match self.0[field::THIRD] & 0x80 {
                    0 => Ok(Request::Write(self.remote(), self.gather()?)),
                    _ => Ok(Request::WriteInline(self.remote(), self.inline()?)),
                }
            }
            opcode::FETCH_ADD => {
                only(segments == 4)?;
                let (add, width) = (self.u64(field::THIRD), Width::Eight);
                Ok(Request::Add { remote: self.remote(), width, add, boundary: 0, fetched: self.fetched(width)? })
            }
            opcode::READ => {
                only(segments == 3 || segments == 4)?;
                Ok(Request::Read(self.remote(), self.gather()?))
            }
            opcode::NOP => only(segments == 1).map(|()| Request::Nop),
            opcode::WAIT => {
                only(segments == 2)?;
                // A number has 24 bits; those above are not looked at.
                let queue = self.u32(field::WAIT_QUEUE) & 0xff_ffff;
                Ok(Request::Wait { queue, index: self.u32(field::WAIT_INDEX) })
            }
            opcode::DUMP => {
                only(segments == 2)?;
                Ok(Request::Dump(self.local(field::SECOND)?))
            }
            opcode::MASKED_ADD => only(segments == 4).and_then(|()| self.masked_add()),
            opcode::MASKED_SWAP => only(segments == 4).and_then(|()| self.masked_swap()),
            _ => Err(Malformed::Opcode(opcode, 0)),
        }
    }
}

impl SendEntry {
    /// What the bytes mean, or why nothing.
    pub fn parse(bytes: &[u8; ENTRY_BYTES]) -> Result<Self, Malformed> {
        let view = View(bytes);
        Ok(Self {
            index: view.index(),
            opcode: view.opcode(),
            queue: view.queue(),
            is_fenced: view.is_fenced(),
            is_signalled: view.is_signalled(),
            work: view.work()?,
        })
    }
}
