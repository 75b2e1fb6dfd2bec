//! The descriptors that proxy device code writes into its queues: how their words are laid out, for whoever writes them
//! (emulated device code) and whoever reads them (an engine that owns such queues).
//!
//! Bit 0 of every 64-bit word is set once the word is valid; its reader clears the word before it returns the slot.
//! Only the first eight words carry anything: the 128-byte form leaves the others empty but for bit 0. Source:
//! `gin_proxy_device_host_common.h` of NCCL 2.29.7, 2.30.3, 2.30.7.

/// Words that carry something, in either form.
pub const WORDS: usize = 8;

/// Operation: data from a window, or a value with [`OP_INLINE`].
pub const OP_PUT: u16 = 1;
/// With [`OP_PUT`]: the data is a value in the descriptor.
pub const OP_INLINE: u16 = 2;
/// With [`OP_PUT`]: a counter goes up by one when the source may be reused.
pub const OP_COUNTER: u16 = 4;
/// Adds one to a signal.
pub const OP_SIGNAL_INC: u16 = 8;
/// Adds the descriptor's value to a signal.
pub const OP_SIGNAL_ADD: u16 = 16;
/// The signal is named by window and offset; there is no data.
pub const OP_VA_SIGNAL: u16 = 32;
/// Reads from a peer. 128-byte form only.
pub const OP_GET: u16 = 64;
/// Makes what earlier gets brought visible. 128-byte form only.
pub const OP_FLUSH: u16 = 128;

/// The form of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// 64 bytes, device code up to NCCL 2.29.7: the operation is in the header.
    Bytes64,
    /// 128 bytes, device code from NCCL 2.30 on: the header has a version, word 7 the operation.
    Bytes128,
}

impl Form {
    /// Bytes of a slot.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }

    /// The newest version that the header may name: 1 in NCCL 2.30.3, 2 from 2.30.7 on; the 64-byte form has none.
    pub const fn newest_version(self) -> u8 {
        match self {
            Self::Bytes64 => 0,
            Self::Bytes128 => 2,
        }
    }
}

impl Form {
    /// Whether a header may name this version.
    #[inline(always)]
    pub const fn has_version(self, version: u8) -> bool {
        match self {
            Self::Bytes64 => true,
            Self::Bytes128 => version != 0 && version <= self.newest_version(),
        }
    }
}

const VALID: u64 = 1;

/// `bits` bits of `word` from `from` on.
#[inline(always)]
const fn field(word: u64, from: u32, bits: u32) -> u64 {
    (word >> from) & ((1 << bits) - 1)
}

/// The valid words of a descriptor, read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// As they stand in the slot, bit 0 included.
    pub words: [u64; WORDS],
    /// How they are to be read.
    pub form: Form,
}

impl Descriptor {
    /// Version of the 128-byte form; 0 in the 64-byte form.
    #[inline(always)]
    pub const fn version(&self) -> u8 {
        match self.form {
            Form::Bytes64 => 0,
            Form::Bytes128 => field(self.words[0], 1, 4) as u8,
        }
    }

    /// `OP_*` bits.
    #[inline(always)]
    pub const fn op(&self) -> u16 {
        match self.form {
            Form::Bytes64 => field(self.words[0], 1, 6) as u16,
            Form::Bytes128 => field(self.words[7], 8, 16) as u16,
        }
    }

    /// Bytes of data.
    #[inline(always)]
    pub const fn size(&self) -> u64 {
        self.words[0] >> 7
    }

    /// Offset of the source of a put, of a get's remote end, or of a signal named by window.
    #[inline(always)]
    pub const fn first_offset(&self) -> u64 {
        self.words[1] >> 1
    }

    /// The window of [`Descriptor::first_offset`].
    #[inline(always)]
    pub const fn first_handle(&self) -> u64 {
        self.words[2] >> 1
    }

    /// Offset of the destination of a put, or of a get's local end.
    #[inline(always)]
    pub const fn second_offset(&self) -> u64 {
        self.words[3] >> 1
    }

    /// The window of [`Descriptor::second_offset`].
    #[inline(always)]
    pub const fn second_handle(&self) -> u64 {
        self.words[4] >> 1
    }

    /// The bytes of an inline value, little-endian; those past its size mean nothing.
    #[inline(always)]
    pub const fn inline_value(&self) -> u64 {
        field(self.words[1], 8, 48) | field(self.words[2], 8, 16) << 48
    }

    /// The counter's number.
    #[inline(always)]
    pub const fn counter(&self) -> u32 {
        field(self.words[5], 1, 23) as u32
    }

    /// The signal's number.
    #[inline(always)]
    pub const fn signal(&self) -> u32 {
        field(self.words[5], 24, 24) as u32
    }

    /// What to add to a signal, with [`OP_SIGNAL_ADD`].
    #[inline(always)]
    pub const fn signal_value(&self) -> u64 {
        self.words[5] >> 48 | field(self.words[6], 8, 48) << 16
    }

    /// Whether the signal is ordered behind all that came before. Before version 2 every signal is.
    #[inline(always)]
    pub const fn is_strong(&self) -> bool {
        self.version() < 2 || field(self.words[6], 1, 1) != 0
    }

    /// An operation without data, window or signal: [`OP_FLUSH`], or what the methods below make of it.
    pub const fn new(form: Form, version: u8, op: u16, size: u64) -> Self {
        let mut words = [VALID; WORDS];
        words[0] |= size << 7;
        match form {
            Form::Bytes64 => words[0] |= (op as u64 & 63) << 1,
            Form::Bytes128 => {
                words[0] |= (version as u64 & 15) << 1;
                words[7] |= (op as u64) << 8;
            }
        }
        Self { words, form }
    }

    /// With the source of a put, the remote end of a get, or the place of a signal.
    pub const fn first(mut self, offset: u64, handle: u64) -> Self {
        self.words[1] = VALID | offset << 1;
        self.words[2] = VALID | handle << 1;
        self
    }

    /// With the destination of a put, or the local end of a get.
    pub const fn second(mut self, offset: u64, handle: u64) -> Self {
        self.words[3] = VALID | offset << 1;
        self.words[4] = VALID | handle << 1;
        self
    }

    /// With an inline value in place of a source.
    pub const fn value(mut self, value: u64) -> Self {
        self.words[1] = VALID | (value & 0xffff_ffff_ffff) << 8;
        self.words[2] = VALID | (value >> 48) << 8;
        self
    }

    /// With a counter, which `op` asks for.
    pub const fn with_counter(mut self, counter: u32) -> Self {
        self.words[5] |= (counter as u64 & 0x7f_ffff) << 1;
        self
    }

    /// With a signal, which `op` asks for.
    pub const fn with_signal(mut self, signal: u32, value: u64, strong: bool) -> Self {
        self.words[5] |= (signal as u64 & 0xff_ffff) << 24 | value << 48;
        self.words[6] |= (value >> 16) << 8 | (strong as u64) << 1;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for form in [Form::Bytes64, Form::Bytes128] {
            let op = OP_PUT | OP_COUNTER | OP_SIGNAL_ADD;
            let d = Descriptor::new(form, 2, op, (1 << 57) - 1)
                .first(u64::MAX >> 1, 0x7fff_ffff_ffff_fffe)
                .second(3, 4)
                .with_counter(0x7f_fffe)
                .with_signal(0xff_fffe, 0x0123_4567_89ab_cdef, false);
            assert!(d.words.iter().all(|w| w & 1 == 1));
            assert_eq!((d.op(), d.size()), (op, (1 << 57) - 1));
            assert_eq!((d.first_offset(), d.first_handle()), (u64::MAX >> 1, 0x7fff_ffff_ffff_fffe));
            assert_eq!((d.second_offset(), d.second_handle()), (3, 4));
            assert_eq!((d.counter(), d.signal(), d.signal_value()), (0x7f_fffe, 0xff_fffe, 0x0123_4567_89ab_cdef));
            assert_eq!((d.version(), d.is_strong()), if form == Form::Bytes64 { (0, true) } else { (2, false) });
            let v = Descriptor::new(form, 1, OP_PUT | OP_INLINE, 8).value(0xfedc_ba98_7654_3210);
            assert_eq!((v.inline_value(), v.is_strong()), (0xfedc_ba98_7654_3210, true));
            assert!(Descriptor::new(form, 2, OP_SIGNAL_INC, 0).with_signal(1, 0, true).is_strong());
        }
    }
}
