//! Windows in host memory that the driver made for GPUs, between processes of one host: what a rank gets from there
//! into its GPU its own engine copies, and the peer does nothing for it. DeepEP's engrams lie in such memory.

use crate::harness::memory::{pattern, HostWindow, Memory};
use crate::harness::*;
use crate::support::processes::{processes, Place};
use std::time::Duration;

const WORDS: usize = (3 << 20) / 8;
/// Whom the memory is made for: the owner's GPU, as in DeepEP.
const OWN: u64 = 1;

/// Each gets blocks of many sizes from the other one, which stands while it does. `how`: words of `OXYGIN_GPU_ISSUE`.
fn gets(place: &Place, how: &str) {
    let (fake, peer) = (Fake::take(), 1 - place.rank);
    fake.set_issue(how);
    let _context = fake.enter(0);
    let r = place.join(2);
    let back = Memory::Segments(1).window(&fake, &r, 0, WORDS);
    let store = HostWindow::new(&fake, &r, WORDS, OWN);
    (0..WORDS).for_each(|i| store.set(i, pattern(r.rank, i)));
    assert!(fake.foreign() >= 2, "not mapped");
    let copied = |fake: &Fake| fake.copies() as u64 + fake.commands();
    place.barrier();
    for (round, size) in [8, 24, 256, 4096, 100_000, 3 << 20].into_iter().enumerate() {
        let at = if size < 100_000 { 8 * 1001 } else { 0 };
        for getter in 0..2 {
            let before = copied(&fake);
            if r.rank == getter {
                r.wait(r.get(round as i32 % 2, (store.as_window(), at), size, (back.as_window(), at), peer));
                assert!(copied(&fake) > before, "{size} bytes, {how}: no copy by the getter's GPU");
                let from = at as usize / 8;
                let wrong = (from..from + size / 8).find(|&i| back.get(i) != pattern(peer, i));
                assert_eq!(wrong, None, "{size} bytes, {how}");
                place.barrier();
            } else {
                // Whoever is asked for bytes has to answer.
                place.barrier();
                assert_eq!(copied(&fake), before, "{size} bytes, {how}: the peer's GPU copied");
            }
        }
    }
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0, "memory of other processes is still mapped");
    fake.check();
}

#[test]
fn gets_from_host_memory_by_copy_engine() {
    processes("gets_from_host_memory_by_copy_engine", 2, &[], |place| gets(place, "kernel=0"));
}

#[test]
fn gets_from_host_memory_by_copy_kernel() {
    processes("gets_from_host_memory_by_copy_kernel", 2, &[], |place| gets(place, "kernel=4096"));
}

/// Puts out of host memory, and into it, and gets between windows there, are as they were.
fn others(place: &Place) {
    let (fake, peer) = (Fake::take(), 1 - place.rank);
    let _context = fake.enter(0);
    let r = place.join(1);
    let gpu = fake.window(&r, 0, 64, 0);
    let [store, back] = [(), ()].map(|()| HostWindow::new(&fake, &r, 64, OWN));
    (0..32).for_each(|i| store.set(i, pattern(r.rank, i)));
    (0..32).for_each(|i| gpu.set(i, pattern(r.rank, 100 + i)));
    place.barrier();
    r.wait(r.get(0, (store.as_window(), 0), 256, (back.as_window(), 0), peer));
    assert!((0..32).all(|i| back.word(i).load(std::sync::atomic::Ordering::Acquire) == pattern(peer, i)));
    r.wait(r.put(0, (store.as_window(), 0), 256, (gpu.as_window(), 256), peer, None));
    r.wait(r.put(0, (gpu.as_window(), 0), 256, (store.as_window(), 256), peer, None));
    let has_come =
        |i: usize| gpu.get(32 + i) == pattern(peer, i) && store.word(32 + i).load(ACQUIRE) == pattern(peer, 100 + i);
    wait_until("all is there", || {
        test_progress(&r);
        (0..32).all(has_come)
    });
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0);
    fake.check();
}

const ACQUIRE: std::sync::atomic::Ordering = std::sync::atomic::Ordering::Acquire;

fn test_progress(r: &crate::support::common::Rank) {
    // SAFETY: plain call.
    crate::support::common::ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
}

#[test]
fn other_ways_from_and_to_host_memory_of_the_driver() {
    processes("other_ways_from_and_to_host_memory_of_the_driver", 2, &[], others);
}

/// A window goes and its number comes again, while others are used; what is mapped goes with it.
fn comes_and_goes(place: &Place) {
    let (fake, peer) = (Fake::take(), 1 - place.rank);
    let _context = fake.enter(0);
    let r = place.join(1);
    let back = Memory::Segments(1).window(&fake, &r, 0, 64);
    let least = fake.foreign();
    for round in 0..150 {
        let store = HostWindow::new(&fake, &r, 64, OWN);
        (0..64).for_each(|i| store.set(i, pattern(r.rank, round + i)));
        place.barrier();
        r.wait(r.get(0, (store.as_window(), 0), 512, (back.as_window(), 0), peer));
        assert!((0..64).all(|i| back.get(i) == pattern(peer, round + i)), "round {round}");
        place.barrier();
        r.dereg(store.as_window());
        place.barrier();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(fake.foreign() <= least + 2, "{} pieces of memory are mapped", fake.foreign());
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0);
    fake.check();
}

#[test]
fn windows_in_host_memory_come_and_go() {
    processes("windows_in_host_memory_come_and_go", 2, &[], comes_and_goes);
}
