//! Owners of libmlx5's objects: made by a call that may fail with the errno, ended when dropped, what they need kept
//! alive by them. Everything here is set-up; nothing waits for the network.

use super::symbols::Mlx5;
use super::types::*;
use crate::verbs::types::ibv_ah_attr;
use crate::verbs::{Context, DeviceRef, Mr, Pd};
use crate::Missing;
use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// A command that the device or the kernel refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandError {
    /// What the call left.
    pub errno: i32,
    /// The command's own answer: how it ended, 0 if it never reached the device.
    pub status: u8,
    /// And the firmware's reason.
    pub syndrome: u32,
}

impl CommandError {
    /// From an errno and the answer's first two words: the status is the first byte, the syndrome the second word.
    fn new(errno: i32, answer: &[u8]) -> Self {
        let syndrome = answer.get(4..8).and_then(|word| word.try_into().ok()).map_or(0, u32::from_be_bytes);
        Self { errno, status: answer.first().copied().unwrap_or(0), syndrome }
    }

    fn last(answer: &[u8]) -> Self {
        Self::new(io::Error::last_os_error().raw_os_error().unwrap_or(0), answer)
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", io::Error::from_raw_os_error(self.errno))?;
        if self.status != 0 {
            write!(f, " (status {:#x}, syndrome {:#x})", self.status, self.syndrome)?;
        }
        Ok(())
    }
}

impl std::error::Error for CommandError {}

fn unsupported(missing: &Missing) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, missing.sentence().to_owned())
}

/// What an int-returning function says: 0, an errno, or -1 with errno set.
fn checked(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        n if n > 0 => Err(io::Error::from_raw_os_error(n)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An mlx5 device that takes DevX commands, open.
pub struct DevxDevice {
    mlx5: Arc<Mlx5>,
    context: Arc<Context>,
}

impl DevxDevice {
    /// Whether libmlx5 drives the device. Does not open it.
    pub fn is_mlx5(mlx5: &Mlx5, device: &DeviceRef) -> bool {
        // SAFETY: the device is in a live list.
        unsafe { (mlx5.is_supported)(device.as_ptr()) }
    }

    /// Opens it; one that [`DevxDevice::is_mlx5`] says no of is refused.
    pub fn open(mlx5: &Arc<Mlx5>, device: &DeviceRef) -> io::Result<Arc<Self>> {
        if !Self::is_mlx5(mlx5, device) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let mut attr = mlx5dv_context_attr { flags: MLX5DV_CONTEXT_FLAGS_DEVX, comp_mask: 0 };
        // SAFETY: the device is in a live list, and an mlx5 one; `attr` outlives the call.
        let at = unsafe { (mlx5.open_device)(device.as_ptr(), &mut attr) };
        let at = NonNull::new(at).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: just opened; such contexts are closed as any.
        let context = unsafe { Context::from_raw(device, at) };
        Ok(Arc::new(Self { mlx5: mlx5.clone(), context }))
    }

    /// As libibverbs knows it.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The library.
    pub fn mlx5(&self) -> &Arc<Mlx5> {
        &self.mlx5
    }

    /// A command about no object. `answer` is as long as the command's answer.
    pub fn command(&self, command: &[u8], answer: &mut [u8]) -> Result<(), CommandError> {
        let (input, output) = (command.as_ptr().cast::<c_void>(), answer.as_mut_ptr().cast::<c_void>());
        // SAFETY: the context is open; lengths are those of the buffers.
        let rc = unsafe { (self.mlx5.general_cmd)(self.context.as_ptr(), input, command.len(), output, answer.len()) };
        match checked(rc) {
            Ok(()) => Ok(()),
            Err(e) => Err(CommandError::new(e.raw_os_error().unwrap_or(0), answer)),
        }
    }

    /// The event queue of the first completion vector.
    pub fn event_queue(&self) -> io::Result<u32> {
        let mut number = 0;
        // SAFETY: the context is open; a place for the answer.
        checked(unsafe { (self.mlx5.query_eqn)(self.context.as_ptr(), 0, &mut number) })?;
        Ok(number)
    }

    /// The number by which commands name a protection domain of this device.
    pub fn domain(&self, pd: &Pd) -> io::Result<u32> {
        let mut answer = mlx5dv_pd::default();
        let pair = Pair { input: pd.as_ptr().cast(), output: (&raw mut answer).cast() };
        let mut object = mlx5dv_obj { pd: pair, ..NOTHING };
        // SAFETY: the domain is live, and of an mlx5 device; the answer outlives the call.
        checked(unsafe { (self.mlx5.init_obj)(&mut object, MLX5DV_OBJ_PD) })?;
        Ok(answer.pdn)
    }

    /// The MAC address to which packets on this way go first. Asks the kernel's neighbour table, and may take as long
    /// as an answer over the network.
    pub fn next_hop(&self, pd: &Pd, way: &ibv_ah_attr) -> io::Result<[u8; 6]> {
        pd.with_address_handle(way, |handle| {
            let mut answer = mlx5dv_ah { av: std::ptr::null(), comp_mask: 0 };
            let pair = Pair { input: handle, output: (&raw mut answer).cast() };
            let mut object = mlx5dv_obj { ah: pair, ..NOTHING };
            // SAFETY: the handle is live, and of an mlx5 device; the answer outlives the call.
            checked(unsafe { (self.mlx5.init_obj)(&mut object, MLX5DV_OBJ_AH) })?;
            // SAFETY: the vector lives as long as the handle.
            let vector = unsafe { answer.av.as_ref() }.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
            Ok(vector.rmac)
        })
    }

    /// Whether the device has a function of its own for memory that is registered with Data Direct.
    pub fn has_data_direct(&self) -> bool {
        let Ok(path) = &self.mlx5.get_data_direct_sysfs_path else { return false };
        let mut buffer = [0; libc::PATH_MAX as usize];
        // SAFETY: the context is open; the length is the buffer's.
        unsafe { path(self.context.as_ptr(), buffer.as_mut_ptr(), buffer.len()) == 0 }
    }

    /// Registers `len` bytes at `offset` of a DMA-BUF with Data Direct; peers and entries name them from `iova` on. The
    /// descriptor is needed during the call only.
    pub fn register_data_direct(
        &self,
        pd: &Arc<Pd>,
        (fd, offset): (RawFd, u64),
        iova: u64,
        len: usize,
        access: crate::verbs::Access,
    ) -> io::Result<Mr> {
        let register = self.mlx5.reg_dmabuf_mr.as_ref().map_err(unsupported)?;
        let (flags, direct) = (access.flags() as c_int, MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT);
        // SAFETY: the domain is live, and of an mlx5 device; the kernel checks descriptor and range.
        let at = unsafe { register(pd.as_ptr(), offset, len, iova, fd, flags, direct) };
        // SAFETY: just registered; it ends as any.
        Ok(unsafe { Mr::from_raw(pd, NonNull::new(at).ok_or_else(io::Error::last_os_error)?) })
    }
}

const NOTHING: mlx5dv_obj = mlx5dv_obj {
    qp: Pair::NONE,
    cq: Pair::NONE,
    srq: Pair::NONE,
    rwq: Pair::NONE,
    dm: Pair::NONE,
    ah: Pair::NONE,
    pd: Pair::NONE,
};

/// Whose a doorbell page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UarKind {
    /// Nobody else's.
    Dedicated,
    /// All such owners' of this open device.
    Shared,
}

/// A non-cached doorbell page, mapped into this process.
pub struct Uar {
    device: Arc<DevxDevice>,
    at: NonNull<mlx5dv_devx_uar>,
}

// SAFETY: the page is memory of the device; libmlx5 locks what it has of it.
unsafe impl Send for Uar {}
// SAFETY: as above.
unsafe impl Sync for Uar {}

impl Uar {
    /// Takes one.
    pub fn new(device: &Arc<DevxDevice>, kind: UarKind) -> io::Result<Self> {
        let flags = match kind {
            UarKind::Dedicated => MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED,
            UarKind::Shared => MLX5DV_UAR_ALLOC_TYPE_NC,
        };
        // SAFETY: the context is open.
        let at = unsafe { (device.mlx5.alloc_uar)(device.context.as_ptr(), flags) };
        Ok(Self { device: device.clone(), at: NonNull::new(at).ok_or_else(io::Error::last_os_error)? })
    }

    fn raw(&self) -> &mlx5dv_devx_uar {
        // SAFETY: lives until it is freed.
        unsafe { self.at.as_ref() }
    }

    /// By which queues name it.
    pub fn number(&self) -> u32 {
        self.raw().page_id
    }

    /// The page.
    pub fn page(&self) -> *mut c_void {
        self.raw().base_addr
    }

    /// The doorbell register, 8 bytes.
    pub fn register(&self) -> *mut c_void {
        self.raw().reg_addr
    }
}

impl Drop for Uar {
    fn drop(&mut self) {
        // SAFETY: queues hold it; freed once.
        unsafe { (self.device.mlx5.free_uar)(self.at.as_ptr()) };
    }
}

/// Whether a umem was refused because libmlx5 or the kernel cannot be told the size of its pages.
pub fn no_page_sizes(e: &io::Error) -> bool {
    let refusals = [libc::EOPNOTSUPP, libc::EPROTONOSUPPORT];
    e.kind() == io::ErrorKind::Unsupported || e.raw_os_error().is_some_and(|errno| refusals.contains(&errno))
}

/// Memory in which queues lie.
pub struct Umem {
    device: Arc<DevxDevice>,
    at: NonNull<mlx5dv_devx_umem>,
}

// SAFETY: only named by its number, and ended once.
unsafe impl Send for Umem {}
// SAFETY: as above.
unsafe impl Sync for Umem {}

impl Umem {
    /// `bytes` at an address: of host memory, or of GPU memory if a peer memory module is loaded. Queues may begin at
    /// multiples of `page`. A libmlx5 or kernel that cannot be told of pages answers with a [`no_page_sizes`].
    ///
    /// # Safety
    /// The memory stays mapped while this lives: the device reads and writes it.
    pub unsafe fn by_address(device: &Arc<DevxDevice>, at: u64, bytes: usize, page: u64) -> io::Result<Self> {
        let asked = mlx5dv_devx_umem_in {
            addr: at as *mut c_void,
            size: bytes,
            access: crate::verbs::types::IBV_ACCESS_LOCAL_WRITE,
            pgsz_bitmap: page,
            comp_mask: 0,
            dmabuf_fd: -1,
        };
        Self::asked(device, asked)
    }

    /// The same, in pages of a size that the kernel chooses: the largest that the memory has. Whoever does not know
    /// that these are small may have one queue in it, at its beginning (Linux, `drivers/infiniband/hw/mlx5/devx.c`,
    /// `devx_umem_reg_cmd_alloc`).
    ///
    /// # Safety
    /// As [`Self::by_address`].
    pub unsafe fn in_any_pages(device: &Arc<DevxDevice>, at: u64, bytes: usize) -> io::Result<Self> {
        // SAFETY: the context is open; the caller vouches for the memory.
        let at = unsafe {
            (device.mlx5.umem_reg)(
                device.context.as_ptr(),
                at as *mut c_void,
                bytes,
                crate::verbs::types::IBV_ACCESS_LOCAL_WRITE,
            )
        };
        Self::owned(device, at)
    }

    /// `bytes` at `offset` of a DMA-BUF, which is needed during the call only. `page`: as [`Self::by_address`].
    pub fn by_dma_buf(
        device: &Arc<DevxDevice>,
        (fd, offset): (RawFd, u64),
        bytes: usize,
        page: u64,
    ) -> io::Result<Self> {
        let asked = mlx5dv_devx_umem_in {
            addr: offset as *mut c_void,
            size: bytes,
            access: crate::verbs::types::IBV_ACCESS_LOCAL_WRITE,
            pgsz_bitmap: page,
            comp_mask: MLX5DV_UMEM_MASK_DMABUF,
            dmabuf_fd: fd,
        };
        Self::asked(device, asked)
    }

    fn asked(device: &Arc<DevxDevice>, mut asked: mlx5dv_devx_umem_in) -> io::Result<Self> {
        let register = device.mlx5.umem_reg_ex.as_ref().map_err(unsupported)?;
        // SAFETY: the context is open; the kernel checks descriptor and range, and who asks vouches for an address.
        let at = unsafe { register(device.context.as_ptr(), &mut asked) };
        Self::owned(device, at)
    }

    fn owned(device: &Arc<DevxDevice>, at: *mut mlx5dv_devx_umem) -> io::Result<Self> {
        Ok(Self { device: device.clone(), at: NonNull::new(at).ok_or_else(io::Error::last_os_error)? })
    }

    /// By which queues name it.
    pub fn number(&self) -> u32 {
        // SAFETY: lives until it is given back.
        unsafe { self.at.as_ref() }.umem_id
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: queues hold it; given back once.
        unsafe { (self.device.mlx5.umem_dereg)(self.at.as_ptr()) };
    }
}

/// What a command made.
pub struct Object {
    device: Arc<DevxDevice>,
    at: NonNull<mlx5dv_devx_obj>,
    /// Ending it failed: the device may go on using its memory.
    stays: Arc<AtomicBool>,
    /// What it uses, which is kept for ever then.
    uses: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: libmlx5's objects may be used from any thread; commands go to the kernel, which locks.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// Makes it by a command. `answer` is as long as the command's answer. `stays` is set if the device refuses to end
    /// it later.
    pub fn create(
        device: &Arc<DevxDevice>,
        command: &[u8],
        answer: &mut [u8],
        stays: &Arc<AtomicBool>,
    ) -> Result<Self, CommandError> {
        let (input, output) = (command.as_ptr().cast::<c_void>(), answer.as_mut_ptr().cast::<c_void>());
        // SAFETY: the context is open; lengths are those of the buffers.
        let at =
            unsafe { (device.mlx5.obj_create)(device.context.as_ptr(), input, command.len(), output, answer.len()) };
        match NonNull::new(at) {
            Some(at) => Ok(Self { device: device.clone(), at, stays: stays.clone(), uses: None }),
            None => Err(CommandError::last(answer)),
        }
    }

    /// It uses this: memory, and objects that it names. If the device refuses to end it, none of that ends either.
    pub fn using(self, what: impl Any + Send + Sync) -> Self {
        let mut object = self;
        object.uses = Some(Box::new(what));
        object
    }

    /// Changes it.
    pub fn modify(&self, command: &[u8], answer: &mut [u8]) -> Result<(), CommandError> {
        let (input, output) = (command.as_ptr().cast::<c_void>(), answer.as_mut_ptr().cast::<c_void>());
        // SAFETY: the object lives; lengths are those of the buffers.
        let rc = unsafe { (self.device.mlx5.obj_modify)(self.at.as_ptr(), input, command.len(), output, answer.len()) };
        checked(rc).map_err(|e| CommandError::new(e.raw_os_error().unwrap_or(0), answer))
    }

    /// Asks about it.
    pub fn query(&self, command: &[u8], answer: &mut [u8]) -> Result<(), CommandError> {
        let (input, output) = (command.as_ptr().cast::<c_void>(), answer.as_mut_ptr().cast::<c_void>());
        // SAFETY: the object lives; lengths are those of the buffers.
        let rc = unsafe { (self.device.mlx5.obj_query)(self.at.as_ptr(), input, command.len(), output, answer.len()) };
        checked(rc).map_err(|e| CommandError::new(e.raw_os_error().unwrap_or(0), answer))
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: what depends on it was ended before; ended once.
        if unsafe { (self.device.mlx5.obj_destroy)(self.at.as_ptr()) } != 0 {
            self.stays.store(true, Ordering::Release);
            std::mem::forget(self.uses.take());
        }
    }
}

/// A channel that tells of events of objects. Taking one never waits.
pub struct EventChannel {
    device: Arc<DevxDevice>,
    at: NonNull<mlx5dv_devx_event_channel>,
}

// SAFETY: events are read from a descriptor, whole ones by each read.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Makes one.
    pub fn new(device: &Arc<DevxDevice>) -> io::Result<Self> {
        device.mlx5.has_events().map_err(|missing| unsupported(&missing))?;
        let create = device.mlx5.create_event_channel.as_ref().map_err(unsupported)?;
        // SAFETY: the context is open.
        let at = unsafe { create(device.context.as_ptr(), MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA) };
        let at = NonNull::new(at).ok_or_else(io::Error::last_os_error)?;
        let channel = Self { device: device.clone(), at };
        // SAFETY: the channel lives, and the descriptor is its own.
        unsafe {
            let fd = channel.at.as_ref().fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            if flags < 0 || libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(channel)
    }

    /// Asks for these events of an object. They bear `cookie`.
    pub fn subscribe(&self, object: &Object, events: &[u16], cookie: u64) -> io::Result<()> {
        let subscribe = self.device.mlx5.subscribe_devx_event.as_ref().map_err(unsupported)?;
        let bytes = size_of_val(events) as u16;
        // SAFETY: both live; the length is that of the list in bytes.
        checked(unsafe { subscribe(self.at.as_ptr(), object.at.as_ptr(), bytes, events.as_ptr(), cookie) })
    }

    /// Takes an event: its cookie. `None`: there is none.
    pub fn take(&self) -> io::Result<Option<u64>> {
        let get = self.device.mlx5.get_event.as_ref().map_err(unsupported)?;
        let mut event = mlx5dv_devx_async_event_hdr::default();
        // SAFETY: the channel lives; events without data are no longer than this.
        let got = unsafe { get(self.at.as_ptr(), &mut event, size_of::<mlx5dv_devx_async_event_hdr>()) };
        match got {
            8.. => Ok(Some(event.cookie)),
            0..8 => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => match io::Error::last_os_error() {
                e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
                e => Err(e),
            },
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        if let Ok(destroy) = &self.device.mlx5.destroy_event_channel {
            // SAFETY: ended once; its subscriptions end with it.
            unsafe { destroy(self.at.as_ptr()) };
        }
    }
}
