//! Doorbell pages and registered memory of queues: libmlx5's functions for them.

use super::abi::{device_of, with_errno};
use super::create;
use super::objects::{Uar, Umem};
use super::pages::{Page, REGISTER};
use crate::world::World;
use crate::{fail, gpu, new, world};
use oxygin_ffi::verbs::types::*;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// `struct mlx5dv_devx_umem`, with what a caller does not see.
#[repr(C)]
pub struct UmemHandle {
    umem_id: u32,
    context: usize,
}

/// `struct mlx5dv_devx_umem_in`.
#[repr(C)]
pub struct UmemAsked {
    addr: *mut c_void,
    size: usize,
    access: u32,
    pgsz_bitmap: u64,
    comp_mask: u64,
    dmabuf_fd: c_int,
}

/// Pages of host memory, and what GPU memory has in one piece.
const HOST_PAGE: u64 = 4096;
const GPU_PAGE: u64 = 2 << 20;

/// `MLX5DV_UMEM_MASK_DMABUF`.
const IS_DMABUF: u64 = 1;

/// `struct mlx5dv_devx_uar`.
#[repr(C)]
pub struct UarHandle {
    reg_addr: *mut c_void,
    base_addr: *mut c_void,
    page_id: u32,
    mmap_off: i64,
    comp_mask: u64,
}

/// `MLX5DV_UAR_ALLOC_TYPE_NC`.
const NON_CACHED: u32 = 1;
/// `MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED`.
const NON_CACHED_DEDICATED: u32 = 1 << 31;

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_alloc_uar_fake(context: *mut ibv_context, flags: u32) -> *mut UarHandle {
    let (device, at) = (unsafe { device_of(context) }, context as usize);
    let mut world = world();
    let errno = world.settings.get("mlx5_uar_errno", device) as i32;
    let dedicated = flags == NON_CACHED_DEDICATED && world.settings.get("mlx5_uar_dedicated", device) != 0;
    match flags {
        _ if errno != 0 => return fail(errno),
        _ if !world.mlx5.contexts.contains(&at) => return fail(libc::EOPNOTSUPP),
        NON_CACHED | 0 => {}
        _ if dedicated => {}
        _ => return fail(libc::EOPNOTSUPP),
    }
    let shared = flags == NON_CACHED;
    let known = world
        .mlx5
        .uars
        .iter()
        .find(|(_, u)| shared && u.shared && u.context == at)
        .map(|(id, u)| (*id, u.page.clone()));
    let (page_id, page) = match known {
        Some(known) => known,
        None => {
            let Some(page) = Page::new() else { return fail(libc::ENOMEM) };
            let (id, page) = (0x10 + world.mlx5.number(), Arc::new(page));
            world.mlx5.uars.insert(id, Uar { context: at, page: page.clone(), users: 0, seen: [0; 2], shared });
            (id, page)
        }
    };
    let base = page.at() as *mut u8;
    new(UarHandle {
        reg_addr: base.wrapping_add(REGISTER).cast(),
        base_addr: base.cast(),
        page_id,
        mmap_off: i64::from(page_id) << 12,
        comp_mask: 0,
    })
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_free_uar_fake(uar: *mut UarHandle) {
    let handle = unsafe { Box::from_raw(uar) };
    let mut world = world();
    match world.mlx5.uars.get(&handle.page_id).map(|u| (u.users, u.shared)) {
        Some((_, true)) => {}
        users => {
            world.mlx5.uars.remove(&handle.page_id);
            if users.is_none_or(|(users, _)| users > 0) {
                world.settings.count("misuse", 1);
                eprintln!("fake mlx5: doorbell page {} is given back, and queues have it", handle.page_id);
            }
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_uar_export_dmabuf_fd_fake(uar: *mut UarHandle) -> c_int {
    let id = unsafe { (*uar).page_id };
    let world = world();
    match world.mlx5.uars.get(&id) {
        Some(uar) if world.settings.get("mlx5_uar_dmabuf", 0) != 0 => uar.page.export(),
        _ => {
            with_errno(libc::EOPNOTSUPP);
            -1
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_query_eqn_fake(context: *mut ibv_context, vector: u32, eqn: *mut u32) -> c_int {
    let errno = world().settings.get("mlx5_eqn_errno", unsafe { device_of(context) }) as i32;
    match errno {
        _ if vector >= unsafe { (*context).num_comp_vectors } as u32 => libc::EINVAL,
        0 => {
            unsafe { *eqn = create::EVENT_QUEUE };
            0
        }
        errno => errno,
    }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_umem_reg_fake(
    context: *mut ibv_context,
    addr: *mut c_void,
    size: usize,
    access: u32,
) -> *mut UmemHandle {
    let asked = UmemAsked { addr, size, access, pgsz_bitmap: !0xfff, comp_mask: 0, dmabuf_fd: -1 };
    unsafe { register(context, &asked) }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_umem_reg_ex_fake(
    context: *mut ibv_context,
    asked: *const UmemAsked,
) -> *mut UmemHandle {
    if world().settings.get("mlx5_umem_pages", unsafe { device_of(context) }) == 0 {
        return fail(libc::EPROTONOSUPPORT);
    }
    unsafe { register(context, &*asked) }
}

unsafe fn register(context: *mut ibv_context, asked: &UmemAsked) -> *mut UmemHandle {
    let (device, at) = (unsafe { device_of(context) }, context as usize);
    if let Err(errno) = world().check_umem(device, at, asked) {
        return fail(errno);
    }
    let placed = if asked.comp_mask & IS_DMABUF != 0 {
        unsafe { place_dmabuf(device, asked) }.map(|(host, mapped)| (host, mapped, GPU_PAGE))
    } else {
        match gpu::resolve(-1, asked.addr as u64, asked.size) {
            Some(_) if world().settings.get("peermem", device) == 0 => Err(libc::EFAULT),
            Some(host) => Ok((host, false, GPU_PAGE)),
            None => Ok((asked.addr as u64, false, HOST_PAGE)),
        }
    };
    let (host, mapped, largest) = match placed {
        Ok(placed) => placed,
        Err(errno) => return fail(errno),
    };
    // The largest allowed one that the memory has.
    let Some(log) = (asked.pgsz_bitmap & (2 * largest - 1)).checked_ilog2() else { return fail(libc::EINVAL) };
    let mut world = world();
    let umem_id = 0x300 + world.mlx5.number();
    let (bytes, page) = (asked.size as u64, 1 << log);
    world.mlx5.umems.insert(umem_id, Umem { context: at, host, bytes, page, mapped, users: 0 });
    new(UmemHandle { umem_id, context: at })
}

impl World {
    /// What library and kernel say of a umem before they look at its memory.
    fn check_umem(&mut self, device: usize, context: usize, asked: &UmemAsked) -> Result<(), i32> {
        let errno = self.settings.get("mlx5_umem_errno", device) as i32;
        let left = self.settings.get("mlx5_umem_in", 0);
        if left > 0 {
            self.settings.set("mlx5_umem_in", left - 1);
        }
        if errno != 0 && left <= 1 {
            // Asked for the n-th one only: not for those behind it.
            if left == 1 {
                self.settings.set("mlx5_umem_errno", 0);
            }
            return Err(errno);
        }
        if !self.mlx5.contexts.contains(&context) || asked.comp_mask & !IS_DMABUF != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        // The kernel looks for a page size among them.
        let pages = asked.pgsz_bitmap & !0xfff;
        let whole = asked.comp_mask & IS_DMABUF == 0 || asked.addr as u64 % 4096 == 0;
        if asked.size == 0 || pages == 0 || !whole || asked.access & !IBV_ACCESS_LOCAL_WRITE & !0xf != 0 {
            return Err(libc::EINVAL);
        }
        Ok(())
    }
}

/// Where the memory of a DMA-BUF lies, and whether it was mapped for that.
unsafe fn place_dmabuf(device: usize, asked: &UmemAsked) -> Result<(u64, bool), i32> {
    let (allowed, errno) = {
        let world = world();
        let get = |key| world.settings.get(key, device);
        (get("mlx5_umem_dmabuf") != 0 && get("dmabuf") != 0, get("dmabuf_errno") as i32)
    };
    match asked.dmabuf_fd {
        _ if !allowed => return Err(libc::EOPNOTSUPP),
        fd if fd < 0 => return Err(libc::EBADF),
        _ if errno != 0 => return Err(errno),
        _ => {}
    }
    // `addr` is an offset into the buffer.
    let (offset, fd) = (asked.addr as u64, asked.dmabuf_fd);
    if gpu::is_known() {
        return gpu::resolve(fd, offset, asked.size).map(|host| (host, false)).ok_or(libc::EINVAL);
    }
    let shared = libc::PROT_READ | libc::PROT_WRITE;
    let at = unsafe { libc::mmap(null_mut(), asked.size, shared, libc::MAP_SHARED, fd, offset as libc::off_t) };
    if at == libc::MAP_FAILED {
        return Err(libc::EINVAL);
    }
    Ok((at as u64, true))
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_umem_dereg_fake(umem: *mut UmemHandle) -> c_int {
    let (id, context) = unsafe { ((*umem).umem_id, (*umem).context) };
    let mut world = world();
    let Some(found) = world.mlx5.umems.get(&id).filter(|u| u.context == context) else { return libc::ENOENT };
    if found.users > 0 {
        eprintln!("fake mlx5: umem {id:#x} is ended, and {} queues lie in it", found.users);
        world.settings.count("misuse", 1);
        return libc::EBUSY;
    }
    if let Some(umem) = world.mlx5.umems.remove(&id).filter(|u| u.mapped) {
        unsafe { libc::munmap(umem.host as *mut c_void, umem.bytes as usize) };
    }
    drop(unsafe { Box::from_raw(umem) });
    0
}
