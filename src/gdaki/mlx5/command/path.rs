//! The way to a peer's port, as queue pairs have it (`ads`).

use super::fields::{field, CommandWords, Field};
use oxygin_ffi::verbs::types::ibv_ah_attr;

/// Fields of `ads`.
pub mod fields {
    use super::{field, Field};

    /// Index of the P_Key.
    pub const PKEY_INDEX: Field = field(0x10, 16);
    /// There is a global route header, on InfiniBand.
    pub const GRH: Field = field(0x28, 1);
    /// Path bits.
    pub const MLID: Field = field(0x29, 7);
    /// The peer's local identifier.
    pub const RLID: Field = field(0x30, 16);
    /// How long an acknowledgement may take.
    pub const ACK_TIMEOUT: Field = field(0x40, 5);
    /// The own GID, by its index.
    pub const SRC_ADDR_INDEX: Field = field(0x48, 8);
    /// Rate limit.
    pub const STAT_RATE: Field = field(0x54, 4);
    /// Routers that a packet may pass.
    pub const HOP_LIMIT: Field = field(0x58, 8);
    /// Traffic class.
    pub const TCLASS: Field = field(0x64, 8);
    /// Flow label.
    pub const FLOW_LABEL: Field = field(0x6c, 20);
    /// The peer's GID, or its IP address: 16 bytes.
    pub const RGID_RIP: usize = 0x80;
    /// On RoCE v2 the upper part of the traffic class.
    pub const DSCP: Field = field(0x10a, 6);
    /// On RoCE v2 the source port.
    pub const UDP_SPORT: Field = field(0x110, 16);
    /// On Ethernet the service level.
    pub const ETH_PRIO: Field = field(0x121, 3);
    /// On InfiniBand the service level.
    pub const SL: Field = field(0x124, 4);
    /// The port.
    pub const VHCA_PORT_NUM: Field = field(0x128, 8);
    /// The next hop's MAC address: 6 bytes.
    pub const RMAC: usize = 0x130;
}

/// What a way is on Ethernet beside what libibverbs says of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// The next hop.
    pub mac: [u8; 6],
    /// The source port; `None`: RoCE v1, which has none.
    pub udp_port: Option<u16>,
}

/// The way to a peer.
#[derive(Clone, Copy, Debug)]
pub struct PortPath {
    /// As the verbs fabric would have it.
    pub way: ibv_ah_attr,
    /// Index of the P_Key.
    pub pkey_index: u16,
    /// On Ethernet.
    pub ethernet: Option<Ethernet>,
}

impl PortPath {
    /// Writes it as an `ads` that begins `start` bits behind the beginning.
    pub(super) fn write<const BYTES: usize>(&self, message: &mut CommandWords<BYTES>, start: usize) {
        use fields::*;
        let way = &self.way;
        let mut set = |field: Field, value: u64| {
            message.set(field.within(start), value);
        };
        set(PKEY_INDEX, self.pkey_index.into());
        set(VHCA_PORT_NUM, way.port_num.into());
        set(STAT_RATE, way.static_rate.into());
        if way.is_global != 0 {
            set(SRC_ADDR_INDEX, way.grh.sgid_index.into());
            set(HOP_LIMIT, way.grh.hop_limit.into());
            set(TCLASS, way.grh.traffic_class.into());
            set(FLOW_LABEL, u64::from(way.grh.flow_label) & 0xf_ffff);
        }
        match &self.ethernet {
            None => {
                set(GRH, u64::from(way.is_global != 0));
                set(MLID, u64::from(way.src_path_bits) & 0x7f);
                set(RLID, way.dlid.into());
                set(SL, u64::from(way.sl) & 15);
            }
            Some(ethernet) => {
                set(ETH_PRIO, u64::from(way.sl) & 7);
                if let Some(port) = ethernet.udp_port {
                    set(UDP_SPORT, port.into());
                    set(DSCP, u64::from(way.grh.traffic_class >> 2));
                }
                message.set_bytes(start + RMAC, &ethernet.mac);
            }
        }
        if way.is_global != 0 {
            message.set_bytes(start + RGID_RIP, &way.grh.dgid.raw);
        }
    }
}

/// The source port of a connection on RoCE v2, between `first` and `last`: the same on every try, and others for other
/// queue pairs, so that a network with several ways spreads them.
pub fn udp_port((first, last): (u16, u16), own: u32, peer: u32) -> u16 {
    /// Where RoCE's source ports begin if the device does not say: the first port that nobody is given.
    const FIRST: u16 = 0xc000;
    let (first, last) = if first == 0 || last < first { (FIRST, u16::MAX) } else { (first, last) };
    let count = u64::from(last - first) + 1;
    // Both numbers count up from connection to connection; a multiplication by an odd constant spreads what differs.
    let mixed = (u64::from(own) << 24 | u64::from(peer)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    first + (mixed % count) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxygin_ffi::verbs::types::{ibv_gid, ibv_global_route};

    fn words(path: &PortPath) -> Vec<(usize, u32)> {
        let mut message = CommandWords::<44>::default();
        path.write(&mut message, 0);
        let words = message.bytes().chunks_exact(4).map(|w| u32::from_be_bytes([w[0], w[1], w[2], w[3]]));
        words.enumerate().filter(|w| w.1 != 0).collect()
    }

    fn way() -> ibv_ah_attr {
        let raw = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw },
                flow_label: 0,
                sgid_index: 3,
                hop_limit: 255,
                traffic_class: 106,
            },
            dlid: 0x1234,
            sl: 5,
            src_path_bits: 0,
            static_rate: 0,
            is_global: 1,
            port_num: 2,
        }
    }

    #[test]
    fn on_ethernet_there_are_a_mac_a_port_and_a_dscp() {
        let ethernet = Ethernet { mac: [0x11, 0x22, 0x33, 0x44, 0x55, 0x66], udp_port: Some(0xc123) };
        let path = PortPath { way: way(), pkey_index: 7, ethernet: Some(ethernet) };
        let all = [
            (0, 7),
            (2, 3 << 16 | 255),
            (3, 106 << 20),
            (4, 0xfe80_0000),
            (6, 0x0102_0304),
            (7, 0x0506_0708),
            (8, 26 << 16 | 0xc123),
            (9, 5 << 28 | 2 << 16 | 0x1122),
            (10, 0x3344_5566),
        ];
        assert_eq!(words(&path), all);
        let v1 = PortPath { ethernet: Some(Ethernet { udp_port: None, ..ethernet }), ..path };
        assert_eq!(words(&v1), all.into_iter().filter(|w| w.0 != 8).collect::<Vec<_>>());
    }

    #[test]
    fn on_infiniband_there_are_a_lid_and_where_it_needs_one_a_global_header() {
        let path = PortPath { way: way(), pkey_index: 0, ethernet: None };
        let global = words(&path);
        assert_eq!(global[0], (1, 1 << 23 | 0x1234));
        assert_eq!(global[global.len() - 1], (9, 5 << 24 | 2 << 16));
        let local = PortPath { way: ibv_ah_attr { is_global: 0, ..way() }, ..path };
        assert_eq!(words(&local), [(1, 0x1234), (9, 5 << 24 | 2 << 16)]);
    }

    #[test]
    fn connections_have_ports_of_their_own_within_what_the_device_allows() {
        let ports = |range, peers| (0..peers).map(|p| udp_port(range, 0x90 + 3 * p, 0x200 + p)).collect::<Vec<_>>();
        let mut all = ports((0xc000, 0xffff), 256);
        assert!(all.iter().all(|&p| p >= 0xc000));
        all.sort_unstable();
        all.dedup();
        assert!(all.len() > 240, "{} ports", all.len());
        assert!(ports((0xd000, 0xd003), 64).iter().all(|p| (0xd000..=0xd003).contains(p)));
        assert!(ports((0, 0), 64).iter().all(|&p| p >= 0xc000));
        assert!(ports((9, 3), 64).iter().all(|&p| p >= 0xc000));
        assert_eq!(udp_port((u16::MAX, u16::MAX), 1, 2), u16::MAX);
    }
}
