//! The verbs fabric's connect messages.

use super::{take, Target};
use oxygin::fabric::verbs::wire::{emit_taken, parse_taken, Hello, QpInfo, QpSlice};
use oxygin_ffi::verbs::types::ibv_ece;

pub fn targets() -> Vec<Target> {
    vec![
        Target { name: "verbs-hello", seeds: hellos(), run: hello },
        Target { name: "verbs-queue-pairs", seeds: slices(), run: slice },
    ]
}

fn hellos() -> Vec<Vec<u8>> {
    let hello = Hello {
        link_layer: 2,
        active_mtu: 3,
        grh_required: true,
        atomics: true,
        ece: true,
        iwarp: false,
        lid: 0,
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        gid_type: 2,
        gid: [9; 16],
        max_msg_sz: 1 << 30,
    };
    vec![
        hello.emit(),
        Hello { link_layer: 1, lid: 7, atomics: false, ..hello }.emit(),
        Hello { iwarp: true, ..hello }.emit(),
    ]
}

fn hello(input: &[u8]) {
    if let Ok(hello) = Hello::parse(input) {
        assert_eq!(hello.emit(), input);
    }
}

/// The number of contexts in one byte, then the slice.
fn slices() -> Vec<Vec<u8>> {
    let ece = Some(ibv_ece { vendor_id: 0x15b3, options: 0xff, comp_mask: 0 });
    let info = QpInfo { qpn: 17, psn: 0xff_ffff, credit_addr: 0x1000, credit_rkey: 5, port: 7, ece };
    [0u8, 1, 3]
        .map(|n| {
            let mut slice = vec![n];
            QpInfo::emit_slice(&vec![info; n.into()], 64, &[9; 16], &mut slice);
            slice
        })
        .to_vec()
}

fn slice(mut input: &[u8]) {
    let [n] = take(&mut input);
    for by_message in [false, true] {
        if let Ok(QpSlice { infos, receives, token }) = QpInfo::parse_slice(input, n.into(), by_message) {
            let mut again = Vec::new();
            QpInfo::emit_slice(&infos, receives, &token, &mut again);
            assert_eq!(again, input);
        }
    }
    if let Ok(taken) = parse_taken(input, n.into()) {
        let mut again = Vec::new();
        emit_taken(&taken, &mut again);
        assert_eq!(again, input);
    }
}
