//! Owners of librdmacm objects. All calls return at once; what they start ends with an event.

use super::symbols::RdmaCm;
use super::types::*;
use std::ffi::{c_int, CStr};
use std::io;
use std::mem::size_of;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr::{null_mut, NonNull};
use std::sync::Arc;

/// librdmacm returns 0, or -1 and leaves the errno.
fn checked(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An address as C has it.
fn to_c(address: &SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: all-zero bytes are a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at = (&raw mut storage).cast::<u8>();
    match address {
        SocketAddr::V4(v4) => {
            let c = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: any sockaddr fits into the storage.
            unsafe { at.cast::<libc::sockaddr_in>().write_unaligned(c) };
        }
        SocketAddr::V6(v6) => {
            let c = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: any sockaddr fits into the storage.
            unsafe { at.cast::<libc::sockaddr_in6>().write_unaligned(c) };
        }
    }
    storage
}

/// Where events arrive.
pub struct EventChannel {
    cm: Arc<RdmaCm>,
    at: NonNull<rdma_event_channel>,
}

// SAFETY: librdmacm objects may be used from any thread.
unsafe impl Send for EventChannel {}
// SAFETY: reading events is one system call each; librdmacm locks what it shares.
unsafe impl Sync for EventChannel {}

/// Something happened.
pub struct Event {
    /// `RDMA_CM_EVENT_*`.
    pub kind: u32,
    /// Which identifier ([`Id::key`]); of a connect request the listener.
    pub key: usize,
    /// The new identifier of a connect request.
    pub request: Option<Id>,
    /// 0, a negative errno, or the transport's own reason.
    pub status: i32,
    /// What the peer sent along.
    pub private_data: Vec<u8>,
}

impl EventChannel {
    /// Makes one whose reads do not block. Fails where the kernel's connection manager cannot be reached.
    pub fn new(cm: &Arc<RdmaCm>) -> io::Result<Arc<Self>> {
        // SAFETY: no arguments.
        let at = NonNull::new(unsafe { (cm.create_event_channel)() }).ok_or_else(io::Error::last_os_error)?;
        let channel = Arc::new(Self { cm: cm.clone(), at });
        // SAFETY: the descriptor is the channel's.
        unsafe {
            let flags = libc::fcntl(channel.fd(), libc::F_GETFL);
            if flags < 0 || libc::fcntl(channel.fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(channel)
    }

    /// Readable when an event waits.
    pub fn fd(&self) -> RawFd {
        // SAFETY: the channel is live.
        unsafe { self.at.as_ref() }.fd
    }

    /// Takes and acknowledges one event; `None` when none waits.
    pub fn take(self: &Arc<Self>) -> io::Result<Option<Event>> {
        let mut event = null_mut();
        // SAFETY: the channel is live, `event` outlives the call.
        if let Err(e) = checked(unsafe { (self.cm.get_cm_event)(self.at.as_ptr(), &mut event) }) {
            return if e.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(e) };
        }
        let Some(at) = NonNull::new(event) else { return Ok(None) };
        // SAFETY: librdmacm handed the event out; it stays until it is acknowledged below.
        let taken = unsafe { self.copy(at.as_ref()) };
        // SAFETY: acknowledged once; nothing of it is used from here on.
        unsafe { (self.cm.ack_cm_event)(at.as_ptr()) };
        Ok(Some(taken))
    }

    /// # Safety
    /// The event is live, and the identifier of a connect request is nobody's yet.
    unsafe fn copy(self: &Arc<Self>, event: &rdma_cm_event) -> Event {
        let request = event.event == RDMA_CM_EVENT_CONNECT_REQUEST;
        // Resolution events carry no parameters.
        let with_data = (RDMA_CM_EVENT_CONNECT_REQUEST..=RDMA_CM_EVENT_DISCONNECTED).contains(&event.event);
        // SAFETY: connection events carry this variant; others are all zeros, which it can be.
        let conn = unsafe { event.param.conn };
        let private_data = match NonNull::new(conn.private_data.cast_mut()) {
            Some(at) if with_data => {
                // SAFETY: so many bytes at that address, until the event is acknowledged.
                unsafe { std::slice::from_raw_parts(at.as_ptr().cast::<u8>(), conn.private_data_len.into()) }.to_vec()
            }
            _ => Vec::new(),
        };
        let id = match (request, NonNull::new(event.id)) {
            (true, Some(at)) => Some(Id { channel: self.clone(), at }),
            _ => None,
        };
        Event {
            kind: event.event,
            key: if request { event.listen_id as usize } else { event.id as usize },
            request: id,
            status: event.status,
            private_data,
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers hold the channel, so none is left; ended once.
        unsafe { (self.cm.destroy_event_channel)(self.at.as_ptr()) };
    }
}

/// One end of a connection, or a listener. Dropping it ends the connection, abruptly.
pub struct Id {
    channel: Arc<EventChannel>,
    at: NonNull<rdma_cm_id>,
}

// SAFETY: librdmacm objects may be used from any thread.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Id {
    /// Makes one that nothing is known of yet.
    pub fn new(channel: &Arc<EventChannel>) -> io::Result<Self> {
        let mut id = null_mut();
        // SAFETY: the channel is live, `id` outlives the call.
        checked(unsafe { (channel.cm.create_id)(channel.at.as_ptr(), &mut id, null_mut(), RDMA_PS_TCP) })?;
        let at = NonNull::new(id).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { channel: channel.clone(), at })
    }

    /// What its events name it by.
    pub fn key(&self) -> usize {
        self.at.as_ptr() as usize
    }

    /// Kernel name and port of the device that it is bound to.
    pub fn device(&self) -> Option<(String, u8)> {
        // SAFETY: the identifier is live; librdmacm keeps its devices open while it is bound to one.
        unsafe {
            let id = self.at.as_ref();
            let device = NonNull::new(NonNull::new(id.verbs)?.as_ref().device)?;
            Some((CStr::from_ptr(device.as_ref().name.as_ptr()).to_string_lossy().into_owned(), id.port_num))
        }
    }

    /// Binds it to an address of this host, and to the device that has the address, if one does.
    pub fn bind(&self, address: &SocketAddr) -> io::Result<()> {
        let mut c = to_c(address);
        // SAFETY: the identifier is live; the address is only read.
        checked(unsafe { (self.channel.cm.bind_addr)(self.at.as_ptr(), (&raw mut c).cast()) })
    }

    /// Takes connect requests; at most `backlog` wait at a time.
    pub fn listen(&self, backlog: u32) -> io::Result<()> {
        // SAFETY: the identifier is live.
        checked(unsafe { (self.channel.cm.listen)(self.at.as_ptr(), backlog as c_int) })
    }

    /// Its own port number.
    pub fn port(&self) -> u16 {
        // SAFETY: the identifier is live.
        u16::from_be(unsafe { (self.channel.cm.get_src_port)(self.at.as_ptr()) })
    }

    /// Starts to look for the device and the neighbour that lead from `source` to `target`.
    pub fn resolve_address(&self, source: &SocketAddr, target: &SocketAddr, milliseconds: u32) -> io::Result<()> {
        let (mut from, mut to) = (to_c(source), to_c(target));
        let (from, to) = ((&raw mut from).cast(), (&raw mut to).cast());
        // SAFETY: the identifier is live; the addresses are only read.
        checked(unsafe { (self.channel.cm.resolve_addr)(self.at.as_ptr(), from, to, milliseconds as c_int) })
    }

    /// Starts to look for the way there.
    pub fn resolve_route(&self, milliseconds: u32) -> io::Result<()> {
        // SAFETY: the identifier is live.
        checked(unsafe { (self.channel.cm.resolve_route)(self.at.as_ptr(), milliseconds as c_int) })
    }

    /// Starts to connect the queue pair that `param` names.
    pub fn connect(&self, param: &rdma_conn_param) -> io::Result<()> {
        let mut param = *param;
        // SAFETY: the identifier is live; private data is read during the call only.
        checked(unsafe { (self.channel.cm.connect)(self.at.as_ptr(), &mut param) })
    }

    /// Takes a connect request for the queue pair that `param` names.
    pub fn accept(&self, param: &rdma_conn_param) -> io::Result<()> {
        let mut param = *param;
        // SAFETY: the identifier is live; private data is read during the call only.
        checked(unsafe { (self.channel.cm.accept)(self.at.as_ptr(), &mut param) })
    }

    /// Refuses a connect request.
    pub fn reject(&self) -> io::Result<()> {
        // SAFETY: the identifier is live; there is no private data.
        checked(unsafe { (self.channel.cm.reject)(self.at.as_ptr(), std::ptr::null(), 0) })
    }

    /// Starts to end the connection in order: what was sent arrives.
    pub fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the identifier is live.
        checked(unsafe { (self.channel.cm.disconnect)(self.at.as_ptr()) })
    }

    /// Sets the type of service of its packets, before it connects.
    pub fn set_type_of_service(&self, mut tos: u8) -> io::Result<()> {
        let (at, len) = ((&raw mut tos).cast(), size_of::<u8>());
        // SAFETY: the identifier is live; one byte is read.
        checked(unsafe { (self.channel.cm.set_option)(self.at.as_ptr(), RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, at, len) })
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: every event that was taken is acknowledged; ended once.
        unsafe { (self.channel.cm.destroy_id)(self.at.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_in_network_byte_order() {
        let c = to_c(&"10.1.2.3:4660".parse().expect("an address"));
        // SAFETY: the storage holds a sockaddr_in.
        let v4 = unsafe { *(&raw const c).cast::<libc::sockaddr_in>() };
        assert_eq!(i32::from(v4.sin_family), libc::AF_INET);
        assert_eq!(v4.sin_port.to_ne_bytes(), [0x12, 0x34]);
        assert_eq!(v4.sin_addr.s_addr.to_ne_bytes(), [10, 1, 2, 3]);
        let c = to_c(&"[2001:db8::7]:1".parse().expect("an address"));
        // SAFETY: the storage holds a sockaddr_in6.
        let v6 = unsafe { *(&raw const c).cast::<libc::sockaddr_in6>() };
        assert_eq!((i32::from(v6.sin6_family), v6.sin6_addr.s6_addr[15]), (libc::AF_INET6, 7));
    }
}
