//! Atomic operations: a word of a peer's memory is read, changed and written as one, and what it held comes back.
//!
//! The operations are those of mlx5 devices (work queue entries 0x12, 0x14, 0x15). The masked compare-and-swap compares
//! some of a word's bits and replaces some, maybe others; the masked fetch-and-add adds to each of several fields of a
//! word, no carry crossing from one into the next. Both are described, with pseudo-code, as extended atomic operations
//! in NVIDIA's MLNX_OFED documentation, chapter "Advanced Transport", and on the linux-rdma mailing list, where the
//! kernel's `IB_WR_MASKED_ATOMIC_*` were proposed. How Linux lays the operands out is in `set_atomic_seg` and
//! `set_masked_atomic_seg` of its mlx4 driver: a masked addition has its boundary in the field `compare`.

use crate::memory::key::Key;

/// Bytes of the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 4 bytes.
    Four,
    /// 8 bytes.
    Eight,
}

impl Width {
    /// That of a word of so many bytes; `None`: no operation has one.
    pub const fn of(bytes: u32) -> Option<Self> {
        match bytes {
            4 => Some(Self::Four),
            8 => Some(Self::Eight),
            _ => None,
        }
    }

    /// Its bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// A one for each of its bits.
    #[inline]
    pub const fn mask(self) -> u64 {
        match self {
            Self::Four => u32::MAX as u64,
            Self::Eight => u64::MAX,
        }
    }
}

/// What becomes of the word. Of operands for a word of 4 bytes the low half counts, and the high half is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds to each field of the word by itself.
    FetchAdd {
        /// What is added: the fields' operands, as the fields lie in the word.
        add: u64,
        /// A one at the highest bit of each field: no carry leaves it. 0: the word is one field.
        boundary: u64,
    },
    /// Replaces bits if others are as expected.
    CompareSwap {
        /// What is expected.
        compare: u64,
        /// Which bits are compared; 0: it always matches.
        compare_mask: u64,
        /// What is written.
        swap: u64,
        /// Which bits are written.
        swap_mask: u64,
    },
}

impl Change {
    /// A plain fetch-and-add.
    pub const fn add(add: u64) -> Self {
        Self::FetchAdd { add, boundary: 0 }
    }

    /// A plain compare-and-swap of all bits of a word.
    pub const fn compare_swap(compare: u64, swap: u64, width: Width) -> Self {
        Self::CompareSwap { compare, compare_mask: width.mask(), swap, swap_mask: width.mask() }
    }

    /// What a word of `width` that holds `old` holds afterwards; `None`: the comparison failed, it stays as it is.
    #[inline]
    pub fn of(&self, old: u64, width: Width) -> Option<u64> {
        match *self {
            Self::FetchAdd { add, boundary } => Some(add_fields(old, add, boundary) & width.mask()),
            Self::CompareSwap { compare, compare_mask, swap, swap_mask } => {
                ((compare ^ old) & compare_mask == 0).then_some((old & !swap_mask | swap & swap_mask) & width.mask())
            }
        }
    }

    /// Its operands, in the order in which they travel.
    pub fn operands(&self) -> [u64; 4] {
        match *self {
            Self::FetchAdd { add, boundary } => [add, boundary, 0, 0],
            Self::CompareSwap { compare, compare_mask, swap, swap_mask } => [compare, compare_mask, swap, swap_mask],
        }
    }

    /// What travels beside them.
    pub fn code(&self) -> u8 {
        match self {
            Self::FetchAdd { .. } => 1,
            Self::CompareSwap { .. } => 2,
        }
    }

    /// From both, which may come from a peer; `None`: they are no operation on a word of `width`.
    pub fn parse(code: u8, operands: [u64; 4], width: Width) -> Option<Self> {
        let [a, b, c, d] = operands;
        let change = match code {
            1 if c | d == 0 => Self::FetchAdd { add: a, boundary: b },
            2 => Self::CompareSwap { compare: a, compare_mask: b, swap: c, swap_mask: d },
            _ => return None,
        };
        change.fits(width).then_some(change)
    }

    /// Whether all operands are those of a word of `width`.
    pub fn fits(&self, width: Width) -> bool {
        self.operands().iter().all(|&operand| operand & !width.mask() == 0)
    }
}

/// The sum of two words, field by field; `boundary` has a one at each field's highest bit.
fn add_fields(a: u64, b: u64, boundary: u64) -> u64 {
    // Without the highest bits no carry leaves a field; those are added to without one.
    ((a & !boundary).wrapping_add(b & !boundary)) ^ ((a ^ b) & boundary)
}

/// Where the fetched value goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Address in this process, a multiple of the word's width.
    pub local: u64,
    /// This rank's key for the region.
    pub lkey: u32,
}

/// An atomic operation on a word of a peer's memory.
///
/// Ordering: as a strong signal, it takes effect only after every earlier put, value and signal of its context to the
/// peer is visible there, and later strong signals and atomic operations of that context take effect after it. The
/// fetched value is in place before the operation is locally complete; in GPU memory over verbs it is as what a get
/// brought. As with signals the order holds for words in windows that are registered as strict.
///
/// Atomicity: with respect to signals and atomic operations of all ranks; [`Atomics`] says with respect to whom else. A
/// word is used with one width at a time: what becomes of an operation on 8 bytes beside one on 4 of the same bytes is
/// not defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// What becomes of the word.
    pub change: Change,
    /// Bytes of the word.
    pub width: Width,
    /// Address of the word in the peer's address space, a multiple of its width.
    pub remote: u64,
    /// The peer's key for the region of the word.
    pub rkey: u32,
    /// Where what it held before goes; `None`: nowhere.
    pub fetched: Option<Fetched>,
    /// A hint: more operations follow at once.
    pub more: bool,
}

impl Atomic {
    /// Whether any end is GPU memory of the soft fabric.
    #[inline]
    pub fn is_on_gpu(&self) -> bool {
        Key(self.rkey | self.fetched.map_or(0, |f| f.lkey)).is_on_gpu()
    }
}

/// With respect to whom atomic operations are atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomicity {
    /// There are no atomic operations.
    None,
    /// All signals and atomic operations of this communicator's ranks. What the owner of the memory changes itself, by
    /// its processors or its GPU's kernels, may be lost. libibverbs calls this `IBV_ATOMIC_HCA`.
    Fabric,
    /// These, and atomic instructions of the owner's processors.
    Processors,
}

/// Which atomic operations a context carries out: all of them, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomics {
    /// On words in host memory.
    pub host: Atomicity,
    /// On words in GPU memory.
    pub gpu: Atomicity,
    /// The 8 bytes around a word of 4 have to lie in its window.
    pub by_words: bool,
}

impl Atomics {
    /// None.
    pub const NONE: Self = Self { host: Atomicity::None, gpu: Atomicity::None, by_words: false };

    /// Whether there are any.
    pub fn any(&self) -> bool {
        *self != Self::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The addition as its description has it: bit by bit.
    fn add_bits(a: u64, b: u64, boundary: u64) -> u64 {
        let (mut sum, mut carry) = (0, 0);
        for bit in 0..64 {
            let value = carry + (a >> bit & 1) + (b >> bit & 1);
            sum |= (value & 1) << bit;
            carry = if boundary >> bit & 1 == 1 { 0 } else { value >> 1 };
        }
        sum
    }

    #[test]
    fn fields_do_not_carry_into_each_other() {
        let fetch_add = |add, boundary| Change::FetchAdd { add, boundary };
        assert_eq!(fetch_add(0x01, 0x80).of(0xff, Width::Eight), Some(0x00));
        assert_eq!(fetch_add(0x01, 0).of(0xff, Width::Eight), Some(0x100));
        assert_eq!(fetch_add(0x0101, 0x8080).of(0x7fff, Width::Eight), Some(0x8000));
        assert_eq!(Change::add(1).of(u64::from(u32::MAX), Width::Four), Some(0));
        assert_eq!(Change::add(1).of(u64::MAX, Width::Eight), Some(0));
    }

    #[test]
    fn masks_say_what_is_compared_and_what_is_replaced() {
        let swap = Change::CompareSwap { compare: 0x12, compare_mask: 0xff, swap: 0xabcd, swap_mask: 0xff00 };
        assert_eq!(swap.of(0x77_5512, Width::Eight), Some(0x77_ab12));
        assert_eq!(swap.of(0x5513, Width::Eight), None);
        let always = Change::CompareSwap { compare: 9, compare_mask: 0, swap: 1, swap_mask: 1 };
        assert_eq!(always.of(6, Width::Four), Some(7));
        assert_eq!(Change::compare_swap(1, 2, Width::Eight).of(1, Width::Eight), Some(2));
    }

    proptest! {
        #[test]
        fn fields_are_added_as_bit_by_bit(a: u64, b: u64, boundary: u64) {
            prop_assert_eq!(add_fields(a, b, boundary), add_bits(a, b, boundary));
        }

        #[test]
        fn changes_come_back(code in 0u8..4, operands: [u64; 4], wide: bool, low: bool) {
            let width = if wide { Width::Eight } else { Width::Four };
            let operands = operands.map(|x| if low { x & width.mask() } else { x });
            let parsed = Change::parse(code, operands, width);
            if let Some(change) = parsed {
                prop_assert_eq!((change.code(), change.operands()), (code, operands));
                prop_assert!(change.fits(width));
            } else {
                prop_assert!(!matches!(code, 1 | 2) || code == 1 && operands[2] | operands[3] != 0 || !low);
            }
        }
    }
}
