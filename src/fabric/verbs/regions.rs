//! Registered memory: windows of the caller, and the few bytes of this fabric's own.

use super::message::Keys;
use crate::error::{Error, Result};
use crate::sys::pages::Pages;
use crate::sys::sync::RwLock;
use oxygin_ffi::verbs::{Access, Mr, Pd};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

/// Zeroed memory of this fabric's own that the device reads and writes, and peers where they know its key.
pub struct OwnRegion {
    // Ended before the memory is freed.
    mr: Mr,
    pages: Pages,
}

impl OwnRegion {
    /// Registers so many bytes.
    pub fn new(pd: &Arc<Pd>, bytes: usize) -> Result<Self> {
        let refused = |e: &io::Error| Error::system(registration(bytes as u64, e));
        let pages = Pages::for_devices(bytes).map_err(|e| refused(&e))?;
        let access = Access { atomic: false, relaxed: false };
        // SAFETY: the memory is owned below and freed after the region.
        let mr = unsafe { Mr::register(pd, pages.address(), bytes, access) }.map_err(|e| refused(&e))?;
        Ok(Self { mr, pages })
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.pages.address()
    }

    /// All of it that is whole words.
    pub fn words(&self) -> &[AtomicU64] {
        self.pages.words()
    }

    /// Local and remote key.
    pub fn keys(&self) -> (u32, u32) {
        (self.mr.lkey(), self.mr.rkey())
    }
}

/// Eight bytes that remote atomics write their result to and flushes read into: nobody looks at them.
pub struct Scratch(OwnRegion);

impl Scratch {
    /// Registers a word.
    pub fn new(pd: &Arc<Pd>) -> Result<Self> {
        OwnRegion::new(pd, 8).map(Self)
    }

    /// Address and local key.
    pub fn place(&self) -> (u64, u32) {
        (self.0.address(), self.0.keys().0)
    }
}

/// Windows in device memory, by local key: a flush of gets into them needs their remote key.
#[derive(Default)]
pub struct DeviceRegions {
    any: AtomicBool,
    registered: AtomicU64,
    keys: RwLock<HashMap<u32, DeviceKey>>,
}

/// What a window in device memory has beside its local key.
#[derive(Clone, Copy)]
struct DeviceKey {
    rkey: u32,
    /// No two registrations have the same; their local keys may be, one after the other.
    serial: u64,
}

/// A byte of device memory that a get brought, and the registration that it was in then.
pub struct Brought {
    at: u64,
    lkey: u32,
    serial: u64,
}

impl DeviceRegions {
    /// Whether there has ever been one.
    #[inline]
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn add(&self, lkey: u32, rkey: u32) {
        let serial = self.registered.fetch_add(1, Ordering::Relaxed);
        self.keys.write().insert(lkey, DeviceKey { rkey, serial });
        self.any.store(true, Ordering::Relaxed);
    }

    /// The remote key of the device window that `lkey` names.
    pub fn rkey(&self, lkey: u32) -> Option<u32> {
        self.keys.read().get(&lkey).map(|key| key.rkey)
    }

    /// Notes that a get brings the byte at `at`, if `lkey` names a device window: one byte of each window that there is
    /// still, as any of them may be gone when the flush comes.
    pub fn note(&self, brought: &mut Vec<Brought>, at: u64, lkey: u32) {
        let keys = self.keys.read();
        let Some(&DeviceKey { serial, .. }) = keys.get(&lkey) else { return };
        if brought.iter().any(|b| b.serial == serial) {
            return;
        }
        brought.retain(|b| keys.get(&b.lkey).is_some_and(|key| key.serial == b.serial));
        brought.push(Brought { at, lkey, serial });
    }

    /// Address and remote key of a byte that a flush of what gets brought may read: all device windows are on one GPU,
    /// and a read of it pushes everything in front. One in the window `into` where they brought any there. `None`: no
    /// such window is registered any more.
    pub fn to_read(&self, brought: &[Brought], into: Option<u32>) -> Option<(u64, u32)> {
        if brought.is_empty() {
            return None;
        }
        let keys = self.keys.read();
        let key_of = |b: &Brought| keys.get(&b.lkey).filter(|key| key.serial == b.serial);
        let place = |b: &Brought| Some((b.at, key_of(b)?.rkey));
        let first = brought.iter().filter(|b| Some(b.lkey) == into).find_map(place);
        first.or_else(|| brought.iter().rev().find_map(place))
    }
}

/// A registered window; dropping it ends the registration.
pub struct WindowGuard {
    mr: Mr,
    keys: Arc<Keys>,
    regions: Arc<DeviceRegions>,
}

impl WindowGuard {
    /// Notes the keys of window `id`, in device memory or not.
    pub fn new(mr: Mr, id: u32, device: bool, keys: &Arc<Keys>, regions: &Arc<DeviceRegions>) -> Self {
        keys.write().insert(mr.rkey(), id);
        if device {
            regions.add(mr.lkey(), mr.rkey());
        }
        Self { mr, keys: keys.clone(), regions: regions.clone() }
    }

    /// Local and remote key.
    pub fn keys(&self) -> (u32, u32) {
        (self.mr.lkey(), self.mr.rkey())
    }
}

/// The device is done with the memory when the region has ended, which is when this is dropped.
impl crate::memory::window::Guard for WindowGuard {}

impl Drop for WindowGuard {
    fn drop(&mut self) {
        // Before the region ends: its keys may be given out again at once.
        self.keys.write().remove(&self.mr.rkey());
        self.regions.keys.write().remove(&self.mr.lkey());
    }
}

/// Why a registration of `len` bytes failed, with the remedy.
#[cold]
pub fn registration(len: u64, e: &std::io::Error) -> String {
    let remedy = match e.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN) => {
            "raise the limit of locked memory (`ulimit -l unlimited`, in containers --ulimit memlock=-1)"
        }
        Some(libc::EFAULT) => {
            "the range is not mapped memory that a device can reach; GPU memory needs a DMA-BUF or nvidia-peermem"
        }
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT) => {
            "the device's driver or the kernel (5.12 or newer is needed) does not register DMA-BUFs"
        }
        Some(libc::EBADF) => "the descriptor is no DMA-BUF",
        _ => "see the kernel log",
    };
    format!("registering {len} bytes with the device: {e}; {remedy}")
}
