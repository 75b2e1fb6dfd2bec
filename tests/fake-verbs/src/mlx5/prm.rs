//! Where the fields of an mlx5 device's commands lie. The provider of this library has its fields from Linux; these
//! come from two other places, so that one misreading cannot pass both. Facts only: names, offsets, widths.
//!
//! * [`Origin::Dpdk`]: DPDK, `drivers/common/mlx5/mlx5_prm.h`;
//! * [`Origin::Pyverbs`]: rdma-core, `tests/mlx5_prm_structs.py`, which tests build commands from;
//! * [`Origin::Both`]: both have it, at one place.
//!
//! A number of bits counts from the first byte's most significant bit; a field is big-endian.

pub mod capabilities;
pub mod commands;
pub mod contexts;

use std::collections::HashMap;
use std::sync::OnceLock;

/// Which file a field was read in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `mlx5_prm.h`.
    Dpdk,
    /// `mlx5_prm_structs.py`.
    Pyverbs,
    /// Both, which agree.
    Both,
}

impl Origin {
    /// Where to look it up.
    pub fn files(self) -> &'static str {
        match self {
            Self::Dpdk => "DPDK drivers/common/mlx5/mlx5_prm.h",
            Self::Pyverbs => "rdma-core tests/mlx5_prm_structs.py",
            Self::Both => "DPDK drivers/common/mlx5/mlx5_prm.h and rdma-core tests/mlx5_prm_structs.py",
        }
    }
}

/// A field: its name, first bit, width in bits, and origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field(pub &'static str, pub u32, pub u32, pub Origin);

/// A part of a layout: its name with a dot behind it (or nothing), its first bit, its fields.
pub type Part = (&'static str, u32, &'static [Field]);

/// What a command or its answer looks like.
#[derive(Debug)]
pub struct Layout {
    /// As in DPDK.
    pub name: &'static str,
    /// Bytes.
    pub bytes: usize,
    /// Its parts; fields of later ones are called `qpc.state`, `qpc.primary_address_path.sl`.
    pub parts: &'static [Part],
    known: OnceLock<Known>,
}

/// What is worked out of a layout once: tests make thousands of queues.
#[derive(Debug)]
struct Known {
    /// Ones where fields are.
    mask: Vec<u8>,
    places: HashMap<String, (u32, u32)>,
}

impl Layout {
    const fn new(name: &'static str, bytes: usize, parts: &'static [Part]) -> Self {
        Self { name, bytes, parts, known: OnceLock::new() }
    }

    /// All fields: name with the names of parts before it, first bit in the command, width, origin.
    pub fn fields(&self) -> impl Iterator<Item = (String, u32, u32, Origin)> + '_ {
        self.parts.iter().flat_map(|(prefix, base, fields)| {
            fields
                .iter()
                .map(move |Field(name, at, bits, origin)| (format!("{prefix}{name}"), base + at, *bits, *origin))
        })
    }

    fn known(&self) -> &Known {
        self.known.get_or_init(|| {
            let mut mask = vec![0; self.bytes];
            for (_, at, bits, _) in self.fields() {
                (at..at + bits).for_each(|bit| write(&mut mask, bit, 1, 1));
            }
            Known { mask, places: self.fields().map(|(name, at, bits, _)| (name, (at, bits))).collect() }
        })
    }

    /// First bit and width of a field. Panics on a name that is none: a fault in the fake.
    fn find(&self, name: &str) -> (u32, u32) {
        *self.known().places.get(name).unwrap_or_else(|| panic!("{} has no field {name}", self.name))
    }

    /// A field of at most 64 bits.
    pub fn get(&self, bytes: &[u8], name: &str) -> u64 {
        let (at, bits) = self.find(name);
        read(bytes, at, bits)
    }

    /// Sets a field of at most 64 bits; what has no room in it is an error in the fake or its test.
    pub fn set(&self, bytes: &mut [u8], name: &str, value: u64) {
        let (at, bits) = self.find(name);
        assert!(bits == 64 || value >> bits == 0, "{value:#x} has no room in {name}");
        write(bytes, at, bits, value);
    }

    /// The bytes of a field that is whole bytes.
    pub fn bytes_of<'a>(&self, bytes: &'a [u8], name: &str) -> &'a [u8] {
        let (at, bits) = self.find(name);
        &bytes[at as usize / 8..][..bits as usize / 8]
    }

    /// The first bit that is set and belongs to no field.
    pub fn reserved_bit(&self, bytes: &[u8]) -> Option<u32> {
        let known = &self.known().mask;
        let (at, wrong) = (0..).zip(bytes.iter().zip(known).map(|(b, k)| b & !k)).find(|(_, wrong)| *wrong != 0)?;
        Some(8 * at + wrong.leading_zeros())
    }
}

/// `bits` from bit `at` on, one by one: slow and plain.
pub fn read(bytes: &[u8], at: u32, bits: u32) -> u64 {
    (at..at + bits).fold(0, |value, bit| value << 1 | u64::from(bytes[bit as usize / 8] >> (7 - bit % 8) & 1))
}

/// The reverse.
pub fn write(bytes: &mut [u8], at: u32, bits: u32, value: u64) {
    for i in 0..bits {
        let (bit, on) = (at + i, value >> (bits - 1 - i) & 1);
        let byte = &mut bytes[bit as usize / 8];
        *byte = *byte & !(1 << (7 - bit % 8)) | (on as u8) << (7 - bit % 8);
    }
}

/// Opcodes: DPDK `mlx5_prm.h`, `MLX5_CMD_OP_*`; those of `destroy` are not sent by users.
pub mod opcode {
    pub const QUERY_HCA_CAP: u16 = 0x100;
    pub const CREATE_CQ: u16 = 0x400;
    pub const DESTROY_CQ: u16 = 0x401;
    pub const CREATE_QP: u16 = 0x500;
    pub const DESTROY_QP: u16 = 0x501;
    pub const RST2INIT: u16 = 0x502;
    pub const INIT2RTR: u16 = 0x503;
    pub const RTR2RTS: u16 = 0x504;
    pub const RTS2RTS: u16 = 0x505;
    pub const TO_ERR: u16 = 0x507;
    pub const TO_RST: u16 = 0x50a;
    pub const QUERY_QP: u16 = 0x50b;
}

/// What commands end with: Linux `include/linux/mlx5/device.h`, `MLX5_CMD_STAT_*`.
pub mod status {
    pub const OK: u8 = 0;
    pub const BAD_OP: u8 = 0x02;
    pub const BAD_PARAM: u8 = 0x03;
    pub const BAD_RES: u8 = 0x05;
    pub const RES_BUSY: u8 = 0x06;
    pub const LIM: u8 = 0x08;
    pub const NO_RES: u8 = 0x0f;
    pub const BAD_QP_STATE: u8 = 0x10;
    pub const BAD_SIZE: u8 = 0x40;
    pub const BAD_INP_LEN: u8 = 0x50;
    pub const BAD_OUTP_LEN: u8 = 0x51;
}
