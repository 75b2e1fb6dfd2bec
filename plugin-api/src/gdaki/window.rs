//! What `ginHandle` of a window points to. NCCL 2.29.7 to 2.32.3.
//!
//! Source: `ncclGinGdakiMemHandle` in `gin_gdaki_device_host_common.h`.

/// A registered window. Its memory is readable by the GPU, and every context of the communicator uses it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowHandle {
    /// By rank: the key to that rank's window, 32 bits each, big-endian. Addresses under a key begin at 0.
    pub rkeys: u64,
    /// The key to this rank's window, big-endian.
    pub lkey: u32,
}

const _: () = assert!(size_of::<WindowHandle>() == 16);
