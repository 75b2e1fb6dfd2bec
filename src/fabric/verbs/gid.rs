//! Which entry of a port's GID table a connection starts from.

use crate::config::{AddressRange, Config};
use oxygin_ffi::verbs::types::{ibv_gid, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2};
use std::net::{IpAddr, Ipv6Addr};

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

/// What a GID is chosen by where its index is not given.
#[derive(Clone, Copy, Debug)]
pub struct GidWish {
    /// `IBV_GID_TYPE_ROCE_V1` or `_V2`.
    pub kind: u32,
    /// An IPv6 address is wanted, else an IPv4 one.
    pub ipv6: bool,
    /// Where the address is to be, if it is of the wanted family.
    pub range: Option<AddressRange>,
}

impl GidWish {
    /// From `NCCL_IB_ROCE_VERSION_NUM`, `NCCL_IB_ADDR_FAMILY` and `NCCL_IB_ADDR_RANGE`.
    pub fn of(config: &Config) -> Self {
        let kind = if config.ib_roce_version == 1 { IBV_GID_TYPE_ROCE_V1 } else { IBV_GID_TYPE_ROCE_V2 };
        Self { kind, ipv6: config.ib_wants_ipv6, range: config.ib_address_range }
    }

    /// Whether the entry's address is in the wanted range.
    pub fn is_in_range(&self, entry: &GidEntry) -> bool {
        let is_ipv4 = is_ipv4_mapped(&entry.gid);
        let address = match Ipv6Addr::from(entry.gid.raw).to_ipv4_mapped() {
            Some(address) => IpAddr::V4(address),
            None => IpAddr::V6(entry.gid.raw.into()),
        };
        is_ipv4 != self.ipv6 && self.range.is_none_or(|range| range.contains(address))
    }
}

/// The entry for RoCE that fits the wish best, much as NCCL's NET picks it: one in the range, then one of the wanted
/// family, then one of the wanted version; link-local addresses last in their family; among equals the first in the
/// table. Where nothing is of the wanted family NCCL takes entry 0, whatever it is, which is a link-local one of
/// version 1 mostly.
pub fn choose_roce(table: &[GidEntry], wish: &GidWish) -> Option<GidEntry> {
    let rank = |e: &&GidEntry| {
        let class = match (is_ipv4_mapped(&e.gid), is_link_local(&e.gid)) {
            (is_ipv4, false) if is_ipv4 != wish.ipv6 => 0,
            (_, is_link_local) => 1 + u8::from(is_link_local != wish.ipv6),
        };
        let is_out = wish.range.is_some() && !wish.is_in_range(e);
        // An address of the wanted family decides before the version does: NCCL changes versions only within it.
        (is_out, class != 0, e.kind != wish.kind, class, e.index)
    };
    table.iter().filter(|e| is_configured(&e.gid)).min_by_key(rank).copied()
}

/// The entry for InfiniBand as NCCL's NET picks it: entry `flid` where its prefix carries a routable subnet number
/// (FLID), else entry 0.
pub fn choose_infiniband(table: &[GidEntry], flid: u8) -> Option<GidEntry> {
    let routable = table.iter().find(|e| e.index == flid && e.gid.raw[4..6] != [0, 0]);
    routable.or_else(|| table.iter().find(|e| e.index == 0)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let usual = GidWish { kind: IBV_GID_TYPE_ROCE_V2, ipv6: false, range: None };
        let index = |table: &[GidEntry], wish: &GidWish| choose_roce(table, wish).map(|e| e.index);
        assert_eq!(index(&table, &usual), Some(3));
        assert_eq!(index(&table[..3], &usual), Some(2));
        assert_eq!(index(&[table[0], table[1], table[4]], &usual), Some(4));
        assert_eq!(index(&table[..2], &usual), Some(1));
        assert_eq!(index(&[entry(0, "::", 2), entry(1, "fe80::", 2)], &usual), None);
        let version_one = GidWish { kind: IBV_GID_TYPE_ROCE_V1, ..usual };
        assert_eq!(index(&table, &version_one), Some(2));
        let within = |text: &str, ipv6| GidWish { ipv6, range: AddressRange::parse(text), ..usual };
        assert_eq!(index(&table, &within("10.0.1.0/24", false)), Some(5));
        assert_eq!(index(&table, &within("10.0.0.0/16", false)), Some(3));
        // Nothing there, or a range of the family that is not wanted: chosen without it.
        assert_eq!(index(&table, &within("192.0.2.0/24", false)), Some(3));
        assert_eq!(index(&table, &within("2001:db8::/32", false)), Some(3));
        let ipv6 = GidWish { ipv6: true, ..usual };
        assert_eq!(index(&table, &ipv6), Some(4));
        assert_eq!(index(&table[..4], &ipv6), Some(1), "link-local, but of the family");
        assert_eq!(index(&table[2..4], &ipv6), Some(3));
        assert_eq!(index(&[table[4], entry(6, "fd00::1", 2)], &within("fd00::/8", true)), Some(6));
    }

    #[test]
    fn infiniband_takes_a_routable_entry_one() {
        let zero = entry(0, "fe80::1", 1);
        let (local, routable) = (entry(1, "fe80::2", 1), entry(1, "fec0:0:7:1::2", 1));
        let index = |table: &[GidEntry], flid| choose_infiniband(table, flid).map(|e| e.index);
        assert_eq!(index(&[zero, local], 1), Some(0));
        assert_eq!(index(&[zero, routable], 1), Some(1));
        assert_eq!(index(&[zero, routable], 2), Some(0));
        assert_eq!(index(&[zero, local, GidEntry { index: 2, ..routable }], 2), Some(2));
        assert_eq!(index(&[], 1), None);
    }
}
