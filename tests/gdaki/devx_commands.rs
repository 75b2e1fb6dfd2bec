//! The fake libmlx5 itself: commands that it takes, and those that it refuses as a device would. A fake that believes
//! everything would prove nothing of whoever uses it.

use crate::devx_harness::{errno, get, is_readable, put, wait, words, Device, Fake};
use crate::devx_pair::{create_cq, create_qp, remote, stop, to_init, to_rtr, to_rts, Memory, Pair, COMMAND};
use oxygin_ffi::verbs::types::ibv_context;
use std::ffi::{c_int, c_void, CStr, CString};
use std::path::Path;
use std::ptr::null_mut;

/// `EREMOTEIO`: the device, not the kernel, refused.
const DEVICE: i32 = libc::EREMOTEIO;
const BAD_OP: u8 = 2;
const BAD_PARAM: u8 = 3;
const BAD_RES: u8 = 5;
const BAD_STATE: u8 = 0x10;
const BAD_SIZE: u8 = 0x40;
const BAD_LENGTH: u8 = 0x50;

#[test]
fn a_queue_pair_goes_through_its_states_and_leaves_nothing() {
    let fake = Fake::take();
    {
        let device = Device::open(&fake, 0);
        let [a, b] = [0, 0].map(|index| Pair::new(&device, index, 4, false));
        assert_eq!(a.state(), 0);
        assert_eq!(a.qp.modify(&to_init(a.number)), (0, 0));
        assert_eq!(a.state(), 1);
        assert_eq!(a.qp.modify(&to_rtr(a.number, b.number, 0)), (0, 0));
        assert_eq!(a.state(), 2);
        assert_eq!(a.qp.modify(&to_rts(a.number)), (0, 0));
        let answer = a.qp.query(a.number);
        assert_eq!(get(&answer, 0x0c0, 4), 3);
        let asked = [(0x0a8, 24, b.number.into()), (0x40, 3, 3), (0x388, 3, 4), (0x38d, 3, 7), (0x3c8, 24, 0x77)];
        for (at, bits, value) in asked {
            assert_eq!(get(&answer, 0x0c0 + at, bits), value, "field at {at:#x} of the context");
        }
        assert_eq!(a.qp.modify(&stop(0x507, a.number)), (0, 0));
        assert_eq!(a.state(), 6);
        assert_eq!(a.qp.modify(&stop(0x50a, a.number)), (0, 0));
        assert_eq!(a.state(), 0);
        assert_eq!(fake.left()[0], 2 * (4 + 1 + 1) + 1, "four umems, two queues each, and a doorbell page");
        a.end();
        b.end();
        assert_eq!(fake.left()[0], 1);
    }
    assert_eq!((fake.left(), fake.count("misuse")), ([0; 4], 0));
}

/// A change of a command: first bit, width, value; and the status that it ends with.
type Wrong = (usize, usize, u64, u8);

/// Makes all of these changes one by one, and expects the command to be refused; without a change it is taken.
fn each_is_refused(device: &Device, command: [u8; COMMAND], wrong: &[Wrong]) {
    let before = device.fake.count("live_mlx5");
    for &(at, bits, value, status) in wrong {
        let mut changed = command;
        put(&mut changed, at, bits, value);
        let (made, out) = device.create(&changed);
        assert_eq!(made.err(), Some(DEVICE), "{value:#x} at {at:#x} is taken");
        assert_eq!(out[0], status, "{value:#x} at {at:#x}: {}", device.fake.refusal());
        assert_ne!(get(&out, 0x20, 32), 0, "a syndrome");
    }
    assert_eq!(device.fake.count("live_mlx5"), before);
    let (made, _) = device.create(&command);
    assert_eq!(made.unwrap().end(), 0);
}

#[test]
fn completion_queues_that_cannot_be_are_refused() {
    let fake = Fake::take();
    let (device, other) = (Device::open(&fake, 0), Device::open(&fake, 0));
    let (memory, foreign) = (Memory::new(&device, 4), Memory::new(&other, 4));
    // SAFETY: the other context's page.
    let foreign_page = unsafe { (*other.uar).page };
    let command = create_cq(&device, &memory, 4);
    let wrong = [
        (0x030, 16, 1, BAD_OP),
        (0x080 + 0x06, 1, 0, BAD_PARAM),
        (0x2e0, 1, 0, BAD_PARAM),
        (0x2c0, 32, 0xdead, BAD_RES),
        (0x2c0, 32, foreign.umems[1].id().into(), BAD_RES),
        (0x080 + 0x20, 32, 0, BAD_RES),
        (0x280, 64, 64, BAD_SIZE),
        (0x280, 64, 32, BAD_PARAM),
        (0x080 + 0x63, 5, 5, BAD_SIZE),
        (0x080 + 0x63, 5, 23, BAD_SIZE),
        (0x080 + 0x68, 24, 0, BAD_RES),
        (0x080 + 0x68, 24, foreign_page.into(), BAD_RES),
        (0x080 + 0xb8, 8, 12, BAD_RES),
        (0x080 + 0xc3, 5, 31, BAD_PARAM),
        (0x080 + 0x1c0, 64, 4, BAD_PARAM),
        (0x080 + 0x1c0, 64, 4096, BAD_SIZE),
        (0x080 + 0x08, 3, 1, BAD_PARAM),
        (0x080 + 0x0b, 1, 1, BAD_PARAM),
        // Reserved: in the context, in the command, behind the last field.
        (0x080 + 0x0c, 1, 1, BAD_PARAM),
        (0x020, 16, 1, BAD_PARAM),
        (0x2e1, 31, 1, BAD_PARAM),
        (0x300, 32, 1, BAD_PARAM),
    ];
    each_is_refused(&device, command, &wrong);
    let (made, out) = device.create(&command[..COMMAND - 4]);
    assert_eq!((made.err(), out[0]), (Some(DEVICE), BAD_LENGTH));
    memory.umems.iter().chain(&foreign.umems).for_each(|umem| assert_eq!(umem.end(), 0));
}

#[test]
fn queue_pairs_that_cannot_be_are_refused() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let pair = Pair::new(&device, 0, 4, false);
    let command = create_qp(&device, &pair.memory, 4, pair.cqn, false);
    let wrong = [
        (0x030, 16, 1, BAD_OP),
        (0x0c0, 4, 1, BAD_PARAM),
        (0x0c0 + 0x08, 8, 3, BAD_PARAM),
        (0x0c0 + 0x13, 2, 0, BAD_PARAM),
        (0x0c0 + 0x28, 24, 0, BAD_RES),
        (0x0c0 + 0x51, 4, 5, BAD_SIZE),
        (0x0c0 + 0x68, 24, 0, BAD_RES),
        (0x0c0 + 0x3e8, 24, 0, BAD_RES),
        (0x0c0 + 0x4e8, 24, 1, BAD_RES),
        (0x0c0 + 0x565, 3, 0, BAD_PARAM),
        (0x0c0 + 0x80, 2, 2, BAD_PARAM),
        (0x0c0 + 0x683, 1, 0, BAD_PARAM),
        (0x0c0 + 0x720, 32, 0, BAD_RES),
        (0x0c0 + 0x500, 64, 4096, BAD_SIZE),
        (0x800, 64, 4096, BAD_SIZE),
        (0x840, 32, 1, BAD_RES),
        (0x860, 1, 0, BAD_PARAM),
        (0x040, 1, 1, BAD_PARAM),
        (0x0c0 + 0x10, 3, 1, BAD_PARAM),
        (0x861, 31, 1, BAD_PARAM),
    ];
    each_is_refused(&device, command, &wrong);
    fake.set("mlx5_cap.cd", 0);
    let (companion, out) = device.create(&create_qp(&device, &pair.memory, 4, pair.cqn, true));
    assert_eq!((companion.err(), out[0]), (Some(DEVICE), BAD_PARAM), "the device knows no companions");
    pair.end();
}

#[test]
fn steps_out_of_order_and_wrong_paths_are_refused() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let [a, b] = [0, 0].map(|index| Pair::new(&device, index, 4, false));
    let refused = |command: &[u8], at: usize, bits: usize, value: u64, status: u8| {
        let mut command = command.to_vec();
        put(&mut command, at, bits, value);
        let before = a.state();
        assert_eq!(a.qp.modify(&command), (DEVICE, status), "{value:#x} at {at:#x}: {}", fake.refusal());
        assert_eq!(a.state(), before, "{value:#x} at {at:#x} has changed the state");
    };
    let (init, rtr, rts) = (to_init(a.number), to_rtr(a.number, b.number, 0), to_rts(a.number));
    let path = 0x0c0 + 0x0c0;
    let same = |command: &[u8], status| refused(command, 0x30, 1, 0, status);
    same(&rtr, BAD_STATE);
    same(&rts, BAD_STATE);
    same(&stop(0x507, a.number), BAD_STATE);
    refused(&init, path + 0x128, 8, 0, BAD_PARAM);
    refused(&init, path + 0x128, 8, 2, BAD_PARAM);
    refused(&init, path + 0x10, 16, 1, BAD_PARAM);
    refused(&init, 0x48, 24, b.number.into(), BAD_RES);
    // A port of a bond, where there is none.
    refused(&init, 0x80, 32, 1 << 15, BAD_PARAM);
    assert_eq!(a.qp.modify(&init), (0, 0));
    same(&init, BAD_STATE);
    same(&rts, BAD_STATE);
    for (at, bits, value) in [
        // More than the port's 1024 bytes, and none.
        (0x0c0 + 0x40, 3, 4),
        (0x0c0 + 0x40, 3, 0),
        (0x0c0 + 0x43, 5, 31),
        (0x0c0 + 0xa8, 24, 0),
        (0x0c0 + 0x488, 3, 5),
        (path + 0x48, 8, 7),
        (path + 0x58, 8, 0),
        (path + 0x110, 16, 0x1234),
        (path + 0x130, 48, 0),
        (path + 0x80 + 64, 64, 0),
        (path + 0x30, 16, 7),
    ] {
        refused(&rtr, at, bits, value, BAD_PARAM);
    }
    assert_eq!(a.qp.modify(&rtr), (0, 0));
    refused(&rts, 0x0c0 + 0x388, 3, 5, BAD_PARAM);
    assert_eq!(a.qp.modify(&rts), (0, 0));
    same(&rts, BAD_STATE);
    a.end();
    b.end();
}

#[test]
fn the_lag_port_is_taken_where_the_device_has_one() {
    let fake = Fake::take();
    fake.set("mlx5_cap.lag_tx_port_affinity", 1);
    fake.set("mlx5_cap.num_lag_ports", 2);
    let device = Device::open(&fake, 0);
    let pair = Pair::new(&device, 0, 4, false);
    let mut command = to_init(pair.number);
    put(&mut command, 0x80, 32, 1 << 15);
    put(&mut command, 0x0c0 + 4, 4, 3);
    assert_eq!(pair.qp.modify(&command), (DEVICE, BAD_PARAM), "there is no third port");
    put(&mut command, 0x0c0 + 4, 4, 2);
    fake.set("mlx5_cap.init2_lag_tx_port_affinity", 0);
    assert_eq!(pair.qp.modify(&command), (DEVICE, BAD_PARAM), "not yet in INIT");
    fake.set("mlx5_cap.init2_lag_tx_port_affinity", 1);
    assert_eq!(pair.qp.modify(&command), (0, 0));
    assert_eq!((fake.count("mlx5_lag_port"), get(&pair.qp.query(pair.number), 0x0c4, 4)), (2, 2));
    pair.end();
}

#[test]
fn commands_fail_where_a_test_wants_it() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let memory = Memory::new(&device, 4);
    let command = create_cq(&device, &memory, 4);
    for (key, value) in [("mlx5_fail_opcode", 0x400), ("mlx5_fail_in", 2), ("mlx5_fail_status", 8)] {
        fake.set(key, value);
    }
    let made = [0; 3].map(|_| device.create(&command));
    let statuses = made.each_ref().map(|(made, out)| (made.is_ok(), out[0], get(out, 0x20, 32)));
    assert_eq!(statuses, [(true, 0, 0), (false, 8, 0x12_3456), (true, 0, 0)]);
    made.into_iter().filter_map(|m| m.0.ok()).for_each(|object| assert_eq!(object.end(), 0));
    fake.set("mlx5_umem_errno", libc::ENOMEM.into());
    fake.set("mlx5_umem_in", 1);
    type Reg = unsafe extern "C" fn(*mut ibv_context, *mut c_void, usize, u32) -> *mut u32;
    // SAFETY: there is such a function; the memory stays.
    let failed = unsafe {
        fake.mlx5::<Reg>("mlx5dv_devx_umem_reg")(device.context, words(512).as_ptr().cast_mut().cast(), 4096, 1)
    };
    assert!(failed.is_null() && errno() == libc::ENOMEM);
    // Only that one.
    assert_eq!(device.umem(words(512)).end(), 0);
    memory.umems.iter().for_each(|umem| assert_eq!(umem.end(), 0));
}

#[test]
fn what_is_in_use_is_not_ended() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let pair = Pair::new(&device, 0, 4, false);
    assert_eq!(pair.cq.end(), libc::EBUSY);
    assert_eq!(pair.memory.umems.each_ref().map(|umem| umem.end()), [libc::EBUSY; 4]);
    assert_eq!(fake.count("misuse"), 5);
    // Its doorbell page and its protection domain, and the context with what is left in it.
    drop(device);
    assert_eq!(fake.count("misuse"), 8);
    pair.end();
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn functions_have_the_versions_of_the_real_library() {
    let fake = Fake::take();
    let path = CString::new(fake_verbs::mlx5::LIBRARY).unwrap();
    // SAFETY: our own library, which is loaded; names are only looked for.
    let find = |name: &CStr, version: &CStr| unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let found = libc::dlvsym(library, name.as_ptr(), version.as_ptr());
        libc::dlclose(library);
        !found.is_null()
    };
    for (name, version) in [
        (c"mlx5dv_init_obj", c"MLX5_1.2"),
        (c"mlx5dv_open_device", c"MLX5_1.7"),
        (c"mlx5dv_devx_obj_create", c"MLX5_1.7"),
        (c"mlx5dv_is_supported", c"MLX5_1.8"),
        (c"mlx5dv_devx_create_event_channel", c"MLX5_1.11"),
        (c"mlx5dv_devx_umem_reg_ex", c"MLX5_1.19"),
        (c"mlx5dv_reg_dmabuf_mr", c"MLX5_1.25"),
        (c"mlx5dv_devx_uar_export_dmabuf_fd", c"MLX5_1.26"),
    ] {
        assert!(find(name, version), "{name:?} {version:?}");
        assert!(fake.has(name.to_str().unwrap()), "{name:?} without a version");
    }
    assert!(!find(c"mlx5dv_init_obj", c"MLX5_1.7"), "that function was there before");
    drop(fake);
    let lacking = fake_verbs::mlx5::without("mlx5dv_devx_umem_reg_ex", Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    let fake = Fake::take_with(&lacking);
    assert!(!fake.has("mlx5dv_devx_umem_reg_ex") && fake.has("mlx5dv_devx_umem_reg"));
    drop(Device::open(&fake, 0));
}

/// `QUERY_HCA_CAP`: errno, status, and the answer.
fn capabilities(device: &Device, op_mod: u64) -> (i32, Vec<u8>) {
    type Command = unsafe extern "C" fn(*mut ibv_context, *const u8, usize, *mut u8, usize) -> c_int;
    let (mut command, mut out) = ([0; 16], vec![0; 16 + 4096]);
    put(&mut command, 0, 16, 0x100);
    put(&mut command, 0x30, 16, op_mod);
    // SAFETY: as many bytes as it is told.
    let errno = unsafe {
        let general = device.fake.mlx5::<Command>("mlx5dv_devx_general_cmd");
        general(device.context, command.as_ptr(), command.len(), out.as_mut_ptr(), out.len())
    };
    (errno, out)
}

#[test]
fn capabilities_are_what_a_test_says() {
    let fake = Fake::take();
    fake.set("mlx5_cap.log_max_qp_sz@1", 9);
    let devices = [0, 1].map(|index| Device::open(&fake, index));
    let sizes = devices.each_ref().map(|device| {
        let (errno, out) = capabilities(device, 1);
        assert_eq!((errno, out[0]), (0, 0));
        assert_eq!(get(&out, 0x80 + 0x1b6, 2), 1, "Ethernet");
        get(&out, 0x80 + 0x88, 8)
    });
    assert_eq!(sizes, [15, 9]);
    let (errno, out) = capabilities(&devices[0], 0x20 << 1 | 1);
    assert_eq!((errno, get(&out, 0x80 + 0x2e1, 1)), (0, 1), "doorbells without record");
    let (errno, out) = capabilities(&devices[0], 0x11 << 1);
    assert_eq!((errno, out[0]), (DEVICE, BAD_PARAM), "capabilities that the device has not");
}

#[test]
fn a_device_of_another_maker_is_none() {
    let fake = Fake::take();
    fake.set("mlx5@1", 0);
    let supported = [0, 1].map(|index| {
        // SAFETY: as libibverbs is used.
        unsafe {
            type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void;
            let list = fake.verbs::<List>("ibv_get_device_list")(null_mut());
            let device = *list.add(index);
            let is = fake.mlx5::<unsafe extern "C" fn(*mut c_void) -> bool>("mlx5dv_is_supported")(device);
            fake.verbs::<unsafe extern "C" fn(*mut *mut c_void)>("ibv_free_device_list")(list);
            is
        }
    });
    assert_eq!(supported, [true, false]);
}

#[test]
fn answers_and_events_come_through_their_channels() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let [mut a, b] = [0, 0].map(|index| Pair::new(&device, index, 2, false));
    a.connect(&b);
    b.connect(&a);
    type Open = unsafe extern "C" fn(*mut ibv_context) -> *mut c_int;
    type OpenEvents = unsafe extern "C" fn(*mut ibv_context, u32) -> *mut c_int;
    type Ask = unsafe extern "C" fn(*mut c_void, *const u8, usize, usize, u64, *mut c_int) -> c_int;
    type Take = unsafe extern "C" fn(*mut c_int, *mut u8, usize) -> c_int;
    type TakeEvent = unsafe extern "C" fn(*mut c_int, *mut u8, usize) -> isize;
    type Subscribe = unsafe extern "C" fn(*mut c_int, *mut c_void, u16, *const u16, u64) -> c_int;
    type Close = unsafe extern "C" fn(*mut c_int);
    // SAFETY: as libmlx5 is used; everything is opened and closed once, and as many bytes are there as is said.
    unsafe {
        let answers = fake.mlx5::<Open>("mlx5dv_devx_create_cmd_comp")(device.context);
        let events = fake.mlx5::<OpenEvents>("mlx5dv_devx_create_event_channel")(device.context, 1);
        assert_eq!(fake.count("live_mlx5_channels"), 2);
        for channel in [answers, events] {
            libc::fcntl(*channel, libc::F_SETFL, libc::O_NONBLOCK);
        }
        let mut query = [0; 16];
        put(&mut query, 0, 16, 0x50b);
        put(&mut query, 0x48, 24, a.number.into());
        let ask = fake.mlx5::<Ask>("mlx5dv_devx_obj_query_async");
        assert_eq!(ask(a.qp.handle, query.as_ptr(), 16, 272, 0xabcd, answers), 0);
        let mut late = [0_u8; 280];
        let take = fake.mlx5::<Take>("mlx5dv_devx_get_async_cmd_comp");
        assert_eq!(take(answers, late.as_mut_ptr(), late.len()), 0);
        assert_eq!((u64::from_ne_bytes(late[..8].try_into().unwrap()), get(&late[8..], 0xc0, 4)), (0xabcd, 3));
        assert_eq!(take(answers, late.as_mut_ptr(), late.len()), libc::EAGAIN);
        // The responder hears that its peer touched what it may not; without data, only the cookie comes.
        let subscribe = fake.mlx5::<Subscribe>("mlx5dv_devx_subscribe_devx_event");
        assert_eq!(subscribe(events, b.qp.handle, 2, [0x11].as_ptr(), 99), 0);
        a.post(0x08, 0, &[remote(1, 0), vec![0x80, 0, 0, 4, 1, 2, 3, 4], vec![0; 8]].concat());
        a.ring();
        assert_eq!(a.outcome(), (0x08, 0, 0x13));
        let mut event = [0_u8; 16];
        wait("an event", || is_readable(*events));
        assert_eq!(fake.mlx5::<TakeEvent>("mlx5dv_devx_get_event")(events, event.as_mut_ptr(), 16), 8);
        assert_eq!(u64::from_ne_bytes(event[..8].try_into().unwrap()), 99);
        fake.mlx5::<Close>("mlx5dv_devx_destroy_cmd_comp")(answers);
        fake.mlx5::<Close>("mlx5dv_devx_destroy_event_channel")(events);
    }
    a.end();
    b.end();
}
