//! Bytes, signals and counters: what descriptors ask for is done, in the order that the contract has.

use crate::support::common::{job, Rank, Window};
use crate::support::device::{entry, own, Ask, Device};
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every rank, its windows, and its device code.
fn on_devices(ranks: usize, ask: Ask, body: impl Fn(&Rank, &Device, &Window, &Window) + Send + Sync) {
    let _turn = own();
    job(ranks, 1, |r| {
        let src = r.window(1 << 14, 0);
        let dst = r.window(1 << 14, 0);
        let device = Device::new(r, ask);
        r.job.barrier.wait();
        body(r, &device, &src, &dst);
        r.job.barrier.wait();
        assert!(!device.has_error());
        device.destroy();
    });
}

fn word(w: &Window, i: usize) -> u64 {
    // SAFETY: inside the window; peers write it.
    unsafe { (*w.words.as_ptr().add(i).cast::<AtomicU64>()).load(Ordering::Acquire) }
}

fn set(w: &Window, i: usize, value: u64) {
    // SAFETY: as above.
    unsafe { (*w.words.as_ptr().add(i).cast::<AtomicU64>()).store(value, Ordering::Release) }
}

fn put(op: u16, bytes: u64, src: &Window, dst: &Window, at: u64) -> Descriptor {
    entry(OP_PUT | op, bytes).first(at, src.handle as u64).second(at, dst.handle as u64)
}

#[test]
fn puts_with_signals_arrive_before_them() {
    on_devices(3, Ask::default(), |r, device, src, dst| {
        let (next, before) = ((r.rank + 1) % 3, (r.rank + 2) % 3);
        for round in 1..=2000u64 {
            let i = (round % 100) as usize;
            set(src, i, round * 10 + r.rank as u64);
            let d = put(OP_SIGNAL_INC, 8, src, dst, 8 * i as u64).with_signal(3, 0, true);
            device.post(0, next, d);
            device.wait_signal(0, 3, round);
            assert_eq!(word(dst, i), round * 10 + before as u64, "round {round}");
            r.job.barrier.wait();
        }
    });
}

#[test]
fn every_operation_does_what_it_says() {
    on_devices(2, Ask { contexts: 3, ..Ask::default() }, |r, device, src, dst| {
        let peer = 1 - r.rank;
        let c = 2;
        (0..64).for_each(|i| set(src, i, 0x1111 * (i as u64 + 1) + r.rank as u64));
        r.job.barrier.wait();
        // Values of all sizes, byte by byte apart.
        let value = 0x8877_6655_4433_2211u64;
        for size in 1..=8u64 {
            let d = entry(OP_PUT | OP_INLINE | OP_SIGNAL_ADD, size).value(value).second(16 * size, dst.handle as u64);
            device.post(c, peer, d.with_signal(7, 1000, false));
        }
        // A signal named by window, and a put with a counter and none.
        let va = entry(OP_VA_SIGNAL | OP_SIGNAL_ADD, 0).first(8 * 200, dst.handle as u64);
        device.post(c, peer, va.with_signal(0, 5, true));
        device.post(c, peer, entry(OP_VA_SIGNAL | OP_SIGNAL_INC, 0).first(8 * 200, dst.handle as u64));
        device.post(c, peer, put(OP_COUNTER, 256, src, dst, 1024).with_counter(6));
        device.post(c, peer, entry(OP_PUT | OP_COUNTER, 0).with_counter(6));
        device.post(c, peer, entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(1, 0, true));
        device.flush(c, peer);
        assert_eq!(device.counter(c, 6), 2);
        device.wait_signal(c, 1, 1);
        device.wait_signal(c, 7, 8000);
        for size in 1..=8u64 {
            let mask = u64::MAX >> (64 - 8 * size);
            assert_eq!(word(dst, 2 * size as usize), value & mask, "{size} bytes");
        }
        assert_eq!(word(dst, 200), 6);
        (0..32).for_each(|i| assert_eq!(word(dst, 128 + i), word(src, 128 + i)));
        r.job.barrier.wait();
        // A get, visible after a flush on the queue to oneself.
        let get = entry(OP_GET, 512).first(0, src.handle as u64).second(4096, dst.handle as u64);
        device.post(c, peer, get);
        device.flush_gets(c, peer, r.rank);
        (0..64).for_each(|i| assert_eq!(word(dst, 512 + i), 0x1111 * (i as u64 + 1) + peer as u64));
        // To oneself.
        device.post(c, r.rank, put(OP_SIGNAL_ADD, 64, src, dst, 0).with_signal(2, 9, true));
        device.wait_signal(c, 2, 9);
    });
}

#[test]
fn rings_wrap_under_many_producers() {
    const THREADS: usize = 8;
    const EACH: u64 = 3000;
    let ask = Ask { contexts: 2, depth: 4, ..Ask::default() };
    on_devices(2, ask, |r, device, src, dst| {
        let peer = 1 - r.rank;
        let plain = put(OP_SIGNAL_ADD | OP_COUNTER, 8, src, dst, 0);
        let (from, to) = (src.handle as u64, dst.handle as u64);
        std::thread::scope(|s| {
            for t in 0..THREADS {
                s.spawn(move || {
                    // Words in an order of the thread's own, with pauses in between.
                    let mut order: Vec<usize> = (0..16).collect();
                    order.rotate_left(t * 2 + 1);
                    for i in 0..EACH {
                        let at = 8 * (t as u64 * 64 + i % 64);
                        let d = plain
                            .first(at, from)
                            .second(at, to)
                            .with_signal(t as u32, i + 1, i % 2 == 0)
                            .with_counter(t as u32);
                        device.post_in(t % 2, peer, &d, &order, || {
                            if i % 500 == 0 {
                                std::thread::yield_now();
                            }
                        });
                    }
                });
            }
        });
        for t in 0..THREADS {
            device.flush(t % 2, peer);
            assert_eq!(device.counter(t % 2, t), EACH);
            device.wait_signal(t % 2, t, EACH * (EACH + 1) / 2);
        }
        r.job.barrier.wait();
        for t in 0..THREADS {
            assert_eq!(device.signal(t % 2, t), EACH * (EACH + 1) / 2);
            assert_eq!(device.ci(t % 2, peer), device.pi(t % 2, peer).load(Ordering::Relaxed));
        }
    });
}
