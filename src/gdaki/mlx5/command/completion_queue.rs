//! CREATE_CQ.

use super::fields::{field, CommandWords, Field, CREATE_CQ, OPCODE};

/// `create_cq_in`, without the list of pages: they are in a umem.
pub type Command = CommandWords<{ 0x880 / 8 }>;
/// `create_cq_out`.
pub type Answer = CommandWords<16>;

/// Fields of `create_cq_in`, and of `cqc` in it.
pub mod fields {
    use super::{field, Field};

    /// Where `cqc` begins, in bits.
    pub const CQC: usize = 0x80;

    const fn at(offset: usize, width: usize) -> Field {
        field(offset, width).within(CQC)
    }

    /// The doorbell record is in a umem.
    pub const DBR_UMEM_VALID: Field = at(0x06, 1);
    /// Bytes of an entry: 0 is 64.
    pub const CQE_SZ: Field = at(0x08, 3);
    /// All completions in one entry.
    pub const CC: Field = at(0x0b, 1);
    /// The queue may be overrun.
    pub const OI: Field = at(0x0e, 1);
    /// The umem of the doorbell record. Reserved in Linux; from a public `mlx5_ifc.h` of NVIDIA's whose `cqc` has an
    /// `apu_user_arg`, too. NCCL's copy of DOCA GPUNetIO sets a field of this name (`doca_verbs_cq.cpp`).
    pub const DBR_UMEM_ID: Field = at(0x20, 32);
    /// Entries, as a power of two.
    pub const LOG_CQ_SIZE: Field = at(0x63, 5);
    /// The doorbell page.
    pub const UAR_PAGE: Field = at(0x68, 24);
    /// The event queue.
    pub const C_EQN_OR_APU_ELEMENT: Field = at(0xa0, 32);
    /// Where the doorbell record is in its umem.
    pub const DBR_ADDR: Field = at(0x1c0, 64);
    /// Where the entries begin in their umem.
    pub const CQ_UMEM_OFFSET: Field = field(0x280, 64);
    /// The umem of the entries.
    pub const CQ_UMEM_ID: Field = field(0x2c0, 32);
    /// They are in a umem.
    pub const CQ_UMEM_VALID: Field = field(0x2e0, 1);
    /// In the answer: the queue's number.
    pub const CQN: Field = field(0x48, 24);
}

/// Memory of a queue: a umem, and where in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUmem {
    /// The umem's number.
    pub umem: u32,
    /// Bytes before it.
    pub offset: u64,
}

/// A completion queue to be made: a ring of 64-byte entries, which may be overrun and tells of nothing yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewCompletionQueue {
    /// Entries, as a power of two.
    pub log_entries: u32,
    /// The ring.
    pub ring: InUmem,
    /// The doorbell record, 8 bytes.
    pub record: InUmem,
    /// The doorbell page.
    pub uar: u32,
    /// The event queue.
    pub event_queue: u32,
}

impl NewCompletionQueue {
    /// The command.
    pub fn create(&self) -> Command {
        use fields::*;
        *CommandWords::default()
            .set(OPCODE, CREATE_CQ)
            .set(CQE_SZ, 0)
            .set(CC, 0)
            .set(OI, 1)
            .set(LOG_CQ_SIZE, self.log_entries.into())
            .set(UAR_PAGE, self.uar.into())
            .set(C_EQN_OR_APU_ELEMENT, self.event_queue.into())
            .set(DBR_UMEM_VALID, 1)
            .set(DBR_UMEM_ID, self.record.umem.into())
            .set(DBR_ADDR, self.record.offset)
            .set(CQ_UMEM_VALID, 1)
            .set(CQ_UMEM_ID, self.ring.umem.into())
            .set(CQ_UMEM_OFFSET, self.ring.offset)
    }
}

/// The number of the first arming. A queue takes the next one, modulo 4, behind each event, and no other (Linux,
/// `mlx5_create_cq`; rdma-core, `mlx5_cq_event`: `arm_sn`).
pub const FIRST_SEQUENCE: u32 = 0;
/// What the second word of a doorbell record is before anybody arms the queue: a number that is not the first (Linux,
/// `drivers/net/ethernet/mellanox/mlx5/core/cq.c`, `MLX5_CQ_INIT_CMD_SN`).
pub const ARMED_BY_NOBODY: u32 = 2 << 28;

/// What arms a queue, so that it tells of the next error (of solicited completions, of which sends have none, and of
/// errors): the second word of its doorbell record, and with the queue's number behind it what its doorbell is rung
/// with, both big-endian. Source: rdma-core, `providers/mlx5/cq.c`, `mlx5_arm_cq`.
pub fn arming(sequence: u32, consumed: u32) -> u32 {
    /// `MLX5_CQ_DB_REQ_NOT_SOL`.
    const SOLICITED_ALONE: u32 = 1 << 24;
    (sequence & 3) << 28 | SOLICITED_ALONE | consumed & 0xff_ffff
}

/// The number of the queue that was made.
pub fn number(answer: &Answer) -> u32 {
    answer.get(fields::CQN) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_as_it_should_be() {
        let ring = InUmem { umem: 0x301, offset: 0x1_0000_2000 };
        let record = InUmem { umem: 0x302, offset: 0x40 };
        let queue = NewCompletionQueue { log_entries: 7, ring, record, uar: 0x12_3456, event_queue: 9 };
        let command = queue.create();
        let words: Vec<(usize, u32)> = command
            .bytes()
            .chunks_exact(4)
            .map(|w| u32::from_be_bytes([w[0], w[1], w[2], w[3]]))
            .enumerate()
            .filter(|w| w.1 != 0)
            .collect();
        let expected = [
            (0, 0x0400_0000),
            // cqc, from the fifth word on: dbr_umem_valid, oi; dbr_umem_id; size and page; event queue; record.
            (4, 1 << 25 | 1 << 17),
            (5, 0x302),
            (7, 7 << 24 | 0x12_3456),
            (9, 9),
            (19, 0x40),
            (20, 1),
            (21, 0x2000),
            (22, 0x301),
            (23, 1 << 31),
        ];
        assert_eq!(words, expected);
        assert_eq!(command.bytes().len(), 272);
    }

    #[test]
    fn a_queue_is_armed_for_errors_with_a_number_that_goes_up() {
        let armed = [arming(FIRST_SEQUENCE, 0), arming(1, 0), arming(6, 0x1ff_ffff)];
        assert_eq!(armed, [0x0100_0000, 0x1100_0000, 0x21ff_ffff]);
        assert_ne!(ARMED_BY_NOBODY >> 28, FIRST_SEQUENCE);
    }

    #[test]
    fn answers_have_the_number() {
        let mut answer = Answer::default();
        answer.bytes_mut()[9..12].copy_from_slice(&[1, 2, 3]);
        assert_eq!(number(&answer), 0x01_0203);
    }
}
