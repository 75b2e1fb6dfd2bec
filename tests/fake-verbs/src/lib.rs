//! A libibverbs of our own, for tests. Its devices exist in this process only; queue pairs of any two contexts in the
//! process can be connected and really move bytes. [`fake_verbs_control`] sets limits and faults (see `settings.rs`
//! for the names), [`fake_verbs_query`] reads counts back.
//!
//! It is stricter than hardware where that finds mistakes: local and remote keys never coincide, the opcode of a
//! failed completion misleads, state changes need exactly the right mask, and both ends of a connection must agree on
//! MTU and packet numbers. Objects that are destroyed while others use them, and leaks, show in `live_*` counts.

#![allow(missing_docs, reason = "the functions are those of libibverbs, documented there")]
#![allow(clippy::missing_safety_doc)]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the C ABI of libibverbs: callers pass what that ABI says")]

mod gpu;
mod rdmacm;
mod settings;
mod world;

use oxygin_ffi::verbs::types::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::ptr::{null_mut, NonNull};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use world::{Events, Region, World};

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(Mutex::default);

fn world() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail<T>(errno: i32) -> *mut T {
    unsafe { *libc::__errno_location() = errno };
    null_mut()
}

fn new<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// Sets `key`; "reset" restores the defaults and "run" carries everything out that waits. Returns 0, or -1 for a name
/// that does not exist.
#[no_mangle]
pub unsafe extern "C" fn fake_verbs_control(key: *const c_char, value: i64) -> i64 {
    let key = unsafe { CStr::from_ptr(key) }.to_string_lossy();
    let mut world = world();
    match key.as_ref() {
        "reset" => {
            world.settings.reset();
            gpu::forget();
        }
        "run" => world.run_all(),
        key => return if world.settings.set(key, value) { 0 } else { -1 },
    }
    0
}

/// Reads a count: `live_*`, `last_*`, `work_requests`, `doorbells`, `send_queue_full`, `receiver_not_ready`,
/// `completion_overruns`, `relaxed_regions`, `misuse`.
#[no_mangle]
pub unsafe extern "C" fn fake_verbs_query(key: *const c_char) -> i64 {
    let key = unsafe { CStr::from_ptr(key) }.to_string_lossy();
    world().settings.counted(&key)
}

/// An open device with its number.
#[repr(C)]
struct Open {
    base: ibv_context,
    index: usize,
}

unsafe fn index_of(context: *mut ibv_context) -> usize {
    unsafe { (*context.cast::<Open>()).index }
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
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
                transport_type: if iwarp { IBV_TRANSPORT_IWARP } else { IBV_TRANSPORT_IB },
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
    context.async_fd = -1;
    context.num_comp_vectors = 1;
    new(Open { base: context, index }).cast()
}

#[no_mangle]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    drop(unsafe { Box::from_raw(context.cast::<Open>()) });
    world().settings.count("live_contexts", -1);
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
        max_msg_sz: get("max_msg_sz") as u32,
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

fn gid_of(world: &World, device: usize, index: u32) -> Option<(ibv_gid, u32)> {
    if i64::from(index) >= world.settings.get("gids", device) || index > 3 {
        return None;
    }
    let mut raw = [0; 16];
    if index < 2 {
        raw[..2].copy_from_slice(&[0xfe, 0x80]);
        raw[8] = 2;
    } else {
        raw[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
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

#[no_mangle]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    world().settings.count("live_pds", 1);
    new(ibv_pd { context, handle: 0 })
}

#[no_mangle]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    drop(unsafe { Box::from_raw(pd) });
    world().settings.count("live_pds", -1);
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
    world.local.remove(&mr.lkey);
    world.remote.remove(&mr.rkey);
    world.settings.count("live_regions", -1);
    if mr.handle == 1 {
        unsafe { libc::munmap(mr.addr, mr.length) };
    }
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let fd = unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return null_mut();
    }
    let channel = new(ibv_comp_channel { context, fd, refcnt: 0 });
    let mut world = world();
    world.channels.insert(channel as usize, Events { fd, ..Default::default() });
    world.settings.count("live_channels", 1);
    channel
}

#[no_mangle]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let channel_at = channel as usize;
    let channel = unsafe { Box::from_raw(channel) };
    let mut world = world();
    if channel.refcnt != 0 {
        world.settings.count("misuse", 1);
    }
    world.channels.remove(&channel_at);
    world.settings.count("live_channels", -1);
    unsafe { libc::close(channel.fd) };
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    let mut count = 0u64;
    if unsafe { libc::read((*channel).fd, (&raw mut count).cast(), 8) } != 8 {
        return -1;
    }
    let Some(at) = world().channels.get_mut(&(channel as usize)).and_then(|e| e.queue.pop_front()) else {
        return -1;
    };
    unsafe {
        *cq = at as *mut ibv_cq;
        *cookie = (*(at as *mut ibv_cq)).cq_context;
    }
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_ack_cq_events(_cq: *mut ibv_cq, _count: c_uint) {}

#[no_mangle]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    let mut world = world();
    if entries < 1 || i64::from(entries) > world.settings.get("max_cqe", unsafe { index_of(context) }) {
        return fail(libc::EINVAL);
    }
    let mut cq: ibv_cq = unsafe { std::mem::zeroed() };
    cq.context = context;
    cq.channel = channel;
    cq.cq_context = cq_context;
    cq.cqe = entries;
    let cq = new(cq);
    if let Some(mut channel) = NonNull::new(channel) {
        unsafe { channel.as_mut() }.refcnt += 1;
    }
    world.add_completions(cq as usize, entries as usize, channel as usize);
    world.settings.count("live_cqs", 1);
    cq
}

#[no_mangle]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let at = cq as usize;
    let cq = unsafe { Box::from_raw(cq) };
    if let Some(mut channel) = NonNull::new(cq.channel) {
        unsafe { channel.as_mut() }.refcnt -= 1;
    }
    let mut world = world();
    world.completions.remove(&at);
    // As the kernel does: events that nobody took go with the queue.
    if let Some(events) = world.channels.get_mut(&(cq.channel as usize)) {
        events.queue.retain(|&c| c != at);
    }
    world.settings.count("live_cqs", -1);
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let (context, init) = unsafe { ((*pd).context, &mut *init) };
    let mut world = world();
    let device = unsafe { index_of(context) };
    let room = world.settings.get("qp_room", device).min(world.settings.get("max_qp_wr", device));
    let deepest = i64::from(init.cap.max_send_wr.max(init.cap.max_recv_wr));
    if deepest > room || init.cap.max_send_sge != 1 || init.qp_type != IBV_QPT_RC {
        return fail(if deepest > room { libc::ENOMEM } else { libc::EINVAL });
    }
    let (send_cq, recv_cq) = (init.send_cq as usize, init.recv_cq as usize);
    let number = world.add_pair(context as usize, device, send_cq, recv_cq, init.cap);
    world.settings.note("last_depth", init.cap.max_send_wr.into());
    world.settings.count("live_qps", 1);
    let mut qp: ibv_qp = unsafe { std::mem::zeroed() };
    qp.context = context;
    qp.qp_context = init.qp_context;
    qp.pd = pd;
    qp.send_cq = init.send_cq;
    qp.recv_cq = init.recv_cq;
    qp.qp_num = number;
    qp.qp_type = init.qp_type;
    new(qp)
}

#[no_mangle]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let (number, attr) = unsafe { ((*qp).qp_num, &*attr) };
    match world().modify(number, attr, mask) {
        Ok(()) => {
            unsafe { (*qp).state = attr.qp_state };
            0
        }
        Err(errno) => errno,
    }
}

#[no_mangle]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let qp = unsafe { Box::from_raw(qp) };
    let mut world = world();
    world.pairs.remove(&qp.qp_num);
    world.settings.count("live_qps", -1);
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_wc_status_str(status: c_uint) -> *const c_char {
    match status {
        IBV_WC_SUCCESS => c"success",
        IBV_WC_LOC_LEN_ERR => c"local length error",
        IBV_WC_LOC_QP_OP_ERR => c"local QP operation error",
        IBV_WC_LOC_PROT_ERR => c"local protection error",
        IBV_WC_WR_FLUSH_ERR => c"Work Request Flushed Error",
        IBV_WC_REM_INV_REQ_ERR => c"remote invalid request error",
        IBV_WC_REM_ACCESS_ERR => c"remote access error",
        IBV_WC_REM_OP_ERR => c"remote operation error",
        IBV_WC_RETRY_EXC_ERR => c"transport retry counter exceeded",
        IBV_WC_RNR_RETRY_EXC_ERR => c"RNR retry counter exceeded",
        _ => c"other error",
    }
    .as_ptr()
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, n: c_int, out: *mut ibv_wc) -> c_int {
    world().poll(cq as usize, n.max(0) as usize, |i, wc| unsafe { *out.add(i) = wc }) as c_int
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    world().arm(cq as usize, solicited_only != 0);
    0
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    let number = unsafe { (*qp).qp_num };
    let mut world = world();
    world.settings.count("doorbells", 1);
    let every = world.settings.get("enomem_every", 0);
    let doorbell = world.settings.counted("doorbells");
    let mut allowance = u64::MAX;
    if every > 0 && doorbell % every == 0 {
        allowance = world.settings.random(4);
    }
    let mut at = wr;
    let mut rc = 0;
    while let Some(wr) = NonNull::new(at) {
        let taken = if allowance == 0 { Err(libc::ENOMEM) } else { world.queue_send(number, unsafe { wr.as_ref() }) };
        if let Err(errno) = taken {
            unsafe { *bad = at };
            rc = errno;
            break;
        }
        allowance -= 1;
        at = unsafe { wr.as_ref() }.next;
    }
    if world.settings.get("late", 0) == 0 {
        world.run(number, usize::MAX);
    }
    rc
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    let number = unsafe { (*qp).qp_num };
    let mut world = world();
    let mut at = wr;
    while let Some(wr) = NonNull::new(at) {
        let r = unsafe { wr.as_ref() };
        if let Err(errno) = world.queue_receive(number, r.wr_id, unsafe { *r.sg_list }) {
            unsafe { *bad = at };
            return errno;
        }
        at = r.next;
    }
    0
}
