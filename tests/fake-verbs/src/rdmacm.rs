//! A librdmacm of our own, in the same library: connects the fake queue pairs of iWARP devices. Identifiers of any two
//! event channels in the process can be connected. Every address of this host belongs to the first iWARP device.

use crate::{fail, new, world};
use oxygin_ffi::rdmacm::types::*;
use oxygin_ffi::verbs::types::{ibv_context, ibv_device};
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

static CM: LazyLock<Mutex<Cm>> = LazyLock::new(Mutex::default);

/// Locked before the world, never the other way round.
fn cm() -> MutexGuard<'static, Cm> {
    CM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event as it is handed out: its private data lies behind it.
#[repr(C)]
struct Handed {
    event: rdma_cm_event,
    data: Vec<u8>,
}

struct Waiting {
    kind: u32,
    id: usize,
    listener: usize,
    status: i32,
    data: Vec<u8>,
}

#[derive(Default)]
struct Id {
    channel: usize,
    port: u16,
    listening: bool,
    target: u16,
    qp: u32,
    /// The other end.
    peer: usize,
    connected: bool,
    /// A connect request that is neither accepted nor refused.
    asked: bool,
}

#[derive(Default)]
struct Cm {
    ids: HashMap<usize, Id>,
    channels: HashMap<usize, (c_int, VecDeque<Waiting>)>,
    next_port: u16,
}

impl Cm {
    fn push(&mut self, kind: u32, id: usize, listener: usize, status: i32, data: &[u8]) {
        let at = if listener != 0 { listener } else { id };
        let Some(channel) = self.ids.get(&at).map(|i| i.channel) else { return };
        let Some((fd, queue)) = self.channels.get_mut(&channel) else { return };
        queue.push_back(Waiting { kind, id, listener, status, data: data.to_vec() });
        let one = 1u64;
        unsafe { libc::write(*fd, (&raw const one).cast(), 8) };
    }

    fn say(&mut self, kind: u32, id: usize, status: i32) {
        self.push(kind, id, 0, status, &[]);
    }

    /// Both queue pairs fail, as when the TCP connection under them ends.
    fn cut(&mut self, id: usize) {
        let Some(one) = self.ids.get_mut(&id).filter(|i| i.connected) else { return };
        one.connected = false;
        let (peer, mine) = (one.peer, one.qp);
        let theirs = self.ids.get_mut(&peer).map(|p| {
            p.connected = false;
            p.qp
        });
        let mut world = world();
        world.break_pair(mine);
        theirs.inspect(|&qp| world.break_pair(qp));
        drop(world);
        self.say(RDMA_CM_EVENT_DISCONNECTED, id, 0);
        self.say(RDMA_CM_EVENT_DISCONNECTED, peer, 0);
    }

    /// A connect request that nobody waits for the answer of.
    fn knock(&mut self, channel: usize, listener: usize) {
        let stranger = make_id(self, channel) as usize;
        self.push(RDMA_CM_EVENT_CONNECT_REQUEST, stranger, listener, 0, b"GET / HTTP/1.1");
    }

    fn refuse(&mut self, id: usize) {
        let Some(one) = self.ids.get_mut(&id).filter(|i| i.asked) else { return };
        one.asked = false;
        let peer = one.peer;
        self.say(RDMA_CM_EVENT_REJECTED, peer, -libc::ECONNREFUSED);
    }

    /// Ends an identifier. As in the kernel, an unanswered request is refused, and a listener takes with it the
    /// requests that nobody has read.
    unsafe fn end(&mut self, id: usize) {
        self.cut(id);
        self.refuse(id);
        self.ids.remove(&id);
        let mut unread = Vec::new();
        for (fd, queue) in self.channels.values_mut() {
            let before = queue.len();
            queue.retain(|w| {
                if w.listener == id {
                    unread.push(w.id);
                }
                w.id != id && w.listener != id
            });
            let mut count = 0u64;
            for _ in queue.len()..before {
                unsafe { libc::read(*fd, (&raw mut count).cast(), 8) };
            }
        }
        world().settings.count("live_cm_ids", -1);
        let at = unsafe { Box::from_raw(id as *mut rdma_cm_id) };
        if !at.verbs.is_null() {
            drop(unsafe { Box::from_raw((*at.verbs).device) });
            drop(unsafe { Box::from_raw(at.verbs) });
        }
        for request in unread {
            unsafe { self.end(request) };
        }
    }
}

fn refuse(errno: i32) -> c_int {
    fail::<c_void>(errno);
    -1
}

fn setting(key: &str) -> i64 {
    world().settings.get(key, 0)
}

#[no_mangle]
pub unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let errno = setting("cm_errno") as i32;
    if errno != 0 {
        return fail(errno);
    }
    let fd = unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return null_mut();
    }
    let channel = new(rdma_event_channel { fd });
    cm().channels.insert(channel as usize, (fd, VecDeque::new()));
    world().settings.count("live_cm_channels", 1);
    channel
}

#[no_mangle]
pub unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    let mut cm = cm();
    if cm.ids.values().any(|id| id.channel == channel as usize) {
        world().settings.count("misuse", 1);
    }
    cm.channels.remove(&(channel as usize));
    world().settings.count("live_cm_channels", -1);
    let channel = unsafe { Box::from_raw(channel) };
    unsafe { libc::close(channel.fd) };
}

#[no_mangle]
pub unsafe extern "C" fn rdma_get_cm_event(channel: *mut rdma_event_channel, out: *mut *mut rdma_cm_event) -> c_int {
    let mut count = 0u64;
    if unsafe { libc::read((*channel).fd, (&raw mut count).cast(), 8) } != 8 {
        return -1;
    }
    let Some(waiting) = cm().channels.get_mut(&(channel as usize)).and_then(|(_, q)| q.pop_front()) else {
        return refuse(libc::EAGAIN);
    };
    let mut handed = Box::new(Handed { event: unsafe { std::mem::zeroed() }, data: waiting.data });
    handed.event.id = waiting.id as *mut _;
    handed.event.listen_id = waiting.listener as *mut _;
    handed.event.event = waiting.kind;
    handed.event.status = waiting.status;
    if !handed.data.is_empty() {
        let mut conn = unsafe { handed.event.param.conn };
        conn.private_data = handed.data.as_ptr().cast();
        conn.private_data_len = handed.data.len() as u8;
        handed.event.param.conn = conn;
    }
    world().settings.count("live_cm_events", 1);
    unsafe { *out = Box::into_raw(handed).cast() };
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    drop(unsafe { Box::from_raw(event.cast::<Handed>()) });
    world().settings.count("live_cm_events", -1);
    0
}

fn make_id(cm: &mut Cm, channel: usize) -> *mut rdma_cm_id {
    let mut id: rdma_cm_id = unsafe { std::mem::zeroed() };
    id.channel = channel as *mut _;
    id.ps = RDMA_PS_TCP;
    let id = new(id);
    cm.ids.insert(id as usize, Id { channel, ..Default::default() });
    world().settings.count("live_cm_ids", 1);
    id
}

#[no_mangle]
pub unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    _ps: u32,
) -> c_int {
    let made = make_id(&mut cm(), channel as usize);
    unsafe {
        (*made).context = context;
        *id = made;
    }
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    unsafe { cm().end(id as usize) };
    0
}

/// Binds to the first iWARP device, as if it had every address.
unsafe fn bind_device(id: *mut rdma_cm_id) -> Result<(), i32> {
    let world = world();
    let devices = world.settings.get("devices", 0) as usize;
    let has = |&i: &usize| world.settings.get("iwarp", i) != 0 && world.settings.get("cm_address", i) != 0;
    let index = (0..devices).find(has).ok_or(libc::ENODEV)?;
    if unsafe { (*id).verbs.is_null() } {
        let mut device: ibv_device = unsafe { std::mem::zeroed() };
        device.name = crate::devices::chars(&format!("fake_{index}"));
        let mut context: ibv_context = unsafe { std::mem::zeroed() };
        context.device = new(device);
        unsafe {
            (*id).verbs = new(context);
            (*id).port_num = 1;
        }
    }
    Ok(())
}

#[no_mangle]
pub unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, _addr: *mut libc::sockaddr) -> c_int {
    if let Err(errno) = unsafe { bind_device(id) } {
        return refuse(errno);
    }
    let mut cm = cm();
    cm.next_port = cm.next_port.wrapping_add(1).max(10_000);
    let port = cm.next_port;
    cm.ids.entry(id as usize).or_default().port = port;
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    cm().ids.get(&(id as usize)).map_or(0, |i| i.port.to_be())
}

#[no_mangle]
pub unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, _backlog: c_int) -> c_int {
    cm().ids.entry(id as usize).or_default().listening = true;
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    _source: *mut libc::sockaddr,
    target: *mut libc::sockaddr,
    _timeout: c_int,
) -> c_int {
    if let Err(errno) = unsafe { bind_device(id) } {
        return refuse(errno);
    }
    // The port lies at the same place in both kinds of address.
    let port = u16::from_be(unsafe { (*target.cast::<libc::sockaddr_in>()).sin_port });
    let outcome = setting("cm_resolve");
    let mut cm = cm();
    cm.ids.entry(id as usize).or_default().target = port;
    match outcome {
        0 => cm.say(RDMA_CM_EVENT_ADDR_RESOLVED, id as usize, 0),
        // Never answered.
        -1 => {}
        errno => cm.say(RDMA_CM_EVENT_ADDR_ERROR, id as usize, -(errno as i32)),
    }
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout: c_int) -> c_int {
    cm().say(RDMA_CM_EVENT_ROUTE_RESOLVED, id as usize, 0);
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    let param = unsafe { *param };
    let mut data =
        unsafe { std::slice::from_raw_parts(param.private_data.cast::<u8>(), param.private_data_len.into()) }.to_vec();
    let (outcome, garbage) = (setting("cm_connect"), setting("cm_garbage"));
    world().settings.note("last_initiator_depth", param.initiator_depth.into());
    world().settings.note("last_responder_resources", param.responder_resources.into());
    let mut cm = cm();
    let own = cm.ids.entry(id as usize).or_default();
    own.qp = param.qp_num;
    let target = own.target;
    let listener = cm.ids.iter().find(|(_, i)| i.listening && i.port == target).map(|(at, i)| (*at, i.channel));
    match (outcome, listener) {
        (0, Some((listener, channel))) => {
            if garbage == 1 || garbage == 2 {
                cm.knock(channel, listener);
            }
            data[16] ^= u8::from(garbage == 2);
            let request = make_id(&mut cm, channel) as usize;
            let one = cm.ids.entry(request).or_default();
            (one.peer, one.asked) = (id as usize, true);
            cm.ids.entry(id as usize).or_default().peer = request;
            cm.push(RDMA_CM_EVENT_CONNECT_REQUEST, request, listener, 0, &data);
        }
        // Never answered.
        (-1, _) => {}
        (0, None) => cm.say(RDMA_CM_EVENT_REJECTED, id as usize, -libc::ECONNREFUSED),
        (errno, _) => cm.say(RDMA_CM_EVENT_UNREACHABLE, id as usize, -(errno as i32)),
    }
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    let qp = unsafe { (*param).qp_num };
    let mut cm = cm();
    let Some((peer, channel)) = cm.ids.get(&(id as usize)).map(|i| (i.peer, i.channel)) else {
        return refuse(libc::EINVAL);
    };
    let Some(active) = cm.ids.get(&peer).map(|i| i.qp) else { return refuse(libc::ECONNRESET) };
    if let Err(errno) = world().link(active, qp) {
        return refuse(errno);
    }
    for (at, qp) in [(peer, active), (id as usize, qp)] {
        let one = cm.ids.entry(at).or_default();
        one.qp = qp;
        one.connected = true;
        one.asked = false;
        cm.say(RDMA_CM_EVENT_ESTABLISHED, at, 0);
    }
    let listener = cm.ids.iter().find(|(_, i)| i.listening && i.channel == channel).map(|(at, _)| *at);
    if let (3, Some(listener)) = (setting("cm_garbage"), listener) {
        cm.knock(channel, listener);
    }
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, _data: *const c_void, _len: u8) -> c_int {
    let mut cm = cm();
    world().settings.count("cm_rejected", 1);
    cm.refuse(id as usize);
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    let mut cm = cm();
    if !cm.ids.get(&(id as usize)).is_some_and(|i| i.connected) {
        return refuse(libc::EINVAL);
    }
    cm.cut(id as usize);
    0
}

#[no_mangle]
pub unsafe extern "C" fn rdma_set_option(
    _id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    if (level, name, len) != (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 1) {
        return refuse(libc::ENOSYS);
    }
    world().settings.note("last_tos", unsafe { *value.cast::<u8>() }.into());
    0
}
