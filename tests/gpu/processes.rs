//! GPU windows between processes of one host, through the RMA v16 table, on the fake CUDA driver.

use crate::harness::*;
use crate::support::common::*;
use crate::support::processes::{processes, Place};
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a window's memory is.
#[derive(Clone, Copy, Debug)]
enum Memory {
    /// Of cuMemCreate, side by side; the window starts somewhere in the first and ends somewhere in the last.
    Segments(usize),
    /// Of cuMemCreate, and not exportable.
    Private,
}

const SEGMENT: usize = 1 << 20;

impl Memory {
    fn window(self, fake: &Fake, r: &Rank, gpu: i32, words: usize) -> GpuWindow {
        let (segments, exportable) = match self {
            Self::Segments(n) => (n, true),
            Self::Private => (1, false),
        };
        let last = (4096 + words * 8).next_multiple_of(65_536).max(segments * SEGMENT) - (segments - 1) * SEGMENT;
        let sizes: Vec<_> = (1..segments).map(|_| SEGMENT).chain([last]).collect();
        let at = fake.segments(gpu, &sizes, exportable);
        fake.register_at(r, at + 4096, words, 0)
    }
}

fn pattern(rank: usize, i: usize) -> u64 {
    (rank as u64) << 32 | i as u64 | 1 << 63
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

const SIGNALS: u64 = MR_FLAG_FORCE_SO | MR_FLAG_SIGNALS_NEVER_RESET;

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
    let sig = fake.signals(&r, gpu, n, SIGNALS);
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

#[test]
fn more_segments_than_a_socket_takes_at_once() {
    processes("more_segments_than_a_socket_takes_at_once", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(0);
        let r = place.join(1);
        let at = fake.segments(0, &[65_536; 40], true);
        let window = fake.register_at(&r, at, 40 * 8192, 0);
        let words = 20 * 8192;
        (0..words).for_each(|i| window.set(i, pattern(r.rank, i)));
        place.barrier();
        let (copies, peer) = (fake.copies(), 1 - r.rank);
        if r.rank == 0 {
            let half = words as u64 * 8;
            r.wait(r.put(0, (window.as_window(), 0), words * 8, (window.as_window(), half), peer, None));
            assert_eq!(fake.copies(), copies);
        }
        place.barrier();
        assert!(r.rank == 0 || (0..words).all(|i| window.get(words + i) == pattern(0, i)));
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
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

/// A context goes while the data of its get is on its way to GPU memory, by way of the host: it goes nowhere from then
/// on.
#[test]
fn a_get_into_gpu_memory_ends_with_its_context() {
    const WORDS: usize = (8 << 20) / 8;
    processes("a_get_into_gpu_memory_ends_with_its_context", 2, &[], |place| {
        let fake = Fake::take();
        fake.set_transport("staged");
        let _context = fake.enter(0);
        let mut r = place.join(1);
        let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        let mut next = null_mut();
        // SAFETY: all pointers are to locals that live through the call.
        ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut next) });
        let [first, second] = [(), ()].map(|()| fake.window(&r, 0, WORDS, 0));
        let step = 4096 / 8;
        if r.rank == 1 {
            (0..WORDS).step_by(step).for_each(|i| first.set(i, 7));
        }
        place.barrier();
        if r.rank == 0 {
            r.get(0, (first.as_window(), 0), WORDS * 8, (first.as_window(), 0), 1);
            let end = Instant::now() + Duration::from_secs(60);
            while first.get(0) != 7 {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
                assert!(Instant::now() < end, "no data");
            }
            // SAFETY: plain call.
            ok(unsafe { T.destroy_context.unwrap()(r.ctx) });
            (0..WORDS).step_by(step).for_each(|i| first.set(i, 9));
            r.ctx = next;
            // Its data comes behind the first one's.
            r.wait(r.get(0, (first.as_window(), 0), WORDS * 8, (second.as_window(), 0), 1));
            assert!((0..WORDS).step_by(step).all(|i| second.get(i) == 7));
            assert!((0..WORDS).step_by(step).all(|i| first.get(i) == 9), "written after its context was gone");
        } else {
            // SAFETY: plain call.
            ok(unsafe { T.destroy_context.unwrap()(r.ctx) });
            r.ctx = next;
        }
        place.barrier();
        r.leave();
        fake.check();
    });
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
    let sig = fake.signals(&r, gpu, 2, SIGNALS);
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
    let sig = fake.signals(&r, gpu, 1, SIGNALS);
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

/// Many contexts, many unfinished operations, one signal; what comes from host memory goes between.
#[test]
fn fan_in_adds_up() {
    processes("fan_in_adds_up", 4, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let (contexts, n) = (8, 3000);
        let r = place.join(contexts);
        let src = Memory::Segments(1).window(&fake, &r, gpu, 8);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, 64);
        let sig = fake.signals(&r, gpu, 1, SIGNALS);
        let host = r.window(8, 0);
        src.set(0, r.rank as u64 + 1);
        if r.rank > 0 {
            let requests: Vec<_> = (0..n)
                .map(|i| {
                    let to = (dst.as_window(), r.rank as u64 * 8);
                    let from = if i % 5 == 4 { (&host, 8) } else { (src.as_window(), 0) };
                    let to = if i % 5 == 4 { (dst.as_window(), 256) } else { to };
                    r.put(i % contexts, from, 8, to, 0, Some((sig.as_window(), 0, 3)))
                })
                .collect();
            requests.into_iter().for_each(|q| r.wait(q));
        } else {
            let all = 3 * 3 * n as u64;
            sig.wait(&r, 0, all);
            assert_eq!(sig.get(0), all);
            assert!((1..4).all(|p| dst.get(p) == p as u64 + 1));
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

/// A strong signal follows everything before it, wherever that came from and went to, and is there when its request is
/// not yet done.
#[test]
fn strong_signals_follow_everything() {
    processes("strong_signals_follow_everything", 2, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(1);
        let src = Memory::Segments(2).window(&fake, &r, gpu, 1 << 17);
        let dst = Memory::Segments(2).window(&fake, &r, gpu, 1 << 17);
        let sig = fake.signals(&r, gpu, 2, SIGNALS);
        let mut host = r.window(16, 0);
        let host_dst = r.window(16, 0);
        let host_sig = r.window(2, 1);
        let peer = 1 - r.rank;
        for round in 1..=200u64 {
            let on_host = round % 3 == 0;
            let signal = |to: u64| match on_host {
                true => Some((&host_sig, to, 1)),
                false => Some((sig.as_window(), to, 1)),
            };
            let wait = |i: usize| match on_host {
                true => r.wait_signal(&host_sig, i, round / 3),
                false => sig.wait(&r, i, round - round / 3),
            };
            if r.rank == 0 {
                (0..8).for_each(|i| src.set(i, round));
                host.words.fill(round);
                let mut all = vec![r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 0), peer, None)];
                if round % 16 == 0 {
                    src.set(130_000, round);
                    all.push(r.put(0, (src.as_window(), 64), 1_040_000, (dst.as_window(), 64), peer, None));
                }
                all.push(r.put(0, (&host, 0), 24, (dst.as_window(), 8 * 131_010), peer, None));
                all.push(r.put(0, (src.as_window(), 0), 24, (&host_dst, 0), peer, None));
                all.push(r.put(0, (&host, 0), 24, (&host_dst, 24), peer, None));
                match round % 2 {
                    0 => all.push(r.put(0, (&host, 0), 0, (&host, 0), peer, signal(0))),
                    _ => all.push(r.put(0, (src.as_window(), 0), 8, (dst.as_window(), 8 * 131_001), peer, signal(0))),
                }
                all.into_iter().for_each(|q| r.wait(q));
                wait(1);
            } else {
                wait(0);
                assert!((0..8).all(|i| dst.get(i) == round), "round {round}");
                assert!(round % 16 != 0 || dst.get(130_000) == round);
                assert!((0..3).all(|i| dst.get(131_010 + i) == round));
                assert_eq!(&host_dst.words[..6], &[round; 6]);
                assert!(round % 2 == 0 || dst.get(131_001) == round);
                r.wait(r.put(0, (&host, 0), 0, (&host, 0), peer, signal(8)));
            }
        }
        place.barrier();
        r.leave();
        fake.check();
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
    let sig = fake.signals(&r, gpu, n + 1, SIGNALS);
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
            let wanted = here * (n - 1 + size.div_ceil(256 << 10));
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

/// What several contexts put side by side becomes one copy and one store for each, however many puts arrive while the
/// GPU is at work.
#[test]
fn neighbours_of_eight_contexts_are_merged() {
    processes("neighbours_of_eight_contexts_are_merged", 2, &[], |place| {
        let fake = Fake::take();
        fake.set_issue("submissions=1,kernel=0");
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let (contexts, each, large) = (8usize, 20, 64 << 10);
        let r = place.join(contexts as i32);
        let src = Memory::Segments(1).window(&fake, &r, gpu, 16 << 10);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, 16 << 10);
        let sig = fake.signals(&r, gpu, contexts, SIGNALS);
        let (mut host, flag) = (r.window(1, 0), r.window(1, 0));
        let area = |c: usize| (8 << 10) + c * 512;
        (0..16 << 10).for_each(|i| src.set(i, pattern(r.rank, i)));
        if r.rank == 1 {
            fake.hold(large);
        }
        place.barrier();
        if r.rank == 0 {
            let mut requests = vec![r.put(0, (src.as_window(), 0), large, (dst.as_window(), 0), 1, None)];
            for i in 0..each {
                requests.extend((0..contexts).map(|c| {
                    let at = (area(c) + i) as u64 * 8;
                    let signal = Some((sig.as_window(), c as u64 * 8, 1));
                    r.put(c as i32, (src.as_window(), at), 8, (dst.as_window(), at), 1, signal)
                }));
            }
            // Read behind them, and applied at once.
            host.words[0] = 1;
            let ready = r.put(0, (&host, 0), 8, (&flag, 0), 1, None);
            requests.into_iter().for_each(|q| r.wait(q));
            r.wait(ready);
        } else {
            r.wait_signal(&flag, 0, 1);
            let (copies, stores) = (fake.copies(), fake.stores());
            assert!((0..contexts).all(|c| sig.get(c) == 0), "in front of the copy that is held");
            fake.hold(0);
            (0..contexts).for_each(|c| sig.wait(&r, c, each as u64));
            for (c, i) in (0..contexts).flat_map(|c| (0..each).map(move |i| (c, i))) {
                assert_eq!(dst.get(area(c) + i), pattern(0, area(c) + i), "context {c}, word {i}");
            }
            // Two submissions: the first with the copy that was held, and whatever was read together with it.
            let (copies, stores) = (fake.copies() - copies, fake.stores() - stores);
            assert!(copies <= 2 * contexts + 1, "{copies} copies");
            assert!(stores <= 2 * (contexts + 1), "{stores} stores");
        }
        place.barrier();
        r.leave();
        fake.check();
    });
}

/// A large copy of one context holds up neither another's put nor its local completion; what its own context sends
/// later stays behind it.
#[test]
fn a_large_put_holds_up_its_own_context_alone() {
    processes("a_large_put_holds_up_its_own_context_alone", 2, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let (r, large) = (place.join(2), 4 << 20);
        let words = large / 8 + 64;
        let src = Memory::Segments(1).window(&fake, &r, gpu, words);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, words);
        let sig = fake.signals(&r, gpu, 3, SIGNALS);
        (0..words).for_each(|i| src.set(i, pattern(r.rank, i)));
        if r.rank == 1 {
            fake.hold(large);
        }
        place.barrier();
        if r.rank == 0 {
            let put = |context, word: usize, bytes, signal| {
                let (at, signal) = (word as u64 * 8, Some((sig.as_window(), signal, 1)));
                r.put(context, (src.as_window(), at), bytes, (dst.as_window(), at), 1, signal)
            };
            let mut own = vec![put(0, 0, large, 0), put(0, words - 2, 8, 8)];
            r.wait(put(1, words - 1, 8, 16));
            let mut done = 0;
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(r.coll, own[1], &mut done) });
            assert_eq!(done, 0, "behind the large one");
            place.barrier();
            own.drain(..).for_each(|q| r.wait(q));
        } else {
            sig.wait(&r, 2, 1);
            assert_eq!(dst.get(words - 1), pattern(0, words - 1));
            assert_eq!((sig.get(0), sig.get(1)), (0, 0), "the large copy is held");
            // The helper thread acknowledges meanwhile.
            place.barrier();
            fake.hold(0);
            sig.wait(&r, 1, 1);
            assert_eq!((sig.get(0), dst.get(words - 2)), (1, pattern(0, words - 2)));
            assert!((0..large / 8).all(|i| dst.get(i) == pattern(0, i)));
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

/// Windows come and go while others carry traffic; a rank may deregister before its peer has stopped sending from its
/// own.
#[test]
fn windows_come_and_go_under_traffic() {
    processes("windows_come_and_go_under_traffic", 2, &[], |place| {
        let fake = Fake::take();
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let before = descriptors();
        let r = place.join(2);
        let dst = Memory::Segments(1).window(&fake, &r, gpu, 1024);
        let peer = 1 - r.rank;
        let mut at = Vec::new();
        for round in 0..20u64 {
            // The same memory again and again, as an application does.
            if at.len() < 2 {
                at.push(fake.segments(gpu, &[65_536, 65_536], true));
            }
            let src = fake.register_at(&r, at[round as usize % 2], 16_384, 0);
            place.barrier();
            if round % 2 == r.rank as u64 {
                // The peer still sends from its window of this number.
                r.dereg(src.as_window());
                place.barrier();
            } else {
                place.barrier();
                let copies = fake.copies();
                src.set(8190, round);
                let requests: Vec<_> = (0..64)
                    .map(|i| r.put(i % 2, (src.as_window(), 65_472), 4096, (dst.as_window(), 0), peer, None))
                    .collect();
                requests.into_iter().for_each(|q| r.wait(q));
                assert_eq!(fake.copies(), copies, "through host memory");
                r.dereg(src.as_window());
            }
            place.barrier();
            assert!(round % 2 != r.rank as u64 || dst.get(6) == round);
            place.barrier();
            // One window that is in use, and one that a peer has deregistered since this rank did.
            assert!(fake.foreign() <= 1 + 2 * 2, "{} pieces are mapped in round {round}", fake.foreign());
        }
        // Whoever deregisters first unmaps the other's window once that one has followed, without another registration.
        let last = fake.register_at(&r, at[0], 16_384, 0);
        if r.rank == 0 {
            r.dereg(last.as_window());
        }
        place.barrier();
        if r.rank == 1 {
            r.dereg(last.as_window());
        }
        let end = Instant::now() + Duration::from_secs(60);
        while fake.foreign() > 1 {
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            assert!(Instant::now() < end, "{} pieces stay mapped", fake.foreign());
        }
        place.barrier();
        r.dereg(dst.as_window());
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        let left = descriptors() - before;
        // What the fake driver has for this process's own memory.
        assert!(left <= 5, "{left} descriptors more than before");
        fake.check();
    });
}

/// A request fails with this rank's peer; nothing hangs.
fn fails(r: &Rank, request: *mut c_void) {
    let end = Instant::now() + Duration::from_secs(60);
    let mut done = 0;
    // SAFETY: plain call.
    while unsafe { T.test.unwrap()(r.coll, request, &mut done) } == NcclResult::SUCCESS {
        assert!(done == 0, "the operation came out well");
        assert!(Instant::now() < end, "neither done nor failed");
    }
}

#[test]
fn a_put_to_a_window_that_is_gone_fails_at_its_sender() {
    processes("a_put_to_a_window_that_is_gone_fails_at_its_sender", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(0);
        let r = place.join(1);
        let src = Memory::Segments(1).window(&fake, &r, 0, 64);
        let dst = Memory::Segments(1).window(&fake, &r, 0, 64);
        if r.rank == 1 {
            r.dereg(dst.as_window());
        }
        place.barrier();
        if r.rank == 0 {
            fails(&r, r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 0), 1, None));
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}

#[test]
fn a_fault_on_the_receivers_gpu_fails_the_senders_operation() {
    processes("a_fault_on_the_receivers_gpu_fails_the_senders_operation", 2, &[], |place| {
        let fake = Fake::take();
        let _context = fake.enter(0);
        let r = place.join(1);
        let src = Memory::Segments(1).window(&fake, &r, 0, 64);
        if r.rank == 1 {
            fake.inject("gpu", 700);
        }
        place.barrier();
        if r.rank == 0 {
            fails(&r, r.put(0, (src.as_window(), 0), 64, (src.as_window(), 64), 1, None));
        }
        place.barrier();
        r.leave();
        fake.check();
    });
}

/// Rank 1 is killed while copies are on their way: into it (`from` 0), out of it (1), or fetched from it (2).
fn killed(place: &Place, from: usize) {
    let fake = Fake::take();
    fake.settings(false, 2000);
    let _context = fake.enter(0);
    let r = place.join(1);
    let src = Memory::Segments(1).window(&fake, &r, 0, 1 << 17);
    let dst = Memory::Segments(1).window(&fake, &r, 0, 1 << 17);
    place.barrier();
    let put = |peer| r.put(0, (src.as_window(), 0), 1 << 20, (dst.as_window(), 0), peer, None);
    if r.rank == 1 {
        if from == 1 {
            for _ in 0..64 {
                put(0);
            }
        }
        // Time for the first of them.
        std::thread::sleep(Duration::from_millis(20));
        place.word(0).store(1, Ordering::SeqCst);
        // SAFETY: ends this process.
        unsafe { libc::raise(libc::SIGKILL) };
    }
    if from == 0 {
        let requests: Vec<_> = (0..1000).map(|_| put(1)).collect();
        fails(&r, requests[999]);
    } else {
        if from == 2 {
            // More than the engine starts before the death is noticed.
            for _ in 0..20_000 {
                let (from, to, mut request) = (src.as_window().handle, dst.as_window().handle, null_mut());
                // SAFETY: registered windows. Fails once the death is noticed.
                let _ = unsafe { T.iget.unwrap()(r.ctx, 0, 0, from, 1 << 20, 0, to, 1, 0, &mut request) };
            }
        }
        let end = Instant::now() + Duration::from_secs(60);
        let mut error = false;
        while !error {
            assert!(Instant::now() < end, "the death was not noticed");
            let mut request = null_mut();
            // SAFETY: plain calls.
            unsafe {
                let handle = src.as_window().handle;
                let _ = T.iput.unwrap()(r.ctx, 0, 0, handle, 8, 0, handle, 1, 0, &mut request);
                ok(T.query_last_error.unwrap()(r.ctx, &mut error));
            }
        }
    }
    assert_eq!(place.word(0).load(Ordering::SeqCst), 1);
    // Its memory is given up with the next window that goes.
    r.dereg(dst.as_window());
    assert_eq!(fake.foreign(), 0);
    r.leave();
    fake.check();
}

#[test]
fn a_receiver_is_killed() {
    processes("a_receiver_is_killed", 2, &[1], |p| killed(p, 0));
}

#[test]
fn a_sender_is_killed() {
    processes("a_sender_is_killed", 2, &[1], |p| killed(p, 1));
}

#[test]
fn the_owner_of_what_is_fetched_is_killed() {
    processes("the_owner_of_what_is_fetched_is_killed", 2, &[1], |p| killed(p, 2));
}

/// A copy between processes is under way when a later one of its context is refused: what it copies from stays
/// mapped, and the sender is not told, until it has ended.
#[test]
fn what_is_copied_from_stays_mapped_when_another_copy_fails() {
    const BYTES: usize = 64 << 10;
    processes("what_is_copied_from_stays_mapped_when_another_copy_fails", 2, &[], |place| {
        let fake = Fake::take();
        fake.set_issue("submissions=4,gather=1,merge=0,kernel=0");
        let gpu = place.rank as i32;
        let _context = fake.enter(gpu);
        let r = place.join(1);
        let [src, dst, gone] = [(); 3].map(|()| Memory::Segments(1).window(&fake, &r, gpu, BYTES / 8));
        if r.rank == 1 {
            r.dereg(src.as_window());
            r.dereg(gone.as_window());
            fake.hold(BYTES);
        }
        place.barrier();
        let mapped = fake.foreign();
        // Longer than from one look at what may be unmapped to the next.
        let meanwhile = || {
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                // SAFETY: plain call.
                ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            }
        };
        if r.rank == 0 {
            r.put(0, (src.as_window(), 0), BYTES, (dst.as_window(), 0), 1, None);
            let refused = r.put(0, (src.as_window(), 0), 64, (gone.as_window(), 0), 1, None);
            meanwhile();
            let mut done = 0;
            // SAFETY: plain call.
            ok(unsafe { T.test.unwrap()(r.coll, refused, &mut done) });
            assert_eq!(done, 0, "told while its memory is read");
            place.barrier();
            fails(&r, refused);
            r.dereg(src.as_window());
        } else {
            meanwhile();
            assert_eq!(fake.foreign(), mapped);
            place.barrier();
            fake.hold(0);
        }
        place.barrier();
        if r.rank == 1 {
            // Whoever deregisters unmaps what is left.
            r.dereg(dst.as_window());
            assert!(fake.foreign() < mapped);
        }
        place.barrier();
        r.leave();
        assert_eq!(fake.foreign(), 0);
        fake.check();
    });
}
