//! Where the fields of commands lie, from independent origins: the fake's table (DPDK and rdma-core's tests, see
//! `fake_verbs::mlx5::prm`), and numbers that were noted down from documentation.

use fake_verbs::mlx5::prm::commands::*;
use fake_verbs::mlx5::prm::{opcode, Layout};
use std::collections::BTreeMap;

/// Every layout of the fake.
static LAYOUTS: [&Layout; 13] = [
    &CREATE_CQ_IN,
    &CREATE_CQ_OUT,
    &CREATE_QP_IN,
    &CREATE_QP_OUT,
    &MODIFY_QP_IN,
    &STOP_QP_IN,
    &QUERY_QP_IN,
    &QUERY_QP_OUT,
    &QUERY_HCA_CAP_IN,
    &GENERAL_CAP_OUT,
    &GENERAL_2_CAP_OUT,
    &ROCE_CAP_OUT,
    &PLAIN_OUT,
];

/// First bit and width of a field.
fn place(layout: &Layout, name: &str) -> Option<(u32, u32)> {
    layout.fields().find(|f| f.0 == name).map(|f| (f.1, f.2))
}

#[test]
fn fields_lie_apart_and_inside() {
    for layout in LAYOUTS {
        let mut taken = BTreeMap::new();
        for (name, at, bits, _) in layout.fields() {
            assert!(bits > 0 && at + bits <= layout.bytes as u32 * 8, "{}: {name} at {at:#x}", layout.name);
            // Paths are whole bytes in a queue pair's context; no field crosses what is next to it.
            for bit in at..at + bits {
                let other = taken.insert(bit, name.clone());
                assert_eq!(other, None, "{}: bit {bit:#x} is {name}'s, too", layout.name);
            }
        }
    }
}

#[test]
fn both_ways_of_a_field_agree() {
    for layout in LAYOUTS {
        for (name, at, bits, _) in layout.fields().filter(|f| f.2 <= 64) {
            let mut bytes = vec![0; layout.bytes];
            let all = u64::MAX >> (64 - bits);
            layout.set(&mut bytes, &name, all);
            assert_eq!((layout.get(&bytes, &name), layout.reserved_bit(&bytes)), (all, None), "{name}");
            let ones: u32 = bytes.iter().map(|b| b.count_ones()).sum();
            assert_eq!((ones, bytes[at as usize / 8] >> (7 - at % 8) & 1), (bits, 1), "{name}");
        }
    }
    let mut bytes = vec![0; CREATE_CQ_IN.bytes];
    bytes[0x23 / 8] |= 0x80 >> (0x23 % 8);
    assert_eq!(CREATE_CQ_IN.reserved_bit(&bytes), Some(0x23));
}

/// Fields that a queue for device code needs: in the context, first bit.
const NOTED_CQC: [(&str, u32); 10] = [
    ("dbr_umem_valid", 0x06),
    ("cqe_sz", 0x08),
    ("cc", 0x0b),
    ("oi", 0x0e),
    ("st", 0x14),
    ("dbr_umem_id", 0x20),
    ("log_cq_size", 0x63),
    ("uar_page", 0x68),
    ("c_eqn", 0xb8),
    ("dbr_addr", 0x1c0),
];

const NOTED_QPC: [(&str, u32); 27] = [
    ("state", 0x00),
    ("st", 0x08),
    ("pd", 0x28),
    ("mtu", 0x40),
    ("log_msg_max", 0x43),
    ("log_sq_size", 0x51),
    ("uar_page", 0x68),
    ("send_dbr_mode", 0x80),
    ("remote_qpn", 0xa8),
    ("primary_address_path.fl", 0xc0),
    ("log_sra_max", 0x388),
    ("retry_count", 0x38d),
    ("rnr_retry", 0x390),
    ("next_send_psn", 0x3c8),
    ("cqn_snd", 0x3e8),
    ("log_rra_max", 0x488),
    ("atomic_mode", 0x48c),
    ("rre", 0x490),
    ("rwe", 0x491),
    ("rae", 0x492),
    ("cd_master", 0x49f),
    ("min_rnr_nak", 0x4a3),
    ("next_rcv_psn", 0x4a8),
    ("dbr_addr", 0x500),
    ("rq_type", 0x565),
    ("dbr_umem_valid", 0x683),
    ("dbr_umem_id", 0x720),
];

/// What was noted down from documentation while the fake did not exist.
#[test]
fn the_fake_agrees_with_what_was_noted_down() {
    for (name, at) in NOTED_CQC {
        let found = place(&CREATE_CQ_IN, &format!("cq_context.{name}"));
        assert_eq!(found.map(|f| f.0), Some(0x080 + at), "cqc: {name}");
    }
    for (name, at) in NOTED_QPC {
        for layout in [&CREATE_QP_IN, &MODIFY_QP_IN, &QUERY_QP_OUT] {
            let found = place(layout, &format!("qpc.{name}"));
            assert_eq!(found.map(|f| f.0), Some(0x0c0 + at), "{}: {name}", layout.name);
        }
    }
    let rest = [
        (&CREATE_CQ_IN, "cq_umem_offset", 0x280),
        (&CREATE_CQ_IN, "cq_umem_id", 0x2c0),
        (&CREATE_CQ_IN, "cq_umem_valid", 0x2e0),
        (&CREATE_QP_IN, "wq_umem_offset", 0x800),
        (&CREATE_QP_IN, "wq_umem_id", 0x840),
        (&CREATE_QP_IN, "wq_umem_valid", 0x860),
    ];
    for (layout, name, at) in rest {
        assert_eq!(place(layout, name).map(|f| f.0), Some(at), "{name}");
    }
    let opcodes = [opcode::QUERY_HCA_CAP, opcode::CREATE_CQ, opcode::DESTROY_CQ, opcode::CREATE_QP, opcode::DESTROY_QP];
    assert_eq!(opcodes, [0x100, 0x400, 0x401, 0x500, 0x501]);
    let changes = [opcode::RST2INIT, opcode::INIT2RTR, opcode::RTR2RTS, opcode::RTS2RTS, opcode::TO_ERR];
    assert_eq!(changes, [0x502, 0x503, 0x504, 0x505, 0x507]);
    assert_eq!([opcode::TO_RST, opcode::QUERY_QP], [0x50a, 0x50b]);
}
