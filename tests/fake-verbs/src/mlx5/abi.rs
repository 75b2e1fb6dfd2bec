//! libmlx5's functions. `build.rs` gives them their names and versions, in a library of their own.
//!
//! Types and values: rdma-core, `providers/mlx5/mlx5dv.h` and `mlx5_api.h`, read apart from the library's own.

use super::command::Call;
use super::objects::Kind;
use crate::devices::{self, index_of};
use crate::regions::register_dmabuf;
use crate::world::World;
use crate::{fail, new, world};
use oxygin_ffi::verbs::types::*;
use std::ffi::{c_char, c_int, c_void};

/// `struct mlx5dv_context_attr`.
#[repr(C)]
pub struct OpenAttributes {
    flags: u32,
    comp_mask: u64,
    fds: *mut c_void,
}

/// `MLX5DV_CONTEXT_FLAGS_DEVX`.
const WITH_DEVX: u32 = 1;

/// What stands behind `struct mlx5dv_devx_obj`, of which callers know nothing.
pub struct ObjectHandle {
    context: usize,
    device: usize,
    pub(super) kind: Kind,
}

/// The first half of `struct mlx5dv_obj`'s pairs, in their order: qp, cq, srq, rwq, dm, ah, pd, devx.
#[repr(C)]
pub struct InitObject {
    pairs: [(*mut c_void, *mut c_void); 8],
}

/// `MLX5DV_OBJ_AH`, `MLX5DV_OBJ_PD`.
const OBJECT_AH: u64 = 1 << 5;
const OBJECT_PD: u64 = 1 << 6;

/// `struct mlx5dv_pd`.
#[repr(C)]
struct DomainOut {
    pdn: u32,
    comp_mask: u64,
}

/// `struct mlx5dv_ah`.
#[repr(C)]
struct AddressOut {
    av: *mut c_void,
    comp_mask: u64,
}

/// A device number as long as no lock is held.
pub(super) unsafe fn device_of(context: *mut ibv_context) -> usize {
    unsafe { index_of(context) }
}

pub(super) fn with_errno(errno: i32) -> c_int {
    unsafe { *libc::__errno_location() = errno };
    errno
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_is_supported_fake(device: *mut ibv_device) -> bool {
    let name = unsafe { std::ffi::CStr::from_ptr((*device).name.as_ptr()) }.to_string_lossy();
    let index = name.trim_start_matches("fake_").parse().unwrap_or(0);
    world().settings.get("mlx5", index) != 0
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_open_device_fake(
    device: *mut ibv_device,
    attributes: *mut OpenAttributes,
) -> *mut ibv_context {
    let asked = unsafe { &*attributes };
    if !unsafe { mlx5dv_is_supported_fake(device) } || asked.comp_mask != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    let context = unsafe { devices::open(device) };
    if context.is_null() {
        return context;
    }
    let index = unsafe { device_of(context) };
    let errno = world().settings.get("mlx5_open_errno", index) as i32;
    if errno != 0 {
        unsafe { devices::close(context) };
        return fail(errno);
    }
    if asked.flags & WITH_DEVX != 0 {
        world().mlx5.contexts.insert(context as usize);
    }
    context
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_init_obj_fake(object: *mut InitObject, kinds: u64) -> c_int {
    if kinds & !(OBJECT_AH | OBJECT_PD) != 0 {
        return with_errno(libc::EINVAL);
    }
    let pairs = unsafe { &(*object).pairs };
    if kinds & OBJECT_PD != 0 {
        let (pd, out) = (pairs[6].0.cast::<ibv_pd>(), pairs[6].1.cast::<DomainOut>());
        unsafe { (*out).pdn = world().mlx5_domain(pd as usize, (*pd).context as usize) };
        // Fields beyond the mask that was asked for stay as they are.
        unsafe { (*out).comp_mask = 0 };
    }
    if kinds & OBJECT_AH != 0 {
        let (ah, out) = (pairs[5].0, pairs[5].1.cast::<AddressOut>());
        unsafe { (*out).av = crate::addresses::vector_of(ah) };
        unsafe { (*out).comp_mask = 0 };
    }
    0
}

impl World {
    /// The number of a protection domain.
    fn mlx5_domain(&mut self, pd: usize, context: usize) -> u32 {
        if let Some((number, _)) = self.mlx5.domains.get(&pd) {
            return *number;
        }
        let number = 0x70 + self.mlx5.number();
        self.mlx5.domains.insert(pd, (number, context));
        number
    }

    /// A protection domain ends.
    pub fn mlx5_end_domain(&mut self, pd: usize) {
        let Some((number, context)) = self.mlx5.domains.remove(&pd) else { return };
        let users = self.mlx5.qps.values().filter(|q| q.context == context && q.get("pd") == u64::from(number)).count();
        if users > 0 {
            self.settings.count("misuse", 1);
            eprintln!("fake mlx5: a protection domain is ended that {users} queue pairs have");
        }
    }

    /// A context ends.
    pub fn mlx5_end_context(&mut self, context: usize) {
        let left = self.mlx5.left_by(context);
        if left > 0 {
            self.settings.count("misuse", 1);
            eprintln!("fake mlx5: a context is closed that has {left} umems, pages, queues and channels");
        }
        self.mlx5.contexts.remove(&context);
        self.mlx5.uars.retain(|_, u| u.context != context || !u.shared);
    }

    /// How many objects of mlx5 there are, by count or all.
    pub fn mlx5_live(&self, key: &str) -> Option<i64> {
        let live = self.mlx5.live();
        if key == "live_mlx5" {
            return Some(live.iter().map(|l| l.1 as i64).sum());
        }
        live.iter().find(|l| l.0 == key).map(|l| l.1 as i64)
    }
}

unsafe fn command(
    context: usize,
    device: usize,
    call: Call,
    input: (*const u8, usize),
    out: (*mut u8, usize),
) -> Result<Option<Kind>, i32> {
    let (input, out) =
        unsafe { (std::slice::from_raw_parts(input.0, input.1), std::slice::from_raw_parts_mut(out.0, out.1)) };
    world().mlx5_command(context, device, call, input, out)
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_obj_create_fake(
    context: *mut ibv_context,
    input: *const u8,
    inlen: usize,
    out: *mut u8,
    outlen: usize,
) -> *mut ObjectHandle {
    let (device, at) = (unsafe { device_of(context) }, context as usize);
    match unsafe { command(at, device, Call::Create, (input, inlen), (out, outlen)) } {
        Ok(Some(kind)) => new(ObjectHandle { context: at, device, kind }),
        Ok(None) => fail(libc::EINVAL),
        Err(errno) => fail(errno),
    }
}

unsafe fn on_object(
    object: *mut ObjectHandle,
    call: fn(Kind) -> Call,
    input: (*const u8, usize),
    out: (*mut u8, usize),
) -> c_int {
    let object = unsafe { &*object };
    match unsafe { command(object.context, object.device, call(object.kind), input, out) } {
        Ok(_) => 0,
        Err(errno) => with_errno(errno),
    }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_obj_modify_fake(
    object: *mut ObjectHandle,
    input: *const u8,
    inlen: usize,
    out: *mut u8,
    outlen: usize,
) -> c_int {
    unsafe { on_object(object, Call::Modify, (input, inlen), (out, outlen)) }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_obj_query_fake(
    object: *mut ObjectHandle,
    input: *const u8,
    inlen: usize,
    out: *mut u8,
    outlen: usize,
) -> c_int {
    unsafe { on_object(object, Call::Query, (input, inlen), (out, outlen)) }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_obj_destroy_fake(object: *mut ObjectHandle) -> c_int {
    let (kind, device) = unsafe { ((*object).kind, (*object).device) };
    let mut world = world();
    let errno = world.settings.get("mlx5_destroy_errno", device) as i32;
    let ended = if errno != 0 { Err(errno) } else { world.destroy_object(kind) };
    match ended {
        Ok(()) => {
            drop(unsafe { Box::from_raw(object) });
            0
        }
        Err(errno) => with_errno(errno),
    }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_general_cmd_fake(
    context: *mut ibv_context,
    input: *const u8,
    inlen: usize,
    out: *mut u8,
    outlen: usize,
) -> c_int {
    let device = unsafe { device_of(context) };
    match unsafe { command(context as usize, device, Call::General, (input, inlen), (out, outlen)) } {
        Ok(_) => 0,
        Err(errno) => with_errno(errno),
    }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_reg_dmabuf_mr_fake(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
    mlx5_access: c_int,
) -> *mut ibv_mr {
    let device = unsafe { device_of((*pd).context) };
    // MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT.
    let direct = mlx5_access & 1 != 0;
    if mlx5_access & !1 != 0 || direct && world().settings.get("mlx5_data_direct", device) == 0 {
        return fail(libc::EOPNOTSUPP);
    }
    let errno = world().settings.get("mlx5_data_direct_errno", device) as i32;
    if direct && errno != 0 {
        return fail(errno);
    }
    unsafe { register_dmabuf(pd, offset, length, iova, fd, access) }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_get_data_direct_sysfs_path_fake(
    context: *mut ibv_context,
    buffer: *mut c_char,
    bytes: usize,
) -> c_int {
    if world().settings.get("mlx5_data_direct", unsafe { device_of(context) }) == 0 {
        return libc::ENODEV;
    }
    let path = c"/nonexistent/data-direct".to_bytes_with_nul();
    if bytes < path.len() {
        return libc::ENOSPC;
    }
    unsafe { std::ptr::copy_nonoverlapping(path.as_ptr(), buffer.cast(), path.len()) };
    0
}

/// Copies why the last command was refused, as a C string; returns its bytes.
#[no_mangle]
pub unsafe extern "C" fn fake_mlx5_refusal(buffer: *mut c_char, bytes: usize) -> usize {
    let world = world();
    let sentence = &world.mlx5.refusal;
    let len = sentence.len().min(bytes.saturating_sub(1));
    unsafe {
        std::ptr::copy_nonoverlapping(sentence.as_ptr(), buffer.cast(), len);
        *buffer.add(len) = 0;
    }
    len
}

/// An object's handle for events and late answers: which object, and the context it belongs to.
pub(super) unsafe fn object_of(object: *mut ObjectHandle) -> (Kind, usize, usize) {
    unsafe { ((*object).kind, (*object).context, (*object).device) }
}
