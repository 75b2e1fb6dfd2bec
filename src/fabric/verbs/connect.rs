//! The states of a queue pair on its way to sending.

use super::gid::GidEntry;
use super::wire::Hello;
use crate::config::Config;
use crate::error::{Error, Result};
use oxygin_ffi::verbs::types::*;
use oxygin_ffi::verbs::Qp;
use std::ffi::c_int;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

/// What every connection of this rank starts from.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// Port, from 1.
    pub port: u8,
    /// Index of the P_Key.
    pub pkey_index: u16,
    /// The own GID.
    pub gid: GidEntry,
    /// Service level.
    pub sl: u8,
    /// 4.096 µs × 2^n.
    pub timeout: u8,
    /// Retries after a timeout.
    pub retry_cnt: u8,
    /// What is done where the kernel finds no way to a peer in time.
    pub resolving: Resolving,
}

impl Origin {
    /// A port of a device of this vendor.
    pub fn new(config: &Config, port: u8, gid: GidEntry, vendor: u32) -> Self {
        Self {
            port,
            pkey_index: config.ib_pkey,
            gid,
            sl: config.ib_sl.unwrap_or(0) & 15,
            timeout: config.ib_timeout,
            retry_cnt: retries(config.ib_retry_cnt, vendor),
            resolving: Resolving {
                retries: config.ib_modify_retries,
                all: config.ib_modify_retry_all,
                pause: config.ib_modify_pause,
            },
        }
    }
}

/// How often a queue pair's move is tried again that timed out. On RoCE the kernel asks the network for the peer's
/// hardware address then, for a second at most, and where many ranks ask at once requests or answers get lost.
#[derive(Clone, Copy, Debug)]
pub struct Resolving {
    /// `NCCL_IB_MQP_RETRY_CNT`.
    pub retries: u32,
    /// `NCCL_IB_MQP_RETRY_ALL`: also where it failed otherwise.
    pub all: bool,
    /// `NCCL_IB_MQP_RETRY_SLEEP_MSEC`: before the first of them; before the n-th n times that.
    pub pause: Duration,
}

impl Resolving {
    fn modify(&self, qp: &Qp, attr: &ibv_qp_attr, mask: c_int, end: Instant) -> std::io::Result<()> {
        let mut retry = 1;
        loop {
            let pause = self.pause.saturating_mul(retry);
            match qp.modify(attr, mask) {
                Err(e)
                    if (self.all || e.raw_os_error() == Some(libc::ETIMEDOUT))
                        && retry <= self.retries
                        && pause < end.saturating_duration_since(Instant::now()) =>
                {
                    let why = match e.raw_os_error() {
                        Some(libc::ETIMEDOUT) => ", most likely for want of an answer from the network",
                        _ => "",
                    };
                    log::info!(
                        "queue pair {}: {e}{why}; retry {retry} of {} in {} ms",
                        qp.number(),
                        self.retries,
                        pause.as_millis()
                    );
                    std::thread::sleep(pause);
                    retry += 1;
                }
                done => return done,
            }
        }
    }
}

/// The queue pair at the other end of one connection.
#[derive(Clone, Copy, Debug)]
pub struct RemoteQp {
    /// Its port and device.
    pub hello: Hello,
    /// Its number.
    pub qpn: u32,
    /// The first packet number it sends.
    pub psn: u32,
}

/// RESET to INIT: receives may be posted from here on.
pub fn init(qp: &Qp, origin: &Origin, atomics: bool) -> Result<()> {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        pkey_index: origin.pkey_index,
        port_num: origin.port,
        qp_access_flags: IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_READ
            | if atomics { IBV_ACCESS_REMOTE_ATOMIC } else { 0 },
        ..Default::default()
    };
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    qp.modify(&attr, mask).map_err(|e| {
        Error::system(format!(
            "queue pair {} to INIT on port {} with P_Key index {}: {e}",
            qp.number(),
            origin.port,
            origin.pkey_index
        ))
    })
}

/// RESET to INIT for iWARP, which knows no more than these attributes: the connection manager does the rest.
pub fn init_iwarp(qp: &Qp) -> Result<()> {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        qp_access_flags: IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
        ..Default::default()
    };
    qp.modify(&attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS)
        .map_err(|e| Error::system(format!("queue pair {} to INIT: {e}", qp.number())))
}

/// INIT to RTR. Nothing is tried again after `end`.
pub fn receive(qp: &Qp, origin: &Origin, mine: &Hello, remote: &RemoteQp, tc: u8, end: Instant) -> Result<()> {
    let attr = ready_to_receive(origin, mine, remote, tc);
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    origin.resolving.modify(qp, &attr, mask, end).map_err(|e| {
        Error::system(format!(
            "queue pair {} to RTR (towards queue pair {}, from {:?}, GID index {}, to {:?}, LID {}, MTU {}, traffic \
             class {tc}): {e}; {}",
            qp.number(),
            remote.qpn,
            Ipv6Addr::from(mine.gid),
            origin.gid.index,
            Ipv6Addr::from(remote.hello.gid),
            remote.hello.lid,
            mtu_bytes(attr.path_mtu),
            match e.raw_os_error() {
                Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT) =>
                    "there is no route or no neighbour entry for the peer's address; check `ip route`, ARP, and that \
                     the NICs of all ranks reach each other, those of other rails too; NCCL_IB_MQP_RETRY_CNT and \
                     NCCL_IB_MQP_RETRY_SLEEP_MSEC set how often it is tried",
                _ => "check that both ends' GIDs are of one kind and reach each other (NCCL_IB_GID_INDEX)",
            }
        ))
    })
}

/// RTR to RTS. `psn` is the first packet number that this end sends; nothing is tried again after `end`.
pub fn send(qp: &Qp, origin: &Origin, mine: &Hello, remote: &RemoteQp, psn: u32, end: Instant) -> Result<()> {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: psn,
        timeout: origin.timeout.min(31),
        retry_cnt: origin.retry_cnt,
        // 7: for ever. Signal messages are sent only for receives that are posted, so this is never needed.
        rnr_retry: 7,
        max_rd_atomic: mine.max_rd_atomic.min(remote.hello.max_dest_rd_atomic),
        ..Default::default()
    };
    let mask =
        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    origin.resolving.modify(qp, &attr, mask, end).map_err(|e| {
        Error::system(format!(
            "queue pair {} to RTS (timeout {}, {} retries, {} reads and atomics): {e}",
            qp.number(),
            attr.timeout,
            attr.retry_cnt,
            attr.max_rd_atomic
        ))
    })
}

/// `RXE_VENDOR_ID` of the kernel's `rxe_param.h`: soft-RoCE.
const SOFT_ROCE: u32 = 0x00FF_FFFF;

/// How often a queue pair may send again on a device of this vendor, of the `wanted` times. Soft-RoCE takes 7 for
/// "for ever" (`rxe_comp.c`), and would never tell of a peer that is gone.
fn retries(wanted: u8, vendor: u32) -> u8 {
    wanted.min(if vendor == SOFT_ROCE { 6 } else { 7 })
}

/// Bytes of an `IBV_MTU_*`.
pub fn mtu_bytes(mtu: u32) -> u32 {
    128 << mtu.min(5)
}

fn ready_to_receive(origin: &Origin, mine: &Hello, remote: &RemoteQp, tc: u8) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: mine.active_mtu.min(remote.hello.active_mtu).into(),
        dest_qp_num: remote.qpn,
        rq_psn: remote.psn,
        max_dest_rd_atomic: mine.max_dest_rd_atomic.min(remote.hello.max_rd_atomic),
        // NCCL's value: 0.64 ms.
        min_rnr_timer: 12,
        ah_attr: address(origin, mine, &remote.hello, tc),
        ..Default::default()
    }
}

/// The way to a peer: by GID on Ethernet, across subnets and where the port asks for it; else by LID.
pub(super) fn address(origin: &Origin, mine: &Hello, peer: &Hello, tc: u8) -> ibv_ah_attr {
    let ethernet = mine.link_layer == IBV_LINK_LAYER_ETHERNET;
    let same_subnet = mine.gid[6..8] == peer.gid[6..8];
    let flid = u16::from_be_bytes([peer.gid[4], peer.gid[5]]);
    let global = ethernet || !same_subnet || mine.grh_required || peer.grh_required;
    ibv_ah_attr {
        grh: if global {
            ibv_global_route {
                dgid: ibv_gid { raw: peer.gid },
                flow_label: 0,
                sgid_index: origin.gid.index,
                hop_limit: 255,
                traffic_class: tc,
            }
        } else {
            ibv_global_route::default()
        },
        dlid: if same_subnet || ethernet || flid == 0 { peer.lid } else { flid },
        sl: origin.sl,
        src_path_bits: 0,
        static_rate: 0,
        is_global: u8::from(global),
        port_num: origin.port,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(link_layer: u8, subnet: u8) -> Hello {
        let mut gid = [0xfe, 0x80, 0, 0, 0, 0, 0, subnet, 0, 0, 0, 0, 0, 0, 0, 1];
        gid[5] = 9;
        Hello {
            link_layer,
            active_mtu: 5,
            grh_required: false,
            atomics: true,
            ece: false,
            iwarp: false,
            lid: 17,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 8,
            gid_type: 2,
            gid,
            max_msg_sz: 1 << 30,
        }
    }

    fn origin() -> Origin {
        let gid = GidEntry { index: 3, gid: ibv_gid::default(), kind: 2 };
        let resolving = Resolving { retries: 0, all: false, pause: Duration::ZERO };
        Origin { port: 1, pkey_index: 0, gid, sl: 2, timeout: 20, retry_cnt: 7, resolving }
    }

    #[test]
    fn the_smaller_end_decides() {
        let mine = Hello { active_mtu: 3, ..hello(2, 0) };
        let remote = RemoteQp { hello: Hello { max_rd_atomic: 4, ..hello(2, 0) }, qpn: 5, psn: 6 };
        let attr = ready_to_receive(&origin(), &mine, &remote, 106);
        assert_eq!((attr.path_mtu, attr.max_dest_rd_atomic, attr.dest_qp_num, attr.rq_psn), (3, 4, 5, 6));
        assert_eq!(mtu_bytes(attr.path_mtu), 1024);
    }

    #[test]
    fn ethernet_is_always_global() {
        let ah = address(&origin(), &hello(2, 0), &hello(2, 0), 106);
        assert_eq!(
            (ah.is_global, ah.grh.sgid_index, ah.grh.hop_limit, ah.grh.traffic_class, ah.sl),
            (1, 3, 255, 106, 2)
        );
        assert_eq!(ah.grh.dgid.raw, hello(2, 0).gid);
    }

    #[test]
    fn infiniband_is_local_within_a_subnet() {
        let ah = address(&origin(), &hello(1, 0), &hello(1, 0), 0);
        assert_eq!((ah.is_global, ah.dlid), (0, 17));
        let ah = address(&origin(), &hello(1, 0), &hello(1, 1), 0);
        assert_eq!((ah.is_global, ah.dlid), (1, 9));
        let ah = address(&origin(), &hello(1, 0), &Hello { grh_required: true, ..hello(1, 0) }, 0);
        assert_eq!((ah.is_global, ah.dlid), (1, 17));
    }
}
