//! Queues in GPU memory, as DMA-BUFs or by their addresses, and in what a descriptor stands for.

use crate::devx_harness::{errno, words, Device, Fake, Umem};
use crate::devx_pair::{create_qp, Memory, Pair};
use oxygin_ffi::verbs::types::ibv_context;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// What the GPU calls its first byte.
const GPU: u64 = 0x7e00_0000_0000;
/// A number that stands for a DMA-BUF of all of it.
const DESCRIPTOR: c_int = 4711;

/// Where the GPU's memory really is.
fn memory() -> &'static [AtomicU64] {
    static MEMORY: OnceLock<&'static [AtomicU64]> = OnceLock::new();
    MEMORY.get_or_init(|| words(2048))
}

/// What a driver would say: where `bytes` at an offset of the descriptor, or at an address, lie.
extern "C" fn resolve(fd: c_int, at: u64, bytes: usize) -> *mut u8 {
    let offset = match fd {
        -1 => at.checked_sub(GPU),
        DESCRIPTOR => Some(at),
        _ => None,
    };
    let inside = offset.filter(|o| *o <= 16384 && bytes as u64 <= 16384 - o);
    inside.map_or(std::ptr::null_mut(), |o| memory().as_ptr().cast::<u8>().cast_mut().wrapping_add(o as usize))
}

#[repr(C)]
struct Asked {
    addr: u64,
    size: usize,
    access: u32,
    pages: u64,
    mask: u64,
    fd: c_int,
}

/// Registers memory for queues, or says the errno.
fn register<'a>(device: &Device<'a>, addr: u64, size: usize, fd: Option<c_int>) -> Result<Umem<'a>, i32> {
    let asked = Asked { addr, size, access: 1, pages: !0xfff, mask: fd.is_some().into(), fd: fd.unwrap_or(0) };
    type Reg = unsafe extern "C" fn(*mut ibv_context, *const Asked) -> *mut u32;
    // SAFETY: as libmlx5 is used; the memory outlives the queues.
    let handle = unsafe { device.fake.mlx5::<Reg>("mlx5dv_devx_umem_reg_ex")(device.context, &asked) };
    let error = errno();
    if handle.is_null() {
        Err(error)
    } else {
        Ok(Umem { fake: device.fake, handle })
    }
}

#[test]
fn queues_lie_in_gpu_memory() {
    let fake = Fake::take();
    // SAFETY: the fake has such a function; it forgets it at the next reset.
    unsafe { fake.verbs::<extern "C" fn(extern "C" fn(c_int, u64, usize) -> *mut u8)>("fake_verbs_gpu")(resolve) };
    {
        let device = Device::open(&fake, 0);
        let refused = |addr, size, fd| register(&device, addr, size, fd).err();
        assert_eq!(refused(GPU, 4096, None), Some(libc::EFAULT), "no kernel module helps");
        assert_eq!(refused(0, 4096, Some(-1)), Some(libc::EBADF));
        assert_eq!(refused(0, 4096, Some(1)), Some(libc::EINVAL), "no DMA-BUF");
        assert_eq!(refused(16384, 4096, Some(DESCRIPTOR)), Some(libc::EINVAL), "behind its end");
        assert_eq!(refused(64, 4096, Some(DESCRIPTOR)), Some(libc::EINVAL), "an offset that is no page's");
        assert_eq!(refused(0, 0, Some(DESCRIPTOR)), Some(libc::EINVAL));
        fake.set("mlx5_umem_dmabuf", 0);
        assert_eq!(refused(0, 4096, Some(DESCRIPTOR)), Some(libc::EOPNOTSUPP));
        fake.set("mlx5_umem_dmabuf", 1);
        fake.set("peermem", 1);
        assert_eq!(register(&device, GPU + 64, 4096, None).unwrap().end(), 0);
        let records = [words(512), words(512)];
        let umems = [
            register(&device, 0, 4096, Some(DESCRIPTOR)).unwrap(),
            register(&device, 4096, 4096, Some(DESCRIPTOR)).unwrap(),
            device.umem(records[0]),
            device.umem(records[1]),
        ];
        let (slots, completions) = (&memory()[..512], &memory()[512..1024]);
        completions.iter().skip(7).step_by(8).for_each(|w| w.store(0xf1 << 56, Ordering::Relaxed));
        let queues = Memory { slots, completions, records, umems };
        let make = |(memory, cq): (&Memory, u32)| create_qp(&device, memory, 6, cq, false);
        let mut pair = Pair::of(&device, 0, queues, 6, make, 1);
        pair.connect(&pair);
        pair.post(0, 0, &[]);
        pair.ring();
        assert_eq!(pair.outcome(), (0, 0, 0));
        pair.end();
    }
    assert_eq!(fake.left(), [0; 4]);
    fake.set("reset", 0);
}

#[test]
fn doorbell_pages_are_exported_where_the_kernel_can() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    type Export = unsafe extern "C" fn(*mut c_void) -> c_int;
    // SAFETY: as libmlx5 is used.
    let export = || unsafe { fake.mlx5::<Export>("mlx5dv_devx_uar_export_dmabuf_fd")(device.uar.cast()) };
    assert_eq!((export(), errno()), (-1, libc::EOPNOTSUPP));
    fake.set("mlx5_uar_dmabuf", 1);
    let fd = export();
    assert!(fd >= 0);
    // Whoever maps it rings the same register.
    // SAFETY: a page of its own, unmapped again.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0);
        assert_ne!(at, libc::MAP_FAILED);
        let there = AtomicU64::from_ptr(at.cast::<u64>().add(0x800 / 8));
        there.store(1, Ordering::Release);
        assert_eq!(AtomicU64::from_ptr((*device.uar).reg.cast()).swap(0, Ordering::AcqRel), 1);
        libc::munmap(at, 4096);
        libc::close(fd);
    }
}

#[test]
fn shared_doorbell_pages_are_one_page() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    type Alloc = unsafe extern "C" fn(*mut ibv_context, u32) -> *mut crate::devx_harness::UarHandle;
    type Free = unsafe extern "C" fn(*mut crate::devx_harness::UarHandle);
    // SAFETY: as libmlx5 is used; each is given back once.
    unsafe {
        let (alloc, free) = (fake.mlx5::<Alloc>("mlx5dv_devx_alloc_uar"), fake.mlx5::<Free>("mlx5dv_devx_free_uar"));
        let pages = [1, 1, 1 << 31].map(|flags| alloc(device.context, flags));
        let numbers = pages.map(|page| (*page).page);
        assert!(numbers[0] == numbers[1] && numbers[0] != numbers[2]);
        fake.set("mlx5_uar_dedicated", 0);
        let refused = alloc(device.context, 1 << 31);
        assert!(refused.is_null() && errno() == libc::EOPNOTSUPP);
        assert!(alloc(device.context, 2).is_null(), "no such flag");
        pages.into_iter().for_each(|page| free(page));
    }
    assert_eq!((fake.left()[0], fake.count("misuse")), (1, 0));
}
