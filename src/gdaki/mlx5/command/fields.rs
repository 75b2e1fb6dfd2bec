//! Fields of big-endian words, and the words that all commands begin with.

/// Bits of a layout: where they begin, and how many they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bits before it, from the upper bit of the first word.
    pub offset: usize,
    /// Bits of it: up to 32 inside a word, or 64, which begin at a word.
    pub width: usize,
}

/// A field of a table.
pub const fn field(offset: usize, width: usize) -> Field {
    assert!(width == 64 && offset % 32 == 0 || width >= 1 && offset % 32 + width <= 32);
    Field { offset, width }
}

impl Field {
    /// The same field of a structure that begins so many bits behind another one.
    pub const fn within(self, start: usize) -> Self {
        field(start + self.offset, self.width)
    }

    const fn mask(self) -> u64 {
        match self.width {
            64 => u64::MAX,
            width => (1 << width) - 1,
        }
    }
}

/// The words of a command or an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandWords<const BYTES: usize>([u8; BYTES]);

impl<const BYTES: usize> Default for CommandWords<BYTES> {
    fn default() -> Self {
        Self([0; BYTES])
    }
}

impl<const BYTES: usize> CommandWords<BYTES> {
    /// The bytes, for a call.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes, for an answer to go to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// Sets a field. A value that is too large for it loses its upper bits: whoever sets it has checked it.
    pub fn set(&mut self, field: Field, value: u64) -> &mut Self {
        debug_assert!(value <= field.mask(), "{field:?} = {value:#x}");
        let at = field.offset / 32 * 4;
        if field.width == 64 {
            self.0[at..at + 8].copy_from_slice(&value.to_be_bytes());
            return self;
        }
        let shift = 32 - field.width - field.offset % 32;
        let (mask, value) = ((field.mask() as u32) << shift, ((value & field.mask()) as u32) << shift);
        let word = self.word(at) & !mask | value;
        self.0[at..at + 4].copy_from_slice(&word.to_be_bytes());
        self
    }

    /// What a field says.
    pub fn get(&self, field: Field) -> u64 {
        let at = field.offset / 32 * 4;
        if field.width == 64 {
            return u64::from(self.word(at)) << 32 | u64::from(self.word(at + 4));
        }
        u64::from(self.word(at) >> (32 - field.width - field.offset % 32)) & field.mask()
    }

    /// Sets bytes that begin `offset` bits behind the beginning, a multiple of 8.
    pub fn set_bytes(&mut self, offset: usize, bytes: &[u8]) -> &mut Self {
        self.0[offset / 8..offset / 8 + bytes.len()].copy_from_slice(bytes);
        self
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }
}

/// What every command begins with (`cmd_in`).
pub const OPCODE: Field = field(0x00, 16);
/// Which variant of it.
pub const OP_MOD: Field = field(0x30, 16);
/// What every answer begins with (`cmd_out`): 0 is success.
pub const STATUS: Field = field(0x00, 8);
/// The firmware's reason.
pub const SYNDROME: Field = field(0x20, 32);

/// `MLX5_CMD_OP_QUERY_HCA_CAP`.
pub const QUERY_HCA_CAP: u64 = 0x100;
/// `MLX5_CMD_OP_CREATE_CQ`.
pub const CREATE_CQ: u64 = 0x400;
/// `MLX5_CMD_OP_CREATE_QP`.
pub const CREATE_QP: u64 = 0x500;
/// `MLX5_CMD_OP_RST2INIT_QP`.
pub const RST2INIT_QP: u64 = 0x502;
/// `MLX5_CMD_OP_INIT2RTR_QP`.
pub const INIT2RTR_QP: u64 = 0x503;
/// `MLX5_CMD_OP_RTR2RTS_QP`.
pub const RTR2RTS_QP: u64 = 0x504;
/// `MLX5_CMD_OP_RTS2RTS_QP`.
pub const RTS2RTS_QP: u64 = 0x505;
/// `MLX5_CMD_OP_2ERR_QP`.
pub const TO_ERR_QP: u64 = 0x507;
/// `MLX5_CMD_OP_2RST_QP`.
pub const TO_RST_QP: u64 = 0x50a;
/// `MLX5_CMD_OP_QUERY_QP`.
pub const QUERY_QP: u64 = 0x50b;

/// An answer that says nothing but how it went.
pub type Plain = CommandWords<16>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_bits_of_big_endian_words() {
        let mut m = CommandWords::<16>::default();
        m.set(field(0x43, 5), 0x1e).set(field(0x00, 16), 0x0502).set(field(0x7f, 1), 1);
        assert_eq!(m.bytes(), [5, 2, 0, 0, 0, 0, 0, 0, 0x1e, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!([m.get(field(0x43, 5)), m.get(field(0x40, 3)), m.get(field(0x7f, 1))], [0x1e, 0, 1]);
        // What stands beside a field stays.
        m.set(field(0x40, 3), 5).set(field(0x43, 5), 1);
        assert_eq!((m.bytes()[8], m.get(field(0x40, 3))), (0xa1, 5));
        m.set(field(0x40, 64), 0x0102_0304_0506_0708);
        assert_eq!(m.bytes()[8..], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(m.get(field(0x40, 64)), 0x0102_0304_0506_0708);
        assert_eq!(m.set_bytes(0x20, &[9, 8]).get(field(0x20, 32)), 0x0908_0000);
        assert_eq!(field(0x04, 4).within(0xc0), field(0xc4, 4));
    }
}
