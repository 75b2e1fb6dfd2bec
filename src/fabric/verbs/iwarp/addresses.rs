//! Which IP address of this host belongs to which iWARP device.

use crate::sys::interfaces;
use oxygin_ffi::rdmacm::{EventChannel, Id, RdmaCm};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The addresses of this host that lead to an RDMA device: device, port, address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses(Vec<(String, u8, IpAddr)>);

impl Addresses {
    /// Asks the connection manager for every address of this host: IPv4 first, loopback last. The error is a sentence
    /// with a remedy.
    pub fn find() -> Result<Self, String> {
        let cm = RdmaCm::load().map_err(|e| e.to_string())?;
        let channel = open(&cm)?;
        let present = interfaces::present().map_err(|e| e.message().to_string())?;
        let mut candidates: Vec<IpAddr> = present.iter().map(|p| p.address.ip()).filter(is_candidate).collect();
        candidates.sort_by_key(|ip| (ip.is_loopback(), ip.is_ipv6()));
        let mut found = Vec::new();
        for ip in candidates {
            let id = Id::new(&channel).map_err(|e| format!("the RDMA connection manager makes no identifier: {e}"))?;
            // An address that no RDMA device has binds to none, or not at all.
            let Ok(()) = id.bind(&SocketAddr::new(ip, 0)) else { continue };
            if let Some((device, port)) = id.device() {
                found.push((device, port, ip));
            }
        }
        Ok(Self(found))
    }

    /// The first address of a port.
    pub fn of(&self, device: &str, port: u8) -> Option<IpAddr> {
        self.0.iter().find(|(d, p, _)| d == device && *p == port).map(|(_, _, ip)| *ip)
    }
}

/// An event channel, or why there is none.
pub fn open(cm: &Arc<RdmaCm>) -> Result<Arc<EventChannel>, String> {
    EventChannel::new(cm).map_err(|e| {
        format!(
            "the RDMA connection manager cannot be reached: {e}; load the module rdma_ucm and give this user access to \
             /dev/infiniband/rdma_cm (in a container: pass it in)"
        )
    })
}

/// Link-local addresses mean something else on each interface.
fn is_candidate(ip: &IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.segments()[0] & 0xffc0 == 0xfe80,
    };
    !ip.is_unspecified() && !link_local
}

/// The address in the form of a GID, as hellos carry it.
pub fn to_gid(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address that a hello carries.
pub fn from_gid(gid: [u8; 16]) -> IpAddr {
    IpAddr::V6(gid.into()).to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_pass_through_hellos() {
        for text in ["10.1.2.3", "2001:db8::1"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(from_gid(to_gid(ip)), ip);
            assert!(is_candidate(&ip));
        }
        for text in ["0.0.0.0", "fe80::1", "169.254.3.4"] {
            assert!(!is_candidate(&text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn a_port_has_the_first_address_of_its_own() {
        let at = |device: &str, port, ip: &str| (device.to_owned(), port, ip.parse().unwrap());
        let all = Addresses(vec![at("siw1", 1, "10.0.0.9"), at("siw0", 2, "10.0.0.2"), at("siw0", 2, "::2")]);
        assert_eq!(all.of("siw0", 2), Some("10.0.0.2".parse().unwrap()));
        assert_eq!(all.of("siw0", 1), None);
    }
}
