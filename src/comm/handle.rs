//! The 128-byte handle that `listen` fills and NCCL carries to every rank.
//!
//! It says where a rank listens and holds a random token. NCCL hands handles
//! to the ranks of the job only, so whoever shows the token belongs to the job.

use crate::error::{Error, Result};
use crate::sys::{secret, version};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Bytes of a handle.
pub const BYTES: usize = nccl_plugin_api::HANDLE_BYTES;

/// Where each thing is. Numbers are little-endian; bytes that no field names are zero.
mod field {
    use std::ops::Range;
    pub const MAGIC: Range<usize> = 0..8;
    pub const VERSION: Range<usize> = 8..10;
    pub const FLAGS: Range<usize> = 10..12;
    pub const PORT: Range<usize> = 12..14;
    pub const SCOPE: Range<usize> = 16..20;
    pub const ADDRESS: Range<usize> = 20..36;
    pub const TOKEN: Range<usize> = 36..52;
    /// Text, NUL behind it. Stays here in all versions, as magic and version do: builds that refuse each other name it.
    pub const BUILD: Range<usize> = 52..52 + crate::sys::version::MAX_BYTES;
}

const MAGIC: [u8; 8] = *b"oxyginH\0";

/// Counts changes of this layout, of the rendezvous messages and of their order: all ranks of a job must have the same.
pub const VERSION: u16 = 2;

/// Flag: the address is IPv6.
const FLAG_IPV6: u16 = 1;

/// What only the ranks of a job know.
#[derive(Clone, Copy)]
pub struct Token([u8; 16]);

impl Token {
    /// A fresh random one.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| Error::system(format!("no random bytes from the kernel: {e}")))?;
        Ok(Self(bytes))
    }

    /// From a message or a handle.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// For a message.
    pub fn bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl PartialEq for Token {
    /// Takes as long for a first byte that differs as for the last.
    fn eq(&self, other: &Self) -> bool {
        secret::same(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Token {
    /// Secrets do not belong into logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// What a handle says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Handle {
    /// Where the rank listens.
    pub address: SocketAddr,
    /// What a connection there must show.
    pub token: Token,
}

fn u16_at(bytes: &[u8; BYTES], range: std::ops::Range<usize>) -> u16 {
    u16::from_le_bytes([bytes[range.start], bytes[range.start + 1]])
}

/// The one place where bytes from a peer become trusted: magic, version and flags.
fn check(bytes: &[u8; BYTES]) -> Result<()> {
    if bytes[field::MAGIC] != MAGIC {
        return Err(Error::argument(
            "its handle was not made by oxygin: NCCL took another plugin there, its own where RDMA devices suit it; \
             name oxygin by NCCL_GIN_PLUGIN and NCCL_RMA_PLUGIN on all ranks",
        ));
    }
    let version = u16_at(bytes, field::VERSION);
    if version != VERSION {
        return Err(Error::argument(format!(
            "its oxygin is {} and speaks version {version} of the set-up protocol, this one is {} and speaks version \
             {VERSION}; install builds that speak the same on all ranks",
            version::of_peer(&bytes[field::BUILD]),
            version::BUILD
        )));
    }
    let flags = u16_at(bytes, field::FLAGS);
    if flags & !FLAG_IPV6 != 0 {
        return Err(Error::argument(format!("a handle has unknown flags {flags:#x}")));
    }
    Ok(())
}

impl Handle {
    /// As bytes.
    pub fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[field::MAGIC].copy_from_slice(&MAGIC);
        bytes[field::VERSION].copy_from_slice(&VERSION.to_le_bytes());
        bytes[field::PORT].copy_from_slice(&self.address.port().to_le_bytes());
        match self.address {
            SocketAddr::V4(v4) => bytes[field::ADDRESS][..4].copy_from_slice(&v4.ip().octets()),
            SocketAddr::V6(v6) => {
                bytes[field::FLAGS].copy_from_slice(&FLAG_IPV6.to_le_bytes());
                bytes[field::ADDRESS].copy_from_slice(&v6.ip().octets());
                bytes[field::SCOPE].copy_from_slice(&v6.scope_id().to_le_bytes());
            }
        }
        bytes[field::TOKEN].copy_from_slice(self.token.bytes());
        bytes[field::BUILD][..version::BUILD.len()].copy_from_slice(version::BUILD.as_bytes());
        bytes
    }

    /// From bytes that came from anywhere.
    pub fn decode(bytes: &[u8; BYTES]) -> Result<Self> {
        check(bytes)?;
        let port = u16_at(bytes, field::PORT);
        let mut octets = [0; 16];
        octets.copy_from_slice(&bytes[field::ADDRESS]);
        let address = if u16_at(bytes, field::FLAGS) & FLAG_IPV6 != 0 {
            let mut scope = [0; 4];
            scope.copy_from_slice(&bytes[field::SCOPE]);
            SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, u32::from_le_bytes(scope)).into()
        } else {
            SocketAddr::new(IpAddr::V4(Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3])), port)
        };
        let mut token = [0; 16];
        token.copy_from_slice(&bytes[field::TOKEN]);
        Ok(Self { address, token: Token(token) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address() -> impl Strategy<Value = SocketAddr> {
        prop_oneof![
            (any::<[u8; 4]>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::from((ip, port))),
            (any::<[u8; 16]>(), any::<u16>(), any::<u32>()).prop_map(|(ip, port, scope)| SocketAddrV6::new(
                ip.into(),
                port,
                0,
                scope
            )
            .into()),
        ]
    }

    proptest! {
        #[test]
        fn round_trip(address in address(), token: [u8; 16]) {
            let handle = Handle { address, token: Token(token) };
            prop_assert_eq!(Handle::decode(&handle.encode()).unwrap(), handle);
        }

        #[test]
        fn anything_decodes_or_fails(bytes in proptest::collection::vec(any::<u8>(), BYTES), good_head: bool) {
            let mut bytes: [u8; BYTES] = bytes.try_into().unwrap();
            if good_head {
                bytes[field::MAGIC].copy_from_slice(&MAGIC);
                bytes[field::VERSION].copy_from_slice(&VERSION.to_le_bytes());
                let flags = u16_at(&bytes, field::FLAGS) & FLAG_IPV6;
                bytes[field::FLAGS].copy_from_slice(&flags.to_le_bytes());
            }
            prop_assert_eq!(Handle::decode(&bytes).is_ok(), good_head);
        }
    }

    #[test]
    fn wrong_ones_say_what_to_do() {
        assert!(Handle::decode(&[0; BYTES]).unwrap_err().message().contains("plugin"));
        let handle = Handle { address: "10.0.0.1:7".parse().unwrap(), token: Token::random().unwrap() };
        let mut bytes = handle.encode();
        bytes[field::VERSION][0] = 9;
        bytes[field::BUILD][..9].copy_from_slice(b"9.8.7 (x)");
        bytes[field::BUILD][9..].fill(0);
        let error = Handle::decode(&bytes).unwrap_err();
        let said = ["9.8.7 (x)", "version 9", version::BUILD, &format!("version {VERSION}")];
        assert!(said.iter().all(|words| error.message().contains(words)), "{error}");
    }

    #[test]
    fn tokens_differ_and_do_not_show() {
        let (a, b) = (Token::random().unwrap(), Token::random().unwrap());
        assert!(a != b && a == a);
        assert_eq!(format!("{a:?}"), "Token(..)");
    }
}
