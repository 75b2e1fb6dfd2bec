//! The hand-written librdmacm types against what a C compiler makes of `rdma/rdma_cma.h` (package librdmacm-dev).

mod c_layout;

use c_layout::{compare, offsets, sizes, values};
use oxygin_ffi::rdmacm::types::*;
use std::mem::{offset_of, size_of};

fn expected() -> Vec<(String, u64)> {
    let mut out = Vec::new();
    sizes!(
        out,
        rdma_event_channel,
        rdma_ib_addr,
        rdma_addr,
        rdma_route,
        rdma_cm_id,
        rdma_conn_param,
        rdma_ud_param,
        rdma_cm_event
    );
    offsets! { out,
        rdma_event_channel { fd }
        rdma_addr { src_addr, dst_addr, addr }
        rdma_route { addr, path_rec, num_paths }
        rdma_cm_id { verbs, channel, context, qp, route, ps, port_num, event, send_cq, pd, qp_type }
        rdma_conn_param {
            private_data, private_data_len, responder_resources, initiator_depth, flow_control, retry_count,
            rnr_retry_count, srq, qp_num
        }
        rdma_ud_param { private_data, ah_attr, qp_num, qkey }
        rdma_cm_event { id, listen_id, event, status, param }
    }
    values!(
        out,
        RDMA_PS_TCP,
        RDMA_OPTION_ID,
        RDMA_OPTION_ID_TOS,
        RDMA_CM_EVENT_ADDR_RESOLVED,
        RDMA_CM_EVENT_ADDR_ERROR,
        RDMA_CM_EVENT_ROUTE_RESOLVED,
        RDMA_CM_EVENT_ROUTE_ERROR,
        RDMA_CM_EVENT_CONNECT_REQUEST,
        RDMA_CM_EVENT_CONNECT_RESPONSE,
        RDMA_CM_EVENT_CONNECT_ERROR,
        RDMA_CM_EVENT_UNREACHABLE,
        RDMA_CM_EVENT_REJECTED,
        RDMA_CM_EVENT_ESTABLISHED,
        RDMA_CM_EVENT_DISCONNECTED,
        RDMA_CM_EVENT_DEVICE_REMOVAL,
        RDMA_CM_EVENT_ADDR_CHANGE,
        RDMA_CM_EVENT_TIMEWAIT_EXIT,
    );
    out
}

#[test]
fn types_are_laid_out_as_the_c_header_says() {
    compare("rdmacm_layout", "rdma/rdma_cma.h", "librdmacm-dev", &expected());
}
