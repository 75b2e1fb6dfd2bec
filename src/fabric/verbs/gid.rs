//! Which entry of a port's GID table a connection starts from.

use oxygin_ffi::verbs::types::{ibv_gid, IBV_GID_TYPE_ROCE_V2};

/// One readable entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its index.
    pub index: u8,
    /// The identifier.
    pub gid: ibv_gid,
    /// `IBV_GID_TYPE_*`.
    pub kind: u32,
}

/// Whether the identifier is an IPv4 address in IPv6 clothes (`::ffff:a.b.c.d`).
pub fn is_ipv4_mapped(gid: &ibv_gid) -> bool {
    gid.raw[..10] == [0; 10] && gid.raw[10..12] == [0xff, 0xff]
}

/// Whether anything is configured there: not all zeros, not a link-local prefix without an interface.
pub fn is_configured(gid: &ibv_gid) -> bool {
    gid.raw != [0; 16] && !(is_link_local(gid) && gid.raw[8..] == [0; 8])
}

fn is_link_local(gid: &ibv_gid) -> bool {
    gid.raw[..8] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0]
}

/// The entry for RoCE as NCCL's NET picks it: version 2 before version 1, IPv4-mapped first, then routable IPv6, then
/// link-local; among equals the first in the table.
pub fn choose_roce(table: &[GidEntry]) -> Option<GidEntry> {
    let rank = |e: &&GidEntry| {
        let address = match &e.gid {
            g if is_ipv4_mapped(g) => 0,
            g if !is_link_local(g) => 1,
            _ => 2,
        };
        // An IPv4 address decides before the version does: NCCL changes versions only within the wanted family.
        let version = u8::from(e.kind != IBV_GID_TYPE_ROCE_V2);
        (address != 0, version, address, e.index)
    };
    table.iter().filter(|e| is_configured(&e.gid)).min_by_key(rank).copied()
}

/// The entry for InfiniBand as NCCL's NET picks it: entry 1 where its prefix carries a routable subnet number (FLID),
/// else entry 0.
pub fn choose_infiniband(table: &[GidEntry]) -> Option<GidEntry> {
    let routable = table.iter().find(|e| e.index == 1 && e.gid.raw[4..6] != [0, 0]);
    routable.or_else(|| table.iter().find(|e| e.index == 0)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxygin_ffi::verbs::types::IBV_GID_TYPE_ROCE_V1;

    fn entry(index: u8, text: &str, version: u8) -> GidEntry {
        let raw = text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        let kind = if version == 2 { IBV_GID_TYPE_ROCE_V2 } else { IBV_GID_TYPE_ROCE_V1 };
        GidEntry { index, gid: ibv_gid { raw }, kind }
    }

    #[test]
    fn roce_prefers_version_two_over_ipv4() {
        let table = [
            entry(0, "fe80::1", 1),
            entry(1, "fe80::1", 2),
            entry(2, "::ffff:10.0.0.1", 1),
            entry(3, "::ffff:10.0.0.1", 2),
            entry(4, "2001:db8::1", 2),
            entry(5, "::ffff:10.0.1.1", 2),
        ];
        assert_eq!(choose_roce(&table).unwrap().index, 3);
        assert_eq!(choose_roce(&table[..3]).unwrap().index, 2);
        assert_eq!(choose_roce(&[table[0], table[1], table[4]]).unwrap().index, 4);
        assert_eq!(choose_roce(&table[..2]).unwrap().index, 1);
        assert_eq!(choose_roce(&[entry(0, "::", 2), entry(1, "fe80::", 2)]), None);
    }

    #[test]
    fn infiniband_takes_a_routable_entry_one() {
        let zero = entry(0, "fe80::1", 1);
        assert_eq!(choose_infiniband(&[zero, entry(1, "fe80::2", 1)]).unwrap().index, 0);
        assert_eq!(choose_infiniband(&[zero, entry(1, "fec0:0:7:1::2", 1)]).unwrap().index, 1);
        assert_eq!(choose_infiniband(&[]), None);
    }
}
