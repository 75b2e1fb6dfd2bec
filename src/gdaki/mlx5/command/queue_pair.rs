//! CREATE_QP and QUERY_QP.

use super::completion_queue::InUmem;
use super::fields::{field, CommandWords, Field, CREATE_QP, OPCODE, QUERY_QP};

/// `create_qp_in`, without the list of pages: they are in a umem.
pub type Create = CommandWords<{ 0x880 / 8 }>;
/// `create_qp_out`.
pub type Created = CommandWords<16>;
/// `query_qp_out`, without the list of pages.
pub type State = CommandWords<{ 0x880 / 8 }>;

/// Fields of `qpc`.
pub mod qpc {
    use super::{field, Field};

    /// See [`super::QueuePairState`].
    pub const STATE: Field = field(0x00, 4);
    /// The port of a LAG; 0: the device chooses.
    pub const LAG_TX_PORT_AFFINITY: Field = field(0x04, 4);
    /// The transport: 0 is RC.
    pub const ST: Field = field(0x08, 8);
    /// 3: there is one path alone.
    pub const PM_STATE: Field = field(0x13, 2);
    /// The protection domain.
    pub const PD: Field = field(0x28, 24);
    /// 1 to 5: 256 to 4096 bytes a packet.
    pub const MTU: Field = field(0x40, 3);
    /// The largest message, as a power of two.
    pub const LOG_MSG_MAX: Field = field(0x43, 5);
    /// Slots of the send queue, as a power of two.
    pub const LOG_SQ_SIZE: Field = field(0x51, 4);
    /// Whose times its completions bear: 0, those of the free-running clock; 1, of the one that the device is set to.
    pub const TS_FORMAT: Field = field(0x58, 2);
    /// The doorbell page.
    pub const UAR_PAGE: Field = field(0x68, 24);
    /// 0: doorbells have a record; 1: none. Reserved in Linux and rdma-core; from NCCL's copy of DOCA GPUNetIO,
    /// `host/mlx5_ifc.h` (2.31).
    pub const SEND_DBR_MODE: Field = field(0x80, 2);
    /// The peer.
    pub const REMOTE_QPN: Field = field(0xa8, 24);
    /// Where the `ads` of the one path begins, in bits.
    pub const PRIMARY_ADDRESS_PATH: usize = 0xc0;
    /// Reads and atomics under way at most, as a power of two.
    pub const LOG_SRA_MAX: Field = field(0x388, 3);
    /// Tries after a timeout.
    pub const RETRY_COUNT: Field = field(0x38d, 3);
    /// Tries after the peer was not ready; 7: for ever.
    pub const RNR_RETRY: Field = field(0x390, 3);
    /// The first packet number that it sends.
    pub const NEXT_SEND_PSN: Field = field(0x3c8, 24);
    /// The completion queue of sends.
    pub const CQN_SND: Field = field(0x3e8, 24);
    /// Reads and atomics arriving at most, as a power of two.
    pub const LOG_RRA_MAX: Field = field(0x488, 3);
    /// 1: atomics as InfiniBand's specification has them.
    pub const ATOMIC_MODE: Field = field(0x48c, 4);
    /// Peers may read.
    pub const RRE: Field = field(0x490, 1);
    /// Peers may write.
    pub const RWE: Field = field(0x491, 1);
    /// Peers may ask for atomics.
    pub const RAE: Field = field(0x492, 1);
    /// Its entries may wait for completions of other queues.
    pub const CD_MASTER: Field = field(0x49f, 1);
    /// How long a peer is to wait that finds it not ready.
    pub const MIN_RNR_NAK: Field = field(0x4a3, 5);
    /// The first packet number that it expects.
    pub const NEXT_RCV_PSN: Field = field(0x4a8, 24);
    /// Where the doorbell record is in its umem.
    pub const DBR_ADDR: Field = field(0x500, 64);
    /// The receive queue: 3 is none.
    pub const RQ_TYPE: Field = field(0x565, 3);
    /// Entries that the device has taken. In answers.
    pub const HW_SQ_WQEBB_COUNTER: Field = field(0x5a0, 16);
    /// Entries that it was rung for. In answers.
    pub const SW_SQ_WQEBB_COUNTER: Field = field(0x5b0, 16);
    /// The doorbell record is in a umem.
    pub const DBR_UMEM_VALID: Field = field(0x683, 1);
    /// The umem of the doorbell record.
    pub const DBR_UMEM_ID: Field = field(0x720, 32);
}

/// Fields of `create_qp_in` beside `qpc`, and of answers.
pub mod fields {
    use super::{field, Field};

    /// Where `qpc` begins in every command and answer that has one, in bits.
    pub const QPC: usize = 0xc0;
    /// Where the slots begin in their umem.
    pub const WQ_UMEM_OFFSET: Field = field(0x800, 64);
    /// The umem of the slots.
    pub const WQ_UMEM_ID: Field = field(0x840, 32);
    /// They are in a umem.
    pub const WQ_UMEM_VALID: Field = field(0x860, 1);
    /// The queue pair's number: in the answer of CREATE_QP, and in every other command.
    pub const QPN: Field = field(0x48, 24);
}

use fields::{QPC, QPN};

/// How kernels ring a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellMode {
    /// By a register and a record in memory.
    Record,
    /// By a register alone.
    NoRecord,
}

/// A queue pair to be made: RC, in state RESET, without a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewQueuePair {
    /// The protection domain.
    pub domain: u32,
    /// Slots of the send queue, 64 bytes each, as a power of two.
    pub log_slots: u32,
    /// The slots.
    pub ring: InUmem,
    /// The doorbell records of both queues, 8 bytes, of which the second half is the send queue's.
    pub record: InUmem,
    /// The doorbell page.
    pub uar: u32,
    /// The completion queue of sends.
    pub completion_queue: u32,
    /// How it is rung.
    pub mode: DoorbellMode,
    /// Its entries may wait for completions of other queues.
    pub is_master: bool,
    /// Its completions bear times of the clock that the device is set to, not of the free-running one. Nobody reads
    /// them.
    pub any_clock: bool,
}

impl NewQueuePair {
    /// The command.
    pub fn create(&self) -> Create {
        use fields::{WQ_UMEM_ID, WQ_UMEM_OFFSET, WQ_UMEM_VALID};
        use qpc::*;
        let mut command = Create::default();
        command.set(OPCODE, CREATE_QP);
        command.set(WQ_UMEM_VALID, 1).set(WQ_UMEM_ID, self.ring.umem.into()).set(WQ_UMEM_OFFSET, self.ring.offset);
        for (field, value) in [
            (ST, 0),
            (PM_STATE, 3),
            (PD, self.domain.into()),
            (LOG_SQ_SIZE, self.log_slots.into()),
            (TS_FORMAT, u64::from(self.any_clock)),
            (UAR_PAGE, self.uar.into()),
            (SEND_DBR_MODE, u64::from(self.mode == DoorbellMode::NoRecord)),
            (CQN_SND, self.completion_queue.into()),
            (CD_MASTER, u64::from(self.is_master)),
            (RQ_TYPE, 3),
            (DBR_UMEM_VALID, 1),
            (DBR_UMEM_ID, self.record.umem.into()),
            (DBR_ADDR, self.record.offset),
        ] {
            command.set(field.within(QPC), value);
        }
        command
    }
}

/// The number of the queue pair that was made.
pub fn number(answer: &Created) -> u32 {
    answer.get(QPN) as u32
}

/// The state of a queue pair (`MLX5_QPC_STATE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePairState {
    /// Made.
    Reset,
    /// May be connected.
    Init,
    /// Receives.
    ReadyToReceive,
    /// Sends.
    ReadyToSend,
    /// A send failed, receiving goes on.
    SendError,
    /// Nothing goes on.
    Error,
    /// Another one, as the device numbers it.
    Other(u8),
}

impl std::fmt::Display for QueuePairState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reset => f.write_str("RESET"),
            Self::Init => f.write_str("INIT"),
            Self::ReadyToReceive => f.write_str("RTR"),
            Self::ReadyToSend => f.write_str("RTS"),
            Self::SendError => f.write_str("SQER"),
            Self::Error => f.write_str("ERR"),
            Self::Other(number) => write!(f, "{number}"),
        }
    }
}

/// The command that asks for a queue pair's state (`query_qp_in`).
pub fn query(number: u32) -> CommandWords<16> {
    *CommandWords::default().set(OPCODE, QUERY_QP).set(QPN, number.into())
}

/// What the answer says: the state, the entries that the device took, and those that it was rung for.
pub fn state(answer: &State) -> (QueuePairState, u16, u16) {
    let get = |field: Field| answer.get(field.within(QPC));
    let state = match get(qpc::STATE) {
        0 => QueuePairState::Reset,
        1 => QueuePairState::Init,
        2 => QueuePairState::ReadyToReceive,
        3 => QueuePairState::ReadyToSend,
        4 => QueuePairState::SendError,
        6 => QueuePairState::Error,
        other => QueuePairState::Other(other as u8),
    };
    (state, get(qpc::HW_SQ_WQEBB_COUNTER) as u16, get(qpc::SW_SQ_WQEBB_COUNTER) as u16)
}

#[cfg(test)]
pub(super) fn words(bytes: &[u8]) -> Vec<(usize, u32)> {
    let words = bytes.chunks_exact(4).map(|w| u32::from_be_bytes([w[0], w[1], w[2], w[3]]));
    words.enumerate().filter(|w| w.1 != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new() -> NewQueuePair {
        NewQueuePair {
            domain: 0x71,
            log_slots: 10,
            ring: InUmem { umem: 0x300, offset: 0x2000 },
            record: InUmem { umem: 0x301, offset: 0x88 },
            uar: 0x15,
            completion_queue: 0x42,
            mode: DoorbellMode::Record,
            is_master: false,
            any_clock: false,
        }
    }

    #[test]
    fn every_word_is_as_it_should_be() {
        let plain = vec![
            (0, 0x0500_0000),
            // qpc, from the seventh word on: path migration state; domain; slots; page; completion queue; record;
            // no receive queue; umem of the record.
            (6, 3 << 11),
            (7, 0x71),
            (8, 10 << 11),
            (9, 0x15),
            (37, 0x42),
            (47, 0x88),
            (49, 3 << 24),
            (58, 1 << 28),
            (63, 0x301),
            // Behind it the umem of the slots.
            (65, 0x2000),
            (66, 0x300),
            (67, 1 << 31),
        ];
        assert_eq!(words(new().create().bytes()), plain);
        let other = NewQueuePair { mode: DoorbellMode::NoRecord, is_master: true, any_clock: true, ..new() };
        let mut more = plain;
        more.extend([(10, 1 << 30), (42, 1)]);
        more[3].1 |= 1 << 6;
        more.sort_unstable();
        assert_eq!(words(other.create().bytes()), more);
    }

    #[test]
    fn answers_are_read() {
        let mut created = Created::default();
        created.bytes_mut()[8..12].copy_from_slice(&[0xff, 1, 2, 3]);
        assert_eq!(number(&created), 0x01_0203);
        assert_eq!(words(query(0x01_0203).bytes()), [(0, 0x050b_0000), (2, 0x01_0203)]);
        let mut answer = State::default();
        for (value, seen) in [(0, "RESET"), (3, "RTS"), (4, "SQER"), (6, "ERR"), (9, "9")] {
            answer.bytes_mut()[24] = value << 4;
            assert_eq!(state(&answer).0.to_string(), seen);
        }
        answer.bytes_mut()[24 + 0x5a0 / 8..][..4].copy_from_slice(&[0, 5, 0, 9]);
        assert_eq!(state(&answer), (QueuePairState::Other(9), 5, 9));
    }
}
