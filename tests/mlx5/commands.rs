//! Fields of commands against tables of another origin: the library's are from Linux and rdma-core, the fake's from
//! DPDK and from rdma-core's tests (`fake_verbs::mlx5::prm`).

use fake_verbs::mlx5::prm::commands::*;
use fake_verbs::mlx5::prm::{opcode, Layout};
use oxygin::gdaki::mlx5::command::capabilities::{self, general, general_2, roce, Group};
use oxygin::gdaki::mlx5::command::completion_queue::{fields as cq, InUmem, NewCompletionQueue};
use oxygin::gdaki::mlx5::command::fields::{self, Field};
use oxygin::gdaki::mlx5::command::path::{fields as ads, Ethernet, PortPath};
use oxygin::gdaki::mlx5::command::queue_pair::{self, fields as qp, qpc, DoorbellMode, NewQueuePair};
use oxygin::gdaki::mlx5::command::transition::{self, Patience, RcConnection};
use oxygin_ffi::verbs::types::ibv_ah_attr;

/// First bit and width, by the other table.
fn there(layout: &Layout, name: &str) -> (usize, usize) {
    let field = layout.fields().find(|field| field.0 == name);
    let (_, at, bits, _) = field.unwrap_or_else(|| panic!("{} has no {name}", layout.name));
    (at as usize, bits as usize)
}

fn same(layout: &Layout, prefix: &str, start: usize, fields: &[(&str, Field)]) {
    for (name, field) in fields {
        let here = (start + field.offset, field.width);
        assert_eq!(here, there(layout, &format!("{prefix}{name}")), "{}: {name}", layout.name);
    }
}

/// Names of constants as fields are called.
macro_rules! fields {
    ($of:ident: $($name:ident)*) => { [$((stringify!($name).to_lowercase(), $of::$name)),*] };
}

fn compare(layout: &Layout, prefix: &str, start: usize, fields: &[(String, Field)]) {
    let fields: Vec<_> = fields.iter().map(|(name, field)| (name.as_str(), *field)).collect();
    same(layout, prefix, start, &fields);
}

#[test]
fn fields_lie_where_another_origin_has_them() {
    let created = fields!(cq: DBR_UMEM_VALID CQE_SZ CC OI DBR_UMEM_ID LOG_CQ_SIZE UAR_PAGE DBR_ADDR);
    compare(&CREATE_CQ_IN, "cq_context.", 0, &created);
    compare(&CREATE_CQ_IN, "", 0, &fields!(cq: CQ_UMEM_OFFSET CQ_UMEM_ID CQ_UMEM_VALID));
    // That origin has eight bits, this one the whole word that ends with them: numbers below 256 are the same.
    let (at, width) = there(&CREATE_CQ_IN, "cq_context.c_eqn");
    let whole = cq::C_EQN_OR_APU_ELEMENT;
    assert!(whole.offset + whole.width == at + width && width == 8);
    compare(&CREATE_CQ_OUT, "", 0, &fields!(cq: CQN));
    let context = fields!(qpc: STATE LAG_TX_PORT_AFFINITY ST PM_STATE PD MTU LOG_MSG_MAX LOG_SQ_SIZE UAR_PAGE
        SEND_DBR_MODE REMOTE_QPN LOG_SRA_MAX RETRY_COUNT RNR_RETRY NEXT_SEND_PSN CQN_SND LOG_RRA_MAX ATOMIC_MODE RRE
        RWE RAE CD_MASTER MIN_RNR_NAK NEXT_RCV_PSN DBR_ADDR RQ_TYPE HW_SQ_WQEBB_COUNTER SW_SQ_WQEBB_COUNTER
        DBR_UMEM_VALID DBR_UMEM_ID);
    let path = fields!(ads: PKEY_INDEX GRH MLID RLID ACK_TIMEOUT SRC_ADDR_INDEX STAT_RATE HOP_LIMIT TCLASS FLOW_LABEL
        DSCP UDP_SPORT ETH_PRIO SL VHCA_PORT_NUM);
    for layout in [&CREATE_QP_IN, &MODIFY_QP_IN, &QUERY_QP_OUT] {
        compare(layout, "qpc.", qp::QPC, &context);
        let start = qp::QPC + qpc::PRIMARY_ADDRESS_PATH;
        compare(layout, "qpc.primary_address_path.", start, &path);
        for (name, at) in [("rgid_rip", ads::RGID_RIP), ("rmac_47_32", ads::RMAC), ("rmac_31_0", ads::RMAC + 16)] {
            assert_eq!(start + at, there(layout, &format!("qpc.primary_address_path.{name}")).0, "{name}");
        }
    }
    compare(&CREATE_QP_IN, "", 0, &fields!(qp: WQ_UMEM_OFFSET WQ_UMEM_ID WQ_UMEM_VALID));
    for layout in [&CREATE_QP_OUT, &MODIFY_QP_IN, &STOP_QP_IN, &QUERY_QP_IN] {
        compare(layout, "", 0, &fields!(qp: QPN));
    }
    compare(&MODIFY_QP_IN, "", 0, &fields!(transition: OPT_PARAM_MASK));
    compare(&MODIFY_QP_IN, "", 0, &fields!(fields: OPCODE OP_MOD));
    compare(&PLAIN_OUT, "", 0, &fields!(fields: STATUS SYNDROME));
}

#[test]
fn capabilities_lie_where_another_origin_has_them() {
    let known = fields!(general: HCA_CAP_2 LOG_MAX_QP_SZ LOG_MAX_QP LOG_MAX_CQ_SZ LOG_MAX_CQ LOG_MAX_RA_REQ_QP
        LOG_MAX_RA_RES_QP PORT_TYPE LOG_MAX_MSG INIT2_LAG_TX_PORT_AFFINITY ROCE ATOMIC CQ_OI CD RC
        LAG_TX_PORT_AFFINITY NUM_LAG_PORTS);
    compare(&GENERAL_CAP_OUT, "capability.", 0, &known);
    compare(&ROCE_CAP_OUT, "capability.", 0, &fields!(roce: R_ROCE_MAX_SRC_UDP_PORT R_ROCE_MIN_SRC_UDP_PORT));
    compare(&GENERAL_2_CAP_OUT, "capability.", 0, &fields!(general_2: SEND_DBR_MODE_NO_DBR_EXT));
    for (group, op_mod) in [(Group::General, 1), (Group::Roce, 9), (Group::General2, 0x41)] {
        assert_eq!(QUERY_HCA_CAP_IN.get(capabilities::query(group).bytes(), "op_mod"), op_mod);
    }
}

/// What a command says, by the other table: its opcode, these fields, and nothing where that table has none.
fn says(layout: &Layout, bytes: &[u8], op: u16, fields: &[(&str, u64)]) {
    assert_eq!((bytes.len(), layout.reserved_bit(bytes)), (layout.bytes, None), "{}", layout.name);
    assert_eq!(layout.get(bytes, "opcode"), u64::from(op));
    for (name, value) in fields {
        assert_eq!(layout.get(bytes, name), *value, "{}: {name}", layout.name);
    }
}

#[test]
fn commands_say_to_another_origin_what_they_are_to_say() {
    let at = |umem, offset| InUmem { umem, offset };
    let made = NewCompletionQueue {
        log_entries: 10,
        ring: at(0x1_0001, 0x7_0000_1000),
        record: at(0x1_0002, 0x80),
        uar: 0xab_cdef,
        event_queue: 200,
    };
    let queue = [("cq_context.log_cq_size", 10), ("cq_context.c_eqn", 200), ("cq_context.dbr_umem_id", 0x1_0002)];
    says(&CREATE_CQ_IN, made.create().bytes(), opcode::CREATE_CQ, &queue);
    says(&CREATE_CQ_IN, made.create().bytes(), opcode::CREATE_CQ, &[("cq_umem_offset", 0x7_0000_1000)]);
    let pair = NewQueuePair {
        domain: 0x12_3456,
        log_slots: 15,
        ring: at(7, 0x3000),
        record: at(8, 0x104),
        uar: 5,
        completion_queue: 0xff_ffff,
        mode: DoorbellMode::NoRecord,
        is_master: true,
    };
    let wanted = [("qpc.pd", 0x12_3456), ("qpc.log_sq_size", 15), ("qpc.send_dbr_mode", 1), ("qpc.cd_master", 1)];
    says(&CREATE_QP_IN, pair.create().bytes(), opcode::CREATE_QP, &wanted);
    says(&MODIFY_QP_IN, transition::init(9, 1, 3, 2).bytes(), opcode::RST2INIT, &[("qpn", 9), ("qpc.rae", 1)]);
    let way = ibv_ah_attr { is_global: 1, port_num: 1, sl: 4, ..Default::default() };
    let ethernet = Some(Ethernet { mac: [1, 2, 3, 4, 5, 6], udp_port: Some(0xc001) });
    let to = RcConnection {
        peer: 77,
        mtu: 5,
        log_message: 30,
        reads_in: 16,
        path: PortPath { way, pkey_index: 3, ethernet },
        lag_port: 2,
        lag_counts: true,
    };
    let path = |name: &str| format!("qpc.primary_address_path.{name}");
    let (mac, port) = (path("rmac_47_32"), path("udp_sport"));
    let wanted =
        [("qpc.remote_qpn", 77), ("qpc.mtu", 5), ("opt_param_mask", 1 << 15), (&mac[..], 0x0102), (&port[..], 0xc001)];
    says(&MODIFY_QP_IN, transition::ready_to_receive(9, &to).bytes(), opcode::INIT2RTR, &wanted);
    let patience = Patience { timeout: 20, retries: 7, reads_out: 16 };
    let wanted = [("qpc.retry_count", 7), ("qpc.rnr_retry", 7), ("qpc.log_sra_max", 4)];
    says(&MODIFY_QP_IN, transition::ready_to_send(9, &patience).bytes(), opcode::RTR2RTS, &wanted);
    says(&STOP_QP_IN, transition::error(9).bytes(), opcode::TO_ERR, &[("qpn", 9)]);
    says(&STOP_QP_IN, transition::reset(9).bytes(), opcode::TO_RST, &[("qpn", 9)]);
    says(&QUERY_QP_IN, queue_pair::query(9).bytes(), opcode::QUERY_QP, &[("qpn", 9)]);
}
