//! What a device can: QUERY_HCA_CAP.

use super::fields::{field, CommandWords, Field, OPCODE, OP_MOD, QUERY_HCA_CAP};

/// Which capabilities are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Those of every device.
    General,
    /// Those of RoCE.
    Roce,
    /// More of those of every device, where [`Capabilities`] says that there are.
    General2,
}

impl Group {
    /// `MLX5_SET_HCA_CAP_OP_MOD_*`, shifted; the lowest bit says that what is in force is meant, not what could be.
    fn op_mod(self) -> u64 {
        let group = match self {
            Self::General => 0x0,
            Self::Roce => 0x4,
            Self::General2 => 0x20,
        };
        group << 1 | 1
    }
}

/// The command (`query_hca_cap_in`).
pub fn query(group: Group) -> CommandWords<16> {
    *CommandWords::default().set(OPCODE, QUERY_HCA_CAP).set(OP_MOD, group.op_mod())
}

/// The answer (`query_hca_cap_out`): 16 bytes, then the capabilities.
pub type Answer = CommandWords<{ 16 + 0x1000 }>;

/// Where capabilities begin in the answer, in bits.
const START: usize = 0x80;

/// Fields of `cmd_hca_cap`.
pub mod general {
    use super::{field, Field, START};

    const fn at(offset: usize, width: usize) -> Field {
        field(offset, width).within(START)
    }

    /// There is [`super::Group::General2`].
    pub const HCA_CAP_2: Field = at(0x20, 1);
    /// Slots of a send queue at most, as a power of two.
    pub const LOG_MAX_QP_SZ: Field = at(0x88, 8);
    /// Queue pairs at most, as a power of two.
    pub const LOG_MAX_QP: Field = at(0x9b, 5);
    /// Entries of a completion queue at most, as a power of two.
    pub const LOG_MAX_CQ_SZ: Field = at(0xc8, 8);
    /// Completion queues at most, as a power of two.
    pub const LOG_MAX_CQ: Field = at(0xdb, 5);
    /// Reads and atomics that a queue pair may have under way, as a power of two.
    pub const LOG_MAX_RA_REQ_QP: Field = at(0x14a, 6);
    /// The LAG port of a queue pair that sends can be changed. From rdma-core,
    /// `tests/mlx5_prm_structs.py`.
    pub const RTS2RTS_LAG_TX_PORT_AFFINITY: Field = at(0x152, 1);
    /// Reads and atomics that may be arriving at one, as a power of two.
    pub const LOG_MAX_RA_RES_QP: Field = at(0x15a, 6);
    /// 0: InfiniBand, 1: Ethernet.
    pub const PORT_TYPE: Field = at(0x1b6, 2);
    /// Bytes of a message at most, as a power of two.
    pub const LOG_MAX_MSG: Field = at(0x1c3, 5);
    /// The LAG port can be changed where a queue pair goes to RTR.
    pub const INIT2_LAG_TX_PORT_AFFINITY: Field = at(0x1f8, 1);
    /// RoCE is on.
    pub const ROCE: Field = at(0x21d, 1);
    /// It carries out atomic operations.
    pub const ATOMIC: Field = at(0x21e, 1);
    /// Completion queues may be overrun.
    pub const CQ_OI: Field = at(0x220, 1);
    /// Entries that wait for completions ("cross-channel").
    pub const CD: Field = at(0x22c, 1);
    /// Reliable connections.
    pub const RC: Field = at(0x23f, 1);
    /// Queue pairs may be bound to a port of a LAG.
    pub const LAG_TX_PORT_AFFINITY: Field = at(0x278, 1);
    /// Ports of the LAG; 0 and 1: there is none.
    pub const NUM_LAG_PORTS: Field = at(0x27c, 4);
    /// Whose times completions of a send queue may bear: 0, those of the free-running clock alone; 1, of the real-time
    /// clock alone; 2, of both.
    pub const SQ_TS_FORMAT: Field = at(0x440, 2);
}

/// Fields of `roce_cap`.
pub mod roce {
    use super::{field, Field, START};

    /// As [`super::general::SQ_TS_FORMAT`], of queue pairs.
    pub const QP_TS_FORMAT: Field = field(0x1e, 2).within(START);
    /// The largest source port of RoCE v2.
    pub const R_ROCE_MAX_SRC_UDP_PORT: Field = field(0xc0, 16).within(START);
    /// The smallest.
    pub const R_ROCE_MIN_SRC_UDP_PORT: Field = field(0xd0, 16).within(START);
}

/// Fields of `cmd_hca_cap_2`.
pub mod general_2 {
    use super::{field, Field, START};

    /// Doorbells that need no record. Reserved in Linux and rdma-core; from NCCL's copy of DOCA GPUNetIO,
    /// `host/mlx5_ifc.h` (2.31).
    pub const SEND_DBR_MODE_NO_DBR_EXT: Field = field(0x2e1, 1).within(START);
    /// Slots of a send queue without one at most, as a power of two. From rdma-core,
    /// `tests/mlx5_prm_structs.py`.
    pub const LOG_MAX_SEND_DBR_LESS_QP_SQ: Field = field(0x2e3, 5).within(START);
}

/// What a device can, as far as queue pairs of GDAKI need it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Reliable connections.
    pub rc: bool,
    /// Atomic operations.
    pub atomics: bool,
    /// Completion queues that may be overrun: device code of GDAKI writes no consumer index. A device that does not say
    /// so is tried: NCCL asks for such queues without a look at this.
    pub cq_overrun: bool,
    /// Entries that wait for completions: counters need them.
    pub cross_channel: bool,
    /// Slots of a send queue at most.
    pub send_slots: u32,
    /// Entries of a completion queue at most.
    pub completions: u32,
    /// Queue pairs at most, as the firmware counts; other users of the device have some.
    pub queue_pairs: u32,
    /// Reads and atomics under way at most, of a queue pair.
    pub reads_out: u32,
    /// Arriving at most.
    pub reads_in: u32,
    /// The largest message, as a power of two.
    pub log_message: u8,
    /// Ports of a LAG to which queue pairs can be bound; 0: none.
    pub lag_ports: u8,
    /// A queue pair's port can be changed on its way to RTR.
    pub lag_in_rtr: bool,
    /// It can be changed of one that sends.
    pub lag_in_rts: bool,
    /// The port is an Ethernet one.
    pub is_ethernet: bool,
    /// Source ports of RoCE v2, first and last.
    pub udp_ports: (u16, u16),
    /// Slots of a send queue whose doorbells need no record at most; 0: there is no such queue.
    pub no_record_slots: u32,
    /// It may have another clock than the free-running one: queue pairs take the one that it is set to. One that is set
    /// to real time alone refuses those that ask for the other (Linux, `mlx5_get_qp_default_ts`).
    pub has_clocks: bool,
    /// There are more capabilities to ask for.
    pub has_more: bool,
}

impl Capabilities {
    /// Whether there are doorbells that need no record.
    pub fn can_do_without_record(&self) -> bool {
        self.no_record_slots > 0
    }

    /// From the answers; those that were not asked for, or that the device refused, are `None`.
    pub fn new(general: &Answer, roce: Option<&Answer>, general_2: Option<&Answer>) -> Self {
        let is = |field| general.get(field) == 1;
        let power = |field| 1_u32.checked_shl(general.get(field) as u32).unwrap_or(u32::MAX);
        // A single port is no LAG, and nothing to be bound to (Linux, `mlx5_ib_lag_should_assign_affinity`).
        let ports = match general.get(general::NUM_LAG_PORTS) as u8 {
            ports @ 2.. if is(general::LAG_TX_PORT_AFFINITY) => ports,
            _ => 0,
        };
        let no_record = general_2.is_some_and(|answer| answer.get(general_2::SEND_DBR_MODE_NO_DBR_EXT) == 1);
        let send_slots = power(general::LOG_MAX_QP_SZ);
        let no_record_slots = match general_2.map_or(0, |a| a.get(general_2::LOG_MAX_SEND_DBR_LESS_QP_SQ) as u32) {
            _ if !no_record => 0,
            // A device that says nothing has no limit of its own for them.
            0 => send_slots,
            log => send_slots.min(1 << log),
        };
        Self {
            rc: is(general::RC),
            atomics: is(general::ATOMIC),
            cq_overrun: is(general::CQ_OI),
            cross_channel: is(general::CD),
            send_slots,
            completions: power(general::LOG_MAX_CQ_SZ),
            queue_pairs: power(general::LOG_MAX_QP),
            reads_out: power(general::LOG_MAX_RA_REQ_QP),
            reads_in: power(general::LOG_MAX_RA_RES_QP),
            log_message: general.get(general::LOG_MAX_MSG) as u8,
            lag_ports: ports,
            lag_in_rtr: is(general::INIT2_LAG_TX_PORT_AFFINITY),
            lag_in_rts: is(general::RTS2RTS_LAG_TX_PORT_AFFINITY),
            is_ethernet: general.get(general::PORT_TYPE) == 1,
            udp_ports: roce.map_or((0, 0), |answer| {
                let port = |field| answer.get(field) as u16;
                (port(roce::R_ROCE_MIN_SRC_UDP_PORT), port(roce::R_ROCE_MAX_SRC_UDP_PORT))
            }),
            no_record_slots,
            has_clocks: match roce.filter(|_| is(general::ROCE)) {
                Some(roce) => roce.get(roce::QP_TS_FORMAT) != 0,
                None => general.get(general::SQ_TS_FORMAT) != 0,
            },
            has_more: is(general::HCA_CAP_2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_name_their_group() {
        for (group, op_mod) in [(Group::General, 0x01), (Group::Roce, 0x09), (Group::General2, 0x41)] {
            assert_eq!(query(group).bytes(), [1, 0, 0, 0, 0, 0, 0, op_mod, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn answers_say_what_the_device_can() {
        let mut general = Answer::default();
        general.set(general::RC, 1).set(general::LOG_MAX_QP_SZ, 15).set(general::NUM_LAG_PORTS, 2);
        general.set(general::LOG_MAX_RA_REQ_QP, 4).set(general::PORT_TYPE, 1).set(general::HCA_CAP_2, 1);
        let without = Capabilities::new(&general, None, None);
        assert_eq!((without.send_slots, without.reads_out, without.lag_ports), (32_768, 16, 0));
        assert!(
            without.rc
                && without.is_ethernet
                && without.has_more
                && !without.atomics
                && !without.can_do_without_record()
        );
        general.set(general::LAG_TX_PORT_AFFINITY, 1);
        let (mut roce, mut more) = (Answer::default(), Answer::default());
        roce.set(roce::R_ROCE_MIN_SRC_UDP_PORT, 0xc000).set(roce::R_ROCE_MAX_SRC_UDP_PORT, 0xffff);
        more.set(general_2::SEND_DBR_MODE_NO_DBR_EXT, 1);
        let all = Capabilities::new(&general, Some(&roce), Some(&more));
        assert_eq!((all.lag_ports, all.udp_ports, all.can_do_without_record()), (2, (0xc000, 0xffff), true));
        assert_eq!(all.no_record_slots, all.send_slots, "it does not say");
        for (log, most) in [(5, 32), (31, all.send_slots)] {
            more.set(general_2::LOG_MAX_SEND_DBR_LESS_QP_SQ, log);
            assert_eq!(Capabilities::new(&general, None, Some(&more)).no_record_slots, most);
        }
        more.set(general_2::SEND_DBR_MODE_NO_DBR_EXT, 0);
        assert_eq!(Capabilities::new(&general, None, Some(&more)).no_record_slots, 0);
        // Without RoCE queue pairs have the clocks of send queues.
        for (by_roce, clocks) in [(0, false), (1, true)] {
            general.set(general::ROCE, by_roce);
            roce.set(roce::QP_TS_FORMAT, 1);
            let has = Capabilities::new(&general, Some(&roce), None).has_clocks;
            assert_eq!((has, Capabilities::new(&general, None, None).has_clocks), (clocks, false));
        }
        general.set(general::SQ_TS_FORMAT, 2);
        assert!(Capabilities::new(&general, None, None).has_clocks);
        // A device that says nonsense is no reason to end.
        general.set(general::LOG_MAX_QP_SZ, 0xff);
        assert_eq!(Capabilities::new(&general, None, None).send_slots, u32::MAX);
    }
}
