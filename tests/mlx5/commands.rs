//! Whole commands, read by tables of another origin: the library's are from Linux and rdma-core, the fake's from DPDK
//! and from rdma-core's tests (`fake_verbs::mlx5::prm`). `gdaki/prm_provider.rs` compares the tables field by field.

use fake_verbs::mlx5::prm::commands::*;
use fake_verbs::mlx5::prm::{opcode, Layout};
use oxygin::gdaki::mlx5::command::completion_queue::{InUmem, NewCompletionQueue};
use oxygin::gdaki::mlx5::command::path::{Ethernet, PortPath};
use oxygin::gdaki::mlx5::command::queue_pair::{self, DoorbellMode, NewQueuePair};
use oxygin::gdaki::mlx5::command::transition::{self, Patience, RcConnection};
use oxygin_ffi::verbs::types::ibv_ah_attr;

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
        any_clock: true,
    };
    let wanted = [
        ("qpc.pd", 0x12_3456),
        ("qpc.log_sq_size", 15),
        ("qpc.send_dbr_mode", 1),
        ("qpc.cd_master", 1),
        ("qpc.ts_format", 1),
    ];
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
        lag_again: true,
    };
    let path = |name: &str| format!("qpc.primary_address_path.{name}");
    let (mac, port) = (path("rmac_47_32"), path("udp_sport"));
    let wanted =
        [("qpc.remote_qpn", 77), ("qpc.mtu", 5), ("opt_param_mask", 1 << 15), (&mac[..], 0x0102), (&port[..], 0xc001)];
    says(&MODIFY_QP_IN, transition::ready_to_receive(9, &to).bytes(), opcode::INIT2RTR, &wanted);
    let patience = Patience { timeout: 20, retries: 7, reads_out: 16 };
    let wanted = [("qpc.retry_count", 7), ("qpc.rnr_retry", 7), ("qpc.log_sra_max", 4)];
    says(&MODIFY_QP_IN, transition::ready_to_send(9, &patience).bytes(), opcode::RTR2RTS, &wanted);
    let wanted = [("qpn", 9), ("qpc.lag_tx_port_affinity", 2), ("opt_param_mask", 1 << 15)];
    says(&MODIFY_QP_IN, transition::bound_to(9, 2).bytes(), opcode::RTS2RTS, &wanted);
    says(&STOP_QP_IN, transition::error(9).bytes(), opcode::TO_ERR, &[("qpn", 9)]);
    says(&STOP_QP_IN, transition::reset(9).bytes(), opcode::TO_RST, &[("qpn", 9)]);
    says(&QUERY_QP_IN, queue_pair::query(9).bytes(), opcode::QUERY_QP, &[("qpn", 9)]);
}
