//! Owners of libibverbs objects: made by a call that may fail with the errno, ended when dropped, parents kept alive
//! by children. Everything here is set-up; the data path takes the raw pointers.

use super::symbols::Verbs;
use super::types::*;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::ptr::{null_mut, NonNull};
use std::sync::Arc;

/// What a pointer-returning verb says: the object, or the errno it left.
pub(super) fn made<T>(object: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(object).ok_or_else(io::Error::last_os_error)
}

/// What an int-returning verb says: 0, or an errno (returned, some providers negate it, or -1 and left in errno).
fn checked(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        n => Err(io::Error::from_raw_os_error(n.saturating_abs())),
    }
}

fn text(chars: &[std::ffi::c_char]) -> String {
    chars.iter().take_while(|&&c| c != 0).map(|&c| c as u8 as char).collect()
}

struct List {
    verbs: Arc<Verbs>,
    at: NonNull<*mut ibv_device>,
}

// SAFETY: the list is read-only memory of libibverbs until it is freed, once, in drop.
unsafe impl Send for List {}
// SAFETY: as above.
unsafe impl Sync for List {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list came from get_device_list and is freed once.
        unsafe { (self.verbs.free_device_list)(self.at.as_ptr()) };
    }
}

/// A device that can be opened.
#[derive(Clone)]
pub struct DeviceRef {
    list: Arc<List>,
    device: NonNull<ibv_device>,
}

// SAFETY: the device is read-only while the list lives, and the list is held.
unsafe impl Send for DeviceRef {}
// SAFETY: as above.
unsafe impl Sync for DeviceRef {}

impl DeviceRef {
    /// All devices, in libibverbs' order.
    pub fn all(verbs: &Arc<Verbs>) -> io::Result<Vec<Self>> {
        let mut count: c_int = 0;
        // SAFETY: `count` outlives the call.
        let at = made(unsafe { (verbs.get_device_list)(&mut count) })?;
        let list = Arc::new(List { verbs: verbs.clone(), at });
        let mut devices = Vec::new();
        for i in 0..count.max(0) as usize {
            // SAFETY: the list has `count` entries.
            if let Some(device) = NonNull::new(unsafe { *at.as_ptr().add(i) }) {
                devices.push(Self { list: list.clone(), device });
            }
        }
        Ok(devices)
    }

    fn raw(&self) -> &ibv_device {
        // SAFETY: valid while the list lives.
        unsafe { self.device.as_ref() }
    }

    /// Kernel name.
    pub fn name(&self) -> String {
        text(&self.raw().name)
    }

    /// Where sysfs describes it.
    pub fn sysfs(&self) -> PathBuf {
        text(&self.raw().ibdev_path).into()
    }

    /// The uverbs character device.
    pub fn uverbs(&self) -> PathBuf {
        PathBuf::from("/dev/infiniband").join(text(&self.raw().dev_name))
    }

    /// Whether it speaks iWARP.
    pub fn is_iwarp(&self) -> bool {
        self.raw().transport_type == IBV_TRANSPORT_IWARP || self.raw().node_type == IBV_NODE_RNIC
    }

    /// Whether it speaks InfiniBand, RoCE or iWARP, and so has reliable connections.
    pub fn has_connections(&self) -> bool {
        self.raw().transport_type == IBV_TRANSPORT_IB || self.is_iwarp()
    }

    /// For libraries that know more of it; valid while this object lives.
    pub(crate) fn as_ptr(&self) -> *mut ibv_device {
        self.device.as_ptr()
    }

    /// Opens it.
    pub fn open(&self) -> io::Result<Arc<Context>> {
        // SAFETY: the device is in a live list.
        let at = made(unsafe { (self.list.verbs.open_device)(self.device.as_ptr()) })?;
        Ok(Arc::new(Context { verbs: self.list.verbs.clone(), at }))
    }
}

/// An open device.
pub struct Context {
    verbs: Arc<Verbs>,
    at: NonNull<ibv_context>,
}

// SAFETY: libibverbs objects may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: libibverbs locks where calls of several threads meet.
unsafe impl Sync for Context {}

impl Context {
    /// Owns one that another library opened.
    ///
    /// # Safety
    /// It is of `device`, open, nobody else's, and closed as those of libibverbs are.
    pub(crate) unsafe fn from_raw(device: &DeviceRef, at: NonNull<ibv_context>) -> Arc<Self> {
        Arc::new(Self { verbs: device.list.verbs.clone(), at })
    }

    /// For libraries that know more of it; valid while this object lives.
    pub(crate) fn as_ptr(&self) -> *mut ibv_context {
        self.at.as_ptr()
    }

    /// The library.
    pub fn verbs(&self) -> &Arc<Verbs> {
        &self.verbs
    }

    /// Limits.
    pub fn query_device(&self) -> io::Result<ibv_device_attr> {
        // SAFETY: all-zero bytes are a valid ibv_device_attr.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open and `attr` has the size of the ABI.
        checked(unsafe { (self.verbs.query_device)(self.at.as_ptr(), &mut attr) })?;
        Ok(attr)
    }

    /// State of a port.
    pub fn query_port(&self, port: u8) -> io::Result<ibv_port_attr> {
        let mut attr = ibv_port_attr::default();
        // SAFETY: the entry point writes a prefix of ibv_port_attr.
        checked(unsafe { (self.verbs.query_port)(self.at.as_ptr(), port, &mut attr) })?;
        Ok(attr)
    }

    /// A GID with its type; `None` for the type where the library is too old to say.
    pub fn query_gid(&self, port: u8, index: u32) -> io::Result<(ibv_gid, Option<u32>)> {
        if let Some(query) = self.verbs.query_gid_ex {
            let mut entry = ibv_gid_entry::default();
            let size = std::mem::size_of::<ibv_gid_entry>();
            // SAFETY: the context is open, `entry` has the size that is passed.
            let rc = unsafe { query(self.at.as_ptr(), u32::from(port), index, &mut entry, 0, size) };
            if rc == 0 {
                return Ok((entry.gid, Some(entry.gid_type)));
            }
            // ENODATA: an empty entry. Older kernels refuse the whole call; then the plain one may know.
            if rc == libc::ENODATA {
                return Err(io::Error::from_raw_os_error(rc));
            }
        }
        let mut gid = ibv_gid::default();
        // SAFETY: the context is open and `gid` has the size of the ABI.
        checked(unsafe { (self.verbs.query_gid)(self.at.as_ptr(), port, index as c_int, &mut gid) })?;
        Ok((gid, None))
    }

    /// Readable when an asynchronous event waits.
    pub fn async_fd(&self) -> c_int {
        // SAFETY: the context is open; the descriptor does not change.
        unsafe { self.at.as_ref() }.async_fd
    }

    /// Has [`Context::take_async_event`] return at once where no event waits; false: it cannot.
    pub fn watch(&self) -> bool {
        if self.verbs.get_async_event.is_none() || self.verbs.ack_async_event.is_none() {
            return false;
        }
        let fd = self.async_fd();
        // SAFETY: reads and sets flags of a descriptor that is the open device's own.
        unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFL);
            flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) == 0
        }
    }

    /// Takes and acknowledges one event; `None` when none waits. Only after [`Context::watch`] does it not wait. What
    /// it names may be gone already: only addresses may be compared.
    pub fn take_async_event(&self) -> Option<ibv_async_event> {
        let (get, ack) = (self.verbs.get_async_event?, self.verbs.ack_async_event?);
        let mut event = ibv_async_event::default();
        // SAFETY: the context is open and `event` has the size of the ABI. An object that it names lives until the
        // event is acknowledged, which is at once.
        unsafe {
            if get(self.at.as_ptr(), &mut event) != 0 {
                return None;
            }
            ack(&mut event);
        }
        Some(event)
    }

    /// Takes completions. Set once the device is open.
    pub fn poll_cq(&self) -> Option<PollCq> {
        // SAFETY: the context is open; the table does not change.
        unsafe { self.at.as_ref() }.ops.poll_cq
    }

    /// Posts sends.
    pub fn post_send(&self) -> Option<PostSend> {
        // SAFETY: as above.
        unsafe { self.at.as_ref() }.ops.post_send
    }

    /// Posts receives.
    pub fn post_recv(&self) -> Option<PostRecv> {
        // SAFETY: as above.
        unsafe { self.at.as_ref() }.ops.post_recv
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: children hold this object, so none is left; closed once.
        unsafe { (self.verbs.close_device)(self.at.as_ptr()) };
    }
}

/// A protection domain.
pub struct Pd {
    context: Arc<Context>,
    at: NonNull<ibv_pd>,
}

// SAFETY: as for Context.
unsafe impl Send for Pd {}
// SAFETY: as for Context.
unsafe impl Sync for Pd {}

impl Pd {
    /// Makes one.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let at = made(unsafe { (context.verbs.alloc_pd)(context.at.as_ptr()) })?;
        Ok(Arc::new(Self { context: context.clone(), at }))
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// For libraries that know more of it; valid while this object lives.
    pub(crate) fn as_ptr(&self) -> *mut ibv_pd {
        self.at.as_ptr()
    }

    /// Does something with an address handle, which lives meanwhile.
    pub(crate) fn with_address_handle<T>(
        &self,
        way: &ibv_ah_attr,
        work: impl FnOnce(*mut c_void) -> io::Result<T>,
    ) -> io::Result<T> {
        let (Some(create), Some(destroy)) = (self.context.verbs.create_ah, self.context.verbs.destroy_ah) else {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        };
        let mut way = *way;
        // SAFETY: the domain is live and the description has the size of the ABI.
        let handle = made(unsafe { create(self.at.as_ptr(), &mut way) })?;
        let done = work(handle.as_ptr());
        // SAFETY: ended once.
        unsafe { destroy(handle.as_ptr()) };
        done
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: children hold this object; ended once.
        unsafe { (self.context.verbs.dealloc_pd)(self.at.as_ptr()) };
    }
}

/// A completion channel: a descriptor that becomes readable when an armed completion queue gets an entry.
pub struct Channel {
    context: Arc<Context>,
    at: NonNull<ibv_comp_channel>,
}

// SAFETY: as for Context.
unsafe impl Send for Channel {}
// SAFETY: as for Context.
unsafe impl Sync for Channel {}

impl Channel {
    /// Makes one whose reads do not block.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let at = made(unsafe { (context.verbs.create_comp_channel)(context.at.as_ptr()) })?;
        let channel = Arc::new(Self { context: context.clone(), at });
        // SAFETY: the descriptor is the channel's.
        unsafe {
            let flags = libc::fcntl(channel.fd(), libc::F_GETFL);
            if flags < 0 || libc::fcntl(channel.fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(channel)
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        // SAFETY: the channel is live.
        unsafe { self.at.as_ref() }.fd
    }

    /// Takes and acknowledges one event; false when none waits.
    pub fn take_event(&self) -> bool {
        let mut cq = null_mut();
        let mut cookie = null_mut();
        // SAFETY: both out-pointers outlive the call. An event names a live queue: destroying a queue waits for
        // events that were taken and drops those that were not.
        unsafe {
            if (self.context.verbs.get_cq_event)(self.at.as_ptr(), &mut cq, &mut cookie) != 0 {
                return false;
            }
            (self.context.verbs.ack_cq_events)(cq, 1);
        }
        true
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: queues on it hold it; ended once.
        unsafe { (self.context.verbs.destroy_comp_channel)(self.at.as_ptr()) };
    }
}

/// A completion queue.
pub struct Cq {
    context: Arc<Context>,
    /// Only held: the queue's events arrive there.
    _channel: Option<Arc<Channel>>,
    at: NonNull<ibv_cq>,
}

// SAFETY: as for Context.
unsafe impl Send for Cq {}
// SAFETY: as for Context.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes one of at least `entries` entries.
    pub fn new(context: &Arc<Context>, entries: u32, channel: Option<&Arc<Channel>>) -> io::Result<Arc<Self>> {
        let at = channel.map_or(null_mut(), |c| c.at.as_ptr());
        // SAFETY: the context is open; the channel, if any, is held below.
        let at = made(unsafe { (context.verbs.create_cq)(context.at.as_ptr(), entries as c_int, null_mut(), at, 0) })?;
        Ok(Arc::new(Self { context: context.clone(), _channel: channel.cloned(), at }))
    }

    /// For the data path; valid while this object lives.
    pub fn as_ptr(&self) -> *mut ibv_cq {
        self.at.as_ptr()
    }

    /// Asks for an event at the next completion, or only at the next solicited one or error.
    pub fn arm(&self, solicited_only: bool) -> io::Result<()> {
        // SAFETY: the context is open.
        let Some(notify) = (unsafe { self.context.at.as_ref() }).ops.req_notify_cq else {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        };
        // SAFETY: the queue is live.
        checked(unsafe { notify(self.at.as_ptr(), c_int::from(solicited_only)) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it; ended once.
        unsafe { (self.context.verbs.destroy_cq)(self.at.as_ptr()) };
    }
}

/// A queue pair.
pub struct Qp {
    pd: Arc<Pd>,
    /// Only held: completions arrive there.
    _cq: Arc<Cq>,
    at: NonNull<ibv_qp>,
    cap: ibv_qp_cap,
}

// SAFETY: as for Context.
unsafe impl Send for Qp {}
// SAFETY: as for Context.
unsafe impl Sync for Qp {}

impl Qp {
    /// Makes a reliable connection's queue pair in state RESET.
    pub fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, cap: ibv_qp_cap) -> io::Result<Self> {
        let mut attr = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: null_mut(),
            cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue are live and held below.
        let at = made(unsafe { (pd.context.verbs.create_qp)(pd.at.as_ptr(), &mut attr) })?;
        Ok(Self { pd: pd.clone(), _cq: cq.clone(), at, cap: attr.cap })
    }

    /// What the device really gave.
    pub fn cap(&self) -> ibv_qp_cap {
        self.cap
    }

    /// Number on the wire.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { self.at.as_ref() }.qp_num
    }

    /// For the data path; valid while this object lives.
    pub fn as_ptr(&self) -> *mut ibv_qp {
        self.at.as_ptr()
    }

    /// Sets the attributes that `mask` names.
    pub fn modify(&self, attr: &ibv_qp_attr, mask: c_int) -> io::Result<()> {
        let mut attr = *attr;
        // SAFETY: the queue pair is live and `attr` has the size of the ABI.
        checked(unsafe { (self.pd.context.verbs.modify_qp)(self.at.as_ptr(), &mut attr, mask) })
    }
}

impl Qp {
    /// The options of connections that its device knows, or has taken where it is connected; `None`: it knows none, or
    /// the library does not.
    pub fn query_ece(&self) -> Option<ibv_ece> {
        let (query, mut ece) = (self.pd.context.verbs.query_ece?, ibv_ece::default());
        // SAFETY: the queue pair is live, and there is a place for the answer.
        checked(unsafe { query(self.at.as_ptr(), &mut ece) }).ok().map(|()| ece)
    }

    /// Has it connect with these options, which it may take a part of. Before it is moved to RTR.
    pub fn set_ece(&self, mut ece: ibv_ece) -> io::Result<()> {
        let set = self.pd.context.verbs.set_ece.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the queue pair is live; the options are read.
        checked(unsafe { set(self.at.as_ptr(), &mut ece) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: ended once; the data path's owner drops its pointers first.
        unsafe { (self.pd.context.verbs.destroy_qp)(self.at.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_however_a_provider_returns_them() {
        assert!(checked(0).is_ok());
        for rc in [libc::ETIMEDOUT, -libc::ETIMEDOUT] {
            assert_eq!(checked(rc).unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
        }
        // SAFETY: the calling thread's own.
        unsafe { *libc::__errno_location() = libc::ENODEV };
        assert_eq!(checked(-1).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
