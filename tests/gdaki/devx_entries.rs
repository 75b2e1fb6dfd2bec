//! What the fake does with entries: the bytes that arrive, and completion entries as hardware writes them.

use crate::devx_harness::{is_readable, record, wait, words, Device, Fake};
use crate::devx_pair::{create_qp, data, remote, to_init, to_rtr, to_rts, Memory, Pair};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

const NOP: u8 = 0x00;
const WRITE: u8 = 0x08;
const WAIT: u8 = 0x0f;
const READ: u8 = 0x10;
const SWAP: u8 = 0x11;
const ADD: u8 = 0x12;
const MASKED_SWAP: u8 = 0x14;
const MASKED_ADD: u8 = 0x15;
const DUMP: u8 = 0x23;

/// Two connected queue pairs of 2^log slots on devices 0 and 1, with memory each.
struct Both<'a> {
    pairs: [Pair<'a>; 2],
    memory: [&'static [AtomicU64]; 2],
    /// Local key, remote key.
    keys: [(u32, u32); 2],
}

fn both(fake: &Fake, log: u32, body: impl FnOnce(&mut Both)) {
    {
        let devices = [0, 1].map(|index| Device::open(fake, index));
        let pairs = [0, 1].map(|index| Pair::new(&devices[index], index, log, false));
        pairs[0].connect(&pairs[1]);
        pairs[1].connect(&pairs[0]);
        let memory = [0, 1].map(|_| words(512));
        let regions = [0, 1].map(|i| devices[i].region(memory[i]));
        let keys = regions.each_ref().map(|r| (r.lkey, r.rkey));
        let mut both = Both { pairs, memory, keys };
        body(&mut both);
        both.pairs.into_iter().for_each(Pair::end);
    }
    assert_eq!(fake.left(), [0; 4]);
}

fn get(memory: &[AtomicU64], word: usize) -> u64 {
    memory[word].load(Ordering::Acquire)
}

#[test]
fn every_operation_does_what_it_says() {
    let fake = Fake::take();
    both(&fake, 4, |b| {
        let ([a, _], [here, there]) = (&mut b.pairs, b.memory);
        let ((lkey, _), (_, rkey)) = (b.keys[0], b.keys[1]);
        (0..64).for_each(|i| here[i].store(i as u64 + 1, Ordering::Relaxed));
        there[20].store(0xffff_ffff_0000_00f0, Ordering::Relaxed);
        there[21].store(5, Ordering::Relaxed);
        there[22].store(0x0102, Ordering::Relaxed);
        a.post(WRITE, 0, &[remote(rkey, 0), data(lkey, 0, 64)].concat());
        // From two places.
        a.post(WRITE, 0, &[remote(rkey, 64), data(lkey, 128, 8), data(lkey, 256, 8)].concat());
        let inline = [&(1_u32 << 31 | 12).to_be_bytes()[..], b"twelve bytes"].concat();
        a.post(WRITE, 0, &[remote(rkey, 80), inline].concat());
        a.post(READ, 0, &[remote(rkey, 0), data(lkey, 1024, 80)].concat());
        let two = |first: u64, second: u64| [first.to_be_bytes(), second.to_be_bytes()].concat();
        a.post(ADD, 0, &[remote(rkey, 160), two(0x11, 0), data(lkey, 2048, 8)].concat());
        a.post(SWAP, 0, &[remote(rkey, 168), two(7, 5), data(lkey, 2056, 8)].concat());
        // Fields of one byte: no carry leaves them.
        let boundary = 0x8080_8080_8080_8080;
        a.post(MASKED_ADD, 9, &[remote(rkey, 176), two(0xffff, boundary), data(lkey, 2064, 8)].concat());
        let masked = [two(0xff00, 0x01), two(0xff00, 0xff)].concat();
        a.post(MASKED_SWAP, 9, &[remote(rkey, 176), masked, data(lkey, 2072, 8)].concat());
        a.post(NOP, 0, &[]);
        a.post(DUMP, 0, &data(lkey, 0, 64));
        a.ring();
        // The masked swap has two slots; an entry's number is that of its first.
        for (opcode, index) in [WRITE, WRITE, WRITE, READ, ADD, SWAP, MASKED_ADD, MASKED_SWAP, NOP, DUMP]
            .into_iter()
            .zip([0, 1, 2, 3, 4, 5, 6, 7, 9, 10])
        {
            assert_eq!(a.outcome(), (opcode, index, 0));
        }
        (0..8).for_each(|i| assert_eq!(get(there, i), i as u64 + 1));
        assert_eq!([get(there, 8), get(there, 9)], [17, 33]);
        assert_eq!(get(there, 10).to_le_bytes(), *b"twelve b");
        (0..8).for_each(|i| assert_eq!(get(here, 128 + i), i as u64 + 1));
        assert_eq!([get(here, 136), get(here, 137)], [17, 33]);
        assert_eq!([get(here, 256), get(there, 20)], [0xffff_ffff_0000_00f0, 0xffff_ffff_0000_0101]);
        assert_eq!([get(here, 257), get(there, 21)], [5, 7]);
        assert_eq!(get(here, 258), 0x0102);
        assert_eq!([get(here, 259), get(there, 22)], [0x0001, 0xff01]);
    });
}

#[test]
fn the_owner_bit_turns_with_every_lap_and_silent_entries_say_nothing() {
    let fake = Fake::take();
    both(&fake, 2, |b| {
        let a = &mut b.pairs[0];
        for i in 0..50_u16 {
            a.post_flagged(NOP, 0, &[], if i % 5 == 3 { 0 } else { 8 });
            // Sometimes the register comes first, sometimes the record, as device code does.
            if i % 2 == 0 {
                a.ring_register();
                a.write_record();
            } else {
                a.write_record();
                a.ring_register();
            }
            if i % 5 != 3 {
                assert_eq!(a.outcome(), (NOP, i, 0));
            }
        }
        fake.wait_for("mlx5_entries", 50);
        assert!(!a.has_completion());
        assert_eq!(fake.count("misuse"), 0);
    });
}

#[test]
fn strict_doorbells_want_the_register() {
    let fake = Fake::take();
    fake.set("mlx5_strict_doorbells", 1);
    both(&fake, 2, |b| {
        let a = &mut b.pairs[0];
        a.post(NOP, 0, &[]);
        a.write_record();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!a.has_completion(), "a record is no doorbell");
        a.ring_register();
        assert_eq!(a.outcome(), (NOP, 0, 0));
    });
}

#[test]
fn faults_end_their_queue_pair_with_the_devices_syndromes() {
    let fake = Fake::take();
    type Body = fn(lkey: u32, rkey: u32) -> (u8, u8, Vec<u8>);
    let cases: [(Body, u8, bool); 8] = [
        (|lkey, rkey| (WRITE, 0, [remote(rkey + 1, 0), data(lkey, 0, 8)].concat()), 0x13, true),
        (|lkey, rkey| (WRITE, 0, [remote(rkey, 4096), data(lkey, 0, 8)].concat()), 0x13, true),
        (|lkey, rkey| (READ, 0, [remote(rkey, 0), data(lkey, 4090, 8)].concat()), 0x04, false),
        (|lkey, rkey| (READ, 0, [remote(rkey, 0), data(lkey + 1, 0, 8)].concat()), 0x04, false),
        (|lkey, rkey| (ADD, 0, [remote(rkey, 4), vec![0; 16], data(lkey, 0, 8)].concat()), 0x12, true),
        (|lkey, rkey| (ADD, 0, [remote(rkey, 8), vec![0; 16], data(lkey, 0, 4)].concat()), 0x01, false),
        (|_, _| (0x77, 0, vec![]), 0x02, false),
        (|_, _| (NOP, 1, vec![]), 0x02, false),
    ];
    for (case, (body, syndrome, is_responders)) in cases.into_iter().enumerate() {
        both(&fake, 3, |b| {
            let (opcode, modifier, body) = body(b.keys[0].0, b.keys[1].1);
            let [a, peer] = &mut b.pairs;
            a.post(NOP, 0, &[]);
            a.post(opcode, modifier, &body);
            a.post(NOP, 0, &[]);
            a.ring();
            assert_eq!(a.outcome(), (NOP, 0, 0));
            assert_eq!(a.outcome(), (opcode, 1, syndrome), "case {case}");
            assert_eq!(a.outcome(), (NOP, 2, 5), "flushed");
            assert_eq!((a.state(), peer.state()), (6, if is_responders { 6 } else { 3 }), "case {case}");
            // What comes later is flushed as well.
            a.post(NOP, 0, &[]);
            a.ring();
            assert_eq!(a.outcome(), (NOP, 3, 5));
        });
    }
}

#[test]
fn ends_that_do_not_agree_do_not_talk() {
    let fake = Fake::take();
    // Another MTU, another first packet number, another peer, the MAC of another device, another device's GID.
    let path = 0x0c0 + 0x0c0;
    for (at, bits, value) in [
        (0x0c0 + 0x40, 3, 2),
        (0x0c0 + 0x4a8, 24, 0x78),
        (0x0c0 + 0xa8, 24, 0x99),
        (path + 0x130, 48, 0x0102_0304_0506),
        (path + 0x80 + 96, 32, 0x0a00_0001),
    ] {
        let devices = [0, 1].map(|index| Device::open(&fake, index));
        let mut pairs = [0, 1].map(|index| Pair::new(&devices[index], index, 2, false));
        pairs[1].connect(&pairs[0]);
        let [a, b] = &mut pairs;
        let mut rtr = to_rtr(a.number, b.number, 1);
        crate::devx_harness::put(&mut rtr, at, bits, value);
        // A wrong number in packets that arrive is the other end's fault.
        let is_its_own = at != 0x0c0 + 0x4a8;
        for command in [&to_init(a.number)[..], &rtr, &to_rts(a.number)] {
            assert_eq!(a.qp.modify(command), (0, 0));
        }
        let sender = if is_its_own { a } else { b };
        sender.post(WRITE, 0, &remote(0, 0));
        sender.ring();
        assert_eq!(sender.outcome(), (WRITE, 0, 0x15), "{value:#x} at {at:#x}");
        pairs.into_iter().for_each(Pair::end);
    }
}

#[test]
fn a_companion_waits_for_completions_of_another_queue_pair() {
    let fake = Fake::take();
    both(&fake, 3, |b| {
        let devices = Device::open(&fake, 0);
        let count = words(512);
        let region = devices.region(count);
        let mut main = Pair::new(&devices, 0, 3, false);
        main.connect(&b.pairs[1]);
        let mut companion = Pair::new(&devices, 0, 3, true);
        companion.connect(&companion);
        let wait_for = |index: u32, cq: u32| [&[0; 8][..], &index.to_be_bytes(), &cq.to_be_bytes()].concat();
        companion.post(WAIT, 0, &wait_for(1, main.cqn));
        companion.post(
            ADD,
            0,
            &[remote(region.rkey, 0), [2_u64.to_be_bytes(), [0; 8]].concat(), data(region.lkey, 8, 8)].concat(),
        );
        companion.ring();
        main.post(NOP, 0, &[]);
        main.ring();
        assert_eq!(main.outcome(), (NOP, 0, 0));
        std::thread::sleep(std::time::Duration::from_millis(10));
        assert_eq!((get(count, 0), companion.has_completion()), (0, false), "one completion is not two");
        main.post(NOP, 0, &[]);
        main.ring();
        assert_eq!(companion.outcome(), (WAIT, 0, 0));
        assert_eq!(companion.outcome(), (ADD, 1, 0));
        assert_eq!(get(count, 0), 2);
        // Others may not wait.
        main.post(WAIT, 0, &wait_for(0, main.cqn));
        main.ring();
        assert_eq!((main.outcome(), main.outcome()), ((NOP, 1, 0), (WAIT, 2, 2)));
        companion.end();
        main.end();
    });
}

#[test]
fn rings_that_overflow_are_seen() {
    let fake = Fake::take();
    both(&fake, 2, |b| {
        let a = &mut b.pairs[0];
        fake.set("mlx5_held", 1);
        (0..5).for_each(|_| a.post(NOP, 0, &[]));
        a.ring();
        fake.set("mlx5_held", 0);
        wait("the queue pair's end", || a.state() == 6);
        assert!(fake.count("mlx5_overruns") > 0);
    });
}

#[test]
fn an_overrun_completion_queue_raises_an_event() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let memory = Memory::new(&device, 2);
    let make = |(memory, cq): (&Memory, u32)| create_qp(&device, memory, 2, cq, false);
    let records = memory.records;
    let arm = |word: u32| record(records[0], 1).store(word.to_be(), Ordering::Release);
    arm(2 << 28);
    let mut pair = Pair::of(&device, 0, memory, 2, make, 0);
    assert_eq!(fake.count("mlx5_born_armed"), 0);
    pair.connect(&pair);
    // SAFETY: as libmlx5 is used; the channel's descriptor is first.
    let (channel, fd) = unsafe {
        type Create = unsafe extern "C" fn(*mut oxygin_ffi::verbs::types::ibv_context, u32) -> *mut c_int;
        let channel = fake.mlx5::<Create>("mlx5dv_devx_create_event_channel")(device.context, 0);
        type Subscribe = unsafe extern "C" fn(*mut c_int, *mut std::ffi::c_void, u16, *const u16, u64) -> c_int;
        let subscribe = fake.mlx5::<Subscribe>("mlx5dv_devx_subscribe_devx_event");
        assert_eq!(subscribe(channel, pair.cq.handle, 2, [0x10].as_ptr(), 7), libc::EINVAL, "no event of such a queue");
        assert_eq!(subscribe(channel, pair.cq.handle, 4, [0, 4].as_ptr(), 0x1234_5678_9abc), 0);
        libc::fcntl(*channel, libc::F_SETFL, libc::O_NONBLOCK);
        (channel, *channel)
    };
    let next = || {
        let mut out = [0_u8; 72];
        type Get = unsafe extern "C" fn(*mut c_int, *mut u8, usize) -> isize;
        // SAFETY: as above.
        let bytes = unsafe { fake.mlx5::<Get>("mlx5dv_devx_get_event")(channel, out.as_mut_ptr(), out.len()) };
        let cqn = u32::from_be_bytes(out[8 + 32 + if out[9] == 4 { 0 } else { 24 }..][..4].try_into().unwrap());
        (bytes, u64::from_ne_bytes(out[..8].try_into().unwrap()), out[9], cqn)
    };
    // Armed for all completions behind none taken, by the wrong number; then by those whose turn it is.
    for (index, word, is_event) in [(0, 1 << 28, false), (1, 0, true), (2, 0, false), (3, 1 << 28, true)] {
        arm(word);
        pair.post(NOP, 0, &[]);
        pair.ring();
        assert_eq!(pair.outcome(), (NOP, index, 0));
        // Its event is there, if there is one: the fake answers behind it.
        assert_eq!(pair.state(), 3);
        let event = if is_event { (72, 0x1234_5678_9abc, 0, pair.cqn) } else { (-1, 0, 0, 0) };
        assert_eq!(next(), event, "completion {index}, armed by {word:#x}");
    }
    pair.post(NOP, 0, &[]);
    pair.ring();
    wait("an event", || is_readable(fd));
    assert_eq!(next(), (72, 0x1234_5678_9abc, 4, pair.cqn), "nobody said that the four were taken");
    wait("the queue pair's end", || pair.state() == 6);
    assert_eq!(next().0, -1);
    // SAFETY: as above.
    unsafe {
        fake.mlx5::<unsafe extern "C" fn(*mut c_int)>("mlx5dv_devx_destroy_event_channel")(channel);
    }
    pair.end();
}

#[test]
fn consumed_entries_make_room() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let memory = Memory::new(&device, 2);
    let make = |(memory, cq): (&Memory, u32)| create_qp(&device, memory, 2, cq, false);
    let mut pair = Pair::of(&device, 0, memory, 2, make, 0);
    pair.connect(&pair);
    for i in 0..20 {
        pair.post(NOP, 0, &[]);
        pair.ring();
        assert_eq!(pair.outcome(), (NOP, i, 0));
        pair.consume();
    }
    pair.end();
    assert_eq!(fake.count("mlx5_overruns"), 0);
}

#[test]
fn a_thousand_queue_pairs_are_watched_at_once() {
    let fake = Fake::take();
    let device = Device::open(&fake, 0);
    let mut pairs: Vec<Pair> = (0..1024).map(|_| Pair::new(&device, 0, 2, false)).collect();
    pairs.iter().for_each(|pair| pair.connect(pair));
    // They share a register, in which doorbells overwrite each other: the records tell.
    for pair in &mut pairs {
        pair.post(NOP, 0, &[]);
        pair.ring();
    }
    pairs.iter_mut().for_each(|pair| assert_eq!(pair.outcome(), (NOP, 0, 0)));
    pairs.into_iter().for_each(Pair::end);
}
