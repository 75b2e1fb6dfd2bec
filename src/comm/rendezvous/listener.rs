//! The listening socket behind a handle.

use crate::comm::handle::{self, Handle, Token};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::sys::fork::Private;
use crate::sys::interfaces;
use crate::sys::net;
use std::net::{SocketAddr, TcpListener};

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
        let socket = net::listen(address)
            .map_err(|(call, e)| Error::system(format!("{call} for a listener at {address}: {}", e.desc())))?;
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
