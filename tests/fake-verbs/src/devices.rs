//! Devices: the list of them, what they say of themselves, their ports and GIDs.

use crate::world::AsyncEvents;
use crate::world::World;
use crate::{fail, new, poll_cq, post_recv, post_send, req_notify_cq, world};
use oxygin_ffi::verbs::types::*;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, CStr};
use std::ptr::{null_mut, NonNull};

/// An open device with its number.
#[repr(C)]
struct Open {
    base: ibv_context,
    index: usize,
}

/// An open device's number.
pub unsafe fn index_of(context: *mut ibv_context) -> usize {
    unsafe { (*context.cast::<Open>()).index }
}

/// As C has names.
pub fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
    out
}

#[no_mangle]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let mut world = world();
    let n = world.settings.get("devices", 0) as usize;
    world.settings.count("live_lists", 1);
    let sysfs = std::env::var("FAKE_VERBS_SYSFS").unwrap_or_else(|_| "/nonexistent".into());
    let mut list: Vec<*mut ibv_device> = (0..n)
        .map(|i| {
            let iwarp = world.settings.get("iwarp", i) != 0;
            new(ibv_device {
                ops: [null_mut(); 2],
                node_type: if iwarp { IBV_NODE_RNIC } else { 1 },
                transport_type: if iwarp { IBV_TRANSPORT_IWARP } else { world.settings.get("transport", i) as c_int },
                name: chars(&format!("fake_{i}")),
                dev_name: chars(&format!("uverbs{i}")),
                dev_path: chars(""),
                ibdev_path: chars(&format!("{sysfs}/fake_{i}")),
            })
        })
        .collect();
    if let Some(mut count) = NonNull::new(count) {
        unsafe { *count.as_mut() = n as c_int };
    }
    list.push(null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[no_mangle]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // Devices that were opened live on in their contexts, which hold a copy of the number only.
    let mut n = 0;
    while let Some(device) = NonNull::new(unsafe { *list.add(n) }) {
        drop(unsafe { Box::from_raw(device.as_ptr()) });
        n += 1;
    }
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, n + 1)) });
    world().settings.count("live_lists", -1);
}

#[no_mangle]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    unsafe { open(device) }
}

pub unsafe fn open(device: *mut ibv_device) -> *mut ibv_context {
    let name = unsafe { CStr::from_ptr((*device).name.as_ptr()) }.to_string_lossy();
    let index = name.trim_start_matches("fake_").parse().unwrap_or(0);
    let mut world = world();
    let errno = world.settings.get("open_errno", index) as i32;
    if errno != 0 {
        return fail(errno);
    }
    world.settings.count("live_contexts", 1);
    let mut context: ibv_context = unsafe { std::mem::zeroed() };
    context.ops.poll_cq = Some(poll_cq);
    context.ops.req_notify_cq = Some(req_notify_cq);
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    context.cmd_fd = -1;
    context.async_fd = unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) };
    let async_fd = context.async_fd;
    context.num_comp_vectors = 1;
    let context: *mut ibv_context = new(Open { base: context, index }).cast();
    world.events.insert(context as usize, AsyncEvents { device: index, fd: async_fd, queue: VecDeque::new() });
    context
}

#[no_mangle]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    unsafe { close(context) }
}

pub unsafe fn close(context: *mut ibv_context) -> c_int {
    let mut world = world();
    world.mlx5_end_context(context as usize);
    world.events.remove(&(context as usize));
    unsafe { libc::close((*context).async_fd) };
    drop(unsafe { Box::from_raw(context.cast::<Open>()) });
    world.settings.count("live_contexts", -1);
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let (world, i) = (world(), unsafe { index_of(context) });
    let get = |key| world.settings.get(key, i) as c_int;
    let mut a: ibv_device_attr = unsafe { std::mem::zeroed() };
    a.node_guid = (0x1122_3344_5566_0000 + i as u64).to_be();
    a.sys_image_guid = a.node_guid;
    a.max_mr_size = u64::MAX;
    a.max_qp = 1 << 16;
    a.max_qp_wr = get("max_qp_wr");
    a.max_sge = 1;
    a.max_cq = 1 << 16;
    a.max_cqe = get("max_cqe");
    a.max_qp_rd_atom = get("max_qp_rd_atom");
    a.max_qp_init_rd_atom = get("max_qp_init_rd_atom");
    a.atomic_cap = get("atomic_cap") as c_uint;
    a.vendor_id = get("vendor_id") as u32;
    a.max_pkeys = 1;
    a.phys_port_cnt = 1;
    unsafe { *attr = a };
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    let (world, i) = (world(), unsafe { index_of(context) });
    let get = |key| world.settings.get(key, i);
    let full = ibv_port_attr {
        state: get("port_state") as c_uint,
        max_mtu: IBV_MTU_4096,
        active_mtu: get("active_mtu") as c_uint,
        gid_tbl_len: 8,
        max_msg_sz: if get("max_msg_sz_unsaid") == 0 { get("max_msg_sz") as u32 } else { 0 },
        pkey_tbl_len: 1,
        lid: if get("link_layer") == 1 { 7 + i as u16 } else { 0 },
        // 4 lanes of 25 Gbit/s.
        active_width: 2,
        active_speed: 32,
        link_layer: get("link_layer") as u8,
        ..Default::default()
    };
    // As the real entry point: nothing behind `flags` is written.
    let len = std::mem::offset_of!(ibv_port_attr, flags) + 1;
    unsafe { std::ptr::copy_nonoverlapping((&raw const full).cast::<u8>(), attr.cast::<u8>(), len) };
    0
}

impl World {
    /// A GID of a device, and its type.
    pub fn gid(&self, device: usize, index: u32) -> Option<(ibv_gid, u32)> {
        gid_of(self, device, index)
    }

    /// Which device has a GID.
    pub fn device_with(&self, gid: &[u8; 16]) -> Option<usize> {
        let devices = 0..self.settings.get("devices", 0) as usize;
        devices.into_iter().find(|&d| (0..8).any(|i| self.gid(d, i).is_some_and(|g| g.0.raw == *gid)))
    }
}

fn gid_of(world: &World, device: usize, index: u32) -> Option<(ibv_gid, u32)> {
    if i64::from(index) >= world.settings.get("gids", device) || index > 7 {
        return None;
    }
    let mut raw = [0; 16];
    match index / 2 {
        0 => {
            raw[..2].copy_from_slice(&[0xfe, 0x80]);
            raw[8] = 2;
        }
        1 => raw[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]),
        2 => raw[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 1, 1]),
        _ => raw[..4].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]),
    }
    raw[15] = 1 + device as u8;
    Some((ibv_gid { raw }, if index % 2 == 0 { IBV_GID_TYPE_ROCE_V1 } else { IBV_GID_TYPE_ROCE_V2 }))
}

#[no_mangle]
pub unsafe extern "C" fn ibv_query_gid(context: *mut ibv_context, _port: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
    let found = gid_of(&world(), unsafe { index_of(context) }, index as u32);
    unsafe { *gid = found.map_or(ibv_gid::default(), |(gid, _)| gid) };
    0
}

#[no_mangle]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _flags: u32,
    size: usize,
) -> c_int {
    if size != std::mem::size_of::<ibv_gid_entry>() {
        return libc::EINVAL;
    }
    let Some((gid, gid_type)) = gid_of(&world(), unsafe { index_of(context) }, index) else { return libc::ENODATA };
    unsafe { *entry = ibv_gid_entry { gid, gid_index: index, port_num: port, gid_type, ndev_ifindex: 0 } };
    0
}
