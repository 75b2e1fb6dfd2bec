//! `NCCL_IB_ADDR_RANGE`: the addresses of a subnet.

use std::fmt;
use std::net::IpAddr;

/// Addresses of one family that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    address: IpAddr,
    bits: u8,
}

impl AddressRange {
    /// From `ADDRESS/BITS`; `None`: no such thing.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, bits) = text.trim().split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        Some(Self { address, bits: bits.parse().ok().filter(|bits| *bits <= most)? })
    }

    /// Whether it is of IPv4 addresses.
    pub fn is_ipv4(&self) -> bool {
        self.address.is_ipv4()
    }

    /// Whether an address is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        let differs = match (self.address, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() < u32::from(self.bits),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() < u32::from(self.bits),
            _ => true,
        };
        !differs
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bits_decide() {
        for (range, address, is_in) in [
            ("10.1.0.0/16", "10.1.255.3", true),
            ("10.1.2.3/16", "10.1.255.3", true),
            ("10.1.0.0/16", "10.2.0.0", false),
            ("10.1.0.0/32", "10.1.0.0", true),
            ("10.1.0.0/32", "10.1.0.1", false),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("2001:db8::/33", "2001:db8:8000::1", false),
            ("2001:db8::/32", "2001:db8:8000::1", true),
            ("::/0", "::ffff:10.0.0.1", true),
        ] {
            let range = AddressRange::parse(range).unwrap();
            assert_eq!(range.contains(address.parse().unwrap()), is_in, "{range} {address}");
        }
        for text in ["", "10.1.0.0", "10.1.0.0/", "10.1.0.0/33", "::/129", "10.1/16", "10.1.0.0/-1", "mlx5_0/8"] {
            assert_eq!(AddressRange::parse(text), None, "{text}");
        }
    }
}
