//! GPU windows between processes of one host: every byte arrives, by shared memory where that can be and through host
//! memory where not, also where the queues of both stand. Through the RMA v16 table, on the fake CUDA driver.

use crate::harness::memory::{pattern, Memory};
use crate::harness::*;
use crate::support::processes::{processes, Place};
use nccl_plugin_api::MR_FLAG_FORCE_SO;
use std::time::{Duration, Instant};

/// Every rank puts blocks of many sizes to every other one, with a signal, and reads them back. `shared`: a sender's
/// GPU copies nothing, a getter's one piece a get.
fn all_to_all(place: &Place, memory: Memory, shared: bool, set_up: impl Fn(&Fake)) {
    let sizes = [1usize, 8, 24, 4096, 100_000, 3 << 20];
    let block = (3 << 20) / 8;
    let (fake, n) = (Fake::take(), place.nranks);
    // Copies are counted, and a copy kernel's are none.
    fake.set_issue("kernel=0");
    let gpu = place.rank as i32;
    let context = fake.enter(gpu);
    let r = place.join(3);
    set_up(&fake);
    let src = memory.window(&fake, &r, gpu, block);
    let dst = memory.window(&fake, &r, gpu, block * n);
    let back = memory.window(&fake, &r, gpu, block);
    let sig = fake.signals(&r, gpu, n, NEVER_RESET);
    for i in 0..block {
        src.set(i, pattern(r.rank, i));
    }
    drop(context);
    // NCCL's progress thread has device 0 current, and kernels run.
    let _other = fake.enter(0);
    fake.kernel(1);
    for (round, &size) in sizes.iter().enumerate() {
        // One after the other, so that the copies can be counted.
        for sender in 0..n {
            let copies = fake.copies();
            place.barrier();
            if sender == r.rank {
                let requests: Vec<_> = (0..n)
                    .filter(|&p| p != r.rank)
                    .map(|p| {
                        let at = (r.rank * block * 8) as u64;
                        let signal = Some((sig.as_window(), r.rank as u64 * 8, 1));
                        r.put((p % 3) as i32, (src.as_window(), 0), size, (dst.as_window(), at), p, signal)
                    })
                    .collect();
                requests.into_iter().for_each(|q| r.wait(q));
                assert_eq!(fake.copies() == copies, shared, "{memory:?}, {size} bytes: copies at the sender");
                src.set(0, 0);
                place.barrier();
                src.set(0, pattern(r.rank, 0));
            } else {
                sig.wait(&r, sender, round as u64 + 1);
                for i in 0..size / 8 {
                    assert_eq!(
                        dst.get(sender * block + i),
                        pattern(sender, i),
                        "from {sender}, {size} bytes, word {i}"
                    );
                }
                if shared {
                    assert_eq!(fake.copies() - copies, 1, "{memory:?}, {size} bytes: copies at the receiver");
                }
                place.barrier();
            }
        }
        place.barrier();
        for p in (0..n).filter(|&p| p != r.rank) {
            r.wait(r.get(0, (src.as_window(), 0), size, (back.as_window(), 0), p));
            for i in 0..size / 8 {
                assert_eq!(back.get(i), pattern(p, i), "got from {p}, {size} bytes, word {i}");
            }
        }
        place.barrier();
    }
    fake.kernel(-1);
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0, "memory of other processes is still mapped");
    fake.check();
}

#[test]
fn one_copy_out_of_one_segment() {
    processes("one_copy_out_of_one_segment", 2, &[], |p| all_to_all(p, Memory::Segments(1), true, |_| {}));
}

#[test]
fn one_copy_out_of_many_segments() {
    processes("one_copy_out_of_many_segments", 2, &[], |p| all_to_all(p, Memory::Segments(3), true, |_| {}));
}

#[test]
fn four_processes() {
    processes("four_processes", 4, &[], |p| all_to_all(p, Memory::Segments(2), true, |_| {}));
}

/// Half of a window of so many segments, registered with these flags, is put into the other half of the peer's: the
/// peer's GPU copies, the sender's does nothing.
fn is_fetched(place: &Place, segments: usize, flags: u64) {
    let fake = Fake::take();
    // Copies are counted, and a copy kernel's are none.
    fake.set_issue("kernel=0");
    let _context = fake.enter(0);
    let r = place.join(1);
    let at = fake.segments(0, &vec![65_536; segments], true);
    let window = fake.register_at(&r, at, segments * 8192, flags);
    let words = segments * 4096;
    (0..words).for_each(|i| window.set(i, pattern(r.rank, i)));
    // Before the other one begins.
    let (copies, peer) = (fake.copies(), 1 - r.rank);
    place.barrier();
    if r.rank == 0 {
        let half = words as u64 * 8;
        r.wait(r.put(0, (window.as_window(), 0), words * 8, (window.as_window(), half), peer, None));
        assert_eq!(fake.copies(), copies, "copies at the sender");
    }
    place.barrier();
    assert!(r.rank == 0 || (0..words).all(|i| window.get(words + i) == pattern(0, i)));
    assert!(r.rank == 0 || fake.copies() > copies, "no copy at the receiver");
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0);
    fake.check();
}

#[test]
fn more_segments_than_a_socket_takes_at_once() {
    processes("more_segments_than_a_socket_takes_at_once", 2, &[], |place| is_fetched(place, 40, 0));
}

/// A put of 4 KiB between two processes that call their GPUs by one number: the driver would have the processors copy
/// it, for which a private context waits, so it goes through pinned memory. `buses`: where the GPUs are.
fn waits_for_no_processors(place: &Place, buses: [i32; 2]) {
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    fake.first_bus(buses[place.rank]);
    let _context = fake.enter(0);
    let r = place.join(1);
    let window = Memory::Segments(1).window(&fake, &r, 0, 1024);
    (0..512).for_each(|i| window.set(i, pattern(r.rank, i)));
    fake.block(0, true);
    let (slices, peer) = (fake.slices(), 1 - r.rank);
    place.barrier();
    if r.rank == 0 {
        r.wait(r.put(0, (window.as_window(), 0), 4096, (window.as_window(), 4096), peer, None));
    }
    place.barrier();
    if r.rank == 1 {
        assert!((0..512).all(|i| window.get(512 + i) == pattern(0, i)));
        assert_eq!(fake.slices(), slices, "time slices that were waited for");
    }
    place.barrier();
    fake.block(0, false);
    r.leave();
    fake.check();
}

#[test]
fn copies_of_two_processes_on_one_gpu() {
    processes("copies_of_two_processes_on_one_gpu", 2, &[], |place| waits_for_no_processors(place, [6, 6]));
}

/// As with `CUDA_VISIBLE_DEVICES`.
#[test]
fn copies_of_two_processes_that_see_a_gpu_each() {
    processes("copies_of_two_processes_that_see_a_gpu_each", 2, &[], |place| waits_for_no_processors(place, [6, 7]));
}

/// DeepEP's windows are such ones (`NCCL_WIN_STRICT_ORDERING`).
#[test]
fn windows_of_strict_order_are_shared() {
    processes("windows_of_strict_order_are_shared", 2, &[], |place| is_fetched(place, 2, MR_FLAG_FORCE_SO));
}

#[test]
fn memory_that_cannot_be_exported_goes_through_host_memory() {
    processes("memory_that_cannot_be_exported_goes_through_host_memory", 2, &[], |p| {
        all_to_all(p, Memory::Private, false, |_| {});
    });
}

#[test]
fn staged_goes_through_host_memory() {
    processes("staged_goes_through_host_memory", 2, &[], staged);
}

fn staged(place: &Place) {
    let fake = Fake::take();
    fake.set_transport("staged");
    let _context = fake.enter(0);
    let r = place.join(1);
    let window = Memory::Segments(1).window(&fake, &r, 0, 1024);
    assert_eq!(fake.foreign(), 0);
    (0..512).for_each(|i| window.set(i, pattern(r.rank, i)));
    r.wait(r.put(0, (window.as_window(), 0), 4096, (window.as_window(), 4096), 1 - r.rank, None));
    place.barrier();
    let end = Instant::now() + Duration::from_secs(60);
    while window.get(1023) != pattern(1 - r.rank, 511) {
        assert!(Instant::now() < end);
    }
    place.barrier();
    r.leave();
    fake.check();
}

/// One call of the driver fails on one rank: that direction goes through host memory, and nothing else changes.
fn refused(place: &Place, memory: Memory, rank: usize, call: &str) {
    let fake = Fake::take();
    let gpu = place.rank as i32;
    let _context = fake.enter(gpu);
    let r = place.join(1);
    if r.rank == rank {
        fake.inject(call, 999);
    }
    let window = memory.window(&fake, &r, gpu, 1024);
    let sig = fake.signals(&r, gpu, 2, NEVER_RESET);
    (0..512).for_each(|i| window.set(i, pattern(r.rank, i)));
    let peer = 1 - r.rank;
    let signal = Some((sig.as_window(), r.rank as u64 * 8, 1));
    r.wait(r.put(0, (window.as_window(), 0), 4096, (window.as_window(), 4096), peer, signal));
    sig.wait(&r, peer, 1);
    let wrong = (0..512).find(|&i| window.get(512 + i) != pattern(peer, i));
    assert_eq!(wrong.map(|i| (i, window.get(512 + i), pattern(peer, i))), None, "rank {}, {memory:?}, {call}", r.rank);
    place.barrier();
    r.wait(r.get(0, (window.as_window(), 4096), 4096, (window.as_window(), 0), peer));
    assert!((0..512).all(|i| window.get(i) == pattern(r.rank, i)));
    let is_exporter = ["cuMemGet", "cuMemExport"].iter().any(|c| call.starts_with(c));
    assert_eq!(fake.foreign() == 0, (r.rank == rank) != is_exporter, "{call}");
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0);
    fake.check();
}

#[test]
fn what_the_driver_refuses_goes_through_host_memory() {
    let segments = Memory::Segments(2);
    let calls = [
        (segments, "cuMemGetAllocationPropertiesFromHandle"),
        (segments, "cuMemExportToShareableHandle"),
        (segments, "cuMemImportFromShareableHandle"),
        (segments, "cuMemAddressReserve"),
        (segments, "cuMemMap"),
        (segments, "cuMemSetAccess"),
    ];
    processes("what_the_driver_refuses_goes_through_host_memory", 2, &[], |p| {
        for (memory, call) in calls {
            refused(p, memory, 1, call);
            p.barrier();
        }
    });
}

/// Both processes' own queues stand, and everything between them flows.
fn blocked(place: &Place, gpus: i32, memory: Memory) {
    let fake = Fake::take();
    let gpu = place.rank as i32 % gpus;
    let _context = fake.enter(gpu);
    let r = place.join(2);
    let (sizes, words) = ([0, 1, 4, 8, 8193, 1 << 20, 5 << 20], (5 << 20) / 8 + 1);
    let src = memory.window(&fake, &r, gpu, words);
    let dst = memory.window(&fake, &r, gpu, words);
    let sig = fake.signals(&r, gpu, 1, NEVER_RESET);
    let (mut host, peer) = (r.window(1, 0), 1 - r.rank);
    (0..words).for_each(|i| src.set(i, pattern(r.rank, i)));
    place.barrier();
    fake.block(gpu, true);
    let mut sum = 0;
    let check = |n: usize, what: &str| {
        let wrong = (0..n / 8).find(|&i| dst.get(i) != pattern(peer, i));
        assert_eq!(wrong, None, "{memory:?}, {gpus} GPUs, {n} bytes {what}");
        (0..n.div_ceil(8)).for_each(|i| dst.set(i, 0));
    };
    for n in sizes {
        // A value and data, then a sum that passes 2^32 now and then.
        host.words[0] = pattern(r.rank, n);
        let value = r.put(0, (&host, 0), 8, (dst.as_window(), words as u64 * 8 - 8), peer, None);
        let signal = Some((sig.as_window(), 0, 0x7000_0000));
        let put = r.put(0, (src.as_window(), 0), n, (dst.as_window(), 0), peer, signal);
        sum += 0x7000_0000;
        sig.wait(&r, 0, sum);
        assert_eq!(sig.get(0), sum);
        assert_eq!(dst.get(words - 1), pattern(peer, n));
        check(n, "put");
        [value, put].into_iter().for_each(|q| r.wait(q));
        place.barrier();
        r.wait(r.get(1, (src.as_window(), 0), n, (dst.as_window(), 0), peer));
        check(n, "got");
        place.barrier();
    }
    r.leave();
    fake.block(gpu, false);
    let end = Instant::now() + Duration::from_secs(60);
    while fake.launched() > 0 {
        assert!(Instant::now() < end, "launches that were left have not ended");
    }
    assert_eq!(fake.foreign(), 0);
    fake.check();
}

#[test]
fn all_flows_where_the_queues_of_both_stand() {
    processes("all_flows_where_the_queues_of_both_stand", 2, &[], |p| {
        for (gpus, memory) in [(1, Memory::Segments(1)), (2, Memory::Segments(2)), (2, Memory::Private)] {
            blocked(p, gpus, memory);
            p.barrier();
        }
    });
}

/// One of several ranks of a process: every rank puts to every one, itself too, with a signal, and reads back; pairs in
/// one process go by the receiver's engine, others by shared windows, either in one copy an operation.
fn pairs(fake: &Fake, place: &Place, memory: Memory) {
    let sizes = [8usize, 24, 4096, 100_000, 5 << 20];
    let (block, n, here) = ((6 << 20) / 8, place.nranks, 2);
    let gpu = place.rank as i32;
    let _context = fake.enter(gpu);
    let r = place.join(3);
    let src = memory.window(fake, &r, gpu, block);
    let dst = memory.window(fake, &r, gpu, block * n);
    let sig = fake.signals(&r, gpu, n + 1, NEVER_RESET);
    let peers = || (0..n).map(|i| (r.rank + i) % n);
    (0..block).for_each(|i| src.set(i, pattern(r.rank, i)));
    for (round, &size) in (1..).zip(&sizes) {
        let check = |what: &str| {
            for p in 0..n {
                let wrong = (0..size / 8).find(|i| dst.get(p * block + i) != pattern(p, *i));
                assert_eq!(wrong, None, "rank {}, {what} of {size} bytes, {p}: the first wrong word", r.rank);
            }
        };
        // Both counts while all ranks of this process are between the same two barriers.
        let counted = |body: &dyn Fn()| {
            place.barrier();
            let copies = fake.copies();
            place.barrier();
            body();
            place.barrier();
            // A rank's to itself stays on its GPU, where it goes in pieces.
            let wanted = here * (n - 1 + size.div_ceil(1 << 20));
            assert_eq!(fake.copies() - copies, wanted, "{memory:?}, {size} bytes: copies in a process");
            place.barrier();
        };
        counted(&|| {
            let put = |p: usize| {
                let (at, signal) = ((r.rank * block * 8) as u64, (sig.as_window(), r.rank as u64 * 8, 1));
                r.put((p % 3) as i32, (src.as_window(), 0), size, (dst.as_window(), at), p, Some(signal))
            };
            let requests: Vec<_> = peers().map(put).collect();
            requests.into_iter().for_each(|q| r.wait(q));
            peers().for_each(|p| sig.wait(&r, p, round));
            check("put");
        });
        (0..n).for_each(|p| dst.set(p * block, 0));
        counted(&|| {
            let get = |p: usize| {
                let at = (p * block * 8) as u64;
                r.get((p % 3) as i32, (src.as_window(), 0), size, (dst.as_window(), at), p)
            };
            let requests: Vec<_> = peers().map(get).collect();
            requests.into_iter().for_each(|q| r.wait(q));
            check("get");
        });
    }
    // Everybody adds to one signal of everybody.
    let each = 300;
    let add = |i: usize| {
        let (p, at) = (i % n, ((r.rank * block + i) * 8) as u64);
        let signal = (sig.as_window(), n as u64 * 8, 2);
        r.put((i % 3) as i32, (src.as_window(), i as u64 * 8), 8, (dst.as_window(), at), p, Some(signal))
    };
    let requests: Vec<_> = (0..each * n).map(add).collect();
    sig.wait(&r, n, 2 * (each * n) as u64);
    requests.into_iter().for_each(|q| r.wait(q));
    for (p, i) in (0..n).flat_map(|p| (0..each).map(move |i| (p, i * n + place.rank))) {
        assert_eq!(dst.get(p * block + i), pattern(p, i), "rank {}, from {p}, word {i}", r.rank);
    }
    place.barrier();
    assert_eq!(sig.get(n), 2 * (each * n) as u64);
    r.leave();
}

#[test]
fn two_ranks_in_each_of_two_processes() {
    processes("two_ranks_in_each_of_two_processes", 2, &[], |process| {
        let fake = Fake::take();
        fake.set_issue("kernel=0");
        for memory in [Memory::Segments(2), Memory::Segments(1)] {
            process.threads(2, |place| pairs(&fake, place, memory));
            assert_eq!(fake.foreign(), 0, "memory of other processes is still mapped");
        }
        fake.check();
    });
}

/// Where windows over the same memory begin and end, of so many words of two allocations: whole, twice and in part, as
/// programs register it.
const SHARED_WORDS: usize = 32_768;
const PARTS: [(usize, usize); 6] = [
    (0, SHARED_WORDS),
    (0, SHARED_WORDS),
    (0, SHARED_WORDS / 2),
    (SHARED_WORDS / 2, SHARED_WORDS),
    (512, SHARED_WORDS - 512),
    (1024, 2048),
];

/// Windows over the same memory, of which one after the other goes: those that are left carry all.
fn over_the_same_memory(place: &Place, fake: &Fake) {
    let (gpu, r) = (place.rank as i32, place.join(1));
    let [from, to] = [(), ()].map(|()| fake.segments(gpu, &[SHARED_WORDS * 4, SHARED_WORDS * 4], true));
    let sig = fake.signals(&r, gpu, 1, NEVER_RESET);
    let over = |at: u64| {
        let window = |(begin, end): (usize, usize)| fake.register_at(&r, at + 8 * begin as u64, end - begin, 0);
        PARTS.map(|part| Some(window(part)))
    };
    let (mut sources, mut targets, mut sent) = (over(from), over(to), 0);
    for gone in [0, 5, 3, 1, 4] {
        for (s, source) in sources.iter().enumerate() {
            for (t, target) in targets.iter().enumerate() {
                let (Some(source), Some(target)) = (source, target) else { continue };
                let len = (PARTS[s].1 - PARTS[s].0).min(PARTS[t].1 - PARTS[t].0);
                sent += 1;
                let value = |rank: usize, i: usize| pattern(rank, (sent as usize) << 16 | i);
                let looked_at = [0, len / 2, len - 1];
                looked_at.iter().for_each(|&i| source.set(i, value(r.rank, i)));
                place.barrier();
                let (from, to) = ((source.as_window(), 0), (target.as_window(), 0));
                r.wait(r.put(0, from, 8 * len, to, 1 - r.rank, Some((sig.as_window(), 0, 1))));
                sig.wait(&r, 0, sent);
                for i in looked_at {
                    assert_eq!(target.get(i), value(1 - r.rank, i), "word {i} of window {t} from {s}, {gone} is next");
                }
                place.barrier();
            }
        }
        for all in [&mut sources, &mut targets] {
            all[gone].take().into_iter().for_each(|window| r.dereg(window.as_window()));
        }
    }
    place.barrier();
    r.leave();
    assert_eq!(fake.foreign(), 0, "pieces of the peer's memory are left mapped");
}

#[test]
fn windows_over_the_same_memory() {
    processes("windows_over_the_same_memory", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(place.rank as i32);
        for way in ["auto", "tcp"] {
            fake.set_transport(way);
            over_the_same_memory(place, &fake);
            place.barrier();
        }
        fake.check();
    });
}
