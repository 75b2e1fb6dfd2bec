//! Protection domains, and memory that is registered with them.

use crate::devices::index_of;
use crate::world::Region;
use crate::{fail, gpu, new, world};
use oxygin_ffi::verbs::types::*;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

#[no_mangle]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    world().settings.count("live_pds", 1);
    new(ibv_pd { context, handle: 0 })
}

#[no_mangle]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let mut world = world();
    world.mlx5_end_domain(pd as usize);
    drop(unsafe { Box::from_raw(pd) });
    world.settings.count("live_pds", -1);
    0
}

/// Registers `len` bytes that lie at `host` and are called `iova`; `mapped`: they are unmapped again at the end.
unsafe fn register(pd: *mut ibv_pd, host: u64, iova: u64, len: usize, access: c_uint, mapped: bool) -> *mut ibv_mr {
    let context = unsafe { (*pd).context };
    let mut world = world();
    let device = unsafe { index_of(context) };
    let errno = world.settings.get("reg_errno", device) as i32;
    if errno != 0 {
        return fail(errno);
    }
    if len == 0 || (access & IBV_ACCESS_REMOTE_ATOMIC != 0 && world.settings.get("atomic_cap", device) == 0) {
        return fail(libc::EINVAL);
    }
    if access & IBV_ACCESS_RELAXED_ORDERING != 0 {
        world.settings.count("relaxed_regions", 1);
    }
    // Registered memory that need not begin a page shares it with other memory.
    world.settings.count("regions_within_pages", i64::from(host % 4096 != 0));
    world.settings.count("live_regions", 1);
    let (lkey, rkey) = world.add_region(Region { iova, host, len: len as u64, access, context: context as usize });
    new(ibv_mr { context, pd, addr: host as *mut c_void, length: len, handle: u32::from(mapped), lkey, rkey })
}

#[no_mangle]
pub unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    if access as c_uint & IBV_ACCESS_RELAXED_ORDERING != 0 {
        return fail(libc::EINVAL);
    }
    unsafe { register_at(pd, addr as u64, len, addr as u64, access as c_uint) }
}

/// By address: host memory, or GPU memory where the kernel helps.
unsafe fn register_at(pd: *mut ibv_pd, addr: u64, len: usize, iova: u64, access: c_uint) -> *mut ibv_mr {
    let device = unsafe { index_of((*pd).context) };
    match gpu::resolve(-1, addr, len) {
        Some(_) if world().settings.get("peermem", device) == 0 => fail(libc::EFAULT),
        Some(host) => unsafe { register(pd, host, iova, len, access, false) },
        None => unsafe { register(pd, addr, iova, len, access, false) },
    }
}

#[no_mangle]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    unsafe { register_at(pd, addr as u64, len, iova, access) }
}

#[no_mangle]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    unsafe { register_dmabuf(pd, offset, len, iova, fd, access) }
}

/// Exported functions call none of each other: tests take symbols away.
pub unsafe fn register_dmabuf(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    if world().settings.get("dmabuf", unsafe { index_of((*pd).context) }) == 0 {
        return fail(libc::EOPNOTSUPP);
    }
    if fd < 0 {
        return fail(libc::EBADF);
    }
    let errno = world().settings.get("dmabuf_errno", unsafe { index_of((*pd).context) }) as i32;
    if errno != 0 {
        return fail(errno);
    }
    if gpu::is_known() {
        // The kernel asks for this much of both.
        let aligned = offset % 4096 == iova % 4096;
        return match gpu::resolve(fd, offset, len).filter(|_| aligned) {
            Some(host) => unsafe { register(pd, host, iova, len, access as c_uint, false) },
            None => fail(libc::EINVAL),
        };
    }
    let shared = libc::PROT_READ | libc::PROT_WRITE;
    let at = unsafe { libc::mmap(null_mut(), len, shared, libc::MAP_SHARED, fd, offset as libc::off_t) };
    if at == libc::MAP_FAILED {
        return null_mut();
    }
    unsafe { register(pd, at as u64, iova, len, access as c_uint, true) }
}

#[no_mangle]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let mr = unsafe { Box::from_raw(mr) };
    let mut world = world();
    world.land_region(mr.rkey);
    world.local.remove(&mr.lkey);
    world.remote.remove(&mr.rkey);
    world.settings.count("live_regions", -1);
    if mr.handle == 1 {
        unsafe { libc::munmap(mr.addr, mr.length) };
    }
    0
}
