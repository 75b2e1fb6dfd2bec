//! Commands and their answers.

use super::capabilities::{GENERAL, GENERAL_2, ROCE};
use super::contexts::{ADS, CQC, QPC};
use super::Origin::{Both, Dpdk, Pyverbs};
use super::{opcode, Field, Layout, Part};

/// First in every command.
const HEAD: &[Field] =
    &[Field("opcode", 0x00, 16, Both), Field("uid", 0x10, 16, Both), Field("op_mod", 0x30, 16, Both)];

/// First in every answer.
const STATUS: &[Field] = &[Field("status", 0x00, 8, Both), Field("syndrome", 0x20, 32, Both)];

/// `create_cq_in`, `CreateCqIn`.
pub static CREATE_CQ_IN: Layout = Layout::new(
    "create_cq_in",
    0x880 / 8,
    &[
        ("", 0, HEAD),
        ("", 0, &[Field("cqn", 0x048, 24, Pyverbs)]),
        ("cq_context.", 0x080, CQC),
        (
            "",
            0,
            &[
                Field("cq_umem_offset", 0x280, 64, Both),
                Field("cq_umem_id", 0x2c0, 32, Both),
                Field("cq_umem_valid", 0x2e0, 1, Both),
            ],
        ),
    ],
);

/// `create_cq_out`, `CreateCqOut`.
pub static CREATE_CQ_OUT: Layout =
    Layout::new("create_cq_out", 16, &[("", 0, STATUS), ("", 0, &[Field("cqn", 0x48, 24, Both)])]);

/// A queue pair's context with its paths, in all commands at one place.
const QPC_AT: Part = ("qpc.", 0x0c0, QPC);
const PRIMARY: Part = ("qpc.primary_address_path.", 0x0c0 + 0x0c0, ADS);
const SECONDARY: Part = ("qpc.secondary_address_path.", 0x0c0 + 0x220, ADS);

/// `create_qp_in`, `CreateQpIn`, without what `qpc_ext` adds.
pub static CREATE_QP_IN: Layout = Layout::new(
    "create_qp_in",
    0x880 / 8,
    &[
        ("", 0, HEAD),
        (
            "",
            0,
            &[
                Field("qpc_ext", 0x040, 1, Dpdk),
                Field("input_qpn", 0x048, 24, Pyverbs),
                Field("cmd_on_behalf", 0x061, 1, Pyverbs),
                Field("vhca_id", 0x070, 16, Pyverbs),
                Field("opt_param_mask", 0x080, 32, Both),
            ],
        ),
        QPC_AT,
        PRIMARY,
        SECONDARY,
        (
            "",
            0,
            &[
                Field("wq_umem_offset", 0x800, 64, Both),
                Field("wq_umem_id", 0x840, 32, Both),
                Field("wq_umem_valid", 0x860, 1, Both),
            ],
        ),
    ],
);

/// `create_qp_out`, `CreateQpOut`.
pub static CREATE_QP_OUT: Layout =
    Layout::new("create_qp_out", 16, &[("", 0, STATUS), ("", 0, &[Field("qpn", 0x48, 24, Both)])]);

/// `rst2init_qp_in` and the others from state to state, `ModifyQpIn`.
pub static MODIFY_QP_IN: Layout = Layout::new(
    "rst2init_qp_in",
    0x880 / 8,
    &[
        ("", 0, HEAD),
        (
            "",
            0,
            &[
                Field("qpn", 0x048, 24, Both),
                Field("opt_param_mask", 0x080, 32, Both),
                Field("ece", 0x0a0, 32, Pyverbs),
            ],
        ),
        QPC_AT,
        PRIMARY,
        SECONDARY,
    ],
);

/// `2rst_qp_in`; `2err_qp_in` is the same.
pub static STOP_QP_IN: Layout =
    Layout::new("2rst_qp_in", 16, &[("", 0, HEAD), ("", 0, &[Field("qpn", 0x48, 24, Dpdk)])]);

/// `query_qp_in`, `QueryQpIn`.
pub static QUERY_QP_IN: Layout =
    Layout::new("query_qp_in", 16, &[("", 0, HEAD), ("", 0, &[Field("qpn", 0x48, 24, Both)])]);

/// `query_qp_out`, `QueryQpOut`.
pub static QUERY_QP_OUT: Layout = Layout::new(
    "query_qp_out",
    0x880 / 8,
    &[("", 0, STATUS), ("", 0, &[Field("opt_param_mask", 0x080, 32, Both)]), QPC_AT, PRIMARY, SECONDARY],
);

/// `query_hca_cap_in`, `QueryHcaCapIn`.
pub static QUERY_HCA_CAP_IN: Layout = Layout::new(
    "query_hca_cap_in",
    16,
    &[("", 0, HEAD), ("", 0, &[Field("other_function", 0x40, 1, Pyverbs), Field("function_id", 0x50, 16, Pyverbs)])],
);

/// `query_hca_cap_out` with `cmd_hca_cap`: `op_mod` 0 or 1. 256 bytes of it are used of 4096.
pub static GENERAL_CAP_OUT: Layout =
    Layout::new("query_hca_cap_out", 16 + 256, &[("", 0, STATUS), ("capability.", 0x80, GENERAL)]);

/// `query_hca_cap_out` with `cmd_hca_cap_2`: `op_mod` 0x40 or 0x41.
pub static GENERAL_2_CAP_OUT: Layout =
    Layout::new("query_hca_cap_out", 16 + 256, &[("", 0, STATUS), ("capability.", 0x80, GENERAL_2)]);

/// `query_hca_cap_out` with `roce_caps`: `op_mod` 8 or 9.
pub static ROCE_CAP_OUT: Layout =
    Layout::new("query_hca_cap_out", 16 + 256, &[("", 0, STATUS), ("capability.", 0x80, ROCE)]);

/// An answer that says no more than how it went.
pub static PLAIN_OUT: Layout = Layout::new("rst2init_qp_out", 16, &[("", 0, STATUS)]);

/// The data of a completion queue's error event, 28 bytes behind the first 36 of an event: `CqError`.
pub static CQ_ERROR: Layout =
    Layout::new("CqError", 28, &[("", 0, &[Field("cqn", 0x08, 24, Pyverbs), Field("syndrome", 0x58, 8, Pyverbs)])]);

/// The data of a completion event: `CompEvent`.
pub static COMP_EVENT: Layout = Layout::new("CompEvent", 28, &[("", 0, &[Field("cqn", 0xc8, 24, Pyverbs)])]);

/// What a command with this opcode looks like, and its answer.
pub fn of(op: u16) -> Option<(&'static Layout, &'static Layout)> {
    Some(match op {
        opcode::CREATE_CQ => (&CREATE_CQ_IN, &CREATE_CQ_OUT),
        opcode::CREATE_QP => (&CREATE_QP_IN, &CREATE_QP_OUT),
        opcode::RST2INIT | opcode::INIT2RTR | opcode::RTR2RTS | opcode::RTS2RTS => (&MODIFY_QP_IN, &PLAIN_OUT),
        opcode::TO_ERR | opcode::TO_RST => (&STOP_QP_IN, &PLAIN_OUT),
        opcode::QUERY_QP => (&QUERY_QP_IN, &QUERY_QP_OUT),
        opcode::QUERY_HCA_CAP => (&QUERY_HCA_CAP_IN, &PLAIN_OUT),
        _ => return None,
    })
}
