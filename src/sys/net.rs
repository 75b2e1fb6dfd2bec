//! Sockets that wait for other ranks.

use crate::sys::fork::Private;
use nix::errno::Errno;
use nix::sys::socket::{self, sockopt, AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;

/// Listens at `address`, port 0 meaning one of the kernel's choice; accepting does not block. Many ranks may come at
/// once, while nobody accepts: the queue is as long as the kernel allows (net.core.somaxconn). An error comes with
/// the call that failed.
pub fn listen(address: SocketAddr) -> Result<Private<TcpListener>, (&'static str, Errno)> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket::socket(family, SockType::Stream, flags, None).map_err(|e| ("socket", e))?;
    let listener = Private::new(TcpListener::from(fd));
    if address.is_ipv6() {
        socket::setsockopt(&*listener, sockopt::Ipv6V6Only, &true).map_err(|e| ("setsockopt IPV6_V6ONLY", e))?;
    }
    socket::bind(listener.as_raw_fd(), &SockaddrStorage::from(address)).map_err(|e| ("bind", e))?;
    socket::listen(&*listener, Backlog::MAXALLOWABLE).map_err(|e| ("listen", e))?;
    Ok(listener)
}
