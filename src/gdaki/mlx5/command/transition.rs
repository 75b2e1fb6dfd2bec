//! The commands that take a queue pair from state to state.

use super::fields::field;
use super::fields::{
    CommandWords, Field, INIT2RTR_QP, OPCODE, RST2INIT_QP, RTR2RTS_QP, RTS2RTS_QP, TO_ERR_QP, TO_RST_QP,
};
use super::path::{self, PortPath};
use super::queue_pair::fields::{QPC, QPN};
use super::queue_pair::qpc::*;

/// `rst2init_qp_in`, `init2rtr_qp_in`, `rtr2rts_qp_in`, `rts2rts_qp_in`: one layout.
pub type Command = CommandWords<{ 0x880 / 8 }>;

/// Which fields count that need not be set.
pub const OPT_PARAM_MASK: Field = field(0x80, 32);
/// `MLX5_QP_OPTPAR_LAG_TX_AFF` of Linux, `include/linux/mlx5/qp.h`; `MLX5_QPC_OPT_MASK_RTS2RTS_LAG_TX_PORT_AFFINITY` of
/// rdma-core.
const LAG_COUNTS: u64 = 1 << 15;
/// `MLX5_QPC_ATOMIC_MODE_IB_SPEC`.
const ATOMICS_AS_SPECIFIED: u64 = 1;
/// The first packet number, of both ends.
const FIRST_PACKET: u64 = 0;
/// 0.64 ms, as NCCL has it.
const NOT_READY_WAIT: u64 = 12;
/// For ever; nobody sends what needs a receive.
const NOT_READY_TRIES: u64 = 7;

fn begin(opcode: u64, number: u32) -> Command {
    *Command::default().set(OPCODE, opcode).set(QPN, number.into())
}

fn set_all(command: &mut Command, values: &[(Field, u64)]) {
    for (field, value) in values {
        command.set(field.within(QPC), *value);
    }
}

/// RESET to INIT: peers may read, write, and ask for atomics once it is connected. `lag_port` 0: the device chooses.
pub fn init(number: u32, port: u8, pkey_index: u16, lag_port: u8) -> Command {
    let mut command = begin(RST2INIT_QP, number);
    let path = |field: Field| field.within(PRIMARY_ADDRESS_PATH);
    set_all(
        &mut command,
        &[
            (LAG_TX_PORT_AFFINITY, lag_port.into()),
            (PM_STATE, 3),
            (path(path::fields::VHCA_PORT_NUM), port.into()),
            (path(path::fields::PKEY_INDEX), pkey_index.into()),
            (ATOMIC_MODE, ATOMICS_AS_SPECIFIED),
            (RRE, 1),
            (RWE, 1),
            (RAE, 1),
        ],
    );
    command
}

/// The other end of a connection, and what both ends have in common.
#[derive(Clone, Copy, Debug)]
pub struct RcConnection {
    /// The peer's queue pair.
    pub peer: u32,
    /// 1 to 5: 256 to 4096 bytes a packet.
    pub mtu: u8,
    /// The largest message, as a power of two.
    pub log_message: u8,
    /// Reads and atomics arriving at most, at least 1.
    pub reads_in: u32,
    /// The way.
    pub path: PortPath,
    /// The port of a LAG; 0: the device chooses. `lag_counts`: it may be given here.
    pub lag_port: u8,
    /// See `lag_port`.
    pub lag_counts: bool,
    /// The port is given once more when the queue pair can send.
    pub lag_again: bool,
}

/// INIT to RTR.
pub fn ready_to_receive(number: u32, to: &RcConnection) -> Command {
    let mut command = begin(INIT2RTR_QP, number);
    to.path.write(&mut command, QPC + PRIMARY_ADDRESS_PATH);
    set_all(
        &mut command,
        &[
            (LAG_TX_PORT_AFFINITY, to.lag_port.into()),
            (MTU, to.mtu.into()),
            (LOG_MSG_MAX, to.log_message.into()),
            (REMOTE_QPN, to.peer.into()),
            (NEXT_RCV_PSN, FIRST_PACKET),
            (LOG_RRA_MAX, power(to.reads_in)),
            (ATOMIC_MODE, ATOMICS_AS_SPECIFIED),
            (RRE, 1),
            (RWE, 1),
            (RAE, 1),
            (MIN_RNR_NAK, NOT_READY_WAIT),
        ],
    );
    if to.lag_port > 0 && to.lag_counts {
        command.set(OPT_PARAM_MASK, LAG_COUNTS);
    }
    command
}

/// What a requester keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// 4.096 µs × 2^n for an acknowledgement, up to 31.
    pub timeout: u8,
    /// Tries after that, up to 7.
    pub retries: u8,
    /// Reads and atomics under way at most, at least 1.
    pub reads_out: u32,
}

/// RTR to RTS.
pub fn ready_to_send(number: u32, patience: &Patience) -> Command {
    let mut command = begin(RTR2RTS_QP, number);
    set_all(
        &mut command,
        &[
            (path::fields::ACK_TIMEOUT.within(PRIMARY_ADDRESS_PATH), patience.timeout.min(31).into()),
            (RETRY_COUNT, patience.retries.min(7).into()),
            (RNR_RETRY, NOT_READY_TRIES),
            (NEXT_SEND_PSN, FIRST_PACKET),
            (LOG_SRA_MAX, power(patience.reads_out)),
        ],
    );
    command
}

/// The port of a LAG, of a queue pair that can send (rdma-core, `modify_qp_lag_port`).
pub fn bound_to(number: u32, lag_port: u8) -> Command {
    let mut command = begin(RTS2RTS_QP, number);
    set_all(&mut command, &[(LAG_TX_PORT_AFFINITY, lag_port.into())]);
    *command.set(OPT_PARAM_MASK, LAG_COUNTS)
}

/// A number of reads and atomics as a power of two, rounded down, in three bits.
fn power(count: u32) -> u64 {
    count.max(1).ilog2().min(7).into()
}

/// To the error state: what is outstanding is flushed.
pub fn error(number: u32) -> CommandWords<16> {
    *CommandWords::default().set(OPCODE, TO_ERR_QP).set(QPN, number.into())
}

/// To RESET: nothing goes on, and nothing completes.
pub fn reset(number: u32) -> CommandWords<16> {
    *CommandWords::default().set(OPCODE, TO_RST_QP).set(QPN, number.into())
}

#[cfg(test)]
mod tests {
    use super::super::queue_pair::words;
    use super::*;
    use oxygin_ffi::verbs::types::ibv_ah_attr;

    #[test]
    fn init_says_what_peers_may() {
        let all = [(0, 0x0502_0000), (2, 0x99), (6, 2 << 24 | 3 << 11), (12, 4), (21, 1 << 16), (42, 0x1e000)];
        assert_eq!(words(init(0x99, 1, 4, 2).bytes()), all);
        assert_eq!(words(init(0x99, 1, 4, 0).bytes())[2], (6, 3 << 11));
    }

    fn connection() -> RcConnection {
        let way = ibv_ah_attr { dlid: 17, sl: 2, port_num: 1, ..Default::default() };
        let path = PortPath { way, pkey_index: 0, ethernet: None };
        RcConnection {
            peer: 0xabcdef,
            mtu: 3,
            log_message: 30,
            reads_in: 16,
            path,
            lag_port: 0,
            lag_counts: true,
            lag_again: false,
        }
    }

    #[test]
    fn a_receiver_has_path_peer_and_limits() {
        let plain = [
            (0, 0x0503_0000),
            (2, 0x99),
            (8, 3 << 29 | 30 << 24),
            (11, 0xab_cdef),
            (13, 17),
            (21, 2 << 24 | 1 << 16),
            (42, 4 << 21 | 1 << 16 | 7 << 13),
            (43, 12 << 24),
        ];
        assert_eq!(words(ready_to_receive(0x99, &connection()).bytes()), plain);
        let bound = ready_to_receive(0x99, &RcConnection { lag_port: 2, ..connection() });
        assert_eq!(words(bound.bytes())[2..4], [(4, 1 << 15), (6, 2 << 24)]);
        // A device that takes the port in INIT alone is not asked to take it here.
        let early = ready_to_receive(0x99, &RcConnection { lag_port: 2, lag_counts: false, ..connection() });
        assert_eq!(words(early.bytes())[2], (6, 2 << 24));
    }

    #[test]
    fn a_sender_has_patience() {
        let patience = Patience { timeout: 20, retries: 7, reads_out: 16 };
        let all = [(0, 0x0504_0000), (2, 0x99), (14, 20 << 27), (34, 4 << 21 | 7 << 16 | 7 << 13)];
        assert_eq!(words(ready_to_send(0x99, &patience).bytes()), all);
        // What is too much is as much as there is.
        let much = ready_to_send(0x99, &Patience { timeout: 255, retries: 9, reads_out: 1 << 20 });
        assert_eq!(words(much.bytes())[2..], [(14, 31 << 27), (34, 7 << 21 | 7 << 16 | 7 << 13)]);
    }

    #[test]
    fn a_sender_can_be_bound_to_a_port() {
        assert_eq!(words(bound_to(0x99, 2).bytes()), [(0, 0x0505_0000), (2, 0x99), (4, 1 << 15), (6, 2 << 24)]);
    }

    #[test]
    fn a_queue_pair_can_be_stopped() {
        assert_eq!(words(error(0x99).bytes()), [(0, 0x0507_0000), (2, 0x99)]);
        assert_eq!(words(reset(0x99).bytes()), [(0, 0x050a_0000), (2, 0x99)]);
    }
}
