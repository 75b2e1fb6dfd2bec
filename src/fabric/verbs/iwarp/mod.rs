//! iWARP: RDMA over TCP. Its queue pairs are made as all others, but only the RDMA connection manager can connect
//! them: it moves them to RTS when the TCP connection stands. One listener a context takes the connections of lower
//! ranks and of this rank itself; this rank connects to itself and to higher ranks.

mod acceptor;
mod addresses;
mod connections;
mod first;
mod greeting;
mod meet;

pub use acceptor::Acceptor;
pub use addresses::{from_gid, to_gid, Addresses};
pub use connections::Connections;
pub use first::{first_reads, FirstRead};
pub use meet::{meet, ConnectRound, Peer};

use super::wire::Hello;
use oxygin_ffi::rdmacm::RdmaCm;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Where a communicator's iWARP connections start from.
pub struct Home {
    /// The library.
    pub cm: Arc<RdmaCm>,
    /// The device's address.
    pub address: IpAddr,
    /// The device's name.
    pub device: String,
    /// How long the connections of a set of contexts may take: half of `OXYGIN_TIMEOUT`, so that the ranks still meet
    /// in time to tell each other of a failure.
    pub patience: Duration,
}

impl Home {
    /// The address that a hello carries.
    pub fn address_in(hello: &Hello) -> IpAddr {
        from_gid(hello.gid)
    }
}
