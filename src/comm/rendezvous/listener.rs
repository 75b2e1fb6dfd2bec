//! The listening socket behind a handle.

use crate::comm::handle::{self, Handle, Token};
use crate::comm::interfaces;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::Private;
use nix::sys::socket::{self, sockopt, AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;

/// A socket that listens on the chosen interface, and the token that a connection must show. Closed on drop.
#[derive(Debug)]
pub struct Listener {
    socket: Private<TcpListener>,
    handle: Handle,
}

impl Listener {
    /// Opens a socket on the first interface that `config` selects, at a port that the kernel picks.
    pub fn open(config: &Config) -> Result<Self> {
        let mut last = None;
        for chosen in interfaces::choose(config)? {
            match Self::bind(chosen.address) {
                Ok(listener) => {
                    log::debug!("listening on {} at {}", chosen.name, listener.handle.address);
                    return Ok(listener);
                }
                Err(error) => last = Some(error.context(format_args!("interface {}", chosen.name))),
            }
        }
        Err(last.unwrap_or_else(|| Error::internal("no interface to listen on")))
    }

    /// Opens a socket at `address`; port 0: the kernel picks.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let failed = |call: &'static str| move |e| Error::system(format!("{call} for a listener at {address}: {e}"));
        let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket::socket(family, SockType::Stream, flags, None).map_err(failed("socket"))?;
        let socket = Private::new(TcpListener::from(fd));
        if address.is_ipv6() {
            socket::setsockopt(&*socket, sockopt::Ipv6V6Only, &true).map_err(failed("setsockopt IPV6_V6ONLY"))?;
        }
        socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(address)).map_err(failed("bind"))?;
        // All ranks may come before rank 0 accepts: as many as the kernel allows (net.core.somaxconn).
        socket::listen(&*socket, Backlog::MAXALLOWABLE).map_err(failed("listen"))?;
        let address = socket.local_addr().map_err(|e| Error::system(format!("getsockname of a listener: {e}")))?;
        Ok(Self { socket, handle: Handle { address, token: Token::random()? } })
    }

    /// The 128 bytes for the other ranks.
    pub fn handle(&self) -> [u8; handle::BYTES] {
        self.handle.encode()
    }

    /// What a connection must show.
    pub(super) fn token(&self) -> Token {
        self.handle.token
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.handle.address
    }

    pub(super) fn socket(&self) -> &TcpListener {
        &self.socket
    }
}
