//! What a rank says of itself so that peers can reach it without RDMA.

use crate::error::{Error, Result};
use crate::sys::wire::{Reader, Writer};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The ways to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoftHello {
    /// Secret that whoever talks to this rank presents.
    pub token: [u8; 16],
    /// Abstract name of its contact socket.
    pub contact: Vec<u8>,
    /// Where its address space holds `probe_value`: how a peer tells that cross-memory attach reaches the right
    /// process.
    pub probe: u64,
    /// Random.
    pub probe_value: [u8; 16],
    /// Where it listens for data connections.
    pub tcp: Vec<SocketAddr>,
}

impl SoftHello {
    /// Whether both ranks are on one host: they share an address.
    pub fn is_on_host_of(&self, other: &Self) -> bool {
        self.tcp.iter().any(|a| other.tcp.iter().any(|b| a.ip() == b.ip()))
    }

    /// The message.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.raw(&self.token).bytes(&self.contact).u64(self.probe).raw(&self.probe_value).u16(self.tcp.len() as u16);
        for address in &self.tcp {
            match address.ip() {
                IpAddr::V4(ip) => w.u8(4).raw(&ip.octets()).u16(address.port()),
                IpAddr::V6(ip) => w.u8(6).raw(&ip.octets()).u16(address.port()),
            };
            if let SocketAddr::V6(v6) = address {
                w.u32(v6.scope_id());
            }
        }
        w.finish()
    }

    /// From a message of `rank`.
    pub fn parse(rank: u32, message: &[u8]) -> Result<Self> {
        Self::fields(message).ok_or_else(|| {
            Error::protocol(format!("rank {rank} sent a malformed soft fabric message of {} bytes", message.len()))
        })
    }

    fn fields(message: &[u8]) -> Option<Self> {
        let mut r = Reader::new(message);
        let token = r.array()?;
        // A sockaddr_un takes 107 bytes of abstract name.
        let contact = r.bytes().filter(|b| !b.is_empty() && b.len() <= 107)?.to_vec();
        let probe = r.u64()?;
        let probe_value = r.array()?;
        let n = r.u16()?;
        let mut tcp = Vec::new();
        for _ in 0..n {
            tcp.push(match r.u8()? {
                4 => SocketAddr::new(Ipv4Addr::from(r.array::<4>()?).into(), r.u16()?),
                6 => {
                    let ip = Ipv6Addr::from(r.array::<16>()?);
                    let port = r.u16()?;
                    SocketAddrV6::new(ip, port, 0, r.u32()?).into()
                }
                _ => return None,
            });
        }
        r.end()?;
        Some(Self { token, contact, probe, probe_value, tcp })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn round_trip_and_cuts() {
        let h = SoftHello {
            token: [3; 16],
            contact: b"oxygin-x".to_vec(),
            probe: 77,
            probe_value: [5; 16],
            tcp: vec!["10.0.0.1:7".parse().unwrap(), "[fe80::1%3]:9".parse().unwrap()],
        };
        let m = h.encode();
        assert_eq!(SoftHello::parse(0, &m).unwrap(), h);
        for cut in 0..m.len() {
            assert!(SoftHello::parse(1, &m[..cut]).is_err());
        }
    }

    proptest! {
        #[test]
        fn garbage_is_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = SoftHello::parse(0, &bytes);
        }
    }
}
