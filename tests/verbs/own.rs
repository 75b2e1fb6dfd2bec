//! The library's own engine over verbs: what device code wrote is done whatever the device refuses, delays or fails.

use crate::harness::Fake;
use crate::support::apart::is_elsewhere;
use crate::support::common::{job, Window};
use crate::support::device::{entry, wait, Ask, Device};
use crate::support::logged::{collect, lines, listen, said};
use nccl_plugin_api::descriptor::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of each window, and puts that each rank makes to every rank.
const WORDS: usize = 1 << 12;
const PUTS: usize = 150;
/// Words from the place of one put to the next one's: a put has up to one fewer.
const PLACE: usize = 21;

fn take() -> Fake {
    let fake = Fake::take();
    std::env::set_var("OXYGIN_FABRIC", "verbs");
    std::env::set_var("OXYGIN_ENGINE", "own");
    collect();
    fake
}

fn word(w: &Window, i: usize) -> u64 {
    // SAFETY: inside the window; peers write it.
    unsafe { (*w.words.as_ptr().add(i).cast::<AtomicU64>()).load(Ordering::Acquire) }
}

/// Three ranks with two contexts each: every entry puts a few words with a signal and a counter; signals tell of what
/// was put before them.
fn exchange() {
    job(3, 1, |r| {
        let mut src = r.window(WORDS, 0);
        src.words.iter_mut().zip(1..).for_each(|(word, i)| *word = i << 8 | r.rank as u64);
        let dst = r.window(3 * WORDS, 0);
        let device = Device::new(r, Ask { contexts: 2, depth: 16, ..Ask::default() });
        r.job.barrier.wait();
        for i in 0..PUTS {
            let (at, bytes) = (8 * (i * PLACE) as u64, 8 * (1 + i as u64 % 20));
            for peer in 0..3 {
                let there = at + 8 * (r.rank * WORDS) as u64;
                let put = entry(OP_PUT | OP_SIGNAL_INC | OP_COUNTER, bytes)
                    .first(at, src.handle as u64)
                    .second(there, dst.handle as u64);
                device.post(i % 2, peer, put.with_signal(r.rank as u32, 0, true).with_counter(3));
            }
        }
        for from in 0..3 {
            (0..2).for_each(|context| device.wait_signal(context, from, PUTS as u64 / 2));
            for i in 0..PUTS {
                let words = 1 + i % 20;
                let is_there =
                    |w: usize| word(&dst, from * WORDS + i * PLACE + w) == ((i * PLACE + w + 1) << 8 | from) as u64;
                assert!((0..words).all(is_there), "put {i} of rank {from}");
                assert_eq!(word(&dst, from * WORDS + i * PLACE + words) & 0xff, 0, "behind put {i} of rank {from}");
            }
        }
        (0..6).for_each(|i| device.flush(i / 3, i % 3));
        assert_eq!([0, 1].map(|context| device.counter(context, 3)), [3 * PUTS as u64 / 2; 2]);
        assert!(!device.has_error());
        r.job.barrier.wait();
        device.destroy();
    });
}

#[test]
fn entries_are_done_whatever_the_device_refuses_or_delays() {
    // The tables keep the process's list of devices, which others count as left.
    if is_elsewhere(concat!(module_path!(), "::entries_are_done_whatever_the_device_refuses_or_delays")) {
        return;
    }
    let fake = take();
    for faults in [
        &[][..],
        &[("enomem_every", 2)],
        &[("enomem_every", 3), ("late", 1)],
        &[("max_msg_sz", 40), ("late", 1)],
        &[("inline_errno", libc::EINVAL.into()), ("max_inline", 0)],
    ] {
        fake.set("reset", 0);
        faults.iter().for_each(|(name, value)| fake.set(name, *value));
        exchange();
    }
}

#[test]
fn so_they_are_where_signals_go_by_message() {
    // That devices have no atomics is in the list, too.
    if is_elsewhere(concat!(module_path!(), "::so_they_are_where_signals_go_by_message")) {
        return;
    }
    let fake = take();
    fake.set("atomic_cap", 0);
    fake.set("enomem_every", 3);
    exchange();
}

#[test]
fn what_the_device_fails_is_told_and_named_and_holds_nobody() {
    if is_elsewhere(concat!(module_path!(), "::what_the_device_fails_is_told_and_named_and_holds_nobody")) {
        return;
    }
    let fake = take();
    job(2, 1, |r| {
        listen();
        let window = r.window(64, 0);
        let handle = window.handle as u64;
        let device = Device::new(r, Ask { contexts: 2, depth: 8, ..Ask::default() });
        let put = entry(OP_PUT | OP_SIGNAL_INC | OP_COUNTER, 8).first(0, handle).second(8, handle);
        let put = put.with_signal(1, 0, true).with_counter(2);
        let peer = 1 - r.rank;
        r.job.barrier.wait();
        if r.rank == 0 {
            // The next work request comes back as one that the peer's device refused.
            fake.set("error_status", 10);
            fake.set("error_in", 1);
            device.post(0, peer, put);
            wait(|| "an error".into(), || device.has_error());
            // Device code is not held: credits go on, more of them than the queue has places.
            (0..30).for_each(|_| device.post(0, peer, put));
            device.flush(0, peer);
            // The other context goes on.
            device.post(1, peer, put);
            device.flush(1, peer);
        }
        r.job.barrier.wait();
        if r.rank == 1 {
            device.wait_signal(1, 1, 1);
        }
        r.job.barrier.wait();
        device.destroy();
    });
    let words = ["rank 1", "a put of 8 bytes"];
    assert!(said(&words) > 0, "{words:?}: {:#?}", lines());
}
