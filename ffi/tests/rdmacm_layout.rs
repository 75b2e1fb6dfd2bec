//! The hand-written librdmacm types against what a C compiler makes of `rdma/rdma_cma.h` (package librdmacm-dev).

use oxygin_ffi::rdmacm::types::*;
use std::collections::BTreeMap;
use std::mem::{offset_of, size_of};
use std::process::Command;

macro_rules! sizes {
    ($out:ident, $($name:ident),* $(,)?) => {
        $($out.push((format!("sizeof(struct {})", stringify!($name)), size_of::<$name>() as u64));)*
    };
}

macro_rules! offsets {
    ($out:ident, $($name:ident { $($field:ident),* $(,)? })*) => {
        $($($out.push((
            format!("offsetof(struct {}, {})", stringify!($name), stringify!($field)),
            offset_of!($name, $field) as u64,
        ));)*)*
    };
}

macro_rules! values {
    ($out:ident, $($name:ident),* $(,)?) => {
        $($out.push((stringify!($name).to_owned(), $name as u64));)*
    };
}

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
    let expected = expected();
    let mut source =
        String::from("#include <stddef.h>\n#include <stdio.h>\n#include <rdma/rdma_cma.h>\nint main(void) {\n");
    for (what, _) in &expected {
        source += &format!("  printf(\"%s=%llu\\n\", \"{what}\", (unsigned long long)({what}));\n");
    }
    source += "  return 0;\n}\n";
    let dir = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (c, exe) = (dir.join("rdmacm_layout.c"), dir.join("rdmacm_layout"));
    std::fs::write(&c, source).unwrap();
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(&cc).arg("-o").arg(&exe).arg(&c).output().expect("a C compiler is needed");
    assert!(
        built.status.success(),
        "{cc} failed; is librdmacm-dev installed?\n{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let ran = Command::new(&exe).output().unwrap();
    let said: BTreeMap<_, _> = std::str::from_utf8(&ran.stdout)
        .unwrap()
        .lines()
        .map(|l| l.rsplit_once('=').map(|(k, v)| (k.to_owned(), v.parse::<u64>().unwrap())).unwrap())
        .collect();
    let wrong: Vec<_> = expected
        .iter()
        .filter(|(k, v)| said.get(k) != Some(v))
        .map(|(k, v)| format!("{k}: here {v}, in C {:?}", said.get(k)))
        .collect();
    assert_eq!(said.len(), expected.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
