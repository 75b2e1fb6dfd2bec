//! Event channels, and answers to queries that come later.

use super::abi::{object_of, ObjectHandle};
use super::command::Call;
use super::objects::{Channel, Kind, LateAnswer};
use super::prm::commands::{COMP_EVENT, CQ_ERROR};
use crate::devices::index_of;
use crate::world::World;
use crate::{fail, new, world};
use oxygin_ffi::verbs::types::ibv_context;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

/// Events: rdma-core, `tests/mlx5_prm_structs.py`, `EventType`; those of queue pairs: Linux
/// `include/linux/mlx5/device.h`, `MLX5_EVENT_TYPE_*`.
pub const COMPLETION: u16 = 0x00;
pub const CQ_FAILED: u16 = 0x04;
pub const QP_CATASTROPHE: u16 = 0x05;
pub const QP_INVALID_REQUEST: u16 = 0x10;
pub const QP_ACCESS: u16 = 0x11;

/// Events that an object can raise.
fn raised_by(kind: Kind) -> &'static [u16] {
    match kind {
        Kind::Cq(_) => &[COMPLETION, CQ_FAILED],
        Kind::Qp(_) => &[QP_CATASTROPHE, QP_INVALID_REQUEST, QP_ACCESS],
    }
}

/// `struct mlx5dv_devx_event_channel`, and `mlx5dv_devx_cmd_comp`: they begin alike.
#[repr(C)]
pub struct ChannelHandle {
    fd: c_int,
}

/// `MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA`.
const OMITS_DATA: u32 = 1;

fn event_fd() -> Option<c_int> {
    let fd = unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) };
    (fd >= 0).then_some(fd)
}

fn wake(fd: c_int) {
    let one = 1u64;
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// Takes one event off a descriptor: waits, unless the descriptor does not.
unsafe fn take(fd: c_int) -> bool {
    let mut count = 0u64;
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) == 8 }
}

impl World {
    /// Tells every channel that wants to know of this. `data` is of the event: 28 bytes.
    pub(super) fn raise(&mut self, kind: Kind, event: u16, data: &[u8; 28]) {
        let mut entry = [0; 64];
        entry[1] = event as u8;
        entry[32..60].copy_from_slice(data);
        for channel in self.mlx5.channels.values_mut() {
            let cookies = channel.subscribed.iter().filter(|s| (s.0, s.1) == (kind, event)).map(|s| s.2);
            for cookie in cookies.collect::<Vec<_>>() {
                // Of events without data one is enough for each cookie.
                if channel.omits_data && channel.events.iter().any(|e| e.0 == cookie) {
                    continue;
                }
                channel.events.push_back((cookie, entry));
                wake(channel.fd);
            }
        }
    }

    /// A completion queue has an entry for somebody who armed it.
    pub(super) fn raise_completion(&mut self, number: u32) {
        let mut data = [0; 28];
        COMP_EVENT.set(&mut data, "cqn", number.into());
        self.raise(Kind::Cq(number), COMPLETION, &data);
    }

    /// A completion queue is overrun.
    pub(super) fn raise_overrun(&mut self, number: u32) {
        let mut data = [0; 28];
        CQ_ERROR.set(&mut data, "cqn", number.into());
        CQ_ERROR.set(&mut data, "syndrome", 1);
        self.raise(Kind::Cq(number), CQ_FAILED, &data);
    }

    /// A responder refused what its peer asked for.
    pub(super) fn raise_responder(&mut self, number: u32, event: u16) {
        let mut data = [0; 28];
        // Its number is last: Linux include/linux/mlx5/device.h, struct mlx5_eqe_qp_srq.
        data[24..].copy_from_slice(&number.to_be_bytes());
        self.raise(Kind::Qp(number), event, &data);
    }
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_create_event_channel_fake(
    context: *mut ibv_context,
    flags: u32,
) -> *mut ChannelHandle {
    let device = unsafe { index_of(context) };
    let mut world = world();
    let errno = world.settings.get("mlx5_channel_errno", device) as i32;
    match errno {
        0 if !world.mlx5.contexts.contains(&(context as usize)) => return fail(libc::EOPNOTSUPP),
        0 if flags & !OMITS_DATA != 0 => return fail(libc::EINVAL),
        0 => {}
        errno => return fail(errno),
    }
    let Some(fd) = event_fd() else { return fail(libc::EMFILE) };
    let channel = new(ChannelHandle { fd });
    let omits_data = flags & OMITS_DATA != 0;
    let (subscribed, events) = (Vec::new(), VecDeque::new());
    world
        .mlx5
        .channels
        .insert(channel as usize, Channel { fd, context: context as usize, omits_data, subscribed, events });
    channel
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_destroy_event_channel_fake(channel: *mut ChannelHandle) {
    world().mlx5.channels.remove(&(channel as usize));
    unsafe { libc::close(Box::from_raw(channel).fd) };
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_subscribe_devx_event_fake(
    channel: *mut ChannelHandle,
    object: *mut ObjectHandle,
    bytes: u16,
    events: *const u16,
    cookie: u64,
) -> c_int {
    if object.is_null() || bytes == 0 || bytes % 2 != 0 {
        return libc::EINVAL;
    }
    let (kind, context, device) = unsafe { object_of(object) };
    let numbers = unsafe { std::slice::from_raw_parts(events, bytes as usize / 2) };
    let mut world = world();
    let errno = world.settings.get("mlx5_subscribe_errno", device) as i32;
    if errno != 0 {
        return errno;
    }
    // Linux, drivers/infiniband/hw/mlx5/devx.c, is_valid_events: those of the device's capabilities.
    let told = world.settings.get("mlx5_events", device);
    if numbers.iter().any(|n| told >> n & 1 == 0) {
        return libc::EINVAL;
    }
    let Some(channel) = world.mlx5.channels.get_mut(&(channel as usize)) else { return libc::EBADF };
    if channel.context != context || numbers.iter().any(|n| !raised_by(kind).contains(n)) {
        return libc::EINVAL;
    }
    channel.subscribed.extend(numbers.iter().map(|&number| (kind, number, cookie)));
    0
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_get_event_fake(channel: *mut ChannelHandle, out: *mut u8, bytes: usize) -> isize {
    if !unsafe { take((*channel).fd) } {
        return -1;
    }
    let mut world = world();
    let Some(found) = world.mlx5.channels.get_mut(&(channel as usize)) else {
        return fail::<u8>(libc::EBADF) as isize - 1;
    };
    let Some((cookie, entry)) = found.events.pop_front() else { return fail::<u8>(libc::EAGAIN) as isize - 1 };
    let mut all = cookie.to_ne_bytes().to_vec();
    if !found.omits_data {
        all.extend(entry);
    }
    if all.len() > bytes {
        return fail::<u8>(libc::ENOSPC) as isize - 1;
    }
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), out, all.len()) };
    all.len() as isize
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_create_cmd_comp_fake(context: *mut ibv_context) -> *mut ChannelHandle {
    if !world().mlx5.contexts.contains(&(context as usize)) {
        return fail(libc::EOPNOTSUPP);
    }
    let Some(fd) = event_fd() else { return fail(libc::EMFILE) };
    let handle = new(ChannelHandle { fd });
    world().mlx5.answers.insert(handle as usize, (fd, VecDeque::new()));
    handle
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_destroy_cmd_comp_fake(handle: *mut ChannelHandle) {
    world().mlx5.answers.remove(&(handle as usize));
    unsafe { libc::close(Box::from_raw(handle).fd) };
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_obj_query_async_fake(
    object: *mut ObjectHandle,
    input: *const c_void,
    inlen: usize,
    outlen: usize,
    id: u64,
    handle: *mut ChannelHandle,
) -> c_int {
    let (kind, context, device) = unsafe { object_of(object) };
    let input = unsafe { std::slice::from_raw_parts(input.cast::<u8>(), inlen) };
    let mut world = world();
    let mut answer = vec![0; outlen];
    // The answer tells how it went; only what the kernel refuses is an error now.
    match world.mlx5_command(context, device, Call::Query(kind), input, &mut answer) {
        Ok(_) | Err(libc::EREMOTEIO) => {}
        Err(errno) => return errno,
    }
    let Some((fd, queue)) = world.mlx5.answers.get_mut(&(handle as usize)) else { return libc::EBADF };
    queue.push_back(LateAnswer { id, answer });
    wake(*fd);
    0
}

#[no_mangle]
pub unsafe extern "C" fn mlx5dv_devx_get_async_cmd_comp_fake(
    handle: *mut ChannelHandle,
    out: *mut u8,
    bytes: usize,
) -> c_int {
    if !unsafe { take((*handle).fd) } {
        return unsafe { *libc::__errno_location() };
    }
    let mut world = world();
    let Some(late) = world.mlx5.answers.get_mut(&(handle as usize)).and_then(|a| a.1.pop_front()) else {
        return libc::EAGAIN;
    };
    let mut all = late.id.to_ne_bytes().to_vec();
    all.extend(late.answer);
    if all.len() > bytes {
        return libc::ENOSPC;
    }
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), out, all.len()) };
    0
}
