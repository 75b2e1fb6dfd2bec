//! A libibverbs of our own, for tests. Its devices exist in this process only; queue pairs of any two contexts in the
//! process can be connected and really move bytes. [`fake_verbs_control`] sets limits and faults (see `settings.rs`
//! for the names), [`fake_verbs_query`] reads counts back.
//!
//! It is stricter than hardware where that finds mistakes: local and remote keys never coincide, the opcode of a
//! failed completion misleads, state changes need exactly the right mask, and both ends of a connection must agree on
//! MTU and packet numbers. [`mlx5`] is a libmlx5 of the same devices. Objects that are destroyed while others use
//! them, and leaks, show in `live_*` counts.

#![allow(missing_docs, reason = "the functions are those of libibverbs, documented there")]
#![allow(clippy::missing_safety_doc)]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the C ABI of libibverbs: callers pass what that ABI says")]

mod addresses;
mod bytes;
mod devices;
mod gpu;
pub mod mlx5;
mod rdmacm;
mod regions;
mod settings;
mod world;

use devices::index_of;
use oxygin_ffi::verbs::types::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::ptr::{null_mut, NonNull};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use world::{Events, World};

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

/// Sets `key`. "reset" restores the defaults, "run" carries out what waits: everything (0), what ranks sent to
/// themselves (1), or what they sent to others (2). "device_fatal" is an asynchronous event of a device, "pair_fatal"
/// of a queue pair by its number, which `last_qp` tells, as "pair_access" is, "queue_fatal" of its completion queue;
/// "port_down", "port_up", "lid_change" and "gid_change" are of a device's port. Returns 0, or -1 for a name that does
/// not exist.
#[no_mangle]
pub unsafe extern "C" fn fake_verbs_control(key: *const c_char, value: i64) -> i64 {
    let key = unsafe { CStr::from_ptr(key) }.to_string_lossy();
    let mut world = world();
    match key.as_ref() {
        "reset" => {
            world.settings.reset();
            gpu::forget();
        }
        "run" => world.run_all(value),
        "device_fatal" => world.strike(IBV_EVENT_DEVICE_FATAL, value),
        "pair_fatal" => world.strike(IBV_EVENT_QP_FATAL, value),
        "queue_fatal" => world.strike(IBV_EVENT_CQ_ERR, value),
        "pair_access" => world.strike(IBV_EVENT_QP_ACCESS_ERR, value),
        "port_down" => world.strike(IBV_EVENT_PORT_ERR, value),
        "port_up" => world.strike(IBV_EVENT_PORT_ACTIVE, value),
        "lid_change" => world.strike(IBV_EVENT_LID_CHANGE, value),
        "gid_change" => world.strike(IBV_EVENT_GID_CHANGE, value),
        key => return if world.settings.set(key, value) { 0 } else { -1 },
    }
    0
}

/// Reads a count: `live_*`, `last_*`, `work_requests`, `doorbells`, `send_queue_full`, `receiver_not_ready`,
/// `completion_overruns`, `relaxed_regions`, `misuse`.
#[no_mangle]
pub unsafe extern "C" fn fake_verbs_query(key: *const c_char) -> i64 {
    let key = unsafe { CStr::from_ptr(key) }.to_string_lossy();
    let world = world();
    if let Some(options) = key.strip_prefix("ece_agreed_") {
        return world.agreed(options.parse().unwrap_or_default()).0;
    }
    if key == "ece_apart" {
        return world.agreed(0).1;
    }
    world.mlx5_live(&key).unwrap_or_else(|| world.settings.counted(&key))
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
pub unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let mut count = 0u64;
    if unsafe { libc::read((*context).async_fd, (&raw mut count).cast(), 8) } != 8 {
        return -1;
    }
    let mut world = world();
    let Some(taken) = world.events.get_mut(&(context as usize)).and_then(|e| e.queue.pop_front()) else { return -1 };
    // What is not acknowledged shows at the end.
    world.settings.count("misuse", 1);
    unsafe { *event = taken };
    0
}

#[no_mangle]
pub unsafe extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {
    world().settings.count("misuse", -1);
}

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
    if i64::from(init.cap.max_inline_data) > world.settings.get("max_inline", device) {
        return fail(world.settings.get("inline_errno", device) as c_int);
    }
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
    let qp = new(qp);
    world.settings.note("last_qp", number.into());
    if let Some(pair) = world.pairs.get_mut(&number) {
        pair.at = qp as usize;
    }
    qp
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
pub unsafe extern "C" fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    match world().ece(unsafe { (*qp).qp_num }) {
        Ok(options) => {
            unsafe { *ece = options };
            0
        }
        Err(errno) => errno,
    }
}

#[no_mangle]
pub unsafe extern "C" fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    world().set_ece(unsafe { (*qp).qp_num }, unsafe { *ece }).err().unwrap_or(0)
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
    if rc == 0 {
        rc = world.settings.get("ring_errno", 0) as i32;
        world.settings.set("ring_errno", 0);
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
